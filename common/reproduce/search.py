"""A search of settings by validation numbers: the same grid for every row, seeds that no table uses, no test set.

If a row's best value lies at an edge, the grid of all rows grows there by its own ratio, so all have equally many
trials. A validation number is no result: it chooses settings, and a table measures them with other seeds on other data.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tqdm import tqdm

from common.base.config import ConfigError
from common.base.files import read_json, write_atomically, write_json
from common.base.provenance import hash_of, now
from common.distributed import is_main_process
from common.reproduce.command import SEARCH_SEEDS
from common.reproduce.rows import Job, RowRun, run_row
from common.reproduce.side_by_side import train_side_by_side
from common.reproduce.tables import trained_on
from common.run.guards import NonFiniteLoss

MAX_WIDENINGS = 2  # times that a grid grows
NO_RESULT = "validation: no result"
METRICS = {  # of a run's validation the first that it has decides; higher is better
    "right_boxes": "share of right boxes of expressions",
    "matched_mean_recall": "mean of R@1, 5, 10 in both directions, by the matching head",
    "mean_recall": "mean of R@1, 5, 10 in both directions",
    "knn_acc1": "kNN accuracy",
    "accuracy": "accuracy",
}
# no test set is opened or evaluated; nothing is validated on the way
_NO_TEST = ("run.test=false", "run.evaluate_every=0")


@dataclass(frozen=True)
class Axis:
    """The values of one setting, as typed; numbers in ascending order.

    Raises:
        ConfigError: a value twice.
    """

    key: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        numbers = [_number(value) for value in self.values]
        distinct = numbers if self.is_numeric else self.values
        if len(set(distinct)) < len(self.values):
            raise ConfigError(f"SET: {self.key}={','.join(self.values)} has a value twice; expected distinct values")
        if self.is_numeric:
            object.__setattr__(self, "values", tuple(sorted(self.values, key=float)))

    @property
    def is_numeric(self) -> bool:
        return None not in map(_number, self.values)

    def edges(self, value: str) -> set[str]:
        """The end at which a value lies, "low" or "high"; none on an axis of words or of one value."""
        if not self.is_numeric or len(self.values) < 2:
            return set()
        return {end for end, at in (("low", self.values[0]), ("high", self.values[-1])) if value == at}

    def widened(self, end: str, is_whole: bool) -> "Axis":
        """The axis with one value more at an end, by the ratio of the two there; unchanged if they have none (0)."""
        outer, inner = (self.values[0], self.values[1]) if end == "low" else (self.values[-1], self.values[-2])
        if float(outer) * float(inner) <= 0:
            return self
        number = float(outer) ** 2 / float(inner)
        if is_whole and not round(number):  # 0 is often another kind of setting
            return self
        value = f"{round(number)}" if is_whole else f"{number:.3g}"
        # rounded it may be one of them, also as another text: 0.999 and 0.9990
        return self if float(value) in map(float, self.values) else replace(self, values=(*self.values, value))


@dataclass(frozen=True)
class Trial:
    """One setting of one row: its validation number in [0, 1] for each seed; None for a run that diverged."""

    settings: tuple[str, ...]
    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        return None if None in self.values else fmean(self.values)

    @property
    def standard_error(self) -> float | None:
        """Of the mean, s / sqrt(n); None if a run diverged."""
        return None if None in self.values else stdev(self.values) / math.sqrt(len(self.values))


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the highest mean, of equal ones the first; None if each has a run that diverged."""
    return max((trial for trial in trials if trial.mean is not None), key=lambda trial: trial.mean, default=None)


def equivalent(trials: Sequence[Trial]) -> list[Trial]:
    """Trials whose mean lies at most one standard error of the best below it, the best among them.

    The one-standard-error rule (Breiman et al. 1984).
    """
    best = best_of(trials)
    if best is None:
        return []
    return [trial for trial in trials if trial.mean is not None and trial.mean >= best.mean - best.standard_error]


@dataclass(frozen=True)
class Searched:
    """A finished search.

    jobs: row -> its job with the first seed, without grid settings and as tables would train it.
    axes_at_start, axes: of the grid; each row is trained at all combinations.
    trials: by row, the same settings in the same order.
    runs: of all trials that ended.
    measured: row -> (name of the metric, name of the validation data).
    notes: where a grid could not grow, and best values at an edge.
    """

    jobs: Mapping[str, Job]
    axes_at_start: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    trials: dict[str, list[Trial]]
    runs: list[RowRun]
    measured: dict[str, tuple[str, str]]
    notes: tuple[str, ...]


def run_search(jobs_of_rows: Mapping[str, Job], axes_at_start: tuple[Axis, ...]) -> Searched:
    """Trains what is missing of the grid; widens it while a best value lies at an edge, at most MAX_WIDENINGS times.

    Arguments as the fields of `Searched`.

    Raises:
        ConfigError: a row has no such setting, no validation number, or takes no value of the grid.
        Stopped, KeyboardInterrupt: as `train_side_by_side`; the same command resumes.
    """
    axes, notes, runs = axes_at_start, [], {}
    for row, job in jobs_of_rows.items():
        if not job.paper.open_validation(_jobs(job, grid(axes)[0])[0].config()):
            raise ConfigError(f"{row} has no validation set, by which a search could choose; expected data.val")
    for widenings in itertools.count():
        settings = grid(axes)
        jobs = {(row, chosen): _jobs(job, chosen) for row, job in jobs_of_rows.items() for chosen in settings}
        every_job = [job for seeds in jobs.values() for job in seeds]
        for job in every_job:
            job.config()  # refuses a value before anything is trained
        runs |= _run([job for job in every_job if job not in runs])
        trials = {
            row: [Trial(chosen, tuple(_value(runs[job]) for job in jobs[row, chosen])) for chosen in settings]
            for row in jobs_of_rows
        }
        ends = {(axis, end) for of_row in trials.values() for axis, end in at_edge(axes, of_row)}
        if not ends or widenings == MAX_WIDENINGS:
            break
        wider, refused = _widened(axes, ends, jobs_of_rows.values())
        notes += refused
        if wider == axes:
            break
        axes = wider
    measured = {row: _measured(row, [runs[job] for chosen in settings for job in jobs[row, chosen]]) for row in trials}
    for row, of_row in trials.items():
        notes += [
            f"{row}: its best {axis.key} lies at the {end} edge of the grid" for axis, end in at_edge(axes, of_row)
        ]
    ended = [run for run in runs.values() if isinstance(run, RowRun)]
    return Searched(jobs_of_rows, axes_at_start, axes, trials, ended, measured, tuple(dict.fromkeys(notes)))


def grid(axes: Iterable[Axis]) -> list[tuple[str, ...]]:
    """All combinations of the axes' values, each as "section.key=value" settings."""
    return list(itertools.product(*([f"{axis.key}={value}" for value in axis.values] for axis in axes)))


def at_edge(axes: Sequence[Axis], trials: Sequence[Trial]) -> list[tuple[Axis, str]]:
    """Axes and ends, "low" or "high", at which the best trial lies."""
    best = best_of(trials)
    if best is None:
        return []
    values = dict(setting.split("=", 1) for setting in best.settings)
    return [(axis, end) for axis in axes for end in sorted(axis.edges(values[axis.key]))]


def _widened(
    axes: tuple[Axis, ...], ends: Iterable[tuple[Axis, str]], jobs: Iterable[Job]
) -> tuple[tuple[Axis, ...], list[str]]:
    # a value that some row refuses becomes a note
    jobs, notes = list(jobs), []
    by_key = {axis.key: axis for axis in axes}
    for axis, end in sorted(ends, key=lambda pair: (pair[0].key, pair[1])):
        # by the setting's type, not by how its values were typed
        is_whole = isinstance(attrgetter(axis.key)(jobs[0].config()), int)
        wider = by_key[axis.key].widened(end, is_whole)
        (new,) = {*wider.values} - {*by_key[axis.key].values} or {None}
        chosen = grid([wider if key == axis.key else other for key, other in by_key.items()])
        try:  # in every combination: some settings bound one another
            for job, settings in itertools.product(jobs, [at for at in chosen if f"{axis.key}={new}" in at]):
                _jobs(job, settings)[0].config()
        except ConfigError as error:
            new = None
            notes.append(f"{axis.key}: the grid could not grow at its {end} edge: {error}")
        if wider == by_key[axis.key]:
            notes.append(
                f"{axis.key}: the grid could not grow at its {end} edge, for want of a ratio or a whole number"
            )
        elif new is not None:
            by_key[axis.key] = wider
    return tuple(by_key[axis.key] for axis in axes), notes


def _jobs(job: Job, settings: Sequence[str]) -> list[Job]:
    overrides, settings = (*job.overrides, *_NO_TEST), (*job.settings, *settings)
    return [job._replace(seed=seed, overrides=overrides, settings=settings) for seed in SEARCH_SEEDS]


def _run(jobs: Sequence[Job]) -> dict[Job, RowRun | None]:
    diverged, runs = train_side_by_side(jobs), {}
    for job in tqdm(jobs, desc="search", unit="run", disable=not is_main_process()):
        try:
            runs[job] = None if job in diverged else run_row(job)
        except NonFiniteLoss as error:
            print(f"{job.label}: counts as no success: {error}", flush=True)
            runs[job] = None
    return runs


def _value(run: RowRun | None) -> float | None:
    if run is None:
        return None
    metric, data = _metric_of(run)
    return run.validation[data][metric]


def _metric_of(run: RowRun) -> tuple[str, str]:
    for metric in METRICS:
        for data, metrics in run.validation.items():
            if metric in metrics:
                return metric, data
    raise ConfigError(
        f"{run.files.folder}: validation.json has no number that a search could use "
        f"({', '.join(run.validation) or 'no validation set'}); expected one of: {', '.join(METRICS)}"
    )


def _measured(row: str, runs: Sequence[RowRun | None]) -> tuple[str, str]:
    ended = [run for run in runs if run is not None]
    if not ended:
        raise ConfigError(f"{row}: every run of the search diverged; expected other values in SET")
    metric, data = _metric_of(ended[0])
    return METRICS[metric], data


# ---------------------------------------------------------------- what is written


def content_of(searched: Searched, command: str) -> dict[str, Any]:
    """A search as plain values, for search.json.

    Args:
        command: as typed, without paths of this machine.
    """
    job, runs = next(iter(searched.jobs.values())), searched.runs
    return {
        "kind": "search",
        "status": NO_RESULT,
        "paper": job.paper.name,
        "scale": job.scale,
        "command": command,
        "created": now(),
        "seeds": list(SEARCH_SEEDS),
        "training_data": trained_on(runs),
        "git_revision": sorted({run.git_revision for run in runs}),
        "hardware": sorted({run.hardware for run in runs}),
        "versions": sorted({run.versions for run in runs}),
        "grid": {axis.key: list(axis.values) for axis in searched.axes},
        "grid_at_start": {axis.key: list(axis.values) for axis in searched.axes_at_start},
        "notes": list(searched.notes),
        "rows": {row: _content_of_row(searched, row) for row in searched.trials},
    }


def _content_of_row(searched: Searched, row: str) -> dict[str, Any]:
    trials, (metric, data) = searched.trials[row], searched.measured[row]
    best, within = best_of(trials), equivalent(trials)
    within.sort(key=lambda trial: trial is not best)
    return {
        "metric": metric,
        "data": data,
        "trials": [
            {
                "settings": list(trial.settings),
                "values": list(trial.values),
                "mean": trial.mean,
                "standard_error": trial.standard_error,
            }
            for trial in trials
        ],
        "best": None if best is None else list(best.settings),
        "equivalent": [list(trial.settings) for trial in within],
    }


def markdown_of(content: Mapping[str, Any]) -> str:
    """The table of a search: a line for each row and setting, in percent."""
    seeds = ", ".join(map(str, content["seeds"]))
    lines = [
        f"# Search of settings: {content['paper']}, scale {content['scale']}",
        "",
        f"**{NO_RESULT.capitalize()}.** These numbers choose settings. No test set was evaluated.",
        "",
        f"`{content['command']}`",
        "",
        f"Seeds {seeds}. Training data: {content['training_data']}. Revision {', '.join(content['git_revision'])}, "
        f"{content['created'][:10]}, {'; '.join(content['hardware'])}.",
        "",
        "| row | setting | mean, % | standard error | by seed | |",
        "|---|---|---|---|---|---|",
    ]
    for row, of_row in content["rows"].items():
        for trial in of_row["trials"]:
            is_within = trial["settings"] in of_row["equivalent"]
            mark = "**best**" if trial["settings"] == of_row["best"] else "within one standard error" * is_within
            mean, error = (_percent(trial[name]) for name in ("mean", "standard_error"))
            values = ", ".join(map(_percent, trial["values"]))
            lines.append(f"| {row} | {', '.join(trial['settings'])} | {mean} | {error} | {values} | {mark} |")
    measured: dict[str, list[str]] = {}
    for row, of_row in content["rows"].items():
        measured.setdefault(f"{of_row['metric']} on {of_row['data']}", []).append(row)
    numbers = [f"{', '.join(rows)}: {number}" for number, rows in measured.items()]
    lines += ["", f"Number: {'; '.join(numbers)}."]
    grown = {key: values for key, values in content["grid"].items() if values != content["grid_at_start"][key]}
    lines += [
        f"Grid of {key} after widening, for all rows: {', '.join(values)} "
        f"(at the start {', '.join(content['grid_at_start'][key])})."
        for key, values in grown.items()
    ]
    lines += [f"Note: {note}." for note in content["notes"]]
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "diverged" if share is None else f"{100 * share:.2f}"


def write_search(content: Mapping[str, Any], root: Path, name: str) -> Path:
    """Writes search.json and .md; returns their folder, <root>/<paper>/search/<name>. Call on the main process.

    A search on other data stays; the folder then has a hash of the data at its end. A note names the values of an
    earlier search on the same data that this one leaves out.
    """
    folder = root / content["paper"] / "search" / name
    earlier, data = read_json(folder / "search.json"), content["training_data"]
    if earlier is not None and earlier.get("training_data") != data:
        folder = folder.with_name(f"{folder.name}-{hash_of(data)[:6]}")
        earlier = read_json(folder / "search.json")
    for key, values in (earlier or {}).get("grid", {}).items():
        left_out = [value for value in values if value not in content["grid"][key]]
        if left_out:
            note = f"an earlier search had also {key}={','.join(left_out)}; with these in SET its runs count too"
            content = {**content, "notes": [*content["notes"], note]}
            print(f"Note: {note}", flush=True)
    write_json(folder / "search.json", content)
    write_atomically(folder / "search.md", markdown_of(content))
    return folder


def name_of(scale: str, rows: Sequence[str], axes: Sequence[Axis], fixed: Sequence[str]) -> str:
    """Name of a search's folder; the same for another grid of the same settings."""
    shown = [*rows] if len(rows) <= 3 else [rows[0], f"and_{len(rows) - 1}_more", hash_of(sorted(rows))[:6]]
    keys = [axis.key.removeprefix("optim.") for axis in axes]
    return "-".join([scale, *shown, *keys, *([hash_of(sorted(fixed))[:6]] if fixed else [])])


def axes_of(texts: Iterable[str]) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """The axes of "key=value,value,..." texts, and the texts with one value. Commas in brackets separate nothing.

    A setting may have both: several values for the rows, and one for the rows that they start from.

    Raises:
        ConfigError: no "=", no setting with several values, or an axis or value twice.
    """
    axes, fixed = [], []
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(f"SET: {text!r} is not of the form section.key=value,value")
        # "x,y" without commas inside brackets
        parts = [part.strip() for part in re.split(r",(?![^\[]*\]|[^{]*\})", values)]
        is_open = any(values.count(one) != values.count(other) for one, other in ("[]", "{}"))
        if is_open or (parts[1:] and not all(parts)):
            raise ConfigError(f"SET: {text!r} has an empty value or an open bracket; expected section.key=value,value")
        if len(parts) > 1:
            axes.append(Axis(key, tuple(parts)))
        else:
            fixed.append(text)
    if not axes:
        raise ConfigError('SET has no setting with several values; expected SET="optim.learning_rate=1e-3,3e-3,1e-2"')
    for keys in ([text.partition("=")[0] for text in fixed], [axis.key for axis in axes]):
        if len(set(keys)) < len(keys):
            raise ConfigError("SET names a setting twice; expected all of its values behind one name")
    return tuple(axes), tuple(fixed)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
