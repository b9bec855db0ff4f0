"""Numbers that train beside the weights, their values and bounds."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from common.sharded import whole


class Scalar(NamedTuple):
    """A number that trains: the logit scale, the curvature, the scale of the embeddings, a bias of the logits.

    name: of the number, in logs.
    parameter: of one entry.
    minimum, maximum: bounds of the number, None = none.
    in_loss: it acts in the loss and not in the embeddings. Such scalars learn at the rate of the logit scale
        (optim.logit_scale_rate).
    absorbing: its bounds act in the forward pass, as in EuCLIP's code: beyond a bound its gradient is 0 and it never
        comes back. Otherwise `clamp_scalars_` moves it back after each step, and it keeps its gradient at the bound.
    is_logarithm: the parameter is the logarithm of the number, which is then positive; otherwise it is the number.
    """

    name: str
    parameter: nn.Parameter
    minimum: float | None = None
    maximum: float | None = None
    in_loss: bool = False
    absorbing: bool = False
    is_logarithm: bool = True

    def value(self) -> torch.Tensor:
        """The number as it acts, a scalar tensor. Under FSDP2 call it on every process."""
        parameter = whole(self.parameter)  # of one entry; sum makes no view, which FSDP2 warns about
        value = parameter.exp().sum() if self.is_logarithm else parameter.sum()
        low, high = self.bounds() if self.absorbing else (None, None)  # clamp has no gradient at a bound itself
        value = value if low is None else torch.where(parameter.sum() < low, self.minimum, value)
        return value if high is None else torch.where(parameter.sum() > high, self.maximum, value)

    def bounds(self) -> tuple[float | None, float | None]:
        """Of the parameter."""
        return tuple(
            math.log(bound) if self.is_logarithm and bound is not None else bound
            for bound in (self.minimum, self.maximum)
        )


def scalar_values(scalars: Iterable[Scalar]) -> dict[str, float]:
    """name -> the number as it acts, for the log."""
    return {scalar.name: scalar.value().item() for scalar in scalars}


@torch.no_grad()
def clamp_scalars_(scalars: Iterable[Scalar]) -> int | torch.Tensor:
    """Moves trainable scalars back into their bounds; call once after every optimiser step.

    Returns:
        How many of them were out of their bounds: 0, or a tensor without axes, so that the host does not wait.
    """
    outside = 0
    for scalar in scalars:
        if scalar.minimum is None and scalar.maximum is None:
            continue
        before = whole(scalar.parameter).detach().clone()
        if scalar.absorbing:
            outside = outside + (scalar._replace(absorbing=False).value() != scalar.value()).sum()
            continue
        scalar.parameter.clamp_(*scalar.bounds())
        outside = outside + (whole(scalar.parameter) != before).sum()
    return outside
