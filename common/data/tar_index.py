"""The samples of one tar shard: headers and captions read once, and cached between runs in an Arrow file.

A shard is an uncompressed tar. A sample is every member of one KEY: `KEY.jpg|jpeg|png|webp` with `KEY.json` and / or
`KEY.txt`, and `KEY.cls` and `KEY.npy` for labelled sets. Nothing in a file is executed.
"""

import hashlib
import json
import os
import re
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from common.base.files import write_atomically
from common.data.broken import BrokenSample, Unusable
from common.data.decoding import checked_captions, id_text
from common.data.pictures import MAX_MEMBER_BYTES, check_size, max_bytes, metadata_in, table_of
from common.data.text_files import decoded

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # the first that a sample has is its image
MEMBERS = ("image", "json", "txt", "cls", "npy")  # of a sample
_COLUMNS = ("name", "image", "json", "npy", "captions", "image_id", "label", "fault")  # of `ShardIndex.rows`

_CACHE_VERSION = 8
_DIGEST_SIZE = hashlib.sha256().digest_size
_BLOCK = 512  # bytes; a tar is a row of these
_MAX_ZEROS = 1 << 20  # bytes at the end; tar programs write 11 KB at most, by default
_NO_BODY = {
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE
}  # fmt: skip
_NOTES = re.compile("__[^/]*__/")  # webdataset's own folders; a key may begin with "__", as an id in base64 does
_NOT_A_TAR = {
    b"\x1f\x8b": "a gzip file, unpack it first (gunzip)",
    b"BZh": "a bzip2 file, unpack it first (bunzip2)",
    b"\xfd7zXZ\0": "an xz file, unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "a zstd file, unpack it first (unzstd)",
    b"PK\x03\x04": "a zip file",
    b"version https://git-lfs": "a Git LFS pointer, fetch the file it stands for",
}  # first bytes -> what the file is


class ShardIndex(NamedTuple):
    """Content of one shard.

    rows: samples, see `table_of`. broken: the rest. digest: SHA-256 of member names, sizes and texts.
    file_size, modified: bytes and time (ns) of the shard when it was read.
    """

    rows: pa.Table
    broken: list[BrokenSample]
    digest: str
    file_size: int
    modified: int


class _Member(NamedTuple):
    # One file of a sample. content: of json, txt and cls, if that is not too large.

    offset: int
    size: int
    content: bytes = b""


class _Damage(Exception):
    # Where reading a shard must stop; name: of the member that is damaged, where that is known.

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def index_shard(path: Path, allow_missing_captions: bool = False) -> ShardIndex:
    """Reads the headers and the captions of one shard.

    A damaged shard gives the complete samples before the damage. Listed as broken are the damage, with its byte and the
    number of these samples, and members without a partner.

    Raises:
        ValueError: the file is empty, compressed or not a tar.
    """
    # `lost` keys: a sample with an unusable member does not come back when more of its members follow
    samples: dict[str, dict[str, _Member]] = {}
    others: dict[str, list[str]] = {}  # key -> its members that are neither image nor caption
    broken: list[BrokenSample] = []
    digest = hashlib.sha256()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        file_size = status.st_size
        last_key, lost, damage = "", set(), None
        try:
            for name, offset, size, unusable in _members(file, file_size, path):
                key, extension = _split_name(name)
                if not key or key in lost:
                    continue
                # what the member is: an image, a caption, an array, or nothing of a sample
                column = "image" if extension in IMAGE_EXTENSIONS else extension
                if column not in MEMBERS:
                    others.setdefault(key, []).append(name)
                    continue
                if unusable:
                    samples.pop(key, None)
                    lost.add(key)
                    broken.append(BrokenSample(path, key, unusable))
                    continue
                # the first member of a kind counts; captions and arrays enter the digest by content, images by size
                last_key = key
                sample = samples.setdefault(key, {})
                if column in sample:
                    broken.append(BrokenSample(path, key, f"second {column} member: {name} is ignored"))
                    continue
                sample[column] = _Member(offset, size)
                digest.update(f"{key}\0{extension}\0{size}\0".encode("utf-8", "surrogateescape"))
                if column != "image" and size <= max_bytes(column):
                    file.seek(offset)
                    content = file.read(size)
                    digest.update(content)
                    if column != "npy":
                        sample[column] = _Member(offset, size, content)
        except _Damage as error:
            damage, spoilt = error, _split_name(error.name)[0]
            # an unreadable header does not tell whose it was: the sample before it, if that is incomplete
            if not spoilt and last_key not in lost and not _has_pair(samples.get(last_key, {}), allow_missing_captions):
                spoilt = last_key
            samples.pop(spoilt, None)
    # samples without an image or a caption, and members that belong to no sample
    for key in [key for key, sample in samples.items() if not _has_pair(sample, allow_missing_captions)]:
        sample = samples.pop(key)
        if "image" in sample:
            reason = "image without caption: no json or txt member"
        else:
            reason = (
                f"no image: it has only {', '.join(sorted(sample))}; expected one of: {', '.join(IMAGE_EXTENSIONS)}"
            )
        if key in others:
            reason += f" (and {', '.join(others[key][:3])})"
        broken.append(BrokenSample(path, key, reason))
    if damage is not None:
        broken.append(BrokenSample(path, spoilt, f"{damage}; samples read before it: {len(samples)}"))
    named = {item.key for item in broken}
    broken += [
        BrokenSample(path, key, f"no image: unknown members {', '.join(names[:3])}")
        for key, names in others.items()
        if key not in samples and key not in named
    ]
    rows = [_row(key, sample, allow_missing_captions) for key, sample in samples.items()]
    table = table_of({column: [row.get(column) for row in rows] for column in _COLUMNS})
    return ShardIndex(table, broken, digest.hexdigest(), file_size, status.st_mtime_ns)


def _row(key: str, sample: dict[str, _Member], allow_missing_captions: bool) -> dict[str, Any]:
    spans = {member: sample[member][:2] for member in ("image", "json", "npy") if member in sample}
    row = {"name": key, **spans}
    try:
        row["label"] = _text(sample, "cls")
        metadata = metadata_in(_content(sample, "json"))
        if metadata.get("image_id") not in (None, ""):
            row["image_id"] = id_text(metadata["image_id"])
        captions = _captions(metadata, sample)
        if captions:
            row["captions"] = checked_captions(captions, allow_empty=True)
        elif not allow_missing_captions:
            raise Unusable("missing caption: neither captions nor caption in json, nor a txt member")
    except Unusable as error:
        row["fault"] = str(error)
    return row


def _captions(metadata: dict[str, Any], sample: dict[str, _Member]) -> list[Any]:
    if "captions" in metadata:
        captions = metadata["captions"]
        if not isinstance(captions, list):
            raise Unusable(f"captions has the wrong type: {type(captions).__name__} instead of a list of strings")
        return captions
    if "caption" in metadata:
        return [metadata["caption"]]
    text = _text(sample, "txt")
    return [] if text is None else [text]


def _text(sample: dict[str, _Member], member: str) -> str | None:
    content = _content(sample, member)
    try:
        return None if content is None else decoded(content).strip()
    except UnicodeDecodeError as error:
        raise Unusable(f"{member} cannot be decoded: {error}") from None


def _content(sample: dict[str, _Member], member: str) -> bytes | None:
    if member not in sample:
        return None
    check_size(member, sample[member].size)
    return sample[member].content


def _has_pair(sample: dict[str, _Member], allow_missing_captions: bool) -> bool:
    return "image" in sample and (allow_missing_captions or "json" in sample or "txt" in sample)


def _split_name(name: str) -> tuple[str, str]:
    # key and lower-case extension as in webdataset: the extension starts at the first dot of the file name
    folder, _, file = name.removeprefix("./").rpartition("/")
    stem, dot, extension = file.partition(".")
    if not stem or not dot or _NOTES.match(name):
        return "", ""  # hidden files, files without extension, webdataset's own notes
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def _members(file: BinaryIO, file_size: int, path: Path) -> Iterator[tuple[str, int, int, str]]:
    # (name, offset, size, "" or why its bytes are not its content) of each file.
    #
    # `tarfile`'s own iterator is silent about a cut, and about anything behind a block of zeros.
    if file_size == 0:
        raise ValueError(f"{path} is empty; expected: an uncompressed tar")
    position, override = 0, {}
    last_name, last_end = "", 0  # of the member before: its name, and the byte behind its content
    while True:
        at = position
        file.seek(at)
        block = file.read(_BLOCK)
        if at and block in (b"", b"\0" * _BLOCK):
            _check_end(file, at, file_size)
            return
        # a pax header or GNU long name describes the member behind it
        try:
            header = _header(block)
            start, size = at + _BLOCK, header.size
            if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
                if size > MAX_MEMBER_BYTES or start + size > file_size:
                    raise _Damage(f"shard is cut in a header: at byte {at}")
                position = start + _padded(size)
                override.update(_extension(header.type, file.read(size)))
                continue
        except tarfile.HeaderError as error:
            if at == 0:
                raise ValueError(f"{path} is not a tar: {_looks_like(block)} ({error})") from None
            if len(block) < _BLOCK:
                raise _Damage(f"shard is cut in a header: at byte {at}") from None
            file.seek(last_end)
            is_shifted = any(file.read(-last_end % _BLOCK))  # bytes are missing in the member before, or too many
            raise _Damage(f"unreadable header: at byte {at}", last_name if is_shifted else "") from None
        # the member itself, with what such headers have changed
        name, size = override.get("path", header.name), int(override.get("size", size))
        body = 0 if header.type in _NO_BODY else size
        if start + body > file_size:
            raise _Damage(
                f"shard is cut: {name} has {max(0, file_size - start)} of {body} bytes, it ends at byte {file_size}",
                name,
            )
        if header.isreg():  # sparse ones too
            is_sparse = header.type == tarfile.GNUTYPE_SPARSE or "sparse" in override
            yield name, start, size, f"sparse file: {name} is stored with holes (tar --sparse)" if is_sparse else ""
        elif header.type in (tarfile.LNKTYPE, tarfile.SYMTYPE):
            yield name, start, 0, f"link: {name} is a link to {header.linkname}, its content is not under its name"
        last_name, last_end, position = name, start + body, start + _padded(body)
        if header.type != tarfile.GNUTYPE_LONGLINK:
            override = {}


def _check_end(file: BinaryIO, at: int, file_size: int) -> None:
    # a tar ends in zeros behind its last member, and not in too many. Raises: _Damage.
    if at >= file_size:
        raise _Damage(f"shard ends without end-of-archive blocks: at byte {file_size}; samples may be missing")
    if file.read(_MAX_ZEROS).strip(b"\0"):
        raise _Damage(f"zeros in the place of a header: at byte {at}, other bytes follow")
    if file_size - at > _MAX_ZEROS:
        raise _Damage(f"shard ends in zeros: at byte {at}, {file_size - at} bytes to its end; an unfinished download?")


def _header(block: bytes) -> tarfile.TarInfo:
    header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    if header.size < 0:  # base-256 numbers have a sign; going backwards would never end
        raise tarfile.HeaderError("negative size")
    if block[257:265] == b"ustar  \0":  # GNU's own format may have times where ustar has the first part of a name
        header.name = tarfile.nts(block[:100], "utf-8", "surrogateescape")
    return header


def _extension(kind: bytes, body: bytes) -> dict[str, str]:
    # path and size of the member that follows, and whether it is sparse, from a GNU long name or a pax header
    if kind == tarfile.GNUTYPE_LONGNAME:
        name = body.partition(b"\0")[0]
        if not name:
            raise tarfile.HeaderError("empty long name")
        return {"path": name.decode("utf-8", "surrogateescape")}
    records, position = {}, 0
    while body[position : position + 1].strip(b"\0"):  # each record reads "LENGTH KEY=VALUE\n"
        digits, space, _ = body[position : position + 20].partition(b" ")
        end = position + int(digits) if space and digits.isdigit() else 0
        key, equals, value = body[position + len(digits) + 1 : end - 1].partition(b"=")
        if not equals or body[end - 1 : end] != b"\n":
            raise tarfile.HeaderError("bad pax record")
        if key in (b"path", b"GNU.sparse.name"):
            records["path"] = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise tarfile.HeaderError("bad size in a pax record")
            records["size"] = value.decode("ascii")
        if key.startswith(b"GNU.sparse."):
            records["sparse"] = "yes"
        position = end
    return records


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _looks_like(block: bytes) -> str:
    kind = next((kind for magic, kind in _NOT_A_TAR.items() if block.startswith(magic)), "")
    return kind or f"it starts with {block[:16]!r}"


def cached_index(path: Path, index_dir: Path | None, allow_missing_captions: bool = False) -> ShardIndex:
    """`index_shard` through an Arrow file in `index_dir`, with its SHA-256; a stale or damaged one is rebuilt."""
    if index_dir is None:
        return index_shard(path, allow_missing_captions)
    status = path.stat()
    identity = json.dumps([_CACHE_VERSION, str(path), status.st_size, status.st_mtime_ns, allow_missing_captions])
    place = hashlib.sha256(json.dumps([str(path), allow_missing_captions]).encode()).hexdigest()[:12]
    cache = index_dir / f"{path.stem}-{place}.arrow"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _read_cached(cache, identity, path, status)
    index = index_shard(path, allow_missing_captions)
    broken = [[item.key, item.reason] for item in index.broken]
    notes = {"identity": identity, "digest": index.digest, "broken": json.dumps(broken)}
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, index.rows.schema.with_metadata(notes)) as writer:
        writer.write_table(index.rows)
    content = stream.getvalue()
    try:
        write_atomically(cache, content.to_pybytes() + hashlib.sha256(content).digest())
    except OSError as error:
        warnings.warn(f"the shard index cannot be cached in {index_dir}: {error}", stacklevel=2)
    return index


def _read_cached(cache: Path, identity: str, path: Path, status: os.stat_result) -> ShardIndex:
    # the rows stay in the file: processes share its memory. Raises where the file is stale or damaged.
    content = pa.memory_map(os.fsencode(cache)).read_buffer()
    body, checksum = content[:-_DIGEST_SIZE], content[-_DIGEST_SIZE:]
    # the checksum shows damage: a flipped bit in an offset would still be read
    if hashlib.sha256(body).digest() != checksum.to_pybytes():
        raise ValueError("damaged")
    rows = pa.ipc.open_stream(body).read_all()
    notes = rows.schema.metadata
    if notes[b"identity"] != identity.encode():
        raise ValueError("stale")
    broken = [BrokenSample(path, key, reason) for key, reason in json.loads(notes[b"broken"])]
    stated = notes[b"digest"].decode(), status.st_size, status.st_mtime_ns
    return ShardIndex(rows.replace_schema_metadata(None), broken, *stated)
