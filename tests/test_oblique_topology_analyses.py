"""Analyses of the oblique paper: closed forms, loops from the formulas, autograd, hand-made pairs, second libraries."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from common.base.config import load_row
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.evaluation.grad_cam import recorded_input
from common.geometry import Sphere
from common.info_nce import contrastive_loss, symmetric_info_nce
from common.logit_scale import LogitScale
from common.oblique import Oblique
from oblique_topology import class_token_cost
from oblique_topology.class_token_cost import BERT_WORDS, SCENE_WORDS, TOKENS, counted, encoder_macs, time_ratios
from oblique_topology.config import Config
from oblique_topology.distance_distributions import chance_to_be_closer, sample_distances, statistics_of
from oblique_topology.equilibrium import (
    GRIDS,
    HIGHEST,
    READINGS,
    Grid,
    alignment_and_uniformity,
    alignment_share,
    balance,
    cases_of,
    drawn_similarities,
    log_ratios,
    loss_minimising,
    measures_of,
    panels_of,
    pull_and_push,
    shuffled_texts,
    similarity_gradient,
)
from oblique_topology.geometry import ObliqueGeodesic
from oblique_topology.loss_landscape import (
    gradient_norms_on_line,
    losses_on_plane,
    movable_weights,
    random_directions,
    roughness,
)
from oblique_topology.reproduce import CODE
from oblique_topology.token_maps import (
    TokenMaps,
    measured_maps,
    scores_of_pairs,
    share_in_box,
    token_maps,
    with_words_of_others,
)
from oblique_topology.token_maps import (
    statistics_of as statistics_of_maps,
)

SPHERES, SPHERE_DIM, END, LENGTH = 3, 4, 3, 9


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def small_model(geometry, tokens=1, numbers=SPHERES * SPHERE_DIM):
    """Two towers of two blocks; float64, so that sums can be compared to many digits."""
    torch.manual_seed(1)
    image_tower = VisionTransformer(16, 4, 16, 2, 2, numbers // tokens, num_class_tokens=tokens)
    text_tower = BidirectionalTextTransformer(
        20, LENGTH, 16, 2, 2, numbers // tokens, num_class_tokens=tokens, end_id=END
    )
    model = TwoTowers(image_tower, text_tower, geometry, LogitScale(10.0)).double().eval()
    for parameter in model.parameters():  # at the start blocks hardly do anything
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def small_batch(count=5):
    token_ids = torch.zeros(count, LENGTH, dtype=torch.long)
    for row in range(count):
        words = 2 + row % 5
        token_ids[row, : words + 2] = torch.tensor([2, *range(5 + row, 5 + row + words), END])
    return torch.randn(count, 3, 16, 16, generator=draws(), dtype=torch.float64), token_ids


# ---- equilibrium ----------------------------------------------------------------------------------------------------


def test_curves_are_labelled_by_the_batches_of_their_source():
    sizes = {("drawn", "small"): 16, ("drawn", "middle"): 40, ("drawn", "large"): 64}
    sizes |= {("trained", "small"): 16, ("trained", "middle"): 30, ("trained", "large"): 31}
    panels = panels_of(sizes, 0.2, lambda case, value: [(sizes[case[:2]], [0.0])])
    points = [(label, curve[0][0]) for panel in panels for label, curve in panel.curves.items()]
    assert {batch for _, batch in points} == {*sizes.values()}
    assert all(label.startswith(f"B = {batch}") for label, batch in points)


@pytest.mark.parametrize("multiplier", [1.0, 30.0])
def test_alignment_and_uniformity_are_the_numerator_and_denominator_of_equation_1(multiplier):
    similarity = torch.rand(6, 6, generator=draws(), dtype=torch.float64)
    alignment, uniformity = alignment_and_uniformity(similarity, multiplier)
    ratios, total = [], 0.0
    for i in range(6):
        numerator = math.exp(multiplier * float(similarity[i, i]))
        denominator = sum(math.exp(multiplier * float(similarity[i, j])) for j in range(6) if j != i)
        denominator += sum(math.exp(multiplier * float(similarity[j, i])) for j in range(6) if j != i)
        assert float(alignment[i]) == pytest.approx(math.log(numerator), rel=1e-12)
        assert float(uniformity[i]) == pytest.approx(math.log(denominator), rel=1e-12)
        ratios.append(numerator / denominator)
        total -= math.log(numerator / denominator) / 6  # Eq. 1
    assert float((uniformity - alignment).mean()) == pytest.approx(total)
    readings = log_ratios(similarity, multiplier)
    assert readings["mean"] == pytest.approx(math.log(sum(ratios) / 6))
    assert readings["median"] == pytest.approx(
        (sorted(map(math.log, ratios))[2] + sorted(map(math.log, ratios))[3]) / 2
    )
    assert readings["logs"] == pytest.approx(float((alignment / uniformity).mean()) - 1)
    sizes = [sum(abs(float(value)) for value in part) for part in (alignment, uniformity)]
    assert alignment_share(similarity, multiplier) == pytest.approx(sizes[0] / sum(sizes))


def test_ratios_stay_finite_where_plain_exponentials_would_not():
    similarity = 8 * torch.rand(6, 6, generator=draws(), dtype=torch.float32)
    assert all(map(math.isfinite, log_ratios(similarity, 100.0).values()))
    refused(
        (r"got \(2, 3\)", lambda: alignment_and_uniformity(torch.zeros(2, 3), 1.0)),
        ("at least two pairs", lambda: alignment_and_uniformity(torch.zeros(1, 1), 1.0)),
    )


def constant_similarities(batch, share=0.0):
    similarity = torch.full((batch, batch), 0.1, dtype=torch.float64)
    shuffled = torch.arange(batch) < round(share * batch)
    similarity.diagonal().copy_(torch.where(shuffled, 0.1, 0.4))
    return similarity


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_the_balance_of_constant_similarities_follows_the_closed_forms_of_all_readings(share):
    similarity, plain = constant_similarities(200, share), math.log(2 * 199) / 0.3
    mean = math.log((2 * 199 - share) / (1 - share)) / 0.3
    expected = {"mean": mean, "median": plain, "logs": plain / (1 - share)}
    assert {reading: balance(similarity, reading) for reading in READINGS} == pytest.approx(expected, abs=1e-5)


def test_noise_raises_the_balance_and_lowers_the_multiplier_of_the_lowest_loss():
    whole = drawn_similarities(512, draws())
    noisy = [whole[:, shuffled_texts(512, share, draws(1))] for share in (0.0, 0.05, 0.1, 0.2)]
    medians = [balance(similarity, "median") for similarity in noisy]
    lowest = [loss_minimising(similarity) for similarity in noisy]
    assert medians == pytest.approx([47, 51, 55, 79], rel=0.1)  # measured for the specification, with other draws
    assert lowest == pytest.approx([60, 46, 40, 34], rel=0.1)
    by_batch = [balance(whole[:batch, :batch], "median") for batch in (32, 128, 512)]
    assert by_batch == sorted(by_batch)


@pytest.mark.parametrize("seed", range(2))
def test_more_noise_is_the_same_noise_and_more_and_raises_the_balance_that_claims_read(seed):
    whole = drawn_similarities(256, draws(seed))
    cases = cases_of({"drawn": whole}, Grid(small=64, middle=256, large=256, shares=(0.0, 0.05, 0.1, 0.2)), seed)
    noisy = [cases["drawn", "middle", share] for share in (0.0, 0.05, 0.1, 0.2)]
    wrong = [{i for i in range(256) if matrix[i, i] != whole[i, i]} for matrix in noisy]
    assert [len(pairs) for pairs in wrong] == [0, 13, 26, 51]
    assert wrong[1] < wrong[2] < wrong[3]
    by_share = [balance(matrix, "mean") for matrix in noisy]
    assert by_share == sorted(by_share)


def test_there_is_no_balance_where_positives_are_not_the_closest():
    assert balance(torch.full((8, 8), 0.2), "mean") is None
    assert balance(constant_similarities(8) - 0.5, "logs") is None  # U falls below 0: A / U says nothing
    assert balance(constant_similarities(8) - 0.5, "mean") == pytest.approx(math.log(14) / 0.3, abs=1e-5)
    scaled = constant_similarities(8) * balance(constant_similarities(8), "mean") / HIGHEST
    near, beyond = (balance(scaled / share, "mean") for share in (0.9, 1.1))
    assert (near, beyond) == (pytest.approx(0.9 * HIGHEST, rel=1e-6), None)


def test_the_lowest_loss_is_that_of_a_fine_grid():
    similarity = drawn_similarities(64, draws())
    grid = torch.linspace(math.log(5), math.log(500), 2000).exp()
    losses = torch.tensor([symmetric_info_nce(float(scale) * similarity) for scale in grid])
    assert loss_minimising(similarity) == pytest.approx(float(grid[losses.argmin()]), rel=2e-3)


def test_a_batch_without_an_error_has_no_multiplier_of_the_lowest_loss():
    similarity = drawn_similarities(64, draws()) + 0.3 * torch.eye(64)
    losses = [float(symmetric_info_nce(scale * similarity)) for scale in (1, 10, 30, 50)]
    assert losses == sorted(losses, reverse=True)
    assert loss_minimising(similarity) is None
    similarity[0, 1] = similarity[0, 0] + 0.01  # one error
    assert 10 < loss_minimising(similarity) < 500


@pytest.mark.parametrize("multiplier", [1.0, 100.0])
def test_the_gradient_on_similarities_in_closed_form_is_that_of_autograd(multiplier):
    similarity = drawn_similarities(12, draws()).requires_grad_()
    symmetric_info_nce(multiplier * similarity).backward()
    expected, actual = similarity.grad, similarity_gradient(similarity.detach(), multiplier)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    sums = pull_and_push(similarity.detach(), multiplier)
    pull = sum(abs(float(expected[i, i])) for i in range(12))
    push = sum(abs(float(expected[i, j])) for i, j in itertools.permutations(range(12), 2))
    assert (sums["pull"], sums["push"]) == pytest.approx((pull, push))
    assert pull == pytest.approx(push)  # whatever the multiplier: their sizes cannot say that a loss rather pushes
    felt = []
    for i in range(12):
        shares = [float(expected[i, j]) for j in range(12) if j != i] + [
            float(expected[j, i]) for j in range(12) if j != i
        ]
        shares = [share / sum(shares) for share in shares]
        felt.append(math.exp(-sum(share * math.log(share) for share in shares if share > 0)))
    assert sums["felt"] == pytest.approx(sum(felt) / 12)
    assert pull_and_push(8 * torch.eye(4), 100.0)["felt"] == pytest.approx(6)  # pushes below the smallest float


def test_cases_have_the_same_names_at_every_scale_and_the_true_size_of_their_batch():
    whole = {"drawn": drawn_similarities(50, draws())}
    names = {scale: list(cases_of(whole, grid, 0)) for scale, grid in GRIDS.items()}
    assert len({tuple(rows) for rows in names.values()}) == 1
    cases = cases_of(whole, Grid(8, 20, 400), 0)
    assert [len(cases["drawn", size, 0.0]) for size in ("small", "middle", "large")] == [8, 20, 50]
    assert torch.equal(cases["drawn", "small", 0.0], whole["drawn"][:8, :8])


def test_exactly_the_asked_share_of_texts_is_shuffled():
    order = shuffled_texts(40, 0.2, draws())
    assert sorted(order.tolist()) == list(range(40))
    assert int((order != torch.arange(40)).sum()) == 8
    assert torch.equal(order, shuffled_texts(40, 0.2, draws()))
    assert not torch.equal(order, shuffled_texts(40, 0.2, draws(1)))
    assert torch.equal(shuffled_texts(40, 0.0, draws()), torch.arange(40))
    assert torch.equal(shuffled_texts(40, 1 / 40, draws()), torch.arange(40))  # one pair has nobody to exchange with
    assert (shuffled_texts(40, 1.0, draws()) != torch.arange(40)).all()


def test_the_measures_of_a_row_are_at_the_multiplier_that_they_are_named_after():
    similarity = drawn_similarities(48, draws())
    measures = measures_of(similarity)
    for multiplier in (1, 100):
        gradients = pull_and_push(similarity, multiplier)
        assert measures[f"ratio_{multiplier}"] == log_ratios(similarity, multiplier)["mean"]
        assert measures[f"share_{multiplier}"] == alignment_share(similarity, multiplier)
        assert (measures[f"slope_{multiplier}"], measures[f"felt_{multiplier}"]) == (
            gradients["pull"],
            gradients["felt"],
        )
    assert measures["share_1"] < 0.1 < 0.4 < measures["share_100"]
    assert {name: measures[f"balance_{name}"] for name in READINGS} == {
        name: balance(similarity, name) for name in READINGS
    }
    assert measures["lowest_loss"] == loss_minimising(similarity)


# ---- landscape ------------------------------------------------------------------------------------------------------


def test_directions_are_orthogonal_and_as_long_as_the_weights():
    model = small_model(Sphere())
    model.image_tower.final_norm.bias.data.zero_()
    weights = movable_weights(model)
    assert not any("logit_scale" in name for name in weights)
    assert len(weights) == len(list(model.parameters())) - 1
    first, second = random_directions(weights, draws())
    for name, weight in weights.items():
        assert float(first[name].norm()) == pytest.approx(float(weight.norm()))
        assert float(second[name].norm()) == pytest.approx(float(weight.norm()))
        assert abs(float((first[name] * second[name]).sum())) < 1e-9 * max(1, float(weight.norm()) ** 2)
    assert not first["image_tower.final_norm.bias"].any()
    again = random_directions(weights, draws())[1]
    assert all(torch.equal(again[name], second[name]) for name in weights)
    of_one = {"scalar": torch.tensor([2.0])}
    assert float(random_directions(of_one, draws())[0]["scalar"].abs()) == pytest.approx(2.0)
    assert not random_directions(of_one, draws())[1]["scalar"].any()


def test_losses_on_the_plane_are_those_of_a_model_with_these_weights():
    model, inputs = small_model(Oblique(SPHERE_DIM)), small_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = random_directions(movable_weights(model), draws())
    places, multipliers = [-0.5, 0.0, 0.5], [1.0, 20.0]
    losses = losses_on_plane(model, inputs, (first, second), places, multipliers)
    assert losses.shape == (2, 3, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for (row, b), (column, a) in itertools.product(enumerate(places), enumerate(places)):
        moved = small_model(Oblique(SPHERE_DIM))
        for name, weight in moved.named_parameters():
            if name in first:
                weight.data = before[name] + a * first[name] + b * second[name]
        images, texts, _ = moved(*inputs)
        for index, multiplier in enumerate(multipliers):
            expected = symmetric_info_nce(multiplier * moved.geometry.similarity(images, texts))
            assert losses[index, row, column] == pytest.approx(float(expected), rel=1e-9)


def test_gradient_norms_on_the_line_are_those_of_backward():
    model, inputs = small_model(Sphere()), small_batch()
    direction, _ = random_directions(movable_weights(model), draws())
    norms = gradient_norms_on_line(model, inputs, direction, [0.0, 0.3], [1.0, 50.0])
    for column, a in enumerate([0.0, 0.3]):
        moved = small_model(Sphere())
        for name, weight in moved.named_parameters():
            weight.data += a * direction[name] if name in direction else 0
        moved.requires_grad_()
        for row, multiplier in enumerate([1.0, 50.0]):
            moved.zero_grad()
            images, texts, _ = moved(*inputs)
            scale = torch.tensor(multiplier, dtype=torch.float64)
            contrastive_loss(images, texts, moved.geometry, scale).backward()
            squares = [weight.grad.square().sum() for weight in moved.parameters() if weight.grad is not None]
            assert norms[row, column] == pytest.approx(float(sum(squares).sqrt()), rel=1e-9)


def test_a_tilted_plane_is_not_rough_and_a_parabola_is():
    x = np.linspace(-1, 1, 9)
    assert roughness(2 * x[None, :] - 3 * x[:, None] + 5) == pytest.approx(0, abs=1e-12)
    step = x[1] - x[0]
    # second differences: 2 h^2 along rows, 0 along columns, as many of each
    assert roughness(np.broadcast_to(x**2, (9, 9))) == pytest.approx(math.sqrt(2) * step**2)


# ---- distances ------------------------------------------------------------------------------------------------------


class Recording(nn.Module):
    """A geometry of numbers that remembers which pairs it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def paired_similarity(self, first, second):
        self.asked.append(torch.stack([first[:, 0], second[:, 0]], dim=1).long())
        return -(first - second)[:, 0].abs()


def test_pairs_are_of_the_kind_that_they_are_called():
    owners = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    images, texts = torch.arange(4.0)[:, None], 100 + torch.arange(7.0)[:, None]
    geometry = Recording()
    distances = sample_distances(geometry, images, texts, owners, 500, draws())
    positive, negative, pictures, captions = geometry.asked
    assert sorted(positive[:, 1].tolist()) == [100, 101, 102, 103, 104, 105, 106]  # all there are
    assert all(owners[text - 100] == image for image, text in positive.tolist())
    assert {(image, text) for image, text in negative.tolist()} == {
        (image, 100 + text) for image in range(4) for text in range(7) if owners[text] != image
    }
    assert set(map(tuple, pictures.tolist())) == set(itertools.permutations(range(4), 2))
    assert {(int(owners[a - 100]), int(owners[b - 100])) for a, b in captions.tolist()} == set(
        itertools.permutations(range(4), 2)
    )
    assert [len(values) for values in distances.values()] == [7, 500, 500, 500]
    assert (distances["positive"] > 90).all()  # distances, not similarities
    assert (distances["image_image"] <= 3).all()
    assert len(sample_distances(Recording(), images, texts, owners, 3, draws())["positive"]) == 3
    with pytest.raises(ValueError, match="at least two pictures"):
        sample_distances(Recording(), images[:1], texts[:2], owners[:2], 5, draws())


def test_the_chance_to_be_closer_counts_pairs_and_ties_half():
    closer, farther = torch.tensor([0.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 5.0])
    counted_by_hand = sum((a < b) + 0.5 * (a == b) for a in closer.tolist() for b in farther.tolist()) / 12
    assert chance_to_be_closer(closer, farther) == pytest.approx(counted_by_hand)
    assert chance_to_be_closer(torch.tensor([-3.0, -2.0]), torch.tensor([-1.0])) == 1.0
    assert chance_to_be_closer(farther, closer) == pytest.approx(1 - counted_by_hand)


def test_statistics_of_hand_made_distances():
    distances = {
        "positive": torch.tensor([1.0, 3.0]),
        "negative": torch.tensor([2.0, 4.0]),
        "image_image": torch.tensor([0.0, 0.5]),
        "text_text": torch.tensor([3.0, 9.0]),
    }
    statistics = statistics_of(distances)
    assert (statistics["positive_mean"], statistics["negative_std"]) == pytest.approx((2.0, math.sqrt(2)))
    assert statistics["auc"] == pytest.approx(3 / 4)
    assert statistics["image_image_closer"] == 1.0  # in-modal negatives closer than every positive
    assert statistics["text_text_closer"] == pytest.approx((0.5 + 0) / 4)


# ---- Grad-CAM of token pairs ----------------------------------------------------------------------------------------


def test_scores_and_heat_of_token_pairs_add_up_to_those_of_the_whole_score():
    model, (images, token_ids) = small_model(Oblique(SPHERE_DIM), tokens=SPHERES), small_batch()
    maps = token_maps(model, images, token_ids)
    assert maps.scores.shape == (5, 1 + SPHERES)
    assert maps.pixels.shape == (5, 1 + SPHERES, 4, 4)
    assert maps.words.shape == (5, 1 + SPHERES, LENGTH)
    for values in (maps.scores, maps.pixels, maps.words):
        torch.testing.assert_close(values[:, 1:].sum(dim=1), values[:, 0])
        assert values[:, 1].abs().max() > 1e-6
        assert not torch.allclose(values[:, 1], values[:, 2])
    expected = model.geometry.similarity(model.encode_image(images), model.encode_text(token_ids)).diagonal()
    torch.testing.assert_close(maps.scores[:, 0], expected)  # recording changes nothing


def test_the_map_of_the_whole_score_is_grad_cam_on_the_patches_that_enter_the_last_block():
    model, (images, token_ids) = small_model(Oblique(SPHERE_DIM), tokens=SPHERES), small_batch()
    maps = token_maps(model, images, token_ids)
    kept = {}
    block = model.image_tower.transformer.blocks[-1]
    handle = block.register_forward_hook(lambda _, inputs, output: kept.update(entering=inputs[0], leaving=output))
    model.requires_grad_()
    images_in, texts_in = model.encode_image(images), model.encode_text(token_ids)
    handle.remove()
    score = model.geometry.paired_similarity(images_in, texts_in).sum()
    entering, leaving = torch.autograd.grad(score, [kept["entering"], kept["leaving"]])
    patches, slopes = kept["entering"].detach()[:, SPHERES:], entering[:, SPHERES:]
    heat = torch.einsum("bpc,bc->bp", patches, slopes.mean(dim=1)).unflatten(1, (4, 4))
    torch.testing.assert_close(maps.pixels[:, 0], heat)
    assert not leaving[:, SPHERES:].any()  # behind the last attention no patch counts


def test_words_are_words_whatever_stands_in_front_of_them_and_behind():
    images, token_ids = small_batch()
    for geometry, tokens in ((Oblique(SPHERE_DIM), SPHERES), (Sphere(), 1)):
        model = small_model(geometry, tokens)
        maps = token_maps(model, images, token_ids)
        is_word = (token_ids > END) & (token_ids != 0)
        assert torch.equal(maps.is_word, is_word)
        assert not maps.words.masked_select(~is_word[:, None].expand_as(maps.words)).any()
        assert maps.words.masked_select(is_word[:, None].expand_as(maps.words)).abs().min() > 0
        padded = token_ids.clone()
        padded[0, 5:] = 7  # behind the end token
        torch.testing.assert_close(token_maps(model, images, padded).words[0], maps.words[0])


def test_heat_of_words_by_hand():
    model, (images, token_ids) = small_model(Oblique(SPHERE_DIM), tokens=SPHERES), small_batch()
    with recorded_input(model.text_tower.transformer.blocks[-1]) as recorded:
        texts = model.encode_text(token_ids)
    (score,) = torch.autograd.grad((model.encode_image(images)[:, 1] * texts[:, 1]).sum(), recorded)
    row, words = 2, 4  # ids: class, 4 words, end
    places = range(SPHERES, SPHERES + words)  # behind as many class tokens
    weights = sum(score[row, place] for place in places) / words
    expected = [float(recorded[0][row, place].detach() @ weights) for place in places]
    assert token_maps(model, images, token_ids).words[row, 2, 1 : 1 + words].tolist() == pytest.approx(expected)
    assert not model.text_tower.transformer.blocks[-1]._forward_pre_hooks  # nothing stays behind


def test_a_score_without_spheres_has_no_pairs():
    images, token_ids = small_batch()
    for model in (small_model(Sphere()), small_model(ObliqueGeodesic(SPHERE_DIM), tokens=SPHERES)):
        maps = token_maps(model, images, token_ids)
        assert maps.scores.shape == (5, 1)
        assert maps.pixels.abs().max() > 0
        embeddings = model.encode_image(images), model.encode_text(token_ids)
        torch.testing.assert_close(scores_of_pairs(model, *embeddings)[0], maps.scores[:, 0])


def test_a_caption_without_words_has_no_heat_and_no_nan():
    model, (images, token_ids) = small_model(Oblique(SPHERE_DIM), tokens=SPHERES), small_batch()
    token_ids[1] = 0
    token_ids[1, :2] = torch.tensor([2, END])
    maps = token_maps(model, images, token_ids)
    assert not maps.is_word[1].any()
    assert not maps.words[1].any()
    assert torch.isfinite(maps.words).all()


def test_the_share_in_a_box_is_that_of_fine_pixels():
    heat = np.random.default_rng(0).random((4, 6))
    assert share_in_box(heat, (0, 0, 1, 1)) == pytest.approx(1)
    assert share_in_box(np.ones((4, 4)), (0.1, 0.2, 0.6, 0.9)) == pytest.approx(0.5 * 0.7)
    assert share_in_box(np.zeros((4, 4)), (0, 0, 1, 1)) is None
    box = (0.15, 0.3, 0.8, 0.95)
    fine = np.kron(heat, np.ones((100, 100)))  # 400 x 600 pixels, whose edges the box meets
    inside = fine[round(400 * box[1]) : round(400 * box[3]), round(600 * box[0]) : round(600 * box[2])]
    assert share_in_box(heat, box) == pytest.approx(inside.sum() / fine.sum())


def test_shares_and_likeness_of_hand_made_maps(monkeypatch):
    maps = torch.zeros(3, 3, 2, 2)
    maps[:, 0] = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    maps[:, 1] = torch.tensor([[-5.0, 2.0], [0.0, 2.0]])  # negative heat counts as none
    maps[1:, 2] = torch.tensor([[6.0, -1.0], [8.0, -1.0]])  # item 0 has no heat there
    monkeypatch.setattr(
        "oblique_topology.token_maps.as_model_inputs", lambda _, images, texts: (torch.tensor(images), None)
    )
    monkeypatch.setattr(
        "oblique_topology.token_maps.token_maps", lambda _, images, __: TokenMaps(None, maps[images], None, None)
    )
    items = [{"image": k, "text": "", "box": (0.0, 0.5, 1.0, 1.0)} for k in range(3)]
    shares, likeness, areas = measured_maps(SimpleNamespace(batch_size=2, model=None), items)
    assert areas.tolist() == [0.5] * 3
    assert shares.tolist() == [[0.75, 0.5, 0.5]] + [[0.75, 0.5, 8 / 14]] * 2
    expected = (6 + 24) / (math.sqrt(10) * 10)
    np.testing.assert_allclose(likeness, [[1, 0, 0]] + [[1, 0, expected]] * 2)


def test_the_best_pair_gains_nothing_from_being_chosen():
    generator = np.random.default_rng(0)
    shares, areas = generator.random((4000, 17)), np.full(4000, 0.25)  # every pair alike
    others = generator.random((4000, 17)) / 2
    statistics = statistics_of_maps(shares, shares, areas, others)
    assert statistics["best_pair", "share_in_box"] == pytest.approx(0.5, abs=0.03)
    assert statistics["best_pair_others", "share_in_box"] == pytest.approx(0.25, abs=0.03)
    assert statistics["whole_others", "share_in_box"] == others[1::2, 0].mean()
    assert statistics["box", "share_in_box"] == 0.25
    shares[:, 5] += 0.2
    others[:, 5] = 0.1
    statistics = statistics_of_maps(shares, 1 - shares, areas, others)
    assert statistics["best_pair", "share_in_box"] == pytest.approx(0.7, abs=0.03)
    assert statistics["best_pair_others", "share_in_box"] == pytest.approx(0.1)  # of the pair that own words choose
    assert statistics["best_pair", "likeness"] == pytest.approx(0.3, abs=0.03)
    # the best of item 0 is the worst of item 1, and not the best of both
    two = np.array([[0.0, 0.6, 0.5], [0.0, 0.0, 0.6]])
    assert statistics_of_maps(two, two, areas[:2], two)["best_pair", "share_in_box"] == 0.0


def test_without_boxes_there_are_no_shares_and_without_pairs_no_pairs():
    values, no_boxes = np.full((4, 3), 0.5), np.full(4, math.nan)
    none = values * math.nan
    assert statistics_of_maps(none, values, no_boxes, none) == {("mean_pair", "likeness"): 0.5}
    whole = statistics_of_maps(values[:, :1], values[:, :1], np.full(4, 0.1), values[:, :1] / 2)
    assert {key[0]: value for key, value in whole.items()} == {
        "box": pytest.approx(0.1),
        "whole": 0.5,
        "whole_others": 0.25,
    }


def test_words_of_others_are_other_words_beside_the_same_picture_and_box():
    items = [{"image": k, "text": text, "box": -k} for k, text in enumerate(["a", "b", "b", "c", "a"])]
    changed = with_words_of_others(items)
    assert [item["text"] for item in changed] == ["b", "c", "c", "a", "b"]
    assert [(item["image"], item["box"]) for item in changed] == [(item["image"], item["box"]) for item in items]
    assert items[0]["text"] == "a"
    with pytest.raises(ValueError, match="3 items with one text"):
        with_words_of_others([{"text": "a"}] * 3)


# ---- cost of class tokens -------------------------------------------------------------------------------------------


def config_with(row, tokens, scale="paper"):
    settings = ["method.geometry=oblique", f"method.num_spheres={tokens}", "method.multi_token=true"]
    return load_row(Config, CODE.folder, CODE.folder / "configs" / row, scale, settings, CODE.scale_files)


def test_counted_costs_are_the_formula_with_patches_and_projections_and_those_of_the_notes():
    """Claims C4, C16, C18 and C35 and the README's first deviation."""
    row = "ablation_multi_64_8.yaml"
    costs = {tokens: counted(config_with(row, tokens), BERT_WORDS) for tokens in (1, 8, 32)}
    for tokens, cost in costs.items():
        numbers = 512 // tokens
        vision = encoder_macs(196 + tokens, 12, 384) + 196 * 768 * 384 + tokens * 384 * numbers
        text = encoder_macs(76 + tokens, 12, 512) + tokens * 512 * numbers
        assert (cost["vision"], cost["text"], cost["both"]) == (2 * vision, 2 * text, 2 * (vision + text))
    assert [round(costs[tokens]["both"] / costs[1]["both"], 2) for tokens in (8, 32)] == [1.06, 1.27]
    assert costs[8]["parameters"] == pytest.approx(75.229697, abs=1e-9)
    more = 1e6 * (costs[8]["encoder_parameters"] - costs[1]["encoder_parameters"])
    assert more == pytest.approx(7 * (384 + 384 + 512), abs=0.5)  # a vector and a position, a position
    assert costs[1]["kept"] > 1e7
    assert 1.02 < costs[8]["kept"] / costs[1]["kept"] < 1.15
    one, *others = (counted(config_with(row, tokens, "demo"), SCENE_WORDS)["both"] for tokens in (1, 8, 16, 32))
    assert [round(other / one, 2) for other in others] == [1.32, 1.69, 2.44]


def test_times_are_ratios_to_the_first_model(monkeypatch):
    row = CODE.folder / "configs" / "table2_multi.yaml"
    configs = [
        load_row(Config, CODE.folder, row, "smoke", [f"method.num_spheres={tokens}"]) for tokens in (TOKENS[0], 4)
    ]
    real = class_token_cost.step_seconds
    times, measured = iter([1.0, 90.0, 2.0, 3.0, 1.0, 4.0, 4.0, 8.0]), []  # the first round warms up

    def seconds(model, images, token_ids):
        measured.append(real(model, images, token_ids))
        return next(times)

    monkeypatch.setattr(class_token_cost, "step_seconds", seconds)
    assert time_ratios(configs, BERT_WORDS, batch=2, rounds=3, seed=0) == [1.0, 2.0]  # of 1.5, 4 and 2
    assert len(measured) == 8
    assert min(measured) > 0
