"""The command `vlgeometry`: its table, its messages, and that it passes arguments on."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import called

from common.run import named_models
from scripts import command, evaluate
from scripts.command import SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[1]


def printed(capsys, *words):
    """Status of the command and what it prints to both streams."""
    status = 0
    try:
        called(command.main, *words)
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    return status, output.out + output.err


def test_every_module_of_the_table_has_a_main_and_is_installed():
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    scripts = {"command", "evaluate_table"}  # `evaluate` calls the second
    for name, subcommand in SUBCOMMANDS.items():
        modules = [subcommand.module.replace("PAPER", paper) for paper in subcommand.papers] or [subcommand.module]
        assert not any("PAPER" in module for module in modules), name
        assert all(callable(importlib.import_module(module).main) for module in modules), name
        scripts |= {module.removeprefix("scripts.") for module in modules if module.startswith("scripts.")}
    assert set(installed) == {f"vlgeometry.{script}" for script in scripts}
    assert SUBCOMMANDS["train"].papers == ["contrastive_basics", "oblique_topology", "euclip", "geomm"]
    assert SUBCOMMANDS["pretrain"].papers == ["contrastive_basics", "geomm"]


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help_lists_the_subcommands_with_examples(words, capsys):
    status, text = printed(capsys, *words)
    assert status == 0
    for name, subcommand in SUBCOMMANDS.items():
        assert f"  vlgeometry {name} {subcommand.example}" in text
        assert subcommand.what in text


def test_help_waits_for_no_heavy_library():
    check = "from scripts.command import main; main(); import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: vlgeometry SUBCOMMAND")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["vlgeometry has no subcommand trian; did you mean train?"]),
        (["train", "eucilp"], ["vlgeometry train eucilp: no such paper; ", "did you mean euclip?; for example: vlg"]),
        (["finetune", "euclip"], ["finetune euclip: no such paper; expected one of: geomm; for example: vlgeometry f"]),
        (["train"], ["vlgeometry train needs a paper; expected one of: contrastive_basics, oblique_topology, euclip"]),
        (
            ["train", "euclip", "optim.stpes=3"],
            ["error: command line: unknown key 'optim.stpes'; did you mean optim.steps?"],
        ),
        (["reproduce", "euclip", "table44"], ["euclip has no table44; did you mean table4?"]),
    ],
)
def test_a_mistyped_word_is_refused_with_the_nearest(words, parts, capsys):
    status, text = printed(capsys, *words)
    assert status not in (0, None)
    assert all(part in f"{status}{text}" for part in parts), f"{status}{text}"


def test_arguments_are_passed_on_with_the_name_of_the_command(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("euclip.train.main", lambda: seen.append(list(sys.argv)))
    assert printed(capsys, "train", "euclip", "--scale", "demo", "data.root=/a b") == (0, "")
    assert seen == [["vlgeometry train euclip", "--scale", "demo", "data.root=/a b"]]
    status, text = printed(capsys, "export", "--help")
    assert status == 0
    assert text.startswith("usage: vlgeometry export [-h] --model MODEL")


@pytest.mark.parametrize(
    ("paper", "kind", "module"),
    [
        ("geomm", "", "geomm.evaluate"),
        ("geomm", "task", "geomm.evaluate_tasks"),
        ("contrastive_basics", "vision", "contrastive_basics.evaluate_pictures"),
        (None, "", "euclip.published"),
        ("os", "", None),
    ],
)
def test_a_model_is_evaluated_by_the_paper_that_its_checkpoint_names(paper, kind, module, monkeypatch):
    checkpoint = paper and SimpleNamespace(path=Path("run"), state={"paper": paper, "kind": kind})
    monkeypatch.setattr(named_models, "run_checkpoint", lambda name: checkpoint)
    if module is None:
        with pytest.raises(ValueError, match="run belongs to 'os'; expected one of: contrastive_basics"):
            named_models.evaluator_of("run")
        return
    assert named_models.evaluator_of("run") == module
    seen = []
    monkeypatch.setattr(f"{module}.main", lambda: seen.append(list(sys.argv)))
    called(evaluate.main, "run", "--json", "data.num_test=4", name="vlgeometry evaluate")
    assert seen == [["vlgeometry evaluate", "--checkpoint", "run", "--json", "data.num_test=4"]]
