"""Grounding without boxes (RefCOCO+, Figure 3): where in a picture the matching head looks chooses among proposals.

The model is ALBEF, fine-tuned on pictures with expressions and no boxes. Of a picture and an expression the match logit
goes back to the attention of one fusion layer; attention times the positive part of its gradient is the heat, and the
proposal with the most heat over the root of its area is the answer (`common/evaluation/grad_cam.py`). Beside it: the
same with words that mean another thing of the picture, a flat map, and an oracle that heats the right box alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from common.base.config import ConfigError
from common.base.fields import path_setting
from common.base.settings import DataConfig
from common.data.annotated import open_annotated
from common.data.broken import BrokenSample
from common.data.scenes import ReferringScenes
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

DECIDES = "evaluation"

NUM_PICTURES = {"smoke": 6, "demo": 400}  # of each set of scenes; other scales as demo
SETS = {"val": ("val", None), "test_a": ("test", True), "test_b": ("test", False)}  # part of scenes, large things alone


@dataclass(frozen=True)
class RefcocoFiles:
    """RefCOCO+ below data.root, where pictures are photographs; `docs/annotations.md` says how the files are made."""

    # expressions with boxes and proposals; one that is not there is left out
    val: str = path_setting("refcoco_plus_val.json")
    test_a: str = path_setting("refcoco_plus_testA.json")  # likewise
    test_b: str = path_setting("refcoco_plus_testB.json")  # likewise


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


def open_sets(scale: str, data: DataConfig, files: RefcocoFiles) -> dict[str, GroundingSet]:
    """val, test_a and test_b: scenes, or the files that the user names.

    Raises:
        ConfigError: photographs without a file of expressions, or cropped, so that heat lies elsewhere than boxes, or
            scenes with such a file.
    """
    if data.source == "scenes":
        if files != RefcocoFiles():
            raise ConfigError(f"{files} on scenes; accepted: refcoco.* at a scale of photographs")
        count = NUM_PICTURES.get(scale, NUM_PICTURES["demo"])
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
