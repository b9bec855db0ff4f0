"""What the graphs of a table's rows are like, as a second table: hops, path / angle, components, what has no path."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import RowRun
from common.run.log import read_log

DECIDES = "nothing"

AT_THE_END = {  # of the last step in the log, mean of both directions
    "entropy": ("softness: entropy of the softmax", "nats", None),
    "scale_factor": ("factor on the scale", "multiplier", None),
    "positive_local": ("local positives", "percent", None),
    "positive_lost": ("unreachable or truncated positives", "percent", "lower"),
    "unreachable": ("unreachable candidates", "percent", None),
    "distinct_centers": ("nearest centres in a batch", "centres", None),
}
OF_GRAPHS = {  # of the last graphs, mean of both pools
    "hops": ("edges of a path, top layer", "edges", None),
    "path_over_angle": ("path / angle, top layer", "ratio", None),
    "components": ("components, top layer", "components", None),
    "unreachable_pairs": ("pairs of centres without a path", "percent", None),
}
BESIDE_A_TABLE = OF_GRAPHS | {column: AT_THE_END[column] for column in ("unreachable", "positive_lost")}


def figures_of_graphs(graphs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Column of `OF_GRAPHS` -> mean over graphs, from what `graph_report.py` reports; shares in percent."""
    figures = {}
    for column, (_, unit, _) in OF_GRAPHS.items():
        key = "unreachable" if column == "unreachable_pairs" else column
        if graphs and all(key in graph for graph in graphs):
            share = 100 if unit == "percent" else 1
            figures[column] = share * sum(graph[key] for graph in graphs) / len(graphs)
    return figures


def figures_of_log(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Column of `AT_THE_END` and `OF_GRAPHS` -> value at the end of a run; shares in percent.

    A run on pictures alone logs no directions, and one by the cosine no graphs: they lack these columns.
    """
    last, figures = dict([line for line in lines if line["event"] == "train"][-1]), {}
    for side in ("i2t", "t2i"):
        if f"{side}_positive_unreachable" in last:
            lost = last[f"{side}_positive_unreachable"] + last[f"{side}_positive_truncated"]
            last[f"{side}_positive_lost"] = lost
    for column, (_, unit, _) in AT_THE_END.items():
        if f"i2t_{column}" in last:
            share = 100 if unit == "percent" else 1
            figures[column] = share * (last[f"i2t_{column}"] + last[f"t2i_{column}"]) / 2
    graphs = {line.get("pool"): line for line in lines if line["event"] == "graph"}  # the last one of each pool
    return figures | figures_of_graphs([*graphs.values()])


def graphs_of_runs(command: Command, table: Table, runs: Mapping[str, Sequence[RowRun]]) -> list[Table]:
    """`graphs_beside` of trained rows, from their logs; of rows of the same runs the first."""
    logs = {method: [run.files.log for run in seeds] for method, seeds in runs.items()}
    figures = {
        method: [figures_of_log(read_log(log)) for log in logs[method]]
        for method, seeds in runs.items()
        if seeds[0].config.method.distance == "geodesic"
        and method == next(first for first in logs if logs[first] == logs[method])
    }
    return graphs_beside(command, table, figures)


def graphs_beside(command: Command, table: Table, figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Table]:
    """The table of the graphs beside another one, a line for each row; none without rows. Call on the main process.

    Args:
        figures: row -> `figures_of_log` by seed.
    """
    if not figures:
        return []
    values = {
        (row, column): [of_seed[column] for of_seed in seeds]
        for row, seeds in figures.items()
        for column in BESIDE_A_TABLE
        if all(column in of_seed for of_seed in seeds)
    }
    present = {column for _, column in values}
    ran = {row.method: row.ran for row in table.rows}
    findings = Findings(
        name=f"{table.table_id}_graphs",
        caption="What the graphs of these rows are like: the last ones of the training.",
        data=table.data,
        protocol="mean over pairs of centres of the top layer, and over both pools and directions",
        settings={"rows": list(figures)},
        rows={row: ran.get(row) or row for row in figures},
        columns={column: texts for column, texts in BESIDE_A_TABLE.items() if column in present},
        values=values,
        notes=["On a sphere the paths over a complete graph are the angles: 1 edge, path / angle 1."],
    )
    return [findings_table(command, table.paper, findings)]
