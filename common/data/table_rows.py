"""From one row of a table (arrow, parquet, JSON) to a captioned picture."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from common.data.broken import BrokenSample
from common.data.picture_files import picture_path, read_picture
from common.data.samples import FILE_FORMATS, Unusable, caption_list, check_captions, decode_picture, id_text


@dataclass(frozen=True)
class RowReader:
    """How one row of a table becomes a sample.

    source: for messages.
    image, caption, image_id, caption_ids: names of columns; the last two are None where there is none.
    folder: where relative picture paths start.
    """

    source: str
    image: str
    caption: str
    image_id: str | None
    caption_ids: str | None
    folder: Path
    role: str
    decode_size: int | None

    @property
    def text_columns(self) -> list[str]:
        """Columns that hold no picture."""
        return [name for name in (self.caption, self.image_id, self.caption_ids) if name is not None]

    def broken(self, index: int, reason: str) -> BrokenSample:
        """The fault of one row; of a stream, the row is the position in the run."""
        return BrokenSample(self.source, f"row {index}", reason)

    def captions(self, row: dict[str, Any], index: int) -> list[str]:
        """Raises: BrokenSample."""
        try:
            captions = caption_list(row[self.caption])
            check_captions(captions, allow_empty=self.role != "train")
        except Unusable as error:
            raise self.broken(index, str(error)) from None
        return captions

    def picture(self, row: dict[str, Any], index: int) -> Image.Image:
        """Pillow image in RGB. Raises: BrokenSample."""
        content = picture_bytes(row[self.image])
        if isinstance(content, bytes):
            try:
                return decode_picture(content, self.decode_size, FILE_FORMATS)
            except Unusable as error:
                raise self.broken(index, str(error)) from None
        if not isinstance(content, str) or not content:
            raise self.broken(index, f"missing picture: {self.image} is {str(content)[:40]!r}")
        try:
            return read_picture(self.folder / picture_path(content), self.decode_size)
        except Unusable as error:
            raise self.broken(index, str(error)) from None

    def identity(self, row: dict[str, Any], index: int) -> str | None:
        """The id that the row gives, else the path of its picture; None for bytes without id. Raises: BrokenSample."""
        image_id = None if self.image_id is None else row[self.image_id]
        path = picture_bytes(row[self.image])
        try:
            if image_id is not None and image_id != "":
                return id_text(image_id)
            return self._short(picture_path(path)) if isinstance(path, str) and path else None
        except Unusable as error:
            raise self.broken(index, str(error)) from None

    def _short(self, path: str) -> str:
        """The library makes the paths of an image folder absolute; an id should not change with the machine."""
        folder = self.folder.as_posix().rstrip("/") + "/"
        return path.removeprefix(folder)


def picture_bytes(value: Any) -> Any:
    """Bytes or path of a picture, as a row has them: {"bytes", "path"}, bytes, or a path."""
    if isinstance(value, dict):
        return value.get("path") if value.get("bytes") is None else value["bytes"]
    return value


def rows_of_batch(batch: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of columns."""
    return (dict(zip(batch, values)) for values in zip(*batch.values()))


def captions_of(batches: Iterable[dict[str, list[Any]]], reader: RowReader) -> Iterator[str]:
    """All captions, in order; rows whose captions cannot be used are left out."""
    for batch in batches:
        for row in rows_of_batch(batch):
            with suppress(BrokenSample):
                yield from reader.captions(row, -1)
