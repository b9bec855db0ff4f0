"""A run: opened, trained step by step, evaluated. Losses and what comes between steps stay in a paper's train.py.

    with opened(SETUP, config, pairs, files, resume, accelerator, label) as run:
        for step in run.steps():
            image_embeddings, text_embeddings, logit_scale = step.embed(step.images, step.token_ids)
            loss = ...
            step.backward(loss)
            step.update()
        run.evaluate(MODELS)

When the loop asks for the next step, the one before is logged, validated and saved, with what the loop did after
`update` (keys into a queue, a momentum encoder).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.swa_utils import AveragedModel

from common.accumulation import MicroBatches
from common.base.config import ConfigError, to_dict
from common.base.dependencies import loaded_files
from common.base.signals import Stopped, is_stop_requested, stop_signals
from common.data.broken import TooManyBroken
from common.data.loader import NoBatch
from common.distributed import any_process, world_size
from common.evaluation.embed import Encoder, evaluate_retrieval, evaluate_zero_shot
from common.run.checkpoint import Checkpoint, save_checkpoint, saved_step
from common.run.compilation import compile_towers_
from common.run.dry_run import measured_steps
from common.run.ema import averaged
from common.run.ending import agreed, ending
from common.run.evaluation import TrainedModels, evaluate_and_save
from common.run.evaluation_files import save_validation
from common.run.folder import RunFiles, checkpoint_to_resume, provenance_of, save_config, save_dependencies
from common.run.initial import InitialWeights, start_text
from common.run.inputs import Training, TrainingData, batches_from, open_training_data, validates
from common.run.journal import Journal
from common.run.launch import command_to_resume, end_run, prepare, seed_step
from common.run.readme import write_readme
from common.run.schedule import build_optimizer, set_rate
from common.run.sources import initial_fingerprints
from common.run.step import Step
from common.sharded import copy_whole_


@dataclass
class Run:
    """What a loop works with while it trains.

    num_steps: updates of the whole run.
    training: of `Setup.open_training`, with cached features if the model has a frozen stem.
    model, optimizer: as Accelerate wraps them. bare_model: unwrapped.
    state: JSON content of a checkpoint.
    provenance: of the code when the run was opened.
    whole_copy: of a model that FSDP2 has sharded, for evaluations.
    average: of the weights (optim.ema), for evaluations; None = there is none.
    """

    setup: "Setup"
    config: Any
    files: RunFiles
    num_steps: int
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
    whole_copy: nn.Module | None = None
    average: AveragedModel | None = None
    validation: Mapping[str, Mapping[str, float]] | None = None  # of the last validation in this process
    _is_validating: bool = False

    @property
    def is_fresh(self) -> bool:
        return self.journal.first_step == 0

    def steps(self) -> Iterator[Step]:
        """The remaining steps. Call on every process.

        Raises:
            Stopped: after a signal, when a checkpoint is saved.
            NoBatch: no further batch comes, or too many samples are broken; what was trained is saved.
            CheckpointError, NonFiniteLoss: see `save_checkpoint`, `Step.update`.
            Measured: of a dry run, after a few steps.
        """
        if self.files.is_dry:
            yield from measured_steps(self)
        done = self.journal.first_step
        try:
            if self.journal.lacks_validation():  # a stop came before it
                self._validate(done)
            for number, batch in self.journal.steps(self.batches):
                step = self.step(number, batch)
                yield step
                done = number + 1
                # the loop asks for the next step: this one is complete
                if self.average is not None:
                    self.average.update_parameters(self.bare_model)
                self.journal.step_done(done, batch, step.values)
                self._save_if_due(done)  # first: a failure or a kill in the validation loses no step
                # after a signal little time may be left: the run validates when it resumes
                if self.journal.evaluates_at(done) and not self._stops_at(done):
                    self._validate(done)
        except (NoBatch, TooManyBroken) as error:  # what was trained is saved before the run ends
            self.journal.close()
            if self._is_validating and world_size() > 1:  # the other processes are not told, and would not save
                raise
            raise ending(error, done, self.num_steps, self.files, self._save) from error
        # random weights: nothing trains, but an evaluation needs a checkpoint
        if not self.num_steps:
            self._save_if_due(0)
        self.journal.close()

    def step(self, number: int, batch: Any) -> Step:
        # first: dropout of a step must not depend on what ran before it
        seed_step(self.config.run.seed, number)
        return Step(self, number, batch, self.setup.set_rates(self.optimizer, number, self.config.optim))

    @property
    def evaluated_model(self) -> nn.Module:
        if self.average is not None:
            return self.average.module
        return self.bare_model if self.whole_copy is None else self.whole_copy

    @property
    def encoder(self) -> Encoder:
        """The evaluated model with its preprocessing. Call on every process."""
        if self.whole_copy is not None:
            copy_whole_(self.whole_copy, self.bare_model)
        return self._encoder

    @cached_property
    def _encoder(self) -> Encoder:
        return self.setup.build_encoder(self.evaluated_model, self.config, self.training, self.accelerator.device)

    def evaluate(self, models: TrainedModels) -> None:
        """Writes validation.json if the run validates; evaluation.json, hits.json with run.test. On every process."""
        self.save_validation()
        sets, steps = self.training.evaluation_sets, self.num_steps
        if self.config.run.test:
            evaluate_and_save(models, self.config, self.encoder, sets, self.files, steps, self.state, self.provenance)

    def save_validation(self) -> None:
        """Writes the metrics of the last step on the validation sets, if any. Call on every process."""
        if not validates(self.config.run):
            return
        if self.validation is None:  # the last step was made by an earlier process
            self.validation, _ = self.setup.validate(self)
        further = self.setup.validate_last(self)
        metrics = {data: {**numbers, **further.get(data, {})} for data, numbers in self.validation.items()}
        sets, steps = self.training.validation_sets, self.num_steps
        save_validation(self.setup.paper, metrics, sets, self.files, steps, self.state, self.provenance)

    def _stops_at(self, done: int) -> bool:
        # Whether a signal ends the run before another step.
        return done < self.num_steps and any_process(is_stop_requested(), self.accelerator.device)

    def _validate(self, done: int) -> None:
        self._is_validating = True
        self.validation, shown = self.setup.validate(self)
        self.journal.evaluated(done, self.validation, shown)
        self._is_validating = False

    def _save_if_due(self, done: int) -> None:
        # Saves every run.save_every steps and at the end.
        every = self.config.run.save_every
        if done == self.num_steps or (every and done % every == 0):
            self._save(done)

    def _save(self, done: int) -> None:
        state = {**self.state, **self.journal.state(done)}
        optimizer, keep = self.optimizer.optimizer, self.config.run.keep_checkpoints
        save_dependencies(self.files, is_fresh=False)
        average = None if self.average is None else self.average.module
        save_checkpoint(self.files.checkpoints, done, self.model, optimizer, state, keep, average)


def encoder_of(model: nn.Module, config: Any, training: TrainingData, device: torch.device) -> Encoder:
    """The unwrapped model with its preprocessing, for evaluations."""
    return Encoder(
        model,
        training.transform,
        training.tokenizer,
        config.data.context_length,
        config.run.evaluation_batch_size,
        device,
        config.run.num_workers,
        training.cache,
        config.run.ranking_gb,
        config.data.max_broken_share,
    )


def validate_pairs(run: Run) -> tuple[dict[str, Mapping[str, float]], dict[str, str]]:
    """Ranks the validation pairs, and classifies a labelled set if there is one.

    Returns:
        Name of the data -> metrics, and their chance levels as chance_<metric>; metric -> its name on the screen.
    """
    pairs, task = run.training.validation_pairs, run.training.validation_task
    results = {pairs.name: evaluate_retrieval(run.encoder, pairs)}
    if task is not None:
        results[task.name] = evaluate_zero_shot(run.encoder, task, run.config.method.prompt_average)
    metrics = {
        name: result.metrics | {f"chance_{metric}": level for metric, level in result.chance.items()}
        for name, result in results.items()
    }
    return metrics, {"i2t_recall_at_1": "R@1 i2t", "t2i_recall_at_1": "t2i", "acc1": "zero-shot"}


@dataclass(frozen=True)
class Setup:
    """How the runs of a train.py are made: the parts that differ between papers.

    build_model: (config, training) -> model with weights drawn from the run's seed.
    start: (model, config) fills the model of a fresh run from other runs, before it is wrapped or sharded; returns
        events of the log: name, text, facts.
    open_training: (config, data_set, checkpoint or None) -> see `Training`.
    set_rates: (optimizer, step, config.optim) -> learning rate of the step, for the log.
    prepare: (accelerator, model, optimizer) -> both as Accelerate wraps them.
    build_encoder: (model, config, training, device) -> see `encoder_of`.
    validate: (run) -> see `validate_pairs`; every run.evaluate_every steps and after the last one.
    validate_last: (run) -> name of the data -> further metrics, after the last step alone.
    num_steps: updates of a run.
    """

    paper: str
    build_model: Callable[[Any, Any], nn.Module]
    start: Callable[[Any, Any], Sequence[tuple[str, str, Mapping[str, Any]]]] = lambda model, config: ()
    open_training: Callable[..., Training] = open_training_data
    build_optimizer: Callable[[nn.Module, Any], torch.optim.Optimizer] = build_optimizer
    set_rates: Callable[[torch.optim.Optimizer, int, Any], float] = set_rate
    prepare: Callable[..., tuple[Any, Any]] = prepare
    build_encoder: Callable[..., Encoder] = encoder_of
    validate: Callable[[Run], tuple[dict[str, Mapping[str, float]], dict[str, str]]] = validate_pairs
    validate_last: Callable[[Run], Mapping[str, Mapping[str, float]]] = lambda run: {}
    num_steps: Callable[[Any], int] = lambda config: config.optim.steps


@contextmanager
def opened(
    setup: Setup, config: Any, data_set: Any, files: RunFiles, resume: bool, accelerator: Accelerator, label: str
) -> Iterator[Run]:
    """A run, fresh or resumed, while it trains: within it a signal waits for the end of a step.

    Args:
        config: with the sections data, optim and run.
    """
    # what the run is made from
    provenance = provenance_of()
    loaded_files("weights", "evaluation")  # their hashes are those of now, whatever is edited meanwhile
    try:
        initial = InitialWeights.opened(config)
    except (OSError, ValueError) as error:
        if resume and saved_step(files.checkpoints) is not None:
            text = f"{error}; the run in {files.folder} began with these weights, and needs them to resume"
            raise ConfigError(text) from error
        raise
    config = initial.resolved(config)
    checkpoint = checkpoint_to_resume(files, resume, config, data_set.fingerprint)
    training = setup.open_training(config, data_set, checkpoint)

    # model and optimiser; weights go in before the model is wrapped or sharded, the optimiser's state after
    model, events = _initial_model(setup, config, training, initial, checkpoint)
    optimizer = setup.build_optimizer(model, config.optim)
    if checkpoint is not None:
        checkpoint.load_model(model, is_online=True)
    whole_copy = copy.deepcopy(model) if accelerator.distributed_type == DistributedType.FSDP else None
    compile_towers_(model, config.optim.compile)
    model, optimizer = setup.prepare(accelerator, model, optimizer)
    if checkpoint is not None:
        checkpoint.load_optimizer(model, optimizer.optimizer)
    # features are cached last, when the stem has its weights and its device
    bare_model = accelerator.unwrap_model(model)
    if whole_copy is not None:
        whole_copy.to(accelerator.device)
    training = training.with_features(whole_copy or bare_model, config, accelerator.device)
    average = averaged(bare_model, config, checkpoint)

    # what it writes
    save_dependencies(files, is_fresh=checkpoint is None)
    num_steps = setup.num_steps(config)
    journal = Journal(files, config, training, accelerator, checkpoint, label, num_steps)
    for event, text, facts in events:
        journal.announce(event, text, **facts)
    if average is not None and checkpoint is None:
        text = f"evaluations and model.safetensors: moving average of the weights, decay {config.optim.ema}"
        journal.announce("ema", text, decay=config.optim.ema)
    facts = {
        "paper": setup.paper,
        "config": to_dict(config),
        "data_fingerprint": data_set.fingerprint,
        "training_data": training.description,
        "precision": _in_turn("precision", accelerator.mixed_precision, checkpoint),
        "processes": _in_turn("processes", str(accelerator.num_processes), checkpoint),
        "initial_weights": initial_fingerprints(config),
    }
    if accelerator.is_main_process:
        save_config(files, config, training_data=training.description, processes=facts["processes"])
    state = facts | _code_facts(provenance, checkpoint) | training.state(bare_model)
    # an evaluation or a cached stem may have left it in evaluation mode
    model.train()
    write_readme(files, state, bare_model, num_steps, command_to_resume(""))
    with stop_signals() as stop, closing(journal):
        yield Run(
            setup=setup,
            config=config,
            files=files,
            num_steps=num_steps,
            accelerator=accelerator,
            training=training,
            model=model,
            bare_model=bare_model,
            optimizer=optimizer,
            micro_batches=MicroBatches(accelerator, model, getattr(config.optim, "micro_batch_size", None)),
            batches=agreed(
                batches_from(journal.first_step, config, training, accelerator, num_steps), stop, accelerator.device
            ),
            journal=journal,
            state=state,
            provenance=provenance,
            whole_copy=whole_copy,
            average=average,
        )
    write_readme(files, state, bare_model, num_steps, command_to_resume(""), is_finished=True)
    end_run(accelerator)
    if any_process(stop.received, accelerator.device):  # during the evaluation: a table must not begin its next row
        raise Stopped(f"received a stop signal: finished and evaluated, results in {files.folder}")


def _initial_model(
    setup: Setup, config: Any, training: Training, initial: InitialWeights, checkpoint: Checkpoint | None
) -> tuple[nn.Module, list[tuple[str, str, Mapping[str, Any]]]]:
    # The model, and what a fresh run announces.
    torch.manual_seed(config.run.seed)  # the seed draws the weights, whatever opening the data has drawn
    model = setup.build_model(config, training)
    # also where a checkpoint follows: it locks parameters
    facts = initial.start_(model, config, training.tokenizer) if initial.of else {}
    if checkpoint is not None:
        return model, []
    initial.load_stems_(model, config, getattr(training, "tokenizer", None))
    events = [("initial_weights", start_text(facts), facts)] if facts else []
    return model, [*events, *setup.start(model, config)]


def _in_turn(key: str, now: str, checkpoint: Checkpoint | None) -> str:
    # what all processes of a run had, in order
    before = now if checkpoint is None else checkpoint.state.get(key, "not known")
    return before if before.rpartition(", then ")[2] == now else f"{before}, then {now}"


def _code_facts(provenance: dict[str, str], checkpoint: Checkpoint | None) -> dict[str, str]:
    # Revision at the start of a run, and the libraries of all its processes in order.
    revision = provenance["git_revision"] if checkpoint is None else checkpoint.state["training_revision"]
    return {
        "training_revision": revision,
        "training_versions": _in_turn("training_versions", provenance["versions"], checkpoint),
    }
