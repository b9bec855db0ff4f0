"""Evaluates a checkpoint of EuCLIP: zero-shot classification and retrieval by its own geometry, as JSON.

python euclip/evaluate.py --checkpoint outputs/runs/euclip/<run>/seed0
python euclip/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.data.pairs import EvaluationSets
from common.run.evaluation import TrainedModels, evaluate_main
from common.run.launch import run_or_explain
from euclip.config import Config
from euclip.model import build_model
from euclip.suite import evaluate_suite, open_suite

DECIDES = "evaluation"

PAPER = "euclip"
MODELS = TrainedModels(PAPER, Config, build_model, evaluate_suite)
load_encoder = MODELS.load_encoder  # (checkpoint, device, overrides) -> (config, encoder)
reevaluate = MODELS.reevaluate  # (checkpoint, config, files, accelerator)


def check_tests(config: Config, sets: EvaluationSets) -> None:
    """Opens all test sets, so that a missing one is an error before training (`open_suite`)."""
    open_suite(config.data, sets)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
