"""The softmax temperature as a positive multiplier, and a bias: logits = logit_scale * similarity (+ logit_bias)."""

import math
from typing import Any

import torch
from torch import nn

from common.scalars import Scalar, clamp_scalars_


class LogitScale(nn.Module):
    """exp of a learned scalar, with bounds on the multiplier itself.

    The bounds act after the optimiser's step (`clamp_`), as in CLIP; see `Scalar.absorbing` for the other way.

    Args:
        init: multiplier at the start, by default CLIP's; moved into the bounds if it trains.
        minimum, maximum: bounds of the multiplier; None = none. CLIP: at most 100.
        trainable: False keeps the multiplier at its start.
        dtype: of the parameter; None = PyTorch's default. `double()` afterwards keeps only the digits of float32.
    Raises:
        ValueError: unless 0 < minimum <= maximum and init > 0; a fixed multiplier outside its bounds.
    """

    def __init__(
        self,
        init: float = 1 / 0.07,
        minimum: float | None = None,
        maximum: float | None = 100.0,
        trainable: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        low = 0.0 if minimum is None else minimum
        high = math.inf if maximum is None else maximum
        if not (math.isfinite(init) and init > 0):
            raise ValueError(f"logit_scale_init must be a positive finite number, got {init}")
        if not 0 <= low <= high or 0 in (minimum, maximum):
            raise ValueError(f"logit_scale_min = {minimum}, logit_scale_max = {maximum}; expected: 0 < min <= max")
        if not trainable and not low <= init <= high:
            raise ValueError(
                f"logit_scale_init = {init} with logit_scale_trainable = false is outside its bounds; expected: "
                f"{minimum} to {maximum}, or other logit_scale_min and logit_scale_max (null = none)"
            )
        self.minimum, self.maximum = minimum, maximum
        start = math.log(min(max(init, low), high))
        # one entry, not none: FSDP2 refuses parameters without a dimension
        self.log_logit_scale = nn.Parameter(torch.tensor([start], dtype=dtype), requires_grad=trainable)

    @classmethod
    def from_config(cls, method: Any) -> "LogitScale":
        """From a config's section `method`."""
        return cls(
            method.logit_scale_init, method.logit_scale_min, method.logit_scale_max, method.logit_scale_trainable
        )

    def forward(self) -> torch.Tensor:
        """The multiplier, a scalar tensor in [minimum, maximum]."""
        return self.scalars()[0].value()

    def scalars(self) -> list[Scalar]:
        return [Scalar("logit_scale", self.log_logit_scale, self.minimum, self.maximum, in_loss=True)]

    def clamp_(self) -> None:
        """Call after every optimiser step."""
        clamp_scalars_(self.scalars())


class LogitBias(nn.Module):
    """A learned number that is added to all logits (SigLIP); it starts at the paper's -10 by default."""

    def __init__(self, init: float = -10.0) -> None:
        super().__init__()
        # one entry, not none: FSDP2 refuses parameters without a dimension
        self.logit_bias = nn.Parameter(torch.tensor([float(init)]))

    def forward(self) -> torch.Tensor:
        return self.scalars()[0].value()

    def scalars(self) -> list[Scalar]:
        return [Scalar("logit_bias", self.logit_bias, in_loss=True, is_logarithm=False)]


def check_bounds(method: Any) -> None:
    """Checks a config section in its __post_init__; raises ValueError as `LogitScale`."""
    LogitScale.from_config(method)
