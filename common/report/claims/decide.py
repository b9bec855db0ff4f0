"""The rules by which numbers decide a claim: audit (the paper's numbers) and measured (ours at one scale).

A claim is a condition of comparisons, each a *margin* (`expressions.py`) that is positive where it holds. The logic has
three values, and comparisons of which one is enough share the chance to err (`decide`). The audit uses only the value
of a margin. Measured, with an interval over seeds and test pictures (`intervals.py`):

    holds                     the 95 % interval of the margin lies above 0
    does not hold             it lies below 0
    holds by less than x      it lies above 0, and the 90 % interval within x, see `equivalence.py`
    no difference beyond x    it contains 0, and the 90 % interval lies within x
    undecided                 else, with the seeds that a difference of x would take
    depends on the setting    the verdict is another one at a setting near the best of a search (`at_every_setting`)

A comparison that equal numbers satisfy, a > b - 0.5, states "at least as good as": it holds where the 90 % interval
lies above 0. So does a >= b, where the margin of equivalence x takes the place of 0.5. A claim over more than three
comparisons has a second verdict, on their mean. One seed decides nothing. A row that did not train decides only claims
about training. Runs outside a claim's regime leave it open. `Claim.exact` is judged by its value, as the audit is. The
paper's numbers count only in the margin of equivalence.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from common.evaluation.protocol import first_difference
from common.report.claims.equivalence import bound_of
from common.report.claims.expressions import (
    EXPERIMENT,
    Cell,
    Condition,
    Margin,
    all_of,
    cells,
    has_alternatives,
    margins,
    mean_margin,
)
from common.report.claims.intervals import OurCell, estimate
from common.report.claims.ours import SCALES
from common.report.claims.read import FAILS, HOLDS, Claim, PaperTables
from common.report.claims.verdict import (
    DECIDED,
    HOLDS_BY_LITTLE,
    NEEDS,
    NO_DIFFERENCE,
    NOT_RUN,
    NOT_TRAINED,
    ONE_SEED,
    OUTSIDE,
    UNCHECKED,
    UNDECIDED,
    UNLIKE,
    Decision,
    Finding,
    Verdict,
    decide,
)
from common.report.table import ERROR

EMPTY_SCALES = ("smoke",)  # end to end in seconds; nothing is learned that could decide a claim
_MEAN_OF = 3  # comparisons; a claim over more has a verdict on their mean
_UNSETTLED = (NEEDS, NOT_RUN, UNLIKE, NOT_TRAINED, ONE_SEED, UNDECIDED)  # of several reasons, the first of these counts
_ROUNDING = 1.0e-9  # of sums of printed decimals


def _verdict(
    conditions: Sequence[Condition],
    findings: Mapping[Margin, Finding],
    decision: Decision,
    open_: Callable[[], tuple[str, str]],
    scale: str = "",
) -> Verdict:
    # open_ gives verdict and reason without an answer
    verdict, reason = open_() if decision.answer is None else (HOLDS if decision.answer else FAILS, "")
    answers = {HOLDS: True, FAILS: False}

    def settle(margin: Margin, *_: float) -> tuple[bool | None, float]:
        return answers.get(findings[margin].verdict), 0.0

    return Verdict(
        verdict,
        reason,
        tuple(findings.values()),
        scale,
        sum(decide(condition, settle).answer is True for condition in conditions),
        len(conditions),
        findings[decision.margin],
        unlike=next((finding.reason for finding in findings.values() if finding.verdict == UNLIKE), ""),
    )


# ---- the paper's own numbers ----------------------------------------------------------------------------------------


def audit(claim: Claim, printed: PaperTables) -> Verdict:
    """Whether the paper's printed numbers support its sentence, to the printed digits."""
    if not claim.audit:
        return Verdict(UNCHECKED, claim.no_numbers)
    findings: dict[Margin, Finding] = {}

    def settle(margin: Margin, *_: float) -> tuple[bool | None, float | None]:
        missing = [cell for cell in margin.cells if printed.numbers[cell] is None]
        if missing:
            findings[margin] = Finding(margin.text, UNCHECKED, reason=f"the paper prints no {missing[0]}")
            return None, None
        unit = _unit_of((printed.units[cell.table, cell.column] for cell in margin.cells), margin)
        findings[margin] = _by_value(margin, margin.value(printed.numbers), unit)
        return findings[margin].verdict == HOLDS, findings[margin].margin

    decision = decide(all_of(claim.audit), settle)
    return _verdict(
        claim.audit,
        findings,
        decision,
        lambda: (UNCHECKED, next(finding.reason for finding in findings.values() if finding.reason)),
    )


def _by_value(margin: Margin, value: float, unit: str, data: tuple[str, ...] = ()) -> Finding:
    answer = value > _ROUNDING if margin.strict else value >= -_ROUNDING
    return Finding(margin.text, HOLDS if answer else FAILS, value, unit=unit, data=data)


# ---- ours ------------------------------------------------------------------------------------------------------------


def measured(claim: Claim, printed: PaperTables, ours: Mapping[Cell, OurCell], scale: str) -> Verdict:
    """The measured verdict of a claim at one scale.

    Args:
        printed: the paper's tables, for what its rows need and for margins of equivalence.
        ours: our numbers at this scale, see `our_cells`.
        scale: at smoke scale nothing is decided.
    """
    if claim.needs:
        return Verdict(NEEDS, claim.needs)
    if claim.tests:
        return Verdict(claim.shows, ", ".join(claim.tests), how=claim.exact or "by test")
    verdict = _by_numbers(claim.measured, claim, printed, ours, scale)
    if claim.regime and scale not in EMPTY_SCALES and verdict.verdict in (*DECIDED, UNDECIDED, ONE_SEED):
        outside = _outside_regime(claim, ours, scale)
        if outside is not None:
            return outside
    later = measured(replace(claim, measured=claim.later, later=()), printed, ours, scale) if claim.later else None
    means = _means(claim.measured, ours) if verdict.verdict in (*DECIDED, UNDECIDED) and not claim.exact else []
    mean = _by_numbers(means, claim, printed, ours, scale) if means else None
    how = claim.exact if verdict.verdict in (HOLDS, FAILS) else ""
    departure = claim.departure if scale != "paper" and verdict.verdict in (*DECIDED, UNDECIDED) else ""
    return replace(verdict, how=how, later=later, mean=mean, departure=departure)


def _outside_regime(claim: Claim, ours: Mapping[Cell, OurCell], scale: str) -> Verdict | None:
    # The verdict on runs outside the regime, or in an unknown one; None if they are inside
    missing = [cell for cell in cells(*claim.regime) if cell not in ours]
    if missing:
        return Verdict(NOT_RUN, f"the regime of the runs is unknown: {_named(missing, ours)}", scale=scale)
    values = {cell: ours[cell].number.mean for cell in cells(*claim.regime)}

    def settle(margin: Margin, *_: float) -> tuple[bool, float]:
        finding = _by_value(margin, margin.value(values), "")
        return finding.verdict == HOLDS, finding.margin

    decision = decide(all_of(claim.regime), settle)
    return None if decision.answer else Verdict(OUTSIDE, f"not {decision.margin.text}", scale=scale)


def _by_numbers(
    conditions: Sequence[Condition], claim: Claim, printed: PaperTables, ours: Mapping[Cell, OurCell], scale: str
) -> Verdict:
    whole = all_of(conditions)
    error = min((ours[cell].error for cell in cells(whole) if cell in ours), default=ERROR)
    weighed = {margin: replace(_weigh(margin, claim, printed, ours, scale), error=error) for margin in margins(whole)}
    findings: dict[Margin, Finding] = {}

    def settle(margin: Margin, error_holds: float, error_fails: float) -> tuple[bool | None, float | None]:
        answer, strength, findings[margin] = _settle(margin, (error_holds, error_fails), weighed[margin])
        return answer, strength

    decision = decide(whole, settle, error, error)
    verdict = _verdict(conditions, findings, decision, lambda: _why_open(conditions, findings, ours), scale)
    return _with_ties(replace(verdict, condition=whole), whole, findings)


def _means(conditions: Sequence[Condition], ours: Mapping[Cell, OurCell]) -> list[Margin]:
    # The mean of the comparisons for each table and unit, if there are more than three; else none.
    # Comparisons such as a < 0.25 * b, which are no differences, have a mean for each task.
    # Alternatives ("or") have no mean, nor have comparisons that equal numbers satisfy.
    strict = [margin for margin in margins(all_of(conditions)) if not margin.allows]
    is_measured = all(cell in ours for margin in strict for cell in margin.cells)
    if len(strict) <= _MEAN_OF or not is_measured or any(map(has_alternatives, conditions)):
        return []
    groups: dict[tuple, list[Margin]] = {}
    for margin in strict:
        tables = tuple(sorted({cell.row if cell.table == EXPERIMENT else cell.table for cell in margin.cells}))
        is_difference = not math.isnan(margin.at_equality)
        tasks = () if is_difference else tuple(sorted({str(ours[cell].protocol.get("task")) for cell in margin.cells}))
        unit = _unit_of((ours[cell].unit for cell in margin.cells), margin)
        groups.setdefault((tables, unit, tasks), []).append(margin)
    return [mean_margin(group) for group in groups.values()]


def _with_ties(verdict: Verdict, whole: Condition, findings: Mapping[Margin, Finding]) -> Verdict:
    # The verdict as a tie, where all comparisons are within x and those with a threshold hold
    strict = [finding for margin, finding in findings.items() if not margin.allows]
    others_hold = all(finding.verdict == HOLDS for margin, finding in findings.items() if margin.allows)
    kind = {HOLDS: HOLDS_BY_LITTLE, UNDECIDED: NO_DIFFERENCE}.get(verdict.verdict)
    is_tie = kind and strict and others_hold and not has_alternatives(whole)
    if not is_tie or not all(finding.is_equal for finding in strict):
        return verdict
    within = max(finding.bound.within for finding in strict)
    papers = [finding.bound.paper for finding in strict if finding.bound.paper is not None]
    # a margin that is wider than what the paper claims refutes nothing
    beside = f"the paper's own difference is {min(papers):.2g} points here" if papers and min(papers) <= within else ""
    return replace(verdict, verdict=kind, within=within, reason=beside)


def measured_at_every_scale(
    claim: Claim, printed: PaperTables, ours: Mapping[str, Mapping[Cell, OurCell]]
) -> tuple[Verdict, ...]:
    """The verdict at each scale at which a cell of the claim was measured; without any, one.

    The most telling scale comes first, but for those with a single seed or outside the claim's regime. `ours` is
    `our_cells`.
    """
    used = cells(*claim.measured)
    verdicts = [
        measured(claim, printed, ours[scale], scale) for scale in SCALES if not ours[scale].keys().isdisjoint(used)
    ]
    # a complete scale comes before one at which something is missing
    complete = [verdict for verdict in verdicts if verdict.verdict not in (NEEDS, NOT_RUN)]
    complete.sort(key=lambda verdict: verdict.verdict in (ONE_SEED, OUTSIDE))
    return tuple(complete or verdicts[:1]) or (measured(claim, printed, {}, ""),)


def _why_open(
    conditions: Sequence[Condition], findings: Mapping[Margin, Finding], ours: Mapping[Cell, OurCell]
) -> tuple[str, str]:
    verdicts = {finding.verdict for finding in findings.values()}
    verdict = next((kind for kind in _UNSETTLED if kind in verdicts), UNDECIDED)
    if verdict == NOT_RUN:
        return verdict, _named([cell for cell in cells(*conditions) if cell not in ours], ours)
    open_ = [finding for finding in findings.values() if finding.verdict == verdict]
    reasons = dict.fromkeys(finding.reason for finding in open_ if finding.estimate is None)
    most = max((finding for finding in open_ if finding.seeds), key=lambda finding: finding.seeds, default=None)
    return verdict, "; ".join(filter(None, [*reasons, most.reason if most else ""]))


def _weigh(margin: Margin, claim: Claim, printed: PaperTables, ours: Mapping[Cell, OurCell], scale: str) -> Finding:
    # An estimate, or a verdict that needs none, before the chance to err is shared
    missing = [cell for cell in margin.cells if cell not in ours]
    if missing:
        needed = {printed.needs[c.table, c.row]: None for c in missing if (c.table, c.row) in printed.needs}
        verdict, reason = (NEEDS, ", ".join(needed)) if needed else (NOT_RUN, _named(missing, ours))
        return Finding(margin.text, verdict, reason=reason)
    used = {cell: ours[cell] for cell in margin.cells}
    data = tuple(dict.fromkeys(cell.number.data for cell in used.values()))
    means = {cell: our_cell.number.mean for cell, our_cell in used.items()}
    value, slopes = margin.value(means), margin.slopes(means)
    difference = _unlike(slopes, used)
    if difference:
        return Finding(margin.text, UNLIKE, reason=difference, data=data)
    unit = _unit_of((cell.unit for cell in used.values()), margin)
    reason = "; ".join(dict.fromkeys(cell.number.undecided for cell in used.values() if cell.number.undecided))
    reason = f"nothing is decided at {scale} scale" if scale in EMPTY_SCALES else reason
    if reason:
        return Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
    if claim.exact:
        return _by_value(margin, value, unit, data)
    if not margin.is_linear and len({cell.number.seeds for cell in used.values()}) > 1:
        reason = "numbers of unlike runs are multiplied: they have other seeds"
        return Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
    untrained = dict.fromkeys(f"{cell.name}: {cell.untrained}" for cell in used.values() if cell.untrained)
    if untrained and claim.about != "training":
        return Finding(margin.text, NOT_TRAINED, value, unit=unit, reason="; ".join(untrained), data=data)
    seeds = [len(cell.number.seeds) for cell in used.values()]
    if 1 in seeds:
        reason = "" if max(seeds) == 1 else "one seed on one side"
        return Finding(margin.text, ONE_SEED, value, unit=unit, reason=reason, data=data)
    of_margin = estimate(margin, slopes, used)
    bound = bound_of(margin, slopes, used, printed.numbers, claim.equal_within)
    shares = all(cell.unit == "percent" for cell in used.values())
    between = value == 0 or all(0 < mean < 100 for mean in means.values())  # a share above one of 0 % is above
    if shares and between and of_margin.seed_variance == 0 and not of_margin.picture_variance:
        # a share moves in steps of one query: few seeds tie by chance
        reason = "the seeds of both sides tie, so that no spread is known"
        return Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data, bound=bound)
    slack = bound.within if margin.allows and not margin.strict and bound.within else 0.0
    basis = of_margin.basis + (f", as good within {slack:.2g} points" if slack else "")
    return Finding(margin.text, UNDECIDED, value, None, unit, basis, "", data, of_margin, bound, slack=slack)


def _settle(margin: Margin, errors: tuple[float, float], finding: Finding) -> tuple[bool | None, float | None, Finding]:
    # Answer, how clear it is, and finding, at the errors that the whole claim leaves to this margin
    if finding.estimate is None:
        answer = {HOLDS: True, FAILS: False}.get(finding.verdict)
        return answer, None if answer is None else finding.margin, finding
    if margin.allows:  # "at least as good as" is a one-sided statement
        errors = (2 * errors[0], errors[1])
    value, interval_at, basis = finding.margin, finding.estimate.interval_at, finding.basis
    low, high = interval_at(errors[0])[0] + finding.slack, interval_at(errors[1])[1] + finding.slack
    answer = True if low > 0 or (low == 0 == value and not margin.strict) else None
    answer = False if high < 0 or (high == 0 == value and margin.strict) else answer
    error = min(errors) if answer is None else errors[0] if answer else errors[1]
    interval = interval_at(error)
    if error != ERROR:
        parts = round(finding.error / error)
        basis += f", {100 * (1 - error):.4g} %{f' as one of {parts}' if parts > 1 else ''}"
    verdict = {True: HOLDS, False: FAILS, None: UNDECIDED}[answer]
    seeds, needed = _seeds_needed(margin, finding, errors[value <= 0]) if answer is None else (0, "")
    half_width = (interval[1] - interval[0]) / 2  # of the same error for all comparisons that are as yet open
    clear = value + finding.slack
    strength = clear / half_width if half_width else math.copysign(math.inf, clear) if clear else 0.0
    settled = replace(finding, verdict=verdict, interval=interval, basis=basis, reason=needed, seeds=seeds)
    return answer, strength, settled


def _seeds_needed(margin: Margin, finding: Finding, error: float = ERROR) -> tuple[float, str]:
    # Seeds that would show a difference of x, also as text; 0 without x.
    # x is the margin of equivalence; of a comparison with a threshold, the distance of equal numbers from it.
    bound, of_margin = finding.bound, finding.estimate
    if of_margin.runs_needed:
        count = of_margin.runs_needed(error)
        return count or 0, f"the same share of {count} seeds would decide" if count else ""
    difference = bound.within or bound.least or abs(margin.at_equality)
    if finding.unit != "points" or not difference > 0:
        return 0, ""
    amount = f"{difference:.2g}"
    amount += " point" if amount == "1" else " points"
    count = of_margin.seeds_needed(difference)
    if count is None:
        return math.inf, f"a difference of {amount} takes more pictures, not seeds"
    least = "at least " if of_margin.picture_variance is None else "about "
    unknown = f" ({bound.reason})" if bound.reason else ""
    return count, f"a difference of {amount} takes {least}{count} seeds{unknown}"


def seeds_for(claim: Claim, printed: PaperTables, ours: Mapping[Cell, OurCell], scale: str) -> float:
    """The most seeds that a difference of x takes in any comparison of the claim; inf: more pictures, not seeds.

    Measured differences do not count. 0 where no comparison has an interval and an x. Arguments as in `measured`.
    """
    comparisons = margins(all_of(claim.measured)) if claim.measured else ()
    weighed = {margin: _weigh(margin, claim, printed, ours, scale) for margin in comparisons}
    counts = (_seeds_needed(margin, finding)[0] for margin, finding in weighed.items() if finding.estimate is not None)
    return max(counts, default=0)


def _unlike(slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]) -> str:
    # Which key of the protocol keeps the cells of a margin from being compared; empty if none does.
    # An average over test sets is fine if each set is compared with itself: within a protocol the slopes must cancel.
    groups: list[list[Cell]] = []  # of one protocol each
    for cell in slopes:
        alike = (g for g in groups if first_difference(used[g[0]].protocol, used[cell].protocol) is None)
        group = next(alike, None)
        if group is None:
            groups.append([cell])
        else:
            group.append(cell)
    size = max(abs(slope) for slope in slopes.values())
    unbalanced = [group for group in groups if abs(sum(slopes[cell] for cell in group)) > 1.0e-9 * size]
    if len(unbalanced) < 2:
        return ""
    one, other = unbalanced[0][0], unbalanced[1][0]
    key, first, second = first_difference(used[one].protocol, used[other].protocol)
    return f"{key} is {first} for {one} but {second} for {other}"


def _unit_of(units: Iterable[str], margin: Margin) -> str:
    # Of a difference: points for percent, empty where units are mixed or multiplied
    distinct = set(units)
    unit = distinct.pop() if len(distinct) == 1 and margin.is_linear else ""
    return "points" if unit == "percent" else unit


def _named(missing: Sequence[Cell], ours: Mapping[Cell, OurCell]) -> str:
    parts = []
    for table in dict.fromkeys(cell.table for cell in missing):
        here = [cell for cell in missing if cell.table == table]
        known_rows = {cell.row for cell in ours if cell.table == table}
        rows = list(dict.fromkeys(cell.row for cell in here))
        unknown = [row for row in rows if row not in known_rows]
        if table == EXPERIMENT:
            parts += [f"experiment {row}" for row in rows]
        elif not unknown:
            parts.append(f"{table}, column {', '.join(dict.fromkeys(cell.column for cell in here))}")
        else:
            parts.append(f"{table}, {unknown[0] if len(unknown) == 1 else f'{len(unknown)} rows'}")
    return "; ".join(parts)
