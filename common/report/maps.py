"""Contours of a plane, heat on pictures, heat on words; each with its numbers as CSV.

Light is high in contours; a picture is clear where it is hot and fades to grey elsewhere; a word is the darker the
hotter it is. Grey print tells the same.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.report.figures import _FONT, _SMALL, _literal, _write

_FADED = 0.22  # how much of a picture is left where there is no heat


@dataclass(frozen=True)
class Contours:
    """One panel: values[k][i] at (x[i], y[k]), with what they are in `label`."""

    title: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    values: np.ndarray


def plot_contours(panels: Sequence[Contours], path: str | Path, x_label: str, y_label: str) -> list[Path]:
    """Filled contours with labelled lines, panels side by side; the values go to `<stem>_plotted.csv`.

    Args:
        panels: each with its own levels and colour bar.
        path: of the PNG.
        x_label, y_label: of all panels.
    Returns:
        The two files.
    """
    figure = Figure(figsize=(0.3 + 4.2 * len(panels), 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    records = []
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False).ravel(), panels):
        values = np.asarray(panel.values)
        filled = axis.contourf(panel.x, panel.y, values, levels=12, cmap="cividis")
        lines = axis.contour(filled, levels=filled.levels[1::2], colors="white", linewidths=0.7)
        axis.clabel(lines, fontsize=_SMALL - 2, fmt="%.3g")
        axis.plot([0], [0], marker="+", color="white", markersize=9, markeredgewidth=1.6)  # where the model stands
        bar = figure.colorbar(filled, ax=axis)
        bar.set_label(panel.label, fontsize=_SMALL)
        bar.ax.tick_params(labelsize=_SMALL - 1)
        axis.set_title(_literal(panel.title), fontsize=_FONT)
        axis.set_xlabel(x_label, fontsize=_SMALL)
        axis.set_ylabel(y_label, fontsize=_SMALL)
        axis.tick_params(labelsize=_SMALL, length=3)
        records += [(panel.title, x, y, values[k, i]) for k, y in enumerate(panel.y) for i, x in enumerate(panel.x)]
    return _write(figure, path, ("panel", "x", "y", "value"), records)


@dataclass(frozen=True)
class HeatOnPicture:
    """One line of pictures.

    caption: under the picture. picture: (height, width, 3) uint8.
    maps: title -> (rows, columns), not negative; each is drawn relative to its largest value.
    """

    caption: str
    picture: np.ndarray
    maps: Mapping[str, np.ndarray]


def plot_heat_on_pictures(lines: Sequence[HeatOnPicture], path: str | Path) -> list[Path]:
    """The picture, then once for each map: clear where it is hot, grey elsewhere; the maps go to `<stem>_plotted.csv`.

    Args:
        lines: from top to bottom.
        path: of the PNG.
    Returns:
        The two files.
    """
    across = 1 + max(len(line.maps) for line in lines)
    figure = Figure(figsize=(1.25 * across, 0.2 + 1.75 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lines), across, squeeze=False)
    records = []
    for line, row in zip(lines, axes):
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        row[0].imshow(line.picture)
        caption = textwrap.fill(line.caption, 26, max_lines=3, placeholder=" …")
        row[0].set_xlabel(_literal(caption), fontsize=_SMALL - 3)
        for axis, (title, heat) in zip(row[1:], line.maps.items()):
            axis.imshow(_faded(line.picture, heat))
            axis.set_title(_literal(title), fontsize=_SMALL - 1)
            records += [(line.caption, title, *place, value) for place, value in np.ndenumerate(np.asarray(heat))]
    return _write(figure, path, ("caption", "map", "row", "column", "heat"), records)


@dataclass(frozen=True)
class HeatOnWords:
    """One panel: the words, and for each map a value per word, not negative."""

    words: Sequence[str]
    maps: Mapping[str, Sequence[float]]


def plot_heat_on_words(panels: Sequence[HeatOnWords], path: str | Path) -> list[Path]:
    """Panels below each other, one line per map, the darker the hotter; the values go to `<stem>_plotted.csv`.

    Args:
        panels: from top to bottom; each map is drawn relative to its largest value.
        path: of the PNG.
    Returns:
        The two files.
    """
    heights = [0.9 + 0.2 * len(panel.maps) for panel in panels]
    width = 2.0 + 0.42 * max(len(panel.words) for panel in panels)
    figure = Figure(figsize=(max(5.0, width), sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    records = []
    for axis, panel in zip(axes, panels):
        heat = np.array([_relative(np.asarray(values, dtype=float)) for values in panel.maps.values()])
        axis.imshow(heat, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(panel.words)), map(_literal, panel.words), rotation=40, ha="right", fontsize=_SMALL)
        axis.set_yticks(range(len(panel.maps)), map(_literal, panel.maps), fontsize=_SMALL)
        axis.set_xticks(np.arange(len(panel.words) + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(len(panel.maps) + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="#d9d9d9", linewidth=0.6)
        axis.tick_params(which="both", length=0)
        caption = " ".join(panel.words)
        for title, values in panel.maps.items():
            records += [
                (caption, title, position, *pair) for position, pair in enumerate(zip(panel.words, map(float, values)))
            ]
    return _write(figure, path, ("caption", "map", "position", "word", "heat"), records)


def _relative(heat: np.ndarray) -> np.ndarray:
    """Divided by the largest value; all zeros stay zeros."""
    return heat / heat.max() if heat.max() > 0 else np.zeros_like(heat)


def _faded(picture: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """(height, width, 3) in [0, 1]: the picture where the heat is largest, nearly mid-grey where there is none."""
    heat = _relative(np.asarray(heat, dtype=float))
    rows, columns = (np.arange(size) * count // size for size, count in zip(picture.shape[:2], heat.shape))
    left = _FADED + (1 - _FADED) * heat[rows][:, columns, None]
    return left * (picture / 255) + (1 - left) * 0.5
