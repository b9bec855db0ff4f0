"""SwAV: codes of one view, predicted from another (Caron et al. 2020), with prototypes as nodes of a graph.

A view's code says which prototypes it belongs to, equal shares of a batch to each (Sinkhorn and Knopp, by the cosine).
What another view of the picture predicts is a softmax over its similarities with the prototypes. GeoMM says nothing of
how its distance gets there (inferred): there is no distance of two pictures in SwAV, so prototypes are the nodes, each
the only member of its cluster, and a picture joins them as any query joins a graph (`geodesic_similarity`).
"""

from collections.abc import Sequence

import torch
from torch import nn

from common.distributed import broadcast_, gather_without_gradient, local_rows
from common.feature_queue import FeatureQueue
from common.geometry import at_least_float32, full_precision, unit
from common.info_nce import info_nce
from common.logit_scale import LogitScale
from common.methods.self_supervised import Method, StepLoss
from geomm.config import DistanceConfig
from geomm.geodesic import GeodesicGraph, geodesic_similarity, neighbor_graph, shortest_paths
from geomm.pool import graph_is_due


class Prototypes(nn.Module):
    """Unit vectors that pictures are compared with, and the paths between them.

    Args:
        count: prototypes; SwAV: 3,000.
        dim: of an embedding.
        method: distance, reading, neighbours and when the paths are computed anew.
    Attributes:
        weight: (count, dim), trained. paths: (count, count) lengths in radians, inf = none; has_paths: () bool.
    """

    def __init__(self, count: int, dim: int, method: DistanceConfig) -> None:
        super().__init__()
        self.method = method
        self.weight = nn.Parameter(unit(torch.randn(count, dim)))
        self.register_buffer("paths", torch.zeros(count, count))
        self.register_buffer("has_paths", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def normalise_(self) -> None:
        """Back to norm 1, which an update has left."""
        self.weight.copy_(unit(self.weight))

    @torch.no_grad()
    def rebuild(self, step: int) -> bool:
        """Paths of the prototypes as they are now, if it is time, as in `GeodesicPool.rebuild`; on every process."""
        if not graph_is_due(self.method, self.has_paths, step):
            return False
        self.paths.copy_(shortest_paths(neighbor_graph(self.weight, self.method.num_neighbors)))
        broadcast_(self.paths)
        self.has_paths.fill_(True)
        return True

    def similarity(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(batch, dim) unit vectors -> (batch, count), cosines or `geodesic_similarity`; gradients reach both sides."""
        embeddings = at_least_float32(embeddings)
        with full_precision(embeddings):
            if not self.has_paths:
                return embeddings @ self.weight.T
            count, device = len(self.weight), self.weight.device
            own = torch.arange(count, device=device, dtype=torch.int32)
            graph = GeodesicGraph(self.weight, self.paths, own, torch.zeros(count, device=device))
            method = self.method
            return geodesic_similarity(
                embeddings, self.weight, graph, method.attach, method.num_neighbors, method.local
            )


class Swav(Method):
    """What differs from MoCo: no negatives and no momentum encoder; pictures are compared with prototypes alone.

    Args:
        encoder: backbone and head, see `swav_head`.
        prototypes: trained with it; in the first steps they are held still.
        logit_scale: 1/T; SwAV: 10.
        sinkhorn_scale: 1/epsilon of the codes; SwAV: 20.
        sinkhorn_iterations: SwAV: 3.
        frozen_steps: in which the prototypes are held still; SwAV: 313.
        code_queue: pictures of past steps among which the codes are shared out, too, once they are so many; 0 = none.
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
        self.frozen_steps = frozen_steps
        dim = 2 * prototypes.weight.shape[1]  # both views of a picture in one row
        self.queue = FeatureQueue(code_queue, dim, "fill_level") if code_queue else None

    def start_step(self, step: int) -> None:
        """Prototypes of norm 1, and their paths if it is time."""
        if step > self.frozen_steps:
            self.prototypes.normalise_()
        self.prototypes.rebuild(step)

    def hold(self, step: int) -> None:
        """The first steps leave the prototypes as they are: no gradient, no weight decay."""
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
        """(batch, 3, height, width) each: codes of the first two, each predicted from all other views of its picture.

        Returns:
            The mean over both codes of the mean cross-entropy of the other views; keys for the queue.
        """
        features = [self.encoder.backbone(torch.cat([first_views, second_views]))]
        if small_views:
            features.append(self.encoder.backbone(torch.cat(small_views)))
        embeddings = unit(self.encoder.head(torch.cat(features))).split(len(first_views))
        similarities = [self.prototypes.similarity(each) for each in embeddings]
        codes = self.codes([each.detach() for each in embeddings[:2]])
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
        """Of each of two views, (batch, dim) -> (batch, num_prototypes), rows that sum to 1; by the cosine.

        Shared out among the pictures of all processes, and those of the queue when it is full.
        """
        past = [None, None]
        if self.queue is not None and self.queue.fill_level == self.queue.capacity:
            past = self.queue.rows().chunk(2, dim=1)
        found = []
        for own, before in zip(embeddings, past):
            everyone = gather_without_gradient(at_least_float32(own))
            rows = everyone if before is None else torch.cat([everyone, before])
            with full_precision(rows):
                codes = sinkhorn(rows @ self.prototypes.weight.T, self.sinkhorn_scale, self.sinkhorn_iterations)
            found.append(codes[local_rows(len(own))])
        return found

    def insert(self, keys: torch.Tensor | None) -> None:
        """Both views of a step's pictures, of all processes, into the queue where there is one."""
        if self.queue is not None:
            self.queue.enqueue_from_all_processes(keys)


def sinkhorn(scores: torch.Tensor, scale: float, iterations: int) -> torch.Tensor:
    """exp(scale * scores), its columns and rows normalised in turns: columns get about equal shares of all rows.

    In logarithms: a column that exp would leave empty gets its share, too, and no 0 is divided by 0.

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
    """Linear, batch normalisation, ReLU, linear; as wide inside as what comes in (2048 for ResNet-50)."""
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, dim))
