"""Trains one row.

python my_geometry/train.py --config my_geometry/configs/ball.yaml
accelerate launch --config_file scripts/accelerate/multi_gpu.yaml my_geometry/train.py data.num_train=100000
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.data.pairs import Pairs
from common.info_nce import info_nce_chance
from common.run.folder import RunFiles
from common.run.launch import run_or_explain, train_main
from common.run.training import Setup, opened
from common.tiled import geometry_loss
from my_geometry.config import Config
from my_geometry.evaluate import MODELS, PAPER
from my_geometry.model import build_model

SETUP = Setup(
    PAPER,
    build_model=lambda config, training: build_model(config, training.tokenizer),
)


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; arguments as in `common/run/training.py: opened`."""
    with opened(SETUP, config, pairs, files, resume, accelerator, label) as run:
        geometry = run.bare_model.geometry
        for step in run.steps():
            image_embeddings, text_embeddings, logit_scale = step.embed(step.images, step.token_ids)
            loss = geometry_loss(image_embeddings, text_embeddings, geometry, logit_scale, **config.optim.tiles)
            step.backward(loss)
            step.diagnose(image_embeddings, text_embeddings, chance=info_nce_chance(len(image_embeddings)))
            step.update()
        run.evaluate(MODELS)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, "ball.yaml", train)


if __name__ == "__main__":
    run_or_explain(main)
