"""The temperature of trained runs, from their logs: the final t = ln(logit scale), and when t stops moving (Table 6).

The paper's rule: converged at the first step from which t changes by less than 2 % within one epoch, 7,200 of 108,000
steps. It has two readings, and both are computed. `converged_step`: t has hardly changed an epoch later, which is also
true of a dip or a peak. `settled_step`: t hardly changes within any epoch from there on.
Inferred: the rule refers to t, which the paper's figure shows, and not to e^t; |t| must exceed a threshold, as a
relative change near 0 has no meaning; warm-up, in which nothing moves yet, does not count; an epoch is a fifteenth of a
run, however often the run passes through its data.
"""

import math
from collections.abc import Sequence

import numpy as np

from common.report.table import Measured, measured_over_seeds
from common.reproduce.rows import RowRun
from common.run.log import read_log
from oblique_topology.config import Config

DECIDES = "evaluation"

EPOCHS = 15  # of the paper's runs
RELATIVE_CHANGE = 0.02
TOPOLOGIES = {  # of the rows of Table 3 that learn the temperature, see `row_of`
    "sphere": "Sphere",
    "geodesic": "Ob(64, 8), geodesic",
    "oblique": "Ob(64, 8), inner product",
    "euclidean": "Euclidean",
}
STARTS = {"264": "e^2.64", "531": "e^5.31", "0": "e^0"}  # in the order of Figure 4's colours: blue, orange, green
SMALLEST = 0.1  # |t| below which the rule waits


def row_of(topology: str, start: str = "264") -> str:
    """The config of a row by keys of TOPOLOGIES and STARTS."""
    return f"ablation_{topology}_{start}.yaml"


def log_temperatures(run: RowRun) -> tuple[np.ndarray, np.ndarray]:
    """Number of earlier updates, and t, for every logged step of a run.

    The last t is the value before the last update; only the checkpoint has the value after it.
    """
    records = [record for record in read_log(run.files.log) if record["event"] == "train"]
    return (
        np.array([record["step"] - 1 for record in records], dtype=np.float64),
        np.log([record["logit_scale"] for record in records]),
    )


def converged_step(steps: Sequence[float], values: Sequence[float], window: float, start: float = 0) -> float | None:
    """First logged step s >= start with |t(s + window) - t(s)| < 2 % of |t(s)| and |t(s)| > 0.1.

    Args:
        steps: ascending.
        values: t at those steps; between two of them it is interpolated.
        window: steps of one epoch.
        start: end of the warm-up.
    Returns:
        None if there is no such step at least a window before the end.
    """
    steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    later = np.interp(steps + window, steps, values)
    settled = (np.abs(later - values) < RELATIVE_CHANGE * np.abs(values)) & (np.abs(values) > SMALLEST)
    settled &= (steps + window <= steps[-1]) & (steps >= start)
    return float(steps[settled.argmax()]) if settled.any() else None


def settled_step(steps: Sequence[float], values: Sequence[float], window: float, start: float = 0) -> float | None:
    """First logged step from which t is constant: max over u in (s, s + window] of |t(u) - t(s)| < 2 % of |t(s)|, and
    |t(s)| > 0.1, for this and every later s whose window ends within the run.

    The threshold is relative, but an optimiser moves t by about its learning rate. Of two temperatures with the same
    jitter the higher one therefore settles first.

    Args and returns as `converged_step`; it is never earlier than that.
    """
    steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    ends = np.interp(steps + window, steps, values)
    beyond = np.searchsorted(steps, steps + window, side="right")
    settled = None
    for place in reversed(range(len(steps))):
        step, value = steps[place], values[place]
        if step + window > steps[-1]:
            continue
        ahead = np.append(values[place + 1 : beyond[place]], ends[place])
        if abs(value) <= SMALLEST or np.abs(ahead - value).max() >= RELATIVE_CHANGE * abs(value) or step < start:
            break
        settled = float(step)
    return settled


def steps_of_rest(steps: np.ndarray, values: np.ndarray, warmup_steps: int) -> dict[str, float]:
    """ "converged" and "settled" of a whole run by the two rules; the end of the run, a lower bound, if it has none."""
    window = (steps[-1] + 1) / EPOCHS
    rules = {"converged": converged_step, "settled": settled_step}
    rest = {name: rule(steps, values, window, warmup_steps) for name, rule in rules.items()}
    return {name: float(steps[-1]) if step is None else step for name, step in rest.items()}


def temperature_cells(runs: Sequence[RowRun], config: Config, scale: str) -> dict[str, Measured | None]:
    """Table 6's columns of one row: the final t, and the steps (in thousands) from which it is constant.

    Args:
        runs: one per seed.
        config: of the row; the steps are empty if the temperature is fixed.
    Returns:
        "temp_final", "converge_step" (`converged_step`) and "settle_step" (`settled_step`).
    """
    logs = [log_temperatures(run) for run in runs]
    learned = logs if config.method.logit_scale_trainable else []
    rest = [steps_of_rest(*log, config.optim.warmup_steps) for log in learned]
    still, never = f"by less than {RELATIVE_CHANGE:.0%}", "else the run's end"
    columns = {
        "temp_final": ("t of the last update", [values[-1] for _, values in logs]),
        "converge_step": (
            f"t differs {still} after 1/{EPOCHS} of the run, {never}",
            [x["converged"] / 1000 for x in rest],
        ),
        "settle_step": (f"t moves {still} within 1/{EPOCHS} of the run, {never}", [x["settled"] / 1000 for x in rest]),
    }
    # a fixed temperature has no step at which it comes to rest: an empty cell
    return {
        key: None
        if not values
        else measured_over_seeds(
            values,
            [run.seed for run in runs],
            scale=scale,
            data="training",  # not a test set; the same for all rows
            protocol=rule,
            full_protocol={"task": "temperature", "rule": rule},
        )
        for key, (rule, values) in columns.items()
    }


def final_logit_scales(runs: Sequence[RowRun]) -> tuple[float, ...]:
    """The multiplier e^t before the last update, one per seed."""
    return tuple(math.exp(log_temperatures(run)[1][-1]) for run in runs)
