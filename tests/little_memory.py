"""A bound on what the process may take, for tests of inputs that would take gigabytes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """What is allocated inside beyond so many megabytes is a MemoryError."""
    before, block = resource.getrlimit(resource.RLIMIT_AS), Image.core.get_block_size()
    Image.core.set_block_size(1 << 30)  # a picture in one piece: small ones fit into what earlier tests have freed
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        Image.core.set_block_size(block)
