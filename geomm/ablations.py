"""Table 7: the graph in other sizes, in the paper's proportions to the sizes of a scale."""

from common.report.claims.expressions import margins, parse
from common.report.claims.intervals import estimate
from common.report.claims.ours import our_cells
from common.report.table import Table
from geomm.config import Config, full_at

DECIDES = "nothing"

CLUSTERS = {"128 clusters": 1 / 2, "192 clusters": 3 / 4, "256 clusters": 1, "384 clusters": 3 / 2}  # of the default's
NEIGHBORS = {"6 neighbours": -1, "8 neighbours": 0, "10 neighbours": 1, "12 neighbours": 2}  # quarters of the default's
INTERVALS = {"50 steps": 1 / 2, "75 steps": 3 / 4, "100 steps": 1, "125 steps": 5 / 4}  # of the default's
DEFAULTS = {"table7a": "2 layers", "table7b": "256 clusters", "table7c": "8 neighbours", "table7d": "100 steps"}
DIFFERENCE = 1.5  # points, the largest of the paper's in TR R@1 within a table
NUM_GRAPHS = 6  # in the row with the longest interval of Table 7d


def branching_of(top: int, layers: int) -> tuple[int, ...]:
    """Clusters of each layer within one of the layer above: the first number is the paper's n_cluster, below are pairs.

    inferred: Sec. 3.3 gives the clusters of the first clustering only; Table 6's memory leaves room for two in each.
    """
    return top, *(2,) * (layers - 1)


def settings_of(table_id: str, config: Config) -> dict[str, list[str]]:
    """Overrides of each row of a table.

    Args:
        table_id: "table7a" to "table7d".
        config: of the default row at the scale.
    """
    method = config.method
    (top, *below), layers = method.branching, len(method.branching)

    def branching(top: int, layers: int) -> list[str]:
        sizes = (top, *below[: layers - 1], *branching_of(top, layers)[1 + len(below) :])
        return [] if sizes == method.branching else [f"method.branching={list(sizes)}"]

    if table_id == "table7a":
        return {f"{n} layer{'s' if n > 1 else ''}": branching(top, n) for n in (1, 2, 3)}
    if table_id == "table7b":
        return {row: branching(round(share * top), layers) for row, share in CLUSTERS.items()}
    if table_id == "table7c":
        step = max(1, method.num_neighbors // 4)
        return {
            row: [f"method.num_neighbors={method.num_neighbors + quarters * step}"] if quarters else []
            for row, quarters in NEIGHBORS.items()
        }
    intervals = {row: max(1, round(share * method.graph_update_interval)) for row, share in INTERVALS.items()}
    # all rows train as long as the one with the rarest graphs needs
    steps = max(full_at(config), method.geodesic_from_step) + NUM_GRAPHS * max(intervals.values())
    longer = [f"optim.steps={steps}"] if steps > config.optim.steps else []
    return {
        row: longer + ([] if interval == method.graph_update_interval else [f"method.graph_update_interval={interval}"])
        for row, interval in intervals.items()
    }


def seeds_notes(table: Table) -> list[str]:
    """How many seeds would show `DIFFERENCE` between the default row and another one, by column; none of one seed.

    By the rule of the claims (`common/report/crossed.py`), for the row that needs most.
    """
    default, texts = DEFAULTS[table.table_id], []
    for column in table.columns:
        measured = [row.method for row in table.rows if row.ours.get(column.key)]
        if column.unit != "percent" or len(table.seeds) < 2 or default not in measured:
            continue
        counts = [_seeds_of(table, column.key, row, default) for row in measured if row != default]
        needs = "more pictures, not seeds" if None in counts else f"about {max(counts)} seeds"
        texts += [f"{column.label} {needs}"] if counts else []
    return [f"A difference of {DIFFERENCE} points to {default} takes: {'; '.join(texts)}."] if texts else []


def _seeds_of(table: Table, column: str, row: str, default: str) -> int | None:
    (margin,) = margins(parse(f'{table.table_id}["{row}"]["{column}"] > {table.table_id}["{default}"]["{column}"]'))
    cells = our_cells([table])[table.scale]
    used = {cell: cells[cell] for cell in margin.cells}
    spread = estimate(margin, margin.slopes({cell: number.number.mean for cell, number in used.items()}), used)
    return spread.seeds_needed(DIFFERENCE)
