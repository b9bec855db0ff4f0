"""Micro-batches: loss and every gradient are those of one batch, whatever the sizes, with dropout, on two processes."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from comparison import Comparison
from processes import as_launched, in_processes
from refusals import refused
from torch import nn

from common.accumulation import MicroBatches
from common.distributed import mean_over_processes, rank, world_size
from common.info_nce import contrastive_loss
from common.run.launch import launched_accelerator

BATCH = 10


class RecordedDropout(nn.Module):
    """Dropout that keeps its masks, and can be given those to use."""

    def __init__(self):
        super().__init__()
        self.masks, self.given = [], None

    def forward(self, features):
        mask = (torch.rand_like(features) < 0.7).to(features.dtype) if self.given is None else self.given
        self.masks.append(mask)
        return features * mask / 0.7


class Towers(nn.Module):
    """Two small towers; a scalar that both the embeddings and the similarity use, one that only the loss uses."""

    def __init__(self, dropout=False):
        super().__init__()
        torch.manual_seed(3)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 4))
        self.dropout = RecordedDropout() if dropout else nn.Identity()
        self.log_curvature = nn.Parameter(torch.tensor([0.3]))
        self.log_weight = nn.Parameter(torch.tensor([-0.5]))
        self.log_logit_scale = nn.Parameter(torch.tensor([1.0]))
        self.double()

    def forward(self, images, token_ids):
        image_embeddings = self.dropout(self.image(images)) * self.log_curvature.exp().sum()
        return image_embeddings, self.text(token_ids).tanh(), self.log_logit_scale.exp().sum()

    def similarity(self, images, texts):
        return -self.log_curvature.exp() * self.log_weight.exp() * torch.cdist(images, texts).square()

    def geometry(self):
        return Comparison(self.similarity)


def inputs():
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(11, (BATCH, 3), generator=generator)


def loss_and_gradients(model, size, images, token_ids, accelerator=None, bare=None):
    """Of one step; `bare` is the model without DDP."""
    bare = model if bare is None else bare
    micro_batches = MicroBatches(accelerator or Accelerator(cpu=True), model, size)
    torch.manual_seed(7)
    image_embeddings, text_embeddings, scale = micro_batches.embed(images, token_ids)
    loss = contrastive_loss(image_embeddings, text_embeddings, bare.geometry(), scale)
    micro_batches.backward(loss)
    gradients = {name: parameter.grad.clone() for name, parameter in bare.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    return loss.detach(), gradients


def worst_error(actual, expected):
    """Over all parameters: largest difference, relative to the parameter's largest gradient."""
    assert actual.keys() == expected.keys()
    assert all(gradient.abs().max() > 1e-6 for gradient in expected.values())  # all of them matter
    return max(float((actual[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_give_loss_and_every_gradient_of_one_batch(size):
    loss, expected = loss_and_gradients(Towers(), None, *inputs())
    actual_loss, actual = loss_and_gradients(Towers(), size, *inputs())
    assert len(actual) == 10
    assert float(actual_loss - loss) == pytest.approx(0.0, abs=1e-12)
    assert worst_error(actual, expected) <= 1e-12


def test_with_dropout_the_gradients_are_those_of_one_batch_with_the_same_draws():
    model = Towers(dropout=True)
    loss, actual = loss_and_gradients(model, 4, *inputs())
    masks = model.dropout.masks
    assert len(masks) == 2 * 3
    assert all(torch.equal(first, again) for first, again in zip(masks[:3], masks[3:]))
    whole = torch.cat(masks[:3])
    assert 0.4 < whole.mean() < 0.95
    assert len(whole.unique(dim=0)) > 4  # parts draw each for itself

    reference = Towers(dropout=True)
    reference.dropout.given = whole
    expected_loss, expected = loss_and_gradients(reference, None, *inputs())
    assert float(loss - expected_loss) == pytest.approx(0.0, abs=1e-12)
    assert worst_error(actual, expected) <= 1e-12


def test_without_a_size_it_is_the_model_and_its_backward_to_the_last_bit():
    model = Towers()
    *embeddings, scale = model(*inputs())
    loss = contrastive_loss(*embeddings, model.geometry(), scale)
    loss.backward()
    for size in (None, BATCH):
        actual_loss, actual = loss_and_gradients(Towers(), size, *inputs())
        assert torch.equal(actual_loss, loss)
        assert all(torch.equal(actual[name], parameter.grad) for name, parameter in model.named_parameters())


def test_a_micro_batch_is_embedded_twice_one_graph_at_a_time_and_gradients_add_up_over_steps():
    model, calls = Towers(), []
    model.image.register_forward_hook(lambda module, given, result: calls.append((len(result), result.requires_grad)))
    micro_batches = MicroBatches(Accelerator(cpu=True), model, 4)
    for _ in range(2):
        image_embeddings, text_embeddings, scale = micro_batches.embed(*inputs())
        micro_batches.backward(contrastive_loss(image_embeddings, text_embeddings, model.geometry(), scale))
    assert calls == 2 * [(4, False), (4, False), (2, False), (4, True), (4, True), (2, True)]
    _, once = loss_and_gradients(Towers(), None, *inputs())
    assert worst_error({name: parameter.grad / 2 for name, parameter in model.named_parameters()}, once) <= 1e-12


def test_a_frozen_scale_and_a_frozen_tower_get_no_gradient_and_the_rest_is_as_before():
    model = Towers()
    for frozen in (model.log_logit_scale, model.text):
        frozen.requires_grad_(False)
    _, expected = loss_and_gradients(model, None, *inputs())
    _, actual = loss_and_gradients(model, 3, *inputs())
    assert worst_error(actual, expected) <= 1e-12


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_the_model_returns_itself_has_its_gradient_once(frozen):
    model = nn.Linear(6, 4).double()
    model.bias_of_loss = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64), requires_grad=not frozen)
    model.forward = lambda images: (nn.functional.linear(images, model.weight), model.bias_of_loss)
    gradients = []
    for size in (None, 3):
        micro_batches = MicroBatches(Accelerator(cpu=True), model, size)
        features, bias = micro_batches.embed(inputs()[0])
        micro_batches.backward((features + bias).square().sum())
        gradients.append(model.bias_of_loss.grad)
        assert model.bias_of_loss.requires_grad is not frozen
        model.zero_grad()
    if frozen:
        assert gradients == [None, None]
    else:
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_weights_cast_by_autocast_get_their_gradient_in_the_second_pass():
    # a cast that autocast had kept from the pass without a graph would cut the weights off
    class Cast(Towers):
        def forward(self, images, token_ids):
            with torch.autocast("cpu", torch.bfloat16):
                first, second, scale = super().forward(images, token_ids)
            return first.float(), second.float(), scale

    images, token_ids = inputs()
    _, expected = loss_and_gradients(Cast().float(), None, images.float(), token_ids)
    _, actual = loss_and_gradients(Cast().float(), 3, images.float(), token_ids)
    assert worst_error(actual, expected) < 0.05  # bfloat16 has 8 bits


def test_inputs_of_unlike_lengths_are_refused():
    images, token_ids = inputs()
    for size in (None, 4):
        embed = MicroBatches(Accelerator(cpu=True), Towers(), size).embed
        refused((r"inputs of \[10, 8\] rows", partial(embed, images, token_ids[:8])))


def test_batch_normalisation_and_accelerates_averaging_over_small_batches_are_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    MicroBatches(Accelerator(cpu=True), model, None)
    statistics = r"optim\.micro_batch_size = 4 does not give .* batch normalisation \(1\)"
    refused((statistics, lambda: MicroBatches(Accelerator(cpu=True), model, 4)))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")  # as `accelerate launch` passes its option on
    averaging = r"gradient_accumulation_steps = 3 averages losses .*expected: 1, with optim"
    refused((averaging, lambda: MicroBatches(Accelerator(cpu=True), Towers(), None)))


def gradients_under_ddp():
    as_launched()
    accelerator = launched_accelerator()
    share = slice(rank() * BATCH // world_size(), (rank() + 1) * BATCH // world_size())
    images, token_ids = (tensor[share] for tensor in inputs())
    actual = {}
    for size in (None, 2):  # of two processes a share has five rows
        bare = Towers()
        model = accelerator.prepare(bare)
        assert model is not bare
        loss, gradients = loss_and_gradients(model, size, images, token_ids, accelerator, bare)
        actual[size] = mean_over_processes(loss), gradients
    return actual


@pytest.mark.parametrize("count", [1, 2])  # torchrun wraps the model of one process, too
def test_processes_under_ddp_in_micro_batches_equal_one_with_the_whole_batch(count):
    loss, expected = loss_and_gradients(Towers(), None, *inputs())
    for report in in_processes(count, gradients_under_ddp):
        for actual_loss, actual in report.values():
            assert float(actual_loss) == pytest.approx(float(loss), abs=1e-12)
            assert worst_error(actual, expected) <= 1e-12
