"""Two small worlds in which a contrastive objective trains in seconds on one core.

World, weights and batches are functions of a seed. The global random state is neither used nor changed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from common.base.random_keys import derive_key

DECIDES = "evaluation"

NUM_CLASSES, NUM_PIXELS, NUM_WORDS, EMBEDDING_DIM = 40, 64, 48, 32
_CLASS_LATENTS, _PAIR_LATENTS, _WIDTH = 24, 16, 128


@dataclass(frozen=True)
class ClassWorld:
    """Images of 40 classes: Gaussian clusters, mixed at random and squashed into 64 "pixels" (Sec. 5.1).

    means: (40, 24) of the classes. mixing: (24, 64).
    """

    means: torch.Tensor
    mixing: torch.Tensor

    @classmethod
    def drawn(cls, seed: int) -> "ClassWorld":
        """The world of a seed."""
        draws = generator(seed, "class world")
        means = 0.9 * torch.randn(NUM_CLASSES, _CLASS_LATENTS, generator=draws)
        return cls(means, _mixing(_CLASS_LATENTS, NUM_PIXELS, draws))

    def pictures(self, count: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(count, 64) pixels in (-1, 1), and (count,) labels."""
        labels = torch.randint(NUM_CLASSES, (count,), generator=draws)
        latents = self.means[labels] + 0.9 * torch.randn(count, _CLASS_LATENTS, generator=draws)
        return (latents @ self.mixing).tanh(), labels

    def view(self, pictures: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        """An augmented view, same shape: a random fifth of the pixels is lost, the rest is noisy."""
        kept = torch.rand(pictures.shape, generator=draws) > 0.2
        return pictures * kept + 0.4 * torch.randn(pictures.shape, generator=draws)


@dataclass(frozen=True)
class PairWorld:
    """Images with captions: two noisy nonlinear functions of one latent vector (Sec. 5.2).

    to_image: (16, 64). to_meaning: (16, 16), applied to the latent vector before to_text. to_text: (16, 48).
    """

    to_image: torch.Tensor
    to_meaning: torch.Tensor
    to_text: torch.Tensor

    @classmethod
    def drawn(cls, seed: int) -> "PairWorld":
        """The world of a seed."""
        draws = generator(seed, "pair world")
        return cls(
            _mixing(_PAIR_LATENTS, NUM_PIXELS, draws),
            torch.randn(_PAIR_LATENTS, _PAIR_LATENTS, generator=draws),
            _mixing(_PAIR_LATENTS, NUM_WORDS, draws),
        )

    def pairs(self, count: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(count, 64) images and (count, 48) texts; row k of both belong together."""
        latents = torch.randn(count, _PAIR_LATENTS, generator=draws)
        images = (latents @ self.to_image).tanh()
        texts = (latents @ self.to_meaning @ self.to_text).tanh()
        return tuple(side + 0.25 * torch.randn(side.shape, generator=draws) for side in (images, texts))


def toy_encoder(in_dim: int, batch_norm: bool = False) -> nn.Sequential:
    """Three linear layers with ReLU between, (batch, in_dim) -> (batch, 32).

    Args:
        batch_norm: normalise after every layer, the last one included; after it no representation looks collapsed.
    """
    layers: list[nn.Module] = []
    for incoming, outgoing in ((in_dim, _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, EMBEDDING_DIM)):
        last = outgoing == EMBEDDING_DIM
        layers.append(nn.Linear(incoming, outgoing))
        if batch_norm:
            layers.append(nn.BatchNorm1d(outgoing, affine=not last))
        if not last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def seeded(make: Callable[[], nn.Module], *key: int | str) -> nn.Module:
    """The module that `make` builds, with weights drawn from the key."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_key(*key))
        return make()


def generator(*key: int | str) -> torch.Generator:
    """A generator seeded only by the key."""
    return torch.Generator().manual_seed(derive_key(*key))


def _mixing(incoming: int, outgoing: int, draws: torch.Generator) -> torch.Tensor:
    return torch.randn(incoming, outgoing, generator=draws) / math.sqrt(incoming)
