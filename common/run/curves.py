"""The plot of training logs: of a run, curves.png in its folder, and of the rows of a table, beside it."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.base.drawing import (
    COLORS,
    FONT,
    GREY,
    SMALL,
    draw_curve,
    label_axes,
    legend_below,
    literal,
    panels_of,
    scale_by_range,
    set_title,
    write_figure,
)
from common.base.files import write_atomically

DECIDES = "nothing"

_POINTS = 60  # a longer series is averaged over windows of steps, so that its course can be seen through the noise
_VALIDATED = {  # end of a metric's name -> the axis
    "i2t_recall_at_1": "validation i2t R@1 (percent)",
    "t2i_recall_at_1": "validation t2i R@1 (percent)",
    "acc1": "validation accuracy, zero-shot or kNN\n(percent)",
}
_PANELS = {"loss": "loss (nats)", "logit_scale": "logit scale (multiplier)", **_VALIDATED}


def plot_run(records: Sequence[Mapping], path: Path, title: str) -> Path | None:
    """A run's log so far, with all trainable scalars and the learning rate; None without a training step."""
    lines = [record for record in records if record.get("event") == "train"]
    if not lines:
        return None
    panels = {"loss": "loss (nats)" if any("loss_over_chance" in line for line in lines) else "loss"}
    if any(line["loss"] != line.get("contrastive_loss", line["loss"]) for line in lines):
        panels["contrastive_loss"] = "contrastive part of the loss (nats)"
    panels |= {
        "logit_scale": _PANELS["logit_scale"],
        "projection_channel_std": "spread of the unit projections\n(standard deviation)",
    }
    # the log has a gradient norm of each trainable scalar
    scalars = (key.removeprefix("gradient_norm_") for line in lines for key in line if key.startswith("gradient_norm_"))
    panels |= {key: key.replace("_", " ") for key in scalars if key not in panels}
    panels |= {**_VALIDATED, "accuracy": "validation accuracy (percent)", "learning_rate": "learning rate"}
    figure, _ = _drawn({"this run": records}, panels, title, at_least=1)
    picture = io.BytesIO()  # without the palette of the tables' plots: a run waits for it
    figure.savefig(picture, format="png", dpi=100)
    return write_atomically(path, picture.getvalue())


def plot_training(log_records_by_run: Mapping[str, Sequence[Mapping]], path: str | Path, title: str = "") -> list[Path]:
    """Loss, logit scale, R@1 and accuracy against the step, one panel each: mean over a row's seeds, and their range.

    Rows of another length, stages that start from other rows ("<row>, <stage>"), and more rows than there are colours
    go to blocks of their own. The chance level of the loss is drawn where all runs share it.

    Args:
        log_records_by_run: label ("<row>, seed <k>") -> log records. Event "train" gives `step`, `loss` and
            `logit_scale`; "evaluate" gives `step` and `metrics`, of which names that end in `i2t_recall_at_1`,
            `t2i_recall_at_1` and `acc1` (fractions) are plotted in percent.
        path: of the PNG; points, averaged where records are many, go to `<stem>_plotted.json`.
    Returns:
        The written files, PNG first; empty if the logs hold nothing to plot.
    """
    figure, records = _drawn(log_records_by_run, _PANELS, title, at_least=2)  # one point is no course
    return [] if figure is None else write_figure(figure, path, ("panel", "run", "step", "value"), records)


def _drawn(
    log_records_by_run: Mapping[str, Sequence[Mapping]], panels: Mapping[str, str], title: str, at_least: int
) -> tuple[Figure | None, list[tuple]]:
    # The figure of panels with at least so many points, and a record of each point; None if no panel has them.
    series = {
        (name, run): list(_points_of(records, name, "percent" in unit))
        for name, unit in panels.items()
        for run, records in log_records_by_run.items()
    }
    blocks = _blocks(list(log_records_by_run), series, panels, at_least)
    if not blocks:
        return None, []
    all_records = [record for run in log_records_by_run.values() for record in run]
    chance_levels = {name: _chance_loss(all_records, name) for name in panels if name.endswith("loss")}
    heights = [2.7 * -(-len(of.panels) // of.across) + 0.7 + 0.2 * -(-len(of.rows) // of.columns) for of in blocks]
    figure = Figure(figsize=(9.2, sum(heights) + 0.4), layout="constrained")
    set_title(figure, title)
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights).ravel()
    records: list[tuple] = []
    scales: dict[tuple, Any] = {}  # blocks of one stage share theirs
    for part, block in zip(parts, blocks):
        if len(blocks) > 1:
            part.suptitle(literal(block.title), fontsize=FONT)
        drawn: dict[str, object] = {}
        for axis, (name, unit) in zip(panels_of(part, len(block.panels), block.across), block.panels):
            axis.sharey(scales.setdefault((block.stage, name), axis))
            for index, (row, runs) in enumerate(block.rows.items()):
                windows, points = zip(*(_averaged(series[name, run]) for run in runs))
                records += [(name, run, *point) for run, of_run in zip(runs, points) for point in of_run]
                if means := _mean_and_range(points):
                    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
                    drawn.setdefault(literal(row) + seeds, draw_curve(axis, means, index, behind=False))
                if max(windows) > 1:
                    text = f"mean over windows of {max(windows)} records"
                    axis.set_title(text, fontsize=SMALL - 1, color=GREY, loc="right")
            chance = chance_levels.get(name)
            if chance is not None:
                line = axis.axhline(chance, color=GREY, linewidth=1.2, linestyle=(0, (1, 1.5)))
                drawn[f"chance level: {chance:.2f}"] = line
            label_axes(axis, "step (optimiser updates)", unit)
            if "percent" not in unit and name != "learning_rate":
                scale_by_range(axis)
        several = any(len(runs) > 1 for runs in block.rows.values())
        legend_below(part, drawn, block.columns, "line: mean over seeds; band: lowest to highest" if several else None)
    return figure, records


@dataclass(frozen=True)
class _Block:
    stage: str
    title: str
    rows: Mapping[str, Sequence[str]]
    panels: Sequence[tuple[str, str]]

    @property
    def across(self) -> int:
        return min(len(self.panels), 3 if len(self.panels) > 4 else 2)

    @property
    def columns(self) -> int:
        # of the legend
        return 2 if max(map(len, self.rows)) <= 48 else 1


def _blocks(
    runs: Sequence[str], series: Mapping[tuple[str, str], Sequence], panels: Mapping[str, str], at_least: int
) -> list[_Block]:
    rows: dict[str, list[str]] = {}
    for run in runs:
        rows.setdefault(run.rsplit(", seed ", 1)[0], []).append(run)
    stages: dict[str, list[str]] = {}
    for row, of_row in rows.items():
        after = next((row.removeprefix(f"{other}, ") for other in rows if row.startswith(f"{other}, ")), "")
        last = max((step for name in panels for run in of_row for step, _ in series[name, run]), default=0)
        stages.setdefault(f"{after}, {last:,g} steps".removeprefix(", "), []).append(row)
    blocks = []
    for stage, names in stages.items():
        size = -(-len(names) // -(-len(names) // len(COLORS)))
        for start in range(0, len(names), size):
            of_block = {row: rows[row] for row in names[start : start + size]}
            of_stage = [
                (name, unit)
                for name, unit in panels.items()
                if any(min(len(series[name, run]) for run in of_row) >= at_least for of_row in of_block.values())
            ]
            part = f", rows {start + 1} to {start + len(of_block)} of {len(names)}" if size < len(names) else ""
            blocks += [_Block(stage, stage + part, of_block, of_stage)] if of_stage else []
    return blocks


def _mean_and_range(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    # Step, mean, low, high, at the steps that all seeds have
    values: dict[float, list[float]] = {}
    for step, value in (point for points in seeds for point in points):
        values.setdefault(step, []).append(value)
    common = sorted((step, of) for step, of in values.items() if len(of) == len(seeds))
    return [(step, sum(of) / len(of), min(of), max(of)) for step, of in common]


def _chance_loss(records: Sequence[Mapping], key: str) -> float | None:
    # A logged loss at chance level, from the logged ratio; None where the loss has further terms.
    lines = [record for record in records if record.get("event") == "train"]
    ratios = [(float(line[key]), float(line.get("loss_over_chance", math.inf))) for line in lines]
    levels = {round(loss / ratio, 6) for loss, ratio in ratios if 0 < loss < math.inf and ratio}
    return (levels.pop() or None) if len(levels) == 1 else None


def _points_of(records: Sequence[Mapping], name: str, is_validated: bool) -> Iterator[tuple[int, float]]:
    # Step and value of a key of the training lines, or of the first metric whose name ends so, in percent.
    for record in records:
        if not is_validated and record.get("event") == "train" and record.get(name) is not None:
            yield int(record["step"]), _finite(record[name])
        elif is_validated and record.get("event") == "evaluate":
            values = [value for key, value in record.get("metrics", {}).items() if key.endswith(name)]
            if values:  # several splits: the first one that the log names
                yield int(record["step"]), 100 * _finite(values[0])


def _finite(value: float | str) -> float:
    number = float(value)  # logs hold "nan" and "inf" as strings
    return number if math.isfinite(number) else math.nan


def _averaged(points: list[tuple[int, float]]) -> tuple[int, list[tuple[float, float]]]:
    # Window, and the means of step and value over windows of so many points; 1 where they are few.
    window = -(-len(points) // _POINTS)
    groups = [points[start : start + window] for start in range(0, len(points), window)] if window > 1 else []
    means = [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]
    return max(window, 1), means if groups else list(points)
