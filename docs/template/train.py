"""Trains one row.

python my_geometry/train.py --config my_geometry/configs/ball.yaml
accelerate launch --config_file scripts/accelerate/multi_gpu.yaml my_geometry/train.py data.num_train=100000
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.base.signals import stop_signals
from common.data.pairs import Pairs
from common.distributed import mean_over_processes
from common.geometry import clamp_scalars_, scalar_values
from common.run.evaluation import evaluate_and_save
from common.run.folder import RunFiles
from common.run.guards import check_finite, clip_gradient
from common.run.inputs import as_inputs
from common.run.launch import end_run, run_or_explain, seed_step, train_main
from common.run.schedule import learning_rate_at, set_learning_rate
from common.run.training import encoder_of, open_run, save_if_due, validate_if_due
from common.tiled import geometry_loss
from my_geometry.config import Config
from my_geometry.model import MODELS, PAPER, build_model


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; a run that goes on does so from its last whole checkpoint."""
    optim = config.optim
    run = open_run(
        PAPER, config, pairs, files, resume, accelerator, label,
        build_model=lambda config, training: build_model(config, training.tokenizer),
        micro_batch_size=optim.micro_batch_size,
        evaluation_script="model.py",
    )  # fmt: skip
    model, journal, transform = run.bare_model, run.journal, run.training.transform
    encoder = encoder_of(model, config, run.training, accelerator.device)
    with stop_signals() as stop:
        for step, batch in journal.steps(run.batches):
            seed_step(config.run.seed, step)
            learning_rate = learning_rate_at(step, optim)
            set_learning_rate(run.optimizer, learning_rate)
            images, token_ids = as_inputs(batch, transform, accelerator.device)

            image_embeddings, text_embeddings, logit_scale = run.micro_batches.embed(images, token_ids)
            loss = geometry_loss(image_embeddings, text_embeddings, model.geometry, logit_scale, tile=optim.loss_tile)
            values = {"loss": float(mean_over_processes(loss)), "logit_scale": logit_scale.item()}
            check_finite(step=step, model=model, **values)

            run.micro_batches.backward(loss)
            values |= journal.diagnosis(step, model, image_embeddings, text_embeddings, **values)
            values |= scalar_values(model.scalars())
            gradient_norm = clip_gradient(accelerator, run.model, optim, step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            clamp_scalars_(model.scalars())  # in place, after the step: a clamp in the forward pass would freeze it

            done = step + 1
            journal.step_done(done, batch, **values, learning_rate=learning_rate, gradient_norm=gradient_norm)
            validate_if_due(run, done, encoder)
            save_if_due(run, done, stop)
    sets = run.training.evaluation_sets
    evaluate_and_save(MODELS, config, encoder, sets, files, optim.steps, run.state, run.provenance)
    end_run(accelerator)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, "ball.yaml", train)


if __name__ == "__main__":
    run_or_explain(main)
