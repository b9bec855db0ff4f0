"""The files of this repository that a result was made from.

A module, or a package in its __init__.py for all of its modules, states what it decides:

    DECIDES = "evaluation"    metrics: after a change a run is evaluated again, not trained
    DECIDES = "nothing"       commands, reports, plots: after a change nothing is made again

Without it a module decides weights: after a change a run is trained again. A file too many costs time, a file too few
shows a stale result; so modules loaded for another run of the process may count too.
"""

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from common.base.places import ROOT, is_of_repository

_foreign: set[str] = set()  # names of modules of other projects, thousands
_NO_PART_OF_A_RESULT = ("tests", "scripts", "vlgeometry", "outputs", "results")  # folders of the repository


def loaded_files(*kinds: str) -> dict[str, str]:
    """File -> hash, of all loaded modules of this repository that decide one of `kinds`.

    The hash is taken at the first call: what is edited later has not run.
    """
    files, ours = set(), _top_names()
    for name in sys.modules.keys() - _foreign:
        if name.partition(".")[0] not in ours:
            _foreign.add(name)
            continue
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        file = path and _below_root(path)
        if file and _decides(name, module) in kinds:
            files.add(file)
    return {file: _first_hash(file) for file in sorted(files)}


def changed_files(files: Mapping[str, str]) -> list[str]:
    """The files that are missing now or have another hash."""
    return [file for file, before in files.items() if _hash_of(ROOT / file) != before]


@cache
def _top_names() -> set[str]:
    # modules of the root, and the script that was started
    return {path.stem for path in ROOT.iterdir()} | {"__main__", "__mp_main__"}


@cache
def _below_root(path: str) -> str | None:
    # None for a file of another project.
    file = Path(path).resolve()
    if not is_of_repository(file) or not file.is_file():
        return None
    first = file.relative_to(ROOT).parts[0]
    is_other = first in _NO_PART_OF_A_RESULT or first.startswith(".")
    return None if is_other else file.relative_to(ROOT).as_posix()


def _decides(name: str, module: ModuleType) -> str:
    # of the module, else of the nearest package around it that states it
    while module is not None:
        if hasattr(module, "DECIDES"):
            return module.DECIDES
        name = name.rpartition(".")[0]
        module = sys.modules.get(name)
    return "weights"


@cache
def _first_hash(file: str) -> str:
    return _hash_of(ROOT / file)


def _hash_of(path: Path) -> str:
    # 12 hex digits of the content; "" for a file that cannot be read
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return ""
