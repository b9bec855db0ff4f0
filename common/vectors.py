"""Vectors in float32 or better: norms, inner products, angles and straight paths.

All comparisons run so, under autocast too: half precision ties the close pairs, and these are the positives.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F

PairSimilarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (a, ...), (b, ...) -> (a, b), larger = closer


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(tensor: torch.Tensor):
    """Context that switches autocast off on the tensor's device."""
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
    """Scales the last axis to norm 1; zero stays zero, a norm above 1.8e19 (float32) becomes it. Float32 or better."""
    return F.normalize(at_least_float32(features), dim=-1, eps=1e-12)


def norm(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean norm over the last axis; the gradient at the zero vector is 0. One axis less."""
    return torch.linalg.vector_norm(vectors, dim=-1)


def inner_product_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Inner products of all pairs; on unit vectors the cosine, in [-1, 1] up to rounding.

    Args:
        image_embeddings, text_embeddings: (num_images, dim) and (num_texts, dim).
    Returns:
        (num_images, num_texts), float32 or better, higher is closer.
    Raises:
        ValueError: if the two dims differ.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        return at_least_float32(image_embeddings) @ at_least_float32(text_embeddings).T


def paired_inner_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Inner product of row k and row k: (batch, dim) twice -> (batch,), float32 or better."""
    check_same_dim(first, second)
    with full_precision(first):
        return (at_least_float32(first) * at_least_float32(second)).sum(dim=-1)


def paired_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angle of unit vector k and unit vector k as 2 atan2(|x - y|, |x + y|): accurate at 0 and at pi.

    Args:
        first, second: (batch, ..., dim), unit norm on the last axis.
    Returns:
        (batch, ...) radians in [0, pi]; the gradient is 0 where the vectors coincide or are opposite. The zero vector
        is at pi / 2 to every vector.
    """
    check_same_dim(first, second)
    with full_precision(first):
        first, second = at_least_float32(first), at_least_float32(second)
        apart, together = norm(first - second), norm(first + second)
        both_zero = (apart == 0) & (together == 0)  # no direction, no gradient
        return 2 * torch.atan2(torch.where(both_zero, 1.0, apart), torch.where(both_zero, 1.0, together))


def straight_path(start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
    """Equally spaced points on the line from start to end, both included exactly.

    Args:
        start, end: (..., dim).
        num_points: at least 2.
    Returns:
        (num_points, ..., dim).
    """
    start, end = at_least_float32(start), at_least_float32(end)
    weights = torch.linspace(0, 1, num_points, dtype=start.dtype, device=start.device)
    return torch.lerp(start, end, weights.reshape(-1, *[1] * start.ndim))


class OneMatrix(NamedTuple):
    """Both directions of a symmetric comparison: a matrix (num_images, num_texts), and its transpose as a view."""

    image_to_text: torch.Tensor
    text_to_image: torch.Tensor


def both_ways(similarity: torch.Tensor) -> OneMatrix:
    """`OneMatrix` of a matrix (num_images, num_texts)."""
    return OneMatrix(similarity, similarity.T)


def one_matrix(directions: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two directions are one matrix and its view, whose numbers are kept, scaled and filled in once.

    Their type shows it (`both_ways`): a compiler that asks for storage breaks the graph.
    """
    return isinstance(directions, OneMatrix)
