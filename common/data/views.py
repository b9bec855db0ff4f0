"""Random views of an image for self-supervised learning (SimCLR, MoCo v1 to v3, SimSiam).

A view is a pure function of (image, seed); no two views or samples share a draw.

One order serves all pipelines. A mirror image follows the crop, although MoCo mirrors last: no later step depends on
left and right. Blur is Pillow's, as in MoCo and SimSiam; SimCLR's kernel ends 1/20 of the height from its centre.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from common.base.random_keys import derive_key
from common.data.broken import BrokenSample, read_or_replace
from common.data.order import SampleOrder, seed_of
from common.data.transforms import IMAGENET_MEAN, IMAGENET_STD, random_crop_box

BLUR_SIGMA = (0.1, 2.0)  # pixels
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # RGB, of pixels in [0, 1], as the MoCo notebook has them
CIFAR10_STD = (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class ViewRecipe:
    """Changes of an image, in this order. A mirror image always has probability 0.5.

    crop_scale: share of the area of a random crop (ratio 3/4 to 4/3).
    jitter: strengths, see `colour_jitter`.
    grey_first: grey before the jitter (MoCo v1), not after it.
    bicubic: resampling of the crop; bilinear otherwise.
    mean, std: for `normalize`; SimCLR leaves pixels in [0, 1].
    size_share: side of the view, as a share of the whole views'.
    """

    crop_scale: tuple[float, float]
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jitter_probability: float = 0.0
    grey_probability: float = 0.0
    blur_probability: float = 0.0
    solarise_probability: float = 0.0
    grey_first: bool = False
    bicubic: bool = False
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    size_share: float = 1.0


_UNSCALED = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
_CIFAR10 = {"mean": CIFAR10_MEAN, "std": CIFAR10_STD}

RECIPES = {
    "simclr": ViewRecipe((0.08, 1.0), (0.8, 0.8, 0.8, 0.2), 0.8, 0.2, blur_probability=0.5, bicubic=True, **_UNSCALED),
    # colours at half strength, no blur
    "simclr_cifar10": ViewRecipe((0.08, 1.0), (0.4, 0.4, 0.4, 0.1), 0.8, 0.2, bicubic=True, **_UNSCALED),
    "moco_v1": ViewRecipe((0.2, 1.0), (0.4, 0.4, 0.4, 0.4), 1.0, 0.2, grey_first=True),
    "moco_v2": ViewRecipe((0.2, 1.0), (0.4, 0.4, 0.4, 0.1), 0.8, 0.2, blur_probability=0.5),  # SimSiam's too
    "moco_cifar10": ViewRecipe((0.08, 1.0), (0.4, 0.4, 0.4, 0.1), 0.8, 0.2, **_CIFAR10),  # of the MoCo notebook
    # MoCo v3's two views differ; the smallest crop is that of its ViTs, and 0.2 for its ResNet
    "moco_v3_vit_1": ViewRecipe((0.08, 1.0), (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, blur_probability=1.0),
    "moco_v3_vit_2": ViewRecipe((0.08, 1.0), (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, 0.1, solarise_probability=0.2),
    "moco_v3_resnet_1": ViewRecipe((0.2, 1.0), (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, blur_probability=1.0),
    "moco_v3_resnet_2": ViewRecipe((0.2, 1.0), (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, 0.1, solarise_probability=0.2),
    "crop_and_flip": ViewRecipe((0.08, 1.0)),  # of supervised training and of linear probes
    "crop_and_flip_cifar10": ViewRecipe((0.08, 1.0), **_CIFAR10),
}


def random_view(image: Image.Image | np.ndarray, recipe: ViewRecipe, size: int, seed: int) -> Tensor:
    """One view, (3, size, size) uint8, to be normalised with the recipe's mean and std."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image = image if image.mode == "RGB" else image.convert("RGB")
    box = random_crop_box(image.height, image.width, recipe.crop_scale, rng)
    resampling = InterpolationMode.BICUBIC if recipe.bicubic else InterpolationMode.BILINEAR
    view = F.resized_crop(image, *box, [size, size], resampling)
    if rng.random() < 0.5:
        view = ImageOps.mirror(view)
    return F.pil_to_tensor(colour_changes(view, recipe, rng))


def colour_changes(view: Image.Image, recipe: ViewRecipe, rng: np.random.Generator) -> Image.Image:
    """A recipe's changes behind crop and mirror: jitter, grey, blur, solarise."""
    if recipe.grey_first and rng.random() < recipe.grey_probability:
        view = F.rgb_to_grayscale(view, 3)
    if rng.random() < recipe.jitter_probability:
        view = colour_jitter(view, recipe.jitter, rng)
    if not recipe.grey_first and rng.random() < recipe.grey_probability:
        view = F.rgb_to_grayscale(view, 3)
    if rng.random() < recipe.blur_probability:
        view = view.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR_SIGMA)))
    if rng.random() < recipe.solarise_probability:
        view = ImageOps.solarize(view)  # inverts values from 128 on
    return view


def colour_jitter(image: Image.Image, strengths: tuple[float, ...], rng: np.random.Generator) -> Image.Image:
    """Brightness, contrast, saturation and hue, each by a random amount, in random order.

    Args:
        strengths: s >= 0 of each; a factor is drawn from [max(0, 1 - s), 1 + s], the hue's shift from [-s, s] turns.
    """
    brightness, contrast, saturation, hue = strengths
    factors = [rng.uniform(max(0.0, 1 - s), 1 + s) for s in (brightness, contrast, saturation)]
    changes = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    amounts = [*factors, rng.uniform(-hue, hue)]
    for change in rng.permutation(4):
        image = changes[change](image, float(amounts[change]))
    return image


def stacked_views(
    images: list[Image.Image | np.ndarray], recipes: list[ViewRecipe], size: int, seeds: list[int]
) -> list[Tensor]:
    """For each recipe (batch, 3, size, size) uint8; view v of image i has a separate seed."""
    sizes = [round(recipe.size_share * size) for recipe in recipes]
    return [
        torch.stack(
            [random_view(image, recipe, sizes[view], derive_key(seed, view)) for image, seed in zip(images, seeds)]
        )
        for view, recipe in enumerate(recipes)
    ]


class ViewBatch(NamedTuple):
    """One process's share of a global batch."""

    first_views: torch.Tensor  # (batch, 3, size, size) uint8
    second_views: torch.Tensor  # as first_views; row k of both shows one image
    labels: torch.Tensor  # (batch,) int64
    broken: list[BrokenSample]  # images that could not be read and were replaced
    small_views: Sequence[torch.Tensor] = ()  # as first_views, of smaller images (SwAV's multi-crop)

    @property
    def views(self) -> list[torch.Tensor]:
        return [self.first_views, self.second_views, *self.small_views]


class TwoViews(Dataset):
    """Training images by position, each with all its views.

    A broken image is replaced by one drawn from (seed, position), so the order of all others stays.
    """

    def __init__(self, pictures: Any, order: SampleOrder, recipes: list[ViewRecipe], size: int) -> None:
        self.pictures, self.order, self.recipes, self.size = pictures, order, recipes, size

    def __len__(self) -> int:
        return self.order.samples_per_epoch

    def __getitems__(self, positions: list[int]) -> ViewBatch:
        indices = self.order.epochs_and_indices(np.asarray(positions))[1]
        seeds = [seed_of(self.order.seed, position) for position in positions]
        broken: list[BrokenSample] = []
        samples = [
            read_or_replace(self.pictures.__getitem__, int(index), partial(self._substitute, seed), broken)
            for index, seed in zip(indices, seeds)
        ]
        images, labels = [sample["image"] for sample in samples], [sample["label"] for sample in samples]
        first, second, *small = stacked_views(images, self.recipes, self.size, seeds)
        return ViewBatch(first, second, torch.tensor(labels), broken, small)

    def _substitute(self, seed: int, index: int, attempt: int) -> int:
        return derive_key("instead of a broken picture", seed, attempt) % self.order.num_samples
