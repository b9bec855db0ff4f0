"""Measurements that are no table of a paper, as a table whose numbers claims name as values of an experiment."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from common.base.provenance import hardware
from common.report.table import CROSSED_INTERVAL, MEASURED, Column, Row, Table, Training, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.rows import RowRun, paper_tables
from common.reproduce.tables import models_of, table_of, trained_on, training_of


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that one experiment measured.

    name: of experiment and table.
    data: training data of its models; empty = those of the runs.
    measured_on: our test set, for all columns or by column; empty = `data`.
    protocol: a few words for the table.
    settings: the full protocol, as plain values.
    rows: key -> label.
    columns: key -> (label, unit, which is better: "higher", "lower" or None).
    values: (row, column) -> a finite value per seed; a missing pair is an empty cell.
    chance: column -> chance level; `guess` is the model behind it, see `Column`.
    intervals: (row, column) -> (low, high), 95 % over seeds and test pictures, instead of those over seeds.
    rows_are_runs: whether a row is a training run, so that rows share their spread over seeds.
    """

    name: str
    caption: str
    protocol: str
    settings: Mapping[str, Any]
    rows: Mapping[str, str]
    columns: Mapping[str, tuple[str, str, str | None]]
    values: Mapping[tuple[str, str], Sequence[float]]
    data: str = ""
    chance: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    rows_are_runs: bool = False
    measured_on: str | Mapping[str, str] = ""
    guess: str = Column.guess
    intervals: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)


def findings_table(command: Command, paper: str, findings: Findings, runs: Mapping[str, list[RowRun]] = {}) -> Table:
    """The table of findings; claims name a value experiment["<name>"]["<row>_<column>"]. Call on the main process.

    Args:
        runs: that it was measured on, by method; a line below the table describes their models and training data.
    Returns:
        The table, without rows that have no value.
    """
    data = findings.data or trained_on(run for of_row in runs.values() for run in of_row)
    measured_on = findings.measured_on or data
    cells = {
        (row, column): measured_over_seeds(
            values,
            command.seeds,
            scale=command.scale,
            data=measured_on if isinstance(measured_on, str) else measured_on[column],
            protocol=findings.protocol,
            chance=findings.chance.get(column),
        )
        for (row, column), values in findings.values.items()
    }
    for place, interval in findings.intervals.items():
        cells[place] = replace(cells[place], interval=interval, interval_kind=CROSSED_INTERVAL)
    # rows without any value are left out
    rows = []
    for row, label in findings.rows.items():
        ours = {column: cells[row, column] for column in findings.columns if (row, column) in cells}
        rows += [Row(label, {}, ours, MEASURED, training=made_by(runs, row, label), key=row)] if ours else []
    versions = {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}
    return table_of(
        command,
        paper,
        findings.name,
        [Column(key, *texts, None, better, findings.guess) for key, (*texts, better) in findings.columns.items()],
        rows,
        {},
        measured_on=runs or None,
        paper_version=paper_tables(paper)["paper"]["version"],
        caption=findings.caption,
        data=data,
        hardware=hardware(),
        notes=findings.notes,
        errata=(),
        models=models_of(runs),
        protocol={"settings": {"experiment": findings.name, **findings.settings}, "versions": versions},
        rows_are_runs=findings.rows_are_runs,
    )


def made_by(runs: Mapping[str, list[RowRun]], row: str, label: str) -> Training | None:
    """The revisions of the runs that a row was measured on, by its key or label; None without such runs.

    Whether these trained stands in their own table.
    """
    beginnings = [key for key in runs if len(runs) == 1 or key in (row, label) or row.startswith(f"{key}_")]
    if not beginnings:
        return None
    made, *_ = training_of(runs[max(beginnings, key=len)])
    return Training(made.revision, made.evaluated_at)
