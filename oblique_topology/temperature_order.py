"""Does the temperature settle before the representations (claim C38)? Runs from scratch with three starts.

    s_T   first step at which the spread of t over the three starts is at most 10 % of its first value
    s_R   first evaluation at which R@1 of one of the three runs is at least half of the best of all

The claim holds if s_T < s_R, and if t rises gradually after s_T: t(end) > t(s_T), and Spearman's correlation of t with
the step from s_T on is above 0.9, each in the worst of the three runs. With a pretrained backbone the representations
are there from the start, so that photographs on cached features cannot decide it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import stats

from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import train_rows
from common.run.log import validated_recall
from oblique_topology.temperature import STARTS, TOPOLOGIES, log_temperatures, row_of
from oblique_topology.temperature_curves import curve_of

DECIDES = "nothing"

COMPARED = {key: TOPOLOGIES[key] for key in ("sphere", "oblique")}
SPREAD = 0.1  # of its first value
EVERY = {"smoke": 1}  # steps between evaluations; 20 at other scales
COLUMNS = {
    "temperature_step": ("s_T: t of the three starts meet", "steps", "lower"),
    "representation_step": ("s_R: half of the best R@1", "steps", None),
    "rise": ("t(end) - t(s_T), least of three", "log units", None),
    "spearman": ("Spearman of t and step after s_T, least of three", "correlation", None),
}


class Order(NamedTuple):
    """The numbers of three runs; see COLUMNS. Without s_T: the last step, and 0 for what follows it."""

    temperature_step: float
    representation_step: float
    rise: float
    spearman: float


def order_of_runs(
    steps: Sequence[float],
    temperatures: Sequence[Sequence[float]],
    evaluations: Sequence[Sequence[tuple[float, float]]],
) -> Order:
    """The numbers of one seed.

    Args:
        steps: ascending.
        temperatures: t of each start at these steps.
        evaluations: (step, R@1) of each start, ascending.
    """
    steps, t = np.asarray(steps, dtype=np.float64), np.asarray(temperatures, dtype=np.float64)
    spread = t.max(axis=0) - t.min(axis=0)
    close = spread <= SPREAD * spread[0]
    representation = half_of_best(evaluations)
    if not close.any():
        return Order(float(steps[-1]), representation, 0.0, 0.0)
    first = int(close.argmax())
    later = t[:, first:]
    is_enough = later.shape[1] > 2 and (np.ptp(later, axis=1) > 0).all()
    correlations = [float(stats.spearmanr(steps[first:], row).statistic) for row in later] if is_enough else [0.0]
    return Order(float(steps[first]), representation, float((later[:, -1] - later[:, 0]).min()), min(correlations))


def half_of_best(evaluations: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The first step at which a run has at least half of the largest value of all; the last step if all stay at 0.

    A run that learns nothing has half of its own best at once, and must not decide.
    """
    best = max(value for points in evaluations for _, value in points)
    reached = [step for points in evaluations for step, value in points if value >= best / 2 > 0]
    return float(min(reached, default=evaluations[0][-1][0]))


def temperature_order(command: Command, code: PaperCode) -> list[Table]:
    """s_T, s_R and the rise of t for each topology, and both courses as curves."""
    if not command.runs_at(("smoke", "demo", "photos_scratch", "paper"), "there the representations are given"):
        return []
    every = EVERY.get(command.scale, 20)
    configs = {f"{topology}_{start}": row_of(topology, start) for topology in COMPARED for start in STARTS}
    # a folder of their own: how often a run is evaluated makes no other run, and those of Table 3 are rarely evaluated
    apart = replace(command, output=command.output / "temperature_order")
    settings = (f"run.evaluate_every={every}", "run.log_every=1")
    command.refuse_set(settings)
    runs = train_rows(apart, code, configs, dict.fromkeys(configs, settings))
    if not is_main_process():
        return []
    values: dict[tuple[str, str], list[float]] = {}
    panels = []
    for topology, label in COMPARED.items():
        if any(f"{topology}_{start}" not in runs for start in STARTS):  # left out by ROWS
            continue
        by_seed = list(zip(*(runs[f"{topology}_{start}"] for start in STARTS)))
        logs = [[log_temperatures(run) for run in of_seed] for of_seed in by_seed]
        numbers = [
            order_of_runs(of_seed[0][0], [t for _, t in of_seed], [validated_recall(run.files.log) for run in of_runs])
            for of_seed, of_runs in zip(logs, by_seed)
        ]
        values |= {(topology, column): [getattr(of_seed, column) for of_seed in numbers] for column in COLUMNS}
        of_t, of_recall = {}, {}
        for start, name in STARTS.items():
            of_t[f"start at {name}"] = curve_of(runs[f"{topology}_{start}"])
            recalls = [validated_recall(run.files.log) for run in runs[f"{topology}_{start}"]]
            of_recall[f"start at {name}"] = [
                (step, [of_run[at][1] for of_run in recalls]) for at, (step, _) in enumerate(recalls[0])
            ]
        panels += [
            Curves(f"{label}: temperature", "step (optimiser updates)", "t = ln(multiplier)", of_t),
            Curves(f"{label}: representations", "step (optimiser updates)", "mean R@1, validation, percent", of_recall),
        ]
    rate = next(iter(runs.values()))[0].config.optim.logit_scale_rate
    findings = Findings(
        name="temperature_order",
        caption="When the temperature settles and when the representations come, from scratch (claim C38).",
        measured_on="the training log",
        protocol=f"t of every step; R@1 of validation pairs every {every} steps",
        settings={"rows": configs, "evaluate_every": every, "spread": SPREAD, "logit_scale_rate": rate},
        rows=COMPARED,
        columns=COLUMNS,
        values=values,
        notes=[
            f"The temperature learns {rate:g} times as fast as the weights; at the weights' rate its steps add up to "
            "less than the starts are apart.",
            "Where the starts do not meet, s_T is the last step, and rise and correlation are 0.",
        ],
    )
    if panels:
        plot_curves(panels, command.folder(code.name) / "temperature_order_curves.png", across=2)
    return [findings_table(command, code.name, findings, runs)]
