"""What every train.py does before and around its loop: Accelerate, the run's folder, guards against lost runs."""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from common.data.broken import BrokenSample, BrokenSamples, TooManyBroken
from common.data.pairs import build_tokenizer
from common.distributed import gather_objects, is_main_process, leave_process_group, rank, wait_for_everyone
from common.encoders.two_towers import TwoTowers
from common.random_keys import derive_key
from common.run.checkpoint import Checkpoint, has_checkpoints, last_checkpoint, set_aside_later
from common.run.config import ConfigError, DataConfig, RunConfig, to_dict
from common.run.log import RunLog, read_log
from common.run.provenance import ROOT, code_fingerprint, git_revision, hardware, hash_of, imported_files
from common.run.stop import STOPPED_EXIT_STATUS, Stopped

# What decides no weight: a run may go on with other values, and its key leaves them out. Data are known by fingerprints
# instead (of names and captions, not of pixels), and evaluated again where those of the tests have changed.
MAY_CHANGE = (
    "data.root",
    "data.train",
    "data.val",
    "data.test",
    "data.second_test",
    "data.images",
    "data.labelled",
    "data.winogavil",
    "data.averages",
    "data.vocabulary",  # the key holds what it says, and a checkpoint brings its tokenizer
    "data.max_broken_share",
    "optim.micro_batch_size",
    "optim.loss_tile",
)  # and all of `run` but the seed

# Code that decides no weight either: it evaluates, measures or writes. What a log holds was measured by the code of its
# day; the evaluation of the end is made again after a change (`evaluation_code`).
NOT_IN_KEY = (
    "common/evaluation/",
    "common/run/diagnosis.py",
    "common/run/log.py",
    "common/run/utilisation.py",
    "common/data/scenes/tasks/",
)
NOT_IN_KEY_OF_PAIRS = ("common/data/labelled.py", "common/data/class_names.py")  # pretrain.py trains on labelled sets


class NonFiniteLoss(ArithmeticError):
    """Training met NaN or infinity and stopped before the step could spoil the weights."""


@dataclass(frozen=True)
class RunFiles:
    """Where one run (a row, a scale, a seed) keeps its files."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation.json"

    @property
    def hits(self) -> Path:
        return self.folder / "hits.json"


def run_key(script: Path, config: Any, data_fingerprint: str) -> str:
    """Cache key of a training run: resolved config, data and the code that trains. A stale run has another key.

    Args:
        script: that trains, e.g. oblique_topology/train.py; what it imports counts, but for NOT_IN_KEY and the paper's
            evaluate.py and vision_evaluate.py.
        config: of the run.
        data_fingerprint: of the training set.
    Raises:
        ValueError: if data.vocabulary cannot be read.
    """
    paper, data = script.resolve().parent.name, config.data
    leave_out = (*NOT_IN_KEY, f"{paper}/evaluate.py", f"{paper}/vision_evaluate.py")
    content = _what_decides(to_dict(config))
    # in the key though a run may go on with another one: a launch may say it, and the results are two
    content["precision"] = config.run.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if isinstance(data, DataConfig):
        leave_out += NOT_IN_KEY_OF_PAIRS
        if data.tokenizer != "words":  # those are counted in the training set
            content["tokenizer"] = build_tokenizer(data, training_pairs=None).fingerprint
    code = code_fingerprint(imported_files(script, leave_out))
    return hash_of({"config": content, "data": data_fingerprint, "code": code})


def evaluation_code(paper: str, script: str = "evaluate.py") -> str:
    """Hash of the code that an evaluation depends on: what a script of the paper's folder imports, but for reports."""
    return code_fingerprint(imported_files(ROOT / paper / script, ("common/report/",)))[:12]


def provenance_of(paper: str, script: str = "evaluate.py") -> dict[str, str]:
    """Revision, evaluation code (arguments as above) and machine of a run; taken once at its start."""
    return {"git_revision": git_revision(), "evaluation_code": evaluation_code(paper, script), "hardware": hardware()}


def run_files(
    script: Path, row: str, scale: str, config: Any, data_fingerprint: str, runs: Path = ROOT / "outputs" / "runs"
) -> RunFiles:
    """Folder of a run, named by its cache key, below the folder of all runs; arguments as in `run_key`."""
    name = f"{row}-{scale}-{run_key(script, config, data_fingerprint)}"
    return RunFiles(runs / script.resolve().parent.name / name / f"seed{config.run.seed}")


def chosen_files(script: Path, arguments: argparse.Namespace, config: Any, data_fingerprint: str) -> RunFiles:
    """Where a train.py writes, as its command line says.

    Args:
        script, config, data_fingerprint: as in `run_key`.
        arguments: of `entry_arguments`.
    Raises:
        ConfigError: --resume where no checkpoint is: a fresh run would be no resume.
    """
    if arguments.output_dir is not None:
        files = RunFiles(Path(arguments.output_dir))
    else:
        files = run_files(script, arguments.row, arguments.scale, config, data_fingerprint)
    if arguments.resume and not has_checkpoints(files.checkpoints):
        raise ConfigError(
            f"--resume: {files.folder} holds no checkpoint. Another config, data or code has another folder; accepted: "
            "--output-dir with the folder of the run, or no --resume for a fresh run"
        )
    return files


def launched_accelerator(**options: Any) -> Accelerator:
    """Accelerator that sees every process that was launched, on a machine without a GPU too.

    Without cpu=True Accelerate takes several launched processes on such a machine for so many single runs. Buffers are
    not broadcast in each forward pass, as DDP does by default: queues are equal on all processes by construction, and
    a momentum encoder's running statistics are its own.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Accelerator(
        cpu=True if several and not torch.accelerator.is_available() else None,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        **options,
    )


def start_accelerator(run: RunConfig, folder: Path) -> Accelerator:
    """Accelerate for launch, device and precision; deterministic algorithms and a tracker if the config says so."""
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it before its first product
        torch.use_deterministic_algorithms(True)
    tracked = run.tracker != "none"
    accelerator = launched_accelerator(
        mixed_precision=run.mixed_precision,
        log_with=run.tracker if tracked else None,
        project_dir=str(folder) if tracked else None,
    )
    if tracked:
        accelerator.init_trackers("contrastive-geometry")
    return accelerator


def prepare(accelerator: Accelerator, model: TwoTowers, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Accelerate's prepare, for a model whose encode methods are called by evaluations."""
    model, optimizer = accelerator.prepare(model, optimizer)
    return with_encode_methods(model), optimizer


def with_encode_methods(model: Any) -> Any:
    """The model; under FSDP2 its two encode methods gather the weights as its forward pass does."""
    if isinstance(model, FSDPModule):
        for method in ("encode_image", "encode_text"):
            register_fsdp_forward_method(model, method)
    return model


def end_run(accelerator: Accelerator) -> None:
    """Closes the trackers. The process group stays: the next row of a table trains in the same processes."""
    for tracker in accelerator.trackers:
        tracker.finish()
    wait_for_everyone()


def save_config(files: RunFiles, config: Any, **provenance: Any) -> None:
    """Writes the resolved config, and where the run comes from as comments above it."""
    files.folder.mkdir(parents=True, exist_ok=True)
    header = {"git_revision": git_revision(), "hardware": hardware(), **provenance}
    lines = "".join(f"# {key}: {value}\n" for key, value in header.items())
    files.config.write_text(lines + yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")


class BrokenLog:
    """Counts the broken samples of all processes, names them in the log, and stops above a share.

    Args:
        log: of the run.
        max_share: of the samples seen; see BrokenSamples.
        at_open: what the training set could not even index; named in the log at once.
        counted: `counts()` as a checkpoint holds them, so that a resumed run judges the whole run; None = a fresh run.
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
        if counted is not None:
            self.samples.seen, self.samples.count = counted["seen"], counted["broken"]
        if at_open and log.enabled:
            record = {
                "event": "broken", "step": 0, "count": len(at_open), "samples": [str(sample) for sample in at_open]
            }  # fmt: skip
            if record not in read_log(log.path):  # a resumed run has it already
                log.write(**record)

    def collect(self, broken: list[BrokenSample], seen: int) -> None:
        """Takes in one batch of this process."""
        self.new += broken
        self.good += seen

    def write_new(self, step: int) -> None:
        """Logs what came up since the last call; call on every process, before a checkpoint too.

        Raises:
            TooManyBroken: on every process, if more than the allowed share of all samples is broken.
        """
        new = []
        for good, broken in gather_objects((self.good, self.new)):
            self.samples.saw(good)
            for sample in broken:
                self.samples.record(sample)
                new.append(str(sample))
        self.new, self.good = [], 0
        if new:
            self.log.write("broken", step=step, count=len(new), samples=new)
        self.samples.check()

    def counts(self) -> dict[str, int]:
        """For the checkpoint: samples seen and broken, over all processes, up to the last `write_new`."""
        return {"seen": self.samples.seen, "broken": self.samples.count}


def seed_step(seed: int, step: int) -> None:
    """Seeds what one step draws on this process (dropout, patch dropout) from (seed, step, process).

    Call it at the start of every step. A resumed run then draws what the unbroken one would have drawn, without a
    saved generator, and whatever an evaluation or a loader drew in between. What is drawn depends on the number of
    processes and on optim.micro_batch_size, since each draws for its own part of the batch. Only torch's generators are
    used in a step (CPU and accelerators alike); Python's and NumPy's are not.
    """
    torch.manual_seed(derive_key("draws of a step", seed, step, rank()))


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    temporary.replace(path)


class StepClock:
    """Samples per second, and the share of the time that the loop waited for data.

    Args:
        global_batch_size: samples of one step over all processes.
    """

    def __init__(self, global_batch_size: int) -> None:
        self.global_batch_size = global_batch_size
        self._restart()

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, with the time spent on getting each one taken down."""
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
        self._restart()
        self._steps = -1  # the step that reads is counted when the next batch is asked for
        return figures

    def pause(self) -> None:
        """What comes between this step and the next (an evaluation, a checkpoint) does not count."""
        self._paused = True

    def _restart(self) -> None:
        self._start, self._waited, self._steps, self._paused = time.perf_counter(), 0.0, 0, False


def checkpoint_to_resume(files: RunFiles, resume: bool, config: Any, data_fingerprint: str) -> Checkpoint | None:
    """The last whole checkpoint if the run is to go on, None for a fresh run. Call on every process.

    Damaged checkpoints of later steps are set aside, with a warning. The number of processes, of loader workers and of
    micro-batches may be another than before.

    Args:
        files: of the run.
        resume: whether the user wants to go on.
        config: as it is now.
        data_fingerprint: of the training set; a checkpoint's state holds it under this name.
    Raises:
        CheckpointError: if there are checkpoints and none is whole.
        ConfigError: if a fresh run would write over one that is there, if the run there has another config or other
            training data, or if the processes do not see the same checkpoint.
    """
    found = last_checkpoint(files.checkpoints)
    steps = gather_objects(None if found is None else found.state["step"])
    if len(set(steps)) > 1:
        raise ConfigError(f"{files.checkpoints} is not the same for all processes (steps {steps}): use a shared disk")
    if found is None:
        return None
    if not resume:
        raise ConfigError(
            f"{files.folder} holds a run up to step {found.state['step']}: add --resume to go on from there, "
            "or choose another --output-dir"
        )
    now = _what_decides(to_dict(config))
    # what the code has learnt since is taken to have had its default
    before = _what_decides(to_dict(type(config)())) | _what_decides(found.state["config"])
    changed = [
        f"{key} {before.get(key)} -> {now.get(key)}" for key in {**before, **now} if before.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(f"{files.folder} holds a run of another config: {'; '.join(changed[:5])}")
    if found.state["data_fingerprint"] != data_fingerprint:
        raise ConfigError(f"{files.folder} holds a run on other training data than data.train and data.root name now")
    if is_main_process():
        set_aside_later(files.checkpoints, found.state["step"])
    return found


def _what_decides(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of the settings that decide a run's weights: all but MAY_CHANGE and how often one writes."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _what_decides(value, f"{name}.")
        elif name == "run.seed" or not (name in MAY_CHANGE or name.startswith("run.")):
            flat[name] = value
    return flat


@contextlib.contextmanager
def only_run_in(files: RunFiles) -> Iterator[None]:
    """Holds the run's folder for this process alone; enter on the main process.

    Raises:
        ConfigError: if another process trains in it.
    """
    files.folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(files.folder / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise ConfigError(f"another process trains in {files.folder}; wait for it or choose another folder") from None


def check_finite_gradient(gradient_norm: float, step: int) -> None:
    """Stops the run before a step with a gradient that is not finite.

    Raises:
        NonFiniteLoss.
    """
    if not math.isfinite(gradient_norm):
        raise NonFiniteLoss(
            f"the gradient norm is {gradient_norm} at step {step}, while the loss is finite; the weights are those "
            "before this step. Try a lower optim.learning_rate."
        )


def check_finite(loss: float, step: int, model: torch.nn.Module, **values: Any) -> None:
    """Stops the run, naming step, scalars and the norms of the weights, if the loss is NaN or infinite.

    Raises:
        NonFiniteLoss.
    """
    if loss == loss and abs(loss) != float("inf"):
        return
    norms = {name: float(parameter.detach().float().norm()) for name, parameter in model.named_parameters()}
    bad = [name for name, norm in norms.items() if not norm < float("inf")]
    largest = sorted(((norm, name) for name, norm in norms.items() if name not in bad), reverse=True)[:3]
    scalars = ", ".join(f"{name} {value}" for name, value in values.items())
    raise NonFiniteLoss(
        f"loss is {loss} at step {step} ({scalars}). Parameters that are not finite: {', '.join(bad[:4]) or 'none'}"
        f"{f' and {len(bad) - 4} more' if len(bad) > 4 else ''}. "
        f"Largest norms: {', '.join(f'{name} {norm:.3g}' for norm, name in largest)}. "
        "Checkpoints are from before this step. Try a lower optim.learning_rate or more optim.warmup_steps."
    )


def run_or_explain(main) -> None:
    """Runs an entry script's main; errors that are the user's to mend are printed as one message, exit status 1.

    A run that a signal has stopped, and that has saved, ends with exit status 143 (see common/run/stop.py).
    """
    try:
        main()
        leave_process_group()
    except Stopped as stopped:
        if is_main_process():
            print(stopped, file=sys.stderr)
        leave_process_group()
        sys.exit(STOPPED_EXIT_STATUS)
    except (ConfigError, NonFiniteLoss) as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # names the file that is missing, not writable, ...
        sys.exit(f"error: {error}")
    except ValueError as error:
        if not _meant_for_user(error):
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint (train.py: add --resume)", file=sys.stderr)
        sys.exit(130)


def _meant_for_user(error: ValueError) -> bool:
    """ValueErrors raised in our own files are messages; one from the depths of a library keeps its traceback."""
    if isinstance(error, TooManyBroken):  # a loader worker's is raised again by torch
        return True
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = Path(trace.tb_frame.f_code.co_filename)
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts
