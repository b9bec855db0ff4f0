"""The losses of paired images and texts that a row can name, each with its chance level."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from common.info_nce import info_nce_chance
from common.sigmoid_loss import sigmoid_chance, sigmoid_loss
from common.tiled import geometry_loss


class Loss(NamedTuple):
    """A loss of a batch of pairs.

    of: (image_embeddings, text_embeddings, geometry, *scalars of the model, **options) -> scalar, of this process.
    chance: (local_batch, ...) -> lowest value of a model that gives all pairs one score.
    """

    of: Callable[..., torch.Tensor]
    chance: Callable[..., float]


LOSSES = {
    "info_nce": Loss(geometry_loss, info_nce_chance),
    "sigmoid": Loss(sigmoid_loss, sigmoid_chance),
}
