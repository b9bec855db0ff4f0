"""From the command line to a run: processes, Accelerate, seeds, and errors as messages."""

import argparse
import ctypes
import errno
import io
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, parse_flag_from_env

from common.base.arguments import expanded, some
from common.base.config import ConfigError, entry_arguments, load_config
from common.base.files import shown
from common.base.places import is_of_repository, outputs
from common.base.random_keys import derive_key
from common.base.settings import RunConfig
from common.base.signals import STOPPED_EXIT_STATUS, Stopped, how_to_resume, what_is_saved
from common.data.broken import TooManyBroken
from common.data.loader import NoBatch
from common.data.pairs import open_training_pairs
from common.distributed import (
    gather_objects,
    is_main_process,
    leave_process_group,
    rank,
    wait_for_everyone,
    world_size,
)
from common.evaluation.protocol import evaluation_text
from common.run.checkpoint import CheckpointError, saved_step
from common.run.compilation import without_accelerate
from common.run.dry_run import dry_run, report_text
from common.run.folder import (
    RunFiles,
    check_precision,
    chosen_files,
    only_run_in,
    precision_of,
    set_aside_if_stale,
    stale_files,
)
from common.run.guards import NonFiniteLoss

_LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
_PACKAGES_OF_TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX")}  # the others are called as theirs


def launched_accelerator(**options: Any) -> Accelerator:
    """Accelerator that sees all launched processes, on a machine without a GPU too.

    DDP broadcasts no buffers: queues are equal on all processes, and a momentum encoder has separate running
    statistics.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Accelerator(
        cpu=True if several and not torch.accelerator.is_available() else None,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        dynamo_plugin=without_accelerate(),
        **options,
    )


def start_accelerator(run: RunConfig, folder: Path) -> Accelerator:
    """Accelerate for launch, device and precision; deterministic algorithms and a tracker if the config sets them."""
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it before its first product
        torch.use_deterministic_algorithms(True)
    tracked = run.tracker != "none"
    packages = _PACKAGES_OF_TRACKERS.get(run.tracker, (run.tracker,))
    # Accelerate would warn, and track nothing; a folder wandb/ of runs is a package without origin
    if tracked and not any(getattr(find_spec(package), "origin", None) for package in packages):
        raise ConfigError(
            f"run.tracker = {run.tracker} needs the package {' or '.join(packages)}, which is not installed; run: pip "
            f"install {packages[0]}, or set run.tracker=none"
        )
    accelerator = launched_accelerator(
        mixed_precision=precision_of(run),
        log_with=run.tracker if tracked else None,
        project_dir=str(folder) if tracked else None,
    )
    check_precision(f"mixed_precision = {accelerator.mixed_precision!r}", accelerator.mixed_precision)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


def keep_freed_memory() -> None:
    """Makes glibc, if that is the C library, keep the memory of freed tensors of up to 32 MB."""
    # else the system clears many pages anew in every step
    with suppress(AttributeError, OSError, TypeError):  # no glibc
        set_option = ctypes.CDLL(None).mallopt
        set_option(-3, 2**25)  # M_MMAP_THRESHOLD, at its highest: larger tensors have mappings of their own
        set_option(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free bytes at the end of the heap that stay


@dataclass(frozen=True)
class _OfRun:
    run: RunConfig = field(default_factory=RunConfig)


def join_processes(settings: Iterable[str] = ()) -> None:
    """Forms the group of the launched processes, so that an error can end all of them.

    Accelerate uses a group that exists, with its timeout: call before anything makes an Accelerator.

    Args:
        settings: "section.key=value" of the command line, of which run.process_timeout counts.
    """
    stated = [text for text in settings if text.startswith("run.process_timeout=")]
    _join(load_config(_OfRun, [], stated).run.process_timeout)


def _join(timeout: float) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        PartialState(cpu=cpu, timeout=timedelta(seconds=timeout))


@contextmanager
def ending_together() -> Iterator[None]:
    """Within it an error for the user ends all processes with one message. Enter on every process.

    On separate disks one process may lack a file, and the others would wait for it without end.

    Raises:
        ConfigError: of the first process that has one.
    """
    problem = None
    try:
        yield
    except (OSError, ValueError) as error:
        if world_size() == 1 or (isinstance(error, ValueError) and not _meant_for_user(error)):
            raise
        problem = error
    # every process learns of the error, also those without one
    messages = gather_objects(None if problem is None else _text(problem))
    if not any(messages):
        return
    first = next(number for number, message in enumerate(messages) if message)
    everywhere = set(messages) == {messages[first]}
    raise ConfigError(
        messages[first] if everywhere else f"process {first} of {len(messages)}: {messages[first]}"
    ) from problem


def prepare(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Accelerate's prepare. Under FSDP a model without transformer blocks, such as a ResNet, is one unit."""
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ConfigError(f"fsdp_version = {plugin.fsdp_version}; expected: 2, as in scripts/accelerate/fsdp2.yaml")
        has_statistics = any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if has_statistics and accelerator.mixed_precision != "no":
            raise ConfigError(
                f"run.mixed_precision = {accelerator.mixed_precision} under FSDP, whose half-precision weights do not "
                "go with the statistics of batch normalisation; expected: no"
            )
        model.to(memory_format=torch.contiguous_format)  # FSDP2 shards no weights that are channels last
        known, names = {type(module).__name__ for module in model.modules()}, plugin.transformer_cls_names_to_wrap
        plugin.transformer_cls_names_to_wrap = [name for name in names or () if name in known]
    return accelerator.prepare(model, optimizer)


def end_run(accelerator: Accelerator) -> None:
    """Closes the trackers. The process group stays for the next row of a table."""
    for tracker in accelerator.trackers:
        tracker.finish()
    wait_for_everyone()


def seed_step(seed: int, step: int) -> None:
    """Seeds the random numbers of a step (dropout, patch dropout) from (seed, step, process).

    So a resumed run needs no saved generator. The numbers depend on the number of processes and on
    optim.micro_batch_size. A step uses only torch's generators.
    """
    torch.manual_seed(derive_key("draws of a step", seed, step, rank()))


@contextmanager
def interrupted_with_saved_step(files: RunFiles) -> Iterator[None]:
    """Within it, a KeyboardInterrupt or an error of the disk reports the last checkpoint of the run."""
    try:
        yield
    except (KeyboardInterrupt, OSError, CheckpointError) as error:
        step = saved_step(files.checkpoints)
        saved = what_is_saved(0, 0, files.folder)
        if step is not None:
            saved = f"the last checkpoint is step {step} in {files.folder}; {how_to_resume(files.command)}"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(saved) from None
        is_of_disk = isinstance(error, OSError) or str(error).startswith("cannot write")
        if step is None or not is_of_disk:
            raise
        raise ConfigError(f"{_text(error)}; {saved}") from error


def command_to_resume(option: str = "--resume") -> str:
    """The shell line that started this run, by python, a console script or a launcher.

    Args:
        option: added to it; "" = none.
    """
    words, process, arguments = sys.orig_argv, psutil.Process(), sys.argv[1:]
    if words[len(words) - len(arguments) :] != arguments:  # called by other code than a command line
        # a process that the command has started: its subcommand is in the name (scripts/command.py)
        named = sys.argv[0].split(" ") if sys.argv[0].startswith("vlgeometry ") else ["python", sys.argv[0]]
        words = [*named, *arguments]
    environment: dict[str, str] = {}
    with suppress(psutil.Error):
        parent = process.parent()  # none for the first process of a container
        if parent is not None and any(Path(word).name in _LAUNCHERS for word in parent.cmdline()[:3]):
            process, words = parent, parent.cmdline()
        environment = process.environ()
    # a console script: its interpreter was not typed
    if len(words) > 1 and os.sep in words[1] and not Path(words[1]).suffix and shutil.which(words[1]):
        name = Path(words[1]).name
        words = [name if shutil.which(name) == words[1] else words[1], *words[2:]]
    settings = [f"{key}={shlex.quote(value)}" for key, value in environment.items() if key.startswith("ACCELERATE_")]
    if option and not any(word.partition("=")[0] == option for word in arguments):
        words = [*words, option]
    return " ".join([*settings, shlex.join(words)])


def run_or_explain(main) -> None:
    """Runs an entry script's main; errors for the user are printed as one message, with exit status 1.

    The status is 143 after a stop signal (see common/base/signals.py).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name that is no UTF-8 is shown with escapes, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
        leave_process_group()
    except Stopped as stopped:
        if is_main_process():
            print(stopped, file=sys.stderr)
        leave_process_group()
        sys.exit(STOPPED_EXIT_STATUS)
    except (ConfigError, NonFiniteLoss, NoBatch) as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # names the file that is missing, not writable, ...
        sys.exit(f"error: {_text(error)}")
    except ValueError as error:
        if not _meant_for_user(error):
            raise
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        if not _is_of_connection(error):
            raise
        sys.exit(
            f"error: another process of this run has ended or cannot be reached ({str(error).splitlines()[0]}); the "
            "output of the others has the reason. Training goes on from its last checkpoint: train.py with --resume"
        )
    except KeyboardInterrupt as stopped:
        if is_main_process():
            print(f"\nstopped at once: {stopped or 'nothing was being trained'}", file=sys.stderr)
        sys.exit(130)


def _is_of_connection(error: RuntimeError) -> bool:
    # Whether a collective operation failed; gloo has no error class.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


_WAYS_ON = {  # kind of an OSError -> what to do about it
    NotADirectoryError: "a file lies where a folder must be; expected another folder",
    FileExistsError: "a file lies where a folder must be; expected another folder",
    PermissionError: "expected a path that you may read and write",
    FileNotFoundError: "expected a path that exists or can be made",
}


def _text(error: OSError | ValueError) -> str:
    # The message; where the command line names the file of an OSError, with that setting and what to do.
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return str(error)
    path = Path(error.filename).absolute()
    way_on = next((text for kind, text in _WAYS_ON.items() if isinstance(error, kind)), "expected another path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_on = "expected free space there"
    # --name value, --name=value, section.key=value
    words = [piece for word in sys.argv[1:] for piece in word.split("=", 1)]
    named = {}
    for name, value in itertools.pairwise(words):
        place = Path(expanded(value)).absolute()
        if (
            value
            and (name.startswith("--") or "." in name)
            and (path.is_relative_to(place) or place.is_relative_to(path))
        ):
            named[len(place.parts)] = f"{name} {value}: {error}; {way_on}"
    if named:  # the longest: --output may lie in the folder of --checkpoint
        return named[max(named)]
    if path.is_relative_to(outputs()) or outputs().is_relative_to(path):
        return f"{error}: outputs go to {outputs()}; {way_on}: --output-dir (train.py) or --output names one"
    return str(error)


def _meant_for_user(error: ValueError) -> bool:
    # ValueErrors raised in this repository are messages; those of a library keep their traceback.
    if isinstance(error, TooManyBroken):  # a loader worker's is raised again by torch
        return True
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return is_of_repository(Path(trace.tb_frame.f_code.co_filename))


def _refuse_or_set_aside(files: RunFiles, resume: str | None) -> None:
    # Handles a run that other code has trained: a resume is refused, a fresh run sets it aside.
    stale = stale_files(files)
    if stale and resume == "last":
        raise ConfigError(
            f"--resume: {some(stale)} changed since {files.folder} was trained; expected: the files as they were, or "
            "no --resume, which sets that run aside and trains afresh"
        )
    set_aside_if_stale(files)


def train_main(
    description: str,
    script: Path,
    config_class: type,
    default_row: str,
    train: Callable[[Any, Any, RunFiles, bool, Accelerator, str], None],
    open_training_set: Callable[[Any, int], Any] = open_training_pairs,
    scale_files: str = "scale",
    start: Callable[[Any, argparse.Namespace], Any] = lambda config, _: config,
) -> None:
    """The command line of a train.py: config, data, folder of the run, Accelerate; then `train`.

    Args:
        train: (config, training set, files, resume, accelerator, label).
        open_training_set: (config.data, seed) -> set with a fingerprint.
        start: (config, arguments) -> the config with the run that it starts from.
    """
    paper = script.resolve().parent
    config, arguments = entry_arguments(description, script, config_class, default_row, scale_files)
    if arguments.dry_run:
        config = replace(config, run=replace(config.run, tracker="none"))
    _join(config.run.process_timeout)
    config = start(config, arguments)
    # from here on an error in one process ends all of them with one message
    with ending_together():
        data_set = open_training_set(config.data, config.run.seed)
        files = chosen_files(script, arguments, config, data_set.fingerprint)
        files = replace(files, command=command_to_resume())
    # after the data: a tracker or a GPU is not touched by a command that cannot run
    accelerator = start_accelerator(config.run, files.folder)
    if arguments.dry_run:
        figures = dry_run(
            lambda dry: train(config, data_set, dry, False, accelerator, arguments.row),
            files,
            arguments.resume is not None,
            arguments.missing_rows,
        )
        accelerator.print(json.dumps(figures, indent=1) if arguments.json else report_text(figures))
        return
    accelerator.print(
        f"{paper.name}, {arguments.row}, scale {arguments.scale}, seed {config.run.seed} -> {files.folder}"
    )
    for note in arguments.notes:
        accelerator.print(note)
    # the lock is held until the evaluation is written
    with ExitStack() as stack:
        with ending_together():
            if accelerator.is_main_process:
                stack.enter_context(only_run_in(files, config.run.lock))
                if "key" in files.identity:  # another folder is the user's, who may resume with other code
                    _refuse_or_set_aside(files, arguments.resume)
        stack.enter_context(interrupted_with_saved_step(files))
        train(config, data_set, files, arguments.resume is not None, accelerator, arguments.row)
    if accelerator.is_main_process:
        if config.run.test:
            print(evaluation_text(json.loads(files.evaluation.read_text(encoding="utf-8"))))
        else:
            print("run.test = false: no test set was evaluated")
        results = files.evaluation if config.run.test else files.validation
        names = f"results ({results.name}), curves ({files.curves.name}), commands ({files.readme.name})"
        print(f"{names}: {shown(files.folder)}")
