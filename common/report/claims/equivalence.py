"""How small a difference counts as none: a margin of equivalence, by a rule that claims.yaml states before the runs.

    equal_within: {share: 0.5, least: 1.0}

Of a comparison of shares the margin is this share of the paper's own difference, and `least` points at least. The
paper's difference is taken on the log-odds scale to the level of our control on *validation* data: two points at 50 %
are not two points at 5 %, and the test numbers that are to be judged have no say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import expit, logit

from common.report.claims.expressions import Cell, Margin
from common.report.claims.intervals import OurCell

UNKNOWN_LEVEL = "validation level of the control unknown"
_PRINTED = 0.05  # percent: 0 and 100 are printed for what rounds to them


@dataclass(frozen=True)
class Rule:
    """share: of the paper's difference in log-odds. least: in points."""

    share: float
    least: float


@dataclass(frozen=True)
class Bound:
    """What the rule gives for a comparison, in points.

    within: the margin of equivalence; None = there is none, `reason` says why where one would be expected. paper: the
    paper's difference at the level of our control; None = unknown, or not printed. least: of the rule.
    """

    within: float | None = None
    paper: float | None = None
    reason: str = ""
    least: float | None = None

    def contains(self, low: float, high: float) -> bool:
        """Whether an interval lies within the margin of equivalence."""
        return self.within is not None and -self.within < low and high < self.within


def bound_of(
    margin: Margin,
    slopes: Mapping[Cell, float],
    used: Mapping[Cell, OurCell],
    printed: Mapping[Cell, float | None],
    rule: Rule | None,
) -> Bound:
    """The margin of equivalence of a comparison "a > b", or of means of such.

    Args:
        slopes: of the margin by cell.
        used: our numbers; of those on the lesser side, the control's, the validation level is taken.
        printed: the paper's numbers, in percent.
        rule: None = no difference counts as none.
    """
    greater = sum(slope for slope in slopes.values() if slope > 0)
    is_contrast = greater > 0 and abs(sum(slopes.values())) < 1.0e-9 * greater
    if (
        rule is None
        or not is_contrast
        or margin.at_equality != 0
        or {cell.unit for cell in used.values()} != {"percent"}
    ):
        return Bound()
    numbers = {cell: printed.get(cell) for cell in slopes}
    least = greater * rule.least
    levels = [(-slope, used[cell].number.validation) for cell, slope in slopes.items() if slope < 0]
    if any(level is None for _, level in levels):
        return Bound(reason=UNKNOWN_LEVEL, least=least)
    if None in numbers.values():
        return Bound(least, least=least)
    level = sum(weight * share for weight, share in levels) / greater
    odds = sum(slope * _log_odds(numbers[cell]) for cell, slope in slopes.items()) / greater

    def points(difference: float) -> float:
        """So much more in log-odds, from our level."""
        return greater * abs(100 * expit(_log_odds(level) + difference) - _percent(level))

    return Bound(max(least, points(rule.share * odds)), points(odds), least=least)


def _percent(number: float) -> float:
    return min(max(number, _PRINTED), 100 - _PRINTED)


def _log_odds(number: float) -> float:
    return float(logit(_percent(number) / 100))
