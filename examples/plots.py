"""Plots of the examples: a PNG, and its numbers as JSON beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from common.base.files import shown
from common.base.places import outputs
from common.report.figures import (
    COLORS,
    Curves,
    figure_with_panels,
    label_axes,
    legend_below,
    plot_curves,
    write_figure,
)
from common.report.statistics import bounded_interval, interval_over_seeds

TEMPERATURES = {True: "temperature learned", False: "logit scale fixed at 1"}


@dataclass(frozen=True)
class Trained:
    """One run. losses (nats) and logit_scales: of every step. recalls: four times, the last at the end, as (steps made,
    R@1 in percent text to image, image to text)."""

    losses: list[float]
    logit_scales: list[float]
    recalls: list[tuple[int, float, float]]


Runs = dict[tuple[str, bool], list[Trained]]  # (geometry, temperature learned) -> a run for each seed


def plot_losses(name: str, losses: Sequence[float], y_label: str = "loss (nats)") -> Path:
    """A curve over the steps, saved as outputs/examples/NAME.png; prints the path."""
    curve = [(step, [loss]) for step, loss in enumerate(losses, start=1)]
    panel = Curves(name, "step", y_label, {name: curve})
    path, _ = plot_curves([panel], outputs() / "examples" / f"{name}.png", across=1)
    print(f"saved: {shown(path)}")
    return path


def last_recalls(of_seeds: Sequence[Trained]) -> tuple[list[float], list[float]]:
    """R@1 at the end in percent, of every seed: text to image, image to text."""
    return tuple(list(values) for values in zip(*(trained.recalls[-1][1:] for trained in of_seeds)))


def plot_recalls(runs: Runs, path: Path) -> list[Path]:
    """Recall beside geometry: the mean over seeds and its 95 % interval; a PNG, and its numbers as JSON."""
    names = list(dict.fromkeys(name for name, _ in runs))
    figure, panels = figure_with_panels(2, 2, 9, 0.6 + 0.36 * len(names), 0.8, sharey=True)
    drawn, records = {}, []
    for panel, direction in zip(panels, ("text to image", "image to text")):
        for (name, learned), of_seeds in runs.items():
            values = last_recalls(of_seeds)[direction == "image to text"]
            (low, high), height = (min(values), max(values)), names.index(name) + (-0.12 if learned else 0.12)
            if len(values) > 1:
                (low, high), _ = bounded_interval(interval_over_seeds(values), values, 100.0)
            look = {"color": COLORS[not learned], "marker": "o" if learned else "s", "markersize": 5}
            panel.plot([low, high], [height] * 2, color=look["color"], linewidth=2)
            (drawn[TEMPERATURES[learned]],) = panel.plot([mean(values)], [height], linestyle="none", **look)
            records.append((direction, name, TEMPERATURES[learned], mean(values), low, high))
        panel.set_title(direction)
        panel.set_yticks(range(len(names)), names)
        label_axes(panel, "R@1 (percent)")
    panels[0].set_ylim(len(names) - 0.5, -0.5)  # first row on top
    legend_below(figure, drawn, 2)
    return write_figure(figure, path, ("direction", "geometry", "temperature", "mean", "low", "high"), records)


def plot_courses(runs: Runs, path: Path) -> list[Path]:
    """Loss, recall and logit scale over the steps with a learned temperature; a PNG, and its numbers as JSON."""
    courses = {"loss": {}, "recall": {}, "scale": {}}
    for (name, learned), of_seeds in runs.items():
        if learned:
            courses["loss"][name] = _windows([trained.losses for trained in of_seeds])
            courses["scale"][name] = _windows([trained.logit_scales for trained in of_seeds])
            times = zip(*(trained.recalls for trained in of_seeds))
            courses["recall"][name] = [(of[0][0], [t2i for _, t2i, _ in of]) for of in times]
    scales = [value for points in courses["scale"].values() for _, values in points for value in values]
    wide = max(scales, default=1) > 10 * min(scales, default=1)  # a narrow logarithmic axis has unreadable ticks
    panels = [
        Curves("Loss", "step", "loss (nats)", courses["loss"]),
        Curves("R@1 on the test set, text to image", "step", "percent", courses["recall"]),
        Curves("Logit scale (1 / temperature)", "step", "multiplier", courses["scale"], log_y=wide),
    ]
    return plot_curves(panels, path, across=3)


def _windows(of_seeds: Sequence[Sequence[float]], most: int = 20) -> list[tuple[float, list[float]]]:
    """Means over windows of steps, at most `most` of them: (middle step, one value for each seed)."""
    size = -(-len(of_seeds[0]) // most)
    starts = range(0, len(of_seeds[0]), size)
    return [
        (start + (len(of_seeds[0][start : start + size]) + 1) / 2, [mean(v[start : start + size]) for v in of_seeds])
        for start in starts
    ]
