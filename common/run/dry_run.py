"""`train.py --dry-run`: what a run would need, measured on a few of its steps, which are thrown away.

Model and data are built as for the run, in a temporary folder. The first step counts FLOPs, without compilation and
with the plain form of attention, whose products torch can count. The second warms up, the next ones are timed.
Evaluations are not part of it.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from common.base.arguments import some
from common.distributed import wait_for_device
from common.run.checkpoint import saved_step
from common.run.folder import RunFiles, stale_files

if TYPE_CHECKING:
    from common.run.step import Step
    from common.run.training import Run

DECIDES = "nothing"

BEFORE_TIMING, TIMED = 2, 3  # steps


class Measured(Exception):
    """Ends the loop of a dry run; figures: JSON values."""

    def __init__(self, figures: dict[str, Any]) -> None:
        super().__init__("the steps of a dry run are measured")
        self.figures = figures


def dry_run(
    train: Callable[[RunFiles], None], files: RunFiles, resume: bool, missing_rows: Sequence[str] = ()
) -> dict[str, Any]:
    """Figures of a run. Call on every process.

    Args:
        train: as a train.py's, called with a temporary folder; `files` are only read.
        missing_rows: rows that the run trains first; their weights decide its folder.
    Returns:
        JSON values; bytes, FLOPs of all processes (a multiply-add counts as two), seconds. The speed of a run of two
        steps or less is None.
    """
    with TemporaryDirectory() as folder:
        try:
            train(replace(files, folder=Path(folder), is_dry=True))
        except Measured as measured:
            figures = measured.figures
    step = saved_step(files.checkpoints)
    remaining = figures["steps"] - (step if resume and step is not None else 0)
    seconds = figures["seconds_per_step"]
    return figures | {
        "steps_to_train": remaining,
        "hours": 0.0 if not remaining else None if seconds is None else remaining * seconds / 3600,
        "missing_rows": list(missing_rows),
        "folder": None if missing_rows and "key" in files.identity else str(files.folder),
        "saved_step": step,
        "changed_files": stale_files(files) if "key" in files.identity else [],
    }


def measured_steps(run: "Run") -> Iterator["Step"]:
    """The first steps of a dry run, after which `Measured` is raised."""
    journal, device = run.journal, run.accelerator.device
    seconds, flops = [], 0
    journal.progress.total = min(run.num_steps, BEFORE_TIMING + TIMED)
    journal.progress.leave = False
    start = time.perf_counter()
    for number, batch in itertools.islice(journal.steps(run.batches), BEFORE_TIMING + TIMED):
        if number == 1:  # the counted step takes more memory than others
            forget_peak(device)
        with _counting() if number == 0 else nullcontext() as counter:
            yield run.step(number, batch)
        wait_for_device(device)
        flops = flops if counter is None else counter.get_total_flops()
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        journal.progress.update()
    journal.progress.close()
    raise Measured(_figures(run, seconds[BEFORE_TIMING:], flops))


def _figures(run: "Run", seconds: list[float], flops: int) -> dict[str, Any]:
    model, optim, settings = run.bare_model, run.config.optim, run.config.run
    optimizer = run.optimizer.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    copies = 1 if run.average is None else 2
    saved = copies * _bytes(model.state_dict().values()) + _bytes(state)
    times = max(1, math.ceil(run.num_steps / settings.save_every)) if settings.save_every else 1
    per_epoch = run.training.order.samples_per_epoch
    samples = run.num_steps * optim.global_batch_size
    mean = sum(seconds) / len(seconds) if seconds else None
    return {
        "parameters": parameters_of(model),
        "memory": {
            "weights": _bytes([*model.parameters(), *model.buffers()]),
            "average": (copies - 1) * _bytes([*model.parameters(), *model.buffers()]),
            "gradients": _bytes(trained),
            "optimizer": _bytes(state),
            "peak": peak(run.accelerator.device),
        },
        "checkpoint": {"bytes": saved, "kept": min(settings.keep_checkpoints, times)},
        "flops_per_step": flops * run.accelerator.num_processes,
        "seconds_per_step": mean,
        "samples_per_second": optim.global_batch_size / mean if mean else None,
        "timed_steps": len(seconds),
        "device": run.accelerator.device.type,
        "processes": run.accelerator.num_processes,
        "steps": run.num_steps,
        "epochs": samples / per_epoch,
        "samples_seen": samples,
    }


def parameters_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Part of a model (a tower, or a module beside them) -> number of trained and of frozen parameters."""
    parts: dict[str, dict[str, int]] = {}
    for name, parameter in model.named_parameters():
        names = name.split(".")
        last = next((place for place, word in enumerate(names) if word.endswith("_tower")), 0)
        part = parts.setdefault(".".join(names[: last + 1]), {"trained": 0, "frozen": 0})
        part["trained" if parameter.requires_grad else "frozen"] += parameter.numel()
    return parts


def report_text(figures: dict[str, Any]) -> str:
    """The figures of `dry_run` as lines for the screen."""
    parts, memory, checkpoint = figures["parameters"], figures["memory"], figures["checkpoint"]
    trained, frozen = (sum(part[kind] for part in parts.values()) for kind in ("trained", "frozen"))
    of_parts = ", ".join(f"{name} {part['trained'] + part['frozen']:,}" for name, part in parts.items())
    sizes = [f"{name} {_size(memory[name])}" for name in ("weights", "average", "gradients", "optimizer")]
    where = "the process, with its data" if figures["device"] == "cpu" else "the device"
    speed = "not measured: too few steps"
    if figures["seconds_per_step"] is not None:
        speed = (
            f"{figures['seconds_per_step']:.3g} s, {figures['samples_per_second']:.3g} samples/s (mean of "
            f"{figures['timed_steps']} steps, device {figures['device']}, processes {figures['processes']})"
        )
    hours = "" if figures["hours"] is None else f", {figures['hours']:.3g} hours without evaluations"
    steps = f"{figures['steps_to_train']:,} of {figures['steps']:,} steps, {figures['epochs']:.3g} epochs"
    return "\n".join(
        (
            f"parameters   {trained:,} trained, {frozen:,} frozen: {of_parts}",
            f"memory       {', '.join(sizes)}; peak of {where}: {_size(memory['peak'])}",
            f"checkpoints  {_size(checkpoint['bytes'])} each, {checkpoint['kept']} kept",
            f"step         {figures['flops_per_step'] / 1e9:,.3g} GFLOP, {speed}",
            f"run          {steps}, {figures['samples_seen']:,} samples{hours}",
            f"folder       {_folder_text(figures)}",
        )
    )


def _folder_text(figures: dict[str, Any]) -> str:
    step, changed, missing = (figures[name] for name in ("saved_step", "changed_files", "missing_rows"))
    start = f"starts from {some(missing)}, trained first (not counted here)" if missing else ""
    if figures["folder"] is None:
        return f"known when its start is trained; {start}"
    if changed:
        state = f"holds a run by other code ({some(changed)} changed), which is set aside"
    else:
        state = "no checkpoint yet" if step is None else f"holds a run up to step {step}; --resume continues it"
    return "; ".join(filter(None, (f"{figures['folder']}: {state}", start)))


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _counting() -> Iterator[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode  # imports sympy

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield stack.enter_context(FlopCounterMode(display=False))


def forget_peak(device: torch.device) -> None:
    """Lets the peak of the memory start again from what is taken now; of a process on Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Most bytes that a GPU, or this process with all that it holds, has taken; elsewhere than on Linux bytes now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return psutil.Process().memory_info().rss
