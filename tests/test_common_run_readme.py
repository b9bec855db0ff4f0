"""README.md of a run's folder: its commands do what it states, and it names only what works for a kind of run."""

import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import called
from torch import nn

from common.run.checkpoint import named_checkpoint
from common.run.folder import RunFiles
from common.run.launch import command_to_resume
from common.run.readme import write_readme
from oblique_topology import train
from scripts import compare, evaluate, publish

ROOT = Path(__file__).resolve().parents[1]
FEW = ("optim.steps=2", "run.evaluate_every=0", "data.num_test=16", "data.num_labelled=8")
MAINS = {"train.py": train.main, "evaluate.py": evaluate.main, "compare.py": compare.main, "publish.py": publish.main}


def shell_lines(readme):
    """Of the blocks in a README, in order."""
    return re.findall(r"^```sh\n(.*)\n```$", readme.read_text(encoding="utf-8"), re.MULTILINE)


def run_line(line):
    """Runs a line of a README in this process: the script that it names, with its arguments."""
    _, script, *arguments = shlex.split(line)
    assert (ROOT / script).is_file()
    called(MAINS[Path(script).name], *arguments, name=script)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Files of a trained run, in a folder whose name a shell would split."""
    folder = tmp_path_factory.mktemp("runs") / "a run's folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        words = ("--scale", "smoke", "--output-dir", folder, *FEW)
        called(train.main, *words, name="oblique_topology/train.py")
    return RunFiles(folder)


def test_the_readme_states_what_the_run_is(finished):
    text = finished.readme.read_text(encoding="utf-8")
    assert text.startswith("# table2_multi, scale smoke, seed 0\n\nA training run of `oblique_topology`.")
    assert "| training data | scenes/train, 256 pictures" in text
    tensors = named_checkpoint(finished.folder).model_tensors()
    size = f"{sum(tensor.numel() for tensor in tensors.values()):,} parameters"
    for stated in (
        size,
        "| 2 steps, global batch size 16 |",
        "| state | finished |",
        "## Results when the run finished",
    ):
        assert stated in text
    named = set(re.findall(r"^\| .*?`([\w.]+?)/?`", text, re.MULTILINE)) | {"hits.json"}
    present = {path.name for path in finished.folder.iterdir()} | {"validation.json", "curves.png"}
    assert named >= present - {"README.md", ".lock"}
    assert named <= present


@pytest.mark.slow  # quick: the tests of these scripts, and the names of the commands below
def test_its_commands_resume_evaluate_and_publish_the_run(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    home, resume, *others = shell_lines(finished.readme)
    assert home == shlex.join(["cd", str(ROOT)])
    finished.evaluation.unlink()
    run_line(resume)
    assert finished.evaluation.is_file()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"results (evaluation.json), curves (curves.png), commands (README.md): {finished.folder}"
    evaluating, comparing, publishing = others
    run_line(evaluating)
    assert "oblique_topology, step 2, trained on scenes/train" in capsys.readouterr().out
    published = tmp_path / "published"
    words = publishing.replace("LICENCE", "mit").split(" --output ")[0]
    run_line(f"{words} --output {published}")
    assert named_checkpoint(published).state["step"] == 2
    other = tmp_path / "other"
    shutil.copytree(finished.folder, other)
    run_line(f"{comparing.replace('OTHER_RUN', str(other))} --output {tmp_path / 'compared'}")
    assert list((tmp_path / "compared").rglob("*.png"))


STATE = {
    "paper": "geomm",
    "training_data": "pictures",
    "training_revision": "abc",
    "config": {
        "run": {"seed": 3, "test": True, "keep_checkpoints": 2, "tracker": "none"},
        "optim": {"global_batch_size": 1024},
    },
}


@pytest.mark.parametrize(
    ("more", "scripts"),
    [
        ({}, ["evaluate.py", "compare.py", "publish.py"]),
        ({"kind": "task"}, ["evaluate.py", "compare.py"]),
        ({"kind": "vision"}, ["evaluate.py", "compare.py"]),
        ({"paper": "my_geometry"}, ["publish.py"]),
    ],
)
def test_only_commands_that_take_a_run_of_this_kind_are_named(more, scripts, tmp_path):
    files = RunFiles(tmp_path, command="accelerate launch geomm/train.py --resume")
    write_readme(files, STATE | more, nn.Linear(2, 3), 5, "make table2")
    _, resume, *others = shell_lines(files.readme)
    assert resume == files.command
    assert [Path(shlex.split(line)[1]).name for line in others] == scripts
    text = files.readme.read_text(encoding="utf-8")
    for stated in ("state | not finished when", "model | 9 parameters, 9 of them", "5 steps, global batch size 1,024"):
        assert stated in text
    assert "Results" not in text
    write_readme(replace(files, command=""), STATE | more, nn.Linear(2, 3), 5, "make table2")
    assert shell_lines(files.readme)[1] == "make table2"


def test_a_process_without_a_parent_has_a_command(monkeypatch):
    monkeypatch.setattr("psutil.Process.parent", lambda process: None)  # the first one of a container
    monkeypatch.setattr(sys, "argv", ["euclip/train.py", "--scale", "demo"])
    assert command_to_resume() == "python euclip/train.py --scale demo --resume"
    assert command_to_resume("") == "python euclip/train.py --scale demo"
    monkeypatch.setattr(sys, "argv", ["vlgeometry reproduce", "euclip", "table4"])  # of a row beside others
    assert command_to_resume("") == "vlgeometry reproduce euclip table4"
