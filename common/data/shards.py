"""Captioned pictures in tar shards (WebDataset layout), read by position instead of as a stream.

A shard is a plain, uncompressed tar: `KEY.jpg|jpeg|png|webp` with `KEY.json` and / or `KEY.txt`, and for labelled sets
`KEY.cls`. Its headers are read once; from then on any sample is one seek away, so the order of samples can be a pure
function of (seed, epoch, position), a resume is one integer, and any number of shards serves any number of workers.
Nothing that a file contains is executed.

Where the samples of one file lie: tar_index.py.
"""

import hashlib
import io
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.base.files import printable
from common.data.broken import BrokenSample, Unusable, check_opened, named
from common.data.decoding import check_reading_options, checked_captions, decode_picture, row_of, sampled_places
from common.data.shard_paths import expand_shards
from common.data.tar_index import COLUMNS, cached_index, given_image_id, max_bytes
from common.data.text_files import decoded

MAX_OPEN = 32  # files per process


class OpenFiles:
    """Reads ranges of many large files; handles are opened on first use in each process and only the latest stay open.

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


class ShardDataset:
    """Captioned pictures in tar shards, by position.

    A sample that cannot be used raises `BrokenSample` when it is read; the caller decides what stands in for it. What
    the headers alone show (a cut shard, a picture without caption) is in `broken_at_open` and is no sample.
    Pictures are not rotated by their EXIF orientation, as in the usual CLIP pipelines.

    Args:
        pattern: shards, see `expand_shards`.
        root: folder that relative patterns start from.
        role: "train" refuses empty captions and takes a picture as often as it is there; "val", "test" and
            "second_test" accept them, as there an empty caption is one more text to rank, and want an `image_id` once.
        max_broken_share: opening fails when more than this share of at least 100 samples is broken, in [0, 1].
        index_dir: folder that keeps the index between runs; None reads the headers at every opening.
        allow_missing_captions: a labelled set (`KEY.cls`), which is not ranked: pictures without caption are samples
            with an empty list, and ids may repeat.
        decode_size: see `decode_picture`.
        key: setting that names the shards, for messages; None is the role's own, data.train, ...
    Attributes:
        name: for logs and tables, from the first shard's.
        shards: the files, in order; sample indices run through them one after the other.
        broken_at_open: list of BrokenSample, not counted by len().
    Raises:
        FileNotFoundError: no shards, see `expand_shards`.
        ValueError: a shard is not a tar, nothing is left, too much is broken, an `image_id` is there twice in a set
            that is ranked, or an argument is out of range.
    """

    def __init__(
        self,
        pattern: str | Path | list[str] | list[Path],
        root: str | Path | None = None,
        max_broken_share: float = 0.01,
        index_dir: str | Path | None = None,
        *,
        role: str = "train",
        allow_missing_captions: bool = False,
        decode_size: int | None = None,
        key: str | None = None,
    ) -> None:
        check_reading_options(role, decode_size)
        self.role, self.decode_size, self.allow_missing_captions = role, decode_size, allow_missing_captions

        self.shards = expand_shards(pattern, root, f"data.{role}" if key is None else key)
        folder = Path(index_dir).expanduser() if index_dir is not None else None
        self._indices = [cached_index(shard, folder, allow_missing_captions) for shard in self.shards]
        self._starts = np.cumsum([0] + [len(index.members) for index in self._indices])
        self.broken_at_open = [broken for index in self._indices for broken in index.broken]
        empty = f"no captioned picture in {len(self.shards)} shards, {self.shards[0]} ..."
        check_opened(empty, len(self), self.broken_at_open, max_broken_share)
        self.name = _name_of(self.shards[0])
        folder_of_all = os.path.commonpath([shard.parent for shard in self.shards])
        self._shard_names = [shard.relative_to(folder_of_all).as_posix().removesuffix(".tar") for shard in self.shards]
        self._files = OpenFiles([index.file_size for index in self._indices])
        if role != "train" and not allow_missing_captions:
            self._check_each_once()

    def __len__(self) -> int:
        """Number of samples that the index holds."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample.

        Args:
            index: in [-len, len).
        Returns:
            {"image": Pillow image in RGB, "captions": list of str, "image_id": str}, and "label" (int, or str where the
            member is no whole number) where the sample has a `.cls` member.
        Raises:
            BrokenSample: if picture or captions cannot be used; names shard, key and reason.
            IndexError: if there is no such sample.
        """
        with self._sample(index) as (shard, row):
            metadata = self._metadata(shard, row)
            captions = self._captions(shard, row, metadata)
            image = decode_picture(self._read(shard, row, "image"), self.decode_size)
            sample = {"image": image, "captions": captions, "image_id": self._image_id(shard, row, metadata)}
            label = self._label(shard, row)
            return sample if label is None else {**sample, "label": label}

    def captions(self, index: int) -> list[str]:
        """The captions of one sample, without touching its picture.

        Raises:
            BrokenSample: as `__getitem__`, for the captions.
        """
        with self._sample(index) as (shard, row):
            return self._captions(shard, row, self._metadata(shard, row))

    def all_captions(self) -> Iterator[str]:
        """All captions in order, broken samples left out (building a tokenizer should not fail on one of them)."""
        for index in range(len(self)):
            with suppress(BrokenSample):
                yield from self.captions(index)

    def image_id(self, index: int) -> str:
        """`image_id` of the json as text, else shard and key, "test-00003/000017": a shard may begin its keys anew."""
        with self._sample(index) as (shard, row):
            return self._image_id(shard, row, self._metadata(shard, row))

    def label(self, index: int) -> int | str | None:
        """Content of the `.cls` member, None where there is none."""
        with self._sample(index) as (shard, row):
            return self._label(shard, row)

    def metadata(self, index: int) -> dict[str, Any]:
        """The whole json member of one sample (boxes, hierarchies, licences); {} where there is none."""
        with self._sample(index) as (shard, row):
            return self._metadata(shard, row)

    def array(self, index: int) -> np.ndarray | None:
        """The `.npy` member of one sample (metadata of DataComp's WILDS and fairness tasks); None where there is none.

        Raises:
            BrokenSample: if it cannot be read; pickled objects are refused.
        """
        with self._sample(index) as (shard, row):
            content = self._read(shard, row, "npy")
            if content is None:
                return None
            try:
                return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)  # np.load takes zip files, too
            except Exception as error:  # ValueError, EOFError, tokenize's own, MemoryError where the header claims much
                raise Unusable(f"npy cannot be decoded: {type(error).__name__}, {error}") from None

    def broken(self, index: int, reason: str) -> BrokenSample:
        """The fault that a caller finds in a sample, with its place."""
        shard, row = self._locate(index)
        return BrokenSample(self.shards[shard], self._key(shard, row), reason)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names and sizes of shards and members, all captions, and some pictures: `sampled_places`."""
        digest = hashlib.sha256()
        for shard, index in zip(self.shards, self._indices):
            digest.update(f"{shard.name}\0{index.file_size}\0{index.digest}\0".encode("utf-8", "surrogateescape"))
        for place in sampled_places(len(self)):
            with suppress(Unusable, OSError):
                digest.update(hashlib.sha256(self._read(*self._locate(place), "image") or b"").digest())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"ShardDataset({self.name!r}, {len(self)} samples in {len(self.shards)} shards)"

    def _check_each_once(self) -> None:
        """Of two samples of one picture each would count the other's captions as wrong.

        Raises:
            ValueError: names both places.
        """
        image_ids = np.concatenate([index.image_ids for index in self._indices])
        given = np.flatnonzero(image_ids >= 0)
        firsts = given[np.unique(image_ids[given], return_index=True)[1]]
        if len(firsts) < len(given):
            second = np.setdiff1d(given, firsts)[0]
            first = np.flatnonzero(image_ids == image_ids[second])[0]
            one, other = (self.broken(place, "") for place in (first, second))
            raise ValueError(
                f"picture {self.image_id(second)!r} is there twice, in {one} and in {other}; accepted in a set that is "
                "ranked: each image_id once, with all its captions"
            )

    def _locate(self, index: int) -> tuple[int, int]:
        position = row_of(index, self)
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return shard, position - int(self._starts[shard])

    @contextmanager
    def _sample(self, index: int) -> Iterator[tuple[int, int]]:
        """Shard and row of a sample; what is unusable inside gets its place."""
        shard, row = self._locate(index)
        with named(self.shards[shard], self._key(shard, row)):
            yield shard, row

    def _key(self, shard: int, row: int) -> str:
        return bytes(self._indices[shard].keys[row]).decode("utf-8", "surrogateescape")

    def _read(self, shard: int, row: int, column: str) -> bytes | None:
        """A member of a sample; None where there is none. This and what follows raise `Unusable`."""
        offset, size = self._indices[shard].members[row, COLUMNS.index(column)].tolist()
        if offset < 0:
            return None
        if size > max_bytes(column):
            raise Unusable(f"{column} is too large: {size} bytes, at most {max_bytes(column)} are read")
        content = self._files.read(shard, self.shards[shard], offset, size)
        if len(content) != size:
            raise Unusable(f"{column} cannot be read in full: {len(content)} of {size} bytes")
        return content

    def _text(self, shard: int, row: int, column: str) -> str | None:
        content = self._read(shard, row, column)
        try:
            return None if content is None else decoded(content).strip()
        except UnicodeDecodeError as error:
            raise Unusable(f"{column} cannot be decoded: {error}") from None

    def _metadata(self, shard: int, row: int) -> dict[str, Any]:
        content = self._read(shard, row, "json")
        try:
            metadata = {} if content is None else json.loads(content)
        except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
            raise Unusable(f"json cannot be decoded: {error}") from None
        if not isinstance(metadata, dict):
            raise Unusable(f"json has the wrong type: {type(metadata).__name__} instead of an object")
        return metadata

    def _captions(self, shard: int, row: int, metadata: dict[str, Any]) -> list[str]:
        if "captions" in metadata:
            captions = metadata["captions"]
            if not isinstance(captions, list):
                kind = type(captions).__name__
                raise Unusable(f"captions has the wrong type: {kind} instead of a list of strings")
        elif "caption" in metadata:
            captions = [metadata["caption"]]
        else:
            text = self._text(shard, row, "txt")
            captions = [] if text is None else [text]
        if captions:
            return checked_captions(captions, allow_empty=self.role != "train")
        if not self.allow_missing_captions:
            raise Unusable("missing caption: neither captions nor caption in json, nor a txt member")
        return []

    def _image_id(self, shard: int, row: int, metadata: dict[str, Any]) -> str:
        image_id = given_image_id(metadata)
        return f"{self._shard_names[shard]}/{self._key(shard, row)}" if image_id is None else image_id

    def _label(self, shard: int, row: int) -> int | str | None:
        text = self._text(shard, row, "cls")
        return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _name_of(shard: Path) -> str:
    """flickr8k-train-000003.tar gives flickr8k-train; 00000.tar, which has no name, its folder's."""
    return printable(re.sub(r"[-_.]?\d*$", "", shard.stem) or shard.parent.name or "shards")
