"""Captioned pictures in tar shards (WebDataset layout), read by position instead of as a stream.

A shard is a plain, uncompressed tar: `KEY.jpg|jpeg|png|webp` with `KEY.json` and / or `KEY.txt`, and for labelled sets
`KEY.cls`. Its headers are read once; from then on any sample is one seek away, so the order of samples can be a pure
function of (seed, epoch, position), a resume is one integer, and any number of shards serves any number of workers.
Nothing that a file contains is executed.
"""

import glob
import hashlib
import io
import json
import operator
import os
import re
import tarfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from common.data.broken import BrokenSample, BrokenSamples

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # the first that a sample has is its picture
COLUMNS = ("image", "json", "txt", "cls")  # members of a sample; the index holds (offset, size) of each
MAX_PIXELS = 100_000_000  # larger pictures are refused by their header, before they are decoded
MAX_MEMBER_BYTES = 1 << 28  # larger members are refused before they are read
ROLES = ("train", "val", "test", "second_test")

_BLOCK = 512  # bytes; a tar is a row of these
_CACHE_VERSION = 1
_OPEN_FILES = 32  # per process
_BRACES = re.compile(r"\{([^{}]*)\}")  # innermost pair
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


# ---------------------------------------------------------------------------------------------------------------------
# which files
# ---------------------------------------------------------------------------------------------------------------------


def expand_shards(pattern: str | Path | list[str] | list[Path], root: str | Path | None = None) -> list[Path]:
    """The shard files that a pattern names.

    Braces as in bash (`{00000..01287}`, `{0..9..3}`, `{train,val}`, nested), globs (`*`, `?`, `[...]`, `**`), `~` for
    the home folder. A folder means all `*.tar` directly in it. A name without a glob must exist: a shard that is
    missing from a brace range is an error, not a smaller data set.

    Args:
        pattern: one or several patterns.
        root: folder that relative patterns start from; None for the working folder.
    Returns:
        Absolute paths, sorted, each once.
    Raises:
        FileNotFoundError: if a name is missing or a pattern finds nothing; names pattern, root and what was looked for.
        ValueError: if the pattern is empty.
    """
    patterns = [os.fspath(item) for item in (pattern if isinstance(pattern, list | tuple) else [pattern])]
    if not patterns or not all(patterns):
        raise ValueError(f"the shard pattern is {pattern!r}; a path, a pattern with braces or globs, or a list of them")
    folder = Path.cwd() if root is None else Path.cwd() / Path(root).expanduser()
    found: set[str] = set()
    for item in patterns:
        item = str(Path(item).expanduser())
        # a name that exists as it stands may have braces or brackets of its own
        names = [item] if (folder / item).exists() else list(dict.fromkeys(_expand_braces(item)))
        missing = []
        for name in names:
            files = _files_of(folder, name)
            # not resolve(): a link keeps its own name (download caches link to files named by their hash)
            found.update(os.path.abspath(file) for file in files)  # noqa: PTH100
            if not files:
                missing.append(str(folder / name))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise FileNotFoundError(
                f"no shards for pattern {item!r} with root {str(folder)!r}: {len(missing)} of {len(names)} names "
                f"found nothing, looked for {', '.join(missing[:3])}{more}"
                + ("" if folder.is_dir() else "; the root folder does not exist")
            )
    return [Path(file) for file in sorted(found)]


def _files_of(folder: Path, name: str) -> list[Path]:
    path = folder / name
    if path.is_dir():
        return sorted(path.glob("*.tar"))
    if path.exists():
        return [path]
    # root_dir: a bracket in the root folder's own name is no pattern; Path.glob refuses absolute patterns
    matches = glob.glob(name, root_dir=folder, recursive=True)  # noqa: PTH207
    return [folder / match for match in matches if (folder / match).is_file()]


def _expand_braces(pattern: str) -> list[str]:
    """Bash's brace expansion; braces without comma or range stay as they are."""
    for match in _BRACES.finditer(pattern):
        span = _RANGE.fullmatch(match[1])
        if span:
            options = _range(*span.groups())
        elif "," in match[1]:
            options = match[1].split(",")
        else:
            continue
        if options is not None:
            head, tail = pattern[: match.start()], pattern[match.end() :]
            return [text for option in options for text in _expand_braces(head + option + tail)]
    return [pattern]


def _range(first: str, last: str, step: str | None) -> list[str] | None:
    numeric = [text.lstrip("-").isdigit() for text in (first, last)]
    if not any(numeric):
        low, high = ord(first), ord(last)
    elif all(numeric):
        low, high = int(first), int(last)
    else:
        return None  # {a..3} is no range
    stride = abs(int(step)) if step else 1
    stride = (stride or 1) if low <= high else -(stride or 1)
    values = range(low, high + (1 if stride > 0 else -1), stride)
    if not any(numeric):
        return [chr(value) for value in values]
    padded = any(text.lstrip("-").startswith("0") and len(text.lstrip("-")) > 1 for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{value:0{width}d}" for value in values]


# ---------------------------------------------------------------------------------------------------------------------
# index of one shard
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class ShardIndex:
    """Where the samples of one shard lie.

    `keys` (num_samples,) UTF-8 bytes; `members` (num_samples, len(COLUMNS), 2) int64: offset and size in bytes of the
    picture, json, txt and cls, -1 where there is none; `broken` what could not be indexed; `digest` SHA-256 of member
    names, sizes and captions; `file_size` of the shard when it was read.
    """

    keys: np.ndarray
    members: np.ndarray
    broken: list[BrokenSample]
    digest: str
    file_size: int


def index_shard(path: Path, allow_missing_captions: bool = False, hash_images: bool = False) -> ShardIndex:
    """Read the headers, and the caption bytes, of one shard.

    A shard that was cut gives its complete samples; the cut, and members without a partner, are listed as broken.

    Args:
        path: an uncompressed tar.
        allow_missing_captions: whether a picture without caption is a sample.
        hash_images: whether the digest covers the bytes of the pictures, not only their names and sizes.
    Raises:
        ValueError: if the file is empty, compressed or not a tar.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    others: dict[str, list[str]] = {}  # key -> its members that are neither picture nor caption
    broken: list[BrokenSample] = []
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        last_key = ""
        for member in _members(file, file_size, path):
            if isinstance(member, str):  # the shard is cut here
                # a header that is cut does not tell whose it was: the sample before it, if that is incomplete
                incomplete = last_key and not _has_pair(samples[last_key], allow_missing_captions)
                key = last_key if incomplete else ""
                samples.pop(key, None)
                broken.append(BrokenSample(path, key, member))
                break
            name, offset, size = member
            key, extension = _split_name(name)
            if offset + size > file_size:
                samples.pop(key, None)
                reason = f"shard is cut: {name} has {file_size - offset} of {size} bytes"
                broken.append(BrokenSample(path, key, reason))
                break
            if not key:
                continue
            column = "image" if extension in IMAGE_EXTENSIONS else extension
            if column not in COLUMNS:
                others.setdefault(key, []).append(name)
                continue
            last_key = key
            sample = samples.setdefault(key, {})
            if column in sample:
                broken.append(BrokenSample(path, key, f"second {column} member: {name} is ignored"))
                continue
            sample[column] = (offset, size)
            digest.update(f"{key}\0{extension}\0{size}\0".encode("utf-8", "surrogateescape"))
            if (column != "image" or hash_images) and size <= MAX_MEMBER_BYTES:
                file.seek(offset)
                digest.update(file.read(size))
    for key in [key for key, sample in samples.items() if not _has_pair(sample, allow_missing_captions)]:
        sample = samples.pop(key)
        if "image" in sample:
            reason = "picture without caption: no json or txt member"
        else:
            reason = f"no picture: it has only {', '.join(sorted(sample))}; accepted: {', '.join(IMAGE_EXTENSIONS)}"
        if key in others:
            reason += f" (and {', '.join(others[key][:3])})"
        broken.append(BrokenSample(path, key, reason))
    broken += [
        BrokenSample(path, key, f"no picture: unknown members {', '.join(names[:3])}")
        for key, names in others.items()
        if key not in samples and not any(key == item.key for item in broken)
    ]
    members = np.full((len(samples), len(COLUMNS), 2), -1, dtype=np.int64)
    for row, sample in zip(members, samples.values()):
        for column, place in sample.items():
            row[COLUMNS.index(column)] = place
    keys = np.array([key.encode("utf-8", "surrogateescape") for key in samples], dtype=np.bytes_)
    return ShardIndex(keys, members, broken, digest.hexdigest(), file_size)


def _has_pair(sample: dict[str, tuple[int, int]], allow_missing_captions: bool) -> bool:
    return "image" in sample and (allow_missing_captions or "json" in sample or "txt" in sample)


def _split_name(name: str) -> tuple[str, str]:
    """Key and lower-case extension as webdataset has them: the extension starts at the first dot of the file name."""
    folder, _, file = name.removeprefix("./").rpartition("/")
    stem, dot, extension = file.partition(".")
    if not stem or not dot or name.startswith("__"):
        return "", ""  # hidden files, files without extension, webdataset's own notes
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def _members(file: BinaryIO, file_size: int, path: Path) -> Iterator[tuple[str, int, int] | str]:
    """(name, offset, size) of each regular member; where the shard is cut, a sentence about it ends the stream.

    The last one may reach past the end of the file. `tarfile`'s own iterator is silent about a cut.
    """
    if file_size == 0:
        raise ValueError(f"{path} is empty; accepted: an uncompressed tar")
    position, override = 0, {}
    while True:
        file.seek(position)
        block = file.read(_BLOCK)
        if not block and position:
            yield f"shard ends without end-of-archive blocks: at byte {file_size}; samples may be missing"
            return
        if block == b"\0" * _BLOCK:
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if header.size < 0:  # base-256 numbers have a sign; going backwards would never end
                raise tarfile.HeaderError("negative size")
        except tarfile.HeaderError as error:
            if position == 0:
                raise ValueError(f"{path} is not a tar: {_looks_like(block)} ({error})") from None
            kind = "shard is cut in a header" if len(block) < _BLOCK else "unreadable header, the rest is not read"
            yield f"{kind}: at byte {position}"
            return
        start = position + _BLOCK
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            if header.size > MAX_MEMBER_BYTES or start + header.size > file_size:
                yield f"shard is cut in a header: at byte {position}"
                return
            body = file.read(header.size)
            if header.type == tarfile.GNUTYPE_LONGNAME:
                override["path"] = body.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                override.update(_pax_records(body))
            position = start + _padded(header.size)
            continue
        size = header.size
        if "size" in override:
            size = int(override["size"])
        if header.isreg():
            yield override.get("path", header.name), start, size
        if start + size > file_size:
            if not header.isreg():
                yield f"shard is cut in a header: at byte {position}"
            return
        no_body = (
            tarfile.LNKTYPE,
            tarfile.SYMTYPE,
            tarfile.CHRTYPE,
            tarfile.BLKTYPE,
            tarfile.DIRTYPE,
            tarfile.FIFOTYPE,
        )
        position = start + (0 if header.type in no_body else _padded(size))
        if header.type != tarfile.GNUTYPE_LONGLINK:
            override = {}


def _pax_records(body: bytes) -> dict[str, str]:
    """The path and size of a pax header, whose records read "LENGTH KEY=VALUE\\n"."""
    records, position = {}, 0
    while position < len(body):
        length, space, _ = body[position : position + 20].partition(b" ")
        if not space or not length.isdigit() or int(length) < len(length) + 2:
            break
        key, _, value = body[position + len(length) + 1 : position + int(length) - 1].partition(b"=")
        if key == b"path":
            records["path"] = value.decode("utf-8", "surrogateescape")
        elif key == b"size" and value.isdigit() and len(value) < 20:
            records["size"] = value.decode("ascii")
        position += int(length)
    return records


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _looks_like(block: bytes) -> str:
    for magic, kind in (
        (b"\x1f\x8b", "a gzip file, unpack it first (gunzip)"),
        (b"BZh", "a bzip2 file, unpack it first (bunzip2)"),
        (b"\xfd7zXZ\0", "an xz file, unpack it first (unxz)"),
        (b"\x28\xb5\x2f\xfd", "a zstd file, unpack it first (unzstd)"),
        (b"PK\x03\x04", "a zip file"),
        (b"version https://git-lfs", "a Git LFS pointer, fetch the file it stands for"),
    ):
        if block.startswith(magic):
            return kind
    return f"it starts with {block[:16]!r}"


# ---------------------------------------------------------------------------------------------------------------------
# cache of the index
# ---------------------------------------------------------------------------------------------------------------------


def _cached_index(path: Path, index_dir: Path | None, **options: bool) -> ShardIndex:
    """`index_shard` through a JSON file in `index_dir`; a stale, foreign or corrupt one is rebuilt."""
    if index_dir is None:
        return index_shard(path, **options)
    status = path.stat()
    identity = {
        "version": _CACHE_VERSION,
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        **options,
    }
    place = hashlib.sha256(json.dumps([str(path), options]).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    cache = index_dir / f"{path.stem}-{place}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _parse_cache(cache.read_bytes(), identity, path)
    index = index_shard(path, **options)
    content = {
        "identity": identity,
        "digest": index.digest,
        "keys": [key.decode("utf-8", "surrogateescape") for key in index.keys.tolist()],
        "members": index.members.tolist(),
        "broken": [[item.key, item.reason] for item in index.broken],
    }
    text = json.dumps(content)
    # the checksum tells a damaged cache from a good one: a flipped digit in an offset would still parse
    content["checksum"] = hashlib.sha256(text.encode("ascii")).hexdigest()
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    try:
        index_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="ascii")
        temporary.replace(cache)
    except OSError as error:
        warnings.warn(f"the shard index cannot be kept in {index_dir}: {error}", stacklevel=2)
    return index


def _parse_cache(text: bytes, identity: dict[str, Any], path: Path) -> ShardIndex:
    content = json.loads(text)
    checksum = content.pop("checksum")
    if content["identity"] != identity or checksum != hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest():
        raise ValueError("stale or damaged")
    keys = np.array([key.encode("utf-8", "surrogateescape") for key in content["keys"]], dtype=np.bytes_)
    members = np.array(content["members"], dtype=np.int64).reshape(len(keys), len(COLUMNS), 2)
    broken = [BrokenSample(path, key, reason) for key, reason in content["broken"]]
    return ShardIndex(keys, members, broken, content["digest"], identity["size"])


# ---------------------------------------------------------------------------------------------------------------------
# the data set
# ---------------------------------------------------------------------------------------------------------------------


class ShardDataset:
    """Captioned pictures in tar shards, by position.

    A sample that cannot be used raises `BrokenSample` when it is read; the caller decides what stands in for it. What
    the headers alone show (a cut shard, a picture without caption) is in `broken_at_open` and is no sample.
    Pictures are not rotated by their EXIF orientation, as in the usual CLIP pipelines.

    Args:
        pattern: shards, see `expand_shards`.
        root: folder that relative patterns start from.
        name: for logs and tables; None takes it from the first shard's name.
        role: "train" refuses empty captions; "val", "test" and "second_test" accept them, as there an empty caption is
            one more text to rank.
        max_broken_share: opening fails when more than this share of at least 100 samples is broken, in [0, 1].
        index_dir: folder that keeps the index between runs; None reads the headers at every opening.
        allow_empty_captions: overrides what `role` says.
        allow_missing_captions: pictures without caption are samples with an empty list (labelled sets with `KEY.cls`).
        decode_size: JPEGs may be decoded at 1/2, 1/4 or 1/8 as long as both sides keep at least this many pixels
            (several times faster for large photographs, pixels differ slightly); None decodes them in full.
        max_pixels: pictures above this are broken, judged by their header.
        hash_images: whether `fingerprint` covers the bytes of the pictures (reads every shard in full).
    Attributes:
        shards: the files, in order; sample indices run through them one after the other.
        broken_at_open: list of BrokenSample, not counted by len().
    Raises:
        FileNotFoundError: no shards, see `expand_shards`.
        ValueError: a shard is not a tar, nothing is left, too much is broken, or an argument is out of range.
    """

    def __init__(
        self,
        pattern: str | Path | list[str] | list[Path],
        root: str | Path | None = None,
        name: str | None = None,
        max_broken_share: float = 0.01,
        index_dir: str | Path | None = None,
        *,
        role: str = "train",
        allow_empty_captions: bool | None = None,
        allow_missing_captions: bool = False,
        decode_size: int | None = None,
        max_pixels: int = MAX_PIXELS,
        hash_images: bool = False,
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role is {role!r}; accepted: {', '.join(ROLES)}")
        if decode_size is not None and decode_size < 1:
            raise ValueError(f"decode_size is {decode_size!r}; accepted: at least 1 pixel, or None")
        if max_pixels < 1:
            raise ValueError(f"max_pixels is {max_pixels!r}; accepted: at least 1")
        self.max_broken_share, self.role = max_broken_share, role
        self.allow_empty_captions = role != "train" if allow_empty_captions is None else allow_empty_captions
        self.allow_missing_captions = allow_missing_captions
        self.decode_size, self.max_pixels = decode_size, max_pixels

        opened = BrokenSamples(max_broken_share)
        self.shards = expand_shards(pattern, root)
        folder = Path(index_dir).expanduser() if index_dir is not None else None
        self._indices = [
            _cached_index(shard, folder, allow_missing_captions=allow_missing_captions, hash_images=hash_images)
            for shard in self.shards
        ]
        self._starts = np.cumsum([0] + [len(index.members) for index in self._indices])
        self.broken_at_open = [broken for index in self._indices for broken in index.broken]
        if len(self) == 0:
            first = f"; first fault: {self.broken_at_open[0]}" if self.broken_at_open else ""
            raise ValueError(f"no captioned picture in {len(self.shards)} shards, {self.shards[0]} ...{first}")
        opened.saw(len(self))
        for broken in self.broken_at_open:
            opened.record(broken)
        opened.check()
        self.name = name if name is not None else _name_of(self.shards[0])
        self._files = _OpenFiles([index.file_size for index in self._indices])

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
        shard, row = self._locate(index)
        captions, metadata = self._captions(shard, row)
        sample = {
            "image": self._image(shard, row),
            "captions": captions,
            "image_id": self._image_id(shard, row, metadata),
        }
        label = self._label(shard, row)
        if label is not None:
            sample["label"] = label
        return sample

    def captions(self, index: int) -> list[str]:
        """The captions of one sample, without touching its picture.

        Raises:
            BrokenSample: as `__getitem__`, for the captions.
        """
        return self._captions(*self._locate(index))[0]

    def all_captions(self) -> Iterator[str]:
        """All captions in order, broken samples left out (building a tokenizer should not fail on one of them)."""
        for index in range(len(self)):
            with suppress(BrokenSample):
                yield from self.captions(index)

    def image_id(self, index: int) -> str:
        """`image_id` of the json as text, else the key of the sample."""
        shard, row = self._locate(index)
        return self._image_id(shard, row, self._metadata(shard, row))

    def label(self, index: int) -> int | str | None:
        """Content of the `.cls` member, None where there is none."""
        return self._label(*self._locate(index))

    def metadata(self, index: int) -> dict[str, Any]:
        """The whole json member of one sample (boxes, hierarchies, licences); {} where there is none."""
        return self._metadata(*self._locate(index))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over shard names and sizes, member names and sizes, and the bytes of all captions; 64 hex digits.

        A picture that is replaced by one of equal length shows only with `hash_images`.
        """
        digest = hashlib.sha256()
        for shard, index in zip(self.shards, self._indices):
            digest.update(f"{shard.name}\0{index.file_size}\0{index.digest}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    @cached_property
    def split_hash(self) -> str:
        """SHA-256 over image ids and captions in order; 64 hex digits.

        Says that two runs ranked the same pictures against the same texts, however these were packed into shards.
        Reads all captions once.
        """
        digest = hashlib.sha256()
        for index in range(len(self)):
            try:
                entry = [self.image_id(index), self.captions(index)]
            except BrokenSample as broken:
                entry = [broken.key, None]
            digest.update(json.dumps(entry).encode("ascii") + b"\n")
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"ShardDataset({self.name!r}, {len(self)} samples in {len(self.shards)} shards)"

    def _locate(self, index: int) -> tuple[int, int]:
        index = operator.index(index)
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"sample {index} of {self.name!r}, which has {len(self)}")
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return shard, position - int(self._starts[shard])

    def _broken(self, shard: int, row: int, reason: str) -> BrokenSample:
        return BrokenSample(self.shards[shard], self._key(shard, row), reason)

    def _key(self, shard: int, row: int) -> str:
        return bytes(self._indices[shard].keys[row]).decode("utf-8", "surrogateescape")

    def _read(self, shard: int, row: int, column: str) -> bytes | None:
        offset, size = self._indices[shard].members[row, COLUMNS.index(column)].tolist()
        if offset < 0:
            return None
        if size > MAX_MEMBER_BYTES:
            raise self._broken(shard, row, f"{column} is too large: {size} bytes, at most {MAX_MEMBER_BYTES} are read")
        content = self._files.read(shard, self.shards[shard], offset, size)
        if len(content) != size:
            raise self._broken(shard, row, f"{column} cannot be read in full: {len(content)} of {size} bytes")
        return content

    def _metadata(self, shard: int, row: int) -> dict[str, Any]:
        content = self._read(shard, row, "json")
        if content is None:
            return {}
        try:
            metadata = json.loads(content)
        except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
            raise self._broken(shard, row, f"json cannot be decoded: {error}") from None
        if not isinstance(metadata, dict):
            raise self._broken(shard, row, f"json has the wrong type: {type(metadata).__name__} instead of an object")
        return metadata

    def _captions(self, shard: int, row: int) -> tuple[list[str], dict[str, Any]]:
        metadata = self._metadata(shard, row)
        if "captions" in metadata:
            captions = metadata["captions"]
            if not isinstance(captions, list):
                kind = type(captions).__name__
                raise self._broken(shard, row, f"captions has the wrong type: {kind} instead of a list of strings")
        elif "caption" in metadata:
            captions = [metadata["caption"]]
        else:
            text = self._read(shard, row, "txt")
            try:
                captions = [] if text is None else [text.decode("utf-8").strip()]
            except UnicodeDecodeError as error:
                raise self._broken(shard, row, f"txt cannot be decoded: {error}") from None
        if not captions and not self.allow_missing_captions:
            raise self._broken(shard, row, "missing caption: neither captions nor caption in json, nor a txt member")
        for caption in captions:
            if not isinstance(caption, str):
                raise self._broken(shard, row, f"caption is not a string: {type(caption).__name__}")
            if not self.allow_empty_captions and not caption.strip():
                raise self._broken(shard, row, f"empty caption: {caption!r}")
        return captions, metadata

    def _image_id(self, shard: int, row: int, metadata: dict[str, Any]) -> str:
        image_id = metadata.get("image_id")
        if image_id is None:
            return self._key(shard, row)
        if isinstance(image_id, bool) or not isinstance(image_id, int | str):
            kind = type(image_id).__name__
            raise self._broken(shard, row, f"image_id has the wrong type: {kind} instead of a string or whole number")
        return str(image_id)

    def _label(self, shard: int, row: int) -> int | str | None:
        content = self._read(shard, row, "cls")
        if content is None:
            return None
        try:
            text = content.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise self._broken(shard, row, f"cls cannot be decoded: {error}") from None
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text

    def _image(self, shard: int, row: int) -> Image.Image:
        content = self._read(shard, row, "image")
        try:
            # opening reads the header only; naming the formats keeps Pillow from trying its many others
            image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP"))
            width, height = image.size
            if width * height > self.max_pixels:
                size = f"{width} x {height} pixels, at most {self.max_pixels} in all are decoded"
                raise self._broken(shard, row, f"picture is too large: {size}")
            if self.decode_size is not None:
                image.draft("RGB", (self.decode_size, self.decode_size))  # only JPEG has it, others ignore it
            image.load()
            return image.convert("RGB")
        except (BrokenSample, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others
            kind = type(error).__name__
            raise self._broken(shard, row, f"picture cannot be decoded: {kind}, {error}") from None


class _OpenFiles:
    """Reads ranges of files; handles are opened on first use in each process and only the latest stay open.

    Sharing a handle between processes would share its position, so a fork starts with none, and a pickle carries none.
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
                if len(self._files) > _OPEN_FILES:
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


def _name_of(shard: Path) -> str:
    """flickr8k-train-000003.tar gives flickr8k-train; 00000.tar, which has no name, its folder's."""
    return re.sub(r"[-_.]?\d*$", "", shard.stem) or shard.parent.name or "shards"
