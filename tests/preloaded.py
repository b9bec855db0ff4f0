"""What a forked process finds done: imports, and the compiled kernels of the scenes (see processes.py)."""

import importlib

for name in (
    "oblique_topology.train",
    "euclip.train",
    "contrastive_basics.train",
    "torch._dynamo",  # the first step of any optimiser imports it, for over a second
    "torch.distributed.checkpoint.state_dict",  # and the first checkpoint this
):
    importlib.import_module(name)

importlib.import_module("common.data.scenes").SceneDataset(split="train", size=1, image_size=16)[0]
importlib.import_module("common.base.dependencies").loaded_files()  # which file is the repository's, for thousands
