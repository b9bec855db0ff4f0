"""Grounding without boxes (RefCOCO+, Figure 3): where in a picture the matching head looks chooses among proposals.

    make reproduce-refcoco_plus PAPER=geomm SEEDS=3
    make reproduce-refcoco_plus PAPER=geomm SCALE=paper DATA=/data/refcoco SET="grounding.layer=3 start.run=<a run>"

The model is ALBEF, fine-tuned on pictures with expressions and no boxes. Of a picture and an expression the match logit
goes back to the attention of one fusion layer; attention times the positive part of its gradient is the heat, and the
proposal with the most heat over the root of its area is the answer (`common/evaluation/grad_cam.py`). Beside it: the
same with words that mean another thing of the picture, a flat map, and an oracle that heats the right box alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from common.base.config import ConfigError, load_config, load_row
from common.base.settings import DataConfig, setting
from common.data.annotated import open_annotated
from common.data.broken import BrokenSample
from common.data.scenes import ReferringScenes
from common.distributed import is_main_process
from common.evaluation.embed import Encoder, evaluation_mode
from common.evaluation.grad_cam import (
    MIN_IOU,
    Grounding,
    attention_heat,
    box_coverage,
    gradients_of,
    ground,
    grounding_metrics,
    inclusive_iou,
    pixel_boxes,
    resize_heat,
    share_in_box,
)
from common.methods.albef import Albef
from common.report.figures import HeatOnPicture, plot_heat_on_pictures
from common.report.table import Column, Measured, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.findings import Findings, write_findings
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import note_of, printed_rows, table_of, train_rows
from common.run.checkpoint import last_checkpoint
from geomm.evaluate import load_encoder
from geomm.table3 import learnt, without_claims

NUM_PICTURES = {"smoke": 6, "demo": 400}  # of each set of scenes; other scales as demo
NUM_DRAWN = 4
SETS = {"val": ("val", None), "test_a": ("test", True), "test_b": ("test", False)}  # part of scenes, large things alone
STANDS_FOR = {"val": "scenes, all things", "test_a": "scenes, large things", "test_b": "scenes, small things"}
WORDS = {"own": "", "other": ", words of another thing"}
MAPS = {"flat": "a flat map", "oracle": "an oracle, heat in the right box alone"}


@dataclass(frozen=True)
class RefcocoFiles:
    """RefCOCO+ below data.root, where pictures are photographs; `docs/annotations.md` says how the files are made."""

    val: str = "refcoco_plus_val.json"  # expressions with boxes and proposals; one that is not there is left out
    test_a: str = "refcoco_plus_testA.json"  # likewise
    test_b: str = "refcoco_plus_testB.json"  # likewise


@dataclass(frozen=True)
class GroundingConfig:
    """How heat is made."""

    layer: int | None = setting(None, at_least=1)  # of the fusion, from 1; null = the middle one, the third of six


@dataclass(frozen=True)
class GroundConfig:
    """What `make reproduce-refcoco_plus` takes beside a row's settings: `refcoco.val=...`, `grounding.layer=...`."""

    refcoco: RefcocoFiles = field(default_factory=RefcocoFiles)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)


class Expression(NamedTuple):
    """One sentence. picture: its place in the set. box, proposals: (4,) and (num_boxes, 4), (x, y, width, height) in
    pixels. other: an expression for another thing of the picture, "" where there is none."""

    picture: int
    text: str
    box: np.ndarray
    proposals: np.ndarray
    other: str


@dataclass(frozen=True)
class GroundingSet:
    """Pictures, by position, and what is said of them."""

    name: str
    fingerprint: str
    pictures: Any
    expressions: list[Expression]


def scenes_to_ground(part: str, large: bool | None, count: int, image_size: int) -> GroundingSet:
    """Expressions for the things of scenes.

    Args:
        part: of `ReferringScenes`. large: those of large or of small things alone; None = of all.
        count: pictures. image_size: pixels.
    """
    scenes, found = ReferringScenes(part, count, image_size), []
    for index in range(len(scenes)):
        said = scenes.expressions(index)
        proposals = pixel_boxes(scenes.proposals(index), image_size, image_size)
        for place, each in enumerate(said):
            if large in (None, each["large"]):
                box = pixel_boxes([each["box"]], image_size, image_size)[0]
                other = said[(place + 1) % len(said)]["text"] if len(said) > 1 else ""
                found.append(Expression(index, each["text"], box, proposals, other))
    return GroundingSet(scenes.name, f"{scenes.fingerprint[:16]}-{large}", scenes, found)


def file_to_ground(path: Path, images: Path | None) -> GroundingSet:
    """RefCOCO+ from its JSON file; another thing's words are those of the next row of the picture with another box."""
    items = open_annotated("grounding", path, images)
    rows, rows_of = [items.row(index) for index in range(len(items))], {}
    for index, row in enumerate(rows):
        rows_of.setdefault(row["image_id"], []).append(index)
    found = []
    for index, row in enumerate(rows):
        same = rows_of[row["image_id"]]
        turn = same.index(index) + 1
        others = (rows[each]["text"] for each in same[turn:] + same[:turn] if rows[each]["box"] != row["box"])
        box, proposals = np.array(row["box"], float), np.array(row["proposals"], float)
        found.append(Expression(index, row["text"], box, proposals, next(others, "")))
    if not any(each.other for each in found):
        raise ConfigError(f"{path}: no picture has expressions for two boxes; accepted: one with some, as the control")
    return GroundingSet(items.name, items.fingerprint[:16], items, found)


@torch.enable_grad()
def match_heat(
    model: Albef, images: torch.Tensor, token_ids: torch.Tensor, layer: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grad-CAM of the match logit on the cross-attention of one fusion layer.

    Args:
        model: in evaluation mode.
        images: (batch, 3, size, size), normalised. token_ids: (batch, length).
        layer: from 1; None = the middle one, the third of six as in ALBEF.
    Returns:
        (batch, rows, columns) heat, not negative, and (batch,) match logits.
    Raises:
        ConfigError: there is no such layer.
    """
    encoders, layers = model.encoders, len(model.encoders.fusion.transformer.blocks)
    layer = (layers + 1) // 2 if layer is None else layer
    if not 1 <= layer <= layers:
        raise ConfigError(f"grounding.layer = {layer}; accepted: 1 to {layers}, the layers of the fusion")
    mask, recorded = encoders.text_mask(token_ids), []
    with torch.no_grad():  # the logit is followed back to the fusion and no further
        tokens = encoders.text_tower.forward_tokens(token_ids), mask, encoders.image_tower.forward_tokens(images)
    logits = model.match(*tokens, recorded)[:, 1]
    (gradient,) = gradients_of(logits, recorded[layer - 1 : layer])
    tower = encoders.image_tower
    return attention_heat(recorded[layer - 1], gradient, mask, tower.num_class_tokens), logits.detach()


def heat_of(
    encoder: Encoder, pictures: Sequence[Any], texts: Sequence[str], layer: int | None
) -> Iterator[tuple[np.ndarray, Any]]:
    """Heat of each text in its picture, in the picture's own pixels, and the heat on the patches."""
    for start in range(0, len(texts), encoder.batch_size):
        batch = slice(start, start + encoder.batch_size)
        pixels = torch.stack([encoder.transform.eval(picture) for picture in pictures[batch]])
        token_ids = encoder.tokenizer.encode(list(texts[batch]), encoder.context_length).to(encoder.device)
        with evaluation_mode(encoder.model):
            maps, _ = match_heat(encoder.model, encoder.transform.inputs(pixels.to(encoder.device)), token_ids, layer)
        for picture, heat in zip(pictures[batch], maps.cpu()):
            height, width = np.asarray(picture).shape[:2]
            yield resize_heat(heat, height, width).numpy(), heat.numpy()


def measure(encoder: Encoder, data: GroundingSet, layer: int | None) -> dict[str, float]:
    """What heat finds: "<own, other, flat or oracle>_<metric of `grounding_metrics`>", fractions, and "chance".

    "other" is measured on expressions with another thing's words; "chance" is the share of proposals that would do.
    "own_in_box" and "other_in_box" are shares of the heat, "area" is the box's share of the picture.
    Pictures that cannot be read are left out.
    """
    results: dict[str, list[Grounding]] = {"own": [], "other": [], "flat": [], "oracle": []}
    shares: dict[str, list[float]] = {"own_in_box": [], "other_in_box": [], "area": []}
    chance: list[float] = []
    for start in range(0, len(data.expressions), encoder.batch_size):
        said, pictures = [], []
        for each in data.expressions[start : start + encoder.batch_size]:
            try:
                pictures.append(data.pictures[each.picture]["image"])
                said.append(each)
            except BrokenSample as broken:
                print(f"left out: {broken}")
        for words in ("own", "other"):
            texts = [each.text if words == "own" else each.other for each in said]
            kept = [place for place, text in enumerate(texts) if text]
            maps = heat_of(encoder, [pictures[place] for place in kept], [texts[place] for place in kept], layer)
            for place, (heat, patches) in zip(kept, maps):
                box = said[place].box
                results[words].append(ground(heat, said[place].proposals, box))
                share = share_in_box(patches, as_fractions(box, *heat.shape))
                shares[f"{words}_in_box"].append(area_of(box, *heat.shape) if share is None else share)
        for each, picture in zip(said, pictures):
            height, width = np.asarray(picture).shape[:2]
            shares["area"].append(area_of(each.box, height, width))
            results["flat"].append(ground(np.ones((height, width)), each.proposals, each.box))
            oracle = box_coverage(as_fractions(each.box, height, width), height, width)
            results["oracle"].append(ground(oracle, each.proposals, each.box))
            right = [inclusive_iou(proposal, each.box) >= MIN_IOU for proposal in each.proposals]
            chance.append(float(np.mean(right)))
    metrics = {
        f"{words}_{name}": value
        for words, found in results.items()
        if found
        for name, value in grounding_metrics(found).items()
    }
    return metrics | {name: fmean(found) for name, found in (shares | {"chance": chance}).items() if found}


def as_fractions(box: Sequence[float], height: int, width: int) -> tuple[float, float, float, float]:
    """(x, y, width, height) in pixels as (left, top, right, bottom), fractions of the picture."""
    x, y, across, down = box
    return x / width, y / height, (x + across) / width, (y + down) / height


def area_of(box: Sequence[float], height: int, width: int) -> float:
    """A box's share of the picture."""
    return float(box[2] * box[3] / (height * width))


def open_sets(command: Command, data: DataConfig, files: RefcocoFiles) -> dict[str, GroundingSet]:
    """val, test_a and test_b: scenes, or the files that the user names.

    Raises:
        ConfigError: photographs without a file of expressions, or cropped, so that heat lies elsewhere than boxes.
    """
    if data.source == "scenes":
        count = NUM_PICTURES.get(command.scale, NUM_PICTURES["demo"])
        return {name: scenes_to_ground(*which, count, data.image_size) for name, which in SETS.items()}
    if data.resize != "squeeze":
        raise ConfigError(f"data.resize = {data.resize} cuts off what a box may lie in; accepted: squeeze")
    root = Path(data.root).expanduser()
    paths = {name: root / getattr(files, name) for name in SETS}
    if not any(path.is_file() for path in paths.values()):
        raise ConfigError(
            f"no expressions with boxes: {', '.join(map(str, paths.values()))}; accepted: DATA=<folder with such a "
            "file>, or refcoco.val, refcoco.test_a, refcoco.test_b=<file> (docs/annotations.md says how they are made)"
        )
    images = root / data.images if data.images else None
    return {name: file_to_ground(path, images) for name, path in paths.items() if path.is_file()}


def _encoder(run: RowRun) -> Encoder:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return load_encoder(last_checkpoint(run.files.checkpoints), device)[1]


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
    mine = [text for text in command.overrides if text.startswith(("refcoco.", "grounding."))]
    asked = load_config(GroundConfig, [], mine)
    command = replace(command, overrides=tuple(text for text in command.overrides if text not in mine))
    configs = {row["method"]: row["config"] for row in code.printed("refcoco_plus")["rows"] if "config" in row}
    row = code.folder / "configs" / next(iter(configs.values()))
    data = load_row(code.config_class, code.folder, row, command.scale, list(command.overrides)).data
    sets = open_sets(command, data, asked.refcoco)
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
    columns = [
        Column(each["key"], each["label"], "percent", STANDS_FOR[each["key"]] if found.on_scenes else None, "higher")
        for each in source["columns"]
    ]
    table = table_of(command, code.name, "refcoco_plus", columns, printed_rows(source, ours), found.runs)
    not_learnt = {
        name: f"{name} is not learnt: the words of another thing find the box as often, up to the spread of the seeds"
        for name in found.sets
        if not any(learnt(*_accuracies(seeds, name)) for seeds in measured.values())
    }
    return [without_claims(table, not_learnt), write_findings(command, code.name, _controls(found, measured))]


def _measured(run: RowRun, found: Grounded) -> dict[str, dict[str, float]]:
    """`measure` on every set, kept beside the run."""

    def measured() -> dict[str, dict[str, float]]:
        encoder = _encoder(run)
        return {name: measure(encoder, data, found.layer) for name, data in found.sets.items()}

    settings = {"layer": found.layer, "sets": {name: data.fingerprint for name, data in found.sets.items()}}
    return measured_once(run, Path(__file__), settings, measured)


def _accuracies(seeds: Sequence[dict[str, dict[str, float]]], name: str) -> tuple[list[float], list[float]]:
    """On one set by seed: with the own words, and with those of another thing."""
    return tuple([each[name][f"{words}_accuracy"] for each in seeds] for words in WORDS)


def _cell(found: Grounded, name: str, seeds: Sequence[dict[str, float]]) -> Measured:
    data = found.sets[name]
    return measured_over_seeds(
        [100 * each["own_accuracy"] for each in seeds],
        found.command.seeds,
        scale=found.command.scale,
        data=f"{data.name} ({data.fingerprint[:8]}), {len(data.expressions):,} expressions",
        protocol=f"box of most heat over the root of its area, IoU >= {MIN_IOU}",
        chance=100 * seeds[0]["chance"],
    )


def _controls(found: Grounded, measured: dict[str, list[dict[str, dict[str, float]]]]) -> Findings:
    """Rows of models and of maps that are none's, columns of sets and of two ways to be right."""
    columns, values, rows = {}, {}, {}
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
        data=", ".join(dict.fromkeys(f"{data.name} ({data.fingerprint[:8]})" for data in found.sets.values())),
        protocol=f"IoU >= {MIN_IOU}",
        settings={"layer": found.layer, "rows": found.configs},
        rows={row: rows[row] for row in sorted(rows, key=("flat", "oracle").__contains__)},
        columns=columns,
        values=values,
        chance={f"{name}_accuracy": 100 * first[name]["chance"] for name in found.sets},
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
    return [write_findings(command, code.name, findings)]


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
