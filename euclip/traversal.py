"""Walks from an image embedding to the root of its space, past captions (EuCLIP, Tables 2, 3, 6, 7).

    walk      points from the image embedding to the root, equally spaced, both ends included
    filter    only with K: captions in whose entailment cone the point lies; the root is always allowed
    nearest   of the allowed captions and the root, by the model's similarity
    met       every caption that is nearest somewhere, once, in the order of the walk; the root does not count

A place is an index of a caption in the pool; the index after the last one is the root. The root is `geometry.root`: the
origin for geometries with cones, else the mean of image and text embeddings.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.geometry import ConeGeometry, RootedGeometry, at_least_float32, norm

DECIDES = "evaluation"

NUM_POINTS = 50  # both ends included
ROOT = "[ROOT]"


def mean_of_modalities(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Mean of all embeddings with equal modality weights: (num, dim) twice -> (dim,), float32 or better.

    On a sphere it is shorter than 1. The authors' script averages all embeddings together. That is the same with one
    caption per image, as they trained, and nearer to the texts with several ("Two readings" in docs/euclip.md).
    """
    return (at_least_float32(images).mean(dim=0) + at_least_float32(texts).mean(dim=0)) / 2


def root_of(
    geometry: RootedGeometry, images: torch.Tensor, texts: torch.Tensor, normalised: bool = True
) -> torch.Tensor:
    """The root, (dim,): the origin for geometries with cones, else the mean of image and text embeddings.

    Args:
        images, texts: (num, dim) embeddings of training pairs; with cones only dim and dtype matter.
        normalised: False leaves the mean as it is, inside the sphere. inferred: the authors' script shows only that
            the embeddings are normalised first; a root shorter than 1 loses against captions under the cosine.
    """
    mean = mean_of_modalities(images, texts)
    return geometry.root(mean[None]) if normalised or geometry.has_cones else mean


def entailed(geometry: RootedGeometry, points: torch.Tensor, captions: torch.Tensor, min_radius: float) -> torch.Tensor:
    """Which points lie in the cones of which captions, apex and border included.

    Args:
        geometry: with cones.
        points: (num_points, dim) of a walk, taken as images.
        captions: (num_captions, dim) embeddings.
        min_radius: K >= 0 of the filter; it need not be that of the training.
    Returns:
        (num_points, num_captions) bool.
    Raises:
        ValueError: a geometry without cones, K < 0, or embeddings that are not finite (in the authors' script a caption
            whose angle is not a number passes).
    """
    _check_filter(geometry, points, captions, min_radius)
    # one point after the other: all pairs at once would hold num_points * num_captions * dim numbers several times
    inputs = ({"images": point[None], "texts": captions} for point in points)
    return torch.stack([geometry.entailment_residual(**arguments, min_radius=min_radius) for arguments in inputs]) <= 0


def _check_filter(geometry: RootedGeometry, points: torch.Tensor, captions: torch.Tensor, min_radius: float) -> None:
    if not geometry.has_cones:
        raise ValueError(
            f"geometry {geometry.name!r} has no entailment cones: min_radius = {min_radius}; expected: none"
        )
    if not min_radius >= 0:
        raise ValueError(f"min_radius = {min_radius}; expected: at least 0")
    if not (points.isfinite().all() and captions.isfinite().all()):
        raise ValueError("points and captions of the entailment filter must be finite")


@torch.no_grad()
def nearest_on_walk(
    geometry: RootedGeometry,
    image: torch.Tensor,
    captions: torch.Tensor,
    root: torch.Tensor,
    num_points: int = NUM_POINTS,
    min_radius: float | None = None,
) -> list[int]:
    """The place that is nearest at each point of the walk from an image to the root.

    Args:
        geometry: compares points, as images, with captions and root, as texts.
        image: (dim,) embedding.
        captions: (num_captions, dim) embeddings.
        root: (dim,).
        num_points: at least 2.
        min_radius: K of the entailment filter, None = no filter.
    Returns:
        num_points places, from the image to the root: of a caption, or num_captions for the root. Ties go to the first
        caption, and to captions before the root.
    Raises:
        ValueError: num_points below 2, embeddings that are not finite, and as `entailed`.
    """
    if num_points < 2:
        raise ValueError(f"a walk of {num_points} points does not reach its root; expected: at least 2")
    points = geometry.interpolate(image, root, num_points)
    scores = geometry.similarity(points, torch.cat([captions, root[None]]))
    if not scores.isfinite().all():
        raise ValueError("a similarity on the walk is not finite: embeddings must be finite")
    if min_radius is None:
        return _first_best(scores).tolist()
    _check_filter(geometry, points, captions, min_radius)
    return _nearest_entailed(geometry, points, captions, scores, min_radius).tolist()


def _first_best(scores: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(scores.cpu().numpy().argmax(axis=1))  # numpy's takes the first of equals, torch's any


def _nearest_entailed(
    geometry: ConeGeometry, points: torch.Tensor, captions: torch.Tensor, scores: torch.Tensor, min_radius: float
) -> torch.Tensor:
    """The first best place of each point among the root, the last column of scores, and the captions that entail it.

    Few pairs need `entailment_residual`, which costs dim times as much as a score: a caption farther than the root is
    never nearest, most cones miss a point by far, and of the others only the nearest captions count.
    """
    # captions that are at least as near as the root, and whose cones the point may lie in
    near = scores[:, :-1] >= scores[:, -1:]
    if not points[-1].any():  # the nearer to the origin, the larger the residual: a cone that misses the image is out
        near &= ~_far_outside(geometry, points[:1], captions, *torch.ones_like(near[:1]).nonzero().T, min_radius)
    rows, columns = near.nonzero().T
    maybe = ~_far_outside(geometry, points, captions, rows, columns, min_radius)
    rows, columns = rows[maybe], columns[maybe]
    left = torch.full_like(scores, -math.inf)
    left[:, -1] = scores[:, -1]
    left[rows, columns] = scores[rows, columns]
    # the nearest of them, until the cone of every one holds its point
    places = _first_best(left)
    unsure = (places < len(captions)).nonzero().squeeze(1)
    while len(unsure):
        pairs = {"images": points[unsure], "texts": captions[places[unsure]]}
        inside = geometry.entailment_residual(**pairs, min_radius=min_radius) <= 0
        unsure = unsure[~inside.cpu()]
        left[unsure, places[unsure]] = -math.inf
        places[unsure] = _first_best(left[unsure])
        unsure = unsure[places[unsure] < len(captions)]
    return places


def _far_outside(
    geometry: ConeGeometry,
    points: torch.Tensor,
    captions: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    min_radius: float,
) -> torch.Tensor:
    """Which pairs of a point and a caption miss the cone by more than rounding: (num_pairs,) bool.

    The residual depends on two norms and the angle between the vectors, so two numbers stand for each of them.
    Args:
        rows, columns: (num_pairs,) indices of points and captions.
    """
    points, captions = points.double(), captions.double()
    lengths, radii = norm(points)[rows], norm(captions)[columns]
    products = (points @ captions.T)[rows, columns]
    cosines = (products / (lengths * radii).clamp(min=1e-300)).clamp(-1, 1)
    sines = ((1 - cosines) * (1 + cosines)).sqrt()
    images = lengths[:, None] * torch.stack([cosines, sines], dim=1)
    texts = torch.stack([radii, torch.zeros_like(radii)], dim=1)
    residual = geometry.entailment_residual(images=images, texts=texts, min_radius=min_radius)
    # float32 keeps 0.0015 rad of the residual, except near an apex, which counts as inside; a caption with this
    # distance from the line through the origin and the point is no such apex on the whole way
    return (residual > 0.01) & (radii * sines > 1e-3)


@dataclass(frozen=True)
class Stay:
    """A stretch of a walk on which one caption is nearest: points `first` to `last`, counted from 1."""

    caption: str
    first: int
    last: int


def stays(places: Sequence[int], tags: Sequence[str]) -> list[Stay]:
    """The walk as stretches, the root included; a caption to which the walk returns has several.

    Args:
        places: from `nearest_on_walk`.
        tags: of the captions; places with equal tags count as the same.
    """
    stretches: list[Stay] = []
    for point, place in enumerate(places, start=1):
        tag = tags[place] if place < len(tags) else ROOT
        if stretches and stretches[-1].caption == tag:
            stretches[-1] = Stay(tag, stretches[-1].first, point)
        else:
            stretches.append(Stay(tag, point, point))
    return stretches


def met(places: Sequence[int], tags: Sequence[str]) -> list[int]:
    """Places of the distinct captions on a walk, in order of their first point, without the root.

    Args:
        places: from `nearest_on_walk`.
        tags: of the captions; of places with equal tags only the first that is met counts.
    """
    first: dict[str, int] = {}
    for place in places:
        if place < len(tags):
            first.setdefault(tags[place], place)
    return list(first.values())


def kendall_tau(levels: Sequence[float]) -> float | None:
    """Kendall's tau-b of levels with their order: 1 ascending, -1 descending; None if all are equal."""
    if any(map(math.isnan, levels)):
        raise ValueError(f"levels {list(levels)[:6]}; expected: no NaN, which has no order")
    pairs = [(levels[i], levels[j]) for i in range(len(levels)) for j in range(i + 1, len(levels))]
    untied = sum(a != b for a, b in pairs)
    if not untied:
        return None
    return sum((b > a) - (b < a) for a, b in pairs) / math.sqrt(untied * len(pairs))


def chance_of_order(levels: Sequence[float]) -> float:
    """Probability that a random order of these levels never falls: in (0, 1], 1 where all are equal."""
    return math.prod(math.factorial(times) for times in Counter(levels).values()) / math.factorial(len(levels))


@dataclass(frozen=True)
class Hierarchy:
    """Truth about the captions of a pool: how specific they are, and of which images they are true.

    levels: of each caption, 0 = most specific.
    chains: for each image the places of its captions, from specific to generic.
    holds: (num_images, num_captions) bool, whether the caption is known to be true of the image.
    """

    levels: Sequence[float]
    chains: Sequence[Sequence[int]]
    holds: torch.Tensor

    @classmethod
    def of_chains(cls, chains: Sequence[Sequence[int]], holds: torch.Tensor) -> "Hierarchy":
        """With levels counted along the chains; a caption that stands at several levels has their mean."""
        levels: list[list[int]] = [[] for _ in range(holds.shape[1])]
        for chain in chains:
            for level, place in enumerate(chain):
                levels[place].append(level)
        if [] in levels:
            raise ValueError(f"caption {levels.index([])} is in no chain, so it has no level; expected: each in one")
        return cls([math.fsum(values) / len(values) for values in levels], chains, holds)

    def of_pictures(self, rows: Sequence[int]) -> "Hierarchy":
        """For these pictures only, in this order."""
        return Hierarchy(self.levels, [self.chains[row] for row in rows], self.holds[list(rows)])


SCORES = (
    "captions", "monotone", "monotone_by_chance", "kendall_tau", "true_share", "first_level", "last_level"
)  # fmt: skip


def walk_scores(
    walks: Sequence[Sequence[int]], tags: Sequence[str], hierarchy: Hierarchy | None
) -> dict[str, list[float | None]]:
    """Scores of each walk; without a hierarchy only "captions".

    Args:
        walks: one per image, from `nearest_on_walk`.
        hierarchy: of the same images and captions.
    Returns:
        By name of `SCORES`, one value per walk, None where it has no meaning:
        captions            distinct captions met, without the root
        monotone            1.0 if no caption met is more specific than the one before it, else 0.0; None below two
        monotone_by_chance  probability of that for a random order of the captions met; None below two
        kendall_tau         tau-b of point and level, points at the root left out; None where the level never changes
        true_share          share of the captions met that are known to be true of the picture, in [0, 1]; of a
                            photograph only those of its own chain are
        first_level, last_level    of the captions met; 0 = most specific
    """
    captions = [met(places, tags) for places in walks]
    scores: dict[str, list[float | None]] = {"captions": [float(len(places)) for places in captions]}
    if hierarchy is None:
        return scores
    level_of = hierarchy.levels
    levels = [[level_of[place] for place in places] for places in captions]
    along = [[level_of[place] for place in places if place < len(tags)] for places in walks]
    return scores | {
        "monotone": [float(sorted(row) == row) if len(row) > 1 else None for row in levels],
        "monotone_by_chance": [chance_of_order(row) if len(row) > 1 else None for row in levels],
        "kendall_tau": [kendall_tau(row) for row in along],
        "true_share": [
            float(holds[places].double().mean()) if places else None for places, holds in zip(captions, hierarchy.holds)
        ],
        "first_level": [row[0] if row else None for row in levels],
        "last_level": [row[-1] if row else None for row in levels],
    }


def mean_score(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def generic_nearer(distances: torch.Tensor, chains: Sequence[Sequence[int]]) -> float | None:
    """Share of pairs of captions of one image in which the more generic one is nearer to the root.

    Args:
        distances: (num_captions,) from the root.
        chains: places of each image's captions, from specific to generic.
    Returns:
        In [0, 1], 0.5 by chance; ties count half. None where no chain has two captions.
    """
    if distances.isnan().any():
        raise ValueError("distances from the root with NaN; expected: none, as it is neither nearer nor farther")
    nearer = pairs = 0.0
    for chain in chains:
        values = distances[list(chain)].tolist()
        for i, specific in enumerate(values):
            for generic in values[i + 1 :]:
                nearer += 1.0 if generic < specific else 0.5 if generic == specific else 0.0
                pairs += 1
    return nearer / pairs if pairs else None
