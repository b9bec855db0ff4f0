"""How pixels become the inputs of an image tower (`ImageTransform`), as open_clip's and transformers' files state it.

It belongs to weights as their activation does: the wrong one costs accuracy without an error.
"""

from collections.abc import Mapping
from typing import Any

import pydantic

from common.data.text_files import stated_file
from common.data.transforms import CLIP_MEAN, CLIP_STD, ImageTransform
from common.encoders.weights.keys import PREPROCESS, PROCESSOR, check_keys, refused, square
from common.encoders.weights.layouts import WeightsError

PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # transformers 5 writes the second for a processor
_RESIZE_MODES = {"shortest": "crop", "squash": "squeeze"}  # open_clip's -> ours
_RESAMPLINGS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def pixels_of_open_clip(preprocess: Mapping[str, Any], size: int, where: str) -> ImageTransform:
    """Our transform of open_clip's `preprocess_cfg`; open_clip's defaults replace what is missing or null.

    Args:
        size: of the model's images, which open_clip takes instead of the section's.
    """
    stated = {key: value for key, value in preprocess.items() if value is not None}
    check_keys(stated, PREPROCESS, where, strict=False)
    mode, resampling = stated.get("resize_mode", "shortest"), stated.get("interpolation", "bicubic")
    if mode not in _RESIZE_MODES:
        raise refused(where, "resize_mode", mode, f"expected one of: {', '.join(_RESIZE_MODES)}")
    resampling = "bicubic" if resampling == "random" else resampling  # random in training only
    colours = {key: _three(stated.get(key) or default) for key, default in (("mean", CLIP_MEAN), ("std", CLIP_STD))}
    return _transform(where, size=size, mode=_RESIZE_MODES[mode], interpolation=resampling, **colours)


def pixels_of_processor(processor: Mapping[str, Any], where: str) -> ImageTransform:
    """Our transform of a transformers image processor.

    Resampling is Pillow's. An odd margin is cut as in torchvision, hence OpenAI's release; transformers cuts one pixel
    beside.

    Args:
        processor: its `to_dict()`, which includes the defaults of its class.
    """
    check_keys(processor, PROCESSOR, where, strict=False)
    size, crop = (_sides(processor.get(key)) for key in ("size", "crop_size"))
    is_cut = bool(processor.get("do_center_crop")) and crop is not None
    if set(size or ()) not in ({"shortest_edge"}, {"height", "width"}):
        raise refused(where, "size", processor.get("size"), "expected shortest_edge, or height and width")
    resized = square(list(size.values()), where, "size")
    if not is_cut and "shortest_edge" in size:
        raise refused(where, "do_center_crop", False, "pictures that are not square; expected true with shortest_edge")
    side = square([crop.get("height"), crop.get("width")], where, "crop_size") if is_cut else resized
    if side > resized:
        raise refused(where, "crop_size", processor["crop_size"], f"expected at most size, {resized}")
    if processor["resample"] not in _RESAMPLINGS:
        raise refused(where, "resample", processor["resample"], "expected one of: 2 (bilinear), 3 (bicubic)")
    mean, std = (0.0,) * 3, (1.0,) * 3
    if processor["do_normalize"]:
        for key in ("image_mean", "image_std"):
            if processor[key] is None:
                raise refused(where, key, None, "expected three numbers, or do_normalize = false")
        mean, std = _three(processor["image_mean"]), _three(processor["image_std"])
    # theirs: (factor * level - mean) / std of levels up to 255; ours: of pixels level / 255
    scale = 255 * (processor["rescale_factor"] if processor["do_rescale"] else 1.0)
    scale = 1.0 if abs(scale - 1.0) < 1e-9 else scale
    return _transform(
        where,
        size=side,
        mode="crop" if "shortest_edge" in size else "squeeze",
        mean=tuple(value / scale for value in mean),
        std=tuple(value / scale for value in std),
        interpolation=_RESAMPLINGS[processor["resample"]],
        resized=None if resized == side else resized,
    )


def pixels_of_folder(name: str) -> ImageTransform | None:
    """What a folder or hub name of transformers states; None = no file of a processor."""
    file = stated_file(name, *PROCESSORS)
    if file is None:  # a model that was saved without its processor
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(file.parent, trust_remote_code=False).to_dict()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file} cannot be read by transformers: {str(error).strip().splitlines()[0]}") from error
    return pixels_of_processor(processor, f"{file}: ")


def preprocess_of(pixels: ImageTransform) -> dict[str, Any]:
    """open_clip's `preprocess_cfg`."""
    if pixels.resized not in (None, pixels.size):
        raise WeightsError(f"resized = {pixels.resized} with size = {pixels.size}; open_clip has one size only")
    modes = {ours: theirs for theirs, ours in _RESIZE_MODES.items()}
    return {
        "size": pixels.size,
        "mode": "RGB",
        "mean": list(pixels.mean),
        "std": list(pixels.std),
        "interpolation": pixels.interpolation,
        "resize_mode": modes[pixels.mode],
        "fill_color": 0,
    }


def processor_of(pixels: ImageTransform) -> dict[str, Any]:
    """The arguments of transformers' CLIPImageProcessor."""
    resized, square_size = pixels.resized or pixels.size, {"height": pixels.size, "width": pixels.size}
    return {
        "size": {"shortest_edge": resized} if pixels.mode == "crop" else {"height": resized, "width": resized},
        "do_center_crop": pixels.mode == "crop" or resized != pixels.size,
        "crop_size": square_size,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "resample": {name: number for number, name in _RESAMPLINGS.items()}[pixels.interpolation],
    }


def _transform(where: str, **fields: Any) -> ImageTransform:
    try:
        return ImageTransform(**fields)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise WeightsError(f"{where}{place} = {problem['input']!r}: {problem['msg']}") from None


def _three(value: Any) -> tuple[float, ...]:
    # A number for each colour; both libraries also take one for all.
    return tuple(value) if isinstance(value, list | tuple) else (value,) * 3


def _sides(size: Any) -> dict[str, int] | None:
    return None if size is None else {key: side for key, side in dict(size).items() if side is not None}
