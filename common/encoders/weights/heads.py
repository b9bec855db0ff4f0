"""Number of attention heads of a bare file of weights, which no tensor states.

Width and layers decide for published models: open_clip's model configurations, which include OpenAI's
(`tests/test_common_weights_keys.py` compares them). For others the user states it.
"""

import argparse
from collections.abc import Mapping

from torch import nn

from common.encoders.weights.layouts import WeightsError

Heads = Mapping[str, int | None]  # "image", "text" -> heads that the user states
PUBLISHED: Mapping[str, Mapping[tuple[int, int], int]] = {  # side -> (width, layers) -> heads
    "image": {
        (384, 12): 6, (512, 12): 8, (768, 12): 12, (896, 12): 14, (1024, 24): 16, (1280, 32): 16, (1408, 40): 16,
        (1664, 48): 16, (1792, 56): 16,
    },
    "text": {
        (256, 10): 4, (384, 12): 6, (512, 12): 8, (640, 12): 10, (768, 12): 12, (768, 16): 12, (1024, 12): 16,
        (1024, 20): 16, (1024, 24): 16, (1152, 27): 16, (1280, 24): 20, (1280, 32): 20, (1280, 36): 20,
    },
}  # fmt: skip


def heads_of(side: str, width: int, layers: int, stated: int | None, source: str) -> int:
    """The heads of a tower."""
    heads = PUBLISHED[side].get((width, layers), stated)
    if heads is None:
        raise WeightsError(
            f"{source}: no tensor states the heads of the {side} tower, and no published CLIP has its width "
            f"{width} with {layers} layers; give --heads IMAGE,TEXT (one number for both), or model.{side}.heads where "
            "a run starts from it"
        )
    return heads


def heads_in(model: nn.Module) -> dict[str, int]:
    """Of both towers of a `TwoTowers`: "image", "text" -> heads."""
    towers = {"image": model.image_tower, "text": model.text_tower}
    return {side: tower.transformer.blocks[0].attention.heads for side, tower in towers.items()}


def agreed_heads(source: str, heads: Mapping[str, int], stated: Heads) -> None:
    """Refuses heads that the user states if the weights have others."""
    for side, number in heads.items():
        if stated[side] not in (None, number):
            raise WeightsError(
                f"{source} has {number} attention heads in its {side} tower, --heads states {stated[side]}; expected "
                f"{number} (a file of other heads than the published ones of its sizes needs open_clip_config.json "
                "beside it: name the folder)"
            )


def heads_argument(text: str) -> dict[str, int | None]:
    """The value of --heads: "4" for both towers, or "12,8" for image and text."""
    numbers = text.split(",")
    if len(numbers) > 2 or not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number for both towers, or two: IMAGE,TEXT")
    return {"image": int(numbers[0]), "text": int(numbers[-1])}


NOT_STATED: Heads = {"image": None, "text": None}
HEADS_HELP = "attention heads of a bare file of no published sizes: one number for both towers, or two as in 12,8"
