"""Tiled InfoNCE: tiles of any size, finite differences, memory, digits, half precision, what it refuses.

Every geometry, scheme and number of processes: tests/test_info_nce_matrix.py.
"""

import copy
from functools import partial

import pytest
import torch
from comparison import Comparison
from hard_pairs import hard_pairs
from refusals import refused
from test_info_nce_matrix import GEOMETRIES

from common import tile_comparison, tiled
from common.geometry import ChordGeometry, Sphere, squared_arccos, unit
from common.info_nce import Distillation, QueuedPairs, contrastive_loss
from common.oblique import Oblique
from common.tiled import geometry_loss, tiled_contrastive_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import L2, ObliqueGeodesic

BATCH, DIM, QUEUED = 12, 16, 9
KINDS = {
    "partners": (),
    "queue": ("queue",),
    "distilled": ("distillation",),
    "ids and queue": ("ids", "queue"),
    "all of them": ("ids", "queue", "distillation"),
}


def world(geometry, kind="partners", dtype=torch.float64, batch=BATCH, dim=DIM):
    """Embeddings of a batch, and what the kind names: ids of which some repeat or are unknown, a queue, keys."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        images, texts, old_images, old_texts, image_keys, text_keys = (
            embed(torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype))
            for rows in (batch, QUEUED, batch)
            for embed in (geometry.embed_image, geometry.embed_text)
        )
    options = {
        "ids": torch.tensor([0, 1, 2, 0, 4, 5, 6, 1, 8, -1, -1, 11])[:batch],
        "queue": QueuedPairs(old_images, old_texts, torch.tensor([1, 2, -1, -1, 30, 0, 5, 5, 7])),
        "distillation": Distillation(image_keys, text_keys, 0.4),
    }
    return images.requires_grad_(), texts.requires_grad_(), {name: options[name] for name in KINDS[kind]}


def scale_of(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def gradients_of(loss, geometry, *leaves):
    """Zero where there is none: embedding scales do not enter the loss of embeddings."""
    return torch.autograd.grad(loss, [*leaves, *geometry.parameters()], materialize_grads=True, allow_unused=True)


def worst_error(actual, expected):
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-30))


# the same numbers


@pytest.mark.parametrize(("name", "kind"), [("sphere", "partners"), ("hyperbolic squared", "all of them")])
def test_tiles_of_any_size_give_the_plain_loss_and_every_gradient(name, kind):
    geometry, scale = GEOMETRIES[name]().double(), scale_of(3.0)
    images, texts, options = world(geometry, kind)
    plain = contrastive_loss(images, texts, geometry, scale, **options)
    expected = gradients_of(plain, geometry, images, texts, scale)
    for tile in (1, 5, 11, 100):  # of 12 rows and 9 of the queue
        loss = geometry_loss(images, texts, geometry, scale, tile=tile, **options)
        assert worst_error(loss, plain) < 1e-12
        for actual, wanted in zip(gradients_of(loss, geometry, images, texts, scale), expected):
            assert worst_error(actual, wanted) < 1e-12


def test_keys_without_mass_change_nothing_and_are_not_compared():
    geometry, scale = Sphere(), scale_of(3.0)
    images, texts, options = world(geometry, "distilled")
    keys = options["distillation"]
    no_mass = Distillation(torch.full_like(keys.image_keys, torch.nan), keys.text_keys, 0.0)
    actual = tiled_contrastive_loss(images, texts, geometry, scale, distillation=no_mass, tile=5)
    assert torch.equal(actual, tiled_contrastive_loss(images, texts, geometry, scale, tile=5))


# tiles in closed form


CLOSED = {
    "elliptic": Elliptic,
    "euclidean": lambda: Euclidean(squared=False),
    "euclidean squared": lambda: Euclidean(squared=True),
    "l2": L2,
    "hyperbolic": lambda: Hyperbolic(DIM, squared=False, curvature_init=0.7),
    "hyperbolic squared": lambda: Hyperbolic(DIM, squared=True, curvature_init=0.7),
}
INNER = {"sphere": Sphere, "oblique": lambda: Oblique(4)}


def by_autograd(geometry, scalars, *_):
    """In place of `comparison_of`: the tiled loss differentiates every geometry by autograd."""
    return tiled.Comparison(tile_comparison._Methods(geometry), scalars)


@pytest.mark.parametrize("name", CLOSED)
def test_the_distance_of_chords_is_the_similarity_of_the_embeddings(name):
    geometry = CLOSED[name]().double()
    assert isinstance(geometry, ChordGeometry)
    x, y = geometry.embed_image(torch.randn(9, DIM).double()), geometry.embed_text(torch.randn(7, DIM).double())
    (vectors, a), (others, b) = geometry.chord_factors(x), geometry.chord_factors(y)
    chords = a[:, None] + b + geometry.coupling * a[:, None] * b - vectors @ others.T
    distances, inverse_slopes = geometry.distance_of_chords(chords, False)
    assert inverse_slopes is None
    torch.testing.assert_close(-geometry.distance_unit() * distances, geometry.similarity(x, y))


@pytest.mark.parametrize("name", CLOSED)
def test_inverse_slopes_are_difference_quotients_of_distances(name):
    geometry, step = CLOSED[name]().double(), 1e-6
    chords = torch.tensor([1e-3, 0.05, 0.4, 1.0, 1.7, 1.99], dtype=torch.float64)
    values, inverse_slopes = geometry.distance_of_chords(chords.clone(), True)
    above, below = (geometry.distance_of_chords(chords * factor, False)[0] for factor in (1 + step, 1 - step))
    torch.testing.assert_close(1 / inverse_slopes, (above - below) / (2 * step * chords), rtol=1e-7, atol=0.0)
    torch.testing.assert_close(values, geometry.distance_of_chords(chords.clone(), False)[0])


@pytest.mark.parametrize("name", CLOSED)
def test_chords_that_rounding_left_below_zero_have_distance_and_slope_0_and_nan_stays(name):
    geometry = CLOSED[name]()
    distances, inverse_slopes = geometry.distance_of_chords(torch.tensor([-1e-7, 0.0, torch.nan]), True)
    assert torch.equal(distances[:2], torch.zeros(2))
    assert torch.equal(inverse_slopes[:2], torch.full((2,), torch.inf))
    assert torch.isnan(distances[2])


def test_opposite_vectors_have_the_angle_and_the_slope_of_the_squared_arccos():
    halves, inverse_slopes = Elliptic().distance_of_chords(torch.tensor([2.0, 2.0 + 1e-6]), True)
    torch.testing.assert_close(2 * halves, squared_arccos(torch.tensor([-1.0, -1.0])).sqrt())
    assert torch.equal(inverse_slopes, torch.full((2,), torch.inf))


def hard_world(geometry, kind):
    """A batch with zero vectors, a text that equals the image of another pair and, off the sphere, a large norm."""
    images, texts, options = world(geometry, kind)
    with torch.no_grad():
        images[2], texts[5] = 0, 0
        texts[8] = images[1]
        if geometry.name.startswith(("euclidean", "hyperbolic")):
            images[7] *= 6
    return images, texts, options


@pytest.mark.parametrize(
    ("name", "build"),  # the other geometries in an easy world: tests/test_info_nce_matrix.py
    [
        *((name, hard_world) for name in CLOSED | INNER),
        *((name, world) for name in ("l2", "hyperbolic", "hyperbolic squared")),
    ],
)
def test_closed_form_autograd_and_plain_loss_agree_in_float64(name, build, monkeypatch):
    geometry, scale = (CLOSED | INNER)[name]().double(), scale_of(3.0)
    images, texts, options = build(geometry, "all of them")

    def of(loss, **settings):
        value = loss(images, texts, geometry, scale, **options, **settings)
        return value, *gradients_of(value, geometry, images, texts, scale)

    closed, plain = of(tiled_contrastive_loss, tile=5), of(contrastive_loss)
    monkeypatch.setattr(tiled, "comparison_of", by_autograd)
    expected = of(tiled_contrastive_loss, tile=5)
    # where vectors coincide a distance is the root of a rounding error
    tolerance = 1e-12 if build is world else 1e-6
    for actual, *others in zip(closed, expected, plain):
        assert max(worst_error(actual, other) for other in others) < tolerance


@pytest.mark.parametrize("name", CLOSED | INNER)
def test_closed_form_keeps_the_digits_of_autograd_in_float32(name, monkeypatch):
    """Values to 1e-6 and gradients to 1e-5, of embeddings in one direction; the matrix of losses has others."""
    batch, dim = 300, 64
    features = 0.8 + 0.2 * torch.randn(batch, dim)
    near = features + 0.14 * torch.randn(batch, dim)
    build = {"hyperbolic": False, "hyperbolic squared": True}
    geometry = Hyperbolic(dim, build[name]) if name in build else (CLOSED | INNER)[name]()
    logit_scale = {"l2": 1.5, "oblique": 1.0}.get(name, 14.0)  # their similarities spread as widely
    with torch.no_grad():
        embeddings = geometry.embed_image(features), geometry.embed_text(near)

    def of(loss, dtype, **settings):
        x, y = (side.to(dtype).requires_grad_() for side in embeddings)
        scale, converted = scale_of(logit_scale, dtype), copy.deepcopy(geometry).to(dtype)
        value = loss(x, y, converted, scale, **settings)
        return value, *gradients_of(value, converted, x, y, scale)

    exact = of(contrastive_loss, torch.float64)
    closed = of(tiled_contrastive_loss, torch.float32, tile=128)
    monkeypatch.setattr(tiled, "comparison_of", by_autograd)
    before = of(tiled_contrastive_loss, torch.float32, tile=128)
    for expected in (exact, before):
        assert worst_error(closed[0], expected[0]) < 1e-6
        assert max(worst_error(*pair) for pair in zip(closed[1:3], expected[1:3])) < 1e-5
    # logarithms, of one unit: that of the curvature alone adds terms of both signs and may be anything near 0
    logarithms = [torch.stack([one.flatten()[0] for one in of_loss[3:]]) for of_loss in (closed, before, exact)]
    assert max(worst_error(actual, logarithms[-1]) for actual in logarithms[:-1]) < 1e-5


# digits


@pytest.mark.parametrize("tile", [0, 5])
@pytest.mark.parametrize("name", ["euclidean", "elliptic", "oblique geodesic", "hyperbolic"])
def test_partners_keep_their_digits_in_float32_however_close(name, tile):
    """From the matrix product alone the distance of such a pair, and the direction of its gradient, is noise."""
    geometry = GEOMETRIES[name]()
    images = geometry.embed_image(torch.randn(BATCH, DIM)).detach()
    texts = geometry.embed_text(torch.randn(BATCH, DIM)).detach()
    texts[:6] = images[:6] + 1e-4 * torch.randn_like(images[:6])

    def of(dtype):
        x, y, scale = images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_(), scale_of(3.0, dtype)
        loss = geometry_loss(x, y, GEOMETRIES[name]().to(dtype), scale, tile=tile)
        return torch.autograd.grad(loss, [x, y])

    # float32 texts, not the loss, set the bound
    assert max(worst_error(*pair) for pair in zip(of(torch.float32), of(torch.float64))) < 2e-3


def test_a_batch_that_is_almost_solved_keeps_the_digits_of_loss_and_gradients_in_float32():
    """log sum exp and 1 - p of rows whose partner dominates are not what two rounded numbers leave of each other."""
    images = unit(torch.randn(64, 256))
    texts = unit(images + 0.02 * torch.randn(64, 256))

    def of(loss, dtype):
        x, y, scale = images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_(), scale_of(20.0, dtype)
        value = loss(x, y, Sphere(), scale)
        return value.detach(), *torch.autograd.grad(value, [x, y, scale])

    expected = of(contrastive_loss, torch.float64)
    assert expected[0] < 1e-5
    in_tiles = of(partial(tiled_contrastive_loss, tile=20), torch.float32)
    assert all(worst_error(*pair) < 2e-5 for pair in zip(in_tiles, expected))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_loss_and_gradients_are_finite_at_hard_pairs(name):
    geometry = GEOMETRIES[name]()
    images, texts = (side.requires_grad_() for side in hard_pairs(120, DIM))
    scale = scale_of(1.0, torch.float32)
    ids = torch.randint(60, (120,))
    for tile in (0, 50):
        embeddings = geometry.embed_image(images), geometry.embed_text(texts)
        loss = geometry_loss(*embeddings, geometry, scale, ids=ids, tile=tile)
        assert torch.isfinite(loss)
        for gradient in gradients_of(loss, geometry, images, texts, scale):
            assert torch.isfinite(gradient).all()


# memory and work


class Counting:
    """Notes the tiles that a geometry compares."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []

    def similarity(self, image_embeddings, text_embeddings):
        self.seen.append((len(image_embeddings), len(text_embeddings)))
        return super().similarity(image_embeddings, text_embeddings)


class CountingSimilarity(Counting, ObliqueGeodesic):
    """By autograd."""


class CountingChords(Counting, Euclidean):
    """In closed form."""

    def distance_of_chords(self, chords, with_slope):
        self.seen.append(tuple(chords.shape))
        return super().distance_of_chords(chords, with_slope)


@pytest.mark.parametrize(("counting", "sizes"), [(CountingSimilarity, (4,)), (CountingChords, ())])
def test_the_whole_matrix_is_never_there(counting, sizes):
    batch, tile, geometry = 64, 8, counting(*sizes)
    images = geometry.embed_image(torch.randn(batch, DIM)).requires_grad_()
    tiled_contrastive_loss(images, images.detach(), geometry, torch.tensor(2.0), tile=tile).backward()
    one_pair, *tiles = geometry.seen  # the first tells that the geometry compares in one matrix
    assert one_pair == (1, 1)
    assert set(tiles) == {(tile, tile)}
    assert len(tiles) == 2 * (batch // tile) ** 2  # once forward, once backward: both directions from one walk


def test_what_is_frozen_gets_no_gradient_and_the_rest_is_unchanged():
    geometry, scale = Hyperbolic(DIM, squared=True).double(), scale_of(3.0)
    images, texts, options = world(geometry, "ids and queue")
    everything = gradients_of(
        tiled_contrastive_loss(images, texts, geometry, scale, tile=5, **options), geometry, texts
    )
    geometry.log_curvature.requires_grad_(False)
    loss = tiled_contrastive_loss(images.detach(), texts, geometry, scale.detach(), tile=5, **options)
    loss.backward()
    torch.testing.assert_close(texts.grad, everything[0])
    assert geometry.log_curvature.grad is None


# half precision


def test_bf16_embeddings_are_compared_in_float32_and_get_their_dtype_back():
    images, texts, _ = world(Sphere(), dtype=torch.float32)
    images, texts = (side.detach().bfloat16().requires_grad_() for side in (images, texts))
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiled_contrastive_loss(images, texts, Sphere(), torch.tensor(3.0), tile=5)
    loss.backward()
    wide = [side.detach().float().requires_grad_() for side in (images, texts)]
    plain = contrastive_loss(*wide, Sphere(), torch.tensor(3.0))
    torch.testing.assert_close(loss, plain)
    for narrow, gradient in zip((images, texts), torch.autograd.grad(plain, wide)):
        assert narrow.grad.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.grad, gradient.bfloat16(), rtol=0.01, atol=1e-6)


def test_a_half_precision_scale_acts_as_its_value_does():
    geometry, (images, texts, _) = Euclidean(squared=False), world(Euclidean(squared=False), dtype=torch.float32)
    for scale in (torch.tensor(14.25).bfloat16(), torch.tensor(14.25, dtype=torch.float64)):
        actual = tiled_contrastive_loss(images, texts, geometry, scale, tile=5)
        torch.testing.assert_close(actual, contrastive_loss(images, texts, geometry, 14.25), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("geometry", [Sphere(), Oblique(4)], ids=lambda geometry: geometry.name)
def test_a_bf16_product_rounds_the_factors_and_nothing_else(geometry):
    images, texts, options = world(geometry, "all of them", torch.float32)
    scale = scale_of(3.0, torch.float32)

    def similarity(x, y):  # the scale multiplies the texts before they are rounded
        return geometry.similarity(x.bfloat16(), (scale * y).bfloat16()) / scale

    rounded = Comparison(similarity, geometry.paired_similarity)
    plain = contrastive_loss(images, texts, rounded, scale, **options)
    loss = tiled_contrastive_loss(images, texts, geometry, scale, tile=5, bf16_product=True, **options)
    torch.testing.assert_close(loss, plain)
    assert geometry_loss(images, texts, geometry, scale, tile=5, bf16_product=True, **options) == loss
    exact = contrastive_loss(images, texts, geometry, scale, **options)
    assert 1e-6 < abs(loss - exact) < 0.01
    expected = gradients_of(exact, geometry, images, texts, scale)
    for actual, wanted in zip(gradients_of(loss, geometry, images, texts, scale), expected):
        assert actual.dtype == torch.float32
        assert worst_error(actual, wanted) < 0.01


@pytest.mark.parametrize("geometry", [ObliqueGeodesic(4), Elliptic(), Euclidean(squared=True)])
def test_a_bf16_product_is_refused_where_distances_would_lose_their_digits(geometry):
    images, texts, _ = world(geometry, dtype=torch.float32)
    refused(
        (
            rf"is for an inner product, as sphere and oblique are; got {geometry.name}",
            lambda: tiled_contrastive_loss(images, texts, geometry, torch.tensor(1.0), bf16_product=True),
        )
    )


# what is refused


@pytest.mark.parametrize("loss", [tiled_contrastive_loss, contrastive_loss])
def test_mistakes_are_named(loss):
    images, texts, options = world(Sphere(), "all of them")
    scale = torch.tensor(1.0)
    short = options["queue"]._replace(text_embeddings=options["queue"].text_embeddings[1:])
    keys = Distillation(images, texts[:11], 0.5)
    refused(
        (
            "row k of images and texts is one pair: got 12 images and 11 texts",
            lambda: loss(images, texts[:11], Sphere(), scale),
        ),
        (
            r"ids of a batch of 12 must be \(12,\) int64, got \(12,\) torch.int32",
            lambda: loss(images, texts, Sphere(), scale, ids=options["ids"].int()),
        ),
        (
            r"the queue's text embeddings \(8, 16\) and 9 ids do not fit",
            lambda: loss(images, texts, Sphere(), scale, queue=short),
        ),
        (
            r"text keys \(11, 16\) must be shaped as embeddings \(12, 16\)",
            lambda: loss(images, texts, Sphere(), scale, distillation=keys),
        ),
        ("tile = 0; expected: a whole", lambda: tiled_contrastive_loss(images, texts, Sphere(), scale, tile=0)),
        ("tile = 2.5; expected: a whole", lambda: tiled_contrastive_loss(images, texts, Sphere(), scale, tile=2.5)),
        (r"alpha must lie in \[0, 1\], got 1.5", lambda: Distillation(images, texts, 1.5)),
    )


def test_a_second_derivative_and_a_changed_input_are_refused_not_wrong():
    images, texts, _ = world(Sphere())
    loss = tiled_contrastive_loss(images, texts, Sphere(), scale_of(3.0), tile=5)
    refused(
        ("the tiled loss has first derivatives only", lambda: torch.autograd.grad(loss, images, create_graph=True)),
        error=RuntimeError,
    )
    queue = world(Sphere(), "queue")[2]["queue"]
    for changed in (texts, queue.image_embeddings, queue.ids):  # keys are inserted after the backward pass
        loss = tiled_contrastive_loss(images, texts, Sphere(), scale_of(3.0), queue=queue, tile=5)
        with torch.no_grad():
            changed.mul_(2)
        refused(("modified by an inplace operation", loss.backward), error=RuntimeError)
    for place in range(3):
        ids, *keys = torch.arange(len(images)), images.detach().clone(), texts.detach().clone()
        distillation = Distillation(*keys, 0.4)
        loss = tiled_contrastive_loss(images, texts, Sphere(), scale_of(3.0), ids, distillation=distillation, tile=5)
        (ids, *keys)[place].zero_()
        refused(("modified by an inplace operation", loss.backward), error=RuntimeError)


@pytest.mark.parametrize(
    "geometry", [Sphere(), Euclidean(squared=False), Hyperbolic(DIM, squared=True)], ids=lambda g: g.name
)
def test_a_weight_of_the_loss_and_its_sign_are_those_of_every_gradient(geometry):
    geometry, scale = copy.deepcopy(geometry).double(), scale_of(3.0)
    images, texts, _ = world(geometry)
    both = (
        gradients_of(
            weight * tiled_contrastive_loss(images, texts, geometry, scale, tile=5), geometry, images, texts, scale
        )
        for weight in (1.0, -2.0)
    )
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(other, -2 * one)
