"""The interval of a margin, by its chance to err: over seeds, and over test pictures where their hits are known.

A margin is a smooth function of a few numbers, so its spread follows from theirs to first order (the delta method).
Shares spread less near 0 and 1, but their angles arcsin sqrt(share) spread evenly. So numbers in percent move as
angles, and no end of an interval leaves the range of a share.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from common.report.claims.expressions import Cell, Margin
from common.report.crossed import crossed_half_width, picture_variance, seeds_needed
from common.report.statistics import (
    RUNS,
    SHARE_OF,
    SharedSpread,
    contrast_interval,
    interval_of_runs,
    share_angle,
    share_of_angle,
    shared_spread,
)
from common.report.table import ERROR, Measured

SEEDS_ONLY = "on these pictures"
_SMALLEST_ERROR, _GREATEST_ERROR, _HALVINGS = 1.0e-9, 0.9999, 16
_MOST_RUNS = 1000  # more are not counted


class OurCell(NamedTuple):
    """A number of ours.

    trained_on: training data; only runs that share it are compared by seed.
    name: of its row.
    column: all rows of its column by name.
    untrained: by which sign its row did not train.
    error: the chance to err that its seeds may spend.
    runs: of the column's rows by name; equal for the same runs.
    """

    number: Measured
    unit: str
    trained_on: str
    name: str
    column: Mapping[str, Measured]
    untrained: str = ""
    error: float = ERROR
    runs: Mapping[str, Any] = MappingProxyType({})

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What two numbers must share to be compared; old tables have only the text for readers."""
        return self.number.full_protocol or {"data": self.number.data, "protocol": self.number.protocol}


@dataclass(frozen=True)
class Estimate:
    """A margin with its interval.

    interval_at: chance to err -> two-sided interval.
    basis: the rule that gave it, as text.
    seed_variance: s^2 of one seed's margin.
    freedom: its degrees of freedom for each seed beyond the first.
    picture_variance: b^2, what new pictures add to the margin's variance; None = hits are unknown, and the interval is
        over seeds only.
    runs_needed: of shares of runs, chance to err -> how many seeds with the same shares would decide; None = too many.
    """

    value: float
    interval_at: Callable[[float], tuple[float, float]]
    basis: str
    seed_variance: float
    freedom: float
    picture_variance: float | None
    runs_needed: Callable[[float], int | None] | None = None

    def seeds_needed(self, difference: float) -> int | None:
        """See `crossed.seeds_needed`."""
        return seeds_needed(self.seed_variance, self.picture_variance or 0.0, difference, self.freedom)

    def smallest_error(self, answers: Callable[[float, float], bool]) -> float:
        """The smallest chance to err at which the interval (low, high) answers, by bisection; 1 if none does."""
        low, high = math.log(_SMALLEST_ERROR), math.log(_GREATEST_ERROR)
        if not answers(*self.interval_at(math.exp(high))):
            return 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if answers(*self.interval_at(math.exp(middle))) else (middle, high)
        return math.exp(high)


def estimate(margin: Margin, slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]) -> Estimate:
    """The interval of a margin.

    Args:
        slopes: of the margin by cell, at the means.
        used: our numbers by cell, of two seeds or more.
    """
    if all(our_cell.unit == RUNS for our_cell in used.values()):
        return _of_runs(margin, slopes, used)
    wholes = {cell: _whole(our_cell) for cell, our_cell in used.items()}
    means = {cell: our_cell.number.mean for cell, our_cell in used.items()}
    steep = {  # slope by the angle: d (w sin^2 a) / da = 2 sqrt(y (w - y))
        cell: slope * (2 * math.sqrt(max(0.0, means[cell] * (wholes[cell] - means[cell]))) if wholes[cell] else 1)
        for cell, slope in slopes.items()
    }
    over_seeds, variance, freedom, basis = _over_seeds(steep, used, wholes)
    pictures = pictures_of(slopes, used)
    squares, value = sum(slope**2 for slope in steep.values()), margin.value(means)

    def end(step: float) -> float:
        # the margin with all numbers moved along the slope
        moved = {cell: _flat(means[cell], whole) + step * steep[cell] for cell, whole in wholes.items()}
        return value + sum(slopes[cell] * (_back(angle, wholes[cell]) - means[cell]) for cell, angle in moved.items())

    def interval_at(error: float) -> tuple[float, float]:
        half_width = float(crossed_half_width(over_seeds(error), pictures or 0.0, error))
        step = half_width / squares if squares else 0.0
        return (end(-step), end(step)) if step else (value, value)

    return Estimate(value, interval_at, basis, variance, freedom, pictures)


def _of_runs(margin: Margin, slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]) -> Estimate:
    # shares of runs have no spread where all runs end alike; they divide the chance to err
    means = {cell: our_cell.number.mean for cell, our_cell in used.items()}
    value, most = margin.value(means), max(len(our_cell.number.values) for our_cell in used.values())

    def interval_of(error: float, runs: Mapping[Cell, Sequence[float]]) -> tuple[float, float]:
        ends = np.array([interval_of_runs(runs[cell], 1 - error / len(slopes)) for cell in slopes])
        moves = np.array(list(slopes.values()))[:, None] * (ends - np.array([means[cell] for cell in slopes])[:, None])
        return value + float(moves.min(axis=1).sum()), value + float(moves.max(axis=1).sum())

    def runs_needed(error: float) -> int | None:
        for count in range(most + 1, _MOST_RUNS):
            ones = {cell: round(count * mean) for cell, mean in means.items()}
            low, high = interval_of(error, {cell: [1] * one + [0] * (count - one) for cell, one in ones.items()})
            if low > 0 or high < 0:
                return count
        return None

    interval_at = functools.partial(interval_of, runs={cell: our_cell.number.values for cell, our_cell in used.items()})
    return Estimate(value, interval_at, f"{most} seeds, exact for shares of runs", 0.0, 1.0, None, runs_needed)


def pictures_of(slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]) -> float | None:
    """What new pictures add to the variance of a margin, summed over test sets; None where a number has no hits.

    Numbers of one test set share its pictures, whatever was ranked or classified.
    """
    sets: dict[tuple, dict[tuple, np.ndarray]] = {}  # test set -> block of seeds -> z
    for cell, slope in slopes.items():
        number, protocol = used[cell].number, used[cell].protocol
        if number.hits is None:
            return None
        z = slope * number.hits.by_picture()[np.argsort(number.seeds)]
        blocks = sets.setdefault((protocol.get("data"), protocol.get("fingerprint"), z.shape[1]), {})
        block = _block(used[cell])
        blocks[block] = blocks.get(block, 0) + z
    return sum(float(picture_variance(*blocks.values())) for blocks in sets.values())


def _block(cell: OurCell) -> tuple:
    # Runs of one block share their seeds and what they were trained on
    return cell.trained_on, tuple(sorted(cell.number.seeds))


def _over_seeds(
    slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell], wholes: Mapping[Cell, float]
) -> tuple[Callable[[float], float], float, float, str]:
    # Half-width over seeds by its chance to err, seed_variance, freedom and basis, see `Estimate`
    first = next(iter(used.values()))
    blocks: dict[tuple, np.ndarray] = {}
    for cell, our_cell in used.items():
        by_seed = slopes[cell] * _by_seed(our_cell.number, wholes[cell])
        blocks[_block(our_cell)] = blocks.get(_block(our_cell), 0) + by_seed
    if len(blocks) > 1:  # no seeds are shared, or unlike training data
        counts = sorted({len(our_cell.number.seeds) for our_cell in used.values()})

        def by_welch(error: float) -> float:
            low, high = contrast_interval(list(blocks.values()), 1 - error)
            return (high - low) / 2

        variance = sum(block.var(ddof=1) for block in blocks.values())
        return by_welch, variance, 1.0, f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds, Welch"
    (((_, seeds), by_seed),) = blocks.items()
    by_name = {used[cell].name: slope for cell, slope in slopes.items()}
    # two rows of the same runs are no two samples of the spread over seeds
    one_of_runs: dict[Any, str] = {}
    for name in sorted(first.column, key=lambda name: name not in by_name):
        if tuple(sorted(first.column[name].seeds)) == seeds:
            one_of_runs.setdefault(first.runs.get(name, name), name)
    alike = {name: number for name, number in first.column.items() if name in one_of_runs.values()}
    if all(cell.column is first.column for cell in used.values()) and by_name.keys() <= alike.keys():
        rows = np.array([_by_seed(number, next(iter(wholes.values()))) for number in alike.values()])
        weights = np.array([by_name.get(name, 0.0) for name in alike])
    else:  # several columns or tables: the margin of each seed
        alike, rows, weights = {"": None}, by_seed[None, :], np.ones(1)
    spread = _shared_spread(tuple(map(tuple, rows.tolist())))
    by_rows, by_values = spread.rules(weights)
    basis = f"{len(seeds)} seeds"
    if by_rows:
        wider = f"the wider of {'paired' if len(used) > 1 else 'its own spread'} and " if by_values else ""
        basis += f", {wider}pooled over {spread.pooled.sum()} rows"
    elif len(used) > 1:
        basis += ", paired"
    odd = (weights != 0) & (spread.doubtful if by_rows else ~spread.pooled)
    reasons = np.where(spread.quiet, "far quieter", [f"Brown-Forsythe p {p:.2g}" for p in spread.p_values])
    reasons = np.where(np.ptp(rows, axis=1) > 0, reasons, "no spread")
    named = [f"{name} ({reason})" for name, reason, is_odd in zip(alike, reasons, odd) if is_odd]
    if named and len(rows) > 2:
        basis += f"; {'perhaps with a wider spread' if by_rows else 'not pooled'}: {', '.join(named)}"
    variance = len(seeds) * float(spread.variance(weights))
    # what seeds do to all rows cancels in a difference only
    is_pooled = by_rows and not by_values and abs(weights.sum()) <= 1e-9 * abs(weights).max()
    freedom = float(spread.freedom) / (len(seeds) - 1) if is_pooled else 1.0
    return lambda error: float(spread.half_width(weights, error)), variance, freedom, basis


@functools.lru_cache(maxsize=1024)  # a column has many margins
def _shared_spread(rows: tuple[tuple[float, ...], ...]) -> SharedSpread:
    return shared_spread(np.array(rows))


def _whole(cell: OurCell) -> float:
    # What the shares of a cell's column are of; 0 where they are no shares
    whole = SHARE_OF.get(cell.unit, 0.0)
    values = [value for number in (cell.number, *cell.column.values()) for value in number.values]
    return whole if min(values) >= 0 and max(values) <= whole else 0.0


def _flat(number: Any, whole: float) -> Any:
    return share_angle(np.asarray(number) / whole) if whole else number


def _back(angle: Any, whole: float) -> Any:
    return float(whole * share_of_angle(angle)) if whole else angle


def _by_seed(number: Measured, whole: float) -> np.ndarray:
    return _flat(np.asarray(number.values)[np.argsort(number.seeds)], whole)
