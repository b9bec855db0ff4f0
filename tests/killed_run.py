"""A run that was killed on its way: its folder as it was then, and what must be the same once it has gone on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.base.files import read_json
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles
from common.run.log import read_log


def killed_after(step: int, run: RunFiles, folder: Path) -> Path:
    """A copy of a finished run's folder as if it had been killed between this step and the next.

    Args:
        step: the last one whose checkpoint is there.
        run: finished, with a checkpoint of the step.
        folder: the copy, not there yet.
    """
    shutil.copytree(run.folder, folder)
    checkpoints = {int(path.name.removeprefix("step-")): path for path in (folder / "checkpoints").iterdir()}
    assert step in checkpoints
    for later in (path for number, path in checkpoints.items() if number > step):
        shutil.rmtree(later)
    for name in ("evaluation.json", "validation.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def resumed_after(step: int, train: Callable[..., RunFiles], folder: Path) -> RunFiles:
    """An unbroken run, once the same settings have given the same after a kill.

    Args:
        step: as in `killed_after`.
        train: the run of a folder; it resumes there with resume=True.
    """
    unbroken = train(folder / "unbroken")
    assert_same_to_the_last_bit(unbroken, train(killed_after(step, unbroken, folder / "resumed"), resume=True))
    return unbroken


def assert_same_to_the_last_bit(unbroken: RunFiles, resumed: RunFiles) -> None:
    """What the log says of steps, the tensors of the last checkpoint, and what was evaluated."""
    assert records(unbroken) == records(resumed)
    before, after = (
        {file.name: file.read_bytes() for file in last_checkpoint(run.checkpoints).path.glob("*.safetensors")}
        for run in (unbroken, resumed)
    )
    assert {"model.safetensors", "optimizer.safetensors"} <= before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert _evaluated(unbroken) == _evaluated(resumed)


def records(run: RunFiles, *events: str) -> list[dict[str, Any]]:
    """Of a log, without what depends on the clock; by default of steps and of what follows them."""
    clock, events = ("samples_per_second", "data_wait_share"), events or ("train", "evaluate", "graph", "scale_factor")
    lines = [record for record in read_log(run.log) if record["event"] in events]
    return [{key: value for key, value in record.items() if key not in clock} for record in lines]


def _evaluated(run: RunFiles) -> list[Any]:
    """Evaluations and validation of the last step; None where there is none."""
    files = (("evaluations", run.evaluation), ("validation", run.validation))
    return [(read_json(file) or {}).get(key) for key, file in files]
