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

from common.base.signals import stop_signals
from common.data.pairs import Pairs
from common.distributed import mean_over_processes
from common.geometry import clamp_scalars_, norm, scalar_values
from common.run.checkpoint import Checkpoint
from common.run.evaluation import evaluate_and_save
from common.run.folder import RunFiles
from common.run.guards import check_finite, clip_gradient
from common.run.inputs import TrainingData, as_inputs, open_training_data
from common.run.launch import end_run, run_or_explain, seed_step, train_main
from common.run.schedule import learning_rate_at, set_learning_rate
from common.run.training import encoder_of, open_run, save_if_due, validate_if_due
from common.tiled import geometry_loss
from euclip.config import Config
from euclip.evaluate import MODELS, PAPER, check_tests
from euclip.model import build_model, multiply_scalar_gradients_

DEFAULT_ROW = "table4_euclip.yaml"


def open_data(config: Config, pairs: Pairs, checkpoint: Checkpoint | None) -> TrainingData:
    """The run's data; sets that an average of the paper wants and that are not there are missed before training."""
    training = open_training_data(config, pairs, checkpoint)
    check_tests(config, training.evaluation_sets)
    return training


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; the run's files hold everything that comes out.

    Args:
        config: one row at one scale.
        pairs: the training set that config.data names.
        files: where to write.
        resume: go on from the last whole checkpoint, if there is one.
        accelerator: places the model; one process or many.
        label: name on the progress bar.
    """
    method, optim = config.method, config.optim

    # data, model, optimiser, all as the last checkpoint left them where the run goes on
    run = open_run(
        PAPER,
        config,
        pairs,
        files,
        resume,
        accelerator,
        label,
        build_model=lambda config, training: build_model(config, training.tokenizer),
        open_training=open_data,
        micro_batch_size=optim.micro_batch_size,
    )
    model, geometry = run.bare_model, run.bare_model.geometry
    journal, transform = run.journal, run.training.transform
    encoder = encoder_of(model, config, run.training, accelerator.device)

    with stop_signals() as stop:
        for step, batch in journal.steps(run.batches):
            seed_step(config.run.seed, step)
            learning_rate = learning_rate_at(step, optim)
            set_learning_rate(run.optimizer, learning_rate)
            images, token_ids = as_inputs(batch, transform, accelerator.device)

            image_embeddings, text_embeddings, logit_scale = run.micro_batches.embed(images, token_ids)
            loss = geometry_loss(
                image_embeddings,
                text_embeddings,
                geometry,
                logit_scale,
                tile=optim.loss_tile,
                bf16_product=optim.loss_bf16_product,
            )
            parts = {"contrastive_loss": loss}
            if method.entailment_weight:
                # matched pairs alone, so the mean over processes is that of the global batch; the text is the apex
                pairs = {"images": image_embeddings, "texts": text_embeddings}
                residuals = geometry.entailment_residual(**pairs, min_radius=method.min_radius)
                parts["entailment_loss"] = residuals.mean()
                loss = loss + method.entailment_weight * parts["entailment_loss"]
            parts |= {"image_norm": norm(image_embeddings).mean(), "text_norm": norm(text_embeddings).mean()}
            values = {name: float(mean_over_processes(part)) for name, part in {"loss": loss, **parts}.items()}
            values |= scalar_values(model.scalars())
            check_finite(step=step, model=model, **values)

            run.micro_batches.backward(loss)
            multiply_scalar_gradients_(model, method.scalar_gradient_factor)
            told = {"loss": values["contrastive_loss"], "logit_scale": values["logit_scale"]}
            repeated = {"token_ids": batch.token_ids, "ids": batch.image_index}
            values |= journal.diagnosis(step, model, image_embeddings, text_embeddings, **told, **repeated)
            gradient_norm = clip_gradient(accelerator, run.model, optim, step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            bound_hits = clamp_scalars_(model.scalars())

            done = step + 1
            values |= {"bound_hits": bound_hits, "learning_rate": learning_rate, "gradient_norm": gradient_norm}
            journal.step_done(done, batch, **values)
            validate_if_due(run, done, encoder)
            save_if_due(run, done, stop)

    # final evaluation
    sets = run.training.evaluation_sets
    evaluate_and_save(MODELS, config, encoder, sets, files, optim.steps, run.state, run.provenance)
    end_run(accelerator)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train)


if __name__ == "__main__":
    run_or_explain(main)
