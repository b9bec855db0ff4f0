"""RefCOCO+ and Figure 3: grounding without boxes (`geomm/ground.py`), beside other words, a flat map and an oracle.

make reproduce-refcoco_plus PAPER=geomm SEEDS=3
make reproduce-refcoco_plus PAPER=geomm SCALE=paper DATA=/data/refcoco SET="grounding.layer=3 start.run=<a run>"
A given run is the start of all rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from common.base.settings import setting
from common.data.broken import BrokenSample
from common.distributed import is_main_process
from common.evaluation.embed import Encoder
from common.evaluation.grad_cam import MIN_IOU, ground
from common.report.figures import HeatOnPicture, plot_heat_on_pictures
from common.report.table import Column, Measured, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import note_of, printed_rows, table_of, train_rows, with_custom_rows
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import this_device
from geomm.evaluate import load_encoder
from geomm.graph_table import graphs_of_runs
from geomm.ground import Expression, GroundingSet, RefcocoFiles, heat_of, layer_of, measure, open_sets
from geomm.table3 import learnt, without_claims

DECIDES = "evaluation"

NUM_DRAWN = 4
STANDS_FOR = {"val": "scenes, all things", "test_a": "scenes, large things", "test_b": "scenes, small things"}
WORDS = {"own": "", "other": ", words of another thing"}
MAPS = {"flat": "a flat map", "oracle": "an oracle, heat in the right box alone"}
GUESS = "the better of a flat map (the largest box) and a random box"


@dataclass(frozen=True)
class GroundingConfig:
    """Settings of the heat."""

    # of the fusion, from 1; null = the third of six as in ALBEF, the second of two
    layer: int | None = setting(None, at_least=1)


@dataclass(frozen=True)
class GroundConfig:
    """Settings of `make reproduce-refcoco_plus` beside those of a row: `refcoco.val=...`, `grounding.layer=...`."""

    refcoco: RefcocoFiles = field(default_factory=RefcocoFiles)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)


@dataclass(frozen=True)
class Grounded:
    """The common inputs of both parts.

    command: its overrides are those of rows. runs, configs: by method. sets: by name. layer: of the fusion.
    """

    command: Command
    runs: dict[str, list[RowRun]]
    configs: dict[str, str]
    sets: dict[str, GroundingSet]
    layer: int
    on_scenes: bool


def grounded(command: Command, code: PaperCode) -> Grounded:
    """The rows of RefCOCO+, trained if they are missing, after the sets are opened."""
    options, command = command.split(GroundConfig)
    source = with_custom_rows(command, code.printed("refcoco_plus"))
    configs = {row["method"]: row["config"] for row in source["rows"] if "config" in row}
    config = code.config(next(iter(configs.values())), command.scale, command.overrides)
    layer = layer_of(options.grounding.layer, config.method.fusion_layers)
    sets = open_sets(command.scale, config.data, options.refcoco)
    runs = train_rows(command, code, configs)
    return Grounded(command, runs, configs, sets, layer, config.data.source == "scenes")


def refcoco_plus(command: Command, code: PaperCode) -> list[Table]:
    """The paper's table of RefCOCO+, and one of the controls: other words, a flat map and an oracle."""
    grounding = grounded(command, code)
    if not is_main_process():
        return []
    measured = {method: [_measured(run, grounding) for run in seeds] for method, seeds in grounding.runs.items()}
    source = with_custom_rows(command, code.printed("refcoco_plus"))
    ours = {
        method: (
            {name: _cell(grounding, name, [of_run[name] for of_run in seeds]) for name in grounding.sets},
            note_of(grounding.command, grounding.configs[method], code),
        )
        for method, seeds in measured.items()
    }
    stands_for = STANDS_FOR if grounding.on_scenes else {}
    columns = [
        Column(column["key"], column["label"], stands_in_for=stands_for.get(column["key"]), guess=GUESS)
        for column in source["columns"]
    ]
    table = table_of(command, code.name, "refcoco_plus", columns, printed_rows(source, ours), grounding.runs)
    not_learnt = {
        name: f"{name} is not learnt: the words of another thing find the box as often, up to the spread of the seeds"
        for name in grounding.sets
        if not learnt(*([_accuracies(seeds, name, words) for seeds in measured.values()] for words in WORDS))
    }
    return [
        without_claims(table, not_learnt),
        findings_table(command, code.name, _controls(grounding, measured), grounding.runs),
        *graphs_of_runs(grounding.command, table, grounding.runs),
    ]


def _encoder(run: RowRun) -> Encoder:
    return load_encoder(last_checkpoint(run.files.checkpoints), this_device(), config=run.config)[1]


def _measured(run: RowRun, grounding: Grounded) -> dict[str, dict[str, float]]:
    """`measure` on every set, cached in the run's folder."""

    def measured() -> dict[str, dict[str, float]]:
        encoder = _encoder(run)
        return {name: measure(encoder, data, grounding.layer) for name, data in grounding.sets.items()}

    settings = {"layer": grounding.layer, "sets": {name: data.fingerprint for name, data in grounding.sets.items()}}
    return measured_once(run, Path(__file__), settings, measured)


def _accuracies(seeds: Sequence[dict[str, dict[str, float]]], name: str, words: str) -> list[float]:
    """Accuracies on one set by seed, with the expression's words or those of another object."""
    return [of_run[name][f"{words}_accuracy"] for of_run in seeds]


def _cell(grounding: Grounded, name: str, seeds: Sequence[dict[str, float]]) -> Measured:
    data = grounding.sets[name]
    return measured_over_seeds(
        [100 * of_run["own_accuracy"] for of_run in seeds],
        grounding.command.seeds,
        scale=grounding.command.scale,
        data=_described(data, seeds[0]),
        protocol=f"box of most heat over the root of its area, IoU >= {MIN_IOU}",
        chance=_without_heat(seeds[0]),
    )


def _described(data: GroundingSet, measured: dict[str, float]) -> str:
    left_out = f", {measured['left_out']:,} left out" if measured["left_out"] else ""
    return f"{data.name} ({data.fingerprint[:8]}), {measured['expressions']:,} expressions{left_out}"


def _without_heat(measured: dict[str, float]) -> float:
    """The accuracy of `GUESS` on a set, in percent."""
    return 100 * max(measured["chance"], measured["flat_accuracy"])


def _controls(grounding: Grounded, measured: dict[str, list[dict[str, dict[str, float]]]]) -> Findings:
    """Rows: models, and maps without a model. Columns: sets, with two kinds of accuracy."""
    columns, values, rows = {}, {}, {}
    named = {name: f"{data.name} ({data.fingerprint[:8]})" for name, data in grounding.sets.items()}
    for name in grounding.sets:
        columns |= {
            f"{name}_accuracy": (f"{name}: right box", "percent", "higher"),
            f"{name}_pointing": (f"{name}: hottest point in the box", "percent", "higher"),
        }
    columns["no_heat"] = ("no box with heat", "percent", None)
    metrics = {"accuracy": "accuracy", "pointing": "pointing_accuracy"}
    for method, seeds in measured.items():
        key = Path(grounding.configs[method]).stem
        for row, words, label in (
            *((f"{key}_{words}", words, method + label) for words, label in WORDS.items()),
            *((words, words, label) for words, label in MAPS.items()),
        ):
            rows[row] = label
            for name in grounding.sets:
                for column, metric in metrics.items():
                    values[row, f"{name}_{column}"] = [100 * of_run[name][f"{words}_{metric}"] for of_run in seeds]
            no_heat = f"{words}_no_positive_score_share"
            values[row, "no_heat"] = [100 * fmean(of_run[name][no_heat] for name in grounding.sets) for of_run in seeds]
    first = next(iter(measured.values()))[0]
    return Findings(
        name="grounding",
        caption="Grounding without boxes: the expression's own words, those of another thing of the picture, and maps "
        "that no model made.",
        data=", ".join(dict.fromkeys(named.values())),
        measured_on={column: named.get(column.rsplit("_", 1)[0], "all sets") for column in columns},
        protocol=f"IoU >= {MIN_IOU}",
        settings={"layer": grounding.layer, "rows": grounding.configs},
        rows={row: rows[row] for row in sorted(rows, key=("flat", "oracle").__contains__)},
        columns=columns,
        values=values,
        chance={f"{name}_accuracy": _without_heat(first[name]) for name in grounding.sets},
        guess=GUESS,
        notes=[
            "A flat map takes the largest box. With the words of another thing heat that follows the words leaves the "
            "box; where both rows are alike, grounding was not learnt.",
            "No box with heat, mean of the sets: there the published code took the box of the expression before.",
        ],
    )


def figure3(command: Command, code: PaperCode) -> list[Table]:
    """Images with the heat of their expressions, and the share of heat in the right box.

    Photographs may not be published: they go to <output>/photographs, not to the results.
    """
    grounding = grounded(command, code)
    if not is_main_process():
        return []
    name, data = next(iter(grounding.sets.items()))
    folder = command.folder(code.name)
    if not grounding.on_scenes:
        folder = command.output / "photographs" / code.name / command.part / command.scale
        print(f"photographs with heat: {folder} (not among the results, which may be published)")
    _draw(grounding, data, folder / "figure3_pictures.png")
    measured = {method: [_measured(run, grounding)[name] for run in seeds] for method, seeds in grounding.runs.items()}
    values = {
        (f"{Path(grounding.configs[method]).stem}_{words}", "in_box"): [
            100 * of_run[f"{words}_in_box"] for of_run in seeds
        ]
        for method, seeds in measured.items()
        for words in WORDS
    }
    findings = Findings(
        name="figure3",
        caption="Heat of the matching head's attention in the box of what the words mean (Figure 3).",
        data=_described(data, next(iter(measured.values()))[0]),
        protocol="mean over expressions",
        settings={"layer": grounding.layer, "rows": grounding.configs},
        rows={
            f"{Path(grounding.configs[method]).stem}_{words}": method + label
            for method in measured
            for words, label in WORDS.items()
        },
        columns={"in_box": ("heat in the box of what is meant", "percent", "higher")},
        values=values,
        chance={"in_box": 100 * next(iter(measured.values()))[0]["area"]},
        notes=["A guess is even heat: the box's share of the picture. A map without heat counts as even."],
    )
    return [findings_table(command, code.name, findings, grounding.runs)]


def _readable(data: GroundingSet) -> Iterator[tuple[Any, list[Expression]]]:
    """Images that can be read and have words of another thing, and at most two expressions of each."""
    for picture in sorted({line.picture for line in data.expressions if line.other}):
        with suppress(BrokenSample):  # `measure` names it
            yield data.pictures[picture]["image"], [line for line in data.expressions if line.picture == picture][:2]


def _draw(grounding: Grounded, data: GroundingSet, path: Path) -> None:
    """Draws the first images of a set with two expressions each, and the box that each model of seed 0 selects."""
    drawn, pictures = [], []
    for image, expressions in islice(_readable(data), NUM_DRAWN):
        drawn += expressions
        pictures += [image] * len(expressions)
    texts = [line.text for line in drawn]
    maps, boxes = [{} for _ in drawn], [{"": line.box} for line in drawn]
    for method, seeds in grounding.runs.items():
        heat = heat_of(_encoder(seeds[0]), pictures, texts, grounding.layer)
        for line, of_map, of_box, (pixels, patches) in zip(drawn, maps, boxes, heat):
            choice = ground(pixels, line.proposals, line.box).choice
            of_map[method] = patches
            if choice is not None:  # without heat none is chosen
                of_box[method] = line.proposals[choice]
    lines = [HeatOnPicture(*line) for line in zip(texts, map(np.asarray, pictures), maps, boxes)]
    plot_heat_on_pictures(lines, path, beside=2)  # the two expressions of an image
