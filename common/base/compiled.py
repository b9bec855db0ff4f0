"""Loops compiled by numba, on machines where its disk cache cannot be written too."""

import functools

import numba
import torch


def compiled(function=None, *, parallel: bool = False):
    """`numba.njit` with its disk cache where a cache can be written, and without one where it cannot.

    Numba refuses at decoration when neither `__pycache__` nor the user's cache directory is writable.

    Args:
        function: to compile at its first call; `@compiled` and `@compiled(parallel=True)` both work.
        parallel: let `numba.prange` use several threads: as many as torch has at the call, at most those that numba
            was imported with (NUMBA_NUM_THREADS, default one for each core).
    """
    if function is None:
        return lambda decorated: compiled(decorated, parallel=parallel)
    options = {"parallel": True} if parallel else {"nogil": True}
    try:
        loop = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        loop = numba.njit(**options)(function)
    return _with_torch_threads(loop) if parallel else loop


def _with_torch_threads(loop):
    """The loop on as many threads as torch has; both libraries have as many after it as before.

    Numba's threads and torch's come from one OpenMP, and starting the first sets the number of the second: sums would
    be split in another way from then on, and a resumed run differ in the last bit.
    """

    @functools.wraps(loop)
    def call(*arguments):
        threads = torch.get_num_threads()
        before = numba.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        try:
            return loop(*arguments)
        finally:
            numba.set_num_threads(before)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    return call
