"""Products of spheres and their distances (oblique paper, submission Sec. 3.1, Table 1).

An embedding on Ob(n, m) is m unit vectors of n numbers: (batch, num_spheres, sphere_dim), unit norm on the last axis.
The paper writes Ob(n, m) with n = sphere_dim and m = num_spheres, and in places the two the other way round; the names
here cannot be swapped. Everything runs in float32 or better.
"""

import torch

from common.geometry import (
    at_least_float32,
    check_same_dim,
    full_precision,
    inner_product_similarity,
    norm,
    paired_angles,
    paired_inner_products,
    safe_sqrt,
    squared_arccos,
    unit,
)


def to_spheres(features: torch.Tensor, sphere_dim: int) -> torch.Tensor:
    """Cuts features into contiguous chunks and normalises each: the map onto the oblique manifold.

    Args:
        features: (batch, num_spheres * sphere_dim).
        sphere_dim: numbers per sphere, n in Ob(n, m).
    Returns:
        (batch, num_spheres, sphere_dim), unit norm on the last axis; a zero chunk stays zero.
    Raises:
        ValueError: if the features cannot be cut evenly.
    """
    if features.shape[-1] % sphere_dim:
        raise ValueError(f"{features.shape[-1]} features cannot be cut into spheres of {sphere_dim} numbers")
    return unit(features.unflatten(-1, (-1, sphere_dim)))


def oblique_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Sum of inner products over spheres: -d(u, v) with d = -tr(u^T v), the paper's proposal.

    One matrix product of flattened embeddings: as cheap as the cosine.

    Args:
        image_embeddings: (num_images, num_spheres, sphere_dim).
        text_embeddings: (num_texts, num_spheres, sphere_dim).
    Returns:
        (num_images, num_texts) in [-num_spheres, num_spheres]; higher is closer.
    Raises:
        ValueError: if the last two axes differ; the message gives both shapes.
    """
    check_same_dim(image_embeddings, text_embeddings)
    return inner_product_similarity(image_embeddings.flatten(1), text_embeddings.flatten(1))


def paired_oblique_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """The diagonal of oblique_similarity: (batch, num_spheres, sphere_dim) twice -> (batch,)."""
    check_same_dim(image_embeddings, text_embeddings)
    return paired_inner_products(image_embeddings.flatten(1), text_embeddings.flatten(1))


def oblique_geodesic_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Geodesic distance of the product manifold, sqrt of the sum of squared angles (Table 1, "Geo").

    The paper prints the range [0, m pi]; the formula gives [0, sqrt(m) pi]. One matrix product and one arc cosine for
    each sphere and pair.

    Args:
        image_embeddings: (num_images, num_spheres, sphere_dim).
        text_embeddings: (num_texts, num_spheres, sphere_dim).
    Returns:
        (num_images, num_texts), radians in [0, sqrt(num_spheres) * pi]; smaller is closer.
    Raises:
        ValueError: if the last two axes differ; the message gives both shapes.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        images, texts = at_least_float32(image_embeddings), at_least_float32(text_embeddings)
        total = images.new_zeros(len(images), len(texts))
        for sphere in range(images.shape[1]):
            total = total + squared_arccos(images[:, sphere] @ texts[:, sphere].T)
        return safe_sqrt(total)


def paired_oblique_geodesic_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """The diagonal of oblique_geodesic_distance, from differences, which keep the digits of pairs that are close.

    Args:
        image_embeddings, text_embeddings: (batch, num_spheres, sphere_dim).
    Returns:
        (batch,), radians in [0, sqrt(num_spheres) * pi].
    """
    return norm(paired_angles(image_embeddings, text_embeddings))
