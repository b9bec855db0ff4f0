"""A run that is stopped, or has no next batch, ends between two steps and saves what it has trained."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from common.base.signals import Stopped, StopRequest, what_is_saved
from common.data.broken import TooManyBroken
from common.data.loader import NoBatch
from common.distributed import any_process, gather_objects
from common.run.checkpoint import saved_step
from common.run.folder import RunFiles


def agreed(batches: Iterable[Any], stop: StopRequest, device: torch.device) -> Iterator[Any]:
    """The batches, until one process has none or a stop signal: then all end before the same step. On every process.

    Raises:
        NoBatch: with the same message on every process.
    """
    batches = iter(batches)
    while True:
        batch, problem = None, None
        try:
            if stop.received:
                raise NoBatch("received a stop signal", is_stop=True)
            batch = next(batches, None)
        except NoBatch as error:
            problem = (str(error), error.is_stop)
        except TooManyBroken as error:  # such as a disk that is away
            problem = (str(error), False)
        if any_process(problem is not None, device):
            problems = filter(None, gather_objects(problem))
            raise NoBatch(*min(problems, key=lambda reason: reason[1]))  # an error before a stop
        if batch is None:
            return
        yield batch


def ending(
    error: NoBatch | TooManyBroken, done: int, steps: int, files: RunFiles, save: Callable[[int], None]
) -> Stopped | NoBatch:
    """Saves a run that cannot go on; returns the exception that ends it. Call on every process."""
    if done and gather_objects(saved_step(files.checkpoints))[0] != done:
        save(done)
    is_stop = isinstance(error, NoBatch) and error.is_stop
    message = f"{error}; {what_is_saved(done, steps, files.folder, files.command)}" if done or is_stop else str(error)
    return Stopped(message) if is_stop else NoBatch(message)
