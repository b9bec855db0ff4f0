"""The geometries of EuCLIP as values that a model is given (EuCLIP, Sec. 3 and Table 1; MERU).

    name                 embedding of features f        similarity    trainable scalars       root
    sphere               f / |f|                        cos           none                    normalised mean of all
    elliptic             f / |f|                        -arccos(cos)  none                    normalised mean of all
    euclidean            f / sqrt(dim)                  -d            none                    origin
    euclidean_squared    f / sqrt(dim)                  -d^2          none                    origin
    hyperbolic           alpha f, a tangent vector      -d_L          2 alphas and curvature  origin
    hyperbolic_squared   alpha f, a tangent vector      -d_L^2        2 alphas and curvature  origin

The sphere is in common/geometry.py. EuCLIP is euclidean_squared, MERU is hyperbolic, each with entailment.
"""

import math

import torch
from torch import nn

from common.distances import (
    ChordFactors,
    distance_of_chords,
    euclidean_chord_factors,
    euclidean_distance,
    half_angle_of_chords,
    paired_euclidean_distance,
    paired_squared_distances,
    safe_sqrt,
    squared_arccos,
    squared_distance_of_chords,
    squared_distances,
)
from common.scalars import Scalar
from common.vectors import at_least_float32, both_ways, inner_product_similarity, paired_angles, straight_path, unit
from euclip.entailment import euclidean_entailment_residual, lorentz_entailment_residual
from euclip.lorentz import (
    lorentz_chord_factors,
    lorentz_distance,
    lorentz_distance_of_chords,
    paired_lorentz_distance,
    paired_squared_lorentz_distance,
    squared_lorentz_distance,
    squared_lorentz_distance_of_chords,
)


class Elliptic(nn.Module):
    """Unit sphere compared by minus the angle: the order of the cosine, another weighting (EuCLIP)."""

    name, space = "elliptic", "sphere"
    is_inner_product = False
    has_cones = False
    coupling = 0.0

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return unit(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return unit(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """Minus the angle in radians, in [-pi, 0]."""
        return -safe_sqrt(squared_arccos(inner_product_similarity(image_embeddings, text_embeddings)))

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -paired_angles(image_embeddings, text_embeddings)

    def chord_factors(self, embeddings: torch.Tensor) -> ChordFactors:
        """x and 1/2, for q = 1 - cos(theta)."""
        embeddings = at_least_float32(embeddings)
        return ChordFactors(embeddings, torch.full_like(embeddings[:, 0], 0.5))

    def distance_unit(self) -> float:
        return 2.0

    def distance_of_chords(self, chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return half_angle_of_chords(chords, with_slope)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean, as on the sphere."""
        return unit(at_least_float32(embeddings).mean(dim=0))

    def scalars(self) -> list[Scalar]:
        return []

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean of all embeddings, as on the sphere of the cosine."""
        return self.mean(embeddings)

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        """Points of the straight path, normalised."""
        return unit(straight_path(start, end, num_points))

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """The angle, in [0, pi]."""
        return paired_angles(embeddings, point[None])


class Euclidean(nn.Module):
    """Features over sqrt(dim), compared by minus their distance or its square (EuCLIP).

    Args:
        squared: True, the default, is EuCLIP itself: -d^2 is a linear classifier with a norm-dependent bias.
    """

    space = "euclidean"
    is_inner_product = False
    has_cones = True
    coupling = 0.0

    def __init__(self, squared: bool = True) -> None:
        super().__init__()
        self.squared = squared
        self.name = "euclidean_squared" if squared else "euclidean"

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return at_least_float32(image_features) / image_features.shape[-1] ** 0.5

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return at_least_float32(text_features) / text_features.shape[-1] ** 0.5

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """-d or -d^2, at most 0."""
        distance = squared_distances if self.squared else euclidean_distance
        return -distance(image_embeddings, text_embeddings)

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        distance = paired_squared_distances if self.squared else paired_euclidean_distance
        return -distance(image_embeddings, text_embeddings)

    def chord_factors(self, embeddings: torch.Tensor) -> ChordFactors:
        return euclidean_chord_factors(embeddings)

    def distance_unit(self) -> float:
        return 2.0 if self.squared else math.sqrt(2)

    def distance_of_chords(self, chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        distance = squared_distance_of_chords if self.squared else distance_of_chords
        return distance(chords, with_slope)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Plain mean: normalising it would destroy the norms that this geometry uses."""
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
        """|x - y|, not squared even where the similarity is."""
        return paired_euclidean_distance(embeddings, point[None])

    def entailment_residual(self, *, images: torch.Tensor, texts: torch.Tensor, min_radius: float) -> torch.Tensor:
        """Radians by which images miss the cones of their texts; see euclidean_entailment_residual."""
        return euclidean_entailment_residual(images=images, texts=texts, min_radius=min_radius)


class Hyperbolic(nn.Module):
    """Tangent vectors at the origin of a Lorentz space whose curvature is learned, compared by -d or -d^2.

    Three trainable scalars, each kept as its logarithm: c, and the scales of text and image features that replace the
    normalisation (MERU). With `squared=False` and entailment it is MERU.

    Args:
        dim: of the features; both scales start at 1/sqrt(dim).
        squared: compare by the squared distance.
        curvature_init, curvature_min, curvature_max: of c; moved back into the bounds after each step, so that a
            curvature at its bound keeps its gradient (MERU's code).
        absorbing_bounds: True clamps c in the forward pass instead, as EuCLIP's code does (`Scalar.absorbing`).
        embedding_scale_max: of both scales; None = none (EuCLIP's code), 1 = MERU's.
        dtype: of the scalars; None = PyTorch's default. `double()` afterwards keeps only the digits of float32.
    Raises:
        ValueError: unless 0 < curvature_min <= curvature_init <= curvature_max; dim below 1, features of another width.
    """

    space = "hyperbolic"
    is_inner_product = False
    has_cones = True
    coupling = 2.0

    def __init__(
        self,
        dim: int,
        squared: bool,
        curvature_init: float = 1.0,
        curvature_min: float = 0.1,
        curvature_max: float = 10.0,
        absorbing_bounds: bool = False,
        embedding_scale_max: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim = {dim}; expected: at least 1")
        if not 0 < curvature_min <= curvature_init <= curvature_max:
            raise ValueError(
                f"curvature must satisfy 0 < minimum <= init <= maximum, got {curvature_min}, {curvature_init}, "
                f"{curvature_max}"
            )
        self.dim, self.squared = dim, squared
        self.name = "hyperbolic_squared" if squared else "hyperbolic"
        self.curvature_min, self.curvature_max = curvature_min, curvature_max
        self.absorbing_bounds, self.embedding_scale_max = absorbing_bounds, embedding_scale_max
        # one entry each, not none: FSDP2 refuses parameters without a dimension
        self.log_curvature = nn.Parameter(torch.tensor([math.log(curvature_init)], dtype=dtype))
        self.log_image_scale = nn.Parameter(torch.tensor([-0.5 * math.log(dim)], dtype=dtype))
        self.log_text_scale = nn.Parameter(torch.tensor([-0.5 * math.log(dim)], dtype=dtype))

    def curvature(self) -> torch.Tensor:
        """c, a scalar tensor."""
        return self._curvature().value()

    def _curvature(self) -> Scalar:
        bounds = (self.curvature_min, self.curvature_max)
        return Scalar("curvature", self.log_curvature, *bounds, in_loss=True, absorbing=self.absorbing_bounds)

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return self._scaled(image_features, self.log_image_scale)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return self._scaled(text_features, self.log_text_scale)

    def _scaled(self, features: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
        if features.shape[-1] != self.dim:  # its scales start at those of another width
            raise ValueError(f"features {tuple(features.shape)} for dim = {self.dim}; expected: (batch, {self.dim})")
        return log_scale.exp() * at_least_float32(features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """-d_L or -d_L^2, at most 0."""
        distance = squared_lorentz_distance if self.squared else lorentz_distance
        return -distance(image_embeddings, text_embeddings, self.curvature())

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        distance = paired_squared_lorentz_distance if self.squared else paired_lorentz_distance
        return -distance(image_embeddings, text_embeddings, self.curvature())

    def chord_factors(self, embeddings: torch.Tensor) -> ChordFactors:
        return lorentz_chord_factors(embeddings, self.curvature())

    def distance_unit(self) -> torch.Tensor:
        """2 / sqrt(c), or 4 / c of squared distances."""
        curvature = at_least_float32(self.curvature())
        return 4 / curvature if self.squared else 2 / curvature.sqrt()

    def distance_of_chords(self, chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        distance = squared_lorentz_distance_of_chords if self.squared else lorentz_distance_of_chords
        return distance(chords, with_slope)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Mean of the tangent vectors; the exponential map comes after it, inside the similarity."""
        return at_least_float32(embeddings).mean(dim=0)

    def scalars(self) -> list[Scalar]:
        return [
            self._curvature(),
            Scalar("image_scale", self.log_image_scale, maximum=self.embedding_scale_max),
            Scalar("text_scale", self.log_text_scale, maximum=self.embedding_scale_max),
        ]

    def root(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The origin, whose tangent vector is zero, whatever the embeddings."""
        return torch.zeros_like(embeddings[0])

    def interpolate(self, start: torch.Tensor, end: torch.Tensor, num_points: int) -> torch.Tensor:
        """Tangent vectors on the straight path, lifted inside the similarity."""
        return straight_path(start, end, num_points)

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """d_L, not squared even where the similarity is. From the root it is |u|, whatever the curvature."""
        return paired_lorentz_distance(embeddings, point[None], self.curvature())

    def entailment_residual(self, *, images: torch.Tensor, texts: torch.Tensor, min_radius: float) -> torch.Tensor:
        """Radians by which images miss the cones of their texts; see lorentz_entailment_residual."""
        return lorentz_entailment_residual(
            images=images, texts=texts, min_radius=min_radius, curvature=self.curvature()
        )
