"""Rows of a table trained side by side on a CPU: a second core speeds up one run little, two runs use both.

A process trains one run as `run_row` does, with one process per core; the caller then reads the runs from the cache.
Screen and signals belong to the first process: it shows the progress of all, and forwards signals. The number of
threads is in no run's key, though it changes the last bits of a run.
"""

import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import psutil
import torch
from tqdm import tqdm

from common.base.signals import Stopped, stop_signals
from common.data.loader import cores
from common.distributed import world_size
from common.reproduce.rows import Job, RowRun, is_missing, run_row
from common.run.guards import NonFiniteLoss

MEMORY = 2 * 2**30  # bytes free for each run; one at demo scale takes 1.4 GB
LOOK = 0.2  # seconds after which a signal that has come is passed on
PROCESSES = multiprocessing.get_context("spawn")  # one forked after torch has used its threads hangs
# a terminal and a scheduler send them to all processes; the first one says what they mean
OF_FIRST_PROCESS = {getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)}


def run_rows(jobs: Mapping[str, Sequence[Job]]) -> dict[str, list[RowRun]]:
    """Runs by name, cached or trained, missing ones side by side if that is faster.

    Raises:
        Stopped, NonFiniteLoss, ConfigError: as `run_row`.
    """
    diverged = train_side_by_side([job for row_jobs in jobs.values() for job in row_jobs])

    def run(job: Job) -> RowRun:
        if job in diverged:
            raise NonFiniteLoss(diverged[job])
        return run_row(job)

    return {name: [run(job) for job in row_jobs] for name, row_jobs in jobs.items()}


def train_side_by_side(jobs: Sequence[Job]) -> dict[Job, str]:
    """Trains and evaluates missing runs if at least two are missing and fit at once.

    A run that fails, or whose process is killed, is left to the `run_row` that follows.

    Returns:
        Messages of the runs that diverged.
    Raises:
        Stopped, KeyboardInterrupt: after a signal; the message names the last checkpoint of every run.
    """
    if len(jobs) < 2 or at_once() < 2:
        return {}
    # parents first: several runs may start from one
    first = list(dict.fromkeys(parent for job in jobs for parent in job.parents().values()))
    if first:
        run_rows({"": first})
    # rows of a table may share a config
    missing = [
        job for job in dict.fromkeys(jobs) if job.scale != "smoke" and is_missing(job)
    ]  # smoke runs take seconds
    count = min(len(missing), at_once())
    if count < 2:
        return {}
    print(f"{len(missing)} runs are missing, {count} are trained side by side", flush=True)
    return _Trainer(missing, count).train()


def at_once() -> int:
    """Runs trained at once: one on an accelerator and in a launch of processes, else as many as cores and memory allow.

    A run has one core, or OMP_NUM_THREADS.
    """
    if torch.accelerator.is_available() or world_size() > 1 or "WORLD_SIZE" in os.environ or os.name != "posix":
        return 1
    return min(cores() // _threads_asked(), psutil.virtual_memory().available // MEMORY)


def _threads_asked() -> int:
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1


class _Trainer:
    # the first process while others train: count of its jobs at once, in order
    def __init__(self, jobs: Sequence[Job], count: int) -> None:
        self.waiting, self.count = list(jobs)[::-1], count
        self.threads = max(_threads_asked(), cores() // count)
        self.running: list[_Worker] = []
        self.messages: dict[str, list[str]] = {"stopped": [], "interrupted": []}
        self.diverged: dict[Job, str] = {}
        # of each place the line of progress, where the screen can rewrite it
        self.bars = [
            tqdm(bar_format="{desc}", position=place, leave=False, dynamic_ncols=True, disable=None)
            for place in range(count)
        ]
        self.total = tqdm(total=len(jobs), desc="runs", unit="run", position=count, leave=False, disable=None)

    def train(self) -> dict[Job, str]:
        try:
            with stop_signals() as stop:
                passed_on = False
                while self.running or (self.waiting and not stop.received):
                    if stop.received and not passed_on:
                        for worker in self.running:
                            worker.process.terminate()
                        passed_on = True
                    while self.waiting and len(self.running) < self.count and not stop.received:
                        self._start(self.waiting.pop())
                    self._listen()
        except KeyboardInterrupt:  # a second Ctrl-C
            raise KeyboardInterrupt(self._saved()) from None
        finally:
            for worker in self.running:
                worker.process.kill()
                worker.process.join()
            for bar in (*self.bars, self.total):
                bar.close()
        if stop.received:
            raise (Stopped if self.messages["stopped"] else KeyboardInterrupt)(self._saved())
        return self.diverged

    def _saved(self) -> str:
        lines = [*self.messages["stopped"], *self.messages["interrupted"]]
        return "\n".join(filter(None, lines)) or "the same command resumes"

    def _start(self, job: Job) -> None:
        listener, speaker = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=_work, args=(speaker, self.threads, job))
        resource_tracker.ensure_running()  # its start would undo what is blocked
        # a process that imports cannot tell yet what a signal is to do
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*OF_FIRST_PROCESS, signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        speaker.close()
        place = min({*range(self.count)} - {worker.place for worker in self.running})
        self.running.append(_Worker(process, listener, job, place))

    def _listen(self) -> None:
        wait([worker.listener for worker in self.running] + [worker.process.sentinel for worker in self.running], LOOK)
        for worker in list(self.running):
            # before reading: a message that arrives later than this check is read in the next round
            ended = not worker.process.is_alive()
            with suppress(EOFError, OSError):
                while worker.listener.poll():
                    self._hear(worker, *worker.listener.recv())
            if ended:
                self.running.remove(worker)
                self.total.update()
                worker.listener.close()
                self.bars[worker.place].set_description_str("")

    def _hear(self, worker: "_Worker", what: str, text: str) -> None:
        label = worker.job.label
        if what == "wrote":
            *lines, worker.unfinished = f"{worker.unfinished}{text}".split("\n")
            self.bars[worker.place].set_description_str(worker.unfinished.rpartition("\r")[2])
        else:
            lines = [text]
        if what == "diverged":
            self.diverged[worker.job] = text
        elif what in self.messages:
            self.messages[what].append(text)
            return
        for line in lines:
            line = line.rpartition("\r")[2].strip()
            if line:
                tqdm.write(line if line.startswith(label) else f"{label}: {line}", file=sys.stderr)


@dataclass(eq=False)
class _Worker:
    process: Any
    listener: Connection
    job: Job
    place: int
    unfinished: str = ""


# ---------------------------------------------------------------- in the process that trains


def _work(speaker: Connection, threads: int, job: Job) -> None:
    written = _Written(speaker)
    sys.stdout = sys.stderr = written
    torch.set_num_threads(threads)
    ended = "done", ""
    try:
        # the first process decides what they mean, and forwards it
        for number in OF_FIRST_PROCESS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end_at_once)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        threading.Thread(target=_end_with_first_process, daemon=True).start()
        run_row(job)
    except Stopped as stopped:
        ended = "stopped", str(stopped)
    except KeyboardInterrupt as interrupted:
        ended = "interrupted", str(interrupted)
    except NonFiniteLoss as error:
        ended = "diverged", str(error)
    except Exception as error:  # comes again in the first process, where it is raised
        ended = "failed", f"{type(error).__name__}: {error}"
    _ignore()
    written.send(*ended)


def _ignore() -> None:
    # this process ends by itself; Python reports an error for a signal that is pending at SIG_IGN
    signal.signal(signal.SIGTERM, lambda *_: None)


def _end_at_once(number: int, frame: Any) -> NoReturn:
    # a signal outside of training
    _ignore()
    raise KeyboardInterrupt


def _end_with_first_process() -> None:
    # training saves and ends when the first process is gone
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


class _Written(io.TextIOBase):
    encoding = "utf-8"

    def __init__(self, speaker: Connection) -> None:
        self.speaker, self.lock = speaker, threading.Lock()

    def send(self, what: str, text: str) -> None:
        with self.lock, suppress(OSError):  # the first process may have died
            self.speaker.send((what, text))

    def write(self, text: str) -> int:
        self.send("wrote", text)
        return len(text)

    def fileno(self) -> int:
        # of the screen: tqdm asks for its width
        return 2
