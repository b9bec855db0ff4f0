"""Plots of tables, curves, distributions and heat maps; numbers that no table has go to `<stem>_plotted.json`.

Panels are in the order of reading, `across` of them side by side; those that share a label share its colour.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from common.base.drawing import (
    COLORS,
    FONT,
    GREY,
    SMALL,
    draw_curve,
    figure_with_panels,
    label_axes,
    legend_below,
    literal,
    look_of,
    set_title,
    wrapped,
    write_figure,
    write_picture,
)
from common.report.formats import CHANCE, chance_level, heading, named, panel_label, stand_in, title_in_words
from common.report.statistics import SHARE_OF, bounded_interval, interval_over_seeds
from common.report.table import CUT, LEAST, MOST, OF_SHARES, Column, Measured, Row, Table, with_columns

MOST_ROWS = 32  # of the figure of a table; more are a page that nobody compares by eye
MANY_ROWS = 16  # more stand closer, in one line each
MOST_POINTS = 200  # of a curve; a panel is some 400 pixels wide


def plot_table(table: Table, path: str | Path, method: Mapping | None = None, title: str = "") -> list[Path]:
    """One panel per measured column: our mean and interval for every measured row, the chance level as a line.

    Of more than six columns those of recall at 5 and 10 and those of few rows have no panel. A line of panels has the
    rows that were measured in one of them. Nothing is drawn of more than MOST_ROWS rows, or if half of the columns or
    more are constant.

    Args:
        table: columns and rows without a measured cell, and columns of counts or settings, are left out.
        path: of the PNG; outside the folder of the scale the title names the changed settings.
        method: `paper.method` of a paper_tables.yaml. A row is of the first of "kinds" whose regular expression its
            name matches, with a colour and a name in the legend; other rows are called "without". Rows whose names
            differ only by what matches "pair" share a height.
        title: what the table compares; empty = the beginning of its caption.
    Returns:
        The written file; empty if nothing was drawn.
    """
    measured = [column for column in table.columns if table.measured(column.key)]
    columns = [column for column in measured if not _constant(table.measured(column.key))]
    num_rows = sum(any(cell is not None for cell in row.ours.values()) for row in table.rows)
    if 2 * len(columns) <= len(measured) or num_rows > MOST_ROWS:
        Path(path).unlink(missing_ok=True)  # of an earlier run
        return []
    least = max(2, num_rows / 4) if num_rows > 2 else 1
    few = [column for column in columns if len(table.measured(column.key)) < least]
    all_columns, columns = columns, _leading(columns, few)
    table = with_columns(table, columns)
    left_out = dict.fromkeys(
        "columns of few rows" if column in few else "R@5 and R@10" for column in all_columns if column not in columns
    )
    words = title_in_words(table, title) + (f", without {' and '.join(left_out)}" if left_out else "")
    across = _across(table, columns)
    lines = [columns[start : start + across] for start in range(0, len(columns), across)]
    rows_of = [[row for row in table.rows if any(row.ours.get(c.key) is not None for c in line)] for line in lines]
    long = num_rows > MANY_ROWS
    labels_of = [_labels(rows, method, 64 if long else 36) for rows in rows_of]
    heights = [list(dict.fromkeys(labels)) for labels in labels_of]
    label_lines = [line for of_line in heights for label in of_line for line in label.split("\n")]
    width = 0.3 + 0.075 * max(map(len, label_lines)) + 2.5 * across
    of_a_row = 0.34 if all(labels.count(label) < 3 for labels in labels_of for label in labels) else 0.5
    of_a_row *= 0.65 if long else 1
    sizes = [1.2 + of_a_row * max(len(of), 0.6 * sum(label.count("\n") + 1 for label in of)) for of in heights]
    figure = Figure(figsize=(width, sum(sizes) + 1.3), layout="constrained")
    grid = figure.add_gridspec(len(lines), across, height_ratios=sizes)
    of_several = method if len({_kind(row, method) for rows in rows_of for row in rows}) > 1 else None
    drawn: dict[str, object] = {}
    for number, (line, rows, labels, of_line) in enumerate(zip(lines, rows_of, labels_of, heights)):
        at, first = [of_line.index(label) for label in labels], None
        for place, column in enumerate(line):
            panel = first = figure.add_subplot(grid[number, place], sharey=first)
            drawn |= _draw_column(panel, table, column, rows, at, of_several)
            if place:
                panel.tick_params(labelleft=False)
            else:
                panel.set_yticks(range(len(of_line)), [literal(label) for label in of_line], fontsize=SMALL)
        first.set_ylim(len(of_line) - 0.4, -0.6)  # first row on top
    command = table.command if Path(path).parent.name != table.scale else ""
    stated = _intervals(table)
    seed = "" if stated or len(table.seeds) > 1 else ", one seed, no intervals"
    set_title(figure, f"{words}\n{heading(table.paper, table.table_id, table.scale, command)}{seed}")
    names = {"interval": f"interval: {stated}"}  # all are drawn alike
    room = int((width - 0.6) / 0.07)
    order = sorted(drawn, key=lambda name: name == "interval" or name.startswith(CHANCE))  # rows first
    legend = {wrapped(names.get(name, name), room): drawn[name] for name in order}
    beside = len(legend) if sum(0.6 + 0.07 * len(text) for text in legend) < width else 1
    legend_below(figure, legend, beside)
    more = figure.get_suptitle().count("\n") + len(legend) // beside - 6  # lines beyond the room for title and legend
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, more))
    return [write_picture(figure, path, colors=64)]


def _intervals(table: Table) -> str:
    # What the intervals are; of several kinds, in which columns
    kinds, columns_of = set(), {}
    for column in table.columns:
        for cell in table.measured(column.key):
            if cell.interval is not None:
                kinds.add(cell.interval_kind)
                kind = cell.interval_kind.removesuffix(OF_SHARES).removesuffix(CUT)
                columns_of.setdefault(kind, {})[column.label] = None
    several = len(columns_of) > 1
    stated = "; ".join(f"{kind} ({', '.join(of)})" if several else kind for kind, of in columns_of.items())
    of_shares = [kind.endswith(OF_SHARES) for kind in kinds]
    if any(of_shares):
        stated += OF_SHARES if all(of_shares) else f",{OF_SHARES} near the ends of the range"
    return stated + (CUT if any(CUT in kind for kind in kinds) else "")


def _leading(columns: list[Column], few: Sequence[Column]) -> list[Column]:
    if len(columns) <= 6:
        return columns
    at_1 = {column.label: re.sub(r"R@(5|10)\b", "R@1", column.label) for column in columns}
    beside = {label for label, other in at_1.items() if other != label and other in at_1}
    return [column for column in columns if column.label not in beside and column not in few]


def _across(table: Table, columns: Sequence[Column]) -> int:
    # As many test sets with all their columns as fit, if they have equally many, else up to 4 panels
    sources = (named(stand_in(table, column) or "") for column in columns)
    sizes = [len(list(group)) for _, group in groupby(sources)]
    if 1 < sizes[0] <= 4 and len(set(sizes)) == 1:
        return min(len(columns), 4 // sizes[0] * sizes[0])
    return min(len(columns), 3 if len(columns) in (5, 6, 9) else 4)


def _kind(row: Row, method: Mapping | None) -> int:
    # 0 = without the method
    patterns = method["kinds"] if method else ()
    return next((n for n, pattern in enumerate(patterns, 1) if re.search(pattern, row.method)), 0)


def _labels(rows: Sequence[Row], method: Mapping | None, width: int) -> list[str]:
    # By row; a row with the method has the label of the same row without it
    names = [row.ran or row.method for row in rows]
    name_of = dict(zip((row.method for row in rows), names))
    plain = [re.sub(method["pair"], "", row.method) if method and "pair" in method else "" for row in rows]
    return [wrapped(name_of.get(short, name), width) for short, name in zip(plain, names)]


def _constant(cells: Sequence[Measured]) -> bool:
    # of two seeds or more: a count or a setting, which has neither hits nor a chance level; seeds of a measurement tie
    if any(cell.hits is not None or cell.chance is not None for cell in cells):
        return False
    return all(len(cell.values) > 1 and max(cell.values) - min(cell.values) <= 1e-6 * abs(cell.mean) for cell in cells)


def _draw_column(
    panel, table: Table, column: Column, rows: Sequence[Row], heights: Sequence[int], method: Mapping | None
) -> dict[str, object]:
    drawn = {}
    kinds = [_kind(row, method) for row in rows]
    names = [method["without"], *method["kinds"].values()] if method else ["ours"]
    for row, at, kind in zip(rows, heights, kinds):
        cell = row.ours.get(column.key)
        if cell is not None:
            color, marker = look_of(kind)["color"], look_of(kind)["marker"]
            # side by side at one height
            together = sorted(other for other, where in zip(kinds, heights) if where == at)
            height = at + 0.28 * (together.index(kind) - (len(together) - 1) / 2)
            low, high = cell.interval or (cell.mean, cell.mean)
            (ends,) = panel.plot([low, high], [height, height], color=color, linewidth=2.2, solid_capstyle="butt")
            (dot,) = panel.plot([cell.mean], [height], color=color, marker=marker, markersize=6, linestyle="none")
            drawn[names[kind]] = dot
            if cell.interval is not None:
                drawn["interval"] = ends if color == COLORS[0] else drawn.get("interval", ends)
            if cell.chance is not None:
                ends_of_level = [at - 0.4, at + 0.4]
                (level,) = panel.plot(
                    [cell.chance] * 2, ends_of_level, color=GREY, linestyle=(0, (2, 1.2)), linewidth=1.4
                )
                drawn[chance_level([column])] = level
    better = ", lower is better" if column.better == "lower" else ""
    panel.set_title(literal(wrapped(panel_label(table, column), 36)), fontsize=SMALL)
    label_axes(panel, f"{column.unit}{better}")
    panel.margins(x=0.12)
    return drawn


@dataclass(frozen=True)
class Distributions:
    """One panel of histograms: label -> values, in the unit that `x_label` names.

    whole_numbers: the values are counts; each gets a bin of its own.
    """

    title: str
    x_label: str
    values: Mapping[str, Sequence[float]]
    whole_numbers: bool = False


def plot_distributions(panels: Sequence[Distributions], path: str | Path, across: int, bins: int = 50) -> list[Path]:
    """Histograms as outlines, so that several can overlap; each sums to 100 %.

    Every axis has its 0, and panels of a row with the same `x_label` have one scale.

    Args:
        bins: equal ones over the joint range of a panel's values; whole numbers have theirs.
    Returns:
        The PNG and its numbers.
    Raises:
        ValueError: no panel, a label without values, or a value that is not finite.
    """
    if not panels:
        raise ValueError("plot_distributions needs at least one panel")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.values))
    columns = min(len(labels), max(2, 2 * across - 1))
    legend_rows = -(-len(labels) // columns)
    figure, axes = figure_with_panels(len(panels), across, 0.6 + 3.6 * across, 2.6, 0.4 + 0.22 * legend_rows)
    drawn: dict[str, object] = {}
    records: list[tuple] = []
    histograms = [_histograms(panel, bins) for panel in panels]
    for place, (axis, panel, (edges, shares)) in enumerate(zip(axes, panels, histograms)):
        for label, heights in shares.items():
            drawn[literal(label)] = _draw_outline(axis, edges, heights, labels.index(label))
            rows = zip(edges, edges[1:], heights)
            records += [(panel.title, panel.x_label, label, *map(float, row)) for row in rows]
        axis.set_title(literal(panel.title), fontsize=FONT)
        axis.set_ylim(bottom=0)
        label_axes(axis, panel.x_label, "percent a bin")
        row = slice(place // across * across, place // across * across + across)  # one scale for what it has in common
        ends = [
            end for other, (of, _) in zip(panels[row], histograms[row]) if other.x_label == panel.x_label for end in of
        ]
        axis.set_xlim(min(0, *ends), max(0, *ends))
        if panel.whole_numbers:
            axis.xaxis.get_major_locator().set_params(integer=True)
    legend_below(figure, drawn, columns)
    return write_figure(figure, path, ("panel", "x", "curve", "bin_low", "bin_high", "percent"), records)


def _histograms(panel: Distributions, bins: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    arrays = {label: np.asarray(values, dtype=np.float64) for label, values in panel.values.items()}
    for label, values in arrays.items():
        if not len(values) or not np.isfinite(values).all():
            raise ValueError(f"panel {panel.title!r}, {label}: finite values are needed, at least one")
    together = np.concatenate(list(arrays.values()))
    edges = np.histogram_bin_edges(together, bins)
    if panel.whole_numbers:
        edges = np.arange(together.min() - 0.5, together.max() + 1)
    return edges, {label: 100 * np.histogram(array, edges)[0] / len(array) for label, array in arrays.items()}


def _draw_outline(axis, edges: np.ndarray, heights: np.ndarray, index: int):
    look = look_of(index) | {"markersize": 5}
    axis.stairs(heights, edges, fill=True, color=look["color"], alpha=0.12)
    axis.stairs(heights, edges, color=look["color"], linestyle=look["linestyle"], linewidth=1.6)
    peak = int(heights.argmax())  # styles repeat after four curves; a marker separates them in grey print
    middle = (edges[peak] + edges[peak + 1]) / 2
    axis.plot([middle], [heights[peak]], **(look | {"linestyle": "none"}))
    return Line2D([], [], linewidth=1.6, **look)


@dataclass(frozen=True)
class Curves:
    """One panel: label -> points (x, one value per seed), ascending in x.

    A curve that is labelled as its panel is titled takes no line of the legend.

    log_y: intervals are as wide in the logarithm, to first order, so that they stay above 0.
    behind: labels of curves that others lie upon; they are thick, pale lines.
    level: label and height of a dotted line.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, Sequence[float]]]]
    log_x: bool = False
    log_y: bool = False
    behind: Sequence[str] = ()
    level: tuple[str, float] | None = None


def plot_curves(panels: Sequence[Curves], path: str | Path, across: int, one_scale: bool = False) -> list[Path]:
    """The mean over seeds with its 95 % interval, none with one seed, over steps or sizes; returns both files.

    one_scale: all panels have the same axes.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves if label != panel.title))
    columns = across + 1 if max(map(len, labels), default=0) <= 32 else across
    lines_of = {label: wrapped(label, 44) for label in labels}
    legend_rows = -(-sum(text.count("\n") + 1 for text in lines_of.values()) // columns)
    size = 0.6 + 3.4 * across, 2.7, 0.4 + 0.22 * legend_rows
    figure, axes = figure_with_panels(len(panels), across, *size, sharex=one_scale, sharey=one_scale)
    drawn, records = {}, []
    for axis, panel in zip(axes, panels):
        for label, points in panel.curves.items():
            index = labels.index(label) if label in labels else 0
            points = [*points[: -1 : -(-len(points) // MOST_POINTS)], points[-1]]  # the first and the last always
            rows = [(x, *_mean_and_interval(values, panel.y_label, panel.log_y)) for x, values in points]
            records += [(panel.title, label, *row) for row in rows]
            line = draw_curve(axis, rows, index, label in panel.behind)
            if label != panel.title:
                drawn[lines_of[label]] = line
        if panel.level is not None:
            label, height = panel.level
            drawn[label] = axis.axhline(height, color=GREY, linewidth=1.2, linestyle=(0, (1, 1.5)))
        axis.set_title(wrapped(panel.title, 40), fontsize=FONT)
        label_axes(axis, panel.x_label, panel.y_label)
        axis.tick_params(labelbottom=True, labelleft=True)
        if panel.log_x:
            axis.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.curves.values() for x, _ in points})
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
        if panel.log_y:
            axis.set_yscale("log")
    legend_below(figure, drawn, columns)
    return write_figure(figure, path, ("panel", "curve", "x", "mean", "low", "high"), records, colors=128)


def _mean_and_interval(values: Sequence[float], unit: str, log: bool) -> tuple[float, float | None, float | None]:
    # Mean, low, high
    mean = sum(values) / len(values)
    low = high = None
    if len(values) > 1:
        (low, high), _ = bounded_interval(interval_over_seeds(values), values, SHARE_OF.get(unit))
        low, high = max(low, min(*values, LEAST.get(unit, low))), min(high, max(*values, MOST.get(unit, high)))
    if log and low is not None and mean > 0:
        share = (high - mean) / mean
        low, high = mean * math.exp(-share), mean * math.exp(share)
    return mean, low, high


_FADED = 0.22  # how much of a picture is left where there is no heat


@dataclass(frozen=True)
class HeatOnPicture:
    """One line of pictures.

    picture: (height, width, 3) uint8.
    maps: title -> (rows, columns), not negative; each is drawn relative to its largest value.
    boxes: title -> (x, y, width, height) in pixels, drawn on its map; "" is the picture's own.
    """

    caption: str
    picture: np.ndarray
    maps: Mapping[str, np.ndarray]
    boxes: Mapping[str, Sequence[float]] = field(default_factory=dict)


def plot_heat_on_pictures(lines: Sequence[HeatOnPicture], path: str | Path, beside: int = 1) -> list[Path]:
    """The picture, then once for each map: clear where it is hot, grey elsewhere.

    A title stands over the first of the maps below each other that share it. A map with a box also has that of the
    picture, so that a wrong choice is visible.

    Args:
        beside: lines side by side.
    Returns:
        The PNG and its numbers.
    """
    across = 1 + max(len(line.maps) for line in lines)
    captions = [wrapped(line.caption, 26) for line in lines]
    height = 1.5 + 0.11 * max(1 + caption.count("\n") for caption in captions)
    figure, axes = figure_with_panels(across * len(lines), across * beside, 1.25 * across * beside, height, 0.2)
    records = []
    for place, line in enumerate(lines):
        row = axes[place * across : (place + 1) * across]
        above = list(lines[place - beside].maps) if place >= beside else []
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        row[0].imshow(line.picture)
        row[0].set_xlabel(literal(captions[place]), fontsize=SMALL - 3)
        for axis, (title, heat) in zip(row[1:], line.maps.items()):
            axis.imshow(_faded(line.picture, heat))
            axis.set_title("" if list(line.maps) == above else literal(title), fontsize=SMALL - 1)
            records += [(line.caption, title, *at, value) for at, value in np.ndenumerate(np.asarray(heat))]
        for axis, title in zip(row, ("", *line.maps)):
            boxes = {name: line.boxes[name] for name in ("", title) if name in line.boxes and title in line.boxes}
            for name, box in boxes.items():
                _draw_box(axis, box, *((COLORS[1], "--") if name else (COLORS[0], "-")))
    key = "clear: the hottest place of a map; grey: no heat; each map relative to its maximum"
    if any(line.boxes for line in lines):
        key += "; blue box: what is meant; dashed orange box: what the model chooses"
    figure.supxlabel(wrapped(key, 14 * across * beside), fontsize=SMALL)
    return write_figure(figure, path, ("caption", "map", "row", "column", "heat"), records)


def _draw_box(axis, box: Sequence[float], color: str, style: str) -> None:
    x, y, width, height = box
    look = {"fill": False, "edgecolor": color, "linewidth": 1.5, "linestyle": style}
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), width, height, **look))


def relative(heat: np.ndarray) -> np.ndarray:
    """Divided by the largest value; all zeros stay zeros."""
    return heat / heat.max() if heat.max() > 0 else np.zeros_like(heat)


def _faded(picture: np.ndarray, heat: np.ndarray) -> np.ndarray:
    # (height, width, 3) in [0, 1]: the picture where the heat is largest, nearly mid-grey where there is none
    heat = relative(np.asarray(heat, dtype=float))
    rows, columns = (np.arange(size) * count // size for size, count in zip(picture.shape[:2], heat.shape))
    left = _FADED + (1 - _FADED) * heat[rows][:, columns, None]
    return left * (picture / 255) + (1 - left) * 0.5
