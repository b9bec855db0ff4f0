"""The distances of a tile and their slopes in one Triton kernel, from its matrix product (CUDA only).

A pair's chord is a formula of one inner product, and so is its distance (`ChordGeometry`):
    q_ij = a_i + b_j + coupling a_i b_j - x_i . y_j
The product is cuBLAS's, in float32. torch then reads and writes the tile for every step of the formula; the kernel
reads the product once and writes what the tile needs. The geometry's torch formula is the only source:
`formula_source` traces it and writes it in Triton's language.

With TRITON_INTERPRET=1 the kernel runs on CPU tensors, as the tests do. No GPU has run it yet.
"""

import functools
import hashlib
import linecache
import math
from dataclasses import dataclass

import torch
import torch.fx
import triton
import triton.language as tl

from common.geometry import ChordGeometry

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


@triton.jit(do_not_specialize=["n", "m"])
def chords_kernel(
    products, a, b, inverse_slopes, n, m,
    BM: tl.constexpr, BN: tl.constexpr, COUPLING: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Writes the distances over the products (n, m), and their inverse slopes."""
    r, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (r < n)[:, None] & (c < m)[None, :]
    places = r.to(tl.int64)[:, None] * m + c[None, :]
    offsets = tl.load(a + r, mask=r < n, other=0.0)[:, None]
    others = tl.load(b + c, mask=c < m, other=0.0)[None, :]
    sums = offsets + (1.0 + COUPLING * offsets) * others
    distances, slopes = FORMULA(sums - tl.load(products + places, mask=inside, other=0.0))
    tl.store(products + places, distances, mask=inside)
    tl.store(inverse_slopes + places, slopes, mask=inside)


BLOCKS = {"BM": 16, "BN": 128, "num_warps": 8}  # rows and columns; a warp reads along a row


@dataclass(frozen=True)
class ChordKernel:
    """The kernel for one geometry.

    formula: (q) -> (distance, inverse slope). coupling: of the chords.
    """

    formula: triton.JITFunction
    coupling: float

    def distances(
        self, vectors: torch.Tensor, offsets: torch.Tensor, other_vectors: torch.Tensor, other_offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, columns): distances of all pairs, and the inverses of their slopes; operands in float32."""
        products = torch.mm(vectors, other_vectors.T)
        inverse_slopes = torch.empty_like(products)
        n, m = products.shape
        with torch.cuda.device_of(products):
            chords_kernel[triton.cdiv(n, BLOCKS["BM"]), triton.cdiv(m, BLOCKS["BN"])](
                products, offsets.contiguous(), other_offsets.contiguous(), inverse_slopes, n, m,
                COUPLING=self.coupling, FORMULA=self.formula, **BLOCKS,
            )  # fmt: skip
        return products, inverse_slopes


@functools.lru_cache(maxsize=8)  # every loss asks for it
def chord_kernel(geometry: ChordGeometry) -> ChordKernel:
    """The kernel for a geometry.

    Raises:
        ValueError: a geometry without chords; as `formula_source`.
    """
    if not isinstance(geometry, ChordGeometry):
        raise ValueError(f"geometry {geometry.name}, which has no formula for its distance")
    return ChordKernel(_compiled(formula_source(geometry)), geometry.coupling)
