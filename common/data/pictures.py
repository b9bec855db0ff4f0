"""Images on disk in one form: an Arrow table, and the class that reads, checks and hashes what it lists.

A reader (karpathy.py, tsv.py, shards.py, labelled.py) turns its format into such a table. A broken sample raises only
when read; equal content has an equal fingerprint wherever it lies.
"""

import hashlib
import io
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from common.base.files import printable
from common.data.broken import BrokenSample, Unusable, named
from common.data.decoding import (
    FILE_FORMATS,
    SHARD_FORMATS,
    checked_captions,
    decode_picture,
    file_bytes,
    row_of,
    sampled_places,
)

MAX_OPEN = 32  # shards per process
MAX_MEMBER_BYTES = 1 << 28  # larger images and arrays in shards are refused before they are read
MAX_TEXT_BYTES = 1 << 24  # the same for json, txt and cls; parsed, brackets take twenty times as much memory

SPAN = pa.list_(pa.int64(), 2)  # first byte and number of bytes
COLUMNS = {
    "name": pa.large_binary(),  # path of the file below the folder, or key of the sample in its shard
    "image": SPAN,
    "json": SPAN,
    "npy": SPAN,
    "captions": pa.large_list(pa.large_string()),  # null: none
    "caption_ids": pa.large_list(pa.int64()),
    "image_id": pa.large_binary(),  # null: the path, or shard and key
    "label": pa.large_string(),
    "fault": pa.large_string(),  # why the sample cannot be used, where that is known before its image is read
}


def table_of(columns: dict[str, Sequence[Any]]) -> pa.Table:
    """A table of some of `COLUMNS`. Names and ids are text, with other bytes as in Python's file names."""
    return pa.table(
        {
            name: packed(values) if COLUMNS[name] == pa.large_binary() else pa.array(values, COLUMNS[name])
            for name, values in columns.items()
        }
    )


def packed(texts: Iterable[str | None]) -> pa.LargeBinaryArray:
    """Texts in one block of bytes: millions cost no Python objects, and forked workers share them."""
    encoded = [None if text is None else text.encode("utf-8", "surrogateescape") for text in texts]
    return pa.array(encoded, pa.large_binary())


def unpacked(texts: pa.LargeBinaryArray | pa.ChunkedArray, place: int) -> str:
    """One text of `packed`."""
    return texts[place].as_py().decode("utf-8", "surrogateescape")


class Shard(NamedTuple):
    """A tar with some of the rows.

    digest: SHA-256 of member names, sizes and captions. modified: in ns; a tar that takes its place is opened anew.
    """

    path: Path
    num_samples: int
    file_size: int
    digest: str
    modified: int


@lru_cache(maxsize=MAX_OPEN)
def _opened(shard: Shard) -> BinaryIO:
    file = shard.path.open("rb", buffering=0)
    size = os.fstat(file.fileno()).st_size
    if size != shard.file_size:
        file.close()
        raise Unusable(f"shard has changed: it had {shard.file_size} bytes when it was opened, now {size}")
    return file


class Pictures:
    """Images with captions, labels or both, by position; decoded when read, see `decode_picture`.

    Args:
        rows: see `table_of`.
        broken: unusable at opening; not counted by len().
        role: "train" refuses empty captions; in the other roles an empty caption is one more text to rank.
        shards: that hold the rows, one behind the other; without them every row is a file.
    """

    def __init__(
        self,
        name: str,
        rows: pa.Table,
        images: Path,
        broken: Sequence[BrokenSample],
        *,
        role: str = "train",
        decode_size: int | None = None,
        shards: Sequence[Shard] = (),
    ) -> None:
        self.name, self.images, self.broken_at_open = printable(name), images, list(broken)
        self.role, self.decode_size, self.shards = role, decode_size, list(shards)
        self._starts = [*accumulate((shard.num_samples for shard in shards), initial=0)]
        self._rows = dict(zip(rows.column_names, rows.columns))

    def __len__(self) -> int:
        return len(self._rows["name"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": Pillow image in RGB, "captions": list of str, "image_id": str}, and "label" if there is one.

        Raises:
            BrokenSample: image or captions cannot be used.
        """
        row = row_of(index, self)
        formats = SHARD_FORMATS if self.shards else FILE_FORMATS
        with self._place(row):
            captions = self._captions(row)
            image = decode_picture(self.read(row, "image"), self.decode_size, formats)
        sample, label = {"image": image, "captions": captions, "image_id": self.image_id(row)}, self.label(row)
        return sample if label is None else {**sample, "label": label}

    def captions(self, index: int) -> list[str]:
        """Without reading the image. Raises: BrokenSample."""
        row = row_of(index, self)
        with self._place(row):
            return self._captions(row)

    def all_captions(self) -> Iterator[str]:
        """In order, without broken samples."""
        for row in range(len(self)):
            with suppress(BrokenSample):
                yield from self.captions(row)

    def image_id(self, index: int) -> str:
        """Id that the file gives, else the path, or shard and key, "test-00003/000017", as shards may repeat keys."""
        row = row_of(index, self)
        if self._value("image_id", row) is not None:
            return unpacked(self._rows["image_id"], row)
        if not self.shards:
            return self._name(row)
        return f"{self.path(row).relative_to(self.images).as_posix().removesuffix('.tar')}/{self._name(row)}"

    def lasting_id(self, index: int) -> str:
        """`image_id` without the folders of shards."""
        row = row_of(index, self)  # a shard in another folder makes the others' ids longer
        if not self.shards or self._value("image_id", row) is not None:
            return self.image_id(row)
        return f"{self.path(row).name.removesuffix('.tar')}/{self._name(row)}"

    def caption_ids(self, index: int) -> list[int | None] | None:
        """In order, None for an unknown one; None where the file gives none.

        For COCO the annotation ids, by which CxC and ECCV Caption name captions.
        """
        ids = self._value("caption_ids", row_of(index, self))
        return None if ids is None or set(ids) == {None} else ids

    def label(self, index: int) -> int | str | None:
        """Class of a sample, int if it is a whole number; None without one. Raises: BrokenSample."""
        row = row_of(index, self)
        label = self._value("label", row)
        if label is None and (fault := self._value("fault", row)):
            raise self.broken(row, fault)
        return int(label) if isinstance(label, str) and re.fullmatch(r"-?[0-9]{1,18}", label) else label

    def metadata(self, index: int) -> dict[str, Any]:
        """The json member in a shard (boxes, hierarchies, licences), or {}."""
        row = row_of(index, self)
        with self._place(row):
            return metadata_in(self.read(row, "json"))

    def array(self, index: int) -> np.ndarray | None:
        """The `.npy` member in a shard (metadata of DataComp's WILDS and fairness tasks), or None.

        Raises:
            BrokenSample: it cannot be read; pickled objects are refused.
        """
        row = row_of(index, self)
        with self._place(row):
            content = self.read(row, "npy")
            if content is None:
                return None
            try:
                return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)  # np.load takes zip files, too
            except Exception as error:  # ValueError, EOFError, tokenize's own, MemoryError where the header claims much
                raise Unusable(f"npy cannot be decoded: {type(error).__name__}, {error}") from None

    def path(self, index: int) -> Path:
        """The image file, or the shard."""
        row = row_of(index, self)
        return self._shard(row).path if self.shards else self.images / self._name(row)

    def key(self, index: int) -> str:
        """Name in the shard, "" for an image file."""
        return self._name(row_of(index, self)) if self.shards else ""

    def broken(self, index: int, reason: str) -> BrokenSample:
        """A caller's reason with the sample's place."""
        return BrokenSample(self.path(index), self.key(index), reason)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the rows, sizes of files included, and some images (`sampled_places`)."""
        digest = hashlib.sha256()
        self.feed(digest.update)
        return digest.hexdigest()

    def feed(self, update: Callable[[Any], Any]) -> None:
        for shard in self.shards:
            update(f"{shard.path.name}\0{shard.file_size}\0{shard.digest}\0".encode("utf-8", "surrogateescape"))
        if not self.shards:
            for name, column in self._rows.items():
                update(f"{name}{column.to_pylist()}".encode())
        for row in sampled_places(len(self)):
            with suppress(Unusable, OSError):
                update(hashlib.sha256(self.read(row, "image")).digest())

    def __repr__(self) -> str:
        return f"Pictures({self.name!r}, {len(self)} samples in {len(self.shards) or len(self)} files)"

    def _value(self, column: str, row: int) -> Any:
        return self._rows[column][row].as_py() if column in self._rows else None

    def _captions(self, row: int) -> list[str]:
        if fault := self._value("fault", row):
            raise Unusable(fault)
        captions = self._value("captions", row)
        return checked_captions(captions, allow_empty=self.role != "train") if captions else []

    def _name(self, row: int) -> str:
        return unpacked(self._rows["name"], row)

    def _shard(self, row: int) -> Shard:
        return self.shards[bisect_right(self._starts, row) - 1]

    def _place(self, row: int) -> AbstractContextManager[None]:
        return named(self.path(row), self.key(row))

    def read(self, row: int, member: str) -> bytes | None:
        """Bytes of an image, or another member in a shard; None where there is none. Raises: Unusable."""
        if not self.shards:
            return file_bytes(self.path(row)) if member == "image" else None
        span = self._value(member, row)
        if span is None:
            return None
        offset, size = span
        check_size(member, size)
        content = b""
        try:
            file = _opened(self._shard(row))  # held: another thread may evict it
            # leaves the position of the file, which forked processes share; a read may stop early
            while len(content) < size and (
                chunk := os.pread(file.fileno(), size - len(content), offset + len(content))
            ):
                content += chunk
        except OSError as error:
            raise Unusable(f"shard cannot be read: {error.strerror}") from None
        if len(content) < size:
            raise Unusable(f"{member} cannot be read in full: {len(content)} of {size} bytes")
        return content


def max_bytes(member: str) -> int:
    """Size of the largest member of a shard that is read."""
    return MAX_MEMBER_BYTES if member in ("image", "npy") else MAX_TEXT_BYTES


def check_size(member: str, size: int) -> None:
    """Raises Unusable for a member above `max_bytes`."""
    if size > max_bytes(member):
        raise Unusable(f"{member} is too large: {size} bytes, at most {max_bytes(member)} are read")


def metadata_in(content: bytes | None) -> dict[str, Any]:
    """Content of a json member, or {}. Raises: Unusable: it is no JSON object."""
    try:
        metadata = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        raise Unusable(f"json cannot be decoded: {error}") from None
    if not isinstance(metadata, dict):
        raise Unusable(f"json has the wrong type: {type(metadata).__name__} instead of an object")
    return metadata
