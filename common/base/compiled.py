"""Loops compiled by numba, also on machines where its disk cache cannot be written."""

import functools

import numba
import torch


def compiled(function=None, *, parallel: bool = False):
    """`numba.njit` with its disk cache where one can be written, else without: numba itself would raise an error.

    Args:
        parallel: let `numba.prange` use as many threads as torch has at the call, at most NUMBA_NUM_THREADS.
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
    # The loop on as many threads as torch has; both libraries have as many after it as before.
    #
    # Numba and torch share one OpenMP, and starting numba's threads sets torch's number. Sums would then be split in
    # another way, and a resumed run would differ in the last bit.
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
