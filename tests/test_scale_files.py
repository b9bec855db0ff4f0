"""Every scale file says how its settings were chosen: a validation number and its commit, or honestly none."""

import re
from pathlib import Path

import pytest
import yaml

from common.base.provenance import ROOT

FILES = sorted(ROOT.glob("*/configs/scale_*.yaml"))
# settings that can decide between rows; a row's own ones in `rows:` have a line of their own
DECISIVE = {
    "learning_rate", "weight_decay", "logit_scale", "logit_scale_init", "logit_scale_min", "logit_scale_max",
    "logit_scale_rate", "ema_momentum", "sinkhorn_scale", "smoothing", "hardest_negatives", "dropout",
}  # fmt: skip
SOURCES = (
    r"speed|the paper\b.*|the published .*|hand\b.*; to be searched|test data \(.*before the search existed\); to be "
    r"searched again|val [a-z][\w @]*, commit [0-9a-f]{7,40}"
)


def problems_of(text: str, scale: str) -> list[str]:
    """What a scale file does not say: "" for the file, else the names of entries of its `rows:`."""
    lines = text.split("\n")
    header = list(lines[: next(k for k, line in enumerate(lines) if not line.startswith("#"))])
    problems = [] if _is_chosen(header, scale) else [""]
    for name, settings in (yaml.safe_load(text).get("rows") or {}).items():
        if scale in ("smoke", "paper") or not DECISIVE & set(_keys(settings)):
            continue  # the file's own line holds
        place = next(k for k, line in enumerate(lines) if line.startswith(f"  {name}:"))
        first = place
        while lines[first - 1].startswith("  #"):
            first -= 1
        if not _is_chosen([line.strip() for line in lines[first:place]], scale):
            problems.append(str(name))
    return problems


def _is_chosen(comments: list[str], scale: str) -> bool:
    said = [line.removeprefix("# chosen by: ") for line in comments if line.startswith("# chosen by: ")]
    expected = {"smoke": "speed", "paper": r"the paper\b.*"}.get(scale, SOURCES)
    return len(said) == 1 and re.fullmatch(expected, said[0]) is not None


def _keys(settings: dict) -> list[str]:
    nested = [key for value in settings.values() if isinstance(value, dict) for key in _keys(value)]
    return [*settings, *nested]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parts[-3]}/{file.stem}")
def test_a_scale_file_says_by_which_number_its_settings_were_chosen(file: Path):
    assert problems_of(file.read_text(encoding="utf-8"), file.stem.rpartition("_")[2]) == []
