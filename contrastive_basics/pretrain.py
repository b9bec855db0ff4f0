"""Trains one method of learning from images only: SimCLR, MoCo v1 to v3, SimSiam, or one of two controls.

    python contrastive_basics/pretrain.py                                     MoCo v2, scenes, a CPU is enough
    python contrastive_basics/pretrain.py --config contrastive_basics/configs/vision_simsiam.yaml \\
        --scale photos data.root=/data/cifar10                                train/CLASS/*.jpg and test/CLASS/*.jpg
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml contrastive_basics/pretrain.py \\
        --config contrastive_basics/configs/vision_simclr.yaml --scale paper data.root=/data/imagenet
                                                                              with the settings in the row's header
"""

import sys
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.run.folder import RunFiles
from common.run.launch import run_or_explain, train_main
from common.run.picture_evaluation import PictureModels
from common.run.pictures import SCALE_FILES, open_training_set
from common.run.pretraining import train_on_pictures
from contrastive_basics.vision.config import VisionConfig
from contrastive_basics.vision.methods import build_method

PAPER = "contrastive_basics"
DEFAULT_ROW = "vision_moco_v2.yaml"


def pretrain(
    config: VisionConfig, training_set: Any, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains a row and evaluates it, see `train_on_pictures`."""
    train_on_pictures(PAPER, build_method, config, training_set, files, resume, accelerator, label)


MODELS = PictureModels(PAPER, VisionConfig, build_method)
reevaluate = MODELS.reevaluate  # (checkpoint, config, files, accelerator)


def main() -> None:
    train_main(__doc__, Path(__file__), VisionConfig, DEFAULT_ROW, pretrain, open_training_set, SCALE_FILES)


if __name__ == "__main__":
    run_or_explain(main)
