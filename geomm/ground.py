"""Grounding without boxes (RefCOCO+, Figure 3): the attention of the matching head selects one of the proposals.

The model is ALBEF, fine-tuned on images with expressions and without boxes. The gradient of the match logit goes back
to the attention of one fusion layer. Heat is attention times the positive part of its gradient. The answer is the
proposal with the most heat over the root of its area (`common/evaluation/grad_cam.py`). Controls: words for another
object of the image, a flat map, and an oracle with heat only in the right box.
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
from common.data.broken import BrokenSample, check_whole
from common.data.pairs import lost_at_open
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
SETS = {"val": ("val", None), "test_a": ("test", True), "test_b": ("test", False)}  # part of scenes, only large objects


@dataclass(frozen=True)
class RefcocoFiles:
    """RefCOCO+ below data.root, for photographs; `docs/annotations.md` describes how to make the files."""

    # expressions with boxes and proposals; a missing file is left out
    val: str = path_setting("refcoco_plus_val.json")
    test_a: str = path_setting("refcoco_plus_testA.json")
    test_b: str = path_setting("refcoco_plus_testB.json")


class Expression(NamedTuple):
    """One sentence. picture: its index in the set. box, proposals: (4,) and (num_boxes, 4), (x, y, width, height) in
    pixels. other: an expression for another object of the image, "" = none."""

    picture: int
    text: str
    box: np.ndarray
    proposals: np.ndarray
    other: str


@dataclass(frozen=True)
class GroundingSet:
    """Images by position, and their expressions."""

    name: str
    fingerprint: str
    pictures: Any
    expressions: list[Expression]


def scenes_to_ground(part: str, large: bool | None, count: int, image_size: int) -> GroundingSet:
    """Expressions for the objects of scenes.

    Args:
        part: of `ReferringScenes`.
        large: True = only large objects, False = only small ones, None = all.
        count: of images.
        image_size: pixels.
    """
    scenes, expressions = ReferringScenes(part, count, image_size), []
    for index in range(len(scenes)):
        phrases = scenes.expressions(index)
        proposals = pixel_boxes(scenes.proposals(index), image_size, image_size)
        for place, phrase in enumerate(phrases):
            if large in (None, phrase["large"]):
                box = pixel_boxes([phrase["box"]], image_size, image_size)[0]
                other = phrases[(place + 1) % len(phrases)]["text"] if len(phrases) > 1 else ""
                expressions.append(Expression(index, phrase["text"], box, proposals, other))
    return GroundingSet(scenes.name, f"{scenes.fingerprint[:16]}-{large}", scenes, expressions)


def file_to_ground(path: Path, images: Path | None, **options: Any) -> GroundingSet:
    """RefCOCO+ from its JSON file; the other words are those of the image's next row with another box.

    Args:
        images, options: as in `AnnotatedPictures`.
    """
    items = open_annotated("grounding", path, images, **options)
    rows, rows_of = [items.row(index) for index in range(len(items))], {}
    for index in range(len(rows)):
        rows_of.setdefault(items.image_id(index), []).append(index)
    expressions = []
    for index, row in enumerate(rows):
        same = rows_of[items.image_id(index)]
        turn = same.index(index) + 1
        others = (rows[place]["text"] for place in same[turn:] + same[:turn] if rows[place]["box"] != row["box"])
        box, proposals = np.array(row["box"], float), np.array(row["proposals"], float)
        expressions.append(Expression(index, row["text"], box, proposals, next(others, "")))
    if not any(expression.other for expression in expressions):
        raise ConfigError(f"{path}: no picture has expressions for two boxes, which the control needs")
    return GroundingSet(items.name, items.fingerprint[:16], items, expressions)


def layer_of(layer: int | None, num_layers: int) -> int:
    """None = the third of six, as in ALBEF; the second of two, whose boxes are right more often on validation scenes.

    Raises:
        ConfigError: there is no such layer.
    """
    layer = min(num_layers, max(2, num_layers // 2)) if layer is None else layer
    if not 1 <= layer <= num_layers:
        raise ConfigError(f"grounding.layer = {layer}; expected: 1 to {num_layers}, the layers of the fusion")
    return layer


@torch.enable_grad()
def match_heat(
    model: Albef, images: torch.Tensor, token_ids: torch.Tensor, layer: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grad-CAM of the match logit on the cross-attention of one fusion layer.

    Args:
        model: in evaluation mode.
        images: (batch, 3, size, size), normalised. token_ids: (batch, length).
        layer: from 1, as `layer_of` takes it.
    Returns:
        (batch, rows, columns) heat, not negative, and (batch,) match logits.
    """
    encoders = model.encoders
    layer = layer_of(layer, len(encoders.fusion.transformer.blocks))
    mask, recorded = encoders.text_mask(token_ids), []
    with torch.no_grad():  # the gradient goes back to the fusion and no further
        tokens = encoders.text_tower.forward_tokens(token_ids), mask, encoders.image_tower.forward_tokens(images)
    logits = model.match(*tokens, recorded)[:, 1]
    (gradient,) = gradients_of(logits, recorded[layer - 1 : layer])
    tower = encoders.image_tower
    return attention_heat(recorded[layer - 1], gradient, mask, tower.num_class_tokens), logits.detach()


def heat_of(
    encoder: Encoder, pictures: Sequence[Any], texts: Sequence[str], layer: int | None
) -> Iterator[tuple[np.ndarray, Any]]:
    """Heat of each text in the pixels of its image, and on the patches."""
    for start in range(0, len(texts), encoder.batch_size):
        batch = slice(start, start + encoder.batch_size)
        pixels = torch.stack([encoder.transform.eval(picture) for picture in pictures[batch]])
        token_ids = encoder.tokenizer.encode(list(texts[batch]), encoder.context_length).to(encoder.device)
        with evaluation_mode(encoder.model):
            maps, _ = match_heat(encoder.model, encoder.transform.inputs(pixels.to(encoder.device)), token_ids, layer)
        for picture, heat in zip(pictures[batch], maps.cpu()):
            height, width = np.asarray(picture).shape[:2]
            yield resize_heat(heat, height, width).numpy(), heat.numpy()


def measure(encoder: Encoder, data: GroundingSet, layer: int | None = None) -> dict[str, float]:
    """Results of grounding: "<own, other, flat or oracle>_<metric of `grounding_metrics`>", fractions, and "chance".

    "own" uses the expression, "other" that of another object; "chance" is the share of correct proposals.
    "own_in_box" and "other_in_box" are shares of the heat, "area" is the box's share of the image.
    Unreadable images are left out; "expressions" is the number of the others. "left_out" also counts the rows of the
    file that cannot be used.

    Raises:
        ConfigError: no image with expressions for two boxes can be read.
        TooManyBroken: clearly more than the encoder's `max_broken_share` of the rows cannot be used.
    """
    lost = lost_at_open(data.pictures)
    for broken in lost:
        print(f"left out: {broken}")
    results: dict[str, list[Grounding]] = {"own": [], "other": [], "flat": [], "oracle": []}
    shares: dict[str, list[float]] = {"own_in_box": [], "other_in_box": [], "area": []}
    chance: list[float] = []
    unreadable: list[BrokenSample] = []
    for start in range(0, len(data.expressions), encoder.batch_size):
        batch, pictures = [], []
        for expression in data.expressions[start : start + encoder.batch_size]:
            try:
                pictures.append(data.pictures[expression.picture]["image"])
                batch.append(expression)
            except BrokenSample as broken:
                print(f"left out: {broken}")
                unreadable.append(broken)
        # the model's heat, with the right words and with those of another object
        for words in ("own", "other"):
            texts = [expression.text if words == "own" else expression.other for expression in batch]
            kept = [place for place, text in enumerate(texts) if text]
            maps = heat_of(encoder, [pictures[place] for place in kept], [texts[place] for place in kept], layer)
            for place, (heat, patches) in zip(kept, maps):
                box = batch[place].box
                results[words].append(ground(heat, batch[place].proposals, box))
                share = share_in_box(patches, as_fractions(box, *heat.shape))
                shares[f"{words}_in_box"].append(area_of(box, *heat.shape) if share is None else share)
        # controls without a model
        for expression, picture in zip(batch, pictures):
            height, width = np.asarray(picture).shape[:2]
            shares["area"].append(area_of(expression.box, height, width))
            results["flat"].append(ground(np.ones((height, width)), expression.proposals, expression.box))
            oracle = box_coverage(as_fractions(expression.box, height, width), height, width)
            results["oracle"].append(ground(oracle, expression.proposals, expression.box))
            right = [inclusive_iou(proposal, expression.box) >= MIN_IOU for proposal in expression.proposals]
            chance.append(float(np.mean(right)))
    if not results["other"]:
        raise ConfigError(
            f"{data.name}: none of its {len(data.expressions)} expressions has an image that can be read and words for "
            "another box of it; expected: at least one"
        )
    check_whole(len(chance), unreadable, encoder.max_broken_share)
    metrics = {
        f"{words}_{name}": value
        for words, groundings in results.items()
        for name, value in grounding_metrics(groundings).items()
    }
    means = {name: fmean(values) for name, values in (shares | {"chance": chance}).items()}
    return metrics | means | {"expressions": len(chance), "left_out": len(lost) + len(data.expressions) - len(chance)}


def as_fractions(box: Sequence[float], height: int, width: int) -> tuple[float, float, float, float]:
    """(x, y, width, height) in pixels -> (left, top, right, bottom), fractions of the image."""
    x, y, across, down = box
    return x / width, y / height, (x + across) / width, (y + down) / height


def area_of(box: Sequence[float], height: int, width: int) -> float:
    """A box's share of the image."""
    return float(box[2] * box[3] / (height * width))


def open_sets(scale: str, data: DataConfig, files: RefcocoFiles) -> dict[str, GroundingSet]:
    """val, test_a and test_b: scenes, or the user's files.

    Raises:
        ConfigError: photographs without a file of expressions; cropped photographs, where heat and boxes differ in
            position; scenes with such a file.
    """
    if data.source == "scenes":
        if files != RefcocoFiles():
            raise ConfigError(f"{files} on scenes; expected: refcoco.* at a scale of photographs")
        count = NUM_PICTURES.get(scale, NUM_PICTURES["demo"])
        return {name: scenes_to_ground(*which, count, data.image_size) for name, which in SETS.items()}
    if data.resize != "squeeze":
        raise ConfigError(f"data.resize = {data.resize} cuts off what a box may lie in; expected: squeeze")
    root = Path(data.root).expanduser()
    paths = {name: root / getattr(files, name) for name in SETS}
    if not any(path.is_file() for path in paths.values()):
        raise ConfigError(
            f"no expressions with boxes: {', '.join(map(str, paths.values()))}; expected: DATA=<folder with such a "
            "file>, or refcoco.val, refcoco.test_a, refcoco.test_b=<file> (docs/annotations.md has the conversion)"
        )
    images = root / data.images if data.images else None
    options = {"root": root, "max_broken_share": data.max_broken_share}
    return {name: file_to_ground(path, images, **options) for name, path in paths.items() if path.is_file()}
