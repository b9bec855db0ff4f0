"""open_clip_config.json: what it states of towers and pixels, and whether the tensors have its sizes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.data.text_files import read_json_object
from common.data.transforms import ImageTransform
from common.encoders.two_towers import TwoTowers
from common.encoders.weights.keys import (
    OPEN_CLIP_MODEL,
    OPEN_CLIP_TEXT,
    OPEN_CLIP_VISION,
    check_keys,
    check_patches_of,
    refused,
    square,
)
from common.encoders.weights.layouts import WeightsError
from common.encoders.weights.pixels import pixels_of_open_clip

# the defaults of open_clip's dataclasses, for keys that a configuration leaves out
VISION_DEFAULTS = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
    "norm_kwargs": None,
}  # fmt: skip
TEXT_DEFAULTS = {
    "context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0, "eos_id": 2,
    "pool_type": "argmax", "norm_kwargs": None,
}  # fmt: skip
_SIZES = dict.fromkeys(  # key -> types, what is expected
    ("layers", "width", "head_width", "heads", "patch_size", "image_size", "context_length", "vocab_size"),
    ((int,), "a whole number"),
) | {"mlp_ratio": ((int, float), "a number")}


def read_configuration(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], ImageTransform]:
    """What open_clip_config.json states.

    Returns:
        model_cfg with defaults filled in; what no tensor of the image and of the text tower shows ("heads", "norm_eps",
        "end_id"); how pixels become inputs.
    """
    content = read_json_object(file)
    model, preprocess = content.get("model_cfg", content), content.get("preprocess_cfg") or {}
    for key, value in (("model_cfg", model), ("preprocess_cfg", preprocess)):
        if not isinstance(value, dict):
            raise refused(f"{file}: ", key, value, "expected a mapping")
    check_keys(model, OPEN_CLIP_MODEL, f"{file}: ")
    sections = {}
    for name, table, defaults in (
        ("vision_cfg", OPEN_CLIP_VISION, VISION_DEFAULTS),
        ("text_cfg", OPEN_CLIP_TEXT, TEXT_DEFAULTS),
    ):
        section = model.get(name)
        if not isinstance(section, dict):
            raise WeightsError(f"{file} has no section {name}; expected a model_cfg of open_clip")
        check_keys(section, table, f"{file}: {name}.")
        sections[name] = {**defaults, **section}
    vision, text = sections.values()
    if not isinstance(vision["layers"], int):
        raise refused(f"{file}: vision_cfg.", "layers", vision["layers"], "a ResNet; expected a number (a ViT)")
    for key in ("image_size", "patch_size"):
        vision[key] = square(vision[key], f"{file}: vision_cfg.", key)
    for name, section in sections.items():
        for key, (kinds, expected) in _SIZES.items():
            value = section.get(key, 1)
            if type(value) not in kinds or not 0 < value < math.inf:
                raise refused(f"{file}: {name}.", key, value, f"expected {expected} above 0")
    check_patches_of(vision["image_size"], vision["patch_size"], f"{file}: vision_cfg.")
    of_image = {"heads": vision["width"] // vision["head_width"], "norm_eps": _eps(vision, f"{file}: vision_cfg.")}
    if text["pool_type"] == "eos" and type(text["eos_id"]) is not int:
        raise refused(f"{file}: text_cfg.", "eos_id", text["eos_id"], "expected a whole number")
    of_text = {
        "heads": text["heads"],
        "norm_eps": _eps(text, f"{file}: text_cfg."),
        "end_id": text["eos_id"] if text["pool_type"] == "eos" else None,
    }
    pixels = pixels_of_open_clip(preprocess, vision["image_size"], f"{file}: preprocess_cfg.")
    return {**model, **sections}, of_image, of_text, pixels


def _eps(section: Mapping[str, Any], where: str) -> float:
    stated = section["norm_kwargs"] or {}
    if not isinstance(stated, dict) or stated.keys() - {"eps"}:
        raise refused(where, "norm_kwargs", stated, "expected eps only")
    eps = stated.get("eps", 1e-5)
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        raise refused(where, "norm_kwargs.eps", eps, "expected a number from 0 on")
    return eps


def check_sizes(clip: TwoTowers, model: Mapping[str, Any], where: str) -> None:
    """Refuses tensors of other sizes than the configuration states; open_clip would interpolate them, or fail."""
    image, text = clip.image_tower, clip.text_tower
    actual = {
        "vision_cfg": {"image_size": image.image_size, "patch_size": image.patch_size},
        "text_cfg": {"context_length": text.context_length, "vocab_size": text.vocabulary_size},
    }
    for name, tower in (("vision_cfg", image), ("text_cfg", text)):
        blocks, mlp_width = tower.transformer.blocks, int(tower.width * model[name]["mlp_ratio"])
        actual[name] |= {"width": tower.width, "layers": len(blocks)}
        hidden = blocks[0].mlp[0].out_features
        if hidden != mlp_width:
            actual[name]["mlp_ratio"] = hidden / tower.width
    for name, sizes in actual.items():
        for key, number in sizes.items():
            if model[name][key] != number:
                raise refused(f"{where}{name}.", key, model[name][key], f"the tensors have {number}")
    if (model.get("init_logit_bias") is None) != (clip.logit_bias is None):
        has = "no bias" if clip.logit_bias is None else "a bias"
        raise refused(where, "init_logit_bias", model.get("init_logit_bias"), f"the tensors have {has}")
    if model.get("embed_dim") != image.projection_dim:
        raise refused(where, "embed_dim", model.get("embed_dim"), f"the tensors have {image.projection_dim}")
