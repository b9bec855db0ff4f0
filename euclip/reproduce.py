"""Reproduces the tables of EuCLIP: trains missing rows and prints the results beside the paper's numbers.

make reproduce-table4 PAPER=euclip                                        scenes at demo scale, one seed
make reproduce-table4 PAPER=euclip SCALE=photos DATA=/data/flickr8k WEIGHTS=/data/weights SEEDS=3
python euclip/reproduce.py table5 --scale smoke --output outputs
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.distributed import is_main_process
from common.report.table import Table
from common.reproduce.command import Command, reproduce_main
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import trained_table, with_custom_rows
from common.run.launch import run_or_explain
from common.run.log import read_log
from euclip import figures, hierarchies, regime, stability
from euclip import traversal_tables as walk_tables
from euclip.config import Config
from euclip.evaluate import PAPER, reevaluate
from euclip.suite import open_tests
from euclip.train import train

DECIDES = "nothing"

CODE = PaperCode(PAPER, Config, train, reevaluate, open_tests=open_tests)
AT_THE_END = {  # of a run's log: label, unit, which is better
    "logit_scale": ("beta", "multiplier", None),
    "curvature": ("c", "curvature", None),
    "image_scale": ("alpha, image", "multiplier", None),
    "text_scale": ("alpha, text", "multiplier", None),
    "image_norm": ("mean norm, image", "norm", None),
    "text_norm": ("mean norm, text", "norm", None),
    "entailment_loss": ("entailment loss", "radians", "lower"),
}


def _trained(command: Command, table_id: str) -> list[Table]:
    """A table of trained rows, and a second one with their final scalars and norms."""
    table, runs = trained_table(command, CODE, table_id)
    # keys of claims are the configs' names without the table: table4_euclip.yaml -> "euclip"
    source = with_custom_rows(command, CODE.printed(table_id))
    configs = {row["method"]: row["config"] for row in source["rows"]}
    keys = {method: Path(config).stem.removeprefix(f"{table_id}_") for method, config in configs.items()}
    of_regime, notes = regime.regime_of_rows({keys[method]: seeds for method, seeds in runs.items()})
    if not is_main_process():
        return [table]
    last = {
        method: [[line for line in read_log(run.files.log) if line["event"] == "train"][-1] for run in seeds]
        for method, seeds in runs.items()
    }
    findings = Findings(
        name=f"{table_id}_scalars",
        caption=f"Scalars, mean norms and entailment loss at the last step of {table_id}'s rows; their regime.",
        data=table.data,
        protocol="training log",
        settings={method: Path(configs[method]).name for method in runs},
        rows={keys[method]: method for method in runs},
        columns=AT_THE_END | {name: regime.COLUMNS[name] for _, name in of_regime},
        values={
            (keys[method], name): [line[name] for line in lines]
            for method, lines in last.items()
            for name in AT_THE_END
            if name in lines[0]
        }
        | of_regime,
        notes=notes,
        rows_are_runs=True,
        measured_on=dict.fromkeys(regime.COLUMNS, f"at most {regime.NUM_PICTURES:,} training images, and the log")
        | dict.fromkeys(AT_THE_END, "the log's last step"),
    )
    return [table, findings_table(command, PAPER, findings, runs)]


PARTS = {
    "table1": partial(_trained, table_id="table1"),
    "table2": partial(walk_tables.table2, code=CODE),
    "table3": partial(walk_tables.table3, code=CODE),
    "table4": partial(_trained, table_id="table4"),
    "table5": partial(_trained, table_id="table5"),
    "table6": partial(walk_tables.table6, code=CODE),
    "table7": partial(walk_tables.table7, code=CODE),
    "table8": partial(_trained, table_id="table8"),
    "figure2": partial(figures.figure2, code=CODE),
    "figure4": partial(figures.figure4, code=CODE),
    "figure5": partial(walk_tables.figure5, code=CODE),
    "figure6": partial(figures.figure6, code=CODE),
    "figure7": partial(figures.figure7, code=CODE),
    "figure8": partial(figures.figure8, code=CODE),
    "root_norms": partial(figures.root_norms, code=CODE),
    "hierarchies": partial(hierarchies.hierarchies, code=CODE),
    "stability": partial(stability.stability, code=CODE),
    "regime": partial(regime.regime, code=CODE),
}


def main(arguments: list[str] | None = None) -> None:
    reproduce_main(__doc__, PAPER, PARTS, arguments)


if __name__ == "__main__":
    run_or_explain(main)
