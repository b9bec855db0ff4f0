"""A run that was killed on its way: its folder as it was then, and what must be the same once it has gone on."""

import shutil
from pathlib import Path

import torch

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
    (folder / "evaluation.json").unlink(missing_ok=True)
    return folder


def assert_same_to_the_last_bit(unbroken: RunFiles, resumed: RunFiles) -> None:
    """Losses of every step and all that the last checkpoint holds of the model."""
    curves = [
        [record["loss"] for record in read_log(run.log) if record["event"] == "train"] for run in (unbroken, resumed)
    ]
    assert curves[0] == curves[1]
    before, after = (last_checkpoint(run.checkpoints).model_tensors() for run in (unbroken, resumed))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
