"""Labelled images for learning from images only: training and test sets, two views of an image."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.base.vision_settings import VisionDataConfig
from common.data.broken import BrokenSample
from common.data.order import SampleOrder, permuted, seed_of
from common.data.pairs import lost_at_open
from common.data.scenes.classification import classification_task
from common.data.transforms import ImageTransform
from common.data.views import RECIPES, TwoViews, ViewRecipe
from common.run.checkpoint import Checkpoint
from common.run.inputs import described

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SMALL_CROPS = (0.05, 0.14)  # share of the area in SwAV's multi-crop, of 96 pixels beside 224
ROLES = ("knn", "linear_probe", "collapse")  # what is measured on the test set

# method -> recipes of its two views on photographs of ImageNet's size, and on pictures of 32 pixels
_VIEWS = {
    "simclr": (("simclr", "simclr"), ("simclr_cifar10", "simclr_cifar10")),
    "moco_v1": (("moco_v1", "moco_v1"), ("moco_cifar10", "moco_cifar10")),
    "moco_v2": (("moco_v2", "moco_v2"), ("moco_cifar10", "moco_cifar10")),
    "moco_v3": (("moco_v3_resnet_1", "moco_v3_resnet_2"), ("moco_cifar10", "moco_cifar10")),  # second: inferred
    "simsiam": (("moco_v2", "moco_v2"), ("moco_cifar10", "moco_cifar10")),  # second: inferred
    "swav": (("moco_v2", "moco_v2"), ("moco_cifar10", "moco_cifar10")),  # SimSiam's, as in its comparison of methods
    "supervised": (("crop_and_flip", "crop_and_flip"), ("crop_and_flip_cifar10", "crop_and_flip_cifar10")),
    "random_weights": (("crop_and_flip", "crop_and_flip"), ("crop_and_flip_cifar10", "crop_and_flip_cifar10")),
}


def open_training_set(data: VisionDataConfig, seed: int = 0) -> Any:
    """The labelled training set; it does not depend on the seed.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: a file cannot be used; names it.
    """
    return _open(data, "train")


def open_test_set(data: VisionDataConfig) -> Any:
    """The labelled test set, with the classes of the training set."""
    return _open(data, "test")


def open_test_sets(data: VisionDataConfig) -> dict[str, Any]:
    """The test set by the role of an evaluation."""
    return dict.fromkeys(ROLES, open_test_set(data))


def _open(data: VisionDataConfig, part: str) -> Any:
    if data.source == "scenes":
        size = data.num_train if part == "train" else data.num_test
        return classification_task(data.task, size, data.image_size, part=part)
    from common.data.labelled import class_folders, open_image_folder, open_torchvision  # not for scenes

    if data.source == "cifar10":
        return open_torchvision("cifar10", data.root, CIFAR10_CLASSES, ["{}"], part=part)
    root, folders = Path(data.root).expanduser(), {"train": data.train, "test": data.test}
    names = class_folders(root / folders["train"])
    return open_image_folder(
        root / folders[part],
        names,
        ["{}"],
        folders=names,
        name=f"{root.name}-{part}",
        max_broken_share=data.max_broken_share,
    )


def view_recipes(config: Any) -> list[ViewRecipe]:
    """Recipes of the two views of a config's method, and of small views if it has any."""
    names = _VIEWS[config.method.name][("imagenet", "cifar10").index(config.data.views)]
    smallest = config.data.smallest_crop
    recipes = [RECIPES[name] for name in names]
    if smallest is not None:
        recipes = [replace(recipe, crop_scale=(smallest, 1.0)) for recipe in recipes]
    small = replace(recipes[0], crop_scale=SMALL_CROPS, size_share=96 / 224)
    return recipes + [small] * getattr(config.method, "small_views", 0)


def evaluation_transform(config: Any) -> ImageTransform:
    """Shortest side and centre crop, with the mean and std of the method's views."""
    recipe = view_recipes(config)[0]
    return ImageTransform(config.data.image_size, mean=recipe.mean, std=recipe.std)


@dataclass(frozen=True)
class VisionTraining:
    """Data of pretrain.py; order, view and description as in common/run/inputs.py, `Training`.

    pictures, test_set: labelled. recipes: of the two views. transform: of an evaluation.
    bank, queries: neighbours and classified images of the kNN accuracy during training.
    """

    pictures: Any
    test_set: Any
    order: SampleOrder
    view: TwoViews
    recipes: list[ViewRecipe]
    transform: ImageTransform
    bank: "SomePictures"
    queries: "SomePictures"

    @property
    def description(self) -> str:
        return described(self.pictures)

    def lost_at_open(self) -> list[BrokenSample]:
        return lost_at_open(self.pictures, self.test_set)

    def with_features(self, model: nn.Module, config: Any, device: torch.device) -> "VisionTraining":
        return self  # the encoder trains

    def state(self, model: nn.Module) -> dict[str, Any]:
        return {"kind": "vision", "transform": self.transform.to_json()}


def open_vision_training(config: Any, pictures: Any, checkpoint: Checkpoint | None) -> VisionTraining:
    """Opens everything except the training set; order and views depend on (seed, position)."""
    order, recipes = SampleOrder(len(pictures), config.optim.global_batch_size, config.run.seed), view_recipes(config)
    test_set = open_test_set(config.data)
    return VisionTraining(
        pictures=pictures,
        test_set=test_set,
        order=order,
        view=TwoViews(pictures, order, recipes, config.data.image_size),
        recipes=recipes,
        transform=evaluation_transform(config),
        bank=SomePictures(pictures, config.evaluation.monitor_bank),
        queries=SomePictures(test_set, config.evaluation.monitor_queries),
    )


class SomePictures:
    """A part of a labelled set, the same in every run, for evaluations during training.

    Args:
        count: of the part, at most the whole set.
    """

    def __init__(self, pictures: Any, count: int) -> None:
        self.pictures = pictures
        self.name, self.class_names = f"{pictures.name}, {min(count, len(pictures))} of them", pictures.class_names
        self.indices = permuted(np.arange(min(count, len(pictures))), len(pictures), seed_of(len(pictures)))

    def __len__(self) -> int:
        return len(self.indices)

    def label(self, index: int) -> int:
        return self.pictures.label(int(self.indices[index]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.pictures[int(self.indices[index])]

    @cached_property
    def fingerprint(self) -> str:
        """Of the whole set."""
        return self.pictures.fingerprint
