"""Evaluates a checkpoint of pretrain.py: nearest neighbours, a linear probe and signs of collapse, as JSON.

python contrastive_basics/evaluate_pictures.py --checkpoint outputs/runs/contrastive_basics/<run>/seed0
python contrastive_basics/evaluate_pictures.py --checkpoint <folder> data.source=folders data.root=/data/flowers
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.run.launch import run_or_explain
from contrastive_basics.pretrain import MODELS

DECIDES = "evaluation"


def main() -> None:
    MODELS.main(__doc__)


if __name__ == "__main__":
    run_or_explain(main)
