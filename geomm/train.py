"""Trains a model of GeoMM or its base: CLIP against a pool, or ALBEF, with the cosine or the geodesic distance.

    python geomm/train.py                            geodesic distance on CLIP, from trained towers; a CPU is enough
    python geomm/train.py --config geomm/configs/albef_geo.yaml
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml geomm/train.py \\
        --config geomm/configs/albef_geo.yaml --scale demo

If a row starts from another one, that is trained first unless it exists.
"""

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.base.config import ConfigError
from common.data.order import SampleOrder
from common.data.pairs import Pairs
from common.data.partners import Partners
from common.evaluation.rerank import evaluate_two_stage
from common.evaluation.retrieval import RECALL_AT
from common.methods.albef import Albef, Losses, QueueClip, distillation_weight
from common.reproduce.rows import PaperCode, started
from common.run.checkpoint import Checkpoint, named_checkpoint
from common.run.folder import RunFiles
from common.run.inputs import TrainingData, open_training_data, tokenizer_of_start
from common.run.launch import run_or_explain, train_main
from common.run.training import Run, Setup, opened
from geomm.config import Config
from geomm.evaluate import MODELS, PAPER, evaluated_sets, matching, reevaluate
from geomm.graph_report import pool_report
from geomm.ground import measure, scenes_to_ground
from geomm.grouping import GroupedOrder
from geomm.mafa import smoothing_at
from geomm.model import WordMask, build_model, start_, start_discriminator_
from geomm.softness import match_

DEFAULT_ROW = "clip_geo.yaml"


def open_data(config: Config, pairs: Pairs, checkpoint: Checkpoint | None) -> TrainingData:
    """The run's data, with the tokenizer of the run that it starts from, which the discriminator must share.

    TCL, and ALBEF with method.two_views, use two views of each image. MAFA orders its batches by its features.

    Raises:
        ConfigError: another tokenizer than that run's, a discriminator with other token ids, or a MAFA on a stream or a
            mixture.
        ValueError: a BERT beside another vocabulary.
    """
    fresh = checkpoint is None
    if fresh and config.start.run:
        checkpoint = named_checkpoint(Path(config.start.run), "start.run")
        tokenizer_of_start(config.data, checkpoint, f"start.run = {config.start.run}")
    two_views = config.method.two_views or config.method.base == "tcl"
    training = open_training_data(config, pairs, checkpoint, two_views)
    if fresh and config.start.bert:
        training.tokenizer.check_beside(config.start.bert, "start.bert")
    if fresh and config.start.discriminator_run:
        theirs = named_checkpoint(Path(config.start.discriminator_run)).state["tokenizer"]
        if theirs != json.loads(json.dumps(training.tokenizer.to_json())):
            raise ConfigError(
                f"start.discriminator_run = {config.start.discriminator_run} has other token ids than this run; "
                "expected: a run that starts from the same towers"
            )
    if config.method.base != "mafa":
        return training
    if type(training.order) is not SampleOrder or training.order.forward_only:
        raise ConfigError("method.base = mafa with a stream or data.mixture; expected: one set with random access")
    order, view = GroupedOrder(len(pairs), config.optim.global_batch_size, config.run.seed), copy.copy(training.view)
    view.order = order
    if view.partners is not None:
        view.partners = Partners(order, config.data.partner_noise, config.data.partners_drawn)
    return replace(training, order=order, view=view)


def start_from_others_(model: QueueClip, config: Config) -> list[tuple[str, str, dict[str, Any]]]:
    """Fills a new model from the runs and the BERT that its row names, then copies it into its momentum encoders."""
    events = []
    if config.start.run or config.start.bert:
        names = " and ".join(filter(None, (config.start.bert, config.start.run)))
        events.append(("start", f"started from {names}", start_(model, config)))
    if config.start.discriminator_run:
        facts = start_discriminator_(model, config)
        events.append(("discriminator", f"discriminator from {config.start.discriminator_run}", facts))
    model.start_momentum_()
    return events


def validate_matching(run: Run) -> dict[str, dict[str, float]]:
    """Of validation pairs, recalls by the matching head, as tables rank; none without one, or of too few pictures.

    After training on expressions for objects of scenes also the share of right boxes, as RefCOCO+ is judged.
    """
    encoder, pairs = run.encoder, run.training.validation_pairs
    if not isinstance(encoder.model, Albef) or len(pairs) < max(RECALL_AT):
        return {}
    rankings = evaluate_two_stage(encoder, pairs, partial(matching, encoder), run.config.method.k_test)
    metrics = {f"matched_{metric}": value for metric, value in rankings["matched"].metrics.items()}
    if run.config.data.train == "train_referring":
        boxes = scenes_to_ground("val", None, len(pairs), run.config.data.image_size)
        metrics["right_boxes"] = measure(encoder, boxes)["own_accuracy"]
    return {pairs.name: metrics}


SETUP = Setup(
    PAPER,
    build_model=lambda config, training: build_model(config, training.tokenizer, training.order),
    start=start_from_others_,
    open_training=open_data,
    validate_last=validate_matching,
)


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; arguments as in `common/run/training.py: opened`."""
    method = config.method
    # data, model, optimiser, as the last checkpoint left them if the run resumes
    with opened(SETUP, config, pairs, files, resume, accelerator, label) as run:
        model, order = run.bare_model, run.training.order
        grouping = getattr(model, "grouping", None)
        if grouping is not None:
            order.follow(grouping)  # the epoch in which the run begins or resumes
        mask = WordMask(run.training.tokenizer, method.mask_probability, accelerator.device)
        steps_per_epoch = max(1, len(pairs) // config.optim.global_batch_size)

        for step in run.steps():
            ids = step.ids if method.targets == "ids" else None

            # Alg. 2: a graph every graph_update_interval steps; the loss then sees this step's keys among the columns
            for name, pool in (("image", model.image_pool), ("text", model.text_pool)):
                if pool.rebuild(step.number) and accelerator.is_main_process:
                    run.journal.log.write("graph", step=step.number + 1, pool=name, **pool_report(pool))
            model.update_momentum_encoders(method.ema_momentum)
            alpha = distillation_weight(step.number, steps_per_epoch, method.distillation)
            if grouping is not None:  # MAFA smooths its targets and has no distillation
                alpha = smoothing_at(step.number, steps_per_epoch, method.smoothing)
            masked, more = mask(step.batch.token_ids) if isinstance(model, Albef) else ((), {})
            if step.batch.second_views is not None:  # of the momentum encoders
                views = step.batch.second_views.to(step.device, non_blocking=True)
                more |= {"momentum_images": run.training.transform.inputs(views)}
            inputs = step.images, step.token_ids, *masked, alpha, ids
            if method.changes_scale and model.text_pool.factor_is_due(step.number):
                facts = set_factor_(run, inputs, more, step.number)
                run.journal.log.write("scale_factor", step=step.number + 1, **facts)
            losses = run.model(*inputs, **more)

            step.backward(None, losses.parts, **losses.logged)
            if step.is_logged:  # before the update, which changes the model that the statistics are about
                step.log(of_the_pools(model, losses, ids))
            step.update()
            model.insert(losses.image_keys, losses.text_keys, ids)  # after the backward pass, which reads the pools
            if grouping is not None:
                embeddings = losses.image_embeddings, losses.text_embeddings
                if grouping.collect(order.indices_of(step.number), *embeddings):
                    order.follow(grouping)
        run.evaluate(MODELS)


def set_factor_(run: Run, inputs: Sequence[Any], more: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Sets the factor of both pools at the step of the first graph, see geomm/softness.py; call on every process.

    Args:
        inputs, more: arguments of the model; a match computes the step's embeddings once before the loss.
    Returns:
        For the log.
    """
    model, method = run.bare_model, run.config.method
    if not method.match_entropy:
        for pool in (model.image_pool, model.text_pool):
            pool.set_factor_(method.scale_factor)
        return {"scale_factor": method.scale_factor}
    device = run.accelerator.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        return match_(model, run.model(*inputs, **more), step)


def of_the_pools(model: QueueClip, losses: Losses, ids: torch.Tensor | None) -> dict[str, float]:
    """Statistics of this process's queries by direction (the main process's are logged); plain queues have none."""
    queries = {
        "i2t": (losses.image_embeddings, model.text_pool.open(losses.text_keys, ids)),
        "t2i": (losses.text_embeddings, model.image_pool.open(losses.image_keys, ids)),
    }
    return {
        f"{side}_{name}": value
        for side, (embeddings, candidates) in queries.items()
        if hasattr(candidates, "statistics")
        for name, value in candidates.statistics(embeddings, model.logit_scale().item()).items()
    }


CODE = PaperCode(PAPER, Config, train, reevaluate, open_tests=evaluated_sets)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train, start=partial(started, CODE))


if __name__ == "__main__":
    run_or_explain(main)
