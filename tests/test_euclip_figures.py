"""The traversal and distance parts of EuCLIP's reproduce.py at smoke scale, end to end, and their command lines."""

import json
import runpy
import sys

import numpy as np
import pytest
from PIL import Image
from plotted import read_plotted
from refusals import refused
from runs import values_of
from test_euclip_claims import columns_of_claims

from common.base.places import ROOT
from common.report.table import from_json
from euclip import distributions, figures, traverse
from euclip import traversal_tables as walk_tables
from euclip.config import Config, EvaluationData
from euclip.reproduce import CODE, main

WALK_PARTS = ("table2", "table3", "table6", "table7", "figure5")
DISTANCE_PARTS = ("figure2", "figure4", "figure6", "figure7", "figure8", "root_norms")


@pytest.fixture(scope="module")
def output(euclip):
    for part in (*WALK_PARTS, *DISTANCE_PARTS):
        euclip(part)
    return euclip.folder


def folder_of(output, part):
    return output / "results" / "euclip" / part / "smoke"


def table_of(output, part, name=None):
    return from_json((folder_of(output, part) / f"{name or part}.json").read_text(encoding="utf-8"))


def checkpoint_of(output, row):
    (folder,) = output.glob(f"runs/euclip/{row}-smoke-*/seed0/checkpoints/step-00000002")
    return folder


def test_printed_rows_stand_beside_ours_under_the_same_name(output):
    for part in (*WALK_PARTS, "root_norms"):
        printed = CODE.printed(part)
        rows = {row.method: row for row in table_of(output, part).rows}
        keys = [column["key"] for column in printed["columns"]]
        for row in printed["rows"]:
            assert dict(rows[row["method"]].paper) == dict(zip(keys, row["values"]))
            assert any(rows[row["method"]].ours.values()) == ("needs" not in row)
    assert set(walk_tables.ROWS) == {row.method for row in table_of(output, "table6").rows}


def test_table_6_and_the_experiment_say_the_same_and_come_with_the_order_of_the_walks(output):
    cells = {row.method: row.ours["mean_captions"] for row in table_of(output, "table6").rows}
    values = values_of(folder_of(output, "table6") / "traversal.json")
    for label, row in walk_tables.ROWS.items():
        assert values[f"{row.key}_captions"] == cells[label].values
        if cells[label].mean > 0:
            assert 0 <= values[f"{row.key}_true_share"][0] <= 1
    assert any(cell.mean > 0 for cell in cells.values())
    assert cells["EuCLIP, no filter"].interval is not None  # over pictures, of a single seed
    assert {row.method for row in table_of(output, "table6", "traversal").rows} == set(walk_tables.ROWS)


def test_at_no_scale_do_our_pictures_captions_and_draws_pass_for_the_papers(output):
    for part in WALK_PARTS:
        table = table_of(output, part)
        assert {column.stands_in_for for column in table.columns} == {"8 pictures of scenes/test, captions of 8 scenes"}
        assert ("CLIP normalised mean" in " ".join(table.notes)) == (part not in ("table3", "table7"))
    (column,) = table_of(output, "root_norms").columns
    assert column.stands_in_for == "scenes/train, all 24"


@pytest.mark.parametrize("name", ["figure2", "figure4", "figure6", "figure7", "traversal"])
def test_claims_name_only_what_the_experiments_hold(output, name):
    named, part = columns_of_claims(name), "table6" if name == "traversal" else name
    assert named
    assert named <= set(values_of(folder_of(output, part) / f"{name}.json"))
    assert table_of(output, part, name).data.startswith("scenes/train")


@pytest.mark.parametrize("part", ["table3", "table6"])  # 2 lists captions as 3 does, 7 has means as 6 has
def test_the_tables_walk_from_your_pictures_past_your_captions(part, output, euclip, tmp_path, monkeypatch):
    for name in ("collect_page", "plot_table"):  # those of the session's tables are there
        monkeypatch.setattr(f"common.reproduce.command.{name}", lambda *arguments, **words: None)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "captions.txt").write_text("a red circle\na blue square\n")
    files = [f"traversal.pictures={tmp_path / 'photos'}", f"traversal.captions={tmp_path / 'captions.txt'}"]
    few = ["--scale", "smoke", "--output", str(output), "--results", str(tmp_path), *euclip.overrides]
    main([part, *few, *files])
    (path,) = tmp_path.glob(f"euclip/{part}/smoke-*/{part}.json")
    table = from_json(path.read_text(encoding="utf-8"))
    assert {column.stands_in_for for column in table.columns} == {"3 pictures of photos, captions.txt"}
    cells = [cell for row in table.rows for cell in row.ours.values() if cell is not None]
    assert cells
    assert all(0 <= cell.mean <= 2 for cell in cells)
    assert str(tmp_path) not in table.command
    if part == "table3":
        assert [row.method for row in table.rows if row.ours] == [f"ours: {number}.png" for number in range(3)]
    refused(("nowhere: no such folder", lambda: main([part, *few, "traversal.pictures=nowhere"])))


def test_figure_5_shares_out_all_pictures_and_agrees_with_table_6(output):
    means = {row.method: row.ours["mean_captions"].mean for row in table_of(output, "table6").rows}
    for row in table_of(output, "figure5").rows:
        shares = [cell.mean for cell in row.ours.values()]
        assert sum(shares) == pytest.approx(100)
        if shares[-1] == 0:
            assert sum(number * share / 100 for number, share in enumerate(shares)) == pytest.approx(means[row.method])


def test_examples_name_the_captions_of_four_pictures(output):
    ours = [row for row in table_of(output, "table2").rows if row.method.startswith("ours")]
    assert len(ours) == 4
    for row in ours:
        for part in row.note.split(" | "):
            model, _, captions = part.partition(": ")
            number = 0 if captions == "only the root" else len(captions.split("; "))
            assert row.ours[model].mean == number


@pytest.mark.parametrize(
    ("part", "points", "panels"), [("figure2", 3, 3), ("figure4", 4, 4), ("figure6", 4, 4), ("figure8", 4, 4)]
)
def test_figures_draw_their_panels_and_claims_can_name_their_numbers(output, part, points, panels):
    table = table_of(output, part)
    assert len(table.rows) == points
    rows = read_plotted(folder_of(output, part) / f"{part}_distances.png")
    assert len({(row["panel"], row["x"]) for row in rows}) == panels
    assert {row["curve"] for row in rows} == {"image", "text"}
    assert (folder_of(output, part) / f"{part}_distances.png").stat().st_size > 1000
    assert (folder_of(output, part) / f"{part}_levels.png").stat().st_size > 1000
    for key, (value,) in values_of(folder_of(output, part) / f"{part}.json").items():
        if key.endswith(("overlap", "image_farther", "generic_nearer", "within_half")):
            assert 0 <= value <= 1


def test_figure_6_has_the_origin_above_the_mean_and_figure_2_gives_clip_its_mean(output):
    def panels(part):
        rows = read_plotted(folder_of(output, part) / f"{part}_distances.png")
        return list(dict.fromkeys((row["panel"], row["x"]) for row in rows))

    origin, mean = "geodesic distance from the origin", "geodesic distance from the mean"
    assert panels("figure6") == [(model, x) for x in (origin, mean) for model in ("MERU, lambda=0", "MERU")]
    assert ("CLIP", "scaled cosine distance from the mean") in panels("figure2")


def test_the_norms_of_the_mean_are_those_of_figure_7(output):
    norms = {row.method: row.ours["root_norm"].values for row in table_of(output, "root_norms").rows}
    values = values_of(folder_of(output, "figure7") / "figure7.json")
    assert norms["EuCLIP ViT-B/32"] == pytest.approx(values["euclip_origin_mean_norm"])
    assert norms["EuCLIP ViT-B/32, lambda=0"] == pytest.approx(values["euclip_lambda0_mean_mean_norm"])
    assert set(norms) == set(figures.ROOT_NORMS)


def test_traverse_writes_its_files_or_prints_the_table_of_a_checkpoint(output, tmp_path, capsys):
    checkpoint = str(checkpoint_of(output, "b16_meru"))
    few = ["--pictures", "3", "--steps", "10"]
    traverse.main(["--checkpoint", checkpoint, "--output", str(tmp_path), *few, "--min-radius", "0.1", "0.8"])
    content = json.loads((tmp_path / "traversal.json").read_text())
    assert [entry["min_radius"] for entry in content["filters"]] == [None, 0.1, 0.8]
    assert (content["num_pictures"], content["num_points"], content["root"]) == (3, 10, "the origin")
    captions = tmp_path / "captions.txt"
    captions.write_text("a red circle\na blue square\n")
    capsys.readouterr()
    traverse.main(["--checkpoint", str(checkpoint_of(output, "b16_clip")), "--captions", str(captions), *few])
    printed = capsys.readouterr().out
    assert "root: normalised mean of image and text embeddings of scenes/train, all 24" in printed
    assert "2: captions.txt" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere"], "checkpoint = nowhere: no such folder"),
        (["--checkpoint", "CLIP", "--min-radius", "0.1"], "'sphere' has no entailment cones"),
        (["--checkpoint", "CLIP", "--captions", "/dev/null"], "/dev/null holds no caption"),
        (["--checkpoint", "MERU", "--plain-mean"], "--plain-mean: the root of geometry 'hyperbolic' is the origin"),
        (
            ["--checkpoint", "MERU", "data.train=train_crowded"],
            r"data\.train=.*: the root of geometry 'hyperbolic' is the origin, no",
        ),
    ],
)
def test_traverse_says_what_it_cannot_use(output, arguments, message):
    models = {model: str(checkpoint_of(output, f"b16_{model.lower()}")) for model in ("CLIP", "MERU")}
    refused((message, lambda: traverse.main([models.get(word, word) for word in arguments])))


@pytest.mark.parametrize("script", ["traverse", "distributions"])
def test_entry_scripts_explain_errors_in_one_line(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--checkpoint", "nowhere", "--output", "nowhere"])
    monkeypatch.setattr(sys, "path", [str(ROOT / "euclip"), *sys.path[1:]])  # as when started by path
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "euclip" / f"{script}.py"), run_name="__main__")
    assert ended.value.code.startswith("error: checkpoint = nowhere: no such folder")
    assert "\n" not in ended.value.code


def test_distributions_of_a_checkpoint_from_the_command_line(output, tmp_path, capsys):
    checkpoint = str(checkpoint_of(output, "b16_euclip"))
    distributions.main(["--checkpoint", checkpoint, "--output", str(tmp_path), "--pictures", "6"])
    content = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "distances.json").read_text()) == content
    assert content["data"] == "scenes/train, 6 of 24 drawn at random"
    none = ["--checkpoint", checkpoint, "--output", str(tmp_path), "--pictures", "0"]
    refused(("--pictures 0; expected: at least 1", lambda: distributions.main(none)))


def test_photographs_with_a_hierarchy_are_preferred(data_dir):
    data = EvaluationData(
        source="shards",
        root=str(data_dir),
        train="flickr8k/flickr8k-val-*.tar",
        test="flickr8k/flickr8k-test-*.tar",
        second_test="coco_mini/coco-test-*.tar",
    )
    task = walk_tables.walk_task(Config(data=data))
    assert task.pool.name == "hierarchies of 60 pictures of coco-test"
    assert task.image_id(0).isdigit()
