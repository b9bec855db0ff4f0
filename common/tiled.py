"""InfoNCE without the B x B matrix: any geometry, any batch, any number of processes, exact gradients.

The matrix of logits is walked in tiles. One walk gives the log-sum-exp of rows and of columns together; the backward
pass walks again, forms each tile once more and hands its part of the gradient to autograd:
    products        2 B^2 d forward, 2 B^2 d to form the tiles again, 4 B^2 d for both gradients: 8 B^2 d in all
                    (with distillation the keys' tiles too, twice: 12 B^2 d)
    memory          embeddings, their gradients, some vectors of length B, some matrices of one tile
Partners are compared by the geometry's `paired_similarity`, which keeps the digits of close pairs, and all others by
its `similarity`. The partners' values are written over the diagonal.

With W processes each has its rows and walks them against the columns of all, which arrive one tile at a time: no
process holds more than its share, its gradient and a tile. Column sums are combined over processes, and the gradient of
a tile's columns is summed on the process that has them.

With several processes the gradients of scalars (logit scale, curvature) agree with those of `contrastive_loss` after
averaging over processes, as DDP and FSDP2 do it, and not before: here a process adds up the tiles of its rows, there
its rows and its columns. A loop without DDP must average them itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from common.distributed import gather_without_gradient, rank, whole, world_size
from common.geometry import Geometry, at_least_float32, check_same_dim, full_precision, one_matrix
from common.info_nce import Distillation, QueuedPairs, check_geometry, check_pairs, contrastive_loss
from common.query_sums import QuerySums

TILE = 512  # rows and columns: on a CPU a tile stays in the cache; a GPU wants 4096 or more


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
) -> torch.Tensor:
    """InfoNCE as training calls it: `contrastive_loss` at once (tile 0) or in tiles of that many rows.

    Raises:
        ValueError: as `tiled_contrastive_loss`; bf16_product without tiles.
    """
    if tile or bf16_product:
        return tiled_contrastive_loss(
            image_embeddings, text_embeddings, geometry, logit_scale, ids, queue, distillation, tile, bf16_product
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
) -> torch.Tensor:
    """The value and the gradients of `contrastive_loss`, in memory that grows with B and not with B^2.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process; half precision is
            exchanged as it is and compared in float32.
        geometry: a module; its parameters get their gradients, averaged over processes those of the global batch.
        logit_scale: scalar tensor, the multiplier.
        ids, queue, distillation: as in `contrastive_loss`.
        tile: rows and columns of a tile, at least 1.
        bf16_product: for geometries that are an inner product: multiply in bfloat16, forward and backward, and add in
            float32. An inner product of unit vectors is then off by up to 0.004, a gradient by some parts in a
            thousand; partners are still compared in float32. Faster on CUDA only.
    Returns:
        Scalar in nats: this process's share of the global loss.
    Raises:
        ValueError: a tile below 1, bf16_product for another geometry, a geometry of two matrices, shapes that do not
            fit.
    """
    check_geometry(geometry)
    check_pairs(image_embeddings, text_embeddings, ids, queue, distillation)
    if tile < 1:
        raise ValueError(f"tile = {tile}; accepted: at least 1")
    if bf16_product and not geometry.is_inner_product:
        raise ValueError(
            f"bf16_product (optim.loss_bf16_product) is for an inner product, as sphere and oblique are; got "
            f"{geometry.name}"
        )
    with torch.no_grad():
        one_pair = geometry.directions(image_embeddings[:1], text_embeddings[:1])
    if not one_matrix(one_pair):
        raise ValueError(
            f"tile = {tile} (optim.loss_tile) with geometry {geometry.name}, which has two matrices; accepted: 0"
        )
    scalars = {name: whole(parameter) for name, parameter in geometry.named_parameters()}
    alpha = 0.0 if distillation is None else distillation.alpha
    inputs = _Inputs(
        images=image_embeddings.detach(),
        texts=text_embeddings.detach(),
        logit_scale=logit_scale.detach(),
        comparisons=_Comparisons(geometry),
        scalars={f"geometry.{name}": value.detach() for name, value in scalars.items()},
        ids=ids,
        all_ids=None if ids is None else gather_without_gradient(ids),
        queue=queue,
        alpha=alpha,
        image_keys=distillation.image_keys.detach() if alpha else None,  # with alpha 0 no target follows the keys
        text_keys=distillation.text_keys.detach() if alpha else None,
        tile=tile,
        bf16_product=bf16_product,
    )
    return _TiledContrastiveLoss.apply(inputs, image_embeddings, text_embeddings, logit_scale, *scalars.values())


class _TiledContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, *differentiable):
        ctx.inputs = inputs
        ctx.save_for_backward(*differentiable, *(inputs.queue or ()))  # the second walk reads the queue again
        loss, ctx.sums = _first_walk(inputs)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph: parts of a second derivative would be missing
            raise RuntimeError("the tiled loss has first derivatives only; use contrastive_loss for a second one")
        _ = ctx.saved_tensors  # raises if one of them was changed in place since the forward pass
        return (None, *_second_walk(ctx.inputs, ctx.sums, gradient, ctx.needs_input_grad[1:]))


class _Comparisons(nn.Module):
    """A geometry's functions in the form whose parameters `functional_call` can replace by given tensors."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(self, images: torch.Tensor, texts: torch.Tensor, paired: bool) -> torch.Tensor:
        return self.geometry.paired_similarity(images, texts) if paired else self.geometry.similarity(images, texts)


@dataclass(frozen=True)
class _Inputs:
    """What both walks read of this process's rows; all tensors without gradient.

    scalars: the geometry's parameters, by the names that `functional_call` takes.
    ids, all_ids: (batch,) of the rows, and of the columns of all processes.
    image_keys, text_keys: of the momentum model; None where alpha is 0.
    """

    images: torch.Tensor
    texts: torch.Tensor
    logit_scale: torch.Tensor
    comparisons: _Comparisons
    scalars: dict[str, torch.Tensor]
    ids: torch.Tensor | None
    all_ids: torch.Tensor | None
    queue: QueuedPairs | None
    alpha: float
    image_keys: torch.Tensor | None
    text_keys: torch.Tensor | None
    tile: int
    bf16_product: bool

    @property
    def batch(self) -> int:
        return len(self.images)

    def logits(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Of all pairs."""
        if self.bf16_product:
            return self.logit_scale * _bf16_inner_products(images, texts)
        return self.logit_scale * functional_call(self.comparisons, self.scalars, (images, texts, False))

    def paired_logits(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Of row k of both."""
        return self.logit_scale * functional_call(self.comparisons, self.scalars, (images, texts, True))

    def queue_logits(self, side: int, queries: torch.Tensor, cols: slice) -> torch.Tensor:
        """(queries, rows of the queue), of image queries (side 0) or text queries (side 1)."""
        if side == 0:
            return self.logits(queries, self.queue.text_embeddings[cols].detach())
        return self.logits(self.queue.image_embeddings[cols].detach(), queries).T

    def same_id(self, rows: slice, ids: torch.Tensor) -> torch.Tensor:
        """(rows, candidates) bool; a negative id equals no other."""
        return (self.ids[rows, None] == ids) & (self.ids[rows, None] >= 0)

    def ranges(self, length: int) -> list[slice]:
        return [slice(start, min(start + self.tile, length)) for start in range(0, length, self.tile)]

    def column_tiles(self) -> Iterator[tuple[int, slice]]:
        """(source, its texts) of every process in turn; all processes are at the same tile."""
        return ((source, cols) for source in range(world_size()) for cols in self.ranges(self.batch))

    def columns_of(self, source: int, cols: slice) -> slice:
        """Where a process's columns are among those of all."""
        return slice(source * self.batch + cols.start, source * self.batch + cols.stop)

    def queue_tiles(self) -> Iterator[tuple[int, slice, slice, torch.Tensor | None, torch.Tensor | None]]:
        """(side, its rows, rows of the queue, which are positives, pseudo-logits) of every tile."""
        for cols in [] if self.queue is None else self.ranges(len(self.queue.ids)):
            for rows in self.ranges(self.batch):
                positive = None if self.ids is None else self.same_id(rows, self.queue.ids[cols])
                for side, keys in enumerate((self.image_keys, self.text_keys)):
                    pseudo = None if keys is None else self.queue_logits(side, keys[rows], cols)
                    yield side, rows, cols, positive, pseudo


@dataclass(frozen=True)
class _WalkSums:
    """What the first walk leaves for the second.

    partners, pseudo_partners: (batch,) logits of this process's pairs, and of their keys (None without distillation).
    rows, columns: of this process's images, and of the texts of all processes.
    """

    partners: torch.Tensor
    pseudo_partners: torch.Tensor | None
    rows: QuerySums
    columns: QuerySums

    @classmethod
    def empty(cls, inputs: _Inputs) -> "_WalkSums":
        """The partners are compared, nothing is added up yet."""

        def compared(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
            return torch.cat([inputs.paired_logits(images[rows], texts[rows]) for rows in inputs.ranges(inputs.batch)])

        partners = compared(inputs.images, inputs.texts)
        pseudo = None if inputs.image_keys is None else compared(inputs.image_keys, inputs.text_keys)
        columns = QuerySums(gather_without_gradient(partners), inputs.alpha)
        return cls(partners, pseudo, QuerySums(partners, inputs.alpha), columns)

    def of_side(self, side: int, rows: slice, inputs: _Inputs) -> tuple[QuerySums, slice]:
        """Where this process's images (side 0) and texts (side 1) are summed."""
        return (self.rows, rows) if side == 0 else (self.columns, inputs.columns_of(rank(), rows))


def _first_walk(inputs: _Inputs) -> tuple[torch.Tensor, _WalkSums]:
    """The loss, and the sums from which the second walk forms residuals."""
    sums = _WalkSums.empty(inputs)
    for source, cols in inputs.column_tiles():
        texts, text_keys = _received(inputs.texts, cols, source), _received(inputs.text_keys, cols, source)
        at = inputs.columns_of(source, cols)
        for rows in inputs.ranges(inputs.batch):
            logits = inputs.logits(inputs.images[rows], texts)
            positive, pseudo, on_diagonal = _complete_(logits, inputs, sums, text_keys, rows, cols, source)
            sums.rows.add(rows, logits, positive, pseudo, on_diagonal)
            sums.columns.add(at, logits.T, _transposed(positive), _transposed(pseudo), on_diagonal)
    for side, rows, cols, positive, pseudo in inputs.queue_tiles():
        side_sums, at = sums.of_side(side, rows, inputs)
        side_sums.add(at, inputs.queue_logits(side, (inputs.images, inputs.texts)[side][rows], cols), positive, pseudo)
    # rows have met all candidates here, columns only the rows of this process
    sums.columns.combine()
    everything = slice(0, inputs.batch)
    sides = [side_sums.losses(at).mean() for side_sums, at in (sums.of_side(k, everything, inputs) for k in (0, 1))]
    return sum(sides) / 2, sums


def _second_walk(
    inputs: _Inputs, sums: _WalkSums, gradient: torch.Tensor, needed: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Gradients of images, texts, logit scale and the geometry's parameters, where `needed`."""
    weights = gather_without_gradient(gradient[None]) / (2 * inputs.batch)  # of each process's rows and columns
    local_weight = weights[rank()]
    inputs = replace(
        inputs,
        logit_scale=inputs.logit_scale.clone().requires_grad_(needed[2]),
        scalars={
            name: value.clone().requires_grad_(needs)
            for (name, value), needs in zip(inputs.scalars.items(), needed[3:])
        },
    )
    scalars = [(leaf, torch.zeros_like(leaf)) for leaf in (inputs.logit_scale, *inputs.scalars.values())]
    image_gradient, text_gradient = (
        at_least_float32(side[:0]).new_zeros(side.shape) for side in (inputs.images, inputs.texts)
    )
    partner_residuals = torch.zeros_like(sums.partners)

    for source, cols in inputs.column_tiles():
        texts, text_keys = _received(inputs.texts, cols, source), _received(inputs.text_keys, cols, source)
        at, y = inputs.columns_of(source, cols), _leaf(texts, needed[1])
        y_gradient = torch.zeros_like(y)
        for rows in inputs.ranges(inputs.batch):
            x = _leaf(inputs.images[rows], needed[0])
            with torch.enable_grad():
                logits = inputs.logits(x, y)
            values = logits.detach()  # a product keeps its factors for the backward pass, not itself
            positive, pseudo, on_diagonal = _complete_(values, inputs, sums, text_keys, rows, cols, source)
            residuals = sums.rows.residuals(rows, values, positive, pseudo, on_diagonal).mul_(local_weight)
            turned = values.T, _transposed(positive), _transposed(pseudo)
            residuals += sums.columns.residuals(at, *turned, on_diagonal).T.mul_(weights[source])
            if on_diagonal:
                partner_residuals[rows] = residuals.diagonal()
                residuals.fill_diagonal_(0.0)
            _add_gradients_(logits, residuals, [(x, image_gradient[rows]), (y, y_gradient), *scalars])
        # a tile's columns belong to its source, which adds what all processes computed for them
        if world_size() > 1:
            dist.reduce(y_gradient, source)
        if source == rank():
            text_gradient[cols] += y_gradient

    # the partners' part goes through `paired_similarity`, whose value stands on the diagonal
    for rows in inputs.ranges(inputs.batch):
        x, y = _leaf(inputs.images[rows], needed[0]), _leaf(inputs.texts[rows], needed[1])
        with torch.enable_grad():
            partners = inputs.paired_logits(x, y)
        pairs = [(x, image_gradient[rows]), (y, text_gradient[rows]), *scalars]
        _add_gradients_(partners, partner_residuals[rows], pairs)

    # rows of the queue are constants: only this process's queries and the scalars have a gradient
    for side, rows, cols, positive, pseudo in inputs.queue_tiles():
        side_sums, at = sums.of_side(side, rows, inputs)
        x = _leaf((inputs.images, inputs.texts)[side][rows], needed[side])
        with torch.enable_grad():
            logits = inputs.queue_logits(side, x, cols)
        residuals = side_sums.residuals(at, logits.detach(), positive, pseudo).mul_(local_weight)
        _add_gradients_(logits, residuals, [(x, (image_gradient, text_gradient)[side][rows]), *scalars])

    gradients = [image_gradient.to(inputs.images.dtype), text_gradient.to(inputs.texts.dtype)]
    gradients += [total for _, total in scalars]
    return [total if needs else None for total, needs in zip(gradients, needed)]


def _add_gradients_(
    logits: torch.Tensor, residuals: torch.Tensor, leaves: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Adds the gradient of sum(logits * residuals) by every leaf to the total beside it."""
    if logits.requires_grad:
        trained = [(leaf, total) for leaf, total in leaves if leaf.requires_grad]
        parts = torch.autograd.grad(logits, [leaf for leaf, _ in trained], residuals, allow_unused=True)
        for (_, total), part in zip(trained, parts):
            if part is not None:
                total += part


def _complete_(
    logits: torch.Tensor,
    inputs: _Inputs,
    sums: _WalkSums,
    text_keys: torch.Tensor | None,
    rows: slice,
    cols: slice,
    source: int,
) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """Which entries of a tile are positives, its pseudo-logits, and whether it is on the diagonal.

    If so, the partners' logits and pseudo-logits are written there.
    """
    on_diagonal = source == rank() and rows == cols
    positive = pseudo = None
    if inputs.ids is not None:
        positive = inputs.same_id(rows, inputs.all_ids[inputs.columns_of(source, cols)])
    elif on_diagonal:
        positive = torch.zeros_like(logits, dtype=torch.bool)
    if text_keys is not None:
        pseudo = inputs.logits(inputs.image_keys[rows], text_keys)
    if on_diagonal:
        positive.fill_diagonal_(True)
        logits.diagonal().copy_(sums.partners[rows])
        if pseudo is not None:
            pseudo.diagonal().copy_(sums.pseudo_partners[rows])
    return positive, pseudo, on_diagonal


def _leaf(tensor: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    """The same numbers, float32 or better, as the start of a graph if they need a gradient."""
    return at_least_float32(tensor).detach().requires_grad_(needs_gradient)


def _transposed(matrix: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrix is None else matrix.T


def _received(tensor: torch.Tensor | None, rows: slice, source: int) -> torch.Tensor | None:
    """Some rows of the source's tensor, on every process; None stays None."""
    if tensor is None or world_size() == 1:
        return None if tensor is None else tensor[rows]
    received = tensor[rows].contiguous() if source == rank() else tensor[rows].new_empty(tensor[rows].shape)
    dist.broadcast(received, source)
    return received


class _Bf16Product(torch.autograd.Function):
    """x @ y.T with factors in bfloat16 and sums in float32; so are both gradients."""

    @staticmethod
    def forward(ctx, x, y):
        x, y = x.bfloat16(), y.bfloat16()
        ctx.save_for_backward(x, y)
        return _bf16_matmul(x, y.T)

    @staticmethod
    def backward(ctx, gradient):
        (x, y), gradient = ctx.saved_tensors, gradient.bfloat16()
        return _bf16_matmul(gradient, y), _bf16_matmul(gradient.T, x)


def _bf16_matmul(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    with full_precision(first):
        if first.device.type == "cuda":
            return torch.mm(first, second, out_dtype=torch.float32)
        return first.float() @ second.float()  # the same: float32 holds products of bfloat16 exactly


def _bf16_inner_products(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """inner_product_similarity of flattened embeddings, by bfloat16 factors."""
    check_same_dim(images, texts)
    return _Bf16Product.apply(images.flatten(1), texts.flatten(1))
