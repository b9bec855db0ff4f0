"""Learning rate and parameter groups."""

import dataclasses
import itertools

import pytest
import torch

from common.base.settings import OptimConfig, SgdConfig
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.run.checkpoint import last_checkpoint, save_checkpoint
from common.run.schedule import build_optimizer, learning_rate_at, set_rate
from euclip.geometry import Hyperbolic

OPTIM = OptimConfig(steps=100, warmup_steps=10, learning_rate=2.0e-3, final_learning_rate=1.0e-4)


@pytest.mark.parametrize("start", [0.0, 1.0e-5])
def test_a_warm_up_rises_in_equal_steps_to_the_peak(start):
    optim = dataclasses.replace(OPTIM, warmup_from=start)
    rates = [start, *(learning_rate_at(step, optim) for step in range(11))]
    steps = [after - before for before, after in itertools.pairwise(rates)]
    assert steps == pytest.approx([(2.0e-3 - start) / 11] * 11)
    assert learning_rate_at(50, optim) == learning_rate_at(50, OPTIM)


def test_without_a_warm_up_the_first_rate_is_the_peak_and_none_starts_above_it():
    assert learning_rate_at(0, OptimConfig(steps=5, warmup_steps=0, learning_rate=1.0)) == 1.0
    for key in ("warmup_from", "final_learning_rate"):
        with pytest.raises(ValueError, match=rf"{key} = 0.1 with optim.learning_rate = 0.002; expected: at most"):
            dataclasses.replace(OPTIM, **{key: 0.1})
    with pytest.raises(ValueError, match=r"final_learning_rate = 0.1 with optim.learning_rate = 0.06; expected: at"):
        SgdConfig(final_learning_rate=0.1)


def test_decay_equals_pytorchs_cosine():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=1.0e-4)
    for step in range(10, 100):
        assert learning_rate_at(step, OPTIM) == pytest.approx(cosine.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        cosine.step()


def test_only_matrices_decay():
    model = TwoTowers(
        VisionTransformer(16, 8, 16, 1, 2, 8, num_class_tokens=3),
        BidirectionalTextTransformer(10, 4, 16, 1, 2, 8),
        Sphere(),
        LogitScale(14.0),
    )
    decayed, spared = build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    assert {"logit_scale.log_logit_scale", "image_tower.class_embedding"} <= spared_names
    assert not [names[id(p)] for p in decayed["params"] if "norm" in names[id(p)] or names[id(p)].endswith("bias")]
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_a_scale_that_trains_between_frozen_towers_is_the_only_group_and_goes_on_after_loading(tmp_path):
    def made():
        towers = (torch.nn.Linear(2, 2).requires_grad_(False) for _ in range(2))
        model = TwoTowers(*towers, Sphere(), LogitScale(14.0))
        return model, build_optimizer(model, OptimConfig(logit_scale_rate=20.0))

    (model, optimizer), (other, other_optimizer) = made(), made()
    model.logit_scale().backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    last_checkpoint(tmp_path).load_optimizer(other, other_optimizer)
    (group,) = other_optimizer.param_groups
    assert group["rate"] == 20.0
    assert other_optimizer.state_dict()["state"] == optimizer.state_dict()["state"]


def test_logit_scale_and_curvature_with_a_separate_rate_are_a_group_that_keeps_it_and_embedding_scales_are_not_in_it():
    model = TwoTowers(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Hyperbolic(2, squared=False), LogitScale(14.0))
    optimizer = build_optimizer(model, OptimConfig(logit_scale_rate=20.0, weight_decay=0.3))
    *others, loss_group = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_loss, *rest = ({names[id(p)] for p in group["params"]} for group in (loss_group, *others))
    assert of_loss == {"logit_scale.log_logit_scale", "geometry.log_curvature"}
    assert of_loss.union(*rest) == {*names.values()}
    assert loss_group["weight_decay"] == 0.0
    set_rate(optimizer, 0, OptimConfig(learning_rate=0.01, warmup_steps=0))
    assert loss_group["lr"] == pytest.approx(0.2)
    assert [group["lr"] for group in others] == [0.01, 0.01]
