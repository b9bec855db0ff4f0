"""Captioned picture files by position: what the readers of annotation files (karpathy.py, tsv.py) have in common."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.base.arguments import some
from common.base.files import printable
from common.data.broken import BrokenSample, check_opened
from common.data.decoding import PackedTexts, check_reading_options, content_hash, read_picture, row_of, sampled_places
from common.data.rows import Entry

_PROBED = 20  # pictures by which the folder of all is recognised


class PictureFiles:
    """Captioned picture files, by position. Pictures are decoded when they are read, not before.

    A picture file that is not there, or has no bytes, is listed in `broken_at_open` and is no sample; the folders are
    listed once for that, no file is opened. A file that cannot be decoded raises `BrokenSample` when it is read.

    Args:
        entries: the samples, in order.
        broken: what the annotation file alone showed to be unusable.
        annotations: the annotation file.
        images: folder that relative picture paths start from; None looks for it, see `find_images`.
        name: for logs and tables.
        role: "train", "val", "test" or "second_test".
        root: a second place to look for the pictures.
        max_broken_share: opening fails when more than this share of at least 100 samples is broken, in [0, 1].
        decode_size: see `decode_picture`.
    Attributes:
        broken_at_open: list of BrokenSample, not counted by len().
    Raises:
        FileNotFoundError: if there is no folder with the pictures.
        ValueError: if nothing is left, too much is broken, or an argument is out of range.
    """

    def __init__(
        self,
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
    ) -> None:
        check_reading_options(role, decode_size)
        self.name, self.decode_size = printable(name), decode_size
        paths = [entry.path for entry in entries]
        self.images = find_images(paths, annotations, images, root) if paths else annotations.parent
        self.broken_at_open = list(broken)
        kept, sizes = self._existing(entries)
        check_opened(f"{annotations}: no captioned picture in {name}", len(kept), self.broken_at_open, max_broken_share)
        self._paths = PackedTexts(entry.path for entry in kept)
        self._ids = PackedTexts(entry.image_id for entry in kept)
        self._captions = PackedTexts(caption for entry in kept for caption in entry.captions)
        self._first_caption = np.cumsum([0, *(len(entry.captions) for entry in kept)], dtype=np.int64)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._caption_ids = None
        if any(entry.caption_ids is not None for entry in kept):
            ids = [entry.caption_ids or [None] * len(entry.captions) for entry in kept]
            flat = [-1 if number is None else number for group in ids for number in group]
            self._caption_ids = np.array(flat, dtype=np.int64)

    def _existing(self, entries: list[Entry]) -> tuple[list[Entry], list[int]]:
        """Entries whose picture is there, and the bytes that each has."""
        sizes = sizes_of_files(self.images / entry.path for entry in entries)
        kept = []
        for entry, (path, size) in zip(entries, sizes):
            if size:
                kept.append(entry)
            else:
                self.broken_at_open.append(missing_picture(path, size))
        return kept, [size for _, size in sizes if size]

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample.

        Args:
            index: in [-len, len).
        Returns:
            {"image": Pillow image in RGB, "captions": list of str, "image_id": str}.
        Raises:
            BrokenSample: if the picture cannot be read; names its file and the reason.
            IndexError: if there is no such sample.
        """
        row = row_of(index, self)
        image = read_picture(self.images / self._paths[row], self.decode_size)
        return {"image": image, "captions": self.captions(row), "image_id": self._ids[row]}

    def captions(self, index: int) -> list[str]:
        """The captions of one sample, without touching its picture."""
        row = row_of(index, self)
        return [self._captions[number] for number in range(*self._first_caption[row : row + 2].tolist())]

    def all_captions(self) -> Iterator[str]:
        """All captions, in order."""
        return (self._captions[number] for number in range(len(self._captions)))

    def image_id(self, index: int) -> str:
        """Id of a picture; for COCO the id of the image there."""
        return self._ids[row_of(index, self)]

    def caption_ids(self, index: int) -> list[int | None] | None:
        """Ids of the captions, in their order, None for one that is not known; None where the file gives none.

        For COCO they are the annotation ids, by which CxC and ECCV Caption name captions.
        """
        row = row_of(index, self)
        if self._caption_ids is None:
            return None
        ids = self._caption_ids[slice(*self._first_caption[row : row + 2])].tolist()
        return None if max(ids) < 0 else [None if number < 0 else number for number in ids]

    def path(self, index: int) -> Path:
        """The picture file of one sample."""
        return self.images / self._paths[row_of(index, self)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over paths, sizes of the picture files, ids, captions, and some pictures (`sampled_places`)."""
        digest = hashlib.sha256()
        for texts in (self._paths, self._ids, self._captions):
            texts.feed(digest.update)
        for numbers in (self._first_caption, self._sizes, self._caption_ids):
            digest.update(b"-" if numbers is None else numbers.tobytes())
        for place in sampled_places(len(self)):
            digest.update(content_hash(self.path(place)))
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"PictureFiles({self.name!r}, {len(self)} pictures, {len(self._captions)} captions)"


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
            raise FileNotFoundError(f"{folder}: no such folder of pictures (data.images) for {annotations}")
        return folder
    probed = [path for path in paths if not Path(path).is_absolute()][:_PROBED]
    if not probed:
        return annotations.parent  # absolute paths need none
    places: dict[Path, None] = {}
    for folder in (annotations.parent, root or annotations.parent):
        places[folder.resolve()] = None
        inside = sorted(item for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else []
        places |= dict.fromkeys(item.resolve() for item in inside)
    found: dict[tuple[Path, ...], Path] = {}  # the files -> the first place that leads to them
    for place in places:
        files = tuple((place / path).resolve() for path in probed if (place / path).is_file())
        if files:
            found.setdefault(files, place)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        several = " and ".join(str(place) for place in list(found.values())[:2])
        raise ValueError(f"{annotations}: its pictures lie in {several}; set data.images to the folder that is meant")
    raise FileNotFoundError(
        f"{annotations}: no folder has its pictures, such as {probed[0]!r}; looked in {some([*map(str, places)], 8)}; "
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
    fault = f"missing picture: {absent}" if size is None else "picture cannot be decoded: it has no bytes"
    return BrokenSample(path, "", fault)


def _sizes_of(folder: str, names: set[str]) -> dict[str, int]:
    """Bytes of the named files of one folder; {} where it does not exist."""
    try:
        with os.scandir(folder) as items:
            return {item.name: item.stat().st_size for item in items if item.name in names and item.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
