"""Trains a model of GeoMM or its base: CLIP against a pool, or ALBEF, by the cosine or the geodesic distance.

    python geomm/train.py                            geodesic distance on CLIP, from trained towers; a CPU is enough
    python geomm/train.py --config geomm/configs/albef_geo.yaml
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml geomm/train.py \\
        --config geomm/configs/albef_geo.yaml --scale demo

A row that starts from another one has it trained first, where it is missing.
"""

import copy
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.base.config import ConfigError
from common.base.signals import stop_signals
from common.data.order import SampleOrder
from common.data.pairs import Pairs
from common.distributed import mean_over_processes
from common.geometry import clamp_scalars_
from common.methods.albef import Albef, Losses, QueueClip, distillation_weight, mask_words, replaceable_words
from common.reproduce.rows import PaperCode, started
from common.run.checkpoint import Checkpoint, named_checkpoint
from common.run.evaluation import evaluate_and_save
from common.run.folder import RunFiles
from common.run.guards import check_finite, clip_gradient
from common.run.inputs import TrainingData, as_inputs, open_training_data
from common.run.launch import end_run, run_or_explain, seed_step, train_main
from common.run.schedule import learning_rate_at, set_learning_rate
from common.run.training import encoder_of, open_run, save_if_due, validate_if_due
from geomm.config import Config
from geomm.evaluate import MODELS, PAPER, evaluated_sets, reevaluate
from geomm.grouping import GroupedOrder
from geomm.mafa import smoothing_at
from geomm.model import build_model, mask_id_of, start_, start_discriminator_

DEFAULT_ROW = "clip_geo.yaml"


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
    method, optim, device = config.method, config.optim, accelerator.device

    # data, model, optimiser, all as the last checkpoint left them where the run goes on
    run = open_run(
        PAPER,
        config,
        pairs,
        files,
        resume,
        accelerator,
        label,
        build_model=lambda config, training: build_model(config, training.tokenizer, training.order),
        open_training=open_data,
    )
    model, journal, transform, tokenizer = run.bare_model, run.journal, run.training.transform, run.training.tokenizer
    if not journal.first_step:
        if config.start.run or config.start.bert:
            names = " and ".join(filter(None, (config.start.bert, config.start.run)))
            journal.told("start", f"started from {names}", **start_(model, config))
        if config.start.discriminator_run:
            told = start_discriminator_(model, config)
            journal.told("discriminator", f"discriminator from {config.start.discriminator_run}", **told)
        model.start_momentum_()
    order, grouping = run.training.order, getattr(model, "grouping", None)
    if grouping is not None:
        order.follow(grouping)  # where a run goes on, in the middle of an epoch
    encoder = encoder_of(model, config, run.training, device)
    mask_id = mask_id_of(tokenizer)
    words = replaceable_words(
        tokenizer.vocabulary_size, (tokenizer.pad_id, tokenizer.cls_id, tokenizer.end_id, mask_id), device
    )
    steps_per_epoch = max(1, len(pairs) // optim.global_batch_size)

    with stop_signals() as stop:
        for step, batch in journal.steps(run.batches):
            seed_step(config.run.seed, step)
            learning_rate = learning_rate_at(step, optim)
            set_learning_rate(run.optimizer, learning_rate)
            images, token_ids = as_inputs(batch, transform, device)
            views = (images,)
            if batch.second_views is not None:
                views = images, transform.inputs(batch.second_views.to(device, non_blocking=True))
            ids = batch.image_index.to(device) if method.targets == "ids" else None

            # Alg. 2: a new graph every graph_update_interval steps; then the loss on the columns as they will be
            for pool in (model.image_pool, model.text_pool):
                pool.rebuild(step)
            model.update_momentum_encoders(method.ema_momentum)
            alpha = distillation_weight(step, steps_per_epoch, method.distillation)
            if grouping is not None:
                alpha = smoothing_at(step, steps_per_epoch, method.smoothing)
            if isinstance(model, Albef):
                masked = None, None
                if method.mask_probability:
                    spared = (tokenizer.pad_id, tokenizer.cls_id)
                    masked = mask_words(token_ids, words, mask_id, spared, method.mask_probability)
                losses = run.model(*views, token_ids, *masked, alpha, ids)
            else:
                losses = run.model(*views, token_ids, alpha, ids)
            loss = sum(losses.parts.values())
            values = {name: float(mean_over_processes(part)) for name, part in losses.parts.items()}
            values = {"loss": sum(values.values()), **values, "logit_scale": model.logit_scale().item()}
            values |= {name: float(mean_over_processes(value)) for name, value in losses.told.items()}
            check_finite(step=step, model=model, **values)

            accelerator.backward(loss)
            gradient_norm = clip_gradient(accelerator, run.model, optim, step)
            done = step + 1
            if journal.logs_at(done):
                values |= of_the_pools(model, losses, ids)
            run.optimizer.step()
            run.optimizer.zero_grad()
            clamp_scalars_(model.scalars())  # in place, after the step: a clamp in the forward pass would freeze it
            model.insert(losses.image_keys, losses.text_keys, ids)  # after the backward pass, which reads the pools
            if grouping is not None:
                embeddings = losses.image_embeddings, losses.text_embeddings
                if grouping.collect(order.indices_of(step), *embeddings):
                    order.follow(grouping)

            journal.step_done(done, batch, **values, learning_rate=learning_rate, gradient_norm=gradient_norm)
            validate_if_due(run, done, encoder)
            save_if_due(run, done, stop)

    # final evaluation
    sets = run.training.evaluation_sets
    evaluate_and_save(MODELS, config, encoder, sets, files, optim.steps, run.state, run.provenance)
    end_run(accelerator)


def open_data(config: Config, pairs: Pairs, checkpoint: Checkpoint | None) -> TrainingData:
    """Words have the ids that they had in the run that this one starts from, which its discriminator must know, too.

    TCL sees two views of each picture; the batches of a MAFA are ordered by what it has learnt.

    Raises:
        ConfigError: a discriminator with other words, or a MAFA on samples that come in an order of their own.
    """
    fresh = checkpoint is None
    if fresh and config.start.run:
        checkpoint = named_checkpoint(Path(config.start.run), "start.run")
    training = open_training_data(config, pairs, checkpoint, two_views=config.method.base == "tcl")
    if fresh and config.start.discriminator_run:
        told = named_checkpoint(Path(config.start.discriminator_run)).state["tokenizer"]
        if told != json.loads(json.dumps(training.tokenizer.to_json())):
            raise ConfigError(
                f"start.discriminator_run = {config.start.discriminator_run} knows words by other ids than this run; "
                "accepted: a run that starts from the same towers"
            )
    if config.method.base != "mafa":
        return training
    if type(training.order) is not SampleOrder or training.order.forward_only:
        raise ConfigError(
            "method.base = mafa with a stream or data.mixture; accepted: one set whose samples can be had"
        )
    order, view = GroupedOrder(len(pairs), config.optim.global_batch_size, config.run.seed), copy.copy(training.view)
    view.order = order
    return replace(training, order=order, view=view)


def of_the_pools(model: QueueClip, losses: Losses, ids: torch.Tensor | None) -> dict[str, float]:
    """Statistics of the queries of a step and the candidates that they met, by direction; a queue's have none."""
    queries = {
        "i2t": (losses.image_embeddings, model.text_pool.open(losses.text_keys, ids)),
        "t2i": (losses.text_embeddings, model.image_pool.open(losses.image_keys, ids)),
    }
    return {
        f"{side}_{name}": value
        for side, (embeddings, candidates) in queries.items()
        if hasattr(candidates, "statistics")
        for name, value in candidates.statistics(embeddings).items()
    }


CODE = PaperCode(PAPER, Config, train, reevaluate, open_tests=evaluated_sets)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train, start=partial(started, CODE))


if __name__ == "__main__":
    run_or_explain(main)
