"""Our numbers as claims name them: by scale, table, row and column, and at each setting near the best of a search."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.base.files import read_repository_yaml
from common.base.places import ROOT
from common.report.claims.expressions import EXPERIMENT, Cell
from common.report.claims.intervals import OurCell
from common.report.table import Measured, Row, Table

SCALES = ("paper", "photos", "photos_scratch", "demo", "smoke")  # the more telling first


def our_cells(tables: Sequence[Table]) -> dict[str, dict[Cell, OurCell]]:
    """Our numbers of one paper by scale and reference; of rows with a key as values of an experiment, too.

    Where several tables hold a cell, the one with the most seeds counts, of equal ones the last.
    """
    every = []
    printed = {paper: _printed_tables(paper) for paper in {table.paper for table in tables}}
    for table in tables:
        count, error = table.deciding
        runs = _runs_of(table, printed[table.paper].get(table.table_id, {}))
        for column in table.columns:
            numbers = [
                (row, _of_seeds(_with_protocol(number, table), table.seeds[:count]))
                for row in table.rows
                if (number := row.ours.get(column.key)) is not None
            ]
            by_method = {row.method: number for row, number in numbers}
            by_key = {row.key: number for row, number in numbers if row.key}
            for row, number in numbers:
                names = {Cell(table.table_id, row.method, column.key): (row.method, by_method)}
                if row.key:
                    value = "_".join(filter(None, (row.key, column.key)))
                    rows = by_key if table.rows_are_runs else {row.key: number}
                    names[Cell(EXPERIMENT, table.experiment or table.table_id, value)] = row.key, rows
                untrained = "" if row.training is None else row.training.failure
                for cell, (name, rows) in names.items():
                    number_of_cell = OurCell(number, column.unit, table.data, name, rows, untrained, error, runs)
                    every.append((table.scale, cell, number_of_cell))
    ours: dict[str, dict[Cell, OurCell]] = {scale: {} for scale in SCALES}
    for scale, cell, number in sorted(every, key=lambda entry: len(entry[2].number.seeds)):  # the last of equals stays
        ours.setdefault(scale, {})[cell] = number
    return ours


def _printed_tables(paper: str) -> dict[str, Any]:
    path = ROOT / paper / "paper_tables.yaml"
    return read_repository_yaml(path)["tables"] if path.is_file() else {}


def _runs_of(table: Table, printed: dict[str, Any]) -> dict[str, Any]:
    # row -> what only rows of the same runs share: the figures of their training, in old tables the config
    configs = {row["method"]: row.get("config") for row in (*printed.get("rows", ()), *printed.get("beyond", ()))}

    def key(row: Row) -> Any:
        figures = row.training and (*row.training.loss_over_chance, *row.training.validation)
        return figures or configs.get(row.method) or row.method

    return {row.method: key(row) for row in table.rows}


def _with_protocol(number: Measured, table: Table) -> Measured:
    if number.full_protocol or not table.protocol:
        return number
    return replace(number, full_protocol={"data": table.data, **table.protocol})


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
