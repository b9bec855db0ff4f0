"""The training data of a run: samples in order, as tensors on the device."""

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

from common.base.config import ConfigError
from common.base.places import outputs
from common.base.settings import TAKEN_BY_TOKENIZER, DataConfig, ModelConfig, RunConfig
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
from common.data.tokenizer import Tokenizer, WordTokenizer
from common.data.transforms import ImageTransform, normalize
from common.encoders.stem import PooledStem
from common.encoders.two_towers import bare_tower
from common.run.checkpoint import Checkpoint
from common.run.sources import named_sources, run_checkpoint


class Training(Protocol):
    """What a run needs from its data, whatever a sample is.

    order: sample of each position.
    view: positions -> batch of one process; it has a length, `broken` samples and `pin_memory()`.
    description: the training set in one line.
    """

    order: SampleOrder | MixedOrder
    view: Dataset
    description: str

    def lost_at_open(self) -> list[BrokenSample]:
        """Samples that were broken when the data were opened."""

    @property
    def validation_sets(self) -> list[Any]:
        """What `Setup.validate` evaluates on, each with name and fingerprint."""

    def with_features(self, model: nn.Module, config: Any, device: torch.device) -> "Training":
        """The same data, with cached features for images if the stem is frozen. Call on every process."""

    def state(self, model: nn.Module) -> dict[str, Any]:
        """JSON values with which a checkpoint, beside the config, rebuilds model and preprocessing."""


@dataclass(frozen=True)
class TrainingData:
    """Captioned images: training and evaluation sets, and their preprocessing.

    order, view, description: see `Training`.
    tokenizer, transform: the same for training and evaluation.
    validation_pairs: ranked during training; None if the run has no validation.
    validation_task: classified zero-shot during training; None also without labelled validation images.
    evaluation_sets: opened at the start, so that a missing one is reported at once.
    cache: of a frozen stem's features; None = no stem, or a trained one.
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

    @property
    def validation_sets(self) -> list[Any]:
        return [data_set for data_set in (self.validation_pairs, self.validation_task) if data_set is not None]

    def lost_at_open(self) -> list[BrokenSample]:
        sets, validation = self.evaluation_sets, [] if self.validation_pairs is None else [self.validation_pairs]
        return lost_at_open(self.pairs, *validation, *sets.retrieval.values(), *sets.zero_shot.values())

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
        geometry, tokenizer = model.geometry.name, self.tokenizer.to_json()
        return {"geometry": geometry, "tokenizer": tokenizer, "transform": self.transform.to_json()}


def validates(run: RunConfig) -> bool:
    """Whether a run evaluates its validation sets, at the latest after its last step."""
    return bool(run.evaluate_every) or not run.test


def feature_cache(model: nn.Module, config: Any, device: torch.device) -> FeatureCache | None:
    """Cache of the image stem's features, or of their mean if the tower reads no more; None = nothing to cache."""
    if not isinstance(config.model, ModelConfig) or not config.model.image.has_cache:
        return None
    stem, settings = bare_tower(model.image_tower).stem, config.model.image.stem
    # one cached row per crop: a number stands for that many random ones
    views = {"centre": (CENTRE,), "mirror": (CENTRE, MIRROR)}.get(settings.views)
    pooled = isinstance(model.image_tower, PooledStem)
    grid = 1 if pooled else stem.grid
    return FeatureCache(
        folder=outputs() / "features",
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
    """Computes captions once for a frozen text stem, and lets it read them. Call on every process, after the weights.

    Args:
        model: unwrapped, on the device; its momentum copies read the same cache.
        sets: whose captions are computed now, if not cached; those of scenes and streams are computed when read.
    """
    # momentum copies have stems with the same weights: one fingerprint, one cache
    stems = [module for module in model.modules() if hasattr(module, "kept")]
    if not stems or not config.model.text.has_cache:
        return
    stem, length = stems[0], config.data.context_length
    file = outputs() / "features" / f"captions-{stem.fingerprint()}.f16"
    cache = CaptionCache(file, stem.width, tokenizer.end_id, stem.compute, config.model.text.stem.cache_gb * 1e9)
    # the same set may be validation and test; scenes and streams draw captions on the fly
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
    """Opens everything but the training set, which is open already.

    Args:
        checkpoint: holds the tokenizer of a resumed run; None = a fresh run.
    """
    data, run = config.data, config.run
    if checkpoint is None:
        tokenizer = _words_of_start(config) or build_tokenizer(data, pairs)
    else:
        tokenizer = tokenizer_from_json(checkpoint.state["tokenizer"])
    order, transform = order_of(pairs, config.optim.global_batch_size, run.seed), image_transform(data)
    sets = open_evaluation_sets(data) if run.test else EvaluationSets({}, {})
    # before the first step: a vocabulary that does not fit the captions costs a whole run
    warn_of_unread_words(tokenizer, data.context_length, pairs, *sets.retrieval.values())
    return TrainingData(
        pairs=pairs,
        order=order,
        view=TrainingView(
            pairs,
            order,
            transform,
            tokenizer,
            data.context_length,
            two_views,
            data.augmentation,
            data.partner_noise,
            data.partners_drawn,
        ),
        tokenizer=tokenizer,
        transform=transform,
        validation_pairs=open_validation_pairs(data) if validates(run) else None,
        validation_task=open_validation_task(data) if validates(run) else None,
        evaluation_sets=sets,
    )


def _words_of_start(config: Any) -> Tokenizer | None:
    # With data.tokenizer=words the words of the run that the text tower starts from; None without such a run.
    named = named_sources(getattr(config, "model", None)).get("text")
    takes_words = config.data.tokenizer == "words" and not config.data.vocabulary  # which is refused
    start = run_checkpoint(named[1]) if named and takes_words else None
    if start is None or not isinstance(tokenizer_from_json(start.state["tokenizer"]), WordTokenizer):
        return None
    return tokenizer_of_start(config.data, start, named[1])


def tokenizer_of_start(data: DataConfig, start: Checkpoint, source: str) -> Tokenizer:
    """The tokenizer of the run that a text tower starts from: its weights belong to these ids.

    Args:
        source: names the run in messages.
    Raises:
        ConfigError: the config has another tokenizer, or counts words.
    """
    tokenizer, theirs = tokenizer_from_json(start.state["tokenizer"]), start.state["config"]["data"]
    if data.tokenizer == "words":
        is_same = isinstance(tokenizer, WordTokenizer) and not data.vocabulary
    else:
        is_same = build_tokenizer(data, training_pairs=None).fingerprint == tokenizer.fingerprint
    if not is_same:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer}, data.vocabulary = {data.vocabulary!r}: the text tower starts from "
            f"{source}, which has another tokenizer; expected: data.tokenizer = {theirs.get('tokenizer')}, "
            f"data.vocabulary = {theirs.get('vocabulary')!r}, as in that run"
        )
    for key in TAKEN_BY_TOKENIZER:
        value, default = getattr(data, key), getattr(DataConfig, key)
        if value not in (default, theirs.get(key)):
            raise ConfigError(
                f"data.{key} = {value} counts no words here: the text tower starts from {source} and keeps its "
                f"words; expected: {default}, the default"
            )
    return tokenizer


def batches_from(
    first_step: int, config: Any, training: Training, accelerator: Accelerator, steps: int | None = None
) -> Iterable[Any]:
    """This process's share of the global batches from a step on.

    The order depends only on the seed. If it is known epoch by epoch, each epoch has a loader, which starts when the
    last has ended.
    """
    last, order, run = config.optim.steps if steps is None else steps, training.order, config.run
    pin_memory, num_workers = accelerator.device.type == "cuda", run.num_workers
    # nothing to decode; beside a GPU the trainer's one core draws too few
    is_quick = config.data.source in ("scenes", "cifar10") and not pin_memory
    if num_workers is None and (is_quick or getattr(training, "cache", None)):
        num_workers = 0

    def loader(start: int, stop: int) -> Loader:
        positions = BatchPositions(order, start, stop, accelerator.process_index, accelerator.num_processes)
        name = training.description
        return training_batches(training.view, positions, num_workers, pin_memory, name, run.data_timeout)

    # the order of later epochs is known already: one loader serves the whole run
    if not order.by_epoch:
        return loader(first_step, last)
    steps_per_epoch = order.samples_per_epoch // order.global_batch_size
    edges = [first_step, *range((first_step // steps_per_epoch + 1) * steps_per_epoch, last, steps_per_epoch), last]
    return itertools.chain.from_iterable(loader(start, stop) for start, stop in itertools.pairwise(edges))


def as_inputs(batch: Batch, transform: ImageTransform, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 3, size, size) normalised pixels and (batch, context_length) ids, on the device."""
    images = transform.inputs(batch.images.to(device, non_blocking=True))
    return images, batch.token_ids.to(device, non_blocking=True)
