"""A product of spheres compared by the inner product: the oblique paper's proposal, and TCL on two spheres.

An embedding on Ob(n, m) is m unit vectors of n numbers: (batch, num_spheres, sphere_dim), unit norm on the last axis.
Here n = sphere_dim and m = num_spheres; the paper swaps the two in places.
"""

import torch
from torch import nn

from common.scalars import Scalar
from common.vectors import (
    at_least_float32,
    both_ways,
    check_same_dim,
    inner_product_similarity,
    norm,
    paired_angles,
    paired_inner_products,
    unit,
)


def to_spheres(features: torch.Tensor, sphere_dim: int) -> torch.Tensor:
    """Cuts features into contiguous chunks and normalises each: the map onto the oblique manifold.

    Args:
        features: (batch, num_spheres * sphere_dim).
        sphere_dim: n in Ob(n, m).
    Returns:
        (batch, num_spheres, sphere_dim), unit norm on the last axis; a zero chunk stays zero.
    Raises:
        ValueError: if the features cannot be cut evenly.
    """
    if features.shape[-1] % sphere_dim:
        raise ValueError(f"{features.shape[-1]} features cannot be cut into spheres of {sphere_dim} numbers")
    return unit(features.unflatten(-1, (-1, sphere_dim)))


def oblique_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Sum of inner products over spheres: -d(u, v) with d = -tr(u^T v) (oblique, submission, Sec. 3.1).

    One matrix product of flattened embeddings: as cheap as the cosine.

    Args:
        image_embeddings, text_embeddings: (num_images or num_texts, num_spheres, sphere_dim).
    Returns:
        (num_images, num_texts) in [-num_spheres, num_spheres]; higher is closer.
    Raises:
        ValueError: if the last two axes differ.
    """
    check_same_dim(image_embeddings, text_embeddings)
    return inner_product_similarity(image_embeddings.flatten(1), text_embeddings.flatten(1))


def paired_oblique_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """The diagonal of oblique_similarity: (batch, num_spheres, sphere_dim) twice -> (batch,)."""
    check_same_dim(image_embeddings, text_embeddings)
    return paired_inner_products(image_embeddings.flatten(1), text_embeddings.flatten(1))


def paired_oblique_geodesic_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """sqrt of the sum of squared angles of row k and row k (Table 1, "Geo"), from differences: exact for close pairs.

    (batch, num_spheres, sphere_dim) twice -> (batch,) radians in [0, sqrt(num_spheres) * pi].
    """
    return norm(paired_angles(image_embeddings, text_embeddings))


def log_map(points: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Tangent vectors at the root of a sphere, or of each sphere: (batch, ..., dim), (..., dim) -> (batch, ..., dim).

    Direction and length (radians) of the geodesic from the root; 0 at the root. Opposite to it, where no direction is
    the shorter, rounding decides: the direction of its errors, or 0.
    """
    away = points - (points * root).sum(dim=-1, keepdim=True) * root
    return unit(away) * paired_angles(points, root.expand_as(points))[..., None]


def product_path(start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
    """Equally spaced points of the geodesic, a great circle on each sphere, both ends included.

    Args:
        start, end: (num_spheres, sphere_dim), unit norm on the last axis, nowhere opposite.
        num_points: at least 2.
    Returns:
        (num_points, num_spheres, sphere_dim).
    """
    start, end = at_least_float32(start), at_least_float32(end)
    away, angles = log_map(start[None], end)[0], paired_angles(start, end)[:, None]
    share = torch.linspace(1, 0, num_points, dtype=start.dtype, device=start.device)[:, None, None]
    return (share * angles).cos() * end + (share * angles).sin() * unit(away)


class Oblique(nn.Module):
    """A product of spheres, compared by the summed inner product.

    Features of one class token, (batch, dim), are cut into spheres; several class tokens, (batch, num_tokens,
    sphere_dim), give one sphere each.

    Args:
        sphere_dim: n in Ob(n, m).
    """

    name, space = "oblique", "product"
    is_inner_product = True
    has_cones = False

    def __init__(self, sphere_dim: int) -> None:
        super().__init__()
        if sphere_dim < 1:
            raise ValueError(f"sphere_dim = {sphere_dim}; expected: at least 1")
        self.sphere_dim = sphere_dim

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return to_spheres(image_features.flatten(1), self.sphere_dim)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return to_spheres(text_features.flatten(1), self.sphere_dim)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        if image_embeddings.ndim != 3 or image_embeddings.shape[-1] != self.sphere_dim:
            raise ValueError(
                f"embeddings {tuple(image_embeddings.shape)} on spheres of {self.sphere_dim} numbers; expected: those "
                f"of embed_image and embed_text, (batch, spheres, {self.sphere_dim})"
            )
        return oblique_similarity(image_embeddings, text_embeddings)

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return paired_oblique_similarity(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean on each sphere."""
        return unit(at_least_float32(embeddings).mean(dim=0))

    def scalars(self) -> list[Scalar]:
        return []

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        return self.mean(embeddings)

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        return product_path(start, end, num_points)

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        return paired_oblique_geodesic_distance(embeddings, point[None].expand_as(embeddings))
