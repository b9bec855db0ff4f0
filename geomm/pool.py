"""GeoMM's pool: a queue of keys with a graph of their cluster centres (GeoMM, Alg. 2).

    pool.rebuild(step)                                   # line 2; a function of the step, on every process
    candidates = pool.open(keys, ids)                    # the columns as they will be after this step; writes nothing
    loss, _ = pool_info_nce(candidates, queries, logit_scale, candidates.columns)
    loss.backward(); optimizer.step()
    pool.insert(keys, ids)                               # new keys join existing centres

Alg. 2 inserts this step's keys before the loss, over the oldest rows. Here candidates show them in these slots. They
are written once, after the step, as in every pool. Without a graph the same columns are compared by the cosine: before
the queue is full, before `geodesic_from_step`, and with distance "cosine", so that a baseline differs only in the
distance.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from common.distributed import broadcast_, gather_without_gradient, is_main_process, local_rows
from common.feature_queue import FeatureQueue
from common.host_numbers import host_number, write_number_
from common.pool import LOGITS_AT_ONCE
from common.vectors import at_least_float32, check_same_dim, full_precision, norm
from geomm.geodesic import (
    CUT,
    GRAPHS,
    GeodesicGraph,
    angle_normalise,
    angles_of,
    attach_queries,
    attached_and_local,
    check_reading,
    components,
    nearest_centers,
)
from geomm.hierarchy import check_branching, check_finite, cluster_layers, join_layers

DISTANCES = ("geodesic", "cosine")


def graph_is_due(settings: Any, has_graph: bool, step: int) -> bool:
    """Whether a graph is built at a step: every graph_update_interval steps, and if there is none yet.

    inferred: as printed in Alg. 2, the first steps have none.

    Args:
        settings: has distance, graph_update_interval and geodesic_from_step, the first step with a graph.
    """
    if settings.distance == "cosine" or step < settings.geodesic_from_step:
        return False
    return not has_graph or step % settings.graph_update_interval == 0


@dataclass(frozen=True)
class GeodesicCandidates:
    """Columns of a pool as they will be after the insertion of this step's keys; column j is slot j.

    rows: (num_columns, dim), a view of the queue: its next write must wait for the backward pass.
    keys: (num_keys, dim) of the step, without gradient. slots: (num_keys,) int64, their columns.
    columns, ids: as in Candidates.
    graph: has the keys' centres and offsets in their slots; None = compare by the cosine.
    attach, num_attached, local: as in `geodesic_distance`.
    factor: of all similarities, beside the logit scale. A reading `_st` keeps the size of its gradient.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor
    columns: torch.Tensor
    ids: torch.Tensor | None
    graph: GeodesicGraph | None
    attach: str
    num_attached: int
    local: str
    factor: float = 1.0

    @property
    def floor(self) -> float | None:
        """As in Candidates: beyond 4 pi."""
        return None if self.graph is None or self.attach == "angle_st" else -self.factor

    @property
    def tile(self) -> int:
        """Queries at once: all if one product is enough, else as many as have their distances in the CPU cache."""
        return len(self.columns) if self.is_linear else max(1, LOGITS_AT_ONCE // len(self.rows))

    @property
    def is_linear(self) -> bool:
        """Whether the gradient is that of the cosine."""
        return self.graph is None or self.attach.endswith("_st")

    def similarity(self, queries: torch.Tensor) -> torch.Tensor:
        """As in Candidates: `geodesic_similarity` with the columns, or cosines, times factor; float32 or better."""
        check_same_dim(queries, self.keys)
        with full_precision(queries):
            return _Similarity.apply(at_least_float32(queries), self)

    def products(self, queries: torch.Tensor) -> torch.Tensor:
        """Cosines of (batch, dim) queries with all columns."""
        cosines = queries @ self.rows.T
        cosines[:, self.slots] = queries @ self.keys.T
        return cosines

    def distances(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `geodesic_distance`, (batch, num_columns); and attached, entrance from `attach_queries`."""
        routes, attached, entrance = attach_queries(queries, self.graph, self.counts[0])
        if self.attach == "angle_st":
            return self.products(queries).clamp_(-1, 1).acos_(), attached, entrance
        lengths = routes.gather(1, self.clusters.expand(len(routes), -1)).add_(self.graph.offset)
        if self.counts[1] and queries.is_cuda:
            cosines = self.products(queries)
            lengths = torch.where(self.is_local(attached), angles_of(cosines), lengths)
        elif self.counts[1]:
            places, pairs, at_keys = self.local_pairs(attached)
            cosines = torch.sparse.sampled_addmm(pairs, queries, self.rows.T, beta=0.0).values()
            lengths.view(-1).index_copy_(0, places, angles_of(cosines))
            lengths[:, self.slots] = torch.where(at_keys, angles_of(queries @ self.keys.T), lengths[:, self.slots])
        return lengths, attached, entrance

    @property
    def counts(self) -> tuple[int, int]:
        """The number of centres of a query, and the number of its local clusters."""
        return attached_and_local(self.attach, self.local, self.num_attached, len(self.graph.paths))

    def is_local(self, attached: torch.Tensor) -> torch.Tensor:
        """(batch, num_columns) bool: columns of clusters that are local to the query; `attached` as below.

        For CUDA: to list these pairs, the host would have to wait for their number.
        """
        of_clusters = torch.zeros(len(attached), len(self.graph.paths), dtype=torch.bool, device=attached.device)
        of_clusters.scatter_(1, attached[:, : self.counts[1]], True)
        return of_clusters.gather(1, self.clusters.expand(len(attached), -1))

    def local_pairs(self, attached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pairs of `is_local` as a list: on a CPU they cost far less than all pairs.

        Args:
            attached: (batch, count) int64, from `attach_queries`.
        Returns:
            places: (num_pairs,) int64 ascending, in the flattened (batch, num_columns), without this step's keys.
            pairs: a sparse matrix (batch, num_columns) with zeros at these places.
            at_keys: (batch, num_keys) bool, the step's keys in such clusters.
        """
        # members of the local clusters one after another: cluster starts, repeated by size, plus a running count
        local, (order, starts, sizes) = attached[:, : self.counts[1]], self.members
        counts, num_columns = sizes[local], len(self.rows)
        before = starts[local].flatten() - counts.flatten().cumsum(0) + counts.flatten()
        members = before.repeat_interleave(counts.flatten())
        members += torch.arange(len(members), device=local.device)
        in_a_query = counts.sum(dim=1)
        first = torch.arange(len(local), device=local.device).repeat_interleave(in_a_query) * num_columns
        places = first + order[members]
        if local.shape[1] > 1:
            places = places.sort().values
        ends = F.pad(in_a_query.cumsum(0), (1, 0))
        shape, zeros = (len(local), num_columns), self.rows.new_zeros(len(places))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            pairs = torch.sparse_csr_tensor(ends, places - first, zeros, shape, check_invariants=False)
        at_keys = (local[:, :, None] == self.graph.nearest_center[self.slots]).any(dim=1)
        return places, pairs, at_keys

    @cached_property
    def clusters(self) -> torch.Tensor:
        """(1, num_columns) int64: the cluster of each column; gather and scatter_add are faster than indexing."""
        return self.graph.nearest_center.long()[None]

    @cached_property
    def members(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns sorted by cluster, with those that this step overwrites last; starts and sizes of clusters."""
        clusters = self.graph.nearest_center.index_fill(0, self.slots, len(self.graph.paths))
        sizes = torch.bincount(clusters, minlength=len(self.graph.paths) + 1)
        return clusters.argsort(stable=True), sizes.cumsum(0) - sizes, sizes

    @torch.no_grad()
    def statistics(self, queries: torch.Tensor, logit_scale: float) -> dict[str, float]:
        """Statistics of a step for the log; they cost as much as the similarity without gradients.

        Args:
            queries: (batch, dim) of the step's keys.
        Returns:
            positive_rank: mean, 1 = the closest. entropy: mean of the softmax over all columns, in nats. info_nce: loss
            with the matched key as the only positive. scale_factor: beside the logit scale. With a graph also
            info_nce_reachable, without the rows whose positive is unreachable or truncated, if others are left; as
            shares in [0, 1]: unreachable, truncated (longer than 4 pi) of all pairs, positive_unreachable,
            positive_truncated, positive_local (at the direct angle); and components of the graph, distinct_centers
            (nearest ones of the batch's queries), mean offset and its 95 % quantile, mean distance of the reachable
            pairs, the last three in radians.
        """
        queries, positives = at_least_float32(queries), self.columns[:, None]
        with full_precision(queries):
            if self.graph is None:
                similarity = self.products(queries)
                distances = -similarity
            else:
                distances, attached, _ = self.distances(queries)
                similarity = angle_normalise(distances).cos()
            log_shares = (logit_scale * self.factor * similarity).log_softmax(dim=1)
        positive, losses = distances.gather(1, positives), -log_shares.gather(1, positives)
        of_all = {
            "positive_rank": 1 + (distances < positive).sum(dim=1).float().mean(),
            "entropy": -(log_shares.exp() * log_shares).sum(dim=1).mean(),
            "info_nce": losses.mean(),
            "scale_factor": self.factor,
        }
        if self.graph is None:
            return {name: float(value) for name, value in of_all.items()}
        reachable = losses[positive <= CUT]
        if len(reachable):
            of_all["info_nce_reachable"] = reachable.mean()
        far, lost = distances.isfinite() & (distances > CUT), distances.isinf()
        offset = self.graph.offset
        is_direct = (attached[:, : self.counts[1]] == self.graph.nearest_center[positives]).any(dim=1)
        values = of_all | {
            "unreachable": lost.float().mean(),
            "truncated": far.float().mean(),
            "positive_unreachable": lost.gather(1, positives).float().mean(),
            "positive_truncated": far.gather(1, positives).float().mean(),
            "positive_local": 1 if self.attach == "angle_st" else is_direct.float().mean(),
            "components": components(self.graph.paths).unique().numel(),
            "distinct_centers": attached[:, 0].unique().numel(),
            "mean_offset": offset.mean(),
            "offset_95": offset.sort().values[int(0.95 * (len(offset) - 1))],
            "mean_distance": distances[distances.isfinite()].mean(),
        }
        return {name: float(value) for name, value in values.items()}


class GeodesicPool(nn.Module):
    """A feature queue with a graph of its cluster centres.

    Args:
        capacity: number of keys.
        dim: of an embedding, which is a unit vector.
        distance: "geodesic", or "cosine", which never has a graph.
        branching: clusters of each layer within one of the layer above; ours for the paper: (256, 2).
        num_neighbors: of each centre in the graph; the paper: 8.
        attach, local, num_attached: how a query is attached, see geomm/geodesic.py.
        graph: which centres are joined, one of GRAPHS.
        graph_update_interval: steps between two graphs; the paper: 100.
        geodesic_from_step: first step with a graph.
        kmeans_iterations: of each clustering; the paper: 5.
    Attributes:
        queue: the keys; it starts empty.
        cluster_centers, paths, nearest_center, offset: as in GeodesicGraph, over all slots; 0 before the first graph.
        has_graph: () bool.
        scale_factor: () of all similarities from the first graph on, see geomm/softness.py; 0 = not set, as 1.
        top_centers: (branching[0], dim) of the last rebuild on the main process, for `graph_report`; else None.
    Raises:
        ValueError: more clusters than slots (without effect on a cosine), or an unknown distance or reading.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        distance: str = "geodesic",
        branching: Sequence[int] = (256, 2),
        num_neighbors: int = 8,
        attach: str = "knn_local_st",
        local: str = "nearest",
        num_attached: int = 8,
        graph: str = "neighbors",
        graph_update_interval: int = 100,
        geodesic_from_step: int = 0,
        kmeans_iterations: int = 5,
    ) -> None:
        super().__init__()
        if distance not in DISTANCES:
            raise ValueError(f"distance {distance!r} is unknown; expected: {', '.join(DISTANCES)}")
        counts = {"num_neighbors": num_neighbors, "num_attached": num_attached}
        for name, number in (counts | {"graph_update_interval": graph_update_interval}).items():
            if number < 1:
                raise ValueError(f"{name} {number}; expected: at least 1")
        check_reading(attach, local)
        if graph not in GRAPHS:
            raise ValueError(f"graph {graph!r} is unknown; expected: {', '.join(GRAPHS)}")
        if distance != "cosine":
            check_branching(branching, capacity, "slots of the queue")
        self.queue = FeatureQueue(capacity, dim, "fill_level")
        self.distance, self.branching, self.num_neighbors = distance, tuple(branching), num_neighbors
        self.attach, self.local, self.num_attached, self.kind = attach, local, num_attached, graph
        self.kmeans_iterations, self.top_centers, self.seen_keys = kmeans_iterations, None, False
        self.graph_update_interval, self.geodesic_from_step = graph_update_interval, geodesic_from_step
        clusters = math.prod(branching)
        self.register_buffer("cluster_centers", torch.zeros(clusters, dim, dtype=torch.float32))
        self.register_buffer("paths", torch.zeros(clusters, clusters, dtype=torch.float32))
        self.register_buffer("nearest_center", torch.zeros(capacity, dtype=torch.int32))
        self.register_buffer("offset", torch.zeros(capacity, dtype=torch.float32))
        self.register_buffer("has_graph", torch.zeros((), dtype=torch.bool))
        self.register_buffer("scale_factor", torch.zeros((), dtype=torch.float32))

    @classmethod
    def from_config(cls, method: Any, dim: int) -> "GeodesicPool":
        """The pool of a method's settings (geomm/config.py, DistanceConfig)."""
        names = ("distance", "branching", "num_neighbors", "attach", "local", "num_attached", "graph")
        settings = {name: getattr(method, name) for name in (*names, "graph_update_interval", "geodesic_from_step")}
        return cls(method.queue_size, dim, **settings)

    def graph(self) -> GeodesicGraph | None:
        """The current graph; its tensors are the buffers, to which `insert` and `rebuild` write."""
        if not host_number(self.has_graph):
            return None
        return GeodesicGraph(self.cluster_centers, self.paths, self.nearest_center, self.offset)

    @property
    def factor(self) -> float:
        """`scale_factor`, and 1 before it is set."""
        return host_number(self.scale_factor) if host_number(self.scale_factor) else 1.0

    def set_factor_(self, factor: float) -> None:
        """Sets `scale_factor`; the same on every process."""
        self.scale_factor.fill_(factor)  # rounded as a checkpoint keeps it

    def factor_is_due(self, step: int) -> bool:
        """Whether `scale_factor` is to be set at a step: that of the first graph, with or without one."""
        return self.queue.is_full and step >= self.geodesic_from_step and host_number(self.scale_factor) == 0

    @torch.no_grad()
    def rebuild(self, step: int) -> bool:
        """Rebuilds the graph if it is due (Alg. 2, line 2) and the queue is full; returns whether it did.

        Call before the step's `open`, on every process. The main process builds the graph and broadcasts it, as sums in
        another order would give other graphs.

        Raises:
            ValueError: keys that are not finite, with their number and the first one; on every process.
        """
        has_graph = host_number(self.has_graph)
        if not graph_is_due(self, has_graph, step) or not self.queue.is_full:
            return False
        keys = self.queue.features
        graph = None
        if is_main_process():
            start = self.cluster_centers if has_graph else None
            with full_precision(keys):
                layers = cluster_layers(keys, self.branching, self.kmeans_iterations, start)
                graph = join_layers(keys, layers, self.branching, self.num_neighbors, self.kind)
            self.top_centers = layers[0]
        else:
            check_finite(keys)  # as in cluster_layers: fails on all processes, so that none waits for the broadcast
        for name in ("cluster_centers", "paths", "nearest_center", "offset"):
            buffer = getattr(self, name)
            if graph is not None:
                buffer.copy_(getattr(graph, name))
            broadcast_(buffer)
        write_number_(self.has_graph, True)
        return True

    @torch.no_grad()
    def open(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> GeodesicCandidates:
        """All slots as they will be after the insertion of all processes' keys; while the queue fills, those in use.

        The backward pass reads the queue in place, as with `QueuePool`.

        Args:
            keys: (batch, dim) unit vectors, as the queries of `similarity`; only the first keys are checked.
        Raises:
            ValueError: more keys in a step than slots, or keys that are no unit vectors.
        """
        if not self.seen_keys:  # later checks would let the host wait at every step
            self.seen_keys = True
            if (norm(at_least_float32(keys)) - 1).abs().max() > 0.02:
                raise ValueError("keys of a GeodesicPool are unit vectors; expected: common.vectors.unit(features)")
        batch, keys = len(keys), gather_without_gradient(at_least_float32(keys))
        if len(keys) > self.queue.capacity:
            raise ValueError(
                f"a step brings {len(keys)} keys to a feature queue of {self.queue.capacity}: its positives would "
                f"overwrite each other; expected: a queue of at least {len(keys)}"
            )
        # the new keys take the oldest slots, with the centre and offset that `insert` will write
        slots, graph = self.queue.next_slots(len(keys)), self.graph()
        num_columns = self.queue.capacity
        if graph is None:
            num_columns = min(host_number(self.queue.fill_level) + len(keys), num_columns)
        else:
            nearest, offset = self._attached(keys)
            graph = replace(
                graph,
                nearest_center=graph.nearest_center.index_copy(0, slots, nearest),
                offset=graph.offset.index_copy(0, slots, offset),
            )
        if ids is not None:
            ids = self.queue.ids[:num_columns].index_copy(0, slots, gather_without_gradient(ids))
        return GeodesicCandidates(
            self.queue.features[:num_columns],
            keys,
            slots,
            slots[local_rows(batch)],
            ids,
            graph,
            self.attach,
            self.num_attached,
            self.local,
            self.factor,
        )

    @torch.no_grad()
    def insert(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """As in Pool: over the oldest keys, with the nearest centre of each new key.

        Args:
            keys: (batch, dim) unit vectors; not checked.
        """
        keys = gather_without_gradient(at_least_float32(keys))
        slots = self.queue.enqueue(keys, None if ids is None else gather_without_gradient(ids))
        if host_number(self.has_graph):
            self.nearest_center[slots], self.offset[slots] = self._attached(keys)
        return slots

    def _attached(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with full_precision(keys):
            return nearest_centers(keys, self.cluster_centers)

    def _apply(self, fn, recurse: bool = True):
        """Keeps the graph in float32 when the model is cast to half precision, as the queue keeps its keys."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, before[name].to(buffer.device))
        return self


class _Similarity(torch.autograd.Function):
    """Similarities that save no distances for the backward pass: S = cos(D / 4) has the slope -sqrt(1 - S^2) / 4.

    Gradients of columns are summed into routes, (batch, num_clusters), and routes go back to their first centres. At
    the direct angle cos(D) = 8 S^4 - 8 S^2 + 1 is the inner product, and the slope has no pole at D = 0.
    """

    @staticmethod
    def forward(ctx, queries, candidates):
        ctx.candidates = candidates
        if candidates.graph is None:
            # a view of the queue: checked for writes before the backward pass, like the keys and the graph's centres
            ctx.save_for_backward(candidates.rows, candidates.keys)
            return _times(candidates.products(queries), candidates.factor)
        similarities, attached, entrance = candidates.distances(queries)
        _times(similarities.clamp_(max=CUT).div_(4).cos_(), candidates.factor)  # angle_normalise, in place
        if candidates.is_linear:
            ctx.save_for_backward(candidates.rows, candidates.keys)
        else:
            read = candidates.rows, queries, similarities, attached, entrance, candidates.keys
            ctx.save_for_backward(*read, candidates.graph.cluster_centers)
        return similarities

    @staticmethod
    def backward(ctx, gradient):
        with full_precision(gradient):
            if not ctx.candidates.is_linear:
                return ctx.candidates.factor * _geodesic_gradient(ctx, gradient), None
            of_queries = _cosine_gradient(ctx, gradient)
            return of_queries if ctx.candidates.graph is not None else _times(of_queries, ctx.candidates.factor), None


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor.mul_(factor)


def _of_products(gradient: torch.Tensor, similarity: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to an inner product; `similarity` is the cosine of a quarter of its angle."""
    return gradient / (16 * similarity * (2 * similarity * similarity - 1))


def _cosine_gradient(ctx, gradient: torch.Tensor) -> torch.Tensor:
    rows, written = ctx.saved_tensors[0], ctx.candidates.slots
    return gradient @ rows + gradient[:, written] @ (ctx.candidates.keys - rows[written])


def _geodesic_gradient(ctx, gradient: torch.Tensor) -> torch.Tensor:
    candidates, (_, queries, similarities, attached, entrance, _, centers) = ctx.candidates, ctx.saved_tensors
    similarities = similarities if candidates.factor == 1 else similarities / candidates.factor
    of_columns = (1 - similarities * similarities).clamp_(min=0).sqrt_().mul_(gradient).div_(-4)
    of_queries = 0.0
    # columns at the direct angle have their gradient with respect to the inner product, and leave the routes
    if candidates.counts[1] and queries.is_cuda:
        is_local = candidates.is_local(attached)
        of_products = _of_products(gradient, similarities).where(is_local, 0.0)
        of_queries = of_products @ candidates.rows
        of_queries += of_products[:, candidates.slots] @ (candidates.keys - candidates.rows[candidates.slots])
        of_columns = of_columns.masked_fill_(is_local, 0.0)
    elif candidates.counts[1]:
        places, pairs, at_keys = candidates.local_pairs(attached)
        slots = candidates.slots
        pairs.values().copy_(_of_products(gradient.take(places), similarities.take(places)))
        of_keys = _of_products(gradient[:, slots], similarities[:, slots]).where(at_keys, 0.0)
        of_queries = pairs @ candidates.rows + of_keys @ candidates.keys
        of_columns.view(-1).index_fill_(0, places, 0.0)
        of_columns[:, slots] = of_columns[:, slots].masked_fill_(at_keys, 0.0)
    of_routes = queries.new_zeros(len(queries), len(centers))
    of_routes.scatter_add_(1, candidates.clusters.expand(len(queries), -1), of_columns)
    of_angles = torch.zeros_like(of_routes).scatter_add_(1, entrance, of_routes)
    cosines = queries @ centers.T
    inside = cosines.abs() < 1 - 8 * torch.finfo(cosines.dtype).eps  # as in `angles`
    return of_queries - torch.where(inside, of_angles / (1 - cosines * cosines).sqrt(), 0.0) @ centers
