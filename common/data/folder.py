"""Captioned images of a folder: NAME.txt beside NAME.jpg, a caption per line, also in the folders below."""

import os
from pathlib import Path
from typing import Any

from common.data.decoding import refuse_split
from common.data.picture_files import pictures_in_files
from common.data.pictures import Pictures
from common.data.rows import Row, pictures_of
from common.data.shard_paths import PICTURE_EXTENSIONS, visible_below
from common.data.text_files import read_text

_TEXTS = (".txt", ".TXT", ".Txt")  # the first of them that lies beside an image is read
_NO_IMAGES = (".csv", ".json", ".jsonl", ".md", ".tsv", ".txt")


def open_folder(folder: Path, *, split: str | None = None, role: str = "train", **options: Any) -> Pictures:
    """The images below a folder, without hidden ones, sorted by path, which is their id.

    An image without a text is broken, and so is a second one of the same name: both would have one text. A text beside
    a file of another extension (heic, avif) and no image is a broken image. Texts without an image are ignored, also
    beside a file of `_NO_IMAGES`.
    """
    refuse_split(folder, split)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected images with NAME.txt beside each")
    names = [file.relative_to(folder) for file in visible_below(folder)]
    rows, first_of = [], {}
    for name in names:
        if name.suffix.lower() in PICTURE_EXTENSIONS:
            rows.append(_row(folder, name, first_of.setdefault(name.with_suffix(""), name)))
    texts = {name.with_suffix("") for name in names if name.suffix in _TEXTS}
    for name in names:
        stem = name.with_suffix("")
        if name.suffix.lower() not in _NO_IMAGES and stem in texts and stem not in first_of:
            first_of[stem] = name
            rows.append(Row(name.as_posix(), fault=f"no image: unknown extension {name.suffix or '(none)'}"))
    entries, broken = pictures_of(rows, folder, role)
    return pictures_in_files(entries, broken, folder, folder, folder.absolute().name, role=role, **options)


def captions_beside(image: Path) -> list[str]:
    """The lines of NAME.txt beside NAME.jpg that are not empty.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read.
    """
    text = next(filter(os.path.lexists, map(image.with_suffix, _TEXTS)), None)
    if text is None:
        raise FileNotFoundError(f"no file {image.stem}.txt beside it")
    lines = read_text(text).replace("\r", "\n").split("\n")  # \r alone ended lines of old Mac OS
    return [line for line in map(str.strip, lines) if line]


def _row(folder: Path, name: Path, first: Path) -> Row:
    place = name.as_posix()
    if name != first:
        return Row(place, fault=f"caption is that of another image: {first.as_posix()}")
    try:
        return Row(place, place, captions_beside(folder / name) or [""])
    except FileNotFoundError as error:
        return Row(place, fault=f"missing caption: {error}")
    except ValueError as error:
        return Row(place, fault=f"caption cannot be decoded: {error}")
