"""The topologies of the oblique paper as values that a model is given (Table 1; papers/oblique_topology.md, Sec. 3).

    name                embedding of features f     similarity                            range
    sphere              f / |f|                     cos                                   [-1, 1]
    oblique             m unit vectors              sum over the m spheres of cos         [-m, m]
    oblique_geodesic    m unit vectors              -sqrt(sum over them of angle^2)       [-pi sqrt(m), 0]
    euclidean           f, not normalised           -|x - y|, not squared                 (-inf, 0]
    max_average         m unit vectors              mean over own of max over others' cos [-1, 1]

with m the number of spheres. The sphere is in common/geometry.py. None has a trainable scalar. The paper combines the
prompts of a class by averaging their scores, not their embeddings; `mean` is for everything else. The last is FILIP's,
which the paper mentions as another non-metric on a product of spheres and does not run: it has one matrix for pictures
that look for captions and another for captions that look for pictures (common/late_interaction.py).
"""

from functools import partial

import torch
from torch import nn

from common.geometry import at_least_float32, euclidean_distance, paired_euclidean_distance, unit
from common.late_interaction import LateInteraction
from oblique_topology.oblique import (
    oblique_geodesic_distance,
    oblique_similarity,
    paired_oblique_geodesic_distance,
    paired_oblique_similarity,
    to_spheres,
)


class Oblique(nn.Module):
    """A product of spheres, compared by the summed inner product, the paper's proposal, or by the geodesic distance.

    Features of one class token, (batch, dim), are cut into spheres; those of several class tokens, (batch, num_tokens,
    sphere_dim), give one sphere each.

    Args:
        sphere_dim: numbers per sphere, n in Ob(n, m).
        geodesic: compare by minus the geodesic distance (Table 1, "Geo").
    """

    def __init__(self, sphere_dim: int, geodesic: bool = False) -> None:
        super().__init__()
        self.sphere_dim, self.geodesic = sphere_dim, geodesic
        self.name = "oblique_geodesic" if geodesic else "oblique"
        self.is_inner_product = not geodesic

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return to_spheres(image_features.flatten(1), self.sphere_dim)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return to_spheres(text_features.flatten(1), self.sphere_dim)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        if self.geodesic:
            return -oblique_geodesic_distance(image_embeddings, text_embeddings)
        return oblique_similarity(image_embeddings, text_embeddings)

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        if self.geodesic:
            return -paired_oblique_geodesic_distance(image_embeddings, text_embeddings)
        return paired_oblique_similarity(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean on each sphere."""
        return unit(at_least_float32(embeddings).mean(dim=0))


class Euclidean(nn.Module):
    """Raw features, compared by minus their distance, not squared (Table 1, "l2"); EuCLIP scales them first."""

    name = "euclidean"

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return at_least_float32(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return at_least_float32(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -euclidean_distance(image_embeddings, text_embeddings)

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -paired_euclidean_distance(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Plain mean."""
        return at_least_float32(embeddings).mean(dim=0)


def max_average(sphere_dim: int) -> LateInteraction:
    """A product of spheres in which every vector looks for its best partner, and the matches are averaged (FILIP).

    Args:
        sphere_dim: numbers per sphere.
    """
    return LateInteraction("max_average", partial(_cut, sphere_dim=sphere_dim), padded=False)


def _cut(features: torch.Tensor, sphere_dim: int) -> torch.Tensor:
    return to_spheres(features.flatten(1), sphere_dim)
