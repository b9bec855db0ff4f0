"""From the config to data sets of captioned pictures, a tokenizer, and training batches addressed by position."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from common.data.broken import BrokenSample, TooManyBroken
from common.data.scenes import SceneDataset, classification_task, scene_words
from common.data.shards import ShardDataset
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.run.config import DataConfig
from common.run.order import BatchPositions, SampleOrder, seed_of
from common.run.provenance import ROOT

ZERO_SHOT_SETS = ("imagenet", "imagenet_v2", "imagenet_a", "imagenet_r")


class Pairs(Protocol):
    """A map-style data set of captioned pictures."""

    name: str
    fingerprint: str  # changes when the content changes

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": PIL image or uint8 (H, W, 3), "captions": list of str, "image_id": str}."""

    def captions(self, index: int) -> list[str]:
        """The captions alone, without drawing or decoding the picture."""


def open_training_pairs(data: DataConfig, seed: int) -> Pairs:
    """The training set that the config names. For scenes the run's seed draws another world of the same kind."""
    if data.source == "scenes":
        return SceneDataset(
            split="train",
            size=data.num_train,
            image_size=data.image_size,
            seed=seed,
            caption_noise=data.caption_noise,
            ambiguity=data.ambiguity,
        )
    return _open_shards(data, "train")


def open_validation_pairs(data: DataConfig) -> Pairs:
    """The set that is ranked during training."""
    if data.source == "scenes":
        return SceneDataset(split="val", size=data.num_val, image_size=data.image_size)
    return _open_shards(data, "val")


def open_retrieval_sets(data: DataConfig) -> dict[str, Pairs]:
    """Test sets by role: "test" stands for Flickr30k, "second_test" for COCO. Roles without data are left out."""
    if data.source == "scenes":
        return {
            "test": SceneDataset(split="test", size=data.num_test, image_size=data.image_size),
            "second_test": SceneDataset(split="test_crowded", size=data.num_test, image_size=data.image_size),
        }
    roles = ["test"] + (["second_test"] if data.second_test else [])
    return {role: _open_shards(data, role) for role in roles}


def open_zero_shot_sets(data: DataConfig) -> dict[str, Any]:
    """Labelled sets by name, those that stand for ImageNet and its shifts. Shards bring none."""
    if data.source != "scenes":
        return {}
    return {
        name: classification_task(name, size=data.num_labelled, image_size=data.image_size) for name in ZERO_SHOT_SETS
    }


@dataclass(frozen=True)
class EvaluationSets:
    """What a model is evaluated on, by role."""

    zero_shot: dict[str, Any]
    retrieval: dict[str, Pairs]


def open_evaluation_sets(data: DataConfig) -> EvaluationSets:
    """All of them; opened before training, so that a missing test set is known at once and not hours later."""
    return EvaluationSets(open_zero_shot_sets(data), open_retrieval_sets(data))


def lost_at_open(*sets: Pairs) -> list[BrokenSample]:
    """What the headers of shards alone show to be broken, over several sets."""
    return [sample for pairs in sets for sample in getattr(pairs, "broken_at_open", [])]


def _open_shards(data: DataConfig, role: str) -> ShardDataset:
    if not data.root and not Path(getattr(data, role)).is_absolute():
        raise FileNotFoundError(
            f"data.source = shards needs a folder: set data.root (make: DATA=<folder>) or a full path in data.{role}"
        )
    return ShardDataset(
        getattr(data, role),
        root=data.root or None,
        max_broken_share=data.max_broken_share,
        index_dir=ROOT / "outputs" / "shard_index",
        role=role,
        # training may decode a JPEG at a fraction of its size; ranking sees every pixel
        decode_size=2 * data.image_size if role == "train" else None,
    )


def build_tokenizer(data: DataConfig, training_pairs: Pairs) -> WordTokenizer:
    """Closed vocabulary of the scenes' grammar, or the words of the training captions."""
    if data.source == "scenes":
        return WordTokenizer.from_words(scene_words())
    captions = training_pairs.all_captions()
    return WordTokenizer.from_captions(captions, min_count=data.min_word_count, max_size=data.max_words)


def image_transform(data: DataConfig) -> ImageTransform:
    """Pixels of one size; saved with the checkpoint, so that evaluation cannot silently use another one."""
    return ImageTransform(size=data.image_size, mode=data.resize, crop_scale=data.crop_scale)


@dataclass
class Batch:
    """One process's share of a global batch."""

    images: torch.Tensor  # (batch, 3, size, size) uint8
    token_ids: torch.Tensor  # (batch, context_length)
    image_ids: list[str]
    broken: list[BrokenSample]  # samples that could not be read and were replaced

    def pin_memory(self) -> "Batch":
        self.images, self.token_ids = self.images.pin_memory(), self.token_ids.pin_memory()
        return self


class TrainingView(Dataset):
    """Training pairs addressed by position; a sample is a pure function of (seed, position).

    A broken sample is replaced by another one drawn from (seed, position), so the order of all others stays.

    Args:
        pairs: the training set.
        order: which sample stands at which position.
        transform: picture -> uint8 tensor; gets a seed of its own for each position.
        tokenizer: words -> ids.
        context_length: tokens of a caption.
    """

    max_attempts = 20

    def __init__(
        self,
        pairs: Pairs,
        order: SampleOrder,
        transform: ImageTransform,
        tokenizer: WordTokenizer,
        context_length: int,
    ) -> None:
        self.pairs, self.order, self.transform = pairs, order, transform
        self.tokenizer, self.context_length = tokenizer, context_length

    def __len__(self) -> int:
        return self.order.samples_per_epoch

    def __getitems__(self, positions: list[int]) -> Batch:
        _, indices = self.order.epochs_and_indices(np.asarray(positions))
        images, captions, image_ids, broken = [], [], [], []
        for position, index in zip(positions, indices):
            sample_seed = seed_of(self.order.seed, position)
            sample = self._read(int(index), sample_seed, broken)
            images.append(self.transform.train(sample["image"], sample_seed))
            captions.append(sample["captions"][seed_of(sample_seed, 1) % len(sample["captions"])])
            image_ids.append(sample["image_id"])
        token_ids = self.tokenizer.encode(captions, self.context_length)
        return Batch(torch.stack(images), token_ids, image_ids, broken)

    def _read(self, index: int, sample_seed: int, broken: list[BrokenSample]) -> dict[str, Any]:
        for attempt in range(self.max_attempts):
            try:
                return self.pairs[index]
            except BrokenSample as error:
                broken.append(error)
                index = seed_of(sample_seed, 2 + attempt) % self.order.num_samples
        raise TooManyBroken(f"{self.max_attempts} samples in a row are broken; the last: {broken[-1]}")


def training_batches(view: TrainingView, positions: BatchPositions, num_workers: int, pin_memory: bool) -> DataLoader:
    """Loader of Batch objects for the given steps, in order."""
    return DataLoader(
        view,
        batch_sampler=positions,
        collate_fn=_as_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if num_workers else None,
    )


def _as_is(batch: Batch) -> Batch:
    return batch
