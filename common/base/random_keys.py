"""Cheap deterministic keys: splitmix64 chained over integers and texts, and streams of 32-bit draws from a key.

A key is the same on every machine and in every process, unlike Python's `hash`. Everything random about an image of the
scenes follows from one key, and the key from (seed, split, index).
"""

from functools import cache

import numpy as np

from common.base.compiled import compiled


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
    """A stream of integers that depends only on its key."""

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
        return low + self.below(high - low + 1)

    def pick(self, items):
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
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
        return items


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """One splitmix64 step, a bijection of the 64-bit integers (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@cache
def text_key(text: str) -> int:
    """64-bit key of a short text."""
    key = len(text)
    for byte in text.encode():
        key = mix64(key ^ (byte << 56))
    return key


def derive_key(*parts: int | str) -> int:
    """Chains integers and texts into one 64-bit key; the order matters.

    Keys that differ only in their last part never collide.
    """
    key = 0
    for part in parts:
        key = mix64(key ^ (text_key(part) if isinstance(part, str) else part & _MASK))
    return key


def mix64_array(values: np.ndarray) -> np.ndarray:
    """`mix64` of a uint64 array."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(_GOLDEN)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
