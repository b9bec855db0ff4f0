"""geomm/geodesic.py: second implementations, brute force, laws, and what is wrong with Eq. 3 and with Theorem 2."""

import itertools
import math

import networkx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.csgraph import shortest_path as scipy_shortest_path

from common.geometry import paired_angles, unit
from geomm.geodesic import (
    ATTACH,
    GeodesicGraph,
    _row_by_row,
    angle_normalise,
    angles,
    attach_queries,
    center_graph,
    components,
    first_k,
    geodesic_distance,
    geodesic_similarity,
    nearest_centers,
    neighbor_edges,
    neighbor_graph,
    sample_distance,
    shortest_paths,
    spherical_kmeans,
    threshold_graph,
)


def draw(seed, *shape, dtype=torch.float64):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def random_edges(seed, nodes, share):
    """A symmetric graph, in pieces where few pairs are joined."""
    generator = np.random.default_rng(seed)
    lengths, present = generator.uniform(0.1, 3.0, (nodes, nodes)), generator.uniform(size=(nodes, nodes)) < share
    edges = np.where(np.triu(present, 1), np.triu(lengths, 1), np.inf)
    edges = np.minimum(edges, edges.T)
    np.fill_diagonal(edges, 0.0)
    return edges


def graph_of(rows, num_clusters=16, num_neighbors=3):
    """One flat clustering, put together from the functions under test."""
    centers = spherical_kmeans(rows, rows[:: len(rows) // num_clusters][:num_clusters], 3)
    return GeodesicGraph(
        centers, shortest_paths(neighbor_graph(centers, num_neighbors)), *nearest_centers(rows, centers)
    )


@pytest.mark.parametrize("seed", range(8))
def test_paths_are_those_of_scipy_and_networkx_in_pieces_too(seed):
    edges = random_edges(seed, 30, (0.03, 0.06, 0.2, 0.9)[seed % 4])
    paths = shortest_paths(torch.from_numpy(edges)).numpy()
    on_device = _row_by_row(torch.from_numpy(edges)).numpy()  # what runs elsewhere than on a CPU
    sparse = csr_array(np.where(np.isinf(edges), 0.0, edges))
    graph = networkx.from_numpy_array(np.where(np.isinf(edges), 0.0, edges))
    theirs = np.full_like(edges, np.inf)
    for start, lengths in networkx.all_pairs_dijkstra_path_length(graph):
        theirs[start, list(lengths)] = list(lengths.values())
    for other in (on_device, theirs, *(scipy_shortest_path(sparse, method=method) for method in ("D", "FW"))):
        np.testing.assert_allclose(paths, other, rtol=0, atol=1e-12)  # inf stands where inf stands
    labels = connected_components(sparse)[1]
    assert len(components(torch.from_numpy(paths)).unique()) == labels.max() + 1
    np.testing.assert_array_equal(np.isfinite(paths), labels[:, None] == labels)


def test_a_graph_of_few_centres_is_complete_and_its_paths_are_the_angles():
    centers = draw(0, 9, 5)
    expected = paired_angles(centers.repeat_interleave(9, dim=0), centers.repeat(9, 1)).view(9, 9)
    for num_neighbors in (8, 20):
        torch.testing.assert_close(neighbor_graph(centers, num_neighbors), expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(shortest_paths(expected), expected, rtol=0, atol=1e-14)
    assert neighbor_graph(centers[:1], 8).tolist() == [[0.0]]


def test_paths_are_a_metric_above_the_angle_and_shrink_with_more_neighbours():
    centers, last = draw(1, 40, 6), None
    for num_neighbors in (2, 3, 5, 8):
        edges = neighbor_graph(centers, num_neighbors)
        joined = torch.isfinite(edges).sum(dim=1) - 1
        assert int(joined.min()) >= num_neighbors
        paths = shortest_paths(edges)
        assert torch.equal(paths, paths.T)
        assert (paths.diagonal() == 0).all()
        assert (paths >= angles(centers, centers).fill_diagonal_(0) - 1e-12).all()
        assert (paths <= edges).all()
        torch.testing.assert_close(paths[torch.isfinite(edges)], edges[torch.isfinite(edges)])  # by the triangle
        through = (paths[:, :, None] + paths[None]).amin(dim=1)
        assert (paths <= through + 1e-12).all()
        assert last is None or (paths <= last + 1e-12).all()
        last = paths


@pytest.mark.parametrize("num_neighbors", [1, 3, 6])
def test_a_threshold_joins_the_closest_pairs_and_may_leave_pieces(num_neighbors):
    """By brute force over all pairs; the other graph gives the number of edges."""
    for centers in (draw(3, 30, 6), unit(draw(4, 5, 8).repeat_interleave(6, 0) + 0.2 * draw(5, 30, 8))):
        count = int(torch.isfinite(neighbor_graph(centers, num_neighbors)).sum() - 30) // 2
        pairs = sorted(
            itertools.combinations(range(30), 2), key=lambda pair: -float(centers[pair[0]] @ centers[pair[1]])
        )
        edges = threshold_graph(centers, num_neighbors)
        joined = {(i, j) for i, j in itertools.combinations(range(30), 2) if torch.isfinite(edges[i, j])}
        assert joined == set(pairs[:count])
        assert torch.equal(edges, edges.T)
        assert (edges.diagonal() == 0).all()
        radius = edges[torch.isfinite(edges)].max()
        assert ((angles(centers, centers) <= radius - 1e-9) <= torch.isfinite(edges)).all()
        assert torch.equal(edges, center_graph(centers, num_neighbors, "threshold"))
        pieces = networkx.Graph(list(joined))
        pieces.add_nodes_from(range(30))
        groups = components(shortest_paths(edges))
        assert len(groups.unique()) == networkx.number_connected_components(pieces)
    assert len(groups.unique()) > 1  # tight groups are joined within, and no path leads from one to another
    assert threshold_graph(centers[:1], num_neighbors).tolist() == [[0.0]]


@pytest.mark.parametrize("k", [1, 3, 8, 40])
def test_ties_go_to_the_lower_index(k):
    scores = torch.randint(0, 4, (60, 40), generator=torch.Generator().manual_seed(k)).double()
    scores[0], scores[1] = 0, torch.arange(40)
    expected = [sorted(range(40), key=lambda column: (-row[column], column))[:k] for row in scores.tolist()]
    assert first_k(scores, k).tolist() == expected


def test_neighbours_and_ways_among_equal_centres_are_the_first_ones():
    """Centres and queries on few places, so that nearly all angles tie; by brute force over (angle, index)."""
    places = torch.eye(5, dtype=torch.float64)
    centers, queries, count = places.repeat(8, 1), places.repeat(4, 1), 6
    cosines = (centers @ centers.T).fill_diagonal_(-2)
    nearest = [sorted(range(40), key=lambda other: (-row[other], other))[:count] for row in cosines.tolist()]
    _, tails, _ = neighbor_edges(centers, count)
    assert tails.view(40, count).tolist() == nearest
    graph = GeodesicGraph(centers, shortest_paths(neighbor_graph(centers, count)), *nearest_centers(centers, centers))
    assert graph.nearest_center.tolist() == [row % 5 for row in range(40)]
    _, attached, entrance = attach_queries(queries, graph, count)
    lengths = angles(queries, centers)
    for query, row in enumerate(lengths.tolist()):
        first = sorted(range(40), key=lambda center: (row[center], center))[:count]
        assert attached[query].tolist() == first
        ways = [[row[center] + graph.paths[center, end].item() for center in first] for end in range(40)]
        assert entrance[query].tolist() == [first[way.index(min(way))] for way in ways]


@pytest.mark.parametrize(("nodes", "neighbours"), [(256, 8), (63, 8), (40, 3), (17, 16)])
def test_theorem_1_and_the_bound_that_cannot_be_lowered(nodes, neighbours):
    """A component has more than `neighbours` nodes, which bounds their number; the paper's bound is looser."""
    tight, printed = nodes // (neighbours + 1), nodes * (1 + math.log(1 + neighbours)) / (1 + neighbours)
    for centers in (draw(3, nodes, 8), unit(draw(4, tight, 64).repeat_interleave(neighbours + 1, 0)
                                             + 0.01 * draw(5, tight * (neighbours + 1), 64))):  # fmt: skip
        edges = neighbor_graph(centers, neighbours)
        groups = components(shortest_paths(edges))
        sizes = groups.unique(return_counts=True)[1]
        count = int(torch.isfinite(edges).sum() - len(centers)) // 2
        assert len(sizes) <= tight <= printed
        assert sizes.min() > neighbours
        assert count >= len(centers) - len(sizes)
        assert neighbours * len(centers) <= 2 * count <= 2 * neighbours * len(centers)
    assert len(sizes) == tight  # the last ones lie in as many tight groups


@pytest.mark.parametrize(("a", "b", "sizes_between", "edges_between"), [(3, 1, False, True), (300, 8, True, False)])
def test_theorem_2_is_wrong_both_ways(a, b, sizes_between, edges_between):
    """All components have more than b and fewer than a nodes "if and only if" the number of edges lies between two
    bounds: a path refutes either direction, with its edges counted once or as ordered pairs."""
    nodes = 256
    edges = np.full((nodes, nodes), np.inf)
    edges[np.arange(nodes - 1), np.arange(1, nodes)] = edges[np.arange(1, nodes), np.arange(nodes - 1)] = 1.0
    np.fill_diagonal(edges, 0.0)
    sizes = components(shortest_paths(torch.from_numpy(edges))).unique(return_counts=True)[1]
    assert sizes.tolist() == [nodes]
    assert bool(((sizes > b) & (sizes < a)).all()) == sizes_between
    lower, upper = b * b * (nodes // b) - nodes, (a - 1) ** (1 / a) * nodes ** (2 - 1 / a) + (a - 1) * nodes
    for count in (nodes - 1, 2 * (nodes - 1)):
        assert (lower < count <= upper) == edges_between


def test_clusters_are_separated_and_a_lost_one_starts_at_the_farthest_point():
    means = draw(6, 5, 24)
    points = unit(means.repeat_interleave(20, 0) + 0.1 * draw(7, 100, 24))
    start = points[[0, 20, 40, 60, 60]]  # two in one place, and none in the fifth group
    centers = spherical_kmeans(points, start, 5)
    assert (angles(means, centers).min(dim=1).values < 0.1).all()
    nearest, offset = nearest_centers(points, centers)
    members = [points[nearest == cluster] for cluster in range(5)]
    assert [len(cluster) for cluster in members] == [20] * 5
    torch.testing.assert_close(centers, unit(torch.stack([cluster.mean(dim=0) for cluster in members])))
    torch.testing.assert_close(offset, paired_angles(points, centers[nearest.long()]))
    again = spherical_kmeans(points.repeat(200, 1), start, 5)  # in more than one chunk
    torch.testing.assert_close(again, centers)
    start = torch.cat([points[[0, 20, 60]], -unit(points.mean(dim=0)).repeat(2, 1)])  # which nobody is near to
    assert ((points @ start.T).argmax(dim=1) < 3).all()
    far = (points @ start.T).amax(dim=1).argsort()[:2]
    assert (angles(points[far], spherical_kmeans(points, start, 1)).amin(dim=1) < 1e-6).all()


@pytest.mark.parametrize(("groups", "num_clusters"), [(0, 1), (0, 40), (25, 40)])
@pytest.mark.parametrize("rounds", [1, 7])
def test_clusters_are_those_of_rounds_that_compare_every_point_with_every_centre(groups, num_clusters, rounds):
    points = draw(8, 900, 6)
    if groups:  # most points stay where they are, as others move on
        points = unit(points[:groups].repeat_interleave(900 // groups, 0) + 0.2 * points)
    start = points[:: 900 // num_clusters][:num_clusters]
    actual = spherical_kmeans(points.double(), start.double(), rounds)
    points, centers = points.double().numpy(), start.double().numpy()
    for _ in range(rounds):
        nearest = np.array([np.argmax([point @ center for center in centers]) for point in points])
        sums = np.stack([points[nearest == cluster].sum(axis=0) for cluster in range(num_clusters)])
        centers = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    np.testing.assert_allclose(actual, centers, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_are_cut_at_four_pi_before_the_cosine(dtype):
    distances = torch.tensor([0, 2, 4, 5, math.inf], dtype=dtype).mul_(math.pi).requires_grad_()
    similarity = angle_normalise(distances).cos()
    assert similarity.dtype == dtype
    torch.testing.assert_close(similarity, torch.tensor([1, 0, -1, -1, -1], dtype=dtype), rtol=0, atol=1e-6)
    similarity.sum().backward()
    expected = torch.tensor([0, -0.25, 0, 0, 0], dtype=dtype)
    torch.testing.assert_close(distances.grad, expected, rtol=0, atol=1e-7)


def by_hand(query, rows, graph, attach, count, local):
    """Eq. 3 and its readings for one query, column by column."""
    centers, paths = graph.cluster_centers, graph.paths
    to = [math.acos(float(query @ center)) for center in centers]
    order = sorted(range(len(to)), key=to.__getitem__)[: 1 if attach.startswith("nearest") else count]
    here = order[: 0 if "local" not in attach else 1 if local == "nearest" else count]
    lengths = []
    for row in rows:
        cosines = [float(row @ center) for center in centers]
        cluster = cosines.index(max(cosines))
        way = min(to[center] + float(paths[center, cluster]) for center in order) + math.acos(cosines[cluster])
        lengths.append(math.acos(float(query @ row)) if cluster in here else way)
    return lengths


@pytest.mark.parametrize("local", ["nearest", "attached"])
@pytest.mark.parametrize("attach", ["nearest", "knn", "nearest_local", "knn_local"])
def test_every_reading_column_by_column(attach, local):
    rows, queries = draw(8, 80, 5), draw(9, 6, 5)
    graph = graph_of(rows, 12, 2)
    actual = geodesic_distance(queries, rows, graph, attach, 3, local)
    for query, distances in zip(queries, actual):
        assert distances.tolist() == pytest.approx(by_hand(query, rows, graph, attach, 3, local), abs=1e-9)
    assert (actual >= angles(queries, rows) - 1e-9).all()


def test_one_attached_centre_is_eq_3_and_all_of_them_the_angle():
    rows, queries = draw(10, 120, 6), draw(11, 30, 6)
    graph = graph_of(rows)
    one = geodesic_distance(queries, rows, graph, "knn", 1)
    torch.testing.assert_close(one, geodesic_distance(queries, rows, graph, "nearest"), rtol=0, atol=0)
    everything = geodesic_distance(queries, rows, graph, "knn", 99)
    expected = angles(queries, graph.cluster_centers)[:, graph.nearest_center.long()] + graph.offset
    torch.testing.assert_close(everything, expected, rtol=1e-12, atol=0)
    no_graph = geodesic_distance(queries, rows, graph, "knn_local", 99, "attached")  # what tells graph and angle apart
    torch.testing.assert_close(no_graph, angles(queries, rows), rtol=0, atol=0)
    last = one
    for count in (2, 4, 8):
        now = geodesic_distance(queries, rows, graph, "knn", count)
        assert (now <= last).all()
        last = now


def test_eq_3_pulls_along_the_line_to_the_nearest_centre_whatever_the_positive():
    """And at most one column of each cluster can ever come first; the direct angle mends both."""
    rows = unit(draw(12, 25, 32).repeat(40, 1) + draw(13, 1_000, 32))
    graph, positives = graph_of(rows, 25, 8), torch.arange(100) * 10
    first = geodesic_distance(draw(14, 10_000, 32), rows, graph, "nearest").argmin(dim=1)
    assert len(first.unique()) <= 25
    queries = unit(rows[positives] + 0.6 * draw(15, 100, 32)).requires_grad_()

    def downhill(attach):
        similarity = geodesic_similarity(queries, rows, graph, attach)
        loss = torch.nn.functional.cross_entropy(similarity / 0.07, positives)
        gradient = -torch.autograd.grad(loss, queries)[0]
        return unit(gradient - (gradient * queries).sum(dim=1, keepdim=True) * queries)

    def along(direction, target):
        return (direction * unit(target - (target * queries).sum(dim=1, keepdim=True) * queries)).sum(dim=1)

    nearest = graph.cluster_centers[angles(queries, graph.cluster_centers).argmin(dim=1)]
    assert (along(downhill("nearest"), nearest).abs() > 0.999).all()
    assert along(downhill("knn_local"), nearest).abs().mean() < 0.3
    assert (along(downhill("knn_local"), rows[positives]) > 0).float().mean() > 0.8
    assert (along(downhill("nearest"), rows[positives]) > 0).float().mean() < 0.5


@pytest.mark.parametrize("attach", ATTACH)
def test_the_straight_through_readings_have_the_others_values_and_the_cosines_gradient(attach):
    rows, queries, weights = draw(15, 50, 8), draw(16, 7, 8), torch.randn(7, 50, dtype=torch.float64)
    graph, queries = graph_of(rows), queries.requires_grad_()
    actual = geodesic_similarity(queries, rows, graph, attach, 3)
    if attach == "angle_st":
        plain = angle_normalise(angles(queries, rows)).cos()
    else:
        plain = geodesic_similarity(queries, rows, graph, attach.removesuffix("_st"), 3)
    torch.testing.assert_close(actual, plain, rtol=1e-12, atol=1e-12)
    (actual * weights).sum().backward()
    assert torch.equal(queries.grad, weights @ rows) == attach.endswith("_st")


@pytest.mark.parametrize("attach", ["nearest", "knn", "knn_local"])
def test_gradients_are_finite_at_a_centre_at_a_row_and_without_a_path(attach):
    rows = unit(draw(17, 4, 9).repeat_interleave(10, 0) + 0.01 * draw(18, 40, 9))
    graph = graph_of(rows, 8, 1)
    assert torch.isinf(graph.paths).any()
    rows[0], graph.cluster_centers[0] = torch.eye(9)[2], torch.eye(9)[3]  # whose product with itself is 1, not about
    for queries in (graph.cluster_centers.float(), rows.float(), -rows.float()):
        queries = queries.clone().requires_grad_()
        single = GeodesicGraph(*(t if t.dtype == torch.int32 else t.float() for t in vars(graph).values()))
        similarity = geodesic_similarity(queries, rows.float(), single, attach, 2)
        similarity.logsumexp(dim=1).sum().backward()
        assert torch.isfinite(similarity).all()
        assert torch.isfinite(queries.grad).all()


def test_the_exact_geodesic_of_samples_is_dijkstras_on_their_dense_graph():
    rows, queries = draw(19, 40, 4)[[*range(39), 3]], draw(20, 5, 4)  # two rows in one place, joined by an edge of 0
    exact = sample_distance(queries, rows, 3)
    edges = neighbor_graph(rows, 3)
    paths = shortest_paths(edges)
    assert paths[3, 39] == 0
    first = (queries @ rows.T).topk(3, dim=1).indices
    steps = paired_angles(queries.repeat_interleave(3, 0), rows[first.flatten()]).view(5, 3)
    torch.testing.assert_close(exact, (steps[:, :, None] + paths[first]).amin(dim=1), rtol=0, atol=1e-12)
    assert (exact >= angles(queries, rows) - 1e-12).all()
