"""Captioned images from Hugging Face data sets, by position or as a stream.

Sources: a folder of `save_to_disk`; arrow, parquet or JSON files; a folder that the library recognises (imagefolder
with metadata, parquet by split); a hub name, which needs a network or its cache. Nothing in a data set is executed.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from common.data.broken import BrokenSample, check_opened
from common.data.decoding import row_of, sampled_places
from common.data.hugging_face_files import label_of, place_of, stream_of, table_of
from common.data.rows import RowReader, captions_of, named_columns, pictures_of, refuse_splits, rows_of_batch
from common.data.streamed import StreamedPairs

# usual names of columns, the preferred one first
IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "img", "picture", "file_name", "path")
CAPTION_COLUMNS = ("captions", "caption", "sentences", "text", "txt", "title")


class HuggingFacePairs:
    """Rows with random access, each an image with its captions.

    In a ranked set, rows of one `RowReader.identity` are one sample with the captions of all, in the place of the
    first; rows with unusable captions or id are in `broken_at_open`. Reading any other unusable row raises
    `BrokenSample`.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        reader: RowReader,
        name: str,
        max_broken_share: float = 0.01,
        is_ranked: bool = False,
    ) -> None:
        if not len(rows):
            raise ValueError(f"{reader.source}: no rows in {name}")
        self.name, self.reader = name, reader
        self.broken_at_open: list[BrokenSample] = []
        self._rows = rows.select_columns([reader.image, *reader.text_columns])
        self._texts = rows.select_columns(reader.text_columns)  # reading a caption should not read its image
        self._groups: list[list[int]] | None = None  # None: each row is a sample
        if is_ranked:
            self._group_by_picture(max_broken_share)

    def _group_by_picture(self, max_broken_share: float) -> None:
        rows = (self.reader.as_row(row, number) for number, row in enumerate(_rows_to_group(self._rows, self.reader)))
        entries, self.broken_at_open = pictures_of(rows, self.reader.source, self.reader.role, together="image_id")
        empty = f"{self.reader.source}: no captioned image in {self.name}"
        num_good = len(self._rows) - len(self.broken_at_open)
        check_opened(empty, num_good, self.broken_at_open, max_broken_share)
        if len(entries) < len(self._rows):
            self._groups = [entry.rows for entry in entries]

    def __len__(self) -> int:
        return len(self._rows) if self._groups is None else len(self._groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": Pillow image in RGB, "captions": list of str, "image_id": `RowReader.identity`}."""
        first, captions = self._rows_of(index)[0], self.captions(index)
        row = self._rows[first]
        image_id = self._image_id(row, first)
        return {"image": self.reader.picture(row, first), "captions": captions, "image_id": image_id}

    def captions(self, index: int) -> list[str]:
        """Without reading the image."""
        return [text for row in self._rows_of(index) for text in self.reader.captions(self._texts[row], row)]

    def all_captions(self) -> Iterator[str]:
        """In order, without broken rows."""
        return captions_of(self._texts.iter(1000), self.reader)

    def image_id(self, index: int) -> str:
        first = self._rows_of(index)[0]
        return self._image_id(self._rows[first], first)

    def caption_ids(self, index: int) -> list[int] | None:
        """The column `sentids` or `caption_ids`, or None."""
        if self.reader.caption_ids is None:
            return None
        ids = [self._texts[row][self.reader.caption_ids] for row in self._rows_of(index)]
        if None in ids:
            return None
        return [number for group in ids for number in (group if isinstance(group, list) else [group])]

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for batch in self._rows.with_format("arrow").iter(1000):
            for name in self.reader.text_columns:
                digest.update(json.dumps(batch[name].to_pylist(), ensure_ascii=True, default=str).encode())
            digest.update(json.dumps(_picture_sizes(batch[self.reader.image], self.reader.folder)).encode())
        for place in sampled_places(len(self._rows)):
            digest.update(self.reader.picture_hash(self._rows[place]))
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"HuggingFacePairs({self.name!r}, {len(self)} samples of {self.reader.source})"

    def _image_id(self, row: dict[str, Any], number: int) -> str:
        image_id = self.reader.identity(row, number)
        return f"row {number}" if image_id is None else image_id

    def _rows_of(self, index: int) -> list[int]:
        row = row_of(index, self)
        return [row] if self._groups is None else self._groups[row]


def open_hugging_face(
    source: str,
    *,
    split: str | None = None,
    root: Path | None = None,
    images: str | Path | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    role: str = "train",
    stream_buffer: int = 0,
    is_ranked: bool = False,
    seed: int = 0,
    max_broken_share: float = 0.01,
    decode_size: int | None = None,
    key: str | None = None,
) -> HuggingFacePairs | StreamedPairs:
    """One split of a data set.

    Args:
        source: a folder, files (see `expand_shards`), or a hub name, "user/set" or "user/set:configuration". An
            existing file or folder is never searched on the hub.
        split: None takes the role's: "train"; "validation", "val", "valid" or "dev"; "test". Files named one by one
            have no splits.
        images: folder of relative image paths; None takes the source's.
        image_column, caption_column: None takes the first existing one of `IMAGE_COLUMNS`, `CAPTION_COLUMNS`. An image
            is bytes or a path, captions are a string or a list of strings. Commas separate several caption columns,
            whose empty cells are no captions.
        stream_buffer: rows; above 0 the set is a `StreamedPairs`.
        is_ranked: rows of one image are one sample also in the role "train", as in all others.
    Raises:
        ValueError: no such split or column, a column of another type, no rows, a broken link, a source that cannot be
            loaded.
        FileNotFoundError: a file or folder is missing.
    """
    place = place_of(source, root, f"data.{role}" if key is None else key)
    if stream_buffer:
        rows, split, num_rows, files = stream_of(source, place, split, role)
    else:
        rows, split = table_of(source, place, split, role)
    # which column is what; an unknown name or a type that can never serve is refused before a row is read
    where = str(place[0]) if place else source
    columns = _column_names(rows)
    named = [None] if caption_column is None else named_columns(caption_column, columns)
    reader = RowReader(
        source=where,
        image=_column(columns, image_column, IMAGE_COLUMNS, "image_column", where),
        caption_columns=tuple(_column(columns, name, CAPTION_COLUMNS, "caption_column", where) for name in named),
        image_id="image_id" if "image_id" in columns else None,
        caption_ids=next((name for name in ("caption_ids", "sentids") if name in columns), None),
        folder=_picture_folder(place, images),
        role=role,
        decode_size=decode_size,
    )
    _check_types(rows, reader)
    if "split" in columns and stream_buffer:
        warnings.warn(
            f"{where} has a column 'split', which a stream does not read: rows of all splits are samples; expected: "
            "one split a file, or data.stream_buffer=0, which checks it",
            stacklevel=2,
        )
    elif "split" in columns:
        refuse_splits(where, rows.unique("split"))
    # the library must not decode: a damaged image would end the run instead of being a broken sample
    features = rows.features
    if features is not None and isinstance(features[reader.image], datasets.Image):
        rows = rows.cast_column(reader.image, datasets.Image(decode=False))
    label = label_of(source, place, split)
    if not stream_buffer:
        return HuggingFacePairs(rows, reader, label, max_broken_share, is_ranked or role != "train")
    rows = rows.select_columns([reader.image, *reader.text_columns])
    if num_rows is None:  # a stream of JSON does not state it: read once, only the captions
        first = reader.caption_columns[0]
        num_rows = sum(len(batch[first]) for batch in rows.select_columns([first]).iter(1000))
    return StreamedPairs(rows, num_rows, reader, label, files, seed, stream_buffer)


def _rows_to_group(rows: datasets.Dataset, reader: RowReader) -> Iterator[dict[str, Any]]:
    # the rows; where a row has an id, the number of the image's bytes instead of these, which take long to read
    for batch in rows.with_format("arrow").iter(100):
        columns = {name: batch[name].to_pylist() for name in reader.text_columns}
        ids, images = columns.get(reader.image_id, [None] * len(batch)), batch[reader.image]
        _, content = _paths_and_bytes(images)
        sizes = [None] * len(batch) if content is None else pc.binary_length(content).to_pylist()
        needed = (
            image.as_py() if size is None or image_id in (None, "") else size
            for image, size, image_id in zip(images, sizes, ids)
        )
        yield from rows_of_batch({**columns, reader.image: needed})


def _paths_and_bytes(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray | None, pa.ChunkedArray | None]:
    if pa.types.is_struct(column.type):
        content = pc.struct_field(column, "bytes")
        return pc.struct_field(column, "path"), None if pa.types.is_null(content.type) else content
    return (column, None) if _is_text(column.type) else (None, column)


def _picture_sizes(column: pa.ChunkedArray, folder: Path) -> list[Any]:
    # bytes of each image, which Arrow knows without reading them; for files, path and size
    paths, content = _paths_and_bytes(column)
    sizes = [None] * len(column) if content is None else pc.binary_length(content).to_pylist()
    names = [None] * len(column) if paths is None else paths.to_pylist()
    return [size if size is not None else _file_size(folder, name) for size, name in zip(sizes, names)]


def _file_size(folder: Path, name: str | None) -> Any:
    if name is None:
        return None
    try:
        return [Path(name).name, (folder / name).stat().st_size]
    except (OSError, ValueError):
        return [Path(name).name, None]


def _column_names(rows: Any) -> list[str]:
    if rows.column_names is not None:
        return list(rows.column_names)
    return list(next(iter(rows.take(1)), {}))  # a stream of JSON knows its columns by its first row only


def _column(columns: list[str], name: str | None, usual: tuple[str, ...], key: str, where: str) -> str:
    column = name if name is not None else next((usual_name for usual_name in usual if usual_name in columns), None)
    if column not in columns:
        what = "is unknown" if name is None else f"{name!r} is missing"
        raise ValueError(
            f"{where}: column data.{key} {what}; expected one of: {', '.join(columns) or 'it has no columns'}"
        )
    return column


def _check_types(rows: Any, reader: RowReader) -> None:
    if rows.features is None:
        return
    schema = rows.features.arrow_schema
    image = schema.field(reader.image).type
    fields = {image.field(number).name for number in range(image.num_fields)} if pa.types.is_struct(image) else set()
    if not (
        _is_text(image) or pa.types.is_binary(image) or pa.types.is_large_binary(image) or fields >= {"bytes", "path"}
    ):
        raise ValueError(
            f"{reader.source}: column {reader.image!r} is of type {image}; expected one of: images, bytes, paths"
        )
    for name in reader.caption_columns:
        caption = schema.field(name).type
        if not _is_text(caption.value_type if _is_list(caption) else caption):
            raise ValueError(
                f"{reader.source}: column {name!r} is of type {caption}; expected: strings, or lists of strings"
            )


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _picture_folder(place: list[Path], images: str | Path | None) -> Path:
    if images is not None:
        folder = Path(images).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder of images (data.images)")
        return folder
    if not place:
        return Path()
    return place[0] if place[0].is_dir() else place[0].parent
