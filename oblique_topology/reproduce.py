"""Reproduces the tables of the oblique-topology paper: trains what is missing, prints ours beside the paper's.

make reproduce-table2                                        scenes at demo scale, one seed
make reproduce-table2 SCALE=photos DATA=/data/flickr8k SEEDS=3
python oblique_topology/reproduce.py table2 --scale smoke --output outputs
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.evaluation.retrieval import RECALL_AT
from common.report.cells import measured_cell
from common.report.command import Command, reproduce_main
from common.report.schema import MEASURED, Column, Row, Table
from common.report.trained_rows import Runs, trained_table
from common.run.reproduce import PaperCode
from common.run.session import run_or_explain
from oblique_topology.config import Config
from oblique_topology.evaluate import PAPER, reevaluate
from oblique_topology.train import train

CODE = PaperCode(PAPER, Config, train, reevaluate)


def table2(command: Command) -> list[Table]:
    """Table 2: large-scale zero-shot classification and retrieval; and the same retrieval with all recalls."""
    table, runs = trained_table(command, CODE, "table2")
    return [table, _all_recalls(command, CODE.paper_tables(), runs)]


def _all_recalls(command: Command, printed: dict, runs: Runs) -> Table:
    """R@1, R@5 and R@10 both ways of every trained row: what Table 2 folds into its mean."""
    measures = [
        (role, f"{direction}_recall_at_{k}", f"{direction} R@{k}")
        for role in ("test", "second_test")
        if any(role in seeds[0].evaluations for seeds in runs.values())
        for direction in ("i2t", "t2i")
        for k in RECALL_AT
    ]
    columns = [
        Column(f"{role}_{metric}", label, stands_in_for=command.stand_in(runs, role))
        for role, metric, label in measures
    ]
    rows = [
        Row(
            method,
            {},
            {f"{role}_{metric}": measured_cell(seeds, role, metric, command.scale) for role, metric, _ in measures},
            MEASURED,
        )
        for method, seeds in runs.items()
    ]
    return command.table(
        CODE, printed, "table2", columns, rows, runs, "_recalls", "Retrieval in full of the rows trained here."
    )


PARTS = {"table2": table2}


def main(arguments: list[str] | None = None) -> None:
    reproduce_main(__doc__, PAPER, PARTS, arguments)


if __name__ == "__main__":
    run_or_explain(main)
