"""Which settings train stably: statements of the text about runs that have no row in a table (claims C19, C20, C24).

A run is unstable if its loss or gradient stops being finite, or if its final loss is at the chance level, the logarithm
of the batch size: the mean over the last logged steps is above 98 % of it. The paper does not define instability.
Settings whose runs all finished also list the final loss and the largest rise of the loss after warm-up.

Every setting states its start of the logit scale, as the scales may set another one for the tables. Settings that
`regime` has too are the same runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.distributed import is_main_process
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import Job, PaperCode, RowRun, run_row
from common.reproduce.side_by_side import train_side_by_side
from common.run.guards import NonFiniteLoss
from common.run.log import read_log

DECIDES = "evaluation"

NO_BETTER = 0.98  # of ln B; a collapsed run sits at ln B itself, on either side of it by rounding
LAST = 10  # logged steps at the end of a run
STARTS = {  # of the logit scale: key -> name, value with the digits of the rows' files; the smallest first
    "small": ("exp(-1)", 0.36787944117144233),
    "one": ("1", 1.0),
    "large": ("1/0.07", 14.285714285714286),
}


def start_at(key: str) -> str:
    """The override that starts the logit scale at one of STARTS."""
    return f"method.logit_scale_init={STARTS[key][1]!r}"


@dataclass(frozen=True)
class Setting:
    """One setting: its name in claims, a row's file, and the key of its start in STARTS."""

    key: str
    row: str
    start: str


SETTINGS = {
    "hyperbolic d, no-ln, lambda=0": Setting("hyperbolic_no_ln", "unstable_hyperbolic_no_ln.yaml", "large"),
    "hyperbolic d, no-ln, lambda=0.2": Setting("meru_no_ln", "unstable_meru_no_ln.yaml", "large"),
    "hyperbolic d, ln, lambda=0": Setting("hyperbolic", "table4_hyperbolic.yaml", "large"),
    "hyperbolic d, ln, lambda=0.2": Setting("meru", "table4_meru.yaml", "large"),
    "Euclidean d2, no-ln, lambda=0": Setting("lambda_0", "table4_euclidean_squared.yaml", "one"),
    "Euclidean d2, no-ln, lambda=0.1, K=0.3": Setting("lambda_01", "table4_euclip.yaml", "small"),
    "Euclidean d2, no-ln, lambda=0.2, K=0.3": Setting("lambda_02", "table4_euclidean_squared_entailment.yaml", "small"),
    "Euclidean d2, no-ln, lambda=0, beta from 1/0.07": Setting("large_start", "table4_euclidean_squared.yaml", "large"),
    "Euclidean d2, no-ln, lambda=0.1, beta from 1/0.07": Setting(
        "large_start_entailment", "table4_euclip.yaml", "large"
    ),
}


def stability(command: Command, code: PaperCode) -> list[Table]:
    """Trains every setting and reports which runs were unstable."""
    command.refuse_search()
    command.refuse_set(start_at(setting.start) for setting in SETTINGS.values())
    jobs = {
        method: [
            Job(code, setting.row, command.scale, seed, (*command.overrides, start_at(setting.start)), command.runs)
            for seed in command.seeds
        ]
        for method, setting in SETTINGS.items()
    }
    # all at once where the machine has room; the outcomes are then read from the finished runs
    train_side_by_side([job for row_jobs in jobs.values() for job in row_jobs])
    outcomes = {method: [_outcome(job) for job in row_jobs] for method, row_jobs in jobs.items()}
    runs = {method: [run for _, run in row_outcomes if run is not None] for method, row_outcomes in outcomes.items()}
    data = next((run.training_data for row_runs in runs.values() for run in row_runs), "no run finished")
    if not is_main_process():
        return []
    findings = Findings(
        name="stability",
        caption=__doc__.split("\n\n")[1].replace("\n", " "),
        data=data,
        protocol="training log",
        settings={method: [setting.row, start_at(setting.start)] for method, setting in SETTINGS.items()},
        rows={setting.key: method for method, setting in SETTINGS.items()},
        columns={
            "unstable": ("unstable", "share of runs", "lower"),
            "final_loss": ("final loss over ln B", "ratio", "lower"),
            "largest_rise": ("largest rise of the loss", "nats", "lower"),
        },
        values={
            (SETTINGS[method].key, name): [outcome[name] for outcome, _ in row_outcomes]
            for method, row_outcomes in outcomes.items()
            for name in row_outcomes[0][0]
            # a run that met NaN has no final loss, and a mean over the others would be too good
            if all(name in outcome for outcome, _ in row_outcomes)
        },
        rows_are_runs=True,
        measured_on="the training log",
    )
    return [findings_table(command, code.name, findings)]


def finished(job: Job) -> RowRun | None:
    """The run, cached or trained; None if it diverged, now or in an earlier call."""
    try:
        return run_row(job)
    except NonFiniteLoss as error:
        if is_main_process():
            print(error)
        return None


def _outcome(job: Job) -> tuple[dict[str, float], RowRun | None]:
    """Numbers of one run, and the run; only "unstable" of one that diverged."""
    run = finished(job)
    if run is None:
        return {"unstable": 1.0}, None
    optim = run.config.optim
    lines = [line for line in read_log(run.files.log) if line["event"] == "train"]
    return judge(lines, optim.warmup_steps, optim.global_batch_size), run


def judge(lines: Sequence[Mapping[str, float]], warmup_steps: int, batch_size: int) -> dict[str, float]:
    """unstable (0 or 1), final_loss over the chance level, and largest_rise in nats after warm-up, from a run's log.

    Args:
        lines: "step" and "contrastive_loss" of the logged steps.
    """
    rise, lowest = 0.0, math.inf
    for line in lines:
        if line["step"] > warmup_steps:
            lowest = min(lowest, line["contrastive_loss"])
            rise = max(rise, line["contrastive_loss"] - lowest)
    last = [line["contrastive_loss"] for line in lines[-LAST:]]
    final = math.fsum(last) / len(last) / math.log(batch_size)
    return {"unstable": float(final > NO_BETTER), "final_loss": final, "largest_rise": rise}
