"""Runs a function of a test module in several gloo processes and brings back what each returns."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.distributed import leave_process_group


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of `count` processes of one group, in rank order.

    Args:
        count: processes.
        function: at the top level of a module, so that it can be found by name.
        arguments: picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_work, (count, folder, function, arguments), nprocs=count, start_method="spawn")
        return [torch.load(Path(folder) / f"{number}.pt", weights_only=False) for number in range(count)]


def _work(number: int, count: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=count)
    torch.save(function(*arguments), Path(folder) / f"{number}.pt")
    leave_process_group()
