"""The order of samples: a pure function of (seed, epoch, position).

Position p is the p-th sample of the whole run. Resuming is one integer, and neither the number of loader workers nor
the number of processes changes which samples make up a global batch.
"""

from collections.abc import Iterator

import numpy as np

from common.base.random_keys import derive_key, mix64_array


def seed_of(*parts: int) -> int:
    """One 63-bit seed from several non-negative integers, e.g. (run seed, epoch, position)."""
    return derive_key(*parts) >> 1


def permuted(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """A seeded permutation of range(size), evaluated only where asked: no table, so 10^9 samples cost nothing.

    A four-round Feistel network permutes the smallest even-bit power of two above size; results outside the range are
    put through again until they fall inside (cycle walking), which keeps it a bijection.

    Args:
        positions: integers in [0, size).
        size: number of samples, >= 1.
        seed: the permutation's key.
    Returns:
        Integers in [0, size), same shape; distinct positions give distinct results.
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

    An epoch is the largest whole number of global batches that the data set fills; which samples are left out changes
    from epoch to epoch.

    Args:
        num_samples: size of the training set.
        global_batch_size: pairs per step over all processes.
        seed: of the run.
    Raises:
        ValueError: if one global batch is larger than the data set.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        if global_batch_size > num_samples:
            raise ValueError(
                f"optim.global_batch_size = {global_batch_size} is larger than the training set of {num_samples} "
                f"samples; accepted: at most {num_samples}"
            )
        self.num_samples, self.seed = num_samples, seed
        self.global_batch_size = global_batch_size
        self.samples_per_epoch = num_samples // global_batch_size * global_batch_size

    def epochs_and_indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, index into the data set) of each position, both shaped like positions."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.samples_per_epoch)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permuted(offsets[chosen], self.num_samples, seed_of(self.seed, int(epoch)))
        return epochs, indices


class BatchPositions:
    """Batch sampler of one process: for every step from `start_step` its consecutive share of the global batch.

    Args:
        order: the sample order.
        start_step, stop_step: steps in [start_step, stop_step).
        process, num_processes: this process's place; num_processes divides the global batch.
    Raises:
        ValueError: if the global batch cannot be dealt out evenly.
    """

    def __init__(
        self, order: SampleOrder, start_step: int, stop_step: int, process: int = 0, num_processes: int = 1
    ) -> None:
        if order.global_batch_size % num_processes:
            raise ValueError(
                f"optim.global_batch_size = {order.global_batch_size} cannot be dealt out evenly to {num_processes} "
                f"processes; accepted: multiples of {num_processes}"
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
