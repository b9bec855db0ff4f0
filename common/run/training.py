"""What every train.py opens before its loop and keeps beside it; loss, steps and their order stay in train.py."""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common.base.config import to_dict
from common.base.signals import Stopped, StopRequest
from common.data.pairs import (
    Pairs,
)
from common.evaluation.embed import Encoder, evaluate_retrieval
from common.run.checkpoint import Checkpoint, save_checkpoint
from common.run.inputs import TrainingData
from common.run.journal import Journal
from common.run.utilisation import Utilisation


def utilisation_of(model: nn.Module, config: Any, accelerator: Accelerator) -> Utilisation:
    """Counts what one pair costs; call before Accelerate prepares the model."""
    one_pair = (
        torch.empty(1, 3, config.data.image_size, config.data.image_size, device="meta"),
        torch.zeros(1, config.data.context_length, dtype=torch.long, device="meta"),
    )
    return Utilisation(model, one_pair, accelerator.device, accelerator.mixed_precision, accelerator.num_processes)


def checkpoint_state(
    paper: str,
    geometry: str,
    config: Any,
    training: TrainingData,
    provenance: dict[str, str],
    checkpoint: Checkpoint | None,
) -> dict[str, Any]:
    """What a checkpoint needs beside tensors to rebuild the model and its preprocessing, and where it comes from.

    Args:
        paper: the folder.
        geometry: name of the model's.
        config, training: of the run.
        provenance: of this process's code; a run that goes on keeps the revision that it was started with.
        checkpoint: that it goes on from, or None.
    """
    revision = provenance["git_revision"] if checkpoint is None else checkpoint.state["training_revision"]
    return {
        "paper": paper,
        "geometry": geometry,
        "config": to_dict(config),
        "tokenizer": training.tokenizer.to_json(),
        "transform": training.transform.to_json(),
        "training_revision": revision,
        "data_fingerprint": training.pairs.fingerprint,
        "training_data": training.description,
    }


def encoder_of(model: nn.Module, config: Any, training: TrainingData, device: torch.device) -> Encoder:
    """The unwrapped model with its preprocessing, as evaluations want it."""
    run = config.run
    return Encoder(
        model,
        training.transform,
        training.tokenizer,
        config.data.context_length,
        run.evaluation_batch_size,
        device,
        run.num_workers,
    )


def validate_if_due(journal: Journal, done: int, encoder: Encoder, pairs: Pairs | None) -> None:
    """Ranks the validation set every run.evaluate_every steps. Call on every process.

    Args:
        journal: of the run.
        done: updates made.
        encoder: with the unwrapped model.
        pairs: None where nothing is ever due.
    """
    every = journal.config.run.evaluate_every
    if not every or done % every:
        return
    journal.clock.pause()
    metrics = evaluate_retrieval(encoder, pairs).metrics
    journal.log.write("evaluate", step=done, data=pairs.name, metrics=metrics)
    if journal.accelerator.is_main_process:
        i2t, t2i = 100 * metrics["i2t_recall_at_1"], 100 * metrics["t2i_recall_at_1"]
        journal.progress.write(f"step {done}: {pairs.name} R@1 {i2t:.1f} % i2t, {t2i:.1f} % t2i", file=sys.stderr)


def save_if_due(
    journal: Journal,
    done: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    stop: StopRequest,
) -> None:
    """Writes a checkpoint every run.save_every steps, at the end, and when asked to stop. Call on every process.

    Args:
        journal: of the run.
        done: updates made.
        model: as Accelerate wraps it.
        optimizer: the one inside Accelerate's.
        state: see `checkpoint_state`.
        stop: whether a signal has asked the run to end.
    Raises:
        Stopped: after the checkpoint, if it has.
        CheckpointError: see save_checkpoint.
    """
    run, steps = journal.config.run, journal.config.optim.steps
    asked_to_stop = stop.agreed(journal.accelerator.device)
    if done == steps or asked_to_stop or (run.save_every and done % run.save_every == 0):
        journal.clock.pause()
        journal.broken.write_new(done)
        state = {**state, "broken": journal.broken.counts(), "watch": journal.watch.state()}
        save_checkpoint(journal.files.checkpoints, done, model, optimizer, state, run.keep_checkpoints)
    if done == steps or asked_to_stop:
        journal.progress.close()
    if asked_to_stop:
        raise Stopped(done, steps, journal.files.folder)
