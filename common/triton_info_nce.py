"""InfoNCE over all pairs of a batch as two Triton kernels, whose logits never leave the registers (CUDA only).

For inner products with factors in bfloat16. A program has a block of rows and walks all columns:
    sums         log sum exp of rows, and of columns for each block of rows                              2 B^2 d
    gradients    the logits again, residuals, and their product with y; once for each side               8 B^2 d
Partners are left out: the tiled loss compares them by differences. Sums of blocks are added in one order, without
atomics, so that a run resumes exactly.

With TRITON_INTERPRET=1 the kernels run on CPU tensors, as the tests do. On an H200 they take 0.95 of the time of tiles
(results/benchmark/nvidia-h200.md). In float32 they took 5 times as long, as tensor cores do not multiply it, and went.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

MAX_DIM = 512  # a block of rows and its gradient must fit the registers of one multiprocessor
ROWS_AT_ONCE = 32_768  # bounds the column sums of blocks of rows; still more programs than a GPU has multiprocessors
# of factors; for the interpreter, which cannot multiply bfloat16, the tests set float16, and float32 for its digits
FACTORS = torch.bfloat16


@triton.jit
def _rows(matrix, rows, inside, k, D: tl.constexpr):
    return tl.load(matrix + rows[:, None] * D + k[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _logits(
    x, x_block, y, y_block, r, c, n, m, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """(BM, BN), in float32."""
    if BK == D:  # the block of rows stays where it is
        return tl.dot(x_block, tl.trans(y_block), input_precision="ieee")
    else:
        products = tl.zeros((BM, BN), tl.float32)
        for start in range(0, D, BK):
            k = start + tl.arange(0, BK)
            products = tl.dot(
                _rows(x, r, r < n, k, D), tl.trans(_rows(y, c, c < m, k, D)), products, input_precision="ieee"
            )
        return products


@triton.jit(do_not_specialize=["n", "m", "shift"])
def sums_kernel(
    x, y, row_sums, column_sums, n, m, shift,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Log sum exp without partners: row_sums (n,), column_sums (blocks of rows, m)."""
    block = tl.program_id(0)
    r, k = block * BM + tl.arange(0, BM), tl.arange(0, D)
    x_block = _rows(x, r, r < n, k, D)
    top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, m, BN):
        c = start + tl.arange(0, BN)
        y_block = _rows(y, c, c < m, k, D)
        others = (r < n)[:, None] & (c < m)[None, :] & (r[:, None] + shift != c[None, :])
        logits = tl.where(others, _logits(x, x_block, y, y_block, r, c, n, m, D, BM, BN, BK), float("-inf"))
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
    x, y, row_lse, column_lse, row_weights, column_weights, vectors_gradient, n, m, shift,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows (n, D) by all pairs but partners."""
    r, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x_block = _rows(x, r, r < n, k, D)
    lse = tl.load(row_lse + r, mask=r < n, other=float("inf"))[:, None]
    weights = tl.load(row_weights + r, mask=r < n, other=0.0)[:, None]
    vectors = tl.zeros((BM, D), tl.float32)
    for start in range(0, m, BN):
        c = start + tl.arange(0, BN)
        y_block = _rows(y, c, c < m, k, D)
        logits = _logits(x, x_block, y, y_block, r, c, n, m, D, BM, BN, BK)
        other_lse = tl.load(column_lse + c, mask=c < m, other=float("inf"))[None, :]
        other_weights = tl.load(column_weights + c, mask=c < m, other=0.0)[None, :]
        residuals = tl.exp(logits - lse) * weights + tl.exp(logits - other_lse) * other_weights
        residuals = tl.where((c < m)[None, :] & (r[:, None] + shift != c[None, :]), residuals, 0.0)
        vectors = tl.dot(residuals.to(y_block.dtype), y_block, vectors, input_precision="ieee")
    tl.store(vectors_gradient + r[:, None] * D + k[None, :], vectors, mask=(r < n)[:, None])


def padded(dim: int) -> int:
    """The width that the kernels give vectors: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


def blocks(kernel: triton.JITFunction, width: int, capability: int) -> dict[str, int]:
    """Sizes of blocks and launch options: no spills, and shared memory that the device has.

    For compute capability 8.0 chosen from what compiling reports (tests/test_common_triton.py), for 9.0 and vectors of
    512 numbers the fastest of some timed on an H200, with loads of the first kernel half as large and twice as many,
    since Triton 3.9 spilled 16 bytes with the timed ones.

    Args:
        width: of the vectors, `padded`.
        capability: of the device, 80 for 8.0.
    """
    is_first = kernel is sums_kernel
    if capability == 90 and width == 512:
        rows, columns, at_once, stages = (128, 256, 32, 6) if is_first else (64, 64, 512, 2)
    else:
        rows, columns, at_once, stages = 128 if is_first else 64, 32 if width > 256 else 64, width, 2
    return {"BM": rows, "BN": columns, "BK": at_once, "num_warps": 8, "num_stages": stages}


def _capability(tensor: torch.Tensor) -> int:
    """Of the tensor's device; of a CPU, where the kernels are interpreted, 80."""
    if not tensor.is_cuda:
        return 80
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def sums(x: torch.Tensor, y: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log sum exp of the logits x y^T of all but partners: of rows x (n,), of columns y (m,).

    Args:
        x, y: (n, dim) and (m, dim), dim at most MAX_DIM.
        shift: the partner of row k is column k + shift.
    """
    x, y = _padded(x), _padded(y)
    rows, columns = x.new_empty(len(x), dtype=torch.float32), None
    for start in range(0, len(rows), ROWS_AT_ONCE):
        at = slice(start, start + ROWS_AT_ONCE)
        sizes = blocks(sums_kernel, x.shape[1], _capability(x))
        of_blocks = rows.new_empty(triton.cdiv(len(x[at]), sizes["BM"]), len(y))
        _launch(sums_kernel, x[at], y, (rows[at], of_blocks), shift + start)
        of_part = of_blocks.logsumexp(0)
        columns = of_part if columns is None else torch.logaddexp(columns, of_part)
    return rows, columns


def gradients(
    x: torch.Tensor,
    y: torch.Tensor,
    lse: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    shift: int,
) -> torch.Tensor:
    """Gradients of x by all pairs but partners, in float32.

    Args:
        lse: log sum exp with the partner, (n,) of rows and (m,) of columns.
        weights: (n,) and (m,), factors of their losses.
    """
    dim, (x, y) = x.shape[1], (_padded(side) for side in (x, y))
    vectors = torch.empty_like(x, dtype=torch.float32)
    _launch(gradients_kernel, x, y, (*lse, *weights, vectors), shift)
    return vectors[:, :dim].contiguous()  # processes add theirs up next


def _padded(vectors: torch.Tensor) -> torch.Tensor:
    return F.pad(vectors, (0, padded(vectors.shape[1]) - vectors.shape[1])).to(FACTORS).contiguous()


def _launch(
    kernel: triton.JITFunction, x: torch.Tensor, y: torch.Tensor, tensors: tuple[torch.Tensor, ...], shift: int
) -> None:
    sizes = blocks(kernel, x.shape[1], _capability(x))
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(len(x), sizes["BM"]),)](x, y, *tensors, len(x), len(y), shift, D=x.shape[1], **sizes)
