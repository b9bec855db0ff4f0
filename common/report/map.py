"""A map of embedding spaces: images and captions of a test set in two dimensions, as one HTML page without network.

All geometries share polar coordinates about the root, and the way of an image to the root is a spoke. The radius is the
exact distance d from the root, or that of the Poincaré disk in hyperbolic space, tanh(sqrt(c) d / 2). The angle comes
from a projection of directions; every layout states how many neighbours it keeps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from common.base.files import write_atomically
from common.geometry import RootedGeometry, scalar_values
from common.oblique import log_map

NEIGHBORS = 10
BINS = 40
PERPLEXITY = 25  # of t-SNE; less where there are few points
MAX_BYTES = 3_000_000  # of the page


@dataclass(frozen=True)
class TestSet:
    """Images and captions that all models of a page embed.

    texts: distinct captions.
    chains: for each image the indices of its captions, specific ones first.
    holds: (num_images, num_texts) bool, whether a caption is true of an image.
    knows_truth: False = `holds` has only the captions of an image; others may be true of it, too.
    levels: names of the places in a chain; () = their order has no meaning.
    classes: of each image; () = unknown.
    pictures: data URLs, "" = the page may not show it.
    """

    __test__ = False  # pytest must not collect it

    name: str
    texts: Sequence[str]
    chains: Sequence[Sequence[int]]
    holds: torch.Tensor
    knows_truth: bool = True
    levels: Sequence[str] = ()
    classes: Sequence[str] = ()
    pictures: Sequence[str] = ()


@dataclass(frozen=True)
class Walks:
    """Walks from every image to the root past captions, under one entailment filter.

    min_radius: of the filter, whose cones the page draws; None = no filter, and the cones of the last one.
    places: (num_images, num_points) indices of the nearest captions; num_texts = the root.
    """

    min_radius: float | None
    places: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Space:
    """A model's embeddings of a test set, (num_images, ...) and (num_texts, ...), and its root, on the CPU.

    facts: label -> text, for the table of models.
    graph: of cluster centres, see `cluster_graph`.
    """

    name: str
    geometry: RootedGeometry
    images: torch.Tensor
    texts: torch.Tensor
    root: torch.Tensor
    root_name: str
    walks: Sequence[Walks]
    facts: dict[str, str] = field(default_factory=dict)
    graph: dict[str, Any] | None = None


# ---------------------------------------------------------------- geometry


def tangents(geometry: RootedGeometry, embeddings: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Tangent vectors at the root, whose norm is the distance from it: (batch, ...) -> (batch, dim).

    With the root at the origin, Euclidean and hyperbolic embeddings are such vectors already.
    """
    return embeddings if geometry.space in ("euclidean", "hyperbolic") else log_map(embeddings, root).flatten(1)


def half_apertures(geometry: RootedGeometry, texts: torch.Tensor, min_radius: float) -> torch.Tensor:
    """Radians between a caption's cone and its axis, in [0, pi / 2]: (num_texts, dim) -> (num_texts,).

    The root lies straight behind the apex: it misses a cone by pi minus its half-aperture.
    """
    residual = geometry.entailment_residual(images=torch.zeros_like(texts), texts=texts, min_radius=min_radius)
    return (math.pi - residual).clamp(max=math.pi / 2)  # a text at the root lies on its apex: residual 0


# ---------------------------------------------------------------- layouts


def neighbors_kept(space: np.ndarray, layout: np.ndarray, k: int = NEIGHBORS) -> float:
    """Share, in [0, 1], of each point's k nearest neighbours in the space that are among its k nearest in the layout.

    Args:
        space: (num_points, dim), Euclidean.
        layout: (num_points, 2).
    """
    from sklearn.neighbors import NearestNeighbors

    k = min(k, len(space) - 1)
    near = [NearestNeighbors(n_neighbors=k).fit(rows).kneighbors(return_distance=False) for rows in (space, layout)]
    return float(np.mean([len(np.intersect1d(*rows)) / k for rows in zip(*near)]))


def layouts(images: torch.Tensor, texts: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Places of images, then captions, from tangent vectors at the root, each with its share of kept neighbours.

    Returns:
        polar   angle: (num_points,) radians, by PCA or t-SNE, whichever keeps more
        plane   xy: (num_points, 2), t-SNE of directions
        gap     xy: (num_points, 2), PCA of the vectors as they are
        The first two subtract the mean direction of each modality, or they would show only the gap between modalities.
            xy lie within the unit circle.
    """
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import normalize

    vectors = [rows.double().numpy() for rows in (images, texts)]
    centred = [normalize(normalize(rows) - normalize(rows).mean(axis=0)) for rows in vectors]
    directions, raw = np.concatenate(centred), np.concatenate(vectors)
    plane = _by_neighbors(directions)
    projections = {"PCA": PCA(2).fit_transform(directions), "t-SNE": plane}
    angles = {name: np.arctan2(xy[:, 1], xy[:, 0]) for name, xy in projections.items()}
    kept = {name: neighbors_kept(directions, np.stack([np.cos(a), np.sin(a)], 1)) for name, a in angles.items()}
    best = max(kept, key=kept.__getitem__)
    gap = _in_unit_circle(PCA(2).fit_transform(raw))
    return {
        "polar": {"angle": _rounded(angles[best], 4), "by": best, "kept": kept[best]},
        "plane": {"xy": _rounded(plane, 4), "kept": neighbors_kept(directions, plane)},
        "gap": {"xy": _rounded(gap, 4), "kept": neighbors_kept(raw, gap)},
    }


def _by_neighbors(directions: np.ndarray) -> np.ndarray:
    # t-SNE within the unit circle
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(directions) - 1) / 3)
    layout = TSNE(perplexity=perplexity, init="pca", metric="cosine", random_state=0)
    return _in_unit_circle(layout.fit_transform(directions).astype(float))


def _in_unit_circle(xy: np.ndarray) -> np.ndarray:
    xy = xy - (xy.max(axis=0) + xy.min(axis=0)) / 2
    return xy / max(np.linalg.norm(xy, axis=1).max(), 1e-12)


def histogram(groups: Sequence[np.ndarray], bins: int = BINS) -> dict[str, Any]:
    """Counts of several groups of values in common bins: {"low", "high", "counts": one list per group}."""
    low, high = min(map(np.min, groups)), max(map(np.max, groups))
    counts = [np.histogram(values, bins, (low, high))[0].tolist() for values in groups]
    return {"low": float(low), "high": float(high), "counts": counts}


def cluster_graph(centers: torch.Tensor, paths: torch.Tensor, edges: torch.Tensor) -> dict[str, Any]:
    """A graph of cluster centres for the page, with a shortest path between every two that edges connect.

    Args:
        centers: (num_clusters, dim) unit vectors.
        paths, edges: (num_clusters, num_clusters) lengths of shortest paths and of edges in radians, inf = none.
    Returns:
        xy and kept of the centres; edges as pairs; before: [i][j], the centre before j on the path from i, -1 = none;
            length: `paths`, null = none; start: the two ends of the path with the most edges.
    """
    from scipy.sparse.csgraph import shortest_path

    points, weights = centers.double().numpy(), edges.double().numpy()
    xy = _by_neighbors(points)
    is_edge = np.isfinite(weights) & ~np.eye(len(weights), dtype=bool)
    positive = np.where(is_edge, np.maximum(weights, 1e-6), 0)  # scipy reads what is near 0 as no edge
    _, before = shortest_path(positive, directed=False, return_predecessors=True)
    hops = shortest_path(is_edge, directed=False, unweighted=True)
    first, last = np.unravel_index(np.where(np.isfinite(hops), hops, -1).argmax(), hops.shape)
    rows, columns = np.nonzero(np.triu(is_edge))
    return {
        "xy": _rounded(xy, 4),
        "kept": neighbors_kept(points, xy),
        "edges": np.stack([rows, columns], 1).tolist(),
        "before": np.maximum(before, -1).tolist(),
        "length": [[round(value, 3) if math.isfinite(value) else None for value in row] for row in paths.tolist()],
        "start": [int(first), int(last)],
    }


# ---------------------------------------------------------------- the page


@torch.no_grad()
def describe(space: Space, test_set: TestSet) -> dict[str, Any]:
    """What the page shows of a model, as JSON values.

    distances, radii: from the root.
    norms: histogram of images and captions by distance.
    similarities: histogram of pairs: an image with its captions, and with captions that are not true of it.
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import normalize

    geometry, root = space.geometry, space.root
    distances = [geometry.distance_to(rows, root).double().numpy() for rows in (space.images, space.texts)]
    similarity = geometry.similarity(space.images, space.texts).double().numpy()
    vectors = [tangents(geometry, rows, root) for rows in (space.images, space.texts)]
    num_points = len(space.walks[0].places[0])
    paths = torch.stack([geometry.interpolate(image, root, num_points) for image in space.images])

    holds, is_chain = test_set.holds.numpy(), np.zeros(similarity.shape, dtype=bool)
    for row, chain in enumerate(test_set.chains):
        is_chain[row, chain] = True
    matched, unmatched = similarity[is_chain], similarity[~holds & ~is_chain]
    nearest = similarity.argmax(axis=1)
    share = (holds | is_chain)[np.arange(len(nearest)), nearest].mean()
    means = [normalize(rows.double().numpy()).mean(axis=0) for rows in vectors]
    curvature = scalar_values(geometry.scalars()).get("curvature")
    area = roc_auc_score(np.repeat([1, 0], [len(matched), len(unmatched)]), np.concatenate([matched, unmatched]))
    facts = {
        "geometry": geometry.name + ("" if curvature is None else f", c = {curvature:.2f}"),
        "root": space.root_name,
        "median distance of images": f"{np.median(distances[0]):.2f}",
        "median distance of captions": f"{np.median(distances[1]):.2f}",
        f"images whose nearest caption is {'true' if test_set.knows_truth else 'their own'}": f"{share:.0%}",
        "matched above unmatched (AUC)": f"{area:.3f}",
        "gap between modalities (0 to 2)": f"{np.linalg.norm(means[0] - means[1]):.2f}",
        **space.facts,
    }
    filters = [walks.min_radius for walks in space.walks if walks.min_radius is not None]
    return {
        "name": space.name,
        "kind": geometry.space,
        "geometry": geometry.name,
        "curvature": curvature,
        "edge": _edge(geometry.space, root),
        "root": space.root_name,
        "distances": [_rounded(values, 4) for values in distances],
        "layouts": layouts(*vectors),
        "walks": [_walks(space, walks, paths) for walks in space.walks],
        "radii": [_rounded(geometry.distance_to(points, root), 4) for points in paths],
        "cones": [_cones(space, min_radius) for min_radius in filters],
        "levels": [
            float(np.median(distances[1][[chain[place] for chain in test_set.chains if place < len(chain)]]))
            for place in range(len(test_set.levels))
        ],
        "nearest": nearest.tolist(),
        "norms": histogram(distances),
        "similarities": histogram([matched, unmatched]),
        "facts": facts,
        "graph": space.graph,
    }


def _walks(space: Space, walks: Walks, paths: torch.Tensor) -> dict[str, Any]:
    # For every point the nearest caption, None if the filter leaves none, and whether the root is nearer
    geometry, captions = space.geometry, []
    for points in paths:
        similarity = geometry.similarity(points, space.texts)
        if walks.min_radius is not None:
            arguments = {"images": points[:, None], "texts": space.texts, "min_radius": walks.min_radius}
            similarity[geometry.entailment_residual(**arguments) > 0] = -torch.inf
        best, places = similarity.max(dim=1)
        captions.append([place if value > -math.inf else None for value, place in zip(best.tolist(), places.tolist())])
    is_root = [[int(place == len(space.texts)) for place in row] for row in walks.places]
    return {"min_radius": walks.min_radius, "captions": captions, "is_root": is_root}


def _edge(space: str, root: torch.Tensor) -> float | None:
    # distance of the farthest point of the space
    return {"sphere": math.pi, "product": math.pi * math.sqrt(len(root))}.get(space)


def _cones(space: Space, min_radius: float) -> dict[str, Any]:
    halves = half_apertures(space.geometry, space.texts, min_radius)
    arguments = {"images": space.images, "min_radius": min_radius}
    inside = [space.geometry.entailment_residual(texts=text[None], **arguments) <= 0 for text in space.texts]
    return {
        "min_radius": min_radius,
        "half": _rounded(halves, 4),
        "inside": [rows.nonzero().squeeze(1).tolist() for rows in inside],
    }


def page_content(spaces: Sequence[Space], test_set: TestSet) -> dict[str, Any]:
    """All that the page and its picture show, as JSON values."""
    models = [describe(space, test_set) for space in spaces]
    owners: list[list[int]] = [[] for _ in test_set.texts]
    levels: list[list[int]] = [[] for _ in test_set.texts]
    for row, chain in enumerate(test_set.chains):
        for level, place in enumerate(chain):
            owners[place].append(row)
            levels[place].append(level)
    classes = sorted(set(test_set.classes))
    return {
        "texts": list(test_set.texts),
        "chains": [list(chain) for chain in test_set.chains],
        "holds": [row.nonzero().squeeze(1).tolist() for row in test_set.holds],
        "owners": owners,
        "verdicts": ["true", "untrue"] if test_set.knows_truth else ["its own", "another's"],
        "levels": list(test_set.levels),
        # a caption that stands at several levels takes the mean, rounded
        "level": [round(sum(values) / len(values)) if values else 0 for values in levels],
        "classes": classes,
        "class": [classes.index(name) for name in test_set.classes],
        "pictures": list(test_set.pictures),
        "start": _first_picture(models, test_set),
        "models": models,
    }


def write_map(content: dict[str, Any], test_set: str, path: str | Path) -> Path:
    """Writes the page of `page_content`, atomically; Jinja escapes every text, also within the script.

    Args:
        test_set: its name.
    Raises:
        ValueError: a page above `MAX_BYTES`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    names = [model["name"] for model in content["models"]]
    page = environment.get_template("map.html.jinja").render(
        title=f"Map of the embedding {'spaces' if len(names) > 1 else 'space'} of {', '.join(names)}",
        test_set=test_set, content=content, num_texts=len(content["texts"]), num_images=len(content["chains"]),
    )  # fmt: skip
    if len(page.encode()) > MAX_BYTES:
        size = f"{len(page.encode()) / 1e6:.1f} MB"
        raise ValueError(f"the page takes {size}; expected at most 3 MB: choose fewer --pictures, --points or runs")
    return write_atomically(path, page)


def _first_picture(models: Sequence[dict[str, Any]], test_set: TestSet) -> int:
    # The image whose walks meet the most true captions, less the untrue ones, in the worst model
    holds = test_set.holds.numpy()

    def score(model: dict[str, Any], row: int) -> int:
        return sum(1 if holds[row, text] else -1 for text in set(model["walks"][0]["captions"][row]))

    return int(np.argmax([min(score(model, row) for model in models) for row in range(len(test_set.chains))]))


def _rounded(values: Any, digits: int) -> list:
    return np.round(np.asarray(values, dtype=float), digits).tolist()
