"""SigLIP's loss against open_clip's and the formula in loops; its rows, on one process and on two."""

import itertools
import math

import pytest
import torch
from open_clip.loss import SigLipLoss
from processes import in_processes
from runs import lines, logged, row_config, trained, weights

from common.base.config import ConfigError, override
from common.distributed import rank, world_size
from common.geometry import Sphere, unit
from common.sigmoid_loss import sigmoid_chance, sigmoid_loss
from euclip.geometry import Hyperbolic

BATCH, DIM = 12, 6


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    images, texts = (torch.randn(BATCH, DIM, generator=generator, dtype=dtype) for _ in range(2))
    return images, texts, torch.tensor(9.0, dtype=dtype), torch.tensor(-8.0, dtype=dtype)


def test_it_is_open_clips_loss_with_all_gradients():
    images, texts, scale, bias = (tensor.requires_grad_() for tensor in inputs())
    ours = sigmoid_loss(unit(images), unit(texts), Sphere(), scale, bias)
    theirs = SigLipLoss()(unit(images), unit(texts), scale, bias)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    for one, other in zip(*(torch.autograd.grad(loss, (images, texts, scale, bias)) for loss in (ours, theirs))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_it_is_the_formula_in_loops_in_a_geometry_with_scalars():
    images, texts, scale, bias = inputs(torch.float64)
    geometry = Hyperbolic(DIM, squared=True).double()
    images, texts = geometry.embed_image(images), geometry.embed_text(texts)
    similarity = geometry.similarity(images, texts)
    expected = 0.0
    for i, j in itertools.product(range(BATCH), repeat=2):
        z = 1 if i == j else -1
        expected -= math.log(1 / (1 + math.exp(-z * (9.0 * float(similarity[i, j]) - 8.0)))) / BATCH
    assert float(sigmoid_loss(images, texts, geometry, scale, bias)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bias", [-300.0, 300.0])
def test_value_and_gradients_are_finite_far_out(bias):
    images, texts, scale, _ = (tensor.requires_grad_() for tensor in inputs())
    loss = sigmoid_loss(unit(images), unit(texts), Sphere(), scale, torch.tensor(bias))
    loss.backward()
    assert math.isfinite(float(loss))
    assert all(tensor.grad.isfinite().all() for tensor in (images, texts, scale))


def test_no_logit_that_all_pairs_share_is_better_than_chance():
    def shared(bias):
        return float(sigmoid_loss(torch.ones(BATCH, 1), torch.ones(BATCH, 1), Sphere(), torch.zeros(()), bias))

    best = math.log(1 / (BATCH - 1))  # sigmoid(best) = 1 / BATCH
    assert shared(torch.tensor(best)) == pytest.approx(sigmoid_chance(BATCH), rel=1e-6)
    assert min(shared(torch.tensor(best + step)) for step in (-0.1, 0.1)) > sigmoid_chance(BATCH)


def share():
    """Mean over processes of the loss, and its gradients, of this process's share of the batch."""
    images, texts, scale, bias = (tensor.requires_grad_() for tensor in inputs(torch.float64))
    rows = (unit(side).chunk(world_size())[rank()] for side in (images, texts))
    loss = sigmoid_loss(*rows, Sphere(), scale, bias)
    return loss.detach(), *torch.autograd.grad(loss, (images, texts, scale, bias))


def test_two_processes_equal_one():
    for whole, *parts in zip(share(), *in_processes(2, share)):
        torch.testing.assert_close(sum(parts) / 2, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("paper", ["contrastive_basics", "euclip"])
def test_its_row_trains_the_bias_and_logs_it(paper, tmp_path):
    few = ["optim.steps=3", "run.log_every=1", "run.diagnose_every=1", "data.num_test=4", "data.num_labelled=4"]
    config = row_config(paper, "beyond_sigmoid", *few)
    files = trained(paper, config, tmp_path)
    steps = lines(files)
    assert steps[0]["logit_bias"] == -10.0 != steps[2]["logit_bias"]
    name = "contrastive_loss" if paper == "euclip" else "loss"
    for line in steps:
        assert line["gradient_norm_logit_bias"] > 0
        assert line[name] / line["loss_over_chance"] == pytest.approx(sigmoid_chance(config.optim.global_batch_size))
    bias = weights(files)["logit_bias.logit_bias"]
    again = override(config, [f"model.init={tmp_path}", "optim.steps=1", "optim.warmup_steps=0"])
    (started,) = logged(trained(paper, again, tmp_path / "again"), "logit_bias")
    assert started == float(bias)  # where the first run left it


@pytest.mark.parametrize(
    ("paper", "row", "setting"),
    [
        ("contrastive_basics", "beyond_sigmoid", "method.queue_size=32"),
        ("contrastive_basics", "beyond_sigmoid", "optim.loss_tile=4"),
        ("contrastive_basics", "table1_ours", "method.logit_bias_init=-1"),
        ("euclip", "beyond_sigmoid", "optim.loss_tile=4"),
        ("euclip", "table4_clip", "method.logit_bias_init=-1"),
    ],
)
def test_a_setting_that_the_loss_does_not_take_is_refused(paper, row, setting):
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        row_config(paper, row, setting)
