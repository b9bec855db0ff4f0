"""geomm/softness.py: the factor that makes two distances equally soft, in pools, losses and two processes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import in_processes
from scipy.optimize import brentq
from scipy.special import softmax
from scipy.stats import entropy
from test_geomm_pool import BATCH, CAPACITY, DIM, after, draw, full_pool

from common.distributed import rank
from common.geometry import unit
from common.pool import pool_info_nce
from geomm.geodesic import ATTACH, components, geodesic_similarity
from geomm.pool import GeodesicPool
from geomm.softness import graph_and_cosine, match_, matching_factor, mean_entropy

SCALE = 14.0


def by_scipy(similarity, scale):
    return float(np.mean(entropy(softmax(scale * similarity.double().numpy(), axis=1), axis=1)))


def test_the_entropy_is_scipys_and_falls_with_the_scale_from_ln_n_to_0():
    similarity = draw(0, 7, 30)
    values = [mean_entropy(similarity, scale) for scale in (1e-9, 1.0, 5.0, 14.0, 100.0, 1e6)]
    assert values == pytest.approx([by_scipy(similarity, scale) for scale in (1e-9, 1, 5, 14, 100, 1e6)], abs=1e-9)
    assert (values[0], values[-1]) == pytest.approx((math.log(30), 0), abs=1e-9)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("factor", [0.01, 1.0, 300.0])
def test_a_factor_is_recovered_and_agrees_with_a_root_of_scipys(factor):
    similarity = draw(1, 9, 40)
    assert matching_factor(similarity / factor, mean_entropy(similarity, 3.0), 3.0) == pytest.approx(factor, rel=1e-6)
    other = draw(2, 9, 40)
    root = brentq(lambda number: by_scipy(other, SCALE * number) - by_scipy(similarity, SCALE / 2), 1e-3, 1e3)
    assert matching_factor(other, mean_entropy(similarity, SCALE / 2), SCALE) == pytest.approx(root, rel=1e-6)


def test_an_entropy_that_no_factor_gives_is_refused():
    alike = torch.ones(3, 8).double()  # always ln 8
    with pytest.raises(ValueError, match=r"mean entropy of 1 nats; possible: 2.079 to 2.079. Expected: method.match"):
        matching_factor(alike, 1.0, SCALE)


@pytest.mark.parametrize("attach", [*ATTACH, "cosine"])
def test_a_factor_multiplies_the_values_and_only_a_straight_through_gradient_keeps_its_size(attach):
    pool = full_pool(distance="cosine") if attach == "cosine" else full_pool(attach)
    keys, factor, weights = draw(3, BATCH, DIM), 2.5, torch.randn(6, CAPACITY, dtype=torch.float64)
    queries = unit(pool.queue.features[:6] + 0.5 * draw(4, 6, DIM)).requires_grad_()
    before = pool.open(keys).similarity(queries)
    (before_gradient,) = torch.autograd.grad((before * weights).sum(), queries)
    pool.set_factor_(factor)
    similarity = pool.open(keys).similarity(queries)
    torch.testing.assert_close(similarity, factor * before, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad((similarity * weights).sum(), queries)
    size = 1.0 if attach.endswith("_st") else factor
    torch.testing.assert_close(gradient, size * before_gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("attach", ["nearest_st", "knn"])
def test_lost_positives_leave_the_scale_alone_and_the_queries_as_they_were(attach):
    """By brute force: the gradient of the scale is that of the other rows; the log has the loss with and without."""
    groups = draw(5, 4, 16)
    rows = unit(groups.repeat_interleave(16, 0) + 0.02 * draw(6, 64, 16))
    pool = GeodesicPool(64, 16, branching=(8,), num_neighbors=1, num_attached=1, attach=attach).double()
    pool.insert(rows)
    assert pool.rebuild(0)
    pool.set_factor_(1.7)
    keys = rows[[0, 1, 17, 18, 20]]
    queries = rows[[0, 2, 60, 19, 61]].clone().requires_grad_()  # two of another group
    candidates, scale = pool.open(keys), torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
    written, graph, slots = after(pool, keys)
    plain = geodesic_similarity(queries, written, graph, attach, 1)
    is_lost = plain.gather(1, slots[:, None])[:, 0] == -1
    assert is_lost.tolist() == [False, False, True, False, True]
    loss, _ = pool_info_nce(candidates, queries, scale, candidates.columns)
    loss.backward()
    logits = scale * 1.7 * plain.detach()
    losses = logits.logsumexp(dim=1) - logits.gather(1, slots[:, None])[:, 0]
    assert loss.item() == pytest.approx(losses.mean().item())
    (expected,) = torch.autograd.grad(losses[~is_lost].sum() / 5, scale)
    assert scale.grad.item() == pytest.approx(expected.item(), rel=1e-9)
    whole = torch.autograd.grad((scale * candidates.similarity(queries)).logsumexp(dim=1).mean(), queries)[0]
    positives = torch.autograd.grad((scale * candidates.similarity(queries)).gather(1, slots[:, None]).mean(), queries)
    torch.testing.assert_close(queries.grad, whole - positives[0], rtol=1e-9, atol=1e-9)
    statistics = candidates.statistics(queries.detach(), SCALE)
    expected = {
        "info_nce": losses.mean().item(),
        "info_nce_reachable": losses[~is_lost].mean().item(),
        "entropy": by_scipy(1.7 * plain.detach(), SCALE),
        "scale_factor": 1.7,
        "positive_unreachable": 2 / 5,
        "unreachable": float((plain < -1 + 1e-9).double().mean()),
        "components": len(components(graph.paths).unique()),
    }
    assert {name: statistics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def model_of(distance, attach="knn_local_st"):
    """What `match_` reads of a model: its scale and its pools, which are full."""
    sizes = {"branching": (12, 2), "num_neighbors": 2, "num_attached": 2, "attach": attach, "distance": distance}
    pools = [GeodesicPool(CAPACITY, DIM, **sizes).double() for _ in "it"]
    for seed, pool in enumerate(pools):
        pool.insert(draw(10 + seed, CAPACITY, DIM))
        pool.rebuild(0)
    return SimpleNamespace(logit_scale=lambda: torch.tensor(SCALE), image_pool=pools[0], text_pool=pools[1])


def losses_of(rows):
    """The embeddings and keys of some samples."""
    names = ("image_embeddings", "text_embeddings", "image_keys", "text_keys")
    return SimpleNamespace(**{name: draw(20 + seed, 8, DIM)[rows] for seed, name in enumerate(names)})


@pytest.mark.parametrize("attach", ["knn_local_st", "nearest", "angle_st"])
def test_the_geodesic_becomes_as_sharp_as_the_cosine_and_the_cosine_as_soft_as_the_geodesic(attach):
    losses = losses_of(slice(None))
    for distance in ("geodesic", "cosine"):
        model = model_of(distance, attach)
        assert model.text_pool.factor_is_due(0)
        sides = {"i2t": (losses.image_embeddings, losses.text_keys, model.text_pool),
                 "t2i": (losses.text_embeddings, losses.image_keys, model.image_pool)}  # fmt: skip
        pairs = {side: graph_and_cosine(pool, queries, keys, 0) for side, (queries, keys, pool) in sides.items()}
        assert bool(model.text_pool.has_graph) == (distance == "geodesic")  # the cosine's was a copy's
        facts = match_(model, losses, 0)
        factors = []
        for side, (by_graph, cosines) in pairs.items():
            similarity, other = (by_graph, cosines) if distance == "geodesic" else (cosines, by_graph)
            assert facts[f"{side}_entropy_to_match"] == pytest.approx(by_scipy(other, SCALE), rel=1e-9)
            factors.append(facts[f"{side}_factor"])
            assert by_scipy(similarity, SCALE * factors[-1]) == pytest.approx(by_scipy(other, SCALE), rel=1e-6)
        assert facts["scale_factor"] == pytest.approx(math.exp(sum(map(math.log, factors)) / 2), rel=1e-6)
        assert model.image_pool.factor == model.text_pool.factor == facts["scale_factor"]
        assert not model.text_pool.factor_is_due(0)
        assert (facts["scale_factor"] > 1) == (distance == "geodesic")  # cos(D / 4) is softer
        assert max(factors) > 1.004 * min(factors)  # the means of both directions differ


def match_in_a_process():
    model = model_of("geodesic")
    facts = match_(model, losses_of(slice(4 * rank(), 4 * rank() + 4)), 0)
    return facts, model.image_pool.factor, model.text_pool.factor


def test_two_processes_have_the_factor_of_one():
    expected = match_(model_of("geodesic"), losses_of(slice(None)), 0)
    (first, *of_first), (second, *of_second) = in_processes(2, match_in_a_process)
    assert first == pytest.approx(expected, rel=1e-6)
    assert set(of_first + of_second) == {first["scale_factor"]} == {second["scale_factor"]}
