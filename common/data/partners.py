"""Wrong partners: a share of the training images gets the caption of another one (`data.partner_noise`).

The chosen images exchange captions, so every caption occurs as often as without noise. `every_batch`: within each
global batch, with new choices in every step, so that no wrong pair can be learned by heart. `once`: within the training
set, the same wrong pairs in every epoch.
"""

from functools import cached_property
from typing import Literal

import numpy as np
import torch

from common.base.random_keys import derive_key
from common.data.order import SampleOrder, seed_of

Drawn = Literal["every_batch", "once"]


def shuffled_texts(batch: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """The text of each image when a share of the pairs is wrong: columns of a similarity matrix.

    Args:
        share: in [0, 1], rounded to whole pairs; a single pair cannot be shuffled and stays.
    Returns:
        (batch,) a permutation; exactly the chosen pairs have another text.
    """
    order = torch.arange(batch)
    chosen = torch.randperm(batch, generator=generator)[: round(share * batch)]
    order[chosen] = chosen.roll(1)
    return order


class Partners:
    """The caption at each position; a pure function of (seed, position).

    Args:
        order: of one set that is read by index.
        share: of wrong pairs, in [0, 1], rounded to whole pairs of a batch (`every_batch`) or of the set (`once`).
    """

    def __init__(self, order: SampleOrder, share: float, drawn: Drawn = "every_batch") -> None:
        self.order, self.share, self.drawn = order, share, drawn

    def of(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the sample, position that chooses among its captions) for the text at each position."""
        positions = np.asarray(positions, dtype=np.int64)
        if self.share and self.drawn == "every_batch":
            size = self.order.global_batch_size
            steps, places = np.divmod(positions, size)
            positions = positions.copy()
            for step in np.unique(steps):
                inside = steps == step
                positions[inside] = step * size + self._table("partners of a step", size, int(step))[places[inside]]
        indices = self.order.epochs_and_indices(positions)[1]
        if self.share and self.drawn == "once":
            indices = self._of_set[indices]
        return indices, positions

    @cached_property
    def _of_set(self) -> np.ndarray:
        return self._table("partners of a set", self.order.num_samples)

    def _table(self, what: str, size: int, *numbers: int) -> np.ndarray:
        seed = seed_of(derive_key(what, self.order.seed, *numbers))
        return shuffled_texts(size, self.share, torch.Generator().manual_seed(seed)).numpy()
