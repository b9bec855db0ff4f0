"""A bound on what the process may take, for tests of inputs that would take gigabytes."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MEGABYTE = 1 << 20


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """What is allocated inside beyond so many megabytes is a MemoryError.

    What earlier tests have freed stays in the process, and would be taken first: it is filled. The address space that a
    thread which starts inside reserves does not count.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    taken = 1024 * int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    filled: list[bytearray] = []
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (taken + 2 * _MEGABYTE, before[1]))
        for size in (64, 8, 1):
            with suppress(MemoryError):
                while True:
                    filled.append(bytearray(size * _MEGABYTE))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + megabytes * _MEGABYTE, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
