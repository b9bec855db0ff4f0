"""Evaluates a checkpoint of EuCLIP: zero-shot classification and retrieval by its own geometry, as JSON.

python euclip/evaluate.py --checkpoint outputs/runs/euclip/<run>/seed0
python euclip/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from common.data.pairs import EvaluationSets
from common.evaluation.embed import Encoder
from common.reproduce.command import Command
from common.reproduce.rows import RowRun
from common.run import evaluation as trained
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import TrainedModels, evaluate_main, this_device
from common.run.launch import run_or_explain
from euclip.config import Config
from euclip.model import build_model
from euclip.suite import evaluate_suite, open_suite

PAPER = "euclip"
MODELS = TrainedModels(PAPER, Config, build_model, evaluate_suite)
load_encoder = partial(trained.load_encoder, MODELS)  # (checkpoint, device, overrides) -> (config, encoder)
reevaluate = partial(trained.reevaluate, MODELS)  # (checkpoint, config, files, accelerator)


def check_tests(config: Config, sets: EvaluationSets) -> None:
    """Opens everything that a row is evaluated on, so that what is missing is known before training.

    It is here and not in train.py because a run is known by the code that trains it, which this file is no part of.

    Args:
        config: of the row.
        sets: that every paper evaluates on, already open.
    Raises:
        ValueError: as `open_suite`.
    """
    open_suite(config.data, sets)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)


# What the parts of a reproduction share: the configs of Table 1, and the model of a finished run.


B16 = {"EuCLIP": "b16_euclip.yaml", "CLIP": "b16_clip.yaml", "MERU": "b16_meru.yaml"}  # Table 1, ViT-B/16


def load_run(run: RowRun, command: Command) -> tuple[Any, Encoder]:
    """Config and model of a run, with the command's data: a run found from earlier may have had other test sets."""
    data = [text for text in command.overrides if text.startswith("data.")]
    return load_encoder(last_checkpoint(run.files.checkpoints), this_device(), data)
