"""Micro-batches: loss and every gradient are those of one batch, whatever the sizes, with dropout, on two processes."""

import pytest
import torch
from accelerate import Accelerator
from comparison import Comparison
from processes import as_launched, in_processes
from torch import nn

from common.accumulation import MicroBatches
from common.distributed import mean_over_processes, rank, world_size
from common.encoders.text import BidirectionalTextTransformer
from common.info_nce import contrastive_loss
from common.run.launch import launched_accelerator

BATCH = 10


class RecordedDropout(nn.Module):
    """Dropout that keeps its masks, and can be told which ones to use."""

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
        curvature = self.log_curvature.exp().sum()
        image_embeddings = self.dropout(self.image(images)) * curvature
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
    assert all(expected[name].abs().max() > 1e-6 for name in expected)  # each of them matters
    return max(float((actual[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.mark.parametrize("size", [1, 3, 9])
def test_micro_batches_give_loss_and_every_gradient_of_one_batch(size):
    loss, expected = loss_and_gradients(Towers(), None, *inputs())
    actual_loss, actual = loss_and_gradients(Towers(), size, *inputs())
    assert actual["image.0.weight"].dtype == torch.float64
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


class DroppingTower(Towers):
    """A text tower that drops embeddings, attention weights and branches."""

    def __init__(self):
        super().__init__()
        self.text = BidirectionalTextTransformer(11, 3, 8, 2, 2, 4, dropout=0.3).double()


def test_a_text_towers_dropout_is_drawn_again_for_the_gradients():
    """Against one graph over all parts, each embedded once with its seed."""
    images, token_ids = inputs()
    loss, actual = loss_and_gradients(DroppingTower(), 4, images, token_ids)
    model = DroppingTower()
    torch.manual_seed(7)
    seeds = torch.randint(2**62, (3,)).tolist()
    outputs = []
    for seed, *part in zip(seeds, images.split(4), token_ids.split(4)):
        torch.manual_seed(seed)
        outputs.append(model(*part))
    image_embeddings, text_embeddings = (torch.cat(pieces) for pieces in list(zip(*outputs))[:2])
    expected_loss = contrastive_loss(image_embeddings, text_embeddings, model.geometry(), outputs[-1][2])
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert float(loss - expected_loss.detach()) == pytest.approx(0.0, abs=1e-12)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    plain_loss, _ = loss_and_gradients(DroppingTower().eval(), 4, images, token_ids)
    assert abs(float(plain_loss - loss)) > 1e-3


def test_without_a_size_it_is_the_model_and_its_backward_to_the_last_bit():
    model = Towers()
    images, token_ids = inputs()
    image_embeddings, text_embeddings, scale = model(images, token_ids)
    loss = contrastive_loss(image_embeddings, text_embeddings, model.geometry(), scale)
    loss.backward()
    for size in (None, BATCH, 64):
        actual_loss, actual = loss_and_gradients(Towers(), size, images, token_ids)
        assert torch.equal(actual_loss, loss)
        assert all(torch.equal(actual[name], parameter.grad) for name, parameter in model.named_parameters())


def test_each_micro_batch_is_embedded_twice_one_graph_at_a_time_and_gradients_add_up_over_steps():
    model, calls = Towers(), []
    model.image.register_forward_hook(lambda module, given, result: calls.append((len(result), result.requires_grad)))
    micro_batches = MicroBatches(Accelerator(cpu=True), model, 4)
    for _ in range(2):
        image_embeddings, text_embeddings, scale = micro_batches.embed(*inputs())
        micro_batches.backward(contrastive_loss(image_embeddings, text_embeddings, model.geometry(), scale))
    assert calls == 2 * [(4, False), (4, False), (2, False), (4, True), (4, True), (2, True)]
    _, once = loss_and_gradients(Towers(), None, *inputs())
    twice = {name: parameter.grad / 2 for name, parameter in model.named_parameters()}
    assert worst_error(twice, once) <= 1e-12


def test_a_frozen_scale_and_a_frozen_tower_get_no_gradient_and_the_rest_is_as_before():
    def frozen():
        model = Towers()
        model.log_logit_scale.requires_grad_(False)
        model.text.requires_grad_(False)
        return model

    _, expected = loss_and_gradients(frozen(), None, *inputs())
    _, actual = loss_and_gradients(frozen(), 3, *inputs())
    assert "log_logit_scale" not in actual
    assert worst_error(actual, expected) <= 1e-12


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


def test_batch_normalisation_is_refused_because_its_statistics_would_differ():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"optim\.micro_batch_size = 4 does not give .* batch normalisation \(1\)"):
        MicroBatches(Accelerator(cpu=True), model, 4)
    MicroBatches(Accelerator(cpu=True), model, None)


@pytest.mark.parametrize("size", [None, 4])
def test_accelerates_averaging_over_small_batches_is_refused(size, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")  # as `accelerate launch` passes its option on
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps = 3 averages losses .*expected: 1, with optim"):
        MicroBatches(Accelerator(cpu=True), Towers(), size)


def gradients_under_ddp():
    as_launched()
    accelerator = launched_accelerator()
    share = slice(rank() * BATCH // world_size(), (rank() + 1) * BATCH // world_size())
    images, token_ids = (tensor[share] for tensor in inputs())
    actual = {}
    for size in (None, 1, 2, 4):  # a share has five rows
        bare = Towers()
        model = accelerator.prepare(bare)
        assert model is not bare
        loss, gradients = loss_and_gradients(model, size, images, token_ids, accelerator, bare)
        actual[size] = mean_over_processes(loss), gradients
    return actual


def test_two_processes_in_micro_batches_equal_one_with_the_whole_batch():
    loss, expected = loss_and_gradients(Towers(), None, *inputs())
    for report in in_processes(2, gradients_under_ddp):
        for actual_loss, actual in report.values():
            assert float(actual_loss) == pytest.approx(float(loss), abs=1e-12)
            assert worst_error(actual, expected) <= 1e-12
