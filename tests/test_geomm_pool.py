"""geomm/pool.py: the queue's columns against a list, the fast form against plain autograd, processes, refusals."""

import copy
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from processes import in_processes
from refusals import refused
from test_common_albef import as_tcl, tiny_albef, tiny_batch

from common.distributed import rank, world_size
from common.geometry import unit
from common.info_nce import distilled_targets, info_nce, positives_from_ids
from common.pool import pool_info_nce
from geomm.geodesic import ATTACH, CUT, geodesic_distance, geodesic_similarity, nearest_centers
from geomm.hierarchy import build_graph
from geomm.pool import GeodesicPool

CAPACITY, DIM, BATCH = 48, 8, 5


def draw(seed, *shape, dtype=torch.float64):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def full_pool(attach="knn_local", capacity=CAPACITY, dim=DIM, **settings):
    """A pool of float64 with a graph, whose pointer stands three slots before the end."""
    pool = GeodesicPool(
        capacity, dim, attach=attach, **{"branching": (4, 3), "num_neighbors": 2, "num_attached": 2, **settings}
    ).double()
    pool.insert(draw(0, capacity - 3, dim), torch.arange(capacity - 3))
    pool.insert(draw(1, capacity, dim), torch.arange(capacity) + capacity)
    assert int(pool.queue.pointer) == capacity - 3
    pool.rebuild(0)
    return pool


def after(pool, keys):
    """Rows and graph of a copy into which the keys are written, and their slots."""
    written = copy.deepcopy(pool)
    slots = written.insert(keys)
    return written.queue.features, written.graph(), slots


def test_columns_are_those_of_a_list_over_three_and_a_half_revolutions():
    """And what is attached as it enters is what a new search over all rows would find."""
    sizes = {"branching": (5,), "num_neighbors": 2, "num_attached": 2}
    pool = GeodesicPool(CAPACITY, DIM, **sizes, graph_update_interval=7).double()
    ring, written, rebuilt = [None] * CAPACITY, 0, []
    generator = torch.Generator().manual_seed(5)
    step = 0
    while written < 3.5 * CAPACITY:
        count = int(torch.randint(1, 12, (), generator=generator))  # divides nothing
        keys, ids = draw(100 + step, count, DIM), torch.arange(count) + 100 * step
        rebuilt += [step] if pool.rebuild(step) else []
        state = copy.deepcopy(pool.state_dict())
        queries = draw(1_000 + step, count, DIM).requires_grad_()
        candidates = pool.open(keys, ids)
        similarity = candidates.similarity(queries)
        similarity.sum().backward()
        assert all(torch.equal(tensor, state[name]) for name, tensor in pool.state_dict().items())  # opening wrote not
        slots = [(written + k) % CAPACITY for k in range(count)]
        for slot, key, sample in zip(slots, keys, ids.tolist()):
            ring[slot] = (key, sample)
        written += count
        assert candidates.columns.tolist() == slots
        filled = [item for item in ring if item is not None]
        rows = torch.stack([key for key, _ in filled])
        assert candidates.ids.tolist() == [sample for _, sample in filled]
        assert similarity.shape == (count, len(filled))
        assert pool.insert(keys, ids).tolist() == slots
        assert torch.equal(pool.queue.rows(), rows)
        if not pool.has_graph:  # the cosine of the same columns
            torch.testing.assert_close(similarity, queries @ rows.T, rtol=0, atol=1e-14)
        else:
            nearest, offset = nearest_centers(rows, pool.cluster_centers)
            assert torch.equal(pool.nearest_center, nearest)
            torch.testing.assert_close(pool.offset, offset, rtol=0, atol=1e-14)
            expected = geodesic_similarity(queries, rows, pool.graph(), num_attached=2)
            torch.testing.assert_close(similarity, expected, rtol=0, atol=1e-12)
        step += 1
    first = rebuilt[0]
    assert rebuilt == [first, *(step for step in range(first + 1, step) if step % 7 == 0)]
    assert len(rebuilt) > 2


# the last ones overwrite all rows: no cluster has a member that stays
@pytest.mark.parametrize(("local", "count"), [("nearest", BATCH), ("attached", BATCH), ("nearest", CAPACITY)])
@pytest.mark.parametrize("attach", ATTACH)
def test_values_and_gradients_are_those_of_plain_autograd(attach, local, count, monkeypatch):
    checked = partial(torch.sparse_csr_tensor, check_invariants=True)  # some devices want sorted columns in a row
    monkeypatch.setattr(torch, "sparse_csr_tensor", lambda *parts, check_invariants: checked(*parts))
    pool, keys = full_pool(attach, local=local, dim=5), draw(2, count, 5)
    rows, graph, slots = after(pool, keys)
    assert slots[:5].tolist() == [45, 46, 47, 0, 1]
    queries = unit(rows[torch.arange(0, CAPACITY, 4)] + 0.5 * draw(3, 12, 5))
    candidates, weights = pool.open(keys), torch.randn(12, CAPACITY, dtype=torch.float64)
    ours, plain = queries.clone().requires_grad_(), queries.clone().requires_grad_()
    actual = candidates.similarity(ours)
    expected = geodesic_similarity(plain, rows, graph, attach, 2, local)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for similarity in (actual, expected):
        (similarity * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-9, atol=1e-11)
    single = dataclasses.replace(
        candidates, **{name: getattr(candidates, name).float() for name in ("rows", "keys")},
        graph=type(graph)(*(t if t.dtype == torch.int32 else t.float() for t in vars(candidates.graph).values())),
    )  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        queries = queries.float().requires_grad_()
        similarity = single.similarity(queries)
        (similarity * weights.float()).sum().backward()
    assert similarity.dtype == torch.float32
    torch.testing.assert_close(similarity.double(), actual, rtol=0, atol=1e-5)
    torch.testing.assert_close(queries.grad.double(), ours.grad, rtol=1e-4, atol=1e-3)


def test_gradcheck():
    pool = full_pool("knn_local", dim=4)
    candidates, queries = pool.open(draw(4, BATCH, 4)), draw(5, BATCH, 4).requires_grad_()
    assert torch.autograd.gradcheck(candidates.similarity, (queries,))


@pytest.mark.parametrize("tile", [2, BATCH])
@pytest.mark.parametrize("kind", ["columns", "ids", "distilled", "distilled ids"])
@pytest.mark.parametrize("attach", ["knn_local", "knn_local_st", "cosine"])
def test_the_loss_in_tiles_is_info_nce_of_all_logits(attach, kind, tile, monkeypatch):
    pool = full_pool(distance="cosine") if attach == "cosine" else full_pool(attach)
    keys, alpha = draw(6, BATCH, DIM), 0.4 if "distilled" in kind else 0.0
    monkeypatch.setattr("common.pool.LOGITS_AT_ONCE", 2 * CAPACITY)
    ids = torch.tensor([60, 3, 3, 50, 90])  # 60 and 90 are in the queue; of 50 the row is overwritten now
    candidates = pool.open(keys, ids)
    targets = candidates.columns
    if "ids" in kind:
        targets = positives_from_ids(ids, candidates.ids, candidates.columns, torch.float64)
        assert (targets > 0).sum(dim=1).tolist() == [2, 2, 2, 1, 2]
    losses, gradients = [], []
    for fused in (True, False):
        queries = unit(keys + 0.5 * draw(7, BATCH, DIM)).requires_grad_()
        scale = torch.tensor(14.0, dtype=torch.float64, requires_grad=True)
        if fused:
            monkeypatch.setattr(type(candidates), "tile", tile)
            loss, of_batch = pool_info_nce(candidates, queries, scale, targets, keys, alpha)
        else:
            logits = scale * candidates.similarity(queries)
            pseudo = (scale * candidates.similarity(keys)).detach()
            loss = info_nce(logits, distilled_targets(pseudo, targets, alpha) if alpha else targets)
            torch.testing.assert_close(of_batch, logits[:, candidates.columns], rtol=0, atol=1e-12)
            assert not of_batch.requires_grad
        (3 * loss).backward()
        losses.append(loss.detach())
        gradients.append((queries.grad, scale.grad))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(pool_info_nce(candidates, queries, scale, targets, keys, alpha)[0], losses[0])


@pytest.mark.parametrize("attach", ["knn_local", "knn_local_st", "cosine"])
def test_no_more_than_the_logits_of_a_batch_are_held_at_once(attach):
    batch, capacity = 64, 65_536
    distance, attach = ("cosine", "nearest") if attach == "cosine" else ("geodesic", attach)
    pool = GeodesicPool(capacity, 8, distance, (256,), attach=attach, kmeans_iterations=1)
    pool.insert(draw(0, capacity, 8, dtype=torch.float32))
    pool.rebuild(0)
    queries = draw(1, batch, 8, dtype=torch.float32).requires_grad_()
    candidates, scale = pool.open(queries.detach()), torch.tensor(14.0)

    def step():
        pool_info_nce(candidates, queries, scale, candidates.columns)[0].backward()

    step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    most = 1.75 if candidates.is_linear else 1.0  # all logits with what one part takes, or a tile with it
    assert 0.05 < held.max() / (4 * batch * capacity) < most


@pytest.mark.parametrize("distance", ["geodesic", "cosine"])
def test_albef_and_tcl_take_the_pool_with_no_word_about_it(distance):
    model, (images, token_ids), ids = tiny_albef(), tiny_batch(), torch.tensor([7, 8, 7, 50])
    pools = [full_pool(dim=6, distance=distance) for _ in range(2)]
    pools[1].insert(draw(70, 5, 6))  # images and texts are not the same
    model.image_pool, model.text_pool = pools
    step = model.encode_step(images, images, token_ids, ids)
    *of_batch, loss = model.cross_modal_contrast(step, 0.4)
    terms = []
    for embeddings, keys, others, pool, actual in (
        (step.image_embeddings, step.image_keys, step.text_keys, pools[1], of_batch[0]),
        (step.text_embeddings, step.text_keys, step.image_keys, pools[0], of_batch[1]),
    ):
        rows, graph, slots = after(pool, others)
        ring = pool.queue.ids.index_copy(0, slots, ids)

        def logits(queries, rows=rows, graph=graph):
            if graph is None:
                return model.logit_scale() * queries @ rows.T
            return model.logit_scale() * geodesic_similarity(queries, rows, graph, num_attached=2)

        hard = positives_from_ids(ids, ring, slots, torch.float64)
        terms.append(info_nce(logits(embeddings), distilled_targets(logits(keys), hard, 0.4)))
        torch.testing.assert_close(actual, logits(embeddings)[:, slots].detach(), rtol=1e-9, atol=1e-9)
    assert loss.item() == pytest.approx(sum(terms).item() / 2, rel=1e-9)
    assert torch.isfinite(as_tcl(model)(images, token_ids, None, None, 0.4, ids).parts["contrast"])


def test_geodesic_from_step_and_the_interval_decide_when_a_graph_is_built():
    pool = GeodesicPool(CAPACITY, DIM, branching=(6,), geodesic_from_step=9, graph_update_interval=4)
    built = []
    for step in range(20):
        built += [step] if pool.rebuild(step) else []
        pool.insert(draw(step, 7, DIM, dtype=torch.float32))  # full after the seventh
    assert built == [9, 12, 16]


def test_a_rebuild_starts_from_the_last_centres():
    pool = full_pool()
    centers = pool.cluster_centers.clone()
    expected = build_graph(pool.queue.features, (4, 3), 2, 5, centers)
    assert pool.rebuild(100)
    for name, tensor in vars(expected).items():
        assert torch.equal(getattr(pool, name), tensor), name
    fresh = build_graph(pool.queue.features, (4, 3), 2, 5)
    assert not torch.equal(fresh.cluster_centers, expected.cluster_centers)


@pytest.mark.parametrize("attach", [*ATTACH, "cosine"])
def test_an_insertion_keys_or_a_graph_that_change_before_the_backward_pass_are_an_error(attach):
    settings = {"distance": "cosine"} if attach == "cosine" else {"attach": attach}
    pool = full_pool(**settings, graph_update_interval=1)
    for change in ("insertion", "keys", "graph"):
        if change == "graph" and (attach == "cosine" or attach.endswith("_st")):
            continue  # the gradient of the cosine reads no centre
        keys = draw(12, BATCH, DIM)
        similarity = pool.open(keys).similarity(draw(13, BATCH, DIM).requires_grad_())
        changes = {"insertion": partial(pool.insert, keys), "keys": keys.zero_, "graph": partial(pool.rebuild, 1)}
        changes[change]()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            similarity.sum().backward()


def test_gradients_of_half_precision_queries_are_scaled_before_they_are_rounded():
    pool, keys = GeodesicPool(64, 128, "cosine"), unit(draw(12, BATCH, 128)).float()
    pool.insert(unit(draw(13, 64, 128)).float())
    candidates = pool.open(keys)

    def gradient_of(queries, loss_scale):
        loss, _ = pool_info_nce(candidates, queries, 25.0, candidates.columns)
        return torch.autograd.grad(loss_scale * loss, queries)[0].float() / loss_scale

    queries = keys.half().requires_grad_()
    expected = gradient_of(queries.detach().float().requires_grad_(), 1.0)
    assert 0 < expected.abs().median() < 6e-8  # where half precision ends
    torch.testing.assert_close(gradient_of(queries, 2.0**20), expected, rtol=1e-2, atol=1e-11)


def test_a_second_derivative_of_the_loss_in_tiles_is_refused_not_wrong():
    pool, queries = full_pool(), draw(13, BATCH, DIM).requires_grad_()
    candidates = pool.open(draw(12, BATCH, DIM))
    loss, _ = pool_info_nce(candidates, queries, torch.tensor(10.0), candidates.columns)
    refused(
        ("pool_info_nce has first derivatives only", lambda: torch.autograd.grad(loss, queries, create_graph=True)),
        error=RuntimeError,
    )


def test_statistics_are_those_of_the_distances():
    pool, keys = full_pool(branching=(12,)), draw(16, BATCH, DIM)
    queries = unit(keys + 0.9 * draw(17, BATCH, DIM))
    rows, graph, slots = after(pool, keys)
    distances = geodesic_distance(queries, rows, graph, num_attached=2)
    positives, nearest = distances.gather(1, slots[:, None]), (queries @ graph.cluster_centers.T).argmax(dim=1)
    statistics = pool.open(keys).statistics(queries, 14.0)
    expected = {
        "positive_rank": (distances < positives).sum(dim=1).add(1).double().mean(),
        "truncated": ((distances > CUT) & distances.isfinite()).double().mean(),
        "positive_local": (graph.nearest_center[slots] == nearest).double().mean(),
        "distinct_centers": len(nearest.unique()),
        "mean_offset": graph.offset.mean(),
        "mean_distance": distances[distances.isfinite()].mean(),
    }
    assert 0 < expected["positive_local"] < 1
    for name, value in expected.items():
        assert statistics[name] == pytest.approx(float(value), rel=1e-6), name
    assert full_pool(distance="cosine").open(keys).statistics(queries, 14.0)["positive_rank"] >= 1
    assert full_pool("angle_st").open(keys).statistics(queries, 14.0)["positive_local"] == 1


def steps_of_a_process():
    """What a process sees of three steps with its share of rows; rank 1 must not decide about the graph."""
    pool = GeodesicPool(CAPACITY, DIM, branching=(3, 2), num_neighbors=2, graph_update_interval=2).double()
    pool.insert(draw(20, CAPACITY, DIM)[share_of_process(CAPACITY)])
    steps = []
    for step in range(3):
        if rank():
            pool.queue.features[0] += 1e-3  # as if its rows were summed in another order
        pool.rebuild(step)
        if rank():
            pool.queue.features[0] -= 1e-3
        mine = share_of_process(8)
        keys, queries = draw(30 + step, 8, DIM)[mine], draw(40 + step, 8, DIM)[mine].requires_grad_()
        ids, scale = (torch.arange(8) + 100 * step)[mine], torch.tensor(14.0, dtype=torch.float64)
        candidates = pool.open(keys, ids)
        loss, _ = pool_info_nce(candidates, queries, scale, candidates.columns)
        loss.backward()
        slots = pool.insert(keys, ids)
        state = copy.deepcopy(pool.state_dict()).values()
        steps.append((loss.detach(), queries.grad, candidates.columns, candidates.ids, slots, *state))
    pool.queue.features[3] = math.nan
    with pytest.raises(ValueError, match="the first of them key 3"):  # and nobody waits for a graph
        pool.rebuild(4)
    return steps


def share_of_process(count):
    return slice(rank() * count // world_size(), (rank() + 1) * count // world_size())


def test_two_processes_equal_one():
    """Half of the batch each: one pool, one graph, and each its rows of the loss."""
    for one, first, second in zip(steps_of_a_process(), *in_processes(2, steps_of_a_process)):
        assert (first[0] + second[0]).item() / 2 == pytest.approx(one[0].item(), rel=1e-12)
        torch.testing.assert_close(torch.cat([first[1], second[1]]) / 2, one[1], rtol=1e-9, atol=1e-13)
        assert torch.equal(torch.cat([first[2], second[2]]), one[2])
        for place in (first, second):
            torch.testing.assert_close(place[3:], one[3:], rtol=0, atol=1e-12)


def test_more_clusters_than_one_byte_can_name():
    pool = GeodesicPool(500, 6, branching=(24, 16), num_neighbors=4)
    pool.insert(draw(50, 500, 6, dtype=torch.float32))
    pool.rebuild(0)
    keys = draw(51, 20, 6, dtype=torch.float32)
    candidates = pool.open(keys)
    assert pool.nearest_center.max() > 255
    pool.insert(keys)
    assert torch.equal(pool.nearest_center, candidates.graph.nearest_center)
    assert torch.equal(pool.nearest_center, nearest_centers(pool.queue.features, pool.cluster_centers)[0])


def test_a_cast_to_half_precision_does_not_round_the_graph():
    pool = full_pool().float()
    before = copy.deepcopy(pool.state_dict())
    for name, tensor in pool.half().state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype == before[name].dtype


def test_settings_a_step_larger_than_the_queue_and_keys_that_are_not_finite_are_refused():
    pool = full_pool()
    pool.queue.features[4], pool.queue.features[17] = math.nan, math.inf
    sizes = partial(GeodesicPool, CAPACITY, DIM)
    refused(
        (r"branching \[7, 7\] asks for 49 clusters of 48 slots of the queue; .* 48", lambda: sizes(branching=(7, 7))),
        (r"distance 'euclidean' is unknown; expected: geodesic, cosine", lambda: sizes("euclidean")),
        (r"attach 'all' is unknown; expected: nearest, knn, ", lambda: sizes(attach="all")),
        (r"graph 'mutual' is unknown; expected: neighbors, threshold", lambda: sizes(graph="mutual")),
        (r"num_neighbors 0; expected: at least 1", lambda: sizes(num_neighbors=0)),
        (
            "a step brings 49 keys to a feature queue of 48: .* a queue of at least 49",
            lambda: pool.open(draw(60, 49, DIM)),
        ),
        ("2 of the 48 keys in the pool hold NaN .* the first of them key 4: no graph", lambda: pool.rebuild(100)),
        (r"are unit vectors; expected: common\.vectors\.unit", lambda: sizes("cosine").open(3 * draw(60, 4, DIM))),
    )
    assert len(sizes("cosine", branching=(7, 7)).open(draw(60, 4, DIM)).keys) == 4  # a cosine has no centres
