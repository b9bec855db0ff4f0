"""Plots of this paper only: contours of a loss, and heat on the words of a caption."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from common.base.drawing import FONT, SMALL, figure_with_panels, literal, write_figure
from common.report.figures import relative

DECIDES = "nothing"


@dataclass(frozen=True)
class Contours:
    """One panel: values[k][i] at (x[i], y[k]), with what they are in `label`."""

    title: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    values: np.ndarray


def plot_contours(panels: Sequence[Contours], path: str | Path, x_label: str, y_label: str) -> list[Path]:
    """Filled contours with labelled lines, panels side by side; the values go to `<stem>_plotted.json`.

    Args:
        panels: each with its own levels and colour bar.
        path: of the PNG.
        x_label, y_label: of all panels.
    Returns:
        The two files.
    """
    figure, axes = figure_with_panels(len(panels), len(panels), 0.3 + 4.2 * len(panels), 3.5, 0.0)
    records = []
    for axis, panel in zip(axes, panels):
        values = np.asarray(panel.values)
        filled = axis.contourf(panel.x, panel.y, values, levels=12, cmap="cividis")
        lines = axis.contour(filled, levels=filled.levels[1::2], colors="white", linewidths=0.7)
        axis.clabel(lines, fontsize=SMALL - 2, fmt="%.3g")
        axis.plot([0], [0], marker="+", color="white", markersize=9, markeredgewidth=1.6)  # where the model stands
        bar = figure.colorbar(filled, ax=axis)
        bar.set_label(panel.label, fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL - 1)
        axis.set_title(literal(panel.title), fontsize=FONT)
        axis.set_xlabel(x_label, fontsize=SMALL)
        axis.set_ylabel(y_label, fontsize=SMALL)
        axis.tick_params(labelsize=SMALL, length=3)
        records += [(panel.title, x, y, values[k, i]) for k, y in enumerate(panel.y) for i, x in enumerate(panel.x)]
    return write_figure(figure, path, ("panel", "x", "y", "value"), records)


@dataclass(frozen=True)
class HeatOnWords:
    """One panel: the words, and for each map a value per word, not negative."""

    words: Sequence[str]
    maps: Mapping[str, Sequence[float]]


def plot_heat_on_words(panels: Sequence[HeatOnWords], path: str | Path) -> list[Path]:
    """Panels below each other, one line per map, the darker the hotter; the values go to `<stem>_plotted.json`.

    Args:
        panels: from top to bottom; each map is drawn relative to its largest value.
        path: of the PNG.
    Returns:
        The two files.
    """
    heights = [0.9 + 0.2 * len(panel.maps) for panel in panels]
    width = 2.0 + 0.42 * max(len(panel.words) for panel in panels)
    figure = Figure(figsize=(max(5.0, width), sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    records = []
    for axis, panel in zip(axes, panels):
        heat = np.array([relative(np.asarray(values, dtype=float)) for values in panel.maps.values()])
        drawn = axis.imshow(heat, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(panel.words)), map(literal, panel.words), rotation=40, ha="right", fontsize=SMALL)
        axis.set_yticks(range(len(panel.maps)), map(literal, panel.maps), fontsize=SMALL)
        axis.set_xticks(np.arange(len(panel.words) + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(len(panel.maps) + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="#d9d9d9", linewidth=0.6)
        axis.tick_params(which="both", length=0)
        caption = " ".join(panel.words)
        for title, values in panel.maps.items():
            records += [
                (caption, title, position, *pair) for position, pair in enumerate(zip(panel.words, map(float, values)))
            ]
    bar = figure.colorbar(drawn, ax=list(axes), location="bottom", shrink=0.5, aspect=40, ticks=[0, 1])
    bar.set_label("heat of a word, by itself in each line: 0 none, 1 the hottest", fontsize=SMALL)
    return write_figure(figure, path, ("caption", "map", "position", "word", "heat"), records)
