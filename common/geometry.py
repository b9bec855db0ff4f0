"""The seam: how an image embedding and a text embedding are compared.

Conventions, for every geometry in this repository:
    features     tower output after the projection, before any geometry, (batch, dim)
    embeddings   features after the geometry's map; what is gathered over processes, cached and compared
    similarity   (num_images, num_texts), rows are images, larger means closer; distances are negated in here, once
Training and every evaluation call the same `similarity`. Nothing asks which geometry it has.
All comparisons run in float32 or better, whatever autocast says: the close pairs are the positives, and half
precision ties them (2,000 cosines around 0.25 leave 2.4 candidates at the top score in bfloat16).
"""

from contextlib import nullcontext
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(tensor: torch.Tensor):
    """Context that switches autocast off on the tensor's device, for maths that must not run in half precision."""
    if tensor.device.type == "meta":  # has no autocast, and refuses to switch it off
        return nullcontext()
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def check_same_dim(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> None:
    """Raises ValueError with both shapes unless everything but the first axis agrees."""
    if image_embeddings.shape[1:] != text_embeddings.shape[1:]:
        raise ValueError(
            f"image embeddings {tuple(image_embeddings.shape)} and text embeddings {tuple(text_embeddings.shape)} "
            "must agree in every axis but the first"
        )


def unit(features: torch.Tensor) -> torch.Tensor:
    """Scales the last axis to norm 1; a zero vector stays zero. Same shape, float32 or better."""
    return F.normalize(at_least_float32(features), dim=-1, eps=1e-12)


def inner_product_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Inner products of all pairs; on unit vectors the cosine, in [-1, 1] up to rounding.

    Args:
        image_embeddings: (num_images, dim).
        text_embeddings: (num_texts, dim).
    Returns:
        (num_images, num_texts), float32 or better, higher is closer.
    Raises:
        ValueError: if the two dims differ; the message gives both shapes.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        return at_least_float32(image_embeddings) @ at_least_float32(text_embeddings).T


def paired_inner_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Inner product of row k and row k: (batch, dim) twice -> (batch,), float32 or better."""
    check_same_dim(first, second)
    with full_precision(first):
        return (at_least_float32(first) * at_least_float32(second)).sum(dim=-1)


def squared_distances(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Squared Euclidean distances of all pairs by one matrix product, never negative.

    The error is about eps * (|x|^2 + |y|^2) whatever the distance, so pairs that nearly coincide lose their digits;
    `paired_squared_distances` keeps them, for the pairs that are close because they belong together.

    Args:
        image_embeddings: (num_images, dim).
        text_embeddings: (num_texts, dim).
    Returns:
        (num_images, num_texts), >= 0, float32 or better; smaller is closer.
    Raises:
        ValueError: if the two dims differ; the message gives both shapes.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        images, texts = at_least_float32(image_embeddings), at_least_float32(text_embeddings)
        squares = images.square().sum(dim=1)[:, None] + texts.square().sum(dim=1)[None, :]
        return torch.relu(squares - 2 * (images @ texts.T))  # at 0, clamp's gradient depends on the version


def paired_squared_distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The diagonal of squared_distances, from differences, to full accuracy: (batch, dim) twice -> (batch,)."""
    check_same_dim(first, second)
    with full_precision(first):
        return (at_least_float32(first) - at_least_float32(second)).square().sum(dim=-1)


def euclidean_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Euclidean distances of all pairs, not squared (oblique paper, Table 1, "l2"; EuCLIP).

    Args:
        image_embeddings: (num_images, dim).
        text_embeddings: (num_texts, dim).
    Returns:
        (num_images, num_texts), >= 0, float32 or better; smaller is closer. The gradient is 0 for pairs at distance 0.
    Raises:
        ValueError: if the two dims differ; the message gives both shapes.
    """
    return safe_sqrt(squared_distances(image_embeddings, text_embeddings))


def paired_euclidean_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The diagonal of euclidean_distance, from differences, to full accuracy: (batch, dim) twice -> (batch,)."""
    check_same_dim(first, second)
    with full_precision(first):
        return norm(at_least_float32(first) - at_least_float32(second))


def squared_arccos(cosines: torch.Tensor) -> torch.Tensor:
    """Square of the arc cosine, which is smooth at 1 (slope -2) where the arc cosine itself has no slope.

    Args:
        cosines: any shape, float32 or better; above 1 by rounding gives a value just below 0.
    Returns:
        Squared radians, at most pi**2. Near -1, where the slope grows without bound, cosines within 1e-7 of -1 count
        as -1 + 1e-7 with gradient 0: the slope stays below 1.5e4, and angles stop 4.5e-4 short of pi.
    """
    return _SquaredArccos.apply(cosines)


class _SquaredArccos(torch.autograd.Function):
    """Keeps nothing but its input for the backward pass: a product of spheres has one such matrix for each of them."""

    @staticmethod
    def forward(ctx, cosines):
        ctx.save_for_backward(cosines)
        defect = 1 - cosines
        series = defect * (2 + defect * (1 / 3 + defect * (4 / 45 + defect * (1 / 35))))  # next: 16/1575 defect^5
        far = torch.arccos(cosines.clamp(-1 + 1.0e-7, 1)).square_()
        return torch.where(defect < 1.0e-2, series, far)

    @staticmethod
    def backward(ctx, gradient):
        (cosines,) = ctx.saved_tensors
        defect = 1 - cosines
        near, opposite = defect < 1.0e-2, cosines <= -1 + 1.0e-7
        series = 2 + defect * (2 / 3 + defect * (4 / 15 + defect * (4 / 35)))
        away = torch.where(near | opposite, 0.0, cosines)
        far = 2 * torch.arccos(away) / ((1 - away) * (1 + away)).sqrt()
        return -gradient * torch.where(opposite, 0.0, torch.where(near, series, far))


def paired_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angle of unit vector k and unit vector k as 2 atan2(|x - y|, |x + y|): accurate at 0 and at pi.

    Args:
        first: (batch, ..., dim), unit norm on the last axis.
        second: likewise.
    Returns:
        (batch, ...) radians in [0, pi]; the gradient is 0 where the vectors coincide or are opposite. The zero vector
        is at pi / 2 to every vector, as its cosine of 0 says.
    """
    check_same_dim(first, second)
    with full_precision(first):
        first, second = at_least_float32(first), at_least_float32(second)
        apart, together = norm(first - second), norm(first + second)
        both_zero = (apart == 0) & (together == 0)  # no direction, no gradient
        return 2 * torch.atan2(torch.where(both_zero, 1.0, apart), torch.where(both_zero, 1.0, together))


def norm(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean norm over the last axis; the gradient at the zero vector is 0. One axis less."""
    return torch.linalg.vector_norm(vectors, dim=-1)


def safe_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square root whose value and gradient are 0 where rounding has left nothing positive. Same shape.

    Squared distances from a matrix product are 0 or at least one rounding step of their terms, so that the slope of
    the root, though it has no bound in itself, amplifies their error by no more than about a thousand.
    """
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0)  # both: where(p, sqrt(0), 0) is NaN


def straight_path(start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
    """Equally spaced points on the line from start to end, both of them included exactly.

    Args:
        start, end: (..., dim).
        num_points: at least 2.
    Returns:
        (num_points, ..., dim).
    """
    weights = torch.linspace(0, 1, num_points, dtype=start.dtype, device=start.device)
    return torch.lerp(start, end, weights.reshape(-1, *[1] * start.ndim))


@runtime_checkable
class Geometry(Protocol):
    """What a geometry offers. It is an nn.Module, so that its own trainable scalars train and travel with the model.

    Implementations do not inherit from each other; they compose the pure functions of their file. Some offer more:
        text_similarity(images, texts)             like `similarity`, where texts rank images by another matrix
        root(embeddings)                           the most generic point of the space, (dim,)
        interpolate(start, end, num_points)        points from an embedding to the root, (num_points, dim)
        distance_to(embeddings, point)             (batch,) distances from one point, for histograms
        entailment_residual(texts, images, ...)    (batch,) radians by which images miss the cones of their texts
        clamp_()                                   moves trainable scalars back into their bounds after a step
        is_inner_product                           True: `similarity` is the inner product of flattened embeddings
    """

    name: str

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept."""

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept. Differs from the image side only where a paper says so."""

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(num_images, num_texts), larger is closer."""

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(batch,): the diagonal of `similarity` for rows that belong together.

        These pairs are the close ones. A matrix of distances from one product loses the digits of close pairs;
        differences keep them, at a cost that only batch, not batch squared, pairs can pay.
        """

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Mean over the first axis as this geometry defines it: of the prompts of a class, or for a root."""


class Sphere(nn.Module):
    """The unit sphere with the cosine: CLIP's geometry and the baseline of all four papers."""

    name = "sphere"
    is_inner_product = True

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return unit(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return unit(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return inner_product_similarity(image_embeddings, text_embeddings)

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return paired_inner_products(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean (CLIP's prompt ensemble)."""
        return unit(at_least_float32(embeddings).mean(dim=0))

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean of all embeddings of both modalities, (num, dim) -> (dim,): a sphere has no origin."""
        return self.mean(embeddings)

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        """Points of the straight path, normalised: (dim,) twice -> (num_points, dim), as a walk to the root needs."""
        return unit(straight_path(start, end, num_points))

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """Scaled cosine distance (1 - cos) / 2 in [0, 1]: (batch, dim), (dim,) -> (batch,), for histograms."""
        return (1 - paired_inner_products(embeddings, point[None])) / 2
