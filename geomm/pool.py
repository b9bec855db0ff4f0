"""GeoMM's pool: a queue of keys with a graph of their cluster centres (GeoMM, Alg. 2).

    pool.rebuild(step)                                   # line 2; a function of the step, on every process
    candidates = pool.open(keys, ids)                    # the columns as they will be after this step; writes nothing
    loss, _ = pool_info_nce(candidates, queries, logit_scale, candidates.columns)
    loss.backward(); optimizer.step()
    pool.insert(keys, ids)                               # new keys join existing centres

Alg. 2 inserts this step's keys before the loss, over the oldest rows. Here they are shown in these places and written
after the step, once, as in every pool. Without a graph - before the queue is full, before `geodesic_from_step`, or with
distance "cosine" - the same columns are compared by the cosine: a baseline differs in nothing but the distance.
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
from common.geometry import at_least_float32, check_same_dim, full_precision
from common.pool import LOGITS_AT_ONCE
from geomm.geodesic import (
    CUT,
    GeodesicGraph,
    angles_of,
    attach_queries,
    attached_and_local,
    check_reading,
    components,
    nearest_centers,
)
from geomm.hierarchy import build_graph, check_branching, check_finite

DISTANCES = ("geodesic", "cosine")


def graph_is_due(settings: Any, has_graph: torch.Tensor, step: int) -> bool:
    """Whether a graph is built at a step: every graph_update_interval steps, and when there is none yet.

    inferred: as printed in Alg. 2, the first steps have none.

    Args:
        settings: distance, graph_update_interval and geodesic_from_step, before which there is none, as attributes.
        has_graph: () bool.
        step: of the optimiser.
    """
    if settings.distance == "cosine" or step < settings.geodesic_from_step:
        return False
    return not has_graph or step % settings.graph_update_interval == 0


@dataclass(frozen=True)
class GeodesicCandidates:
    """Columns of a pool as they will be when this step's keys are in; column j is slot j.

    rows: (num_columns, dim), a view of the queue: its next write must wait for the backward pass.
    keys: (num_keys, dim) of the step, without gradient. slots: (num_keys,) int64 columns that they will take.
    columns, ids: as in Candidates.
    graph: with the keys' centres and offsets in their slots; None = compare by the cosine.
    attach, num_attached, local: as in `geodesic_distance`.
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

    @property
    def tile(self) -> int:
        """All queries where one product serves them all; else so many that their distances stay in the cache."""
        return len(self.columns) if self.is_linear else max(1, LOGITS_AT_ONCE // len(self.rows))

    @property
    def is_linear(self) -> bool:
        """Whether the gradient is that of the cosine."""
        return self.graph is None or self.attach.endswith("_st")

    def similarity(self, queries: torch.Tensor) -> torch.Tensor:
        """As in Candidates: the numbers of `geodesic_similarity` on the columns, or cosines; float32 or better."""
        check_same_dim(queries, self.keys)
        with full_precision(queries):
            return _Similarity.apply(at_least_float32(queries), self)

    def products(self, queries: torch.Tensor) -> torch.Tensor:
        """Cosines of (batch, dim) queries with all columns."""
        found = queries @ self.rows.T
        found[:, self.slots] = queries @ self.keys.T
        return found

    def distances(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `geodesic_distance`, (batch, num_columns); and attached, entrance as `attach_queries` gives them."""
        routes, attached, entrance = attach_queries(queries, self.graph, self.counts[0])
        found = routes.gather(1, self.clusters.expand(len(routes), -1)).add_(self.graph.offset)
        if self.counts[1]:
            places, pairs, at_keys = self.local_pairs(attached)
            cosines = torch.sparse.sampled_addmm(pairs, queries, self.rows.T, beta=0.0).values()
            found.view(-1).index_copy_(0, places, angles_of(cosines))
            found[:, self.slots] = torch.where(at_keys, angles_of(queries @ self.keys.T), found[:, self.slots])
        return found, attached, entrance

    @property
    def counts(self) -> tuple[int, int]:
        """Centres that a query is attached to, and how many of their clusters are local to it."""
        return attached_and_local(self.attach, self.local, self.num_attached, len(self.graph.paths))

    def local_pairs(self, attached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pairs of query and column at the direct angle: columns of clusters that are local to the query.

        Args:
            attached: (batch, count) int64, as `attach_queries` gives them.
        Returns:
            places: (num_pairs,) int64 ascending, in the flattened (batch, num_columns), without this step's keys.
            pairs: a sparse matrix (batch, num_columns) of zeros at these.
            at_keys: (batch, num_keys) bool, which of the step's keys are such columns.
        """
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
        """(1, num_columns) int64: of each column, for gather and scatter_add, which are faster than by index."""
        return self.graph.nearest_center.long()[None]

    @cached_property
    def members(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns sorted by cluster, those that this step overwrites at the end; starts of clusters, and sizes."""
        clusters = self.graph.nearest_center.index_fill(0, self.slots, len(self.graph.paths))
        sizes = torch.bincount(clusters, minlength=len(self.graph.paths) + 1)
        return clusters.argsort(stable=True), sizes.cumsum(0) - sizes, sizes

    @torch.no_grad()
    def statistics(self, queries: torch.Tensor) -> dict[str, float]:
        """What to log of a step; it costs as much as the similarity without gradients.

        Returns:
            positive_rank: mean, 1 = the closest. With a graph also, as shares in [0, 1]: unreachable, truncated (longer
            than 4 pi) of all pairs, positive_unreachable, positive_truncated, positive_local (at the direct angle); and
            components of the graph, distinct_centers (nearest ones of the batch's queries), mean offset and its 95 %
            quantile, mean distance of the reachable pairs, the last three in radians.
        """
        queries, own = at_least_float32(queries), self.columns[:, None]
        with full_precision(queries):
            if self.graph is None:
                found = -self.products(queries)
            else:
                found, attached, _ = self.distances(queries)
        positive = found.gather(1, own)
        rank_of = {"positive_rank": 1 + (found < positive).sum(dim=1).float().mean()}
        if self.graph is None:
            return {name: float(value) for name, value in rank_of.items()}
        far, lost = found.isfinite() & (found > CUT), found.isinf()
        offset = self.graph.offset
        values = rank_of | {
            "unreachable": lost.float().mean(),
            "truncated": far.float().mean(),
            "positive_unreachable": lost.gather(1, own).float().mean(),
            "positive_truncated": far.gather(1, own).float().mean(),
            "positive_local": (attached[:, : self.counts[1]] == self.graph.nearest_center[own])
            .any(dim=1)
            .float()
            .mean(),
            "components": components(self.graph.paths).unique().numel(),
            "distinct_centers": attached[:, 0].unique().numel(),
            "mean_offset": offset.mean(),
            "offset_95": offset.sort().values[int(0.95 * (len(offset) - 1))],
            "mean_distance": found[found.isfinite()].mean(),
        }
        return {name: float(value) for name, value in values.items()}


class GeodesicPool(nn.Module):
    """A feature queue with a graph of its cluster centres.

    Args:
        capacity: keys kept.
        dim: of an embedding, which is a unit vector.
        distance: "geodesic", or "cosine": no graph is ever built.
        branching: clusters of each layer within one of the layer above; the paper's two layers: (16, 16).
        num_neighbors: of each centre in the graph, and centres that a query is attached to by `knn`; the paper: 8.
        attach, local: how a query is attached, see geomm/geodesic.py.
        graph_update_interval: steps between two graphs; the paper: 100.
        geodesic_from_step: before it there is no graph.
        kmeans_iterations: of each clustering; the paper: 5.
    Attributes:
        queue: the keys; it starts empty.
        cluster_centers, paths, nearest_center, offset: as in GeodesicGraph, over all slots; 0 before the first graph.
        has_graph: () bool.
    Raises:
        ValueError: more clusters than slots, or an unknown distance or reading; the message says what is accepted.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        distance: str = "geodesic",
        branching: Sequence[int] = (16, 16),
        num_neighbors: int = 8,
        attach: str = "knn_local_st",
        local: str = "nearest",
        graph_update_interval: int = 100,
        geodesic_from_step: int = 0,
        kmeans_iterations: int = 5,
    ) -> None:
        super().__init__()
        if distance not in DISTANCES:
            raise ValueError(f"distance {distance!r} is unknown; accepted: {', '.join(DISTANCES)}")
        for name, number in (("num_neighbors", num_neighbors), ("graph_update_interval", graph_update_interval)):
            if number < 1:
                raise ValueError(f"{name} {number}; accepted: at least 1")
        check_reading(attach, local)
        check_branching(branching, capacity, "slots of the queue")
        self.queue = FeatureQueue(capacity, dim, "fill_level")
        self.distance, self.branching, self.num_neighbors = distance, tuple(branching), num_neighbors
        self.attach, self.local, self.kmeans_iterations = attach, local, kmeans_iterations
        self.graph_update_interval, self.geodesic_from_step = graph_update_interval, geodesic_from_step
        clusters = math.prod(branching)
        self.register_buffer("cluster_centers", torch.zeros(clusters, dim, dtype=torch.float32))
        self.register_buffer("paths", torch.zeros(clusters, clusters, dtype=torch.float32))
        self.register_buffer("nearest_center", torch.zeros(capacity, dtype=torch.int32))
        self.register_buffer("offset", torch.zeros(capacity, dtype=torch.float32))
        self.register_buffer("has_graph", torch.zeros((), dtype=torch.bool))

    @classmethod
    def from_config(cls, method: Any, dim: int) -> "GeodesicPool":
        """The pool that a method's settings describe (geomm/config.py, DistanceConfig), of so many numbers a key."""
        names = ("distance", "branching", "num_neighbors", "attach", "local", "graph_update_interval")
        settings = {name: getattr(method, name) for name in (*names, "geodesic_from_step")}
        return cls(method.queue_size, dim, **settings)

    def graph(self) -> GeodesicGraph | None:
        """The graph of the queue as it is; its tensors are the buffers, which `insert` and `rebuild` write to."""
        if not self.has_graph:
            return None
        return GeodesicGraph(self.cluster_centers, self.paths, self.nearest_center, self.offset)

    @torch.no_grad()
    def rebuild(self, step: int) -> bool:
        """Clusters the queue anew if it is time: Alg. 2, line 2. Before the step's `open`, on every process.

        It is time where `graph_is_due`, but never before the queue is full. The main process does it, and sends it to
        the others: sums in another order would leave them with other graphs.

        Args:
            step: of the optimiser.
        Returns:
            Whether the graph is a new one.
        Raises:
            ValueError: keys that are not finite, with how many and where; on every process.
        """
        if not graph_is_due(self, self.has_graph, step) or self.queue.fill_level < self.queue.capacity:
            return False
        keys = self.queue.features
        graph = None
        if is_main_process():
            start = self.cluster_centers if self.has_graph else None
            with full_precision(keys):
                graph = build_graph(keys, self.branching, self.num_neighbors, self.kmeans_iterations, start)
        else:
            check_finite(keys)  # as building does: nobody waits for a graph that does not come
        for name in ("cluster_centers", "paths", "nearest_center", "offset"):
            buffer = getattr(self, name)
            if graph is not None:
                buffer.copy_(getattr(graph, name))
            broadcast_(buffer)
        self.has_graph.fill_(True)
        return True

    @torch.no_grad()
    def open(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> GeodesicCandidates:
        """All slots as they will be when the keys of all processes are in; while the queue fills, those in use.

        The backward pass reads the queue in place, as with `QueuePool`.

        Raises:
            ValueError: more keys in a step than slots.
        """
        batch, keys = len(keys), gather_without_gradient(at_least_float32(keys))
        if len(keys) > self.queue.capacity:
            raise ValueError(
                f"a step brings {len(keys)} keys to a feature queue of {self.queue.capacity}: its positives would "
                f"overwrite each other; accepted: a queue of at least {len(keys)}"
            )
        slots, graph = self.queue.next_slots(len(keys)), self.graph()
        num_columns = self.queue.capacity
        if graph is None:
            num_columns = min(int(self.queue.fill_level) + len(keys), num_columns)
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
            self.num_neighbors,
            self.local,
        )

    @torch.no_grad()
    def insert(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """As in Pool: over the oldest keys, each attached to the centre nearest to it."""
        keys = gather_without_gradient(at_least_float32(keys))
        slots = self.queue.enqueue(keys, None if ids is None else gather_without_gradient(ids))
        if self.has_graph:
            self.nearest_center[slots], self.offset[slots] = self._attached(keys)
        return slots

    def _attached(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with full_precision(keys):
            return nearest_centers(keys, self.cluster_centers)

    def _apply(self, fn, recurse: bool = True):
        """A cast of the whole model to half precision does not round the graph, as it does not round the keys."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, before[name].to(buffer.device))
        return self

    def extra_repr(self) -> str:
        return (
            f"distance={self.distance!r}, branching={self.branching}, num_neighbors={self.num_neighbors}, "
            f"attach={self.attach!r}, local={self.local!r}"
        )


class _Similarity(torch.autograd.Function):
    """Similarities, of which nothing is kept but themselves: S = cos(D / 4) has the slope -sqrt(1 - S^2) / 4.

    Columns sum up into routes, (batch, num_clusters), and routes lead back to the centres that they begin with. At the
    direct angle cos(D) = 8 S^4 - 8 S^2 + 1 is the product itself, and the slope has no pole where D = 0.
    """

    @staticmethod
    def forward(ctx, queries, candidates):
        ctx.candidates = candidates
        if candidates.graph is None:
            ctx.save_for_backward(candidates.rows)  # a view of the queue: checked for writes before the backward pass
            return candidates.products(queries)
        found, attached, entrance = candidates.distances(queries)
        found.clamp_(max=CUT).div_(4).cos_()  # angle_normalise, in place
        if candidates.is_linear:
            ctx.save_for_backward(candidates.rows)
        else:
            ctx.save_for_backward(candidates.rows, queries, found, attached, entrance)
        return found

    @staticmethod
    def backward(ctx, gradient):
        with full_precision(gradient):
            return (_cosine_gradient if ctx.candidates.is_linear else _geodesic_gradient)(ctx, gradient), None


def _of_products(gradient: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to a product whose angle's quarter has the cosine `found`."""
    return gradient / (16 * found * (2 * found * found - 1))


def _cosine_gradient(ctx, gradient: torch.Tensor) -> torch.Tensor:
    rows, written = ctx.saved_tensors[0], ctx.candidates.slots
    return gradient @ rows + gradient[:, written] @ (ctx.candidates.keys - rows[written])


def _geodesic_gradient(ctx, gradient: torch.Tensor) -> torch.Tensor:
    candidates, (_, queries, found, attached, entrance) = ctx.candidates, ctx.saved_tensors
    centers = candidates.graph.cluster_centers
    of_columns = (1 - found * found).clamp_(min=0).sqrt_().mul_(gradient).div_(-4)
    of_queries = 0.0
    if candidates.counts[1]:
        places, pairs, at_keys = candidates.local_pairs(attached)
        slots = candidates.slots
        pairs.values().copy_(_of_products(gradient.take(places), found.take(places)))
        of_keys = _of_products(gradient[:, slots], found[:, slots]).where(at_keys, 0.0)
        of_queries = pairs @ candidates.rows + of_keys @ candidates.keys
        of_columns.view(-1).index_fill_(0, places, 0.0)
        of_columns[:, slots] = of_columns[:, slots].masked_fill_(at_keys, 0.0)
    of_routes = queries.new_zeros(len(queries), len(centers))
    of_routes.scatter_add_(1, candidates.clusters.expand(len(queries), -1), of_columns)
    of_angles = torch.zeros_like(of_routes).scatter_add_(1, entrance, of_routes)
    cosines = queries @ centers.T
    inside = cosines.abs() < 1 - 8 * torch.finfo(cosines.dtype).eps  # as in `angles`
    return of_queries - torch.where(inside, of_angles / (1 - cosines * cosines).sqrt(), 0.0) @ centers
