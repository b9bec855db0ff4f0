"""Error of the hierarchy: distances over centres compared with shortest paths over all keys of a trained pool.

The exact geodesic joins every key to its nearest ones; the paper's hierarchy joins a few centres (Sec. 3.2). Distances
are those from test images to the keys of the text pool, as in training.
"""

import statistics
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from common.base.config import ConfigError
from common.data.pairs import open_evaluation_sets
from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun
from common.reproduce.tables import train_rows
from common.run.checkpoint import Checkpoint, last_checkpoint
from common.run.evaluation import reading_features, this_device
from geomm.ablations import branching_of
from geomm.config import Config, full_at
from geomm.evaluate import load_encoder
from geomm.geodesic import angles, geodesic_distance, sample_distance
from geomm.hierarchy import build_graph

DECIDES = "evaluation"

ROW = "clip.yaml"
NUM_QUERIES, SAMPLE_NEIGHBORS, NUM_ATTACHED = 200, 8, 8
KEYS_PER_CENTER = (256, 64, 16)  # of the top layer; the paper has 256
MIDDLE = {"layers": 2, "num_neighbors": 5, "attach": "knn"}  # with the middle number of clusters
VARIED = {"layers": (1, 3), "num_neighbors": (3, 8), "attach": ("nearest", "knn_local")}
COLUMNS = {
    "rank_correlation": ("rank correlation with exact geodesics", "Spearman's rho", "higher"),
    "relative_error": ("median relative error", "percent", "lower"),
    "unreachable": ("pairs without a path", "percent", None),
}


def deviation(approximate: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Deviation of distances from exact ones; both (num_queries, num_rows), inf = no path.

    Returns:
        rank_correlation: mean over queries of Spearman's rho over the rows that both reach. relative_error: median of
        |approximate - exact| / exact in percent, over those pairs. unreachable: percent of pairs without an approximate
        path.
    """
    both = torch.isfinite(approximate) & torch.isfinite(exact) & (exact > 0)
    correlations = []
    for one, other, mask in zip(approximate.double().numpy(), exact.double().numpy(), both.numpy()):
        if len(np.unique(one[mask])) > 1 and len(np.unique(other[mask])) > 1:
            correlations.append(spearmanr(one[mask], other[mask]).statistic)
    relative = ((approximate - exact).abs() / exact)[both]
    return {
        "rank_correlation": statistics.fmean(correlations),
        "relative_error": 100 * float(relative.median()),
        "unreachable": 100 * float(torch.isinf(approximate).float().mean()),
    }


def ways_of(num_rows: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Key -> label and settings of each graph: MIDDLE with one setting changed; clusters also with one layer."""
    few, middle, many = (max(8, num_rows // keys) for keys in KEYS_PER_CENTER)
    varied = [{}, *({"layers": layers, "clusters": clusters} for layers in (2, 1) for clusters in (few, many))]
    varied += [{name: value} for name, values in VARIED.items() for value in values]
    ways = {}
    for changes in varied:
        way = {"clusters": middle} | MIDDLE | changes
        branching = branching_of(way["clusters"], way["layers"])
        label = f"{' x '.join(map(str, branching))} centres, {way['num_neighbors']} neighbours, {way['attach']}"
        key = f"k{'x'.join(map(str, branching))}_n{way['num_neighbors']}_{way['attach']}"
        ways[key] = label, way | {"branching": branching}
    return ways


def check_filled(config: Config) -> None:
    """ConfigError unless the steps of a run fill its pools, as empty slots are no keys."""
    steps, batch = config.optim.steps, config.optim.global_batch_size
    if full_at(config) > steps:
        raise ConfigError(
            f"method.queue_size = {config.method.queue_size} with optim.steps = {steps}, which leave {steps * batch} "
            f"keys in a pool; expected: at least {full_at(config)} steps, or at most {steps * batch} keys"
        )


def keys_of(checkpoint: Checkpoint) -> torch.Tensor:
    """(capacity, dim) keys of the text pool."""
    return checkpoint.model_tensors()["text_pool.queue.features"]


def measure(run: RowRun) -> dict[str, dict[str, float]]:
    """Deviations of each graph, and of the plain angle, on the pool of a run."""
    checkpoint = last_checkpoint(run.files.checkpoints)
    encoder = load_encoder(checkpoint, this_device(), config=run.config)[1]
    rows = keys_of(checkpoint)
    pairs = open_evaluation_sets(run.config.data).retrieval["test"]
    images, readable = reading_features(encoder, run.config).images(pairs)
    queries = images[readable][:NUM_QUERIES].float()
    exact = sample_distance(queries, rows, SAMPLE_NEIGHBORS)
    deviations = {"angle": deviation(angles(queries, rows), exact)}
    for key, (_, way) in ways_of(len(rows)).items():
        graph = build_graph(rows, way["branching"], way["num_neighbors"])
        deviations[key] = deviation(geodesic_distance(queries, rows, graph, way["attach"], NUM_ATTACHED), exact)
    return deviations


def hierarchy_error(command: Command, code: PaperCode) -> list[Table]:
    """Distances over centres compared with exact ones, by clusters, layers, neighbours and readings."""
    check_filled(code.config(ROW, command.scale, command.overrides))
    runs = train_rows(command, code, {"clip": ROW})["clip"]
    measured = [measure(run) for run in runs]  # on every process, as embedding gathers
    if not is_main_process():
        return []
    first = runs[0]
    ways = ways_of(first.config.method.queue_size)
    values = {
        (key, column): [of_run[key][column] for of_run in measured] for key in ("angle", *ways) for column in COLUMNS
    }
    findings = Findings(
        name="hierarchy_error",
        caption="Distances over cluster centres beside shortest paths over all keys of a pool.",
        data=f"{first.training_data}; from pictures of {first.evaluations['test']['protocol']['data']}",
        measured_on=first.evaluations["test"]["protocol"]["data"],
        protocol=f"{NUM_QUERIES} pictures at most, {first.config.method.queue_size:,} keys; "
        f"exact: {SAMPLE_NEIGHBORS} neighbours",
        settings={"rows": {"clip": ROW}, "num_queries": NUM_QUERIES, "sample_neighbors": SAMPLE_NEIGHBORS},
        rows={"angle": "the plain angle", **{key: label for key, (label, _) in ways.items()}},
        columns=COLUMNS,
        values=values,
    )
    # the figure varies the number of centres, with all else as in MIDDLE
    by_layers = {
        f"{layers} layer{'s' if layers > 1 else ''}": [
            (float(way["clusters"]), values[key, "rank_correlation"])
            for key, (_, way) in sorted(ways.items(), key=lambda item: item[1][1]["clusters"])
            if way == way | MIDDLE | {"layers": layers}
        ]
        for layers in sorted({way["layers"] for _, way in ways.values()})
    }
    sizes = [point[0] for point in by_layers["1 layer"]]
    by_layers["plain angle"] = [(size, values["angle", "rank_correlation"]) for size in sizes]
    plot_curves(
        [Curves("from pictures to keys of the text pool", "top centres", "rank correlation", by_layers, log_x=True)],
        command.folder(code.name) / "hierarchy_error_curves.png",
        across=1,
    )
    return [findings_table(command, code.name, findings, {"clip": runs})]
