"""The tests of a CUDA device (tests/test_cuda.py), on a device in the memory of the host."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

FOLDER = ROOT / "tests" / "fake_cuda"
sys.path.append(str(FOLDER))
import fake_cuda  # enabled only in the other process

MISSING = fake_cuda.missing()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_tests_of_a_cuda_device_pass_and_none_is_skipped():
    path = os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_cuda.py", "-m", "gpu", "-v", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40
    assert "skipped" not in done.stdout
