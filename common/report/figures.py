"""Plots of tables, of training logs and of distributions; the numbers that no table has lie beside them as JSON.

Only matplotlib's object interface: no window, no global state, usable from threads and tests.
Series differ in colour (Okabe-Ito, safe for colour-blind readers), in marker and in line style, so grey print works.
"""

import io
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator
from PIL import Image

from common.base.files import write_atomically
from common.report.formats import CHANCE, chance_level, heading, panel_label
from common.report.statistics import SHARE_OF, bounded_interval
from common.report.table import Column, Measured, Row, Table

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00", "#882255")
_MARKERS = "osD^vPX"  # one fewer, so that no colour comes twice with the same marker
_STYLES = ("-", "--", "-.", ":")
_GREY = "#595959"
_FONT, _SMALL = 10, 9
_POINTS = 60  # a longer series is averaged over windows of steps, so that its course can be seen through the noise


def plot_table(table: Table, path: str | Path) -> list[Path]:
    """One panel per measured column: our mean and interval for every measured row, the chance level as a line.

    Args:
        table: whose cells are plotted; columns and rows without a measured cell are left out, and columns of constants,
            which are the same for every seed. Where these are half of the columns or more nothing is drawn.
        path: of the PNG; in another folder than that of the scale the title says what was changed.
    Returns:
        The written file; an empty list when nothing was drawn.
    """
    measured = [column for column in table.columns if table.measured(column.key)]
    columns = [column for column in measured if not _constant(table.measured(column.key))]
    rows = [row for row in table.rows if any(row.ours.get(column.key) is not None for column in columns)]
    if 2 * len(columns) <= len(measured):
        Path(path).unlink(missing_ok=True)  # of an earlier run
        return []
    across = min(len(columns), 4 if len(columns) != 5 else 3)
    labels = [textwrap.fill(row.ran or row.method, 36) for row in rows]
    lines = [line for label in labels for line in label.split("\n")]
    width = 0.3 + 0.075 * max(map(len, lines)) + 2.5 * across
    figure, panels = _panels(
        len(columns), across, width, 1.5 + 0.34 * max(len(rows), 0.6 * len(lines)), 1.1, sharey=True
    )
    drawn: dict[str, object] = {}
    for place, (panel, column) in enumerate(zip(panels, columns)):
        drawn |= _draw_column(panel, table, column, rows)
        if place % across == 0:
            panel.set_yticks(range(len(rows)), [_literal(label) for label in labels], fontsize=_SMALL)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)  # first row on top
    command = table.command if Path(path).parent.name != table.scale else ""
    _title(figure, heading(table.paper, table.table_id, table.scale, command))
    cells = [row.ours.get(column.key) for column in columns for row in rows]
    kinds = dict.fromkeys(cell.interval_kind for cell in cells if cell is not None and cell.interval is not None)
    said = {"interval": f"interval: {' or '.join(kinds)}"}  # all are drawn alike
    room = int((width - 0.6) / 0.07)
    legend = {textwrap.fill(said.get(name, name), room): line for name, line in drawn.items()}
    _legend(figure, legend, len(legend) if sum(0.6 + 0.07 * len(text) for text in legend) < width else 1)
    return [_write_picture(figure, path)]


def _constant(cells: Sequence[Measured]) -> bool:
    """Whether all seeds, at least two, gave one value: a count or a setting, no measurement."""
    return all(len(cell.values) > 1 and max(cell.values) - min(cell.values) <= 1e-6 * abs(cell.mean) for cell in cells)


def plot_training(log_records_by_run: Mapping[str, Sequence[Mapping]], path: str | Path, title: str = "") -> list[Path]:
    """Loss, logit scale, R@1 and accuracy against the step, one panel each: the mean of a row's seeds, and their range.

    Rows of unlike lengths, and what follows upon other rows ("<row>, <stage>"), stand in blocks of their own; so do
    more rows than there are colours. The chance level is drawn where the loss is a contrast among candidates and nothing else.

    Args:
        log_records_by_run: for each run's label ("<row>, seed <k>" where seeds belong together) its log records, as in
            the run's JSON lines. Records with event "train" give `step`, `loss` and `logit_scale`, those with event
            "evaluate" `step` and `metrics`, where names that end in `i2t_recall_at_1`, `t2i_recall_at_1` and `acc1`
            (fractions) are plotted in percent.
        path: of the PNG; the points of each run, averages where records are many, go to `<stem>_plotted.json`.
        title: of the picture.
    Returns:
        The written files, PNG first; an empty list when the logs hold nothing to plot.
    """
    found = {(name, run): each for name, _ in _PANELS for run, each in _series(log_records_by_run, name).items()}
    blocks = _blocks(list(log_records_by_run), found)
    if not blocks:
        return []
    chance = _chance_loss(log_records_by_run)
    heights = [2.7 * -(-len(of.panels) // of.across) + 0.7 + 0.2 * -(-len(of.rows) // of.columns) for of in blocks]
    figure = Figure(figsize=(9.2, sum(heights) + 0.4), layout="constrained")
    _title(figure, title)
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights).ravel()
    records: list[tuple] = []
    scales: dict[tuple, Any] = {}  # blocks of one stage share theirs
    for part, block in zip(parts, blocks):
        if len(blocks) > 1:
            part.suptitle(_literal(block.title), fontsize=_FONT)
        drawn: dict[str, object] = {}
        for axis, (name, unit) in zip(_axes(part, len(block.panels), block.across), block.panels):
            axis.sharey(scales.setdefault((block.stage, name), axis))
            for index, (row, runs) in enumerate(block.rows.items()):
                windows, points = zip(*(_averaged(found[name, run]) for run in runs))
                records += [(name, run, *point) for run, of_run in zip(runs, points) for point in of_run]
                if means := _mean_and_range(points):
                    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
                    drawn.setdefault(_literal(row) + seeds, _draw(axis, means, index, behind=False))
                if max(windows) > 1:
                    text = f"mean over windows of {max(windows)} records"
                    axis.set_title(text, fontsize=_SMALL - 1, color=_GREY, loc="right")
            if name == "loss" and chance is not None:
                line = axis.axhline(chance, color=_GREY, linewidth=1.2, linestyle=(0, (1, 1.5)))
                drawn[f"{CHANCE}: ln {math.exp(chance):,.0f} = {chance:.2f}"] = line
            _dress(axis, "step (optimiser updates)", unit)
            low, high = axis.dataLim.intervaly
            if "percent" not in unit and 0 < 10 * low < high:
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter("{x:g}")
                axis.minorticks_off()
        several = any(len(runs) > 1 for runs in block.rows.values())
        _legend(part, drawn, block.columns, "line: mean over seeds; band: lowest to highest" if several else None)
    return _write(figure, path, ("panel", "run", "step", "value"), records)


@dataclass(frozen=True)
class _Block:
    """Rows that are drawn together, each with its runs, in those panels where they have a course."""

    stage: str
    title: str
    rows: Mapping[str, Sequence[str]]
    panels: Sequence[tuple[str, str]]

    @property
    def across(self) -> int:
        """Panels side by side."""
        return min(len(self.panels), 3 if len(self.panels) > 4 else 2)

    @property
    def columns(self) -> int:
        """Of the legend."""
        return 2 if max(map(len, self.rows)) <= 48 else 1


def _blocks(runs: Sequence[str], found: Mapping[tuple[str, str], Sequence]) -> list[_Block]:
    rows: dict[str, list[str]] = {}
    for run in runs:
        rows.setdefault(run.rsplit(", seed ", 1)[0], []).append(run)
    stages: dict[str, list[str]] = {}
    for row, of_row in rows.items():
        after = next((row.removeprefix(f"{other}, ") for other in rows if row.startswith(f"{other}, ")), "")
        last = max((step for name, _ in _PANELS for run in of_row for step, _ in found[name, run]), default=0)
        stages.setdefault(f"{after}, {last:,g} steps".removeprefix(", "), []).append(row)
    blocks = []
    for stage, names in stages.items():
        size = -(-len(names) // -(-len(names) // len(_COLORS)))
        for start in range(0, len(names), size):
            own = {row: rows[row] for row in names[start : start + size]}
            panels = [
                (name, unit)
                for name, unit in _PANELS  # one point is no course
                if any(min(len(found[name, run]) for run in of_row) > 1 for of_row in own.values())
            ]
            part = f", rows {start + 1} to {start + len(own)} of {len(names)}" if size < len(names) else ""
            blocks += [_Block(stage, stage + part, own, panels)] if panels else []
    return blocks


def _mean_and_range(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """Step, mean, low, high, at the steps that all seeds have."""
    values: dict[float, list[float]] = {}
    for step, value in (point for points in seeds for point in points):
        values.setdefault(step, []).append(value)
    common = sorted((step, of) for step, of in values.items() if len(of) == len(seeds))
    return [(step, sum(of) / len(of), min(of), max(of)) for step, of in common]


_PANELS = (
    ("loss", "loss (nats)"),
    ("logit_scale", "logit scale (multiplier)"),
    ("i2t_recall_at_1", "i2t R@1 (percent)"),
    ("t2i_recall_at_1", "t2i R@1 (percent)"),
    ("acc1", "accuracy, zero-shot or kNN (percent)"),
)


def _series(log_records_by_run: Mapping, name: str) -> dict[str, list[tuple[int, float]]]:
    return {run: list(_points(records, name)) for run, records in log_records_by_run.items()}


def _chance_loss(log_records_by_run: Mapping) -> float | None:
    """The loss at chance level, from the ratio that all runs log; None where the loss has further terms."""
    records = [record for run in log_records_by_run.values() for record in run if record.get("event") == "train"]
    ratios = [(float(r["loss"]), float(r.get("loss_over_chance", math.inf))) for r in records]
    found = {round(loss / ratio, 6) for loss, ratio in ratios if 0 < loss < math.inf and ratio}
    return (found.pop() or None) if len(found) == 1 else None


def _points(records: Sequence[Mapping], name: str) -> Iterator[tuple[int, float]]:
    for record in records:
        if record.get("event") == "train" and record.get(name) is not None:
            yield int(record["step"]), _finite(record[name])
        elif record.get("event") == "evaluate":
            values = [value for key, value in record.get("metrics", {}).items() if key.endswith(name)]
            if values:  # several splits: the first one that the log names
                yield int(record["step"]), 100 * _finite(values[0])


def _finite(value: float | str) -> float:
    number = float(value)  # logs hold "nan" and "inf" as strings
    return number if math.isfinite(number) else math.nan


def _averaged(points: list[tuple[int, float]]) -> tuple[int, list[tuple[float, float]]]:
    window = -(-len(points) // _POINTS)
    groups = [points[start : start + window] for start in range(0, len(points), window)] if window > 1 else []
    means = [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]
    return max(window, 1), means if groups else list(points)


def _look(index: int) -> dict[str, Any]:
    looks = {"color": _COLORS, "linestyle": _STYLES, "marker": _MARKERS}
    return {name: of[index % len(of)] for name, of in looks.items()}


def _draw_column(panel, table: Table, column: Column, rows: Sequence[Row]) -> dict[str, object]:
    drawn = {}
    for height, row in enumerate(rows):
        cell = row.ours.get(column.key)
        if cell is not None:
            low, high = cell.interval or (cell.mean, cell.mean)
            (ends,) = panel.plot([low, high], [height, height], color=_COLORS[0], linewidth=2.2, solid_capstyle="butt")
            (dot,) = panel.plot([cell.mean], [height], color=_COLORS[0], marker="o", markersize=6, linestyle="none")
            drawn["ours"] = dot
            if cell.interval is not None:
                drawn["interval"] = ends
            if cell.chance is not None:
                (level,) = panel.plot(
                    [cell.chance] * 2, [height - 0.4, height + 0.4], color=_GREY, linestyle=(0, (2, 1.2)), linewidth=1.4
                )
                drawn[chance_level([column])] = level
    better = ", lower is better" if column.better == "lower" else ""
    panel.set_title(_literal(textwrap.fill(panel_label(table, column), 36)), fontsize=_SMALL)
    _dress(panel, f"{column.unit}{better}")
    panel.margins(x=0.12)
    return drawn


def _panels(
    count: int, across: int, width: float, panel_height: float, more_height: float, **options: Any
) -> tuple[Figure, list]:
    """A figure in inches, and its panels in rows of `across`."""
    figure = Figure(figsize=(width, panel_height * -(-count // across) + more_height), layout="constrained")
    return figure, _axes(figure, count, across, **options)


def _axes(figure: FigureBase, count: int, across: int, **options: Any) -> list:
    """Panels in rows of `across`; the places that are left stay empty."""
    axes = figure.subplots(-(-count // across), across, squeeze=False, **options).ravel()
    for axis in axes[count:]:
        axis.set_axis_off()
    return list(axes[:count])


def _title(figure: Figure, text: str) -> None:
    wrapped = textwrap.fill(text, int(10 * figure.get_figwidth()), break_long_words=False, break_on_hyphens=False)
    figure.suptitle(_literal(wrapped), fontsize=_FONT + 1)


def _legend(figure: FigureBase, drawn: Mapping[str, Any], columns: int, title: str | None = None) -> None:
    if drawn:
        look = {"ncols": columns, "fontsize": _SMALL, "title": title, "title_fontsize": _SMALL}
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", **look)


def _dress(axis, x_label: str, y_label: str = "") -> None:
    axis.set_xlabel(_literal(x_label), fontsize=_SMALL)
    axis.set_ylabel(_literal(y_label), fontsize=_SMALL)
    axis.grid(color="#d9d9d9", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=_SMALL, length=3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.get_major_locator().set_params(nbins=5)


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib would read a formula between dollar signs


def _write(figure: Figure, path: str | Path, header: Sequence[str], records: Sequence[Sequence]) -> list[Path]:
    """The picture, and what is drawn in it: a list of series, each with the texts that name it and its numbers."""
    series: dict[tuple, dict[str, list]] = {}
    for record in records:
        texts = {name: value for name, value in zip(header, record) if isinstance(value, str)}
        numbers = series.setdefault(tuple(texts.items()), {name: [] for name in header if name not in texts})
        for name, value in zip(header, record):
            if name not in texts:
                numbers[name].append(_rounded(value))
    lines = (json.dumps({**dict(texts), **numbers}, ensure_ascii=False) for texts, numbers in series.items())
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    plotted = Path(path).with_name(f"{Path(path).stem}_plotted.json")
    return [_write_picture(figure, path), write_atomically(plotted, text)]


def _write_picture(figure: Figure, path: str | Path) -> Path:
    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, format="png", dpi=130, facecolor="white")
    # a plot has few colours, and a palette takes a third of the bytes
    Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return write_atomically(path, small.getvalue())


def _rounded(value: float | None) -> float | None:
    """Five digits, which no eye tells from more; None for what is no number."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class Distributions:
    """One panel of histograms: for each label the values, in the unit that `x_label` names.

    whole_numbers: the values are counts; each gets a bin of its own.
    """

    title: str
    x_label: str
    values: Mapping[str, Sequence[float]]
    whole_numbers: bool = False


def plot_distributions(panels: Sequence[Distributions], path: str | Path, across: int, bins: int = 50) -> list[Path]:
    """Histograms as outlines, so that several can lie over each other; each sums to 100 %.

    Every axis has its 0, and panels of a row have one scale where they measure the same (`x_label`).

    Args:
        panels: in the order of reading; those that share a label share its colour.
        path: of the PNG; the numbers go to `<stem>_plotted.json`.
        across: panels side by side.
        bins: equal ones over the joint range of a panel's values; whole numbers have theirs.
    Returns:
        The two files.
    Raises:
        ValueError: no panel, a label without values, or a value that is not finite.
    """
    if not panels:
        raise ValueError("plot_distributions needs at least one panel")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.values))
    columns = min(len(labels), max(2, 2 * across - 1))
    legend_rows = -(-len(labels) // columns)
    figure, axes = _panels(len(panels), across, 0.6 + 3.6 * across, 2.6, 0.4 + 0.22 * legend_rows)
    drawn: dict[str, object] = {}
    records: list[tuple] = []
    found = [_histograms(panel, bins) for panel in panels]
    for place, (axis, panel, (edges, shares)) in enumerate(zip(axes, panels, found)):
        for label, heights in shares.items():
            drawn[_literal(label)] = _draw_outline(axis, edges, heights, labels.index(label))
            rows = zip(edges, edges[1:], heights)
            records += [(panel.title, panel.x_label, label, *map(float, row)) for row in rows]
        axis.set_title(_literal(panel.title), fontsize=_FONT)
        axis.set_ylim(bottom=0)
        _dress(axis, panel.x_label, "percent a bin")
        row = slice(place // across * across, place // across * across + across)  # one scale for what it has in common
        ends = [end for other, (of, _) in zip(panels[row], found[row]) if other.x_label == panel.x_label for end in of]
        axis.set_xlim(min(0, *ends), max(0, *ends))
        if panel.whole_numbers:
            axis.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, drawn, columns)
    return _write(figure, path, ("panel", "x", "curve", "bin_low", "bin_high", "percent"), records)


def _histograms(panel: Distributions, bins: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Edges over the joint range, and by label the percent in each bin."""
    arrays = {label: np.asarray(values, dtype=np.float64) for label, values in panel.values.items()}
    for label, values in arrays.items():
        if not len(values) or not np.isfinite(values).all():
            raise ValueError(f"panel {panel.title!r}, {label}: finite values are needed, at least one")
    together = np.concatenate(list(arrays.values()))
    edges = np.histogram_bin_edges(together, bins)
    if panel.whole_numbers:
        edges = np.arange(together.min() - 0.5, together.max() + 1)
    return edges, {label: 100 * np.histogram(each, edges)[0] / len(each) for label, each in arrays.items()}


def _draw_outline(axis, edges: np.ndarray, heights: np.ndarray, index: int):
    look = _look(index) | {"markersize": 5}
    axis.stairs(heights, edges, fill=True, color=look["color"], alpha=0.12)
    axis.stairs(heights, edges, color=look["color"], linestyle=look["linestyle"], linewidth=1.6)
    peak = int(heights.argmax())  # styles repeat after four curves, and a marker tells them apart in grey print
    middle = (edges[peak] + edges[peak + 1]) / 2
    axis.plot([middle], [heights[peak]], **(look | {"linestyle": "none"}))
    return Line2D([], [], linewidth=1.6, **look)


@dataclass(frozen=True)
class Curves:
    """One panel: for each label points (x, one value per seed), ascending in x.

    A curve that is labelled as its panel is titled takes no line of the legend. log_y: intervals are as wide in the
    logarithm, to first order, so that they stay above 0. behind: labels of curves that others
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
    """Curves over steps or sizes, the mean over seeds with its 95 % interval; the numbers go to `<stem>_plotted.json`.

    Args:
        panels: in the order of reading; those that share a label share its colour.
        path: of the PNG.
        across: panels side by side.
    Returns:
        The two files. With one seed there are no intervals.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves if label != panel.title))
    columns = across + 1 if max(map(len, labels), default=0) <= 32 else across
    wrapped = {label: textwrap.fill(label, 44) for label in labels}
    legend_rows = -(-sum(text.count("\n") + 1 for text in wrapped.values()) // columns)
    figure, axes = _panels(len(panels), across, 0.6 + 3.4 * across, 2.7, 0.4 + 0.22 * legend_rows)
    drawn, records = {}, []
    for axis, panel in zip(axes, panels):
        for label, points in panel.curves.items():
            index = labels.index(label) if label in labels else 0
            rows = [(x, *_mean_and_interval(values, SHARE_OF.get(panel.y_label), panel.log_y)) for x, values in points]
            records += [(panel.title, label, *row) for row in rows]
            line = _draw(axis, rows, index, label in panel.behind)
            if label != panel.title:
                drawn[wrapped[label]] = line
        axis.set_title(textwrap.fill(panel.title, 40), fontsize=_FONT)
        _dress(axis, panel.x_label, panel.y_label)
        if panel.log_x:
            axis.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.curves.values() for x, _ in points})
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
        if panel.log_y:
            axis.set_yscale("log")
    _legend(figure, drawn, columns)
    return _write(figure, path, ("panel", "curve", "x", "mean", "low", "high"), records)


def _draw(axis, rows: Sequence[tuple], index: int, behind: bool):
    x, mean, low, high = zip(*rows)
    above = 2 + index % len(_STYLES) / 10  # a line with gaps lies above a whole one, which it would vanish under
    look = _look(index) | {"linewidth": 1.5, "markersize": 4, "zorder": above}
    if low[0] is not None:
        axis.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    if behind:
        thick = {"linestyle": "-", "linewidth": 6, "markersize": 10, "markeredgewidth": 0}
        look |= {**thick, "alpha": 0.4, "zorder": 1.5}
    every = max(1, len(rows) // 10)
    (line,) = axis.plot(x, mean, markevery=(index % every, every), **look)  # markers of equal curves lie side by side
    return line


def _mean_and_interval(
    values: Sequence[float], whole: float | None, log: bool
) -> tuple[float, float | None, float | None]:
    """Mean, low, high."""
    mean = sum(values) / len(values)
    low, high = bounded_interval(values, whole)[0] if len(values) > 1 else (None, None)
    if log and low is not None and mean > 0:
        share = (high - mean) / mean
        low, high = mean * math.exp(-share), mean * math.exp(share)
    return mean, low, high


# Light is high in contours; a picture is clear where it is hot and fades to grey elsewhere; a word is the darker the
# hotter it is. Grey print tells the same.
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
    """Filled contours with labelled lines, panels side by side; the values go to `<stem>_plotted.json`.

    Args:
        panels: each with its own levels and colour bar.
        path: of the PNG.
        x_label, y_label: of all panels.
    Returns:
        The two files.
    """
    figure, axes = _panels(len(panels), len(panels), 0.3 + 4.2 * len(panels), 3.5, 0.0)
    records = []
    for axis, panel in zip(axes, panels):
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
    boxes: title -> (x, y, width, height) in pixels, drawn on its map; "" is the picture's own.
    """

    caption: str
    picture: np.ndarray
    maps: Mapping[str, np.ndarray]
    boxes: Mapping[str, Sequence[float]] = field(default_factory=dict)


def plot_heat_on_pictures(lines: Sequence[HeatOnPicture], path: str | Path) -> list[Path]:
    """The picture, then once for each map: clear where it is hot, grey elsewhere; the maps go to `<stem>_plotted.json`.

    Args:
        lines: from top to bottom.
        path: of the PNG.
    Returns:
        The two files.
    """
    across = 1 + max(len(line.maps) for line in lines)
    captions = [textwrap.fill(line.caption, 26) for line in lines]
    height = 1.5 + 0.11 * max(1 + caption.count("\n") for caption in captions)
    figure, axes = _panels(across * len(lines), across, 1.25 * across, height, 0.2)
    records = []
    for place, line in enumerate(lines):
        row = axes[place * across : (place + 1) * across]
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        row[0].imshow(line.picture)
        row[0].set_xlabel(_literal(captions[place]), fontsize=_SMALL - 3)
        for axis, (title, heat) in zip(row[1:], line.maps.items()):
            axis.imshow(_faded(line.picture, heat))
            axis.set_title(_literal(title), fontsize=_SMALL - 1)
            records += [(line.caption, title, *at, value) for at, value in np.ndenumerate(np.asarray(heat))]
        for axis, title in zip(row, ("", *line.maps)):
            if title in line.boxes:
                x, y, width, height = line.boxes[title]
                outline = Rectangle((x - 0.5, y - 0.5), width, height, fill=False, edgecolor=_COLORS[1], linewidth=1.5)
                axis.add_patch(outline)
    said = "clear: the hottest place of a map; grey: no heat; each map by itself"
    if any(line.boxes for line in lines):
        said += "; box: what is meant, and what is chosen"
    figure.supxlabel(textwrap.fill(said, 14 * across), fontsize=_SMALL)
    return _write(figure, path, ("caption", "map", "row", "column", "heat"), records)


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
        heat = np.array([_relative(np.asarray(values, dtype=float)) for values in panel.maps.values()])
        drawn = axis.imshow(heat, cmap="Greys", vmin=0, vmax=1, aspect="auto")
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
    bar = figure.colorbar(drawn, ax=list(axes), location="bottom", shrink=0.5, aspect=40, ticks=[0, 1])
    bar.set_label("heat of a word, by itself in each line: 0 none, 1 the hottest", fontsize=_SMALL)
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
