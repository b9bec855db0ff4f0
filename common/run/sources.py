"""Names of initial weights and their fingerprints; initial.py reads the weights."""

import hashlib
import os
from pathlib import Path
from typing import Any

from common.base.settings import ModelConfig, StemConfig, TextStemConfig
from common.data.text_files import find_file
from common.encoders.stem_configuration import configuration_file
from common.encoders.weights.reading import described_by
from common.run.checkpoint import SUMS, Checkpoint, folder_of_weights, named_checkpoint, saved_step

SIDES = ("image", "text")


def run_checkpoint(name: str) -> Checkpoint | None:
    """The checkpoint of a name; None if it is no run, checkpoint or published model of this repository."""
    path = folder_of_weights(Path(name).expanduser())
    if not path.exists() and not path.is_absolute() and len(path.parts) == 2:  # a hub name
        try:
            file = find_file(name, ("open_clip_config.json", "config.json", "state.json"), "weights")
        except ValueError:  # said by whoever reads it
            return None
        return named_checkpoint(path) if file.name == "state.json" else None
    has_steps = any(saved_step(folder) is not None for folder in (path / "checkpoints", path))
    return named_checkpoint(path) if has_steps or (path / "state.json").is_file() else None


def named_sources(model: Any) -> dict[str, tuple[str, str]]:
    """Side -> the setting that names its weights, and their name, for sides that do not start at random."""
    if not isinstance(model, ModelConfig):  # only two towers take such weights
        return {}
    names = {}
    for side in SIDES:
        side_init = getattr(model, side).init
        if side_init or model.init:
            names[side] = (f"model.{side}.init", side_init) if side_init else ("model.init", model.init)
    return names


def stems_to_load(model: Any) -> dict[str, StemConfig | TextStemConfig]:
    """Side -> the stem with separate weights, if the tower's weights do not contain it."""
    if not isinstance(model, ModelConfig):
        return {}
    image, text, named = model.image.stem, model.text.stem, named_sources(model)
    return {side: stem for side, stem, name in (("image", image, image.name), ("text", text, text.weights))
            if name and side not in named}  # fmt: skip


def initial_fingerprints(config: Any) -> dict[str, str]:
    """Setting -> fingerprint of its weights; empty where a run starts at random."""
    model = getattr(config, "model", None)
    fingerprints = {key: _fingerprint(name, key) for key, name in dict(named_sources(model).values()).items()}
    for side, stem in stems_to_load(model).items():
        key = f"model.{side}.stem.weights"
        fingerprints[key] = weights_fingerprint(stem.weights, key) if stem.weights else stem.name
    for key in ("run", "discriminator_run") if hasattr(config, "start") else ():
        if named := getattr(config.start, key):
            fingerprints[f"start.{key}"] = _run_fingerprint(named_checkpoint(Path(named), f"start.{key}"))
    if hasattr(config, "start") and config.start.bert:
        fingerprints["start.bert"] = weights_fingerprint(config.start.bert, "start.bert")
    return fingerprints


def _fingerprint(name: str, key: str) -> str:
    checkpoint = run_checkpoint(name)
    return weights_fingerprint(name, key) if checkpoint is None else _run_fingerprint(checkpoint)


def _run_fingerprint(checkpoint: Checkpoint) -> str:
    return (checkpoint.path / SUMS).read_text().partition(" ")[0][:12]  # of model.safetensors, the first


def weights_fingerprint(name: str, key: str = "weights") -> str:
    """Of published weights: the hub's commit, or 12 hex digits of the SHA-256 of a folder or file.

    A configuration beside the file counts if it is read with it.
    """
    path = Path(name).expanduser()
    if not path.exists():  # the folder of a cached file is called by its commit
        return find_file(name, ("config.json", "open_clip_config.json"), key).parent.name
    digest = hashlib.sha256()
    beside = described_by(path), configuration_file(name)
    files = [path, *filter(None, beside)] if path.is_file() else sorted(filter(Path.is_file, path.iterdir()))
    for file in files:
        with file.open("rb") as opened:
            digest.update(os.fsencode(file.name) + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]
