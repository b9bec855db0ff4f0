"""A run is current while the files that trained it are as they were; files that only evaluate or draw do not count."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import in_processes, run_script

from common.base import dependencies
from common.base.dependencies import changed_files, loaded_files
from common.reproduce.rows import measured_once
from common.run.folder import RunFiles, set_aside_if_stale, stale_files

ROOT = Path(__file__).resolve().parents[1]


TRAIN = (
    "euclip.train", "oblique_topology.train", "contrastive_basics.train", "contrastive_basics.pretrain", "geomm.train",
    "geomm.finetune", "geomm.pretrain",
)  # fmt: skip
PAPERS = ("euclip", "oblique_topology", "contrastive_basics", "geomm")


def files_of_commands():
    """Files by kind of what trains, and of what else the papers' tables load."""
    for script in TRAIN:
        importlib.import_module(script)
    of_training = loaded_files("weights")
    for paper in PAPERS:
        importlib.import_module(f"{paper}.reproduce")
    return of_training, {kind: loaded_files(kind) for kind in ("weights", "evaluation", "nothing")}


def test_every_loaded_module_counts_as_what_it_decides():
    ((of_training, files),) = in_processes(1, files_of_commands)
    assert {"euclip/train.py", "euclip/lorentz.py", "common/info_nce.py", "common/__init__.py"} <= of_training.keys()
    assert {"common/evaluation/retrieval.py", "common/run/evaluation.py"} <= files["evaluation"].keys()
    # what a kept measurement is made of
    assert {f"{paper}/loaded_rows.py" for paper in ("euclip", "oblique_topology")} <= files["evaluation"].keys()
    reports = {"common/report/figures.py", "common/reproduce/tables.py", "common/run/curves.py", "common/run/readme.py"}
    assert reports | {"common/diagnosis.py", "common/base/drawing.py"} <= files["nothing"].keys()
    unmarked = [file for file in files["weights"].keys() - of_training.keys() if not file.startswith("common/")]
    assert not unmarked, f"{unmarked} train nothing: each needs DECIDES, see common/base/dependencies.py"
    everything = {file for of_kind in files.values() for file in of_kind}
    assert not any(file.startswith(("tests/", "scripts/", ".")) or "site-packages" in file for file in everything)


def test_a_file_that_is_edited_moved_or_missing_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    (tmp_path / "formula.py").write_text("x = 1\n")
    files = {"formula.py": dependencies._hash_of(tmp_path / "formula.py"), "gone.py": "0123456789ab"}
    assert changed_files(files) == ["gone.py"]
    (tmp_path / "formula.py").write_text("x = 2\n")
    assert changed_files(files) == ["formula.py", "gone.py"]


def test_files_that_are_edited_while_a_run_is_measured_count_as_they_were_before(tmp_path, monkeypatch):
    run, kept = SimpleNamespace(files=RunFiles(tmp_path / "run"), evaluations={}), tmp_path / "formula.py"
    kept.write_text("x = 1\n")
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    monkeypatch.setattr(dependencies, "_below_root", {str(kept): "formula.py"}.get)
    monkeypatch.setitem(sys.modules, "common.of_a_test", SimpleNamespace(__file__=str(kept), DECIDES="evaluation"))
    monkeypatch.setattr(dependencies, "_top_names", lambda: {"common"})
    monkeypatch.setattr("common.reproduce.rows.saved_weights", lambda folder: "")

    def measure():
        kept.write_text("x = 2\n")
        return "of the old code"

    assert measured_once(run, tmp_path / "a.py", [], measure) == "of the old code"
    assert measured_once(run, tmp_path / "a.py", [], lambda: "again") == "again"


def test_a_stale_run_is_set_aside_whole_and_never_overwritten(tmp_path, capsys):
    files = RunFiles(tmp_path / "row-smoke-key" / "seed0")
    for number in (1, 2):
        (files.folder / "checkpoints").mkdir(parents=True)
        (files.folder / ".lock").touch()
        (files.folder / "log.jsonl").write_text(f"run {number}")
        set_aside_if_stale(files)  # of a run that lists no files nothing is known to have changed
        assert (files.folder / "log.jsonl").exists()
        files.dependencies.write_text(json.dumps({"common/no_such_file.py": "0123456789ab"}))
        assert stale_files(files) == ["common/no_such_file.py"]
        set_aside_if_stale(files)
        aside = files.folder.with_name(f"stale-seed0-{number}")
        assert (aside / "log.jsonl").read_text() == f"run {number}"
        assert [path.name for path in files.folder.iterdir()] == [".lock"]
        assert f"changed since this run was trained; it is now {aside.name}" in capsys.readouterr().err


@pytest.mark.parametrize("moved", range(3))
def test_what_a_kill_leaves_of_a_stale_run_is_stale(tmp_path, monkeypatch, moved):
    files, done, rename = RunFiles(tmp_path / "seed0"), [], Path.rename
    (files.folder / "checkpoints").mkdir(parents=True)
    for path in (files.dependencies, files.evaluation):
        path.write_text(json.dumps({"common/no_such_file.py": "0123456789ab"}))

    def killed(path, target):
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(rename(path, target))

    listed = Path.iterdir  # in any order, on some disks that of their names
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(listed(folder))))
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        set_aside_if_stale(files)
    assert len([*files.folder.iterdir()]) == 3 - moved
    assert stale_files(files)


@pytest.fixture
def copied(tmp_path):
    """The repository's code in another place, where it can be edited."""
    for folder in ("common", "oblique_topology"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


@pytest.mark.slow
def test_an_edited_formula_trains_again_and_an_edited_plot_does_not(copied):
    """By the commands of a user, each in a process of its own."""

    def train(*options):
        few = "optim.steps=2 optim.warmup_steps=0 data.num_labelled=4 data.num_test=4 run.evaluate_every=0"
        return run_script(copied, "oblique_topology/train.py", "--scale", "smoke", *options, *few.split())

    def edit(name):
        file = copied / name
        file.write_text(file.read_text() + "\n# edited\n")

    done = train()
    assert done.returncode == 0, done.stderr
    (folder,) = copied.glob("outputs/runs/oblique_topology/*/seed0")
    listed = json.loads((folder / "dependencies.json").read_text())
    assert {"oblique_topology/train.py", "oblique_topology/oblique.py", "common/info_nce.py"} <= listed.keys()
    evaluated_by = json.loads((folder / "evaluation.json").read_text())["evaluation_code"]
    assert "common/evaluation/retrieval.py" in evaluated_by.keys() - listed.keys()

    edit("common/report/figures.py")
    edit("common/evaluation/retrieval.py")
    assert (
        "holds a run up to step 2: choose another --output-dir, or add --resume to continue from there: "
        in train().stderr
    )
    edit("common/info_nce.py")
    refused = train("--resume")
    assert f"--resume: common/info_nce.py changed since {folder} was trained" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = train()
    assert done.returncode == 0, done.stderr
    assert "common/info_nce.py changed since this run was trained; it is now stale-seed0-1" in done.stderr
    assert (folder.with_name("stale-seed0-1") / "evaluation.json").is_file()
    assert (folder / "evaluation.json").is_file()
