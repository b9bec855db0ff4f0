"""Reproduces the tables of GeoMM: trains missing rows and prints the results beside the paper's numbers.

make reproduce-readings PAPER=geomm SEEDS=3        which reading of Eq. 3 trains, scenes at demo scale
make reproduce-table2 PAPER=geomm
python geomm/reproduce.py table4 --scale smoke --output outputs
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.provenance import hardware
from common.distributed import is_main_process
from common.report.table import Column, Measured, Table
from common.reproduce.command import Command, reproduce_main
from common.reproduce.rows import RowRun
from common.reproduce.tables import note_of, printed_rows, table_of, trained_table
from common.run.launch import run_or_explain
from geomm.ablations import seeds_notes, settings_of
from geomm.config import Config, DistanceConfig
from geomm.cost import RANDOM, costs, graph_of_random_keys
from geomm.finetune import CODE as TASKS
from geomm.graph_table import graphs_beside, graphs_of_runs
from geomm.hierarchy_error import hierarchy_error
from geomm.lookalikes import lookalikes
from geomm.mining import mining
from geomm.pretrain import CODE as PICTURES
from geomm.readings import readings
from geomm.refcoco_plus import figure3, refcoco_plus
from geomm.table3 import table3
from geomm.train import CODE
from geomm.training_data import table8

DECIDES = "nothing"

EVERY_ROW = replace(TASKS, other=lambda file: PICTURES if file.stem.startswith("vision_") else TASKS.other(file))


def table5(command: Command) -> list[Table]:
    """Table 5: learning from images only, by a linear probe and nearest neighbours."""
    table, runs = trained_table(command, PICTURES, "table5", _note_of_pictures)
    return _with_graphs(command, table, runs)


def table6(command: Command) -> list[Table]:
    """Table 6: time and memory of training steps."""
    command.refuse_processes()
    source = CODE.printed("table6")
    files = {row["method"]: row["config"] for row in source["rows"] if command.trains(row["config"])}
    configs = {method: _config(command, file) for method, file in files.items()}
    cells = costs(command, configs)
    rows = printed_rows(
        source, {method: (cells[method], _note(command, file, is_trained=False)) for method, file in files.items()}
    )
    columns = [
        Column(column["key"], column["label"], column["unit"], None, column["better"]) for column in source["columns"]
    ]
    table = table_of(command, CODE.name, "table6", columns, rows, {}, data=RANDOM, hardware=hardware())
    graphs = {
        method: [graph_of_random_keys(config, seed) for seed in command.seeds]
        for method, config in configs.items()
        if config.method.distance == "geodesic"
    }
    return [table, *graphs_beside(command, table, graphs)]


def table7(command: Command, letter: str) -> list[Table]:
    """Tables 7a to 7d: the graph in other sizes."""
    table_id = f"table7{letter}"
    source = CODE.printed(table_id)
    row = source["rows"][0]["config"]
    settings, more = settings_of(table_id, _config(command, row)), {}
    if letter == "a" and command.trains(row):
        command.refuse_processes()
        more = costs(
            command, {method: _config(command, row, changes) for method, changes in settings.items()}, memory=False
        )
    tables = _trained(command, table_id, settings, more)
    return [replace(table, notes=[*table.notes, *seeds_notes(table)]) for table in tables[:1]] + tables[1:]


def _trained(
    command: Command,
    table_id: str,
    settings: Mapping[str, Sequence[str]] = {},
    more: Mapping[str, Mapping[str, Measured]] = {},
) -> list[Table]:
    """A table of retrieval; each row's note names the distance of its training."""
    fields = ("crowded",) if command.scale in ("smoke", "demo") else ()  # elsewhere nothing stands for MSCOCO
    table, runs = trained_table(command, CODE, table_id, _note, settings, fields, more)
    return _with_graphs(command, table, runs)


def _with_graphs(command: Command, table: Table, runs: Mapping[str, list[RowRun]]) -> list[Table]:
    """The table, and what the graphs of its rows are like."""
    if not is_main_process():
        return []
    return [table, *graphs_of_runs(command, table, runs)]


def _note_of_pictures(command: Command, row: str) -> str:
    """The trained experiment of a row of Table 5, with its distance."""
    config = PICTURES.config(row, command.scale, command.overrides)
    data, model, method = config.data, config.model, config.method
    kind = (
        "ResNet-50" if model.backbone == "resnet50" else f"ResNet of width {model.width}, blocks {list(model.blocks)}"
    )
    start = f"ours: {data.image_size} px, {kind}"
    if method.name == "random_weights":
        return start
    against = f"pool of {method.queue_size:,}" if method.name == "moco_v2" else f"{method.num_prototypes:,} prototypes"
    nodes = f"{_times(method.branching)} centres, " if method.name == "moco_v2" else ""
    steps = f"{config.optim.steps} steps of {config.optim.global_batch_size} pictures"
    return f"{start}; {steps}; {against} compared {_by_distance(method, nodes)}"


def _times(branching: Sequence[int]) -> str:
    return " x ".join(map(str, branching))


def _by_distance(method: DistanceConfig, nodes: str) -> str:
    if method.distance != "geodesic":
        is_soft = getattr(method, "match_entropy", False)  # rows on images alone have no such setting
        return "by the cosine" + ", as soft as the geodesic distance from the first graph on" * is_soft
    start = f", from step {method.geodesic_from_step} on" if method.geodesic_from_step else ""
    local = f", local: {method.local}" if method.local != DistanceConfig.local else ""
    joined = f"{method.num_neighbors} neighbours"
    if method.graph == "threshold":
        joined = f"joined by a threshold with as many edges as {joined}"
    return (
        f"by the geodesic distance ({method.attach}{local}, {nodes}{joined}, a graph every "
        f"{method.graph_update_interval} steps{start})"
    )


def _config(command: Command, row: str, settings: Sequence[str] = ()) -> Config:
    return CODE.config(row, command.scale, [*command.overrides, *command.settings_of(row), *settings])


def _note(command: Command, row: str, is_trained: bool = True) -> str:
    """The experiment of a row, with its distance and its start; see `note_of`."""
    config = _config(command, row)
    method = config.method
    distance = _by_distance(method, f"{_times(method.branching)} centres, ")
    if method.distance == "oblique":
        distance = f"on {method.num_spheres} spheres of {config.model.embedding_dim // method.num_spheres} numbers"
    part = "the towers of " if config.start.part == "towers" else ""
    of_run = "a run given as start.run" if config.start.run else f"row {config.start.row}"
    start = f"; starts from {part}{of_run}" if config.start.run or config.start.row else ""
    note = f"{note_of(command, row, CODE, is_trained)}; pool of {method.queue_size:,} compared {distance}"
    return note + start if is_trained else note


PARTS = {
    "readings": partial(readings, code=CODE),
    "table1": partial(_trained, table_id="table1"),
    "table2": partial(_trained, table_id="table2"),
    "table3": partial(table3, code=TASKS),
    "table4": partial(_trained, table_id="table4"),
    "table5": table5,
    "table6": table6,
    "table7a": partial(table7, letter="a"),
    "table7b": partial(table7, letter="b"),
    "table7c": partial(table7, letter="c"),
    "table7d": partial(table7, letter="d"),
    "table8": partial(table8, code=CODE),
    "table9": partial(_trained, table_id="table9"),
    "refcoco_plus": partial(refcoco_plus, code=CODE),
    "figure3": partial(figure3, code=CODE),
    "hierarchy_error": partial(hierarchy_error, code=CODE),
    "lookalikes": partial(lookalikes, code=CODE),
    "mining": partial(mining, code=CODE),
}


def main(arguments: list[str] | None = None) -> None:
    reproduce_main(__doc__, CODE.name, PARTS, arguments)


if __name__ == "__main__":
    run_or_explain(main)
