"""A printed table beside the rows of it that are trained here."""

from collections.abc import Callable, Mapping
from typing import Any

from common.diagnosis import PLATEAU
from common.report.table import MEASURED, Column, Measured, Row, Table
from common.reproduce.command import Command, plot_runs
from common.reproduce.rows import PaperCode, RowRun, measured_cell, run_row
from common.run.log import read_log

Runs = dict[str, list[RowRun]]  # method -> one run per seed
NOT_CHOSEN = "not run: not among ROWS"  # status of a row that the command leaves out


def train_rows(command: Command, code: PaperCode, configs: Mapping[str, str]) -> Runs:
    """Runs of all rows that the command wants, for all seeds, found or trained.

    Args:
        command: scale, seeds, overrides, rows.
        code: the paper's.
        configs: method -> file in the paper's configs/.
    """
    return {
        method: [run_row(code, config, command.scale, seed, command.overrides, command.runs) for seed in command.seeds]
        for method, config in configs.items()
        if command.trains(config)
    }


def collapse_note(runs: list[RowRun]) -> str:
    """Which seeds ended where they began, at the loss of a guess; empty where none did."""
    found = []
    for run in runs:
        ratios = [line["loss_over_chance"] for line in read_log(run.files.log) if "loss_over_chance" in line]
        if ratios and abs(ratios[-1] - 1) <= PLATEAU:
            found.append(str(run.seed))
    return f"; seed {', '.join(found)} ended at the loss of a guess" if found else ""


def measured_cells(source: dict[str, Any], runs: list[RowRun], scale: str) -> dict[str, Measured | None]:
    """One row's cells: each column of a printed table names [role, metric] as its `measure`."""
    return {column["key"]: measured_cell(runs, *column["measure"], scale) for column in source["columns"]}


def printed_cells(source: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The paper's values of one row by column."""
    return {column["key"]: value for column, value in zip(source["columns"], row["values"])}


def printed_rows(
    source: dict[str, Any],
    ours: Mapping[str, tuple[Mapping[str, Measured | None], str]],
    status: Callable[[dict[str, Any]], str] | None = None,
) -> list[Row]:
    """The rows of a printed table in its order: ours where they were measured, else why they were not.

    Args:
        source: the printed table.
        ours: method -> our cells, and the row's note.
        status: printed row -> why it was not measured; None = it was not chosen if it has a config, else what it needs.
    """

    def why(row: dict[str, Any]) -> str:
        return NOT_CHOSEN if "config" in row else f"not run: needs {row['needs']}"

    rows = []
    for row in source["rows"]:
        cells, note = ours.get(row["method"], ({}, ""))
        said = MEASURED if row["method"] in ours else (status or why)(row)
        rows.append(Row(row["method"], printed_cells(source, row), cells, said, note))
    return rows


def columns_of(command: Command, source: dict[str, Any], runs: Runs) -> list[Column]:
    """The printed columns, each with what stands in for its data here."""
    return [
        Column(column["key"], column["label"], stands_in_for=command.stand_in(runs, column["measure"][0]))
        for column in source["columns"]
    ]


def trained_table(
    command: Command, code: PaperCode, table_id: str, note: Callable[[str], str] | None = None
) -> tuple[Table, Runs]:
    """A table of the paper: rows that have a `config` are trained, the others say what they need.

    Draws the training curves beside it.

    Args:
        command: what the user asked for.
        code: the paper's.
        table_id: key in its paper_tables.yaml.
        note: file in configs/ -> what was trained for the row; None = `Command.note`.
    """
    source = code.printed(table_id)
    configs = {row["method"]: row["config"] for row in source["rows"] if "config" in row}
    runs = train_rows(command, code, configs)
    ours = {}
    for method, seeds in runs.items():
        said = command.note(configs[method], code) if note is None else note(configs[method])
        ours[method] = (measured_cells(source, seeds, command.scale), said + collapse_note(seeds))
    rows = printed_rows(source, ours)
    plot_runs(command, code.name, runs)
    return command.table(code.name, table_id, columns_of(command, source, runs), rows, runs), runs
