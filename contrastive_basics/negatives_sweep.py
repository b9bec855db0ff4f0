"""The part `negatives_sweep`: retrieval against the number of negatives, with real towers (claim C20; spec Sec. 5.4).

Two series, each with the number of pairs seen held fixed:
    batch    B pairs a step, so B - 1 negatives a query; larger batches mean fewer updates
    queue    a fixed batch, and up to K pairs of past steps from a momentum encoder as further negatives
The learning rate is that of the scale and is not adapted to the batch.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from common.distributed import is_main_process
from common.report.cells import measured_cell
from common.report.command import Command
from common.report.curves import Curves, plot_curves
from common.report.experiments import Experiment, write_experiment
from common.report.schema import MEASURED, Column, Row, Table
from common.run.config import ConfigError
from common.run.reproduce import PaperCode, RowRun, run_row

Runs = Mapping[str, Sequence[RowRun]]
METRICS = {
    **{f"{direction}_recall_at_{k}": f"{direction} R@{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)},
    "mean_recall": "mean of the six",
}
DRAWN = ("i2t_recall_at_1", "t2i_recall_at_1", "mean_recall")
SET_HERE = ("optim.steps=", "optim.global_batch_size=", "optim.warmup_steps=", "method.queue_size=")
WARMUP_SHARE = 12  # one step in so many


@dataclass(frozen=True)
class Sweep:
    """What is varied at one scale.

    samples: pairs that every run sees.
    batches: B of the first series.
    queue_batch: B of the second, one of the first series, which is its K = 0.
    queues: K of the second.
    overrides: what makes a run of the sweep cheaper than a row of the scale.
    """

    samples: int
    batches: tuple[int, ...]
    queue_batch: int
    queues: tuple[int, ...]
    overrides: tuple[str, ...] = ()


_BATCHES, _QUEUES = (16, 32, 64, 128, 256, 512, 1024), (256, 1024, 4096, 16384)
_CHEAP = ("run.evaluate_every=0", "run.save_every=0")
_NARROW = ("model.image.width=128", "model.image.heads=4", "model.text.width=128", "model.text.heads=4")
SWEEPS = {
    "smoke": Sweep(256, (32, 256), 32, (64,), ("run.evaluate_every=0", "data.num_test=8", "data.num_labelled=8")),
    "demo": Sweep(40_960, _BATCHES, 64, _QUEUES, (*_CHEAP, "data.num_labelled=64")),
    "photos": Sweep(40_960, _BATCHES, 64, _QUEUES, (*_CHEAP, *_NARROW)),
}


def negatives_sweep(command: Command, code: PaperCode) -> list[Table]:
    """Trains both series for all seeds of a command; gives the table, writes the experiment and the curves.

    Raises:
        ConfigError: for settings that the sweep itself chooses.
    """
    if not command.runs_at(SWEEPS, "the chapter states no recipe"):
        return []
    taken = [text for text in command.overrides if text.startswith(SET_HERE)]
    if taken:
        raise ConfigError(f"{taken[0]} cannot be set: {command.part} chooses batch, steps and queue")
    sweep = SWEEPS[command.scale]
    settings = {f"batch_{batch}": (batch, 0) for batch in sweep.batches}
    settings |= {f"queue_{queue}": (sweep.queue_batch, queue) for queue in sweep.queues}
    runs = {name: _runs(command, code, sweep, batch, queue) for name, (batch, queue) in settings.items()}

    roles = [role for role in ("test", "second_test") if role in runs[f"batch_{sweep.queue_batch}"][0].evaluations]
    keys = {f"{role}_{metric}": (role, metric) for role in roles for metric in METRICS}
    columns = [
        Column(key, METRICS[metric], stands_in_for=command.stand_in(runs, role)) for key, (role, metric) in keys.items()
    ]
    rows = [
        Row(
            f"batch {batch}, queue {queue}" if queue else f"batch {batch}",
            {},
            {key: measured_cell(runs[name], role, metric, command.scale) for key, (role, metric) in keys.items()},
            MEASURED,
            f"{'up to ' if queue else ''}{batch - 1 + queue} negatives a query, {sweep.samples // batch} steps",
        )
        for name, (batch, queue) in settings.items()
    ]
    caption = (
        f"Retrieval against the number of negatives. Every run sees {sweep.samples} pairs; the learning rate is not "
        f"adapted to the batch. With a queue: batches of {sweep.queue_batch} throughout; it starts "
        "empty, and past keys of a query's own picture are positives."
    )
    table = command.table(code, code.paper_tables(), command.part, columns, rows, runs, caption=caption)
    if is_main_process():
        write_experiment(_experiment(command, code, table, sweep, runs), command.results)
        plot_curves(_panels(sweep, runs), command.folder(code.name) / f"{command.part}_curves.png", across=2)
    return [table]


def _runs(command: Command, code: PaperCode, sweep: Sweep, batch: int, queue: int) -> list[RowRun]:
    """One point of a series, for all seeds."""
    steps = sweep.samples // batch
    overrides = [
        *sweep.overrides,
        *command.overrides,
        f"optim.global_batch_size={batch}",
        f"optim.steps={steps}",
        f"optim.warmup_steps={steps // WARMUP_SHARE}",
    ]
    row = "negatives_batch.yaml"
    if queue:
        row, overrides = "negatives_queue.yaml", [*overrides, f"method.queue_size={queue}"]
    if is_main_process():
        print(f"{command.part}: batch {batch}, queue {queue}, {steps} steps", flush=True)
    return [run_row(code, row, command.scale, seed, overrides, command.runs) for seed in command.seeds]


def _values(runs: Runs, name: str, metric: str) -> list[float]:
    """Percent on the test set, one per seed."""
    return [100 * run.evaluations["test"]["metrics"][metric] for run in runs[name]]


def _experiment(command: Command, code: PaperCode, table: Table, sweep: Sweep, runs: Runs) -> Experiment:
    """What claims name: experiment["negatives_<data>"]["batch_<B>_<metric>" or "queue_<K>_<metric>"], in percent."""
    protocol = next(iter(runs.values()))[0].evaluations["test"]["protocol"]
    values = {f"{name}_{metric}": tuple(_values(runs, name, metric)) for name in runs for metric in METRICS}
    return Experiment(
        paper=code.name,
        name=f"negatives_{protocol['data'].replace('/', '-').split('-')[0]}",
        scale=command.scale,
        seeds=command.seeds,
        values=values,
        units=dict.fromkeys(values, "percent"),
        data=f"{table.data}; ranked on {protocol['data']}",
        protocol={"sweep": asdict(sweep), "retrieval": protocol},
        caption=table.caption,
        git_revision=table.git_revision,
        command=table.command,
        created=datetime.date.today().isoformat(),
        hardware=table.hardware,
    )


def _panels(sweep: Sweep, runs: Runs) -> list[Curves]:
    by_batch = [(batch - 1, f"batch_{batch}") for batch in sweep.batches]
    start = (sweep.queue_batch - 1, f"batch_{sweep.queue_batch}")
    by_queue = [start] + [(sweep.queue_batch - 1 + queue, f"queue_{queue}") for queue in sweep.queues]
    return [
        Curves(
            title,
            "negatives a query (at the end)",
            "percent",
            {METRICS[metric]: [(float(x), _values(runs, name, metric)) for x, name in points] for metric in DRAWN},
            log_x=True,
        )
        for title, points in (
            ("larger batches, fewer steps", by_batch),
            (f"batches of {sweep.queue_batch} and a queue", by_queue),
        )
    ]
