"""SimSiam: loops from the formula, the stopped gradient, heads."""

import math

import pytest
import torch
from torch import nn

from contrastive_basics.vision.simsiam import SimSiam, simsiam_loss, simsiam_predictor, simsiam_projector

BATCH, DIM = 6, 5


def four(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other)) / math.hypot(*one) / math.hypot(*other)


def test_the_loss_equals_loops_written_from_the_formula():
    rows = zip(*(tensor.tolist() for tensor in four()))
    expected = -sum((cosine(a, d) + cosine(b, c)) / 2 for a, b, c, d in rows) / BATCH
    for stop_gradient in (True, False):
        assert float(simsiam_loss(*four(), stop_gradient)) == pytest.approx(expected, abs=1e-14)


def test_the_loss_lies_between_minus_one_and_one():
    for seed in range(50):
        assert -1 <= float(simsiam_loss(*four(seed=seed))) <= 1
    constant = torch.full((BATCH, DIM), 0.3, dtype=torch.float64)
    assert float(simsiam_loss(constant, constant, constant, constant)) == pytest.approx(-1, abs=1e-15)
    assert float(simsiam_loss(constant, constant, -constant, -constant)) == pytest.approx(1, abs=1e-15)


def test_no_gradient_reaches_the_target_branch():
    p1, p2, z1, z2 = (tensor.requires_grad_() for tensor in four())
    simsiam_loss(p1, p2, z1, z2).backward()
    assert z1.grad is z2.grad is None
    assert min(p1.grad.abs().max(), p2.grad.abs().max()) > 1e-3
    simsiam_loss(p1, p2, z1, z2, stop_gradient=False).backward()
    assert z1.grad.abs().max() > 1e-3
    # through a network: the same gradient as with targets that were computed beforehand
    torch.manual_seed(0)
    model = SimSiam(nn.Sequential(nn.Linear(4, DIM), nn.Tanh()), nn.Linear(DIM, DIM)).double()
    views = torch.randn(2, BATCH, 4, dtype=torch.float64)
    targets = [projections.detach() for projections in model(*views)[2:]]
    stopped, given = simsiam_loss(*model(*views)), simsiam_loss(*model(*views)[:2], *targets, stop_gradient=False)
    gradients, expected = (torch.autograd.grad(loss, [*model.parameters()]) for loss in (stopped, given))
    assert min(gradient.abs().max() for gradient in gradients) > 1e-4
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_in_float32_under_autocast_too(dtype):
    given = four(dtype)
    expected = simsiam_loss(*(tensor.float() for tensor in given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = simsiam_loss(*given)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)


def test_a_zero_projection_has_cosine_zero_and_a_finite_gradient():
    _, p2, z1, z2 = four()
    zero = torch.zeros(BATCH, DIM, dtype=torch.float64, requires_grad=True)
    loss = simsiam_loss(zero, p2, z1, z2)
    assert float(loss.detach()) == pytest.approx(float(simsiam_loss(p2, p2, z1, z1)) / 2)
    loss.backward()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(1, DIM), (BATCH, DIM + 1), (BATCH,), (BATCH, DIM, 1)])
def test_shapes_that_differ_are_refused_and_all_given(shape):
    p1, p2, z1, _ = four()
    with pytest.raises(ValueError, match=rf"\(6, 5\), \(6, 5\), \(6, 5\), \({', '.join(map(str, shape))},?\)"):
        simsiam_loss(p1, p2, z1, torch.zeros(shape, dtype=torch.float64))


def test_heads_are_those_of_the_paper():
    projector, predictor = simsiam_projector(512), simsiam_predictor()
    kinds = [type(layer).__name__ for layer in projector]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert projector[7].weight is None
    assert [type(layer).__name__ for layer in predictor] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert (predictor[0].bias is None, predictor[3].bias is None) == (True, False)
    outputs = simsiam_projector(8, 16)(torch.randn(64, 8)).detach()
    torch.testing.assert_close(outputs.mean(dim=0), torch.zeros(16), rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.var(dim=0, correction=0), torch.ones(16), rtol=1e-2, atol=0)
