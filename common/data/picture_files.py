"""Image files that an annotation file names: where they are, which are missing, and the data set of the others."""

import os
from collections.abc import Iterable
from pathlib import Path

from common.base.arguments import some
from common.data.broken import BrokenSample, check_opened
from common.data.pictures import Pictures, table_of
from common.data.rows import Entry

_PROBED = 20  # pictures by which the folder of all is recognised


def pictures_in_files(
    entries: list[Entry],
    broken: list[BrokenSample],
    annotations: Path,
    images: str | Path | None,
    name: str,
    *,
    role: str = "train",
    root: Path | None = None,
    max_broken_share: float = 0.01,
    decode_size: int | None = None,
) -> Pictures:
    """The data set of an annotation file.

    An image file that is missing, or has no bytes, is listed in `broken_at_open` and is no sample; the folders are
    listed once for that, no file is opened.

    Args:
        entries, broken: see `pictures_of`.
        annotations: the annotation file.
        images, root: where the images are, see `find_images`.
        name, role, decode_size: see `Pictures`.
        max_broken_share: opening fails when more than this share of at least 100 samples is broken, in [0, 1].
    Raises:
        FileNotFoundError: if there is no folder with the images.
        ValueError: if nothing is left, too much is broken, or an argument is out of range.
    """
    paths = [entry.path for entry in entries]
    folder = find_images(paths, annotations, images, root) if paths else annotations.parent
    broken, kept, spans = list(broken), [], []
    for entry, (path, size) in zip(entries, sizes_of_files(folder / path for path in paths)):
        if size:
            kept.append(entry)
            spans.append((0, size))
        else:
            broken.append(missing_picture(path, size))
    columns = {
        "name": [entry.path for entry in kept],
        "image": spans,
        "image_id": [entry.image_id for entry in kept],
        "captions": [entry.captions for entry in kept],
    }
    if any(entry.caption_ids is not None for entry in kept):
        columns["caption_ids"] = [entry.caption_ids or [None] * len(entry.captions) for entry in kept]
    pictures = Pictures(name, table_of(columns), folder, broken, role=role, decode_size=decode_size)
    check_opened(f"{annotations}: no captioned image in {name}", len(kept), broken, max_broken_share)
    return pictures


def find_images(paths: list[str], annotations: Path, images: str | Path | None, root: Path | None = None) -> Path:
    """The folder that the picture paths of an annotation file start from.

    Without `images` it is looked for: the folder of the annotation file, `root`, and what lies directly in them. The
    one folder from which any of the first twenty pictures is found is taken, or the first of those that lead to the
    same files, as folders side by side do for "../images/a.jpg".

    Args:
        paths: of the pictures, as the annotation file has them.
        annotations: the annotation file.
        images: the folder, where it is known.
        root: a second place to look in.
    Raises:
        FileNotFoundError: if the folder does not exist or none was found; says where it was looked for.
        ValueError: if several folders hold pictures of these names.
    """
    if images is not None:
        folder = Path(images).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder of images (data.images) for {annotations}")
        return folder
    probed = [path for path in paths if not Path(path).is_absolute()][:_PROBED]
    if not probed:
        return annotations.parent  # absolute paths need none
    places: dict[Path, None] = {}
    for folder in (annotations.parent, root or annotations.parent):
        places[folder.resolve()] = None
        inside = sorted(item for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else []
        places |= dict.fromkeys(item.resolve() for item in inside)
    places_of: dict[tuple[Path, ...], Path] = {}  # the files -> the first place that leads to them
    for place in places:
        files = tuple((place / path).resolve() for path in probed if (place / path).is_file())
        if files:
            places_of.setdefault(files, place)
    if len(places_of) == 1:
        return next(iter(places_of.values()))
    if places_of:
        several = " and ".join(str(place) for place in list(places_of.values())[:2])
        raise ValueError(f"{annotations}: its images lie in {several}; set data.images to the folder that is meant")
    raise FileNotFoundError(
        f"{annotations}: no folder has its images, such as {probed[0]!r}; looked in {some([*map(str, places)], 8)}; "
        "set data.images to their folder"
    )


def sizes_of_files(paths: Iterable[Path]) -> list[tuple[Path, int | None]]:
    """Each path with the bytes of its file, None where there is none; each folder is listed once, no file is opened."""
    paths = list(paths)
    folders: dict[str, set[str]] = {}
    for folder, name in map(os.path.split, paths):
        folders.setdefault(folder, set()).add(name)
    sizes = {folder: _sizes_of(folder, names) for folder, names in folders.items()}
    return [(path, sizes[folder].get(name)) for path, (folder, name) in zip(paths, map(os.path.split, paths))]


def missing_picture(path: Path, size: int | None) -> BrokenSample:
    """What is wrong with a file of no bytes, or none at all."""
    absent = "a link that leads nowhere" if path.is_symlink() else "no such file"
    fault = f"missing image: {absent}" if size is None else "image cannot be decoded: it has no bytes"
    return BrokenSample(path, "", fault)


def _sizes_of(folder: str, names: set[str]) -> dict[str, int]:
    """Bytes of the named files of one folder; {} where it does not exist."""
    try:
        with os.scandir(folder) as items:
            return {item.name: item.stat().st_size for item in items if item.name in names and item.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
