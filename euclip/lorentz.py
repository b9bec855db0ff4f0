"""The Lorentz model of hyperbolic space (MERU, Sec. 3; EuCLIP, Sec. 3.1).

Conventions, fixed here:
    curvature         c > 0, a scalar tensor; the space has sectional curvature -c and lies on <x, x>_L = -1/c
    tangent vectors   u, v at the origin O, (batch, dim); what hyperbolic models embed to, cache and average
    points            exp_O(u), their space components only, (batch, dim); the time component is sqrt(1/c + |x|^2)
    arguments         `tangents` or `points`, whichever a function takes: the two cannot be told apart by shape
    radius            r = sqrt(c) |u|, the distance of a point from the origin in units of 1/sqrt(c)

The paper's distance is arccosh(-c <x, y>_L) / sqrt(c). It subtracts cosh(r) cosh(s) and sinh(r) sinh(s) cos(theta),
which agree in most digits where points are close: in float32 nothing is left of a distance of 1e-4. Here the same
distance comes from the tangent vectors in polar coordinates, radii r and s and the angle theta between them, by the law
of haversines:

    sinh^2(sqrt(c) d / 2) = sinh^2((r - s) / 2) + sinh(r) sinh(s) (1 - cos(theta)) / 2

What it subtracts is r - s and 1 - cos(theta). For all pairs both are taken as they stand, with one matrix product; for
matched pairs, which are the close ones, from the difference u - v. Everything runs in float32 or better.
"""

from typing import NamedTuple

import torch

from common.distances import ChordFactors, infinite_where_zero_, safe_sqrt
from common.vectors import at_least_float32, check_same_dim, full_precision, norm

# Tangent vectors with a larger radius are shortened to it: float32 cannot hold sinh(r) sinh(s) much beyond.
MAX_RADIUS = 40.0


def exp_map0(tangents: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Exponential map at the origin: sinh(r) / r * u.

    Args:
        tangents: (..., dim).
        curvature: scalar tensor c > 0.
    Returns:
        (..., dim), space components of the point; the zero vector gives the origin.
    """
    tangents, curvature = at_least_float32(tangents), at_least_float32(curvature)
    tangents, norms = shorten(tangents, curvature)
    return sinh_over(curvature.sqrt() * norms)[..., None] * tangents


def log_map0(points: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Inverse of exp_map0: asinh(q) / q * x with q = sqrt(c) |x|.

    Args:
        points: (..., dim), space components.
        curvature: scalar tensor c > 0.
    Returns:
        (..., dim), the tangent vector at the origin; the origin gives the zero vector.
    """
    points, curvature = at_least_float32(points), at_least_float32(curvature)
    sinh_radius = curvature.sqrt() * norm(points)
    near = sinh_radius < 1.0e-3
    far = torch.where(near, 1.0, sinh_radius)
    return torch.where(near, 1 - sinh_radius.square() / 6, torch.asinh(far) / far)[..., None] * points


def time_component(points: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """sqrt(1/c + |x|^2) of points: (..., dim) -> (...,)."""
    return (1 / at_least_float32(curvature) + at_least_float32(points).square().sum(dim=-1)).sqrt()


def lorentz_inner(points: torch.Tensor, other_points: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Lorentz inner products <x, y>_L of all pairs of points, at most -1/c: (a, dim), (b, dim) -> (a, b)."""
    check_same_dim(points, other_points)
    with full_precision(points):
        points, other_points = at_least_float32(points), at_least_float32(other_points)
        times = time_component(points, curvature)[:, None] * time_component(other_points, curvature)[None, :]
        return points @ other_points.T - times


def lorentz_distance(tangents: torch.Tensor, other_tangents: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Geodesic distances of all pairs of points that are given by their tangent vectors.

    Args:
        tangents, other_tangents: (a, dim) and (b, dim), tangent vectors at the origin.
        curvature: scalar tensor c > 0.
    Returns:
        (a, b), >= 0, float32 or better; smaller is closer. The gradient is finite, and 0 for pairs at distance 0 and
        with respect to a zero vector.
    Raises:
        ValueError: if the two dims differ; the message gives both shapes.
    """
    return _distance(_squared_half_chord(tangents, other_tangents, curvature), curvature)


def squared_lorentz_distance(
    tangents: torch.Tensor, other_tangents: torch.Tensor, curvature: torch.Tensor
) -> torch.Tensor:
    """Square of lorentz_distance, smooth where pairs coincide: (a, dim), (b, dim) -> (a, b)."""
    return _squared_distance(_squared_half_chord(tangents, other_tangents, curvature), curvature)


def paired_lorentz_distance(
    tangents: torch.Tensor, other_tangents: torch.Tensor, curvature: torch.Tensor
) -> torch.Tensor:
    """The diagonal of lorentz_distance, from differences, to full accuracy: (batch, dim) twice -> (batch,)."""
    return _distance(_paired_squared_half_chord(tangents, other_tangents, curvature), curvature)


def paired_squared_lorentz_distance(
    tangents: torch.Tensor, other_tangents: torch.Tensor, curvature: torch.Tensor
) -> torch.Tensor:
    """Square of paired_lorentz_distance: (batch, dim) twice -> (batch,)."""
    return _squared_distance(_paired_squared_half_chord(tangents, other_tangents, curvature), curvature)


def lorentz_chord_factors(tangents: torch.Tensor, curvature: torch.Tensor) -> ChordFactors:
    """sinh(r) / sqrt(2) in the direction of u, and sinh^2(r / 2), for chords with coupling 2.

    The law of haversines in other terms, since cosh(r) = 1 + 2 sinh^2(r / 2):
        q = sinh^2(sqrt(c) d / 2) = (cosh(r) cosh(s) - 1 - sinh(r) sinh(s) cos(theta)) / 2
          = a + b + 2 a b - sinh(r) sinh(s) cos(theta) / 2              a = sinh^2(r / 2), b = sinh^2(s / 2)
    Its error is about eps * cosh(r) cosh(s), as that of `lorentz_distance`, and small where both radii are.

    Args:
        tangents: (batch, dim), tangent vectors at the origin.
        curvature: scalar tensor c > 0.
    """
    with full_precision(tangents):
        tangents, curvature = at_least_float32(tangents), at_least_float32(curvature)
        shorter, norms = _shortening(tangents, curvature)
        radii = curvature.sqrt() * norms
        # 0 for a zero vector, which then has no gradient, as in `lorentz_distance`
        weights = torch.where(radii > 0, shorter * (curvature / 2).sqrt() * sinh_over(radii), 0.0)
        return ChordFactors(weights[:, None] * tangents, torch.sinh(radii / 2).square())


def lorentz_distance_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """sqrt(c) d / 2 = asinh(sqrt(q)), with slope 1 / (2 sqrt(q (1 + q))); slope 0 where rounding has left q <= 0.

    The chords are overwritten.
    """
    sinh, cosh = _sinh_and_cosh(chords)
    if not with_slope:
        return cosh.add_(sinh).log_(), None
    return (sinh + cosh).log_(), infinite_where_zero_(sinh.mul_(cosh).mul_(2))


def squared_lorentz_distance_of_chords(
    chords: torch.Tensor, with_slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """c d^2 / 4 = D^2 with D = asinh(sqrt(q)), with slope D / sqrt(q (1 + q)), 0 where q <= 0. Overwrites chords.

    In float32 the relative error of D is about 1e-7 / sqrt(q): a percent at sqrt(c) d = 2e-5.
    """
    sinh, cosh = _sinh_and_cosh(chords)
    if not with_slope:
        return cosh.add_(sinh).log_().square_(), None
    halves = (sinh + cosh).log_()
    inverse_slopes = infinite_where_zero_(sinh.mul_(cosh)).div_(halves)
    return halves.square_(), inverse_slopes


def _sinh_and_cosh(chords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of half the distance: sqrt(q) and sqrt(1 + q)."""
    chords = chords.relu_()
    return chords.sqrt(), chords.add_(1).sqrt_()


def _squared_half_chord(tangents: torch.Tensor, other_tangents: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """sinh^2(sqrt(c) d / 2) of all pairs, by the law of haversines and one matrix product."""
    check_same_dim(tangents, other_tangents)
    with full_precision(tangents):
        tangents, other_tangents, curvature = (
            at_least_float32(tensor) for tensor in (tangents, other_tangents, curvature)
        )
        tangents, norms = shorten(tangents, curvature)
        other_tangents, other_norms = shorten(other_tangents, curvature)
        radii, other_radii = curvature.sqrt() * norms, curvature.sqrt() * other_norms
        # |u||v| (1 - cos(theta)); no gradient from 0, where sinh(r) sinh(s) would multiply its rounding errors
        versines = torch.relu(norms[:, None] * other_norms[None, :] - tangents @ other_tangents.T)
        weights = curvature * sinh_over(radii)[:, None] * sinh_over(other_radii)[None, :]
        return torch.sinh((radii[:, None] - other_radii[None, :]) / 2).square() + weights * versines / 2


def _paired_squared_half_chord(
    tangents: torch.Tensor, other_tangents: torch.Tensor, curvature: torch.Tensor
) -> torch.Tensor:
    """The same for matched pairs, without loss of digits where they are close."""
    check_same_dim(tangents, other_tangents)
    with full_precision(tangents):
        tangents, other_tangents, curvature = (
            at_least_float32(tensor) for tensor in (tangents, other_tangents, curvature)
        )
        tangents, norms = shorten(tangents, curvature)
        other_tangents, other_norms = shorten(other_tangents, curvature)
        triangle = triangle_of(tangents, other_tangents, norms, other_norms)
        weights = curvature * sinh_over(curvature.sqrt() * norms) * sinh_over(curvature.sqrt() * other_norms)
        return torch.sinh(curvature.sqrt() * triangle.longer_by / 2).square() + weights * triangle.versine / 2


def _distance(squared_half_chord: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    return 2 / at_least_float32(curvature).sqrt() * torch.asinh(safe_sqrt(squared_half_chord))


def _squared_distance(squared_half_chord: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """4/c asinh(sqrt(X))^2, by its series near 0, where the root has no slope."""
    near = squared_half_chord < 1.0e-3
    x = torch.where(near, squared_half_chord, 0.0)
    series = x * (1 - x * (1 / 3 - x * (8 / 45 - x * (4 / 35))))  # next: 128/1575 x^5
    far = torch.asinh(torch.where(near, 1.0, squared_half_chord).sqrt()).square()
    return 4 / at_least_float32(curvature) * torch.where(near, series, far)


def shorten(tangents: torch.Tensor, curvature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of a radius above MAX_RADIUS cut to it, all others as they are: (..., dim) -> same, and norms."""
    factors, norms = _shortening(tangents, curvature)
    return factors[..., None] * tangents, norms


def _shortening(tangents: torch.Tensor, curvature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # factors, exactly 1 where nothing is cut, and norms after it
    norms = norm(tangents)
    factors = MAX_RADIUS / (curvature.sqrt() * norms).clamp(min=MAX_RADIUS)
    return factors, factors * norms


def sinh_over(radius: torch.Tensor) -> torch.Tensor:
    """sinh(r) / r for r >= 0, by its series near 0. Same shape."""
    near = radius < 1.0e-2
    far = torch.where(near, 1.0, radius)
    return torch.where(near, 1 + radius.square() / 6 * (1 + radius.square() / 20), torch.sinh(far) / far)


class Triangle(NamedTuple):
    """Of the origin, u and v, with the angle theta at the origin. Each (...,), in units of the vectors or their square.

    longer_by: |v| - |u|.
    area: |u||v| sin(theta), twice that of the triangle.
    versine: |u||v| (1 - cos(theta)).
    """

    longer_by: torch.Tensor
    area: torch.Tensor
    versine: torch.Tensor


def triangle_of(first: torch.Tensor, second: torch.Tensor, norms: torch.Tensor, other_norms: torch.Tensor) -> Triangle:
    """To all digits whether vectors are close or their norms far apart.

    All comes from the difference of the vectors, which is exact where they are close: its inner product t with the
    shorter one, and its height across that. |longer| cos(theta) is |shorter| + t / |shorter|, and |longer| sin(theta)
    the height, so that
        |longer| - |shorter| = (|longer|^2 - |shorter|^2) / sum = (2 t + (t / |shorter|)^2 + height^2) / sum
    The versine of an acute angle is the area times tan(theta / 2) = sin(theta) / (1 + cos(theta)).

    Args:
        first, second: (..., dim), u and v; leading axes broadcast.
        norms, other_norms: (...,), theirs.
    """
    swapped = norms > other_norms
    shorter, longer = torch.where(swapped, other_norms, norms), torch.where(swapped, norms, other_norms)
    base, difference = torch.where(swapped[..., None], second, first), second - first
    product = (base * difference).sum(dim=-1)
    divisor = shorter.clamp(min=1e-12)  # a zero vector has no direction, as in `unit`
    part = product / divisor
    height = norm(torch.addcmul(difference, (part / divisor)[..., None], base, value=-1))
    product, part = torch.where(swapped, -product, product), torch.where(swapped, -part, part)
    area, lengths, along = shorter * height, shorter + longer, shorter + part
    longer_by = (2 * product + part.square() + height.square()) / torch.where(lengths > 0, lengths, 1.0)
    acute = along > 0
    near = area * (height / torch.where(acute, longer + along, 1.0))
    versine = torch.where(acute, near, shorter * (longer - shorter) - product)
    return Triangle(torch.where(swapped, -longer_by, longer_by), area, versine)
