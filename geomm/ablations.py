"""Table 7: the graph in other sizes, in the paper's proportions to the sizes of a scale."""

import itertools
import math

from geomm.config import MethodConfig

DECIDES = "nothing"

CLUSTERS = {"128 clusters": 1 / 2, "192 clusters": 3 / 4, "256 clusters": 1, "384 clusters": 3 / 2}  # of the default's
NEIGHBORS = {"6 neighbours": 6, "8 neighbours": 8, "10 neighbours": 10, "12 neighbours": 12}
INTERVALS = {"50 steps": 1 / 2, "75 steps": 3 / 4, "100 steps": 1, "125 steps": 5 / 4}  # of the default's


def branching_of(num_clusters: float, layers: int) -> tuple[int, ...]:
    """Clusters of each layer within one of the layer above, as equal as possible: (16, 16) of 256, (4, 4, 4) of 64.

    Args:
        num_clusters: number of bottom centres; without an exact product the nearest one is used.
    """
    most = int(2 * num_clusters ** (1 / layers)) + 2
    ways = itertools.combinations_with_replacement(range(2, most), layers)
    return min(ways, key=lambda way: (abs(math.prod(way) - num_clusters), way[-1] / way[0]))


def settings_of(table_id: str, method: MethodConfig) -> dict[str, list[str]]:
    """Overrides of each row of a table.

    Args:
        table_id: "table7a" to "table7d".
        method: of the default row at the scale.
    """
    clusters, layers = math.prod(method.branching), len(method.branching)

    def branching(count: float, layers: int) -> str:
        return f"method.branching={list(branching_of(count, layers))}"

    if table_id == "table7a":
        return {f"{n} layer{'s' if n > 1 else ''}": [] if n == layers else [branching(clusters, n)] for n in (1, 2, 3)}
    if table_id == "table7b":
        return {row: [] if share == 1 else [branching(share * clusters, layers)] for row, share in CLUSTERS.items()}
    if table_id == "table7c":
        return {
            row: [] if count == method.num_neighbors else [f"method.num_neighbors={count}"]
            for row, count in NEIGHBORS.items()
        }
    interval = method.graph_update_interval
    return {
        row: [] if share == 1 else [f"method.graph_update_interval={max(1, round(share * interval))}"]
        for row, share in INTERVALS.items()
    }
