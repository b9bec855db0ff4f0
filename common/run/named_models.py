"""From a name to a model: a run, a model folder, a file of weights, or a name on the hub."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.base.config import ConfigError
from common.base.places import papers
from common.encoders.weights import NOT_STATED, Heads
from common.evaluation.embed import Encoder
from common.run.checkpoint import Checkpoint
from common.run.evaluation import TrainedModels, this_device
from common.run.sources import run_checkpoint

DECIDES = "evaluation"

_WEIGHTS = "euclip.published"  # reads CLIP, EuCLIP and MERU of other projects


def evaluator_of(name: str) -> str:
    """Module whose main evaluates a model.

    Raises:
        ConfigError: a run of a folder that is not here.
    """
    checkpoint = run_checkpoint(name)
    if checkpoint is None:
        return _WEIGHTS
    script = {"task": "evaluate_tasks", "vision": "evaluate_pictures"}.get(checkpoint.state.get("kind"), "evaluate")
    return f"{_folder_of(checkpoint)}.{script}"


def models_of(checkpoint: Checkpoint) -> TrainedModels:
    """What the folder that wrote a checkpoint knows of its models; errors as `evaluator_of`."""
    return importlib.import_module(f"{_folder_of(checkpoint)}.evaluate").MODELS


def _folder_of(checkpoint: Checkpoint) -> str:
    if (folder := checkpoint.state["paper"]) not in papers():  # its code is imported
        raise ConfigError(f"{checkpoint.path} belongs to {folder!r}; expected one of: {', '.join(papers())}")
    return folder


def open_model(
    name: str,
    overrides: Sequence[str] = (),
    *,
    layout: str = "transformers",
    geometry: str = "sphere",
    activation: str | None = None,
    heads: Heads = NOT_STATED,
) -> tuple[Any, Encoder]:
    """The settings of a model, and its towers with preprocessing, tokenizer and geometry, on this device.

    Of weights of other projects the settings hold only how data are read (`data`, `run`); `model` and `method` are
    defaults that state nothing of the weights. Sizes are those of the encoder's towers.

    Args:
        name: a run, a model folder, a file of weights or a name on the hub.
        overrides: "data.key=value" and "run.key=value".
        layout, geometry, activation, heads: of weights of other projects, as `euclip.published.open_published` takes
            them; a run states its own.
    Raises:
        ConfigError: as `evaluator_of`, or an override of another section.
        CheckpointError, WeightsError, FileNotFoundError, ValueError: it cannot be read, or does not fit.
    """
    if (checkpoint := run_checkpoint(name)) is not None:
        return models_of(checkpoint).load_encoder(checkpoint, this_device(), overrides)
    is_path = not name or name.startswith((".", "~", "/")) or name.count("/") > 1
    if is_path and not (name and Path(name).expanduser().exists()):
        raise FileNotFoundError(f"model {name!r}: no such run, model folder or file of weights")
    weights = importlib.import_module(_WEIGHTS)
    config = weights.published_config(overrides, geometry)
    return config, weights.open_published(name, layout, geometry, activation, config, this_device(), heads)
