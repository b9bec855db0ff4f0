"""The plot of training logs."""

from collections.abc import Mapping, Sequence
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
from common.report.formats import CHANCE
from common.run.curves import averaged, chance_loss, points_of


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
    series = {
        (name, run): list(points_of(records, name))
        for name, _ in _PANELS
        for run, records in log_records_by_run.items()
    }
    blocks = _blocks(list(log_records_by_run), series)
    if not blocks:
        return []
    chance = chance_loss([record for run in log_records_by_run.values() for record in run])
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
                windows, points = zip(*(averaged(series[name, run]) for run in runs))
                records += [(name, run, *point) for run, of_run in zip(runs, points) for point in of_run]
                if means := _mean_and_range(points):
                    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
                    drawn.setdefault(literal(row) + seeds, draw_curve(axis, means, index, behind=False))
                if max(windows) > 1:
                    text = f"mean over windows of {max(windows)} records"
                    axis.set_title(text, fontsize=SMALL - 1, color=GREY, loc="right")
            if name == "loss" and chance is not None:
                line = axis.axhline(chance, color=GREY, linewidth=1.2, linestyle=(0, (1, 1.5)))
                drawn[f"{CHANCE}: {chance:.2f}"] = line
            label_axes(axis, "step (optimiser updates)", unit)
            if "percent" not in unit:
                scale_by_range(axis)
        several = any(len(runs) > 1 for runs in block.rows.values())
        legend_below(part, drawn, block.columns, "line: mean over seeds; band: lowest to highest" if several else None)
    return write_figure(figure, path, ("panel", "run", "step", "value"), records)


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


def _blocks(runs: Sequence[str], series: Mapping[tuple[str, str], Sequence]) -> list[_Block]:
    rows: dict[str, list[str]] = {}
    for run in runs:
        rows.setdefault(run.rsplit(", seed ", 1)[0], []).append(run)
    stages: dict[str, list[str]] = {}
    for row, of_row in rows.items():
        after = next((row.removeprefix(f"{other}, ") for other in rows if row.startswith(f"{other}, ")), "")
        last = max((step for name, _ in _PANELS for run in of_row for step, _ in series[name, run]), default=0)
        stages.setdefault(f"{after}, {last:,g} steps".removeprefix(", "), []).append(row)
    blocks = []
    for stage, names in stages.items():
        size = -(-len(names) // -(-len(names) // len(COLORS)))
        for start in range(0, len(names), size):
            of_block = {row: rows[row] for row in names[start : start + size]}
            panels = [
                (name, unit)
                for name, unit in _PANELS  # one point is no course
                if any(min(len(series[name, run]) for run in of_row) > 1 for of_row in of_block.values())
            ]
            part = f", rows {start + 1} to {start + len(of_block)} of {len(names)}" if size < len(names) else ""
            blocks += [_Block(stage, stage + part, of_block, panels)] if panels else []
    return blocks


def _mean_and_range(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    # Step, mean, low, high, at the steps that all seeds have
    values: dict[float, list[float]] = {}
    for step, value in (point for points in seeds for point in points):
        values.setdefault(step, []).append(value)
    common = sorted((step, of) for step, of in values.items() if len(of) == len(seeds))
    return [(step, sum(of) / len(of), min(of), max(of)) for step, of in common]


_PANELS = (
    ("loss", "loss (nats)"),
    ("logit_scale", "logit scale (multiplier)"),
    ("i2t_recall_at_1", "validation i2t R@1 (percent)"),
    ("t2i_recall_at_1", "validation t2i R@1 (percent)"),
    ("acc1", "validation accuracy, zero-shot or kNN\n(percent)"),
)
