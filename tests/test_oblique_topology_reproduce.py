"""Every table of the oblique paper at smoke scale, end to end; the cache; photographs; the wall between numbers."""

import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from processes import as_launched, in_processes

from common.base.arguments import rows_of
from common.base.config import ConfigError
from common.report.experiments import read_experiment
from common.report.table import QUERIES_INTERVAL, from_json
from common.reproduce.command import Command
from common.reproduce.rows import Job, run_row
from common.reproduce.tables import note_of, train_rows
from common.run.folder import RunFiles, only_run_in
from oblique_topology.reproduce import CODE, PARTS, _note, main
from scripts.parts import described_rows, parts_of

ROOT = Path(__file__).resolve().parents[1]


FEW = ["data.num_test=16", "data.num_labelled=8"]  # as the session's runs


def no_page_and_no_verdicts(patch):
    """Half of a command that trains nothing; the session's runs have their verdicts."""
    patch.setattr("common.reproduce.command.collect_page", lambda roots, page: None)
    patch.setattr("common.reproduce.command.judge", lambda *results: None)


@pytest.fixture
def tables_alone(monkeypatch):
    no_page_and_no_verdicts(monkeypatch)


def reproduce(part, output, *more, seeds=2, with_page=False):
    """A part on fewer pictures, which are no change of the paper's table."""
    real = Command.changes.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Command, "changes", property(lambda self: [text for text in real(self) if text not in FEW]))
        if not with_page:
            no_page_and_no_verdicts(patch)
        main([part, "--scale", "smoke", "--seeds", str(seeds), "--output", str(output), *FEW, *more])


@pytest.fixture(scope="module")
def output(tmp_path_factory, oblique):
    """Table 2 of two seeds in a folder of its own, where runs may be changed."""
    oblique("table2", seeds=2)
    folder = tmp_path_factory.mktemp("outputs")
    for runs in oblique.folder.glob("runs/oblique_topology/table2_*"):
        if "embedding_dim: 32\n" in next(runs.glob("*/config.yaml")).read_text():  # Table 10's has 512
            shutil.copytree(runs, folder / "runs" / "oblique_topology" / runs.name)
    reproduce("table2", folder, with_page=True)
    return folder


def table_of(output, part):
    return from_json((output / "results" / "oblique_topology" / part / "smoke" / f"{part}.json").read_text())


def table(output):
    return table_of(output, "table2")


def test_the_list_of_parts_is_that_of_the_code():
    assert parts_of("oblique_topology") == list(PARTS)


def make(*arguments, **environment):
    """make in this folder, as a user calls it; it is not told that a make may have started these tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "OMP_WAIT"))}
    done = ["make", "--no-print-directory", *arguments]
    return subprocess.run(done, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=300)


def test_make_refuses_an_unknown_part_before_it_installs_anything(tmp_path):
    done = make(f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", "reproduce-table22")
    assert done.returncode != 0
    assert "error: oblique_topology has no table22; did you mean table2?\n" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_some_rows_of_a_table_are_trained_and_stand_beside_the_whole_table(output, capsys):
    whole = output / "results" / "oblique_topology" / "table2" / "smoke" / "table2.json"
    before = whole.read_bytes()
    reproduce("table2", output, "--rows", "table2_clip")
    screen = capsys.readouterr().out
    assert "table2_clip, seed 0: found in" in screen
    assert "table2_multi" not in screen
    assert "Claims are not judged by changed rows" in screen
    (path,) = whole.parent.parent.glob("smoke-*/table2.json")
    chosen = from_json(path.read_text())
    asked = "make reproduce-table2 PAPER=oblique_topology SCALE=smoke SEEDS=2"
    assert chosen.command.startswith(f'{asked} ROWS="table2_clip"')
    ours = {row.method: row for row in table(output).rows if row.ours}
    for row in chosen.rows:
        if row.method == "CLIP [our-impl.], ViT-B/16":
            assert row == ours[row.method]
        elif row.method in ours:
            assert (row.ours, row.status) == ({}, "not run: not among ROWS")
    assert whole.read_bytes() == before

    every = "table2_multi table2_clip table2_clip"
    reproduce("table2", output, "--rows", every)
    assert from_json(whole.read_text()).command == f'{asked} SET="{" ".join(FEW)}"'
    assert list(whole.parent.parent.glob("smoke-*/table2.json")) == [path]


@pytest.mark.parametrize(
    ("part", "row", "statuses"),
    [
        ("table5", "table2_clip", ["measured", *["not run: not among ROWS"] * 3]),
        ("table7", "table2_multi", ["not run: needs published weights", "not run: needs MSCOCO", "not run: not among"]),
    ],
)
@pytest.mark.usefixtures("tables_alone")
def test_a_row_left_out_and_one_that_needs_something_say_so_in_every_table(part, row, statuses, tmp_path):
    main([part, "--scale", "smoke", "--rows", row, "--output", str(tmp_path), *FEW])
    (path,) = tmp_path.glob(f"results/oblique_topology/{part}/smoke-*/{part}.json")
    table = from_json(path.read_text())
    assert len(table.rows) >= len(statuses)
    for status in dict.fromkeys(statuses):
        times = sum(row.status.startswith(status) for row in table.rows)
        assert times == statuses.count(status) if part != "table7" else times >= 1, status
    assert {row.status for row in table.rows if any(row.ours.values())} <= {"measured"}
    assert not list(tmp_path.glob("runs/oblique_topology/*"))  # neither table trains


@pytest.mark.parametrize(
    ("part", "row", "accepted"),
    [
        ("table2", "table2_mutli", "table2_clip, table2_multi"),
        ("table4", "table2_clip", "ablation_"),
        ("table10", "table2_multi", "none"),  # all its rows are of one model
        ("figure4", "ablation_sphere_264", "none"),
    ],
)
def test_rows_that_a_part_does_not_train_are_refused_before_anything_is_trained(part, row, accepted, tmp_path):
    with pytest.raises(ConfigError, match=rf"ROWS={row}: {part} trains no such row.*; expected one of: {accepted}"):
        main([part, "--scale", "smoke", "--rows", row, "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tables_alone")
def test_a_custom_row_stands_in_the_tables_of_settings_too_and_is_never_left_out_in_silence(tmp_path):
    custom = tmp_path / "mine.yaml"
    custom.write_text("method: {geometry: sphere}\noptim: {weight_decay: 0.07}\n")
    main(["table5", "--scale", "smoke", "--rows", str(custom), "--output", str(tmp_path)])
    (path,) = tmp_path.glob("results/oblique_topology/table5/smoke-*/table5.json")
    row = from_json(path.read_text()).rows[-1]
    assert (row.method, row.paper, row.ours["weight_decay"].mean) == ("mine", {}, 0.07)
    command = Command("figure4", "smoke", (0,), (), tmp_path, tmp_path, ("mine",), (custom,))
    with pytest.raises(ConfigError, match="ROWS=mine: figure4 takes no custom row; leave it out"):
        train_rows(command, CODE, {"a row": "table2_clip.yaml"})


def test_a_custom_row_in_configs_is_among_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.parts.ROOT", tmp_path)
    configs = tmp_path / "euclip" / "configs"
    configs.mkdir(parents=True)
    (configs / "my_row.yaml").write_text("method: {geometry: sphere}\n")
    assert described_rows("euclip", tmp_path) == ["my_row  a custom row"]


def test_make_hands_a_part_to_this_paper():
    for part in ("table2", "temperature_rate"):
        done = make("-n", "PY=python", f"reproduce-{part}", "SCALE=smoke", "DATA=/a b", "ROWS=a b")
        words = shlex.split(done.stdout)
        at = words.index("scripts/reproduce.py") + 1
        assert words[at : at + 6] == ["oblique_topology", part, "--scale", "smoke", "--seeds", "1"]
        assert words[words.index("--data") :][:4] == ["--data", "/a b", "--rows", "a b"]


def test_make_hands_on_what_was_typed_letter_by_letter(tmp_path):
    settings = {
        "--data": "/it's \"my\" $HOME/$(pictures) `a`", "--output": "o$x;u t", "--set": "data.train='a $b.tar' c=\"d\""
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
    ("arguments", "environment"), [(["OUTPUT="], {}), (["OUTPUT=/"], {}), (["OUTPUT=."], {}), ([], {"OUTPUT": ""})]
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
    assert make("clean", f"OUTPUT={tmp_path}/my outputs").returncode == 0
    assert [path.name for path in (tmp_path / "my outputs").iterdir()] == ["mine"]
    assert make("clean", f"OUTPUT={tmp_path}/none").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tset"], "make has no target tset; did you mean test?"),
        (["reproduce-table", "PAPER=geomm"], "error: geomm has no table; did you mean table1, table2 or table3?\n"),
        (["reproduce-figure8"], "error: oblique_topology has no figure8; expected PAPER=euclip\n"),
        (["rows", "PAPER=euclid"], "; did you mean euclip?"),
        (["reproduce-table2", "SEDS=3"], "no setting SEDS; expected one of: PAPER SCALE SEEDS"),
    ],
)  # fmt: skip
def test_what_make_does_not_know_has_a_nearest(arguments, words):
    done = make(f"PYTHON={sys.executable}", *arguments)
    assert done.returncode != 0
    assert words in done.stderr


def test_make_lists_rows_with_what_they_are_and_whether_they_were_run(tmp_path):
    run = tmp_path / "runs" / "oblique_topology" / "table2_clip-demo-0123456789ab" / "seed1" / "evaluation.json"
    run.parent.mkdir(parents=True)
    run.touch()
    done = make("rows", f"PYTHON={sys.executable}", f"OUTPUT={tmp_path}")
    rows = {line.split()[0]: line.split("  ", 1)[1].strip() for line in done.stdout.split("\n\n")[0].splitlines()}
    assert set(rows) == set(rows_of(ROOT / "oblique_topology"))
    line = "Table 2, row CLIP [our-impl.] (ViT-B/16, 420M pairs); committed: results/oblique_topology/table2, "
    assert rows["table2_clip"] == f"{line}results/oblique_topology/further_sets; in {tmp_path}: demo seed1"
    assert "not run" in make("rows", f"PYTHON={sys.executable}", "PAPER=euclip").stdout


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_make_do_not_spin_while_they_wait_unless_the_user_says_so(given, policy):
    assert make("--eval", "show: ; @echo $$OMP_WAIT_POLICY", "show", **given).stdout == f"{policy}\n"


def test_table2_is_written_with_its_training_and_page(output):
    folder = output / "results" / "oblique_topology" / "table2" / "smoke"
    for name in ("table2", "table2_recalls"):
        for ending in ("md", "json"):
            assert (folder / f"{name}.{ending}").stat().st_size > 100
    assert (folder / "table2_training.png").stat().st_size > 1000
    assert "table2" in (output / "report_oblique_topology.html").read_text(encoding="utf-8")


def test_our_cells_come_from_the_runs_and_carry_seeds_scale_and_data(output):
    ours = {row.method: row.ours for row in table(output).rows}
    for method, name in (("CLIP [our-impl.], ViT-B/16", "clip"), ("CLIP [Multi(32, 16)], ViT-B/16", "multi")):
        cells = ours.pop(method)
        runs = sorted((output / "runs" / "oblique_topology").glob(f"table2_{name}-*/seed*/evaluation.json"))
        assert len(runs) == 2
        results = [json.loads(run.read_text())["evaluations"]["test"]["metrics"] for run in runs]
        cell = cells["flickr_i2t_r1"]
        assert cell.values == pytest.approx(tuple(100 * result["i2t_recall_at_1"] for result in results))
        assert (cell.seeds, cell.scale) == ((0, 1), "smoke")
        assert cell.data.startswith("scenes/test (")
        assert cell.interval is not None
        assert cell.chance == pytest.approx(100 / 16)
    assert all(cell is None for cells_of_others in ours.values() for cell in cells_of_others.values())


def test_a_row_says_which_structure_was_trained(output):
    notes = {row.method: row.note for row in table(output).rows}
    assert notes["CLIP [our-impl.], ViT-B/16"].startswith("ours: Sphere(32); ViT width 32")
    assert notes["CLIP [Multi(32, 16)], ViT-B/16"].startswith("ours: Multi(2, 16); ViT width 32")


def test_a_row_says_what_its_towers_stand_on():
    words = SimpleNamespace(scale="photos", overrides=())
    assert "2 layers on tf_efficientnet_lite0 (frozen; its pre-training" in note_of(words, "table2_clip.yaml", CODE)
    assert "text width 192, 2 layers; embedding" in note_of(words, "table2_clip.yaml", CODE)
    bert = SimpleNamespace(scale="photos", overrides=("model.text.stem.weights=a/mini", "model.text.layers=0"))
    assert "text: a mean on mini (frozen; its pre-training" in note_of(bert, "table2_clip.yaml", CODE)


def test_the_final_temperature_is_written_for_the_claim_that_names_it(output):
    experiment = read_experiment(output / "results/oblique_topology/experiments/smoke/final_temperature.json")
    assert set(experiment.values) == {"clip", "multi_32_16"}
    assert all(1 < value <= 3.95 for value in experiment.values["multi_32_16"])
    assert all(13 < value < 16 for value in experiment.values["clip"])


def test_the_papers_numbers_are_those_printed(output):
    paper = {row.method: row.paper for row in table(output).rows}
    assert paper["CLIP [our-impl.], ViT-B/16"]["in_acc1"] == 69.5
    assert paper["CLIP [Multi(32, 16)], ViT-B/16"]["coco_t2i_r1"] == 42.9


def test_a_second_call_trains_nothing_and_an_override_trains_another_run(output, capsys):
    experiment = output / "results/oblique_topology/experiments/smoke/final_temperature.json"
    before = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/evaluation.json")}
    held = RunFiles(next(iter(before)).parent)
    with only_run_in(held):  # another process reads or trains there; what is finished may be read
        reproduce("table2", output)
    assert capsys.readouterr().out.count("found in") == 4
    held.evaluation.rename(held.folder / "kept.json")  # no longer finished
    with only_run_in(held), pytest.raises(ConfigError, match="another process trains in"):
        reproduce("table2", output)
    (held.folder / "kept.json").rename(held.evaluation)
    assert {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/evaluation.json")} == before
    unchanged = experiment.read_bytes()
    reproduce("table2", output, "optim.steps=3", seeds=1)
    assert experiment.read_bytes() == unchanged
    assert len(list(output.glob("runs/*/*/*/evaluation.json"))) == len(before) + 2
    assert "optim.steps=3" not in table(output).command  # a changed row does not write over the unchanged one
    changed = [
        from_json(path.read_text()) for path in output.glob("results/oblique_topology/table2/smoke-*/table2.json")
    ]
    (one_seed,) = [table for table in changed if "optim.steps=3" in table.command]
    for cell in one_seed.measured("flickr_mean"):
        assert cell.interval_kind == QUERIES_INTERVAL
        assert cell.interval[0] < cell.mean < cell.interval[1]
        assert 1 < cell.interval[1] - cell.interval[0] < 60  # percent, from 16 pictures


def again(output, *more, row="table2_clip", seed=0):
    return run_row(Job(CODE, f"{row}.yaml", "smoke", seed, (*FEW, *more), output / "runs"))


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
        (lambda whole: b"\xff" * 9 + whole, "line 1 is no JSON"),
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


def test_a_damaged_last_checkpoint_is_trained_again_from_the_one_before(output, capsys):
    for path in output.glob("runs/*/*/seed0/evaluation.json"):
        path.unlink()
    for path in output.glob("runs/*/*/seed0/checkpoints/step-00000006/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="damaged"):
        reproduce("table2", output, seeds=1)
    for path in output.glob("runs/*/table2_clip-smoke-*/seed0/evaluation.json"):
        assert json.loads(path.read_text())["step"] in (6, 2)


def test_photographs_in_shards_give_the_same_table(data_dir, tmp_path):
    small = [
        "optim.steps=4", "optim.global_batch_size=32", "model.image.width=32", "model.text.width=32",
        "model.image.heads=2", "model.text.heads=2", "model.image.layers=1", "model.text.layers=1",
        "run.num_workers=0", "run.evaluate_every=0", "optim.warmup_steps=1",
        "data.train=flickr8k-val-*.tar", "run.save_every=0", "data.image_size=32",
        "run.mixed_precision=no",  # of one process there is one precision
    ]  # fmt: skip
    root = str(data_dir / "flickr8k")
    photos = ["--scale", "photos_scratch", "--data", root, "--rows", "table2_clip", "--output", str(tmp_path)]
    main(["table2", *photos, *small])
    (written,) = tmp_path.glob("results/oblique_topology/table2/photos_scratch-*/table2.json")
    result = from_json(written.read_text())
    (cells,) = (row.ours for row in result.rows if row.status == "measured")
    assert cells["in_acc1"] is None
    assert cells["flickr_t2i_r1"].data.startswith("flickr8k-test (")
    assert cells["flickr_t2i_r1"].chance == pytest.approx(0.1)
    assert "num_images 1000, num_texts 5000" in cells["flickr_t2i_r1"].protocol
    assert root not in json.dumps(result.command)

    folder = tmp_path / "labelled/cifar10"
    for number in range(10):
        (folder / "test" / f"class{number}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (25 * number, 0, 0)).save(folder / "test" / f"class{number}" / "a.png")
    (folder / "classnames.txt").write_text("".join(f"thing{number}\n" for number in range(10)))
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {}.\n")
    more = f"data.labelled={tmp_path / 'labelled'}"
    main(["further_sets", *photos, *small, more])
    (written,) = tmp_path.glob("results/oblique_topology/further_sets/photos_scratch-*/further_sets.json")
    (cells,) = (row.ours for row in from_json(written.read_text()).rows if row.status == "measured")
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


@pytest.mark.slow  # ten seconds of imports and of all committed results; above, what its command does
def test_a_part_runs_from_the_command_line_of_make(tmp_path):
    given = ["SCALE=smoke", f"OUTPUT={tmp_path}", f"SET={CROPPED}"]
    done = make(f"PY={sys.executable}", "reproduce-table5", *given, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("results/oblique_topology/table5/smoke-*/table5.json"))
    assert (tmp_path / "report_oblique_topology.html").stat().st_size > 100_000  # with all that is committed


def table5_printed(folder):
    as_launched()
    sys.modules[Command.__module__].collect_page = lambda *folders: None  # reads all committed results
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        main(["table5", "--scale", "smoke", "--output", str(folder)])
    return screen.getvalue()


def test_two_processes_write_a_table_that_trains_nothing_once(tmp_path):
    first, second = in_processes(2, table5_printed, tmp_path)
    assert first.count("scale smoke, seed 0") == first.count("tables and figures:") == 1
    assert second == ""
    assert table_of(tmp_path, "table5").rows


def test_the_notes_of_rows_state_how_fast_the_temperature_learns():
    for scale, row, rate in (
        ("demo", "table2_clip.yaml", "30"),
        ("photos", "ablation_sphere_264.yaml", "135"),
        ("photos_scratch", "ablation_sphere_264.yaml", "90"),
        ("demo", "ablation_multi_64_8.yaml", "90"),
    ):
        command = Command("table2", scale, (0,), (), Path("out"), Path("out"))
        assert _note(command, row).endswith(f"; the temperature learns {rate} times as fast as the weights")
    for scale in ("smoke", "paper"):
        command = Command("table2", scale, (0,), (), Path("out"), Path("out"))
        assert "temperature" not in _note(command, "table2_clip.yaml")


def test_no_path_of_a_machine_gets_into_a_committed_command(tmp_path):
    command = Command(
        "table2", "photos", (0,), ("data.root=/a/b", "data.second_test=/c/d.tar", "run.seed=1"), tmp_path, tmp_path
    )
    assert command.text("oblique_topology") == (
        "make reproduce-table2 PAPER=oblique_topology SCALE=photos SEEDS=1 DATA=<folder> "
        'SET="data.second_test=<path> run.seed=1"'
    )
