"""Broken samples: the exception that names one, and a counter that stops a run with too many."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.base.files import printable

ATTEMPTS = 20  # samples that are tried before a whole set counts as broken
MINIMUM_SEEN = 100  # samples before a share of broken ones stops a run
FEW = 5  # broken samples that a smaller set may have whatever their share


class BrokenSample(Exception):
    """One sample that cannot be used: cut image, no caption, wrong type.

    Args:
        path: the shard or file that holds the sample.
        key: its name in a shard; "" if unknown (a shard cut inside a header).
        reason: before the first colon stands the kind of fault, by which `BrokenSamples.check` counts.
    """

    def __init__(self, path: str | Path, key: str = "", reason: str = "") -> None:
        self.path, self.key, self.reason = str(path), str(key), str(reason)
        super().__init__(self.path, self.key, self.reason)  # these args make the exception picklable

    def __str__(self) -> str:
        place = f"{self.path} [{self.key}]" if self.key else self.path
        return printable(f"{place}: {self.reason}" if self.reason else place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BrokenSample) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


class Unusable(ValueError):
    """A sample cannot be used; the message becomes the reason of a `BrokenSample` (`named`)."""


@contextmanager
def named(path: str | Path, key: str = "") -> Iterator[None]:
    """Turns an `Unusable` or `MemoryError` inside into a `BrokenSample` with its place."""
    try:
        yield
    except Unusable as error:
        raise BrokenSample(path, key, str(error)) from None
    except MemoryError:
        raise BrokenSample(path, key, "sample is too large: there is not enough memory to read it") from None


def readable_items(samples: Any, count: int, order: Iterable[int] | None = None) -> list[Any]:
    """The first `count` readable samples in this order (None = the set's), or all if there are fewer."""
    items: list[Any] = []
    for index in range(len(samples)) if order is None else order:
        if len(items) == count:
            break
        with suppress(BrokenSample):
            items.append(samples[index])
    return items


class TooManyBroken(ValueError):
    """More samples are broken than a run allows; the message is for the user."""

    def __init__(self, message: str) -> None:
        # what a loader worker raises comes back as its whole traceback, in one text that ends in the message
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


def read_or_replace(
    read: Callable[[int], Any], index: int, substitute: Callable[[int, int], int], broken: list[BrokenSample]
) -> Any:
    """What `read` gives for this index, or for its first readable substitute.

    Args:
        substitute: (broken index, number of attempts before it) -> next index.
        broken: receives the unreadable samples.
    """
    for attempt in range(ATTEMPTS):
        try:
            return read(index)
        except BrokenSample as error:
            broken.append(error)
            index = substitute(index, attempt)
    raise TooManyBroken(f"{ATTEMPTS} samples in a row are broken; the last: {broken[-1]}")


class BrokenSamples:
    """Counts good samples (`saw`) and broken ones (`record`), lists these, and stops a run above a share.

    A sample that is broken in several epochs counts each time and is listed once.
    """

    def __init__(self, max_share: float = 0.01) -> None:
        self.max_share = max_share
        self.seen = 0  # good and broken together
        self.count = 0  # broken, with repetitions
        self._times: dict[BrokenSample, int] = {}  # in order of first appearance

    def saw(self, count: int = 1) -> None:
        self.seen += count

    def record(self, broken: BrokenSample) -> None:
        self.seen += 1
        self.count += 1
        # a copy without traceback: the original would keep every frame (and its tensors) alive
        listed = BrokenSample(broken.path, broken.key, broken.reason)
        self._times[listed] = self._times.get(listed, 0) + 1

    def check(self, is_whole: bool = False) -> None:
        """Stops a run with too many broken samples.

        Args:
            is_whole: these are all samples of a set, not those that a run has met so far.
        Raises:
            TooManyBroken: a share above `max_share` by more than three standard deviations of chance, after
                `MINIMUM_SEEN` samples, or with more than `FEW` broken ones in a whole set.
        """
        expected = self.max_share * self.seen
        too_early = self.seen < MINIMUM_SEEN and not (is_whole and self.count > FEW)
        if too_early or self.count <= expected + 3 * math.sqrt(expected):
            return  # a run with fewer broken samples than allowed must not stop by chance
        times_of: Counter[str] = Counter()
        for broken, times in self._times.items():
            times_of[broken.reason.split(":")[0]] += times
        kinds = ", ".join(f"{times} x {kind}" for kind, times in times_of.most_common())
        first = "\n".join(f"  {broken}" for broken in [*self._times][:5])
        more = len(self._times) - 5
        raise TooManyBroken(
            f"{self.count} of {self.seen} samples are broken ({self.count / self.seen:.2%}); at most "
            f"{self.max_share:.2%} is accepted (max_broken_share). Kinds: {kinds}. First samples:\n{first}"
            + (f"\n  and {more} more" if more > 0 else "")
        )


def check_opened(empty: str, num_good: int, broken: Sequence[BrokenSample], max_share: float) -> None:
    """Refuses a data set with too few good samples.

    Raises:
        ValueError: no sample is good; the message has the first fault.
        TooManyBroken: see `BrokenSamples.check`.
    """
    if not num_good:
        raise ValueError(f"{empty}; first fault: {broken[0]}" if broken else empty)
    check_whole(num_good, broken, max_share)


def check_whole(num_good: int, broken: Sequence[BrokenSample], max_share: float) -> None:
    """Refuses a whole set of which too many samples are broken.

    Raises:
        TooManyBroken: see `BrokenSamples.check`.
    """
    samples = BrokenSamples(max_share)
    samples.saw(num_good)
    for sample in broken:
        samples.record(sample)
    samples.check(is_whole=True)
