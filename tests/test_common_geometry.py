"""Laws of the maths and of the sphere in common/geometry.py."""

import math

import mpmath
import pytest
import torch

from common.geometry import (
    euclidean_distance,
    norm,
    paired_angles,
    paired_euclidean_distance,
    paired_squared_distances,
    safe_sqrt,
    squared_arccos,
    squared_distances,
    straight_path,
    unit,
)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_sphere_forgets_the_norm(scale):
    features = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(unit(scale * features), unit(features), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(unit(features).norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert (unit(0 * features) == 0).all()


def test_straight_path_meets_both_ends_exactly():
    start, end = 1e3 * torch.randn(3, 5), torch.randn(3, 5)
    path = straight_path(start, end, 7)
    assert torch.equal(path[0], start)
    assert torch.equal(path[-1], end)
    steps = path[1:] - path[:-1]
    torch.testing.assert_close(steps, ((end - start) / 6).expand_as(steps), rtol=1e-4, atol=1e-3)
    half = straight_path(start.bfloat16(), end.bfloat16(), 7)
    assert torch.equal(half, straight_path(start.bfloat16().float(), end.bfloat16().float(), 7))


# Euclidean distances


def test_squared_distances_of_equal_rows_are_never_negative():
    rows = torch.randn(512, 512) / 512**0.5
    naive = rows.square().sum(1)[:, None] + rows.square().sum(1)[None] - 2 * rows @ rows.T
    assert (naive.diagonal() < 0).float().mean() > 0.1  # what relu is there for
    assert (squared_distances(rows, rows) >= 0).all()
    assert (paired_squared_distances(rows, rows) == 0).all()


def test_gradient_of_the_distance_of_equal_rows_is_0_or_a_direction_never_a_pole():
    first = torch.randn(200, 64, requires_grad=True)
    paired_euclidean_distance(first, first.detach().clone()).sum().backward()
    assert (first.grad == 0).all()
    # rounding errors of the matrix product leave some of these pairs a little apart
    euclidean_distance(first, first.detach().clone()).diagonal().sum().backward()
    assert norm(first.grad).max() < 2


@pytest.mark.parametrize("distance", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("length", [1.0, 5.0])
def test_paired_euclidean_distance_keeps_its_digits(length, distance):
    first, second = pairs_at(length, distance)
    expected = (first.double() - second.double()).norm(dim=1)
    assert ((paired_euclidean_distance(first, second) - expected).abs() / expected).max() < 2e-7
    # all pairs: an absolute error of the square, 1.5 sqrt(512) roundings; by the processor 0.7e-6 to 1.6e-6
    all_pairs = squared_distances(first, second).diagonal()
    assert (all_pairs - expected.square()).abs().max() < 4e-6 * (length**2 + distance**2)


# angles


def test_squared_arccos_equals_mpmath():
    cosines = [1.0, 1 - 1e-15, 1 - 1e-8, 0.9999, 0.990001, 0.99, 0.989999, 0.5, 0.0, -0.3, -0.9, -0.999999]
    ours = squared_arccos(torch.tensor(cosines, dtype=torch.float64))
    with mpmath.workdps(40):
        expected = [float(mpmath.acos(mpmath.mpf(c)) ** 2) for c in cosines]
    assert ours.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-30)


def test_squared_arccos_has_slope_minus_2_at_1_and_a_bounded_one_at_minus_1():
    cosines = torch.tensor([1.0, 1 + 3e-7, -1.0, -1 - 3e-7, -1 + 6e-8, -1 + 2e-7], requires_grad=True)
    values = squared_arccos(cosines)
    values.sum().backward()
    assert cosines.grad[:2].tolist() == pytest.approx([-2, -2], rel=1e-5)
    assert cosines.grad.abs().max() < 1.5e4
    assert values[0] == 0
    assert values[2:].sqrt().tolist() == pytest.approx([math.pi] * 4, abs=8e-4)


def test_gradient_of_squared_arccos_is_right_on_both_sides_of_the_border():
    cosines = torch.tensor([0.9999, 0.99001, 0.98999, 0.3, -0.5, -0.99], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(squared_arccos, (cosines,))


def test_squared_arccos_keeps_only_its_input_for_the_backward_pass():
    cosines, kept = torch.linspace(-1, 1, 1001, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        angles = squared_arccos(cosines)
    assert [tensor.data_ptr() for tensor in kept] == [cosines.data_ptr()]
    angles.sum().backward()
    assert torch.isfinite(cosines.grad).all()


def test_paired_angles_equal_mpmath_from_coincidence_to_the_antipode():
    """In float32, against the angle between the rounded vectors."""
    first = unit(torch.randn(200, 64))
    other = unit(torch.randn(200, 64))
    across = unit(other - (first * other).sum(1, keepdim=True) * first)
    wanted = torch.cat([10 ** torch.linspace(-4, 0, 100), math.pi - 10 ** torch.linspace(-4, 0, 100)])[:, None]
    second = (wanted.double().cos() * first.double() + wanted.double().sin() * across.double()).float()
    ours = paired_angles(first, second)
    for k in range(0, 200, 7):
        expected = mpmath_angle(first[k], second[k])
        from_pole = min(expected, math.pi - expected)
        assert abs(ours[k].item() - expected) < 2e-6 * from_pole + 3e-7 * (expected > 1)


def test_angle_of_a_zero_vector_is_a_right_angle_without_gradient_trouble():
    zero = torch.zeros(1, 3, requires_grad=True)
    angle = paired_angles(zero, torch.zeros(1, 3, requires_grad=True))
    angle.sum().backward()
    assert angle.item() == pytest.approx(math.pi / 2)
    assert (zero.grad == 0).all()
    assert paired_angles(torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 0.0]])).item() == pytest.approx(math.pi / 2)


# roots


def test_safe_sqrt_is_the_square_root_and_0_below():
    values = torch.tensor([-1e-6, 0.0, 1e-30, 1e-12, 4.0], requires_grad=True)
    roots = safe_sqrt(values)
    roots.sum().backward()
    assert roots.tolist() == pytest.approx([0, 0, 1e-15, 1e-6, 2])
    assert values.grad.tolist() == pytest.approx([0, 0, 0.5e15, 0.5e6, 0.25], rel=1e-6)


def pairs_at(length, distance, num=200, dim=512):
    """Pairs of float32 vectors of that length at about that distance."""
    first, step = length * unit(torch.randn(num, dim)), unit(torch.randn(num, dim))
    return first, first + distance * step


def mpmath_angle(first, second):
    with mpmath.workdps(40):
        x, y = ([mpmath.mpf(value) for value in vector.tolist()] for vector in (first, second))
        cosine = mpmath.fdot(x, y) / mpmath.sqrt(mpmath.fdot(x, x) * mpmath.fdot(y, y))
        return float(mpmath.acos(cosine))
