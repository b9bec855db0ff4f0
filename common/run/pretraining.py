"""The loop of learning from pictures alone, for every method of `common/methods/self_supervised.py`."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common.base.config import ConfigError
from common.base.signals import stop_signals
from common.data.order import seed_of
from common.data.transforms import normalize
from common.distributed import mean_over_processes
from common.methods.self_supervised import Method
from common.momentum import ema_momentum_at
from common.run.folder import RunFiles
from common.run.guards import check_finite, clip_gradient
from common.run.launch import end_run, seed_step
from common.run.picture_evaluation import SCRIPT, backbone_features, evaluate_and_save, monitor, projection_statistics
from common.run.pictures import open_vision_training
from common.run.schedule import build_sgd, set_sgd_rates
from common.run.training import open_run, save_if_due


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
    """Trains until config.optim.steps, then evaluates; the run's files hold everything that comes out.

    Args:
        paper: the folder.
        build_method: (config, num_classes, seed) -> the method with weights from the global random state.
        config: one row at one scale.
        training_set: the labelled set that config.data names; labels reach the supervised reference alone.
        files: where to write.
        resume: go on from the last whole checkpoint, if there is one.
        accelerator: places the model; one process or many.
        label: name on the progress bar.
    """
    method, optim, device = config.method, config.optim, accelerator.device
    run = open_run(
        paper,
        config,
        training_set,
        files,
        resume,
        accelerator,
        label,
        build_model=lambda config, _: build_method(config, len(training_set.class_names), config.run.seed),
        open_training=open_vision_training,
        build_optimizer=lambda model, optim: build_sgd(model, optim, model.predictor_parameters()),
        prepare=_prepare,
        steps=0 if method.name == "random_weights" else optim.steps,
        evaluation_script=SCRIPT,
    )
    model: Method = run.bare_model
    training, journal = run.training, run.journal
    encoder = backbone_features(model, config, training.transform, device)

    with stop_signals() as stop:
        for step, batch in journal.steps(run.batches):
            seed_step(config.run.seed, step)
            learning_rate = set_sgd_rates(run.optimizer, step, optim)
            first_views, second_views, *small_views = (
                normalize(pixels.to(device, non_blocking=True), recipe.mean, recipe.std)
                for pixels, recipe in zip(batch.views, training.recipes)
            )
            labels = batch.labels.to(device, non_blocking=True)

            model.start_step(step)
            # before the keys, with the weights that the queries use; MoCo's code does it between the two
            if method.ema_momentum is not None:
                model.update_momentum_encoder(
                    ema_momentum_at(step, run.steps, method.ema_momentum, method.ema_schedule)
                )
            loss, keys = run.model(first_views, second_views, labels, seed_of(config.run.seed, step), *small_views)
            values = {"loss": float(mean_over_processes(loss))}
            check_finite(step=step, model=model, **values)

            accelerator.backward(loss)
            model.hold(step)
            gradient_norm = clip_gradient(accelerator, run.model, optim, step)
            done = step + 1
            if journal.logs_at(done):  # of the weights of this loss
                statistics = projection_statistics(model, first_views)
                values |= {f"projection_{name}": value for name, value in statistics.items()}
            run.optimizer.step()
            run.optimizer.zero_grad()
            model.insert(keys)  # after the backward pass, which reads a queue in place

            journal.step_done(done, batch, **values, learning_rate=learning_rate, gradient_norm=gradient_norm)
            if journal.evaluates_at(done):
                metrics = monitor(model, encoder, training.bank, training.queries, config)
                journal.evaluated(done, {training.queries.name: metrics}, {"knn_acc1": "kNN"})
            save_if_due(run, done, stop)
        if run.steps == 0:
            save_if_due(run, 0, stop)

    # final evaluation
    sets = (training_set, training.test_set)
    evaluate_and_save(paper, config, model, encoder, sets, files, run.steps, run.state, run.provenance)
    end_run(accelerator)


def _prepare(accelerator: Accelerator, model: Method, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Accelerate's prepare, after batch normalisation was made to synchronise where the method wants it.

    Raises:
        ConfigError: if it cannot: several processes on CPUs.
    """
    if accelerator.num_processes > 1 and model.synchronised:
        if accelerator.device.type != "cuda":
            raise ConfigError(
                f"{type(model).__name__} takes the statistics of batch normalisation over all processes, which torch "
                "can on GPUs only; accepted: one process, several GPUs, or method.name moco_v1, moco_v2, supervised"
            )
        parameters = list(model.parameters())
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # moves the parameters, the optimiser has them still
        assert all(one is other for one, other in zip(parameters, model.parameters()))
    return accelerator.prepare(model, optimizer)
