"""Finds the table, figure or other part of a paper that `make reproduce-...` asks for.

    python scripts/reproduce.py oblique_topology table2 --scale smoke
    python scripts/reproduce.py all all

Everything behind the two names is passed on to <paper>/reproduce.py.
"""

import importlib
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.run.config import ConfigError
from common.run.provenance import ROOT
from common.run.session import run_or_explain

PAPERS = ("contrastive_basics", "oblique_topology", "euclip", "geomm")


def parts_of(paper: str) -> list[str]:
    """Names of what a paper folder can reproduce so far."""
    if not (ROOT / paper / "reproduce.py").is_file():
        return []
    return list(importlib.import_module(f"{paper}.reproduce").PARTS)


def everything() -> str:
    """All parts that exist, for error messages."""
    return "; ".join(f"{paper}: {', '.join(parts_of(paper)) or 'none yet'}" for paper in PAPERS)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"usage: {__doc__}\n{everything()}")
        return
    if len(sys.argv) < 3:
        raise ConfigError(f"usage: scripts/reproduce.py PAPER PART [options]; {everything()}")
    paper, part, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    if paper not in (*PAPERS, "all"):
        raise ConfigError(f"PAPER={paper} is unknown; accepted: {', '.join(PAPERS)}")
    wanted = [
        (name, each)
        for name in (PAPERS if paper == "all" else (paper,))
        for each in (parts_of(name) if part == "all" else (part,))
    ]
    missing = [(name, each) for name, each in wanted if each not in parts_of(name)]
    if missing or not wanted:
        name, each = missing[0] if missing else (paper, "table or figure")
        raise ConfigError(f"{name} has no {each} here yet; what exists: {everything()}")
    for name, each in wanted:
        importlib.import_module(f"{name}.reproduce").main([each, *options])


if __name__ == "__main__":
    run_or_explain(main)
