"""Which share of the device's arithmetic a training run uses: model FLOPs utilisation (MFU).

    utilisation = samples_per_second * training FLOPs of one sample / (processes * peak FLOP/s of a device)

A multiplication and an addition are two FLOPs. Counted is what the model needs, forward and backward: what gradient
checkpointing or a fused attention kernel computes a second time is not, and neither are the loss, the optimiser and
work on elements (norms, softmax), which is a few per cent at most.
"""

import copy
import os
import re
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

DECIDES = "nothing"

# Dense peaks from NVIDIA's data sheets in TFLOP/s (figures "with sparsity" halved), half precision with float32 sums.
# Names as torch.cuda.get_device_name() gives them, matched in full: a laptop's 4090 or a slice (MIG) of an A100 is
# another device.
_A100 = {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_HOPPER_SXM = {"float32": 67.0, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4}
_HOPPER_NVL = {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5}
GPU_PEAKS = {
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB": _A100,
    r"NVIDIA A100 80GB PCIe": _A100,
    r"NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    r"NVIDIA H100 PCIe": {"float32": 51.0, "tf32": 378.0, "float16": 756.5, "bfloat16": 756.5},
    r"NVIDIA H100 NVL": _HOPPER_NVL,
    r"NVIDIA H200": _HOPPER_SXM,
    r"NVIDIA H200 NVL": _HOPPER_NVL,
    r"NVIDIA L40S": {"float32": 91.6, "tf32": 183.0, "float16": 362.05, "bfloat16": 362.05},
    r"NVIDIA GeForce RTX 4090": {"float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2},
    r"(Tesla|NVIDIA) V100-SXM2-(16|32)GB": {"float32": 15.7, "float16": 125.0},
    r"(Tesla|NVIDIA) V100-PCIE-(16|32)GB": {"float32": 14.0, "float16": 112.0},
    r"(Tesla|NVIDIA) T4": {"float32": 8.1, "float16": 65.0},
}  # device name -> precision -> peak

_GEMM_SIDE, _GEMM_REPEATS = 1024, 8
_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # Accelerate's names


def training_flops(model: nn.Module, *inputs: torch.Tensor, once: Sequence[nn.Module] = ()) -> int:
    """FLOPs of one forward and one backward pass, counted on a copy without weights: no memory, time or random state.

    Args:
        model: in the state in which it trains; patch dropout and frozen weights count for what they save.
        inputs: of `model.forward`; only shapes and types matter.
        once: modules of it that are not counted, as training reads what they have computed before.
    Returns:
        FLOPs of the whole batch.
    Raises:
        Exception: whatever the model raises where it needs values, not shapes.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports sympy, which not every command needs

    left_out = [name for name, part in model.named_modules() if any(part is other for other in once)]
    tensors = [*model.parameters(), *model.buffers()]
    without_weights = {id(tensor): _shape_only(tensor) for tensor in tensors}
    model = copy.deepcopy(model, without_weights).train()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # its second forward pass is no work that the model needs
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        outputs = model(*(tensor.to("meta") for tensor in inputs))
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        sum(output.float().sum() for output in outputs if output.requires_grad).backward()
    by_module = counter.get_flop_counts()
    spared = (by_module.get(f"{type(model).__name__}.{name}", {}) for name in left_out)
    return counter.get_total_flops() - sum(sum(each.values()) for each in spared)


def _shape_only(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def gpu_peak(name: str, precision: str) -> float | None:
    """Peak FLOP/s by data sheet.

    Args:
        name: as `torch.cuda.get_device_name()` gives it.
        precision: "float32", "tf32", "float16" or "bfloat16".
    Returns:
        None for a device or precision that the table lacks.
    """
    for pattern, peaks in GPU_PEAKS.items():
        if re.fullmatch(pattern, name) and precision in peaks:
            return 1e12 * peaks[precision]
    return None


@cache
def measured_peak(device: str, precision: str, threads: int) -> float:
    """FLOP/s of the best of several matrix products; takes a fraction of a second, once in a process.

    Args:
        device: as torch names it.
        precision: name of a floating-point dtype.
        threads: of this process, for the cache alone.
    """
    first = torch.ones(_GEMM_SIDE, _GEMM_SIDE, dtype=getattr(torch, precision), device=device)
    result, seconds = torch.empty_like(first), []
    for _ in range(_GEMM_REPEATS):
        start = time.perf_counter()
        torch.mm(first, first, out=result)
        seconds.append(time.perf_counter() - start)
    return 2 * _GEMM_SIDE**3 / min(seconds)


class Utilisation:
    """Turns samples per second into model FLOPs utilisation, or says once why it cannot.

    Args:
        model: before Accelerate prepares it (sharded weights have no shape of their own).
        inputs: one batch for `model.forward`; only shapes and types matter.
        device: on which the model trains.
        mixed_precision: Accelerate's name: "no", "bf16", "fp16".
        processes: that share the samples, each with such a device.
        once: as in `training_flops`.
    Attributes:
        flops_per_sample: of training, None if the model's FLOPs cannot be counted.
        peak: FLOP/s of all processes together, None if the device is not known.
        source: where the peak comes from, or why there is no figure.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        device: torch.device,
        mixed_precision: str = "no",
        processes: int = 1,
        once: Sequence[nn.Module] = (),
    ) -> None:
        self.flops_per_sample: float | None = None
        self.peak, self.source = _peak(device, mixed_precision)
        if self.peak is not None:
            self.peak *= processes
        try:
            self.flops_per_sample = training_flops(model, *inputs, once=once) / len(inputs[0])
        except Exception as error:  # a figure for the log is no reason to stop a run
            self.source = f"the model's FLOPs cannot be counted without its values: {error}"

    def share(self, samples_per_second: float) -> float | None:
        """Model FLOPs utilisation in [0, 1]; None where FLOPs or peak are not known.

        A measured peak that the run exceeds was measured on a busy machine and is raised to what the run reached. A
        data sheet's cannot be exceeded: that gives None.
        """
        if self.flops_per_sample is None or self.peak is None:
            return None
        reached = samples_per_second * self.flops_per_sample
        self.peak = max(self.peak, reached) if self.source.startswith("measured") else self.peak
        return reached / self.peak if reached <= self.peak else None

    def describe(self) -> dict[str, Any]:
        """For the log, once."""
        return {"flops_per_sample": self.flops_per_sample, "peak_flops": self.peak, "source": self.source}


def _peak(device: torch.device, mixed_precision: str) -> tuple[float | None, str]:
    """Peak FLOP/s of one device, and where it comes from or why it is not known."""
    precision = _DTYPES.get(mixed_precision)
    if precision is None:
        return None, f"no peak is known for mixed precision {mixed_precision}; known: {', '.join(_DTYPES)}"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        what = f"measured: a {precision} matrix product of side {_GEMM_SIDE}, {threads} threads of {os.cpu_count()}"
        return measured_peak("cpu", precision, threads), what
    if device.type != "cuda":
        return None, f"no peak is known for a device of type {device.type}"
    if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    name = torch.cuda.get_device_name(device)
    peak = gpu_peak(name, precision)
    if peak is None:
        return None, f"no data sheet figure is known for {name} with {precision}"
    return peak, f"data sheet: {name}, {precision}, dense"
