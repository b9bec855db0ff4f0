"""Every part of GeoMM at smoke scale, end to end: tables beside the paper's numbers, and the readings of Eq. 3."""

import json
from pathlib import Path

import pytest
from conftest import SmokeParts

from common.base.config import ConfigError
from common.base.files import read_own_yaml
from common.base.provenance import ROOT
from common.report.table import from_json
from common.run.log import read_log
from geomm.readings import READINGS, STARTS
from geomm.reproduce import PARTS, main
from scripts.parts import parts_of

PRINTED = read_own_yaml(ROOT / "geomm" / "paper_tables.yaml")["tables"]


@pytest.fixture(scope="module")
def geomm(tmp_path_factory):
    few = ("optim.steps=4", "optim.warmup_steps=0", "data.num_train=64", "data.num_val=8", "data.num_test=16",
           "run.evaluate_every=0", "run.save_every=0")  # fmt: skip
    return SmokeParts("geomm", tmp_path_factory.mktemp("geomm"), few)


def table_of(geomm, part):
    return from_json((geomm(part) / f"{part}.json").read_text())


def test_the_list_of_parts_is_that_of_the_code():
    assert parts_of("geomm") == list(PARTS)


@pytest.mark.parametrize("part", PRINTED)
def test_rows_with_a_config_are_trained_and_stand_beside_the_papers_numbers(geomm, part):
    table = table_of(geomm, part)
    for row, printed in zip(table.rows, PRINTED[part]["rows"], strict=True):
        assert list(row.paper.values()) == printed["values"]
        if "config" not in printed:
            assert row.status == f"not run: needs {printed['needs']}"
            continue
        (run,) = geomm.folder.glob(f"runs/geomm/{Path(printed['config']).stem}-smoke-*/seed0")
        found = json.loads((run / "evaluation.json").read_text())["evaluations"]
        measured = 0
        for column in PRINTED[part]["columns"]:
            role, metric = column["measure"]
            if role in found:
                assert row.ours[column["key"]].values == pytest.approx((100 * found[role]["metrics"][metric],))
                measured += 1
        assert measured


def test_a_row_says_by_which_distance(geomm):
    notes = {row.method: row.note for row in table_of(geomm, "table2").rows}
    assert "pool of 40 compared by the cosine; starts from all of albef" in notes["ALBEF"]
    assert "by the geodesic distance (knn_local, 2 x 3 centres, 2 neighbours); starts from all" in notes["Geo-ALBEF"]


def test_every_reading_is_trained_from_both_starts_and_towers_once(geomm):
    table = table_of(geomm, "readings")
    assert len(table.rows) == len(READINGS) * len(STARTS)
    assert len(list(geomm.folder.glob("runs/geomm/towers-*"))) == 1
    for row in table.rows:
        assert 0 < row.ours["mean_recall"].mean <= 100
        assert ("positive_local" in row.ours) != row.method.startswith("cosine")


def test_readings_of_one_start_differ_from_the_first_graph_on(geomm):
    geomm("readings")
    losses = {}
    for name, (config, _) in READINGS.items():
        for path in geomm.folder.glob(f"runs/geomm/{Path(config).stem}-smoke-*/seed0"):
            lines = [line for line in read_log(path / "log.jsonl") if line["event"] == "train"]
            started = any(line["event"] == "start" for line in read_log(path / "log.jsonl"))
            losses[name, started] = [line["loss"] for line in lines]
    assert len(losses) == len(READINGS) * len(STARTS)
    for started in (False, True):
        of_start = [losses[name, started] for name in READINGS]
        assert len({line[0] for line in of_start}) == 1  # no pool is full yet
        assert len({line[-1] for line in of_start}) >= len(READINGS) - 2  # a value and its straight-through form agree


def test_a_row_of_another_paper_is_not_taken(geomm, tmp_path):
    with pytest.raises(ConfigError, match="table2_clip"):
        main(["table2", "--scale", "smoke", "--output", str(tmp_path), "--rows", "table2_clip"])
