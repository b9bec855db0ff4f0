"""Every table of the oblique paper at smoke scale, end to end; the cache; photographs; the wall between numbers."""

import contextlib
import importlib
import io
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from processes import as_launched, in_processes
from runs import values_of

from common.base.arguments import rows_of
from common.base.config import ConfigError
from common.base.places import PAPERS, ROOT
from common.report.table import QUERIES_INTERVAL, from_json
from common.reproduce.command import Command, _rows_of_names
from common.reproduce.rows import Job, is_missing, run_row
from common.reproduce.tables import note_of, train_rows
from common.run.folder import only_run_in
from geomm.reproduce import _config as config_of_geomm
from oblique_topology.reproduce import CODE, _note, main
from scripts.parts import described_rows, parts_of
from scripts.parts import main as parts_main

FEW = ["data.num_test=16", "data.num_labelled=8"]  # as the session's runs
pytestmark = pytest.mark.usefixtures("small_data_is_no_change")


@pytest.fixture(autouse=True)
def only_tables(monkeypatch):
    """Pictures, page and verdicts take most of a command that trains nothing; those of the session's runs are there."""
    monkeypatch.setattr("common.reproduce.command.collect_page", lambda roots, page: None)
    monkeypatch.setattr("common.reproduce.command.judge", lambda *results: None)
    monkeypatch.setattr("common.reproduce.command.plot_table", lambda *arguments, **words: None)
    monkeypatch.setattr("common.reproduce.tables.plot_training", lambda *arguments: None)


def reproduce(part, output, *more, seeds=2):
    main([part, "--scale", "smoke", "--seeds", str(seeds), "--output", str(output), *FEW, *more])


@pytest.fixture(scope="module")
def output(tmp_path_factory, oblique, small_data_is_no_change):
    """Table 2 of two seeds in a folder of its own, where runs may be changed; with pictures, page and verdicts."""
    oblique("table2", seeds=2)
    folder = tmp_path_factory.mktemp("outputs")
    for runs in oblique.folder.glob("runs/oblique_topology/table2_*"):
        if "embedding_dim: 32\n" in next(runs.glob("*/config.yaml")).read_text():  # Table 10's has 512
            shutil.copytree(runs, folder / "runs" / "oblique_topology" / runs.name)
    reproduce("table2", folder)
    return folder


def table_of(output, part):
    return from_json((output / "results" / "oblique_topology" / part / "smoke" / f"{part}.json").read_text())


def table(output):
    return table_of(output, "table2")


@pytest.mark.parametrize("paper", PAPERS)
def test_the_list_of_parts_is_that_of_the_code(paper):
    assert parts_of(paper) == list(importlib.import_module(f"{paper}.reproduce").PARTS)


def make(*arguments, **environment):
    """make in this folder, as a user calls it; it sets OMP_WAIT_POLICY itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_WAIT")}
    done = ["make", "--no-print-directory", *arguments]
    return subprocess.run(done, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=300)


def test_some_rows_of_a_table_are_trained_and_stand_beside_the_whole_table(output, capsys):
    whole = output / "results" / "oblique_topology" / "table2" / "smoke" / "table2.json"
    before = whole.read_bytes()
    reproduce("table2", output, "--rows", "table2_clip")
    screen = capsys.readouterr().out
    assert "table2_clip, seed 0: found in" in screen
    assert "table2_multi" not in screen
    assert "No claim is decided at scale smoke" in screen
    (path,) = whole.parent.parent.glob("smoke-*/table2.json")
    chosen = from_json(path.read_text())
    asked = "make reproduce-table2 PAPER=oblique_topology SCALE=smoke SEEDS=2"
    assert chosen.command.startswith(f'{asked} ROWS="table2_clip"')
    ours = {row.method: row for row in table(output).rows if row.ours}
    for row in chosen.rows:
        if row.method == "CLIP [our-impl.], ViT-B/16":
            assert row == ours[row.method]
        elif row.method in ours:
            assert (row.ours, row.status) == ({}, "not run: left out by the command")
    assert whole.read_bytes() == before


def test_in_tables_that_train_nothing_a_row_left_out_says_so_and_a_custom_row_is_never_left_out_in_silence(tmp_path):
    custom = tmp_path / "mine.yaml"
    custom.write_text("method: {geometry: sphere}\noptim: {weight_decay: 0.07}\n")
    reproduce("table5", tmp_path, "--rows", f"table2_clip {custom}")
    (path,) = tmp_path.glob("results/oblique_topology/table5/smoke-*/table5.json")
    *rows, row = from_json(path.read_text()).rows
    assert [row.status for row in rows] == ["measured", *["not run: left out by the command"] * 3]
    assert not any(any(row.ours.values()) for row in rows[1:])
    assert (row.method, row.paper, row.ours["weight_decay"].mean) == ("mine", {}, 0.07)
    reproduce("table7", tmp_path, "--rows", "table2_multi")
    (path,) = tmp_path.glob("results/oblique_topology/table7/smoke-*/table7.json")
    rows = from_json(path.read_text()).rows
    for status in ("not run: needs published weights", "not run: needs MSCOCO", "not run: left out by the command"):
        assert any(row.status.startswith(status) for row in rows), status
    assert not any(any(row.ours.values()) for row in rows)
    assert not list(tmp_path.glob("runs/oblique_topology/*"))  # neither table trains
    command = Command("figure4", "smoke", (0,), (), tmp_path, tmp_path, ("mine",), (custom,))
    with pytest.raises(ConfigError, match="ROWS=mine: figure4 takes no custom row; leave it out"):
        train_rows(command, CODE, {"a row": "table2_clip.yaml"})


@pytest.mark.parametrize(
    ("part", "row", "says"),
    [
        ("table2", "table2_mutli", "table2 trains no such row, .*; expected one of: table2_clip, table2_multi"),
        ("table4", "table2_clip", "table4 trains no such row, .*; expected one of: ablation_"),
        ("table10", "table2_multi", "table10 chooses its rows itself; leave ROWS out"),  # all rows are of one model
        ("figure4", "ablation_sphere_264", "figure4 chooses its rows itself; leave ROWS out"),
    ],
)
def test_rows_that_a_part_does_not_train_are_refused_before_anything_is_trained(part, row, says, tmp_path):
    with pytest.raises(ConfigError, match=f"ROWS={row}: {says}"):
        main([part, "--scale", "smoke", "--rows", row, "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_custom_row_in_configs_is_among_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.parts.ROOT", tmp_path)
    configs = tmp_path / "euclip" / "configs"
    configs.mkdir(parents=True)
    (configs / "my_row.yaml").write_text("method: {geometry: sphere}\n")
    for run in ("my_row-smoke-0a1b", "my_row-big-demo-0a1b"):  # the second is of another row, my_row-big
        (tmp_path / "runs" / "euclip" / run / "seed0").mkdir(parents=True)
        (tmp_path / "runs" / "euclip" / run / "seed0" / "evaluation.json").touch()
    assert described_rows("euclip", tmp_path) == [f"my_row  a custom row; in {tmp_path}: smoke seed0"]


def test_the_home_folder_of_outputs_and_of_a_custom_row_is_expanded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    evaluation = tmp_path / "runs/oblique_topology/table2_clip-smoke-0a1b/seed0/evaluation.json"
    evaluation.parent.mkdir(parents=True)
    evaluation.touch()
    parts_main("rows", "oblique_topology", "~")
    assert f"in {tmp_path}: smoke seed0" in capsys.readouterr().out
    (tmp_path / "mine.yaml").touch()
    of_rows = _rows_of_names(["~/mine.yaml"], ["a"], "t", "oblique_topology", {"tables": {}})
    assert of_rows == (("mine",), (tmp_path / "mine.yaml",))


def test_make_hands_on_what_was_typed_letter_by_letter(tmp_path):
    settings = {
        "--data": "/it's \"my\" $HOME/$(pictures) `a`", "--output": "o$x;u t", "--set": "data.train='a $b.tar' c=\"d\"",
        "--rows": "a b",
    }  # fmt: skip
    given = [f"{name.removeprefix('--').upper()}={value}" for name, value in settings.items()]
    show = "import json, sys; print(json.dumps(sys.argv[2:]))"
    done = make(f"PY={sys.executable} -c '{show}'", "reproduce", "SCALE=photos", *given)
    words = json.loads(done.stdout)
    assert {name: words[words.index(name) + 1] for name in settings} == settings


def test_settings_of_the_environment_are_named_and_change_nothing(tmp_path):
    plain = make("-n", "PY=python", "reproduce-table2")
    done = make("-n", "PY=python", "reproduce-table2", DATA="/x", SEEDS="9", OUTPUT=str(tmp_path), PAPER="euclip")
    assert (done.stdout, done.returncode) == (plain.stdout, 0)
    assert "PAPER SEEDS DATA OUTPUT from the environment: not used" in done.stderr
    assert not plain.stderr


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["OUTPUT="], {}), (["OUTPUT=/"], {}), (["OUTPUT=."], {}), (["OUTPUT=~"], {}), ([], {"OUTPUT": ""})],
)
def test_make_clean_refuses_a_folder_that_is_none_of_outputs(arguments, environment, tmp_path):
    (tmp_path / "rm").write_text("#!/bin/sh\necho REMOVED\n")  # in the place of rm, should clean not refuse
    (tmp_path / "rm").chmod(0o755)
    done = make("clean", *arguments, PATH=f"{tmp_path}:{os.environ['PATH']}", **environment)
    assert done.returncode != 0
    assert "OUTPUT" in done.stderr
    assert "REMOVED" not in done.stdout


def test_make_clean_removes_what_was_made_and_nothing_else(tmp_path):
    for name in ("runs/a", "results/b", "mine"):
        (tmp_path / "my outputs" / name).mkdir(parents=True)
    assert make("clean", "OUTPUT=~/my outputs", HOME=str(tmp_path)).returncode == 0
    assert [path.name for path in (tmp_path / "my outputs").iterdir()] == ["mine"]
    assert make("clean", f"OUTPUT={tmp_path}/none").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tset"], "make has no target tset; did you mean test?"),
        (["reproduce-table22"], "error: oblique_topology has no table22; did you mean table2?\n"),
        (["reproduce-figure8"], "error: oblique_topology has no figure8; expected PAPER=euclip\n"),
        (["rows", "PAPER=euclid"], "; did you mean euclip?"),
        (["reproduce-table2", "SEDS=3"], "no setting SEDS; expected one of: PAPER SCALE SEEDS"),
    ],
)  # fmt: skip
def test_what_make_does_not_know_has_a_nearest_and_installs_nothing(arguments, words, tmp_path):
    done = make(f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_lists_rows_with_what_they_are_and_whether_they_were_run(tmp_path):
    run = tmp_path / "runs" / "oblique_topology" / "table2_clip-demo-0123456789ab" / "seed1" / "evaluation.json"
    run.parent.mkdir(parents=True)
    run.touch()
    done = make("rows", f"PYTHON={sys.executable}", f"OUTPUT={tmp_path}")
    rows = {line.split()[0]: line.split("  ", 1)[1].strip() for line in done.stdout.split("\n\n")[0].splitlines()}
    assert set(rows) == set(rows_of(ROOT / "oblique_topology"))
    line = "Table 2, row CLIP [our-impl.] (ViT-B/16, 420M pairs); committed: results/oblique_topology/table2, "
    assert rows["table2_clip"] == f"{line}results/oblique_topology/further_sets; in {tmp_path}: demo seed1"


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_make_do_not_spin_while_they_wait_unless_the_user_says_so(given, policy):
    assert make("--eval", "show: ; @echo $$OMP_WAIT_POLICY", "show", **given).stdout == f"{policy}\n"


def test_table2_is_written_with_its_training_and_page(output):
    folder = output / "results" / "oblique_topology" / "table2" / "smoke"
    for name in ("table2.md", "table2_recalls.md", "table2_recalls.json", "table2_training.png"):
        assert (folder / name).stat().st_size > 100
    assert "table2" in (output / "report_oblique_topology.html").read_text(encoding="utf-8")


def test_our_cells_come_from_the_runs_and_stand_beside_what_was_trained_and_printed(output):
    rows = {row.method: row for row in table(output).rows}
    for method, name, structure, column, printed in (
        ("CLIP [our-impl.], ViT-B/16", "clip", "Sphere(32)", "in_acc1", 69.5),
        ("CLIP [Multi(32, 16)], ViT-B/16", "multi", "Multi(2, 16)", "coco_t2i_r1", 42.9),
    ):
        row = rows.pop(method)
        files = (output / "runs" / "oblique_topology").glob(f"table2_{name}-*/seed*/evaluation.json")
        runs = sorted(files, key=lambda file: file.parent.name)  # each seed has a hash of its own
        assert len(runs) == 2
        results = [json.loads(run.read_text())["evaluations"]["test"]["metrics"] for run in runs]
        cell = row.ours["flickr_i2t_r1"]
        assert cell.values == pytest.approx(tuple(100 * result["i2t_recall_at_1"] for result in results))
        assert (cell.seeds, cell.scale) == ((0, 1), "smoke")
        assert cell.data.startswith("scenes/test (")
        assert cell.interval is not None
        assert cell.chance == pytest.approx(100 / 16)
        assert row.note.startswith(f"ours: {structure}; ViT width 32")
        assert row.paper[column] == printed
    assert all(cell is None for row in rows.values() for cell in row.ours.values())


def test_a_row_says_what_its_towers_stand_on():
    words = Command("table2", "photos", (0,), (), Path("out"), Path("out"))
    assert "2 layers on tf_efficientnet_lite0 (frozen; its pre-training" in note_of(words, "table2_clip.yaml", CODE)
    assert "text width 192, 2 layers; embedding" in note_of(words, "table2_clip.yaml", CODE)
    bert = replace(words, overrides=("model.text.stem.weights=a/mini", "model.text.layers=0"))
    assert "text: a mean on mini (frozen; its pre-training" in note_of(bert, "table2_clip.yaml", CODE)


def test_the_final_temperature_is_written_for_the_claim_that_names_it(output):
    values = values_of(output / "results/oblique_topology/table2/smoke/table2_temperature.json")
    shown = (output / "results/oblique_topology/table2/smoke/table2_temperature.md").read_text("utf-8")
    assert "| CLIP, ViT 32 x 1, 32 px " in shown  # the model that ran
    assert "ViT-B/16" not in shown
    assert set(values) == {"clip", "multi_32_16"}
    assert all(1 < value <= 3.95 for value in values["multi_32_16"])
    assert all(13 < value < 16 for value in values["clip"])


def again(output, *more, row="table2_clip", seed=0):
    return run_row(Job(CODE, f"{row}.yaml", "smoke", seed, (*FEW, *more), output / "runs"))


def test_a_second_call_trains_nothing_and_an_override_trains_another_run(output, capsys):
    experiment = output / "results/oblique_topology/table2/smoke/table2_temperature.json"
    before = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/evaluation.json")}
    held = again(output).files
    capsys.readouterr()
    with only_run_in(held):  # another process reads or trains there; what is finished may be read
        reproduce("table2", output, "--rows", "table2_multi table2_clip table2_clip")  # all rows are the whole table
    assert capsys.readouterr().out.count("found in") == 4
    asked = f'make reproduce-table2 PAPER=oblique_topology SCALE=smoke SEEDS=2 SET="{" ".join(FEW)}"'
    assert table(output).command == asked
    held.evaluation.rename(held.folder / "kept.json")  # no longer finished
    with only_run_in(held), pytest.raises(ConfigError, match="another process trains in"):
        again(output)
    (held.folder / "kept.json").rename(held.evaluation)
    assert {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/evaluation.json")} == before
    unchanged = experiment.read_bytes()
    reproduce("table2", output, "optim.steps=3", "--rows", "table2_clip", seeds=1)
    assert experiment.read_bytes() == unchanged
    assert len(list(output.glob("runs/*/*/*/evaluation.json"))) == len(before) + 1
    assert table(output).command == asked  # a changed row does not write over the unchanged one
    changed = [
        from_json(path.read_text()) for path in output.glob("results/oblique_topology/table2/smoke-*/table2.json")
    ]
    (one_seed,) = [table for table in changed if "optim.steps=3" in table.command]
    (cell,) = one_seed.measured("flickr_mean")
    assert cell.interval_kind == QUERIES_INTERVAL
    assert cell.interval[0] < cell.mean < cell.interval[1]
    assert 1 < cell.interval[1] - cell.interval[0] < 60  # percent, from 16 pictures


def test_other_test_data_and_a_lost_or_foreign_evaluation_are_evaluated_again_without_training(output, capsys):
    clip, multi = (again(output, row=row) for row in ("table2_clip", "table2_multi"))
    weights = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/checkpoints/*/*")}
    shutil.copy(multi.files.evaluation, clip.files.evaluation)
    (clip.files.folder / "diverged.json").write_text('{"err')
    run = again(output)
    assert (run.evaluations, run.hits) == (clip.evaluations, clip.hits)
    assert again(output, "data.num_test=8").evaluations["test"]["protocol"]["num_images"] == 8
    clip.files.hits.unlink()
    assert again(output).evaluations == clip.evaluations
    assert capsys.readouterr().out.count("evaluating the checkpoint again") == 3
    assert {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/checkpoints/*/*")} == weights


def test_one_call_measures_on_other_test_and_validation_sets_without_training(output):
    settings = ("optim.steps=2", "optim.warmup_steps=1", "run.evaluate_every=2")
    weights = again(output, *settings).files.checkpoints
    before = {path: path.stat().st_mtime_ns for path in weights.rglob("model.safetensors")}
    others = (*settings, "data.num_test=8", "data.num_val=9")
    assert again(output, *others).evaluations["test"]["protocol"]["num_images"] == 8
    assert not is_missing(Job(CODE, "table2_clip.yaml", "smoke", 0, (*FEW, *others), output / "runs"))
    assert {path: path.stat().st_mtime_ns for path in weights.rglob("model.safetensors")} == before


def test_swapped_and_copied_seeds_are_refused(output):
    seeds = [again(output, seed=seed).files.folder for seed in (0, 1)]
    aside = seeds[0].with_name("aside")

    def swap():
        for one, other in ((seeds[0], aside), (seeds[1], seeds[0]), (aside, seeds[1])):
            one.rename(other)

    swap()
    with pytest.raises(ConfigError, match=r"seed0 holds a run of another config: run\.seed 1 -> 0"):
        again(output)
    swap()
    seeds[1].rename(aside)
    shutil.copytree(*seeds)
    with pytest.raises(ConfigError, match=r"seed1 holds a run of another config: run\.seed 0 -> 1"):
        again(output, seed=1)
    shutil.rmtree(seeds[1])
    aside.rename(seeds[1])


@pytest.mark.parametrize(
    ("torn", "reason"),
    [
        (lambda whole: whole[: len(whole) // 2], "does not go on to step 6"),
        (lambda whole: b"\xff" * 9 + whole, "line 1 is no record"),
        (lambda whole: None, "No such file"),
    ],
)
def test_a_finished_run_whose_log_is_torn_is_refused_with_the_folder_to_remove(output, torn, reason):
    log = again(output).files.log
    whole = log.read_bytes()
    log.unlink()
    if torn(whole) is not None:
        log.write_bytes(torn(whole))
    with pytest.raises(ConfigError, match=rf"{reason}.*remove .*seed0 to train again"):
        again(output)
    log.write_bytes(whole)


def test_photographs_in_shards_give_the_same_table(data_dir, tmp_path):
    folder = tmp_path / "labelled/cifar10"
    for number in range(10):
        (folder / "test" / f"class{number}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (25 * number, 0, 0)).save(folder / "test" / f"class{number}" / "a.png")
    (folder / "classnames.txt").write_text("".join(f"thing{number}\n" for number in range(10)))
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {}.\n")
    root = str(data_dir / "flickr8k")
    settings = [
        "--scale", "photos_scratch", "--data", root, "--rows", "table2_clip", "--output", str(tmp_path),
        "optim.steps=2", "optim.global_batch_size=32", "model.image.width=32", "model.text.width=32",
        "model.image.heads=2", "model.text.heads=2", "model.image.layers=1", "model.text.layers=1",
        "run.num_workers=0", "run.evaluate_every=0", "optim.warmup_steps=1",
        "data.train=flickr8k-val-*.tar", "run.save_every=0", "data.image_size=32",
        "run.mixed_precision=no",  # of one process there is one precision
        f"data.labelled={tmp_path / 'labelled'}",
    ]  # fmt: skip

    def measured(part):
        main([part, *settings])
        (written,) = tmp_path.glob(f"results/oblique_topology/{part}/photos_scratch-*/{part}.json")
        table = from_json(written.read_text())
        assert root not in json.dumps(table.command)
        (cells,) = (row.ours for row in table.rows if row.status == "measured")
        return cells

    cells = measured("table2")
    assert cells["in_acc1"] is None
    assert cells["flickr_t2i_r1"].data.startswith("flickr8k-test (")
    assert cells["flickr_t2i_r1"].chance == pytest.approx(0.1)
    assert "num_images 1000, num_texts 5000" in cells["flickr_t2i_r1"].protocol
    cells = measured("further_sets")
    assert cells["cifar10"].data.startswith("cifar10 (")
    assert cells["cifar10"].mean % 10 == pytest.approx(0)
    assert cells["cifar10"].chance == pytest.approx(10)
    assert cells["food101"] is None


CROPPED = "optim.steps=2 'data.crop_scale=[0.5, 1]'"


def test_the_command_that_make_shows_writes_the_table_and_a_page_with_all_that_is_committed(
    tmp_path, monkeypatch, capsys
):
    """In this process, which has the imports."""
    shown = make("-n", "PY=python", "reproduce-table5", "SCALE=smoke", f"OUTPUT={tmp_path}", f"SET={CROPPED}").stdout
    python, script, *arguments = shlex.split(shown.splitlines()[-1])
    assert python == "python"
    pages = []
    monkeypatch.setattr("common.reproduce.command.collect_page", lambda roots, page: pages.append((roots[0], page)))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path[1:]])
    monkeypatch.chdir(ROOT)
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    assert "scale smoke, seed 0\n" in printed
    assert " seeds 0" not in printed
    assert "table5 of Design of the topology" in printed.lstrip().splitlines()[0]
    (path,) = tmp_path.glob("results/oblique_topology/table5/smoke-*/table5.json")
    assert from_json(path.read_text()).command.endswith(f' SET="{CROPPED}"')
    assert pages == [(ROOT / "results", tmp_path / "report.html")]


def table5_printed(folder):
    as_launched()
    for name in ("collect_page", "_print_claims", "plot_table"):  # they read all committed results, or draw
        setattr(sys.modules[Command.__module__], name, lambda *arguments, **words: None)
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        main(["table5", "--scale", "smoke", "--output", str(folder)])
    return screen.getvalue()


def test_two_processes_write_a_table_that_trains_nothing_once(tmp_path):
    first, second = in_processes(2, table5_printed, tmp_path)
    assert first.count("scale smoke, seed 0") == first.count("tables and figures:") == 1
    assert second == ""
    assert table_of(tmp_path, "table5").rows


def stale_run_as_seen_by_training(folder):
    """Whether its old checkpoints are there when a stale run is trained again."""
    as_launched()
    module, seen = sys.modules[run_row.__module__], []
    set_aside = module.set_aside_if_stale
    module.set_aside_if_stale = lambda files: (time.sleep(1), set_aside(files))
    module.read_run = lambda files, config: None
    code = replace(CODE, train=lambda config, pairs, files, *more: seen.append(files.checkpoints.is_dir()))
    run_row(Job(code, "table2_clip.yaml", "smoke", 0, (), folder))
    return seen


def test_a_stale_run_is_set_aside_before_any_process_trains_it_again(tmp_path):
    files = Job(CODE, "table2_clip.yaml", "smoke", 0, (), tmp_path).opened()[2]
    files.checkpoints.mkdir(parents=True)
    files.dependencies.write_text(json.dumps({"common/no_such_file.py": "0123456789ab"}))
    assert in_processes(2, stale_run_as_seen_by_training, tmp_path) == [[False], [False]]


@pytest.mark.parametrize(
    ("paper", "part"),
    [
        ("contrastive_basics", "collapse"),
        ("contrastive_basics", "negatives"),
        ("geomm", "table6"),
        ("geomm", "table7a"),
        ("oblique_topology", "low_precision"),
    ],
)
def test_a_part_that_measures_on_one_process_what_gathers_refuses_several(tmp_path, monkeypatch, paper, part):
    monkeypatch.setattr("common.reproduce.command.world_size", lambda: 2, raising=False)
    with pytest.raises(ConfigError, match=f"{part} measures on one process; start it without accelerate launch"):
        importlib.import_module(f"{paper}.reproduce").main([part, "--scale", "smoke", "--output", str(tmp_path)])


def test_the_note_of_a_row_states_how_fast_the_temperature_learns_where_that_is_not_as_the_weights():
    demo, paper = (
        _note(Command("table2", scale, (0,), (), Path("out"), Path("out")), "table2_clip.yaml")
        for scale in ("demo", "paper")
    )
    assert demo.endswith("; the temperature learns 30 times as fast as the weights")
    assert "temperature" not in paper


def test_the_note_of_a_searched_row_states_the_searched_steps_and_table_7_goes_from_the_searched_graph():
    searched = {"table2_clip": ("optim.steps=77",), "clip_geo": ("method.num_neighbors=7",)}
    command = Command("table6", "demo", (0,), (), Path("out"), Path("out"), searched=searched)
    assert "; 77 steps of 256 pairs" in _note(command, "table2_clip.yaml")
    assert config_of_geomm(command, "clip_geo.yaml").method.num_neighbors == 7


def test_no_path_of_a_machine_gets_into_a_committed_command(tmp_path):
    command = Command(
        "table2", "photos", (0,), ("data.root=/a/b", "data.second_test=/c/d.tar", "run.seed=1"), tmp_path, tmp_path
    )
    assert command.text("oblique_topology") == (
        "make reproduce-table2 PAPER=oblique_topology SCALE=photos SEEDS=1 DATA=<folder> "
        'SET="data.second_test=<path> run.seed=1"'
    )


def test_another_validation_set_is_measured_and_nothing_is_trained(tmp_path):
    job = Job(CODE, "ablation_sphere_264.yaml", "smoke", 0, ("run.evaluate_every=6",), tmp_path)
    before = run_row(job)
    other = run_row(job._replace(overrides=(*job.overrides, "data.num_val=16")))
    assert other.files.folder == before.files.folder
    assert before.validation != other.validation
    assert before.evaluations["test"]["metrics"] == other.evaluations["test"]["metrics"]
    assert run_row(job).validation == before.validation
