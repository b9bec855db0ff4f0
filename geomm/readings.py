"""What the graph adds: readings of Eq. 3 and hierarchies beside cosines that are as soft (part `readings`).

The paper attaches a query to its nearest centre and does not state how a gradient reaches it. Literally, all columns of
a query change equally, so that the positive hardly affects the gradient (`geodesic.py`). cos(D / 4) also softens the
softmax (`softness.py`), so that a gain over the plain cosine is not yet the graph's. Controls: the cosine with its
scale multiplied by several factors, the cosine as soft as a reading, a reading as sharp as the cosine, a complete graph
on the same centres, and the plain angle.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from common.distributed import is_main_process
from common.report.crossed import crossed_half_width, picture_variance
from common.report.figures import Curves, plot_curves
from common.report.hits import Hits
from common.report.statistics import shared_spread
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import Job, PaperCode, RowRun
from common.reproduce.side_by_side import run_rows
from common.reproduce.tables import stand_in_for
from common.run.log import read_log
from geomm.graph_table import AT_THE_END, OF_GRAPHS, figures_of_log

DECIDES = "nothing"

READINGS = {  # value of method.attach -> label
    "nearest": "nearest centre (Eq. 3 to the letter)",
    "nearest_local": "nearest centre, local",
    "knn": "nearest centres",
    "knn_local": "nearest centres, local",
    "nearest_st": "nearest centre, gradient of the cosine",
    "nearest_local_st": "nearest centre, local, gradient of the cosine",
    "knn_local_st": "nearest centres, local, gradient of the cosine",
}
STRAIGHT_THROUGH = ("nearest_st", "nearest_local_st", "knn_local_st")  # on every hierarchy
MATCHED = ("nearest_local_st", "knn_local_st")  # also as sharp as the cosine, and beside a cosine as soft
CHOSEN = ("method.attach", "method.graph", "method.match_entropy", "method.scale_factor")  # by the rows
FACTORS = (1.0, 0.75, 0.55, 0.4, 0.3, 0.086)  # of the cosine's scale, from the step of the first graph on
CURVE = "cosine, scale x 1 (left) to x 0.086"  # in the figure
ANGLE = "plain angle without a graph, gradient of the cosine"
# two projections on cached features: a run takes half a minute, and the comparison is of distances, not of towers
# both rates by make search, of the cosine's rows: results/geomm/search/photos-...
ON_PHOTOGRAPHS = ("model.image.layers=0", "model.text.layers=0", "optim.learning_rate=2e-3")
OVERRIDES = {"photos": ON_PHOTOGRAPHS, "demo": ("data.num_val=1000", "data.num_test=1000")}
# of the rows that go on from the trained towers: one rate for all, where Table 4 has the rates of its rows
AFTER_THE_START = dict.fromkeys(("demo", "photos"), ("optim.learning_rate=5e-4",))
COLUMNS = {
    "mean_recall": ("mean of six recalls", "percent", "higher"),
    "validation_recall": ("mean of six recalls, validation", "percent", "higher"),
    "i2t_recall_at_1": ("i2t R@1", "percent", "higher"),
    "t2i_recall_at_1": ("t2i R@1", "percent", "higher"),
}


class Reading(NamedTuple):
    """A row: its config and settings; in the figure, its panel and its curve there."""

    config: str
    settings: tuple[str, ...]
    label: str
    panel: str = ""
    curve: str = ""


def hierarchies(top: int) -> dict[str, tuple[tuple[str, ...], str]]:
    """Name -> settings and label, around the default with `top` centres of two each."""
    pairs = f"{top} x 2 centres"
    return {
        "": ((), pairs),
        "fours": ((f"method.branching=[{top},4]",), f"{top} x 4 centres"),
        "one_layer": ((f"method.branching=[{top}]",), f"{top} centres"),
        "threshold": (("method.graph=threshold",), f"{pairs} joined by a threshold"),
        "complete": (
            (f"method.num_neighbors={top - 1}", "method.allow_complete=true"),
            f"{pairs}, complete graph",
        ),
    }


def rows_of(top: int, few: bool = False) -> dict[str, Reading]:
    """All rows by name.

    Args:
        top: centres of the top layer at the scale.
        few: one row of each kind, for a test in seconds.
    """
    layouts, factors, others = hierarchies(top), FACTORS, [name for name in READINGS if name not in STRAIGHT_THROUGH]
    straight, matched = STRAIGHT_THROUGH, MATCHED
    if few:
        layouts = {name: layouts[name] for name in ("", "complete")}
        factors, others, straight, matched = (1.0, 0.3), ["nearest"], ("knn_local_st",), ("knn_local_st",)
    rows = {}
    for factor in factors:
        name, label = ("cosine", "cosine") if factor == 1 else (f"cosine_x{factor:g}", f"cosine, scale x {factor:g}")
        settings = () if factor == 1 else (f"method.scale_factor={factor:g}",)
        rows[name] = Reading("clip.yaml", settings, label, "every panel", CURVE)

    def with_controls(name: str, settings: tuple[str, ...], label: str, panel: str, curve: str) -> None:
        matching, sharp = (*settings, "method.match_entropy=true"), ", as sharp as the cosine"
        rows[f"{name}_matched"] = Reading("clip_geo.yaml", matching, label + sharp, panel + sharp, curve)
        rows[f"cosine_as_soft_as_{name}"] = Reading("clip.yaml", matching, f"cosine as soft as: {label}")

    of_angle = ("method.attach=angle_st",)
    rows["angle_st"] = Reading("clip_geo.yaml", of_angle, ANGLE, "every panel", "the plain angle")
    with_controls("angle_st", of_angle, ANGLE, "", "")
    for attach in (*others, *straight):
        for layout, (of_layout, sizes) in layouts.items():
            if layout and attach in others:
                continue
            name = f"{attach}_{layout}" if layout else attach
            settings, label = (f"method.attach={attach}", *of_layout), f"{READINGS[attach]}; {sizes}"
            panel = READINGS[attach] if attach in straight else ""
            rows[name] = Reading("clip_geo.yaml", settings, label, panel, sizes)
            if attach in matched:
                with_controls(name, settings, label, panel, sizes)
    return rows


def readings(command: Command, code: PaperCode) -> list[Table]:
    """Retrieval, softness and graphs of each row, all from the same trained towers."""
    command.refuse_search()
    command.refuse_set(CHOSEN)
    of_scale = OVERRIDES.get(command.scale, ())
    overrides = (*of_scale, *command.overrides)
    further = AFTER_THE_START.get(command.scale, ())
    if any(text.startswith("optim.learning_rate=") for text in command.overrides):
        further = ()
    top = code.config("clip_geo.yaml", command.scale, overrides).method.branching[0]
    rows = {
        name: row._replace(settings=(*further, *row.settings))
        for name, row in rows_of(top, few=command.scale == "smoke").items()
    }
    # the common start itself is a row to compare with
    trained = {"start": Reading("towers.yaml", (), "the trained towers themselves")} | rows
    runs = run_rows(
        {
            name: [
                Job(code, row.config, command.scale, seed, overrides, command.runs, row.settings)
                for seed in command.seeds
            ]
            for name, row in trained.items()
        }
    )
    if not is_main_process():
        return []
    values = {}
    for name, of_seeds in runs.items():
        figures = [figures_of(run) for run in of_seeds]
        for column in figures[0]:
            if all(column in of_run for of_run in figures):
                values[name, column] = [of_run[column] for of_run in figures]
    first = next(iter(runs.values()))[0]
    settings = {name: " ".join((row.config, *row.settings)) for name, row in trained.items()}
    columns = {**COLUMNS, "logit_scale": ("logit scale", "multiplier", None), **AT_THE_END, **OF_GRAPHS}
    findings = Findings(
        name="readings",
        caption=f"Readings of Eq. 3 and controls: CLIP against a pool, {steps_of(runs)} steps from trained towers.",
        data=f"{first.training_data}; ranked on {stand_in_for(command, runs, 'test')}",
        measured_on=dict.fromkeys(columns, "log of the training")
        | dict.fromkeys(COLUMNS, str(stand_in_for(command, runs, "test")))
        | {
            "validation_recall": ", ".join(
                name for name, numbers in first.validation.items() if "mean_recall" in numbers
            )
        },
        protocol="test set by the cosine; log of the last step and of the last graphs",
        settings={"rows": settings, "overrides": [*of_scale, *command.changes]},
        rows={name: row.label for name, row in trained.items()},
        columns=columns,
        values=values,
        notes=[
            "Softness is measured at the last step. The validation recall chooses a default; no test number does.",
            "As sharp as the cosine, and a cosine as soft as a reading: at the step of the first graph both have the "
            "same mean entropy of the softmax (geometric mean of the factors of both directions).",
        ],
    )
    plot_softness(rows, values, command.folder(code.name) / "readings_softness.png")
    return [
        findings_table(command, code.name, findings, runs),
        findings_table(command, code.name, gains(rows, runs, values, findings)),
    ]


def gains(
    rows: Mapping[str, Reading],
    runs: Mapping[str, list[RowRun]],
    values: Mapping[tuple[str, str], list[float]],
    readings: Findings,
) -> Findings:
    """Recall of a distance less that of its controls, in the same seeds: positive where the distance is ahead.

    Intervals are over seeds, with the spread that all rows share, and test pictures; one seed has none.
    """
    cosines = [name for name, row in rows.items() if row.config == "clip.yaml" and row.panel]
    validated = {
        name: sum(values[name, "validation_recall"]) for name in cosines if (name, "validation_recall") in values
    }
    best = max(validated, key=validated.__getitem__, default="")
    recalls = np.array([values[name, "mean_recall"] for name in rows])
    pictures = {name: Hits.of([run.hits["test"]["mean_recall"] for run in runs[name]]).by_picture() for name in rows}
    of_gain, intervals, labels = {}, {}, {}
    for name in rows:
        attach = next((attach for attach in MATCHED if name.startswith(attach)), name)
        controls = {"as_soft": f"cosine_as_soft_as_{name}", "complete": f"{attach}_complete", "best_cosine": best}
        if controls["as_soft"] not in rows:
            continue
        labels[name] = rows[name].label
        for column, control in controls.items():
            if control not in rows or control == name:
                continue
            difference = np.subtract(values[name, "mean_recall"], values[control, "mean_recall"])
            of_gain[name, column] = difference.tolist()
            if len(difference) > 1:
                weights = np.array([(row == name) - (row == control) for row in rows], dtype=float)
                new_pictures = picture_variance(pictures[name] - pictures[control])
                half = crossed_half_width(shared_spread(recalls).half_width(weights, 0.05), new_pictures, 0.05)
                intervals[name, column] = (difference.mean() - float(half), difference.mean() + float(half))
    return Findings(
        name="readings_gain",
        caption="What a distance adds: mean of six recalls less that of its controls.",
        data=readings.data,
        measured_on=readings.measured_on["mean_recall"],
        protocol="same seeds and test pictures for both; test set by the cosine",
        settings=readings.settings,
        rows=labels,
        columns={
            "as_soft": ("to the cosine as soft", "points", "higher"),
            "complete": ("to the complete graph", "points", "higher"),
            "best_cosine": ("to the best cosine", "points", "higher"),
        },
        values=of_gain,
        intervals=intervals,
        notes=[
            *([f"The best cosine has the highest recall on validation data: {rows[best].label}."] if best else []),
            "The complete graph joins the centres of the default hierarchy, also beside other hierarchies.",
        ],
    )


def steps_of(runs: Mapping[str, list[RowRun]]) -> int:
    """Steps of a row; all train equally long, but for the start."""
    return next(of_seeds[0].config.optim.steps for name, of_seeds in runs.items() if name != "start")


def figures_of(run: RowRun) -> dict[str, float]:
    """Column -> value of one run; shares in percent."""
    metrics, lines = run.evaluations["test"]["metrics"], read_log(run.files.log)
    figures = {column: 100 * metrics[column] for column in COLUMNS if column in metrics}
    for of_set in run.validation.values():
        if "mean_recall" in of_set:
            figures["validation_recall"] = 100 * of_set["mean_recall"]
    last = [line for line in lines if line["event"] == "train"][-1]
    figures["logit_scale"] = last["logit_scale"]
    return figures | figures_of_log(lines)


def plot_softness(rows: Mapping[str, Reading], values: Mapping[tuple[str, str], list[float]], path) -> None:
    """Recall over softness: the cosine's curve, and a point for each hierarchy, in a panel for each reading."""
    points = {
        name: (sum(values[name, "entropy"]) / len(values[name, "entropy"]), values[name, "mean_recall"])
        for name in rows
    }

    def curves(panel: str) -> dict[str, list[tuple[float, list[float]]]]:
        drawn: dict[str, list[tuple[float, list[float]]]] = {}
        for name, row in rows.items():
            if row.panel in ("every panel", panel):
                drawn.setdefault(row.curve, []).append(points[name])
        return {label: sorted(of_label) for label, of_label in drawn.items()}

    x_label, y_label = "entropy of the softmax, nats", "mean of six recalls, percent"
    panels = [
        Curves(panel.replace(", gradient of the cosine", ""), x_label, y_label, curves(panel))  # all have it
        for panel in dict.fromkeys(row.panel for row in rows.values() if row.panel.startswith("nearest"))
    ]
    plot_curves(panels, path, across=min(3, len(panels)), one_scale=True)
