"""The Lorentz model: laws of hyperbolic space, and the digits that the distance keeps in float32."""

import json
import math

import mpmath
import pytest
import torch

from common.base.provenance import ROOT
from common.geometry import unit
from euclip.lorentz import (
    MAX_RADIUS,
    exp_map0,
    log_map0,
    lorentz_distance,
    lorentz_inner,
    paired_lorentz_distance,
    paired_squared_lorentz_distance,
    shorten,
    sinh_over,
    squared_lorentz_distance,
    time_component,
    triangle_of,
)
from scripts.lorentz_errors import CURVATURES, errors, markdown

TEXTS = torch.tensor([[0.6, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.2, -0.1, 0.4, 0.8]], dtype=torch.float64)


def scalar(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def vectors(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# the maps


def test_exponential_map_and_time_equal_those_of_the_authors():
    points = exp_map0(TEXTS, scalar(1.0))
    assert points[2].tolist() == pytest.approx([0.2295621600, -0.1147810800, 0.4591243200, 0.9182486399], abs=1e-9)
    times = time_component(points, scalar(1.0))
    assert times.tolist() == pytest.approx([1.1854652182, 1.2605918365, 1.4559701877], abs=1e-9)
    times = time_component(exp_map0(TEXTS, scalar(0.1)), scalar(0.1))
    assert times.tolist() == pytest.approx([3.2193696261, 3.2416645551, 3.2976291394], abs=1e-9)


@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("length", [1e-9, 1e-3, 1e-2, 5.0])
def test_exp_map0_then_log_map0_is_identity(c, length):
    tangent = length * unit(vectors(20, 5))
    torch.testing.assert_close(log_map0(exp_map0(tangent, scalar(c)), scalar(c)), tangent, rtol=1e-12, atol=0)


def test_maps_of_zero_are_zero_with_the_identity_as_gradient():
    for function in (exp_map0, log_map0):
        tangent = torch.zeros(3, requires_grad=True)
        mapped = function(tangent, torch.tensor(1.0))
        assert (mapped == 0).all()
        mapped.sum().backward()
        assert tangent.grad.tolist() == [1, 1, 1]


def test_maps_work_on_any_leading_axes():
    tangent = vectors(4, 3, 5)
    mapped = exp_map0(tangent, scalar(2.5))
    for row in range(4):
        torch.testing.assert_close(mapped[row], exp_map0(tangent[row], scalar(2.5)))
    torch.testing.assert_close(log_map0(mapped, scalar(2.5)), tangent)


def test_gradients_of_the_maps_are_right():
    tangent, c = vectors(4, 3).requires_grad_(), scalar(0.7).requires_grad_()
    for function in (exp_map0, log_map0, time_component):
        assert torch.autograd.gradcheck(function, (tangent, c))


def test_lorentz_inner_equals_loops():
    points, others, c = vectors(4, 3), vectors(5, 3), 2.5
    ours = lorentz_inner(points, others, scalar(c))
    for i, x in enumerate(points.tolist()):
        for j, y in enumerate(others.tolist()):
            x_time, y_time = (math.sqrt(1 / c + sum(value**2 for value in z)) for z in (x, y))
            assert ours[i, j].item() == pytest.approx(sum(a * b for a, b in zip(x, y)) - x_time * y_time)


# the distance


@pytest.mark.parametrize("c", CURVATURES)
def test_distance_along_a_ray_is_the_difference_of_the_norms(c):
    direction = unit(vectors(20, 5))
    for forth, back in ((3.0, 1.0), (3.0, -1.0), (1.0, 1.0 + 1e-6)):
        distance = paired_lorentz_distance(forth * direction, back * direction, scalar(c))
        assert distance.tolist() == pytest.approx([abs(forth - back)] * 20, rel=1e-8)


@pytest.mark.parametrize("c", CURVATURES)
def test_boosts_and_rotations_are_isometries(c):
    """A Lorentz transformation of the points leaves their distances alone; the formula knows nothing of it."""
    first, second = vectors(20, 4), vectors(20, 4)
    boost = torch.eye(5, dtype=torch.float64)
    boost[0, 0] = boost[1, 1] = math.cosh(0.8)
    boost[0, 1] = boost[1, 0] = math.sinh(0.8)
    rotation = torch.eye(5, dtype=torch.float64)
    rotation[1:, 1:] = torch.linalg.qr(vectors(4, 4))[0]

    def moved(tangent):
        points = exp_map0(tangent, scalar(c))
        whole = torch.cat([time_component(points, scalar(c))[:, None], points], dim=1)
        return log_map0((whole @ boost.T @ rotation.T)[:, 1:], scalar(c))

    before = paired_lorentz_distance(first, second, scalar(c))
    after = paired_lorentz_distance(moved(first), moved(second), scalar(c))
    assert (moved(first) - first).abs().max() > 0.5
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def test_distance_tends_to_the_euclidean_one_linearly_in_the_curvature():
    """Deviations on the parity data: 1.5e-2, 1.5e-3, 1.5e-5, 1.5e-7."""
    images = torch.tensor([[1.2, 0.3, 0.0, 0.0], [0.0, 1.0, 0.8, -0.2], [0.1, 0.1, 0.9, 1.5]], dtype=torch.float64)
    euclidean = torch.cdist(images, TEXTS)
    for c in (1e-1, 1e-2, 1e-4, 1e-6):
        deviation = (lorentz_distance(images, TEXTS, scalar(c)) - euclidean).abs().max().item()
        assert deviation == pytest.approx(0.15 * c, rel=0.05)


def test_gradients_are_right_also_at_coincidence_at_the_antipode_and_at_the_origin():
    first, c = vectors(6, 3), scalar(0.7).requires_grad_()
    second = first.clone() + 0.5 * vectors(6, 3)
    second[0], second[3] = first[0], -first[3]
    second[4], first[5] = 0, 0
    for function, rows in (
        (paired_squared_lorentz_distance, slice(0, 6)),
        (squared_lorentz_distance, slice(0, 4)),  # not with respect to the origin
        (paired_lorentz_distance, slice(1, 6)),  # d itself has no gradient at coincidence
        (lorentz_distance, slice(1, 4)),
    ):
        pairs = [side[rows].clone().requires_grad_() for side in (first, second)]
        assert torch.autograd.gradcheck(function, (*pairs, c))


def test_distances_beyond_the_largest_radius_stay_finite_and_stop_growing():
    c = torch.tensor(1.0)
    axis = torch.tensor([[1.0, 0.0]])
    far = paired_lorentz_distance(1e4 * axis, -1e4 * axis, c)
    assert far.item() == pytest.approx(2 * MAX_RADIUS, rel=1e-5)
    assert torch.isfinite(exp_map0(1e15 * axis, c)).all()
    assert torch.isfinite(lorentz_inner(*[exp_map0(1e15 * axis, c)] * 2, c)).all()
    tangent = torch.randn(50, 8)
    assert torch.equal(shorten(tangent, c)[0], tangent)
    shortened, norms = shorten(1e3 * tangent, c)
    torch.testing.assert_close(shortened.norm(dim=1), torch.full((50,), MAX_RADIUS))
    torch.testing.assert_close(norms, torch.full((50,), MAX_RADIUS))


def test_squared_distance_is_smooth_across_the_border_of_its_series():
    first = vectors(300, 3)
    second = first + 10 ** torch.linspace(-5, -1, 300, dtype=torch.float64)[:, None] * unit(vectors(300, 3))
    squared = paired_squared_lorentz_distance(first, second, scalar(1.0))
    half_chords = (squared.sqrt() / 2).sinh().square()
    assert half_chords.min() < 1e-9
    assert ((half_chords > 3e-4) & (half_chords < 3e-3)).sum() > 30  # on both sides of 1e-3
    expected = paired_lorentz_distance(first, second, scalar(1.0)).square()
    torch.testing.assert_close(squared, expected, rtol=1e-12, atol=0)


# digits in float32


@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("length", [0.1, 5.0])
def test_matched_pairs_keep_their_digits_in_float32(c, length):
    """Where the arccosh form has lost all of them; that of all pairs keeps them where pairs are not close.

    Its error of 1 - cos(theta) is a rounding step, which sinh(r) sinh(s) multiplies.
    """
    measured = 0
    for distance in (1e-4, 1e-3, 0.1, 1.0, 20.0):
        row = errors(length, distance, c, num=10)
        if row is None:
            continue
        paired, squared, all_pairs, naive = row
        assert paired < (1e-4 if distance < 1e-3 else 1e-5)
        assert squared < (2e-4 if distance < 1e-3 else 2e-5)
        if distance == 1e-4:
            assert naive > 0.5
        step = 1e-7 * math.sinh(length * c**0.5) ** 2 / math.sinh(distance * c**0.5 / 2) ** 2
        assert all_pairs < 1e-6 + 5 * max(step, step**0.5)
        measured += 1
    assert measured >= 2


@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("distance", [1e-4, 1.0])
def test_gradients_of_matched_pairs_keep_their_digits_in_float32(c, distance):
    first = unit(torch.randn(200, 512))
    second = first + distance * unit(torch.randn(200, 512))

    def gradient(dtype):
        leaf = first.to(dtype).requires_grad_()
        paired_lorentz_distance(leaf, second.to(dtype), scalar(c, dtype)).sum().backward()
        return leaf.grad.double()

    exact = gradient(torch.float64)
    assert ((gradient(torch.float32) - exact).norm(dim=1) / exact.norm(dim=1)).max() < 2e-6


def test_error_on_a_ray_grows_with_sinh_of_the_radius_and_not_before():
    """Along a ray the angle is made of the rounding of the vectors; only sinh(15.8) makes it count."""
    for c, length in ((0.1, 5.0), (1.0, 1.0), (1.0, 5.0)):
        for distance in (1e-3, 1.0):
            row = errors(length, distance, c, "ray", num=10)
            assert row is not None
            assert row[0] < 1e-5


# the parts


def test_sinh_over_equals_mpmath_on_both_sides_of_its_border():
    radii = [0.0, 1e-12, 1e-3, 9.99e-3, 1.001e-2, 0.5, 3.0, 40.0]
    ours = sinh_over(scalar(radii)).tolist()
    expected = [1.0] + [float(mpmath.sinh(r) / mpmath.mpf(r)) for r in radii[1:]]
    assert ours == pytest.approx(expected, rel=1e-14)


def test_parts_of_vectors_without_a_direction_are_0():
    zero, one = torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 0.0]])
    for first, second in ((zero, zero), (zero, one), (one, one)):
        longer_by = second.norm() - first.norm()
        assert [part.item() for part in triangle_of(first, second, first.norm(dim=1), second.norm(dim=1))] == [
            longer_by,
            0,
            0,
        ]
    assert [part.item() for part in triangle_of(one, -one, one.norm(dim=1), one.norm(dim=1))] == [0, 0, 2]


# the committed table


def test_the_table_of_errors_is_what_the_script_measures_and_within_the_goal():
    records = json.loads((ROOT / "results" / "numerics" / "lorentz_distance.json").read_text())
    assert len(records) > 60
    assert (ROOT / "results" / "numerics" / "lorentz_distance.md").read_text() == markdown(records)
    for record in records:
        if record["length"] <= 5 and 1e-4 <= record["distance"] <= 20:
            assert record["matched"] <= (1e-4 if record["distance"] < 1e-3 else 1e-5)
    record = next(record for record in records if record["distance"] == 1.0 and record["length"] == 1.0)
    assert errors(1.0, 1.0, record["curvature"])[0] == pytest.approx(record["matched"], abs=5e-7)
