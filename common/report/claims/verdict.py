"""Verdicts on claims: their words, and the three-valued logic that leads from comparisons to one.

The rules by which a comparison is settled stand in `decide.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from common.report.claims.equivalence import Bound
from common.report.claims.expressions import Condition, Margin, has_alternatives, margins
from common.report.claims.intervals import Estimate
from common.report.claims.read import FAILS, HOLDS
from common.report.table import ERROR

HOLDS_BY_LITTLE, NO_DIFFERENCE = "holds by less than x", "no difference beyond x"
UNDECIDED, UNCHECKED = "undecided", "cannot be checked"
ONE_SEED = "undecided (one seed)"
NOT_RUN, NEEDS, UNLIKE, NOT_TRAINED = "not run yet", "needs", "unlike protocols", "not trained"
OUTSIDE, DEPENDS = "outside the claim's regime", "depends on the setting"
DECIDED = (HOLDS, HOLDS_BY_LITTLE, NO_DIFFERENCE, FAILS)


class Decision(NamedTuple):
    """Whether a condition holds (None: open), the margin that decides, and how clearly, positive where it holds."""

    answer: bool | None
    margin: Margin
    strength: float | None


def decide(
    condition: Condition,
    settle: Callable[[Margin, float, float], tuple[bool | None, float | None]],
    error_holds: float = ERROR,
    error_fails: float = ERROR,
) -> Decision:
    """Whether a condition holds (Kleene's three values), and the comparison that decides it.

    `a and b` holds if both do, each at the whole error (intersection-union). It fails as soon as one does, so n parts
    share the error (Bonferroni, Holm's first step); else chance would refute most claims of 36 comparisons between
    equal methods. `or` mirrors it.

    Args:
        settle: (margin, error of calling it true, error of calling it false) -> answer, and how clear it is, positive
            where the margin holds, None without numbers.
        error_holds: two-sided chance of calling the condition true although it is false.
        error_fails: of calling it false although it is true.
    """
    if isinstance(condition, Margin):
        answer, strength = settle(condition, error_holds, error_fails)
        return Decision(answer, condition, strength)
    count, enough = len(condition.parts), condition.kind == "or"  # `enough`: the answer of one part that is the whole's
    errors = (error_holds / count, error_fails) if enough else (error_holds, error_fails / count)
    parts = [decide(part, settle, *errors) for part in condition.parts]
    answers = [part.answer for part in parts]
    answer = enough if enough in answers else None if None in answers else not enough
    deciding = [part for part in parts if part.answer is answer]
    blocked = next((part for part in deciding if part.strength is None), None)  # not by its interval
    return (blocked or (max if enough else min)(deciding, key=lambda part: part.strength))._replace(answer=answer)


def smallest_error(condition: Condition, holds: bool, error_of: Callable[[Margin, bool], float]) -> float:
    """The smallest chance to err at which `decide` finds that a condition holds (or fails).

    Args:
        holds: which of the two.
        error_of: (margin, holds) -> the same for one margin.
    """
    if isinstance(condition, Margin):
        return error_of(condition, holds)
    parts = [smallest_error(part, holds, error_of) for part in condition.parts]
    one_is_enough = holds == (condition.kind == "or")
    return min(1.0, len(parts) * min(parts)) if one_is_enough else max(parts)


@dataclass(frozen=True)
class Finding:
    """The outcome of one comparison of a claim.

    verdict: one of the constants of this module.
    margin: distance from the threshold, positive where the comparison holds; None without numbers.
    interval: of the margin, at the level that decided; None, as `estimate`, where the verdict needs none.
    basis: the rule of the interval, with seeds and rows.
    reason: of a verdict that is neither holds nor does not hold.
    data: what ours was measured on; of an experiment its data, often the training set.
    error: that the claim may spend.
    slack: what a >= b may fall short by, in points.
    seeds: that a difference of x takes; inf where only more pictures would show it, 0 without x or if decided.
    """

    text: str
    verdict: str
    margin: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    basis: str = ""
    reason: str = ""
    data: tuple[str, ...] = ()
    estimate: Estimate | None = field(default=None, compare=False, repr=False)
    bound: Bound = field(default=Bound(), compare=False, repr=False)
    seeds: float = 0
    error: float = field(default=ERROR, compare=False, repr=False)
    slack: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether the 90 % interval lies within the margin of equivalence (two one-sided tests at 5 % each)."""
        return self.estimate is not None and self.bound.contains(*self.estimate.interval_at(2 * self.error))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim on one side.

    holding, of: how many of the claim's conditions hold, each by itself.
    decisive: the comparison nearest to its threshold if the claim holds, the clearest if it does not, the one that
        blocks if it is open.
    how: "by test", or `Claim.exact`.
    unlike: reason of a comparison of unlike protocols.
    later: by a threshold that was chosen after the data; it does not count.
    within: x, of a verdict that names it, in points.
    mean: the verdict on the mean of many comparisons, for each table and unit.
    q: the false discovery rate of the paper's claims at which this one is among them.
    departure: of the runs from the paper.
    """

    verdict: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    scale: str = ""
    holding: int = 0
    of: int = 0
    decisive: Finding | None = None
    how: str = ""
    unlike: str = ""
    later: "Verdict | None" = None
    within: float | None = None
    mean: "Verdict | None" = None
    q: float | None = None
    departure: str = ""
    condition: Condition | None = field(default=None, compare=False, repr=False)

    @cached_property
    def p(self) -> float | None:
        """The smallest chance to err at which `decide` answers; None where a comparison has no interval."""
        by_text = {finding.text: finding for finding in self.findings}
        if self.condition is None or any(finding.estimate is None for finding in self.findings):
            return None

        def error_of(margin: Margin, holds: bool) -> float:
            finding = by_text[margin.text]
            limit = -finding.slack
            error = finding.estimate.smallest_error(lambda low, high: low > limit if holds else high < limit)
            return error / 2 if holds and margin.allows else error

        return self._of_share(min(smallest_error(self.condition, holds, error_of) for holds in (True, False)))

    @cached_property
    def p_equal(self) -> float | None:
        """The smallest one-sided chance to err at which all comparisons are within x; None where one has no x."""
        if self.condition is None or has_alternatives(self.condition):
            return None
        strict = {margin.text for margin in margins(self.condition) if not margin.allows}
        findings = [finding for finding in self.findings if finding.text in strict]
        if not findings or any(finding.estimate is None or finding.bound.within is None for finding in findings):
            return None
        return self._of_share(max(finding.estimate.smallest_error(finding.bound.contains) / 2 for finding in findings))

    def _of_share(self, p: float) -> float:
        # of a look that may spend a part of the error only, as if it were the only one
        return min(1.0, p * (ERROR / self.findings[0].error))

    @property
    def seeds_only(self) -> bool:
        """Whether a number has no hits: the verdict is on these pictures, whatever others would say."""
        of_findings = [finding.estimate for finding in self.findings if finding.estimate is not None]
        return any(estimate.picture_variance is None for estimate in of_findings)

    @property
    def margin(self) -> float | None:
        """Of the comparison that decides."""
        return None if self.decisive is None else self.decisive.margin


def at_every_setting(verdict: Verdict, others: Mapping[str, Verdict]) -> Verdict:
    """The verdict if it is the same at all settings near the best, else that it depends on the setting.

    Args:
        others: settings as text -> the verdict there. Those without an answer (one seed, for instance) do not count.
    """
    answers = (*DECIDED, UNDECIDED)
    others = {settings: other for settings, other in others.items() if other.verdict in answers}
    if verdict.verdict not in answers or verdict.how or not others:
        return verdict
    means = {settings: other.mean for settings, other in others.items() if other.mean is not None}
    mean = verdict.mean and at_every_setting(verdict.mean, means)
    changed = [
        f"{other.verdict} at {settings}" for settings, other in others.items() if other.verdict != verdict.verdict
    ]
    if not changed:
        reason = "; ".join(filter(None, [verdict.reason, f"the same at {' and at '.join(others)}"]))
        return replace(verdict, reason=reason, mean=mean)
    reason = "; ".join([f"{verdict.verdict} at the settings of the table", *changed])
    return replace(verdict, verdict=DEPENDS, reason=reason, within=None, mean=mean)
