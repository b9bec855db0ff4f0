"""SwAV: codes of one view, predicted from another (Caron et al. 2020), with prototypes as nodes of a graph.

The code of a view assigns it to prototypes, with equal shares of a batch per prototype (Sinkhorn and Knopp). The
prediction from another view of the image is a softmax over its similarities with the prototypes. GeoMM does not state
how its distance enters (inferred): SwAV has no distance of two images, so prototypes are the nodes, each the only
member of its cluster, and an image joins them as any query joins a graph (`geodesic_similarity`). Codes and
predictions are of the same similarities, as in SwAV.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from common.distributed import broadcast_, gather_without_gradient, local_rows
from common.feature_queue import FeatureQueue
from common.geometry import at_least_float32, full_precision, unit
from common.host_numbers import host_number, write_number_
from common.info_nce import info_nce
from common.logit_scale import LogitScale
from common.methods.self_supervised import Method, StepLoss
from common.sharded import whole
from geomm.config import DistanceConfig
from geomm.geodesic import GeodesicGraph, center_graph, geodesic_similarity, shortest_paths
from geomm.graph_report import path_statistics, unreachable_share
from geomm.pool import graph_is_due


class Prototypes(nn.Module):
    """Unit vectors that are compared with images, and the paths between them.

    Args:
        count: prototypes; SwAV: 3,000.
        dim: of an embedding.
        method: distance, reading, neighbours and update interval of the paths.
    Attributes:
        weight: (count, dim), trained. paths: (count, count) lengths in radians, inf = none; has_paths: () bool.
        factor: of all similarities, see `method.scale_factor`; a function of the step, so that no checkpoint keeps it.
    """

    def __init__(self, count: int, dim: int, method: DistanceConfig) -> None:
        super().__init__()
        self.method, self.factor = method, 1.0
        self.weight = nn.Parameter(unit(torch.randn(count, dim)))
        self.register_buffer("paths", torch.zeros(count, count))
        self.register_buffer("has_paths", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def normalise_(self) -> None:
        """Restores norm 1 after an update."""
        self.weight.copy_(unit(self.weight))

    @torch.no_grad()
    def rebuild(self, step: int) -> bool:
        """Recomputes the paths if they are due, as in `GeodesicPool.rebuild`; call at each step on every process."""
        self.factor = self.method.scale_factor if step >= self.method.geodesic_from_step else 1.0
        if not graph_is_due(self.method, host_number(self.has_paths), step):
            return False
        self.paths.copy_(shortest_paths(center_graph(whole(self.weight), self.method.num_neighbors, self.method.graph)))
        broadcast_(self.paths)
        write_number_(self.has_paths, True)
        return True

    @torch.no_grad()
    def report(self) -> dict[str, Any]:
        """What the graph is like: `path_statistics` and `unreachable_share`."""
        nodes = whole(self.weight)
        edges = center_graph(nodes, self.method.num_neighbors, self.method.graph)
        return path_statistics(nodes, edges) | {"unreachable": unreachable_share(self.paths)}

    def similarity(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(batch, dim) unit vectors -> (batch, count), cosines or `geodesic_similarity`, times the factor.

        Gradients reach both sides; that of a reading `_st` is the cosine's, without the factor.
        """
        embeddings = at_least_float32(embeddings)
        with full_precision(embeddings):
            if not host_number(self.has_paths):
                return self.factor * (embeddings @ self.weight.T)
            count, device = len(self.weight), self.weight.device
            clusters = torch.arange(count, device=device, dtype=torch.int32)
            graph = GeodesicGraph(self.weight, self.paths, clusters, torch.zeros(count, device=device))
            method = self.method
            similarity = geodesic_similarity(
                embeddings, self.weight, graph, method.attach, method.num_attached, method.local
            )
            if method.attach.endswith("_st"):
                return similarity + (self.factor - 1) * similarity.detach()
            return self.factor * similarity


class Swav(Method):
    """Differences from MoCo: no negatives and no momentum encoder; images are compared only with prototypes.

    Args:
        encoder: backbone and head, see `swav_head`.
        prototypes: trained with it, frozen in the first steps.
        logit_scale: 1/T; SwAV: 10.
        sinkhorn_scale: 1/epsilon of the codes; SwAV: 20.
        sinkhorn_iterations: SwAV: 3.
        frozen_steps: number of first steps with frozen prototypes; SwAV: 313.
        code_queue: images of past steps that share in the codes, once the queue is full; 0 = none.
    """

    def __init__(
        self,
        encoder: nn.Module,
        prototypes: Prototypes,
        logit_scale: LogitScale,
        sinkhorn_scale: float,
        sinkhorn_iterations: int,
        frozen_steps: int,
        code_queue: int,
    ) -> None:
        super().__init__()
        self.encoder, self.prototypes, self.logit_scale = encoder, prototypes, logit_scale
        self.sinkhorn_scale, self.sinkhorn_iterations = sinkhorn_scale, sinkhorn_iterations
        self.frozen_steps, self.loss_at_chance = frozen_steps, math.log(len(prototypes.weight))
        dim = 2 * prototypes.weight.shape[1]  # both views of a picture in one row
        self.queue = FeatureQueue(code_queue, dim, "fill_level") if code_queue else None

    def start_step(self, step: int) -> Mapping[str, Any]:
        """Normalises the prototypes, and recomputes their paths if they are due; then facts about these."""
        if step > self.frozen_steps:
            self.prototypes.normalise_()
        return self.prototypes.report() if self.prototypes.rebuild(step) else {}

    def hold(self, step: int) -> None:
        """Freezes the prototypes in the first steps: no gradient, no weight decay."""
        if step < self.frozen_steps:
            self.prototypes.weight.grad = None

    def forward(
        self,
        first_views: torch.Tensor,
        second_views: torch.Tensor,
        labels: torch.Tensor | None = None,
        shuffle_seed: int | None = None,
        *small_views: torch.Tensor,
    ) -> StepLoss:
        """(batch, 3, height, width) each: codes of the first two, each predicted from all other views of its image.

        Returns:
            The mean over both codes of the mean cross-entropy of the other views; keys for the queue.
        """
        features = [self.encoder.backbone(torch.cat([first_views, second_views]))]
        if small_views:
            features.append(self.encoder.backbone(torch.cat(small_views)))
        embeddings = unit(self.encoder.head(torch.cat(features))).split(len(first_views))
        similarities = [self.prototypes.similarity(of_view) for of_view in embeddings]
        codes = self.codes([of_view.detach() for of_view in embeddings[:2]])
        losses = [
            info_nce(self.logit_scale() * similarity, code)
            for view, code in enumerate(codes)
            for other, similarity in enumerate(similarities)
            if other != view
        ]
        keys = None if self.queue is None else torch.cat(embeddings[:2], dim=1).detach()
        return StepLoss(sum(losses) / len(losses), keys)

    @torch.no_grad()
    def codes(self, embeddings: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Codes of two views by `Prototypes.similarity`, (batch, dim) -> (batch, num_prototypes), rows sum to 1.

        Prototypes are shared among the images of all processes, and those of the queue when it is full.
        """
        past = [None, None]
        if self.queue is not None and self.queue.is_full:
            past = self.queue.rows().chunk(2, dim=1)
        shares_of_views = []
        for of_view, before in zip(embeddings, past):
            everyone = gather_without_gradient(at_least_float32(of_view))
            rows = everyone if before is None else torch.cat([everyone, before])
            codes = sinkhorn(self.prototypes.similarity(rows), self.sinkhorn_scale, self.sinkhorn_iterations)
            shares_of_views.append(codes[local_rows(len(of_view))])
        return shares_of_views

    def insert(self, keys: torch.Tensor | None) -> None:
        """Adds both views of all processes' images to the queue, if there is one."""
        if self.queue is not None:
            self.queue.enqueue_from_all_processes(keys)


def sinkhorn(scores: torch.Tensor, scale: float, iterations: int) -> torch.Tensor:
    """exp(scale * scores) with columns and rows normalised in turn: columns get about equal shares of all rows.

    In logarithms, so that a column for which exp is 0 also gets its share and 0 / 0 cannot occur.

    Args:
        scores: (num_rows, num_columns).
        scale: 1/epsilon.
        iterations: at least 1; the last one ends with the rows.
    Returns:
        (num_rows, num_columns), rows sum to 1.
    """
    logits = scale * scores
    for _ in range(iterations):
        logits = logits - logits.logsumexp(dim=0)
        logits = logits - logits.logsumexp(dim=1, keepdim=True)
    return logits.exp()


def swav_head(width: int, dim: int) -> nn.Sequential:
    """Linear, batch normalisation, ReLU, linear; the hidden width is that of the input (2048 for ResNet-50)."""
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, dim))
