"""What a forked process finds done: imports, and the compiled kernels of the scenes (see processes.py)."""

import importlib

for name in (
    "oblique_topology.train",
    "euclip.train",
    "contrastive_basics.train",
    "torch._dynamo",  # the first step of any optimiser imports it, for over a second
    "torch.distributed.checkpoint.state_dict",  # and the first checkpoint this
    "matplotlib.figure",
    "pytest",
    "scipy.stats",
    "sklearn.metrics",
):
    importlib.import_module(name)

importlib.import_module("common.data.scenes").SceneDataset(split="train", size=1, image_size=16)[0]
importlib.import_module("common.run.curves").plot_run = lambda *arguments: None  # as in tests/conftest.py
importlib.import_module("common.base.dependencies").loaded_files()  # which file is the repository's, for thousands

if __name__ == "__main__":  # once after installation: else all that rank first compile the loops at the same time
    import torch

    from common.evaluation.positives import Positives
    from common.evaluation.retrieval import precisions_at_r, retrieval_ranks

    owners = Positives.from_owners(torch.tensor([0, 0, 1, 1]), 2)
    for rank in (retrieval_ranks, precisions_at_r):
        rank(torch.rand(2, 4), owners)
    retrieval_ranks(torch.rand(2, 4, dtype=torch.float64), owners)
