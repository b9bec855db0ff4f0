"""Plants each fault of tests/faults.yaml in a copy of the tree and expects the tests named with it to fail.

    python scripts/plant_faults.py                          all of them, one after the other: some minutes
    python scripts/plant_faults.py --only momentum_swapped  one

The copy holds what git tracks, with the changes that are not committed yet. Exit status 1 unless every fault is caught.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TESTS_FAILED = 1  # pytest's exit status; others say that it could not run, which catches nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a fault's name; may be given several times")
    arguments = parser.parse_args()
    faults = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text(encoding="utf-8"))
    unknown = sorted(set(arguments.only or ()) - {fault["name"] for fault in faults})
    if unknown:
        sys.exit(f"error: --only {unknown[0]}: tests/faults.yaml has no such fault")
    chosen = [fault for fault in faults if not arguments.only or fault["name"] in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        tree = copied_tree(Path(folder))
        files = sorted({name for fault in chosen for name in fault["tests"]})
        if run_tests(tree, files):  # or a failure would say nothing about a fault
            sys.exit(f"error: without a fault {', '.join(files)} must pass")
        results = []
        for fault in chosen:
            results.append(planted(tree, fault))
            print(f"{results[-1]:28} {fault['name']}: {fault['what']}", flush=True)
    print(f"{results.count('caught')} of {len(results)} faults caught")
    sys.exit(0 if set(results) <= {"caught"} else 1)


def copied_tree(folder: Path) -> Path:
    """The files that git knows or would add, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted and is still tracked
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def planted(tree: Path, fault: dict) -> str:
    """What became of one fault; the file is as before afterwards."""
    path = tree / fault["file"]
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before.count(fault["old"]) != 1:
        return "the old text is not there"
    path.write_text(before.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        status = run_tests(tree, fault["tests"])
    finally:
        path.write_text(before, encoding="utf-8")
    if status in (0, TESTS_FAILED):
        return "caught" if status == TESTS_FAILED else "NOT CAUGHT"
    return f"pytest ended with {status}"


def run_tests(tree: Path, names: list[str]) -> int:
    """pytest's exit status in the copy, up to the first failure."""
    files = [f"tests/{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    return subprocess.run([*command, *files], cwd=tree, capture_output=True, check=False).returncode


if __name__ == "__main__":
    main()
