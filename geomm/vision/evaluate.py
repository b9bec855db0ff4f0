"""Evaluates runs of pretrain.py again; common/run/picture_evaluation.py has the metrics."""

from functools import partial

from common.run import picture_evaluation
from geomm.vision.config import VisionConfig
from geomm.vision.methods import build_method

DECIDES = "evaluation"

PAPER = "geomm"
reevaluate = partial(picture_evaluation.reevaluate, PAPER, VisionConfig, build_method)
