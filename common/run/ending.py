"""A run without a next batch ends between two steps and saves what it has trained."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from common.base.signals import Stopped, what_is_saved
from common.data.loader import NoBatch
from common.distributed import gather_objects, mean_over_processes, world_size
from common.run.checkpoint import saved_step
from common.run.folder import RunFiles


def agreed(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches, until one process has none: then all end before the same step. Call on every process.

    Raises:
        NoBatch: with the same message on every process.
    """
    if world_size() == 1:
        yield from batches
        return
    batches = iter(batches)
    while True:
        batch, problem = None, None
        try:
            batch = next(batches)
        except StopIteration:
            return
        except NoBatch as error:
            problem = (str(error), error.is_stop)
        if mean_over_processes(torch.tensor(float(problem is not None), device=device)).item():
            problems = filter(None, gather_objects(problem))
            raise NoBatch(*min(problems, key=lambda reason: reason[1]))  # an error before a stop
        yield batch


def ending(error: NoBatch, done: int, steps: int, files: RunFiles, save: Callable[[int], None]) -> Stopped | NoBatch:
    """Saves a run that gets no further batch; returns the exception that ends it. Call on every process."""
    if done and gather_objects(saved_step(files.checkpoints))[0] != done:
        save(done)
    message = (
        f"{error}; {what_is_saved(done, steps, files.folder, files.command)}" if done or error.is_stop else str(error)
    )
    return Stopped(message) if error.is_stop else NoBatch(message)
