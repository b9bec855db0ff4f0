"""Trains one method of learning from pictures alone: SimCLR, MoCo v1 to v3, SimSiam, or one of two controls.

    python contrastive_basics/pretrain.py                                     MoCo v2, scenes, a CPU is enough
    python contrastive_basics/pretrain.py --config contrastive_basics/configs/vision_simsiam.yaml \\
        --scale photos data.root=/data/cifar10                                train/CLASS/*.jpg and test/CLASS/*.jpg
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml contrastive_basics/pretrain.py \\
        --config contrastive_basics/configs/vision_simclr.yaml --scale paper data.root=/data/imagenet
                                                                              with the settings in the row's header
"""

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from common.base.config import ConfigError, entry_arguments, to_dict
from common.base.signals import Stopped, stop_signals
from common.data.batches import training_batches
from common.data.order import BatchPositions, SampleOrder, seed_of
from common.data.pairs import lost_at_open
from common.data.transforms import normalize
from common.distributed import mean_over_processes
from common.momentum import ema_momentum_at
from common.run.checkpoint import save_checkpoint
from common.run.folder import RunFiles, checkpoint_to_resume, chosen_files, only_run_in, provenance_of, save_config
from common.run.guards import check_finite, check_finite_gradient
from common.run.journal import BrokenLog, StepClock
from common.run.launch import end_run, run_or_explain, seed_step, start_accelerator
from common.run.log import RunLog
from contrastive_basics.vision.config import VisionConfig
from contrastive_basics.vision.data import (
    SomePictures,
    TwoViews,
    evaluation_transform,
    open_test_set,
    open_training_set,
    view_recipes,
)
from contrastive_basics.vision.evaluate import (
    PAPER,
    backbone_features,
    evaluate_and_save,
    monitor,
    projection_statistics,
)
from contrastive_basics.vision.methods import Method, build_method, build_sgd, set_learning_rates

DEFAULT_ROW = "vision_moco_v2.yaml"
SCALE_FILES = "scale_vision"


def pretrain(
    config: VisionConfig, training_set: Any, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; the run's files hold everything that comes out.

    Args:
        config: one row at one scale.
        training_set: the labelled set that config.data names; labels reach the supervised reference alone.
        files: where to write.
        resume: go on from the last whole checkpoint, if there is one.
        accelerator: places the model; one process or many.
        label: name on the progress bar.
    """
    data, method, optim, run = config.data, config.method, config.optim, config.run
    device = accelerator.device
    steps = 0 if method.name == "random_weights" else optim.steps

    provenance = provenance_of(PAPER, "vision/evaluate.py")  # of the code as it is now, whatever is edited meanwhile
    checkpoint = checkpoint_to_resume(files, resume, config, training_set.fingerprint)

    # data: the order of pictures, and their views, are functions of (seed, position) alone
    order = SampleOrder(len(training_set), optim.global_batch_size, run.seed)
    recipes = view_recipes(config)
    views = TwoViews(training_set, order, recipes, data.image_size)
    test_set, transform = open_test_set(data), evaluation_transform(config)
    bank = SomePictures(training_set, config.evaluation.monitor_bank)
    queries = SomePictures(test_set, config.evaluation.monitor_queries)

    # method and optimiser
    torch.manual_seed(run.seed)
    model = build_method(config, len(training_set.class_names), run.seed)
    optimizer = build_sgd(model, optim)

    # prepare, resume
    if checkpoint is not None:
        checkpoint.load_model(model)
    first_step = 0 if checkpoint is None else checkpoint.state["step"]
    model, optimizer = _prepare(accelerator, model, optimizer)
    if checkpoint is not None:
        checkpoint.load_optimizer(model, optimizer.optimizer)
    bare_model: Method = accelerator.unwrap_model(model)

    # what a checkpoint needs to rebuild the model and its preprocessing
    state = {
        "paper": PAPER,
        "kind": "vision",
        "config": to_dict(config),
        "transform": transform.to_json(),
        "training_revision": provenance["git_revision"]
        if checkpoint is None
        else checkpoint.state["training_revision"],
        "data_fingerprint": training_set.fingerprint,
        "training_data": f"{training_set.name}, {len(training_set)} pictures ({training_set.fingerprint[:8]})",
    }
    if accelerator.is_main_process:
        save_config(files, config, training_data=state["training_data"], processes=accelerator.num_processes)
    log = RunLog(files.log, first_step if checkpoint is not None else None, accelerator.is_main_process)
    encoder = backbone_features(bare_model, config, transform, device)
    broken = BrokenLog(
        log,
        data.max_broken_share,
        lost_at_open(training_set, test_set),
        None if checkpoint is None else checkpoint.state["broken"],
    )

    def save(step: int) -> None:
        broken.write_new(step)
        state["broken"] = broken.counts()
        save_checkpoint(files.checkpoints, step, model, optimizer.optimizer, state, run.keep_checkpoints)

    # loop
    positions = BatchPositions(order, first_step, steps, accelerator.process_index, accelerator.num_processes)
    batches = training_batches(views, positions, run.num_workers, pin_memory=device.type == "cuda")
    progress = tqdm(total=steps, initial=first_step, desc=label, unit="step", disable=not accelerator.is_main_process)
    model.train()
    clock = StepClock(optim.global_batch_size)
    with stop_signals() as stop:
        for step, batch in enumerate(clock.timed(batches), start=first_step):
            seed_step(run.seed, step)
            learning_rate = set_learning_rates(optimizer, step, optim)
            first_views, second_views = (
                normalize(pixels.to(device, non_blocking=True), recipe.mean, recipe.std)
                for pixels, recipe in zip((batch.first_views, batch.second_views), recipes)
            )
            labels = batch.labels.to(device, non_blocking=True)

            # before the keys, with the weights that the queries use; MoCo's code does it between the two (spec 2.2)
            if method.ema_momentum is not None:
                ema_momentum = ema_momentum_at(step, steps, method.ema_momentum, method.ema_schedule)
                bare_model.update_momentum_encoder(ema_momentum)
            loss, keys = model(first_views, second_views, labels, seed_of(run.seed, step))
            global_loss = float(mean_over_processes(loss))
            check_finite(global_loss, step, bare_model)

            accelerator.backward(loss)
            # an infinite bound measures the norm and changes nothing
            max_norm = math.inf if optim.max_gradient_norm is None else optim.max_gradient_norm
            gradient_norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            check_finite_gradient(gradient_norm, step)
            done = step + 1
            logs = done % run.log_every == 0 or done == steps
            projections = projection_statistics(bare_model, first_views) if logs else {}  # of the weights of this loss
            optimizer.step()
            optimizer.zero_grad()
            bare_model.enqueue(keys)  # after the logits, which were formed from a copy of the queue

            broken.collect(batch.broken, seen=len(batch.labels))
            progress.update()
            if logs:
                record = {
                    "step": done,
                    "samples_seen": done * optim.global_batch_size,
                    "loss": global_loss,
                    "learning_rate": learning_rate,
                    "gradient_norm": gradient_norm,
                    **{f"projection_{name}": value for name, value in projections.items()},
                    **clock.read(),
                }
                log.write("train", **record)
                broken.write_new(done)
                accelerator.log(record, step=done)
                progress.set_postfix(loss=f"{global_loss:.3f}", std=f"{projections['channel_std']:.3f}")
            if run.evaluate_every and done % run.evaluate_every == 0:
                clock.pause()
                metrics = monitor(bare_model, encoder, bank, queries, config)
                log.write("evaluate", step=done, data=queries.name, metrics=metrics)
                progress.write(f"step {done}: kNN {100 * metrics['knn_acc1']:.1f} % on {queries.name}", file=sys.stderr)
            asked_to_stop = stop.agreed(device)
            if done == steps or asked_to_stop or (run.save_every and done % run.save_every == 0):
                clock.pause()
                save(done)
            if asked_to_stop:
                progress.close()
                raise Stopped(done, steps, files.folder)
    progress.close()
    if steps == 0 and checkpoint is None:
        save(0)

    # final evaluation
    evaluate_and_save(config, bare_model, encoder, (training_set, test_set), files, steps, state, provenance)
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


def main() -> None:
    config, arguments = entry_arguments(__doc__, Path(__file__).parent, VisionConfig, DEFAULT_ROW, SCALE_FILES)
    training_set = open_training_set(config.data)
    files = chosen_files(Path(__file__), arguments, config, training_set.fingerprint)
    accelerator = start_accelerator(config.run, files.folder)
    accelerator.print(f"{PAPER}, {arguments.row}, scale {arguments.scale}, seed {config.run.seed} -> {files.folder}")
    with only_run_in(files) if accelerator.is_main_process else nullcontext():
        pretrain(config, training_set, files, arguments.resume, accelerator, label=arguments.row)


if __name__ == "__main__":
    run_or_explain(main)
