"""From rows to captioned images, for the readers of annotation files and tables.

`pictures_of` checks the rows of a file at opening, puts those of one image together and lists unusable ones.
`RowReader` checks the rows of larger tables when they are read.
"""

import hashlib
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image

from common.data.broken import BrokenSample, Unusable, named
from common.data.decoding import FILE_FORMATS, checked_captions, content_hash, decode_picture, id_text, read_picture

_MAX_NAME, _MAX_PATH = 255, 1000  # bytes of one name, characters of a whole path; file systems refuse longer ones


class Row(NamedTuple):
    """One row as its file has it, unchecked.

    captions: a string or a list of them. caption_ids: one each, or None.
    inside: the row holds the image and needs no path.
    image_id: None or "" is the path, or the place where there is none.
    fault: why it is no row at all.
    """

    place: str
    path: Any = None
    captions: Any = None
    image_id: Any = None
    caption_ids: Any = None
    inside: bool = False
    fault: str = ""
    size: int | None = None  # bytes of an image inside; None = not known


@dataclass
class Entry:
    """One checked image.

    path: see `picture_path`; "" where the image lies in a row.
    image_id: unique in a ranked set.
    caption_ids: one per caption, >= 0, or None for an unknown one; None where the file gives none.
    """

    path: str
    captions: list[str]
    image_id: str
    caption_ids: list[int | None] | None = None
    rows: list[int] = field(default_factory=list)
    size: int | None = None


def pictures_of(
    rows: Iterable[Row], source: str | Path, role: str, together: Literal["path", "image_id"] | None = None
) -> tuple[list[Entry], list[BrokenSample]]:
    """The images of a file, and its unusable rows.

    Args:
        role: "train" refuses empty captions. In the others a row that repeats an image or id is broken: each of two
            samples of one image would count the other's captions as wrong.
        together: rows equal in it are one image, at the place of the first, with the captions of all.
    """
    entries, broken = [], []
    seen: dict[tuple[str, str], tuple[str, Entry]] = {}  # ("path" or "image_id", its value) -> place and image
    for number, row in enumerate(rows):
        try:
            entry = _checked(row, number, allow_empty=role != "train")
            keys = [("image_id", entry.image_id)] + ([("path", entry.path)] if entry.path else [])
            before = next((seen[key] for key in keys if key[0] == together and key in seen), None)
            if before is not None:
                _add(*before, entry)
                continue
            for key in keys if role != "train" else ():
                if key in seen:
                    raise Unusable(f"duplicate {key[0]}: {key[1]!r}, first at {seen[key][0]}")
            seen |= dict.fromkeys(keys, (row.place, entry))
            entries.append(entry)
        except Unusable as error:
            broken.append(BrokenSample(source, row.place, str(error)))
    return entries, broken


def _checked(row: Row, number: int, allow_empty: bool) -> Entry:
    if row.fault:
        raise Unusable(row.fault)
    captions = checked_captions(row.captions, allow_empty)
    caption_ids = _id_list(row.caption_ids, len(captions))
    path = "" if row.inside else picture_path(row.path)
    image_id = (path or row.place) if row.image_id in (None, "") else id_text(row.image_id)
    return Entry(path, captions, image_id, caption_ids, [number], row.size)


def _add(place: str, entry: Entry, more: Entry) -> None:
    for key in ("image_id", "path", "size"):
        here, there = getattr(more, key), getattr(entry, key)
        if here and there and here != there:
            raise Unusable(f"{key} differs: {here!r}, the same image has {there!r} at {place}")
    both = entry.caption_ids is not None and more.caption_ids is not None
    entry.caption_ids = entry.caption_ids + more.caption_ids if both else None
    entry.captions += more.captions
    entry.rows += more.rows


def _id_list(ids: Any, count: int) -> list[int | None] | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != count:
        raise Unusable(f"caption ids do not fit: {str(ids)[:60]} for {count} captions")
    for number in ids:
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_whole and 0 <= number < 1 << 63):
            raise Unusable(f"caption id has the wrong type: {number!r} instead of a whole number from 0")
    return ids if any(number is not None for number in ids) else None


def picture_path(text: Any) -> str:
    """The image path of an annotation file, normalised: "./a.jpg" is "a.jpg".

    Returns:
        Absolute, or relative to the image folder, which it may leave ("../images/a.jpg"). Other bytes than UTF-8 stand
        in it as in Python's file names.
    Raises:
        Unusable: it is no path of a file.
    """
    if not isinstance(text, str) or not text:
        raise Unusable(f"missing image: its path is {text!r}")
    path = posixpath.normpath(text)
    try:
        longest = max(map(len, os.fsencode(path).split(b"/")))
    except UnicodeEncodeError:
        raise Unusable(f"path of the image has half a surrogate pair: {text!r}") from None
    if "\0" in path or longest > _MAX_NAME or len(path) > _MAX_PATH:
        raise Unusable(f"missing image: no file has the path {text[:60]!r}")
    return path


@dataclass(frozen=True)
class RowReader:
    """From one row of a table (arrow, parquet, JSON) to a sample.

    image, caption_columns, image_id, caption_ids: names of columns.
    folder: where relative image paths start.
    """

    source: str
    image: str
    caption_columns: tuple[str, ...]
    image_id: str | None
    caption_ids: str | None
    folder: Path
    role: str
    decode_size: int | None

    @property
    def text_columns(self) -> list[str]:
        """Columns that hold no image."""
        return [name for name in (*self.caption_columns, self.image_id, self.caption_ids) if name is not None]

    def captions(self, row: dict[str, Any], index: int) -> list[str]:
        """Raises: BrokenSample. Of a stream, the index is the position in the run."""
        with named(self.source, f"row {index}"):
            return checked_captions(self._cells(row), allow_empty=self.role != "train")

    def picture(self, row: dict[str, Any], index: int) -> Image.Image:
        """In RGB. Raises: BrokenSample."""
        content = picture_bytes(row[self.image])
        with named(self.source, f"row {index}"):
            if isinstance(content, bytes):
                return decode_picture(content, self.decode_size, FILE_FORMATS)
            if not isinstance(content, str) or not content:
                raise Unusable(f"missing image: {self.image} is {str(content)[:40]!r}")
            return read_picture(self.folder / picture_path(content), self.decode_size)

    def picture_hash(self, row: dict[str, Any]) -> bytes:
        """SHA-256 of the image's file or bytes; b"" where it cannot be read."""
        content = picture_bytes(row[self.image])
        if isinstance(content, bytes):
            return hashlib.sha256(content).digest()
        with suppress(Unusable, ValueError):
            return content_hash(self.folder / picture_path(content))
        return b""

    def identity(self, row: dict[str, Any], index: int) -> str | None:
        """The row's id, else a hash of its image's bytes, or without bytes its path; None without an image.

        Raises:
            BrokenSample: an id or path cannot be used.
        """
        with named(self.source, f"row {index}"):
            image_id = None if self.image_id is None else row[self.image_id]
            if image_id is not None and image_id != "":
                return id_text(image_id)
            content = picture_bytes(row[self.image])
            if isinstance(content, bytes):
                return hashlib.blake2b(content, digest_size=16).hexdigest()
            # the library makes the paths of an image folder absolute; an id should not change with the machine
            folder = self.folder.as_posix().rstrip("/") + "/"
            return picture_path(content).removeprefix(folder) if isinstance(content, str) and content else None

    def as_row(self, row: dict[str, Any], index: int) -> Row:
        """For `pictures_of`; a fault of the image shows when it is read, that of a path at once."""
        content = picture_bytes(row[self.image])
        path = content if isinstance(content, str) and content else None
        size = content if isinstance(content, int) else None  # instead of bytes, where the row has an id
        try:
            image_id = self.identity(row, index)
            return Row(f"row {index}", path, self._cells(row), image_id, inside=path is None, size=size)
        except BrokenSample as error:
            return Row(error.key, fault=error.reason)

    def _cells(self, row: dict[str, Any]) -> Any:
        return captions_in([row[name] for name in self.caption_columns])


def captions_in(cells: list[Any]) -> Any:
    """A row's cells of captions; of several columns an empty cell is no caption."""
    if len(cells) == 1:
        return cells[0]
    texts = [text for cell in cells for text in (cell if isinstance(cell, list) else [cell])]
    return [text for text in texts if text is not None and str(text).strip()]


def refuse_splits(where: Any, values: Iterable[Any]) -> None:
    """Refuses a file whose column or key `split` names several splits: one would be trained on and ranked as another.

    Raises:
        ValueError: it does.
    """
    names = list(dict.fromkeys(str(value).strip() for value in values if value is not None and str(value).strip()))
    if len(names) > 1:
        raise ValueError(
            f"{where}: its 'split' names several splits, {', '.join(names[:5])}; expected: a file for each of them"
        )


def named_columns(text: str, columns: Collection[str]) -> list[str]:
    """The columns of a setting, separated by commas; a single name may hold a comma."""
    return [text] if text in columns else [name.strip() for name in text.split(",")]


def picture_bytes(value: Any) -> Any:
    """Bytes or path of an image, from {"bytes", "path"}, bytes, or a path."""
    if isinstance(value, dict):
        return value.get("path") if value.get("bytes") is None else value["bytes"]
    return value


def rows_of_batch(batch: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a batch of columns."""
    return (dict(zip(batch, values)) for values in zip(*batch.values()))


def captions_of(batches: Iterable[dict[str, list[Any]]], reader: RowReader) -> Iterator[str]:
    """All captions in order, without unusable rows."""
    for batch in batches:
        for row in rows_of_batch(batch):
            with suppress(BrokenSample):
                yield from reader.captions(row, -1)
