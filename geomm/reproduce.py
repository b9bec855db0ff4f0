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

from common.base.config import load_row
from common.report.table import Table
from common.reproduce.command import Command, reproduce_main
from common.reproduce.tables import note_of, trained_table
from common.run.launch import run_or_explain
from geomm.config import Config
from geomm.readings import readings
from geomm.train import CODE


def table1(command: Command) -> list[Table]:
    """Table 1: zero-shot retrieval of pre-trained models."""
    return [_trained(command, "table1")]


def table2(command: Command) -> list[Table]:
    """Table 2: retrieval after fine-tuning."""
    return [_trained(command, "table2")]


def table4(command: Command) -> list[Table]:
    """Table 4: further models against a pool."""
    return [_trained(command, "table4")]


def _trained(command: Command, table_id: str) -> Table:
    return trained_table(command, CODE, table_id, partial(_note, command))[0]


def _note(command: Command, row: str) -> str:
    """What was trained for a row, by which distance."""
    config = load_row(Config, CODE.folder, CODE.folder / "configs" / row, command.scale, list(command.overrides))
    method, distance = config.method, "by the cosine"
    if method.distance == "geodesic":
        centres = " x ".join(map(str, method.branching))
        distance = f"by the geodesic distance ({method.attach}, {centres} centres, {method.num_neighbors} neighbours)"
    start = f"; starts from {config.start.part} of {config.start.row}" if config.start.row else ""
    return f"{note_of(command, row, CODE)}; pool of {method.queue_size:,} compared {distance}{start}"


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
