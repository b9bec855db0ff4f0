"""Labelled images with class names and prompt templates, for zero-shot classification and probes.

Sources of `LabelledPictures`:
  open_image_folder    one folder per class: ImageNet and its shifts, or your own
  open_webdataset      tar shards with `.cls` members, the layout of the DataComp tasks
  open_cifar10         the published files, to learn from images only
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common.base.arguments import some
from common.base.files import printable
from common.data.broken import BrokenSample, check_opened
from common.data.class_names import in_label_order, label_order, read_class_names, read_templates
from common.data.decoding import row_of
from common.data.picture_files import missing_picture
from common.data.pictures import Pictures, table_of
from common.data.shard_paths import PICTURE_EXTENSIONS, check_opens, visible_below
from common.data.shards import open_shards

_PARTS = {"test", "val", "train"}  # folders of a set that are no classes
_OF_THE_SYSTEM = ("thumbs.db", "desktop.ini")  # Windows leaves them in folders of pictures
CLASS_NAMES_FILE, TEMPLATES_FILE = "classnames.txt", "zeroshot_classification_templates.txt"


class LabelledPictures:
    """Labelled images; class names in label order, templates with one "{}"."""

    def __init__(
        self,
        name: str,
        source: "Pictures | _Cifar10",
        class_names: Sequence[str],
        templates: Sequence[str],
        broken: list[BrokenSample],
    ) -> None:
        self.name, self.class_names, self.templates = printable(name), list(class_names), list(templates)
        self.broken_at_open, self._source = broken, source

    def __len__(self) -> int:
        return len(self._source)

    def label(self, index: int) -> int:
        """In [0, len(class_names)), without reading the image.

        Raises:
            BrokenSample: the `.cls` member of tar shards is missing or no such number.
        """
        row = row_of(index, self)
        label = self._source.label(row)
        if label is None:
            raise self._source.broken(row, "missing label: no cls member")
        if not isinstance(label, int) or not 0 <= label < len(self.class_names):
            raise self._source.broken(row, f"label out of range: {label!r} for {len(self.class_names)} classes")
        return label

    def image_id(self, index: int) -> str:
        """As in `__getitem__`, without reading the image."""
        return self._source.image_id(row_of(index, self))

    def metadata(self, index: int) -> np.ndarray | None:
        """See `Pictures.array`; None without shards."""
        return self._source.array(row_of(index, self))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": Pillow image in RGB, "label": int, "image_id": path below the root, number, or as shards name it}.

        Raises:
            BrokenSample: image or label cannot be used.
        """
        row = row_of(index, self)
        label, sample = self.label(row), self._source[row]
        return {"image": sample["image"], "label": label, "image_id": sample["image_id"]}

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([self.class_names, self.templates]).encode())
        if isinstance(self._source, Pictures) and self._source.shards:
            digest.update(self._source.fingerprint.encode())
        else:
            self._source.feed(digest.update)
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"LabelledPictures({self.name!r}, {len(self)} images, {len(self.class_names)} classes)"


class _Cifar10:
    # torchvision's CIFAR-10 behind the methods of `Pictures`; a place is an id, as a published set does not grow.

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def label(self, row: int) -> int:
        return self.images.targets[row]

    def image_id(self, row: int) -> str:
        return str(row)

    def array(self, row: int) -> None: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.images[row][0], "image_id": str(row)}

    def feed(self, update: Callable[[bytes], Any]) -> None:
        update(np.array(self.images.targets, np.int64).tobytes())
        update(np.ascontiguousarray(self.images.data).tobytes())


def open_image_folder(
    root: str | Path,
    class_names: Sequence[str],
    templates: Sequence[str],
    *,
    folders: Sequence[str] | None = None,
    name: str | None = None,
    max_broken_share: float = 0.01,
) -> LabelledPictures:
    """A folder with one folder per class.

    Args:
        root: images may lie deeper inside a class folder; hidden files and those of Windows are skipped.
        class_names: in label order; without `folders`, see also `in_label_order`.
        folders: each class's folder, in the order of class_names; None takes `class_folders`.
    """
    # which folder is which class of the whole list
    root = Path(root).expanduser()
    on_disk, is_sorted = class_folders(root), folders is None
    folders = list(on_disk if is_sorted else folders)
    if len(folders) != len(class_names):
        raise ValueError(
            f"{root}: {len(class_names)} class names for {len(folders)} class folders ({', '.join(folders[:3])} ...); "
            "expected: one per folder, in their order"
        )
    class_names = in_label_order(folders, class_names, str(root)) if is_sorted else class_names
    label_of = {folder: label for label, folder in enumerate(folders)}
    # both sides of a mismatch, for the message
    missing, unknown = (
        [item for item in label_of if item not in on_disk],
        [item for item in on_disk if item not in label_of],
    )
    if missing or unknown:
        raise ValueError(
            f"{root}: {len(on_disk)} class folders for {len(label_of)} classes; without a folder: "
            f"{', '.join(missing[:3]) or 'none'}; without a class: {', '.join(unknown[:3]) or 'none'}"
        )
    # every file, only by its name and size: images are decoded when they are read
    paths, labels, spans, broken = [], [], [], []
    for folder, label in label_of.items():
        before = len(paths)
        for path in visible_below(root / folder):
            if path.name.lower() in _OF_THE_SYSTEM:
                continue
            size = path.stat().st_size if path.is_file() else None
            if path.suffix.lower() not in PICTURE_EXTENSIONS:
                broken.append(BrokenSample(path, "", f"no image: unknown extension {path.suffix or '(none)'}"))
            elif not size:
                broken.append(missing_picture(path, size))
            else:
                paths.append(path.relative_to(root).as_posix())
                labels.append(str(label))
                spans.append((0, size))
        if len(paths) == before:
            broken.append(BrokenSample(root / folder, "", "class without images: its accuracy is not defined"))
    check_opened(f"{root}: no image in {len(label_of)} class folders", len(paths), broken, max_broken_share)
    pictures = Pictures(name or root.name, table_of({"name": paths, "image": spans, "label": labels}), root, broken)
    return LabelledPictures(pictures.name, pictures, class_names, templates, broken)


def class_folders(root: str | Path) -> list[str]:
    """Names of the class folders in `label_order`."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; expected: a folder with one folder of images per class")
    names = _visible_folders(root)
    if not names:
        raise ValueError(f"{root} has no folders; expected: one folder of images per class")
    return names


def open_cifar10(root: str | Path, part: Literal["train", "test"]) -> LabelledPictures:
    """CIFAR-10 from root/cifar-10-batches-py: pickles, which torchvision opens only if their MD5 is the published one.

    Raises:
        FileNotFoundError: a file is missing or another one.
    """
    from torchvision.datasets import CIFAR10  # two seconds, which other sets need not wait

    root = Path(root).expanduser()
    try:
        images = CIFAR10(str(root), train=part == "train")
    except (RuntimeError, OSError) as error:
        reason = str(error).partition(" You can use")[0]  # torchvision's download, which no setting asks for
        raise FileNotFoundError(
            f"{root}: CIFAR-10 cannot be read: {reason}; expected: cifar-10-batches-py in this folder, unpacked from "
            "cifar-10-python.tar.gz (www.cs.toronto.edu/~kriz)"
        ) from error
    return LabelledPictures(f"cifar10-{part}", _Cifar10(images), images.classes, ["{}"], [])


def open_webdataset(
    folder: str | Path, index_dir: str | Path | None = None, part: Literal["test", "train"] = "test"
) -> LabelledPictures:
    """A classification task in tar shards.

    It has `classnames.txt`, `zeroshot_classification_templates.txt`, `<part>/nshards.txt`, `<part>/0.tar`,
    `<part>/1.tar`, ... 35 of DataComp's 38 sets come so: all but the two retrieval sets and WinoGAViL.

    Args:
        folder: for example wds_vtab-cifar100_test.
        index_dir: see `open_shards`.
    """
    folder = Path(folder).expanduser()
    count_file = folder / part / "nshards.txt"
    if not count_file.is_file():
        raise FileNotFoundError(
            f"{count_file}: no such file; expected: a task folder with {CLASS_NAMES_FILE}, {TEMPLATES_FILE}, "
            f"{part}/nshards.txt and {part}/0.tar ..."
        )
    text = count_file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("[1-9][0-9]{0,6}", text):
        raise ValueError(f"{count_file} holds {text[:40]!r}; expected: the number of shards")
    paths = [folder / part / f"{number}.tar" for number in range(int(text))]
    if missing := [path.name for path in paths if not path.exists()]:
        raise FileNotFoundError(f"{count_file} names {text} shards, of which {some(missing)} is not there")
    shards = open_shards(
        [str(path) for path in paths],
        role="test",
        index_dir=index_dir,
        allow_missing_captions=True,
        key="data.labelled",
    )
    class_names, templates = _words_of(folder)
    name = folder.name.removeprefix("wds_").removesuffix("_test") + ("" if part == "test" else f"-{part}")
    return LabelledPictures(name, shards, class_names, templates, shards.broken_at_open)


def _folder_of_sets(root: str | Path) -> Path:
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of labelled sets (data.labelled)")
    return folder


def open_labelled_sets(root: str | Path, index_dir: str | Path | None = None) -> dict[str, LabelledPictures]:
    """All labelled sets in one folder, by name.

    A set is a folder with `classnames.txt`, `zeroshot_classification_templates.txt`, and either `test/nshards.txt` with
    tar shards or one folder of images per class: in `test`, in `val`, or in the set's folder if that has no folder
    test, val or train; the first of the three with as many folders as classes. Folders without `classnames.txt` are
    skipped with a warning. A link `imagenet -> /data/tiny_imagenet` puts one set in another's place; tables say so.
    """
    root = _folder_of_sets(root)
    sets: dict[str, LabelledPictures] = {}
    other = []
    for folder in (root / name for name in _visible_folders(root, "data.labelled")):
        # a folder with class names is a set
        if (folder / CLASS_NAMES_FILE).is_symlink():
            check_opens(folder / CLASS_NAMES_FILE, "data.labelled")
        if not (folder / CLASS_NAMES_FILE).is_file():
            other.append(folder.name)
            continue
        if (folder / "test" / "nshards.txt").is_file():
            opened = open_webdataset(folder, index_dir=index_dir)
        else:
            names, templates = _words_of(folder)
            place = _folder_of_classes(folder, len(names))
            opened = open_image_folder(place, names, templates, name=folder.resolve().name)
        # a link names the set whose place it takes
        name = folder.name if folder.is_symlink() else opened.name
        if name in sets:
            raise ValueError(f"{root} has two labelled sets called {name!r} (data.labelled), one in {folder}")
        sets[name] = opened
    if not sets:
        raise ValueError(
            f"{root} has no labelled set (data.labelled); expected: folders that hold {CLASS_NAMES_FILE} and "
            f"{TEMPLATES_FILE}; it has: {', '.join(other[:5]) or 'no folder'}"
        )
    if other:
        warnings.warn(f"{root}: no {CLASS_NAMES_FILE} in {', '.join(other[:10])}; not evaluated", stacklevel=2)
    return sets


def open_labelled_validation(root: str | Path, index_dir: str | Path | None = None) -> LabelledPictures | None:
    """The training part of "imagenet" in a folder of labelled sets, else of the first that has one; None without one.

    It is `train/nshards.txt` with tar shards, or `train` with one folder per class.
    """
    root = _folder_of_sets(root)
    names = sorted(_visible_folders(root, "data.labelled"), key=lambda name: (name != "imagenet", name))
    for folder in (root / name for name in names):
        if (folder / CLASS_NAMES_FILE).is_file() and (folder / "train").is_dir():
            if (folder / "train" / "nshards.txt").is_file():
                return open_webdataset(folder, index_dir, part="train")
            return open_image_folder(folder / "train", *_words_of(folder), name=f"{folder.name}-train")
    return None


def _words_of(folder: Path) -> tuple[list[str], list[str]]:
    names, templates = folder / CLASS_NAMES_FILE, folder / TEMPLATES_FILE
    for path in (names, templates):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected: as scripts/label_files.py writes it")
    return read_class_names(names), read_templates(templates)


def _folder_of_classes(folder: Path, num_classes: int) -> Path:
    counts = []
    for place in (folder / "test", folder / "val", folder):
        names = _visible_folders(place) if place.is_dir() else []
        holds_parts = place == folder and not _PARTS.isdisjoint(names)  # test, val and train are no three classes
        if len(names) == num_classes and not holds_parts:
            return place
        if names:
            counts.append(f"{place.name} has {len(names)} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})")
    raise ValueError(
        f"{folder}: {num_classes} class names in {CLASS_NAMES_FILE}; expected: as many folders of images, one per "
        f"class in the order of the names, in test, in val, or, without these and train, in {folder.name} itself, or "
        f"tar shards with test/nshards.txt; {'; '.join(counts) or 'there is no folder'}"
    )


def _visible_folders(root: Path, key: str = "folder of a class") -> list[str]:
    items = [item for item in root.iterdir() if not item.name.startswith(".")]
    for item in items:
        if item.is_symlink():
            check_opens(item, key, or_folder=True)
    return label_order([item.name for item in items if item.is_dir()])
