"""Trains one row of EuCLIP's tables.

    python euclip/train.py                                                        EuCLIP, scenes, a CPU is enough
    ACCELERATE_USE_CPU=true accelerate launch --config_file scripts/accelerate/cpu_two_processes.yaml \\
        euclip/train.py                                                           two gloo processes, same loss
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml euclip/train.py \\
        --config euclip/configs/table4_meru.yaml --scale paper data.root=/data/datacomp
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.data.pairs import Pairs
from common.geometry import norm
from common.losses import LOSSES
from common.run.checkpoint import Checkpoint
from common.run.folder import RunFiles
from common.run.inputs import TrainingData, open_training_data
from common.run.launch import run_or_explain, train_main
from common.run.training import Setup, opened
from euclip.config import Config
from euclip.evaluate import MODELS, PAPER, check_tests
from euclip.model import build_model, multiply_scalar_gradients_

DEFAULT_ROW = "table4_euclip.yaml"


def open_data(config: Config, pairs: Pairs, checkpoint: Checkpoint | None) -> TrainingData:
    """The run's data; a missing test set is an error before training."""
    training = open_training_data(config, pairs, checkpoint)
    if config.run.test:
        check_tests(config, training.evaluation_sets)
    return training


SETUP = Setup(
    PAPER, build_model=lambda config, training: build_model(config, training.tokenizer), open_training=open_data
)


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; arguments as in `common/run/training.py: opened`."""
    method, optim = config.method, config.optim
    # data, model, optimiser, as the last checkpoint left them if the run resumes
    with opened(SETUP, config, pairs, files, resume, accelerator, label) as run:
        model, geometry = run.bare_model, run.bare_model.geometry
        contrast, tiles = LOSSES[method.loss], optim.tiles
        for step in run.steps():
            image_embeddings, text_embeddings, *scalars = step.embed(step.images, step.token_ids)
            loss = contrast.of(image_embeddings, text_embeddings, geometry, *scalars, **tiles)
            parts = {"contrastive_loss": loss}
            if method.entailment_weight:
                # matched pairs only, so the mean over processes is the global one; the text is the cone's apex
                matched = {"images": image_embeddings, "texts": text_embeddings}
                residuals = geometry.entailment_residual(**matched, min_radius=method.min_radius)
                parts["entailment_loss"] = residuals.mean()
                loss = loss + method.entailment_weight * parts["entailment_loss"]
            norms = {"image_norm": norm(image_embeddings).mean(), "text_norm": norm(text_embeddings).mean()}

            step.backward(loss, parts, **norms)
            multiply_scalar_gradients_(model, method.scalar_gradient_factor)  # by 1, or by 2 as the published code
            chance = contrast.chance(len(image_embeddings))
            step.diagnose(image_embeddings, text_embeddings, chance, loss="contrastive_loss")
            step.update()
        run.evaluate(MODELS)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train)


if __name__ == "__main__":
    run_or_explain(main)
