"""Checkpoints: a folder of safetensors and JSON, written whole or not at all, loaded without executing anything.

    step-00000250/
        model.safetensors       parameters and buffers of the unwrapped model, momentum encoder and queue included
        optimizer.safetensors   the optimiser's state, by parameter name
        state.json              step, config, preprocessing, tokenizer, geometry, counts of broken samples
        SHA256SUMS              of these files; `sha256sum -c SHA256SUMS` checks it too

With optim.ema model.safetensors holds the averaged weights, and online.safetensors those from which a run resumes.

The folder is written under a hidden name, flushed to the disk and renamed when complete; only then are older ones
removed. If its sums do not match, the checkpoint before it is used. The order of samples and the random numbers are not
saved: they are functions of the step (common/data/order.py, `launch.seed_step`).
"""

import hashlib
import json
import os
import re
import shutil
import textwrap
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import nn

from common.base.arguments import some
from common.base.files import as_any_new_file, printable, utf8
from common.data.text_files import find_file
from common.distributed import gather_objects, is_main_process

FORMAT = 2
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
ONLINE = "online.safetensors"  # of a run with optim.ema
PUBLISHED = ("model.safetensors", "state.json")  # of a model folder, which trains no further (scripts/publish.py)
SUMS = "SHA256SUMS"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message is for the user."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder. state: content of state.json."""

    path: Path
    state: dict[str, Any]

    def weights(self, is_online: bool = False) -> Path:
        """File of the weights; `is_online`: of those that a run resumes from."""
        return self.path / (ONLINE if is_online and (self.path / ONLINE).is_file() else "model.safetensors")

    def model_tensors(self, is_online: bool = False) -> dict[str, torch.Tensor]:
        return _load(self.weights(is_online))

    def load_model(self, model: nn.Module, without: tuple[str, ...] = (), is_online: bool = False) -> None:
        """Fills an unwrapped model; names and shapes must agree exactly.

        Args:
            without: beginnings of the names of tensors that are left out.
        Raises:
            CheckpointError: parameters that are missing, left over, of another shape or not finite.
        """
        tensors = self.model_tensors(is_online)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(without)}
        spoilt = _spoilt(tensors, dict(model.named_parameters()))
        if spoilt:  # made elsewhere: `save_checkpoint` writes no such thing
            raise CheckpointError(f"{self.weights(is_online)} holds weights that are not finite: {spoilt}")
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:  # lists all differences, which show what kind of model the folder holds
            differences = textwrap.shorten(str(error), 500, placeholder=" ...")
            raise CheckpointError(f"{self.path} is a checkpoint of another model: {differences}") from error

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        state: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in _load(self.path / "optimizer.safetensors").items():
            name, _, entry = key.rpartition("/")
            state.setdefault(name, {})[entry] = tensor
        if not state:  # of SGD without momentum; the settings of its groups are those of the config
            return
        parameters = {name.removeprefix("module."): one for name, one in model.named_parameters()}  # DDP's prefix
        if unknown := state.keys() - parameters.keys():
            raise CheckpointError(f"{self.path} has an optimiser's state of {min(unknown)}, which is not in the model")
        set_optimizer_state_dict(
            model,
            optimizer,
            {"state": state, "param_groups": self.state["optimizer_groups"]},
            options=StateDictOptions(full_state_dict=True, strict=False),
        )
        # what had no gradient yet has no state, as SwAV's prototypes in the first steps; torch has made one up
        for name in parameters.keys() - state.keys():
            optimizer.state.pop(parameters[name], None)


def _load(path: Path) -> dict[str, torch.Tensor]:
    # safetensors writes a file whose path is not UTF-8 but does not open it; such a file is read as bytes.
    if not path.exists():
        raise CheckpointError(f"{path} is gone, as if its run had gone on and removed it; read the run once more")
    return load_file(path) if str(path) == printable(str(path)) else load(path.read_bytes())


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int = 2,
    average: nn.Module | None = None,
) -> None:
    """Writes folder/step-XXXXXXXX atomically, then removes all but the newest `keep`. Call on every process.

    Args:
        model, optimizer: as trained, also in DDP or FSDP.
        average: the model with averaged weights, to be evaluated in its place; None = there is none.
    Raises:
        CheckpointError: on every process, if the disk cannot be written, a parameter is not finite or a buffer holds
            NaN; earlier checkpoints stay.
    """
    # a second of imports, which whoever only reads a checkpoint need not spend
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # all processes gather sharded tensors; only the main process continues below
    tensors = {"model.safetensors": get_model_state_dict(model, options=everything)}
    if average is not None:
        tensors = {
            "model.safetensors": get_model_state_dict(average, options=everything),
            ONLINE: tensors["model.safetensors"],
        }
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=everything)
    problem = None
    if is_main_process():
        spoilt = _spoilt(tensors.get(ONLINE, tensors["model.safetensors"]), optimizer_state["state"])
        if spoilt:
            problem = (
                f"not saved: after step {step} these are not finite: {spoilt}; earlier checkpoints in "
                f"{folder} stay. Try a lower optim.learning_rate."
            )
        else:
            problem = _write(folder, step, tensors, optimizer_state, state, keep)
    problem = gather_objects(problem)[0]  # every process waits here and learns whether the main one could write
    if problem is not None:
        raise CheckpointError(problem)


def _spoilt(tensors: Mapping[str, torch.Tensor], weights: Container[str]) -> str:
    # Names for a message; a buffer may hold infinity, for example for "no path", but no NaN.
    names = sorted(
        name
        for name, tensor in tensors.items()
        if tensor.isnan().any() or (name in weights and not tensor.isfinite().all())
    )
    return some(names)


def _write(
    folder: Path,
    step: int,
    tensors: dict[str, dict[str, torch.Tensor]],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    keep: int,
) -> str | None:
    # On the main process; tensors: by file. Returns what went wrong, as text.
    path = folder / f"step-{step:08d}"
    temporary = folder / f".writing-{path.name}"
    try:
        for leftover in folder.glob(".writing-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        # under a hidden name: a crash in the middle leaves no folder that looks like a checkpoint
        for name, weights in tensors.items():
            save_file(_without_shared_memory(weights), temporary / name)
        flat = {
            f"{name}/{entry}": torch.as_tensor(value)
            for name, entries in optimizer_state["state"].items()
            for entry, value in entries.items()
        }
        save_file(_without_shared_memory(flat), temporary / "optimizer.safetensors")
        content = {"format": FORMAT, "step": step, **state, "optimizer_groups": optimizer_state["param_groups"]}
        (temporary / "state.json").write_bytes(utf8(json.dumps(content, indent=1, ensure_ascii=False)))
        files = (*FILES, *(name for name in tensors if name not in FILES))
        (temporary / SUMS).write_bytes("".join(_sum_lines(temporary, files)).encode())
        # a rename may reach the disk before the bytes of the files, so these are flushed first
        for name in (*files, SUMS):
            as_any_new_file(temporary / name)
            _flush(temporary / name)
        shutil.rmtree(path, ignore_errors=True)  # of the same step, and damaged: a resume has passed over it
        temporary.rename(path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        before = [old.name for old in _step_folders(folder)]
        return f"cannot write {path}: {error}. What was saved before stays: {', '.join(before) or 'nothing'}"
    # older ones go last: until here they are all that a crash would leave
    for old in [old for old in _step_folders(folder) if _step_of(old) <= step][:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # what cannot be removed now is tried again at the next save
    return None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes its name at the end; an error removes it. CheckpointError: it exists, a full disk."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; expected --output with a new folder")
    hidden = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
        yield hidden
        hidden.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def write_published(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a model folder, which opens as a checkpoint but trains no further."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint.model_tensors(), folder / "model.safetensors")
    as_any_new_file(folder / "model.safetensors")
    content = {**checkpoint.state, "optimizer_groups": []}
    (folder / "state.json").write_bytes(utf8(json.dumps(content, indent=1, ensure_ascii=False)))
    (folder / SUMS).write_bytes("".join(_sum_lines(folder, PUBLISHED)).encode())


def open_checkpoint(path: Path) -> Checkpoint:
    """Checks every byte of a checkpoint folder, or of a published model, which has no optimiser.

    Raises:
        CheckpointError: not a checkpoint, a missing or damaged file, an unknown format.
    """
    listed = (path / SUMS).read_bytes() if (path / SUMS).is_file() else None
    files = PUBLISHED if listed is not None and b"optimizer.safetensors" not in listed else FILES
    if ONLINE.encode() in (listed or b""):
        files = (*files, ONLINE)
    missing = [name for name in (*files, SUMS) if not (path / name).is_file()]
    if missing:
        raise CheckpointError(f"{path} is no whole checkpoint: {', '.join(missing)} missing")
    # sums before content: JSON of a torn file may still parse
    sums, lines = (path / SUMS).read_bytes(), [line.encode() for line in _sum_lines(path, files)]
    if sums != b"".join(lines):
        differing = [name for name, line in zip(files, lines) if line not in sums] or [SUMS]
        raise CheckpointError(f"{path} is damaged: the sha256 of {', '.join(differing)} is not the one in {SUMS}")
    try:
        state = json.loads((path / "state.json").read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path / 'state.json'} is no JSON: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        has = f"format {state.get('format')!r}" if isinstance(state, dict) else "no object"
        raise CheckpointError(f"{path / 'state.json'} has {has}; expected an object of format {FORMAT}")
    return Checkpoint(path, state)


def named_checkpoint(path: Path, key: str = "checkpoint") -> Checkpoint:
    """The checkpoint of a path: its folder or its weights, a run (its last whole checkpoint) or a name on the hub.

    Raises:
        CheckpointError: no such folder, or one of several seeds; as `open_checkpoint` and `last_checkpoint`.
        ValueError: a hub name, user/model, that cannot be downloaded.
    """
    if not path.exists() and not path.is_absolute() and len(path.parts) == 2:
        for name in (*PUBLISHED, SUMS):
            file = find_file(str(path), (name,), key)
        path = file.parent
    path = folder_of_weights(path)
    # a run, its folder of checkpoints, or one checkpoint
    for folder in (path / "checkpoints", path):
        checkpoint = last_checkpoint(folder)
        if checkpoint is not None:
            return checkpoint
    # neither a run nor a checkpoint: the message names what lies there instead
    seeds = sorted(folder.parent.name for folder in path.glob("seed*/checkpoints"))
    if seeds or not path.is_dir():
        what = f"runs of {', '.join(seeds)}" if seeds else "a file" if path.exists() else "no such folder"
        expected = f"one of them, as in {path / seeds[0]}" if seeds else "the folder of a run or of a checkpoint"
        raise CheckpointError(f"{key} = {path}: {what}; expected {expected}")
    return open_checkpoint(path)


def folder_of_weights(path: Path) -> Path:
    """The folder of a checkpoint's model.safetensors, which says what the tensors are; other paths as they are."""
    return path.parent if path.name == PUBLISHED[0] and (path.parent / PUBLISHED[1]).is_file() else path


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, None if there is none; damaged ones are passed over with a warning.

    Raises:
        CheckpointError: no checkpoint can be used; a fresh run would write over them.
    """
    paths = _step_folders(folder)
    for path in reversed(paths):
        try:
            return open_checkpoint(path)
        except (CheckpointError, FileNotFoundError) as error:
            if not path.exists():  # the run trains: it has removed this one after it wrote a newer one
                return last_checkpoint(folder)
            last = error
            if is_main_process():
                warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {folder} can be used; the oldest: {last}. "
            "To start again, remove that folder or choose another"
        )
    return None


def saved_step(folder: Path) -> int | None:
    """Step of the newest checkpoint of a run, whole or not, by its name; None if there is none."""
    return max(map(_step_of, _step_folders(folder)), default=None)


def saved_weights(folder: Path) -> str | None:
    """SHA-256 of the newest checkpoint's weights by its sums, or "not recorded"; None without a checkpoint."""
    paths = _step_folders(folder)
    if not paths:
        return None
    sums = paths[-1] / SUMS
    match = re.search(r"(\w+)  model\.safetensors", sums.read_text("utf-8", "replace") if sums.is_file() else "")
    return "not recorded" if match is None else match[1]


def set_aside_later(folder: Path, step: int) -> None:
    """Renames damaged checkpoints of later steps to damaged-step-XXXXXXXX, so that they do not count for `keep`.

    On the main process of a run that resumes.
    """
    for path in _step_folders(folder):
        if _step_of(path) > step:
            aside = folder / f"damaged-{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _step_folders(folder: Path) -> list[Path]:
    # Oldest first; a copy under another name does not count.
    paths = folder.glob("step-*") if folder.is_dir() else []
    return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name) and path.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _without_shared_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Tied weights become copies: safetensors refuses tensors that share memory. Others do not, as a copy of all would
    # take as much memory of a GPU again.
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if storage in seen else tensor.contiguous()
        seen.add(storage)
    return separate


def _sum_lines(path: Path, files: tuple[str, ...] = FILES) -> list[str]:
    lines = []
    for name in files:
        with (path / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return lines


def _flush(path: Path) -> None:
    # Makes sure that a file or a folder's entries are on the disk.
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
