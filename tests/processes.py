"""Runs a function of a test module in several gloo processes and brings back what each returns; runs scripts.

The processes are forked from a server that has the imports behind it: a start costs a tenth of a second, not the five
that importing torch and Accelerate takes, and none inherits what a test has changed in this one.
"""

import faulthandler
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.base.provenance import ROOT
from common.distributed import leave_process_group

# FSDP2 over gloo ended in SIGSEGV or SIGABRT, inside torch, twice in several hundred runs of the tests (2.14 and 2.15)
once_more_after_a_crash = pytest.mark.flaky(reruns=1, only_rerun="ProcessExitedException.*signal SIG(SEGV|ABRT)")

# the server is one for all that fork from it, and takes its imports when it starts
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


def start_server_as_fork() -> None:
    """Starts the server as a copy of this process, before a test changes it: it need not import all once more."""

    def forked(path: str, arguments: list[str], kept: list[int]) -> int:
        if number := os.fork():
            return number
        for start, stop in itertools.pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(start + 1, stop)  # pipes to the process that hands out the tests
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)

    with mock.patch("multiprocessing.util.spawnv_passfds", forked):
        multiprocessing.forkserver.ensure_running()


def in_processes(count: int, function: Callable[..., Any], *arguments: Any, method: str = "forkserver") -> list[Any]:
    """What `function(*arguments)` returns in each of `count` processes of one group, in rank order.

    Args:
        count: processes.
        function: at the top level of a module, so that it can be found by name.
        arguments: picklable.
        method: "fork" copies this process, where it has the imports and nothing that a test has changed.
    Raises:
        ProcessRaisedException: the function raised an error.
        ProcessExitedException: a signal ended a process; a note says where that process was.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_work, (count, folder, function, arguments), nprocs=count, start_method=method)
        except mp.ProcessExitedException as error:
            written = (Path(folder) / f"{error.error_index}.stderr").read_text(errors="replace")
            error.add_note("".join(written.rpartition("Current thread")[1:])[:4000])
            raise
        finally:
            sys.stderr.writelines(_written(folder))
        return [torch.load(Path(folder) / f"{number}.pt", weights_only=False) for number in range(count)]


def _written(folder: str) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(Path(folder).glob("*.stderr"))]


def run_script(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """`python <command>` in a copy of the repository's code, without the seconds that the imports of others take."""
    with tempfile.TemporaryDirectory() as written:
        process = FORKS.Process(target=_as_script, args=(folder, command, written))
        process.start()
        process.join(300)
        texts = ((Path(written) / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(command, process.exitcode, *texts)


def _as_script(folder: Path, command: tuple[str, ...], written: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(written) / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    ours = {path.name for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]  # those of the copy are imported
    others = [path for path in sys.path if path and Path(path) not in (ROOT, ROOT / "tests")]
    sys.path[:] = [str((folder / command[0]).parent), *others]
    sys.argv = list(command)
    torch.set_num_threads(1)
    runpy.run_path(command[0], run_name="__main__")


def take_terminal_signals() -> dict[int, Any]:
    """Gives this process the handlers that a terminal's program starts with; returns those before.

    Under nohup and in the background of a script SIGHUP and SIGINT are ignored, and every child inherits that.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _work(number: int, count: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    os.dup2(os.open(Path(folder) / f"{number}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()  # an abort says where
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=count)
    torch.save(function(*arguments), Path(folder) / f"{number}.pt")
    leave_process_group()


def free_port() -> str:
    """A port for MASTER_PORT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def as_launched() -> None:
    """Tells Accelerate of the process group that there is, as a launcher would; call in `in_processes`."""
    number, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
