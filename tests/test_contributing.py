"""The worked example of CONTRIBUTING.md does what it says."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.geometry import Geometry
from common.run.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_example_is_a_geometry_that_keeps_its_laws(example):
    ball = example["Ball"]()
    assert isinstance(ball, Geometry)
    images, texts = ball.embed_image(torch.randn(5, 8)), ball.embed_text(50 * torch.randn(6, 8))
    scores = ball.similarity(images, texts)
    assert scores.shape == (5, 6)
    assert (scores <= 0).all()
    assert (scores > -4).all()
    torch.testing.assert_close(scores, ball.similarity(texts, images).T)
    torch.testing.assert_close(scores.diagonal(), ball.paired_similarity(images, texts[:5]))
    images, texts, scores = images.detach(), texts.detach(), scores.detach()
    for i in range(5):
        for j in range(6):
            expected = -sum((images[i, k].item() - texts[j, k].item()) ** 2 for k in range(8))
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-5)
    features = torch.zeros(2, 8, requires_grad=True)
    ball.similarity(ball.embed_image(features), ball.embed_text(features)).sum().backward()
    assert torch.isfinite(features.grad).all()


def test_the_steps_of_the_page_train_a_row(tmp_path):
    """A copy of the repository's code, the page's own commands and blocks, then its own training command."""
    for folder in ("common", "oblique_topology"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (shell, *_), (python,), (row,) = (
        re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL) for kind in ("sh", "python", "yaml")
    )
    copy, rename = shell.strip().splitlines()
    subprocess.run(copy, shell=True, check=True, cwd=tmp_path)
    subprocess.run(rename, shell=True, check=True, cwd=tmp_path)
    mine = tmp_path / "my_geometry"
    (mine / "ball.py").write_text(python)
    (mine / "configs" / "ball.yaml").write_text(row)

    literal, entry, line = re.findall(
        r"`geometry: (Literal.*?)\.\.\.`.*?the line `(.*?)`.*?`(from .*?)`", TEXT, re.DOTALL
    )[0]
    edit(mine / "config.py", 'Literal["sphere", ', literal)
    edit(mine / "model.py", '"sphere": Sphere,', f'"sphere": Sphere,\n        {entry}')
    edit(mine / "model.py", "from my_geometry.config", f"{line}\nfrom my_geometry.config")

    (command,) = re.findall(r"`python (my_geometry/train.py .*?)`", TEXT)
    smoke = [*command.split(), "--scale", "smoke", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *smoke], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert checkpoint.state["geometry"] == "ball"
    assert checkpoint.state["paper"] == "my_geometry"
    assert checkpoint.model_tensors()["geometry.log_radius"].item() != 0.0  # trained
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())["evaluations"]["test"]["metrics"]
    assert 0 <= metrics["mean_recall"] <= 1

    wrong = [sys.executable, *smoke[:-1], str(tmp_path / "other"), "method.geometry=torus"]
    done = subprocess.run(wrong, cwd=tmp_path, capture_output=True, text=True)
    assert "accepted: ball, sphere" in done.stderr


def edit(path, before, after):
    text = path.read_text(encoding="utf-8")
    assert before in text, f"{path.name} has no {before}"
    path.write_text(text.replace(before, after), encoding="utf-8")
