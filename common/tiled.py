"""InfoNCE without the B x B matrix: any geometry, any batch, any number of processes, exact gradients.

The matrix of logits is walked in tiles. One walk gives the log-sum-exp of rows and of columns together; the backward
pass walks again, forms each tile once more and hands its part of the gradient to autograd:
    products        2 B^2 d forward, 2 B^2 d to form the tiles again, 4 B^2 d for both gradients: 8 B^2 d in all
                    (with distillation the keys' tiles too, twice: 12 B^2 d)
    memory          embeddings, their gradients, some vectors of length B, some matrices of one tile
Partners are compared by the geometry's `paired_similarity`, which keeps the digits of close pairs, all others by its
`similarity`: the partners' values are written over the diagonal.

With W processes each owns its rows and walks them against the columns of all, which arrive one tile at a time: no
process holds more than its share, its gradient and a tile. Column sums are put together over processes, a tile's column
gradient is summed where its columns belong.

With several processes the gradients of scalars (logit scale, curvature) agree with those of `contrastive_loss` after
averaging over processes, as DDP and FSDP2 do it, and not before: here a process adds up the tiles of its rows, there
its rows and its columns. Who does not average them (a loop without DDP) has to.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from common.distributed import gather_without_gradient, rank, whole, world_size
from common.geometry import Geometry, at_least_float32, check_same_dim, full_precision, one_matrix
from common.info_nce import Distillation, QueuedPairs, check_geometry, check_pairs, contrastive_loss

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
            thousand; partners are still compared in float32. Faster on CUDA alone.
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
    inputs = image_embeddings, text_embeddings, logit_scale, *scalars.values()
    walk = _Walk(*inputs[:3], geometry, scalars, ids, queue, distillation, tile, bf16_product)
    return _TiledContrastiveLoss.apply(walk, *inputs)


class _TiledContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, walk, *inputs):
        ctx.walk = walk
        ctx.save_for_backward(*inputs, *(walk.queue or ()))  # the backward walk reads the queue again
        return walk.forward()

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph: parts of a second derivative would be missing
            raise RuntimeError("the tiled loss has first derivatives only; use contrastive_loss for a second one")
        _ = ctx.saved_tensors  # raises if one of them was changed in place since the forward pass
        return (None, *ctx.walk.backward(gradient, ctx.needs_input_grad[1:]))


class _Comparisons(nn.Module):
    """A geometry's functions in the form whose parameters `functional_call` can replace by given tensors."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(self, images: torch.Tensor, texts: torch.Tensor, paired: bool) -> torch.Tensor:
        return self.geometry.paired_similarity(images, texts) if paired else self.geometry.similarity(images, texts)


class _Sums:
    """What InfoNCE needs to know of every query, added up over its candidates tile by tile.

    All is relative to the partner's logit l: where it dominates, 1 - p and log sum exp - l would be what two rounded
    numbers leave of each other.
        others      log sum exp of all logits but the partner's
        hard, count sum of the positives' logits minus l, and their number
        pseudo_lse  log sum exp of the pseudo-logits
        soft        mean of the logits minus l under the softmax of the pseudo-logits

    Args:
        partners: (queries,) logits; of this process's rows, or of the columns of all processes.
        alpha: target mass that follows the pseudo-logits.
    """

    def __init__(self, partners: torch.Tensor, alpha: float) -> None:
        self.partners, self.alpha = partners, alpha
        self.others, self.pseudo_lse = (torch.full_like(partners, -torch.inf) for _ in range(2))
        self.hard, self.count, self.soft = (torch.zeros_like(partners) for _ in range(3))

    def add(
        self,
        at: slice,
        logits: torch.Tensor,
        positive: torch.Tensor | None,
        pseudo: torch.Tensor | None,
        on_diagonal: bool = False,
    ) -> None:
        """Adds candidates of the queries `at`.

        Args:
            at: which queries.
            logits: (queries, candidates).
            positive: likewise, bool; None = none of them is one.
            pseudo: likewise, pseudo-logits; None without distillation.
            on_diagonal: the tile is square and its diagonal holds the partners.
        """
        others = logits.clone().fill_diagonal_(-torch.inf) if on_diagonal else logits
        self.others[at] = torch.logaddexp(self.others[at], others.logsumexp(dim=1))
        if positive is not None:
            self.hard[at] += torch.where(positive, logits - self.partners[at, None], 0.0).sum(dim=1)
            self.count[at] += positive.sum(dim=1)
        if pseudo is not None:
            before = self.pseudo_lse[at].clone()
            self.pseudo_lse[at] = torch.logaddexp(before, pseudo.logsumexp(dim=1))
            mass = (pseudo - self.pseudo_lse[at, None]).exp_()
            self.soft[at] *= (before - self.pseudo_lse[at]).exp()
            self.soft[at] += (logits - self.partners[at, None]).mul_(mass).sum(dim=1)

    def combine(self) -> None:
        """Puts together what all processes added to the same queries."""
        if world_size() == 1:
            return
        self.others = _logsumexp_over_processes(self.others)
        if self.alpha:
            before, self.pseudo_lse = self.pseudo_lse, _logsumexp_over_processes(self.pseudo_lse)
            self.soft *= (before - self.pseudo_lse).exp()
        for total in (self.hard, self.count, self.soft):
            dist.all_reduce(total)

    def losses(self, at: slice) -> torch.Tensor:
        """(queries,): log sum exp minus the mean logit under the targets."""
        lse = torch.logaddexp(self.others[at] - self.partners[at], torch.zeros_like(self.partners[at]))
        return lse - (1 - self.alpha) * self.hard[at] / self.count[at] - self.alpha * self.soft[at]

    def residuals(
        self,
        at: slice,
        logits: torch.Tensor,
        positive: torch.Tensor | None,
        pseudo: torch.Tensor | None,
        on_diagonal: bool = False,
    ) -> torch.Tensor:
        """Softmax minus targets, the gradient of `losses` by the logits that were given to `add`; its arguments."""
        lse = torch.logaddexp(self.others[at], self.partners[at])
        found = (logits - lse[:, None]).exp_()
        if positive is not None:
            found -= positive * ((1 - self.alpha) / self.count[at, None])
        if pseudo is not None:
            soft = (pseudo - self.pseudo_lse[at, None]).exp_().mul_(self.alpha)
            found -= soft
        if on_diagonal:
            missing = 1 - (1 - self.alpha) / self.count[at] - (0.0 if pseudo is None else soft.diagonal())
            found.diagonal().copy_(missing - torch.sigmoid(self.others[at] - self.partners[at]))
        return found


class _Walk:
    """This process's rows against all columns, twice: for the loss, and for its gradients.

    Args: of `tiled_contrastive_loss`; scalars are the values of the geometry's parameters by name.
    """

    def __init__(
        self,
        images: torch.Tensor,
        texts: torch.Tensor,
        logit_scale: torch.Tensor,
        geometry: Geometry,
        scalars: dict[str, torch.Tensor],
        ids: torch.Tensor | None,
        queue: QueuedPairs | None,
        distillation: Distillation | None,
        tile: int,
        bf16_product: bool,
    ) -> None:
        self.images, self.texts, self.logit_scale = images.detach(), texts.detach(), logit_scale.detach()
        self.comparisons = _Comparisons(geometry)
        self.scalars = {f"geometry.{name}": value.detach() for name, value in scalars.items()}
        self.bf16_product = bf16_product
        self.ids, self.all_ids = ids, None if ids is None else gather_without_gradient(ids)
        self.queue, self.tile = queue, tile
        self.alpha = 0.0 if distillation is None else distillation.alpha
        if self.alpha:
            self.image_keys, self.text_keys = distillation.image_keys.detach(), distillation.text_keys.detach()
        else:  # nothing follows the keys
            self.image_keys = self.text_keys = None
        self.batch = len(images)
        self.rows = self.columns = None  # _Sums of this process's rows and of all columns, from the first walk

    def forward(self) -> torch.Tensor:
        """The loss; keeps the sums that the second walk needs."""
        self._compare_partners()
        self.rows = _Sums(self.partners, self.alpha)
        self.columns = _Sums(gather_without_gradient(self.partners), self.alpha)
        for source, cols in self._column_tiles():
            texts, text_keys = _received(self.texts, cols, source), _received(self.text_keys, cols, source)
            at = self._columns_of(source, cols)
            for rows in self._ranges(self.batch):
                logits = self.logit_scale * self._similarity(self.images[rows], texts)
                positive, pseudo, on_diagonal = self._complete(logits, text_keys, rows, cols, source)
                self.rows.add(rows, logits, positive, pseudo, on_diagonal)
                self.columns.add(at, logits.T, _transposed(positive), _transposed(pseudo), on_diagonal)
        for side, rows, cols, positive, pseudo in self._queue_tiles():
            sums, at = self._sums_of(side, rows)
            logits = self.logit_scale * self._against_queue(side, (self.images, self.texts)[side][rows], cols)
            sums.add(at, logits, positive, pseudo)
        self.columns.combine()
        sides = [sums.losses(at).mean() for sums, at in (self._sums_of(side, slice(0, self.batch)) for side in (0, 1))]
        return sum(sides) / 2

    def backward(self, gradient: torch.Tensor, needed: tuple[bool, ...]) -> list[torch.Tensor | None]:
        """Gradients of images, texts, logit scale and the geometry's parameters, where `needed`."""
        weights = gather_without_gradient(gradient[None]) / (2 * self.batch)  # of each process's rows and columns
        own = weights[rank()]
        scale = self.logit_scale.clone().requires_grad_(needed[2])
        for (name, value), wanted in zip(self.scalars.items(), needed[3:]):
            self.scalars[name] = value.clone().requires_grad_(wanted)
        scalars = [(scalar, torch.zeros_like(scalar)) for scalar in (scale, *self.scalars.values())]
        image_gradient, text_gradient = (
            at_least_float32(side[:0]).new_zeros(side.shape) for side in (self.images, self.texts)
        )
        partner_residuals = torch.zeros_like(self.partners)

        def add_gradients(logits: torch.Tensor, residuals: torch.Tensor, *leaves: tuple[torch.Tensor, torch.Tensor]):
            if logits.requires_grad:
                wanted = [pair for pair in (*leaves, *scalars) if pair[0].requires_grad]
                found = torch.autograd.grad(logits, [leaf for leaf, _ in wanted], residuals, allow_unused=True)
                for (_, total), part in zip(wanted, found):
                    if part is not None:
                        total += part

        for source, cols in self._column_tiles():
            texts, text_keys = _received(self.texts, cols, source), _received(self.text_keys, cols, source)
            at, y = self._columns_of(source, cols), _leaf(texts, needed[1])
            y_gradient = torch.zeros_like(y)
            for rows in self._ranges(self.batch):
                x = _leaf(self.images[rows], needed[0])
                with torch.enable_grad():
                    logits = scale * self._similarity(x, y)
                values = logits.detach()  # a product keeps its factors for the backward pass, not itself
                positive, pseudo, on_diagonal = self._complete(values, text_keys, rows, cols, source)
                residuals = self.rows.residuals(rows, values, positive, pseudo, on_diagonal).mul_(own)
                turned = values.T, _transposed(positive), _transposed(pseudo)
                residuals += self.columns.residuals(at, *turned, on_diagonal).T.mul_(weights[source])
                if on_diagonal:
                    partner_residuals[rows] = residuals.diagonal()
                    residuals.fill_diagonal_(0.0)
                add_gradients(logits, residuals, (x, image_gradient[rows]), (y, y_gradient))
            if world_size() > 1:
                dist.reduce(y_gradient, source)
            if source == rank():
                text_gradient[cols] += y_gradient

        for rows in self._ranges(self.batch):
            x, y = _leaf(self.images[rows], needed[0]), _leaf(self.texts[rows], needed[1])
            with torch.enable_grad():
                partners = scale * self._paired_similarity(x, y)
            add_gradients(partners, partner_residuals[rows], (x, image_gradient[rows]), (y, text_gradient[rows]))

        for side, rows, cols, positive, pseudo in self._queue_tiles():
            sums, at = self._sums_of(side, rows)
            x = _leaf((self.images, self.texts)[side][rows], needed[side])
            with torch.enable_grad():
                logits = scale * self._against_queue(side, x, cols)
            residuals = sums.residuals(at, logits.detach(), positive, pseudo).mul_(own)
            add_gradients(logits, residuals, (x, (image_gradient, text_gradient)[side][rows]))

        found = [image_gradient.to(self.images.dtype), text_gradient.to(self.texts.dtype)]
        found += [total for _, total in scalars]
        return [total if wanted else None for total, wanted in zip(found, needed)]

    # the tiles

    def _ranges(self, length: int) -> list[slice]:
        return [slice(start, min(start + self.tile, length)) for start in range(0, length, self.tile)]

    def _column_tiles(self) -> Iterator[tuple[int, slice]]:
        """(source, its texts) of every process in turn; all processes are at the same tile."""
        return ((source, cols) for source in range(world_size()) for cols in self._ranges(self.batch))

    def _columns_of(self, source: int, cols: slice) -> slice:
        """Where a process's columns are among those of all."""
        return slice(source * self.batch + cols.start, source * self.batch + cols.stop)

    def _sums_of(self, side: int, rows: slice) -> tuple[_Sums, slice]:
        """Where this process's images (side 0) and texts (side 1) are summed."""
        return (self.rows, rows) if side == 0 else (self.columns, self._columns_of(rank(), rows))

    def _queue_tiles(self) -> Iterator[tuple[int, slice, slice, torch.Tensor | None, torch.Tensor | None]]:
        """(side, its rows, rows of the queue, which are positives, pseudo-logits) of every tile."""
        for cols in [] if self.queue is None else self._ranges(len(self.queue.ids)):
            for rows in self._ranges(self.batch):
                positive = None if self.ids is None else self._same_id(rows, self.queue.ids[cols])
                for side, keys in enumerate((self.image_keys, self.text_keys)):
                    pseudo = None if keys is None else self.logit_scale * self._against_queue(side, keys[rows], cols)
                    yield side, rows, cols, positive, pseudo

    def _against_queue(self, side: int, queries: torch.Tensor, cols: slice) -> torch.Tensor:
        """(queries, rows of the queue)."""
        if side == 0:
            return self._similarity(queries, self.queue.text_embeddings[cols].detach())
        return self._similarity(self.queue.image_embeddings[cols].detach(), queries).T

    # what belongs to a tile

    def _similarity(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        if self.bf16_product:
            return _bf16_inner_products(images, texts)
        return functional_call(self.comparisons, self.scalars, (images, texts, False))

    def _paired_similarity(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return functional_call(self.comparisons, self.scalars, (images, texts, True))

    def _compare_partners(self) -> None:
        """(batch,) logits and pseudo-logits of the pairs."""

        def compared(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
            parts = [self._paired_similarity(images[rows], texts[rows]) for rows in self._ranges(self.batch)]
            return self.logit_scale * torch.cat(parts)

        self.partners = compared(self.images, self.texts)
        self.pseudo_partners = None if self.image_keys is None else compared(self.image_keys, self.text_keys)

    def _complete(
        self, logits: torch.Tensor, text_keys: torch.Tensor | None, rows: slice, cols: slice, source: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
        """Which entries of a tile are positives, its pseudo-logits, and whether it is on the diagonal.

        If so, the partners' logits and pseudo-logits are written there.
        """
        on_diagonal = source == rank() and rows == cols
        positive = pseudo = None
        if self.ids is not None:
            positive = self._same_id(rows, self.all_ids[self._columns_of(source, cols)])
        elif on_diagonal:
            positive = torch.zeros_like(logits, dtype=torch.bool)
        if text_keys is not None:
            pseudo = self.logit_scale * self._similarity(self.image_keys[rows], text_keys)
        if on_diagonal:
            positive.fill_diagonal_(True)
            logits.diagonal().copy_(self.partners[rows])
            if pseudo is not None:
                pseudo.diagonal().copy_(self.pseudo_partners[rows])
        return positive, pseudo, on_diagonal

    def _same_id(self, rows: slice, ids: torch.Tensor) -> torch.Tensor:
        """(rows, candidates) bool; a negative id equals no other."""
        return (self.ids[rows, None] == ids) & (self.ids[rows, None] >= 0)


def _leaf(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    """The same numbers, float32 or better, as the start of a graph if the gradient is wanted."""
    return at_least_float32(tensor).detach().requires_grad_(wanted)


def _transposed(matrix: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrix is None else matrix.T


def _received(own: torch.Tensor | None, rows: slice, source: int) -> torch.Tensor | None:
    """Some rows of the source's tensor, on every process; None stays None."""
    if own is None or world_size() == 1:
        return None if own is None else own[rows]
    received = own[rows].contiguous() if source == rank() else own[rows].new_empty(own[rows].shape)
    dist.broadcast(received, source)
    return received


def _logsumexp_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Element by element, of a vector that every process has."""
    top = values.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    total = (values - top).exp_()
    dist.all_reduce(total)
    return total.log_() + top


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
