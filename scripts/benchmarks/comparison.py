"""One row of the benchmark: two ways to do the same work, run in turn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


class Skipped(Exception):
    """A row that cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Usage:
    """What one side took: seconds, and bytes beyond what was there before."""

    seconds: float
    extra_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same work, and what their ratio should be.

    what: both sides in words, with the sizes.
    kind: "time": the ratio is ours / reference in seconds and at most `goal`; "throughput": it is ours / reference in
        samples per second and at least `goal`; "memory": it is ours / reference in extra bytes and at most `goal`, of
        one go of sides that return their Usage.
    samples: that each side handles in one go.
    """

    what: str
    kind: str
    goal: float
    samples: int
    ours: Callable[[], object]
    reference: Callable[[], object]
    most_repeats: int | None = None


@dataclass(frozen=True)
class Row:
    """A measured comparison, in seconds (medians) or bytes; low and high are the extremes of the pairwise ratios."""

    name: str
    what: str
    kind: str
    goal: float
    ours: float
    reference: float
    ours_samples_per_second: float
    ratio: float
    low: float
    high: float
    repeats: int

    @property
    def met(self) -> bool:
        return self.ratio >= self.goal if self.kind == "throughput" else self.ratio <= self.goal


def measure(name: str, compared: Comparison, repeats: int) -> Row:
    """Runs both sides in turn after one warm-up each, the order changing from one repeat to the next.

    Memory does not vary from one go to the next, and is measured in one.
    """
    if compared.kind == "memory":
        ours, reference = compared.ours(), compared.reference()
        ratio = ours.extra_bytes / reference.extra_bytes
        speed = compared.samples / ours.seconds
        return Row(
            name,
            compared.what,
            compared.kind,
            compared.goal,
            ours.extra_bytes,
            reference.extra_bytes,
            speed,
            ratio,
            ratio,
            ratio,
            1,
        )
    repeats = repeats if compared.most_repeats is None else min(repeats, compared.most_repeats)
    sides = {"ours": compared.ours, "reference": compared.reference}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side in sides if repeat % 2 else reversed(sides):
            start = time.perf_counter()
            sides[side]()
            if repeat:
                seconds[side].append(time.perf_counter() - start)
    pairs = zip(seconds["ours"], seconds["reference"])
    ratios = [ours / other if compared.kind == "time" else other / ours for ours, other in pairs]
    ours = statistics.median(seconds["ours"])
    return Row(
        name,
        compared.what,
        compared.kind,
        compared.goal,
        ours,
        statistics.median(seconds["reference"]),
        compared.samples / ours,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        repeats,
    )
