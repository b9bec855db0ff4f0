"""The topologies of the oblique paper as values that a model takes (oblique, submission, Sec. 3.1, Table 1).

    name               class             embedding of f    similarity                              range
    sphere             Sphere            f / |f|           cos                                     [-1, 1]
    oblique            Oblique           m unit vectors    sum over the m spheres of cos           [-m, m]
    oblique_geodesic   ObliqueGeodesic   m unit vectors    -sqrt(sum over them of angle^2)         [-pi sqrt(m), 0]
    euclidean          L2                f as it is        -|x - y|, not squared                   (-inf, 0]
    max_average        LateInteraction   m unit vectors    mean over own of max over others' cos   [-1, 1]

with m the number of spheres. The first two are in common/geometry.py and common/oblique.py, the last one in
common/late_interaction.py. None has a trainable scalar. The paper averages the scores of the prompts of a class, not
their embeddings; `mean` is for all other uses. The last one is FILIP's. The paper mentions it as another non-metric on
a product of spheres and does not run it.
"""

import math
from functools import partial

import torch
from torch import nn

from common.distances import (
    ChordFactors,
    distance_of_chords,
    euclidean_chord_factors,
    euclidean_distance,
    paired_euclidean_distance,
)
from common.late_interaction import LateInteraction
from common.oblique import paired_oblique_geodesic_distance, product_path, to_spheres
from common.scalars import Scalar
from common.vectors import at_least_float32, both_ways, straight_path, unit
from oblique_topology.oblique import oblique_geodesic_distance


class ObliqueGeodesic(nn.Module):
    """A product of spheres, compared by minus the geodesic distance (Table 1, "Geo").

    Args:
        sphere_dim: numbers per sphere, n in Ob(n, m).
    """

    name, space = "oblique_geodesic", "product"
    is_inner_product = False
    has_cones = False

    def __init__(self, sphere_dim: int) -> None:
        super().__init__()
        self.sphere_dim = sphere_dim

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return to_spheres(image_features.flatten(1), self.sphere_dim)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return to_spheres(text_features.flatten(1), self.sphere_dim)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -oblique_geodesic_distance(image_embeddings, text_embeddings)

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -paired_oblique_geodesic_distance(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean on each sphere."""
        return unit(at_least_float32(embeddings).mean(dim=0))

    def scalars(self) -> list[Scalar]:
        return []

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean on each sphere."""
        return self.mean(embeddings)

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        """Points of the geodesic; see product_path."""
        return product_path(start, end, num_points)

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """See paired_oblique_geodesic_distance."""
        return paired_oblique_geodesic_distance(embeddings, point[None].expand_as(embeddings))


class L2(nn.Module):
    """Raw features, compared by minus their distance, not squared (Table 1, "l2").

    EuCLIP's `Euclidean` differs: it divides the features by sqrt(dim) first and can square the distance.
    """

    name = space = "euclidean"
    is_inner_product = False
    has_cones = False
    coupling = 0.0

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return at_least_float32(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return at_least_float32(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -euclidean_distance(image_embeddings, text_embeddings)

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -paired_euclidean_distance(image_embeddings, text_embeddings)

    def chord_factors(self, embeddings: torch.Tensor) -> ChordFactors:
        return euclidean_chord_factors(embeddings)

    def distance_unit(self) -> float:
        return math.sqrt(2)

    def distance_of_chords(self, chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return distance_of_chords(chords, with_slope)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Plain mean."""
        return at_least_float32(embeddings).mean(dim=0)

    def scalars(self) -> list[Scalar]:
        return []

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The origin, whatever the embeddings."""
        return torch.zeros_like(embeddings[0])

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        """Points of the straight path."""
        return straight_path(start, end, num_points)

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """|x - y|."""
        return paired_euclidean_distance(embeddings, point[None])


def max_average(sphere_dim: int) -> LateInteraction:
    """A product of spheres; every vector takes its best match, and the matches are averaged (FILIP)."""
    return LateInteraction("max_average", partial(_cut, sphere_dim=sphere_dim), padded=False)


def _cut(features: torch.Tensor, sphere_dim: int) -> torch.Tensor:
    return to_spheres(features.flatten(1), sphere_dim)
