"""The chapter's statements as experiments on toy worlds: collapse, temperature, number of negatives, size of the batch.

Every public function is a part of `make reproduce-<part>`. It measures (`measurements.py`) for all seeds of a command,
gives tables, whose numbers claims name, and draws curves.
Scale smoke takes seconds; demo has settings (ours) at which a statement shows or fails.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from common.base.config import ConfigError
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from contrastive_basics.measurements import (
    OBJECTIVES,
    BatchSettings,
    FloorSettings,
    PairSettings,
    ToyRun,
    ViewSettings,
    measure_batch_sizes,
    measure_loss_floor,
    train_on_pairs,
    train_on_views,
)
from contrastive_basics.toys import EMBEDDING_DIM, NUM_CLASSES

DECIDES = "evaluation"

PAPER = "contrastive_basics"

TEMPERATURES = {  # name -> label, temperature at the start (None: no negatives at all), learned
    "positives_only": ("positives only", None, False),
    "t1_fixed": ("T = 1, fixed (Eq. 8 as printed)", 1.0, False),
    "t1_learned": ("T = 1, learned", 1.0, True),
    "t007_fixed": ("T = 0.07, fixed", 0.07, False),
    "t007_learned": ("T = 0.07, learned", 0.07, True),
}
NUM_NEGATIVES = (1, 3, 15, 63, 255)
QUEUE_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
BATCH_SIZES = (2, 4, 16, 64, 256, 1024)
FLOOR_BATCHES = (2, 16, 256)
_SCALES = {
    "demo": (ViewSettings(), PairSettings(), BatchSettings(), FloorSettings()),
    "smoke": (
        ViewSettings(steps=4, batch=32, queue=64, bank=100, queries=50, measure_at=(0, 2)),
        PairSettings(steps=4, test_pairs=50, measure_at=(0, 2)),
        BatchSettings(steps=2, batch=32, test_pairs=1024),
        FloorSettings(steps=5),
    ),
}
_LABELS = {
    "loss": ("loss", "nats", "lower"),
    "channel_std": ("channel std", "fraction", "higher"),
    "mean_cosine": ("mean cosine", "cosine", "lower"),
    "effective_rank": ("effective rank", "directions", "higher"),
    "positive_cosine": ("cosine of positives", "cosine", "higher"),
    "negative_cosine": ("cosine of negatives", "cosine", None),
    "knn_accuracy": ("kNN accuracy", "percent", "higher"),
    "view_r1": ("R@1 of views", "percent", "higher"),
    "i2t_r1": ("i2t R@1", "percent", "higher"),
    "t2i_r1": ("t2i R@1", "percent", "higher"),
    "logit_scale": ("logit scale", "multiplier", None),
}


def collapse(command: Command) -> list[Table]:
    """Which objectives collapse, without and with batch normalisation (claims C1, C2, C4, C5)."""
    if not _runs_here(command):
        return []
    settings = _SCALES[command.scale][0]
    rows, runs = {}, {}
    for batch_norm, suffix, remark in ((False, "", ""), (True, "_batch_norm", ", BN")):
        for objective, label in OBJECTIVES.items():
            rows[objective + suffix] = label + remark
            runs[objective + suffix] = _for_all_seeds(
                command,
                label + remark,
                lambda seed, objective=objective, bn=batch_norm: train_on_views(seed, objective, settings, bn),
            )
    # the common start; batch normalisation before its first batch changes nothing, so one row is enough
    rows["random_init"] = "random initialisation"
    runs["random_init"] = [ToyRun(run.course[0][1], ()) for run in runs["nt_xent"]]
    statistics = (
        "loss", "channel_std", "mean_cosine", "effective_rank", "positive_cosine", "negative_cosine", "knn_accuracy"
    )  # fmt: skip
    result = _findings(
        "collapse",
        f"Objectives on two views of toy pictures, {settings.steps} steps; BN: encoder with batch normalisation, of "
        f"its output too. Spread over the sphere is a channel std of {EMBEDDING_DIM**-0.5:.3f}.",
        "toy/classes",
        settings,
        rows,
        {name: _LABELS[name] for name in statistics},
        _values(runs, statistics),
        {"knn_accuracy": 100 / NUM_CLASSES},
    )
    panels = [
        Curves(
            f"{_LABELS[name][0]}{remark}",
            "step",
            _LABELS[name][1],
            {label: _course(runs[objective + suffix], name) for objective, label in OBJECTIVES.items()},
        )
        for suffix, remark in (("", ", no BN"), ("_batch_norm", ", BN"))
        for name in ("channel_std", "mean_cosine", "knn_accuracy")
    ]
    return _written(command, result, panels, across=3)


def temperature(command: Command) -> list[Table]:
    """Effect of the temperature on loss and retrieval, and training only with positives (claims C2, C16)."""
    if not _runs_here(command):
        return []
    settings = _SCALES[command.scale][1]
    runs = {
        name: _for_all_seeds(
            command, label, lambda seed, start=start, learned=learned: train_on_pairs(seed, settings, start, learned)
        )
        for name, (label, start, learned) in TEMPERATURES.items()
    }
    # the table has the end of the training, the figure its course
    statistics = ("loss", "i2t_r1", "t2i_r1", "channel_std", "positive_cosine", "negative_cosine", "logit_scale")
    rows = {name: label for name, (label, _, _) in TEMPERATURES.items()}
    result = _findings(
        "temperature",
        f"Pictures with captions of a toy world, batches of {settings.batch}, {settings.steps} steps; retrieval among "
        f"{settings.test_pairs} fresh pairs.",
        "toy/pairs",
        settings,
        rows,
        {name: _LABELS[name] for name in statistics},
        _values(runs, statistics),
        {"i2t_r1": 100 / settings.test_pairs, "t2i_r1": 100 / settings.test_pairs},
    )
    panels = [
        Curves(
            _LABELS[name][0],
            "step",
            _LABELS[name][1],
            {label: _course(runs[row], name) for row, label in rows.items()},
        )
        for name in ("loss", "i2t_r1", "negative_cosine")
    ]
    return _written(command, result, panels, across=3)


def negatives(command: Command) -> list[Table]:
    """Retrieval against the number of negatives with all else equal, and MoCo's queue (claim C20)."""
    if not _runs_here(command):
        return []
    view_settings, settings = _SCALES[command.scale][:2]
    # a constant batch: steps and gradients are the same, and only the number of negatives changes
    runs = {
        f"k{number}": _for_all_seeds(
            command,
            f"{number} negatives",
            lambda seed, number=number: train_on_pairs(seed, settings, 0.07, True, number),
        )
        for number in NUM_NEGATIVES
    }
    statistics = ("i2t_r1", "t2i_r1", "channel_std", "positive_cosine", "negative_cosine", "logit_scale")
    in_batch = _findings(
        "negatives",
        f"Pictures with captions of a toy world. All batches have {settings.batch} pairs; each query keeps its "
        f"positive and K random negatives. Learned temperature, {settings.steps} steps; retrieval among "
        f"{settings.test_pairs} fresh pairs.",
        "toy/pairs",
        settings,
        {f"k{number}": f"{number} negative{'s' if number > 1 else ''}" for number in NUM_NEGATIVES},
        {name: _LABELS[name] for name in statistics},
        _values(runs, statistics),
        {"i2t_r1": 100 / settings.test_pairs, "t2i_r1": 100 / settings.test_pairs},
    )
    retrieval = Curves(
        "negatives in the batch",
        "negatives per query",
        "R@1 (percent)",
        {
            direction: _against(NUM_NEGATIVES, [in_batch.values[f"k{n}", name] for n in NUM_NEGATIVES])
            for direction, name in (("i2t R@1", "i2t_r1"), ("t2i R@1", "t2i_r1"))
        },
        log_x=True,
    )
    tables = _written(command, in_batch, [retrieval], across=1)

    # more negatives than a batch holds: keys of past steps, at the same batch
    queue_runs = {
        f"queue{size}": _for_all_seeds(
            command,
            f"MoCo, queue of {size}",
            lambda seed, size=size: train_on_views(seed, "moco", replace(view_settings, queue=size)),
        )
        for size in QUEUE_SIZES
    }
    statistics = ("knn_accuracy", "view_r1", "channel_std", "mean_cosine", "effective_rank")
    queue = _findings(
        "negatives_queue",
        f"MoCo on two views of toy pictures; all batches have {view_settings.batch} pictures. The negatives are the "
        f"newest keys that fit into the queue. {view_settings.steps} steps.",
        "toy/classes",
        view_settings,
        {f"queue{size}": f"queue of {size}" for size in QUEUE_SIZES},
        {name: _LABELS[name] for name in statistics},
        _values(queue_runs, statistics),
        {"knn_accuracy": 100 / NUM_CLASSES, "view_r1": 100 / view_settings.queries},
    )
    features = Curves(
        "negatives in a queue",
        "size of the queue",
        "percent",
        {
            label: _against(QUEUE_SIZES, [queue.values[f"queue{size}", name] for size in QUEUE_SIZES])
            for label, name in (("kNN accuracy", "knn_accuracy"), ("R@1 of views", "view_r1"))
        },
        log_x=True,
    )
    return tables + _written(command, queue, [features], across=1)


def loss_floor(command: Command) -> list[Table]:
    """The lowest loss at temperature 1, as Eq. 6 to 8 are printed (claim C16)."""
    if not _runs_here(command):
        return []
    settings = _SCALES[command.scale][3]
    runs = _for_all_seeds(command, "free vectors", lambda seed: measure_loss_floor(seed, settings, FLOOR_BATCHES))
    # known optima stand beside the trained values, which must not go below them
    columns = {
        "chance": ("ln B", "nats", None),
        "t1_separated": ("positives 1, negatives 0, T = 1", "nats", None),
        "t1_optimum": ("optimum, T = 1", "nats", None),
        "t1_reached": ("reached, T = 1", "nats", "lower"),
        "t1_negative_cosine": ("cosine of negatives, T = 1", "cosine", None),
        "t007_optimum": ("optimum, T = 0.07", "nats", None),
        "t007_reached": ("reached, T = 0.07", "nats", "lower"),
        "t007_negative_cosine": ("cosine of negatives, T = 0.07", "cosine", None),
    }
    result = _findings(
        "loss_floor",
        f"Eq. 8 of B pairs of free unit vectors in {settings.dim} dimensions, trained from a random start for "
        f"{settings.steps} steps. Optimum: a regular simplex, with negatives at -1/(B - 1).",
        "toy/free vectors",
        settings,
        {f"b{batch}": f"B = {batch}" for batch in FLOOR_BATCHES},
        columns,
        {(f"b{b}", name): [run[f"{name}_{b}"] for run in runs] for b in FLOOR_BATCHES for name in columns},
        {},
    )
    panel = Curves(
        "loss of free vectors",
        "pairs in the batch",
        "nats",
        {
            columns[name][0]: _against(FLOOR_BATCHES, [result.values[f"b{b}", name] for b in FLOOR_BATCHES])
            for name in ("chance", "t1_optimum", "t1_reached", "t007_optimum", "t007_reached")
        },
        log_x=True,
        behind=(columns["t1_optimum"][0], columns["t007_optimum"][0]),
    )
    return _written(command, result, [panel], across=1)


def batch_size(command: Command) -> list[Table]:
    """One model's features in batches of different sizes: loss, error, hardest negative, memory (C17, C18, C19)."""
    if not _runs_here(command):
        return []
    settings = _SCALES[command.scale][2]
    runs = _for_all_seeds(command, "sub-batches", lambda seed: measure_batch_sizes(seed, settings, BATCH_SIZES))
    # one model for all sizes, so that only the task differs
    columns = {
        "loss": ("loss", "nats", "lower"),
        "error": ("in-batch error", "percent", "lower"),
        "hardest_negative": ("hardest negative's cosine", "cosine", None),
        "kept_mb": ("kept for backward", "MB", None),
    }
    result = _findings(
        "batch_size",
        f"The features of one model after {settings.steps} steps, of {settings.test_pairs} pairs, cut into batches of "
        "B: the task that a smaller batch sets. Kept for backward: by one step with a batch of that size.",
        "toy/pairs",
        settings,
        {f"b{size}": f"B = {size}" for size in BATCH_SIZES},
        columns,
        {(f"b{size}", name): [run[f"{name}_{size}"] for run in runs] for size in BATCH_SIZES for name in columns},
        {},
    )
    panels = [
        Curves(
            label,
            "pairs in the batch",
            unit_name,
            {label: _against(BATCH_SIZES, [result.values[f"b{size}", name] for size in BATCH_SIZES])},
            log_x=True,
        )
        for name, (label, unit_name, _) in columns.items()
    ]
    return _written(command, result, panels, across=2)


def _runs_here(command: Command) -> bool:
    """Whether the part exists at the command's scale.

    Raises:
        ConfigError: several processes, or overrides, as there is no row file to change.
    """
    if not command.runs_at(_SCALES, "it is an experiment on a toy world"):
        return False
    command.refuse_search()
    command.refuse_processes()
    if command.overrides:
        raise ConfigError(
            f"{command.part} is an experiment on a toy world and has no settings to override, got "
            f"{' '.join(command.overrides)}"
        )
    return True


def _for_all_seeds(command: Command, label: str, measure: Callable[[int], Any]) -> list[Any]:
    """The measurement of every seed; prints a line per seed."""
    results = []
    for seed in command.seeds:
        start = time.perf_counter()
        results.append(measure(seed))
        print(f"{command.part}: {label}, seed {seed}: {time.perf_counter() - start:.1f} s", flush=True)
    return results


def _values(runs: Mapping[str, Sequence[ToyRun]], statistics: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Values of the rows that have the statistic (before the first step there is no loss)."""
    return {
        (row, name): [run.statistics[name] for run in of_row]
        for row, of_row in runs.items()
        for name in statistics
        if name in of_row[0].statistics
    }


def _course(runs: Sequence[ToyRun], name: str) -> list[tuple[float, Sequence[float]]]:
    """(step, a value per seed) of one statistic."""
    steps = [step for step, statistics in runs[0].course if name in statistics]
    by_seed = [dict(run.course) for run in runs]
    return [(step, [course[step][name] for course in by_seed]) for step in steps]


def _against(places: Sequence[int], values: Sequence[Sequence[float]]) -> list[tuple[float, Sequence[float]]]:
    return list(zip(map(float, places), values))


def _written(command: Command, findings: Findings, panels: Sequence[Curves], across: int) -> list[Table]:
    """Draws the curves; the caller writes the table."""
    plot_curves(panels, command.folder(PAPER) / f"{findings.name}_curves.png", across)
    return [findings_table(command, PAPER, findings)]


def _findings(
    name: str,
    caption: str,
    data: str,
    settings: Any,
    rows: Mapping[str, str],
    columns: Mapping[str, tuple[str, str, str | None]],
    values: Mapping[tuple[str, str], Sequence[float]],
    chance: Mapping[str, float],
) -> Findings:
    """Findings with the settings that all toy experiments share."""
    return Findings(
        name=name,
        caption=caption,
        data=data,
        protocol=f"toy world, {settings.steps} steps",
        settings=asdict(settings),
        rows=rows,
        columns=columns,
        values=values,
        chance=chance,
        notes=["The chapter prints no numbers for this; they are of a toy world, for the direction of its statements."],
        rows_are_runs=True,
    )
