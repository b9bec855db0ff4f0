"""Cheap deterministic random integers: splitmix64 keys, and a stream of 32-bit draws that starts from a key.

Everything random about a picture follows from one 64-bit key, and the key from (seed, split, index). Only integers are
involved, so a key means the same picture and the same words on every machine, in every process, in any order.
"""

import numpy as np

from common.compiled import compiled
from common.random_keys import mix64


@compiled
def _fill(key, count):
    out = np.empty(2 * count, dtype=np.uint32)
    state = np.uint64(key)
    for i in range(count):
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        out[2 * i] = np.uint32(z & np.uint64(0xFFFFFFFF))
        out[2 * i + 1] = np.uint32(z >> np.uint64(32))
    return out


class Draws:
    """A stream of integers that depends on its key alone."""

    __slots__ = ("_key", "_position", "_values")

    def __init__(self, key: int):
        self._key = key
        self._values = _fill(np.uint64(key), 64).tolist()
        self._position = 0

    def below(self, n: int) -> int:
        """Next integer in [0, n), n < 2**31; the bias is below n / 2**32."""
        position = self._position
        if position == len(self._values):
            self._key = mix64(self._key ^ 0x5CE4E5)
            self._values = _fill(np.uint64(self._key), 64).tolist()
            position = 0
        self._position = position + 1
        return (self._values[position] * n) >> 32

    def chance(self, percent: int) -> bool:
        """True with the given probability in percent."""
        return self.below(100) < percent

    def between(self, low: int, high: int) -> int:
        """Integer in [low, high], both ends included."""
        return low + self.below(high - low + 1)

    def pick(self, items):
        """One item of a sequence, each equally likely."""
        return items[self.below(len(items))]

    def weighted(self, weights) -> int:
        """Index drawn in proportion to non-negative integer weights."""
        value = self.below(sum(weights))
        for index, weight in enumerate(weights):
            value -= weight
            if value < 0:
                return index
        raise AssertionError("weights sum to more than was drawn")

    def shuffled(self, items) -> list:
        """A permutation of the items (Fisher-Yates)."""
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
        return items
