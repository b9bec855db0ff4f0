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

from common.base.config import ConfigError
from common.reproduce.parts import wanted
from common.run.launch import run_or_explain


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"usage: {__doc__}")
        return
    if len(sys.argv) < 3:
        raise ConfigError("usage: scripts/reproduce.py PAPER PART [options], for example oblique_topology table2")
    for paper, part in wanted(sys.argv[1], sys.argv[2]):
        importlib.import_module(f"{paper}.reproduce").main([part, *sys.argv[3:]])


if __name__ == "__main__":
    run_or_explain(main)
