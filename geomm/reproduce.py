"""Reproduces the tables of GeoMM: trains what is missing, prints ours beside the paper's.

make reproduce-readings PAPER=geomm SEEDS=3        which reading of Eq. 3 trains, scenes at demo scale
make reproduce-table2 PAPER=geomm
python geomm/reproduce.py table4 --scale smoke --output outputs
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.report.table import Table
from common.reproduce.command import Command, reproduce_main
from common.reproduce.tables import trained_table
from common.run.launch import run_or_explain
from geomm.readings import readings
from geomm.train import CODE


def table1(command: Command) -> list[Table]:
    """Table 1: zero-shot retrieval of pre-trained models."""
    return [trained_table(command, CODE, "table1")[0]]


def table2(command: Command) -> list[Table]:
    """Table 2: retrieval after fine-tuning."""
    return [trained_table(command, CODE, "table2")[0]]


def table4(command: Command) -> list[Table]:
    """Table 4: further models against a pool."""
    return [trained_table(command, CODE, "table4")[0]]


PARTS = {
    "readings": partial(readings, code=CODE),
    "table1": table1,
    "table2": table2,
    "table4": table4,
}


def main(arguments: list[str] | None = None) -> None:
    reproduce_main(__doc__, CODE.name, PARTS, arguments)


if __name__ == "__main__":
    run_or_explain(main)
