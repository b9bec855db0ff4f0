"""The map of embedding spaces as one still picture, for a README: a panel for each model, legible at half its size."""

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle

from common.base.drawing import GREY, literal, write_picture

ACROSS = 4  # panels in a row
FONT, LARGE = 14, 18  # points; a page shows the picture at about half its size
LEVEL_COLORS = ("#0013b1", "#571a7a", "#a6659b", "#ea395c", "#ce6f15")  # the page's, specific to generic
FILL = "#9db3cf"
RADII = {
    "sphere": "angle from the root (rad)",
    "product": "distance from the root (rad)",
    "euclidean": "distance from the root",
    "hyperbolic": "distance from the root",
}


def draw_map(content: dict[str, Any], path: str | Path) -> Path:
    """Draws the layout "Distance" of all models, and below it the distances from the root by modality.

    Args:
        content: from `map.page_content`.
    """
    models = content["models"]
    across = min(ACROSS, len(models))
    down = math.ceil(len(models) / across)
    marks, columns = _legend(content), max(1, across - across // 3)  # 1, 2, 2, 3
    heights = 5.1 * down, 0.1 + 0.31 * math.ceil(len(marks) / columns)
    figure = Figure(figsize=(max(4.2, 3.7 * across), sum(heights)), layout="constrained")
    maps, legend = figure.subfigures(2, 1, height_ratios=heights)
    axes = maps.subplots(2 * down, across, height_ratios=(3.7, 1) * down, squeeze=False)
    for place, (disk, histogram) in enumerate(zip(axes[::2].flat, axes[1::2].flat)):
        if place < len(models):
            _draw_disk(disk, models[place], content)
            _draw_distances(histogram, models[place], content)
        else:
            disk.set_axis_off()
            histogram.set_axis_off()
    legend.legend(handles=marks, loc="center", ncols=columns, fontsize=FONT, frameon=False, columnspacing=1.2)
    return write_picture(figure, path)


def level_color(level: float, content: dict[str, Any]) -> str:
    """Of a caption: the levels of the test set spread over the five colours."""
    steps = max(1, len(content["levels"]) - 1)
    return LEVEL_COLORS[min(4, round(level * 4 / steps)) if content["levels"] else 0]


def _draw_disk(axis, model: dict[str, Any], content: dict[str, Any]) -> None:
    curvature = model["curvature"]

    def radius(distances):  # of the Poincaré disk, or the distance itself
        return np.tanh(math.sqrt(curvature) * np.asarray(distances) / 2) if curvature else np.asarray(distances)

    farthest = max(map(max, model["distances"]))
    rim = float(radius(1.04 * farthest))
    angles = np.array(model["layouts"]["polar"]["angle"])
    radii = radius(np.concatenate(model["distances"]))
    x, y = radii * np.cos(angles), radii * np.sin(angles)
    images = len(model["distances"][0])

    axis.set(xlim=(-rim, rim), ylim=(-rim, rim), aspect="equal")
    axis.set_axis_off()
    axis.set_title(literal(textwrap.fill(model["name"], 24)), fontsize=LARGE)
    for distance in _rings(farthest):
        axis.add_patch(Circle((0, 0), float(radius(distance)), fill=False, color="#d0d3ce", zorder=0))
    edge = 1.0 if curvature else model["edge"]
    if edge is not None and edge < 1.05 * rim:  # the end of the space
        axis.add_patch(Circle((0, 0), edge, fill=False, color=GREY, clip_on=False, zorder=0))
    order = np.argsort([-level for level in content["level"]], kind="stable")  # specific captions on top
    colors = [level_color(content["level"][text], content) for text in order]
    axis.scatter(x[images:][order], y[images:][order], s=20, c=colors, linewidths=0.4, edgecolors="white", zorder=2)
    axis.scatter(x[:images], y[:images], s=20, marker="s", c="white", edgecolors="black", linewidths=0.8, zorder=3)

    # one image, its way to the root, and its captions
    image = content["start"]
    chain = [images + text for text in content["chains"][image]]
    axis.plot([x[image], 0], [y[image], 0], color="black", linewidth=2, zorder=4)
    shades = [level_color(content["level"][text], content) for text in content["chains"][image]]
    axis.scatter(x[chain], y[chain], s=90, c=shades, edgecolors="black", linewidths=1.8, zorder=5)
    axis.scatter(x[image], y[image], s=80, marker="s", c="white", edgecolors="black", linewidths=2, zorder=6)
    axis.plot(0, 0, marker="+", color="black", markersize=16, markeredgewidth=2.5, zorder=6)


def _draw_distances(axis, model: dict[str, Any], content: dict[str, Any]) -> None:
    norms = model["norms"]
    edges = np.linspace(norms["low"], norms["high"], len(norms["counts"][0]) + 1)
    images, captions = (np.array(counts) / sum(counts) for counts in norms["counts"])
    axis.stairs(captions, edges, fill=True, color=FILL)
    axis.stairs(images, edges, color="black", linewidth=1.8)
    top = max(images.max(), captions.max())
    for level, median in enumerate(model["levels"]):
        color = level_color(level, content)
        axis.plot(median, 1.14 * top, marker="v", markersize=10, color=color, markeredgecolor="white")
    axis.set(ylim=(0, 1.32 * top), yticks=[])
    step = _rings(max(map(max, model["distances"])))[0]
    axis.set_xlabel(f"{RADII[model['kind']]},\na ring every {step:g}", fontsize=FONT)
    axis.locator_params(axis="x", nbins=4)
    axis.tick_params(labelsize=FONT)
    for side in ("left", "right", "top"):
        axis.spines[side].set_visible(False)


def _rings(farthest: float) -> np.ndarray:
    # Three to six round distances up to the farthest point
    farthest = farthest or 1.0  # all embeddings in one place
    power = 10.0 ** math.floor(math.log10(farthest))
    lead = farthest / power
    step = power * (2 if lead > 5 else 1 if lead > 2.5 else 0.5 if lead > 1.2 else 0.2)
    return np.arange(step, farthest * 1.001, step)


def _legend(content: dict[str, Any]) -> list[Line2D]:
    def dot(label: str, color: str, **look: Any) -> Line2D:
        style = {"marker": "o", "markersize": 10, "linestyle": "", "markeredgecolor": color, **look}
        return Line2D([], [], color=color, label=label, **style)

    levels = [f"caption: {name}" for name in content["levels"]] or ["caption"]
    marks = [dot(literal(name), level_color(level, content)) for level, name in enumerate(levels)]
    images = dot("image (outline below)", "white", marker="s", markeredgecolor="black")
    way = Line2D([], [], color="black", linewidth=2, label="one image's way to the root (+)")
    its_captions = dot("its captions", "white", markersize=13, markeredgecolor="black", markeredgewidth=1.8)
    return [images, *marks, way, its_captions]
