"""The worked examples of CONTRIBUTING.md do what the page says."""

import json
import re
import shutil
import sqlite3
import subprocess

import pytest
from processes import run_script
from tars import jpeg

from common.base.places import ROOT
from common.run.checkpoint import open_checkpoint

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_steps_of_the_page_train_a_row(tmp_path):
    """A copy of the repository's code, the page's own commands, then its own training command."""
    for folder in ("common", "docs/template", "oblique_topology/configs", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with the compiled loops that lie in __pycache__
    (shell, *_) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    subprocess.run(shell, shell=True, check=True, cwd=tmp_path)
    assert len(list((tmp_path / "my_geometry").glob("*.py"))) == 6

    (command,) = re.findall(r"`python (my_geometry/train.py .*?)`", TEXT)
    smoke = [*command.split(), "--scale", "smoke", "data.num_labelled=8", "--output-dir", str(tmp_path / "run")]
    done = run_script(tmp_path, *smoke)
    assert done.returncode == 0, done.stderr
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert checkpoint.state["geometry"] == "ball"
    assert checkpoint.state["paper"] == "my_geometry"
    assert checkpoint.model_tensors()["geometry.log_radius"].item() != 0.0  # trained
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())["evaluations"]["test"]["metrics"]
    assert 0 <= metrics["mean_recall"] <= 1

    # every setting of a loss in tiles arrives
    tiled = run_script(tmp_path, *smoke[:-1], str(tmp_path / "tiled"), "optim.loss_tile=4", "optim.loss_kernel=triton")
    assert tiled.returncode == 1
    assert "optim.loss_kernel" in tiled.stderr

    # the folder is known like those of the papers
    again = run_script(tmp_path, "scripts/evaluate.py", "run", "--json", "data.num_labelled=8")
    assert json.loads(again.stdout)["evaluations"]["test"]["metrics"] == metrics, again.stderr
    assert "ball" in run_script(tmp_path, "scripts/parts.py", "rows", "my_geometry", "outputs").stdout
    assert "scripts/evaluate.py run" in (tmp_path / "run" / "README.md").read_text()


def with_changes_of(heading, tmp_path):
    """A copy of the repository's code with the files and changes of one section of the page; its training command."""
    for folder in ("common", "euclip"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    for kind, content in blocks:
        if kind in ("python", "yaml"):
            (tmp_path / re.match(r"# ([^\s:]+)", content)[1]).write_text(content, encoding="utf-8")
    (changes,) = (content for kind, content in blocks if kind == "diff")
    for file, change in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", changes, re.DOTALL | re.MULTILINE):
        path = tmp_path / file
        text = path.read_text(encoding="utf-8")
        for hunk in filter(None, re.split(r"^@@\n", change, flags=re.MULTILINE)):
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
            assert text.count(before) == 1, (file, before)
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    (command,) = re.findall(r"`python (euclip/train.py .*?)`", section)
    return command


@pytest.mark.parametrize("heading", ["Add your own loss", "Add your own data source"])
def test_the_changes_of_the_page_fit_the_code(heading, tmp_path):
    assert with_changes_of(heading, tmp_path).startswith("euclip/train.py ")


@pytest.mark.slow
def test_the_loss_of_the_page_trains_a_row(tmp_path):
    command = with_changes_of("Add your own loss", tmp_path)
    few = ["--scale", "smoke", "data.num_labelled=8", "data.num_test=8", "run.log_every=1"]
    done = run_script(tmp_path, *command.split(), *few, "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["event"] == "train")
    assert line["loss"] / line["loss_over_chance"] == pytest.approx(0.2)


@pytest.mark.slow
def test_the_data_source_of_the_page_is_trained_on(tmp_path):
    command = with_changes_of("Add your own data source", tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(40):
        (folder / f"{seed}.jpg").write_bytes(jpeg(seed))
    for role, numbers in {"train": range(32), "val": range(32, 40)}.items():
        with sqlite3.connect(folder / f"{role}.db") as database:
            database.execute("CREATE TABLE captions (path TEXT, caption TEXT)")
            rows = [(f"{number}.jpg", text) for number in numbers for text in (f"a photo {number}", "a view")]
            database.executemany("INSERT INTO captions VALUES (?, ?)", rows)
    with sqlite3.connect(folder / "train.db") as database:
        database.execute("INSERT INTO captions VALUES ('missing.jpg', 'not there')")
    few = ["--scale", "smoke", "run.log_every=1", "data.max_broken_share=0.1", "--output-dir", str(tmp_path / "run")]
    done = run_script(tmp_path, *command.split(), *few)
    assert done.returncode == 0, done.stderr
    assert "missing.jpg: missing image: no such file" in done.stderr
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())["evaluations"]["test"]
    assert (metrics["protocol"]["num_images"], metrics["protocol"]["num_texts"]) == (8, 16)
