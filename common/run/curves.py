"""The plot of a run's log, curves.png: loss, trainable scalars, validation and learning rate against the step."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from common.base.drawing import (
    COLORS,
    GREY,
    SMALL,
    draw_curve,
    figure_with_panels,
    label_axes,
    literal,
    scale_by_range,
    set_title,
)
from common.base.files import write_atomically

DECIDES = "nothing"

_POINTS = 60  # a longer series is averaged over windows of steps, so that its course can be seen through the noise
_DOTS = {"linewidth": 1.2, "linestyle": (0, (1, 1.5))}
_LOGGED = {  # key of a log line -> the axis; a key that the log lacks has no panel
    "logit_scale": "logit scale (multiplier)",
    "projection_channel_std": "spread of the unit projections\n(standard deviation)",
    "accuracy": "accuracy on the batch (fraction)",
}
_VALIDATED = {  # metric -> its curve
    "i2t_recall_at_1": "R@1 image to text",
    "t2i_recall_at_1": "R@1 text to image",
    "acc1": "accuracy",
    "knn_acc1": "kNN accuracy",
    "accuracy": "accuracy",
}


def plot_run(records: Sequence[Mapping], path: Path, title: str, steps: int) -> Path | None:
    """Draws a run's log so far, with axes that end at `steps`, of the whole run; None without a training step."""
    lines = [record for record in records if record.get("event") == "train"]
    if not lines:
        return None
    panels = {"loss": "loss (nats)" if "loss_over_chance" in lines[-1] else "loss", **_LOGGED}
    # the log has a gradient norm of each trainable scalar
    scalars = (key.removeprefix("gradient_norm_") for line in lines for key in line if key.startswith("gradient_norm_"))
    panels |= {key: key.replace("_", " ") for key in scalars if key not in panels}
    panels = {key: label for key, label in panels.items() if any(key in line for line in lines)}
    validated = list(_validation(records))
    count = len(panels) + bool(validated) + 1
    across = 2 if count == 4 else 3
    figure, axes = figure_with_panels(count, across, 4.0 * across, 2.5, 0.4)
    set_title(figure, title)
    for axis, (key, label) in zip(axes, panels.items()):
        _draw_noisy(axis, list(points_of(lines, key)), label)
        if key == "loss":
            _add_contrast(axis, lines)
        scale_by_range(axis)
    if validated:
        _draw_validation(axes[len(panels)], validated)
    _draw_noisy(axes[count - 1], list(points_of(lines, "learning_rate")), "learning rate")
    for axis in axes:
        axis.set_xlim(0, 1.02 * steps)
        axis.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()  # without the palette of the tables' plots: a run waits for it
    figure.savefig(picture, format="png", dpi=100)
    return write_atomically(path, picture.getvalue())


def _add_contrast(axis, lines: Sequence[Mapping]) -> None:
    # The contrastive part of a loss with further terms, and its chance level.
    part, loss = (list(points_of(lines, key)) for key in ("contrastive_loss", "loss"))
    if part and part != loss:
        axis.lines[-1].set_label("loss")
        _draw_noisy(axis, part, axis.get_ylabel(), index=1).set_label("contrastive part")
    chance = chance_loss(lines, "contrastive_loss" if part else "loss")
    if chance is not None:
        axis.axhline(chance, color=GREY, label=f"chance level: {chance:.2f}", **_DOTS)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=SMALL - 1, frameon=False)


def _draw_noisy(axis, points: list[tuple[int, float]], label: str, index: int = 0) -> Line2D:
    window, means = averaged(points)
    if window > 1:
        axis.plot(*zip(*points), color=COLORS[index], linewidth=0.6, alpha=0.35)
        text = f"line: mean over windows of {window} log lines"
        axis.set_title(text, fontsize=SMALL - 1, color=GREY, loc="right")
    line = draw_curve(axis, [(*point, None, None) for point in means], index, behind=False)
    label_axes(axis, "step (optimiser updates)", label)
    axis.ticklabel_format(axis="y", useOffset=False)
    return line


def _validation(records: Sequence[Mapping]) -> Iterator[tuple[str, list[tuple[int, float]], float | None]]:
    # Name of a curve, its points in percent, and the chance level where the log states one.
    evaluations: dict[str, list[Mapping]] = {}
    for record in records:
        if record.get("event") == "evaluate":
            evaluations.setdefault(record["data"], []).append(record)
    for data, of_data in evaluations.items():
        for metric, name in _VALIDATED.items():
            values = [
                (int(of["step"]), 100 * _finite(of["metrics"][metric])) for of in of_data if metric in of["metrics"]
            ]
            if values:
                chance = of_data[-1]["metrics"].get(f"chance_{metric}")
                yield f"{name}, {data}", values, None if chance is None else 100 * _finite(chance)


def _draw_validation(axis, curves: Sequence[tuple[str, list[tuple[int, float]], float | None]]) -> None:
    levels = {f"{chance:.3g}": chance for *_, chance in curves if chance is not None}
    for index, (name, points, _) in enumerate(curves):
        draw_curve(axis, [(*point, None, None) for point in points], index, behind=False).set_label(literal(name))
    for number, level in enumerate(levels.values()):
        label = f"chance level: {', '.join(levels)}" if number == 0 else None
        axis.axhline(level, color=GREY, label=label, **_DOTS)
    label_axes(axis, "step (optimiser updates)", "validation (percent)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=SMALL - 1, frameon=False)


def chance_loss(records: Sequence[Mapping], key: str = "loss") -> float | None:
    """A logged loss at chance level, from the logged ratio; None where the loss has further terms."""
    lines = [record for record in records if record.get("event") == "train"]
    ratios = [(float(line[key]), float(line.get("loss_over_chance", math.inf))) for line in lines]
    levels = {round(loss / ratio, 6) for loss, ratio in ratios if 0 < loss < math.inf and ratio}
    return (levels.pop() or None) if len(levels) == 1 else None


def points_of(records: Sequence[Mapping], name: str) -> Iterator[tuple[int, float]]:
    """Step and value of a key of the training lines, or of the first metric whose name ends so, in percent."""
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


def averaged(points: list[tuple[int, float]]) -> tuple[int, list[tuple[float, float]]]:
    """Window, and the means of step and value over windows of so many points; 1 where they are few."""
    window = -(-len(points) // _POINTS)
    groups = [points[start : start + window] for start in range(0, len(points), window)] if window > 1 else []
    means = [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]
    return max(window, 1), means if groups else list(points)
