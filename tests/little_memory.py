"""A bound on what the process may take, for tests of inputs that would take gigabytes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MEGABYTE = 1 << 20


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """What is allocated inside beyond so many megabytes is a MemoryError.

    What earlier tests have freed stays in the process, and would be taken first: it is filled.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    filled: list[bytearray] = []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2 * _MEGABYTE, before[1]))
        for size in (64, 8, 1):
            with suppress(MemoryError):
                while True:
                    filled.append(bytearray(size * _MEGABYTE))
        resource.setrlimit(resource.RLIMIT_AS, (taken + megabytes * _MEGABYTE, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
