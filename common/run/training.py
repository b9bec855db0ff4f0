"""Opening a run: from a config to all that a training loop holds; losses, steps and their order stay in train.py.

A train.py opens its run here, loops over `run.journal.steps(run.batches)`, and ends with `evaluate_and_save`. Nothing
in this file knows how many views or captions a sample has, or what the model is made of.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from common.accumulation import MicroBatches
from common.base.config import to_dict
from common.base.signals import Stopped, StopRequest
from common.evaluation.embed import Encoder, evaluate_retrieval, evaluate_zero_shot
from common.run.checkpoint import Checkpoint, save_checkpoint
from common.run.ending import agreed, saved_without_batch
from common.run.folder import RunFiles, checkpoint_to_resume, provenance_of
from common.run.initial import InitialWeights, in_words
from common.run.inputs import Training, TrainingData, batches_from, kept_stems, open_training_data
from common.run.journal import Journal
from common.run.launch import prepare
from common.run.schedule import build_optimizer
from common.run.sources import initial_fingerprints
from common.run.utilisation import Utilisation


@dataclass(frozen=True)
class Run:
    """What a loop holds while it trains.

    config, files: of the run. steps: at which it is finished.
    training: the data, as `open_training` gave them, with kept features where the model has a stem that is held still.
    model, optimizer: as Accelerate wraps them. bare_model: the same model, unwrapped.
    micro_batches: embeds a batch in parts, see `MicroBatches`. batches: of the steps that are left.
    journal: log, progress bar, speed. state: what a checkpoint holds beside tensors.
    provenance: of the code as it was when the run was opened, whatever is edited meanwhile.
    """

    config: Any
    files: RunFiles
    steps: int
    accelerator: Accelerator
    training: Any
    model: nn.Module
    bare_model: nn.Module
    optimizer: AcceleratedOptimizer
    micro_batches: MicroBatches
    batches: Iterable[Any]
    journal: Journal
    state: dict[str, Any]
    provenance: dict[str, str]


def open_run(
    paper: str,
    config: Any,
    data_set: Any,
    files: RunFiles,
    resume: bool,
    accelerator: Accelerator,
    label: str,
    build_model: Callable[[Any, Any], nn.Module],
    *,
    open_training: Callable[..., Training] = open_training_data,
    build_optimizer: Callable[[nn.Module, Any], torch.optim.Optimizer] = build_optimizer,
    prepare: Callable[..., tuple[Any, Any]] = prepare,
    micro_batch_size: int | None = None,
    steps: int | None = None,
    evaluation_script: str = "evaluate.py",
) -> Run:
    """Opens a run, or the one that its folder holds. Call on every process.

    Args:
        paper: the folder.
        config: with the sections data, optim and run.
        data_set: to train on, with a fingerprint.
        files: where to write.
        resume: go on from the last whole checkpoint, if there is one.
        accelerator: places the model; one process or many.
        label: name on the progress bar.
        build_model: (config, training) -> model with weights drawn from the run's seed.
        open_training: (config, data_set, checkpoint or None) -> see `Training`.
        build_optimizer: (model, config.optim) -> optimiser.
        prepare: (accelerator, model, optimizer) -> both as Accelerate wraps them.
        micro_batch_size: rows of a forward pass and process; None = the whole share.
        steps: updates of the run, None = config.optim.steps.
        evaluation_script: of the paper's folder; what it imports is the code that the evaluation is known by.
    Raises:
        ConfigError, CheckpointError: see `checkpoint_to_resume`.
    """
    provenance = provenance_of(paper, evaluation_script)
    initial = InitialWeights.opened(config)
    config = initial.resolved(config)
    checkpoint = checkpoint_to_resume(files, resume, config, data_set.fingerprint)
    training = open_training(config, data_set, checkpoint)
    steps = config.optim.steps if steps is None else steps

    # the seed draws the weights, whatever opening the data has drawn
    torch.manual_seed(config.run.seed)
    model = build_model(config, training)
    started = initial.start_(model, config, training.tokenizer) if initial.of else {}
    if checkpoint is None:
        initial.load_stems_(model, config)
    optimizer = build_optimizer(model, config.optim)
    one_sample = training.one_sample()
    utilisation = None
    if one_sample is not None:  # counted before Accelerate wraps the model
        processes = accelerator.num_processes
        utilisation = Utilisation(
            model, one_sample, accelerator.device, accelerator.mixed_precision, processes, kept_stems(model, config)
        )

    # weights go in before the model is wrapped or sharded, the optimiser's state after
    if checkpoint is not None:
        checkpoint.load_model(model)
    model, optimizer = prepare(accelerator, model, optimizer)
    if checkpoint is not None:
        checkpoint.load_optimizer(model, optimizer.optimizer)
    bare_model = accelerator.unwrap_model(model)
    training = training.with_features(bare_model, config, accelerator.device)

    state = {
        "paper": paper,
        "config": to_dict(config),
        # a run that goes on keeps the revision that it was started with
        "training_revision": (
            provenance["git_revision"] if checkpoint is None else checkpoint.state["training_revision"]
        ),
        "training_versions": _versions(provenance, checkpoint),
        "run_key": files.identity.get("key"),
        "data_fingerprint": data_set.fingerprint,
        "training_data": training.description,
        "precision": accelerator.mixed_precision,
        "initial_weights": initial_fingerprints(config),
        **training.state(bare_model),
    }
    journal = Journal(files, config, training, accelerator, utilisation, checkpoint, label, steps)
    if started and checkpoint is None:
        journal.told("initial_weights", in_words(started), **started)

    def save(done: int) -> None:
        journal.progress.close()
        everything = {**state, **journal.state(done)}
        save_checkpoint(files.checkpoints, done, model, optimizer.optimizer, everything, config.run.keep_checkpoints)

    model.train()
    return Run(
        config=config,
        files=files,
        steps=steps,
        accelerator=accelerator,
        training=training,
        model=model,
        bare_model=bare_model,
        optimizer=optimizer,
        micro_batches=MicroBatches(accelerator, model, micro_batch_size),
        batches=saved_without_batch(
            agreed(batches_from(journal.first_step, config, training, accelerator, steps), accelerator.device),
            journal.first_step,
            steps,
            files,
            save,
        ),
        journal=journal,
        state=state,
        provenance=provenance,
    )


def _versions(provenance: dict[str, str], checkpoint: Checkpoint | None) -> str:
    """Of the libraries that a run was trained with, one after the other where it went on with others."""
    now = provenance["versions"]
    before = now if checkpoint is None else checkpoint.state.get("training_versions", "not known")
    return before if before.endswith(now) else f"{before}, then {now}"


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
        training.cache,
        run.ranking_gb,
    )


def validate_if_due(run: Run, done: int, encoder: Encoder) -> None:
    """Ranks the validation pairs, and classifies a labelled set, every run.evaluate_every steps. Call on every process.

    Args:
        run: on pairs.
        done: updates made.
        encoder: with the unwrapped model.
    """
    if run.journal.evaluates_at(done):
        pairs, task = run.training.validation_pairs, run.training.validation_task
        found = {pairs.name: evaluate_retrieval(encoder, pairs).metrics}
        if task is not None:
            found[task.name] = evaluate_zero_shot(encoder, task, run.config.method.prompt_average).metrics
        shown = {"i2t_recall_at_1": "R@1 i2t", "t2i_recall_at_1": "t2i", "acc1": "zero-shot"}
        run.journal.evaluated(done, found, shown)


def save_if_due(run: Run, done: int, stop: StopRequest) -> None:
    """Writes a checkpoint every run.save_every steps, at the end, and when asked to stop. Call on every process.

    Args:
        run: whose weights to save.
        done: updates made.
        stop: whether a signal has asked the run to end.
    Raises:
        Stopped: after the checkpoint, if it has.
        CheckpointError: see save_checkpoint.
    """
    journal, every, keep = run.journal, run.config.run.save_every, run.config.run.keep_checkpoints
    asked_to_stop = stop.agreed(run.accelerator.device)
    if done == run.steps or asked_to_stop or (every and done % every == 0):
        state = {**run.state, **journal.state(done)}
        save_checkpoint(run.files.checkpoints, done, run.model, run.optimizer.optimizer, state, keep)
    if done == run.steps or asked_to_stop:
        journal.progress.close()
    if asked_to_stop:
        raise Stopped.at(done, run.steps, run.files.folder)
