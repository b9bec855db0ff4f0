"""The rules by which numbers decide a claim: audit (the paper's own) and measured (ours at one scale).

A claim is a condition of comparisons, each a *margin* (`expressions.py`) that is positive where it holds. The logic has
three values, and the chance to err is shared among comparisons of which one would be enough (`decide`). The audit looks
at a margin's value alone. Measured, a margin holds where its interval lies above 0, does not hold where it lies below,
and is undecided where the interval contains 0. With two seeds or more per cell the interval is over seeds: cells that
share seeds and training data go into one margin per seed (paired differences), others count as independent (Welch).
With one seed it is a bootstrap over test images, where they were kept: that says how this one model would do on other
pictures, nothing about the next training run. Only `Row.ours` and experiments are measured, so no number of a paper can
take part.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from common.evaluation.protocol import first_difference
from common.report.claims.expressions import EXPERIMENT, Cell, Condition, Margin, all_of, cells
from common.report.claims.read import FAILS, HOLDS, Claim, PaperTables
from common.report.experiments import Experiment
from common.report.statistics import bootstrap_means, contrast_interval, percentile_interval
from common.report.table import Measured, Table

UNDECIDED, UNCHECKED = "undecided", "cannot be checked"
NOT_RUN, NEEDS, UNLIKE = "not run yet", "needs", "unlike protocols"
SCALES = ("paper", "photos", "photos_scratch", "demo", "smoke")  # the more telling first
_EMPTY_SCALES = ("smoke",)  # end to end in seconds; nothing is learned that could decide a claim
_LEVEL, _NUM_RESAMPLES = 0.95, 2000
_UNSETTLED = (NEEDS, NOT_RUN, UNLIKE, UNDECIDED)  # what is said of several reasons, the first of these
_ROUNDING = 1.0e-9  # of sums of printed decimals


@dataclass(frozen=True)
class Finding:
    """What became of one comparison of a claim.

    text: of the comparison. verdict: one of the constants of this module. margin: how far the comparison is from its
    threshold, positive where it holds; None without numbers. interval: 95 % of the margin. unit: of both.
    basis: what the interval spans, with the number of seeds. reason: of a verdict that is neither holds nor does not
    hold; data: what ours was measured on.
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

    holding, of: how many of the claim's conditions hold when each is looked at alone. decisive: the comparison that is
    nearest to turning the verdict over, and `margin`, how far it is from that, positive where the claim holds.
    `by_tests` marks an answer that the named tests give where they pass.
    """

    verdict: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    scale: str = ""
    holding: int = 0
    of: int = 0
    decisive: Finding | None = None
    margin: float | None = None
    by_tests: bool = False

    @classmethod
    def on(
        cls, conditions: Sequence[Condition], findings: Mapping[Margin, Finding], verdict: str, reason: str, scale: str
    ) -> "Verdict":
        """From the findings on all comparisons of the conditions."""
        alone = {HOLDS: True, FAILS: False}
        holding = [decide(each, lambda margin, *_: alone.get(findings[margin].verdict)) for each in conditions]
        found = decisive(all_of(conditions), lambda margin: findings[margin].margin)
        which, margin = (None, None) if found is None else (findings[found[0]], found[1])
        return cls(
            verdict, reason, tuple(findings.values()), scale, holding.count(True), len(conditions), which, margin
        )


# ---- three values, and how the chance to err is shared -------------------------------------------------------------


def decide(
    condition: Condition,
    settle: Callable[[Margin, float, float], bool | None],
    error_holds: float = 1 - _LEVEL,
    error_fails: float = 1 - _LEVEL,
) -> bool | None:
    """Whether a condition holds: True, False, or None where its margins leave that open (Kleene's three values).

    The error of the whole stays bounded. `a and b` holds only if both do, each at the whole error; but it fails as soon
    as one does, so n parts share the error between them (Bonferroni), or a claim of 36 comparisons between equal
    methods would be "refuted" by chance in most cases. `or` is the mirror image.

    Args:
        condition: what to decide.
        settle: (margin, error of calling it true, error of calling it false) -> True, False or None.
        error_holds: chance of calling the condition true although it is false (two-sided).
        error_fails: likewise of calling it false.
    """
    if isinstance(condition, Margin):
        return settle(condition, error_holds, error_fails)
    count, enough = len(condition.parts), condition.kind == "or"  # `enough`: the answer of one part that is the whole's
    errors = (error_holds / count, error_fails) if enough else (error_holds, error_fails / count)
    answers = [decide(part, settle, *errors) for part in condition.parts]
    return enough if enough in answers else None if None in answers else not enough


def decisive(condition: Condition, value: Callable[[Margin], float | None]) -> tuple[Margin, float] | None:
    """The margin that decides the condition, and how far the condition is from turning over, positive where it holds.

    The least over `and`, the greatest over `or`; parts without a value are passed over.
    """
    if isinstance(condition, Margin):
        number = value(condition)
        return None if number is None else (condition, number)
    found = [each for part in condition.parts if (each := decisive(part, value)) is not None]
    return (min if condition.kind == "and" else max)(found, key=lambda each: each[1], default=None)


# ---- the paper's own numbers ----------------------------------------------------------------------------------------


def audit(claim: Claim, printed: PaperTables) -> Verdict:
    """Whether the paper's own printed numbers bear its sentence out, to the printed digits."""
    if not claim.audit:
        return Verdict(UNCHECKED, claim.no_numbers)
    findings: dict[Margin, Finding] = {}

    def settle(margin: Margin, *_: float) -> bool | None:
        missing = [cell for cell in margin.cells if printed.numbers[cell] is None]
        if missing:
            findings[margin] = Finding(margin.text, UNCHECKED, reason=f"the paper prints no {missing[0]}")
            return None
        value = margin.value(printed.numbers)
        answer = value > _ROUNDING if margin.strict else value >= -_ROUNDING
        unit = _unit_of(printed.units[cell.table, cell.column] for cell in margin.cells)
        findings[margin] = Finding(margin.text, HOLDS if answer else FAILS, value, unit=unit)
        return answer

    answer = decide(all_of(claim.audit), settle)
    verdict = UNCHECKED if answer is None else HOLDS if answer else FAILS
    reason = "" if answer is not None else next(finding.reason for finding in findings.values() if finding.reason)
    return Verdict.on(claim.audit, findings, verdict, reason, "")


# ---- ours ------------------------------------------------------------------------------------------------------------


class OurCell(NamedTuple):
    """A number of ours, its unit, and what it was trained on: only runs that share it are paired."""

    number: Measured
    unit: str
    trained_on: str

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What two numbers must share to be compared; tables of before it was kept have the text for readers."""
        return self.number.full_protocol or {"data": self.number.data, "protocol": self.number.protocol}


def our_cells(tables: Sequence[Table], experiments: Sequence[Experiment]) -> dict[str, dict[Cell, OurCell]]:
    """Our numbers of one paper by scale and reference. Where several tables hold a cell, that with the most seeds
    counts, of equal ones the last; a number of the paper never does."""
    every = [
        (table.scale, Cell(table.table_id, row.method, column.key), OurCell(number, column.unit, table.data))
        for table in tables
        for row in table.rows
        for column in table.columns
        if (number := row.ours.get(column.key)) is not None
    ]
    every += [
        (each.scale, Cell(EXPERIMENT, each.name, key), OurCell(each.measured(key), each.units.get(key, ""), each.data))
        for each in experiments
        for key in each.values
    ]
    ours: dict[str, dict[Cell, OurCell]] = {scale: {} for scale in SCALES}
    for scale, cell, number in sorted(
        every, key=lambda found: len(found[2].number.seeds)
    ):  # stable: the last of equals
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
        return Verdict(claim.shows, f"by {', '.join(claim.tests)}, where it passes", by_tests=True)
    findings: dict[Margin, Finding] = {}
    resampled = cache(lambda cell: _resampled(ours[cell].number))  # claims compare a cell with many others

    def settle(margin: Margin, error_holds: float, error_fails: float) -> bool | None:
        answer, findings[margin] = _settle(margin, (error_holds, error_fails), printed, ours, scale, resampled)
        return answer

    answer = decide(all_of(claim.measured), settle)
    verdict, reason = (HOLDS if answer else FAILS, "") if answer is not None else _why_open(claim, findings, ours)
    return Verdict.on(claim.measured, findings, verdict, reason, scale)


def measured_at_every_scale(
    claim: Claim, printed: PaperTables, ours: Mapping[str, Mapping[Cell, OurCell]]
) -> tuple[Verdict, ...]:
    """The verdict at each scale at which a cell of the claim was measured, the most telling first; without any, one.

    `ours` is `our_cells` by scale.
    """
    used = cells(*claim.measured)
    verdicts = [
        measured(claim, printed, ours[scale], scale) for scale in SCALES if not ours[scale].keys().isdisjoint(used)
    ]
    # a scale at which something is still missing tells less than one at which nothing is
    complete = [verdict for verdict in verdicts if verdict.verdict not in (NEEDS, NOT_RUN)]
    return tuple(complete or verdicts[:1]) or (measured(claim, printed, {}, ""),)


def _why_open(claim: Claim, findings: Mapping[Margin, Finding], ours: Mapping[Cell, OurCell]) -> tuple[str, str]:
    """Verdict and reason of a claim that its comparisons leave open."""
    found = list(findings.values())
    verdict = min({each.verdict for each in found} & set(_UNSETTLED), key=_UNSETTLED.index, default=UNDECIDED)
    if verdict == NOT_RUN:
        return verdict, _named([cell for cell in cells(*claim.measured) if cell not in ours], ours)
    reasons = dict.fromkeys(each.reason for each in found if each.verdict == verdict)
    if verdict == UNDECIDED and any(each.verdict == FAILS for each in found):
        reasons["one comparison fails alone, but not with the error shared among all"] = None
    return verdict, "; ".join(reasons)


def _settle(
    margin: Margin,
    errors: tuple[float, float],
    printed: PaperTables,
    ours: Mapping[Cell, OurCell],
    scale: str,
    resampled: Callable[[Cell], np.ndarray],
) -> tuple[bool | None, Finding]:
    """The answer at the errors that the whole claim leaves to this margin, and the finding with its 95 % interval."""
    missing = [cell for cell in margin.cells if cell not in ours]
    if missing:
        needed = {printed.needs[c.table, c.row]: None for c in missing if (c.table, c.row) in printed.needs}
        verdict, reason = (NEEDS, ", ".join(needed)) if needed else (NOT_RUN, _named(missing, ours))
        return None, Finding(margin.text, verdict, reason=reason)
    used = {cell: ours[cell] for cell in margin.cells}
    data = tuple(dict.fromkeys(cell.number.data for cell in used.values()))
    means = {cell: each.number.mean for cell, each in used.items()}
    value, slopes = margin.value(means), margin.slopes(means)
    difference = _unlike(slopes, used)
    if difference:
        return None, Finding(margin.text, UNLIKE, reason=difference, data=data)
    unit = _unit_of(cell.unit for cell in used.values())
    levels = [_LEVEL, *(1 - error for error in errors)]
    reason = f"nothing is decided at {scale} scale"
    if scale not in _EMPTY_SCALES:
        reason = "; ".join(dict.fromkeys(cell.number.undecided for cell in used.values() if cell.number.undecided))
    if not reason:
        intervals, basis, reason = _intervals(margin, value, slopes, used, levels, resampled)
    if reason:
        return None, Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
    interval, for_holds, for_fails = intervals
    answer = True if _above(for_holds, margin.strict) else False if _below(for_fails, margin.strict) else None
    alone = HOLDS if _above(interval, margin.strict) else FAILS if _below(interval, margin.strict) else UNDECIDED
    reason = "the interval contains the threshold" if alone == UNDECIDED else ""
    return answer, Finding(margin.text, alone, value, interval, unit, basis, reason, data)


def _above(interval: tuple[float, float], strict: bool) -> bool:
    return interval[0] > 0 or (not strict and interval == (0, 0))


def _below(interval: tuple[float, float], strict: bool) -> bool:
    return interval[1] < 0 or (strict and interval == (0, 0))


def _intervals(
    margin: Margin,
    value: float,
    slopes: Mapping[Cell, float],
    used: Mapping[Cell, OurCell],
    levels: Sequence[float],
    resampled: Callable[[Cell], np.ndarray],
) -> tuple[list[tuple[float, float]], str, str]:
    """Intervals of a margin, one per level, and what they span; or none, and the reason."""
    seeds = {len(cell.number.seeds) for cell in used.values()}
    if seeds == {1} and all(cell.number.per_image is not None for cell in used.values()):
        draws = margin.value({cell: resampled(cell) for cell in used})
        if draws.min() == draws.max():
            return [], "", "one seed, and every test image says the same"
        return [percentile_interval(draws, level) for level in levels], "1 seed, bootstrap over test images", ""
    if 1 in seeds:
        return [], "", "one seed" if seeds == {1} else "one seed on one side"
    blocks = _blocks(slopes, used)
    # linearised at the means: exact for sums and differences; only the width is taken, the centre is the value
    around = [contrast_interval(blocks, level) for level in levels]
    intervals = [(value - (high - low) / 2, value + (high - low) / 2) for low, high in around]
    count = min(seeds) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return intervals, f"{count} seeds" + ("" if len(used) == 1 else ", paired" if len(blocks) == 1 else ", Welch"), ""


def _blocks(slopes: Mapping[Cell, float], used: Mapping[Cell, OurCell]) -> list[np.ndarray]:
    """Per group of cells that share training data and seeds: the group's part of the margin for each seed."""
    blocks: dict[tuple, np.ndarray] = {}
    for cell, slope in slopes.items():
        number = used[cell].number
        values = slope * np.asarray(number.values)[np.argsort(number.seeds)]
        key = (used[cell].trained_on, tuple(sorted(number.seeds)))
        blocks[key] = blocks[key] + values if key in blocks else values
    return list(blocks.values())


def _resampled(number: Measured) -> np.ndarray:
    # the same draws for all numbers of one test set, other ones for another set
    seed = zlib.crc32(number.data.encode())
    return bootstrap_means(number.per_image.sums, number.per_image.counts, _NUM_RESAMPLES, seed)


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
    found = set(units)
    unit = found.pop() if len(found) == 1 else ""
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
