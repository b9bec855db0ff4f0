"""Pools: keys of past steps, as candidates that the queries of a step are compared with (MoCo, ALBEF; GeoMM, Alg. 2).

    pool.rebuild(step)                                               # a graph of the keys, where the pool has one
    candidates = pool.open(keys, ids)                                # writes nothing
    loss, _ = pool_info_nce(candidates, queries, logit_scale, candidates.columns)
    loss.backward(); optimizer.step()
    pool.insert(keys, ids)                                           # once, after the step, on every process

The pool decides where this step's keys stand among the columns: a queue puts them in front of its rows, GeoMM's graph
where they will be written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from common.cross_entropy import distilled_targets, info_nce
from common.distributed import gather_without_gradient, rank, world_size
from common.feature_queue import NO_ID, FeatureQueue
from common.vectors import PairSimilarity, at_least_float32, check_same_dim, full_precision, inner_product_similarity

if TYPE_CHECKING:
    from common.geometry import Geometry

LOGITS_AT_ONCE = 2**19  # they stay in the processor's cache from the exponential to the gradient


class Candidates(Protocol):
    """What the queries of one step are compared with; constants.

    columns: (batch,) int64, the column of each query's positive, the key of the same sample.
    ids: (num_columns,) int64 sample ids, NO_ID = unknown; None if the keys have none.
    tile: queries that `pool_info_nce` compares at once. It forms their gradient at once too, so no logits wait for the
        backward pass; only the queries get a gradient. None = all, by plain autograd, where others may get one.
    is_linear: whether the gradient of a similarity does not depend on its value, so that it may overwrite it.
    floor: similarity of a key that no path reaches, read where `tile` is a number; None = all are reached. No logit
        scale brings such a positive nearer, so its row gives the scale no gradient.
    """

    columns: torch.Tensor
    ids: torch.Tensor | None
    tile: int | None
    is_linear: bool
    floor: float | None

    def similarity(self, queries: torch.Tensor) -> torch.Tensor:
        """(batch, ...) embeddings -> (batch, num_columns), larger is closer."""


class Pool(Protocol):
    """Keys of past steps, the same on every process; an nn.Module, so that it is saved with its model."""

    def rebuild(self, step: int) -> bool:
        """Rebuilds what the pool derives from its keys if due; returns whether. Before `open`, on every process."""

    def open(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> Candidates:
        """The candidates of a step with keys (batch, ...) and (batch,) int64 ids; writes nothing."""

    def insert(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Writes the keys of all processes, after the backward pass; returns their (world_size * batch,) slots."""


@dataclass(frozen=True)
class QueueCandidates:
    """Keys of a step, then rows of a queue; compared separately, so that no step copies the queue.

    compare: (queries, keys) -> similarity.
    keys: (num_keys, ...) of the step, without gradient.
    rows: (num_rows, ...), see `FeatureQueue.rows`.
    ids: as in Candidates.
    matched_key_only: key k is a candidate of query k only, in column 0; otherwise all keys are candidates of all
        queries, and those of this process begin at column rank * batch.
    """

    compare: PairSimilarity
    keys: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor | None = None
    matched_key_only: bool = False
    tile: int | None = None  # the similarity is a geometry's, whose scalars train
    is_linear: bool = False
    floor: float | None = None

    @property
    def columns(self) -> torch.Tensor:
        device = self.keys.device
        if self.matched_key_only:
            return torch.zeros(len(self.keys), dtype=torch.int64, device=device)
        batch = len(self.keys) // world_size()
        return torch.arange(batch, device=device) + rank() * batch

    def similarity(self, queries: torch.Tensor) -> torch.Tensor:
        if self.compare is inner_product_similarity:
            check_same_dim(queries, self.keys)
            queries, keys = at_least_float32(queries).flatten(1), at_least_float32(self.keys).flatten(1)
            return _InnerProducts.apply(queries, keys, self.rows.flatten(1), self.matched_key_only)
        of_keys = self.compare(queries, self.keys)
        if self.matched_key_only:  # a general similarity compares all pairs; they are few beside the rows
            of_keys = of_keys.diagonal()[:, None]
        return torch.cat([of_keys, self.compare(queries, self.rows)], dim=1)


class _InnerProducts(torch.autograd.Function):
    # written side by side into one matrix: to concatenate two would copy them, for an eighth of a product's time

    @staticmethod
    def forward(ctx, queries, keys, rows, matched_key_only):
        ctx.save_for_backward(keys, rows)  # a view of the queue: checked for writes before the backward pass
        ctx.matched_key_only = matched_key_only
        with full_precision(queries):
            of_keys = queries @ keys.T
            if matched_key_only:
                of_keys = of_keys.diagonal()[:, None]
            products = queries.new_empty(len(queries), of_keys.shape[1] + len(rows))
            products[:, : of_keys.shape[1]] = of_keys
            torch.mm(queries, rows.T, out=products[:, of_keys.shape[1] :])
        return products

    @staticmethod
    def backward(ctx, gradient):
        keys, rows = ctx.saved_tensors
        of_keys, of_rows = gradient.split([gradient.shape[1] - len(rows), len(rows)], dim=1)
        return torch.addmm(of_keys * keys if ctx.matched_key_only else of_keys @ keys, of_rows, rows), None, None, None


def pool_info_nce(
    candidates: Candidates,
    queries: torch.Tensor,
    logit_scale: torch.Tensor,
    targets: torch.Tensor,
    keys: torch.Tensor | None = None,
    alpha: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """InfoNCE of queries against a pool's candidates, in tiles of queries if the candidates ask for it.

    Args:
        queries: (batch, ...) embeddings.
        targets: as in `info_nce`.
        keys: (batch, ...) what the momentum model makes of the same samples; needed where alpha > 0.
        alpha: share of the target mass that follows softmax(logit_scale * similarity) of the keys (ALBEF, Eq. 6).
    Returns:
        loss: scalar in nats; its gradients reach queries and logit scale.
        logits: (batch, batch) without gradient: of each query at the `columns` of all.
    """

    columns, logit_scale = candidates.columns, torch.as_tensor(logit_scale, device=queries.device)
    if candidates.tile is None or not torch.is_grad_enabled():
        similarity, pseudo = candidates.similarity(queries), _momentum_similarity(candidates, keys, alpha)
        loss = _distilled_info_nce(similarity, pseudo, targets, logit_scale, alpha)
        return loss, (logit_scale * similarity[:, columns]).detach()
    scale = logit_scale.detach().requires_grad_()
    # float32 at least: a loss scale multiplies the gradient later
    given = at_least_float32(queries.detach())
    total, scale_gradient, query_gradient, logits = 0.0, 0.0, torch.empty_like(given), []
    for rows in _slices(len(queries), candidates.tile):
        tile = given[rows].detach().requires_grad_()
        similarity = candidates.similarity(tile)
        pseudo, hard = _momentum_similarity(candidates, None if keys is None else keys[rows], alpha), targets[rows]
        values = similarity.detach()
        logits.append((scale * values[:, columns]).detach())
        # where it may, the gradient takes the place of the similarities, part by part
        gradient = values if candidates.is_linear else torch.empty_like(values)
        for part in _slices(len(values), max(1, LOGITS_AT_ONCE // values.shape[1])):
            leaf = values[part].requires_grad_()
            of_rows = _scale_of_rows(scale, leaf, columns[rows][part], candidates.floor)
            loss = _distilled_info_nce(leaf, None if pseudo is None else pseudo[part], hard[part], of_rows, alpha)
            loss = loss * (len(leaf) / len(queries))
            gradient[part], part_of_scale = torch.autograd.grad(loss, (leaf, scale))
            total, scale_gradient = total + loss.detach(), scale_gradient + part_of_scale
        (query_gradient[rows],) = torch.autograd.grad(similarity, tile, gradient)
    return _KnownGradients.apply(total, queries, logit_scale, query_gradient, scale_gradient), torch.cat(logits)


def _scale_of_rows(
    scale: torch.Tensor, similarity: torch.Tensor, columns: torch.Tensor, floor: float | None
) -> torch.Tensor:
    # with a floor (batch, 1), without gradient in rows whose positive is there
    if floor is None:
        return scale
    at_floor = similarity.detach().gather(1, columns[:, None]) <= floor
    return torch.where(at_floor, scale.detach(), scale)


@torch.no_grad()
def _momentum_similarity(candidates: Candidates, keys: torch.Tensor | None, alpha: float) -> torch.Tensor | None:
    return candidates.similarity(keys) if alpha > 0 else None


def _distilled_info_nce(
    similarity: torch.Tensor,
    pseudo: torch.Tensor | None,
    targets: torch.Tensor,
    logit_scale: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    if pseudo is not None:
        targets = distilled_targets(logit_scale * pseudo, targets, alpha)
    return info_nce(logit_scale * similarity, targets)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _KnownGradients(torch.autograd.Function):
    # of a loss with respect to queries and logit scale

    @staticmethod
    def forward(ctx, loss, queries, logit_scale, of_queries, of_scale):
        ctx.save_for_backward(of_queries, of_scale)
        ctx.dtype = queries.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph: a second derivative would be missing
            raise RuntimeError("pool_info_nce has first derivatives only; use info_nce of candidates.similarity")
        of_queries, of_scale = ctx.saved_tensors
        return None, (gradient * of_queries).to(ctx.dtype), gradient * of_scale, None, None


class QueuePool(nn.Module):
    """A feature queue as a pool.

    Args:
        queue: of keys that are flattened.
        similarity: (queries, keys) -> (num_queries, num_keys). inner_product_similarity itself needs no copy.
        matched_key_only: the keys of other queries of the step are no candidates (MoCo); otherwise those of all
            processes are. ALBEF's code takes those of one process, so that its loss depends on their number.
    """

    def __init__(self, queue: FeatureQueue, similarity: PairSimilarity, matched_key_only: bool = False) -> None:
        super().__init__()
        self.queue, self.similarity, self.matched_key_only = queue, similarity, matched_key_only

    def rebuild(self, step: int) -> bool:
        return False

    def open(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> QueueCandidates:
        """This step's keys and the queue's rows, which the backward pass reads in place: `insert` comes after it.

        Args:
            keys: (batch, ...) embeddings of the geometry, for the cosine unit vectors; not checked.
        """
        rows, row_ids = self.queue.rows().view(-1, *keys.shape[1:]), self.queue.row_ids()
        if self.matched_key_only:  # column 0 belongs to another sample in each row
            ids = None if ids is None else torch.cat([row_ids.new_full((1,), NO_ID), row_ids])
            return QueueCandidates(self.similarity, keys.detach(), rows, ids, matched_key_only=True)
        ids = None if ids is None else torch.cat([gather_without_gradient(ids), row_ids])
        return QueueCandidates(self.similarity, gather_without_gradient(keys), rows, ids)

    def insert(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """As in Pool; keys as in `open`."""
        return self.queue.enqueue_from_all_processes(keys.flatten(1), ids)


def image_and_text_pools(
    geometry: Geometry, capacity: int, dim: int, start: str = "random_rows"
) -> tuple[QueuePool, QueuePool]:
    """A queue of image keys, which texts query, and a queue of text keys, which images query.

    Args:
        dim: of the features; random rows are mapped to where embeddings lie (oblique: norm sqrt(num_spheres)).
    """
    queues = [FeatureQueue(capacity, dim, start, seed) for seed in (0, 1)]
    with torch.no_grad():
        for queue, embed in zip(queues, (geometry.embed_image, geometry.embed_text)):
            queue.features.copy_(embed(queue.features).flatten(1))
    images, texts = queues
    if geometry.is_inner_product:  # the same both ways
        return QueuePool(images, inner_product_similarity), QueuePool(texts, inner_product_similarity)
    return QueuePool(images, partial(_texts_first, geometry.similarity)), QueuePool(texts, geometry.similarity)


def _texts_first(similarity: PairSimilarity, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return similarity(images, texts).T
