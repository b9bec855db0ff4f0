"""Figure 4: the temperature during training, by topology and start; steps and rule as in temperature.py."""

import re
from collections.abc import Sequence

import numpy as np

from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import Runs, train_rows
from oblique_topology.temperature import EPOCHS, STARTS, log_temperatures, steps_of_rest

DECIDES = "nothing"

COLUMNS = {
    "final_t": ("final t", "log units", None),
    "final_multiplier": ("final multiplier e^t", "multiplier", None),
    "converged": ("t has converged at", "steps", None),
    "settled": ("t stands still from", "steps", None),
    "converged_multiplier": ("e^t has converged at", "steps", None),
    "settled_multiplier": ("e^t stands still from", "steps", None),
}


def figure4(command: Command, code: PaperCode) -> list[Table]:
    """Curves of t = ln(multiplier) for the rows of Table 3 that learn it, and the steps from which t is constant."""
    printed = code.printed("table3")["rows"]
    places = {row["method"]: tuple(row["method"].rsplit(", ", 1)) for row in printed}  # -> topology, start
    configs = {
        row["method"]: row["config"]
        for row in printed
        if "config" in row and places[row["method"]][1] in STARTS.values()
    }
    runs = train_rows(command, code, configs)
    if not is_main_process():
        return []
    panels = [
        Curves(
            topology,
            "step (optimiser updates)",
            "t = ln(multiplier)",
            {f"start at {start}": curve_of(runs[f"{topology}, {start}"]) for start in STARTS.values()},
        )
        for topology in dict.fromkeys(places[method][0] for method in runs)
    ]
    plot_curves(panels, command.folder(code.name) / "temperature_curves_of_t.png", across=2)
    return [findings_table(command, code.name, _findings(runs), runs)]


def curve_of(runs: Sequence) -> list[tuple[float, Sequence[float]]]:
    """(step, t of each seed) at the steps that all seeds have logged: run.log_every may change between two commands."""
    first, *others = [dict(zip(*map(np.ndarray.tolist, log_temperatures(run)))) for run in runs]
    return [(step, [t, *(of[step] for of in others)]) for step, t in first.items() if all(step in of for of in others)]


def _findings(runs: Runs) -> Findings:
    """The final values of the curves, and the steps from which they are constant."""
    values: dict[tuple[str, str], list[float]] = {}
    for method, seeds in runs.items():
        rest: dict[str, list[float]] = {column: [] for column in COLUMNS}
        for run in seeds:
            steps, t = log_temperatures(run)
            rest["final_t"].append(float(t[-1]))
            rest["final_multiplier"].append(float(np.exp(t[-1])))
            # the paper does not say whether t rests or e^t, and 2 % of them are not the same
            for ending, values_of_run in (("", t), ("_multiplier", np.exp(t))):
                for name, step in steps_of_rest(steps, values_of_run, run.config.optim.warmup_steps).items():
                    rest[f"{name}{ending}"].append(step)
        values |= {(_key(method), column): numbers for column, numbers in rest.items()}
    all_runs = [run for seeds in runs.values() for run in seeds]
    rates = sorted({run.config.optim.logit_scale_rate for run in all_runs})  # several only by a search
    return Findings(
        name="temperature_curves",
        caption="Where the learned temperature of the runs of Table 3 comes to rest (Figure 4).",
        protocol=f"moves by less than 2 % in 1/{EPOCHS} of the run",
        settings={"epochs": EPOCHS, "logit_scale_rate": rates[0] if len(rates) == 1 else rates},
        rows={_key(method): method for method in runs},
        columns=COLUMNS,
        values=values,
        notes=[
            "Converged: less than 2 % away after 1/15 of the run, also where it passes a dip. Stands still: moves by "
            "less within any such part from there on. The paper's sentence can mean either, and does not say whether "
            "it looks at t or at e^t. A run that never does counts with its end.",
            f"The temperature learns {' or '.join(f'{rate:g}' for rate in rates)} times as fast as the weights. "
            "A step of the optimiser moves t by about its rate, whatever t is, so jitter of one size keeps a low t "
            "longer from standing still than a high one.",
        ],
        rows_are_runs=True,
        measured_on="the training log",
    )


def _key(method: str) -> str:
    """A method's name with only letters, digits and underscores, as claims require."""
    return re.sub(r"[^A-Za-z0-9]+", "_", method).strip("_").lower()
