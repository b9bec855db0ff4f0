"""Table 1 and the sweep over negatives at smoke scale, end to end; published checkpoints in the table; the cache."""

import json

import numpy as np
import pytest
import yaml
from runs import values_of
from test_contrastive_basics_public import write_model

from common.base.config import ConfigError
from common.report.table import from_json
from contrastive_basics.negatives_sweep import SWEEPS
from contrastive_basics.reproduce import CODE, main

FAST = ["run.evaluate_every=0", "run.save_every=0", "data.num_test=12", "data.num_labelled=8"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:scenes"),
    pytest.mark.filterwarnings("ignore:more than"),
    pytest.mark.usefixtures("small_data_is_no_change"),
]


def reproduce(output, part, *arguments):
    main([part, "--scale", "smoke", "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("clip", "flava")}
    for name, folder in folders.items():
        write_model(folder, name)
    return [f"public.{name}={folder}" for name, folder in folders.items()]


@pytest.fixture(scope="module")
def output(tmp_path_factory, checkpoints):
    folder = tmp_path_factory.mktemp("outputs")
    reproduce(folder, "table1", *FAST, *checkpoints)
    return folder


BEYOND = CODE.printed("table1")["beyond"]
TRAINED_HERE = [row["method"] for row in BEYOND if "scales" not in row]


def table(output):
    (path,) = output.glob("results/contrastive_basics/table1/smoke*/table1.json")
    return from_json(path.read_text())


def test_table1_has_printed_published_and_trained_rows(output):
    rows = {row.method: row for row in table(output).rows}
    printed = [f"{name}{prefix}" for name in ("FLAVA", "CLIP") for prefix in ("", ", captions with 'a photo of'")]
    assert list(rows) == [*printed, "BEiT-3", *TRAINED_HERE]
    assert rows["CLIP, captions with 'a photo of'"].paper["coco_i2t_r1"] == 58.4  # the printed row used a prefix
    assert rows["BEiT-3"].status.startswith("cited: needs weights of the 1.9 billion parameter model")
    assert rows["BEiT-3"].ours == rows["CLIP"].paper == rows["FLAVA, captions with 'a photo of'"].paper == {}
    assert "published; pictures by Pillow, crop to 32 px" in rows["CLIP"].note
    for name in TRAINED_HERE:
        cell = rows[name].ours["flickr_t2i_r5"]
        assert (cell.seeds, cell.scale) == ((0,), "smoke")
        assert not rows[name].paper


def test_our_cells_come_from_the_runs(output):
    (run,) = (output / "runs" / "contrastive_basics").glob("table1_ours-*/seed0/evaluation.json")
    metrics = json.loads(run.read_text())["evaluations"]["second_test"]["metrics"]
    row = next(row for row in table(output).rows if row.method == "CLIP-like, trained here")
    assert row.ours["coco_t2i_r5"].values == pytest.approx((100 * metrics["t2i_recall_at_5"],))
    published = sorted((output / "runs" / "contrastive_basics").glob("public_*/evaluation.json"))
    assert len(published) == 4  # two checkpoints, with and without prefix
    prefixes = [json.loads(run.read_text())["evaluations"]["test"]["protocol"]["caption_prefix"] for run in published]
    assert sorted(prefixes) == ["", "", "a photo of ", "a photo of "]


def test_rows_of_ours_are_an_experiment_that_claims_can_name(output):
    values = values_of(output / "results/contrastive_basics/table1/smoke/table1.json")
    row = next(row for row in table(output).rows if row.method == "token-wise late interaction")
    assert values["late_interaction_flickr_i2t_r1"] == row.ours["flickr_i2t_r1"].values
    assert table(output).experiment == "trained_here"
    assert {name.rsplit("_", 3)[0] for name in values} == {
        "ours", "fixed_temperature", "without_temperature", "class_tokens", "late_interaction", "beyond_sigmoid"
    }  # fmt: skip


def test_figures_2_and_3_measure_the_rows_of_the_table(output):
    folder, trained = output / "results" / "contrastive_basics", set(output.glob("runs/*/*/seed0"))
    for part in ("figure2", "figure3"):
        reproduce(output, part, *FAST)
    assert set(output.glob("runs/*/*/seed0")) == trained
    (ours,) = output.glob("runs/*/table1_ours-*/seed0/evaluation.json")
    tables = {
        part: from_json((folder / part / "smoke" / f"{part}.json").read_text()) for part in ("figure2", "figure3")
    }
    metrics = json.loads(ours.read_text())["evaluations"]["test"]["metrics"]
    assert all(table.data.startswith("scenes/train") for table in tables.values())
    (row,) = tables["figure3"].rows
    assert "The median of an even number of ranks is the lower of the two middle ones." in tables["figure3"].notes
    for direction in ("i2t", "t2i"):
        assert row.ours[f"{direction}_first"].values == pytest.approx((100 * metrics[f"{direction}_recall_at_1"],))
        assert row.ours[f"{direction}_among"].values == pytest.approx((100 * metrics[f"{direction}_recall_at_5"],))
        assert row.ours[f"{direction}_median"].values[0] in range(1, 61 if direction == "i2t" else 13)
    drawn = json.loads((folder / "figure2" / "smoke" / "figure2_batch_plotted.json").read_text())
    for row, line in zip(tables["figure2"].rows, drawn):  # 12 pictures: all that is drawn is all that is measured
        matrix = np.array(line["cosine"]).reshape(12, 12)
        assert row.method == line["temperature"]
        assert row.ours["pair_cosine"].values == pytest.approx((matrix.trace() / 12,), abs=1e-5)
        right = np.mean(matrix.argmax(axis=0) == np.arange(12))
        assert row.ours["nearest_t2i"].values == pytest.approx((100 * right,))


def test_no_path_of_a_checkpoint_gets_into_the_results(output, checkpoints):
    written = "".join(path.read_text() for path in output.glob("results/**/*.json"))
    assert all(text.partition("=")[2] not in written for text in checkpoints)
    assert "public.clip=<path>" in table(output).command


@pytest.fixture
def one_row(monkeypatch):
    first = {BEYOND[0]["method"]: BEYOND[0]["config"]}
    monkeypatch.setattr("contrastive_basics.reproduce._trained_rows", lambda source, command: first)


def test_a_second_call_trains_and_evaluates_nothing(output, checkpoints, one_row, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/**/evaluation.json")}
    reproduce(output, "table1", "--results", str(tmp_path), *FAST, *checkpoints)
    assert capsys.readouterr().out.count("found in") == 1
    assert {path: path.stat().st_mtime_ns for path in output.glob("runs/*/**/evaluation.json")} == before


def test_without_checkpoints_the_printed_rows_say_what_they_need(output, one_row, tmp_path):
    reproduce(output, "table1", "--results", str(tmp_path / "results"), *FAST)
    statuses = {row.method: row.status for row in table(tmp_path).rows}
    assert statuses["CLIP"] == statuses["FLAVA"] == "not run: needs published weights, MSCOCO and Flickr30k"
    assert statuses["CLIP-like, trained here"] == "measured"


def test_at_paper_scale_nothing_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("common.reproduce.command._print_claims", lambda *arguments: None)  # a second's work
    main(["table1", "--scale", "paper", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("results/contrastive_basics/table1/paper/table1.json")
    assert [row.method for row in from_json(path.read_text()).rows] == ["FLAVA", "CLIP", "BEiT-3"]
    assert not (tmp_path / "runs").exists()


def test_an_unknown_setting_of_the_public_section_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'public\.clipp'; .*did you mean public\.clip"):
        reproduce(tmp_path, "table1", "public.clipp=x")


def swept(folder, part, experiment):
    """Rows of a sweep's table by name, and the values of its experiment."""
    reproduce(folder, part)
    path = folder / "results" / "contrastive_basics" / part / "smoke" / f"{part}.json"
    written = from_json(path.read_text())
    assert written.experiment == experiment
    return {row.method: row for row in written.rows}, values_of(path)


def test_the_sweep_gives_a_table_curves_and_an_experiment(tmp_path):
    rows, values = swept(tmp_path, "negatives_sweep", "negatives_scenes")
    assert {name: row.note for name, row in rows.items()} == {
        "batch 32": "31 negatives a query, 8 steps",
        "batch 256": "255 negatives a query, 1 steps",
        "batch 32, queue 64": "up to 95 negatives a query, 8 steps",
    }
    assert values["queue_64_mean_recall"] == rows["batch 32, queue 64"].ours["mean_recall"].values
    assert {"batch_32_mean_recall", "batch_256_i2t_recall_at_1"} <= set(values)
    (plotted,) = tmp_path.glob("results/*/negatives_sweep/smoke/negatives_sweep_curves_plotted.json")
    assert "larger batches, fewer steps" in plotted.read_text()
    steps = [int(json.loads(path.read_text())["step"]) for path in tmp_path.glob("runs/*/*/*/evaluation.json")]
    assert sorted(steps) == [1, 8, 8]


def test_groups_change_the_number_of_negatives_and_nothing_else(tmp_path):
    rows, values = swept(tmp_path, "negatives_in_groups", "groups_scenes")
    assert {name: row.note for name, row in rows.items()} == {
        "batch 32, groups of 2": "1 negatives a query, 8 steps",
        "batch 32, groups of 32": "31 negatives a query, 8 steps",
    }
    assert {"group_2_mean_recall", "group_32_mean_recall"} <= set(values)
    logs = [path.read_text().splitlines() for path in tmp_path.glob("runs/*/*/*/log.jsonl")]
    first = sorted(next(record["loss"] for record in map(json.loads, lines) if "loss" in record) for lines in logs)
    assert first[0] < 2 < 3 < first[1] < 5  # near ln 2 times the scale's spread, and near ln 32


def test_batches_grow_with_steps_held_or_with_pairs_held_and_the_rate_adapted(tmp_path):
    _, values = swept(tmp_path, "negatives_by_batch", "by_batch_scenes")
    ran = {}
    for path in tmp_path.glob("runs/*/*/seed0/config.yaml"):
        optim = yaml.safe_load(path.read_text())["optim"]
        ran[optim["global_batch_size"], optim["steps"]] = optim["learning_rate"]
    at_32 = ran[32, 4]
    assert ran == pytest.approx({(16, 4): at_32, (32, 4): at_32, (16, 16): at_32 / 2**0.5, (32, 8): at_32})
    points = {name.removesuffix("_mean_recall") for name in values if name.endswith("mean_recall")}
    assert {name for name in points if not name.endswith("_second_test")} == {
        "steps_16", "steps_32", "rate_16", "rate_32",
    }  # fmt: skip


def test_every_run_of_a_sweep_sees_the_same_number_of_pairs():
    for sweep in SWEEPS.values():
        assert all(sweep.group_batch % group == 0 for group in sweep.groups)
        assert all(sweep.samples % batch == 0 for batch in (*sweep.batches, *sweep.rate_batches, sweep.queue_batch))
        assert sweep.queue_batch in sweep.batches  # the queue of size 0


def test_what_a_sweep_chooses_cannot_be_set_and_the_rest_can(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"optim\.steps=3 cannot be set: negatives_sweep chooses optim.steps, .*_size"
    ):
        reproduce(tmp_path, "negatives_sweep", "optim.steps=3")
    rate, reached = "optim.learning_rate=2e-3", []
    monkeypatch.setattr("contrastive_basics.negatives_sweep.run_rows", lambda jobs: reached.append(jobs) or 1 / 0)
    with pytest.raises(ConfigError, match=r"2e-3 cannot be set: negatives_by_batch chooses .*optim.learning_rate"):
        reproduce(tmp_path, "negatives_by_batch", rate)
    with pytest.raises(ZeroDivisionError):
        reproduce(tmp_path, "negatives_sweep", rate)
    assert all(rate in job.overrides for jobs in reached[0].values() for job in jobs)


def test_the_row_of_only_the_text_side_is_trained_where_there_is_a_stem(tmp_path, monkeypatch):
    asked, configs = {}, [row["config"] for row in BEYOND if "scales" not in row]
    monkeypatch.setattr("contrastive_basics.reproduce.train_rows", lambda command, code, configs: asked.update(configs))
    for scale, more in (("smoke", set()), ("photos", {"lit_ours.yaml"}), ("photos_scratch", set())):
        asked.clear()
        with pytest.raises(AttributeError):  # None: nothing was trained
            reproduce(tmp_path, "table1", "--scale", scale)
        assert set(asked.values()) == {*configs, *more}


def test_parts_that_train_have_nothing_at_paper_scale_and_say_so(tmp_path, capsys):
    for part in ("negatives_sweep", "self_supervised"):
        reproduce(tmp_path, part, "--scale", "paper", "--data", "/data")
        screen = capsys.readouterr().out
        assert f"{part} runs only at scale smoke, demo, photos" in screen
        assert ", not at paper: " in screen
    assert not list(tmp_path.glob("results/**/*.json"))
