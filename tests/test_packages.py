"""`pip install .` brings the packages with their data and the command `vlgeometry`, which trains from any folder."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "oblique_topology", "geomm", "euclip", "contrastive_basics")
FEW = ("optim.steps=2", "optim.warmup_steps=0", "data.num_labelled=4", "data.num_test=4", "run.evaluate_every=0")
# one process, as imports take most of the time; its parts are printed between lines of "---"
SESSION = """
import json, sys
from pathlib import Path
from vlgeometry.command import main

def command(*words):
    sys.argv = ["vlgeometry", *words]
    try:
        main()
    except SystemExit as ended:
        print(ended.code)
    print("---")

train = ["train", "euclip", "--scale", "smoke", *sys.argv[1:]]
command(*train)
(run,) = Path("outputs/runs/euclip").glob("table4_euclip-smoke-*/seed0")
command("evaluate", str(run), "--json", "data.num_labelled=4", "data.num_test=4")
command("evaluate", str(run), "--tasks", "retrieval", "--csv", "table.csv", "data.num_test=4")
command("files", "euclip.geometry", "--copy", "copied")
command(*train, "optim.stpes=2")
command("train", "euclip", "--config", str(Path("../site/geomm/configs/clip.yaml")))
command("train", "euclip", "--scale", "smoke", "--config", "/etc/hostname/x.yaml", "data.root=1")
print(json.dumps(sorted({module.__file__ for module in list(sys.modules.values()) if module.__name__ in
    ("common.info_nce", "euclip.geometry", "vlgeometry.evaluate")})))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves folders behind; without a look at a registry."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*PACKAGES, "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(built), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(built.glob("*.whl"))


def test_every_file_that_the_code_reads_is_package_data():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = [path for name in PACKAGES for path in files_in(ROOT / name) if path.is_file()]
    assert not [path for path in files if not any(map(path.match, (*patterns, "*.py", "*.md")))]


@pytest.mark.slow
def test_the_wheel_holds_every_file_that_the_code_reads_and_no_others(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    ours = [path for path in ours if "__pycache__" not in path.parts and path.suffix != ".md"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    scripts = {f"{module.replace('.', '/')}.py" for module in (*scripts, "vlgeometry.__init__")}
    assert names == {path.relative_to(ROOT).as_posix() for path in ours} | scripts


@pytest.mark.slow
def test_an_installed_command_trains_and_evaluates_from_another_folder_and_writes_there(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    assert "from vlgeometry.command import main" in (site / "bin" / "vlgeometry").read_text()
    elsewhere.mkdir()
    before = files_in(site)
    done = subprocess.run(
        [sys.executable, "-c", SESSION, *FEW],
        cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, evaluated, table, listed, mistyped, other_paper, no_file, modules = done.stdout.split("---\n")
    # the run lies in the current folder, nothing in that of the packages
    (run,) = (elsewhere / "outputs/runs/euclip").glob("table4_euclip-smoke-*/seed0")
    assert f"scale smoke, seed 0 -> {run}\n" in trained
    assert files_in(site) == before
    assert json.loads(modules) == [
        str(site / file) for file in ("common/info_nce.py", "euclip/geometry.py", "vlgeometry/evaluate.py")
    ]
    # its numbers state the version, its files only the packages' code
    content = json.loads(evaluated)
    assert content["evaluations"]["test"]["metrics"] == metrics_in(run)
    assert content["training_revision"] == "version 0.1.0"
    files = json.loads((run / "dependencies.json").read_text())
    assert {"euclip/train.py", "common/info_nce.py"} <= files.keys()
    assert all(file.startswith(("common/", "euclip/")) for file in files)
    # a table, and the files of a method with the licence
    assert table.startswith("data ")
    assert (elsewhere / "table.csv").read_text().startswith("model,data,metric,value,chance,protocol,n\n")
    assert "  euclip/geometry.py\n" in listed
    for file in ("euclip/geometry.py", "LICENSE"):
        assert (elsewhere / "copied" / file).read_bytes() == (ROOT / file).read_bytes()
    # errors of the packages are messages
    assert mistyped.startswith("error: command line: unknown key 'optim.stpes'; did you mean optim.steps?")
    assert "euclip/train.py does not train it; run: accelerate launch geomm/" in other_paper
    assert no_file.startswith("error: /etc/hostname/x.yaml: no such config file")


def files_in(folder):
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def metrics_in(run):
    return json.loads((run / "evaluation.json").read_text())["evaluations"]["test"]["metrics"]
