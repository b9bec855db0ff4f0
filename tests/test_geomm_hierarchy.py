"""geomm/hierarchy.py: the table against the paper's recursion, point by point; layers, warm start, refusals; and
geomm/graph_report.py: what a graph is like, against networkx."""

import dataclasses
import itertools
import math
import statistics

import networkx
import pytest
import torch
from scipy.stats import spearmanr
from test_geomm_pool import draw

from common.geometry import paired_angles, unit
from geomm.geodesic import (
    angles,
    center_graph,
    geodesic_distance,
    geodesic_similarity,
    nearest_centers,
    neighbor_graph,
    sample_distance,
    shortest_paths,
    spherical_kmeans,
    threshold_graph,
)
from geomm.graph_report import FEW_ROWS, path_statistics, pool_report, unreachable_share
from geomm.hierarchy import build_graph, path_table
from geomm.pool import GeodesicPool


def angle(first, second):
    return float(paired_angles(first[None], second[None]))


class Tree:
    """Eq. 2 as the specification writes it: no table, one pair of points at a time."""

    def __init__(self, layers, branching, num_neighbors, kind):
        self.layers, self.branching, self.num_neighbors, self.kind = layers, branching, num_neighbors, kind
        self.paths = [{} for _ in layers]

    def children(self, layer, node):
        return range(node * self.branching[layer], (node + 1) * self.branching[layer])

    def places(self, point, layer=0, node=0):
        """The node of each layer from `layer` on that a point falls to below a node of the layer above."""
        path = []
        for depth in range(layer, len(self.layers)):
            node = max(self.children(depth, node), key=lambda child: float(point @ self.layers[depth][child]))
            path.append(node)
        return path

    def path(self, layer, first, second):
        nodes = list(self.children(layer, first // self.branching[layer]))
        if nodes[0] not in self.paths[layer]:
            edges = center_graph(self.layers[layer][nodes], self.num_neighbors, self.kind)
            self.paths[layer][nodes[0]] = shortest_paths(edges)
        return float(self.paths[layer][nodes[0]][nodes.index(first), nodes.index(second)])

    def climb(self, point, places, layer):
        """From a point up to its centre of a layer; places[k] is its node of layer k."""
        if layer == len(self.layers) - 1:
            return angle(point, self.layers[-1][places[-1]])
        z = self.layers[layer][places[layer]]
        z_places = places[: layer + 1] + self.places(z, layer + 1, places[layer])
        return (
            self.climb(point, places, layer + 1)
            + self.path(layer + 1, places[layer + 1], z_places[layer + 1])
            + self.climb(z, z_places, layer + 1)
        )

    def distance(self, first, second):
        here, there = self.places(first), self.places(second)
        parted = [layer for layer in range(len(here)) if here[layer] != there[layer]]
        layer = parted[0] if parted else len(here) - 1
        path = self.path(layer, here[layer], there[layer])
        return self.climb(first, here, layer) + path + self.climb(second, there, layer)


@pytest.mark.parametrize(("num_neighbors", "kind"), [(1, "neighbors"), (3, "neighbors"), (1, "threshold")])
@pytest.mark.parametrize("branching", [(12,), (4, 3), (3, 2, 2), (2, 1, 3, 2)])
def test_the_table_is_the_papers_recursion_point_by_point(branching, num_neighbors, kind):
    points = draw(0, 14, 6)
    layers = [draw(1 + depth, math.prod(branching[: depth + 1]), 6) for depth in range(len(branching))]
    tree = Tree(layers, branching, num_neighbors, kind)
    leaf = torch.tensor([tree.places(point)[-1] for point in points])
    offset = paired_angles(points, layers[-1][leaf])
    table = path_table(layers, branching, num_neighbors, kind)
    distances = offset[:, None] + table[leaf[:, None], leaf] + offset
    for i, j in itertools.combinations_with_replacement(range(14), 2):
        assert distances[i, j].item() == pytest.approx(tree.distance(points[i], points[j]), abs=1e-6)
    torch.testing.assert_close(table, table.T)
    assert (table.diagonal() == 0).all()
    assert (table >= angles(layers[-1], layers[-1]).fill_diagonal_(0) - 1e-9).all()


@pytest.mark.parametrize("branching", [(24,), (6, 4), (2, 3, 4), (384,)])
def test_rows_belong_to_the_nearest_of_all_bottom_centres(branching):
    rows = draw(6, 500, 5, dtype=torch.float32)
    graph = build_graph(rows, branching)
    nearest, offset = nearest_centers(rows, graph.cluster_centers)
    assert graph.nearest_center.dtype == torch.int32
    assert torch.equal(graph.nearest_center, nearest)
    assert torch.equal(graph.offset, offset)
    assert nearest.max() == math.prod(branching) - 1  # beyond 255, too
    for name, tensor in dataclasses.asdict(build_graph(rows, branching)).items():
        assert torch.equal(tensor, getattr(graph, name)), name


def test_layers_split_clusters_of_clusters():
    """Groups in groups: the bottom centres of one top centre are those of one group."""
    groups = draw(7, 3, 24)
    means = unit(groups.repeat_interleave(4, 0) + 0.5 * draw(8, 12, 24))
    rows = unit(means.repeat_interleave(25, 0) + 0.05 * draw(9, 300, 24))
    graph = build_graph(rows, (3, 4), start=rows[::25])  # one row of each
    torch.testing.assert_close(graph.nearest_center.long(), torch.arange(12).repeat_interleave(25))
    top, bottom = (unit(rows.view(count, -1, 24).mean(dim=1)) for count in (3, 12))
    torch.testing.assert_close(graph.cluster_centers, bottom)
    torch.testing.assert_close(graph.paths, path_table([top, bottom], (3, 4), 8))
    start = draw(14, 24, 24)  # as it is, without a round of k-means
    above = [unit(start.view(count, -1, 24).mean(dim=1)) for count in (2, 6, 24)]
    graph = build_graph(rows, (2, 3, 4), iterations=0, start=start)
    torch.testing.assert_close(graph.paths, path_table(above, (2, 3, 4), 8))


def test_more_centres_than_rows_of_a_cluster_is_no_error():
    rows = torch.cat([draw(10, 1, 4).repeat(30, 1), draw(11, 6, 4)])  # thirty in one place
    graph = build_graph(rows, (4, 4))
    assert torch.isfinite(graph.cluster_centers).all()
    assert torch.isfinite(graph.offset).all()
    assert not torch.isnan(graph.paths).any()


@pytest.mark.parametrize("branching", [(), (0,), (8, 8), (41,)])
def test_a_branching_that_asks_for_too_much_is_refused(branching):
    with pytest.raises(ValueError, match=r"branching \[.*\] asks for \d+ clusters of 40 rows; expected: .* at most 40"):
        build_graph(draw(12, 40, 4), branching)


@pytest.mark.parametrize(("num_neighbors", "kind"), [(3, "neighbors"), (2, "threshold")])
def test_figures_of_a_graph_are_those_of_networkx(num_neighbors, kind):
    centers = unit(draw(15, 6, 5).repeat_interleave(5, 0) + 0.3 * draw(16, 30, 5))
    edges = center_graph(centers, num_neighbors, kind)
    graph = networkx.Graph()
    graph.add_nodes_from(range(30))
    graph.add_weighted_edges_from(
        (i, j, float(edges[i, j])) for i, j in itertools.combinations(range(30), 2) if torch.isfinite(edges[i, j])
    )
    routes = dict(networkx.all_pairs_dijkstra(graph))
    joined = [(i, j) for i, j in itertools.combinations(range(30), 2) if j in routes[i][0]]
    hops, lengths = [len(routes[i][1][j]) - 1 for i, j in joined], [routes[i][0][j] for i, j in joined]
    direct = [angle(centers[i], centers[j]) for i, j in joined]
    expected = {
        "nodes": 30,
        "edges": graph.number_of_edges(),
        "longest_edge": max(length for _, _, length in graph.edges.data("weight")),
        "components": networkx.number_connected_components(graph),
        "hops": statistics.fmean(hops),
        "path_over_angle": statistics.fmean(length / angle for length, angle in zip(lengths, direct)),
        "rank_correlation": spearmanr(lengths, direct).statistic,
    }
    assert path_statistics(centers, edges) == pytest.approx(expected, rel=1e-6)
    assert kind == "neighbors" or expected["components"] > 1
    assert unreachable_share(shortest_paths(edges)) == pytest.approx(1 - 2 * len(hops) / (30 * 29))


def test_a_pool_reports_its_top_layer_and_clusters_counted_one_by_one():
    pool = GeodesicPool(200, 6, branching=(20, 3), num_neighbors=4, num_attached=2)
    pool.insert(draw(17, 200, 6, dtype=torch.float32))
    assert pool.rebuild(0)
    tops, report = pool.top_centers, pool_report(pool)
    below = pool.cluster_centers.view(20, 3, 6)  # children stand beside their parent
    assert ((below @ tops[:, :, None]).mean(dim=1) > (below @ tops.T).mean(dim=1).median()).float().mean() > 0.8
    sizes = [sum(int(center) // 3 == top for center in pool.nearest_center) for top in range(20)]
    assert report["small_clusters"] == sum(size < FEW_ROWS for size in sizes)
    assert 0 < report["small_clusters"] < 20
    assert {name: report[name] for name in ("unreachable", "nodes")} == {"unreachable": 0, "nodes": 20}
    assert report["path_over_angle"] == path_statistics(tops, neighbor_graph(tops, 4))["path_over_angle"] > 1.01
    assert path_statistics(draw(18, 2, 4), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))["hops"] == 1  # no order of one pair
    one_point = path_statistics(tops[:1].expand(2, -1), torch.zeros(2, 2))
    assert one_point == {"nodes": 2, "edges": 1, "longest_edge": 0, "components": 1}  # a collapsed pool has no paths


def distances_of(rows, queries):
    graph = build_graph(rows, (10, 2), 3)
    geodesic = [compute(queries, rows, graph, "knn_local_st") for compute in (geodesic_distance, geodesic_similarity)]
    return *geodesic, sample_distance(queries, rows, 3)


def parts_of_a_graph(rows, queries):
    rows, queries = rows.float(), queries.float()  # functions of a graph's making, which round nothing either
    centers = spherical_kmeans(rows, queries)
    return centers, *nearest_centers(rows, centers), angles(rows, centers), threshold_graph(centers, 3)


@pytest.mark.parametrize("measured", [distances_of, parts_of_a_graph])
def test_graph_and_distances_are_in_float32_under_autocast_and_of_half_precision(measured):
    rows, queries = (unit(torch.randn(count, 8, generator=torch.Generator().manual_seed(count))).bfloat16()
                     for count in (200, 20))  # fmt: skip
    expected = measured(rows.float(), queries.float())
    assert all(map(torch.equal, measured(rows, queries), expected))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, measured(rows.float(), queries.float()), expected))


def test_a_graph_takes_rows_with_a_gradient():
    rows = draw(3, 120, 8, dtype=torch.float32)
    graph = build_graph(rows.clone().requires_grad_(), (4, 2), 2)
    assert torch.equal(graph.paths, build_graph(rows, (4, 2), 2).paths)
