"""Captioned pictures from a table of paths and captions, separated by tabs or commas, and a folder of pictures.

Rows with the same path are the captions of one picture, whose id is that path. Files are UTF-8 and may be packed with
gzip. A row that cannot be used is listed with its line; a table whose columns or quotes cannot be told stops with an
error.
"""

import csv
import io
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.data.picture_files import PictureFiles
from common.data.rows import Row, pictures_of
from common.data.text_files import unpacked

# names by which a header is recognised
IMAGE_COLUMNS = ("filepath", "file_path", "path", "file_name", "filename", "image_path", "image", "file", "img")
CAPTION_COLUMNS = ("caption", "title", "text", "sentence", "raw", "captions")


def open_tsv(
    table: str | Path,
    images: str | Path | None = None,
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
    role: str = "train",
    **options: Any,
) -> PictureFiles:
    """The pictures of a table, in the order in which their paths first appear, each with the captions of its rows.

    A tab in the first line makes it a table of tabs, else commas separate. Quotes: commas as in RFC 4180, where a
    quoted caption may hold commas, quotes ("" each) and line ends. Between tabs a line is a row, whatever quotes it
    holds; a field that stands in quotes as a whole loses them, so a stray quote cannot swallow the rows behind it.

    Args:
        table: the file.
        images: folder of the pictures; None looks for it, see `find_images`.
        image_column, caption_column: names in the header. None: the first line is a header if it has one of
            `IMAGE_COLUMNS` and one of `CAPTION_COLUMNS` (upper or lower case); without a header there are two
            columns, path and caption.
        role: "train" refuses empty captions; the others accept them.
        options: root, max_broken_share, decode_size, see `PictureFiles`; a row that cannot be used counts as a sample.
    Raises:
        ValueError: names file and line: a column that is missing, quotes that do not close, no readable row.
        FileNotFoundError: if the file or the folder with the pictures is missing.
    """
    table = Path(table).expanduser()
    content = _read(table)
    separator = "\t" if "\t" in content.split("\n", 1)[0] else ","
    rows = _lines(content) if separator == "\t" else _records(content, table)
    first_line, header = next(rows, (1, []))
    columns = _columns(table, header, image_column, caption_column)
    has_header = columns is not None
    path_at, caption_at = columns if has_header else (0, 1)
    if not has_header:
        rows = itertools.chain([(first_line, header)], rows)

    found = (_row(line, row, len(header), path_at, caption_at, separator) for line, row in rows if any(row))
    entries, broken = pictures_of(found, table, role, together="path")
    return PictureFiles(entries, broken, table, images, table.name.partition(".")[0], role=role, **options)


def _row(line: int, fields: list[str], count: int, path_at: int, caption_at: int, separator: str) -> Row:
    place = f"line {line}"
    if separator == "," and len(fields) > count == 2 and caption_at == 1:
        fields = [fields[0], ",".join(fields[1:])]  # Flickr's text files do not quote captions that hold commas
    if len(fields) != count:
        return Row(place, fault=f"row has another number of columns: {len(fields)} instead of {count}")
    path, caption = fields[path_at].strip(), fields[caption_at]
    if any("\udc80" <= sign <= "\udcff" for sign in path + caption):
        return Row(place, fault="row cannot be decoded: it is no UTF-8")
    return Row(place, path, caption)


def _read(table: Path) -> str:
    """The text; bytes that are no UTF-8 become lone surrogates, which name their row later."""
    if not table.is_file():
        raise FileNotFoundError(f"{table}: no such file; accepted: a table with a column of paths and one of captions")
    try:
        content = unpacked(table.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{table} cannot be unpacked: {error}") from None
    if b"\0" in content[:4096]:
        raise ValueError(f"{table} is no table: it holds zero bytes; accepted: text in UTF-8")
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    if not text.strip():
        raise ValueError(f"{table} is empty; accepted: rows of path and caption")
    return text


def _lines(content: str) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of a table of tabs."""
    for number, line in enumerate(io.StringIO(content), start=1):
        yield number, [_unquoted(field) for field in line.rstrip("\r\n").split("\t")]


def _unquoted(field: str) -> str:
    inner = field[1:-1].replace('""', "")
    if len(field) < 2 or field[0] != '"' or field[-1] != '"' or '"' in inner:
        return field
    return field[1:-1].replace('""', '"')


def _records(content: str, table: Path) -> Iterator[tuple[int, list[str]]]:
    """(line where it starts, fields) of a table of commas."""
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    start = 1
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"{table}, line {start}: the row cannot be told from the next ones ({error}); accepted: fields with "
                'commas, quotes or line ends stand in quotes, and each quote inside is doubled ("")'
            ) from None
        yield start, row
        start = reader.line_num + 1


def _columns(
    table: Path, header: list[str], image_column: str | None, caption_column: str | None
) -> tuple[int, int] | None:
    """Where path and caption stand; None where the first line is no header.

    Raises:
        ValueError: if a named column is missing, or there is no header and there are not two columns.
    """
    names = [field.strip() for field in header]
    found = []
    for asked, usual, key in (
        (image_column, IMAGE_COLUMNS, "data.image_column"),
        (caption_column, CAPTION_COLUMNS, "data.caption_column"),
    ):
        if asked is not None and asked not in names:
            raise ValueError(f"{table}, line 1: no column {asked!r} ({key}); the first line has {', '.join(names)!r}")
        lower = [name.lower() for name in names]
        known = [lower.index(name) for name in usual if name in lower]
        found.append(names.index(asked) if asked is not None else known[0] if known else None)
    image, caption = found
    if image is not None and caption is not None and image != caption:
        return image, caption
    if image_column is None and caption_column is None and len(header) == 2 and image == caption:
        return None
    raise ValueError(
        f"{table}, line 1: which columns hold paths and captions? The first line has {', '.join(names)[:200]!r}; "
        "name both with data.image_column and data.caption_column, or leave out the header and have two columns"
    )
