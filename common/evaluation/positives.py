"""Which candidates are right for each query of a retrieval."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
import torch

from common.evaluation.arrays import labels_of


@dataclass(frozen=True)
class Positives:
    """The ascending lists of right candidates of all queries, joined, for both directions.

    ECCV Caption lists them for other queries in each direction.

    texts: those of image i are texts[image_starts[i] : image_starts[i + 1]]; image_starts is (num_images + 1,).
    images: those of text j are images[text_starts[j] : text_starts[j + 1]]; text_starts is (num_texts + 1,).
    texts_outside: (num_images,) number of further positives that are no candidates: never found, but counted in the R
        of R-Precision and mAP@R. Only queries with a positive among the candidates may have some.
    """

    texts: np.ndarray
    image_starts: np.ndarray
    images: np.ndarray
    text_starts: np.ndarray
    texts_outside: np.ndarray

    @classmethod
    def from_owners(cls, text_to_image: torch.Tensor, num_images: int) -> "Positives":
        """Each caption belongs to one image, row text_to_image (num_texts,); an image may have none."""
        owners = labels_of(text_to_image, "text_to_image").cpu().numpy()
        if owners.ndim != 1:
            raise ValueError(f"text_to_image has shape {owners.shape}; expected: one row index for each text")
        if len(owners) and (owners.min() < 0 or owners.max() >= num_images):
            rows_range = f"{owners.min()}..{owners.max()}"
            raise ValueError(f"text_to_image must hold rows in [0, {num_images}), got {rows_range}")
        texts = np.argsort(owners, kind="stable")
        image_starts = np.searchsorted(owners[texts], np.arange(num_images + 1))
        return cls(texts, image_starts, owners, np.arange(len(owners) + 1), np.zeros(num_images, np.int64))

    @classmethod
    def from_lists(
        cls,
        texts_of_image: Sequence[Sequence[int]],
        images_of_text: Sequence[Sequence[int]],
        texts_outside: Sequence[int] | None = None,
    ) -> "Positives":
        """Any relation: one list for every image and every text in order; empty lists are no queries.

        Raises:
            ValueError: a list that holds a candidate twice or an unknown one, or is empty while texts_outside is not 0.
        """
        num_images, num_texts = len(texts_of_image), len(images_of_text)
        texts, image_starts = _joined(texts_of_image, num_texts, "image", "text")
        images, text_starts = _joined(images_of_text, num_images, "text", "image")
        outside = np.zeros(num_images, np.int64) if texts_outside is None else np.asarray(texts_outside, np.int64)
        lost = np.flatnonzero((outside > 0) & (np.diff(image_starts) == 0))
        if len(lost):
            raise ValueError(f"image {lost[0]} has no positive among the candidates, but {outside[lost[0]]} outside")
        return cls(texts, image_starts, images, text_starts, outside)

    @property
    def num_images(self) -> int:
        return len(self.image_starts) - 1

    @property
    def num_texts(self) -> int:
        return len(self.text_starts) - 1

    @property
    def query_images(self) -> np.ndarray:
        """Images with at least one positive, ascending."""
        return np.flatnonzero(np.diff(self.image_starts))

    @property
    def query_texts(self) -> np.ndarray:
        """Texts with at least one positive, ascending."""
        return np.flatnonzero(np.diff(self.text_starts))


def _joined(lists: Sequence[Sequence[int]], num_candidates: int, query: str, candidate: str):
    starts = np.concatenate([[0], np.cumsum([len(values) for values in lists], dtype=np.int64)]).astype(np.int64)
    try:
        joined = np.fromiter((index(value) for values in lists for value in sorted(values)), np.int64, int(starts[-1]))
    except TypeError as error:
        raise ValueError(f"positives of {query}s: {error}; expected: rows, whole numbers") from None
    queries = np.repeat(np.arange(len(lists)), np.diff(starts))
    wrong = np.flatnonzero((joined < 0) | (joined >= num_candidates))
    if len(wrong):
        raise ValueError(
            f"{query} {queries[wrong[0]]} has the positive {candidate} {joined[wrong[0]]}; expected: "
            f"[0, {num_candidates})"
        )
    twice = np.flatnonzero((joined[1:] == joined[:-1]) & (queries[1:] == queries[:-1]))
    if len(twice):
        raise ValueError(f"{query} {queries[twice[0]]} has the positive {candidate} {joined[twice[0]]} more than once")
    return joined, starts
