"""Momentum encoder: a copy that follows a trained module as an exponential average of its parameters.

    theta_m <- m theta_m + (1 - m) theta          over parameters, m = ema_momentum in [0, 1]

Buffers (running statistics, position indices) are not averaged: the copy runs in train mode on its own inputs (as in
MoCo's code).

The module may be compiled in place. DDP: pass the unwrapped module. FSDP2: make the MomentumEncoder before sharding and
give `fully_shard` the copy in the same way as the online module; each process then averages its own shards. FSDP1's
flattened parameters are not supported.
"""

import copy
import math
from typing import Any

import torch
from torch import nn


class MomentumEncoder(nn.Module):
    """An exact copy of a module that gets no gradient and changes only by `update_`.

    Its parameters have requires_grad False, for optimisers to leave them out. It is saved with the model that holds it,
    and follows its train and eval mode. Tied weights stay tied and are averaged once.

    Args:
        module: trained; neither wrapped nor sharded yet.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(module).requires_grad_(False)

    @torch.no_grad()
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.encoder(*inputs, **options)

    def update_(self, online: nn.Module, ema_momentum: float) -> None:
        update_momentum_(self.encoder, online, ema_momentum)


@torch.no_grad()
def update_momentum_(momentum_module: nn.Module, online: nn.Module, ema_momentum: float) -> None:
    """theta_m <- m theta_m + (1 - m) theta for every parameter, in place; buffers do not change.

    Computed as theta_m + (1 - m)(theta - theta_m): a parameter equal to its online one stays so to the last bit,
    m = 1 changes nothing and m = 0 copies, where both are finite.

    Args:
        online: read; the same architecture, unwrapped.
        ema_momentum: m in [0, 1].
    Raises:
        ValueError: m is out of range; the copy is in half precision, where (1 - m) theta is rounded away and the copy
            would never move.
        RuntimeError: the parameters differ in number, shape, dtype, device or sharding.
    """
    if not 0 <= ema_momentum <= 1:
        raise ValueError(f"ema_momentum must lie in [0, 1], got {ema_momentum}")
    copies, originals = dict(momentum_module.named_parameters()), list(online.parameters())
    for (name, parameter), original in zip(copies.items(), originals):
        if parameter.shape != original.shape:  # some would broadcast
            raise RuntimeError(
                f"parameter {name} of the momentum encoder is {tuple(parameter.shape)}, the online one "
                f"{tuple(original.shape)}; expected the same architecture"
            )
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"parameter {name} of the momentum encoder is {parameter.dtype}: small steps are rounded away; keep "
                "weights in float32 and use autocast (mixed precision)"
            )
    if copies:
        torch._foreach_lerp_(list(copies.values()), originals, 1 - ema_momentum)


def ema_momentum_at(step: int, total_steps: int, start: float, schedule: str = "constant") -> float:
    """m of one step.

    constant:     m = start                                                           MoCo v1, v2: 0.999; ALBEF: 0.995
    half_cosine:  m = 1 - (1 - start) (1 + cos(pi step / total_steps)) / 2            MoCo v3: 0.99 rising to 1

    Args:
        step: optimiser updates already made; from total_steps on the value is that of the end.
        total_steps: at least 1.
        start: m at step 0, in [0, 1].
    Raises:
        ValueError: unknown schedule.
    """
    if schedule == "constant":
        return start
    if schedule == "half_cosine":
        return 1 - (1 - start) * (1 + math.cos(math.pi * min(1.0, step / total_steps))) / 2
    raise ValueError(f"ema_momentum schedule {schedule!r} is unknown; expected: constant, half_cosine")
