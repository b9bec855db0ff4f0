"""Trains one of the chapter's vision-language models (its vision part: pretrain.py).

    python contrastive_basics/train.py                                            main row, scenes, a CPU is enough
    python contrastive_basics/train.py --config contrastive_basics/configs/table1_late_interaction.yaml
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml contrastive_basics/train.py \\
        --config contrastive_basics/configs/table1_ours.yaml --scale paper data.root=/data/pairs
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.base.signals import stop_signals
from common.data.pairs import Pairs
from common.distributed import mean_over_processes
from common.geometry import clamp_scalars_
from common.run.evaluation import evaluate_and_save
from common.run.folder import RunFiles
from common.run.guards import check_finite, clip_gradient
from common.run.inputs import as_inputs
from common.run.launch import end_run, run_or_explain, seed_step, train_main
from common.run.schedule import learning_rate_at, set_learning_rate
from common.run.training import encoder_of, open_run, save_if_due, validate_if_due
from common.tiled import geometry_loss
from contrastive_basics.config import Config
from contrastive_basics.evaluate import MODELS, PAPER
from contrastive_basics.groups import loss_within_groups
from contrastive_basics.model import build_model

DEFAULT_ROW = "table1_ours.yaml"


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
        micro_batch_size=optim.micro_batch_size,
    )
    model, journal, transform = run.bare_model, run.journal, run.training.transform
    memory = model.memory  # momentum encoder and queue of past pairs, or None
    if memory is not None and not journal.first_step:
        memory.start_(model)  # as model.init and stems have filled the towers
    encoder = encoder_of(model, config, run.training, accelerator.device)

    with stop_signals() as stop:
        for step, batch in journal.steps(run.batches):
            seed_step(config.run.seed, step)
            learning_rate = learning_rate_at(step, optim)
            set_learning_rate(run.optimizer, learning_rate)
            images, token_ids = as_inputs(batch, transform, accelerator.device)
            ids = batch.image_index.to(accelerator.device)

            # Eq. 2 to 5: normalised vectors and their cosines; Eq. 6 to 8: softmax over rows, over columns, their mean
            image_embeddings, text_embeddings, logit_scale = run.micro_batches.embed(images, token_ids)
            queue = None if memory is None else memory.pairs()
            if method.group_size:
                loss = loss_within_groups(image_embeddings, text_embeddings, logit_scale, method.group_size)
            else:
                loss = geometry_loss(
                    image_embeddings,
                    text_embeddings,
                    model.geometry,
                    logit_scale,
                    ids=ids if method.targets == "ids" else None,
                    queue=queue,
                    tile=optim.loss_tile,
                    bf16_product=optim.loss_bf16_product,
                )
            values = {"loss": float(mean_over_processes(loss)), "logit_scale": logit_scale.item()}
            check_finite(step=step, model=model, **values)

            run.micro_batches.backward(loss)
            told = {**values, "queue": queue, "token_ids": batch.token_ids, "ids": batch.image_index}
            values |= journal.diagnosis(step, model, image_embeddings, text_embeddings, **told)
            gradient_norm = clip_gradient(accelerator, run.model, optim, step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            clamp_scalars_(model.scalars())  # in place, after the step: a clamp in the forward pass would freeze it
            if memory is not None:  # after the loss: a pair must not meet its own key
                memory.update_(model, method.ema_momentum)
                memory.insert(images, token_ids, ids)

            done = step + 1
            journal.step_done(done, batch, **values, learning_rate=learning_rate, gradient_norm=gradient_norm)
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
