"""All geometries, and encoders of fixed linear maps, for tests of EuCLIP's walks and distances."""

import torch
import toys
from torch import nn

from common.data.scenes import scene_words
from common.data.tokenizer import WordTokenizer
from common.geometry import Sphere
from euclip.geometry import Elliptic, Euclidean, Hyperbolic

DIM = 4
GEOMETRIES = {
    "sphere": Sphere,
    "elliptic": Elliptic,
    "euclidean": lambda: Euclidean(squared=False),
    "euclidean_squared": lambda: Euclidean(squared=True),
    "hyperbolic": lambda: Hyperbolic(DIM, squared=False, curvature_init=0.5),
    "hyperbolic_squared": lambda: Hyperbolic(DIM, squared=True, curvature_init=2.0),
}


class Mixed(nn.Module):
    """Pixels or ids through a fixed linear map."""

    def __init__(self, inputs: int, seed: int) -> None:
        super().__init__()
        self.weight = torch.randn(inputs, DIM, generator=torch.Generator().manual_seed(seed)) / inputs**0.5

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.flatten(1).float() @ self.weight


def encoder_of(geometry):
    """Of pictures of 16 x 16 and captions in the scenes' words."""
    tokenizer = WordTokenizer.from_words(scene_words())
    return toys.encoder_of(Mixed(3 * 16 * 16, 1), Mixed(20, 2), tokenizer, geometry, size=16, context_length=20)
