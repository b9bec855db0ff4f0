"""Retrieval against the number of negatives, with real towers (claim C20).

Part `negatives_sweep`: every run sees the same number of pairs.
    batch    B pairs a step, so B - 1 negatives a query; larger batches mean fewer updates
    queue    a fixed batch, and up to K pairs of past steps from a momentum encoder as further negatives
Part `negatives_in_groups`: only the number of negatives changes.
    group    a fixed batch and number of steps; the negatives of a query are the G - 1 other pairs of its group
Part `negatives_by_batch`: separates the effects of a larger batch at a fixed number of pairs.
    steps    a fixed number of steps, so that larger batches see more pairs
    rate     a fixed number of pairs; the learning rate grows by the root of the batch (Malladi et al. 2022, for Adam)
Otherwise the learning rate is that of the scale for every batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import MEASURED, Column, Row, Table
from common.reproduce.command import Command
from common.reproduce.rows import Job, PaperCode, RowRun
from common.reproduce.side_by_side import run_rows
from common.reproduce.tables import measured_cell, stand_in_for, table_of

DECIDES = "evaluation"

METRICS = {
    **{f"{direction}_recall_at_{k}": f"{direction} R@{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)},
    "mean_recall": "mean of the six",
}
DRAWN = ("i2t_recall_at_1", "t2i_recall_at_1", "mean_recall")
SET_HERE = (
    "optim.steps",
    "optim.global_batch_size",
    "optim.warmup_steps",
    "method.queue_size",
    "method.group_size",
)
WARMUP_SHARE = 12  # warm-up is a twelfth of the steps


@dataclass(frozen=True)
class Point:
    """One training of a series: pairs a step, size of the queue, size of the groups (0 = none).

    steps: 0 = as many as the sweep's pairs take. rate: learning rate; 0 = that of the scale.
    """

    batch: int
    queue: int = 0
    group: int = 0
    steps: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Its name in claims."""
        kinds = {"queue": self.queue, "group": self.group, "steps": self.steps, "rate": self.rate}
        kind = next((kind for kind, value in kinds.items() if value), "batch")
        return f"{kind}_{self.queue or self.group or self.batch}"

    @property
    def negatives(self) -> int:
        """Negatives of a query; with a queue, once it is full."""
        return (self.group or self.batch) - 1 + self.queue

    def __str__(self) -> str:
        more = f", queue {self.queue}" if self.queue else f", groups of {self.group}" if self.group else ""
        more += f", {self.steps} steps" if self.steps else f", rate {self.rate:.1e}" if self.rate else ""
        return f"batch {self.batch}{more}"


@dataclass(frozen=True)
class Sweep:
    """Settings of the five series at one scale.

    samples: pairs that every run sees.
    batches: B of the first series.
    queue_batch: B of the second; it is also a batch of the first series, which is its K = 0.
    queues: K of the second.
    group_batch: B of the third.
    groups: G of the third, divisors of its batch.
    steps_batches, steps: B of the fourth, and its steps.
    rate_batches: B of the fifth. rate_batch: B with the scale's learning rate.
    overrides: make a run of the sweep cheaper than a row of the scale.
    rate: the scale's learning rate, from its config.
    """

    samples: int
    batches: tuple[int, ...]
    queue_batch: int
    queues: tuple[int, ...]
    group_batch: int
    groups: tuple[int, ...]
    steps_batches: tuple[int, ...]
    steps: int
    rate_batches: tuple[int, ...]
    rate_batch: int
    overrides: tuple[str, ...] = ()
    rate: float = 0.0


_CHEAP = ("run.evaluate_every=0", "run.save_every=0")
_NARROW = ("model.image.width=128", "model.image.heads=4", "model.text.width=128", "model.text.heads=4")
_SCENES = Sweep(
    samples=40_960,
    batches=(16, 32, 64, 128, 256, 512, 1024),
    queue_batch=64,
    queues=(256, 1024, 4096, 16384),
    group_batch=128,
    groups=(2, 4, 16, 64, 128),
    steps_batches=(16, 64, 256),
    steps=320,
    rate_batches=(16, 64, 256, 1024),
    rate_batch=64,
    overrides=(*_CHEAP, "data.num_labelled=64"),
)
SWEEPS = {
    "smoke": Sweep(
        samples=256,
        batches=(32, 256),
        queue_batch=32,
        queues=(64,),
        group_batch=32,
        groups=(2, 32),
        steps_batches=(16, 32),
        steps=4,
        rate_batches=(16, 32),
        rate_batch=32,
        overrides=("run.evaluate_every=0", "data.num_test=8", "data.num_labelled=8"),
    ),
    "demo": _SCENES,
    "photos": replace(_SCENES, overrides=_CHEAP),
    "photos_scratch": replace(_SCENES, overrides=(*_CHEAP, *_NARROW)),
}


class Series(NamedTuple):
    """The trainings of a part. name: in claims, before the data. panels: title of a plot -> its points."""

    name: str
    caption: str
    panels: dict[str, list[Point]]


def batches_and_queues(sweep: Sweep) -> Series:
    """Larger batches and longer queues at a fixed number of pairs."""
    caption = (
        f"Retrieval against the number of negatives. Every run sees {sweep.samples} pairs; the learning rate is not "
        f"adapted to the batch. With a queue all batches have {sweep.queue_batch} pairs; it starts empty, and past "
        "keys of the query's picture are positives."
    )
    by_queue = [Point(sweep.queue_batch), *(Point(sweep.queue_batch, queue) for queue in sweep.queues)]
    panels = {
        "larger batches, fewer steps": [Point(batch) for batch in sweep.batches],
        f"batches of {sweep.queue_batch} and a queue": by_queue,
    }
    return Series("negatives", caption, panels)


def groups(sweep: Sweep) -> Series:
    """Fewer negatives at a constant batch and number of steps."""
    caption = (
        f"Retrieval against the number of negatives, with all else equal: {sweep.samples // sweep.group_batch} steps "
        f"of {sweep.group_batch} pairs; the negatives of a query are the other pairs of its group."
    )
    points = [Point(sweep.group_batch, group=group) for group in sweep.groups]
    return Series("groups", caption, {f"groups in batches of {sweep.group_batch}": points})


def steps_and_rates(sweep: Sweep) -> Series:
    """Larger batches with constant steps, and with constant pairs and an adapted learning rate."""
    caption = (
        f"Retrieval against the batch: {sweep.steps} steps in all runs, in which larger batches see more pairs; and "
        f"{sweep.samples} pairs in all runs, with a learning rate that grows by the root of the batch."
    )
    panels = {
        "larger batches, as many steps": [Point(batch, steps=sweep.steps) for batch in sweep.steps_batches],
        "larger batches, as many pairs, adapted rate": [
            Point(batch, rate=sweep.rate * (batch / sweep.rate_batch) ** 0.5) for batch in sweep.rate_batches
        ],
    }
    return Series("by_batch", caption, panels)


def negatives(command: Command, code: PaperCode, series: Callable[[Sweep], Series]) -> list[Table]:
    """Trains a series for all seeds of a command; returns the table, writes the curves.

    Raises:
        ConfigError: overrides of settings that the part chooses.
    """
    if not command.runs_at(SWEEPS, "the chapter states no recipe"):
        return []
    command.refuse_search()
    rate = code.config("negatives_batch.yaml", command.scale).optim.learning_rate
    sweep = replace(SWEEPS[command.scale], rate=rate)
    name, caption, panels = series(sweep)
    # a point in two panels is trained once
    points = list(dict.fromkeys(point for of_panel in panels.values() for point in of_panel))
    chosen = (*SET_HERE, *(["optim.learning_rate"] if any(point.rate for point in points) else []))
    command.refuse_set(chosen)
    runs = run_rows({point.name: _jobs(command, code, sweep, point) for point in points})
    # columns: all recalls of the test sets that exist; rows: the points
    first = runs[points[0].name][0]
    keys = {
        f"{role}_{metric}".removeprefix("test_"): (role, metric)
        for role in ("test", "second_test")
        if role in first.evaluations
        for metric in METRICS
    }
    columns = [
        Column(key, METRICS[metric], stands_in_for=stand_in_for(command, runs, role))
        for key, (role, metric) in keys.items()
    ]
    rows = [
        Row(
            str(point),
            {},
            {key: measured_cell(runs[point.name], *of, command.scale) for key, of in keys.items()},
            MEASURED,
            f"{'up to ' if point.queue else ''}{point.negatives} negatives a query, {_steps(sweep, point)} steps",
            key=point.name,
        )
        for point in points
    ]
    data = first.evaluations["test"]["protocol"]["data"].replace("/", "-").split("-")[0]
    table = table_of(
        command, code.name, command.part, columns, rows, runs, caption=caption, experiment=f"{name}_{data}",
        protocol={"sweep": asdict(sweep)},
    )  # fmt: skip
    if is_main_process():
        drawn = [
            Curves(
                title,
                "negatives a query (at the end)" if any(point.queue for point in of_panel) else "negatives a query",
                "percent",
                {
                    METRICS[metric]: [
                        (float(point.negatives), _percent(runs[point.name], metric)) for point in of_panel
                    ]
                    for metric in DRAWN
                },
                log_x=True,
            )
            for title, of_panel in panels.items()
        ]
        plot_curves(drawn, command.folder(code.name) / f"{command.part}_curves.png", across=len(drawn))
    return [table]


def _jobs(command: Command, code: PaperCode, sweep: Sweep, point: Point) -> list[Job]:
    """One point of a series, for all seeds."""
    steps = _steps(sweep, point)
    overrides = (
        *sweep.overrides,
        *command.overrides,
        f"optim.global_batch_size={point.batch}",
        f"optim.steps={steps}",
        f"optim.warmup_steps={steps // WARMUP_SHARE}",
        *([f"method.queue_size={point.queue}"] if point.queue else []),
        *([f"method.group_size={point.group}"] if point.group else []),
        *([f"optim.learning_rate={point.rate}"] if point.rate else []),
    )
    row = "negatives_queue.yaml" if point.queue else "negatives_batch.yaml"
    if is_main_process():
        print(f"{command.part}: {point}, {steps} steps", flush=True)
    return [Job(code, row, command.scale, seed, overrides, command.runs) for seed in command.seeds]


def _steps(sweep: Sweep, point: Point) -> int:
    return point.steps or sweep.samples // point.batch


def _percent(runs: Sequence[RowRun], metric: str) -> list[float]:
    """A metric on the test set in percent, one value per seed."""
    return [100 * run.evaluations["test"]["metrics"][metric] for run in runs]
