"""Optimisers: the learning rate as a function of the step, and which parameters decay."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from common.base.settings import OptimConfig, SgdConfig


def learning_rate_at(step: int, optim: OptimConfig | SgdConfig) -> float:
    """Rate of update `step` (from 0): linear from warmup_from, then half a cosine down to final_learning_rate."""
    if step < optim.warmup_steps:
        rise = optim.learning_rate - optim.warmup_from
        return optim.warmup_from + rise * (step + 1) / (optim.warmup_steps + 1)
    progress = (step - optim.warmup_steps) / max(1, optim.steps - optim.warmup_steps)
    half_cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optim.final_learning_rate + (optim.learning_rate - optim.final_learning_rate) * half_cosine


def set_rate(optimizer: torch.optim.Optimizer, step: int, optim: OptimConfig) -> float:
    """Sets the rate of update `step`, in each group times its "rate", and returns it.

    Accelerate's scheduler would advance once per process.
    """
    rate = learning_rate_at(step, optim)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate", 1.0)
    return rate


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW: matrices and tables decay; class tokens, vectors and scalars (norms, biases) do not.

    Weight decay would hold the logit scale near 1: AdamW shrinks it by learning_rate * weight_decay per step. With a
    logit_scale_rate other than 1, the scalars that act in the loss (`Scalar.in_loss`) are a third group with that rate.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss_scalars = []
    if optim.logit_scale_rate != 1:
        # by identity: `scalars()` names them for the log, not as parameters of the model
        in_loss = {id(scalar.parameter) for scalar in model.scalars() if scalar.in_loss}
        loss_scalars = [trainable.pop(name) for name in list(trainable) if id(trainable[name]) in in_loss]
    decayed = {
        name for name, parameter in trainable.items() if parameter.ndim >= 2 and not name.endswith("class_embedding")
    }
    groups = [
        {"params": [trainable[name] for name in trainable if name in decayed], "weight_decay": optim.weight_decay},
        {"params": [trainable[name] for name in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    if loss_scalars:
        groups.append({"params": loss_scalars, "weight_decay": 0.0, "rate": optim.logit_scale_rate})
    groups = [group for group in groups if group["params"]]  # torch loads no state with two groups of none
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.epsilon)


def build_sgd(model: nn.Module, optim: SgdConfig, predictor_parameters: Iterable[nn.Parameter] = ()) -> torch.optim.SGD:
    """SGD with groups by weight decay and by whether the rate stays at its peak, of parameters with gradient.

    Args:
        predictor_parameters: keep their rate with optim.constant_predictor_rate (SimSiam).
    Raises:
        ValueError: optim.constant_predictor_rate without such parameters.
    """
    constant = set(predictor_parameters) if optim.constant_predictor_rate else set()
    if optim.constant_predictor_rate and not constant:
        raise ValueError(
            "optim.constant_predictor_rate = true with a method that has no such predictor; expected: false, or "
            "method.name = simsiam"
        )
    # up to four groups; a group is made by its first parameter
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = optim.decay_vectors or parameter.ndim >= 2
            groups.setdefault((decays, parameter in constant), []).append(parameter)
    return torch.optim.SGD(
        [
            {"params": members, "weight_decay": optim.weight_decay if decays else 0.0, "constant_rate": keeps_rate}
            for (decays, keeps_rate), members in groups.items()
        ],
        lr=optim.learning_rate * optim.global_batch_size / 256,
        momentum=optim.sgd_momentum,
    )


def set_sgd_rates(optimizer: torch.optim.Optimizer, step: int, optim: SgdConfig) -> float:
    """Sets the rates of update `step`, scaled with the batch; returns that of the groups whose rate changes."""
    scale = optim.global_batch_size / 256
    rate = scale * learning_rate_at(step, optim)
    for group in optimizer.param_groups:
        group["lr"] = scale * optim.learning_rate if group["constant_rate"] else rate
    return rate
