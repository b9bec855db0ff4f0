"""How the tiled loss compares some rows with some columns: logits, and the gradients of what they are made of.

A tile is a function of operands, which cost O(d) an embedding. Inner products and every `ChordGeometry` have formulas;
all other geometries go through autograd in every tile.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call

from common.geometry import ChordGeometry, Geometry
from common.query_sums import Block
from common.vectors import at_least_float32

if TYPE_CHECKING:
    from common.triton_tiles import TileKernel

TILE = 512  # rows and columns: on a CPU a tile stays in the cache; a GPU wants 8192


@dataclass(frozen=True)
class Side:
    """Rows, columns or scalars that a tile is a function of, without graph.

    gradients: their sums over tiles, added in place; None = constants. Those of scalars are float64, as the terms of
        many tiles cancel in them.
    """

    values: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...] | None = None

    @classmethod
    def of(cls, values: Iterable[torch.Tensor], needs_gradient: bool, dtype: torch.dtype | None = None) -> "Side":
        """dtype: of the gradients; None = that of the values."""
        values = tuple(value.detach() for value in values)
        return cls(values, tuple(torch.zeros_like(value, dtype=dtype) for value in values) if needs_gradient else None)

    def __getitem__(self, rows: slice) -> "Side":
        gradients = None if self.gradients is None else tuple(gradient[rows] for gradient in self.gradients)
        return Side(tuple(value[rows] for value in self.values), gradients)


Tiles = Sequence[tuple[slice, Block | None]]  # rows that are compared at once, and where their partners are
_Pullback = Callable[[torch.Tensor], None]  # residuals of a tile -> None; adds to the gradients of its sides


@dataclass(frozen=True)
class Tile:
    """All pairs of some rows and columns.

    logits: gives them. add_to_: adds them to a matrix in place. The residuals of pull_back may be overwritten.
    """

    logits: Callable[[], torch.Tensor]
    add_to_: Callable[[torch.Tensor], torch.Tensor]
    pull_back: _Pullback

    @property
    def T(self) -> "Tile":  # as of a tensor
        return Tile(
            lambda: self.logits().T,
            lambda matrix: self.add_to_(matrix.T).T,
            lambda residuals: self.pull_back(residuals.T),
        )


class _Methods(nn.Module):
    # `functional_call` replaces the parameters of the geometry by other tensors

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(self, method: methodcaller) -> object:
        return method(self.geometry)


@dataclass(frozen=True)
class Comparison:
    """Through the geometry's `similarity`, with autograd in every tile.

    scalars: the logit scale, then the geometry's parameters, at which its methods are called.
    """

    methods: _Methods
    scalars: tuple[torch.Tensor, ...]

    def call(self, method: str, *arguments: torch.Tensor) -> object:
        names = [name for name, _ in self.methods.named_parameters()]
        return functional_call(self.methods, dict(zip(names, self.scalars[1:])), (methodcaller(method, *arguments),))

    def paired_logits(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Of row k of both; differentiable."""
        return self.scalars[0] * self.call("paired_similarity", images, texts)

    def operands(self, embeddings: torch.Tensor, is_text: bool) -> tuple[torch.Tensor, ...]:
        """What tiles are made of, each (batch, ...); differentiable."""
        return (at_least_float32(embeddings),)

    def stored(self, operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return operands

    def multipliers(self) -> tuple[torch.Tensor, ...]:
        """Scalars that act inside a tile; differentiable."""
        return self.scalars

    @property
    def takes_partners(self) -> bool:
        """Whether a tile's gradients are as good for partners as `paired_similarity`; then `pull_back_operands_`."""
        return False

    def operand_factor(self) -> torch.Tensor | None:
        """What the second walk multiplies the operands' gradients by, in place of every tile; None = 1."""
        return None

    def compare(self, x: Side, y: Side, multipliers: Side) -> Tile:
        """Of rows x and columns y."""
        sides = x, y, multipliers
        leaves = [
            [value.detach().requires_grad_(side.gradients is not None) for value in side.values] for side in sides
        ]
        (images,), (texts,), scalars = leaves
        with torch.enable_grad():
            logits = scalars[0] * replace(self, scalars=tuple(scalars)).call("similarity", images, texts)
        trained = [
            (leaf, total)
            for side, values in zip(sides, leaves)
            if side.gradients is not None
            for leaf, total in zip(values, side.gradients)
        ]
        values = logits.detach()
        return Tile(
            lambda: values,
            lambda matrix: matrix.add_(values),
            lambda residuals: add_gradients_([(logits, residuals)], trained),
        )

    def compare_queries(self, is_text: bool, queries: Side, candidates: Side, multipliers: Side) -> Tile:
        """(queries, candidates), of image queries against texts or text queries against images."""
        if is_text:
            return self.compare(candidates, queries, multipliers).T
        return self.compare(queries, candidates, multipliers)


@dataclass(frozen=True)
class OfProducts(Comparison, ABC):
    """Tiles that are functions of one matrix product; what lies between it and the gradients can be left to Triton.

    kernel: for `log_sums` and `pull_back`; None = `compare` alone.
    bf16: multiply in bfloat16, and add in float32.
    """

    kernel: "TileKernel | None"
    bf16: bool = False

    def products(self, x: Side, y: Side) -> torch.Tensor:
        # (rows, columns), of the first operands
        (vectors, *_), (other_vectors, *_) = x.values, y.values
        return (_bf16_matmul if self.bf16 else torch.mm)(vectors, other_vectors.T)

    @abstractmethod
    def add_products_(self, x: Side, y: Side, residuals: torch.Tensor) -> None:
        """Adds to the operands' gradients, from what the kernel calls residuals."""

    def log_sums(self, x: Side, y: Side, multipliers: Side, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
        """Log sum exp of all rows, and of columns over these rows, without partners."""
        parts = [
            self.kernel.log_sums(*self._of_kernel(x[rows], y, multipliers), block) for rows, block in tiles
        ]  # put together at once: each operation costs the host as much as a kernel takes
        of_rows, of_columns = zip(*parts)
        return torch.cat(of_rows, dim=1).logsumexp(0), torch.cat(of_columns).logsumexp(0)

    def pull_back(
        self, x: Side, y: Side, multipliers: Side, tiles: Tiles, row_shifts: torch.Tensor, column_shifts: torch.Tensor
    ) -> None:
        """Adds the gradients that exp(logits + shift) give, of rows and columns, without partners."""
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        for rows, block in tiles:
            shifts = row_shifts[rows], column_shifts
            residuals, of_multiplier = self.kernel.residuals(
                *self._of_kernel(x[rows], y, multipliers), shifts, block, dtype
            )
            for total in multipliers.gradients or ():
                total.add_(of_multiplier.sum(dtype=total.dtype))
            self.add_products_(x[rows], y, residuals)
            del residuals  # makes room for the next tile's products

    def _of_kernel(self, x: Side, y: Side, multipliers: Side) -> tuple:
        return self.products(x, y), (*x.values[1:], *y.values[1:]), multipliers.values


@dataclass(frozen=True)
class _InnerProducts(OfProducts):
    # logit_scale x . y; the scale multiplies the texts, and not the tile

    def operands(self, embeddings: torch.Tensor, is_text: bool) -> tuple[torch.Tensor, ...]:
        vectors = at_least_float32(embeddings).flatten(1)
        return (self.scalars[0] * vectors if is_text else vectors,)

    def stored(self, operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(operand.bfloat16() for operand in operands) if self.bf16 else operands

    def multipliers(self) -> tuple[torch.Tensor, ...]:
        return ()

    @property
    def takes_partners(self) -> bool:
        return not self.bf16 and self.kernel is None

    def pull_back_operands_(
        self,
        embeddings: torch.Tensor,
        is_text: bool,
        gradient: torch.Tensor,
        factor: torch.Tensor,
        scalars: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        # makes the operands' gradient, times the factor, that of the embeddings, and adds that of the logit scale
        if not is_text:
            gradient.mul_(factor)
            return
        for rows, part in zip(embeddings.split(TILE), gradient.split(TILE)):
            scalars[0][1].add_(
                factor * torch.linalg.vecdot(part, rows.flatten(1).to(part.dtype)).sum(dtype=torch.float64)
            )
        gradient.mul_(factor * self.scalars[0])

    def compare(self, x: Side, y: Side, multipliers: Side) -> Tile:
        return Tile(
            lambda: self.products(x, y),
            lambda matrix: self._add_product_(matrix, x.values[0], y.values[0].T),
            lambda residuals: self.add_products_(x, y, residuals),
        )

    def add_products_(self, x: Side, y: Side, residuals: torch.Tensor) -> None:
        residuals = residuals.bfloat16() if self.bf16 else residuals  # once for both products
        if x.gradients is not None:
            self._add_product_(x.gradients[0], residuals, y.values[0])
        if y.gradients is not None:
            self._add_product_(y.gradients[0], residuals.T, x.values[0])

    @property
    def _add_product_(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        return _bf16_addmm_ if self.bf16 else torch.Tensor.addmm_


@dataclass(frozen=True)
class _Chords(OfProducts):
    # scale * distance(q)

    @property
    def geometry(self) -> ChordGeometry:
        return self.methods.geometry

    def operands(self, embeddings: torch.Tensor, is_text: bool) -> tuple[torch.Tensor, ...]:
        return self.call("chord_factors", embeddings)

    def multipliers(self) -> tuple[torch.Tensor, ...]:
        return (-self.scalars[0] * self.call("distance_unit"),)

    def operand_factor(self) -> torch.Tensor:
        return self.multipliers()[0].detach()

    def compare(self, x: Side, y: Side, multipliers: Side) -> Tile:
        (vectors, offsets), (other_vectors, other_offsets), (scale,) = x.values, y.values, multipliers.values
        coupling = self.geometry.coupling
        needs_gradient = x.gradients is not None or y.gradients is not None
        if coupling:  # a + b (1 + coupling a); on a CPU addcmul of vectors takes three times as long
            chords = torch.outer(1 + coupling * offsets, other_offsets).add_(offsets[:, None])
        else:
            chords = torch.add(offsets[:, None], other_offsets)
        chords.addmm_(vectors, other_vectors.T, alpha=-1)
        distances, inverse_slopes = self.geometry.distance_of_chords(chords, needs_gradient)

        def pull_back(residuals: torch.Tensor) -> None:
            if multipliers.gradients is not None:
                # rows first: in float64 throughout it takes ten times as long
                multipliers.gradients[0].add_(distances.mul_(residuals).sum(1).sum(dtype=torch.float64))
            if needs_gradient:
                self.add_products_(x, y, residuals.div_(inverse_slopes))

        is_constant = multipliers.gradients is None  # then nothing needs the distances later
        return Tile(
            lambda: distances.mul_(scale) if is_constant else distances * scale,
            lambda matrix: matrix.addcmul_(distances, scale),
            pull_back,
        )

    def add_products_(self, x: Side, y: Side, residuals: torch.Tensor) -> None:
        # residuals by the chords
        (vectors, offsets), (other_vectors, other_offsets) = x.values, y.values
        coupling = self.geometry.coupling
        if x.gradients is not None:
            x.gradients[0].addmm_(residuals, other_vectors, alpha=-1)
            x.gradients[1].addmv_(residuals, 1 + coupling * other_offsets)
        if y.gradients is not None:
            y.gradients[0].addmm_(residuals.T, vectors, alpha=-1)
            y.gradients[1].addmv_(residuals.T, 1 + coupling * offsets)


def comparison_of(
    geometry: Geometry,
    scalars: tuple[torch.Tensor, ...],
    bf16_product: bool,
    kernel: "TileKernel | None" = None,
) -> Comparison:
    """The fastest way that the geometry offers. The kernel, if any, is that of this geometry."""
    if geometry.is_inner_product:
        return _InnerProducts(_Methods(geometry), scalars, kernel, bf16_product)
    if isinstance(geometry, ChordGeometry):
        return _Chords(_Methods(geometry), scalars, kernel)
    return Comparison(_Methods(geometry), scalars)


def require_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them does."""
    return any(tensor.requires_grad for tensor in tensors)


def gradients_by(
    outputs: Iterable[tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """What the gradients beside the outputs give for every leaf."""
    outputs = [(output, gradient.to(output.dtype)) for output, gradient in outputs if output.requires_grad]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if not outputs or not trained:
        return [None] * len(leaves)
    tensors, gradients = zip(*outputs)
    parts = iter(torch.autograd.grad(tensors, trained, gradients, allow_unused=True))
    return [next(parts) if leaf.requires_grad else None for leaf in leaves]


def add_to_totals(parts: Iterable[torch.Tensor | None], leaves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Adds to the total beside every leaf."""
    for part, (_, total) in zip(parts, leaves):
        if part is not None:
            total += part


def add_gradients_(
    outputs: Iterable[tuple[torch.Tensor, torch.Tensor]], leaves: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Adds `gradients_by` to the total beside every leaf."""
    add_to_totals(gradients_by(outputs, [leaf for leaf, _ in leaves]), leaves)


def _bf16_matmul(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    first, second = first.bfloat16(), second.bfloat16()
    if first.device.type == "cuda":
        return torch.mm(first, second, out_dtype=torch.float32)
    return first.float() @ second.float()  # the same: float32 holds products of bfloat16 exactly


def _bf16_addmm_(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    first, second = first.bfloat16(), second.bfloat16()
    if first.device.type == "cuda":
        return torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
    return total.addmm_(first.float(), second.float())
