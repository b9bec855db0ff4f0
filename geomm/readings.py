"""Which reading of Eq. 3 trains: all readings from random weights and from trained towers (part `readings`).

The paper attaches a query to its nearest centre and does not state how a gradient reaches it. Literally, all columns of
a query change equally, so that the positive hardly affects the gradient (`geodesic.py`).
"""

from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, write_findings
from common.reproduce.rows import Job, PaperCode, RowRun
from common.reproduce.side_by_side import run_rows
from common.reproduce.tables import stand_in_for
from common.run.log import read_log

DECIDES = "nothing"

READINGS = {  # name -> (config, settings, label)
    "cosine": ("clip.yaml", (), "cosine"),
    "angle": (
        "clip_geo.yaml",
        ("method.local=attached", "method.num_neighbors=65536"),  # all centres: every key is in an attached cluster
        "no graph: cos(D / 4) of the plain angle, gradient of the cosine",
    ),
    "nearest": ("clip_geo.yaml", ("method.attach=nearest",), "nearest centre (Eq. 3 to the letter)"),
    "knn": ("clip_geo.yaml", ("method.attach=knn",), "nearest centres"),
    "knn_local": ("clip_geo.yaml", ("method.attach=knn_local",), "nearest centres, local: nearest cluster"),
    "knn_local_attached": (
        "clip_geo.yaml",
        ("method.attach=knn_local", "method.local=attached"),
        "nearest centres, local: their clusters",
    ),
    "nearest_st": ("clip_geo.yaml", ("method.attach=nearest_st",), "nearest centre, gradient of the cosine"),
    "knn_local_st": ("clip_geo.yaml", (), "nearest centres, local, gradient of the cosine"),
}
# two projections on cached features: a run takes a minute, and the comparison is of distances, not of towers
ON_PHOTOGRAPHS = ("model.image.layers=0", "model.text.layers=0")
STARTS = {"trained": ("from trained towers", ()), "random": ("from random weights", ("start.row=",))}
METRICS = {
    "mean_recall": ("mean of six recalls", "percent", "higher"),
    "i2t_recall_at_1": ("i2t R@1", "percent", "higher"),
    "t2i_recall_at_1": ("t2i R@1", "percent", "higher"),
}
AT_THE_END = {  # of the log, mean of both directions
    "positive_local": ("local positives", "percent", None),
    "positive_unreachable": ("unreachable positives", "percent", "lower"),
    "distinct_centers": ("nearest centres in a batch", "centres", None),
}


def readings(command: Command, code: PaperCode) -> list[Table]:
    """Retrieval and final state of the pools for each reading and the cosine, by start."""
    overrides = (*(ON_PHOTOGRAPHS if command.scale == "photos" else ()), *command.overrides)
    jobs = {
        f"{start}_{name}": [
            Job(code, config, command.scale, seed, overrides, command.runs, (*of_start, *settings))
            for seed in command.seeds
        ]
        for start, (_, of_start) in STARTS.items()
        for name, (config, settings, _) in READINGS.items()
    }
    # the common start itself, as a row to compare with
    jobs["start"] = [Job(code, "towers.yaml", command.scale, seed, overrides, command.runs) for seed in command.seeds]
    runs = run_rows(jobs)
    if not is_main_process():
        return []
    values = {
        (name, metric): [100 * run.evaluations["test"]["metrics"][metric] for run in of_seeds]
        for name, of_seeds in runs.items()
        for metric in METRICS
    }
    # the state of the pools at the last step; the cosine has no graph, and its columns stay empty
    for name, of_seeds in runs.items():
        last = [[line for line in read_log(run.files.log) if line["event"] == "train"][-1] for run in of_seeds]
        values[name, "logit_scale"] = [line["logit_scale"] for line in last]
        for key, (_, unit, _) in AT_THE_END.items():
            if all(f"i2t_{key}" in line for line in last):
                share = 100 if unit == "percent" else 1
                values[name, key] = [share * (line[f"i2t_{key}"] + line[f"t2i_{key}"]) / 2 for line in last]
    first = next(iter(runs.values()))[0]
    findings = Findings(
        name="readings",
        caption=f"Readings of Eq. 3: CLIP against a pool after {first.config.optim.steps} steps, by start.",
        data=f"{first.training_data}; ranked on {stand_in_for(command, runs, 'test')}",
        measured_on=str(stand_in_for(command, runs, "test")),
        protocol="test set by the cosine; log of the last step",
        settings={"rows": {name: " ".join((config, *settings)) for name, (config, settings, _) in READINGS.items()}},
        rows={"start": "the trained towers themselves"}
        | {
            f"{start}_{name}": f"{label}, {description}"
            for start, (description, _) in STARTS.items()
            for name, (_, _, label) in READINGS.items()
        },
        columns={**METRICS, "logit_scale": ("temperature's inverse", "multiplier", None), **AT_THE_END},
        values=values,
    )
    plot_curves(
        [
            Curves(description, "step", "mean rank of the positive", _ranks(runs, start), log_y=True)
            for start, (description, _) in STARTS.items()
        ],
        command.folder(code.name) / "readings_curves.png",
        across=len(STARTS),
    )
    return [write_findings(command, code.name, findings, runs)]


def _ranks(runs: dict[str, list[RowRun]], start: str) -> dict[str, list[tuple[float, list[float]]]]:
    """Course of the positive's mean rank among the pool's keys, mean of both directions, one value per seed."""
    curves = {}
    for name, (_, _, label) in READINGS.items():
        logs = [_rank_by_step(run) for run in runs[f"{start}_{name}"]]
        curves[label] = [(float(step), [log[step] for log in logs]) for step in logs[0]]
    return curves


def _rank_by_step(run: RowRun) -> dict[int, float]:
    lines = [line for line in read_log(run.files.log) if "i2t_positive_rank" in line]
    return {line["step"]: (line["i2t_positive_rank"] + line["t2i_positive_rank"]) / 2 for line in lines}
