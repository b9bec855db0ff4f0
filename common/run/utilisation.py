"""Model FLOPs utilisation (MFU): the share of a GPU's peak arithmetic that a training run uses.

    utilisation = samples_per_second * training FLOPs of one sample / (processes * peak FLOP/s of a GPU)

`torch.utils.flop_counter` counts the matrix products and convolutions of forward and backward pass; a multiplication
and an addition are two FLOPs. What gradient checkpointing computes a second time is not counted. A device whose peak
no data sheet gives, a CPU among them, has no figure.
"""

import copy
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

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

_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # Accelerate's names


def training_flops(model: nn.Module, *inputs: torch.Tensor, once: Sequence[nn.Module] = ()) -> int:
    """FLOPs of one forward and one backward pass of a batch, counted on the meta device.

    Args:
        model: with the weights that train and those that are frozen.
        inputs: of `model.forward`; only shapes and types matter.
        once: modules that are not counted, because training reads their cached outputs.
    Raises:
        Exception: whatever the model raises on tensors without values.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports sympy, which not every command needs

    left_out = [name for name, part in model.named_modules() if any(part is other for other in once)]
    model = copy.deepcopy(model).to("meta").train()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # the model does not need its second forward pass
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        outputs = model(*(tensor.to("meta") for tensor in inputs))
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        sum(output.float().sum() for output in outputs if output.requires_grad).backward()
    by_module = counter.get_flop_counts()
    cached = (by_module.get(f"{type(model).__name__}.{name}", {}) for name in left_out)
    return counter.get_total_flops() - sum(sum(flops.values()) for flops in cached)


def gpu_peak(name: str, precision: str) -> float | None:
    """Peak FLOP/s by data sheet; None for a device or precision that `GPU_PEAKS` lacks.

    Args:
        name: as `torch.cuda.get_device_name()` gives it.
        precision: "float32", "tf32", "float16" or "bfloat16".
    """
    peaks = next((peaks for pattern, peaks in GPU_PEAKS.items() if re.fullmatch(pattern, name)), {})
    return 1e12 * peaks[precision] if precision in peaks else None


@dataclass(frozen=True)
class Utilisation:
    """FLOPs of training on one sample, and peak FLOP/s of all processes together."""

    flops_per_sample: float
    peak_flops: float

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        device: torch.device,
        mixed_precision: str,
        processes: int,
        once: Sequence[nn.Module] = (),
    ) -> "Utilisation | None":
        """None where the device's peak is unknown, or where the model needs values to run.

        Args:
            model: before Accelerate prepares it (sharded weights have other shapes).
            inputs: one batch for `model.forward`.
            device: on which the model trains.
            mixed_precision: Accelerate's name: "no", "bf16", "fp16".
            processes: number of processes, each with such a device.
            once: as in `training_flops`.
        """
        if device.type != "cuda" or mixed_precision not in _DTYPES:
            return None
        precision = _DTYPES[mixed_precision]
        if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
            precision = "tf32"
        peak = gpu_peak(torch.cuda.get_device_name(device), precision)
        if peak is None:
            return None
        try:
            return cls(training_flops(model, *inputs, once=once) / len(inputs[0]), processes * peak)
        except Exception as error:  # a figure for the log does not stop a run
            warnings.warn(f"model_flops_utilisation is not logged: {error}", stacklevel=2)
            return None

    def share(self, samples_per_second: float) -> float:
        """Model FLOPs utilisation, a fraction."""
        return samples_per_second * self.flops_per_sample / self.peak_flops
