"""Every table of EuCLIP at smoke scale, end to end; the cache; experiments beside the tables."""

import json
import math
import shutil
from pathlib import Path

import pytest
from conftest import SmokeParts
from runs import values_of
from test_euclip_claims import columns_of_claims

import euclip.stability as stability_part
from common.base.config import ConfigError
from common.base.files import read_repository_yaml
from common.report.table import from_json
from euclip.reproduce import main

ROOT = Path(__file__).resolve().parents[1]
PRINTED = read_repository_yaml(ROOT / "euclip" / "paper_tables.yaml")["tables"]
TOO_FAST = "optim: {learning_rate: 1.0e+37, max_gradient_norm: null}\nmethod:\n  logit_scale_max: null"
SEEDS = {"table1": 2, "table4": 1, "table5": 1, "table8": 1}
MEANS = {"imagenet": "imagenet", "shifts": "shifts", "vtab": "vtab", "retrieval": "retrieval", "average": "all"}


@pytest.mark.parametrize("part", SEEDS)
def test_every_table_is_trained_and_written_with_the_papers_numbers_beside_ours(part, euclip):
    folder, seeds = euclip(part, seeds=SEEDS[part]), tuple(range(SEEDS[part]))
    table = from_json((folder / f"{part}.json").read_text(encoding="utf-8"))
    assert [row.method for row in table.rows] == [row["method"] for row in PRINTED[part]["rows"]]
    for row, printed in zip(table.rows, PRINTED[part]["rows"]):
        assert row.status == "measured"
        assert list(row.paper.values()) == printed["values"]
        stem, evaluations = Path(printed["config"]).stem, []
        for seed in seeds:
            (run,) = euclip.folder.glob(f"runs/euclip/{stem}-smoke-*/seed{seed}")  # once for all tables
            evaluations.append(json.loads((run / "evaluation.json").read_text())["evaluations"])
        for column, mean in MEANS.items():
            cell = row.ours[column]
            assert cell.values == pytest.approx(
                [100 * results[f"mean_{mean}"]["metrics"]["score"] for results in evaluations]
            )
            assert (cell.scale, cell.seeds) == ("smoke", seeds)
            assert cell.interval[0] <= cell.mean <= cell.interval[1]
    for ending in ("md", "png"):
        assert (folder / f"{part}.{ending}").stat().st_size > 100


@pytest.mark.parametrize("part", SEEDS)
def test_scalars_norms_and_regime_of_a_table_are_an_experiment_with_all_that_claims_name(part, euclip):
    values = values_of(euclip(part, seeds=SEEDS[part]) / f"{part}_scalars.json")
    named = columns_of_claims(f"{part}_scalars")
    assert named
    assert named <= set(values)
    assert {key for key in values if key.endswith("root_norm")} >= {
        key.replace("in_regime", "root_norm") for key in values if key.endswith("in_regime")
    }


def test_the_experiment_has_a_value_per_seed_and_that_of_changed_rows_is_another(euclip, tmp_path, monkeypatch):
    whole = euclip("table1", seeds=SEEDS["table1"]) / "table1_scalars.json"
    values, before = values_of(whole), whole.read_bytes()
    assert len(values["b16_meru_curvature"]) == 2
    assert values["b16_clip_image_norm"] == pytest.approx((1, 1))
    assert "b16_clip_curvature" not in values
    (tmp_path / "my_row.yaml").write_text("method: {geometry: elliptic}\n")
    rows = f"b16_clip {tmp_path / 'my_row.yaml'}"
    # what is drawn takes longer than what is trained, and was drawn for the whole table
    for name in ("command.collect_page", "command.plot_table", "tables.plot_training"):
        monkeypatch.setattr(f"common.reproduce.{name}", lambda *arguments, **words: None)
    few = ["--output", str(euclip.folder), "--results", str(tmp_path), *euclip.overrides]
    main(["table1", "--scale", "smoke", "--rows", rows, *few])
    (path,) = tmp_path.glob("euclip/table1/smoke-*/table1.json")
    assert whole.read_bytes() == before

    # a row of one's own stands below those of the paper, in the same columns and with nothing printed
    table = from_json(path.read_text(encoding="utf-8"))
    clip, custom = (row for row in table.rows if row.ours)
    assert table.rows[-1] is custom
    assert (custom.method, custom.paper, set(custom.ours)) == ("my_row", {}, set(clip.ours))
    assert 'ROWS="b16_clip <folder>/my_row.yaml"' in table.command  # without paths of this machine
    (run,) = euclip.folder.glob("runs/euclip/my_row-smoke-*/seed0/config.yaml")
    assert "geometry: elliptic" in run.read_text(encoding="utf-8")


def test_a_custom_row_with_the_name_of_another_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("b16_clip.yaml").write_text("method: {geometry: elliptic}\n")
    with pytest.raises(ConfigError, match=r"two rows have the name b16_clip; rename the custom row"):
        main(["table1", "--scale", "smoke", "--rows", "b16_clip b16_clip.yaml"])


def test_the_stability_part_says_which_runs_went_through_and_trains_none_twice(euclip, tmp_path, monkeypatch, capsys):
    """In a folder of its own, with the runs of Table 4, of which five are among its settings."""
    euclip("table4", seeds=SEEDS["table4"])
    shutil.copytree(euclip.folder / "runs", tmp_path / "runs")

    def stability():
        folder = SmokeParts("euclip", tmp_path, euclip.overrides)("stability")
        return from_json((folder / "stability.json").read_text(encoding="utf-8"))

    row = tmp_path / "unstable_meru_no_ln.yaml"
    text = (ROOT / "euclip" / "configs" / row.name).read_text(encoding="utf-8")
    row.write_text(text.replace("method:", TOO_FAST), encoding="utf-8")
    breaks = stability_part.Setting("meru_no_ln", str(row), "large")
    monkeypatch.setitem(stability_part.SETTINGS, "hyperbolic d, no-ln, lambda=0.2", breaks)
    table = stability()
    assert "unstable_meru_no_ln, seed 0: loss is nan at step " in capsys.readouterr().out
    values = values_of(tmp_path / "results/euclip/stability/smoke/stability.json")
    assert values["meru_no_ln_unstable"] == (1.0,)
    assert {name for name in values if name.endswith("_unstable")} == {
        f"{setting.key}_unstable" for setting in stability_part.SETTINGS.values()
    }
    named = columns_of_claims("stability")
    assert named
    assert named <= set(values)
    assert [row.method for row in table.rows] == list(stability_part.SETTINGS)
    assert all(row.paper == {} for row in table.rows)
    for row in table.rows:
        broke = row.method == "hyperbolic d, no-ln, lambda=0.2"
        assert set(row.ours) == ({"unstable"} if broke else {"unstable", "final_loss", "largest_rise"})
        assert row.ours["unstable"].mean == (broke or row.ours["final_loss"].mean > stability_part.NO_BETTER)

    # once more: what broke is remembered, by config, data and code, and nothing is trained
    def no_training(*arguments):
        raise AssertionError("trained again")

    monkeypatch.setattr("common.run.step.check_finite", no_training)
    again = stability()
    (broke,) = (tmp_path / "runs" / "euclip").glob("unstable_meru_no_ln-smoke-*/seed0/diverged.json")
    output = " ".join(capsys.readouterr().out.split())
    assert "unstable_meru_no_ln, seed 0, earlier: loss is nan at step " in output
    assert f"Remove {broke.parent} to train it again." in output
    assert [row.ours for row in again.rows] == [row.ours for row in table.rows]


@pytest.mark.parametrize("batch", [64, 200])
def test_a_collapsed_run_is_unstable_whatever_the_last_digit_says(batch):
    def of(losses, warmup=2):
        lines = [{"step": n, "contrastive_loss": loss} for n, loss in enumerate(losses)]
        return stability_part.judge(lines, warmup, batch)

    guess = math.log(batch)
    for last in (guess - 1e-6, guess, guess + 1e-6):
        assert of([guess] * 20 + [last])["unstable"] == 1
    outcome = of([9.0, 1.0, 9.0, 3.0, 2.0, 2.5, 2.0] + [1.0] * 10)
    assert outcome == {"unstable": 0, "final_loss": pytest.approx(1 / guess), "largest_rise": 0.5}  # after warm-up
    assert of([1.0] * 20 + [guess])["unstable"] == 0  # one bad batch at the end
    assert of([9.0, 1.0, 9.0], warmup=3)["largest_rise"] == 0  # all warm-up
