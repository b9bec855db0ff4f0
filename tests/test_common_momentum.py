"""The momentum encoder: which tensors move, by how much, and what is refused."""

import copy
import functools
import itertools
import math

import pytest
import torch
from refusals import refused
from torch import nn

from common.base.settings import OptimConfig
from common.momentum import MomentumEncoder, ema_momentum_at, update_momentum_
from common.run.schedule import build_optimizer


class Tied(nn.Module):
    """A normalised layer whose table is also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.table(ids)))


class Learner(nn.Module):
    """An encoder and its copy, as a method holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.momentum_encoder = MomentumEncoder(self.encoder)


def moved(module):
    """The module with every parameter somewhere else."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


def test_the_copy_is_exact_and_shares_no_memory():
    online = Tied()
    momentum = MomentumEncoder(online).encoder
    for (name, ours), (_, theirs) in zip(momentum.state_dict().items(), online.state_dict().items()):
        assert torch.equal(ours, theirs), name
        assert ours.data_ptr() != theirs.data_ptr(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [0.0, 0.3, 0.999, 1.0])
def test_update_equals_the_formula_for_every_parameter(m, dtype):
    online = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    momentum = MomentumEncoder(online)
    moved(online)
    before = copy.deepcopy(momentum.encoder)
    momentum.update_(online, m)
    for old, new, theta in zip(before.parameters(), momentum.encoder.parameters(), online.parameters()):
        assert new.dtype == dtype
        torch.testing.assert_close(
            new.data, (m * old + (1 - m) * theta).data, rtol=4 * torch.finfo(dtype).eps, atol=1e-7
        )
        if m in (0.0, 1.0):
            assert torch.equal(new, theta if m == 0.0 else old)


def test_a_parameter_equal_to_its_online_one_stays_equal_to_the_last_bit():
    online = nn.Linear(50, 50)
    momentum = MomentumEncoder(online)
    for _ in range(10):
        momentum.update_(online, 0.999)
    assert torch.equal(momentum.encoder.weight, online.weight)


def test_tied_parameters_stay_tied_and_are_averaged_once():
    online = Tied().double()
    momentum = MomentumEncoder(online)
    old = momentum.encoder.table.weight.clone()
    moved(online)
    momentum.update_(online, 0.75)
    torch.testing.assert_close(momentum.encoder.table.weight.data, (0.75 * old + 0.25 * online.table.weight).data)
    assert momentum.encoder.output.weight is momentum.encoder.table.weight


def test_running_statistics_stay_those_of_the_copy():
    learner = Learner()
    with torch.no_grad():
        learner.encoder(3 + torch.randn(16, 3))
        learner.momentum_encoder(torch.randn(16, 3))
    running_mean_before = learner.momentum_encoder.encoder[1].running_mean.clone()
    learner.momentum_encoder.update_(learner.encoder, 0.0)
    assert torch.equal(learner.momentum_encoder.encoder[1].running_mean, running_mean_before)
    assert not torch.equal(running_mean_before, learner.encoder[1].running_mean)


def test_no_gradient_reaches_the_copy_and_no_optimiser_holds_it():
    learner = Learner()
    optimizer = build_optimizer(learner, OptimConfig(weight_decay=0.5))
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in learner.encoder.parameters()}
    before = copy.deepcopy(learner.momentum_encoder.state_dict())
    inputs = torch.randn(8, 3)
    keys = learner.momentum_encoder(inputs)
    assert not keys.requires_grad
    (learner.encoder(inputs) * keys).sum().backward()
    optimizer.step()
    for name, parameter in learner.momentum_encoder.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name]), name


def test_modules_that_do_not_fit_and_half_precision_are_refused():
    momentum = MomentumEncoder(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    wide, bare = (nn.Sequential(nn.Linear(2, 3), last) for last in (nn.Linear(3, 4), nn.Linear(3, 2, bias=False)))
    thin = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 2))  # its weights would broadcast
    for online in (wide, bare, thin, copy.deepcopy(momentum.encoder).double()):
        with pytest.raises(RuntimeError):
            momentum.update_(online, 0.9)
    half = nn.Linear(2, 2).bfloat16()
    refused((r"parameter weight .* torch\.bfloat16.*autocast", lambda: MomentumEncoder(half).update_(half, 0.999)))


def test_impossible_momenta_and_unknown_schedules_are_refused():
    online, out_of_range = nn.Linear(2, 2), r"ema_momentum must lie in \[0, 1\]"
    refused(
        *((out_of_range, functools.partial(update_momentum_, online, online, m)) for m in (-0.1, 1.1, math.nan)),
        ("'cosine' is unknown; expected: constant, half_cosine", lambda: ema_momentum_at(0, 10, 0.99, "cosine")),
    )


def test_constant_schedule_is_constant_and_half_cosine_rises_to_one():
    assert {ema_momentum_at(step, 10, 0.999) for step in (0, 3, 10, 50)} == {0.999}
    values = [ema_momentum_at(step, 100, 0.99, "half_cosine") for step in range(101)]
    assert values == pytest.approx(
        [1 - 0.01 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(101)], abs=1e-15
    )
    assert all(earlier < later for earlier, later in itertools.pairwise(values))
    assert values[100] == ema_momentum_at(150, 100, 0.99, "half_cosine") == 1.0
