"""Shared test set-up: the repository root first on the path, no network, few threads."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def small_data_is_no_change():
    """Results of runs on fewer pictures go where those of the plain command go, experiments included."""
    from common.reproduce.command import Command

    real = Command.changes.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Command, "changes", property(lambda self: [text for text in real(self) if not text.startswith("data.")])
        )
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Local real data; tests that need it skip with a reason where it is not there."""
    folder = os.environ.get("VL_DATA_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("VL_DATA_DIR is not set to a folder with the local data sets")
    return Path(folder)
