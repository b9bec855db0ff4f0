"""Image features of a frozen network, computed once: float16 on disk, one file for each set of images and view.

A file is known by network weights, transform, view and the data set's fingerprint, never by paths. It is written in
chunks and resumes where it stopped.
"""

import ctypes
import io
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from common.base.files import check_room, locked, naming, write_json
from common.base.provenance import hash_of
from common.data.broken import BrokenSample, readable_items
from common.data.loader import Loader
from common.data.mixture import Mixture
from common.data.order import seed_of
from common.data.transforms import ImageTransform

CENTRE, MIRROR = "centre", "mirror"
_WAY_ON = "model.image.stem.cache_gb=0, which keeps none, or a link from outputs/features to a disk that has locks"


@dataclass(frozen=True)
class FeatureCache:
    """Where features lie, and how they are made.

    compute: (batch, 3, size, size) uint8 -> (batch, *shape), on any device.
    views: of a training image: "centre" (the evaluation view), "mirror" (its mirror image), or numbers of random crops
    by crop_scale, drawn from image and number.
    max_bytes: of one set, all its views; a larger one is an error before anything is computed.
    """

    folder: Path
    network: str
    compute: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    views: tuple[str | int, ...] = (CENTRE,)
    max_bytes: float = 20e9
    batch_size: int = 64
    num_workers: int | None = 0

    def of(self, pictures: Any, transform: ImageTransform, training: bool) -> tuple["Cached", "CachedTransform"]:
        """A cached set of images and its transform; computes what is missing.

        Args:
            training: all views; else only the centre.
        Raises:
            ValueError: a stream, or larger than max_bytes or than the disk has room for.
        """
        as_cached = CachedTransform(self.shape)
        if isinstance(pictures, Mixture):
            parts = [self.of(part, transform, training)[0] for part in pictures.parts]
            return Mixture(parts, pictures.weights), as_cached
        if getattr(pictures, "forward_only", False):
            raise ValueError(
                f"{pictures.name} is a stream, whose features cannot be cached; expected: data.stream_buffer=0, or "
                "model.image.stem.cache_gb=0"
            )
        # a file for each view; those that are missing are computed under one lock
        views = self.views if training else (CENTRE,)
        files = [self._file(pictures, transform, view) for view in views]
        if not all(file.is_file() for file in files):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(Path(f"{files[0]}.lock"), _WAY_ON):  # one computes, other processes and runs wait, however long
                missing = [(file, view) for file, view in zip(files, views) if not file.is_file()]
                if missing:
                    what = f"features of {pictures.name}: {len(pictures)} images x {len(missing)} views"
                    size = 2 * len(pictures) * len(missing) * int(np.prod(self.shape))
                    check_room(self.folder, what, size, self.max_bytes, "model.image.stem.cache_gb")
                for file, view in missing:
                    self._fill(file, pictures, transform, view)
        broken = json.loads(_notes(files[0]).read_text(encoding="utf-8"))["broken"]
        broken_rows = {int(index): BrokenSample(*args) for index, args in broken.items()}
        if readable_items(pictures, 1, [*broken_rows][:3]):  # a disk that was away for a while
            hint = "pictures that could not be read can be read now; remove the file to compute them"
            warnings.warn(f"{files[0]}: {hint}", stacklevel=2)
        return Cached(pictures, tuple(map(_Rows, files)), broken_rows), as_cached

    def _file(self, pictures: Any, transform: ImageTransform, view: str | int) -> Path:
        # augmentation of training matters only for random crops
        deciding = transform if isinstance(view, int) else replace(transform, crop_scale=None, flip_probability=0.0)
        # upright: features of earlier versions may be those of pictures as they were stored
        made = [self.network, deciding.to_json(), view, pictures.fingerprint, "upright"]
        # training may decode at a fraction of the size and refuses what ranking keeps; others keep their older name
        reader = getattr(pictures, "reader", pictures)  # a Hugging Face set keeps both there
        of_role = getattr(reader, "role", None) == "train", getattr(reader, "decode_size", None)
        key = hash_of([*made, *of_role] if any(of_role) else made)
        return self.folder / f"{str(pictures.name).replace('/', '-')}-{key}.npy"

    def _fill(self, file: Path, pictures: Any, transform: ImageTransform, view: str | int) -> None:
        # computes one view in chunks; after each the notes record how many rows are whole
        part, notes = file.with_suffix(".part"), _notes(file)
        done: dict[str, Any] = {"rows": 0, "broken": {}}
        if part.is_file() and notes.is_file():
            with suppress(ValueError):
                done = json.loads(notes.read_text(encoding="utf-8"))
        _keep_freed_memory()
        header = _header((len(pictures), *self.shape))
        row_bytes = 2 * int(np.prod(self.shape))
        # the notes reach the disk before the rows: after a loss of power they may promise more than there is
        if done["rows"] and part.stat().st_size < len(header) + done["rows"] * row_bytes:
            done = {"rows": 0, "broken": {}}
        pixels = _View(pictures, transform, view, done["rows"])
        loader = Loader(pixels, str(pictures.name), self.num_workers, list, batch_size=self.batch_size)
        # written and not mapped: a full disk then is an error, and not a signal that ends the process
        with naming(part), part.open("r+b" if done["rows"] else "wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + done["rows"] * row_bytes)
            stream.seek(0, 2)
            bar_options = {"desc": f"features of {pictures.name}", "unit": "image", "delay": 2}
            with tqdm(total=len(pictures), initial=done["rows"], **bar_options) as bar, torch.no_grad():
                # a broken image keeps its row of zeros and is noted, so that rows stay in place
                for batch in loader:
                    broken = {place: error for place, error in enumerate(batch) if isinstance(error, BrokenSample)}
                    good = [place for place in range(len(batch)) if place not in broken]
                    rows = np.zeros((len(batch), *self.shape), np.float16)
                    if good:
                        rows[good] = self.compute(torch.stack([batch[place] for place in good])).cpu().numpy()
                    done["broken"] |= {str(done["rows"] + place): list(error.args) for place, error in broken.items()}
                    stream.write(rows.tobytes())
                    stream.flush()
                    done["rows"] += len(batch)
                    write_json(notes, done)
                    bar.update(len(batch))
        part.replace(file)


class Cached:
    """A data set whose items hold `Features` in the place of images; all else comes from the set itself."""

    def __init__(self, pictures: Any, views: tuple["_Rows", ...], broken: dict[int, BrokenSample]) -> None:
        self._pictures, self._views, self._broken = pictures, views, broken

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self._pictures, name)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._broken:
            raise self._broken[index]
        pictures, features = self._pictures, Features(self._views, index)
        if not hasattr(pictures, "captions"):
            return {"image": features}
        return {"image": features, "captions": pictures.captions(index), "image_id": pictures.image_id(index)}


class Features(NamedTuple):
    """The features of one image: a file for each view, and the row in all of them."""

    views: tuple["_Rows", ...]
    row: int


@dataclass(frozen=True)
class CachedTransform:
    """`Features` -> those of a view, in the place of image -> pixels."""

    shape: tuple[int, ...]

    @property
    def blank(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=torch.float16)

    def eval(self, features: Features) -> torch.Tensor:
        return features.views[0][features.row]

    def train(self, features: Features, rng: int) -> torch.Tensor:
        return features.views[seed_of(rng, 3) % len(features.views)][features.row]


class _Rows:
    # A file of features, mapped when it is first read; a copy for another process takes only the path.

    def __init__(self, file: Path) -> None:
        self.file, self._array = file, None

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "_array": None}

    def __getitem__(self, row: int) -> torch.Tensor:
        if self._array is None:
            self._array = np.load(self.file, mmap_mode="r")
        return torch.from_numpy(np.array(self._array[row]))


class _View(Dataset):
    def __init__(self, pictures: Any, transform: ImageTransform, view: str | int, start: int) -> None:
        self.pictures, self.transform, self.view, self.start = pictures, transform, view, start

    def __len__(self) -> int:
        return len(self.pictures) - self.start

    def __getitem__(self, place: int) -> torch.Tensor | BrokenSample:
        index = self.start + place
        try:
            picture = self.pictures[index]["image"]
        except BrokenSample as error:
            return error
        if isinstance(self.view, int):
            return self.transform.train(picture, seed_of(index, self.view))
        pixels = self.transform.eval(picture)
        return pixels.flip(-1) if self.view == MIRROR else pixels


def _keep_freed_memory() -> None:
    # glibc returns large freed blocks each time, and fresh pages take as long as a small convolutional network
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        trim_threshold, mmap_threshold, a_gibibyte = -1, -3, 2**30
        mallopt(trim_threshold, a_gibibyte)
        mallopt(mmap_threshold, a_gibibyte)


def _notes(file: Path) -> Path:
    return file.with_suffix(".json")


def _header(shape: Sequence[int]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(stream, {"descr": "<f2", "fortran_order": False, "shape": tuple(shape)})
    return stream.getvalue()
