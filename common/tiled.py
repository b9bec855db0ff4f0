"""InfoNCE without the B x B matrix: any geometry, any batch, any number of processes, exact gradients.

The matrix of logits is walked in tiles. One walk gives the log-sum-exp of rows and of columns together; the backward
pass walks again, forms each tile once more and adds up the gradients:
    products        2 B^2 d forward, 2 B^2 d to form the tiles again, 4 B^2 d for both gradients: 8 B^2 d in all
                    (with distillation the keys' tiles too, twice: 12 B^2 d)
    memory          embeddings, their gradients, some vectors of length B, some matrices of one tile
In one process, without ids, queue and keys, with logits s_ij:
    first walk      r_i = log sum_j exp s_ij, c_j = log sum_i exp s_ij; loss = mean of (r_i + c_i) / 2 - s_ii
    second walk     residual_ij = (exp(s_ij - r_i) + exp(s_ij - c_j)) / (2 B), less 1 / B for partners;
                    dx_i = sum_j residual_ij ds_ij / dx_i, and so for y_j and the scalars

A tile is a function of operands (tile_comparison.py); autograd goes through them once, after the second walk. Partners
are compared by the geometry's `paired_similarity`, whose values are written over the diagonal.

With W processes each walks its rows against the columns of all, which arrive one tile at a time, with tile / W columns
of each process: one all_gather a tile, and one reduce_scatter for each operand's gradients. No process holds more than
its share, its gradient and a tile.

The gradients of scalars (logit scale, curvature) then agree with those of `contrastive_loss` only after averaging over
processes. A loop without DDP or FSDP2 must average them itself.
"""

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.distributed import gather_without_gradient, rank, world_size
from common.geometry import Geometry
from common.info_nce import Distillation, QueuedPairs, as_scale, check_geometry, check_pairs, contrastive_loss
from common.query_sums import Block, Direction, QuerySums, part_of, residuals
from common.sharded import whole
from common.tile_comparison import (
    TILE,
    Comparison,
    OfProducts,
    Side,
    add_gradients_,
    add_to_totals,
    comparison_of,
    gradients_by,
    require_gradients,
)
from common.vectors import at_least_float32, full_precision, one_matrix

if TYPE_CHECKING:
    from common.triton_tiles import TileKernel

LOG = logging.getLogger(__name__)
KERNELS = ("torch", "auto", "triton")
KERNEL_TARGETS = ((8, 0), (9, 0))  # compute capabilities for which the tests compile the Triton kernels


def geometry_loss(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
    ids: torch.Tensor | None = None,
    queue: QueuedPairs | None = None,
    distillation: Distillation | None = None,
    tile: int = 0,
    bf16_product: bool = False,
    kernel: str = "torch",
) -> torch.Tensor:
    """InfoNCE as training calls it: `contrastive_loss` at once (tile 0) or in tiles of that many rows.

    Raises:
        ValueError: as `tiled_contrastive_loss`; bf16_product or the kernel triton without tiles.
    """
    if tile or bf16_product or kernel == "triton":
        sides = image_embeddings, text_embeddings
        return tiled_contrastive_loss(
            *sides, geometry, logit_scale, ids, queue, distillation, tile, bf16_product, kernel
        )
    return contrastive_loss(image_embeddings, text_embeddings, geometry, logit_scale, ids, queue, distillation)


def tiled_contrastive_loss(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
    ids: torch.Tensor | None = None,
    queue: QueuedPairs | None = None,
    distillation: Distillation | None = None,
    tile: int = TILE,
    bf16_product: bool = False,
    kernel: str = "torch",
) -> torch.Tensor:
    """The value and the gradients of `contrastive_loss`, in memory that grows with B and not with B^2.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process; half precision is
            exchanged as it is and compared in float32.
        geometry: a module; its parameters get gradients.
        logit_scale, ids, queue, distillation: as in `contrastive_loss`.
        tile: rows and columns of a tile, at least 1.
        bf16_product: for inner products: multiply in bfloat16 and add in float32, forward and backward. An inner
            product of unit vectors is then off by up to 0.004, a gradient by some parts in a thousand; partners are
            still compared in float32. Faster on CUDA only.
        kernel: "triton": on CUDA, Triton kernels compute the sums and residuals of the batch's tiles, not of a queue's.
            "auto": where they have the case. "torch": never.
    Returns:
        Scalar in nats: this process's share of the global loss.
    Raises:
        ValueError: a tile below 1, bf16_product for another geometry, a geometry of two matrices, shapes that do not
            fit; kernel "triton" for what it does not have.
    """
    check_geometry(geometry)
    check_pairs(image_embeddings, text_embeddings, ids, queue, distillation)
    # a half-precision scale would be rounded once more where it is multiplied by a number
    logit_scale = as_scale(logit_scale, image_embeddings).to(at_least_float32(image_embeddings[:0]).dtype)
    if not isinstance(tile, Integral) or tile < 1:
        raise ValueError(f"tile = {tile!r}; expected: a whole number, at least 1")
    if bf16_product and not geometry.is_inner_product:
        raise ValueError(
            f"bf16_product (optim.loss_bf16_product) is for an inner product, as sphere and oblique are; got "
            f"{geometry.name}"
        )
    with torch.no_grad():
        one_pair = geometry.directions(image_embeddings[:1], text_embeddings[:1])
    if not one_matrix(one_pair):
        raise ValueError(
            f"tile = {tile} (optim.loss_tile) with geometry {geometry.name}, which has two matrices; expected: 0"
        )
    parameters = [whole(parameter) for parameter in geometry.parameters()]
    scalars = tuple(scalar.detach() for scalar in (logit_scale, *parameters))
    alpha = 0.0 if distillation is None else distillation.alpha
    triton_kernel = _kernel_for(kernel, geometry, image_embeddings, ids, alpha)
    comparison = comparison_of(geometry, scalars, bf16_product, triton_kernel)
    inputs = _Inputs(
        images=image_embeddings.detach(),
        texts=text_embeddings.detach(),
        comparison=comparison,
        multipliers=Side.of(comparison.multipliers(), needs_gradient=False),
        ids=ids,
        queue=queue,
        alpha=alpha,
        image_keys=distillation.image_keys.detach() if alpha else None,  # with alpha 0 no target follows the keys
        text_keys=distillation.text_keys.detach() if alpha else None,
        tile=tile,
    )
    return _TiledContrastiveLoss.apply(inputs, image_embeddings, text_embeddings, logit_scale, *parameters)


class _TiledContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, *differentiable):
        ctx.inputs = inputs
        # the second walk reads them again
        others = inputs.ids, inputs.image_keys, inputs.text_keys, *(inputs.queue or ())
        ctx.save_for_backward(*differentiable, *(tensor for tensor in others if tensor is not None))
        with full_precision(inputs.images):
            loss, ctx.sums = _first_walk(inputs)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph: parts of a second derivative would be missing
            raise RuntimeError("the tiled loss has first derivatives only; use contrastive_loss for a second one")
        _ = ctx.saved_tensors  # raises if one of them was changed in place since the forward pass
        with full_precision(ctx.inputs.images):
            return (None, *_second_walk(ctx.inputs, ctx.sums, gradient, ctx.needs_input_grad[1:]))


def _kernel_for(
    kernel: str,
    geometry: Geometry,
    embeddings: torch.Tensor,
    ids: torch.Tensor | None,
    alpha: float,
) -> "TileKernel | None":
    # None = torch operations
    if kernel not in KERNELS:
        raise ValueError(f"kernel = {kernel!r}; expected one of: {', '.join(KERNELS)}")
    if kernel == "torch":
        return None
    is_interpreted = kernel == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    try:
        if embeddings.device.type == "cuda":
            capability = torch.cuda.get_device_capability(embeddings.device)
            if torch.version.cuda is None or capability not in KERNEL_TARGETS:
                raise ValueError(f"compute capability {capability}; the kernel is compiled for CUDA's {KERNEL_TARGETS}")
        elif not is_interpreted:
            raise ValueError(f"embeddings on {embeddings.device.type}; the kernel runs on CUDA")
        if embeddings.dtype == torch.float64:
            raise ValueError("embeddings in float64; the kernel computes in float32")
        try:
            from common.triton_tiles import tile_kernel
        except ImportError as error:
            raise ValueError(f"no package triton ({error}); pip install triton") from error
        if ids is not None or alpha:
            raise ValueError("ids or distillation; the kernel has one positive a row, its partner")
        chosen = tile_kernel(geometry)
    except ValueError as error:
        if kernel == "triton":
            raise ValueError(f"kernel = triton (optim.loss_kernel) with {error}; expected: auto or torch") from error
        LOG.info("the loss runs in tiles of torch operations (optim.loss_kernel = auto): %s", error)
        return None
    LOG.info("the loss runs in Triton kernels (optim.loss_kernel = %s)", kernel)
    return chosen


# The walks


@dataclass(frozen=True)
class _Inputs:
    # What both walks read of this process's rows; all tensors without gradient.
    # ids: (batch,) of the rows; all_ids: of the columns.
    # image_keys, text_keys: of the momentum model; None where alpha is 0.

    images: torch.Tensor
    texts: torch.Tensor
    comparison: Comparison
    multipliers: Side
    ids: torch.Tensor | None
    queue: QueuedPairs | None
    alpha: float
    image_keys: torch.Tensor | None
    text_keys: torch.Tensor | None
    tile: int

    @property
    def batch(self) -> int:
        return len(self.images)

    @property
    def has_kernel(self) -> bool:
        return isinstance(self.comparison, OfProducts) and self.comparison.kernel is not None

    def same_id(self, rows: slice, ids: torch.Tensor) -> torch.Tensor:
        # (rows, candidates) bool; a negative id equals no other
        return (self.ids[rows, None] == ids) & (self.ids[rows, None] >= 0)

    def ranges(self, length: int, step: int | None = None) -> list[slice]:
        step = self.tile if step is None else step
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]

    # columns: the texts of all processes, a tile with as many of each; their order is that of the tiles

    @property
    def share(self) -> int:
        # how many columns of a tile each process has
        return max(1, self.tile // world_size())

    def column_tiles(self) -> list[slice]:
        # the local texts in each tile of columns, the same on all processes
        return self.ranges(self.batch, self.share)

    @property
    def places(self) -> torch.Tensor:
        # (processes, batch) int64: the column of every text of every process
        texts = torch.arange(self.batch, device=self.images.device)
        first = texts // self.share * self.share
        width = (self.batch - first).clamp(max=self.share)
        processes = torch.arange(world_size(), device=texts.device)[:, None]
        return world_size() * first + processes * width + texts - first

    def of_columns(self, values: torch.Tensor) -> torch.Tensor:
        # a number of each local text -> of all columns
        gathered = gather_without_gradient(values)
        return torch.empty_like(gathered).index_put_((self.places.flatten(),), gathered)

    def block(self, rows: slice, texts: slice) -> Block | None:
        # where the local partners are in the tile of these rows and of the columns that these local texts are in
        first, last = max(rows.start, texts.start), min(rows.stop, texts.stop)
        before = rank() * (texts.stop - texts.start) - texts.start
        if first >= last:
            return None
        return Block(slice(first - rows.start, last - rows.start), slice(before + first, before + last))

    def tiles(self, texts: slice) -> list[tuple[slice, Block | None]]:
        # the rows of each tile of these columns, and where the partners are
        return [(rows, self.block(rows, texts)) for rows in self.ranges(self.batch)]

    def received(self, embeddings: torch.Tensor | None, texts: slice) -> Side | None:
        # of a tile's texts or text keys, on every process
        return None if embeddings is None else self.side(gather_without_gradient(embeddings[texts]), is_text=True)

    def side(self, embeddings: torch.Tensor, is_text: bool) -> Side:
        # operands as constants
        return Side.of(self.comparison.stored(self.comparison.operands(embeddings, is_text)), needs_gradient=False)

    def logits(self, queries: Side, candidates: Side, is_text: bool = False) -> torch.Tensor:
        return self.comparison.compare_queries(is_text, queries, candidates, self.multipliers).logits()

    def pseudo_logits(self, rows: slice, candidates: Side | None, is_text: bool = False) -> torch.Tensor | None:
        keys = self.text_keys if is_text else self.image_keys
        if keys is None:
            return None
        return self.logits(self.side(keys[rows], is_text), candidates, is_text)

    @functools.cached_property
    def all_ids(self) -> torch.Tensor:
        return self.of_columns(self.ids)

    def positive(self, rows: slice, columns: slice, block: Block | None) -> torch.Tensor | None:
        # (rows, columns) bool: other samples of the same id
        if self.ids is None:
            return None
        positive = self.same_id(rows, self.all_ids[columns])
        if block is not None:
            block.diagonal(positive).fill_(False)
        return positive

    def queue_tiles(self) -> Iterator[tuple[bool, slice, torch.Tensor]]:
        # (whether texts query it, rows of the queue, their embeddings)
        for cols in [] if self.queue is None else self.ranges(len(self.queue.ids)):
            yield False, cols, self.queue.text_embeddings[cols].detach()
            yield True, cols, self.queue.image_embeddings[cols].detach()

    def queue_positives(self, rows: slice, cols: slice) -> torch.Tensor | None:
        return None if self.ids is None else self.same_id(rows, self.queue.ids[cols])


@dataclass(frozen=True)
class _WalkSums:
    # What the first walk leaves for the second.
    # partners, pseudo_partners: (batch,) logits of this process's pairs, and of their keys (None without distillation).
    # images, texts, columns: of this process's images and texts, and of the texts of all processes.

    partners: torch.Tensor
    pseudo_partners: torch.Tensor | None
    images: QuerySums
    texts: QuerySums
    columns: QuerySums


def _first_walk(inputs: _Inputs) -> tuple[torch.Tensor, _WalkSums]:
    def compared(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        logits = inputs.comparison.paired_logits
        return torch.cat([logits(images[rows], texts[rows]) for rows in inputs.ranges(inputs.batch)])

    partners = compared(inputs.images, inputs.texts)
    pseudo_partners = None if inputs.image_keys is None else compared(inputs.image_keys, inputs.text_keys)
    image_sums, text_sums = (QuerySums(partners, inputs.alpha) for _ in range(2))
    images = inputs.side(inputs.images, is_text=False)
    for is_text, cols, embeddings in inputs.queue_tiles():
        candidates, side_sums = inputs.side(embeddings, not is_text), text_sums if is_text else image_sums
        for rows in inputs.ranges(inputs.batch):
            queries = inputs.side(inputs.texts[rows], is_text) if is_text else images[rows]
            logits, pseudo = (
                inputs.logits(queries, candidates, is_text),
                inputs.pseudo_logits(rows, candidates, is_text),
            )
            side_sums.add(rows, logits, inputs.queue_positives(rows, cols), pseudo)

    columns, local = QuerySums(inputs.of_columns(partners), inputs.alpha), inputs.places[rank()]
    columns.put_(local, text_sums)
    if inputs.has_kernel:
        image_sums.count.fill_(1)  # the partner is the only positive
        columns.count.index_fill_(0, local, 1)
    for tile_texts in inputs.column_tiles():
        texts, text_keys = (inputs.received(side, tile_texts) for side in (inputs.texts, inputs.text_keys))
        at = slice(world_size() * tile_texts.start, world_size() * tile_texts.stop)
        tiles = inputs.tiles(tile_texts)
        if inputs.has_kernel:
            of_rows, of_columns = inputs.comparison.log_sums(images, texts, inputs.multipliers, tiles)
            image_sums.add_others(slice(0, inputs.batch), of_rows)
            columns.add_others(at, of_columns)
            continue
        for rows, block in tiles:
            logits, pseudo = inputs.logits(images[rows], texts), inputs.pseudo_logits(rows, text_keys)
            positive = inputs.positive(rows, at, block)
            if block is None:
                image_sums.add(rows, logits, positive, pseudo)
                columns.add(at, logits.T, _transposed(positive), _transposed(pseudo))
                continue
            if pseudo is not None:
                block.diagonal(pseudo).copy_(pseudo_partners[part_of(rows, block.queries)])
            image_sums.add(rows, logits, positive, pseudo, block)
            columns.add(at, logits.T, _transposed(positive), _transposed(pseudo), block.T)
    # images have met all candidates here, columns only the images of this process
    columns.combine()
    text_sums = columns.take(local)
    loss = (image_sums.losses().mean() + text_sums.losses().mean()) / 2
    return loss, _WalkSums(partners, pseudo_partners, image_sums, text_sums, columns)


@dataclass(frozen=True)
class _Backward:
    # What the three passes of the second walk share.
    # comparison: with scalars that start a graph. scalars: these, and their gradients so far. multipliers: from them.
    # unit, of_operands: factors of all residuals, left to the end. local_weight: of this process's rows, without unit.
    # needed: which gradients: images, texts, scalars.

    inputs: _Inputs
    sums: _WalkSums
    comparison: Comparison
    scalars: list[tuple[torch.Tensor, torch.Tensor]]
    multipliers: Side
    unit: torch.Tensor
    of_operands: torch.Tensor
    local_weight: torch.Tensor
    needed: tuple[bool, ...]

    def trained_operands(
        self, embeddings: torch.Tensor, is_text: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        # embeddings as the start of a graph
        leaf = at_least_float32(embeddings).detach().requires_grad_(self.needed[is_text])
        with torch.enable_grad():
            return leaf, self.comparison.operands(leaf, is_text)

    def zeros(self, embeddings: torch.Tensor, is_text: bool) -> tuple[torch.Tensor, ...] | None:
        # for the gradients of all operands; None if nothing that trains leads to them
        _, first = self.trained_operands(embeddings[:1], is_text)
        if require_gradients(first):
            return tuple(operand.new_zeros(len(embeddings), *operand.shape[1:]) for operand in first)
        return None


def _second_walk(
    inputs: _Inputs, sums: _WalkSums, gradient: torch.Tensor, needed: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    # Returns the gradients of images, texts, logit scale and the geometry's parameters, where `needed`.
    # Weights of each process's rows and columns. Tiles take their logarithms, so sign and size are left to the end: the
    # weights are 1 where all processes have the same, and no logarithm is rounded.
    weights = gather_without_gradient(gradient[None]) / (2 * inputs.batch)
    unit = weights.take(weights.abs().argmax())  # an index would wait for the device
    weights = weights / torch.where(unit == 0, 1, unit)
    # the same scalars as starts of a graph, which leads to operands and multipliers
    leaves = tuple(scalar.clone().requires_grad_(needs) for scalar, needs in zip(inputs.comparison.scalars, needed[2:]))
    scalars = [(leaf, torch.zeros_like(leaf, dtype=torch.float64)) for leaf in leaves]
    comparison = replace(inputs.comparison, scalars=leaves)
    with torch.enable_grad():
        scales = comparison.multipliers()
    multipliers = Side.of(scales, require_gradients(scales), torch.float64)
    factor = comparison.operand_factor()
    of_operands = unit if factor is None else unit * factor
    walk = _Backward(
        inputs, sums, comparison, scalars, multipliers, unit, of_operands, weights[rank()], needed
    )  # fmt: skip

    images = Side(inputs.side(inputs.images, is_text=False).values, walk.zeros(inputs.images, is_text=False))
    text_gradients = walk.zeros(inputs.texts, is_text=True)
    partner_residuals = _pull_back_tiles(walk, images, text_gradients, weights)
    _pull_back_queue(walk, images, text_gradients)
    sides = ((inputs.images, images.gradients), (inputs.texts, text_gradients))
    _pull_back_operands(walk, sides, partner_residuals)
    add_gradients_(zip(scales, (unit * total for total in multipliers.gradients or ())), scalars)

    totals = [gradients and gradients[0].view_as(side).to(side.dtype) for side, gradients in sides]
    totals += [total.to(leaf.dtype) for leaf, total in scalars]
    return [total if needs else None for total, needs in zip(totals, needed)]


def _pull_back_tiles(
    walk: _Backward, images: Side, text_gradients: tuple[torch.Tensor, ...] | None, weights: torch.Tensor
) -> torch.Tensor:
    # Adds the gradients of all pairs but the partners to those of the operands, and returns the partners' residuals.
    inputs, sums, comparison = walk.inputs, walk.sums, walk.comparison
    partner_residuals = torch.zeros_like(sums.partners)
    everything = slice(0, inputs.batch)
    if inputs.has_kernel:
        for side in (sums.images, sums.texts):
            partner_residuals += walk.local_weight * side.partner_residuals(everything, None)
    for tile_texts in inputs.column_tiles():
        texts, text_keys = (inputs.received(side, tile_texts) for side in (inputs.texts, inputs.text_keys))
        if world_size() == 1:
            texts = Side(texts.values, text_gradients and tuple(total[tile_texts] for total in text_gradients))
        else:
            texts = Side.of(texts.values, text_gradients is not None, text_gradients and text_gradients[0].dtype)
        at = slice(world_size() * tile_texts.start, world_size() * tile_texts.stop)
        column_weights = weights[:, None].expand(-1, tile_texts.stop - tile_texts.start).flatten()
        of_columns = Direction(sums.columns, at, column_weights, axis=1)
        tiles = inputs.tiles(tile_texts)
        if inputs.has_kernel:
            of_rows = Direction(sums.images, everything, walk.local_weight)
            comparison.pull_back(images, texts, walk.multipliers, tiles, of_rows.shifts(), of_columns.shifts())
            tiles = []
        for rows, block in tiles:
            tile = comparison.compare(images[rows], texts, walk.multipliers)
            pseudo = inputs.pseudo_logits(rows, text_keys)
            partners = slice(0) if block is None else part_of(rows, block.queries)
            tile_residuals = residuals(
                tile,
                (Direction(sums.images, rows, walk.local_weight), of_columns),
                inputs.positive(rows, at, block),
                pseudo,
                None if pseudo is None else sums.pseudo_partners[partners],
                block,
            )
            if block is not None and not comparison.takes_partners:
                diagonal = block.diagonal(tile_residuals)
                partner_residuals[partners] = diagonal
                diagonal.zero_()
            tile.pull_back(tile_residuals)
        if world_size() > 1:  # every process gets what all have computed for its columns
            for total, part in zip(text_gradients or (), texts.gradients or ()):
                total[tile_texts] = _scattered_sum(part)
    return partner_residuals


def _pull_back_queue(walk: _Backward, images: Side, text_gradients: tuple[torch.Tensor, ...] | None) -> None:
    # Rows of the queue are constants: only this process's queries and the scalars have a gradient.
    inputs, sums = walk.inputs, walk.sums
    for is_text, cols, embeddings in inputs.queue_tiles():
        with torch.enable_grad():
            operands = walk.comparison.operands(embeddings, not is_text)
        candidates = Side.of(operands, require_gradients(operands))
        for rows in inputs.ranges(inputs.batch):
            values = inputs.side(inputs.texts[rows], is_text).values if is_text else images[rows].values
            gradients = text_gradients if is_text else images.gradients
            queries = Side(values, gradients and tuple(part[rows] for part in gradients))
            tile = walk.comparison.compare_queries(is_text, queries, candidates, walk.multipliers)
            direction = Direction(sums.texts if is_text else sums.images, rows, walk.local_weight)
            pseudo = inputs.pseudo_logits(rows, Side(candidates.values), is_text)
            positive = inputs.queue_positives(rows, cols)
            tile.pull_back(residuals(tile, [direction], positive, pseudo))
        of_candidates = [walk.of_operands * gradient for gradient in candidates.gradients or ()]
        add_gradients_(zip(operands, of_candidates), walk.scalars)


def _pull_back_operands(
    walk: _Backward,
    sides: tuple[tuple[torch.Tensor, tuple[torch.Tensor, ...] | None], ...],
    partner_residuals: torch.Tensor,
) -> None:
    # Through the operands to embeddings and scalars, and for the partners through `paired_similarity`, whose value
    # stands on the diagonal. The first operand's gradient makes room for that of the embeddings.
    if walk.comparison.takes_partners:
        for is_text, (embeddings, gradients) in enumerate(sides):
            if gradients is not None:
                walk.comparison.pull_back_operands_(
                    embeddings, bool(is_text), gradients[0], walk.of_operands, walk.scalars
                )
        return
    for rows in walk.inputs.ranges(walk.inputs.batch):
        (x, x_operands), (y, y_operands) = (
            walk.trained_operands(embeddings[rows], bool(is_text)) for is_text, (embeddings, _) in enumerate(sides)
        )
        with torch.enable_grad():
            outputs = [(walk.comparison.paired_logits(x, y), walk.unit * partner_residuals[rows])]
        for operands, (_, gradients) in zip((x_operands, y_operands), sides):
            outputs += zip(operands, (walk.of_operands * gradient[rows] for gradient in gradients or ()))
        parts = gradients_by(outputs, [x, y, *(leaf for leaf, _ in walk.scalars)])
        for part, (_, gradients) in zip(parts, sides):
            if part is not None:  # both have the size of the embeddings
                gradients[0][rows] = part.view_as(gradients[0][rows])
        add_to_totals(parts[2:], walk.scalars)


def _transposed(matrix: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrix is None else matrix.T


def _scattered_sum(rows: torch.Tensor) -> torch.Tensor:
    # this process's share of the sum over processes of rows that come in rank order
    parts = list(rows.chunk(world_size()))
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts)
    return total
