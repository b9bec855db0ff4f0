"""Labelled images with class names and prompt templates, for zero-shot classification and probes.

Three sources, one protocol (`name`, `class_names`, `templates`, `fingerprint`, `broken_at_open`, `len`, `label(index)`,
`[index]` -> {"image", "label", "image_id"}):
  open_image_folder    one folder per class: ImageNet and its shifts, or your own
  open_torchvision     the sets that torchvision reads, by name; nothing is downloaded
  open_webdataset      tar shards with `.cls` members, the layout of the DataComp tasks

The order of the class names is the order of the labels. For a folder that is the order of the sorted folder names
(WordNet ids, not names; numbers as numbers). The names of the folders themselves in another order are put into theirs.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.base.arguments import accepted
from common.base.files import printable
from common.data.broken import BrokenSample, check_opened
from common.data.class_names import in_label_order, label_order, read_class_names, read_templates
from common.data.decoding import content_hash, row_of, sampled_places
from common.data.picture_files import missing_picture
from common.data.pictures import Pictures, table_of
from common.data.shard_paths import check_opens, files_below
from common.data.shards import open_shards

_PARTS = {"test", "val", "train"}  # folders of a set that are no classes
PICTURE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
CLASS_NAMES_FILE, TEMPLATES_FILE = "classnames.txt", "zeroshot_classification_templates.txt"


class LabelledPictures:
    """Labelled images with the names of their classes, from whichever source.

    Args:
        source: of the images; see `open_image_folder`, `open_torchvision`, `open_webdataset`.
        class_names, templates: in label order; templates have one "{}".
        broken: what opening showed to be unusable.
    """

    def __init__(
        self,
        name: str,
        source: "Pictures | _Torchvision",
        class_names: Sequence[str],
        templates: Sequence[str],
        broken: list[BrokenSample],
    ) -> None:
        self.name, self.class_names, self.templates = printable(name), list(class_names), list(templates)
        self.broken_at_open, self._source = broken, source

    def __len__(self) -> int:
        return len(self._source)

    def label(self, index: int) -> int:
        """Class of an image, in [0, len(class_names)), without reading it.

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
        """Id of a picture, as `__getitem__` gives it, without reading it."""
        return self._source.image_id(row_of(index, self))

    def metadata(self, index: int) -> np.ndarray | None:
        """The array in the `.npy` member of tar shards (WILDS and fairness tasks), or None.

        Raises:
            BrokenSample: it cannot be read.
        """
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
        """SHA-256 over class names, templates, labels and what the source knows of its images; 64 hex digits."""
        digest = hashlib.sha256(json.dumps([self.class_names, self.templates]).encode())
        if isinstance(self._source, Pictures) and self._source.shards:
            digest.update(self._source.fingerprint.encode())
        else:
            self._source.feed(digest.update)
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"LabelledPictures({self.name!r}, {len(self)} images, {len(self.class_names)} classes)"


class _Torchvision:
    """Torchvision's data sets, one behind the other."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        # SUN397 is listed in the order of the disk, which differs between machines
        self._orders = [_stable_order(part) for part in parts]
        self.labels = np.concatenate([_labels_of(part)[order] for part, order in zip(parts, self._orders)])
        self._starts = np.cumsum([0, *map(len, self._orders)])

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def image_id(self, row: int) -> str:
        return str(row)  # published sets do not grow

    def array(self, row: int) -> None: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        place = int(self._orders[number][row - self._starts[number]])
        try:
            return {"image": self.parts[number][place][0].convert("RGB"), "image_id": str(row)}
        except Exception as error:  # of Pillow's decoders, of the file system, of h5py
            reason = f"image cannot be decoded: {type(error).__name__}, {error}"
            raise BrokenSample(self.parts[number].root, f"image {place}", reason) from None

    def feed(self, update: Callable[[bytes], Any]) -> None:
        update(self.labels.tobytes())
        for part, order in zip(self.parts, self._orders):
            files = _files_of(part)
            paths = [] if files is None else [Path(files[place]) for place in order]
            for path in paths:
                update(os.fsencode(f"{path.name}\0{path.stat().st_size if path.is_file() else -1}\0"))
            for place in sampled_places(len(paths)):
                update(content_hash(paths[place]))
            if files is None and hasattr(part, "data"):
                update(np.ascontiguousarray(part.data).tobytes())


def open_image_folder(
    root: str | Path,
    class_names: Sequence[str],
    templates: Sequence[str],
    *,
    folders: Sequence[str] | None = None,
    name: str | None = None,
    max_broken_share: float = 0.01,
) -> LabelledPictures:
    """A folder with one folder per class, whose name is the class.

    Args:
        root: images may lie deeper inside a class folder; hidden files are skipped.
        class_names: one per class, in label order.
        folders: name of each class's folder, in the order of class_names; None takes `class_folders`, the label order
            of ImageNet and its shifts.
        name: for logs and tables; None takes the folder's name.
        max_broken_share: opening fails when more than this share of at least 100 files is broken, in [0, 1].
    Raises:
        FileNotFoundError: the folder is missing.
        ValueError: the class folders are not those of the classes, or there is no image; names both sides.
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
        for path in files_below(root / folder):
            if path.name.startswith("."):
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
    """Names of the class folders of an image folder in label order: sorted, numbers as numbers.

    Raises:
        FileNotFoundError, ValueError: the folder is missing, or has no folders.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; expected: a folder with one folder of images per class")
    names = _visible_folders(root)
    if not names:
        raise ValueError(f"{root} has no folders; expected: one folder of images per class")
    return names


class TorchvisionSpec(NamedTuple):
    """One of torchvision's sets.

    kind: its class there. folder: what it reads below the root. num_classes: of its labels.
    num_test: usual size of the part that is evaluated.
    source: what to download.
    parts: part -> arguments of the class; several are put behind each other. Sets without a split have "all" only.
    """

    kind: str
    folder: str
    num_classes: int
    num_test: int
    source: str
    parts: dict[str, list[dict[str, Any]]] = {"test": [{"split": "test"}], "train": [{"split": "train"}]}  # noqa: RUF012


_FLAG = {"test": [{"train": False}], "train": [{"train": True}]}
_VAL = {"test": [{"split": "test"}], "train": [{"split": "train"}, {"split": "val"}]}
_VALID = {"test": [{"split": "test"}], "train": [{"split": "train"}, {"split": "valid"}]}
_TRAINVAL = {"test": [{"split": "test"}], "train": [{"split": "trainval"}]}
_ALL = {"all": [{}]}
_KRIZ = "(www.cs.toronto.edu/~kriz)"

# Trap: the labels are torchvision's. CLIP's own lists name the classes in another order for EuroSAT, and have a
# background class before the 101 of Caltech101.
# fmt: off
TORCHVISION_SETS = {name: TorchvisionSpec(*values) for name, *values in (
    ("caltech101", "Caltech101", "caltech101/101_ObjectCategories", 101, 8_677,
     "101_ObjectCategories.tar.gz of Caltech-101", _ALL),
    ("cifar10", "CIFAR10", "cifar-10-batches-py", 10, 10_000, f"cifar-10-python.tar.gz {_KRIZ}", _FLAG),
    ("cifar100", "CIFAR100", "cifar-100-python", 100, 10_000, f"cifar-100-python.tar.gz {_KRIZ}", _FLAG),
    ("country211", "Country211", "country211", 211, 21_100, "country211.tgz (OpenAI, CLIP's data notes)", _VALID),
    ("dtd", "DTD", "dtd/dtd", 47, 1_880, "dtd-r1.0.1.tar.gz (www.robots.ox.ac.uk/~vgg/data/dtd)", _VAL),
    ("eurosat", "EuroSAT", "eurosat/2750", 10, 27_000, "EuroSAT.zip, the RGB version", _ALL),
    ("fgvc_aircraft", "FGVCAircraft", "fgvc-aircraft-2013b", 100, 3_333,
     "fgvc-aircraft-2013b.tar.gz (www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft)", _TRAINVAL),
    ("flowers102", "Flowers102", "flowers-102", 102, 6_149,
     "102flowers.tgz, imagelabels.mat and setid.mat (www.robots.ox.ac.uk/~vgg/data/flowers/102)", _VAL),
    ("food101", "Food101", "food-101", 101, 25_250, "food-101.tar.gz (data.vision.ee.ethz.ch/cvl)"),
    ("gtsrb", "GTSRB", "gtsrb", 43, 12_630,
     "GTSRB-Training_fixed.zip, GTSRB_Final_Test_Images.zip and _GT.zip (INI, Bochum)"),
    ("mnist", "MNIST", "MNIST/raw", 10, 10_000, "the four idx-ubyte files of MNIST", _FLAG),
    ("pcam", "PCAM", "pcam", 2, 32_768,
     "the camelyonpatch_level_2 h5 files of PatchCamelyon (needs the package h5py)", _VAL),
    ("pets", "OxfordIIITPet", "oxford-iiit-pet", 37, 3_669,
     "images.tar.gz and annotations.tar.gz (www.robots.ox.ac.uk/~vgg/data/pets)", _TRAINVAL),
    ("rendered_sst2", "RenderedSST2", "rendered-sst2", 2, 1_821, "rendered-sst2.tgz (OpenAI, CLIP's data notes)", _VAL),
    ("stanford_cars", "StanfordCars", "stanford_cars", 196, 8_041,
     "cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat (their first site is gone)"),
    ("stl10", "STL10", "stl10_binary", 10, 8_000, "stl10_binary.tar.gz (ai.stanford.edu/~acoates/stl10)"),
    ("sun397", "SUN397", "SUN397", 397, 108_754, "SUN397.tar.gz (Princeton vision group)", _ALL),
    ("svhn", "SVHN", "test_32x32.mat", 10, 26_032,
     "test_32x32.mat and train_32x32.mat (ufldl.stanford.edu/housenumbers)"),
)}
# fmt: on


def open_torchvision(
    dataset: str,
    root: str | Path,
    class_names: Sequence[str],
    templates: Sequence[str],
    *,
    part: str | None = None,
) -> LabelledPictures:
    """One of `TORCHVISION_SETS`.

    CIFAR's files are pickles; torchvision opens them only if their MD5 is that of the published files.

    Args:
        root: folder where torchvision looks for its own folder.
        class_names, templates: in torchvision's label order.
        part: "test", "train" (with a validation part) or, for sets that torchvision does not split, "all"; None takes
            "test" or "all".
    Raises:
        FileNotFoundError: the set is missing; states what to download and where to put it.
        ValueError: an unknown set or part, or a wrong number of class names.
    Warns:
        UserWarning: the evaluated part has not the usual size.
    """
    if dataset not in TORCHVISION_SETS:
        raise ValueError(f"data set {dataset!r} is unknown; {accepted(dataset, [*TORCHVISION_SETS])}")
    spec, root = TORCHVISION_SETS[dataset], Path(root).expanduser()
    part = next(iter(spec.parts)) if part is None else part
    if part not in spec.parts:
        raise ValueError(f"{dataset} has no part {part!r}; {accepted(part, [*spec.parts])}")
    if len(class_names) != spec.num_classes:
        raise ValueError(f"{dataset} has {spec.num_classes} classes; got {len(class_names)} class names")
    # torchvision's own errors name neither the file to download nor its place
    if not (root / spec.folder).exists():
        raise _not_there(dataset, spec, root, "no such file or folder")
    from torchvision import datasets  # only those who read its sets wait for it

    kind = getattr(datasets, spec.kind)
    try:
        parts = [kind(root=str(root), **options) for options in spec.parts[part]]
    except (RuntimeError, OSError, ImportError) as error:
        raise _not_there(dataset, spec, root, str(error)) from error
    source = _Torchvision(parts)
    if part != "train" and len(source) != spec.num_test:
        warnings.warn(
            f"{dataset}: {len(source):,} images in {root}; usual are {spec.num_test:,} ({part})", stacklevel=2
        )
    # where torchvision knows the names, theirs in another order would mislabel every image
    known = next((getattr(parts[0], key) for key in ("classes", "categories") if hasattr(parts[0], key)), [])
    if len(known) == len(class_names):
        class_names = in_label_order(known, class_names, dataset)
    return LabelledPictures(f"{dataset}-{part}", source, class_names, templates, [])


def open_webdataset(
    folder: str | Path, index_dir: str | Path | None = None, max_broken_share: float = 0.01
) -> LabelledPictures:
    """A classification task in tar shards: `classnames.txt`, `zeroshot_classification_templates.txt`,
    `test/nshards.txt` and `test/0.tar`, `test/1.tar`, ...

    The tasks of DataComp come so, 35 of its 38 sets: all but the two retrieval sets and WinoGAViL.

    Args:
        folder: of the task, for example wds_vtab-cifar100_test.
        index_dir, max_broken_share: see `open_shards`.
    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be used.
    """
    folder = Path(folder).expanduser()
    count_file = folder / "test" / "nshards.txt"
    if not count_file.is_file():
        raise FileNotFoundError(
            f"{count_file}: no such file; expected: a task folder with {CLASS_NAMES_FILE}, {TEMPLATES_FILE}, "
            "test/nshards.txt and test/0.tar ..."
        )
    text = count_file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("[1-9][0-9]{0,6}", text):
        raise ValueError(f"{count_file} holds {text[:40]!r}; expected: the number of shards")
    shards = open_shards(
        [str(folder / "test" / f"{number}.tar") for number in range(int(text))],
        role="test",
        index_dir=index_dir,
        max_broken_share=max_broken_share,
        allow_missing_captions=True,
        key="data.labelled",
    )
    class_names, templates = read_class_names(folder / CLASS_NAMES_FILE), read_templates(folder / TEMPLATES_FILE)
    name = folder.name.removeprefix("wds_").removesuffix("_test")
    return LabelledPictures(name, shards, class_names, templates, shards.broken_at_open)


def open_labelled_sets(root: str | Path, index_dir: str | Path | None = None) -> dict[str, LabelledPictures]:
    """All labelled sets below one folder, by name.

    A set is a folder with `classnames.txt` and `zeroshot_classification_templates.txt`, and beside them
    `test/nshards.txt` with tar shards, or what torchvision reads for a set of that name (a key of `TORCHVISION_SETS`),
    or one folder of images
    per class: in `test`, in `val`, or directly in the set's folder if that has no folder called test, val or train; the
    first of the three with as many folders as there are classes. Folders without `classnames.txt` are skipped with a
    warning. A link `imagenet -> /data/tiny_imagenet` puts one set in the place of another: tables show it in that
    column and name the set.

    Raises:
        FileNotFoundError: the folder is missing.
        ValueError: it holds no set, or one cannot be opened.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder of labelled sets (data.labelled)")
    sets: dict[str, LabelledPictures] = {}
    other = []
    for folder in (root / name for name in _visible_folders(root, "data.labelled")):
        # a folder with class names is a set
        if (folder / CLASS_NAMES_FILE).is_symlink():
            check_opens(folder / CLASS_NAMES_FILE, "data.labelled")
        if not (folder / CLASS_NAMES_FILE).is_file():
            other.append(folder.name)
            continue
        # which of the three layouts it has
        if (folder / "test" / "nshards.txt").is_file():
            opened = open_webdataset(folder, index_dir=index_dir)
        else:
            names, templates = read_class_names(folder / CLASS_NAMES_FILE), read_templates(folder / TEMPLATES_FILE)
            spec = TORCHVISION_SETS.get(folder.name)
            if spec is not None and (folder / spec.folder).exists():
                opened = open_torchvision(folder.name, folder, names, templates)
            else:
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


def _not_there(dataset: str, spec: TorchvisionSpec, root: Path, reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{dataset}: torchvision's {spec.kind} is not in {root}: {reason}. Download {spec.source} and unpack it so "
        f"that {root / spec.folder} exists"
    )


def _labels_of(part: Any) -> np.ndarray:
    # labels of a torchvision set; images are decoded only where it keeps no labels (PCAM)
    for attribute in ("_labels", "labels", "targets", "y"):
        if hasattr(part, attribute):
            return np.asarray(getattr(part, attribute), dtype=np.int64)
    if hasattr(part, "_samples"):
        return np.array([label for _, label in part._samples], dtype=np.int64)
    return np.array([part[index][1] for index in range(len(part))], dtype=np.int64)


def _files_of(part: Any) -> list[Any] | None:
    # image files of a torchvision set; None where several images share a file
    for attribute in ("_image_files", "_images"):
        if hasattr(part, attribute):
            return list(getattr(part, attribute))
    for attribute in ("_samples", "samples"):
        if hasattr(part, attribute):
            return [path for path, _ in getattr(part, attribute)]
    return None


def _stable_order(part: Any) -> np.ndarray:
    files = _files_of(part)
    if files is None:
        return np.arange(len(part))
    return np.array(sorted(range(len(files)), key=lambda place: str(files[place])), dtype=np.int64)
