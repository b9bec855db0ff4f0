"""Every table of EuCLIP at smoke scale, end to end; the cache; experiments beside the tables."""

import json
import math
from pathlib import Path

import pytest
import yaml
from test_euclip_claims import columns_of_claims

import euclip.stability as stability_part
from common.report.experiments import read_experiment
from common.report.table import from_json
from euclip import train
from euclip.reproduce import PARTS, main
from scripts.parts import parts_of

ROOT = Path(__file__).resolve().parents[1]
PRINTED = yaml.safe_load((ROOT / "euclip" / "paper_tables.yaml").read_text(encoding="utf-8"))["tables"]
TOO_FAST = ("optim.learning_rate=1.0e+37", "optim.max_gradient_norm=null", "method.logit_scale_max=null")
SMALL = ["data.num_labelled=8", "data.num_test=8", "data.num_val=4"]  # of every part
TABLES = ("table1", "table4", "table5", "table8")
MEANS = {"imagenet": "imagenet", "shifts": "shifts", "vtab": "vtab", "retrieval": "retrieval", "average": "all"}


pytestmark = pytest.mark.usefixtures("small_data_is_no_change")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """One folder for all parts, so that rows in two tables are trained once."""
    return tmp_path_factory.mktemp("outputs")


def reproduce(part, output, *overrides):
    main([part, "--scale", "smoke", "--output", str(output), *SMALL, *overrides])
    (found,) = (output / "results" / "euclip" / part).glob(f"*/{part}.json")
    return from_json(found.read_text(encoding="utf-8"))


def test_the_list_of_parts_is_that_of_the_code():
    assert parts_of("euclip") == list(PARTS)


@pytest.mark.parametrize("part", TABLES)
def test_every_table_is_trained_and_written_with_the_papers_numbers_beside_ours(part, output):
    table = reproduce(part, output)
    assert [row.method for row in table.rows] == [row["method"] for row in PRINTED[part]["rows"]]
    runs = output / "runs" / "euclip"
    for row, printed in zip(table.rows, PRINTED[part]["rows"]):
        assert row.status == "measured"
        assert list(row.paper.values()) == printed["values"]
        stem = Path(printed["config"]).stem
        (evaluation,) = runs.glob(f"{stem}-smoke-*/seed0/evaluation.json")
        found = json.loads(evaluation.read_text(encoding="utf-8"))["evaluations"]
        for column, mean in MEANS.items():
            cell = row.ours[column]
            assert cell.mean == pytest.approx(100 * found[f"mean_{mean}"]["metrics"]["score"])
            assert (cell.scale, cell.seeds) == ("smoke", (0,))
            assert cell.interval[0] <= cell.mean <= cell.interval[1]
    folder = next((output / "results" / "euclip" / part).iterdir())
    for ending in ("md", "csv", "tex", "png"):
        assert (folder / f"{part}.{ending}").stat().st_size > 100
    assert (folder / f"{part}_training.png").stat().st_size > 1000


def test_rows_in_two_tables_are_trained_once(output):
    reproduce("table5", output)
    for row in ("b16_euclip", "table4_euclip"):  # of Table 1 and of Table 4
        assert len(list((output / "runs" / "euclip").glob(f"{row}-smoke-*"))) == 1


def test_scalars_and_norms_at_the_end_are_an_experiment_with_all_that_claims_name(output):
    reproduce("table4", output)
    experiment = read_experiment(output / "results" / "euclip" / "experiments" / "smoke" / "table4_scalars.json")
    named = columns_of_claims("table4_scalars")
    assert named
    assert named <= set(experiment.values)


def test_the_experiment_has_a_value_per_seed_and_is_not_of_changed_rows(tmp_path):
    main(["table1", "--scale", "smoke", "--seeds", "2", "--output", str(tmp_path), *SMALL])
    path = tmp_path / "results" / "euclip" / "experiments" / "smoke" / "table1_scalars.json"
    experiment = read_experiment(path)
    assert experiment.seeds == (0, 1)
    assert len(experiment.values["b16_meru_curvature"]) == 2
    assert experiment.values["b16_clip_image_norm"] == pytest.approx((1, 1))
    assert "b16_clip_curvature" not in experiment.values
    before = path.read_bytes()
    main(["table1", "--scale", "smoke", "--output", str(tmp_path), *SMALL, "optim.steps=2"])
    assert path.read_bytes() == before


def test_the_stability_part_says_which_runs_went_through_and_trains_none_twice(output, monkeypatch, capsys):
    breaks = stability_part.Setting("meru_no_ln", "unstable_meru_no_ln.yaml", TOO_FAST)
    monkeypatch.setitem(stability_part.SETTINGS, "hyperbolic d, no-ln, lambda=0.2", breaks)
    table = reproduce("stability", output)
    assert "unstable_meru_no_ln, seed 0: the gradient norm is nan at step " in capsys.readouterr().out
    experiment = read_experiment(output / "results" / "euclip" / "experiments" / "smoke" / "stability.json")
    assert experiment.values["meru_no_ln_unstable"] == (1.0,)
    assert {name for name in experiment.values if name.endswith("_unstable")} == {
        f"{setting.key}_unstable" for setting in stability_part.SETTINGS.values()
    }
    named = columns_of_claims("stability")
    assert named
    assert named <= set(experiment.values)
    assert [row.method for row in table.rows] == list(stability_part.SETTINGS)
    assert all(row.paper == {} for row in table.rows)
    for row in table.rows:
        broke = row.method == "hyperbolic d, no-ln, lambda=0.2"
        assert set(row.ours) == ({"unstable"} if broke else {"unstable", "final_loss", "largest_rise"})
        assert row.ours["unstable"].mean == (broke or row.ours["final_loss"].mean > stability_part.NO_BETTER)

    # once more: what broke is remembered, by config, data and code, and nothing is trained
    def no_training(*arguments):
        raise AssertionError("trained again")

    monkeypatch.setattr(train, "check_finite", no_training)
    again = reproduce("stability", output)
    (broke,) = (output / "runs" / "euclip").glob("unstable_meru_no_ln-smoke-*/seed0/diverged.json")
    said = " ".join(capsys.readouterr().out.split())
    assert "unstable_meru_no_ln, seed 0, earlier: the gradient norm is nan at step " in said
    assert f"Remove {broke.parent} to train it again." in said
    assert [row.ours for row in again.rows] == [row.ours for row in table.rows]


def test_a_run_that_is_all_warm_up_has_a_final_loss_and_no_rise(tmp_path, monkeypatch):
    kept = {"hyperbolic d, ln, lambda=0": stability_part.SETTINGS["hyperbolic d, ln, lambda=0"]}
    monkeypatch.setattr(stability_part, "SETTINGS", kept)
    (row,) = reproduce("stability", tmp_path, "optim.steps=3", "optim.warmup_steps=3").rows
    assert row.ours["final_loss"].mean > 0
    assert row.ours["largest_rise"].mean == 0


@pytest.mark.parametrize("batch", [64, 200, 256])
def test_a_collapsed_run_is_unstable_whatever_the_last_digit_says(batch):
    def of(losses):
        return stability_part.judge([{"step": n, "contrastive_loss": loss} for n, loss in enumerate(losses)], 2, batch)

    guess = math.log(batch)
    for last in (guess - 1e-6, guess, guess + 1e-6):
        assert of([guess] * 20 + [last])["unstable"] == 1
    found = of([9.0, 1.0, 9.0, 3.0, 2.0, 2.5, 2.0] + [1.0] * 10)
    assert found == {"unstable": 0, "final_loss": pytest.approx(1 / guess), "largest_rise": 0.5}  # after warm-up
    assert of([1.0] * 20 + [guess])["unstable"] == 0  # one bad batch at the end
