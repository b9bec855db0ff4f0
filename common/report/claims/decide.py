"""The rules by which numbers decide a claim: audit (the paper's own) and measured (ours at one scale).

A claim is a condition of comparisons, each a *margin* (`expressions.py`) that is positive where it holds. The logic has
three values, and the chance to err is shared among comparisons of which one would be enough (`decide`). The audit looks
at a margin's value alone. Measured, a margin holds where its interval over seeds lies above 0, does not hold where it
lies below, and is undecided where the interval contains 0. One seed decides nothing. What follows from a definition or
a count (`Claim.exact`) is judged by its value, as the audit is. Only `Row.ours` and experiments are measured, so no
number of a paper can take part.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from common.evaluation.protocol import first_difference
from common.report.claims.expressions import EXPERIMENT, Cell, Condition, Margin, all_of, cells
from common.report.claims.read import FAILS, HOLDS, Claim, PaperTables
from common.report.experiments import Experiment
from common.report.statistics import (
    SHARE_OF,
    contrast_interval,
    share_angle,
    share_of_angle,
    shared_spread,
)
from common.report.table import Measured, Table

UNDECIDED, UNCHECKED, EFFECT = "undecided", "cannot be checked", "effect size"
ONE_SEED = "undecided (one seed)"
NOT_RUN, NEEDS, UNLIKE = "not run yet", "needs", "unlike protocols"
SCALES = ("paper", "photos", "photos_scratch", "demo", "smoke")  # the more telling first
_EMPTY_SCALES = ("smoke",)  # end to end in seconds; nothing is learned that could decide a claim
_ERROR = 0.05
_UNSETTLED = (NEEDS, NOT_RUN, UNLIKE, ONE_SEED, UNDECIDED)  # of several reasons, the first of these counts
_ROUNDING = 1.0e-9  # of sums of printed decimals


@dataclass(frozen=True)
class Finding:
    """What became of one comparison of a claim.

    text: of the comparison. verdict: one of the constants of this module. margin: how far the comparison is from its
    threshold, positive where it holds; None without numbers. interval: of the margin, at the level that decided: 95 %,
    or more where the chance to err is shared. unit: of both. basis: the rule that gave the interval, with seeds and
    rows. reason: of a verdict that is neither holds nor does not hold; data: what ours was measured on.
    """

    text: str
    verdict: str
    margin: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    basis: str = ""
    reason: str = ""
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of a claim on one side: the answer, why there is none, and its comparisons.

    holding, of: how many of the claim's conditions hold when each is looked at alone. decisive: the comparison that
    decides: of a claim that holds the one nearest to its threshold, of one that does not the clearest, of an open one
    that which blocks. how: "by test", or `Claim.exact`. unlike: which comparison is of unlike protocols, if one is.
    later: the verdict by a threshold that was chosen after the data; it does not count.
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

    @property
    def margin(self) -> float | None:
        """Of the comparison that decides."""
        return None if self.decisive is None else self.decisive.margin


# ---- three values, and how the chance to err is shared -------------------------------------------------------------


class Decision(NamedTuple):
    """Whether a condition holds (None: open), the margin that decides, and how clearly, positive where it holds."""

    answer: bool | None
    margin: Margin
    strength: float | None


def decide(
    condition: Condition,
    settle: Callable[[Margin, float, float], tuple[bool | None, float | None]],
    error_holds: float = _ERROR,
    error_fails: float = _ERROR,
) -> Decision:
    """Whether a condition holds (Kleene's three values), and the comparison that decides it.

    The error of the whole stays bounded. `a and b` holds only if both do, each at the whole error (intersection-union);
    but it fails as soon as one does, so n parts share the error between them (Bonferroni, which is Holm's first step),
    or a claim of 36 comparisons between equal methods would be "refuted" by chance in most cases. `or` is the mirror
    image.

    Args:
        condition: what to decide.
        settle: (margin, error of calling it true, error of calling it false) -> answer, and how clear it is: a number
            that is positive where the margin holds, None without numbers.
        error_holds: chance of calling the condition true although it is false (two-sided).
        error_fails: chance of calling it false although it is true (two-sided).
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


def _verdict(
    conditions: Sequence[Condition],
    findings: Mapping[Margin, Finding],
    decision: Decision,
    open_: Callable[[], tuple[str, str]],
    scale: str = "",
) -> Verdict:
    """From the findings on all comparisons of the conditions; `open_` gives verdict and reason of an open one."""
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
    """Whether the paper's own printed numbers bear its sentence out, to the printed digits."""
    if not claim.audit:
        return Verdict(UNCHECKED, claim.no_numbers)
    findings: dict[Margin, Finding] = {}

    def settle(margin: Margin, *_: float) -> tuple[bool | None, float | None]:
        missing = [cell for cell in margin.cells if printed.numbers[cell] is None]
        if missing:
            findings[margin] = Finding(margin.text, UNCHECKED, reason=f"the paper prints no {missing[0]}")
            return None, None
        unit = _unit_of(printed.units[cell.table, cell.column] for cell in margin.cells)
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
    """The finding on a number that no interval belongs to."""
    answer = value > _ROUNDING if margin.strict else value >= -_ROUNDING
    return Finding(margin.text, HOLDS if answer else FAILS, value, unit=unit, data=data)


# ---- ours ------------------------------------------------------------------------------------------------------------


class OurCell(NamedTuple):
    """A number of ours, its unit, what it was trained on (only runs that share it are compared by seed), and all rows
    of its column by name."""

    number: Measured
    unit: str
    trained_on: str
    name: str
    column: Mapping[str, Measured]

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What two numbers must share to be compared; tables of before it was kept have the text for readers."""
        return self.number.full_protocol or {"data": self.number.data, "protocol": self.number.protocol}


def our_cells(tables: Sequence[Table], experiments: Sequence[Experiment]) -> dict[str, dict[Cell, OurCell]]:
    """Our numbers of one paper by scale and reference. Where several tables hold a cell, that with the most seeds
    counts, of equal ones the last; a number of the paper never does."""
    every = []
    for table in tables:
        for column in table.columns:
            rows = {row.method: number for row in table.rows if (number := row.ours.get(column.key)) is not None}
            for row, number in rows.items():
                cell = OurCell(number, column.unit, table.data, row, rows)
                every.append((table.scale, Cell(table.table_id, row, column.key), cell))
    for experiment in experiments:
        columns: dict[str, dict[str, Measured]] = {}
        for key in experiment.values:
            row, column = experiment.row_of(key)
            rows = columns.setdefault(column, {}) if column else {}
            rows[row] = experiment.measured(key)
            cell = OurCell(rows[row], experiment.units.get(key, ""), experiment.data, row, rows)
            every.append((experiment.scale, Cell(EXPERIMENT, experiment.name, key), cell))
    ours: dict[str, dict[Cell, OurCell]] = {scale: {} for scale in SCALES}
    for scale, cell, number in sorted(every, key=lambda entry: len(entry[2].number.seeds)):  # the last of equals stays
        ours.setdefault(scale, {})[cell] = number
    return ours


def measured(claim: Claim, printed: PaperTables, ours: Mapping[Cell, OurCell], scale: str) -> Verdict:
    """The measured verdict of a claim at one scale.

    Args:
        claim: with its expression for this side.
        printed: the paper's tables, for what its rows need; their numbers are not looked at.
        ours: our numbers at this scale, see `our_cells`.
        scale: for the record; at smoke scale nothing is decided.
    """
    if claim.needs:
        return Verdict(NEEDS, claim.needs)
    if claim.not_run_yet:
        return Verdict(NOT_RUN, claim.not_run_yet)
    if claim.kind == "test":
        return Verdict(claim.shows, ", ".join(claim.tests), how=claim.exact or "by test")
    findings: dict[Margin, Finding] = {}

    def settle(margin: Margin, error_holds: float, error_fails: float) -> tuple[bool | None, float | None]:
        errors = (_ERROR, _ERROR) if claim.effect_size else (error_holds, error_fails)
        answer, strength, findings[margin] = _settle(margin, errors, claim, printed, ours, scale)
        return answer, strength

    decision = decide(all_of(claim.measured), settle)
    verdict = _verdict(claim.measured, findings, decision, lambda: _why_open(claim.measured, findings, ours), scale)
    if claim.effect_size and verdict.verdict in (HOLDS, FAILS, UNDECIDED):
        return replace(verdict, verdict=EFFECT, reason=claim.effect_size)
    later = measured(replace(claim, measured=claim.later, later=()), printed, ours, scale) if claim.later else None
    return replace(verdict, how=claim.exact if verdict.verdict in (HOLDS, FAILS) else "", later=later)


def measured_at_every_scale(
    claim: Claim, printed: PaperTables, ours: Mapping[str, Mapping[Cell, OurCell]]
) -> tuple[Verdict, ...]:
    """The verdict at each scale at which a cell of the claim was measured; without any, one.

    The most telling scale comes first, but for those with a single seed. `ours` is `our_cells` by scale.
    """
    used = cells(*claim.measured)
    verdicts = [
        measured(claim, printed, ours[scale], scale) for scale in SCALES if not ours[scale].keys().isdisjoint(used)
    ]
    # a complete scale comes before one at which something is missing
    complete = [verdict for verdict in verdicts if verdict.verdict not in (NEEDS, NOT_RUN)]
    complete.sort(key=lambda verdict: verdict.verdict == ONE_SEED)
    return tuple(complete or verdicts[:1]) or (measured(claim, printed, {}, ""),)


def _why_open(
    conditions: Sequence[Condition], findings: Mapping[Margin, Finding], ours: Mapping[Cell, OurCell]
) -> tuple[str, str]:
    """Verdict and reason of conditions that their comparisons leave open."""
    verdicts = {finding.verdict for finding in findings.values()}
    verdict = next((kind for kind in _UNSETTLED if kind in verdicts), UNDECIDED)
    if verdict == NOT_RUN:
        return verdict, _named([cell for cell in cells(*conditions) if cell not in ours], ours)
    reasons = dict.fromkeys(finding.reason for finding in findings.values() if finding.verdict == verdict)
    return verdict, "; ".join(filter(None, reasons))


def _settle(
    margin: Margin,
    errors: tuple[float, float],
    claim: Claim,
    printed: PaperTables,
    ours: Mapping[Cell, OurCell],
    scale: str,
) -> tuple[bool | None, float | None, Finding]:
    """The answer at the errors that the whole claim leaves to this margin, how clear it is, and the finding."""
    missing = [cell for cell in margin.cells if cell not in ours]
    if missing:
        needed = {printed.needs[c.table, c.row]: None for c in missing if (c.table, c.row) in printed.needs}
        verdict, reason = (NEEDS, ", ".join(needed)) if needed else (NOT_RUN, _named(missing, ours))
        return None, None, Finding(margin.text, verdict, reason=reason)
    used = {cell: ours[cell] for cell in margin.cells}
    data = tuple(dict.fromkeys(cell.number.data for cell in used.values()))
    means = {cell: our_cell.number.mean for cell, our_cell in used.items()}
    value, slopes = margin.value(means), margin.slopes(means)
    difference = _unlike(slopes, used)
    if difference:
        return None, None, Finding(margin.text, UNLIKE, reason=difference, data=data)
    unit = _unit_of(cell.unit for cell in used.values())
    reason = "; ".join(dict.fromkeys(cell.number.undecided for cell in used.values() if cell.number.undecided))
    reason = f"nothing is decided at {scale} scale" if scale in _EMPTY_SCALES else reason
    if reason:
        return None, None, Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
    if claim.exact:
        finding = _by_value(margin, value, unit, data)
        return finding.verdict == HOLDS, value, finding
    seeds = [len(cell.number.seeds) for cell in used.values()]
    if 1 in seeds:
        reason = "" if max(seeds) == 1 else "one seed on one side"
        return None, None, Finding(margin.text, ONE_SEED, value, unit=unit, reason=reason, data=data)
    interval_at, basis = _intervals(margin, slopes, used)
    low, high = interval_at(errors[0])[0], interval_at(errors[1])[1]
    answer = True if low > 0 or (low == 0 == value and not margin.strict) else None
    answer = False if high < 0 or (high == 0 == value and margin.strict) else answer
    error = min(errors) if answer is None else errors[0] if answer else errors[1]
    interval = interval_at(error)
    if error < _ERROR:
        basis += f", {100 * (1 - error):.4g} % as one of {round(_ERROR / error)}"
    verdict = {True: HOLDS, False: FAILS, None: UNDECIDED}[answer]
    finding = Finding(margin.text, verdict, value, interval, unit, basis, data=data)
    half_width = (interval[1] - interval[0]) / 2  # of the same error for all comparisons that are as yet open
    strength = value / half_width if half_width else math.copysign(math.inf, value) if value else 0.0
    return answer, strength, finding


def _intervals(
    margin: Margin, slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]
) -> tuple[Callable[[float], tuple[float, float]], str]:
    """The two-sided interval of a margin by its chance to err, and the rule that gives it.

    The margin is taken as linear in its numbers, and shares are looked at as angles (`share_angle`): each end is where
    the numbers are moved along the slope, so that no share leaves its range.
    """
    wholes = {cell: _whole(our_cell) for cell, our_cell in used.items()}
    means = {cell: our_cell.number.mean for cell, our_cell in used.items()}
    steep = {  # by the angle: d (w sin^2 a) / da = 2 sqrt(y (w - y))
        cell: slope * (2 * math.sqrt(max(0.0, means[cell] * (wholes[cell] - means[cell]))) if wholes[cell] else 1)
        for cell, slope in slopes.items()
    }
    half_width_at, basis = _half_widths(steep, used, wholes)
    squares, value = sum(slope**2 for slope in steep.values()), margin.value(means)

    def end(step: float) -> float:
        moved = {cell: _flat(means[cell], whole) + step * steep[cell] for cell, whole in wholes.items()}
        return value + sum(slopes[cell] * (_back(angle, wholes[cell]) - means[cell]) for cell, angle in moved.items())

    def interval_at(error: float) -> tuple[float, float]:
        step = half_width_at(error) / squares if squares else 0.0
        return (end(-step), end(step)) if step else (value, value)

    return interval_at, basis


def _half_widths(
    slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell], wholes: Mapping[Cell, float]
) -> tuple[Callable[[float], float], str]:
    """Half the width of a sum of slopes times numbers by its chance to err, and the rule that gives it."""
    first = next(iter(used.values()))
    values = {cell: slope * _by_seed(used[cell].number, wholes[cell]) for cell, slope in slopes.items()}
    blocks: dict[tuple, np.ndarray] = {}
    for cell, our_cell in used.items():
        key = (our_cell.trained_on, tuple(sorted(our_cell.number.seeds)))
        blocks[key] = blocks.get(key, 0) + values[cell]
    if len(blocks) > 1:  # no seeds are shared, or unlike training data
        counts = sorted({len(our_cell.number.seeds) for our_cell in used.values()})

        def by_welch(error: float) -> float:
            low, high = contrast_interval(list(blocks.values()), 1 - error)
            return (high - low) / 2

        return by_welch, f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds, Welch"
    (((_, seeds), by_seed),) = blocks.items()
    if all(cell.column is first.column for cell in used.values()):
        alike = {name: number for name, number in first.column.items() if tuple(sorted(number.seeds)) == seeds}
        by_name = {used[cell].name: slope for cell, slope in slopes.items()}
        rows = np.array([_by_seed(number, next(iter(wholes.values()))) for number in alike.values()])
        weights = np.array([by_name.get(name, 0.0) for name in alike])
    else:  # several columns or tables: the margin of each seed
        alike, rows, weights = {"": None}, by_seed[None, :], np.ones(1)
    spread = shared_spread(rows)
    by_rows, by_values = spread.rules(weights)
    basis = f"{len(seeds)} seeds"
    if by_rows:
        wider = f"the wider of {'paired' if len(used) > 1 else 'its own spread'} and " if by_values else ""
        basis += f", {wider}pooled over {spread.pooled.sum()} rows"
    elif len(used) > 1:
        basis += ", paired"
    odd = (weights != 0) & (spread.doubtful if by_rows else ~spread.pooled)
    named = [
        f"{name} ({f'Brown-Forsythe p {p:.2g}' if np.ptp(row) else 'no spread'})"
        for name, p, row, is_odd in zip(alike, spread.p_values, rows, odd)
        if is_odd
    ]
    if named and len(rows) > 2:
        basis += f"; {'perhaps noisier than they' if by_rows else 'stays apart'}: {', '.join(named)}"
    return lambda error: float(spread.half_width(weights, error)), basis


def _whole(cell: OurCell) -> float:
    """What the shares of a cell's column are of; 0 where they are no shares."""
    whole = SHARE_OF.get(cell.unit, 0.0)
    values = [value for number in (cell.number, *cell.column.values()) for value in number.values]
    return whole if min(values) >= 0 and max(values) <= whole else 0.0


def _flat(number: Any, whole: float) -> Any:
    return share_angle(np.asarray(number) / whole) if whole else number


def _back(angle: Any, whole: float) -> Any:
    return float(whole * share_of_angle(angle)) if whole else angle


def _by_seed(number: Measured, whole: float) -> np.ndarray:
    """The values in the order of the seeds, shares as angles."""
    return _flat(np.asarray(number.values)[np.argsort(number.seeds)], whole)


def _unlike(slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]) -> str:
    """Which key of the protocol keeps the cells of a margin from being compared; empty if nothing does.

    An average over several test sets is fine as long as each set is compared with itself: within every protocol the
    slopes of its cells must cancel.
    """
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


def _unit_of(units: Iterable[str]) -> str:
    """The unit of a difference of numbers: points for percent, nothing where units are mixed."""
    distinct = set(units)
    unit = distinct.pop() if len(distinct) == 1 else ""
    return "points" if unit == "percent" else unit


def _named(missing: Sequence[Cell], ours: Mapping[Cell, OurCell]) -> str:
    """What has not been run, in short: rows, columns of rows that have other numbers, experiments."""
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
