"""Image files that an annotation file names: their folder, missing files, and the data set of the others."""

import os
from collections.abc import Iterable
from pathlib import Path

from common.base.arguments import some
from common.data.broken import BrokenSample, check_opened
from common.data.pictures import Pictures, table_of
from common.data.rows import Entry

_PROBED = 20  # images by which the folder of all is recognised


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
    """The data set of an annotation file; `broken_at_open` lists missing and empty image files. No file is opened."""
    paths = [entry.path for entry in entries]
    folder = find_images(paths, annotations, images, root)
    broken, kept, spans = list(broken), [], []
    for entry, (path, size) in zip(entries, sizes_of_files(folder / path for path in paths)):
        if size:
            kept.append(entry)
            spans.append((0, size))
        else:
            broken.append(missing_picture(path, size))
    # the table of those that exist
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
    """The folder from which the image paths of an annotation file start.

    Without `images` it is searched: the folder of the annotation file, `root`, and the folders directly in them. The
    result is the one that leads to any of some twenty images; of several that lead to the same files, the first.

    Raises:
        FileNotFoundError: the folder does not exist, or none fits.
        ValueError: several folders hold images of these names.
    """
    if images is not None:
        folder = Path(images).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder of images (data.images) for {annotations}")
        return folder
    relative = [path for path in paths if not Path(path).is_absolute()]
    if not relative:
        return annotations.parent  # absolute paths need none
    probed = relative[:: -(-len(relative) // _PROBED)]
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
    """Every path with its bytes, None for a missing file; each folder is listed once, no file is opened."""
    paths = list(paths)
    folders: dict[str, set[str]] = {}
    for folder, name in map(os.path.split, paths):
        folders.setdefault(folder, set()).add(name)
    sizes = {folder: _sizes_of(folder, names) for folder, names in folders.items()}
    return [(path, sizes[folder].get(name)) for path, (folder, name) in zip(paths, map(os.path.split, paths))]


def missing_picture(path: Path, size: int | None) -> BrokenSample:
    """The fault of a missing or empty file."""
    absent = "a link that leads nowhere" if path.is_symlink() else "no such file"
    fault = f"missing image: {absent}" if size is None else "image cannot be decoded: it has no bytes"
    return BrokenSample(path, "", fault)


def _sizes_of(folder: str, names: set[str]) -> dict[str, int]:
    try:
        with os.scandir(folder) as items:
            return {item.name: item.stat().st_size for item in items if item.name in names and item.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
