"""A part of a data set, the same in every run, for validation (`data.num_val`)."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from common.base.provenance import hash_of

_BY_INDEX = ("captions", "image_id", "caption_ids", "label", "row")


class Part:
    """`count` evenly spaced samples of pairs or labelled images; the name states how many of how many."""

    broken_at_open = ()  # of the whole: the samples of the part are taken from those that opening found whole

    def __init__(self, whole: Any, count: int) -> None:
        self._whole, self._rows = whole, (np.arange(count) * len(whole) // count).tolist()
        self.name = f"{whole.name} ({count} of {len(whole)})"

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
        return (caption for row in self._rows for caption in self._whole.captions(row))

    @cached_property
    def fingerprint(self) -> str:
        return hash_of([self._whole.fingerprint, self._rows])


def some_of(pictures: Any | None, count: int | None) -> Any | None:
    """The set, or `count` of its samples where it has more; None as count = all."""
    return pictures if pictures is None or count is None or count >= len(pictures) else Part(pictures, count)
