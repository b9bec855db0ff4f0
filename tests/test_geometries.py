"""The laws that every geometry of the repository and of docs/template keeps, against loops from its formula.

A new geometry gets a line in CASES. What only one of them has is in the tests of its file.
"""

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from euclip_formulas import distance
from hard_pairs import (
    assert_autocast_changes_nothing,
    assert_finite_at_hard_pairs,
    assert_gradient_is_right,
    assert_nothing_but_float32,
)
from torch import nn

from common.geometry import (
    ConeGeometry,
    Geometry,
    RootedGeometry,
    Sphere,
    clamp_scalars_,
    norm,
    one_matrix,
    scalar_values,
    unit,
)
from common.info_nce import contrastive_loss
from common.oblique import Oblique
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import L2, ObliqueGeodesic, max_average

DIM, SPHERE_DIM, SPHERES = 12, 4, 3
Ball = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "template" / "geometry.py"))["Ball"]


# the formulas, of two lists of features each


def inner(x, y):
    return math.fsum(a * b for a, b in zip(x, y))


def cosine(x, y):
    return inner(x, y) / math.sqrt(inner(x, x) * inner(y, y))


def spheres(x):
    return [x[start : start + SPHERE_DIM] for start in range(0, DIM, SPHERE_DIM)]


def lorentz(x, y, c):
    """Of features over sqrt(dim)."""
    return distance("hyperbolic", *([value / math.sqrt(DIM) for value in element] for element in (x, y)), c)


def best_partners(x, y):
    return sum(max(cosine(sphere, other) for other in spheres(y)) for sphere in spheres(x)) / SPHERES


@dataclass(frozen=True)
class Case:
    """build: numbers of the features -> geometry. formula: features of an image and of a text -> similarity.

    low, high: of the similarity, and its values at opposite and at equal points. low = -inf: none, or at no pair.
    metric: minus the similarity is a distance. normalised: so are the embeddings, on each sphere, and their mean.
    distance: of `distance_to`, from features; None = the geometry has no root.
    cones: whether it has entailment cones.
    scalars: names of what trains in it.
    """

    name: str
    build: Callable[[int], nn.Module]
    formula: Callable[[list[float], list[float]], float]
    low: float = -math.inf
    high: float = 0.0
    metric: bool = False
    normalised: bool = False
    distance: Callable[[list[float], list[float]], float] | None = None
    cones: bool = False
    scalars: tuple[str, ...] = ()


def angle(x, y):
    return math.acos(cosine(x, y))


def angles(x, y):
    return math.hypot(*map(angle, spheres(x), spheres(y)))


def hyperbolic(c, squared, absorbing=False):
    bounds = {"curvature_min": c / 2, "curvature_max": 2 * c, "embedding_scale_max": 1.0}
    return Case(
        "hyperbolic_squared" if squared else "hyperbolic",
        lambda dim: Hyperbolic(dim, squared, c, absorbing_bounds=absorbing, **bounds),
        lambda x, y: -(lorentz(x, y, c) ** (2 if squared else 1)),
        metric=not squared,
        distance=lambda x, y: lorentz(x, y, c),
        cones=True,
        scalars=("curvature", "image_scale", "text_scale"),
    )


def scaled(x, y):
    return math.dist(x, y) / math.sqrt(DIM)


def in_ball(x):
    return [value / math.sqrt(1 + inner(x, x)) for value in x]


CASES = {
    "sphere": Case("sphere", lambda _: Sphere(), cosine, -1, 1, normalised=True, distance=angle),
    "elliptic": Case(
        "elliptic",
        lambda _: Elliptic(),
        lambda x, y: -angle(x, y),
        -math.pi,
        metric=True,
        normalised=True,
        distance=angle,
    ),
    "oblique": Case(
        "oblique",
        lambda _: Oblique(SPHERE_DIM),
        lambda x, y: sum(map(cosine, spheres(x), spheres(y))),
        -SPHERES,
        SPHERES,
        normalised=True,
        distance=angles,
    ),
    "oblique geodesic": Case(
        "oblique_geodesic",
        lambda _: ObliqueGeodesic(SPHERE_DIM),
        lambda x, y: -angles(x, y),
        -math.pi * math.sqrt(SPHERES),
        metric=True,
        normalised=True,
        distance=angles,
    ),
    "l2": Case("euclidean", lambda _: L2(), lambda x, y: -math.dist(x, y), metric=True, distance=math.dist),
    "max average": Case("max_average", lambda _: max_average(SPHERE_DIM), best_partners, -1, 1),
    "euclidean": Case(
        "euclidean",
        lambda _: Euclidean(squared=False),
        lambda x, y: -scaled(x, y),
        metric=True,
        distance=scaled,
        cones=True,
    ),
    "euclidean squared": Case(
        "euclidean_squared",
        lambda _: Euclidean(squared=True),
        lambda x, y: -(scaled(x, y) ** 2),
        distance=scaled,
        cones=True,
    ),
    **{f"hyperbolic {c}": hyperbolic(c, squared=False) for c in (0.1, 1.0, 10.0)},
    **{f"hyperbolic squared {c}": hyperbolic(c, squared=True) for c in (0.1, 1.0, 10.0)},
    "hyperbolic, absorbing": hyperbolic(1.0, squared=False, absorbing=True),
    "template": Case(
        "ball", lambda _: Ball(), lambda x, y: -(math.dist(in_ball(x), in_ball(y)) ** 2), scalars=("radius",)
    ),
}


def cases_of(kind=lambda case: True):
    chosen = {name: case for name, case in CASES.items() if kind(case)}
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


every_case = cases_of()


def exact(case):
    """In float64 to all digits: scalars that were rounded to float32 first would be off by 1e-8."""
    torch.set_default_dtype(torch.float64)
    try:
        return case.build(DIM)
    finally:
        torch.set_default_dtype(torch.float32)


def embedded(geometry, images, texts):
    with torch.no_grad():
        return geometry.embed_image(images), geometry.embed_text(texts)


def features(*nums, dtype=torch.float64):
    return [torch.randn(num, DIM, dtype=dtype) for num in nums]


@every_case
def test_similarities_are_those_of_the_formula_in_both_directions(case):
    geometry, (images, texts) = exact(case), features(4, 6)
    assert isinstance(geometry, Geometry)
    assert geometry.name == case.name
    pair = embedded(geometry, images, texts)
    by_images, by_texts = directions = geometry.directions(*pair)
    assert torch.equal(by_images, geometry.similarity(*pair))
    for i, x in enumerate(images.tolist()):
        for j, y in enumerate(texts.tolist()):
            assert by_images[i, j].item() == pytest.approx(case.formula(x, y), rel=1e-8, abs=1e-9)
            assert by_texts[j, i].item() == pytest.approx(case.formula(y, x), rel=1e-8, abs=1e-9)
    assert one_matrix(directions) == by_texts.T.is_set_to(by_images) == (case.name != "max_average")
    paired = geometry.paired_similarity(pair[0], pair[1][:4])
    torch.testing.assert_close(paired, by_images.diagonal(), rtol=1e-8, atol=1e-9)
    if geometry.is_inner_product:
        torch.testing.assert_close(by_images, pair[0].flatten(1) @ pair[1].flatten(1).T)


@every_case
def test_similarity_stays_in_its_range_and_is_largest_at_equal_points(case):
    geometry = exact(case)
    images, texts = embedded(geometry, *features(300, 200))
    assert ((case.low <= geometry.similarity(images, texts)) & (geometry.similarity(images, texts) < case.high)).all()
    itself = geometry.paired_similarity(images, images)
    torch.testing.assert_close(itself, torch.full_like(itself, case.high), rtol=0, atol=1e-12 if case.high else 0)
    assert (geometry.paired_similarity(texts, texts.flip(0)) < case.high).all()
    if math.isfinite(case.low):
        opposite = geometry.paired_similarity(images, -images)
        low = case.low if case.name != "max_average" else opposite
        torch.testing.assert_close(opposite, torch.as_tensor(low).expand_as(opposite), check_dtype=False)


@cases_of(lambda case: case.metric)
def test_a_distance_obeys_the_triangle_inequality(case):
    geometry = exact(case)
    a, b, c = (geometry.embed_text(element).detach() for element in features(2_000, 2_000, 2_000))
    ab, bc, ac = (-geometry.paired_similarity(*pair) for pair in ((a, b), (b, c), (a, c)))
    assert (ac <= ab + bc + 1e-12).all()


@every_case
def test_gradients_are_right(case):
    assert_gradient_is_right(case.build(DIM), *features(3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_values_and_gradients_are_finite_at_hard_pairs(case, dtype):
    """Equal and opposite vectors, zeros, vectors that nearly coincide, and lengths from 1e-6 to 1e15."""
    rows = 100 if case.name != "max_average" else 30
    assert assert_finite_at_hard_pairs(case.build(DIM), rows**2, dtype, dim=DIM, rows=rows) >= 2 * rows**2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_values_and_gradients_are_finite_at_a_million_hard_pairs(case, dtype):
    assert (
        assert_finite_at_hard_pairs(case.build(64), 10**6, dtype, dim=64 if case.name != "max_average" else 12) > 10**6
    )


@every_case
def test_everything_runs_in_float32_or_better_whatever_autocast_says(case):
    geometry, (images, texts) = case.build(DIM), features(6, 6, dtype=torch.float32)
    assert_nothing_but_float32(geometry, images, texts)
    assert_autocast_changes_nothing(geometry, images, texts)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        pair = embedded(case.build(DIM).to(wanted), images.to(dtype), texts.to(dtype))
        results = [*pair]
        for given in (
            pair,
            [element.to(dtype) for element in pair],
        ):  # as they were embedded, and as someone stored them
            results += [*geometry.to(wanted).directions(*given), geometry.paired_similarity(*given)]
        assert {element.dtype for element in results} == {wanted}


@every_case
def test_it_runs_on_the_meta_device_and_names_shapes_that_do_not_fit(case):
    geometry = case.build(DIM).to("meta")
    pair = [geometry.embed_text(torch.empty(num, DIM, device="meta")) for num in (4, 3)]
    assert [element.shape for element in geometry.directions(*pair)] == [(4, 3), (3, 4)]
    assert geometry.paired_similarity(pair[0], pair[0]).shape == (4,)
    shapes = [torch.Size([2, *pair[0].shape[1:]]), torch.Size([2, *pair[0].shape[1:-1], pair[0].shape[-1] + 1])]
    geometry = case.build(DIM)
    comparisons = [geometry.similarity] + [geometry.paired_similarity] * (case.name != "max_average")
    for compare in comparisons:
        with pytest.raises(ValueError, match=r"got|agree") as raised:
            compare(*map(torch.ones, shapes))
        assert all(str(tuple(shape)) in str(raised.value) for shape in shapes)


@every_case
def test_the_mean_is_a_point_like_others(case):
    geometry, (sample,) = exact(case), features(6)
    if case.name == "max_average":
        with pytest.raises(ValueError, match=r"expected: method\.prompt_average = scores"):
            geometry.mean(sample)
        return
    embeddings = geometry.embed_text(sample).detach()
    total = embeddings.sum(dim=0)
    torch.testing.assert_close(geometry.mean(embeddings), unit(total) if case.normalised else total / 6)
    per_class = torch.stack([embeddings, embeddings.flip(0)], dim=1)  # prompts, classes, ...: as zero-shot has them
    torch.testing.assert_close(geometry.mean(per_class)[1], geometry.mean(embeddings))


@every_case
def test_scalars_stay_within_their_bounds_and_keep_their_gradient_there(case):
    geometry = case.build(DIM)
    assert tuple(scalar.name for scalar in geometry.scalars()) == case.scalars
    assert {id(element.parameter) for element in geometry.scalars()} == {
        id(element) for element in geometry.parameters()
    }
    assert clamp_scalars_(geometry.scalars()) == 0
    for far in (-5.0, 5.0):
        with torch.no_grad():
            for scalar in geometry.scalars():
                scalar.parameter.fill_(far)
        moved = clamp_scalars_(geometry.scalars())
        bounded = [
            element for element in geometry.scalars() if (element.minimum if far < 0 else element.maximum) is not None
        ]
        assert moved == len(bounded)
        values = scalar_values(geometry.scalars())
        for scalar in bounded:
            assert values[scalar.name] == pytest.approx(scalar.minimum if far < 0 else scalar.maximum, rel=1e-6)
        absorbing = [element for element in geometry.scalars() if element.absorbing]
        assert clamp_scalars_(geometry.scalars()) == len(absorbing)  # nothing moves these
        images, texts = features(4, 4, dtype=torch.float32)
        if case.scalars:
            geometry.zero_grad()
            geometry.similarity(geometry.embed_image(images), geometry.embed_text(texts)).sum().backward()
        for scalar in geometry.scalars():
            assert (scalar.parameter.grad == 0).all() == scalar.absorbing


@pytest.mark.parametrize("bound", [0.1, 0.5, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("end", ["curvature_min", "curvature_max"])
def test_a_scalar_that_starts_at_an_absorbing_bound_keeps_its_gradient(bound, end):
    bounds = {"curvature_min": 0.01, "curvature_max": 1000.0, end: bound}
    (curvature,) = (
        scalar
        for scalar in Hyperbolic(4, True, curvature_init=bound, absorbing_bounds=True, **bounds).scalars()
        if scalar.name == "curvature"
    )
    curvature.value().backward()
    assert curvature.parameter.grad != 0


@every_case
def test_distances_to_a_point_are_geodesics_and_walks_to_the_root_come_nearer(case):
    geometry, (sample, others) = exact(case), features(9, 9)
    assert isinstance(geometry, RootedGeometry) == (case.distance is not None)
    assert isinstance(geometry, ConeGeometry) == case.cones
    if case.distance is None:
        return
    assert geometry.has_cones == case.cones
    images, texts = embedded(geometry, sample, others)
    distances = geometry.distance_to(images, texts[3])
    expected = [case.distance(x, others[3].tolist()) for x in sample.tolist()]
    assert distances.tolist() == pytest.approx(expected, rel=1e-8)
    assert geometry.distance_to(texts[3:4], texts[3]).item() == 0

    root = geometry.root(torch.cat([images, texts]))
    total = torch.cat([images, texts]).sum(dim=0)
    is_flat = geometry.space in ("euclidean", "hyperbolic")
    torch.testing.assert_close(root, torch.zeros_like(root) if is_flat else unit(total))
    if case.cones:  # from the origin it is the norm, whatever the curvature
        torch.testing.assert_close(geometry.distance_to(images, root), norm(images))
    walk = geometry.interpolate(images[0], root, 50)
    shares = [1 - k / 49 for k in range(50)]
    straight = torch.stack([root + share * (images[0] - root) for share in shares])
    if geometry.space == "product":  # a great circle at constant speed on each sphere, by sines
        theta = torch.arccos((images[0] * root).sum(dim=1, keepdim=True))
        circles = [((s * theta).sin() * images[0] + ((1 - s) * theta).sin() * root) / theta.sin() for s in shares]
        torch.testing.assert_close(walk, torch.stack(circles))
    else:
        torch.testing.assert_close(walk, unit(straight) if case.normalised else straight)
    assert geometry.interpolate(root, root, 3).isfinite().all()
    assert (geometry.distance_to(walk, root).diff() < 0).all()


@cases_of(lambda case: case.cones)
def test_cones_have_their_apex_at_the_text(case):
    geometry = exact(case)
    _, texts = embedded(geometry, *features(1, 9))
    behind = geometry.entailment_residual(images=1.5 * texts, texts=texts, min_radius=0.1)
    before = geometry.entailment_residual(images=texts, texts=1.5 * texts, min_radius=0.1)
    assert (behind == 0).all()
    assert (before > math.pi / 3).all()


@every_case
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_no_score(case, bad):
    """A NaN that became distance 0 would be the best match of all."""
    geometry = case.build(DIM)
    for side in (0, 1):
        sides = features(4, 4, dtype=torch.float32)
        sides[side][2, 5] = bad
        pair = embedded(geometry, *sides)
        spoilt = torch.arange(4) == 2
        scores, paired = geometry.similarity(*pair), geometry.paired_similarity(*pair)
        assert torch.equal(scores.isfinite().all(dim=1 - side), ~spoilt)
        assert not scores.select(side, 2).isfinite().any()
        assert torch.equal(paired.isfinite(), ~spoilt)
        if case.cones:
            residual = geometry.entailment_residual(images=pair[0], texts=pair[1], min_radius=0.1)
            assert torch.equal(residual.isfinite(), ~spoilt)
        if case.distance is not None:
            assert torch.equal(geometry.distance_to(pair[side], pair[1 - side][0]).isfinite(), ~spoilt)


@every_case
@pytest.mark.parametrize("size", [1e-20, 1e-30, 1e-42])
def test_tiny_features_have_finite_gradients(case, size):
    geometry = case.build(DIM)
    images, texts = (size * side for side in features(4, 4, dtype=torch.float32))
    texts[3], texts[2] = images[3], 0.0
    for leaves in ((images, texts), (images, torch.randn(4, DIM))):
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        pair = geometry.embed_image(leaves[0]), geometry.embed_text(leaves[1])
        total = geometry.similarity(*pair).sum() + geometry.paired_similarity(*pair).sum()
        if case.cones:
            total = total + geometry.entailment_residual(images=pair[0], texts=pair[1], min_radius=0.1).sum()
            total = total + geometry.entailment_residual(images=pair[1], texts=pair[0], min_radius=0.1).sum()
        total.backward()
        for tensor in (total, *(leaf.grad for leaf in leaves), *(weight.grad for weight in geometry.parameters())):
            assert tensor.isfinite().all()


@every_case
def test_similarities_and_their_gradients_go_through_vmap(case):
    geometry, (images, texts) = exact(case), (torch.stack(features(4, 4, 4)), torch.stack(features(5, 5, 5)))

    def total(x, y):
        pair = geometry.embed_image(x), geometry.embed_text(y)
        return geometry.similarity(*pair).sin().sum() + geometry.paired_similarity(pair[0], pair[1][:4]).sum()

    step = torch.func.grad_and_value(total, argnums=(0, 1))
    gradients, values = torch.func.vmap(step)(images, texts)
    for k in range(3):
        expected, value = step(images[k], texts[k])
        torch.testing.assert_close(values[k], value)
        for actual, wanted in zip(gradients, expected):
            torch.testing.assert_close(actual[k], wanted)


ONE_OF_EACH_NAME = {case.name: case for case in reversed(CASES.values())}


@pytest.mark.parametrize(
    "case",
    [
        case if name in ("sphere", "hyperbolic") else pytest.param(case, marks=pytest.mark.slow)
        for name, case in ONE_OF_EACH_NAME.items()
    ],
    ids=ONE_OF_EACH_NAME,
)
def test_the_loss_compiles_into_one_graph(case):
    geometry, scale, ids = case.build(DIM), torch.tensor(2.0, requires_grad=True), torch.tensor([1, 2, 1, 4])
    images, texts = (side.requires_grad_() for side in features(4, 4, dtype=torch.float32))

    def loss(images, texts, scale):
        return contrastive_loss(geometry.embed_image(images), geometry.embed_text(texts), geometry, scale, ids)

    torch._dynamo.reset()
    actual = torch._dynamo.explain(loss)(images, texts, scale)
    assert actual.graph_break_count <= 2, actual.break_reasons
