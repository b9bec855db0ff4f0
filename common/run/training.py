"""What every train.py opens before its loop and keeps beside it; loss, steps and their order stay in train.py."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from common.data.pairs import (
    Batch,
    EvaluationSets,
    Pairs,
    TrainingView,
    build_tokenizer,
    image_transform,
    lost_at_open,
    open_evaluation_sets,
    open_training_pairs,
    open_validation_pairs,
    training_batches,
)
from common.data.text import tokenizer_from_json
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform, normalize
from common.encoders.two_towers import TwoTowers
from common.evaluation.embed import Encoder, evaluate_retrieval
from common.info_nce import QueuedPairs
from common.run.checkpoint import Checkpoint, save_checkpoint
from common.run.config import OptimConfig, entry_arguments, to_dict
from common.run.diagnosis import Watch, at_bound, diagnose, loss_over_chance
from common.run.log import RunLog
from common.run.order import BatchPositions, SampleOrder
from common.run.session import (
    BrokenLog,
    RunFiles,
    StepClock,
    check_finite_gradient,
    chosen_files,
    only_run_in,
    prepare,
    save_config,
    start_accelerator,
)
from common.run.stop import Stopped, StopRequest
from common.run.utilisation import Utilisation


def train_main(
    description: str,
    script: Path,
    config_class: type,
    default_row: str,
    train: Callable[[Any, Pairs, RunFiles, bool, Accelerator, str], None],
) -> None:
    """The command line of a train.py: config, data, folder of the run, Accelerate; then `train`.

    Args:
        description: its docstring, for --help.
        script: the train.py itself; its folder's name is the paper's.
        config_class: the paper's dataclass.
        default_row: file in the folder's configs/ that is trained without --config.
        train: (config, pairs, files, resume, accelerator, label).
    """
    paper = script.resolve().parent
    config, arguments = entry_arguments(description, paper, config_class, default_row)
    pairs = open_training_pairs(config.data, config.run.seed)
    files = chosen_files(script, arguments, config, pairs.fingerprint)
    accelerator = start_accelerator(config.run, files.folder)
    accelerator.print(
        f"{paper.name}, {arguments.row}, scale {arguments.scale}, seed {config.run.seed} -> {files.folder}"
    )
    with only_run_in(files) if accelerator.is_main_process else nullcontext():
        train(config, pairs, files, arguments.resume, accelerator, arguments.row)


@dataclass(frozen=True)
class TrainingData:
    """What a run trains and is evaluated on, and how pixels and words become tensors.

    pairs: the training set. order: which sample stands at which position.
    tokenizer, transform: the same for training and evaluation; a checkpoint carries both.
    validation_pairs: ranked during training; None where run.evaluate_every is 0.
    evaluation_sets: of the end, opened now so that a missing one is known at once.
    """

    pairs: Pairs
    order: SampleOrder
    tokenizer: Tokenizer
    transform: ImageTransform
    validation_pairs: Pairs | None
    evaluation_sets: EvaluationSets

    @property
    def description(self) -> str:
        """The training set in one line, for every result."""
        return f"{self.pairs.name}, {len(self.pairs)} pictures ({self.pairs.fingerprint[:8]})"

    def lost_at_open(self) -> list:
        """Samples that opening alone showed to be broken."""
        return lost_at_open(self.pairs, *self.evaluation_sets.retrieval.values())


def open_training_data(config: Any, pairs: Pairs, checkpoint: Checkpoint | None) -> TrainingData:
    """Everything but the training set itself, which the run's folder depends on and which is open already.

    Args:
        config: of the run.
        pairs: the training set that config.data names.
        checkpoint: brings the tokenizer of a run that goes on; None = a fresh run.
    """
    data, run = config.data, config.run
    if checkpoint is None:
        tokenizer = build_tokenizer(data, pairs)
    else:
        tokenizer = tokenizer_from_json(checkpoint.state["tokenizer"])
    return TrainingData(
        pairs=pairs,
        order=SampleOrder(len(pairs), config.optim.global_batch_size, run.seed),
        tokenizer=tokenizer,
        transform=image_transform(data),
        validation_pairs=open_validation_pairs(data) if run.evaluate_every else None,
        evaluation_sets=open_evaluation_sets(data),
    )


def batches_from(first_step: int, config: Any, training: TrainingData, accelerator: Accelerator):
    """Loader of this process's share of every global batch from a step on; the order depends on the seed alone."""
    view = TrainingView(
        training.pairs, training.order, training.transform, training.tokenizer, config.data.context_length
    )
    positions = BatchPositions(
        training.order, first_step, config.optim.steps, accelerator.process_index, accelerator.num_processes
    )
    return training_batches(view, positions, config.run.num_workers, pin_memory=accelerator.device.type == "cuda")


def as_inputs(batch: Batch, transform: ImageTransform, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 3, size, size) normalised pixels and (batch, context_length) ids, on the device."""
    images = normalize(batch.images.to(device, non_blocking=True), transform.mean, transform.std)
    return images, batch.token_ids.to(device, non_blocking=True)


def utilisation_of(model: nn.Module, config: Any, accelerator: Accelerator) -> Utilisation:
    """Counts what one pair costs; call before Accelerate prepares the model."""
    one_pair = (
        torch.empty(1, 3, config.data.image_size, config.data.image_size, device="meta"),
        torch.zeros(1, config.data.context_length, dtype=torch.long, device="meta"),
    )
    return Utilisation(model, one_pair, accelerator.device, accelerator.mixed_precision, accelerator.num_processes)


def prepare_or_resume(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint | None
) -> tuple[Any, Any, int]:
    """Accelerate's prepare, with weights and optimiser of the checkpoint if there is one.

    Returns:
        Model and optimiser as Accelerate wraps them, and the number of updates made so far.
    """
    if checkpoint is not None:
        checkpoint.load_model(model)
    model, optimizer = prepare(accelerator, model, optimizer)
    if checkpoint is None:
        return model, optimizer, 0
    checkpoint.load_optimizer(model, optimizer.optimizer)
    return model, optimizer, checkpoint.state["step"]


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


def clip_gradient(accelerator: Accelerator, model: nn.Module, optim: OptimConfig, step: int) -> float:
    """Scales the gradient down to optim.max_gradient_norm where it is longer.

    Returns:
        Its norm before that.
    Raises:
        NonFiniteLoss: if the norm is not finite.
    """
    # an infinite bound measures the norm and changes nothing
    max_norm = math.inf if optim.max_gradient_norm is None else optim.max_gradient_norm
    gradient_norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))
    check_finite_gradient(gradient_norm, step)
    return gradient_norm


class Journal:
    """What a run writes down while it trains: log, progress bar, tracker, broken samples, speed.

    Args:
        files: of the run.
        config, training: of the run.
        accelerator: the main process writes.
        utilisation: turns speed into a share of the device's arithmetic.
        checkpoint: that the run goes on from, or None.
        label: name on the progress bar.
    """

    def __init__(
        self,
        files: RunFiles,
        config: Any,
        training: TrainingData,
        accelerator: Accelerator,
        utilisation: Utilisation,
        checkpoint: Checkpoint | None,
        label: str,
    ) -> None:
        self.files, self.config, self.accelerator, self.utilisation = files, config, accelerator, utilisation
        if accelerator.is_main_process:
            save_config(files, config, training_data=training.description, processes=accelerator.num_processes)
        first_step = 0 if checkpoint is None else checkpoint.state["step"]
        self.log = RunLog(files.log, None if checkpoint is None else first_step, accelerator.is_main_process)
        self.broken = BrokenLog(
            self.log,
            config.data.max_broken_share,
            training.lost_at_open(),
            None if checkpoint is None else checkpoint.state["broken"],
        )
        self.log.write("utilisation", step=first_step, **utilisation.describe())
        self.first_step = first_step
        self.clock = StepClock(config.optim.global_batch_size)
        self.watch = Watch(config.optim.warmup_steps, None if checkpoint is None else checkpoint.state.get("watch"))
        self.progress = tqdm(
            total=config.optim.steps,
            initial=first_step,
            desc=label,
            unit="step",
            disable=not accelerator.is_main_process,
        )

    def steps(self, batches) -> Iterator[tuple[int, Batch]]:
        """(updates made before, batch) of every step that is left."""
        return enumerate(self.clock.timed(batches), start=self.first_step)

    def logs_at(self, done: int) -> bool:
        """Whether the log has a line after so many updates."""
        return done % self.config.run.log_every == 0 or done == self.config.optim.steps

    def diagnoses_at(self, done: int) -> bool:
        """Whether that line is diagnosed: the first one in every run.diagnose_every steps, and the last of the run."""
        run = self.config.run
        if not run.diagnose_every or not self.logs_at(done):
            return False
        line_before = (done - 1) // run.log_every * run.log_every
        return done // run.diagnose_every > line_before // run.diagnose_every or done == self.config.optim.steps

    def diagnosis(
        self,
        step: int,
        batch: Batch,
        model: TwoTowers,
        image_embeddings: torch.Tensor,
        text_embeddings: torch.Tensor,
        loss: float,
        logit_scale: float,
        queue: QueuedPairs | None = None,
    ) -> dict[str, float]:
        """Further values for `step_done`, see common/run/diagnosis.py, with a warning where they call for one.

        Call in every step on every process, after backward and before the gradient is clipped; most steps look at loss
        and logit scale alone.

        Args:
            step: updates made before.
            batch, image_embeddings, text_embeddings: of this process.
            model: unwrapped.
            loss: over all processes.
            logit_scale: of this step.
            queue: further candidates of the loss.
        """
        done, ratio = step + 1, loss_over_chance(loss, len(image_embeddings), queue)
        self.watch.count(done, ratio, at_bound(model.logit_scale, logit_scale))
        values = {"loss_over_chance": ratio, **self.watch.read()} if self.logs_at(done) else {}
        if self.diagnoses_at(done):
            embeddings = (image_embeddings, text_embeddings)
            values |= diagnose(model, *embeddings, logit_scale, batch.token_ids, batch.image_index)
        for text in self.watch.warnings(done, loss, values):
            self.log.write("warning", step=done, text=text)
            if self.accelerator.is_main_process:
                self.progress.write(text, file=sys.stderr)
        return values

    def step_done(self, done: int, batch: Batch, **values: float) -> None:
        """Takes in one step, and writes its values every run.log_every steps. Call on every process.

        Args:
            done: updates made.
            batch: of this process.
            values: of this step over all processes, the loss among them.
        Raises:
            TooManyBroken: see BrokenLog.
        """
        self.broken.collect(batch.broken, seen=len(batch.image_ids))
        self.progress.update()
        if not self.logs_at(done):
            return
        speed = self.clock.read()
        record = {
            "step": done,
            "samples_seen": done * self.config.optim.global_batch_size,
            **values,
            **speed,
            "model_flops_utilisation": self.utilisation.share(speed["samples_per_second"]),
        }
        self.log.write("train", **record)
        self.broken.write_new(done)
        self.accelerator.log(record, step=done)
        shown = {"loss": f"{values['loss']:.3f}"}
        if "logit_scale" in values:
            shown["scale"] = f"{values['logit_scale']:.1f}"
        self.progress.set_postfix(shown)


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
