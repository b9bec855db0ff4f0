"""Records of a run while it trains: log, curves, progress bar, tracker, broken samples, speed."""

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from common.base.config import to_dict
from common.base.fields import flattened
from common.data.broken import BrokenSample, BrokenSamples
from common.data.loader import usable_cores
from common.diagnosis import Watch
from common.distributed import gather_objects
from common.run.checkpoint import Checkpoint
from common.run.folder import RunFiles
from common.run.inputs import Training, validates
from common.run.log import RunLog, read_log

WAIT_SHARE = 0.25  # of the time that steps take; a run that waits longer for data is warned of once
WAIT_STEPS = 50

# of a step's values, what the progress bar shows: name, short name, format
_SHOWN = (("loss", "loss", ".3f"), ("logit_scale", "scale", ".1f"), ("projection_channel_std", "std", ".3f"))


class BrokenLog:
    """Counts the broken samples of all processes, names them in the log, and stops above a share.

    Args:
        at_open: samples that could not be indexed; logged at once.
        counted: `counts()` of a checkpoint; None = a fresh run.
    """

    def __init__(
        self,
        log: RunLog,
        max_share: float,
        at_open: list[BrokenSample],
        counted: dict[str, int] | None = None,
    ) -> None:
        self.log = log
        self.new: list[BrokenSample] = []  # of this process, since the last line in the log
        self.good = 0  # likewise
        self.samples = BrokenSamples(max_share=max_share)  # of all processes, up to the last line
        # a resumed run continues the counts, so that its share is that of the whole run
        if counted is not None:
            self.samples.seen, self.samples.count = counted["seen"], counted["broken"]
        if at_open and log.enabled:
            record = {
                "event": "broken", "step": 0, "count": len(at_open), "samples": [str(sample) for sample in at_open]
            }  # fmt: skip
            if record not in read_log(log.path):  # a resumed run has it already
                log.write(**record)

    def collect(self, broken: list[BrokenSample], seen: int) -> None:
        self.new += broken
        self.good += seen

    def write_new(self, step: int) -> None:
        """Logs the broken samples since the last call; call on every process, before a checkpoint too."""
        new = []
        # counts of all processes, so that all of them stop at the same step
        for good, broken in gather_objects((self.good, self.new)):
            self.samples.saw(good)
            for sample in broken:
                self.samples.record(sample)
                new.append(str(sample))
        self.new, self.good = [], 0
        if new:
            self.log.write("broken", step=step, count=len(new), samples=new)

    def counts(self) -> dict[str, int]:
        """For the checkpoint, of all processes, up to the last `write_new`."""
        return {"seen": self.samples.seen, "broken": self.samples.count}


class StepClock:
    """Samples per second, and the share of the time that the loop waits for data."""

    def __init__(self, global_batch_size: int) -> None:
        self.global_batch_size = global_batch_size
        self._window = (0, 0.0, 0.0)  # steps, seconds, seconds of waiting since the last `long_wait`
        self._restart()

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        batches = iter(batches)
        self._restart()
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._paused:
                self._restart()
            else:
                self._waited += time.perf_counter() - asked
            yield batch
            self._steps += 1

    def read(self) -> dict[str, float]:
        """Figures since the last reading; call once in a step, after its update."""
        elapsed = time.perf_counter() - self._start
        figures = {
            "samples_per_second": (self._steps + 1) * self.global_batch_size / elapsed,
            "data_wait_share": self._waited / elapsed,
        }
        now = (self._steps + 1, elapsed, self._waited)
        self._window = tuple(before + more for before, more in zip(self._window, now))
        self._restart()
        self._steps = -1  # the step that reads is counted when the next batch is asked for
        return figures

    def long_wait(self) -> float:
        """Share of the time of at least `WAIT_STEPS` read steps spent waiting for data; 0 up to `WAIT_SHARE`."""
        steps, elapsed, waited = self._window
        if steps < WAIT_STEPS:
            return 0.0
        self._window = (0, 0.0, 0.0)
        return waited / elapsed if waited > WAIT_SHARE * elapsed else 0.0

    def pause(self) -> None:
        """The time until the next step does not count."""
        self._paused = True

    def _restart(self) -> None:
        self._start, self._waited, self._steps, self._paused = time.perf_counter(), 0.0, 0, False


class _Notes(logging.Handler):
    # Announces what the code of a step logs through `logging`, each text once.

    def __init__(self, announce: Callable[..., None]) -> None:
        super().__init__(logging.INFO)
        self.announce, self.texts = announce, set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.texts:
            self.texts.add(text)
            self.announce("note", text, text=text)


class Journal:
    """Only the main process writes."""

    def __init__(
        self,
        files: RunFiles,
        config: Any,
        training: Training,
        accelerator: Accelerator,
        checkpoint: Checkpoint | None,
        label: str,
        steps: int,
    ) -> None:
        self.config, self.accelerator, self.num_steps = config, accelerator, steps
        # log, counts and warnings continue where the checkpoint was written
        before = {} if checkpoint is None else checkpoint.state
        self.first_step = before.get("step", 0)
        self.done = self.first_step  # updates
        self.files = files
        self.log = RunLog(files.log, before.get("step"), accelerator.is_main_process)
        self.tracker_run = before.get("tracker_run") or uuid.uuid4().hex[:12]
        self._start_trackers()
        self.broken = BrokenLog(self.log, config.data.max_broken_share, training.lost_at_open(), before.get("broken"))
        self.clock = StepClock(config.optim.global_batch_size)
        self.watch = Watch(config.optim.warmup_steps, before.get("watch"))
        self._warned_of_wait = False
        self.beside_bar: dict[str, str] = {}  # the newest values
        self._undrawn = False  # whether the log has lines that the curves lack
        self._cannot_draw = False
        hidden = not accelerator.is_main_process
        self.progress = tqdm(total=steps, initial=self.first_step, desc=label, unit="step", disable=hidden)
        self._notes = _Notes(self.announce)
        logger = logging.getLogger("common")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._notes)
        if lost := training.lost_at_open():
            self._print(f"samples that cannot be used: {len(lost)}, named in {files.log.name}; the first: {lost[0]}")

    def steps(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """(updates made before, batch) of the remaining steps."""
        return enumerate(self.clock.timed(batches), start=self.first_step)

    def logs_at(self, done: int) -> bool:
        return done % self.config.run.log_every == 0 or done == self.num_steps

    def diagnoses_at(self, done: int) -> bool:
        """Whether a step is diagnosed: at the first line of every run.diagnose_every steps, and at the last."""
        run = self.config.run
        if not run.diagnose_every or not self.logs_at(done):
            return False
        # log lines are rarer than steps: the first line after every multiple of diagnose_every counts
        line_before = (done - 1) // run.log_every * run.log_every
        return done // run.diagnose_every > line_before // run.diagnose_every or done == self.num_steps

    def diagnosed(
        self, done: int, loss: float, ratio: float, is_at_bound: bool, diagnosis: dict[str, float]
    ) -> dict[str, float]:
        """Further values for `step_done`, and warnings. Call in every step on every process.

        Args:
            loss: over all processes. ratio: loss over its chance level.
            diagnosis: of `common.diagnosis.diagnose`, or empty.
        """
        # counted in every step; the log and its warnings read the counts
        self.watch.count(done, ratio, is_at_bound)
        values = {"loss_over_chance": ratio, **self.watch.read(), **diagnosis} if self.logs_at(done) else {}
        for text in self.watch.warnings(done, loss, values):
            self.log.write("warning", step=done, text=text)
            self._print(text)
        return values

    def step_done(self, done: int, batch: Any, values: Mapping[str, Any]) -> None:
        """Counts a step, and writes its values every run.log_every steps. Call on every process.

        Args:
            values: over all processes, with the loss (statistics of GeoMM's pools: of the first process); numbers, or
                tensors without axes.
        Raises:
            TooManyBroken: on every process, if more than the allowed share of all samples is broken.
        """
        self.done = done
        self.broken.collect(batch.broken, seen=len(batch[0]))
        self.progress.update()
        if not self.logs_at(done):
            return
        # only here a value is read from the device
        values = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        speed = self.clock.read()
        self._warn_of_wait(done, self.clock.long_wait())
        samples = done * self.config.optim.global_batch_size
        record = {"step": done, "samples_seen": samples, **values, **speed}
        self.log.write("train", **record)
        self._undrawn = True
        self.broken.write_new(done)
        self.broken.samples.check()
        self.accelerator.log(record, step=done)
        self.beside_bar |= {short: format(values[name], how) for name, short, how in _SHOWN if name in values}
        self.progress.set_postfix(self.beside_bar)

    def _warn_of_wait(self, done: int, share: float) -> None:
        if not share or self._warned_of_wait:
            return
        self._warned_of_wait = True
        data, number = self.config.data, self.config.run.num_workers
        ways = f"more loader processes (run.num_workers, now {'null' if number is None else number}; the trainer has "
        ways += f"{usable_cores()} cores)"
        if data.source != "scenes" and getattr(data, "resize_with", "") == "pillow":
            ways += ", data.resize_with=torchvision"
        text = (
            f"step {done}: training waits for data for {share:.0%} of the time, more than {WAIT_SHARE:.0%} over at "
            f"least {WAIT_STEPS} steps; to wait less: {ways}"
        )
        self.log.write("warning", step=done, text=text)
        self._print(text)

    def evaluates_at(self, done: int) -> bool:
        run = self.config.run
        is_due = bool(run.evaluate_every) and done % run.evaluate_every == 0
        return is_due or (done == self.num_steps and validates(run))

    def lacks_validation(self) -> bool:
        """Whether the step that a resume starts from was to be validated, and the log has nothing of it.

        Call on every process.
        """
        if not self.first_step or not self.evaluates_at(self.first_step):
            return False
        records = read_log(self.log.path) if self.log.enabled else []
        validated = any(record["event"] == "evaluate" and record["step"] == self.first_step for record in records)
        return not gather_objects(validated)[0]

    def evaluated(self, done: int, evaluations: Mapping[str, Mapping[str, float]], shown: Mapping[str, str]) -> None:
        """Records an evaluation during training; its time does not count as steps.

        Args:
            evaluations: name of the data -> metrics, fractions in [0, 1].
            shown: metric -> its name on the screen, in percent.
        """
        self.clock.pause()
        lines = []
        for data, metrics in evaluations.items():
            self.log.write("evaluate", step=done, data=data, metrics=metrics)
            self.accelerator.log({f"{data}/{metric}": value for metric, value in metrics.items()}, step=done)
            percent = {name: f"{100 * metrics[metric]:.1f}" for metric, name in shown.items() if metric in metrics}
            self.beside_bar |= percent
            lines.append(f"{data} {', '.join(f'{name} {value} %' for name, value in percent.items())}")
        self.progress.set_postfix(self.beside_bar)
        if lines:
            self._print(f"step {done}: {'; '.join(lines)}")
        self._undrawn = True
        self.draw()

    def state(self, done: int) -> dict[str, Any]:
        """For the checkpoint, which is written next and whose time does not count. Call on every process."""
        self.clock.pause()
        self.broken.write_new(done)
        tracked = {"tracker_run": self.tracker_run} if self.accelerator.trackers else {}
        return {"broken": self.broken.counts(), "watch": self.watch.state(), **tracked}

    def draw(self) -> None:
        """Rewrites curves.png if the log has new lines; a failure never ends the run."""
        if not (self._undrawn and self.accelerator.is_main_process):
            return
        self._undrawn = False
        try:
            from common.run.curves import plot_run  # imports matplotlib, which the first step need not wait for

            title = f"{self.files.title}: step {self.done:,} of {self.num_steps:,}"
            plot_run(read_log(self.files.log), self.files.curves, title)
        except Exception as error:
            if not self._cannot_draw:
                text = f"cannot draw {self.files.curves}: {error!r}; training continues without it"
                self.log.write("warning", step=self.done, text=text)
                self._print(text)
            self._cannot_draw = True

    def close(self) -> None:
        logging.getLogger("common").removeHandler(self._notes)
        self.progress.close()
        self.draw()

    def announce(self, event: str, text: str, /, **facts: Any) -> None:
        """Writes facts into the log and a sentence onto the screen, before the first step."""
        self.log.write(event, step=self.first_step, **facts)
        self._print(text)

    def _start_trackers(self) -> None:
        # A tracker continues the curves of the run that is resumed, at the step of the checkpoint.
        options = {
            "tensorboard": {"purge_step": self.first_step + 1},  # hides what an earlier process wrote from there on
            # takes no step twice
            "wandb": {"id": self.tracker_run, "name": "/".join(self.files.folder.parts[-2:]), "resume": "allow"},
            "trackio": {"name": self.tracker_run, "resume": "allow"},
        }
        # TensorBoard would show another run for them at each start; config.yaml lies beside its folder
        settings = None if self.config.run.tracker == "tensorboard" else flattened(to_dict(self.config))
        project = "contrastive-geometry"
        if self.config.run.tracker == "wandb":  # a name that is passed would win over W&B's variable
            project = os.environ.get("WANDB_PROJECT", project)
        self.accelerator.init_trackers(project, config=settings, init_kwargs=options)

    def _print(self, text: str) -> None:
        if self.accelerator.is_main_process:
            self.progress.write(text, file=sys.stderr)
