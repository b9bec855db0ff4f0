"""A part of a data set, the same in every run, for validation (`data.num_val`, `data.val_share`)."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from common.base.provenance import hash_of
from common.data.broken import BrokenSample

_BY_INDEX = ("captions", "image_id", "lasting_id", "caption_ids", "label", "row", "pictures")


class Part:
    """Samples of pairs or labelled images in the order of `rows`; the name of the whole and `name` name it."""

    broken_at_open = ()  # of the whole: the samples of the part are taken from those that opening found whole

    def __init__(self, whole: Any, rows: list[int], name: str) -> None:
        self._whole, self._rows, self.name = whole, rows, f"{whole.name} ({name})"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._whole[self._rows[index]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while a copy is being made
            raise AttributeError(name)
        value = getattr(self._whole, name)
        return (lambda index: value(self._rows[index])) if name in _BY_INDEX else value

    def all_captions(self) -> Iterator[str]:
        for row in self._rows:
            with suppress(BrokenSample):
                yield from self._whole.captions(row)

    @cached_property
    def fingerprint(self) -> str:
        return hash_of([self._whole.fingerprint, self._rows])


def some_of(pictures: Any | None, count: int | None) -> Any | None:
    """The set, or `count` evenly spaced ones of its samples where it has more; None as count = all."""
    if pictures is None or count is None or count >= len(pictures):
        return pictures
    rows = (np.arange(count) * len(pictures) // count).tolist()
    return Part(pictures, rows, f"{count} of {len(pictures)}")
