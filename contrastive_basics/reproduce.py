"""Reproduces Table 1 of the chapter and the experiments on its statements.

make reproduce-table1 PAPER=contrastive_basics                        models trained here, on scenes, one seed
make reproduce-table1 PAPER=contrastive_basics SCALE=paper SET="public.clip=openai/clip-vit-large-patch14-336 \\
    public.flava=facebook/flava-full data.source=karpathy ..."        the table's models on the table's data
make reproduce-negatives_sweep PAPER=contrastive_basics SEEDS=3
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.config import ConfigError, to_dict
from common.base.provenance import hash_of
from common.data.pairs import open_retrieval_sets
from common.distributed import gather_objects, wait_for_everyone
from common.report.table import MEASURED, PAPER_SCALE, Row, Table
from common.reproduce.command import Command, reproduce_main, rows_at
from common.reproduce.rows import PaperCode, RowRun, is_current, read_run
from common.reproduce.tables import (
    Runs,
    columns_of,
    measured_cells,
    note_of,
    plot_runs,
    printed_cells,
    table_of,
    train_rows,
)
from common.run.evaluation_files import save_evaluations
from common.run.folder import RunFiles, provenance_of
from common.run.launch import run_or_explain, start_accelerator
from contrastive_basics import experiments, figures
from contrastive_basics.config import Config, PublicConfig
from contrastive_basics.evaluate import PAPER, reevaluate
from contrastive_basics.negatives_sweep import batches_and_queues, groups, negatives, steps_and_rates
from contrastive_basics.public import evaluate_public, open_public, public_state, weights_fingerprint
from contrastive_basics.train import train
from contrastive_basics.vision import tables as vision_tables

DECIDES = "nothing"

CODE = PaperCode(PAPER, Config, train, reevaluate)
EVERY_ROW = replace(CODE, other=lambda file: vision_tables.CODE if file.stem.startswith("vision_") else CODE)


def table1(command: Command) -> list[Table]:
    """Table 1: retrieval of published models, beside models trained here under equal conditions at the command's scale.

    Paper scale trains nothing: the table is about published weights, which public.clip and public.flava name.
    """
    source = CODE.printed("table1")
    options, command = command.split(PublicConfig)
    if command.scale == PAPER_SCALE and command.rows:
        raise ConfigError(f"ROWS={' '.join(command.rows)}: Table 1 trains no row at SCALE={PAPER_SCALE}; leave it out")
    public = options.public
    runs: Runs = {}
    rows = []
    for row in source["rows"]:
        method = row["method"]
        paper = printed_cells(source, row)
        checkpoint = {"CLIP": public.clip, "FLAVA": public.flava}.get(method, "")
        if not checkpoint:
            status = "cited" if method == "BEiT-3" else "not run"
            rows.append(Row(method, paper, {}, f"{status}: needs {row['needs']}"))
            continue
        for prefix in dict.fromkeys(("", public.caption_prefix)):
            run = _public_run(command, checkpoint, prefix)
            name = f"{method}, captions with '{prefix.strip()}'" if prefix else method
            runs[name] = [run]
            pixels = run.evaluations["test"]["protocol"]["preprocessing"]
            note = f"ours: {run.training_data}; pictures by Pillow, {pixels['mode']} to {pixels['size']} px"
            cells = measured_cells(source, [run], command.scale)
            with_prefix = method == "CLIP" and bool(public.caption_prefix)  # its printed numbers have one (recalled)
            printed_here = bool(prefix) == with_prefix
            rows.append(Row(name, paper if printed_here else {}, cells, MEASURED, note))
    # then the rows trained here, which have no printed numbers
    configs = _trained_rows(source, command)
    trained = {} if command.scale == PAPER_SCALE else train_rows(command, CODE, configs)
    for method, seeds in trained.items():
        note = note_of(command, configs[method], CODE)
        key = Path(configs[method]).stem.removeprefix("table1_")  # "ours" of table1_ours.yaml
        rows.append(Row(method, {}, measured_cells(source, seeds, command.scale), MEASURED, note, key=key))
    runs |= trained
    columns = columns_of(command, source, runs)
    table = table_of(command, PAPER, "table1", columns, rows, runs, experiment="trained_here")
    plot_runs(command, PAPER, trained)
    return [table]


def _trained_rows(source: dict[str, Any], command: Command) -> dict[str, str]:
    """Method -> config of the rows for the command's scale, with the user's rows."""
    rows = rows_at(command.scale, source["beyond"])
    return {row["method"]: row["config"] for row in rows} | {file.stem: str(file) for file in command.custom_files}


def _public_run(command: Command, checkpoint: str, prefix: str) -> RowRun:
    """Evaluations of a published checkpoint, cached under a key of its weights, its data and the caption prefix."""
    config = CODE.config("table1_ours.yaml", command.scale, command.overrides)
    key = hash_of([weights_fingerprint(checkpoint), prefix, to_dict(config.data)])
    files = RunFiles(command.runs / PAPER / f"public_{Path(checkpoint).name}-{key}", {"key": key})
    device = start_accelerator(config.run, files.folder).device
    if not gather_objects(is_current(files, open_retrieval_sets(config.data)))[0]:
        results = evaluate_public(open_public(checkpoint, config, device), config, prefix)
        provenance = provenance_of()
        state = public_state(checkpoint, provenance["git_revision"])
        save_evaluations(PAPER, results, files, 0, state, provenance)
    wait_for_everyone()
    return read_run(files, config)


PARTS = {
    "table1": table1,
    "negatives_sweep": partial(negatives, code=CODE, series=batches_and_queues),
    "negatives_in_groups": partial(negatives, code=CODE, series=groups),
    "negatives_by_batch": partial(negatives, code=CODE, series=steps_and_rates),
    "collapse": experiments.collapse,
    "temperature": experiments.temperature,
    "negatives": experiments.negatives,
    "loss_floor": experiments.loss_floor,
    "batch_size": experiments.batch_size,
    "self_supervised": vision_tables.self_supervised,
    "figure1": figures.figure1,
    "figure2": partial(figures.figure2, code=CODE),
    "figure3": partial(figures.figure3, code=CODE),
}


def main(arguments: list[str] | None = None) -> None:
    reproduce_main(__doc__, PAPER, PARTS, arguments)


if __name__ == "__main__":
    run_or_explain(main)
