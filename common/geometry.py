"""How an image embedding and a text embedding are compared.

Conventions, for every geometry:
    features     tower output after the projection, before any geometry, (batch, dim)
    embeddings   features after the geometry's map; what is gathered over processes, cached and compared
    similarity   (num_images, num_texts), larger means closer; distances are negated in here, once
Training and every evaluation call the same `similarity`. Protocols state what a geometry offers, and nothing asks for
its class: `Geometry` compares, `RootedGeometry` and `ConeGeometry` offer more, `ChordGeometry` saves time.
The maths is in vectors.py, distances.py and scalars.py; import it from here.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from common.distances import (  # noqa: F401
    ChordFactors,
    distance_of_chords,
    euclidean_chord_factors,
    euclidean_distance,
    half_angle_of_chords,
    infinite_where_zero_,
    paired_euclidean_distance,
    paired_squared_distances,
    safe_sqrt,
    squared_arccos,
    squared_distance_of_chords,
    squared_distances,
)
from common.scalars import Scalar, clamp_scalars_, scalar_values  # noqa: F401
from common.vectors import (  # noqa: F401
    OneMatrix,
    PairSimilarity,
    at_least_float32,
    both_ways,
    check_same_dim,
    full_precision,
    inner_product_similarity,
    norm,
    one_matrix,
    paired_angles,
    paired_inner_products,
    straight_path,
    unit,
)


@runtime_checkable
class Geometry(Protocol):
    """How images and texts are compared. It is an nn.Module, so that its scalars train and travel with the model.

    Implementations compose the pure functions of their file; they do not inherit from each other.

    name: as in configs and checkpoints.
    is_inner_product: whether `similarity` is the inner product of flattened embeddings.
    """

    name: str
    is_inner_product: bool

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept."""

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings. Differs from the image side only where a paper has it so."""

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(num_images, num_texts), larger is closer: by it images rank texts."""

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By which images rank texts, (num_images, num_texts), and texts images, (num_texts, num_images).

        The first is `similarity`. Where the second is its transpose, return `both_ways(similarity)`: losses and
        evaluations know it by that.
        """

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(batch,): the diagonal of `similarity` for matched pairs.

        These are close, and a matrix of distances from one product loses the digits of close pairs; differences keep
        them.
        """

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Mean over the first axis as this geometry defines it, of prompts or for a root."""

    def scalars(self) -> list[Scalar]:
        """What trains in it, if anything."""


@runtime_checkable
class RootedGeometry(Geometry, Protocol):
    """A geometry of points with a root: the most generic point of the space (EuCLIP, traversals).

    A point is (dim,); on a product of spheres it is (num_spheres, sphere_dim).

    space: "sphere", "product" (of spheres), "euclidean" or "hyperbolic": what the distances and ways are of, and how a
        map draws it. In the last two the root is the origin, and an embedding is its tangent vector there.
    has_cones: whether it is a ConeGeometry; its root is then the origin.
    """

    space: str
    has_cones: bool

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The root of a space in which these embeddings of both modalities lie: (num, dim) -> (dim,)."""

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        """Points from one to the other, both included: (dim,) twice -> (num_points, dim)."""

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """Geodesic distance in the space, never squared or scaled: (batch, dim), (dim,) -> (batch,).

        On a sphere the angle in radians, in Euclidean space |x - y|, in hyperbolic space d_L.
        """


def has_root(candidate: Geometry) -> bool:
    """Whether it is a RootedGeometry; late interaction is none."""
    return isinstance(candidate, RootedGeometry)


@runtime_checkable
class ConeGeometry(RootedGeometry, Protocol):
    """A rooted geometry in which every text has a cone behind it that holds the images it entails (EuCLIP).

    A rotation about the origin changes no residual, and on the way to the origin an image only leaves cones.
    """

    def entailment_residual(self, *, images: torch.Tensor, texts: torch.Tensor, min_radius: float) -> torch.Tensor:
        """Radians by which images miss the cones of their texts: (..., dim) twice, broadcasting -> (...,)."""


@runtime_checkable
class ChordGeometry(Geometry, Protocol):
    """A geometry whose distance is a function of one number per pair, the chord q, with a slope in closed form.

        q_ij = a_i + a_j + coupling a_i a_j - x_i . x_j            x: vectors, a: offsets of `chord_factors`
        similarity_ij = -distance_unit() * distance(q_ij)

    On a sphere a = 1/2 gives q = 1 - cos(theta), in Euclidean space a = |x|^2 / 2 gives q = |x - y|^2 / 2: half the
    squared chord.

    coupling: a number without gradient.
    """

    coupling: float

    def chord_factors(self, embeddings: torch.Tensor) -> ChordFactors:
        """Of images or texts, float32 or better, differentiable in embeddings and scalars."""

    def distance_unit(self) -> torch.Tensor | float:
        """A number; if it depends on the scalars, a scalar tensor, differentiable in them."""

    def distance_of_chords(self, chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The distance and, if needed, dq / d distance: the inverse of its slope. Free of scalars.

        The inverse slope is infinite where `similarity` has no gradient. The chords, of any shape, may be overwritten;
        rounding leaves some below 0. The two results share no memory.
        """


class Sphere(nn.Module):
    """The unit sphere with the cosine: CLIP's geometry and the baseline of all four papers."""

    name = space = "sphere"
    is_inner_product = True
    has_cones = False

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return unit(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return unit(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return inner_product_similarity(image_embeddings, text_embeddings)

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return paired_inner_products(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean (CLIP's prompt ensemble)."""
        return unit(at_least_float32(embeddings).mean(dim=0))

    def scalars(self) -> list[Scalar]:
        return []

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean of all embeddings of both modalities: a sphere has no origin.

        inferred: that the mean is normalised; EuCLIP's code does not show it, and unnormalised it ranks too low.
        """
        return self.mean(embeddings)

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        return unit(straight_path(start, end, num_points))

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        return paired_angles(embeddings, point[None])
