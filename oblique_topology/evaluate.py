"""Evaluates a checkpoint of the oblique-topology paper: zero-shot classification and retrieval, as JSON.

python oblique_topology/evaluate.py --checkpoint outputs/runs/oblique_topology/<run>/seed0/checkpoints/step-00000250
python oblique_topology/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.evaluation import trained
from common.evaluation.trained import TrainedModels, evaluate_main, zero_shot_and_retrieval
from common.run.session import run_or_explain
from oblique_topology.config import Config
from oblique_topology.model import build_model

PAPER = "oblique_topology"
MODELS = TrainedModels(PAPER, Config, build_model, zero_shot_and_retrieval)
load_encoder = partial(trained.load_encoder, MODELS)  # (checkpoint, device, overrides) -> (config, encoder)
reevaluate = partial(trained.reevaluate, MODELS)  # (checkpoint, config, files, accelerator)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
