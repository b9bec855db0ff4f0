"""The seam: how an image embedding and a text embedding are compared.

Conventions, for every geometry in this repository:
    features     tower output after the projection, before any geometry, (batch, dim)
    embeddings   features after the geometry's map; what is gathered over processes, cached and compared
    similarity   (num_images, num_texts), rows are images, larger means closer; distances are negated in here, once
Training and every evaluation call the same `similarity`. Nothing asks which geometry it has, what its class is or how
its parameters are called: protocols state what a geometry offers. Three of them, each more than the one before:
    Geometry         compares
    RootedGeometry   has a most generic point, and ways to it
    ConeGeometry     has entailment cones
One is apart, and saves time only:
    ChordGeometry    has its similarity and the slope as formulas of one matrix product, for the tiled loss
All comparisons run in float32 or better, under autocast too: the close pairs are the positives, and half
precision ties them (2,000 cosines around 0.25 leave 2.4 candidates at the top score in bfloat16).
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from common.distributed import whole

PairSimilarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (a, ...), (b, ...) -> (a, b), larger = closer


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

    The error is about eps * (|x|^2 + |y|^2) at any distance, so pairs that nearly coincide lose their digits;
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
    """Keeps only its input for the backward pass: a product of spheres has one such matrix for each of them."""

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


def paired_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angle of unit vector k and unit vector k as 2 atan2(|x - y|, |x + y|): accurate at 0 and at pi.

    Args:
        first: (batch, ..., dim), unit norm on the last axis.
        second: the same shape.
    Returns:
        (batch, ...) radians in [0, pi]; the gradient is 0 where the vectors coincide or are opposite. The zero vector
        is at pi / 2 to every vector, by its cosine of 0.
    """
    check_same_dim(first, second)
    with full_precision(first):
        first, second = at_least_float32(first), at_least_float32(second)
        apart, together = norm(first - second), norm(first + second)
        both_zero = (apart == 0) & (together == 0)  # no direction, no gradient
        return 2 * torch.atan2(torch.where(both_zero, 1.0, apart), torch.where(both_zero, 1.0, together))


def angle_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """theta = arccos(1 - q) as atan2(sin(theta), 1 - q), and its slope 1 / sin(theta), with sin^2(theta) = q (2 - q).

    Near pi as `squared_arccos`: cosines within 1e-7 of -1 count as -1 + 1e-7, with slope 0. So is the slope where
    rounding has left q <= 0. The chords are overwritten.
    """
    longest = 2 - 1.0e-7
    chords = chords.clamp_(0, longest)
    sines = (2 - chords).mul_(chords).sqrt_()
    angles = torch.atan2(sines, 1 - chords)
    return angles, reciprocal_or_zero_(sines).mul_((longest - chords).sign_()) if with_slope else None


def norm(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean norm over the last axis; the gradient at the zero vector is 0. One axis less."""
    return torch.linalg.vector_norm(vectors, dim=-1)


def safe_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square root whose value and gradient are 0 where rounding has left nothing positive; NaN stays. Same shape.

    Squared distances from a matrix product are 0 or at least one rounding step of their terms, so that the slope of
    the root, though it has no bound in itself, amplifies their error by no more than about a thousand.
    """
    nothing = values <= 0  # not `~(values > 0)`: NaN must stay NaN and not become the distance of a perfect match
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, values).sqrt())  # both: where(n, 0, sqrt(0)) is NaN


class ChordFactors(NamedTuple):
    """What the chords of embeddings are made of: vectors (batch, dim) and offsets (batch,)."""

    vectors: torch.Tensor
    offsets: torch.Tensor


def euclidean_chord_factors(embeddings: torch.Tensor) -> ChordFactors:
    """x and |x|^2 / 2, for chords q = |x - y|^2 / 2 with coupling 0: (batch, dim) -> (batch, dim), (batch,)."""
    with full_precision(embeddings):
        vectors = at_least_float32(embeddings)
        return ChordFactors(vectors, vectors.square().sum(dim=1) / 2)


def squared_distance_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """d^2 = 2 q, and its slope 2; slope 0 where rounding has left q <= 0. The chords are overwritten."""
    squares = chords.relu_().mul_(2)
    return squares, squares.sign().mul_(2) if with_slope else None


def distance_of_chords(chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """d = sqrt(2 q), and its slope 1 / d; slope 0 where rounding has left q <= 0. The chords are overwritten."""
    distances = chords.relu_().mul_(2).sqrt_()
    return distances, reciprocal_or_zero_(distances.clone()) if with_slope else None


def reciprocal_or_zero_(values: torch.Tensor) -> torch.Tensor:
    """1 / v in place, and 0 for v <= 0: the slope of a distance where pairs coincide. NaN stays NaN."""
    return F.threshold_(values, 0.0, math.inf).reciprocal_()


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


class OneMatrix(NamedTuple):
    """Both directions of a symmetric comparison: a matrix (num_images, num_texts), and its transpose as a view."""

    image_to_text: torch.Tensor
    text_to_image: torch.Tensor


def both_ways(similarity: torch.Tensor) -> OneMatrix:
    """Both directions of a symmetric comparison, from its matrix (num_images, num_texts)."""
    return OneMatrix(similarity, similarity.T)


def one_matrix(directions: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two directions are one matrix and its view: then its numbers need be kept, scaled and filled in once.

    Their type shows it (`both_ways`): a compiler that asks for storage breaks the graph.
    """
    return isinstance(directions, OneMatrix)


class Scalar(NamedTuple):
    """A number that trains: the logit scale, the curvature, the scale of the embeddings, a bias of the logits.

    name: of the number, in logs.
    parameter: of one entry.
    minimum, maximum: bounds of the number, None = none.
    in_loss: it acts in the loss, on embeddings of any kind, and not in the embeddings themselves. Such scalars learn at
        the rate of the logit scale (optim.logit_scale_rate).
    absorbing: its bounds act in the forward pass, as in EuCLIP's code: beyond a bound its gradient is 0 and it never
        comes back. Otherwise it is moved back after each step (`clamp_scalars_`), and keeps its gradient at the bound.
    is_logarithm: the parameter is the logarithm of the number, which is then positive; otherwise it is the number.
    """

    name: str
    parameter: nn.Parameter
    minimum: float | None = None
    maximum: float | None = None
    in_loss: bool = False
    absorbing: bool = False
    is_logarithm: bool = True

    def value(self) -> torch.Tensor:
        """The number as it acts, a scalar tensor. Under FSDP2 call it on every process."""
        parameter = whole(self.parameter)
        # of one entry; no view, which FSDP2 warns about
        value = parameter.exp().sum() if self.is_logarithm else parameter.sum()
        return value.clamp(self.minimum, self.maximum) if self.absorbing else value

    def bounds(self) -> tuple[float | None, float | None]:
        """Of the parameter."""
        return tuple(
            math.log(bound) if self.is_logarithm and bound is not None else bound
            for bound in (self.minimum, self.maximum)
        )


def scalar_values(scalars: Iterable[Scalar]) -> dict[str, float]:
    """name -> the number as it acts, for the log."""
    return {scalar.name: scalar.value().item() for scalar in scalars}


@torch.no_grad()
def clamp_scalars_(scalars: Iterable[Scalar]) -> int | torch.Tensor:
    """Moves trainable scalars back into their bounds; call once after every optimiser step.

    In place and after the step: a clamp in the forward pass has no gradient beyond the bound and holds the scalar there
    (`Scalar.absorbing` does that, on purpose).

    Returns:
        How many of them the step had carried out of their bounds: 0, or a tensor without axes that is not read here, so
        that the host does not wait for the device.
    """
    outside = 0
    for scalar in scalars:
        if scalar.minimum is None and scalar.maximum is None:
            continue
        before = whole(scalar.parameter).detach().clone()
        if scalar.absorbing:
            outside = outside + (scalar._replace(absorbing=False).value() != scalar.value()).sum()
            continue
        scalar.parameter.clamp_(*scalar.bounds())
        outside = outside + (whole(scalar.parameter) != before).sum()
    return outside


@runtime_checkable
class Geometry(Protocol):
    """How images and texts are compared. It is an nn.Module, so that its scalars train and travel with the model.

    Implementations do not inherit from each other; they compose the pure functions of their file.

    name: as in configs and checkpoints.
    is_inner_product: whether `similarity` is the inner product of flattened embeddings.
    """

    name: str
    is_inner_product: bool

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept."""

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept. Differs from the image side only where a paper has it so."""

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(num_images, num_texts), larger is closer: by it images rank texts."""

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By which images rank texts, (num_images, num_texts), and texts images, (num_texts, num_images).

        The first is `similarity`. For nearly all geometries the second is its transpose: return
        `both_ways(similarity)`, by which losses and evaluations know it.
        """

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(batch,): the diagonal of `similarity` for rows that belong together.

        These pairs are the close ones. A matrix of distances from one product loses the digits of close pairs;
        differences keep them, at a cost that only batch, not batch squared, pairs can pay.
        """

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Mean over the first axis as this geometry defines it: of the prompts of a class, or for a root."""

    def scalars(self) -> list[Scalar]:
        """What trains in it, if anything: read for the log, the bounds, the learning rate and the diagnosis."""


@runtime_checkable
class RootedGeometry(Geometry, Protocol):
    """A geometry of points, (dim,) each, with a root: the most generic point of the space (EuCLIP, traversals).

    A point of a product of spheres is (num_spheres, sphere_dim).

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

        On a sphere the angle in radians, in Euclidean space |x - y|, in hyperbolic space d_L: a metric, whatever
        decreasing function of it the similarity is.
        """


@runtime_checkable
class ConeGeometry(RootedGeometry, Protocol):
    """A rooted geometry in which every text has a cone behind it, where the images lie that it entails (EuCLIP).

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
    squared chord. A tile of the tiled loss is then one matrix product, `distance_of_chords` and two products for the
    gradients; autograd goes through `chord_factors` and `distance_unit` once a batch. An inner product needs no
    formula. All other geometries go through autograd in every tile, which is as right and slower.

    coupling: a number without gradient.
    """

    coupling: float

    def chord_factors(self, embeddings: torch.Tensor) -> ChordFactors:
        """Of images or texts, float32 or better, differentiable in embeddings and scalars."""

    def distance_unit(self) -> torch.Tensor | float:
        """A number; if it depends on the scalars, a scalar tensor, differentiable in them."""

    def distance_of_chords(self, chords: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The distance and, if needed, its derivative by q, 0 where `similarity` has no gradient. Free of scalars.

        The chords, of any shape, may be overwritten. Rounding leaves some of them below 0.
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
        """The cosine, in [-1, 1] up to rounding."""
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
        """Points of the straight path, normalised."""
        return unit(straight_path(start, end, num_points))

    def distance_to(self, embeddings: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """The angle, in [0, pi]."""
        return paired_angles(embeddings, point[None])
