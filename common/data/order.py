"""The order of samples: a pure function of (seed, epoch, position).

Position p is the p-th sample of the run. Resuming is one integer; the numbers of workers and processes do not change a
global batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from common.base.random_keys import derive_key, mix64_array


def seed_of(*parts: int) -> int:
    """A 63-bit seed from non-negative integers, e.g. (run seed, epoch, position)."""
    return derive_key(*parts) >> 1


def permuted(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """A seeded permutation of range(size) at these positions; no table, so 10^9 samples cost nothing.

    A four-round Feistel network permutes the smallest power of four that reaches size; results outside the range go
    through again (cycle walking), which keeps it a bijection.
    """
    half_bits = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [np.uint64(seed_of(seed, number)) for number in range(4)]
    values = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & half_mask
        for key in keys:
            left, right = right, left ^ (mix64_array(right ^ key) & half_mask)
        values[outside] = (left << half_bits) | right
        outside &= values >= size
    return values.astype(np.int64)


class SampleOrder:
    """Which sample stands at which position.

    An epoch is as many whole global batches as the set fills; the samples left out change from epoch to epoch.
    """

    by_epoch = False  # whether an epoch's order is known only when the one before it is over

    def __init__(self, num_samples: int, global_batch_size: int, seed: int, forward_only: bool = False) -> None:
        if global_batch_size > num_samples:
            raise ValueError(
                f"optim.global_batch_size = {global_batch_size} is larger than the training set of {num_samples} "
                f"samples; expected: at most {num_samples}"
            )
        self.num_samples, self.seed, self.forward_only = num_samples, seed, forward_only
        self.global_batch_size = global_batch_size
        self.samples_per_epoch = num_samples // global_batch_size * global_batch_size

    def epochs_and_indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, index into the data set) of each position, both shaped like positions."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.samples_per_epoch)
        if self.forward_only:
            return epochs, positions
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permuted(offsets[chosen], self.num_samples, seed_of(self.seed, int(epoch)))
        return epochs, indices

    def substitute(self, index: int, seed: int) -> int:
        """Index in the place of a broken one: drawn by the seed, in a stream the next."""
        return index + 1 if self.forward_only else seed % self.num_samples


MIXING_CYCLE = 1_000  # samples


def shares_of(weights: Sequence[float]) -> list[float]:
    """The share of each set in a mixture, in whole thousandths, at least one; the largest takes what is left."""
    parts = np.asarray(weights, dtype=np.float64)
    counts = np.maximum(1, np.rint(MIXING_CYCLE * parts / parts.sum()))
    counts[counts.argmax()] += MIXING_CYCLE - counts.sum()
    return (counts / MIXING_CYCLE).tolist()


class MixedOrder:
    """The order of a `Mixture`.

    Every cycle of 1,000 positions draws exactly its share from each set, in shuffled places. Within its share a set is
    traversed as without the others, epoch after epoch. A batch may hold an image twice where its set begins again.

    Args:
        parts: the order of each set, in batches of 1.
    """

    by_epoch = False

    def __init__(
        self, parts: Sequence[SampleOrder], weights: Sequence[float], global_batch_size: int, seed: int
    ) -> None:
        whole = SampleOrder(sum(part.num_samples for part in parts), global_batch_size, seed)
        self.num_samples, self.samples_per_epoch = whole.num_samples, whole.samples_per_epoch
        self.parts, self.global_batch_size, self.seed = list(parts), global_batch_size, seed
        self.counts = [round(MIXING_CYCLE * share) for share in shares_of(weights)]

    def epochs_and_indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As of `SampleOrder`, with indices into the mixture."""
        positions = np.asarray(positions, dtype=np.int64)
        cycles, offsets = np.divmod(positions, MIXING_CYCLE)
        indices = np.empty_like(positions)
        for cycle in np.unique(cycles):
            slots = permuted(np.arange(MIXING_CYCLE), MIXING_CYCLE, seed_of(self.seed, int(cycle)))
            set_at = np.searchsorted(np.cumsum(self.counts), slots, side="right")
            for number, (part, count) in enumerate(zip(self.parts, self.counts)):
                drawn = np.cumsum(set_at == number) - 1  # of this set in this cycle, before each offset
                chosen = (cycles == cycle) & (set_at[offsets] == number)
                inside = part.epochs_and_indices(cycle * count + drawn[offsets[chosen]])[1]
                indices[chosen] = inside * len(self.parts) + number
        return positions // self.samples_per_epoch, indices

    def substitute(self, index: int, seed: int) -> int:
        inside, number = divmod(index, len(self.parts))
        return self.parts[number].substitute(inside, seed) * len(self.parts) + number


def order_of(pairs: Any, global_batch_size: int, seed: int) -> SampleOrder | MixedOrder:
    """The order of a training set, a stream or a mixture of such."""
    if hasattr(pairs, "parts"):
        parts = [order_of(part, 1, seed_of(seed, number)) for number, part in enumerate(pairs.parts)]
        return MixedOrder(parts, pairs.weights, global_batch_size, seed)
    return SampleOrder(len(pairs), global_batch_size, seed, getattr(pairs, "forward_only", False))


class BatchPositions:
    """Batch sampler of one process: for every step in [start_step, stop_step) its share of the global batch."""

    def __init__(
        self, order: SampleOrder | MixedOrder, start_step: int, stop_step: int, process: int = 0, num_processes: int = 1
    ) -> None:
        if order.global_batch_size % num_processes:
            raise ValueError(
                f"optim.global_batch_size = {order.global_batch_size} cannot be dealt out evenly to {num_processes} "
                f"processes; expected: multiples of {num_processes}"
            )
        self.order, self.steps = order, range(start_step, stop_step)
        self.share = order.global_batch_size // num_processes
        self.process = process

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            first = step * self.order.global_batch_size + self.process * self.share
            yield list(range(first, first + self.share))
