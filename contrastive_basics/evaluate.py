"""Evaluates a checkpoint of the chapter's vision-language models: zero-shot classification and retrieval, as JSON.

python contrastive_basics/evaluate.py --checkpoint outputs/runs/contrastive_basics/<run>/seed0
python contrastive_basics/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.run.evaluation import TrainedModels, evaluate_main, zero_shot_and_retrieval
from common.run.launch import run_or_explain
from contrastive_basics.config import Config
from contrastive_basics.model import build_model

DECIDES = "evaluation"

PAPER = "contrastive_basics"
MODELS = TrainedModels(PAPER, Config, build_model, zero_shot_and_retrieval)
load_encoder = MODELS.load_encoder  # (checkpoint, device, overrides) -> (config, encoder)
reevaluate = MODELS.reevaluate  # (checkpoint, config, files, accelerator)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
