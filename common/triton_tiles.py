"""What a tile of the tiled loss takes between its matrix products, as two Triton kernels (CUDA only).

The products are cuBLAS's. torch operations read and write the tile for every step; a kernel reads the products once:
    sums_kernel         log sum exp of rows and of columns; writes nothing of the size of the tile
    residuals_kernel    softmax of both directions, the gradient by the logits or by the chords; writes it once

Of an inner product the logits are the products. Of a `ChordGeometry` they are a formula of them:
    logits_ij = multiplier * distance(q_ij),    q_ij = a_i + b_j + coupling a_i b_j - x_i . y_j
`formula_source` translates the geometry's torch formula into Triton's language.

Partners are left out: the tiled loss compares them by differences. Each program writes separate sums, which torch adds
in one order, without atomics, so that a run resumes exactly.

With TRITON_INTERPRET=1 the kernels run on CPU tensors, as the tests do.
"""

import functools
import hashlib
import linecache
import math
import re
from dataclasses import dataclass

import torch
import torch.fx
import triton
import triton.language as tl

from common.geometry import ChordGeometry, Geometry
from common.query_sums import Block

OPERATIONS = {  # torch -> Triton, with what torch does to NaN
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "truediv": "{0} / {1}",
    "div": "{0} / {1}",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "sqrt": "tl.sqrt({0})",
    "log": "tl.log({0})",
    "atan": "arctangent({0})",
    "clone": "{0}",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "clamp": "tl.where({0} < {1}, {1}, tl.where({0} > {2}, {2}, {0}))",
    "sign": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
    "threshold": "tl.where({0} <= {1}, {2}, {0})",
}
SIZES = {"BM": 16, "BN": 128, "num_warps": 4}  # rows and columns of a step
STEPS = 16  # of a program of the first kernel


def formula_source(geometry: ChordGeometry) -> str:
    """`distance_of_chords` with its slope as the source of a Triton function, (q) -> (distance, inverse slope).

    Raises:
        ValueError: an operation that is not in OPERATIONS.
    """
    graph = torch.fx.Tracer().trace(lambda chords: geometry.distance_of_chords(chords, True))
    names: dict[torch.fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = "q"
        elif node.op == "output":
            lines.append(f"return {', '.join(names[result] for result in node.args[0])}")
        else:
            operation = getattr(node.target, "__name__", node.target)
            expression = OPERATIONS.get(operation.rstrip("_"))
            num_arguments = len(set(re.findall(r"{\d}", expression or "")))
            if num_arguments != len(node.args) or None in node.args or node.kwargs:
                raise ValueError(
                    f"geometry {geometry.name}, whose distance needs {operation}, which the kernel does not compute"
                )
            arguments = [names.get(argument, argument) for argument in node.args]
            # what torch writes in place keeps its variable, so that all names of one tensor change together
            names[node] = arguments[0] if operation.endswith("_") else node.name
            numbers = ['float("inf")' if argument == math.inf else argument for argument in arguments]
            lines.append(f"{names[node]} = {expression.format(*numbers)}")
    return "\n    ".join(["def distance_and_inverse_slope(q):", *lines]) + "\n"


@triton.jit
def arctangent(x):
    """The polynomial of Cephes' atanf, up to tan(pi / 8)."""
    size = tl.abs(x)
    is_steep = size > 1.0
    ratio = tl.where(is_steep, 1.0 / size, size)
    is_large = ratio > 0.4142135623730950
    part = tl.where(is_large, (ratio - 1.0) / (ratio + 1.0), ratio)
    square = part * part
    series = ((8.05374449538e-2 * square - 1.38776856032e-1) * square + 1.99777106478e-1) * square - 3.33329491539e-1
    angle = series * square * part + part + tl.where(is_large, 0.7853981633974483, 0.0)
    angle = tl.where(is_steep, 1.5707963267948966 - angle, angle)
    return tl.where(x < 0.0, -angle, angle)


@functools.cache
def _compiled(source: str) -> triton.JITFunction:
    # Triton reads the source of a function from its file, or from `linecache`
    file = f"<chords {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"tl": tl, "arctangent": arctangent, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope["distance_and_inverse_slope"])


@triton.jit
def _pairs(
    products, a, b, multiplier, row, n, m, first, last, shift,
    BM: tl.constexpr, BN: tl.constexpr, COUPLING: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    # The BM rows from `row` on: rows, columns, which pairs are in the matrix, which of them are no partners, logits,
    # distances, inverse slopes.
    r, c = row + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    inside = (r < n)[:, None] & (c < m)[None, :]
    others = inside & (((r < first) | (r >= last))[:, None] | (r[:, None] + shift != c[None, :]))
    values = tl.load(products + _places(row, m, BM, BN), mask=inside, other=0.0)
    if FORMULA is None:
        return r, c, inside, others, values, values, values
    else:
        offsets = tl.load(a + r, mask=r < n, other=0.0)[:, None]
        other_offsets = tl.load(b + c, mask=c < m, other=0.0)[None, :]
        distances, inverse_slopes = FORMULA(offsets + (1.0 + COUPLING * offsets) * other_offsets - values)
        return r, c, inside, others, distances * tl.load(multiplier), distances, inverse_slopes


@triton.jit
def _places(row, m, BM: tl.constexpr, BN: tl.constexpr):
    # only the first row's place needs 64 bits
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    return row.to(tl.int64) * m + (tl.arange(0, BM)[:, None] * m + c[None, :])


# the number of columns is specialised: where 16 divides it, loads are wide
@triton.jit(do_not_specialize=["n", "first", "last", "shift"])
def sums_kernel(
    products, a, b, multiplier, row_sums, column_sums, n, m, first, last, shift,
    BM: tl.constexpr, BN: tl.constexpr, COUPLING: tl.constexpr, FORMULA: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Log sum exp without partners: row_sums (blocks of columns, n), column_sums (BM * STEPS rows each, m)."""
    # lower than every logit but -inf: -inf - -inf would be NaN
    tops, totals = tl.full((BM, BN), -3e38, tl.float32), tl.zeros((BM, BN), tl.float32)
    start = tl.program_id(1) * STEPS * BM
    for step in range(tl.minimum(STEPS, tl.cdiv(n - start, BM))):
        row = start + step * BM
        r, c, _, others, logits, _, _ = _pairs(
            products, a, b, multiplier, row, n, m, first, last, shift, BM, BN, COUPLING, FORMULA
        )
        logits = tl.where(others, logits, float("-inf"))
        top = tl.maximum(tl.max(logits, 1), -3e38)
        of_rows = top + tl.log(tl.sum(tl.exp(logits - top[:, None]), 1))
        tl.store(row_sums + tl.program_id(0) * n + r, of_rows, mask=r < n)
        smaller = tl.exp(-tl.abs(logits - tops))
        totals = tl.where(logits > tops, totals * smaller + 1.0, totals + smaller)
        tops = tl.maximum(tops, logits)
    top = tl.max(tops, 0)
    of_columns = top + tl.log(tl.sum(totals * tl.exp(tops - top[None, :]), 0))
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(column_sums + tl.program_id(1) * m + c, of_columns, mask=c < m)


@triton.jit(do_not_specialize=["n", "first", "last", "shift"])
def residuals_kernel(
    products, a, b, multiplier, row_shifts, column_shifts, result, of_multiplier, n, m, first, last, shift,
    BM: tl.constexpr, BN: tl.constexpr, COUPLING: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """The gradient by the logits, 0 for partners; with a formula by the chords, over the multiplier."""
    row = tl.program_id(1) * BM
    r, c, inside, others, logits, distances, inverse_slopes = _pairs(
        products, a, b, multiplier, row, n, m, first, last, shift, BM, BN, COUPLING, FORMULA
    )
    of_rows = tl.load(row_shifts + r, mask=r < n, other=float("-inf"))[:, None]
    of_columns = tl.load(column_shifts + c, mask=c < m, other=float("-inf"))[None, :]
    residuals = tl.where(others, tl.exp(logits + of_rows) + tl.exp(logits + of_columns), 0.0)
    if FORMULA is not None:
        part = tl.sum(tl.sum(tl.where(others, distances * residuals, 0.0), 1), 0)
        tl.store(of_multiplier + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), part)
        residuals = tl.where(others, residuals / inverse_slopes, 0.0)
    tl.store(result + _places(row, m, BM, BN), residuals.to(result.dtype.element_ty), mask=inside)


Operands = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TileKernel:
    """The kernels for one geometry.

    formula: (q) -> (distance, inverse slope); None = the products are the logits. coupling: of the chords.
    """

    formula: triton.JITFunction | None
    coupling: float

    def log_sums(
        self, products: torch.Tensor, offsets: Operands, multipliers: Operands, block: Block | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log sum exp of the logits of all but partners, in parts: (parts, rows) and (other parts, columns).

        Args:
            products: (rows, columns), float32.
            offsets: of rows and of columns. multipliers: one. Both empty without a formula.
        """
        n, m = products.shape
        row_sums = products.new_empty(triton.cdiv(m, SIZES["BN"]), n)
        column_sums = products.new_empty(triton.cdiv(n, SIZES["BM"] * STEPS), m)
        tensors = row_sums, column_sums
        self._launch(sums_kernel, len(column_sums), products, offsets, multipliers, tensors, block, STEPS=STEPS)
        return tensors

    def residuals(
        self,
        products: torch.Tensor,
        offsets: Operands,
        multipliers: Operands,
        shifts: Operands,
        block: Block | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient by the products, or by the chords over the multiplier, and parts of that of the multiplier.

        Args:
            products, offsets, multipliers: as above; float32 products are overwritten.
            shifts: added to the logits of rows, and of columns, before the exponential.
            dtype: of the first result.
        """
        n, m = products.shape
        result = products if dtype == products.dtype else torch.empty_like(products, dtype=dtype)
        parts = products.new_empty(triton.cdiv(n, SIZES["BM"]), triton.cdiv(m, SIZES["BN"]))
        tensors = *shifts, result, parts
        self._launch(residuals_kernel, len(parts), products, offsets, multipliers, tensors, block)
        return result, parts

    def _launch(
        self,
        kernel: triton.JITFunction,
        row_programs: int,
        products: torch.Tensor,
        offsets: Operands,
        multipliers: Operands,
        tensors: Operands,
        block: Block | None,
        **constants: int,
    ) -> None:
        n, m = products.shape
        unused = (products,) * (3 if self.formula is None else 0)
        multipliers = tuple(multiplier.to(products) for multiplier in multipliers)  # an API's may be float64
        rows = slice(0, 0) if block is None else block.queries
        first_column = 0 if block is None else block.candidates.start
        with torch.cuda.device_of(products):
            kernel[triton.cdiv(m, SIZES["BN"]), row_programs](
                products, *(offset.contiguous() for offset in offsets), *multipliers, *unused, *tensors,
                n, m, rows.start, rows.stop, first_column - rows.start,
                COUPLING=self.coupling, FORMULA=self.formula, **SIZES, **constants,
            )  # fmt: skip


@functools.lru_cache(maxsize=8)  # every loss asks for it
def tile_kernel(geometry: Geometry) -> TileKernel:
    """The kernels for a geometry.

    Raises:
        ValueError: neither an inner product nor a geometry with chords; as `formula_source`.
    """
    if geometry.is_inner_product:
        return TileKernel(None, 0.0)
    if not isinstance(geometry, ChordGeometry):
        raise ValueError(f"geometry {geometry.name}, which has no formula for its distance")
    return TileKernel(_compiled(formula_source(geometry)), geometry.coupling)
