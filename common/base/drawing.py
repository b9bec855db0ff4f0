"""Parts of a plot: panels, labels, curves, legends, and the file with its numbers beside it.

Only matplotlib's object interface: usable from threads and tests. Series differ in colour (Okabe-Ito, safe for
colour-blind readers), marker and line style, so grey print works.
"""

import io
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import LogLocator
from PIL import Image

from common.base.files import write_atomically

DECIDES = "nothing"

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00", "#882255")
_MARKERS = "osD^vPX"  # one fewer, so that no colour comes twice with the same marker
_STYLES = ("-", "--", "-.", ":")
GREY = "#595959"
FONT, SMALL = 10, 9  # points


def figure_with_panels(
    count: int, across: int, width: float, panel_height: float, more_height: float, **options: Any
) -> tuple[Figure, list]:
    """A figure in inches, and its panels in rows of `across`."""
    figure = Figure(figsize=(width, panel_height * -(-count // across) + more_height), layout="constrained")
    return figure, panels_of(figure, count, across, **options)


def panels_of(figure: FigureBase, count: int, across: int, **options: Any) -> list:
    """Panels in rows of `across`; further places stay empty."""
    axes = figure.subplots(-(-count // across), across, squeeze=False, **options).ravel()
    for axis in axes[count:]:
        axis.set_axis_off()
    return list(axes[:count])


def set_title(figure: Figure, text: str) -> None:
    """The title of a figure, its lines wrapped to its width."""
    width = int(10 * figure.get_figwidth())
    lines = [wrapped(line, width) for line in text.split("\n")]
    figure.suptitle(literal("\n".join(lines)), fontsize=FONT + 1)


def wrapped(text: str, width: int) -> str:
    """Text in lines of so many letters, broken at spaces only: a name of a file or a row stays whole."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def legend_below(figure: FigureBase, drawn: Mapping[str, Any], columns: int, title: str | None = None) -> None:
    """A legend of drawn lines by their names, below the panels."""
    if drawn:
        look = {"ncols": columns, "fontsize": SMALL, "title": title, "title_fontsize": SMALL}
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", **look)


def label_axes(axis, x_label: str, y_label: str = "") -> None:
    """Labels, grid and ticks of a panel."""
    axis.set_xlabel(literal(x_label), fontsize=SMALL)
    axis.set_ylabel(literal(y_label), fontsize=SMALL)
    axis.grid(color="#d9d9d9", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=SMALL, length=3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.get_major_locator().set_params(nbins=5)


def scale_by_range(axis) -> None:
    """Makes the y axis logarithmic if values are positive and the largest is over ten times the smallest."""
    low, high = axis.dataLim.intervaly
    if 0 < 10 * low < high:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()


def literal(text: str) -> str:
    """Text that matplotlib prints as it is, not as a formula between dollar signs."""
    return text.replace("$", r"\$")


def write_figure(
    figure: Figure, path: str | Path, header: Sequence[str], records: Sequence[Sequence], colors: int = 256
) -> list[Path]:
    """The picture, and beside it what is drawn: a list of series, each with the texts that name it and its numbers."""
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
    return [write_picture(figure, path, colors=colors), write_atomically(plotted, text)]


def write_picture(figure: Figure, path: str | Path, colors: int = 256) -> Path:
    """The figure as a PNG of so many colours."""
    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, format="png", dpi=130, facecolor="white")
    # a plot has few colours, and a palette takes a third of the bytes; kmeans keeps the rare ones
    image = Image.open(picture).convert("RGB")
    image.quantize(colors, kmeans=3, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return write_atomically(path, small.getvalue())


def _rounded(value: float | None) -> float | None:
    # Five digits, more than an eye sees; None for what is no number.
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def draw_curve(axis, rows: Sequence[tuple], index: int, behind: bool):
    """One curve of rows (x, mean, low, high) in the look of its index; `behind` draws it thick and pale."""
    x, mean, low, high = zip(*rows)
    above = 2 + index % len(_STYLES) / 10  # a line with gaps lies above a whole one, which it would vanish under
    look = look_of(index) | {"linewidth": 1.5, "markersize": 4, "zorder": above}
    if low[0] is not None and len(x) == 1:
        axis.vlines(x, low, high, color=look["color"], linewidth=1, zorder=1.6)
    elif low[0] is not None:
        axis.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    if behind:
        thick = {"linestyle": "-", "linewidth": 6, "markersize": 10, "markeredgewidth": 0}
        look |= {**thick, "alpha": 0.4, "zorder": 1.5}
    every = max(1, len(rows) // 10)
    (line,) = axis.plot(x, mean, markevery=(index % every, every), **look)  # markers of equal curves lie side by side
    return line


def look_of(index: int) -> dict[str, Any]:
    """Colour, line style and marker of a series."""
    looks = {"color": COLORS, "linestyle": _STYLES, "marker": _MARKERS}
    return {name: of[index % len(of)] for name, of in looks.items()}
