"""Loops compiled by numba, on machines where its disk cache cannot be written too."""

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
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)
