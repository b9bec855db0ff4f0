"""InfoNCE over all pairs of a batch as two Triton kernels, whose logits never leave the registers (CUDA only).

A pair's logit is a formula of one inner product, as in the tiled loss, whose operands these kernels take:
    q_ij     = a_i + b_j + coupling a_i b_j - x_i . y_j            x, y: vectors, a, b: offsets (ChordGeometry)
    logit_ij = multiplier * distance(q_ij)                         of an inner product: x_i . y_j
A program has a block of rows and walks all columns:
    sums         log sum exp of rows, and of columns for each block of rows                              2 B^2 d
    gradients    the logits again, residuals, and their product with y; once for each side               8 B^2 d
Partners are left out: the tiled loss compares them by differences. Sums of blocks are added in one order, without
atomics, so that a run resumes exactly. The geometry's torch formula is the only source: `formula_source` traces it
and writes it in Triton's language.

With TRITON_INTERPRET=1 the kernels run on CPU tensors, as the tests do. On an H200 they take 0.95 of the time of tiles
in bfloat16, and 3 to 5 times as long in float32, which tensor cores do not multiply: results/benchmark/nvidia-h200.md.
"""

import functools
import hashlib
import linecache
import math
from dataclasses import dataclass

import torch
import torch.fx
import torch.nn.functional as F
import triton
import triton.language as tl

from common.geometry import ChordGeometry, Geometry

MAX_DIM = 512  # a block of rows and its gradient must fit the registers of one multiprocessor
ROWS_AT_ONCE = 32_768  # bounds the column sums of blocks of rows; still more programs than a GPU has multiprocessors
HALF = torch.bfloat16  # of factors; the tests set float16, as the interpreter cannot multiply bfloat16

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
    "clone": "{0}",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "sign": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
    "threshold": "tl.where({0} <= {1}, {2}, {0})",
}


def formula_source(geometry: ChordGeometry) -> str:
    """`distance_of_chords` with its slope as the source of a Triton function, (q) -> (distance, inverse slope).

    Raises:
        ValueError: an operation that is not in OPERATIONS; the message names it.
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
            if expression is None or node.kwargs:
                raise ValueError(
                    f"geometry {geometry.name}, whose distance needs {operation}, which the kernel does not compute"
                )
            arguments = [names.get(argument, argument) for argument in node.args]
            # what torch writes in place keeps its variable, so that all names of one tensor change together
            names[node] = arguments[0] if operation.endswith("_") else node.name
            numbers = ['float("inf")' if argument == math.inf else argument for argument in arguments]
            lines.append(f"{names[node]} = {expression.format(*numbers)}")
    return "\n    ".join(["def distance_and_inverse_slope(q):", *lines]) + "\n"


@functools.cache
def _compiled(source: str) -> triton.JITFunction:
    """Triton reads the source of a function from its file, or from `linecache`."""
    file = f"<chords {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope["distance_and_inverse_slope"])


@triton.jit
def _rows(matrix, rows, inside, k, D: tl.constexpr):
    return tl.load(matrix + rows[:, None] * D + k[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _compare(
    x, x_block, y, y_block, a, b, r, c, n, m,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    COUPLING: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """(BM, BN): distances and inverse slopes of chords; of an inner product the products, twice."""
    if BK == D:  # the block of rows stays where it is
        products = tl.dot(x_block, tl.trans(y_block), input_precision="ieee")
    else:  # factors in float32 go through registers, which hold few columns of them
        products = tl.zeros((BM, BN), tl.float32)
        for start in range(0, D, BK):
            k = start + tl.arange(0, BK)
            products = tl.dot(
                _rows(x, r, r < n, k, D), tl.trans(_rows(y, c, c < m, k, D)), products, input_precision="ieee"
            )
    if FORMULA is None:
        return products, products
    else:
        offsets = tl.load(a + r, mask=r < n, other=0.0)[:, None]
        others = tl.load(b + c, mask=c < m, other=0.0)[None, :]
        return FORMULA(offsets + others + COUPLING * offsets * others - products)


@triton.jit(do_not_specialize=["n", "m", "shift"])
def sums_kernel(
    x, y, a, b, multiplier, row_sums, column_sums, n, m, shift,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    COUPLING: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Log sum exp without partners: row_sums (n,), column_sums (blocks of rows, m)."""
    block = tl.program_id(0)
    r, k = block * BM + tl.arange(0, BM), tl.arange(0, D)
    x_block = _rows(x, r, r < n, k, D)
    scale = 1.0 if FORMULA is None else tl.load(multiplier)
    top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, m, BN):
        c = start + tl.arange(0, BN)
        y_block = _rows(y, c, c < m, k, D)
        distances, _ = _compare(x, x_block, y, y_block, a, b, r, c, n, m, D, BM, BN, BK, COUPLING, FORMULA)
        others = (r < n)[:, None] & (c < m)[None, :] & (r[:, None] + shift != c[None, :])
        logits = tl.where(others, distances * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = higher
        highest = tl.max(logits, 0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        column = base + tl.log(tl.sum(tl.exp(logits - base[None, :]), 0))
        tl.store(column_sums + block * m + c, column, mask=c < m)
    tl.store(row_sums + r, tl.where(top == float("-inf"), 0.0, top) + tl.log(total), mask=r < n)


@triton.jit(do_not_specialize=["n", "m", "shift"])
def gradients_kernel(
    x, y, a, b, multiplier, row_lse, column_lse, row_weights, column_weights,
    vectors_gradient, offsets_gradient, multiplier_gradient, n, m, shift,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    COUPLING: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows by all pairs but partners: vectors (n, D), offsets (n,), multiplier (n,), to be summed."""
    r, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x_block = _rows(x, r, r < n, k, D)
    lse = tl.load(row_lse + r, mask=r < n, other=float("inf"))[:, None]
    weights = tl.load(row_weights + r, mask=r < n, other=0.0)[:, None]
    scale = 1.0 if FORMULA is None else tl.load(multiplier)
    vectors = tl.zeros((BM, D), tl.float32)
    by_offset, by_multiplier = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, m, BN):
        c = start + tl.arange(0, BN)
        y_block = _rows(y, c, c < m, k, D)
        distances, inverse_slopes = _compare(x, x_block, y, y_block, a, b, r, c, n, m, D, BM, BN, BK, COUPLING, FORMULA)
        logits = distances * scale
        other_lse = tl.load(column_lse + c, mask=c < m, other=float("inf"))[None, :]
        other_weights = tl.load(column_weights + c, mask=c < m, other=0.0)[None, :]
        residuals = tl.exp(logits - lse) * weights + tl.exp(logits - other_lse) * other_weights
        residuals = tl.where((c < m)[None, :] & (r[:, None] + shift != c[None, :]), residuals, 0.0)
        if FORMULA is not None:
            by_multiplier += tl.sum(residuals * distances, 1)
            by_chords = residuals / inverse_slopes * scale
            by_offset += tl.sum(by_chords * (1.0 + COUPLING * tl.load(b + c, mask=c < m, other=0.0)[None, :]), 1)
            residuals = -by_chords
        vectors = tl.dot(residuals.to(y_block.dtype), y_block, vectors, input_precision="ieee")
    tl.store(vectors_gradient + r[:, None] * D + k[None, :], vectors, mask=(r < n)[:, None])
    if FORMULA is not None:
        tl.store(offsets_gradient + r, by_offset, mask=r < n)
        tl.store(multiplier_gradient + r, by_multiplier, mask=r < n)


def padded(dim: int) -> int:
    """The width that the kernels give vectors: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


# Compute capability 9.0 and vectors of 512 numbers: rows, columns, numbers of a vector at once, warps, stages of loads.
HOPPER = {  # kernel, factors of 16 bits
    ("sums", True): (128, 256, 64, 8, 3),
    ("gradients", True): (64, 64, 512, 8, 2),
    ("sums", False): (128, 128, 16, 8, 2),
    ("gradients", False): (32, 32, 16, 4, 2),
}


def blocks(kernel: triton.JITFunction, width: int, is_half: bool, capability: int) -> dict[str, int]:
    """Sizes of blocks and launch options, with shared memory that the device has.

    For 8.0 chosen from what compiling reports: no register is spilt (tests/test_common_triton.py). HOPPER is the
    fastest of some timed on an H200.

    Args:
        width: of the vectors, `padded`.
        is_half: factors of 16 bits, for tensor cores; else float32.
        capability: of the device, 80 for 8.0.
    """
    name = "sums" if kernel is sums_kernel else "gradients"
    if capability == 90 and width == 512:
        rows, columns, at_once, warps, stages = HOPPER[name, is_half]
        return {"BM": rows, "BN": columns, "BK": at_once, "num_warps": warps, "num_stages": stages}
    if is_half:
        sizes = {"BM": 128 if name == "sums" else 64, "BN": 32 if width > 256 else 64, "BK": width}
    else:
        side = 64 if name == "sums" else 32
        sizes = {"BM": side, "BN": side, "BK": 16}
    return sizes | {"num_warps": 8, "num_stages": 2}


def _capability(tensor: torch.Tensor) -> int:
    """Of the tensor's device; of a CPU, where the kernels are interpreted, 80."""
    if not tensor.is_cuda:
        return 80
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


Operands = tuple[torch.Tensor, ...]  # vectors (batch, dim), and offsets (batch,) unless it is an inner product


@dataclass(frozen=True)
class PairKernels:
    """Both kernels for one geometry, on the operands and multipliers of the tiled loss.

    formula: (q) -> (distance, inverse slope); None for an inner product. coupling: of the chords.
    is_half: multiply in bfloat16, and add in float32.
    """

    formula: triton.JITFunction | None
    coupling: float
    is_half: bool

    def sums(self, x: Operands, y: Operands, multipliers: Operands, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log sum exp of the logits of all but partners: of rows x (n,), of columns y (m,).

        Args:
            shift: the partner of row k is column k + shift.
        """
        x, y = self._padded(x), self._padded(y)
        rows, columns = x[0].new_empty(len(x[0]), dtype=torch.float32), None
        for start in range(0, len(rows), ROWS_AT_ONCE):
            at = slice(start, start + ROWS_AT_ONCE)
            part = tuple(operand[at] for operand in x)
            sizes = blocks(sums_kernel, x[0].shape[1], self.is_half, _capability(x[0]))
            num_blocks = triton.cdiv(len(part[0]), sizes["BM"])
            of_blocks = rows.new_empty(num_blocks, len(y[0]))
            self._launch(sums_kernel, part, y, multipliers, (rows[at], of_blocks), shift + start)
            of_part = of_blocks.logsumexp(0)
            columns = of_part if columns is None else torch.logaddexp(columns, of_part)
        return rows, columns

    def gradients(
        self, x: Operands, y: Operands, multipliers: Operands, lse: Operands, weights: Operands, shift: int
    ) -> tuple[Operands, Operands]:
        """Gradients of the operands x, and of the multipliers, by all pairs but partners.

        Args:
            lse: log sum exp with the partner, (n,) of rows and (m,) of columns.
            weights: (n,) and (m,), factors of their losses.
        """
        dim, (x, y) = x[0].shape[1], (self._padded(side) for side in (x, y))
        vectors = torch.empty_like(x[0], dtype=torch.float32)
        others = [vectors.new_empty(len(vectors)) for _ in range(0 if self.formula is None else 2)]
        tensors = (*lse, *weights, vectors, *(others or [vectors, vectors]))
        self._launch(gradients_kernel, x, y, multipliers, tensors, shift)
        # contiguous: processes add theirs up next
        return (vectors[:, :dim].contiguous(), *others[:1]), tuple(other.sum() for other in others[1:])

    def _padded(self, operands: Operands) -> Operands:
        vectors, *offsets = operands
        vectors = F.pad(vectors, (0, padded(vectors.shape[1]) - vectors.shape[1]))
        vectors = vectors.to(HALF if self.is_half else torch.float32).contiguous()
        return (vectors, *(offset.float() for offset in offsets))

    def _launch(self, kernel, x: Operands, y: Operands, multipliers: Operands, tensors: Operands, shift: int) -> None:
        (vectors, *offsets), (other_vectors, *other_offsets) = x, y
        width, unused = vectors.shape[1], [vectors]
        sizes = blocks(kernel, width, self.is_half, _capability(vectors))
        with torch.cuda.device_of(vectors):
            kernel[(triton.cdiv(len(vectors), sizes["BM"]),)](
                vectors, other_vectors, *(offsets or unused), *(other_offsets or unused), *(multipliers or unused),
                *tensors, len(vectors), len(other_vectors), shift,
                D=width, COUPLING=self.coupling, FORMULA=self.formula, **sizes,
            )  # fmt: skip


@functools.lru_cache(maxsize=8)
def pair_kernels(geometry: Geometry, dim: int, is_half: bool) -> PairKernels:
    """The kernels for embeddings of dim numbers.

    Raises:
        ValueError: what they do not have: a dim above MAX_DIM, a geometry without chords, or as `formula_source`.
    """
    if dim > MAX_DIM:
        raise ValueError(f"embeddings of {dim} numbers; the kernel has at most {MAX_DIM}")
    if geometry.is_inner_product:
        return PairKernels(None, 0.0, is_half)
    if not isinstance(geometry, ChordGeometry):
        raise ValueError(f"geometry {geometry.name}, which has no formula for its distance")
    return PairKernels(_compiled(formula_source(geometry)), geometry.coupling, is_half)
