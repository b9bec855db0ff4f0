"""Evaluates a checkpoint: zero-shot classification and retrieval by my geometry, as JSON.

python my_geometry/evaluate.py --checkpoint outputs/runs/my_geometry/<run>/seed0
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.run.evaluation import TrainedModels, evaluate_main, zero_shot_and_retrieval
from common.run.launch import run_or_explain
from my_geometry.config import Config
from my_geometry.model import build_model

DECIDES = "evaluation"

PAPER = "my_geometry"
MODELS = TrainedModels(PAPER, Config, build_model, zero_shot_and_retrieval)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
