"""MoCo v1, v2 and v3: contrast against the keys of a momentum encoder (He et al. 2020; Chen et al. 2020, 2021).

One step of training with a pool (v1, v2), as the loop writes it:
    model.update_momentum_encoder(ema_momentum)                  # before the keys; theta_q of before the optimiser step
    logits, columns, keys = model(query_views, key_views, shuffle_seed)
    moco_loss(logits, columns).backward(); optimizer.step()
    model.insert(keys)
and without one (v3):
    model.update_momentum_encoder(ema_momentum_at(step, steps, 0.99, "half_cosine"))
    loss = moco_v3_loss(*model(first_views, second_views), model.logit_scale())
    loss.backward(); optimizer.step()
The published code updates the momentum encoder between the two forward passes; this is the same, as only parameters are
averaged and the query encoder's forward pass changes only buffers. It also enqueues before the backward pass; here
the queue is read in place, and that order is a RuntimeError.

The temperature is 1 / logit_scale, fixed in all three: LogitScale(1 / T, maximum=None, trainable=False).
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common.distributed import gather_without_gradient, local_rows, rank, world_size
from common.geometry import Geometry
from common.info_nce import info_nce
from common.logit_scale import LogitScale
from common.momentum import MomentumEncoder
from common.pool import Pool


class MomentumContrastStep(NamedTuple):
    """MoCo's logits and keys of a batch of num_queries queries.

    logits: (num_queries, num_columns). columns: (num_queries,) int64, where the positives are; 0 with a queue.
    keys: (num_queries, dim) without gradient, for `insert`.
    """

    logits: torch.Tensor
    columns: torch.Tensor
    keys: torch.Tensor


class MomentumContrast(nn.Module):
    """MoCo v1 and v2; they differ in the head, the temperature and the augmentation.

    Unlike CLIP they have one encoder, for two views of an image. Keys come from its momentum copy, without gradient;
    negatives are the keys of past steps in a pool. The one direction is queries against keys.

    Args:
        encoder: backbone and head, (batch, ...) views -> (batch, dim); see `linear_head` and `mlp_head`.
        geometry: MoCo: sphere. Its image side serves both views.
        logit_scale: 1/T. MoCo v1: T = 0.07, v2: 0.2.
        pool: MoCo: QueuePool(FeatureQueue(65_536, 128), geometry.similarity, matched_key_only=True).
        symmetric: each view is query once and key once (the CIFAR demo).
    """

    def __init__(
        self,
        encoder: nn.Module,
        geometry: Geometry,
        logit_scale: LogitScale,
        pool: Pool,
        symmetric: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.geometry, self.logit_scale = encoder, geometry, logit_scale
        self.momentum_encoder = MomentumEncoder(encoder)
        self.pool, self.symmetric = pool, symmetric

    def forward(
        self, query_views: torch.Tensor, key_views: torch.Tensor, shuffle_seed: int | None = None
    ) -> MomentumContrastStep:
        """Logits of a batch, and the keys to put into the pool after the step.

        Args:
            query_views, key_views: (batch, ...), row k of both shows one image.
            shuffle_seed: of this step, the same on every process: keys are computed in an order shuffled over the
                global batch, so that batch statistics do not give away which key belongs to a query. None = not
                shuffled (encoders without batch normalisation).
        Returns:
            Of batch queries; symmetric: of 2 batch, the second half with the views exchanged.
        """
        there = self._direction(query_views, key_views, shuffle_seed)
        if not self.symmetric:
            return there
        back = self._direction(key_views, query_views, shuffle_seed)
        return MomentumContrastStep(*map(torch.cat, zip(there, back)))

    def _direction(
        self, query_views: torch.Tensor, key_views: torch.Tensor, shuffle_seed: int | None
    ) -> MomentumContrastStep:
        # queries meet the keys of this direction only: of both, the key of the query's view would be a negative
        queries = self.geometry.embed_image(self.encoder(query_views))
        keys = self.encode_keys(key_views, shuffle_seed)
        candidates = self.pool.open(keys)
        logits = self.logit_scale() * candidates.similarity(queries)
        return MomentumContrastStep(logits, candidates.columns, keys.flatten(1))

    @torch.no_grad()
    def encode_keys(self, views: torch.Tensor, shuffle_seed: int | None = None) -> torch.Tensor:
        """(batch, ...) views -> embeddings of the momentum encoder, without gradient, in the order of the views."""
        if shuffle_seed is None:
            return self.geometry.embed_image(self.momentum_encoder(views))
        features = self.momentum_encoder(shuffle_rows(views, shuffle_seed))
        return self.geometry.embed_image(unshuffle_rows(features, shuffle_seed))

    def update_momentum_encoder(self, ema_momentum: float) -> None:
        """theta_k <- m theta_k + (1 - m) theta_q over parameters; MoCo: 0.999."""
        self.momentum_encoder.update_(self.encoder, ema_momentum)

    def insert(self, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Puts the keys of all processes, with int64 ids if any, into the pool; returns their slots in rank order."""
        return self.pool.insert(keys, ids)


class MomentumContrastV3(nn.Module):
    """MoCo v3: no queue, both directions, a predictor on the query side.

    Candidates are the keys of the global batch. Queries pass a predictor, of which there is no momentum copy, and the
    loss of each direction is multiplied by 2T (`moco_v3_loss`).

    Args:
        encoder: backbone and projector, see `batch_norm_mlp`.
        predictor: features -> features of the same size.
        geometry: MoCo v3: sphere.
        logit_scale: 1/T. MoCo v3: T = 1 (ResNet), 0.2 (ViT).
    """

    def __init__(self, encoder: nn.Module, predictor: nn.Module, geometry: Geometry, logit_scale: LogitScale) -> None:
        super().__init__()
        self.encoder, self.predictor, self.geometry, self.logit_scale = encoder, predictor, geometry, logit_scale
        self.momentum_encoder = MomentumEncoder(encoder)

    def forward(self, first_views: torch.Tensor, second_views: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of first views against keys of the second, and the reverse: two (batch, world_size * batch).

        Row k of both views, (batch, ...), shows one image. The positive of row i is column i + rank * batch.
        """
        queries = [
            self.geometry.embed_image(self.predictor(self.encoder(views))) for views in (first_views, second_views)
        ]
        with torch.no_grad():
            keys = [self.geometry.embed_image(self.momentum_encoder(views)) for views in (first_views, second_views)]
        first, second = (
            self.logit_scale() * self.geometry.similarity(query, gather_without_gradient(key))
            for query, key in zip(queries, reversed(keys))
        )
        return first, second

    def update_momentum_encoder(self, ema_momentum: float) -> None:
        """As in `MomentumContrast`, over backbone and projector."""
        self.momentum_encoder.update_(self.encoder, ema_momentum)


def moco_loss(logits: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
    """InfoNCE of queries against their keys (MoCo, Eq. 1): mean_i [ log sum_j exp l_ij - l_i,c(i) ].

    Of a symmetric model it is the mean over both directions, half of the published sum.

    Args:
        logits: (num_queries, num_columns).
        columns: (num_queries,) int64, where the positives are; None = column 0, as with a queue.
    Returns:
        Scalar in nats; equal logits give ln(num_columns). Its mean over processes is the loss of the global batch.
    """
    if columns is None:
        columns = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return info_nce(logits, columns)


def moco_v3_loss(first_logits: torch.Tensor, second_logits: torch.Tensor, logit_scale: torch.Tensor) -> torch.Tensor:
    """ctr(q1, k2) + ctr(q2, k1), with ctr = 2T * mean_i [ log sum_j exp l_ij - l_i,i' ] (MoCo v3, Alg. 1).

    Args:
        first_logits, second_logits: of `MomentumContrastV3.forward`; row i's positive is column i' = i + rank * batch.
        logit_scale: scalar tensor, 1/T.
    Returns:
        Scalar, over processes as `moco_loss`; equal logits give 4T ln(global batch).
    """
    targets = torch.arange(len(first_logits), device=first_logits.device) + rank() * len(first_logits)
    return 2 / logit_scale * (info_nce(first_logits, targets) + info_nce(second_logits, targets))


def shuffle_rows(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """This process's share of the global batch in an order drawn from the seed; `unshuffle_rows` undoes it.

    Args:
        rows: (local_batch, ...), as many on each process.
        seed: the same on every process, another one in each step. The global random state is not used.
    Returns:
        (local_batch, ...), also of other processes; no gradient.
    """
    order = _global_order(len(rows), seed).to(rows.device, non_blocking=True)
    return gather_without_gradient(rows)[order[local_rows(len(rows))]]


def unshuffle_rows(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Brings what was computed from `shuffle_rows(..., seed)` back to the rows it belongs to; no gradient."""
    inverse = _global_order(len(rows), seed).argsort().to(rows.device, non_blocking=True)
    return gather_without_gradient(rows)[inverse[local_rows(len(rows))]]


def _global_order(local_batch: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(world_size() * local_batch, generator=generator)


class SplitBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with statistics of each part of the batch, as on that many devices, but in one process.

    Against such statistics MoCo shuffles its keys (Sec. 3.3). Running statistics are the mean over the parts. In eval
    mode it is ordinary batch normalisation.

    Args:
        num_parts: consecutive parts of equal size.
    """

    def __init__(self, num_features: int, num_parts: int) -> None:
        super().__init__(num_features)
        self.num_parts = num_parts

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(batch, num_features, ...) -> the same shape.

        Raises:
            ValueError: in train mode, a batch that num_parts does not divide.
        """
        if not self.training:
            return super().forward(features)
        batch, parts = len(features), self.num_parts
        if batch % parts:
            raise ValueError(f"a batch of {batch} does not split into {parts} equal parts for batch normalisation")
        # parts become channels: (batch / parts, parts * channels, ...)
        split = features.unflatten(0, (parts, batch // parts)).transpose(0, 1).flatten(1, 2)
        means, variances, weight, bias = (
            values.repeat(parts) for values in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        self.num_batches_tracked.add_(1)
        normalised = F.batch_norm(split, means, variances, weight, bias, True, self.momentum, self.eps)
        self.running_mean.copy_(means.view(parts, -1).mean(dim=0))
        self.running_var.copy_(variances.view(parts, -1).mean(dim=0))
        return normalised.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 1)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any number of axes after the channels."""


def linear_head(width: int, dim: int = 128) -> nn.Module:
    """MoCo v1's head, one linear layer."""
    return nn.Linear(width, dim)


def mlp_head(width: int, dim: int = 128) -> nn.Module:
    """MoCo v2's head, Linear-ReLU-Linear without normalisation."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim))


def batch_norm_mlp(
    width: int, dim: int = 256, hidden_dim: int = 4096, num_layers: int = 2, final_batch_norm: bool = True
) -> nn.Module:
    """MoCo v3's projectors and predictors: linear layers without bias, batch normalisation and ReLU between.

        ResNet   projector: 2 layers; predictor: 2 layers, final_batch_norm False
        ViT      projector: 3 layers; predictor: 2 layers

    Args:
        width: of the features; of the predictor: dim.
        num_layers: at least 1.
        final_batch_norm: normalises the output, without scale and shift.
    """
    widths = [width, *[hidden_dim] * (num_layers - 1), dim]
    layers: list[nn.Module] = []
    for number, (incoming, outgoing) in enumerate(itertools.pairwise(widths), start=1):
        layers.append(nn.Linear(incoming, outgoing, bias=False))
        if number < num_layers:
            layers += [nn.BatchNorm1d(outgoing), nn.ReLU()]
        elif final_batch_norm:
            layers.append(nn.BatchNorm1d(outgoing, affine=False))
    return nn.Sequential(*layers)
