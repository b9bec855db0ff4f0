"""Signals that stop a run: SIGTERM and SIGUSR1 (Slurm, Kubernetes), SIGINT (Ctrl-C), SIGHUP (the terminal closes).

The run finishes its step, writes a checkpoint whatever run.save_every is, and ends with exit status 143 (128 + SIGTERM,
whichever signal it was). A second Ctrl-C ends the run at once, with status 130.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from common.distributed import is_main_process

STOPPED_EXIT_STATUS = 143
_OF_TERMINAL = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)] + _OF_TERMINAL
_AGAIN = 0.5  # seconds after which a Ctrl-C is a second one; a launcher passes on what the terminal has sent already


class Stopped(Exception):
    """A run received a stop signal and has saved; the message is for the user."""


def what_is_saved(step: int, steps: int, folder: Path, command: str = "") -> str:
    """The end of a message about a run that ends after `step` of `steps` updates."""
    if not step:
        return f"nothing is saved in {folder}; the same command starts again"
    return f"saved at step {step} of {steps} in {folder}; {how_to_resume(command)}"


def how_to_resume(command: str) -> str:
    """The command that resumes a run; "" = the one that started it."""
    return f"to resume, run: {command}" if command else "the same command resumes from there"


class StopRequest:
    """Whether the run has received a stop signal."""

    def __init__(self) -> None:
        self.received = False
        self._interrupted = None  # when Ctrl-C came first, seconds of the clock

    def note(self, number: int, frame: Any) -> None:
        """The handler.

        Raises:
            KeyboardInterrupt: at a second Ctrl-C, which a launcher passes on as SIGTERM.
        """
        self.received = True
        if number == signal.SIGINT and self._interrupted is None:
            self._interrupted = time.monotonic()
            if is_main_process():
                _tell("\nreceived a stop signal: finishing and saving this step; press Ctrl-C again to end at once\n")
        elif number in (signal.SIGINT, signal.SIGTERM) and self._interrupted is not None:
            if time.monotonic() - self._interrupted > _AGAIN:
                raise KeyboardInterrupt
        elif number in _OF_TERMINAL:
            _tell("\n")


_open: list[StopRequest] = []  # those of `stop_signals`; signals come to the process, and not to one of its objects


def is_stop_requested() -> bool:
    """Whether this process has received a stop signal."""
    return any(request.received for request in _open)


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Within it signals are recorded and do not end the process; outside the main thread nothing changes."""
    request, before = StopRequest(), {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            # nohup and the background of a script ignore those of the terminal, and so it stays
            if number not in _OF_TERMINAL or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, request.note)
    _open.append(request)
    try:
        yield request
    finally:
        _open.remove(request)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _tell(text: str) -> None:
    # writes to the screen, also from within a handler; once the terminal is gone, nothing is printed any more
    try:
        os.write(2, text.encode())
    except OSError:
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def leave_signals_to_trainer(worker: int) -> None:
    """worker_init_fn of a loader: its processes continue when a signal reaches the whole process group.

    If a worker dies, torch raises an error in the trainer, which then cannot save. SIGTERM from the trainer itself ends
    a worker.
    """
    sys.excepthook = _print_unless_disconnected
    for number in _SIGNALS[1:]:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # elsewhere, as on macOS, SIGTERM ends them and the last checkpoint has to do
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_obey, args=(multiprocessing.parent_process().pid,), daemon=True).start()


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # The excepthook of a loader process: these errors come from a connection whose other side is gone.
    #
    # The trainer states why the loader stopped; errors of the process itself reach it through torch.
    if not issubclass(kind, OSError | EOFError | multiprocessing.AuthenticationError):
        sys.__excepthook__(kind, error, trace)


def _obey(trainer: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer:
        pass
    os._exit(0)
