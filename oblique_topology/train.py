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

import torch
from accelerate import Accelerator

from common.accumulation import MicroBatches
from common.base.signals import stop_signals
from common.data.pairs import Pairs
from common.distributed import mean_over_processes
from common.late_interaction import late_interaction_loss
from common.run.evaluation import evaluate_and_save
from common.run.folder import RunFiles, checkpoint_to_resume, provenance_of
from common.run.guards import check_finite, clip_gradient
from common.run.inputs import as_inputs, batches_from, open_training_data
from common.run.journal import Journal
from common.run.launch import end_run, prepare_or_resume, run_or_explain, seed_step, train_main
from common.run.schedule import build_optimizer, learning_rate_at, set_learning_rate
from common.run.training import checkpoint_state, encoder_of, save_if_due, utilisation_of, validate_if_due
from common.tiled import geometry_loss
from oblique_topology.config import Config
from oblique_topology.evaluate import MODELS, PAPER
from oblique_topology.model import build_model

DEFAULT_ROW = "table2_multi.yaml"


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
    optim, run = config.optim, config.run
    provenance = provenance_of(PAPER)  # of the code as it is now, whatever is edited during the run
    checkpoint = checkpoint_to_resume(files, resume, config, pairs.fingerprint)

    # data: the order of samples is a function of (seed, position) alone
    training = open_training_data(config, pairs, checkpoint)

    # model and optimiser
    torch.manual_seed(run.seed)
    model = build_model(config, training.tokenizer)
    optimizer = build_optimizer(model, optim)
    utilisation = utilisation_of(model, config, accelerator)

    # prepare, resume
    model, optimizer, first_step = prepare_or_resume(accelerator, model, optimizer, checkpoint)
    bare_model = accelerator.unwrap_model(model)
    encoder = encoder_of(bare_model, config, training, accelerator.device)
    state = checkpoint_state(PAPER, bare_model.geometry.name, config, training, provenance, checkpoint)
    journal = Journal(files, config, training, accelerator, utilisation, checkpoint, label)

    # loop
    batches = batches_from(first_step, config, training, accelerator)
    micro_batches = MicroBatches(accelerator, model, optim.micro_batch_size)
    model.train()
    with stop_signals() as stop:
        for step, batch in journal.steps(batches):
            seed_step(run.seed, step)
            learning_rate = learning_rate_at(step, optim)
            set_learning_rate(optimizer, learning_rate)
            images, token_ids = as_inputs(batch, training.transform, accelerator.device)

            image_embeddings, text_embeddings, logit_scale = micro_batches.embed(images, token_ids)
            if config.method.geometry == "max_average":  # its two directions have a matrix each
                loss = late_interaction_loss(image_embeddings, text_embeddings, logit_scale, padded=False)
            else:
                loss = geometry_loss(
                    image_embeddings,
                    text_embeddings,
                    bare_model.geometry,
                    logit_scale,
                    tile=optim.loss_tile,
                    bf16_product=optim.loss_bf16_product,
                )
            values = {"loss": float(mean_over_processes(loss)), "logit_scale": logit_scale.item()}
            check_finite(step=step, model=bare_model, **values)

            micro_batches.backward(loss)
            values |= journal.diagnosis(step, batch, bare_model, image_embeddings, text_embeddings, **values)
            gradient_norm = clip_gradient(accelerator, model, optim, step)
            optimizer.step()
            optimizer.zero_grad()
            bare_model.logit_scale.clamp_()  # in place, after the step: a clamp in the forward pass would freeze it

            if config.largest_similarity is not None:  # one multiplier is as many times as hot as there are spheres
                values["largest_logit"] = config.largest_similarity * values["logit_scale"]
            done = step + 1
            journal.step_done(done, batch, **values, learning_rate=learning_rate, gradient_norm=gradient_norm)
            validate_if_due(journal, done, encoder, training.validation_pairs)
            save_if_due(journal, done, model, optimizer.optimizer, state, stop)

    # final evaluation
    evaluate_and_save(MODELS, config, encoder, training.evaluation_sets, files, optim.steps, state, provenance)
    end_run(accelerator)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train)


if __name__ == "__main__":
    run_or_explain(main)
