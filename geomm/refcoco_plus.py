"""RefCOCO+ and Figure 3: what heat finds without boxes (`geomm/ground.py`), beside other words, a flat map, an oracle.

make reproduce-refcoco_plus PAPER=geomm SEEDS=3
make reproduce-refcoco_plus PAPER=geomm SCALE=paper DATA=/data/refcoco SET="grounding.layer=3 start.run=<a run>"
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from common.base.settings import setting
from common.distributed import is_main_process
from common.evaluation.embed import Encoder
from common.evaluation.grad_cam import MIN_IOU, ground
from common.report.figures import HeatOnPicture, plot_heat_on_pictures
from common.report.table import Column, Measured, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.findings import Findings, write_findings
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import note_of, printed_rows, table_of, train_rows
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import this_device
from geomm.evaluate import load_encoder
from geomm.ground import GroundingSet, RefcocoFiles, heat_of, measure, open_sets
from geomm.table3 import learnt, without_claims

DECIDES = "evaluation"

NUM_DRAWN = 4
STANDS_FOR = {"val": "scenes, all things", "test_a": "scenes, large things", "test_b": "scenes, small things"}
WORDS = {"own": "", "other": ", words of another thing"}
MAPS = {"flat": "a flat map", "oracle": "an oracle, heat in the right box alone"}
GUESS = "the better of a flat map (the largest box) and a random box"


@dataclass(frozen=True)
class GroundingConfig:
    """How heat is made."""

    layer: int | None = setting(None, at_least=1)  # of the fusion, from 1; null = the middle one, the third of six


@dataclass(frozen=True)
class GroundConfig:
    """What `make reproduce-refcoco_plus` takes beside a row's settings: `refcoco.val=...`, `grounding.layer=...`."""

    refcoco: RefcocoFiles = field(default_factory=RefcocoFiles)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)


@dataclass(frozen=True)
class Grounded:
    """What both parts begin with.

    command: without the settings of this part. runs, configs: by method. sets: by name. layer: that is looked at.
    """

    command: Command
    runs: dict[str, list[RowRun]]
    configs: dict[str, str]
    sets: dict[str, GroundingSet]
    layer: int | None
    on_scenes: bool


def grounded(command: Command, code: PaperCode) -> Grounded:
    """The rows of RefCOCO+, trained where they are missing; the sets are opened before."""
    asked, command = command.split(GroundConfig)
    configs = {row["method"]: row["config"] for row in code.printed("refcoco_plus")["rows"] if "config" in row}
    data = code.config(next(iter(configs.values())), command.scale, command.overrides).data
    sets = open_sets(command.scale, data, asked.refcoco)
    runs = train_rows(command, code, configs)
    return Grounded(command, runs, configs, sets, asked.grounding.layer, data.source == "scenes")


def refcoco_plus(command: Command, code: PaperCode) -> list[Table]:
    """The paper's table of RefCOCO+, and one of what other words, a flat map and an oracle find."""
    found = grounded(command, code)
    if not is_main_process():
        return []
    measured = {method: [_measured(run, found) for run in seeds] for method, seeds in found.runs.items()}
    source = code.printed("refcoco_plus")
    ours = {
        method: (
            {name: _cell(found, name, [each[name] for each in seeds]) for name in found.sets},
            note_of(found.command, found.configs[method], code),
        )
        for method, seeds in measured.items()
    }
    stands_for = STANDS_FOR if found.on_scenes else {}
    columns = [
        Column(each["key"], each["label"], stands_in_for=stands_for.get(each["key"]), guess=GUESS)
        for each in source["columns"]
    ]
    table = table_of(command, code.name, "refcoco_plus", columns, printed_rows(source, ours), found.runs)
    not_learnt = {
        name: f"{name} is not learnt: the words of another thing find the box as often, up to the spread of the seeds"
        for name in found.sets
        if not learnt(*([_accuracies(seeds, name, words) for seeds in measured.values()] for words in WORDS))
    }
    return [
        without_claims(table, not_learnt),
        write_findings(command, code.name, _controls(found, measured), found.runs),
    ]


def _encoder(run: RowRun) -> Encoder:
    return load_encoder(last_checkpoint(run.files.checkpoints), this_device())[1]


def _measured(run: RowRun, found: Grounded) -> dict[str, dict[str, float]]:
    """`measure` on every set, kept beside the run."""

    def measured() -> dict[str, dict[str, float]]:
        encoder = _encoder(run)
        return {name: measure(encoder, data, found.layer) for name, data in found.sets.items()}

    settings = {"layer": found.layer, "sets": {name: data.fingerprint for name, data in found.sets.items()}}
    return measured_once(run, Path(__file__), settings, measured)


def _accuracies(seeds: Sequence[dict[str, dict[str, float]]], name: str, words: str) -> list[float]:
    """On one set by seed, with the own words or those of another thing."""
    return [each[name][f"{words}_accuracy"] for each in seeds]


def _cell(found: Grounded, name: str, seeds: Sequence[dict[str, float]]) -> Measured:
    data = found.sets[name]
    return measured_over_seeds(
        [100 * each["own_accuracy"] for each in seeds],
        found.command.seeds,
        scale=found.command.scale,
        data=f"{data.name} ({data.fingerprint[:8]}), {len(data.expressions):,} expressions",
        protocol=f"box of most heat over the root of its area, IoU >= {MIN_IOU}",
        chance=_without_heat(seeds[0]),
    )


def _without_heat(measured: dict[str, float]) -> float:
    """What `GUESS` finds of a set, in percent."""
    return 100 * max(measured["chance"], measured["flat_accuracy"])


def _controls(found: Grounded, measured: dict[str, list[dict[str, dict[str, float]]]]) -> Findings:
    """Rows of models and of maps that are none's, columns of sets and of two ways to be right."""
    columns, values, rows = {}, {}, {}
    named = {name: f"{data.name} ({data.fingerprint[:8]})" for name, data in found.sets.items()}
    for name in found.sets:
        columns |= {
            f"{name}_accuracy": (f"{name}: right box", "percent", "higher"),
            f"{name}_pointing": (f"{name}: hottest point in the box", "percent", "higher"),
        }
    columns["no_heat"] = ("no box with heat", "percent", None)
    metrics = {"accuracy": "accuracy", "pointing": "pointing_accuracy"}
    for method, seeds in measured.items():
        key = Path(found.configs[method]).stem
        for row, words, label in (
            *((f"{key}_{words}", words, method + label) for words, label in WORDS.items()),
            *((words, words, label) for words, label in MAPS.items()),
        ):
            rows[row] = label
            for name in found.sets:
                for column, metric in metrics.items():
                    values[row, f"{name}_{column}"] = [100 * each[name][f"{words}_{metric}"] for each in seeds]
            no_heat = f"{words}_no_positive_score_share"
            values[row, "no_heat"] = [100 * fmean(each[name][no_heat] for name in found.sets) for each in seeds]
    first = next(iter(measured.values()))[0]
    return Findings(
        name="grounding",
        caption="Grounding without boxes: the expression's own words, those of another thing of the picture, and maps "
        "that no model made.",
        data=", ".join(dict.fromkeys(named.values())),
        measured_on={column: named.get(column.rsplit("_", 1)[0], "all sets") for column in columns},
        protocol=f"IoU >= {MIN_IOU}",
        settings={"layer": found.layer, "rows": found.configs},
        rows={row: rows[row] for row in sorted(rows, key=("flat", "oracle").__contains__)},
        columns=columns,
        values=values,
        chance={f"{name}_accuracy": _without_heat(first[name]) for name in found.sets},
        guess=GUESS,
        notes=[
            "A flat map takes the largest box. With the words of another thing heat that follows the words leaves the "
            "box; where both rows are alike, grounding was not learnt.",
            "No box with heat, mean of the sets: there the published code took the box of the expression before.",
        ],
    )


def figure3(command: Command, code: PaperCode) -> list[Table]:
    """Pictures with the heat of their expressions, and how much heat lies in the box of what is meant.

    Photographs are not ours to publish: they go to <output>/photographs, not to the results.
    """
    found = grounded(command, code)
    if not is_main_process():
        return []
    name, data = next(iter(found.sets.items()))
    folder = command.folder(code.name)
    if not found.on_scenes:
        folder = command.output / "photographs" / code.name / command.part / command.scale
        print(f"photographs with heat: {folder} (not among the results, which may be published)")
    _draw(found, data, folder / "figure3_pictures.png")
    measured = {method: [_measured(run, found)[name] for run in seeds] for method, seeds in found.runs.items()}
    values = {
        (f"{Path(found.configs[method]).stem}_{words}", "in_box"): [100 * each[f"{words}_in_box"] for each in seeds]
        for method, seeds in measured.items()
        for words in WORDS
    }
    findings = Findings(
        name="figure3",
        caption="Heat of the matching head's attention in the box of what the words mean (Figure 3).",
        data=f"{data.name} ({data.fingerprint[:8]}), {len(data.expressions):,} expressions",
        protocol="mean over expressions",
        settings={"layer": found.layer, "rows": found.configs},
        rows={
            f"{Path(found.configs[method]).stem}_{words}": method + label
            for method in measured
            for words, label in WORDS.items()
        },
        columns={"in_box": ("heat in the box of what is meant", "percent", "higher")},
        values=values,
        chance={"in_box": 100 * next(iter(measured.values()))[0]["area"]},
        notes=["A guess is even heat: the box's share of the picture. A map without heat counts as even."],
    )
    return [write_findings(command, code.name, findings, found.runs)]


def _draw(found: Grounded, data: GroundingSet, path: Path) -> None:
    """The first pictures of a set with two of their expressions each, and the box that each model of seed 0 takes."""
    first = sorted({each.picture for each in data.expressions if each.other})[:NUM_DRAWN]
    drawn = [each for picture in first for each in [e for e in data.expressions if e.picture == picture][:2]]
    pictures = [data.pictures[each.picture]["image"] for each in drawn]
    maps, boxes = [{} for _ in drawn], [{"": each.box} for each in drawn]
    for method, seeds in found.runs.items():
        heat = heat_of(_encoder(seeds[0]), pictures, [each.text for each in drawn], found.layer)
        for each, of_map, of_box, (pixels, patches) in zip(drawn, maps, boxes, heat):
            choice = ground(pixels, each.proposals, each.box).choice
            of_map[method], of_box[method] = patches, each.proposals[choice]
    texts = [each.text for each in drawn]
    plot_heat_on_pictures([HeatOnPicture(*line) for line in zip(texts, map(np.asarray, pictures), maps, boxes)], path)
