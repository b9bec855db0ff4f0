"""A trained row's model and some of its training pairs; the analyses of single models start here."""

from typing import Any

import numpy as np
import torch

from common.data.broken import readable_items
from common.data.order import permuted, seed_of
from common.data.pairs import open_training_pairs
from common.evaluation.embed import Encoder
from common.reproduce.rows import RowRun
from oblique_topology.config import Config
from oblique_topology.evaluate import MODELS

DECIDES = "evaluation"


def trained_model(run: RowRun) -> tuple[Config, Encoder]:
    """The config and the model of a finished run, in evaluation mode, without gradients of parameters.

    If the backbone is frozen, its features come from the cache of the training.
    """
    encoder = MODELS.encoder_of(run.files, run.config)
    encoder.model.requires_grad_(False)
    return run.config, encoder


def as_model_inputs(
    encoder: Encoder, pictures: list[Any], captions: list[str], transform: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, 3, size, size) normalised pixels and (count, context_length) ids on the model's device.

    A transform of cached features takes and returns features instead of images and pixels.
    """
    transform = encoder.transform if transform is None else transform
    images = torch.stack([transform.eval(picture) for picture in pictures]).to(encoder.device)
    token_ids = encoder.tokenizer.encode(captions, encoder.context_length).to(encoder.device)
    return encoder.transform.inputs(images), token_ids


def training_batch(
    config: Config, encoder: Encoder, count: int, drawn_by: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a run's training set as inputs of its model, with right partners; captions take turns, as in training.

    Args:
        drawn_by: seed of a random choice; None = the first pairs.
    Returns:
        As `as_model_inputs`; features instead of pixels if the image tower has a frozen backbone.
    """
    pairs, transform = encoder.cached(open_training_pairs(config.data, config.run.seed))
    order = None if drawn_by is None else permuted(np.arange(len(pairs)), len(pairs), seed_of(drawn_by)).tolist()
    items = readable_items(pairs, count, order)
    captions = [item["captions"][number % len(item["captions"])] for number, item in enumerate(items)]
    images, token_ids = as_model_inputs(encoder, [item["image"] for item in items], captions, transform)
    stem = encoder.model.image_tower.stem
    if encoder.cache is None and stem is not None and not stem.trainable:
        images = torch.cat([stem(part) for part in images.split(encoder.batch_size)])
    return images, token_ids


@torch.no_grad()
def embed_batch(encoder: Encoder, images: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of both sides, a part of the rows at a time."""
    size = encoder.batch_size
    image_embeddings = torch.cat([encoder.model.encode_image(part) for part in images.split(size)])
    return image_embeddings, torch.cat([encoder.model.encode_text(part) for part in token_ids.split(size)])


def random_batches(config: Config, encoder: Encoder, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Embeddings of images and texts of random training batches, of the run's size and drawn by its seed.

    Fewer than `count` where the training set has not as many whole batches.
    """
    size = config.optim.global_batch_size
    sides = embed_batch(encoder, *training_batch(config, encoder, count * size, drawn_by=config.run.seed))
    whole = len(sides[0]) // size * size
    return list(zip(*(side[:whole].split(size) for side in sides)))
