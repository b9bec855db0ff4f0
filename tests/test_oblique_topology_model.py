"""Every row and scale of the oblique paper's tables loads and builds."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from common.run.config import SCALES, load_row
from oblique_topology.config import Config
from oblique_topology.model import build_model

FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"
BERT_IDS = SimpleNamespace(vocabulary_size=30_522, end_id=102)
ROWS = sorted(FOLDER.glob("configs/table*.yaml"))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("row", ROWS, ids=lambda path: path.stem)
def test_every_row_builds_at_every_scale(row, scale):
    config = load_row(Config, FOLDER, row, scale)
    with torch.device("meta"):
        model = build_model(config, BERT_IDS)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


def test_the_baseline_at_paper_scale_has_the_papers_parameter_count():
    config = load_row(Config, FOLDER, FOLDER / "configs" / "table2_clip.yaml", "paper")
    with torch.device("meta"):
        model = build_model(config, BERT_IDS)
    assert sum(parameter.numel() for parameter in model.parameters()) == 139_952_129


def test_the_baseline_starts_at_the_papers_temperature_with_its_bound():
    config = load_row(Config, FOLDER, FOLDER / "configs" / "table2_clip.yaml", "demo")
    model = build_model(config, BERT_IDS)
    assert model.logit_scale().item() == pytest.approx(1 / 0.07, rel=1e-6)
    assert model.logit_scale.maximum == 100.0
    assert model.geometry.name == "sphere"


def test_every_trained_row_of_the_tables_has_its_config():
    tables = yaml.safe_load((FOLDER / "paper_tables.yaml").read_text(encoding="utf-8"))["tables"]
    named = {row["config"] for table in tables.values() for row in table["rows"] if "config" in row}
    assert named == {row.name for row in ROWS}
    for table in tables.values():
        for row in table["rows"]:
            assert len(row["values"]) == len(table["columns"]), row["method"]
            waits = "needs" in row or table.get("not_run_yet", False)
            assert ("config" in row) != waits, row["method"]
