"""Training batches addressed by position."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from common.base.random_keys import derive_key
from common.data.broken import BrokenSample, read_or_replace
from common.data.decoding import number_of
from common.data.loader import TIMEOUT, Loader
from common.data.mixture import lazy_items
from common.data.order import BatchPositions, MixedOrder, SampleOrder, seed_of
from common.data.pairs import Pairs
from common.data.partners import Drawn, Partners
from common.data.rand_augment import albef_augment, tcl_augment
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform


class Batch(NamedTuple):
    """One process's share of a global batch."""

    images: torch.Tensor  # (batch, 3, size, size) uint8
    token_ids: torch.Tensor  # (batch, context_length)
    image_ids: list[str]
    image_index: torch.Tensor  # (batch,) int64 >= 0, equal for equal image_ids: an image listed twice has one
    broken: list[BrokenSample]  # samples that could not be read and were replaced
    second_views: torch.Tensor | None = None  # as images; row k of both shows one image


class TrainingView(Dataset):
    """Training pairs by position; a sample is a pure function of (seed, position).

    A broken sample is replaced by another of its set, drawn from (seed, position), in a stream by the next one; the
    order of all others stays.

    Args:
        two_views: of each image, with separate seeds (TCL).
        augmentation: "none", "albef" or "tcl", after the transform.
        partner_noise, partners_drawn: see `Partners`.
    """

    def __init__(
        self,
        pairs: Pairs,
        order: SampleOrder | MixedOrder,
        transform: ImageTransform,
        tokenizer: Tokenizer,
        context_length: int,
        two_views: bool = False,
        augmentation: str = "none",
        partner_noise: float = 0.0,
        partners_drawn: Drawn = "every_batch",
    ) -> None:
        self.pairs, self.order, self.transform = pairs, order, transform
        self.tokenizer, self.context_length, self.two_views = tokenizer, context_length, two_views
        self.augment = {"none": None, "albef": albef_augment, "tcl": tcl_augment}[augmentation]
        self.partners = Partners(order, partner_noise, partners_drawn) if partner_noise else None

    def __len__(self) -> int:
        return self.order.samples_per_epoch

    def __getitems__(self, positions: list[int]) -> Batch:
        indices = self.order.epochs_and_indices(np.asarray(positions))[1]
        images, second, captions, image_ids, image_index, broken = [], [], [], [], [], []
        for position, index in zip(positions, indices):
            sample_seed = seed_of(self.order.seed, position)
            sample = self.read(int(index), sample_seed, broken)
            images.append(self.view(sample["image"], sample_seed))
            if self.two_views:
                second.append(self.view(sample["image"], derive_key("second view", sample_seed)))
            captions.append(_one_of(sample["captions"], sample_seed))
            image_ids.append(sample["image_id"])
            image_index.append(number_of(sample["image_id"]))
        if self.partners is not None:
            captions = self._with_wrong_partners(captions, positions, indices, broken)
        token_ids = self.tokenizer.encode(captions, self.context_length)
        second_views = torch.stack(second) if second else None
        return Batch(torch.stack(images), token_ids, image_ids, torch.tensor(image_index), broken, second_views)

    def _with_wrong_partners(
        self, captions: list[str], positions: list[int], indices: np.ndarray, broken: list[BrokenSample]
    ) -> list[str]:
        # only a wrong partner is read again: a right one may be the substitute of a broken sample
        sources, drawn_at = self.partners.of(np.asarray(positions))
        seeds = [seed_of(self.order.seed, int(at)) for at in drawn_at]
        return [
            right if source == index else _one_of(self.read(int(source), seed, broken, self.pairs.captions), seed)
            for right, index, source, seed in zip(captions, indices, sources, seeds)
        ]

    def view(self, image: Any, seed: int) -> torch.Tensor:
        """A training view, (3, size, size) uint8."""
        pixels = self.transform.train(image, seed)
        if self.augment is None:
            return pixels
        rng = np.random.default_rng(derive_key("augmentation", seed))
        picture = self.augment(Image.fromarray(pixels.permute(1, 2, 0).numpy()), rng)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def read(
        self, index: int, sample_seed: int, broken: list[BrokenSample], load: Callable[[int], Any] | None = None
    ) -> Any:
        """The sample (or what `load` gives for its index), or its substitute's; `broken` receives unreadable ones."""

        def substitute(index: int, attempt: int) -> int:
            return self.order.substitute(index, seed_of(sample_seed, 2 + attempt))

        # one caption is read of an item, so the others need no words
        return read_or_replace(load or lazy_items(self.pairs), index, substitute, broken)


def training_batches(
    view: Dataset,
    positions: BatchPositions,
    num_workers: int | None,
    pin_memory: bool,
    name: str = "training data",
    timeout: float = TIMEOUT,
) -> Loader:
    """The batches of these steps, in order."""
    return Loader(
        view,
        name,
        num_workers,
        _as_is,
        prefetch=4,
        timeout=timeout,
        stops_at_signal=True,
        batch_sampler=positions,
        pin_memory=pin_memory,
    )


def _one_of(captions: list[str], sample_seed: int) -> str:
    return captions[seed_of(sample_seed, 1) % len(captions)]


def _as_is(batch: Batch) -> Batch:
    return batch
