"""Cheap deterministic keys: splitmix64 chained over integers and texts, in integers only.

A key means the same on every machine, in every process and in any order of asking; Python's `hash` does not.
"""

from functools import cache

import numpy as np

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
    """64-bit key of a short text; unlike `hash()` the same in every process."""
    key = len(text)
    for byte in text.encode():
        key = mix64(key ^ (byte << 56))
    return key


def derive_key(*parts: int | str) -> int:
    """Chain integers and texts into one 64-bit key; the order matters.

    Keys that differ in their last part only never collide, because each step is a bijection of the last part.
    """
    key = 0
    for part in parts:
        key = mix64(key ^ (text_key(part) if isinstance(part, str) else part & _MASK))
    return key


def mix64_array(values: np.ndarray) -> np.ndarray:
    """`mix64` of every entry of a uint64 array."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(_GOLDEN)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
