"""Captioned images from a table of paths and captions, separated by tabs or commas, and a folder of images.

Rows of one path are one image, whose id is the path. Files are UTF-8, or UTF-16 with a byte order mark, plain or gzip.
Unusable rows are listed with their line.
"""

import ast
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.data.broken import BrokenSample
from common.data.decoding import refuse_split
from common.data.picture_files import find_images, pictures_in_files
from common.data.pictures import Pictures
from common.data.rows import Entry, Row, captions_in, named_columns, pictures_of, refuse_splits
from common.data.text_files import raw_text

# names by which a header is recognised
IMAGE_COLUMNS = ("filepath", "file_path", "path", "file_name", "filename", "image_path", "image", "file", "img")
CAPTION_COLUMNS = ("caption", "title", "text", "sentence", "raw", "captions")

_UNDECODED = "row cannot be decoded: it is no UTF-8"
_UNDECODED_BYTE = re.compile("[\udc80-\udcff]")
_PYTHON_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def open_tsv(
    table: str | Path,
    images: str | Path | None = None,
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
    split: str | None = None,
    role: str = "train",
    max_broken_share: float = 0.01,
    **options: Any,
) -> Pictures:
    """The images of a table, in the order of their first rows.

    A tab in the first line makes it a table of tabs, else commas separate. Between commas quotes are as in RFC 4180.
    Between tabs a line is a row, whatever quotes it has; a field in quotes as a whole loses them.

    Args:
        images: see `find_images`.
        image_column, caption_column: names in the header. None: the first line is a header if it has one of
            `IMAGE_COLUMNS` and one of `CAPTION_COLUMNS` (upper or lower case); without a header there are two columns,
            path and caption. Commas separate several caption columns, whose empty cells are no captions. A cell may
            hold a list of captions, as JSON, Python or numpy writes it.
        max_broken_share: of rows in another encoding, however few rows there are, and of all faults as in
            `pictures_in_files`.
    Raises:
        ValueError: unclear or missing columns, malformed quotes, no readable row, another encoding.
        FileNotFoundError: the file or the folder of the images is missing.
    """
    table = Path(table).expanduser()
    refuse_split(table, split)
    content = _read(table)
    separator = "\t" if "\t" in content.split("\n", 1)[0] else ","
    rows = _lines(content) if separator == "\t" else _records(content, table)
    first_line, header = next(rows, (1, []))
    columns, names = _columns(table, header, image_column, caption_column), [name.strip().lower() for name in header]
    has_header = columns is not None
    if not has_header:
        columns, rows = (0, [1]), itertools.chain([(first_line, header)], rows)
    elif "split" in names:
        rows, split_at = list(rows), names.index("split")
        refuse_splits(table, (row[split_at] for _, row in rows if len(row) == len(header)))
    path_at, captions_at = columns

    # rows of one path become one image; too many in another encoding mean that the whole file is
    checked_rows = (_row(line, row, len(header), path_at, captions_at, separator) for line, row in rows if any(row))
    entries, broken = pictures_of(checked_rows, table, role, together="path")
    undecoded = sum(sample.reason == _UNDECODED for sample in broken)
    if undecoded > max_broken_share * (len(broken) + sum(len(entry.rows) for entry in entries)):
        raw_text(table)  # raises: the first byte that is no UTF-8
    folder = find_images([entry.path for entry in entries], table, images, options.get("root"))
    if not has_header and _is_header_like(entries, folder):
        del entries[0]
        fault = "missing image: the line looks like a header; name its columns with"
        keys = f"data.image_column={header[0].strip()} and data.caption_column={header[1].strip()}"
        broken.insert(0, BrokenSample(table, f"line {first_line}", f"{fault} {keys}"))
    options |= {"role": role, "max_broken_share": max_broken_share}
    return pictures_in_files(entries, broken, table, folder, table.name.partition(".")[0], **options)


def _is_header_like(entries: list[Entry], folder: Path) -> bool:
    # the first row names no file, the second an image that exists
    if len(entries) < 2 or entries[0].rows != [0] or Path(entries[0].path).suffix:
        return False
    return not (folder / entries[0].path).exists() and (folder / entries[1].path).exists()


def _row(line: int, fields: list[str], count: int, path_at: int, captions_at: list[int], separator: str) -> Row:
    place = f"line {line}"
    if separator == "," and len(fields) > count == 2 and captions_at == [1]:
        fields = [fields[0], ",".join(fields[1:])]  # Flickr's text files do not quote captions that hold commas
    if len(fields) != count:
        return Row(place, fault=f"row has another number of columns: {len(fields)} instead of {count}")
    captions = captions_in([_cell(fields[at]) for at in captions_at])
    if _UNDECODED_BYTE.search("".join(filter(None, captions))):
        return Row(place, fault=_UNDECODED)
    return Row(place, fields[path_at].strip(), captions)


def _cell(text: str) -> str | list[str]:
    if text.startswith(' "'):  # behind a blank, csv reads quotes as signs of the text
        text = _unquoted(text.strip())
    # pandas writes a list of captions into one cell, as Python, numpy or JSON
    if text[:1] != "[" or text.rstrip()[-1:] != "]":
        return text
    for read in (json.loads, _python_list):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            captions = read(text)
            if isinstance(captions, list) and all(one is None or isinstance(one, str) for one in captions):
                return captions
    return text


def _python_list(text: str) -> Any:
    # numpy separates by blanks; texts that stand so Python would join into one
    is_array = not _PYTHON_TEXT.sub("", text).strip("[] \r\n")
    return ast.literal_eval(f"[{','.join(_PYTHON_TEXT.findall(text))}]" if is_array else text)


def _read(table: Path) -> str:
    # bytes that are not UTF-8 become lone surrogates: valid in a path, a fault in a caption
    if not table.is_file():
        raise FileNotFoundError(f"{table}: no such file; expected: a table with a column of paths and one of captions")
    text = raw_text(table, "surrogateescape")
    if "\0" in text[:4096]:
        raise ValueError(f"{table} is no table: it holds zero bytes; expected: text in UTF-8")
    if not text.strip():
        raise ValueError(f"{table} is empty; expected: rows of path and caption")
    return text


def _lines(content: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(io.StringIO(content), start=1):
        yield number, [_unquoted(field) for field in line.rstrip("\r\n").split("\t")]


def _unquoted(field: str) -> str:
    inner = field[1:-1].replace('""', "")
    if len(field) < 2 or field[0] != '"' or field[-1] != '"' or '"' in inner:
        return field
    return field[1:-1].replace('""', '"')


def _records(content: str, table: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    start = 1
    try:
        for row in reader:
            yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{table}, line {start}: the row has malformed quotes ({error}); expected: fields with "
            'commas, quotes or line ends stand in quotes, and each quote inside is doubled ("")'
        ) from None


def _columns(
    table: Path, header: list[str], image_column: str | None, caption_column: str | None
) -> tuple[int, list[int]] | None:
    # where path and captions stand; None where the first line is no header
    names = [field.strip() for field in header]
    if len(names) == 1 and re.search("[;|]", names[0]):
        raise ValueError(
            f"{table}, line 1: a single column, {names[0][:200]!r}; expected: columns separated by tab or comma"
        )
    positions = []
    for named, usual, key in (
        (None if image_column is None else [image_column], IMAGE_COLUMNS, "data.image_column"),
        (
            None if caption_column is None else named_columns(caption_column, names),
            CAPTION_COLUMNS,
            "data.caption_column",
        ),
    ):
        unknown = next((name for name in named or () if name not in names), None)
        if unknown is not None:
            raise ValueError(f"{table}, line 1: no column {unknown!r} ({key}); the first line has {', '.join(names)!r}")
        spelled = names if named else [name.lower() for name in names]  # columns may have equal names
        wanted = named or [name for name in usual if name in spelled][:1]
        positions.append([at for one in wanted for at, name in enumerate(spelled) if name == one])
    image, captions = positions
    if image and captions and image[0] not in captions:
        return image[0], captions
    if image_column is None and caption_column is None and len(header) == 2 and image == captions:
        return None
    raise ValueError(
        f"{table}, line 1: which columns hold paths and captions? The first line has {', '.join(names)[:200]!r}; "
        "name both with data.image_column and data.caption_column, or leave out the header and have two columns"
    )
