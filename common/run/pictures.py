"""Labelled images for learning from images only: training and test sets, two views of an image."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.base.vision_settings import VisionDataConfig, VisionEvaluationConfig
from common.data.broken import BrokenSample
from common.data.held_out import split_off
from common.data.order import SampleOrder, permuted, seed_of
from common.data.pairs import check_folders_apart, lost_at_open
from common.data.part import Part
from common.data.scenes.classification import classification_task
from common.data.transforms import ImageTransform
from common.data.views import RECIPES, TwoViews, ViewRecipe
from common.run.checkpoint import Checkpoint
from common.run.inputs import described

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

SCALE_FILES = "scale_vision"  # stem of the scale files of rows that train on images only


def open_training_set(data: VisionDataConfig, seed: int = 0) -> Any:
    """The labelled training set; it does not depend on the seed."""
    opened = _open(data, "train")
    return split_off(opened, data.val_share).training if data.val_share else opened


def open_validation_set(data: VisionDataConfig) -> Any:
    """Labelled pictures that no run trains on and no table reports."""
    if data.source == "scenes" or data.val:
        return _open(data, "val")
    if data.val_share:
        return split_off(_open(data, "train"), data.val_share).validation
    raise ValueError(
        f"data.source = {data.source} has no validation set: data.val is empty and data.val_share is 0; expected "
        "data.val=<folder>, or data.val_share=0.1, which holds out a tenth of the training pictures"
    )


def open_validation_sets(config: Any) -> list["SomePictures"]:
    """What kNN accuracy is measured on during training, and by a search at the end of a run."""
    if _has_validation(config):
        return [SomePictures(open_validation_set(config.data), config.evaluation.monitor_queries)]
    return [_parts_of_training(open_training_set(config.data), config.evaluation)[1]]


def _has_validation(config: Any) -> bool:
    return config.data.source == "scenes" or bool(config.data.val or config.data.val_share) or not config.run.test


def _parts_of_training(pictures: Any, evaluation: VisionEvaluationConfig) -> tuple["SomePictures", "SomePictures"]:
    # bank and queries, to see that a run learns: no number to choose a setting by
    num_queries = min(evaluation.monitor_queries, max(1, len(pictures) // 10))
    bank = SomePictures(pictures, min(evaluation.monitor_bank, len(pictures) - num_queries))
    return bank, SomePictures(pictures, num_queries, skip=len(bank))


def open_test_set(data: VisionDataConfig) -> Any:
    """The labelled test set, with the classes of the training set."""
    return _open(data, "test")


def open_test_sets(data: VisionDataConfig) -> dict[str, Any]:
    """The test set by the role of an evaluation."""
    return dict.fromkeys(ROLES, open_test_set(data))


def _open(data: VisionDataConfig, part: str) -> Any:
    if data.source == "scenes":
        size = data.num_train if part == "train" else data.num_test  # as many for validation as for the test
        return classification_task(data.task, size, data.image_size, part=part)
    from common.data.labelled import class_folders, open_cifar10, open_image_folder  # not for scenes

    if data.source == "cifar10":
        return open_cifar10(data.root, part)
    root, folders = Path(data.root).expanduser(), {"train": data.train, "val": data.val, "test": data.test}
    if part != "train":
        check_folders_apart(root / folders["train"], root / folders[part], f"data.{part}")
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
    """Recipes of the two views of a config's method, and of its small views if any."""
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

    pictures, test_set: labelled; no test set if run.test is false. recipes: of the two views.
    transform: of an evaluation. bank, queries: the parts that vote and are classified during training; queries are
        validation images, or training images if the source has no validation set.
    """

    pictures: Any
    test_set: Any | None
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
        return lost_at_open(self.pictures, *([] if self.test_set is None else [self.test_set]))

    @property
    def validation_sets(self) -> list[Any]:
        return [self.queries]

    def with_features(self, model: nn.Module, config: Any, device: torch.device) -> "VisionTraining":
        return self  # the encoder trains

    def state(self, model: nn.Module) -> dict[str, Any]:
        return {
            "kind": "vision",
            "transform": self.transform.to_json(),
            "num_classes": len(self.pictures.class_names),  # the supervised reference has as many outputs
        }


def open_vision_training(config: Any, pictures: Any, checkpoint: Checkpoint | None) -> VisionTraining:
    """Opens everything except the training set; order and views depend on (seed, position)."""
    order, recipes = SampleOrder(len(pictures), config.optim.global_batch_size, config.run.seed), view_recipes(config)
    if _has_validation(config):
        bank, (queries,) = SomePictures(pictures, config.evaluation.monitor_bank), open_validation_sets(config)
    else:
        bank, queries = _parts_of_training(pictures, config.evaluation)
    return VisionTraining(
        pictures=pictures,
        test_set=open_test_set(config.data) if config.run.test else None,
        order=order,
        view=TwoViews(pictures, order, recipes, config.data.image_size),
        recipes=recipes,
        transform=evaluation_transform(config),
        bank=bank,
        queries=queries,
    )


class SomePictures(Part):
    """Samples of a labelled set in random places, the same in every run, for evaluations during training.

    Args:
        count: of the part, at most the whole set.
        skip: images of another part, which this one leaves out.
    """

    def __init__(self, pictures: Any, count: int, skip: int = 0) -> None:
        places = np.arange(skip, min(skip + count, len(pictures)))
        self._whole, self.name = pictures, f"{pictures.name}, {len(places)} of them"
        self._rows = permuted(places, len(pictures), seed_of(len(pictures))).tolist()

    @property
    def fingerprint(self) -> str:
        return self._whole.fingerprint
