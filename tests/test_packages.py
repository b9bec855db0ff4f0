"""`pip install .` brings the five packages with their data, and they import from anywhere."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "oblique_topology", "geomm", "euclip", "contrastive_basics")
LOOK = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import common.info_nce, contrastive_basics.config, euclip.geometry, geomm
from common.base.config import load_row
from oblique_topology.config import Config
folder = Path(__import__("oblique_topology").__path__[0])
row = load_row(Config, folder, folder / "configs" / "table2_multi.yaml", "smoke")
print(json.dumps([row.structure, [module.__file__ for module in (common.info_nce, euclip.geometry)]]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves folders behind; without a look at a registry."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(built), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(built.glob("*.whl"))


def test_the_wheel_holds_every_file_that_the_code_reads_and_no_others(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    ours = [path for path in ours if "__pycache__" not in path.parts and path.suffix != ".md"]
    assert names == {path.relative_to(ROOT).as_posix() for path in ours}


def test_installed_packages_import_and_read_their_configs_in_an_empty_directory(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(site)], cwd=empty, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    structure, files = json.loads(done.stdout)
    assert structure == "Multi(2, 16)"
    assert all(Path(file).is_relative_to(site) for file in files)
