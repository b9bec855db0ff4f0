"""InfoNCE without the B x B matrix: any geometry, any batch, any number of processes, exact gradients.

The matrix of logits is walked in tiles. One walk gives the log-sum-exp of rows and of columns together; the backward
pass walks again, forms each tile once more and hands its part of the gradient to autograd:
    products        2 B^2 d forward, 2 B^2 d to form the tiles again, 4 B^2 d for both gradients: 8 B^2 d in all
    memory          embeddings, their gradients, two vectors of length B, one tile
Pairs that belong together are compared by the geometry's `paired_similarity` (full accuracy for the close pairs) and
everything else by its `similarity`.

With W processes each owns its rows and walks them against the columns of one process after the other, so that it holds
its share and one more: column sums are put together over processes, column gradients are summed where they belong.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.distributed import rank, world_size
from common.geometry import Geometry, at_least_float32
from common.info_nce import QueuedPairs

TILE = 1024  # rows and columns of a tile


@dataclass(frozen=True)
class _Problem:
    """What does not change between the walks."""

    geometry: Geometry
    tile: int
    ids: torch.Tensor | None  # (local_batch,)
    all_ids: torch.Tensor | None  # (world_size, local_batch)
    queue: QueuedPairs | None


def tiled_contrastive_loss(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
    ids: torch.Tensor | None = None,
    queue: QueuedPairs | None = None,
    tile: int = TILE,
) -> torch.Tensor:
    """The value and the gradients of `contrastive_loss`, in memory that grows with B and not with B^2.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process.
        geometry: a module; its parameters get their gradients, those of the global batch.
        logit_scale: scalar tensor, the multiplier.
        ids, queue: as in `contrastive_loss`.
        tile: rows and columns of a tile, at least 1.
    Returns:
        Scalar in nats: this process's share of the global loss.
    """
    if tile < 1:
        raise ValueError(f"tile = {tile}; accepted: at least 1")
    all_ids = None if ids is None else torch.stack(_all_gathered(ids))
    problem = _Problem(geometry, tile, ids, all_ids, queue)
    parameters = [parameter for parameter in geometry.parameters() if parameter.requires_grad]
    return _TiledContrastiveLoss.apply(problem, image_embeddings, text_embeddings, logit_scale, *parameters)


class _TiledContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem, images, texts, logit_scale, *parameters):
        walk = _Walk(problem, images.detach(), texts.detach(), logit_scale.detach())
        loss, row_lse, column_lse, column_counts = walk.forward()
        ctx.problem, ctx.num_parameters = problem, len(parameters)
        ctx.save_for_backward(images, texts, logit_scale, row_lse, column_lse, column_counts, *parameters)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        images, texts, logit_scale, row_lse, column_lse, column_counts, *parameters = ctx.saved_tensors
        walk = _Walk(ctx.problem, images.detach(), texts.detach(), logit_scale.detach())
        gradients = walk.backward(gradient, row_lse, column_lse, column_counts, parameters)
        return (None, *gradients)


class _Walk:
    """One process's walks over its rows and all columns.

    Args:
        problem: geometry, tile, ids, queue.
        images, texts: (local_batch, ...) constants.
        logit_scale: constant.
    """

    def __init__(self, problem: _Problem, images: torch.Tensor, texts: torch.Tensor, logit_scale: torch.Tensor) -> None:
        self.problem, self.logit_scale = problem, logit_scale
        self.images, self.texts = at_least_float32(images), at_least_float32(texts)
        self.input_dtypes = images.dtype, texts.dtype
        self.batch = len(images)

    @torch.no_grad()
    def forward(self) -> tuple[torch.Tensor, ...]:
        """The loss, and what the backward walk needs: (local_batch,) row log-sum-exps, (world_size, local_batch) column
        log-sum-exps, and the number of positives of every sample."""
        problem, own = self.problem, rank()
        row_lse = self.images.new_full((self.batch,), -torch.inf)
        row_positives, count = torch.zeros_like(row_lse), torch.ones_like(row_lse)
        for source in range(world_size()):
            columns = _broadcast(self.texts, source)
            column_lse, column_positives = torch.full_like(row_lse, -torch.inf), torch.zeros_like(row_lse)
            for rows, cols in self._tiles(self.batch, self.batch):
                logits = self._logits(self.images[rows], columns[cols])
                if source == own:  # partners are compared pair by pair
                    _diagonal(logits, rows, cols).fill_(-torch.inf)
                row_lse[rows] = torch.logaddexp(row_lse[rows], logits.logsumexp(dim=1))
                column_lse[cols] = torch.logaddexp(column_lse[cols], logits.logsumexp(dim=0))
                if problem.ids is not None:
                    same = self._same_id(rows, problem.all_ids[source][cols], source == own, rows, cols)
                    chosen = logits.masked_fill(~same, 0.0)
                    row_positives[rows] += chosen.sum(dim=1)
                    column_positives[cols] += chosen.sum(dim=0)
                    count[rows] += same.sum(dim=1)
            column_lse, column_positives = _combined(column_lse, column_positives)
            if source == own:
                own_lse, own_positives = column_lse, column_positives
        partners = torch.cat(
            [
                self.logit_scale * problem.geometry.paired_similarity(self.images[rows], self.texts[rows])
                for rows in self._ranges(self.batch)
            ]
        )
        row_lse, own_lse = torch.logaddexp(row_lse, partners), torch.logaddexp(own_lse, partners)
        row_positives, own_positives = row_positives + partners, own_positives + partners
        if problem.queue is not None:
            for rows, cols in self._tiles(self.batch, len(problem.queue.ids)):
                to_texts = self._logits(self.images[rows], problem.queue.text_embeddings[cols])
                to_images = self._logits(problem.queue.image_embeddings[cols], self.texts[rows]).T
                row_lse[rows] = torch.logaddexp(row_lse[rows], to_texts.logsumexp(dim=1))
                own_lse[rows] = torch.logaddexp(own_lse[rows], to_images.logsumexp(dim=1))
                if problem.ids is not None:
                    same = self._same_id(rows, problem.queue.ids[cols])
                    row_positives[rows] += to_texts.masked_fill(~same, 0.0).sum(dim=1)
                    own_positives[rows] += to_images.masked_fill(~same, 0.0).sum(dim=1)
                    count[rows] += same.sum(dim=1)
        loss = ((row_lse - row_positives / count).mean() + (own_lse - own_positives / count).mean()) / 2
        return loss, row_lse, torch.stack(_all_gathered(own_lse)), torch.stack(_all_gathered(count))

    def backward(
        self,
        gradient: torch.Tensor,
        row_lse: torch.Tensor,
        column_lse: torch.Tensor,
        counts: torch.Tensor,
        parameters: list[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Gradients of images, texts, logit scale and the geometry's parameters."""
        problem, own = self.problem, rank()
        weights = torch.stack(_all_gathered(gradient)) / (2 * self.batch)  # of each process's rows and columns
        scale = self.logit_scale.clone().requires_grad_()
        scalars = [scale, *parameters]
        image_gradient, text_gradient = torch.zeros_like(self.images), torch.zeros_like(self.texts)
        scalar_gradients = [torch.zeros_like(scalar) for scalar in scalars]

        def differentiate(logits: torch.Tensor, coefficients: torch.Tensor, *tensors: torch.Tensor):
            (*found,) = torch.autograd.grad(logits, [*tensors, *scalars], coefficients, allow_unused=True)
            for total, part in zip(scalar_gradients, found[len(tensors) :]):
                if part is not None:
                    total += part
            return found[: len(tensors)]

        for source in range(world_size()):
            columns = _broadcast(self.texts, source)
            column_gradient = text_gradient if world_size() == 1 else torch.zeros_like(columns)
            for rows, cols in self._tiles(self.batch, self.batch):
                with torch.enable_grad():
                    x, y = self.images[rows].requires_grad_(), columns[cols].requires_grad_()
                    logits = scale * problem.geometry.similarity(x, y)
                by_row = (logits.detach() - row_lse[rows, None]).exp_()
                by_column = (logits.detach() - column_lse[source, cols]).exp_()
                if problem.ids is not None:
                    same = self._same_id(rows, problem.all_ids[source][cols], source == own, rows, cols)
                    by_row -= same / counts[own, rows, None]
                    by_column -= same / counts[source, cols]
                coefficients = by_row.mul_(weights[own]).add_(by_column.mul_(weights[source]))
                if source == own:
                    _diagonal(coefficients, rows, cols).fill_(0.0)
                x_part, y_part = differentiate(logits, coefficients, x, y)
                image_gradient[rows] += x_part
                column_gradient[cols] += y_part
            if world_size() > 1:
                dist.reduce(column_gradient, source)
                if source == own:
                    text_gradient += column_gradient

        for rows in self._ranges(self.batch):
            with torch.enable_grad():
                x, y = self.images[rows].requires_grad_(), self.texts[rows].requires_grad_()
                partners = scale * problem.geometry.paired_similarity(x, y)
            logits = partners.detach()
            probabilities = (logits - row_lse[rows]).exp() + (logits - column_lse[own, rows]).exp()
            coefficients = weights[own] * (probabilities - 2 / counts[own, rows])
            x_part, y_part = differentiate(partners, coefficients, x, y)
            image_gradient[rows] += x_part
            text_gradient[rows] += y_part

        if problem.queue is not None:
            for rows, cols in self._tiles(self.batch, len(problem.queue.ids)):
                for side, total, lse in (
                    ("image", image_gradient, row_lse),
                    ("text", text_gradient, column_lse[own]),
                ):
                    with torch.enable_grad():
                        if side == "image":
                            x = self.images[rows].requires_grad_()
                            logits = scale * problem.geometry.similarity(x, problem.queue.text_embeddings[cols])
                        else:
                            x = self.texts[rows].requires_grad_()
                            logits = (scale * problem.geometry.similarity(problem.queue.image_embeddings[cols], x)).T
                    coefficients = (logits.detach() - lse[rows, None]).exp_()
                    if problem.ids is not None:
                        coefficients -= self._same_id(rows, problem.queue.ids[cols]) / counts[own, rows, None]
                    (part,) = differentiate(logits, coefficients.mul_(weights[own]), x)
                    total[rows] += part
        image_dtype, text_dtype = self.input_dtypes
        return [image_gradient.to(image_dtype), text_gradient.to(text_dtype), *scalar_gradients]

    def _ranges(self, length: int) -> list[slice]:
        tile = self.problem.tile
        return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]

    def _tiles(self, num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
        return itertools.product(self._ranges(num_rows), self._ranges(num_columns))

    def _logits(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return self.logit_scale * self.problem.geometry.similarity(images, texts)

    def _same_id(
        self,
        rows: slice,
        ids: torch.Tensor,
        own: bool = False,
        own_rows: slice | None = None,
        cols: slice | None = None,
    ) -> torch.Tensor:
        """(rows, columns) bool: positives other than the partner itself."""
        row_ids = self.problem.ids[rows, None]
        same = (row_ids == ids) & (row_ids >= 0)
        if own:
            _diagonal(same, own_rows, cols).fill_(False)
        return same


def _diagonal(tile: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:
    """View of the entries of a tile that lie on the diagonal of the whole matrix; empty away from it."""
    return tile.diagonal(rows.start - cols.start) if abs(rows.start - cols.start) < max(tile.shape) else tile[:0, 0]


def _broadcast(own: torch.Tensor, source: int) -> torch.Tensor:
    """The source's tensor, on every process."""
    if world_size() == 1:
        return own
    received = own.contiguous() if source == rank() else torch.empty_like(own, memory_format=torch.contiguous_format)
    dist.broadcast(received, source)
    return received


def _all_gathered(own: torch.Tensor) -> list[torch.Tensor]:
    if world_size() == 1:
        return [own]
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own.contiguous())
    return gathered


def _combined(lse: torch.Tensor, positives: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Column sums of all processes' rows."""
    if world_size() == 1:
        return lse, positives
    dist.all_reduce(positives)
    return torch.stack(_all_gathered(lse)).logsumexp(dim=0), positives
