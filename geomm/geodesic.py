"""Distances along the data: spherical k-means, a graph of cluster centres, shortest paths (GeoMM, Sec. 3).

Conventions, for every function here:
    points, features, queries, centres are unit vectors, (num, dim); lengths are angles in radians, float32 or float64
    no path = inf; no function depends on devices, processes or steps; ties go to the lower index

    distance(query, row) = angle to a centre + path between two centres + offset of the row from its centre   (Eq. 3)
    similarity           = cos(min(distance, 4 pi) / 4)

The paper's Eq. 3 goes through the query's nearest centre. All columns of the query then share the only term that
depends on it, and the gradient points along the line to that centre for every positive. So there are several readings:
    nearest        Eq. 3 literally
    knn            the query is a node of the graph: the shortest path through one of its nearest centres
    knn_local      knn, and the direct angle to the rows of the query's cluster (or of all attached clusters)
    nearest_local  nearest, and the direct angle to the rows of the query's cluster
    <reading>_st   straight-through: the value of nearest, nearest_local or knn_local, the gradient of the cosine
    angle_st       no graph: the direct angle to all rows, with the gradient of the cosine; a control
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from common.vectors import at_least_float32, full_precision, inner_product_similarity, norm, paired_angles, unit

ATTACH = (
    "nearest",
    "knn",
    "nearest_local",
    "knn_local",
    "nearest_st",
    "nearest_local_st",
    "knn_local_st",
    "angle_st",
)
LOCAL = ("nearest", "attached")
GRAPHS = ("neighbors", "threshold")
CUT = 4 * math.pi  # distances are truncated here (Sec. 3.3)
CHUNK = 4_096  # rows compared with all centres at once
CHORD_ERROR = 2e-3  # of the difference of two chords whose squares are of float32 products


@dataclass(frozen=True)
class GeodesicGraph:
    """The result of a clustering of rows, sufficient for distances with any hierarchy.

    cluster_centers: (num_clusters, dim). paths: (num_clusters, num_clusters), symmetric, 0 on the diagonal, inf = none.
    nearest_center: (num_rows,) int32, an index that index_select takes; 8 bits would end at 256 clusters.
    offset: (num_rows,) angle between a row and its nearest centre.
    """

    cluster_centers: torch.Tensor
    paths: torch.Tensor
    nearest_center: torch.Tensor
    offset: torch.Tensor


def angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angles of all pairs: (a, dim), (b, dim) -> (a, b), with a finite gradient.

    From one product, so that angles below 1e-3 (float32) are exact to 1e-3 only; `common.geometry.paired_angles` is
    exact everywhere. Below that, and as near to pi, the gradient is 0.
    """
    return angles_of(inner_product_similarity(first, second))


def angles_of(cosines: torch.Tensor) -> torch.Tensor:
    """Angles of cosines, as in `angles`."""
    limit = 1 - 8 * torch.finfo(cosines.dtype).eps  # arccos has no slope at 1
    return cosines.clamp(-limit, limit).arccos()


def angle_normalise(distances: torch.Tensor) -> torch.Tensor:
    """Distances in [0, inf] -> angles in [0, pi]: min(distance, 4 pi) / 4; the gradient is 0 beyond the cut.

    inferred: the paper truncates, normalises to [0, pi] and takes the cosine, without details. This formula is monotone
    and does not depend on the rest of the batch. The cut comes first, as cos(inf) is NaN.
    """
    return distances.clamp(max=CUT) / 4


def nearest_centers(points: torch.Tensor, centers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each point's nearest centre, (num_points,) int32, and its angle to it; a chunk of points at a time."""
    nearest = torch.cat([inner_product_similarity(chunk, centers).argmax(dim=1) for chunk in points.split(CHUNK)])
    parts = zip(points.split(CHUNK), nearest.split(CHUNK))
    offset = torch.cat([paired_angles(chunk, centers[places]) for chunk, places in parts])
    return nearest.int(), offset


def spherical_kmeans(points: torch.Tensor, start: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Centres after some rounds of: assign each point to the closest centre; a centre is its points' normalised mean.

    A cluster without points (or whose points cancel out) restarts at the point that is farthest from its centre,
    several such clusters at several points. The caller assigns the points once more, as the last centres have moved.
    A point is compared again only if the centres may have moved far enough to matter (Hamerly, SDM 2010). Its lead is
    the chord to the second nearest centre minus that to the nearest. By the triangle inequality it shrinks at most by
    the movements of the nearest centre and of the fastest centre.

    Args:
        points: (num_points, dim) unit vectors, at least one.
        start: (num_clusters, dim) unit vectors: earlier centres, or points.
        iterations: rounds; the paper: 5.
    Returns:
        (num_clusters, dim).
    """
    centers, nearest = start, torch.zeros(len(points), dtype=torch.int64, device=points.device)
    lead = torch.full_like(points[:, 0], -torch.inf)
    for _ in range(iterations):
        for part in (lead < CHORD_ERROR).nonzero()[:, 0].split(CHUNK):
            cosines = inner_product_similarity(points[part], centers)
            best, nearest[part] = cosines.max(dim=1)
            second = cosines.scatter_(1, nearest[part, None], -torch.inf).amax(dim=1)
            chords = (2 - 2 * torch.stack((best, second))).clamp(min=0).sqrt()
            lead[part] = chords[1] - chords[0]
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        lost = (norm(sums) < 1e-6).nonzero()[:, 0]
        if len(lost):
            farthest = (points * centers[nearest]).sum(dim=1).argsort(stable=True)
            sums[lost] = points[farthest[torch.arange(len(lost), device=lost.device) % len(points)]]
        before, centers = centers, unit(sums)
        moved = norm(centers - before)
        lead -= moved[nearest] + moved.max()
    return centers


def first_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest scores of each row, the largest first, ties by index. (num_rows, k) int64.

    `topk` takes any of equals, so a row with ties is sorted again.
    """
    if scores.device.type != "cpu":  # finding the rows with ties would synchronise with the device
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    columns = columns[:, :k]
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero()[:, 0]
    if len(tied):
        columns[tied] = scores[tied].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return columns


def neighbor_edges(points: torch.Tensor, num_neighbors: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From each point to its nearest others: heads, tails, lengths, of num_points * min(num_neighbors, the others)."""
    count = min(num_neighbors, len(points) - 1)
    heads = torch.arange(len(points), device=points.device)
    tails = []
    for chunk in heads.split(CHUNK // 8):
        cosines = inner_product_similarity(points[chunk], points)
        cosines[torch.arange(len(chunk), device=chunk.device), chunk] = -torch.inf  # not a neighbour of itself
        tails.append(first_k(cosines, count))
    heads, tails = heads.repeat_interleave(count), torch.cat(tails).flatten()
    return heads, tails, paired_angles(points[heads], points[tails])


def neighbor_graph(centers: torch.Tensor, num_neighbors: int) -> torch.Tensor:
    """Edges of a graph in which two centres are joined if either is among the other's nearest.

    Args:
        centers: (num_clusters, dim).
        num_neighbors: of each centre; with as many centres or fewer the graph is complete.
    Returns:
        (num_clusters, num_clusters) angles, symmetric, 0 on the diagonal, inf = no edge.
    """
    return _joined(len(centers), *neighbor_edges(centers, num_neighbors))


def threshold_graph(centers: torch.Tensor, num_neighbors: int) -> torch.Tensor:
    """Edges of a graph in which two centres are joined if their angle is at most a radius.

    inferred: the paper thresholds distances in its abstract and states no threshold. Here it is the radius with as many
    edges as `neighbor_graph` has; arguments and result as there. The graph may have several components.
    """
    count = (int(torch.isfinite(neighbor_graph(centers, num_neighbors)).sum()) - len(centers)) // 2
    pairs = torch.ones(len(centers), len(centers), dtype=torch.bool, device=centers.device).triu(1).nonzero()
    cosines = inner_product_similarity(centers, centers)[pairs[:, 0], pairs[:, 1]]
    heads, tails = pairs[cosines.sort(descending=True, stable=True).indices[:count]].T
    return _joined(len(centers), heads, tails, paired_angles(centers[heads], centers[tails]))


def center_graph(centers: torch.Tensor, num_neighbors: int, kind: str = "neighbors") -> torch.Tensor:
    """`neighbor_graph` or `threshold_graph`; `kind` is one of GRAPHS, else ValueError."""
    if kind not in GRAPHS:
        raise ValueError(f"graph {kind!r} is unknown; expected: {', '.join(GRAPHS)}")
    return (neighbor_graph if kind == "neighbors" else threshold_graph)(centers, num_neighbors)


def _joined(size: int, heads: torch.Tensor, tails: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    edges = torch.full((size, size), torch.inf, dtype=lengths.dtype, device=lengths.device)
    edges[heads, tails] = lengths
    return torch.minimum(edges, edges.T).fill_diagonal_(0.0)


def shortest_paths(edges: torch.Tensor) -> torch.Tensor:
    """Lengths of the shortest paths between all nodes, by Floyd and Warshall; does not change the edges."""
    if edges.device.type != "cpu":
        return _row_by_row(edges)
    paths = edges.detach().clone()
    _compiled_paths()(paths.numpy())
    return paths


def _row_by_row(edges: torch.Tensor) -> torch.Tensor:
    paths = edges.clone()
    for node in range(len(paths)):
        torch.minimum(paths, paths[:, node, None] + paths[node], out=paths)
    return paths


@cache
def _compiled_paths():
    from common.base.compiled import compiled  # numba: half a second that only builders of graphs wait for

    return compiled(_relax)


def _relax(paths):
    for node in range(len(paths)):
        onwards = paths[node].copy()
        for start in range(len(paths)):
            first = paths[start, node]
            if first < math.inf:
                row = paths[start]
                for end in range(len(onwards)):
                    row[end] = min(row[end], first + onwards[end])


def components(paths: torch.Tensor) -> torch.Tensor:
    """(num_nodes,) int64: the lowest node of each node's component."""
    return torch.isfinite(paths).int().argmax(dim=1)


def attach_queries(
    queries: torch.Tensor, graph: GeodesicGraph, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The shortest path of each query to each centre, through one of its nearest `count` centres.

    Args:
        queries: (batch, dim).
        count: 1 = the paper's Eq. 3; all centres = the angle to each of them, by the triangle inequality.
    Returns:
        routes: (batch, num_clusters) lengths.
        attached: (batch, count) int64, the centres of each query, nearest first.
        entrance: (batch, num_clusters) int64, the first centre of the path.
    """
    lengths = angles(queries, graph.cluster_centers)
    attached = first_k(-lengths.detach(), count)
    routes, through = (lengths.gather(1, attached)[:, :, None] + graph.paths[attached]).min(dim=1)
    return routes, attached, attached.gather(1, through)


def check_reading(attach: str, local: str) -> None:
    """Raises ValueError for unknown readings, with the known ones."""
    for name, value, accepted in (("attach", attach, ATTACH), ("local", local, LOCAL)):
        if value not in accepted:
            raise ValueError(f"{name} {value!r} is unknown; expected: {', '.join(accepted)}")


def attached_and_local(attach: str, local: str, num_attached: int, num_clusters: int) -> tuple[int, int]:
    """The number of centres of a query, and the number of their clusters with direct angles."""
    check_reading(attach, local)
    count = min(num_attached, num_clusters) if attach.startswith("knn") else 1
    if "local" not in attach:
        return count, 0
    return count, 1 if local == "nearest" else count


def geodesic_distance(
    queries: torch.Tensor,
    rows: torch.Tensor,
    graph: GeodesicGraph,
    attach: str = "knn_local",
    num_attached: int = 8,
    local: str = "nearest",
) -> torch.Tensor:
    """Distances of queries to all rows of a graph, for every reading (Eq. 3).

    With plain autograd, where only the queries get a gradient; the pool has a faster form of the same numbers. The
    readings `_st` have the distances of those without.

    Args:
        queries: (batch, dim), not among the rows.
        rows: (num_rows, dim), the rows of the graph.
        attach: reading, one of ATTACH.
        num_attached: centres of a query for `knn`; the paper attaches to one.
        local: rows at the direct angle, for `knn_local`: of the query's "nearest" cluster, or of all "attached" ones.
    Returns:
        (batch, num_rows), >= the angle, inf = no path; float32 or better.
    """
    count, num_local = attached_and_local(attach, local, num_attached, len(graph.paths))
    queries, rows = at_least_float32(queries), at_least_float32(rows)
    with full_precision(queries):
        if attach == "angle_st":
            return angles(queries, rows)
        routes, attached, _ = attach_queries(queries, graph, count)
        distances = routes.index_select(1, graph.nearest_center) + graph.offset
        if not num_local:
            return distances
        is_local = torch.zeros_like(routes, dtype=torch.bool).scatter(1, attached[:, :num_local], True)
        return torch.where(is_local.index_select(1, graph.nearest_center), angles(queries, rows), distances)


def geodesic_similarity(
    queries: torch.Tensor,
    rows: torch.Tensor,
    graph: GeodesicGraph,
    attach: str = "knn_local",
    num_attached: int = 8,
    local: str = "nearest",
) -> torch.Tensor:
    """cos(angle_normalise(geodesic_distance)), in [-1, 1]; with `_st` its gradient is that of the cosine.

    Arguments as in `geodesic_distance`; (batch, num_rows).
    """
    similarity = angle_normalise(geodesic_distance(queries, rows, graph, attach, num_attached, local)).cos()
    if not attach.endswith("_st"):
        return similarity
    cosines = inner_product_similarity(queries, rows)
    return cosines + (similarity - cosines).detach()


def sample_distance(queries: torch.Tensor, rows: torch.Tensor, num_neighbors: int = 8) -> torch.Tensor:
    """The exact geodesic that the clusters approximate: shortest paths on the neighbour graph of all rows.

    Each query has edges to its nearest rows; no path uses another query. Without gradient, by Dijkstra on the CPU:
    seconds for 4,096 rows.

    Args:
        queries: (batch, dim).
        rows: (num_rows, dim).
        num_neighbors: of each row, and of each query.
    Returns:
        (batch, num_rows) float64, >= the angle, inf = no path.
    """
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    heads, tails, lengths = neighbor_edges(rows, num_neighbors)
    first = first_k(inner_product_similarity(queries, rows), min(num_neighbors, len(rows)))
    asking = torch.arange(len(queries), device=queries.device).repeat_interleave(first.shape[1])
    steps = paired_angles(queries[asking], rows[first.flatten()])
    starts = torch.cat([heads, tails, len(rows) + asking]).cpu().numpy()
    ends = torch.cat([tails, heads, first.flatten()]).cpu().numpy()
    lengths = torch.cat([lengths, lengths, steps]).double().detach().cpu().numpy()
    size = len(rows) + len(queries)
    _, once = np.unique(starts * size + ends, return_index=True)  # csr_array would add up an edge that is listed twice
    edges = csr_array((lengths[once], (starts[once], ends[once])), shape=(size, size))
    return torch.from_numpy(dijkstra(edges, indices=np.arange(len(rows), size))[:, : len(rows)])
