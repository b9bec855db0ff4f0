"""Sections of a config of learning from images without text: data, backbone, evaluation."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.base.fields import Decides, TakenBy, path_setting, refuse_not_taken, setting

# fields of VisionDataConfig that not every source takes -> the source that does
_TAKEN_BY = {
    **dict.fromkeys(("task", "num_train", "num_test"), ("scenes",)),
    **dict.fromkeys(("train", "test"), ("folders",)),
}


@dataclass(frozen=True)
class VisionDataConfig:
    """Labelled images; only the evaluation and the supervised reference use the labels."""

    taken_by: ClassVar[dict[str, TakenBy]] = {"source": _TAKEN_BY}
    # the embedded world; folders of images, one per class; torchvision's CIFAR-10
    source: Literal["scenes", "folders", "cifar10"] = "scenes"
    # folders: holds the two folders below; cifar10: holds cifar-10-batches-py
    root: str = path_setting(decides="nothing")
    train: str = path_setting("train", decides="nothing")  # folders: CLASS/*.jpg below it
    test: str = path_setting("test", decides="nothing")  # folders: the same classes
    val: str = path_setting(decides="nothing")  # folders: the same classes, for validation; "" = data.val_share
    # folders, cifar10: share of the training pictures that is held out for validation, by a hash of their paths
    val_share: float = setting(0.0, at_least=0.0, below=1.0, decides="nothing")
    task: str = "vtab/shape"  # scenes: which classes
    num_train: int = setting(20_000, at_least=2)  # scenes
    num_test: int = setting(2_000, at_least=2, decides="evaluation")  # scenes
    image_size: int = setting(32, at_least=8)  # pixels
    views: Literal["imagenet", "cifar10"] = "cifar10"  # which of a method's two published augmentations
    smallest_crop: float | None = setting(None, above=0.0, at_most=1.0)  # share of the area, null = as published
    # stop above this share of broken samples
    max_broken_share: float = setting(0.01, at_least=0.0, at_most=1.0, decides="nothing")

    def __post_init__(self) -> None:
        refuse_not_taken(self, "data", self.taken_by)
        if self.source != "scenes" and not self.root:
            raise ValueError(f"data.source = {self.source} needs data.root, the folder of the images (DATA=...)")
        if self.val and (self.source != "folders" or self.val_share):
            raise ValueError(
                f"data.val = {self.val!r} with data.source = {self.source} and data.val_share = {self.val_share}; "
                "expected a folder with data.source=folders, or data.val_share"
            )
        if self.val_share and self.source == "scenes":
            raise ValueError(f"data.val_share = {self.val_share} with data.source = scenes; expected 0: some are drawn")


@dataclass(frozen=True)
class VisionModelConfig:
    """The backbone; heads are as wide as it is, in the proportions of the published ones."""

    backbone: Literal["narrow_resnet", "resnet50"] = "narrow_resnet"
    width: int = setting(16, at_least=1)  # narrow_resnet: channels of the first stage; each further one doubles them
    blocks: tuple[int, int, int, int] = setting((1, 1, 1, 1), at_least=1)  # narrow_resnet: of each stage
    zero_init_residual: bool = True  # residual blocks start as the identity (SimCLR, SimSiam)


@dataclass(frozen=True)
class VisionEvaluationConfig:
    """What is measured on frozen features of the backbone."""

    decides: ClassVar[Decides] = "evaluation"
    neighbours: int = setting(200, at_least=1)  # k of the weighted vote
    knn_temperature: float = setting(0.1, above=0.0)
    probe_epochs: int = setting(100, at_least=5)  # of the linear probe
    monitor_bank: int = setting(2_000, at_least=1)  # training images that vote during training
    monitor_queries: int = setting(1_000, at_least=2)  # validation images that are classified then
