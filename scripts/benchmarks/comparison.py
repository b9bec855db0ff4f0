"""One row of the benchmark: two ways to do the same work, run in turn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


class Skipped(Exception):
    """A row that cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same work, and what their ratio should be.

    what: both sides in words, with the sizes.
    kind: "time": the ratio is ours / reference in seconds and at most `goal`; "throughput": it is ours / reference in
        samples per second and at least `goal`.
    samples: that each side handles in one go.
    """

    what: str
    kind: str
    goal: float
    samples: int
    ours: Callable[[], object]
    reference: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A measured comparison. Seconds are medians; low and high are the smallest and largest of the pairwise ratios."""

    name: str
    what: str
    kind: str
    goal: float
    ours_seconds: float
    reference_seconds: float
    ours_samples_per_second: float
    ratio: float
    low: float
    high: float
    repeats: int

    @property
    def met(self) -> bool:
        return self.ratio <= self.goal if self.kind == "time" else self.ratio >= self.goal


def measure(name: str, compared: Comparison, repeats: int) -> Row:
    """Runs both sides in turn after one warm-up each, the order changing from one repeat to the next."""
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
