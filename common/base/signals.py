"""Signals that ask a run to save and end: SIGTERM and SIGUSR1, as Slurm, Kubernetes and cloud machines send them.

A run that was asked so finishes its step, writes a checkpoint whatever run.save_every says, and ends with exit status
143 (128 + SIGTERM, whichever of the two it was). The same command with --resume goes on from that step.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from common.distributed import mean_over_processes, world_size

STOPPED_EXIT_STATUS = 143
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(Exception):
    """The run was asked to end and has saved; the message is meant for the user as it stands.

    Args:
        step, steps: updates made, and in all.
        folder: of the run.
    """

    def __init__(self, step: int, steps: int, folder: Path) -> None:
        super().__init__(
            f"asked to stop: saved at step {step} of {steps} in {folder}; the same command goes on from there "
            "(train.py: add --resume)"
        )


class StopRequest:
    """Whether the run has been asked to end."""

    def __init__(self) -> None:
        self.received = False

    def agreed(self, device: torch.device) -> bool:
        """True as soon as one process has been asked, on all of them at the same step. Call on every process.

        Args:
            device: on which processes exchange numbers.
        """
        if world_size() == 1:
            return self.received
        return mean_over_processes(torch.tensor(float(self.received), device=device)).item() > 0


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Within it the signals are noted and do not end the process at once; outside the main thread nothing changes."""
    request = StopRequest()

    def note(number, frame):
        request.received = True

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_signals_to_trainer(worker: int) -> None:
    """worker_init_fn of a loader: its processes go on when a signal reaches the whole process group.

    A worker that dies makes torch raise an error in the trainer, which then could not save. SIGTERM from the trainer
    itself is how workers are ended that do not end by themselves, and is obeyed.
    """
    if hasattr(signal, "sigwaitinfo"):  # elsewhere, as on macOS, workers die and the last checkpoint has to do
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=_obey, args=(multiprocessing.parent_process().pid,), daemon=True).start()


def _obey(trainer: int) -> None:
    """Ends this process when a signal comes from the trainer."""
    while signal.sigwaitinfo(_SIGNALS).si_pid != trainer:
        pass
    os._exit(0)
