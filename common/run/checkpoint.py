"""Checkpoints: a folder of safetensors and JSON, written whole or not at all, loaded without executing anything.

    step-00000250/
        model.safetensors       parameters and buffers of the unwrapped model
        optimizer.safetensors   AdamW's state, by parameter name
        state.json              step, config, preprocessing, tokenizer, geometry, and the sha256 of the other files
The folder is written under another name and renamed when complete. A torn one fails its hashes and the one before it
is used. The order of samples needs no state beyond the step (common/run/order.py); nothing in training draws from a
global random generator after the model is built.
"""

import hashlib
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from common.distributed import is_main_process, wait_for_everyone

FORMAT = 1
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is meant for the user as it stands."""


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds. state: the JSON's content."""

    path: Path
    state: dict[str, Any]

    def model_tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    def load_model(self, model: nn.Module) -> None:
        """Fills an unwrapped model; names and shapes must agree exactly.

        Raises:
            CheckpointError: names the parameters that are missing, left over or of another shape.
        """
        tensors = self.model_tensors()
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        problems = [f"missing {name}" for name in expected.keys() - found.keys()]
        problems += [f"unknown {name}" for name in found.keys() - expected.keys()]
        problems += [
            f"{name} is {found[name]}, the model has {expected[name]}"
            for name in expected.keys() & found.keys()
            if expected[name] != found[name]
        ]
        if problems:
            shown = "; ".join(sorted(problems)[:4])
            raise CheckpointError(
                f"{self.path} is a checkpoint of another model: {len(problems)} parameters differ ({shown}"
                f"{'; ...' if len(problems) > 4 else ''})"
            )
        model.load_state_dict(tensors)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Restores the optimiser's state by parameter name."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in load_file(self.path / "optimizer.safetensors").items():
            name, _, entry = key.rpartition("/")
            state.setdefault(name, {})[entry] = tensor
        set_optimizer_state_dict(
            model,
            optimizer,
            {"state": state, "param_groups": self.state["optimizer_groups"]},
            options=StateDictOptions(full_state_dict=True),
        )


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int = 2
) -> None:
    """Writes folder/step-XXXXXXXX atomically and removes all but the newest `keep`. Call on every process.

    Args:
        folder: of this run's checkpoints.
        step: optimiser updates made.
        model, optimizer: as trained (DDP or FSDP wrapped or not); tensors are gathered before writing.
        state: JSON values that rebuild the model and its preprocessing.
        keep: how many checkpoints stay.
    """
    tensors = get_model_state_dict(model, options=_FULL)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=_FULL)
    if is_main_process():
        path = folder / f"step-{step:08d}"
        temporary = folder / f".writing-{path.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / "model.safetensors")
        flat = {
            f"{name}/{entry}": torch.as_tensor(value).contiguous()
            for name, entries in optimizer_state["state"].items()
            for entry, value in entries.items()
        }
        save_file(flat, temporary / "optimizer.safetensors")
        content = {
            "format": FORMAT,
            "step": step,
            **state,
            "optimizer_groups": optimizer_state["param_groups"],
            "sha256": {file.name: _sha256(file) for file in sorted(temporary.iterdir())},
        }
        (temporary / "state.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        # of later steps there can only be what a resume has passed over as damaged
        earlier = [old for old in _step_folders(folder) if old.name <= path.name]
        for old in [*earlier[:-keep], *(old for old in _step_folders(folder) if old.name > path.name)]:
            shutil.rmtree(old)
    wait_for_everyone()


def open_checkpoint(path: Path) -> Checkpoint:
    """Checks one checkpoint folder.

    Raises:
        CheckpointError: not a checkpoint, an unknown format, or a file whose hash is wrong.
    """
    state_path = path / "state.json"
    if not state_path.is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no state.json")
    try:
        state = json.loads(state_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{state_path} is damaged: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{state_path} has format {state.get('format')!r}; accepted: {FORMAT}")
    for name, expected in state["sha256"].items():
        file = path / name
        if not file.is_file() or _sha256(file) != expected:
            raise CheckpointError(f"{file} is missing or damaged: its sha256 is not the one in state.json")
    return Checkpoint(path, state)


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, passing over damaged ones with a warning; None if there is none at all.

    Raises:
        CheckpointError: if there are checkpoints and none can be used; starting anew would write over them.
    """
    paths = _step_folders(folder)
    for path in reversed(paths):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            last = error
            warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
    if paths:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {folder} can be used; the oldest: {last}")
    return None


def _step_folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
