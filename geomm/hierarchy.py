"""Clusters within clusters, collapsed to one table of distances between the bottom centres (GeoMM, Eq. 2).

Rows are clustered into branching[0] clusters, the rows of each cluster into branching[1], and so on. The centres within
one cluster form a graph. Two rows that separate at layer s climb to their centres of that layer, which a path connects;
below the bottom centres the angle is the distance. A climb starts with the angle to the bottom centre, and its rest
depends only on that centre. Distances of rows are therefore offset + table + offset, for any number of layers.
"""

import math
from collections.abc import Sequence

import torch

from common.vectors import at_least_float32, full_precision, paired_angles, unit
from geomm.geodesic import (
    GeodesicGraph,
    center_graph,
    nearest_centers,
    shortest_paths,
    spherical_kmeans,
)


def build_graph(
    rows: torch.Tensor,
    branching: Sequence[int],
    num_neighbors: int = 8,
    iterations: int = 5,
    start: torch.Tensor | None = None,
    seed: int = 0,
    kind: str = "neighbors",
) -> GeodesicGraph:
    """Clusters rows and joins their centres, in float32 or better: `cluster_layers`, then `join_layers`.

    Arguments and errors as there.
    """
    rows = at_least_float32(rows).detach()
    with full_precision(rows):
        layers = cluster_layers(rows, branching, iterations, start, seed)
        return join_layers(rows, layers, branching, num_neighbors, kind)


def join_layers(
    rows: torch.Tensor,
    layers: Sequence[torch.Tensor],
    branching: Sequence[int],
    num_neighbors: int = 8,
    kind: str = "neighbors",
) -> GeodesicGraph:
    """The graph of clustered rows.

    All rows are assigned to the nearest of all bottom centres, by the same rule as later rows (inferred: by the tree
    these two would differ).

    Args:
        rows: (num_rows, dim) unit vectors.
        layers, branching: of `cluster_layers`.
        num_neighbors, kind: of the graph among the centres within one cluster, see `center_graph`.
    """
    nearest, offset = nearest_centers(rows, layers[-1])
    return GeodesicGraph(layers[-1], path_table(layers, branching, num_neighbors, kind), nearest, offset)


def check_branching(branching: Sequence[int], available: int, what: str) -> None:
    """Raises ValueError unless branching is whole numbers of at least 1 whose product is at most `available`."""
    if not branching or min(branching) < 1 or math.prod(branching) > available:
        raise ValueError(
            f"branching {list(branching)} asks for {math.prod(branching)} clusters of {available} {what}; expected: "
            f"one number or more of at least 1, whose product is at most {available}"
        )


def check_finite(rows: torch.Tensor) -> None:
    """Raises ValueError, with the number of bad rows and the first one, if rows hold NaN or infinite numbers."""
    broken = (~torch.isfinite(rows.sum(dim=1))).nonzero()[:, 0]  # a mask of all numbers would cost as much as k-means
    if len(broken):
        raise ValueError(
            f"{len(broken)} of the {len(rows)} keys in the pool hold NaN or infinite numbers, the first of them key "
            f"{int(broken[0])}: no graph can be built of them; their encoder has diverged"
        )


def cluster_layers(
    rows: torch.Tensor,
    branching: Sequence[int],
    iterations: int = 5,
    start: torch.Tensor | None = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Centres of each layer from the top, (prod(branching[:layer]), dim); deterministic on one machine.

    The children of node i are i * b .. i * b + b - 1.

    Args:
        rows: (num_rows, dim) unit vectors.
        branching: clusters of each layer within a cluster of the one above; ours for the paper: (256, 2).
        iterations: of k-means in each layer.
        start: (prod(branching), dim) centres of an earlier graph to begin with; None = rows drawn with `seed`.
    Raises:
        ValueError: more clusters than rows, an invalid branching, or rows that are not finite.
    """
    check_branching(branching, len(rows), "rows")
    check_finite(rows)
    generator = torch.Generator().manual_seed(seed)
    layers = [rows.new_zeros(1, rows.shape[1])]  # all rows are members of this root
    member_of = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for depth, width in enumerate(branching):
        centers, places = [], torch.zeros_like(member_of)
        below = math.prod(branching[depth + 1 :])
        for node, parent in enumerate(layers[-1]):
            members = (member_of == node).nonzero()[:, 0]
            inside = rows[members] if len(members) else parent[None]  # no member: all its centres are the parent
            if start is None:
                drawn = torch.randperm(len(inside), generator=generator).to(rows.device)
                first = inside[drawn[torch.arange(width, device=rows.device) % len(inside)]]
            else:  # the mean of the bottom centres below is near the earlier upper centre
                first = unit(start.view(len(layers[-1]), width, below, -1)[node].mean(dim=1))
            centers.append(spherical_kmeans(inside, first, iterations))
            if depth + 1 < len(branching) and len(members):
                places[members] = nearest_centers(inside, centers[-1])[0].long()
        layers.append(torch.cat(centers))
        member_of = member_of * width + places
    return layers[1:]


def path_table(
    layers: Sequence[torch.Tensor], branching: Sequence[int], num_neighbors: int, kind: str = "neighbors"
) -> torch.Tensor:
    """Distances between all bottom centres by Eq. 2, climbs included.

    With U_k(p) the climb of bottom centre p to its layer-k centre z, and q the bottom centre to which z descends by the
    nearest centre in each layer (a mean is no row, so this is its cluster):

        U_n(p) = 0,    U_k(p) = U_k+1(p) + path_k+1(p, q) + angle(z, q) + U_k+1(q)
        table(p, q) = U_s(p) + path_s(p, q) + U_s(q),    s the first layer in which p and q separate

    As printed, the middle term of the recursion is the quantity that it defines (inferred: a misprint).

    Args:
        layers: centres of each layer from the top, children of a node in a row.
        branching: children of each node in each layer.
        num_neighbors, kind: of the graph of siblings, see `center_graph`.
    Returns:
        (num_clusters, num_clusters), symmetric, 0 on the diagonal, inf if a path is missing.
    """
    bottom = layers[-1]
    num_clusters, device = len(bottom), bottom.device
    leaf = torch.arange(num_clusters, device=device)
    table = bottom.new_zeros(num_clusters, num_clusters)
    climb = bottom.new_zeros(num_clusters)
    for depth in reversed(range(len(layers))):
        width = branching[depth]
        parent_of = leaf // (num_clusters // math.prod(branching[:depth]))
        place_of = leaf // (num_clusters // len(layers[depth])) % width
        siblings = layers[depth].view(-1, width, bottom.shape[1])
        paths = torch.stack([shortest_paths(center_graph(centers, num_neighbors, kind)) for centers in siblings])
        here = paths[parent_of[:, None], place_of[:, None], place_of] + climb[:, None] + climb
        part = (parent_of[:, None] == parent_of) & (place_of[:, None] != place_of)
        table = torch.where(part, here, table)
        if depth:  # on to the parents
            middle = layers[depth - 1]
            reached = _descend(middle, layers[depth:], branching[depth:])[parent_of]
            climb = (
                climb
                + paths[parent_of, place_of, place_of[reached]]
                + paired_angles(middle[parent_of], bottom[reached])
                + climb[reached]
            )
    return table


def _descend(points: torch.Tensor, layers: Sequence[torch.Tensor], branching: Sequence[int]) -> torch.Tensor:
    """(num_points,) int64: the bottom centre to which the centre of node i, points[i], descends."""
    node = torch.arange(len(points), device=points.device)
    for centers, width in zip(layers, branching):
        children = centers.view(-1, width, centers.shape[1])[node]
        node = node * width + (children @ points[:, :, None])[:, :, 0].argmax(dim=1)
    return node
