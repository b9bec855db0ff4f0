"""How small a difference counts as none: a margin of equivalence, by a rule that claims.yaml states before the runs.

    equal_within: {share: 0.5, least: 1.0}

The margin of a comparison of shares is this share of the paper's own difference, and at least `least` points. The
paper's difference is moved on the log-odds scale to our control's level on *validation* data: two points at 50 % are
not two points at 5 %, and the test numbers to be judged have no influence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import pydantic
from scipy.special import expit, logit

from common.report.claims.expressions import Cell, Margin
from common.report.claims.intervals import OurCell
from common.report.table import KNOWN_KEYS_ONLY

UNKNOWN_LEVEL = "validation level of the control unknown"
_PRINTED = 0.05  # percent: 0 and 100 are printed for what rounds to them


@dataclass(frozen=True)
class Rule:
    """share: of the paper's difference in log-odds. least: in points."""

    __pydantic_config__ = KNOWN_KEYS_ONLY

    share: Annotated[float, pydantic.Field(gt=0)]
    least: Annotated[float, pydantic.Field(gt=0)]


@dataclass(frozen=True)
class Bound:
    """The rule's result for a comparison, in points.

    within: the margin of equivalence; None = none, and `reason` says why where one would be expected.
    paper: the paper's difference at the level of our control; None = unknown, or not printed.
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
        used: our numbers; the lesser side, the control, gives the validation level.
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
        # so much more in log-odds, from our level
        return greater * abs(100 * expit(_log_odds(level) + difference) - _percent(level))

    return Bound(max(least, points(rule.share * odds)), points(odds), least=least)


def _percent(number: float) -> float:
    return min(max(number, _PRINTED), 100 - _PRINTED)


def _log_odds(number: float) -> float:
    return float(logit(_percent(number) / 100))
