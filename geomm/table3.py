"""Table 3: tasks after fine-tuning, beside the same models with blank images in training and test."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from common.distributed import is_main_process
from common.report.statistics import contrast_interval
from common.report.table import Column, Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import Job, PaperCode, RowRun
from common.reproduce.tables import note_of, train_rows, trained_table, training_of
from geomm.graph_table import graphs_of_runs

DECIDES = "nothing"

TASKS = ("vqa", "nlvr2", "visual_entailment")  # fields of a printed row: the rows that are fine-tuned
WITHOUT = {"blank": "blank pictures in training and test", "exchanged": "the two pictures exchanged in the test"}


def table3(command: Command, code: PaperCode) -> list[Table]:
    """The printed table and, as experiment `tasks`, each accuracy beside that without images."""
    source = code.printed("table3")
    trained = [row for row in [*source["rows"], *source["beyond"]] if "config" in row]
    configs = {(row["method"], task): row[task] for row in trained for task in TASKS if command.trains(row["config"])}
    of_tasks = {row["config"]: [row[task] for task in TASKS] for row in trained}

    def note(command: Command, row: str) -> str:
        return f"{note_of(command, row, code)}; then {', '.join(_steps(command, each, code) for each in of_tasks[row])}"

    of_chosen = replace(command, rows=())  # `configs` has the chosen rows already, under names of their tasks
    seeing = train_rows(of_chosen, code, configs)
    blank = train_rows(of_chosen, code, configs, dict.fromkeys(configs, ("data.blank=true",)))
    table, runs = trained_table(command, code, "table3", note, {}, TASKS)
    table = replace(table, columns=[_of_public_answers(column, table) for column in table.columns])
    pretrained = {method: runs[method] for method in dict.fromkeys(method for method, _ in configs)}
    if not is_main_process():
        return []
    # a task that images do not help, or that all runs together are near chance in, decides no claim
    methods, values, chance, not_learnt = list(dict.fromkeys(method for method, _ in configs)), {}, {}, {}
    for column in source["columns"]:
        key, (role, metric, task) = column["key"], column["measure"]
        for method in methods:
            runs = seeing[method, task]
            values[method, key] = _percent(runs, role, metric)
            values[f"{method}_blank", key] = _percent(blank[method, task], role, metric)
            if key == "nlvr2_test_p":
                values[f"{method}_exchanged", key] = _percent(runs, "nlvr2_exchanged", metric)
            chance[key] = 100 * runs[0].evaluations[role]["chance"][metric]
        reason = why_undecided(*([runs[method, task] for method in methods] for runs in (seeing, blank)))
        if reason:
            not_learnt[key] = f"{column['label']} {reason}"
    every_run = {f"{method}, {task}": runs for (method, task), runs in seeing.items()}
    findings = Findings(
        name="tasks",
        caption="Table 3's tasks beside the same model without pictures, and with those of NLVR2 exchanged.",
        measured_on={key: cell.data for row in table.rows for key, cell in row.ours.items() if cell is not None},
        protocol="accuracy; VQA's by the official rules, of answers from a closed list",
        settings={"rows": {", ".join(names): config for names, config in configs.items()}, "blank": "data.blank=true"},
        rows={method: method for method in methods}
        | {
            f"{method}_{kind}": f"{method}, {description}"
            for kind, description in WITHOUT.items()
            for method in methods
        },
        columns={column["key"]: (column["label"], "percent", "higher") for column in source["columns"]},
        values=values,
        chance=chance,
        notes=[*not_learnt.values()] if len(command.seeds) > 1 else ["One seed has no spread to say what is learnt."],
    )
    graphs = graphs_of_runs(command, table, pretrained)
    return [without_claims(table, not_learnt), findings_table(command, code.name, findings, every_run), *graphs]


def why_undecided(seeing: Sequence[Sequence[RowRun]], blank: Sequence[Sequence[RowRun]]) -> str:
    """Why a task decides no claim, by its validation items; empty where images help there and its runs have trained.

    Args:
        seeing, blank: runs by model and seed.
    """
    figures = [[_validated(seeds) for seeds in of_models] for of_models in (seeing, blank)]
    if not all(seeds for of_models in figures for seeds in of_models):
        return "has no validation figure to show that images help"
    if not learnt(*figures):
        return "is not learnt: blank pictures do as well on validation items (one-sided 95 %)"
    failure = training_of([run for seeds in seeing for run in seeds])[0].failure
    return f"is not trained: {failure}" if failure else ""


def _validated(runs: Sequence[RowRun]) -> list[float]:
    """Accuracy of the last step on validation items by seed, in percent; empty where a run has none."""
    figures = [100 * metrics["accuracy"] for run in runs for metrics in run.validation.values()]
    return figures if len(figures) == len(runs) else []


def learnt(seeing: Sequence[Sequence[float]], blank: Sequence[Sequence[float]]) -> bool:
    """Whether images help by more than the spread of the seeds: the one-sided 95 % CI of the difference lies above 0.

    The difference is summed over the models, each with the spread of its seeds.

    Args:
        seeing, blank: accuracies by model and seed. One seed has no spread, and counts as learnt if it is better.
    """
    gains = [np.subtract(one, other) for one, other in zip(seeing, blank, strict=True)]
    if len(gains[0]) == 1:
        return np.sum(gains) > 0
    return contrast_interval(gains, 0.9)[0] > 0


def without_claims(table: Table, reasons: Mapping[str, str]) -> Table:
    """The table with columns that decide no claim, and a note about them; `reasons`: column -> why."""

    def marked(key: str, cell):
        return replace(cell, undecided=reasons[key]) if cell is not None and key in reasons else cell

    rows = [replace(row, ours={key: marked(key, cell) for key, cell in row.ours.items()}) for row in table.rows]
    return replace(table, rows=rows, notes=[*table.notes, *reasons.values()])


def _of_public_answers(column: Column, table: Table) -> Column:
    """VQA's test answers are not public: at every scale its columns name the questions that were asked."""
    cells = (row.ours.get(column.key) for row in table.rows)
    data = next((cell.data for cell in cells if cell is not None), None)
    return replace(column, stands_in_for=data) if column.key.startswith("vqa") else column


def _steps(command: Command, row: str, code: PaperCode) -> str:
    """Task and steps of a row; text assignment precedes NLVR2."""
    job = Job(code.of(row), row, command.scale, 0, command.overrides, command.runs)
    config, parent = job.config(), next(iter(job.parents().values()), None)
    before = f"{_steps(command, parent.row, code)} and " if parent is not None and parent.paper == job.paper else ""
    return f"{before}{config.data.task} {config.optim.steps} steps of {config.optim.global_batch_size}"


def _percent(runs: Sequence[RowRun], role: str, metric: str) -> list[float]:
    return [100 * run.evaluations[role]["metrics"][metric] for run in runs]
