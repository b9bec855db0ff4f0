"""Curves over steps or sizes: the mean over seeds with its 95 % interval, in the style of the other figures."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.report.figures import _COLORS, _FONT, _MARKERS, _SMALL, _STYLES, _dress, _write
from common.report.statistics import interval_over_seeds


@dataclass(frozen=True)
class Curves:
    """One panel: for each label points (x, one value per seed), ascending in x.

    A curve that is labelled as its panel is titled takes no line of the legend. behind: labels of curves that others
    lie upon; they are thick, pale lines.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, Sequence[float]]]]
    log_x: bool = False
    log_y: bool = False
    behind: Sequence[str] = ()


def plot_curves(panels: Sequence[Curves], path: str | Path, across: int) -> list[Path]:
    """Writes a PNG, and the plotted numbers as `<stem>_plotted.csv` beside it.

    Args:
        panels: in the order of reading; those that share a label share its colour.
        path: of the PNG.
        across: panels side by side.
    Returns:
        The two files. With one seed there are no intervals.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves if label != panel.title))
    down = -(-len(panels) // across)
    legend_rows = -(-len(labels) // (across + 1))
    figure = Figure(figsize=(0.6 + 3.4 * across, 2.7 * down + 0.4 + 0.22 * legend_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    drawn, records = {}, []
    for axis, panel in zip(axes, panels):
        for label, points in panel.curves.items():
            index = labels.index(label) if label in labels else 0
            rows = [(x, *_mean_and_interval(values)) for x, values in points]
            records += [(panel.title, label, *row) for row in rows]
            line = _draw(axis, rows, index, label in panel.behind)
            if label != panel.title:
                drawn[label] = line
        axis.set_title(textwrap.fill(panel.title, 40), fontsize=_FONT)
        axis.set_xlabel(panel.x_label, fontsize=_SMALL)
        axis.set_ylabel(panel.y_label, fontsize=_SMALL)
        _dress(axis)
        if panel.log_x:
            axis.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.curves.values() for x, _ in points})
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
        if panel.log_y:
            axis.set_yscale("log")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if drawn:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=across + 1, fontsize=_SMALL)
    return _write(figure, path, ("panel", "curve", "x", "mean", "low", "high"), records)


def _draw(axis, rows: Sequence[tuple], index: int, behind: bool):
    x, mean, low, high = zip(*rows)
    color = _COLORS[index % len(_COLORS)]
    if low[0] is not None:
        axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    style = {"linestyle": _STYLES[index % len(_STYLES)], "linewidth": 1.5, "markersize": 4}
    if behind:
        style = {"linewidth": 6, "markersize": 10, "markeredgewidth": 0, "alpha": 0.4, "zorder": 1.5}
    every = max(1, len(rows) // 10)
    (line,) = axis.plot(x, mean, color=color, marker=_MARKERS[index % len(_MARKERS)], markevery=every, **style)
    return line


def _mean_and_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    low, high = interval_over_seeds(values) if len(values) > 1 else (None, None)
    return sum(values) / len(values), low, high
