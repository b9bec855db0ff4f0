"""Entailment cones: a caption is more general than its picture, so the image lies in a cone behind the text (EuCLIP).

    residual = max(0, exterior_angle(text, image) - half_aperture(text))

The cone has its apex at the text's embedding and opens away from the origin; the nearer the apex is to the origin, the
wider it opens, and within `min_radius` K (hyperbolic: where sinh(r) < 2K) it is a half-space. The exterior angle is pi
minus the angle O-text-image. Only matched pairs count; the mean of their residuals is the entailment loss. Swapped
sides would give a smooth loss near 2.7, so functions of both take keyword arguments only.

In the hyperbolic case text and image are tangent vectors (euclip/lorentz.py); in polar coordinates, radii r of the text
and s of the image and the angle theta between them,
    half-aperture    arcsin(2K / sinh(r))
    exterior angle   atan2(sinh(s) sin(theta), sinh(s) cosh(r) cos(theta) - cosh(s) sinh(r))
are the paper's arcsin(2K / (sqrt(c) |x|)) and arccos of Lorentz products, without their cancellations.
Angles are in radians. All functions broadcast over the leading axes: (a, 1, dim) and (b, dim) give all pairs.
Everything runs in float32 or better.
"""

import math

import torch

from common.vectors import at_least_float32, norm, paired_angles, unit
from euclip.lorentz import shorten, sinh_over, triangle_of

# The one guard: an image within this distance of its text, in the embeddings' units (hyperbolic: sinh(sqrt(c) d) /
# sqrt(c), the hypotenuse of the triangle), counts as lying on the apex, inside the cone. The direction from one to the
# other has a gradient of 1 / distance, and below it is made of rounding errors anyway.
COINCIDENT = 1.0e-4
# A text of a smaller norm is the origin (`unit`), which has no direction: its angle is 0 by definition.
ORIGIN = 1.0e-12


def euclidean_entailment_residual(*, images: torch.Tensor, texts: torch.Tensor, min_radius: float) -> torch.Tensor:
    """Angle by which images miss the cones of their texts, Euclidean.

    Args:
        images, texts: (..., dim) embeddings, already scaled by 1 / sqrt(dim); leading axes broadcast.
        min_radius: K >= 0, in the embeddings' units; 0 closes every cone to a ray.
    Returns:
        (...,) radians in [0, pi], 0 inside the cone.
    Raises:
        ValueError: if min_radius is negative, or the last axes differ.
    """
    return torch.relu(euclidean_exterior_angle(images=images, texts=texts) - euclidean_half_aperture(texts, min_radius))


def lorentz_entailment_residual(
    *, images: torch.Tensor, texts: torch.Tensor, min_radius: float, curvature: torch.Tensor
) -> torch.Tensor:
    """Angle by which images miss the cones of their texts, hyperbolic.

    For small c it is the Euclidean residual at 2K / sqrt(c), not K: a falling curvature widens the cones.

    Args:
        images, texts: (..., dim), tangent vectors at the origin; leading axes broadcast.
        min_radius: K >= 0.
        curvature: scalar tensor c > 0.
    Returns:
        (...,) radians in [0, pi], 0 inside the cone.
    Raises:
        ValueError: if min_radius is negative, or the last axes differ.
    """
    exterior = lorentz_exterior_angle(images=images, texts=texts, curvature=curvature)
    return torch.relu(exterior - lorentz_half_aperture(texts, min_radius, curvature))


def euclidean_half_aperture(texts: torch.Tensor, min_radius: float) -> torch.Tensor:
    """arcsin(min(1, K / |x|)): (..., dim) -> (...,) radians in [0, pi / 2]."""
    return _half_aperture(norm(at_least_float32(texts)), min_radius)


def lorentz_half_aperture(texts: torch.Tensor, min_radius: float, curvature: torch.Tensor) -> torch.Tensor:
    """arcsin(min(1, 2K / sinh(r))), from tangent vectors: (..., dim) -> (...,) radians in [0, pi / 2]."""
    curvature = at_least_float32(curvature)
    radii = curvature.sqrt() * shorten(at_least_float32(texts), curvature)[1]
    return _half_aperture(torch.sinh(radii) / 2, min_radius)


def euclidean_exterior_angle(*, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """pi minus the angle O-text-image, the angle between x and y - x.

    Args:
        images: (..., dim), y.
        texts: (..., dim), x; leading axes broadcast.
    Returns:
        (...,) radians in [0, pi]. An image on its text, and any image of a text at the origin, is at 0.
    Raises:
        ValueError: if the last axes differ; the message gives both shapes.
    """
    _check_same_last_axis(images, texts)
    texts, images = at_least_float32(texts), at_least_float32(images)
    step = images - texts
    on_apex = (norm(step) <= COINCIDENT) | (norm(texts) < ORIGIN)
    return torch.where(on_apex, 0.0, paired_angles(unit(texts).expand_as(step), unit(step)))


def lorentz_exterior_angle(*, images: torch.Tensor, texts: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """pi minus the angle O-text-image of the hyperbolic triangle that tangent vectors span with the origin.

    Args:
        images, texts: (..., dim), tangent vectors at the origin; leading axes broadcast.
        curvature: scalar tensor c > 0.
    Returns:
        (...,) radians in [0, pi]. An image on its text, and any image of a text at the origin, is at 0. In float32 the
        gradient is 0 once r + s is beyond about 45.
    Raises:
        ValueError: if the last axes differ; the message gives both shapes.
    """
    _check_same_last_axis(images, texts)
    texts, images, curvature = (at_least_float32(tensor) for tensor in (texts, images, curvature))
    (texts, text_norms), (images, image_norms) = shorten(texts, curvature), shorten(images, curvature)
    root_c = curvature.sqrt()
    # sinh(s) / (|u| s); legs are over sqrt(c)
    stretch = sinh_over(root_c * image_norms) / text_norms.clamp(min=ORIGIN)
    triangle = triangle_of(texts, images, text_norms, image_norms)
    radial = torch.sinh(root_c * triangle.longer_by) / root_c
    opposite = stretch * triangle.area  # sinh(s) sin(theta)
    # sinh(s - r) - sinh(s) cosh(r) (1 - cos(theta)): the second leg at the top of this file, with 1 - cos(theta) in it
    adjacent = radial - stretch * torch.cosh(root_c * text_norms) * triangle.versine
    on_apex = (torch.hypot(opposite, adjacent) <= COINCIDENT) | (text_norms < ORIGIN)
    return torch.atan2(torch.where(on_apex, 0.0, opposite), torch.where(on_apex, 1.0, adjacent))


def _half_aperture(length: torch.Tensor, min_radius: float) -> torch.Tensor:
    """arcsin(min(1, K / length)); the slope, which has no bound where they are equal, ends at 707 / K."""
    if min_radius < 0:
        raise ValueError(f"min_radius = {min_radius}; expected: at least 0")
    within = length <= (1 + 1.0e-6) * min_radius
    return torch.where(within, math.pi / 2, torch.arcsin(min_radius / torch.where(within, math.inf, length)))


def _check_same_last_axis(images: torch.Tensor, texts: torch.Tensor) -> None:
    if texts.shape[-1] != images.shape[-1]:
        raise ValueError(f"images {tuple(images.shape)} and texts {tuple(texts.shape)} must agree in the last axis")
