"""Configuration of the chapter's vision-language models; vision/config.py has its vision part."""

from dataclasses import dataclass, field
from typing import Any, Literal

from common.base.fields import path_setting
from common.base.settings import DataConfig, ModelConfig, OptimConfig, PromptAverage, RunConfig, check_patches, setting
from common.logit_scale import check_bounds


@dataclass(frozen=True)
class MethodConfig:
    """The loss: embeddings, negatives and temperature.

    The temperature T is 1 / logit_scale: learned (trainable), fixed (not trainable), or absent as in the chapter's
    Eq. 6 and 7 (not trainable, logit_scale_init 1).
    """

    # one vector a side (Eq. 6-8); token by token (FILIP); one vector a side, every pair classified on its own (SigLIP)
    loss: Literal["in_batch", "late_interaction", "sigmoid"] = "in_batch"
    # class_token: the class tokens of the last layers (Eq. 2 to 5); projection: CLIP's, of class and end token
    embedding: Literal["projection", "class_token"] = "projection"
    targets: Literal["diagonal", "ids"] = "diagonal"  # ids: an image that is twice in a batch is no negative of itself
    queue_size: int = setting(0, at_least=0)  # pairs of past steps as further negatives, 0 = none
    group_size: int = setting(0, at_least=0)  # a query is compared within its group only, 0 = within the batch
    ema_momentum: float = setting(0.99, at_least=0.0, at_most=1.0)  # of the encoder of queued pairs
    logit_scale_init: float = setting(1 / 0.07, above=0.0)  # multiplier; CLIP: 1 / 0.07
    logit_scale_trainable: bool = True
    logit_scale_min: float | None = setting(1.0, above=0.0)  # bounds of the multiplier, null = none; open_clip, FLAVA
    logit_scale_max: float | None = setting(100.0, above=0.0)
    logit_bias_init: float = -10.0  # sigmoid: added to all logits at the start
    # zero-shot classes; late_interaction: scores
    prompt_average: PromptAverage = setting("embeddings", decides="evaluation")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.loss == "late_interaction":
            values = {
                "embedding": "projection", "targets": "diagonal", "queue_size": 0, "group_size": 0,
                "prompt_average": "scores",
            }  # fmt: skip
            self._only(values, "method.loss = late_interaction")
        if self.loss == "sigmoid":
            values = {"targets": "diagonal", "queue_size": 0, "group_size": 0}
            self._only(values, "method.loss = sigmoid")
        else:
            self._only({"logit_bias_init": -10.0}, f"method.loss = {self.loss}, which has no bias")
        if not self.queue_size:
            self._only({"ema_momentum": 0.99}, "method.queue_size = 0, which has no momentum encoder")
        if self.group_size:
            self._only({"targets": "diagonal", "queue_size": 0}, f"method.group_size = {self.group_size}")

    def _only(self, values: dict[str, Any], cause: str) -> None:
        for name, value in values.items():
            if getattr(self, name) != value:
                raise ValueError(f"method.{name} = {getattr(self, name)!r} with {cause}; expected: {value}")


@dataclass(frozen=True)
class Config:
    """An experiment: a row of a table at a scale."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_patches(self.data, self.model)
        if self.method.loss == "late_interaction" and not self.model.image.projection:
            raise ValueError(
                "method.loss = late_interaction with model.image.projection = false, which projects the patches; "
                "expected: true"
            )
        if self.method.embedding == "class_token":
            self._check_class_tokens()
        if self.method.loss != "in_batch" and self.optim.loss_tile:
            raise ValueError(
                f"optim.loss_tile = {self.optim.loss_tile} with method.loss = {self.method.loss}, which has no tiled "
                "form; expected: 0"
            )
        groups, batch = self.method.group_size, self.optim.global_batch_size
        if groups and (groups == 1 or batch % groups or self.optim.loss_tile):
            raise ValueError(
                f"method.group_size = {groups} with optim.global_batch_size = {batch} and optim.loss_tile = "
                f"{self.optim.loss_tile}; expected: divisors of the batch, at least 2, and no tiles"
            )

    def _check_class_tokens(self) -> None:
        model = self.model
        for name, value in (("image.width", model.image.width), ("text.width", model.text.width)):
            if value != model.embedding_dim:
                raise ValueError(
                    f"model.{name} = {value} with method.embedding = class_token, which compares the towers' outputs; "
                    f"expected: {model.embedding_dim}, as model.embedding_dim"
                )
        for name, layers in (("image", model.image.layers), ("text", model.text.layers)):
            if not layers:
                raise ValueError(
                    f"model.{name}.layers = 0 with method.embedding = class_token; expected: at least 1, as a class "
                    "token takes a transformer"
                )


@dataclass(frozen=True)
class PublicModels:
    """Published models of Table 1: a folder written by transformers, or a name on the hub; "" = not evaluated."""

    clip: str = path_setting()  # the table's: openai/clip-vit-large-patch14-336
    flava: str = path_setting()  # the table's: facebook/flava-full
    caption_prefix: str = "a photo of "  # of a second row per model, "" = none; CLIP's paper used one


@dataclass(frozen=True)
class PublicConfig:
    """Settings of `make reproduce-table1` beside those of a row: `public.clip=...`."""

    public: PublicModels = field(default_factory=PublicModels)
