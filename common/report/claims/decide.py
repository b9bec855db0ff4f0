"""The measured verdict of a claim: our numbers at one scale, with an interval, or why there is no verdict.

Only `Row.ours` and experiments are read here, so no number of a paper can take part. Each comparison of a claim is a
margin (see `expressions.py`) that holds where its interval lies above 0, does not hold where it lies below, and is
undecided where it contains 0. With two seeds or more per cell the interval is over seeds: cells that share seeds and
training data go into one margin per seed (paired differences), others count as independent (Welch). With one seed it is
a bootstrap over test images, where they were kept: that says how this one model would do on other pictures, nothing
about the next training run.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.evaluation.protocol import first_difference
from common.report.claims.expressions import EXPERIMENT, Cell, Margin, all_of, cells, decide, evaluate, gradient
from common.report.claims.read import (
    FAILS,
    HOLDS,
    NEEDS,
    NOT_RUN,
    UNDECIDED,
    UNLIKE,
    Claim,
    Finding,
    PaperTables,
    Verdict,
    unit_of,
)
from common.report.experiments import Experiment
from common.report.statistics import bootstrap_means, contrast_interval, percentile_interval
from common.report.table import PerImage, Table

SCALES = ("paper", "photos", "demo", "smoke")  # the more telling first
_EMPTY_SCALES = ("smoke",)  # end to end in seconds; nothing is learned that could decide a claim
_LEVEL, _NUM_RESAMPLES = 0.95, 2000
_UNSETTLED = (NEEDS, NOT_RUN, UNLIKE, UNDECIDED)  # what is said of several reasons, the first of these


@dataclass(frozen=True)
class OurCell:
    """A number of ours as claims need it.

    values, seeds: one each per run. unit: of the values. data: it was measured on. trained_on: so that only runs that
    share their training data are paired. protocol: compared by `check_alike`'s rule. per_image: of a single seed.
    """

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    unit: str
    data: str
    trained_on: str
    protocol: Mapping[str, Any]
    per_image: PerImage | None = None

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


def our_cells(tables: Sequence[Table], experiments: Sequence[Experiment], scale: str) -> dict[Cell, OurCell]:
    """Our numbers of one paper at one scale, by reference. Where several tables hold a cell, that with the most seeds
    counts, of equal ones the last; a number of the paper never does."""
    found: dict[Cell, OurCell] = {}

    def add(cell: Cell, ours: OurCell) -> None:
        if cell not in found or len(ours.seeds) >= len(found[cell].seeds):
            found[cell] = ours

    for table in tables:
        if table.scale != scale:
            continue
        units = {column.key: column.unit for column in table.columns}
        for row in table.rows:
            for key, number in row.ours.items():
                if number is not None:
                    protocol = number.full_protocol or {"data": number.data, "protocol": number.protocol}
                    add(
                        Cell(table.table_id, row.method, key),
                        OurCell(
                            number.values, number.seeds, units[key], number.data, table.data, protocol, number.per_image
                        ),
                    )
    for experiment in experiments:
        if experiment.scale == scale:
            for key, values in experiment.values.items():
                protocol = {"data": experiment.data, **experiment.protocol}
                unit = experiment.units.get(key, "")
                add(
                    Cell(EXPERIMENT, experiment.name, key),
                    OurCell(values, experiment.seeds, unit, experiment.data, experiment.data, protocol),
                )
    return found


def measured(claim: Claim, printed: PaperTables, ours: Mapping[Cell, OurCell], scale: str) -> Verdict:
    """The measured verdict of a claim at one scale.

    Args:
        claim: with its expression for this side.
        printed: the paper's tables, for what its rows need; their numbers are not looked at.
        ours: our numbers at this scale, from `our_cells`.
        scale: for the record; at smoke scale nothing is decided.
    """
    if claim.needs:
        return Verdict(NEEDS, claim.needs)
    if claim.not_run_yet:
        return Verdict(NOT_RUN, claim.not_run_yet)
    if claim.kind == "test":
        return Verdict(claim.shows, f"by {', '.join(claim.tests)}, where it passes", by_tests=True)
    findings: dict[Margin, Finding] = {}
    resampled: dict[Cell, np.ndarray] = {}

    def settle(margin: Margin, error_holds: float, error_fails: float) -> bool | None:
        answer, findings[margin] = _settle(margin, error_holds, error_fails, printed, ours, scale, resampled)
        return answer

    answer = decide(all_of(claim.measured), settle, 1 - _LEVEL, 1 - _LEVEL)
    verdict, reason = (HOLDS if answer else FAILS, "") if answer is not None else _why_open(claim, findings, ours)
    return Verdict.on(claim.measured, findings, verdict, reason, scale)


def _why_open(claim: Claim, findings: Mapping[Margin, Finding], ours: Mapping[Cell, OurCell]) -> tuple[str, str]:
    """Verdict and reason of a claim that its comparisons leave open."""
    found = list(findings.values())
    verdict = min(
        (each.verdict for each in found if each.verdict in _UNSETTLED), key=_UNSETTLED.index, default=UNDECIDED
    )
    if verdict == NOT_RUN:
        used = dict.fromkeys(cell for condition in claim.measured for cell in cells(condition))
        return verdict, _named([cell for cell in used if cell not in ours], ours)
    reasons = dict.fromkeys(each.reason for each in found if each.verdict == verdict)
    if verdict == UNDECIDED and any(each.verdict == FAILS for each in found):
        reasons["one comparison fails alone, but not with the error shared among all"] = None
    return verdict, "; ".join(reasons)


def measured_at_every_scale(
    claim: Claim, printed: PaperTables, tables: Sequence[Table], experiments: Sequence[Experiment]
) -> tuple[Verdict, ...]:
    """The verdict at each scale at which a cell of the claim was measured, the most telling first; without any, one."""
    wanted = {cell for condition in claim.measured for cell in cells(condition)}
    verdicts = []
    for scale in SCALES:
        ours = our_cells(tables, experiments, scale)
        if wanted & set(ours):
            verdicts.append(measured(claim, printed, ours, scale))
    if not verdicts:
        return (measured(claim, printed, {}, ""),)
    # a scale at which something is still missing tells less than one at which nothing is
    complete = [verdict for verdict in verdicts if verdict.verdict not in (NEEDS, NOT_RUN)]
    return tuple(complete or verdicts[:1])


def _settle(
    margin: Margin,
    error_holds: float,
    error_fails: float,
    printed: PaperTables,
    ours: Mapping[Cell, OurCell],
    scale: str,
    resampled: dict[Cell, np.ndarray],
) -> tuple[bool | None, Finding]:
    """The answer at the errors that the whole claim leaves to this margin, and the finding with its 95 % interval."""
    used = cells(margin.value)
    missing = [cell for cell in used if cell not in ours]
    if missing:
        needed = {printed.needs[c.table, c.row]: None for c in missing if (c.table, c.row) in printed.needs}
        if needed:
            return None, Finding(margin.text, NEEDS, reason=", ".join(needed))
        return None, Finding(margin.text, NOT_RUN, reason=_named(missing, ours))
    means = {cell: ours[cell].mean for cell in used}
    data = tuple(dict.fromkeys(ours[cell].data for cell in used))
    unit = unit_of(ours[cell].unit for cell in used)
    try:
        value, slopes = evaluate(margin.value, means), gradient(margin.value, means)
    except ZeroDivisionError:
        return None, Finding(margin.text, UNDECIDED, reason="division by zero", data=data)
    difference = _unlike(slopes, ours)
    if difference:
        return None, Finding(margin.text, UNLIKE, reason=difference, data=data)
    if scale in _EMPTY_SCALES:
        reason = f"nothing is decided at {scale} scale"
        return None, Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
    seeds = {len(ours[cell].seeds) for cell in used}
    if seeds == {1} and all(ours[cell].per_image is not None for cell in used):
        for cell in used:
            if cell not in resampled:
                resampled[cell] = _resampled(ours[cell])
        draws = evaluate(margin.value, resampled)
        draws = draws[np.isfinite(draws)]
        if not len(draws) or draws.min() == draws.max():
            reason = "one seed, and every test image says the same"
            return None, Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
        intervals = [percentile_interval(draws, level) for level in (_LEVEL, 1 - error_holds, 1 - error_fails)]
        basis = "1 seed, bootstrap over test images"
    elif 1 in seeds:
        reason = "one seed" if seeds == {1} else "one seed on one side"
        return None, Finding(margin.text, UNDECIDED, value, unit=unit, reason=reason, data=data)
    else:
        blocks = _blocks(slopes, ours)
        # linearised at the means: exact for sums and differences; only the width is taken, the centre is the value
        intervals = []
        for level in (_LEVEL, 1 - error_holds, 1 - error_fails):
            low, high = contrast_interval([block for _, block in blocks], level)
            intervals.append((value - (high - low) / 2, value + (high - low) / 2))
        count = min(seeds) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
        basis = f"{count} seeds" + ("" if len(used) == 1 else ", paired" if len(blocks) == 1 else ", Welch")
    interval, for_holds, for_fails = intervals
    answer = True if _above(for_holds, margin.strict) else False if _below(for_fails, margin.strict) else None
    alone = HOLDS if _above(interval, margin.strict) else FAILS if _below(interval, margin.strict) else UNDECIDED
    reason = "the interval contains the threshold" if alone == UNDECIDED else ""
    return answer, Finding(margin.text, alone, value, interval, unit, basis, reason, data)


def _above(interval: tuple[float, float], strict: bool) -> bool:
    return interval[0] > 0 or (not strict and interval == (0, 0))


def _below(interval: tuple[float, float], strict: bool) -> bool:
    return interval[1] < 0 or (strict and interval == (0, 0))


def _blocks(slopes: Mapping[Cell, float], ours: Mapping[Cell, OurCell]) -> list[tuple[tuple, np.ndarray]]:
    """Per group of cells that share training data and seeds: the group's part of the margin for each seed."""
    blocks: dict[tuple, np.ndarray] = {}
    for cell, slope in slopes.items():
        order = np.argsort(ours[cell].seeds)
        values = slope * np.asarray(ours[cell].values)[order]
        key = (ours[cell].trained_on, tuple(sorted(ours[cell].seeds)))
        blocks[key] = blocks[key] + values if key in blocks else values
    return list(blocks.items())


def _resampled(cell: OurCell) -> np.ndarray:
    assert cell.per_image is not None
    # the same draws for all numbers of one test set, other ones for another set
    seed = zlib.crc32(cell.data.encode())
    return bootstrap_means(cell.per_image.sums, cell.per_image.counts, _NUM_RESAMPLES, seed)


def _unlike(slopes: Mapping[Cell, float], ours: Mapping[Cell, OurCell]) -> str:
    """Which key of the protocol keeps the cells of a margin from being compared; empty if nothing does.

    An average over several test sets is fine as long as each set is compared with itself: within every protocol the
    slopes of its cells must cancel.
    """
    groups: list[list[Cell]] = []
    for cell in slopes:
        alike = (g for g in groups if first_difference(ours[g[0]].protocol, ours[cell].protocol) is None)
        group = next(alike, None)
        if group is None:
            groups.append([cell])
        else:
            group.append(cell)
    if len(groups) < 2:
        return ""
    size = max(abs(slope) for slope in slopes.values())
    unbalanced = [group for group in groups if abs(sum(slopes[cell] for cell in group)) > 1.0e-9 * size]
    if len(unbalanced) < 2:
        return ""
    one, other = unbalanced[0][0], unbalanced[1][0]
    difference = first_difference(ours[one].protocol, ours[other].protocol)
    assert difference is not None
    key, first, second = difference
    return f"{key} is {first} for {one} but {second} for {other}"


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
