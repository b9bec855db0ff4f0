"""Runs a function of a test module in several gloo processes and brings back what each returns.

The processes are forked from a server that has the imports behind it: a start costs a tenth of a second, not the five
that importing torch and Accelerate takes, and none inherits what a test has changed in this one.
"""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.distributed import leave_process_group

# the server is one for all that fork from it, and takes its imports when it starts
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of `count` processes of one group, in rank order.

    Args:
        count: processes.
        function: at the top level of a module, so that it can be found by name.
        arguments: picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_work, (count, folder, function, arguments), nprocs=count, start_method="forkserver")
        return [torch.load(Path(folder) / f"{number}.pt", weights_only=False) for number in range(count)]


def take_terminal_signals() -> dict[int, Any]:
    """Gives this process the handlers that a terminal's program starts with; returns those before.

    Under nohup and in the background of a script SIGHUP and SIGINT are ignored, and every child inherits that.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _work(number: int, count: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=count)
    torch.save(function(*arguments), Path(folder) / f"{number}.pt")
    leave_process_group()


def as_launched() -> None:
    """Tells Accelerate of the process group that there is, as a launcher would; call in `in_processes`."""
    number, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
