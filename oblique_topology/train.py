"""Trains one row of the oblique-topology paper's tables.

    python oblique_topology/train.py                                              Multi, scenes, a CPU is enough
    ACCELERATE_USE_CPU=true accelerate launch --config_file scripts/accelerate/cpu_two_processes.yaml \\
        oblique_topology/train.py                                                 two gloo processes, same loss
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml oblique_topology/train.py \\
        --config oblique_topology/configs/table2_multi.yaml --scale paper data.root=/data/pairs
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
from oblique_topology.config import Config
from oblique_topology.evaluate import MODELS, PAPER
from oblique_topology.model import build_model

DEFAULT_ROW = "table2_multi.yaml"


SETUP = Setup(PAPER, build_model=lambda config, training: build_model(config, training.tokenizer))


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; arguments as in `common/run/training.py: opened`."""
    # data, model, optimiser, as the last checkpoint left them if the run resumes
    with opened(SETUP, config, pairs, files, resume, accelerator, label) as run:
        geometry = run.bare_model.geometry
        for step in run.steps():
            image_embeddings, text_embeddings, logit_scale = step.embed(step.images, step.token_ids)
            loss = geometry_loss(image_embeddings, text_embeddings, geometry, logit_scale, **config.optim.tiles)
            step.backward(loss)
            step.diagnose(image_embeddings, text_embeddings, chance=info_nce_chance(len(image_embeddings)))
            step.update()
            if config.largest_similarity is not None:  # m spheres make the largest logit m times the multiplier
                step.log(largest_logit=config.largest_similarity * step.values["logit_scale"])
        run.evaluate(MODELS)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train)


if __name__ == "__main__":
    run_or_explain(main)
