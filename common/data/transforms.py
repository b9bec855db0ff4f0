"""Images to uint8 tensors of one size, and uint8 tensors to normalised floats.

A training view is a pure function of (image, seed). Resampling, always antialiased, is Pillow's or torchvision v2's on
uint8 tensors, which is faster; both have the bits of torchvision's functions, whose import takes seconds.
"""

import json
import math
from dataclasses import asdict
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.data.text_files import parsed_json

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # RGB, of pixels in [0, 1]
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

CROP_RATIO = (3 / 4, 4 / 3)  # width / height of a random crop, as torchvision's RandomResizedCrop
CROP_ATTEMPTS = 10
MAX_SIDE_RATIO = 100  # long side over short one: of a longer image the central part is taken


Share, Positive = Annotated[float, Field(ge=0.0, le=1.0)], Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ImageTransform:
    """From an image of any size to a uint8 tensor (3, size, size).

    Args:
        size: pixels.
        mode: evaluation, and training without `crop_scale`: "squeeze" resizes both sides (ALBEF, TCL, GeoMM), "crop"
            resizes the shortest side and cuts the centre (CLIP, DataComp), of a very long image first as
            `MAX_SIDE_RATIO` states.
        crop_scale: training: smallest and largest share of the area of a random crop, see `random_crop_box`; None
            trains with the evaluation view.
        flip_probability: training: of a mirror image. Captions with left and right need 0.
        mean, std: RGB, of pixels in [0, 1], for `inputs`; views are not normalised.
        resized: side that `mode` resizes to before the centre of `size` is cut, at least size; None = size.
        resize_with: "pillow", as published evaluations, or "torchvision", whose levels of a photograph differ by 0.004
            on average and by 2 at most.
    """

    size: Annotated[int, Field(ge=1)]
    mode: Literal["squeeze", "crop"] = "crop"
    crop_scale: tuple[Positive, Share] | None = None
    flip_probability: Share = 0.0
    mean: tuple[Share, Share, Share] = CLIP_MEAN
    std: tuple[Positive, Positive, Positive] = CLIP_STD
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resized: int | None = None
    resize_with: Literal["pillow", "torchvision"] = "pillow"

    def __post_init__(self) -> None:
        if self.resized is not None and self.resized < self.size:
            raise ValueError(f"resized is {self.resized}; expected: at least size, {self.size}")
        if self.crop_scale is not None and self.crop_scale[0] > self.crop_scale[1]:
            raise ValueError(f"crop_scale is {self.crop_scale}; expected: (low, high) with low <= high")

    def eval(self, image: Image.Image | np.ndarray) -> Tensor:
        """The evaluation view, (3, size, size) uint8.

        Args:
            image: Pillow image, or uint8 array (height, width, 3); an array of the right size passes unchanged.
        """
        if isinstance(image, np.ndarray):
            _check_array(image)
            if image.shape[0] == image.shape[1] == self.size and self.resized in (None, self.size):
                # a copy: a view would let the caller's array change the batch
                return torch.from_numpy(image.transpose(2, 0, 1).copy())
        picture = _as_rgb(image)
        side_to = self.size if self.resized is None else self.resized
        if self.mode == "squeeze":
            width = height = side_to
        else:  # the shortest side gets the size; of the other one what is too much is cut off on both sides
            shortest = min(picture.size)
            if max(picture.size) > MAX_SIDE_RATIO * shortest:
                picture = _centre(picture, *(min(side, MAX_SIDE_RATIO * shortest) for side in picture.size))
            width, height = (side_to * side // shortest for side in picture.size)
        return self._resize(picture, width, height)

    def train(self, image: Image.Image | np.ndarray, rng: np.random.Generator | int) -> Tensor:
        """The training view, (3, size, size) uint8.

        Args:
            rng: generator that the view advances, or a seed >= 0.
        """
        if self.crop_scale is None and not self.flip_probability:
            return self.eval(image)
        rng = np.random.default_rng(rng)  # a generator as it is
        if self.crop_scale is None:
            pixels = self.eval(image)
        else:
            picture = _as_rgb(image)
            top, left, height, width = random_crop_box(picture.height, picture.width, self.crop_scale, rng)
            picture = picture.crop((left, top, left + width, top + height))
            pixels = self._resize(picture, self.size, self.size)
        if self.flip_probability and rng.random() < self.flip_probability:
            pixels = pixels.flip(-1)
        return pixels

    def inputs(self, images: Tensor) -> Tensor:
        """Views as a tower's input: normalised; cached features stay as they are."""
        return images if images.is_floating_point() else normalize(images, self.mean, self.std)

    def _resize(self, picture: Image.Image, width: int, height: int) -> Tensor:
        # the central square of the resized image
        if self.resize_with == "pillow":
            resized = picture.resize((width, height), Image.Resampling[self.interpolation.upper()])
            return _as_tensor(_centre(resized, self.size, self.size))
        pixels = F.interpolate(_as_tensor(picture)[None], (height, width), mode=self.interpolation, antialias=True)[0]
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return pixels[:, top : top + self.size, left : left + self.size].contiguous()

    @property
    def blank(self) -> Tensor:
        """Stands for an image that cannot be read."""
        return torch.zeros(3, self.size, self.size, dtype=torch.uint8)

    def to_json(self) -> str:
        """A JSON text in a fixed order; equal transforms give equal texts.

        Later fields are left out at their default, so that older texts stay valid.
        """
        return json.dumps({key: value for key, value in asdict(self).items() if _LATER.get(key, ...) != value})

    @classmethod
    def from_json(cls, text: str | dict) -> "ImageTransform":
        """Reads what `to_json` wrote."""
        content = parsed_json(text, "the image transform")
        known = set(cls.__dataclass_fields__)
        if not isinstance(content, dict) or set(content) | set(_LATER) != known:
            keys_read = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"an image transform has the keys {', '.join(sorted(known))}; found {keys_read}")
        return cls(**content)


# fields that older checkpoints and evaluations lack
_LATER = {"interpolation": "bicubic", "resized": None, "resize_with": "pillow"}


def random_crop_box(
    height: int, width: int, scale: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """A random crop inside the image by the rules of torchvision's RandomResizedCrop.

    Returns:
        top, left, height, width, in pixels.
    """
    log_low, log_high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    for _ in range(CROP_ATTEMPTS):
        area = height * width * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(log_low, log_high))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(0, height - crop_height + 1))
            left = int(rng.integers(0, width - crop_width + 1))
            return top, left, crop_height, crop_width
    crop_height, crop_width = height, width
    if width / height < CROP_RATIO[0]:
        crop_height = round(width / CROP_RATIO[0])
    elif width / height > CROP_RATIO[1]:
        crop_width = round(height * CROP_RATIO[1])
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def normalize(images_uint8: Tensor, mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD) -> Tensor:
    """(pixels / 255 - mean) / std in float32, with the bits of torchvision's ToTensor and Normalize on the same device.

    Args:
        images_uint8: (batch, 3, height, width).
    """
    if images_uint8.dtype != torch.uint8 or images_uint8.ndim != 4 or images_uint8.shape[1] != 3:
        raise ValueError(
            f"images are {images_uint8.dtype} of shape {tuple(images_uint8.shape)}; "
            "expected: uint8 (batch, 3, height, width)"
        )
    pixels = images_uint8.to(torch.float32).div_(255.0)
    return pixels.sub_(_of_channels(tuple(mean), pixels.device)).div_(_of_channels(tuple(std), pixels.device))


@lru_cache(maxsize=64)
def _of_channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    # copied to the device once: every copy from ordinary memory makes the host wait
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, 3, 1, 1)


def _check_array(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(f"the array is {image.dtype} of shape {image.shape}; expected: uint8 (height, width, 3)")


def _as_rgb(image: Image.Image | np.ndarray) -> Image.Image:
    if isinstance(image, np.ndarray):
        _check_array(image)
        return Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise ValueError(f"the image is of type {type(image).__name__}; expected one of: Pillow image, uint8 array")
    return image if image.mode == "RGB" else image.convert("RGB")


def _centre(picture: Image.Image, width: int, height: int) -> Image.Image:
    left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
    return picture.crop((left, top, left + width, top + height))


def _as_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
