"""For tests/test_sharding.py: a train.py under FSDP2, as in scripts/accelerate/fsdp2.yaml, in one of two processes."""

import importlib
import os
import sys

import accelerate.state
import torch
import yaml
from conftest import ROOT
from processes import as_launched

from geomm.vision.swav import Swav

CONFIG = ROOT / "scripts" / "accelerate" / "fsdp2.yaml"


def on_cpus() -> None:
    """Accelerate shards on accelerators only; here the device is the CPU, and everything else its own way."""
    as_launched()
    del os.environ["ACCELERATE_USE_CPU"]
    settings = yaml.safe_load(CONFIG.read_text())["fsdp_config"]
    os.environ |= {name.upper(): str(value) for name, value in settings.items()} | {"ACCELERATE_USE_FSDP": "true"}
    state = accelerate.state.PartialState
    state.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    state._prepare_backend = lambda *arguments, **options: ("gloo", accelerate.state.DistributedType.MULTI_GPU)
    torch._C._get_accelerator = lambda *arguments: torch.device("cpu")


def train(*runs: tuple[str, ...]) -> None:
    """main() of a module with its arguments, for each run in turn."""
    on_cpus()
    Swav.synchronised = False  # torch synchronises batch normalisation on GPUs only
    for module, *arguments in runs:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        sys.argv = [module, *arguments]
        importlib.import_module(module).main()
