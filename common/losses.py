"""The losses of matched pairs that a row can name, each with its chance level."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from common.info_nce import info_nce_chance
from common.sigmoid_loss import sigmoid_chance, sigmoid_loss
from common.tiled import geometry_loss


class Loss(NamedTuple):
    """A loss of matched pairs.

    of: (image_embeddings, text_embeddings, geometry, *scalars of the model, **options) -> scalar, of this process.
    chance: (local_batch, ...) -> value for a model to which all pairs are alike.
    """

    of: Callable[..., torch.Tensor]
    chance: Callable[..., float]


LOSSES = {
    "info_nce": Loss(geometry_loss, info_nce_chance),
    "sigmoid": Loss(sigmoid_loss, sigmoid_chance),
}
