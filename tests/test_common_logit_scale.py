"""The logit scale: bounds on the multiplier, frozen or trained."""

import math
from functools import partial

import pytest
import torch
from refusals import refused

from common.geometry import scalar_values
from common.logit_scale import LogitScale
from euclip.geometry import Hyperbolic


@pytest.mark.parametrize(("init", "expected"), [(200.0, 100.0), (0.5, 2.0), (50.0, 50.0)])
def test_start_is_moved_into_the_bounds(init, expected):
    assert LogitScale(init, minimum=2.0, maximum=100.0)().item() == pytest.approx(expected, rel=1e-6)


def test_clamp_holds_the_bound_and_leaves_a_gradient_at_it():
    scale = LogitScale(100.0, maximum=100.0)
    optimizer = torch.optim.SGD(scale.parameters(), lr=0.1)
    (-scale()).backward()  # wants to grow
    optimizer.step()
    assert scale().item() > 100.0
    scale.clamp_()
    assert scale().item() == pytest.approx(100.0, rel=1e-6)
    optimizer.zero_grad()
    scale().backward()  # wants to shrink: a clamp in the forward pass would have gradient 0 here
    assert scale.log_logit_scale.grad.item() == pytest.approx(100.0, rel=1e-5)
    optimizer.step()
    assert scale().item() < 100.0


def test_frozen_scale_never_moves():
    scale = LogitScale(1.0, trainable=False)
    assert [parameter for parameter in scale.parameters() if parameter.requires_grad] == []
    scale.clamp_()
    assert scale.log_logit_scale.item() == 0.0


def test_impossible_values_and_a_fixed_multiplier_outside_its_bounds_are_refused():
    refused(
        *(("logit_scale", partial(LogitScale, init)) for init in (0.0, float("nan"), -1.0)),
        ("logit_scale", lambda: LogitScale(1.0, minimum=3.0, maximum=2.0)),
        ("logit_scale", lambda: LogitScale(minimum=0.0)),
        (r"logit_scale_init = 200.0 with .* is outside its bounds; expected: None to 100.0",
         lambda: LogitScale(200.0, trainable=False)),
    )  # fmt: skip
    assert LogitScale(200.0, maximum=None, trainable=False)().item() == pytest.approx(200.0)


def test_the_defaults_are_those_of_clip_and_the_parameter_is_the_logarithm():
    scale = LogitScale()
    assert (scale().item(), scale.minimum, scale.maximum) == (pytest.approx(1 / 0.07), None, 100.0)
    assert scale.log_logit_scale.requires_grad
    assert scale.log_logit_scale.item() == pytest.approx(math.log(1 / 0.07), rel=1e-6)


def test_constructors_keep_float64():
    """Of a parameter made in float32 `double()` gives 0.10000000149."""
    exact = torch.float64
    assert LogitScale(0.1, dtype=exact)().item() == pytest.approx(0.1, rel=1e-15)
    hyperbolic = Hyperbolic(7, squared=False, curvature_init=0.3, dtype=exact)
    values = scalar_values(hyperbolic.scalars())
    assert values == pytest.approx({"curvature": 0.3, "image_scale": 7**-0.5, "text_scale": 7**-0.5}, rel=1e-15)
