"""WinoGAViL: a cue word, some images, and the k of them that match the cue; one of DataComp's retrieval sets."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from common.data.broken import Unusable, named
from common.data.decoding import FILE_FORMATS, content_hash, decode_picture, read_picture, sampled_places
from common.data.rows import picture_bytes
from common.data.scenes import AnnotationTask
from common.evaluation.accuracy import WINOGAVIL_GROUPS, winogavil_jaccard, winogavil_metrics, winogavil_prompt
from common.evaluation.embed import Encoder
from common.evaluation.protocol import Evaluation

if TYPE_CHECKING:
    import datasets

DECIDES = "evaluation"


class Associations(Protocol):
    """Images of all instances one after the other, and their cues.

    cues: one word per instance. counts: candidates per instance. gold: indices of the matching candidates, counted
    within the instance.
    """

    name: str
    fingerprint: str
    cues: list[str]
    counts: list[int]
    gold: list[list[int]]

    def __len__(self) -> int:
        """Number of pictures."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": ...}."""


class SceneAssociations:
    """Associations of scenes, drawn at the first use and cached; `size` counts instances."""

    name = "scenes/winogavil"

    def __init__(self, size: int, image_size: int) -> None:
        self._task = AnnotationTask("winogavil", size, image_size)
        self.fingerprint = self._task.fingerprint

    @cached_property
    def _items(self) -> list[dict[str, Any]]:
        return [self._task[index] for index in range(len(self._task))]

    @cached_property
    def _pictures(self) -> list[Any]:
        return [image for item in self._items for image in item["images"]]

    @property
    def cues(self) -> list[str]:
        """One word per instance."""
        return [item["cue"] for item in self._items]

    @property
    def counts(self) -> list[int]:
        """Candidates per instance."""
        return [len(item["images"]) for item in self._items]

    @property
    def gold(self) -> list[list[int]]:
        """The candidates that the cue describes."""
        return [item["gold"] for item in self._items]

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": uint8 (H, W, 3)}."""
        return {"image": self._pictures[index]}


class RowAssociations:
    """WinoGAViL's rows: candidate_images, candidates (their names), cue, associations (the names of the right ones).

    A right name that occurs twice among the candidates is right at both places, and k counts both (DataComp's code).

    Args:
        rows: images not decoded, as `open_winogavil` makes them.
        name: for protocols and messages.
    Raises:
        ValueError: a column is missing, an instance's associations are not among its candidates, or there is no
            instance of 5, 6, 10 or 12 candidates, over which the metrics average.
    """

    def __init__(self, rows: "datasets.Dataset", name: str) -> None:
        needed = ("candidate_images", "candidates", "cue", "associations")
        missing = [column for column in needed if column not in rows.column_names]
        if missing:
            raise ValueError(f"{name}: no column {missing[0]}; expected: {', '.join(needed)}")
        self.name, self._rows = name, rows
        self.cues, candidates, right = (list(rows[column]) for column in ("cue", "candidates", "associations"))
        self.counts = [len(names) for names in candidates]
        self.gold = []
        for row, (names, chosen) in enumerate(zip(candidates, right)):
            cue = self.cues[row]
            if not isinstance(cue, str) or not cue.strip() or not names or not chosen:
                raise ValueError(
                    f"{name}, row {row}: cue {cue!r}, candidates {names}, associations {chosen}; expected: a word, "
                    "names, and one or more of these"
                )
            strange = [candidate for candidate in chosen if candidate not in names]
            if strange:
                raise ValueError(f"{name}, row {row}: associations {chosen}; expected: one or more of {names}")
            self.gold.append([place for place, candidate in enumerate(names) if candidate in chosen])
        try:
            winogavil_metrics([0.0] * len(self.counts), self.counts)  # a missing group fails now, not after training
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self._words = json.dumps([self.cues, candidates, right], ensure_ascii=True)
        self._places = [(row, place) for row, count in enumerate(self.counts) for place in range(count)]
        self._last: tuple[int, list[Any]] = (-1, [])  # images are read in order, so one cached row is enough

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the words, and with the images at `sampled_places`."""
        digest = hashlib.sha256(self._words.encode())
        for index in sampled_places(len(self)):
            content = self._content(index)
            content = content_hash(Path(content)) if isinstance(content, str) else content
            digest.update(hashlib.sha256(content if isinstance(content, bytes) else b"").digest())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": Pillow image in RGB}.

        Raises:
            BrokenSample: if the picture is missing or cannot be decoded.
        """
        content, (row, place) = self._content(index), self._places[index]
        with named(self.name, f"row {row}, candidate {place}"):
            if len(self._last[1]) > self.counts[row]:
                raise Unusable(f"{len(self._last[1])} pictures for {self.counts[row]} candidates")
            if isinstance(content, str):
                return {"image": read_picture(Path(content))}
            if not isinstance(content, bytes):
                raise Unusable("missing picture")
            return {"image": decode_picture(content, formats=FILE_FORMATS)}

    def _content(self, index: int) -> Any:
        # bytes or path of an image, None for a missing one
        row, place = self._places[index]
        if self._last[0] != row:
            self._last = (row, self._rows[row]["candidate_images"])
        pictures = self._last[1]
        return picture_bytes(pictures[place]) if place < len(pictures) else None


def open_winogavil(source: str, root: Path) -> RowAssociations:
    """The test split of WinoGAViL.

    Args:
        source: a folder written by `save_to_disk` or one that the `datasets` library recognises, or a name on the hub
            (nlphuji/winogavil).
        root: folder that a relative path starts from.
    Raises:
        ValueError: if it cannot be read, or is another data set.
    """
    import datasets  # two seconds, which rows without WinoGAViL need not spend

    folder = root / source
    try:
        if folder.is_dir():
            saved = (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()
            rows = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder))
        else:
            rows = datasets.load_dataset(source)
    except (OSError, ValueError, ConnectionError) as error:
        raise ValueError(f"data.winogavil = {source!r} cannot be read: {error}") from None
    if isinstance(rows, datasets.DatasetDict):
        if "test" not in rows:
            raise ValueError(f"data.winogavil = {source!r} has no split test; it has: {', '.join(rows)}")
        rows = rows["test"]
    if "candidate_images" in rows.column_names:  # else the error comes with the columns that are needed
        undecoded = _with_picture(rows.features["candidate_images"], datasets.Image(decode=False))
        rows = rows.cast_column("candidate_images", undecoded)
    return RowAssociations(rows, folder.name if folder.is_dir() else source)


def _with_picture(feature: Any, picture: Any) -> Any:
    """A list of undecoded images, so that a damaged one is one broken sample and not the end of the run."""
    if isinstance(feature, list):
        return [picture]
    return type(feature)(picture) if hasattr(feature, "feature") else feature


@torch.no_grad()
def evaluate_associations(encoder: Encoder, instances: Associations) -> Evaluation:
    """Mean Jaccard index of the k best images for "A <cue>" or "An <cue>" and the k right ones (`winogavil_metrics`).

    Instances with an unreadable image are left out and counted in the protocol.
    """
    # all images of all instances in one pass; an instance is then a span of them
    images, readable = encoder.images(instances)
    texts = encoder.texts([winogavil_prompt(cue) for cue in instances.cues])
    starts = [0, *itertools.accumulate(instances.counts)]
    jaccards, sizes, chances = [], [], []
    for number, gold in enumerate(instances.gold):
        span = slice(starts[number], starts[number + 1])
        if not readable[span].all():
            continue
        pictures, text = images[span].to(encoder.device), texts[number : number + 1].to(encoder.device)
        scores = encoder.model.geometry.similarity(pictures, text)[:, 0]
        jaccards.append(winogavil_jaccard(scores.cpu().numpy(), gold))
        sizes.append(instances.counts[number])
        chances.append(chance_jaccard(sizes[-1], len(gold)))
    return Evaluation(
        metrics=winogavil_metrics(jaccards, sizes),
        protocol={
            "task": "associations",
            "data": instances.name,
            "fingerprint": instances.fingerprint,
            "num_images": len(instances),
            "num_instances": len(jaccards),
            "unreadable_instances": len(instances.counts) - len(jaccards),
            "preprocessing": encoder.preprocessing,
        },
        chance=winogavil_metrics(chances, sizes),
        hits={
            name: [[value] if inside(size) else [] for value, size in zip(jaccards, sizes)]
            for name, inside in WINOGAVIL_GROUPS.items()
        },
    )


def chance_jaccard(num_candidates: int, k: int) -> float:
    """Expected Jaccard index of k candidates drawn at random, k being right: the mean over hypergeometric hits."""
    ways = comb(num_candidates, k)
    hits: Sequence[int] = range(max(0, 2 * k - num_candidates), k + 1)
    return sum(comb(k, h) * comb(num_candidates - k, k - h) / ways * h / (2 * k - h) for h in hits)
