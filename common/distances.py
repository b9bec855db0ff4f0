"""Distances of all pairs by one matrix product, of matched pairs from differences, and of chords (`ChordGeometry`)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.vectors import at_least_float32, check_same_dim, full_precision, norm


def squared_distances(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Squared Euclidean distances of all pairs by one matrix product.

    The error is about eps * (|x|^2 + |y|^2) at any distance, so pairs that nearly coincide lose their digits;
    `paired_squared_distances` keeps those of matched pairs.

    Args:
        image_embeddings, text_embeddings: (num_images, dim) and (num_texts, dim).
    Returns:
        (num_images, num_texts), >= 0, float32 or better; smaller is closer.
    Raises:
        ValueError: if the two dims differ.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        images, texts = at_least_float32(image_embeddings), at_least_float32(text_embeddings)
        squares = images.square().sum(dim=1)[:, None] + texts.square().sum(dim=1)[None, :]
        return torch.relu(squares - 2 * (images @ texts.T))  # at 0, clamp's gradient depends on the version


def paired_squared_distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The diagonal of `squared_distances`, accurate by differences: (batch, dim) twice -> (batch,)."""
    check_same_dim(first, second)
    with full_precision(first):
        return (at_least_float32(first) - at_least_float32(second)).square().sum(dim=-1)


def euclidean_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Euclidean distances of all pairs, not squared (oblique paper, Table 1, "l2"; EuCLIP).

    Shapes and Raises as `squared_distances`. The gradient is 0 for pairs at distance 0.
    """
    return safe_sqrt(squared_distances(image_embeddings, text_embeddings))


def paired_euclidean_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The diagonal of `euclidean_distance`, accurate by differences: (batch, dim) twice -> (batch,)."""
    check_same_dim(first, second)
    with full_precision(first):
        return norm(at_least_float32(first) - at_least_float32(second))


def safe_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square root whose value and gradient are 0 where rounding has left nothing positive; NaN stays. Same shape.

    A squared distance from a matrix product is 0 or at least one rounding step of its terms, so the slope of the root
    amplifies its error by no more than about a thousand.
    """
    nothing = values <= 0  # not `~(values > 0)`: NaN must stay NaN and not become the distance of a perfect match
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, values).sqrt())  # both: where(n, 0, sqrt(0)) is NaN


def squared_arccos(cosines: torch.Tensor) -> torch.Tensor:
    """Square of the arc cosine, which is smooth at 1 (slope -2).

    Args:
        cosines: any shape, float32 or better; above 1 by rounding gives a value just below 0.
    Returns:
        Squared radians, at most pi**2. Cosines within 1e-7 of -1 count as -1 + 1e-7 with gradient 0: the slope stays
        below 1.5e4, and angles stop 4.5e-4 short of pi.
    """
    return _SquaredArccos.apply(cosines)


class _SquaredArccos(torch.autograd.Function):
    # keeps only its input for the backward pass: a product of spheres has one such matrix for each of them

    generate_vmap_rule = True

    @staticmethod
    def forward(cosines):
        defect = 1 - cosines
        series = defect * (2 + defect * (1 / 3 + defect * (4 / 45 + defect * (1 / 35))))  # next: 16/1575 defect^5
        far = torch.arccos(cosines.clamp(-1 + 1.0e-7, 1))
        far.mul_(far)  # vmap has no rule for square_
        return torch.where(defect < 1.0e-2, series, far)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (cosines,) = ctx.saved_tensors
        defect = 1 - cosines
        near, opposite = defect < 1.0e-2, cosines <= -1 + 1.0e-7
        series = 2 + defect * (2 / 3 + defect * (4 / 15 + defect * (4 / 35)))
        away = torch.where(near | opposite, 0.0, cosines)
        far = 2 * torch.arccos(away) / ((1 - away) * (1 + away)).sqrt()
        return -gradient * torch.where(opposite, 0.0, torch.where(near, series, far))


class ChordFactors(NamedTuple):
    """What chords are made of: vectors (batch, dim) and offsets (batch,)."""

    vectors: torch.Tensor
    offsets: torch.Tensor


def euclidean_chord_factors(embeddings: torch.Tensor) -> ChordFactors:
    """x and |x|^2 / 2, for chords q = |x - y|^2 / 2 with coupling 0: (batch, dim) -> (batch, dim), (batch,)."""
    with full_precision(embeddings):
        vectors = at_least_float32(embeddings)
        return ChordFactors(vectors, vectors.square().sum(dim=1) / 2)


def squared_distance_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """d^2 / 2 = q, with slope 1; slope 0 where rounding has left q <= 0. Overwrites chords."""
    halves = chords.relu_()
    return halves, halves.sign().reciprocal_() if with_slope else None


def distance_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """d / sqrt(2) = sqrt(q), with slope 1 / (2 sqrt(q)); slope 0 where rounding has left q <= 0. Overwrites chords."""
    roots = chords.relu_().sqrt_()
    return roots, infinite_where_zero_(roots * 2) if with_slope else None


def half_angle_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """theta / 2 as atan(sqrt(q / (2 - q))), with slope 1 / (2 sin(theta)), where sin^2(theta) = q (2 - q).

    Cosines within 1e-7 of -1 count as -1 + 1e-7, with slope 0; so is the slope where rounding has left q <= 0.
    Overwrites chords.
    """
    chords = chords.clamp_(0, 2 - 1.0e-7)
    others = 2 - chords
    halves = (chords / others).sqrt_().atan_()  # on a CPU atan2 takes three times as long
    if not with_slope:
        return halves, None
    F.threshold_(others, 1.2e-7, math.inf)  # of 1e-7 as float32 rounds it
    return halves, infinite_where_zero_(chords.mul_(others).sqrt_().mul_(2))


def infinite_where_zero_(values: torch.Tensor) -> torch.Tensor:
    """Replaces v <= 0 in place: the inverse slope of a distance where pairs coincide. NaN stays NaN."""
    return F.threshold_(values, 0.0, math.inf)
