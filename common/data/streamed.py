"""Training pairs as a stream."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from common.data.broken import BrokenSample
from common.data.order import permuted, seed_of
from common.data.rows import RowReader, captions_of, rows_of_batch

if TYPE_CHECKING:
    import datasets

KEPT_ROWS = 64  # a stream can step back by this many rows, for the substitutes of broken samples


class StreamedPairs:
    """Training pairs as a stream: position p is the p-th row of an endless sequence of shuffled epochs.

    The order of an epoch is a function of (seed, epoch): the data files in shuffled order, then a buffer from which
    each next row is drawn. Every process and worker traverses the same sequence and decodes only its own positions, so
    the order depends on neither. The cost:
      - each loader process reads the bytes of the whole stream;
      - a resume reads again, without decoding, what the current epoch had read;
      - each loader process holds `buffer_size` undecoded images.
    Positions may fall by at most `KEPT_ROWS`.

    Args:
        rows: with undecoded images.
        files: names of the data files, with sizes or revision, for the fingerprint.
        buffer_size: rows; 1 shuffles only the files.
    """

    forward_only = True  # for TrainingView: ask by position, in order

    def __init__(
        self,
        rows: "datasets.IterableDataset",
        num_rows: int,
        reader: RowReader,
        name: str,
        files: list[str],
        seed: int,
        buffer_size: int,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"{reader.source}: no rows in {name}")
        self.name, self.reader, self.seed, self.buffer_size = name, reader, seed, buffer_size
        self.broken_at_open: list[BrokenSample] = []
        self._plain, self._num_rows, self._files = rows, num_rows, files
        self._stream: Iterator[dict[str, Any]] | None = None
        self._next = 0  # position of the next row of the stream
        self._kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT_ROWS)

    def __getstate__(self) -> dict[str, Any]:
        # a pickle has no open stream: a worker starts its own
        return self.__dict__ | {"_stream": None, "_next": 0, "_kept": deque(maxlen=KEPT_ROWS)}

    def __len__(self) -> int:
        """Rows of one epoch; positions continue beyond it."""
        return self._num_rows

    def __getitem__(self, position: int) -> dict[str, Any]:
        """{"image": Pillow image in RGB, "captions": list of str, "image_id": `RowReader.identity`}.

        Raises:
            BrokenSample: the row cannot be used.
            ValueError: the position lies too far back, or an epoch has not `len` rows.
        """
        row = self._row(position)
        captions = self.reader.captions(row, position)
        image = self.reader.picture(row, position)
        return {"image": image, "captions": captions, "image_id": self.reader.identity(row, position)}

    def captions(self, position: int) -> list[str]:
        """The stream moves on to the position."""
        return self.reader.captions(self._row(position), position)

    def all_captions(self) -> Iterator[str]:
        """Of one epoch, not shuffled, without broken rows; reads the whole stream once."""
        return captions_of(self._plain.select_columns(self.reader.text_columns).iter(1000), self.reader)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the data files (names, sizes; on the hub, the revision) and the first 100 rows and images.

        It misses a later change that keeps name and size of a local file.
        """
        first = [
            [row[name] for name in self.reader.text_columns] + [self.reader.picture_hash(row).hex()]
            for batch in self._plain.take(100).iter(100)
            for row in rows_of_batch(batch)
        ]
        content = [self._num_rows, self._files, first]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"StreamedPairs({self.name!r}, {len(self)} rows of {self.reader.source})"

    def _row(self, position: int) -> dict[str, Any]:
        if position < 0:
            raise IndexError(f"position {position} of {self.name!r}; expected: from 0")
        oldest = self._kept[0][0] if self._kept else self._next
        if self._stream is not None and position < oldest:
            raise ValueError(
                f"{self.name}: position {position} follows position {self._next - 1}, but a stream goes "
                f"forward only (back by at most {KEPT_ROWS} rows); read a data set with random access "
                "(data.stream_buffer=0), or open the stream again"
            )
        if position < self._next:
            return self._kept[position - oldest][1]
        if self._stream is None or position // self._num_rows > self._next // self._num_rows:
            self._start_epoch(position // self._num_rows)
        while True:
            row = next(self._stream, None)
            if row is None:  # the epoch is over
                self._start_epoch(self._next // self._num_rows)
                continue
            self._kept.append((self._next, row))
            self._next += 1
            if self._next > position:
                return row

    def _start_epoch(self, epoch: int) -> None:
        if self._next != epoch * self._num_rows:
            self._kept.clear()  # the last rows must be without gaps
        self._next = epoch * self._num_rows
        self._stream = self._epoch(epoch)

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        # the library's own shuffle interleaves files in threads, and its order is its version's
        key = seed_of(self.seed, epoch)
        buffer: list[dict[str, Any]] = []
        count = 0
        for row in self._rows_of_files(key):
            count += 1
            if len(buffer) < self.buffer_size:
                buffer.append(row)
                continue
            place = seed_of(key, count) % self.buffer_size
            row, buffer[place] = buffer[place], row
            yield row
            if count > self._num_rows:
                break
        if count != self._num_rows:
            num_read = "more" if count > self._num_rows else f"{count}"
            raise ValueError(
                f"{self.reader.source}: epoch {epoch} of the stream has {num_read} rows, {self._num_rows} were stated "
                "when it was opened"
            )
        for left in range(len(buffer), 0, -1):
            place = seed_of(key, count + left) % left
            buffer[place], buffer[left - 1] = buffer[left - 1], buffer[place]
            yield buffer.pop()

    def _rows_of_files(self, key: int) -> Iterator[dict[str, Any]]:
        num_files = self._plain.num_shards
        for number in permuted(np.arange(num_files), num_files, key):
            file = self._plain.shard(num_files, int(number))
            # iter(), unlike the set's own __iter__, does not leave files to the other workers of a loader
            for batch in file.iter(16):
                yield from rows_of_batch(batch)
