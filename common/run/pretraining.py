"""The training loop for images only, for every method of `common/methods/self_supervised.py`."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common.base.config import ConfigError
from common.data.order import seed_of
from common.data.transforms import normalize
from common.methods.self_supervised import Method
from common.momentum import ema_momentum_at
from common.run.evaluation_files import save_evaluations
from common.run.folder import RunFiles
from common.run.launch import prepare
from common.run.picture_evaluation import backbone_features, evaluate_all, monitor, projection_statistics
from common.run.pictures import open_vision_training
from common.run.schedule import build_sgd, set_sgd_rates
from common.run.training import Run, Setup, opened
from common.sharded import whole_weights


def train_on_pictures(
    paper: str,
    build_method: Callable[[Any, int, int], Method],
    config: Any,
    training_set: Any,
    files: RunFiles,
    resume: bool,
    accelerator: Accelerator,
    label: str,
) -> None:
    """Trains until config.optim.steps, then evaluates.

    Args:
        build_method: (config, num_classes, seed) -> the method with weights from the global random state.
    """
    method = config.method
    parts, processes = getattr(method, "batch_norm_parts", 1), accelerator.num_processes
    if parts > 1 and parts % processes:
        raise ConfigError(
            f"method.batch_norm_parts = {parts} on {processes} processes; expected: a multiple of their number, or 1"
        )
    setup = Setup(
        paper,
        build_model=lambda config, _: build_method(config, len(training_set.class_names), config.run.seed),
        open_training=open_vision_training,
        build_optimizer=lambda model, optim: build_sgd(model, optim, model.predictor_parameters()),
        set_rates=set_sgd_rates,
        prepare=_prepare,
        build_encoder=lambda model, config, training, device: backbone_features(
            model, config, training.transform, device
        ),
        validate=_validate,
        num_steps=lambda config: 0 if config.method.name == "random_weights" else config.optim.steps,
    )
    # data, model, optimiser, as the last checkpoint left them if the run resumes
    with opened(setup, config, training_set, files, resume, accelerator, label) as run:
        model, training = run.bare_model, run.training
        for step in run.steps():
            first_views, second_views, *small_views = (
                normalize(pixels.to(step.device, non_blocking=True), recipe.mean, recipe.std)
                for pixels, recipe in zip(step.batch.views, training.recipes)
            )
            labels = step.batch.labels.to(step.device, non_blocking=True)

            if facts := model.start_step(step.number):
                run.journal.log.write("graph", step=step.number + 1, **facts)
            # before the keys, with the weights that the queries use; MoCo's code does it between the two
            if method.ema_momentum is not None:
                momentum = ema_momentum_at(step.number, run.num_steps, method.ema_momentum, method.ema_schedule)
                model.update_momentum_encoder(momentum)
            shuffle_seed = seed_of(config.run.seed, step.number)
            loss, keys = run.model(first_views, second_views, labels, shuffle_seed, *small_views)

            step.backward(loss)
            model.hold(step.number)
            if step.is_logged:  # of the weights of this loss
                with whole_weights(model):
                    statistics = projection_statistics(model, first_views)
                step.log({f"projection_{name}": value for name, value in statistics.items()})
            step.update()
            if step.is_logged and model.loss_at_chance is not None:
                step.log(loss_over_chance=step.values["loss"] / model.loss_at_chance)
            model.insert(keys)  # after the backward pass, which reads a queue in place
        run.save_validation()
        if config.run.test:
            results = evaluate_all(config, run.evaluated_model, run.encoder, training_set, training.test_set)
            save_evaluations(paper, results, files, run.num_steps, run.state, run.provenance)


def _validate(run: Run) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    bank, queries = run.training.bank, run.training.queries
    metrics = monitor(run.evaluated_model, run.encoder, bank, queries, run.config)
    if run.num_steps:  # random weights are not trained, and no level says whether they were
        metrics |= {"chance_knn_acc1": 1 / len(queries.class_names)}
    return {queries.name: metrics}, {"knn_acc1": "kNN"}


def _prepare(accelerator: Accelerator, model: Method, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    # Accelerate's prepare, after batch normalisation was synchronised if the method needs it.
    if accelerator.num_processes > 1 and model.synchronised:
        if accelerator.device.type != "cuda":
            raise ConfigError(
                f"{type(model).__name__} takes the statistics of batch normalisation over all processes, which torch "
                "can on GPUs only; expected one process, several GPUs, or method.name moco_v1, moco_v2, supervised"
            )
        parameters = list(model.parameters())
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # moves the parameters, the optimiser has them still
        assert all(one is other for one, other in zip(parameters, model.parameters()))
    return prepare(accelerator, model, optimizer)
