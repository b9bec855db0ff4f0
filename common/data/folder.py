"""Captioned images of a folder: NAME.txt beside NAME.jpg, also in the folders below."""

from pathlib import Path
from typing import Any

from common.data.decoding import refuse_split
from common.data.picture_files import pictures_in_files
from common.data.pictures import Pictures
from common.data.rows import Row, pictures_of
from common.data.shard_paths import PICTURE_EXTENSIONS, files_below
from common.data.text_files import read_text


def open_folder(folder: Path, *, split: str | None = None, role: str = "train", **options: Any) -> Pictures:
    """The images below a folder, sorted by path, which is their id. Each line of a text is a caption.

    An image without a text is broken.
    """
    refuse_split(folder, split)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected pictures with NAME.txt beside each")
    paths = [path for path in files_below(folder) if path.suffix.lower() in PICTURE_EXTENSIONS]
    rows = [_row(path, path.relative_to(folder).as_posix()) for path in paths]
    entries, broken = pictures_of(rows, folder, role)
    return pictures_in_files(entries, broken, folder, folder, folder.resolve().name, role=role, **options)


def _row(picture: Path, name: str) -> Row:
    try:
        lines = [line.strip() for line in read_text(picture.with_suffix(".txt")).split("\n")]
    except (OSError, ValueError) as error:
        return Row(name, fault=f"missing caption: {error}")
    return Row(name, name, [line for line in lines if line] or [""])
