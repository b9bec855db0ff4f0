"""One table of several models, ours and others, on the same test sets; `vlgeometry evaluate` calls it.

    vlgeometry evaluate RUN openai/clip-vit-base-patch32 --tasks retrieval,zero_shot --csv table.csv

A model is a run, a model folder, a file of weights or a hub name. The test sets are those of the first run named, with
the settings data.* of the command; without a run those of the command only.

    retrieval, zero_shot    by the model's similarity; retrieval by embeddings only, without a matching head
    probe, knn              on features of the image tower before its projection; sets and recipe of the oblique paper
    hierarchy               chains of captions from specific to generic, euclip/hierarchies.py
"""

import argparse
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from common.base.arguments import Parser, accepted, file_to_write
from common.base.config import ConfigError
from common.base.files import shown, write_atomically
from common.data.pairs import EvaluationSets, open_evaluation_sets
from common.distributed import is_main_process
from common.encoders.weights import HEADS_HELP, NOT_STATED, heads_argument
from common.evaluation.embed import Encoder
from common.evaluation.knn import evaluate_knn
from common.evaluation.linear_probe import backbone_encoder
from common.evaluation.protocol import HEADLINES, LEFT_OUT, MAY_DIFFER, Evaluation, data_text, first_difference
from common.geometry import has_root
from common.run.evaluation import refuse_stated, zero_shot_and_retrieval
from common.run.launch import join_processes
from common.run.named_models import open_model
from common.run.sources import run_checkpoint
from euclip.hierarchies import CHANCE, COLUMNS, measure
from euclip.published import LAYOUTS
from euclip.traversal_data import hierarchy_task
from oblique_topology.evaluate import PROBE_TEST, PROBE_TRAIN, linear_probe, probe_sets, without_probe_train

_MAY_DIFFER = (*MAY_DIFFER, "preprocessing")
TASKS = ("retrieval", "zero_shot", "probe", "knn", "hierarchy")


class Number(NamedTuple):
    """A row of the CSV file.

    metric: "task/metric". value, chance: fractions (rsum: a sum); chance "" = not known. protocol: as JSON.
    n: images; "" where `data` states what was measured.
    """

    model: str
    data: str
    metric: str
    value: float
    chance: float | str
    protocol: str
    n: int | str


class Model(NamedTuple):
    """A model that a user names, its settings and its encoder.

    label: name in the table; of a run that is not finished also where it stands.
    """

    label: str
    config: Any
    encoder: Encoder
    is_run: bool


def open_models(options: argparse.Namespace, overrides: Sequence[str]) -> list[Model]:
    """The models that a user names."""
    if len(set(options.models)) < len(options.models):
        raise ConfigError(f"a model is named twice: {' '.join(options.models)}; expected each once")
    checkpoints = [run_checkpoint(name) for name in options.models]
    if all(checkpoints):
        refuse_stated(options.models[0], options)
    stated = {"layout": options.layout or "transformers", "geometry": options.geometry or "sphere"}
    stated |= {"activation": options.activation, "heads": options.heads}
    labels = [
        "/".join(Path(name).parts[-1 if made is None else -2 :]) for name, made in zip(options.models, checkpoints)
    ]
    if len(set(labels)) < len(labels):
        labels = options.models
    models = []
    for name, label, checkpoint in zip(options.models, labels, checkpoints):
        config, encoder = open_model(name, overrides, **stated)
        is_run = checkpoint is not None
        if is_run and checkpoint.state["step"] < config.optim.steps:
            label = f"{label} (step {checkpoint.state['step']:,} of {config.optim.steps:,})"
        models.append(Model(label, config, encoder, is_run))
    return models


def check_tasks(tasks: Sequence[str], models: Sequence[Model], data: Any, sets: EvaluationSets) -> None:
    """Refuses a task whose data are missing, and a model that cannot do it.

    Raises:
        ConfigError: names the setting, or the model.
    """
    probed = probe_sets(data, sets)
    labelled = "data.root=<folder> and data.labelled=<folder of labelled sets in it>"
    needs = {
        "zero_shot": (sets.zero_shot, labelled),
        "probe": (probed, f"{labelled}, with the sets {PROBE_TRAIN} and {PROBE_TEST}"),
        "knn": (probed, f"{labelled}, with the sets {PROBE_TRAIN} and {PROBE_TEST}"),
    }
    if "hierarchy" in tasks:  # opens the test sets once more
        known = hierarchy_task(SimpleNamespace(data=data), 1)
        needs["hierarchy"] = known, "data.second_test=<shards with hierarchies>"
    for task in tasks:
        available, setting = needs.get(task, (True, ""))
        if not available:
            raise ConfigError(f"--tasks {task}: the data are missing; expected {setting}")
    for model in models if "hierarchy" in tasks else ():
        if not has_root(geometry := model.encoder.model.geometry):
            raise ConfigError(f"--tasks hierarchy: geometry {geometry.name} of {model.label} has no root")


def evaluate_model(model: Model, tasks: Sequence[str], data: Any, sets: EvaluationSets) -> Iterator[Number]:
    """All numbers of a model."""
    encoder, method = model.encoder, model.config.method
    # the same functions as those of every evaluate.py
    classified = without_probe_train(sets)
    chosen = EvaluationSets(
        *({} if task not in tasks else getattr(classified, task) for task in ("zero_shot", "retrieval"))
    )
    results = list(zero_shot_and_retrieval(SimpleNamespace(data=data, method=method), encoder, chosen).values())
    if "probe" in tasks:
        results.append(linear_probe(encoder, *probe_sets(data, sets)))
    if "knn" in tasks:
        bank, test, _ = probe_sets(data, sets)
        results.append(evaluate_knn(backbone_encoder(encoder, encoder.model.image_tower), bank, test))
    for result in results:
        yield from _numbers(model.label, result)
    if "hierarchy" in tasks:
        radius = SimpleNamespace(min_radius=getattr(method, "min_radius", None))
        what, scores = measure(encoder, SimpleNamespace(data=data, run=model.config.run, method=radius), "")["captions"]
        for name, value in scores.items():
            yield Number(model.label, what, f"hierarchy/{name}", value, CHANCE.get(name, ""), '{"chains": "all"}', "")


def _numbers(label: str, result: Evaluation) -> Iterator[Number]:
    protocol = result.protocol
    about = data_text(protocol), json.dumps(protocol, ensure_ascii=False), protocol["num_images"]
    for metric, value in result.metrics.items():
        chance = result.chance.get(metric, "")
        yield Number(label, about[0], f"{protocol['task']}/{metric}", value, chance, *about[1:])


def csv_text(numbers: Sequence[Number]) -> str:
    """A header and one line per number."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Number._fields, *numbers])
    return text.getvalue()


def table_text(numbers: Sequence[Number]) -> str:
    """Headline metrics with their units: a line per metric and protocol, a column per model.

    Numbers of unlike protocols share no line; these lines end with what differs first. A model's own preprocessing may
    differ, as in `compare.py`.
    """
    labels = list(dict.fromkeys(number.model for number in numbers))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    protocols: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in numbers:
        name = number.metric.partition("/")[2]
        if name in {*HEADLINES, *COLUMNS}:
            unit, form = COLUMNS[name][1] if name in COLUMNS else "fraction", "{:.3g}".format
            if unit == "fraction":
                unit, form = "percent", lambda value: f"{100 * value:.1f}"
            chance = "" if number.chance == "" else form(number.chance)
            unlike, protocol = protocols.setdefault((number.data, number.metric), []), json.loads(number.protocol)
            alike = (n for n, other in enumerate(unlike) if first_difference(protocol, other, _MAY_DIFFER) is None)
            which = next(alike, len(unlike))
            if which == len(unlike):
                unlike.append(protocol)
            lines.setdefault((number.data, number.metric, unit, chance, which), {})[number.model] = form(number.value)
    rows = [("data", "metric", "unit", "chance", *labels, "")]
    for (*key, which), values in lines.items():
        unlike = protocols[key[0], key[1]]
        # the first beside the second, all others beside the first
        difference = len(unlike) > 1 and first_difference(unlike[which], unlike[which == 0], _MAY_DIFFER)
        ends = [" ".join(difference[:2])] if difference else []
        if lost := unlike[which].get("unreadable_images"):
            ends.append(LEFT_OUT.format(lost))
        end = "; ".join(ends)
        rows.append((*key, *(values.get(label, "") for label in labels), end))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="+", metavar="MODEL or section.key=value", help="models; data.* and run.*")
    default = "retrieval, and zero_shot where the data hold labelled sets"
    parser.add_argument("--tasks", help=f"some of {','.join(TASKS)}; default: {default}")
    parser.add_argument("--csv", type=file_to_write, metavar="FILE", help="all numbers as CSV; replaces the file")
    parser.add_argument("--json", action="store_true", help="print only all numbers as JSON")
    parser.add_argument("--layout", help=f"of weights from elsewhere: {', '.join(LAYOUTS)}; default: transformers")
    parser.add_argument("--geometry", help="layout open_clip: the geometry of its training, default sphere")
    parser.add_argument("--activation", choices=("gelu", "quick_gelu"), help="of a file of weights without a config")
    parser.add_argument("--heads", type=heads_argument, default=NOT_STATED, metavar="IMAGE,TEXT", help=HEADS_HELP)
    options = parser.parse_intermixed_args()
    overrides = [word for word in options.words if re.match(r"\w+\.[\w.]+=", word)]
    options.models = [word for word in options.words if word not in overrides]
    tasks = ["retrieval"] if options.tasks is None else options.tasks.split(",")
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"--tasks {options.tasks}: no task {task!r}; {accepted(task, TASKS)}")
    join_processes(overrides)
    models = open_models(options, overrides)
    data = next((model for model in models if model.is_run), models[0]).config.data
    sets = open_evaluation_sets(data)
    if options.tasks is None and sets.zero_shot:
        tasks.append("zero_shot")
    check_tasks(tasks, models, data, sets)
    numbers = [number for model in models for number in evaluate_model(model, tasks, data, sets)]
    if not is_main_process():
        return
    # printed first: a file that cannot be written loses no evaluation
    print(json.dumps([number._asdict() for number in numbers], indent=1) if options.json else table_text(numbers))
    if options.csv:
        write_atomically(options.csv, csv_text(numbers))
        if not options.json:
            print(f"all {len(numbers)} numbers with their protocols: {shown(options.csv)}")
