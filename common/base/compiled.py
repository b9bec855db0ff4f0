"""Loops compiled by numba, on machines where its disk cache cannot be written too."""

import functools
import os
import sys

import torch

# Numba's parallel loops take as many threads as torch has. Numba reads the variable at its first import and again at
# every compilation, and refuses a value that differs from the threads it runs: one that the caller has imported already
# keeps the number it has.
if "numba" not in sys.modules:
    os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))

import numba


def compiled(function=None, *, parallel: bool = False):
    """`numba.njit` with its disk cache where a cache can be written, and without one where it cannot.

    Numba refuses at decoration when neither `__pycache__` nor the user's cache directory is writable.

    Args:
        function: to compile at its first call; `@compiled` and `@compiled(parallel=True)` both work.
        parallel: let `numba.prange` use several threads.
    """
    if function is None:
        return lambda decorated: compiled(decorated, parallel=parallel)
    options = {"parallel": True} if parallel else {"nogil": True}
    try:
        loop = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        loop = numba.njit(**options)(function)
    return _keeping_torch_threads(loop) if parallel else loop


def _keeping_torch_threads(loop):
    """The loop; torch has as many threads after it as before.

    Numba's threads and torch's come from one OpenMP, and starting the first sets the number of the second: sums would
    be split in another way from then on, and a resumed run differ in the last bit.
    """

    @functools.wraps(loop)
    def call(*arguments):
        threads = torch.get_num_threads()
        try:
            return loop(*arguments)
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    return call
