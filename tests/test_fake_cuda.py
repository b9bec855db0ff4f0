"""The tests of a CUDA device (tests/test_cuda.py), on a device in the memory of the host."""

import json
import os
import re
import subprocess
import sys
from operator import gt
from pathlib import Path

import pytest
from conftest import ROOT

FOLDER = ROOT / "tests" / "fake_cuda"
sys.path.append(str(FOLDER))
import fake_cuda  # enabled only in the other process

MISSING = fake_cuda.missing()


pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done


def test_a_build_that_was_killed_does_not_stop_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which a build changes
    built = []

    def load(*_, build_directory, **__):
        with (Path(build_directory) / "lock").open("x"):  # torch waits for ever for one that is there
            built.append(1)
        if len(built) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("torch.utils.cpp_extension.load", load)
    with pytest.raises(KeyboardInterrupt):
        fake_cuda.build()
    fake_cuda.build()
    assert len(built) == 2


@pytest.mark.slow  # budgets of all rows: tests/test_cuda.py
def test_a_rows_step_is_counted(tmp_path):
    row = "contrastive_basics/configs/table1_ours.yaml"
    run("scripts/device_work.py", "--only", row, "--output", str(tmp_path))
    step = json.loads((tmp_path / "work.json").read_text())["steps"][row]
    assert step["waits"] == 1
    assert step["kernels"] > 100
    assert f"| {row} | 1 | {step['kernels']} |" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_bytes_of_the_tiled_loss_stay_within_their_budget(tmp_path):
    run("scripts/device_work.py", "--only", "losses", "--output", str(tmp_path))
    losses = json.loads((tmp_path / "work.json").read_text())["losses"]
    # an entry of the similarity matrix, and a number of the embeddings; the oblique geodesic goes through autograd
    most = {name: (90, 40) if name in ("sphere", "oblique (32, 16)") else (330, 150) for name in losses}
    most |= {name: (330, 360) for name in losses if name.startswith("hyperbolic")}
    del most["oblique geodesic (32, 16)"]
    asked = {name: (losses[name]["bytes"], losses[name]["embedding_bytes"]) for name in most}
    assert {name: bytes_ for name, bytes_ in asked.items() if any(map(gt, bytes_, most[name]))} == {}


def passed_on_a_device(results, *options):
    """The names of the tests of a CUDA device that pass, in their order; none may be skipped."""
    path = os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", "")))
    command = ["-m", "pytest", "tests/test_cuda.py", "-m", "gpu", "-v", "-p", "no:cacheprovider", *options]
    done = run(*command, PYTHONPATH=path, TEST_RESULTS=str(results))
    assert "skipped" not in done.stdout
    written = results.read_text().splitlines()
    assert len(written) == len(set(written)) == int(re.search(r"(\d+) passed", done.stdout)[1])
    return written


def test_the_maths_and_a_row_pass_on_a_cuda_device(tmp_path):
    """A resumed run, and more rows: below, and on a CPU in tests/test_resume.py."""
    passed = passed_on_a_device(tmp_path / "results.txt", "-k", "not (a_row_of_each or resumes) or clip_geo")
    assert len(passed) > 25
    assert passed[0].startswith("passed tests/test_cuda.py::test_a_row_of_each_method")


@pytest.mark.slow
def test_the_tests_of_a_cuda_device_pass_and_none_is_skipped(tmp_path):
    assert len(passed_on_a_device(tmp_path / "results.txt")) > 40
