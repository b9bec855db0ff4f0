"""Pools: what a step is compared with, against loops; what writes, and what the backward pass reads."""

import copy

import pytest
import torch
from refusals import refused

from common.feature_queue import FeatureQueue
from common.geometry import Sphere, inner_product_similarity, unit
from common.oblique import Oblique
from common.pool import QueuePool, image_and_text_pools
from euclip.geometry import Hyperbolic

CAPACITY, DIM, BATCH = 7, 6, 3


def cosine(queries, keys):
    """The same numbers by another function: this one goes the way of every similarity."""
    return inner_product_similarity(queries, keys)


def keys_of(step, shape=(DIM,)):
    generator = torch.Generator().manual_seed(step)
    return unit(torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("matched_key_only", [False, True])
@pytest.mark.parametrize("similarity", [inner_product_similarity, cosine])
def test_columns_and_ids_after_any_number_of_steps_are_those_of_a_list(similarity, matched_key_only):
    pool = QueuePool(FeatureQueue(CAPACITY, DIM, "fill_level"), similarity, matched_key_only).double()
    ring = {}
    for step in range(6):  # the queue is empty, half full, full, and wraps with a remainder
        keys, ids = keys_of(step), torch.arange(BATCH) + 10 * step
        queries = keys_of(100 + step).requires_grad_()
        state = copy.deepcopy(pool.state_dict())
        candidates = pool.open(keys.clone().requires_grad_(), ids)
        actual, columns = candidates.similarity(queries), candidates.columns
        rows = [ring[slot] for slot in sorted(ring)]
        for i in range(BATCH):
            step_keys = [(keys[i], -1)] if matched_key_only else list(zip(keys, ids.tolist()))
            for column, (key, sample) in enumerate([*step_keys, *rows]):
                assert actual[i, column].item() == pytest.approx(float(queries[i].detach() @ key), abs=1e-14)
                assert int(candidates.ids[column]) == sample
            assert actual.shape[1] == len(step_keys) + len(rows)
            assert actual[i, columns[i]].item() == pytest.approx(float(queries[i].detach() @ keys[i]), abs=1e-14)
        weights = torch.randn(actual.shape, dtype=torch.float64)
        (actual * weights).sum().backward()
        matrix = [torch.stack([*(keys[i : i + 1] if matched_key_only else keys), *(key for key, _ in rows)])
                  for i in range(BATCH)]  # fmt: skip
        expected = torch.stack([row @ keys for row, keys in zip(weights, matrix)])
        torch.testing.assert_close(queries.grad, expected, rtol=1e-13, atol=1e-14)
        assert all(torch.equal(tensor, state[name]) for name, tensor in pool.state_dict().items())  # opening wrote not
        for key, sample, slot in zip(keys, ids.tolist(), pool.insert(keys, ids).tolist()):
            ring[slot] = (key, sample)
    assert len(ring) == CAPACITY
    assert pool.open(keys).ids is None


@pytest.mark.parametrize("matched_key_only", [False, True])
@pytest.mark.parametrize("similarity", [inner_product_similarity, cosine, Hyperbolic(DIM, squared=True).similarity])
def test_an_insertion_between_forward_and_backward_is_an_error(similarity, matched_key_only):
    pool = QueuePool(FeatureQueue(CAPACITY, DIM), similarity, matched_key_only)
    queries, keys = keys_of(0).float().requires_grad_(), keys_of(1).float()
    logits = pool.open(keys).similarity(queries)
    pool.insert(keys)
    refused(("modified by an inplace operation", lambda: logits.logsumexp(dim=1).sum().backward()), error=RuntimeError)


@pytest.mark.parametrize(
    "geometry", [Sphere(), Oblique(2), Hyperbolic(DIM, squared=True)], ids=lambda pool_geometry: pool_geometry.name
)
def test_each_pool_compares_the_queries_of_the_other_side_as_the_geometry_does(geometry):
    images, texts = geometry.embed_image(keys_of(0).float()), geometry.embed_text(keys_of(1).float())
    image_pool, text_pool = copy.deepcopy(image_and_text_pools(geometry, CAPACITY, DIM))
    old_images = image_pool.queue.rows().view(-1, *images.shape[1:])
    old_texts = text_pool.queue.rows().view(-1, *texts.shape[1:])
    torch.testing.assert_close(
        text_pool.open(texts).similarity(images), geometry.similarity(images, torch.cat([texts, old_texts]))
    )
    torch.testing.assert_close(
        image_pool.open(images).similarity(texts), geometry.similarity(torch.cat([images, old_images]), texts).T
    )
    norms = old_images.float().flatten(1).norm(dim=1)  # random rows lie where the embeddings of random features do
    again = geometry.embed_image(FeatureQueue(CAPACITY, DIM).features).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, again)
    assert not image_pool.state_dict().keys() - {f"queue.{name}" for name in image_pool.queue.state_dict()}


def test_embeddings_of_another_shape_are_refused():
    pool = QueuePool(FeatureQueue(CAPACITY, DIM), inner_product_similarity)
    refused((r"\(3, 4\) .* \(3, 6\) must agree", lambda: pool.open(keys_of(0).float()).similarity(torch.randn(3, 4))))
