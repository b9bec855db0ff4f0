"""What a run trains on: samples in order, as tensors on the device."""

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

from common.base.provenance import ROOT
from common.base.settings import ModelConfig
from common.data.batches import Batch, TrainingView, training_batches
from common.data.broken import BrokenSample
from common.data.caption_cache import CaptionCache
from common.data.feature_cache import CENTRE, MIRROR, FeatureCache
from common.data.loader import Loader
from common.data.order import BatchPositions, MixedOrder, SampleOrder, order_of
from common.data.pairs import (
    EvaluationSets,
    Pairs,
    image_transform,
    lost_at_open,
    open_evaluation_sets,
    open_validation_pairs,
    open_validation_task,
)
from common.data.text import build_tokenizer, tokenizer_from_json, warn_of_unread_words
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform, normalize
from common.encoders.stem import PooledStem
from common.encoders.two_towers import bare_tower
from common.run.checkpoint import Checkpoint


class Training(Protocol):
    """What a run needs to know of its data, whatever a sample is.

    order: which sample stands at which position.
    view: positions -> one process's batch, which has a length, `broken` samples and `pin_memory()`.
    description: the training set in one line, for every result.
    """

    order: SampleOrder | MixedOrder
    view: Dataset
    description: str

    def lost_at_open(self) -> list[BrokenSample]:
        """Samples that opening alone showed to be broken."""

    def one_sample(self) -> tuple[torch.Tensor, ...] | None:
        """The model's inputs for one sample, on the meta device, to count what it costs; None = not counted."""

    def with_features(self, model: nn.Module, config: Any, device: torch.device) -> "Training":
        """Itself, with features kept on disk in the place of pictures where the model has a stem that is held still.

        Call on every process, with the model on the device.
        """

    def state(self, model: nn.Module) -> dict[str, Any]:
        """JSON values with which a checkpoint rebuilds the model and its preprocessing, beside the config."""


@dataclass(frozen=True)
class TrainingData:
    """Captioned pictures: what a run trains and is evaluated on, and how pixels and words become tensors.

    pairs: the training set. order, view, description: see `Training`.
    tokenizer, transform: the same for training and evaluation; a checkpoint carries both.
    validation_pairs: ranked during training; None where run.evaluate_every is 0.
    validation_task: classified zero-shot during training; None likewise, and where there is no labelled set.
    evaluation_sets: of the end, opened now so that a missing one is known at once.
    cache: of a stem's features; None = there is no stem, or it trains.
    """

    pairs: Pairs
    order: SampleOrder | MixedOrder
    view: Dataset
    tokenizer: Tokenizer
    transform: ImageTransform
    validation_pairs: Pairs | None
    validation_task: Any | None
    evaluation_sets: EvaluationSets
    cache: FeatureCache | None = None

    @property
    def description(self) -> str:
        return described(self.pairs)

    def lost_at_open(self) -> list[BrokenSample]:
        sets, validation = self.evaluation_sets, [] if self.validation_pairs is None else [self.validation_pairs]
        return lost_at_open(self.pairs, *validation, *sets.retrieval.values(), *sets.zero_shot.values())

    def one_sample(self) -> tuple[torch.Tensor, ...]:
        size, length = self.transform.size, self.view.context_length
        return torch.empty(1, 3, size, size, device="meta"), torch.zeros(1, length, dtype=torch.long, device="meta")

    def with_features(self, model: nn.Module, config: Any, device: torch.device) -> "TrainingData":
        sets = self.evaluation_sets.retrieval.values()
        keep_captions(model, config, self.tokenizer, [self.pairs, self.validation_pairs, *sets], device)
        cache = feature_cache(model, config, device)
        if cache is None:
            return self
        view = copy.copy(self.view)
        view.pairs, view.transform = cache.of(self.pairs, self.transform, training=True)
        return replace(self, view=view, cache=cache)

    def state(self, model: nn.Module) -> dict[str, Any]:
        """The model is two towers with a geometry."""
        geometry, tokenizer = model.geometry.name, self.tokenizer.to_json()
        return {"geometry": geometry, "tokenizer": tokenizer, "transform": self.transform.to_json()}


def kept_stems(model: nn.Module, config: Any) -> list[nn.Module]:
    """Parts of the model whose outputs training reads from disk."""
    if not isinstance(config.model, ModelConfig):
        return []
    towers = (model.image_tower, config.model.image), (model.text_tower, config.model.text)
    return [bare_tower(tower).stem for tower, settings in towers if settings.has_cache]


def feature_cache(model: nn.Module, config: Any, device: torch.device) -> FeatureCache | None:
    """Of the features of the image tower's stem; None where there is none, it trains, or nothing is to be kept.

    A tower that reads nothing but their mean has the mean kept.

    Args:
        model: unwrapped, on the device, with the stem's weights.
        config: of the run.
        device: computes.
    """
    if not isinstance(config.model, ModelConfig) or not config.model.image.has_cache:
        return None
    stem, settings = bare_tower(model.image_tower).stem, config.model.image.stem
    views = {"centre": (CENTRE,), "mirror": (CENTRE, MIRROR)}.get(settings.views)
    pooled = isinstance(model.image_tower, PooledStem)
    grid = 1 if pooled else stem.grid
    return FeatureCache(
        folder=ROOT / "outputs" / "features",
        network=f"{stem.name} {stem.fingerprint()}{' mean' * pooled}",
        compute=lambda pixels: F.adaptive_avg_pool2d(stem(normalize(pixels.to(device))), grid),
        shape=(stem.channels, grid, grid),
        views=tuple(range(settings.views)) if views is None else views,
        max_bytes=settings.cache_gb * 1e9,
        # of a CPU's cache a small batch fits in, which makes it twice as fast
        batch_size=16 if device.type == "cpu" else config.run.evaluation_batch_size,
        num_workers=config.run.num_workers,
    )


def keep_captions(
    model: nn.Module, config: Any, tokenizer: Tokenizer, sets: Iterable[Pairs | None], device: torch.device
) -> None:
    """Lets a text stem that is held still read what was computed once. Call on every process, with the weights in.

    Sets whose captions are not known in advance (scenes, streams) are computed as they come.

    Args:
        model: unwrapped, on the device; momentum copies in it read the same.
        config: of the run.
        tokenizer: of the run.
        sets: whose captions are computed now, where they are not kept yet.
        device: computes.
    """
    stems = [module for module in model.modules() if hasattr(module, "kept")]
    if not stems or not config.model.text.has_cache:
        return
    stem, length = stems[0], config.data.context_length
    file = ROOT / "outputs" / "features" / f"captions-{stem.fingerprint()}.f16"
    cache = CaptionCache(file, stem.width, tokenizer.end_id, stem.compute, config.model.text.stem.cache_gb * 1e9)
    known = (pairs for pairs in sets if hasattr(pairs, "all_captions"))
    for pairs in {id(pairs): pairs for pairs in known}.values():
        cache.keep(pairs.name, tokenizer.encode([*pairs.all_captions()], length), device)
    for stem in stems:
        stem.kept = cache


def described(data_set: Any) -> str:
    """A data set in one line: name, size, short fingerprint."""
    return f"{data_set.name}, {len(data_set)} pictures ({data_set.fingerprint[:8]})"


def open_training_data(
    config: Any, pairs: Pairs, checkpoint: Checkpoint | None, two_views: bool = False
) -> TrainingData:
    """Everything but the training set itself, which the run's folder depends on and which is open already.

    Args:
        config: of the run.
        pairs: the training set that config.data names.
        checkpoint: brings the tokenizer of a run that goes on, or starts from another; None = a fresh one.
        two_views: of each training picture.
    """
    data, run = config.data, config.run
    if checkpoint is None:
        tokenizer = build_tokenizer(data, pairs)
    else:
        tokenizer = tokenizer_from_json(checkpoint.state["tokenizer"])
    order, transform = order_of(pairs, config.optim.global_batch_size, run.seed), image_transform(data)
    sets = open_evaluation_sets(data)
    warn_of_unread_words(tokenizer, pairs, *sets.retrieval.values())
    return TrainingData(
        pairs=pairs,
        order=order,
        view=TrainingView(pairs, order, transform, tokenizer, data.context_length, two_views, data.augmentation),
        tokenizer=tokenizer,
        transform=transform,
        validation_pairs=open_validation_pairs(data) if run.evaluate_every else None,
        validation_task=open_validation_task(data, sets) if run.evaluate_every else None,
        evaluation_sets=sets,
    )


def batches_from(
    first_step: int, config: Any, training: Training, accelerator: Accelerator, steps: int | None = None
) -> Iterable[Any]:
    """This process's share of every global batch from a step on; the order depends on the seed alone.

    Where it is known epoch by epoch, the loader of an epoch begins when the last step of the one before is over.

    Args:
        first_step: updates made.
        config: of the run.
        training: gives order and samples.
        accelerator: gives this process's place among all.
        steps: of the run, None = config.optim.steps.
    """
    last, order, run = config.optim.steps if steps is None else steps, training.order, config.run
    pin_memory = accelerator.device.type == "cuda"

    def loader(start: int, stop: int) -> Loader:
        positions = BatchPositions(order, start, stop, accelerator.process_index, accelerator.num_processes)
        name = training.description
        return training_batches(training.view, positions, run.num_workers, pin_memory, name, run.data_timeout)

    if not order.by_epoch:
        return loader(first_step, last)
    steps_per_epoch = order.samples_per_epoch // order.global_batch_size
    edges = [first_step, *range((first_step // steps_per_epoch + 1) * steps_per_epoch, last, steps_per_epoch), last]
    return itertools.chain.from_iterable(loader(start, stop) for start, stop in itertools.pairwise(edges))


def as_inputs(batch: Batch, transform: ImageTransform, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 3, size, size) normalised pixels and (batch, context_length) ids, on the device."""
    images = transform.inputs(batch.images.to(device, non_blocking=True))
    return images, batch.token_ids.to(device, non_blocking=True)
