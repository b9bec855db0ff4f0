"""The planted faults of tests/faults.yaml (scripts/plant_faults.py): what they replace stands once in its file."""

import yaml

from common.base.places import ROOT


def test_every_fault_quotes_text_that_stands_once_in_its_file_and_names_tests_that_exist():
    faults = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text(encoding="utf-8"))
    assert len({fault["name"] for fault in faults}) == len(faults)
    for fault in faults:
        assert (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) == 1, fault["name"]
        assert fault["new"] != fault["old"], fault["name"]
        assert all((ROOT / "tests" / f"{test}.py").is_file() for test in fault["tests"]), fault["name"]
