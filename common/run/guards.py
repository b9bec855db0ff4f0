"""Guards around a step: a value that is not finite stops the run before it reaches the weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common.base.arguments import some
from common.base.settings import OptimConfig
from common.sharded import whole


class NonFiniteLoss(ArithmeticError):
    """Training met NaN or infinity and stopped; the weights are those before the step."""


def check_finite_gradient(gradient_norm: float, step: int, norms: Mapping[str, torch.Tensor]) -> None:
    """Stops the run before a step whose gradient is not finite. Under FSDP2 call it on every process.

    Args:
        step: as the log counts, from 1.
        norms: of each parameter's gradient, by name.
    """
    if not math.isfinite(gradient_norm):
        bad = [name for name, norm in norms.items() if not math.isfinite(float(whole(norm)))]
        raise NonFiniteLoss(
            f"the gradient norm is {gradient_norm} at step {step}, while the loss is finite; the gradient of "
            f"{some(bad) or 'no parameter'} is not finite. The weights are those before this step. Try a lower "
            "optim.learning_rate."
        )


def check_finite(loss: float, step: int, model: torch.nn.Module, **values: Any) -> None:
    """Stops the run if the loss is not finite."""
    if loss == loss and abs(loss) != float("inf"):
        return
    norms = {name: float(parameter.detach().float().norm()) for name, parameter in model.named_parameters()}
    bad = [name for name, norm in norms.items() if not norm < float("inf")]
    largest = sorted(((norm, name) for name, norm in norms.items() if name not in bad), reverse=True)[:3]
    scalars = ", ".join(f"{name} {value}" for name, value in values.items())
    raise NonFiniteLoss(
        f"loss is {loss} at step {step} ({scalars}). Parameters that are not finite: {some(bad) or 'none'}. "
        f"Largest norms: {', '.join(f'{name} {norm:.3g}' for norm, name in largest)}. "
        "Checkpoints are from before this step. Try a lower optim.learning_rate or more optim.warmup_steps."
    )


def clip_gradient(
    accelerator: Accelerator, model: nn.Module, optim: OptimConfig
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Scales the gradient down to optim.max_gradient_norm. No value is read from the device.

    Returns:
        Norms before scaling, of each parameter's gradient by name and of the whole gradient.
    """
    # measured before, as clipping by a norm that is not finite makes all gradients so
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norms = dict(zip(gradients, torch._foreach_norm(list(gradients.values())))) if gradients else {}
    # an infinite bound measures the norm and changes nothing
    max_norm = math.inf if optim.max_gradient_norm is None else optim.max_gradient_norm
    return norms, whole(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
