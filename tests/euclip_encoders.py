"""All geometries, and encoders of fixed linear maps, for tests of EuCLIP's walks and distances."""

import torch
from torch import nn

from common.data.scenes import scene_words
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.encoders.two_towers import TwoTowers
from common.evaluation.embed import Encoder
from common.geometry import Sphere
from common.logit_scale import LogitScale
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


def encoder_of(geometry) -> Encoder:
    """Of pictures of 16 x 16 and captions in the scenes' words."""
    model = TwoTowers(Mixed(3 * 16 * 16, 1), Mixed(20, 2), geometry, LogitScale(1.0))
    tokenizer = WordTokenizer.from_words(scene_words())
    return Encoder(model, ImageTransform(size=16), tokenizer, 20, 4, torch.device("cpu"))
