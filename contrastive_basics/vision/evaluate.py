"""Evaluates runs of pretrain.py again; common/run/picture_evaluation.py has the metrics."""

from functools import partial

from common.run import picture_evaluation
from contrastive_basics.vision.config import VisionConfig
from contrastive_basics.vision.methods import build_method

DECIDES = "evaluation"

PAPER = "contrastive_basics"
reevaluate = partial(picture_evaluation.reevaluate, PAPER, VisionConfig, build_method)
