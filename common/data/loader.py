"""Batches from loader processes, awaited in short turns: a signal, a dead process or a full /dev/shm ends the wait.

torch waits forever for a process that cannot hand over its batch, and its handler of SIGCHLD raises in the middle of a
step when a process dies. Here an error shows between two steps, when the next batch is due.
"""

import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from common.base.signals import is_stop_requested, leave_signals_to_trainer

TIMEOUT = 600.0  # seconds that a batch may take, where no setting says otherwise
FEW = 2_000  # samples: decoded in seconds, which loader processes would not shorten much
MOST_PROCESSES = 8  # chosen without a setting
TURN = 1.0  # seconds of waiting between two looks at signals and processes
_SHARED_MEMORY = Path("/dev/shm")
_MORE_ROOM = "fewer loader processes (run.num_workers), or more shared memory (docker run --shm-size)"
_MEANINGS = {
    "SIGKILL": "SIGKILL, as the system sends it where memory runs out",
    "SIGBUS": "SIGBUS, as the system sends it where shared memory runs out",
}


class NoBatch(Exception):
    """No further batch comes; the message is for the user. is_stop: the run ends as after a signal, not in error."""

    def __init__(self, reason: str, is_stop: bool = False) -> None:
        super().__init__(reason)
        self.is_stop = is_stop


class _SharedMemoryFull(RuntimeError):
    # Raised in a loader process, and by torch again in the trainer, with the traceback before the message.

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


@dataclasses.dataclass(frozen=True)
class _SharedBatch:
    # Collates, and puts the batch into shared memory where an error reaches the trainer.
    #
    # torch does so in a thread of the loader process, which prints the error and drops the batch. room: bytes of shared
    # memory.

    collate: Callable[[Any], Any]
    num_workers: int
    prefetch: int
    room: float

    def __call__(self, samples: Any) -> Any:
        if get_worker_info() is None:
            return self.collate(samples)
        try:
            batch = self.collate(samples)
            tensors = list(tensors_of(batch))
            self.check(sum(tensor.nbytes for tensor in tensors))
            for tensor in tensors:
                tensor.share_memory_()
        except RuntimeError as error:
            if "shared memory(shm)" not in str(error):
                raise
            raise _SharedMemoryFull(f"has filled {_SHARED_MEMORY}; expected: {_MORE_ROOM}") from None
        return batch

    def check(self, batch_bytes: int) -> None:
        def size(num_workers: int) -> int:
            return (num_workers * self.prefetch + 2) * batch_bytes  # two are with the trainer: this step's, the next

        if size(self.num_workers) > self.room:
            most = max(number for number in range(self.num_workers) if not number or size(number) <= self.room)
            gigabytes = max(1, -(-size(self.num_workers) // 2**29))  # twice as much, in whole GiB
            raise _SharedMemoryFull(
                f"puts up to {self.num_workers * self.prefetch + 2} batches of {batch_bytes / 1e6:.3g} MB into "
                f"{_SHARED_MEMORY}, {size(self.num_workers) / 1e6:.3g} MB, where {self.room / 1e6:.3g} MB are free for "
                f"it; expected: run.num_workers={most}, or more shared memory (docker run --shm-size={gigabytes}g)"
            )


def tensors_of(item: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch: a tensor, or lists and tuples of them, named ones too."""
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from tensors_of(part)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """This trainer's share of `cores`, at least 1."""
    return max(1, cores() // _trainers())


def default_processes(num_samples: int) -> int:
    """Loader processes where run.num_workers is null; samples, order and augmentation do not depend on them.

    None for few samples or one core. One on a CPU, where training uses all cores; beside a GPU all cores but one, at
    most `MOST_PROCESSES`.
    """
    share = usable_cores()
    if num_samples < FEW or share == 1:
        return 0
    return min(share - 1, MOST_PROCESSES) if torch.cuda.is_available() else 1


def _trainers() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Loader:
    """Batches of a data set in order, from loader processes that leave signals to the trainer.

    Args:
        num_workers: 0 = no loader processes; None = `default_processes`.
        collate: samples -> batch, as `tensors_of` reads it.
        timeout: seconds that a batch of loader processes may take.
        stops_at_signal: a stop signal ends the wait for a batch, as in training; an evaluation waits for all of them.
    """

    def __init__(
        self,
        data_set: Dataset,
        name: str,
        num_workers: int | None,
        collate: Callable[[Any], Any] = default_collate,
        prefetch: int = 2,
        timeout: float = TIMEOUT,
        stops_at_signal: bool = False,
        **options: Any,
    ) -> None:
        if num_workers is None:
            num_workers = default_processes(len(data_set))
        self.label, self.timeout = f"the loader of {name} (run.num_workers={num_workers})", timeout
        self.stops_at_signal = stops_at_signal
        # each trainer on this machine has a loader
        room = shutil.disk_usage(_SHARED_MEMORY).free / _trainers() if _SHARED_MEMORY.is_dir() else float("inf")
        self.loader = DataLoader(
            data_set,
            num_workers=num_workers,
            collate_fn=_SharedBatch(collate, num_workers, prefetch, room),
            prefetch_factor=prefetch if num_workers else None,
            worker_init_fn=leave_signals_to_trainer,
            timeout=TURN if num_workers else 0,
            **options,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches.

        Raises:
            NoBatch: a stop signal before the next batch (`stops_at_signal`), a batch too late, a dead loader process,
                or full shared memory.
        """
        if not self.loader.num_workers:
            yield from self.loader
            return
        batches = self._started()
        while True:
            try:
                batch = _next(batches, self.label, self.timeout, self.stops_at_signal)
            except StopIteration:
                return
            except NoBatch:
                for worker in batches._workers:
                    worker.kill()  # one that stands still would hold up the trainer's end
                raise
            yield batch

    def _started(self) -> Iterator[Any]:
        # torch's iterator without its handler of SIGCHLD
        before = _handle(None)
        try:
            return iter(self.loader)
        except (OSError, RuntimeError) as error:  # no process, or no semaphore in /dev/shm
            raise NoBatch(f"{self.label} cannot start: {error}; expected: {_MORE_ROOM}") from error
        finally:
            _handle(before)


def _next(iterator: Any, label: str, timeout: float, stops_at_signal: bool) -> Any:
    start = time.monotonic()
    while True:
        try:
            with _death_ends_the_wait(iterator._workers):
                return next(iterator)
        except _SharedMemoryFull as error:
            raise NoBatch(f"{label} {error}") from error
        except (RuntimeError, EOFError, ConnectionError) as error:
            text = str(error)
            if "in DataLoader worker process" in text:  # the data set's own
                raise
            if not text.startswith("DataLoader timed out"):
                raise NoBatch(f"{label} has lost a process: {_ends(iterator._workers) or text}") from error
        if stops_at_signal and is_stop_requested():
            raise NoBatch(f"received a stop signal while {label} had no batch ready", is_stop=True)
        if time.monotonic() - start > timeout:
            raise NoBatch(
                f"{label} has given no batch for {timeout:g} seconds, run.data_timeout (does its disk or network stand "
                "still?)",
                is_stop=True,
            )


@contextmanager
def _death_ends_the_wait(workers: Sequence[BaseProcess]) -> Iterator[None]:
    # raises where a loader process has died or dies within it: half a message may be all that comes from it
    def check(*_: Any) -> None:
        if any(worker.exitcode not in (None, 0, -signal.SIGTERM) for worker in workers):  # those are the trainer's ends
            raise ConnectionAbortedError

    before = _handle(check)
    try:
        check()
        yield
    finally:
        _handle(before)


def _handle(handler: Any) -> Any:
    # sets the handler of SIGCHLD where this thread may; returns the one before
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return None
    return signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def _ends(workers: Sequence[BaseProcess]) -> str:
    # how the loader processes that are gone have ended
    ended = wait([worker.sentinel for worker in workers], TURN)  # connections close a little before
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(TURN)
    codes = {worker.exitcode for worker in workers if worker.exitcode}
    names = [signal.Signals(-code).name if code < 0 else f"exit status {code}" for code in sorted(codes)]
    return ", ".join(_MEANINGS.get(name, name) for name in names)
