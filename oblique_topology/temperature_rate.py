"""Tables 3 and 6 with the temperature at the weights' rate, beside 10 and 100 times as fast (claims C6, C12, C14).

Below paper scale the temperature learns 20 to 135 times as fast as the weights, which removes the drawback that the
paper studies: a delay, and results that depend on the start. With small batches and many steps at a high rate t moves
far enough by itself. "Converged" is the paper's rule (`temperature.converged_step`).

    make reproduce-temperature_rate ... SET="temperature_rate.faster=false"    only the weights' rate, which claims read
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import stand_in_for, train_rows
from oblique_topology.temperature import EPOCHS, STARTS, TOPOLOGIES, converged_step, log_temperatures, row_of
from oblique_topology.temperature_curves import curve_of

DECIDES = "nothing"

RATES = (1, 10, 100)
# chosen by: hand, so that t moves as far at rate 1 as in the paper's runs
SETTINGS = {
    "photos": (
        "optim.global_batch_size=64",
        "optim.learning_rate=3e-3",
        "optim.weight_decay=0.5",
        "optim.warmup_steps=270",
        "optim.steps=5860",
        "run.evaluate_every=0",
        "run.save_every=0",
    ),
    "smoke": (),
}
COLUMNS = {
    "final_t": ("final t", "log units", None),
    "converged": ("t has converged at", "steps", None),
    "i2t_recall_at_1": ("i2t R@1", "percent", "higher"),
    "t2i_recall_at_1": ("t2i R@1", "percent", "higher"),
}


@dataclass(frozen=True)
class RateOptions:
    """Settings of this part, beside those of a row."""

    faster: bool = True  # also 10 and 100 times the weights' rate; at smoke scale never


@dataclass(frozen=True)
class RateConfig:
    """`make reproduce-temperature_rate ... SET="temperature_rate.faster=false"`."""

    temperature_rate: RateOptions = field(default_factory=RateOptions)


def rows_of(scale: str, faster: bool = True) -> dict[str, tuple[str, str, int]]:
    """Key -> topology, start, rate; at smoke scale one topology at one rate."""
    is_smoke = scale == "smoke"
    topologies = ["sphere"] if is_smoke else TOPOLOGIES
    rates = RATES if faster and not is_smoke else RATES[:1]
    return {
        f"{topology}_{start}_rate{rate}": (topology, start, rate)
        for rate in rates
        for topology in topologies
        for start in STARTS
    }


def converged_or_end(steps: Sequence[float], t: Sequence[float], warmup_steps: int) -> float:
    """The step by the paper's rule, in steps of the whole run; its end, a lower bound, if there is none."""
    step = converged_step(steps, t, (steps[-1] + 1) / EPOCHS, warmup_steps)
    return float(steps[-1]) if step is None else step


def temperature_rate(command: Command, code: PaperCode) -> list[Table]:
    """Final t, convergence and recall by topology, start and rate, and the curves of t."""
    if not command.runs_at(tuple(SETTINGS), "there a run of so many steps takes hours"):
        return []
    command.refuse_search()
    options, command = command.split(RateConfig)
    rows = rows_of(command.scale, options.temperature_rate.faster)
    configs = {key: row_of(topology, start) for key, (topology, start, _) in rows.items()}
    settings = {key: (*SETTINGS[command.scale], f"optim.logit_scale_rate={rate}") for key, (_, _, rate) in rows.items()}
    command.refuse_set(itertools.chain(*settings.values()))
    runs = train_rows(command, code, configs, settings)
    if not is_main_process():
        return []
    labels = {
        key: f"{TOPOLOGIES[topology]}, {STARTS[start]}, rate {rate}" for key, (topology, start, rate) in rows.items()
    }
    values: dict[tuple[str, str], list[float]] = {}
    for key, of_seeds in runs.items():
        logs = [log_temperatures(run) for run in of_seeds]
        warmup = of_seeds[0].config.optim.warmup_steps
        values[key, "final_t"] = [float(t[-1]) for _, t in logs]
        values[key, "converged"] = [converged_or_end(steps, t, warmup) for steps, t in logs]
        for column in ("i2t_recall_at_1", "t2i_recall_at_1"):
            values[key, column] = [100 * run.evaluations["test"]["metrics"][column] for run in of_seeds]
    panels = [
        Curves(
            f"{TOPOLOGIES[topology]}, rate {rate}",
            "step (optimiser updates)",
            "t = ln(multiplier)",
            {
                f"start at {name}": _thinned(curve_of(runs[f"{topology}_{start}_rate{rate}"]))
                for start, name in STARTS.items()
                if f"{topology}_{start}_rate{rate}" in runs
            },
        )
        for topology in TOPOLOGIES
        for rate in RATES
    ]
    plot_curves(
        [panel for panel in panels if panel.curves], command.folder(code.name) / "temperature_rate_curves.png", across=3
    )
    times = "" if {rate for *_, rate in rows.values()} == {1} else "1, 10 and 100 times "
    findings = Findings(
        name="temperature_rate",
        caption=f"Four topologies with the temperature at {times}the weights' rate (Tables 3 and 6).",
        measured_on=f"training log; recall: {stand_in_for(command, runs, 'test')}",
        protocol=f"converged: t differs by less than 2 % after 1/{EPOCHS} of the run, else the run's end",
        settings={"settings": {key: list(of_row) for key, of_row in settings.items()}, "rows": configs},
        rows={key: labels[key] for key in runs},
        columns=COLUMNS,
        values=values,
        notes=["Converged by the paper's rule: less than 2 % away one epoch later, also where t passes a dip."],
    )
    return [findings_table(command, code.name, findings, runs)]


def _thinned(points: list[tuple[float, Sequence[float]]], count: int = 300) -> list[tuple[float, Sequence[float]]]:
    """So many points of a curve at even places, with the last one."""
    if len(points) <= count:
        return points
    return [points[place] for place in np.linspace(0, len(points) - 1, count).round().astype(int)]
