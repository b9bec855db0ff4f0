"""Where the samples of one tar shard lie: its headers read once, and kept between runs in a small JSON file.

A sample is every member of one KEY: `KEY.jpg|jpeg|png|webp` with `KEY.json` and / or `KEY.txt`, and `KEY.cls` for
labelled sets. Nothing that a file contains is executed.
"""

import hashlib
import json
import os
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.data.broken import BrokenSample

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # the first that a sample has is its picture
COLUMNS = ("image", "json", "txt", "cls")  # members of a sample; the index holds (offset, size) of each
MAX_MEMBER_BYTES = 1 << 28  # larger members are refused before they are read

_CACHE_VERSION = 1
_BLOCK = 512  # bytes; a tar is a row of these
_NO_BODY = {
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE
}  # fmt: skip
_NOT_A_TAR = {
    b"\x1f\x8b": "a gzip file, unpack it first (gunzip)",
    b"BZh": "a bzip2 file, unpack it first (bunzip2)",
    b"\xfd7zXZ\0": "an xz file, unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "a zstd file, unpack it first (unzstd)",
    b"PK\x03\x04": "a zip file",
    b"version https://git-lfs": "a Git LFS pointer, fetch the file it stands for",
}  # first bytes -> what the file is


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
        position = start + (0 if header.type in _NO_BODY else _padded(size))
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
    kind = next((kind for magic, kind in _NOT_A_TAR.items() if block.startswith(magic)), "")
    return kind or f"it starts with {block[:16]!r}"


def cached_index(path: Path, index_dir: Path | None, **options: bool) -> ShardIndex:
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
