"""Compares models, reproduced or published: one table, one plot, and a paired test over test images.

    make compare RUNS="outputs/runs/euclip/table4_clip-demo-0a1b outputs/runs/euclip/table4_meru-demo-2c3d/seed0"
    make compare RUNS="<run> <run>" SET="data.source=shards data.root=/data/flickr8k"
    python scripts/compare.py <run> <evaluation.json> ...

A model is the folder of a run, a checkpoint (step-XXXXXXXX), or the JSON file of an evaluate.py, published.py or
public.py; published weights are compared by that file. "table4_clip-demo-*" names all runs of a row: all its seeds,
and all settings it was trained with.
The evaluation in the folder of a run is used as it is. A checkpoint before the last one is evaluated now, and every
model with SET.

Runs that differ only in the seed are one line. Lines of one name are numbered, and a note states for each its folder
and the settings that differ. Numbers of different protocols share no column; a note states the
difference. Only preprocessing may differ, which a note states too. The other models are compared with the first one,
on the same test images: difference, its 95 % bootstrap interval, and p of McNemar's exact test, or of a sign-flip test
if an image has several captions or a line several seeds (common/report/statistics.py). These values are about new
images for the same weights. For newly trained weights, only several seeds can answer: where both lines have some,
Welch's 95 % interval over seeds follows.
"""

import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import yaml

from common.base.arguments import Parser, names_in, some, words_in
from common.base.config import ConfigError
from common.base.fields import flattened
from common.base.files import read_json, shown
from common.base.places import outputs
from common.base.provenance import hash_of, now
from common.evaluation.protocol import HEADLINES, MAY_DIFFER, data_text, first_difference
from common.report.figures import plot_table
from common.report.formats import to_text, write_table
from common.report.statistics import bootstrap_means, contrast_interval, percentile_interval, sign_flip_p_value
from common.report.table import MEASURED, Column, Row, Table, to_json
from common.reproduce.command import set_text
from common.reproduce.rows import RowRun
from common.reproduce.tables import measured_cell, trained_on
from common.run.checkpoint import named_checkpoint
from common.run.evaluation import evaluate_checkpoint, hits_beside
from common.run.evaluation_files import read_evaluations
from common.run.folder import RunFiles, RunName, settings_of_all_seeds
from common.run.launch import run_or_explain
from common.run.named_models import models_of

SCALE = "as trained"  # models of unlike scales may be compared on one test set


@dataclass(frozen=True)
class Model:
    """One of those that were named.

    line: equal for seeds of one line. place: folder or file. settings: dotted key -> value, without the seed.
    code: files that evaluated it -> hashes.
    """

    label: str
    line: str
    place: Path
    settings: dict[str, Any]
    paper: str
    code: dict[str, str]
    run: RowRun


def opened(text: str, overrides: Sequence[str]) -> list[Model]:
    """The models that a word of the command names, several where it is a pattern."""
    path = Path(text).expanduser()
    if path.name == "evaluation.json" and (path.parent / "config.yaml").is_file():
        return [_of_run(path.parent, overrides)]
    if path.is_file() and path.suffix == ".json":
        return [_of_file(path, overrides)]
    named = [path] if path.exists() else [*path.parent.glob(path.name)] or [path]
    seeds = [file.parent for folder in named for file in folder.glob("seed*/config.yaml")]
    folders = sorted(seeds, key=lambda folder: (len(folder.name), folder.name, folder)) or named
    if not any((folders[0] / name).is_file() for name in ("config.yaml", "state.json")):
        raise ConfigError(
            f"{text} is no run; expected the folder of a run, a checkpoint, or the JSON file of an "
            "evaluation. Published weights are evaluated first: python <paper>/published.py --checkpoint ..."
        )
    return [_of_run(folder, overrides) for folder in folders]


def _of_file(path: Path, overrides: Sequence[str]) -> Model:
    if overrides:
        raise ConfigError(f"{path} is measured already, {overrides[0]} needs a checkpoint; expected no SET, or a run")
    content, hits = read_json(path), read_json(hits_beside(path))
    if not isinstance(content, dict) or "evaluations" not in content or hits is None:
        problem = f"{path} is no evaluation with its hits in {hits_beside(path).name} beside it"
        raise ConfigError(f"{problem}; expected both files, whole")
    return _model(content["training_data"], str(path.resolve()), path, {}, 0, content, hits)


def _of_run(folder: Path, overrides: Sequence[str]) -> Model:
    # a checkpoint of a run; the folder of a published model has its settings beside it
    step = folder.name if (folder / "state.json").is_file() and not (folder / "config.yaml").is_file() else ""
    files = RunFiles(folder.resolve().parents[1] if step else folder.resolve())
    try:
        config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
        files = replace(files, identity={"seed": config["run"]["seed"]})
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise ConfigError(f"{files.config} is torn; expected the resolved config of a run") from error
    name = RunName.of(files.folder)
    label = f"{name.row}, {name.scale}" if name.scale else name.row
    content, hits = (None if overrides else read_evaluations(files)) or (None, None)
    if content is None or (step and int(step.rpartition("-")[2]) != content["step"]):
        checkpoint = named_checkpoint(folder)
        content, results = evaluate_checkpoint(models_of(checkpoint), checkpoint, overrides)
        hits = {role: result.hits for role, result in results.items()}
        if content["step"] < config["optim"]["steps"]:
            label += f", step {content['step']}"
    # not by the folder's name: it has another hash for every seed
    settings = flattened(settings_of_all_seeds(config)) | {"precision": content.get("precision")}
    line = hash_of([content["paper"], content["step"], label, settings])
    return _model(label, line, files.folder, settings, config["run"]["seed"], content, hits)


def _model(
    label: str,
    line: str,
    place: Path,
    settings: dict[str, Any],
    seed: int,
    content: dict[str, Any],
    hits: dict[str, Any],
) -> Model:
    run = RowRun(
        files=None,
        seed=seed,
        evaluations=content["evaluations"],
        hits=hits,
        training_data=content["training_data"],
        hardware=content["hardware"],
        git_revision=content["training_revision"],
        versions=content.get("versions", "not known"),
        config=None,
    )
    code = content["evaluation_code"]
    return Model(label, line, place, settings, content["paper"], code if isinstance(code, dict) else {"": code}, run)


def _unlike(code: dict[str, str], other: dict[str, str]) -> bool:
    # Whether a file that both have loaded differs.
    return any(code[file] != other[file] for file in code.keys() & other.keys())


def lines_of(models: Sequence[Model]) -> dict[str, list[Model]]:
    """Label -> one model per seed, in the order in which they were named."""
    groups: dict[str, list[Model]] = {}
    for model in models:
        groups.setdefault(model.line, []).append(model)
    lines: dict[str, list[Model]] = {}
    for group in groups.values():
        if len({model.run.seed for model in group}) < len(group):
            raise ConfigError(f"{group[0].label}: seed {group[-1].run.seed} is named twice; name each model once")
        label = group[0].label
        numbers = (f"{label} ({number})" for number in itertools.count(2))
        lines[label if label not in lines else next(name for name in numbers if name not in lines)] = group
    if len(lines) < 2:
        raise ConfigError(f"RUNS names {len(lines)} model; expected at least two (the seeds of a model count as one)")
    return lines


def namesakes(lines: dict[str, list[Model]]) -> list[str]:
    """For each line whose row has several lines: its folder, and its settings that differ between them."""
    notes = []
    for label, models in lines.items():
        alike = [others[0] for others in lines.values() if others[0].label == models[0].label]
        if len(alike) > 1:
            keys = dict.fromkeys(key for model in alike for key in model.settings)
            unlike = [
                key for key in keys if any(model.settings.get(key) != alike[0].settings.get(key) for model in alike)
            ]
            values = "; ".join(f"{key} {models[0].settings.get(key)}" for key in unlike)
            # without paths of this machine
            places = some(["/".join(model.place.parts[-2:]) for model in models])
            notes.append(f"{label} is {places}" + (f": {values}" if values else ""))
    return notes


def compare(models: Sequence[Model], command: str) -> Table:
    """The table; its notes hold the differences, which run a numbered line is, and what shares no column and why."""
    groups = lines_of(models)
    lines = {label: [model.run for model in group] for label, group in groups.items()}
    columns, cells, differences, notes = [], {label: {} for label in lines}, [], []
    for role in dict.fromkeys(role for runs in lines.values() for role in runs[0].evaluations):
        have = {label: runs[0].evaluations[role] for label, runs in lines.items() if role in runs[0].evaluations}
        alike, refused = _alike({label: evaluation["protocol"] for label, evaluation in have.items()})
        notes += [f"{role}: {text}" for text in refused]
        for metric, name in HEADLINES.items():
            measured = [label for label in alike if metric in have[label]["metrics"]]
            if len(measured) < 2:
                continue
            data = data_text(have[measured[0]]["protocol"])
            column = Column(f"{role}/{metric}", f"{role} {name}", stands_in_for=data)
            columns.append(column)
            for label in measured:
                cells[label][column.key] = measured_cell(lines[label], role, metric, SCALE)
            reference, *others = measured
            for other in others:
                result = difference(lines[other], lines[reference], role, metric)
                differences.append(f"{column.label}: {other} less {reference}: {result}")
    if not columns:
        reasons = "; ".join(notes) or "No test set is that of two of them"
        raise ConfigError(f"no two of these models have a number of one protocol. {reasons}")
    pairs = itertools.combinations(models, 2)
    if any(one.paper == other.paper and _unlike(one.code, other.code) for one, other in pairs):
        notes.append("evaluated by different versions of the code; evaluate.py or SET evaluates again")
    if len(differences) > 1:
        count = len(differences)
        notes.append(f"p values stand as they are; of {count} comparisons one below {0.05 / count:.2g} counts at 5 %")
    every = [run for runs in lines.values() for run in runs]
    return Table(
        paper="comparison",
        paper_title="models side by side",
        paper_version="no paper's table",
        table_id="compare",
        caption="Differences in points, over the test images in pairs: 95 % bootstrap interval and p value.",
        columns=columns,
        rows=[Row(label, {}, measured_cells, MEASURED) for label, measured_cells in cells.items() if measured_cells],
        scale=SCALE,
        data=trained_on(every),
        seeds=sorted({run.seed for run in every}),
        git_revision=", ".join(sorted({run.git_revision for run in every})),
        command=command,
        created=now(),
        hardware=", ".join(sorted({run.hardware for run in every})),
        notes=[*namesakes(groups), *differences, *notes],
    )


def _alike(protocols: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    # Labels under the first protocol that two share, and why the others are left out.
    labels = list(protocols)
    may_differ = (*MAY_DIFFER, "preprocessing")

    def same(one: str, other: str) -> bool:
        return first_difference(protocols[one], protocols[other], may_differ) is None

    first = next((one for one in labels if sum(same(one, other) for other in labels) > 1), labels[0])
    notes = []
    for label in labels:
        unlike = first_difference(protocols[first], protocols[label], may_differ)
        if unlike is not None:
            notes.append(f"{label} shares no column with {first}: {unlike[0]} is {unlike[2]}, there {unlike[1]}")
        elif (unlike := first_difference(protocols[first], protocols[label])) is not None:
            notes.append(
                f"images are preprocessed differently: {unlike[0]} is {unlike[2]} for {label}, {unlike[1]} for {first}"
            )
    return [label for label in labels if same(first, label)], notes


def difference(one: Sequence[RowRun], other: Sequence[RowRun], role: str, metric: str) -> str:
    """What one line has more than the other, in points, with interval and p value."""
    sums, counts = zip(*(_over_images(runs, role, metric) for runs in (one, other)))
    values = [[100 * run.evaluations[role]["metrics"][metric] for run in runs] for runs in (one, other)]
    text = f"{np.mean(values[0]) - np.mean(values[1]):+.1f}"
    if np.array_equal(*counts):
        low, high = percentile_interval(bootstrap_means(sums[0] - sums[1], counts[0]))
        text += f" [{low:+.1f}, {high:+.1f}], p {sign_flip_p_value(sums[0] - sums[1]):.2g}"
    else:
        text += ", not paired: the two were not measured on the same queries"
    if min(map(len, values)) > 1:
        low, high = contrast_interval([values[0], [-value for value in values[1]]])
        text += f"; over seeds [{low:+.1f}, {high:+.1f}]"
    return text


def _over_images(runs: Sequence[RowRun], role: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    # (num_images,) what an image's queries add to the number, mean over seeds, and how many queries it has.
    counts = np.array([len(hits) for hits in runs[0].hits[role][metric]])
    sums = np.array([[100 * math.fsum(hits) for hits in run.hits[role][metric]] for run in runs])
    return sums[:, counts > 0].mean(axis=0), counts[counts > 0]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", help="runs, checkpoints or evaluations, at least two; quotes as in a shell")
    parser.add_argument("--set", default="", help="data.key=value run.key=value ...: evaluate on other data")
    parser.add_argument("--output", type=Path, default=outputs(), help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="prints the table as JSON instead of text")
    given = parser.parse_args()
    names, overrides = names_in(given.runs), words_in("SET", given.set)  # make RUNS passes several names as one word
    models = [model for name in names for model in opened(name, overrides)]
    # without paths of this machine: of a full one the last two parts, as the folder of every run is a seed's
    paths = [Path(name).expanduser() for name in names]
    words = " ".join(shlex.quote(str(Path(*path.parts[-2:]) if path.is_absolute() else path)) for path in paths)
    table = compare(models, f'make compare RUNS="{words}"{set_text(overrides)}')
    folder = given.output / "comparisons" / hash_of([names, overrides])
    # printed first: a folder that cannot be written loses no evaluation
    print(to_json(table) if given.json else to_text(table))
    write_table(table, folder)
    plot_table(table, folder / "compare.png")
    if not given.json:
        print(f"table and plot: {shown(folder)}")


if __name__ == "__main__":
    run_or_explain(main)
