"""Ranges of bytes from many large files, safe with threads, forked workers and pickling."""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

MAX_OPEN = 32  # files per process


class OpenFiles:
    """Reads ranges of files; handles are opened on first use in each process and only the latest stay open.

    Sharing a handle between processes would share its position, so a fork starts with none, and a pickle carries none.

    Args:
        sizes: bytes that each file had when it was indexed; `read` names a file by its place in this list.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self._forget()

    def _forget(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def __getstate__(self) -> list[int]:
        return self.sizes

    def __setstate__(self, sizes: list[int]) -> None:
        self.__init__(sizes)

    def read(self, number: int, path: Path, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer where the file ends.

        Raises:
            RuntimeError: if the file no longer has the size that was indexed.
        """
        if self._process != os.getpid():
            self._forget()
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = path.open("rb", buffering=0)
                now = os.fstat(file.fileno()).st_size
                if now != self.sizes[number]:
                    file.close()
                    raise RuntimeError(
                        f"{path} changed: it had {self.sizes[number]} bytes when it was opened, now {now}"
                    )
                self._files[number] = file
                if len(self._files) > MAX_OPEN:
                    self._files.popitem(last=False)[1].close()
            self._files.move_to_end(number)
            file.seek(offset)
            chunks, left = [], size
            while left:  # an unbuffered read may stop early
                chunk = file.read(left)
                if not chunk:
                    break
                chunks.append(chunk)
                left -= len(chunk)
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
