"""Our numbers as claims name them: by scale, table, row and column, and at each setting near the best of a search."""

import re
from collections.abc import Sequence
from dataclasses import replace

from common.report.claims.expressions import EXPERIMENT, Cell
from common.report.claims.intervals import OurCell
from common.report.experiments import Experiment
from common.report.table import ERROR, Measured, Row, Table

SCALES = ("paper", "photos", "photos_scratch", "demo", "smoke")  # the more telling first


def unplanned(command: str) -> str:
    """A command without its PLAN, which an experiment keeps where it does not count for the table beside it."""
    return re.sub(r" PLAN=\d+", "", command)


def our_cells(tables: Sequence[Table], experiments: Sequence[Experiment]) -> dict[str, dict[Cell, OurCell]]:
    """Our numbers of one paper by scale and reference.

    Where several tables hold a cell, the one with the most seeds counts, of equal ones the last. An experiment decides
    with the seeds of the table that shows it.
    """
    every = []
    by_command = {(unplanned(table.command), table.scale, tuple(table.seeds)): table.deciding for table in tables}
    deciding = {(table.table_id, table.scale, tuple(table.seeds)): table.deciding for table in tables}
    for table in tables:
        untrained = {row.method: row.training.failure for row in table.rows if row.training is not None}
        count, error = table.deciding
        for column in table.columns:
            rows = {row.method: number for row in table.rows if (number := row.ours.get(column.key)) is not None}
            rows = {row: _of_seeds(number, table.seeds[:count]) for row, number in rows.items()}
            for row, number in rows.items():
                cell = OurCell(number, column.unit, table.data, row, rows, untrained.get(row, ""), error)
                every.append((table.scale, Cell(table.table_id, row, column.key), cell))
    for experiment in experiments:
        shown_as = experiment.name, experiment.scale, experiment.seeds
        beside = unplanned(experiment.command), experiment.scale, experiment.seeds
        count, error = deciding.get(shown_as) or by_command.get(beside) or (len(experiment.seeds), ERROR)
        columns: dict[str, dict[str, Measured]] = {}
        for key in experiment.values:
            row, column = experiment.row_of(key)
            rows = columns.setdefault(column, {}) if column else {}
            rows[row] = _of_seeds(experiment.measured(key), experiment.seeds[:count])
            cell = OurCell(rows[row], experiment.units.get(key, ""), experiment.data, row, rows, error=error)
            every.append((experiment.scale, Cell(EXPERIMENT, experiment.name, key), cell))
    ours: dict[str, dict[Cell, OurCell]] = {scale: {} for scale in SCALES}
    for scale, cell, number in sorted(every, key=lambda entry: len(entry[2].number.seeds)):  # the last of equals stays
        ours.setdefault(scale, {})[cell] = number
    return ours


def _of_seeds(number: Measured, seeds: Sequence[int]) -> Measured:
    # A number of some seeds only; unchanged if it has none of them
    places = [place for place, seed in enumerate(number.seeds) if seed in seeds]
    if not 0 < len(places) < len(number.seeds):
        return number
    values, kept = ([of[place] for place in places] for of in (number.values, number.seeds))
    return replace(number, values=tuple(values), seeds=tuple(kept), hits=number.hits and number.hits.of_seeds(places))


def at_settings(tables: Sequence[Table], near: Sequence[Table]) -> dict[str, list[Table]]:
    """Settings as text -> the tables, with rows of `near` that were trained at these settings in place of theirs.

    A table of other seeds does not count: fewer seeds leave open what more decide. Nor does one of other data.
    """
    by_settings: dict[str, dict[tuple, Table]] = {}
    for table in near:
        by_settings.setdefault(", ".join(table.settings), {})[_place(table)] = table

    def with_rows(table: Table, other: Table | None) -> Table:
        counts = other is not None and _data(other) <= _data(table)  # it may have some of the rows only
        rows = {row.method: row for row in other.rows if any(row.ours.values())} if counts else {}
        return replace(table, rows=[_trained_as(row, rows.get(row.method)) for row in table.rows])

    return {
        settings: [with_rows(table, of_settings.get(_place(table))) for table in tables]
        for settings, of_settings in by_settings.items()
    }


def _trained_as(row: Row, other: Row | None) -> Row:
    if other is None:
        return row
    ours = {key: cell for key, cell in other.ours.items() if cell is not None}
    return replace(row, ours={**row.ours, **ours}, training=other.training)


def _data(table: Table) -> set:
    # words and fingerprints of the training sets; test set and protocol of each column
    tests = {(column.key, cell.data, cell.protocol) for column in table.columns for cell in table.measured(column.key)}
    return {*re.findall(r"[^\s,()]+", table.data), *tests}


def _place(table: Table) -> tuple:
    return table.paper, table.table_id, table.scale, table.seeds
