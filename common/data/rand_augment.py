"""RandAugment as timm's "rand-m9-mstd0.5-inc1" defines it, and as in ALBEF's code.

timm's, which the oblique paper's linear probe names: two of fifteen changes, each made every other time. torchvision's
always makes both, at a third of the strength. ALBEF's: two of ten, none of which touches a colour's name, each made
every other time, at magnitude 7 of 10.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

NUM_CHANGES, PROBABILITY = 2, 0.5
MAGNITUDE, MAGNITUDE_STD, MAGNITUDE_MAX = 9.0, 0.5, 10.0
Fill = tuple[int, int, int]


def rand_augment(image: Image.Image, rng: np.random.Generator, fill: Fill = (128, 128, 128)) -> Image.Image:
    """timm's changes of an RGB image, drawn with replacement.

    Args:
        fill: colour of uncovered pixels; the training mean is usual.
    """
    for _ in range(NUM_CHANGES):
        name = CHANGES[int(rng.integers(len(CHANGES)))]
        if rng.random() < PROBABILITY:
            magnitude = float(np.clip(rng.normal(MAGNITUDE, MAGNITUDE_STD), 0.0, MAGNITUDE_MAX))
            image = change(image, name, magnitude / MAGNITUDE_MAX, 1 if rng.random() < 0.5 else -1, fill)
    return image


def albef_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A mirror image every other time, then ALBEF's changes, drawn with replacement."""
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    for _ in range(NUM_CHANGES):
        name, strength = ALBEF_CHANGES[int(rng.integers(len(ALBEF_CHANGES)))]
        if rng.random() < PROBABILITY and name != "identity":
            sign = 1 if name in _ENHANCERS or rng.random() < 0.5 else -1
            if name.startswith("translate"):  # so many pixels, whatever the size
                strength /= 0.45 * (image.width if name == "translate_x" else image.height)
            image = change(image, name, strength, sign, (128, 128, 128))
    return image


def tcl_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Colours, grey and blur as in MoCo v2, then `albef_augment` (TCL's code)."""
    from common.data.views import RECIPES, colour_changes  # imports torchvision, which ALBEF's needs not

    return albef_augment(colour_changes(image, RECIPES["moco_v2"], rng), rng)


def change(image: Image.Image, name: str, strength: float, sign: int, fill: Fill) -> Image.Image:
    """One change of an RGB image.

    Args:
        strength: in [0, 1]; 0 changes nothing, except for changes without strength, "posterize" and "solarize".
        sign: 1 or -1, for changes with a direction.
    """
    if name in _WITHOUT_STRENGTH:
        return _WITHOUT_STRENGTH[name](image)
    if name in _ENHANCERS:  # 1 is no change
        return _ENHANCERS[name](image).enhance(max(0.1, 1 + sign * 0.9 * strength))
    if name == "posterize":
        lost = (1 << (4 + int(4 * strength))) - 1  # at full strength all bits; Pillow's own refuses to keep none
        return image.point([value & ~lost for value in range(256)] * 3)
    if name == "solarize":
        return ImageOps.solarize(image, 256 - min(256, int(256 * strength)))
    if name == "solarize_add":
        added = min(128, int(110 * strength))
        table = [min(255, value + added) if value < 128 else value for value in range(256)]
        return image.point(table * 3)
    if name == "rotate":
        return image.rotate(sign * 30 * strength, resample=Image.Resampling.BICUBIC, fillcolor=fill)
    shear, shift = sign * 0.3 * strength, sign * 0.45 * strength
    matrix = {
        "shear_x": (1, shear, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, shear, 1, 0),
        "translate_x": (1, 0, shift * image.width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, shift * image.height),
    }[name]
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BICUBIC, fillcolor=fill
    )


_WITHOUT_STRENGTH: dict[str, Callable[[Image.Image], Image.Image]] = {
    "auto_contrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
}
_ENHANCERS = {
    "colour": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}
ALBEF_CHANGES = (  # with their strengths in `change` at magnitude 7; of the last two in pixels
    ("identity", 0.0),
    ("auto_contrast", 0.0),
    ("equalize", 0.0),
    ("brightness", 0.4),
    ("sharpness", 0.4),
    ("rotate", 0.7),
    ("shear_x", 0.7),
    ("shear_y", 0.7),
    ("translate_x", 7.0),
    ("translate_y", 7.0),
)
CHANGES = (
    *_WITHOUT_STRENGTH,
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    *_ENHANCERS,
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
