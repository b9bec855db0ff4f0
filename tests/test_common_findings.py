"""Findings: one set of measurements as a table, and as an experiment for claims."""

import pytest

from common.report.claims.expressions import EXPERIMENT, Cell
from common.report.claims.ours import our_cells
from common.report.table import Training
from common.reproduce import findings
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table

FINDINGS = Findings(
    name="sweep",
    caption="What was swept.",
    data="toy",
    protocol="3 steps",
    settings={"steps": 3},
    rows={"low": "low setting", "high": "high setting", "none": "nothing measured"},
    columns={"loss": ("loss", "nats", "lower"), "rank": ("rank", "directions", None)},
    values={("low", "loss"): [1.0, 2.0], ("high", "loss"): [3.0, 4.0], ("high", "rank"): [5.0, 6.0]},
    chance={"loss": 9.0},
    notes=["a note"],
)


def test_claims_and_readers_get_the_same_numbers(tmp_path):
    command = Command("sweep", "smoke", (0, 1), (), tmp_path, tmp_path / "results")
    table = findings_table(command, "oblique_topology", FINDINGS)
    cells = our_cells([table])["smoke"]
    named = {"low_loss": (1.0, 2.0), "high_loss": (3.0, 4.0), "high_rank": (5.0, 6.0)}
    assert {cell.column: ours.number.values for cell, ours in cells.items() if cell.table == EXPERIMENT} == named
    settings = cells[Cell(EXPERIMENT, "sweep", "low_loss")].protocol["settings"]
    assert settings == {"experiment": "sweep", "steps": 3}
    assert [row.method for row in table.rows] == ["low setting", "high setting"]  # without a value there is no row
    low, high = (row.ours for row in table.rows)
    assert (low["loss"].values, low["loss"].chance) == ((1.0, 2.0), 9.0)
    assert "rank" not in low
    assert high["rank"].mean == pytest.approx(5.5)
    assert [column.better for column in table.columns] == ["lower", None]


def test_changed_settings_give_a_table_in_another_folder(tmp_path):
    command = Command("sweep", "smoke", (0, 1), ("optim.steps=2",), tmp_path, tmp_path / "results")
    assert findings_table(command, "oblique_topology", FINDINGS).rows
    changed_data = Command("sweep", "smoke", (0, 1), ("data.num_test=2",), tmp_path, tmp_path / "results")
    assert changed_data.folder("oblique_topology").name.startswith("smoke-")
    made_otherwise = ("data.second_test=/d/*.tar", "run.mixed_precision=bf16", "hierarchies.nouns=nouns.tsv")
    other_data = Command("sweep", "photos", (0, 1), made_otherwise, tmp_path, tmp_path / "results")
    assert "run.mixed_precision=bf16" in findings_table(other_data, "oblique_topology", FINDINGS).command
    assert other_data.folder("oblique_topology").name == "photos"


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({"low": "1", "high": "2"}, ["1", "2"]),  # by key
        ({"lo": "1", "low setting": "2"}, ["2", None]),  # by label; "lo" is no beginning before a "_"
        ({"any": "1"}, ["1", "1"]),
        ({}, [None, None]),
    ],
)
def test_rows_name_the_revision_of_the_runs_that_they_were_measured_on(monkeypatch, runs, expected):
    monkeypatch.setattr(findings, "training_of", lambda made: (Training(made, "now", "code", (0.99,)), "", {}))
    made = [findings.made_by(runs, row, label) for row, label in (("low", "low setting"), ("high", "high setting"))]
    assert [row and (row.revision, row.failure) for row in made] == [one and (one, "") for one in expected]
    assert findings.made_by({"low": "1", "low_two": "2", "x": "3"}, "low_two_at_3", "").revision == "2"
