"""What a graph is like: figures that show whether it has shortest paths at all.

On a sphere the paths over a complete graph are the angles. The more the paths exceed them, and the less their order is
that of the angles, the more graph there is.
"""

from typing import Any

import numpy as np
import torch

from common.vectors import unit
from geomm.geodesic import angles, center_graph, components
from geomm.pool import GeodesicPool

FEW_ROWS = 8


def path_statistics(centers: torch.Tensor, edges: torch.Tensor) -> dict[str, float]:
    """Statistics of the shortest paths of a graph.

    Args:
        centers: (num_nodes, dim) unit vectors, at least two.
        edges: (num_nodes, num_nodes) lengths, 0 on the diagonal, inf = no edge; at least one edge.
    Returns:
        nodes, edges: counts. longest_edge: in radians. components: count. hops: mean number of edges of a path.
        path_over_angle: mean ratio of a path's length and the angle between its ends, >= 1. rank_correlation:
        Spearman's rho of both, which is that with the complete graph. The last three are over the pairs of different
        nodes with a path, and are missing where there is none, or no order.
    """
    from scipy.sparse import csr_array  # statistics of scipy are a second of each start
    from scipy.sparse.csgraph import dijkstra
    from scipy.stats import spearmanr

    size = len(centers)
    lengths = edges.double().cpu().numpy()
    heads, tails = np.nonzero(np.isfinite(lengths) & ~np.eye(size, dtype=bool))
    graph = csr_array((lengths[heads, tails], (heads, tails)), shape=(size, size))
    paths, before = dijkstra(graph, return_predecessors=True)
    # from all ends back to their starts at once, one edge at a time
    start, place, hops = np.arange(size)[:, None], np.broadcast_to(np.arange(size), (size, size)), np.zeros_like(paths)
    while (is_moving := before[start, place] >= 0).any():
        hops, place = hops + is_moving, np.where(is_moving, before[start, place], place)
    centers = unit(centers.double())  # norms of float32 are off by 1e-7, which small angles would show
    direct = angles(centers, centers).cpu().numpy()
    pairs = np.triu(np.isfinite(paths), 1) & (direct > 1e-6)
    statistics = {
        "nodes": size,
        "edges": len(heads) // 2,
        "longest_edge": float(lengths[heads, tails].max()),
        "components": components(torch.from_numpy(paths)).unique().numel(),
    }
    if pairs.any():  # else all centres are one point: the keys have collapsed
        statistics["hops"] = float(hops[pairs].mean())
        statistics["path_over_angle"] = float((paths[pairs] / direct[pairs]).mean())
    if len(np.unique(paths[pairs])) > 1 and len(np.unique(direct[pairs])) > 1:
        statistics["rank_correlation"] = float(spearmanr(paths[pairs], direct[pairs]).statistic)
    return statistics


def unreachable_share(paths: torch.Tensor) -> float:
    """Share of the ordered pairs of different nodes without a path; 0 for one node."""
    return float(torch.isinf(paths).sum() / max(1, paths.numel() - len(paths)))


def pool_report(pool: GeodesicPool) -> dict[str, Any]:
    """After a rebuild, on the main process: `path_statistics` of the top layer, and two figures of the whole table.

    Returns:
        Also small_clusters, the number of top clusters with fewer than FEW_ROWS rows, and unreachable, the share of
        pairs of different bottom centres without a path.
    """
    tops = pool.top_centers
    top_of = pool.nearest_center.long() // (len(pool.paths) // len(tops))
    sizes = torch.bincount(top_of, minlength=len(tops))
    return path_statistics(tops, center_graph(tops, pool.num_neighbors, pool.kind)) | {
        "small_clusters": int((sizes < FEW_ROWS).sum()),
        "unreachable": unreachable_share(pool.paths),
    }
