"""Configuration of my geometry's experiments."""

from dataclasses import dataclass, field
from typing import Literal

from common.base.settings import DataConfig, ModelConfig, OptimConfig, PromptAverage, RunConfig, check_patches, setting
from common.logit_scale import check_bounds


@dataclass(frozen=True)
class MethodConfig:
    """How embeddings are compared; a row file sets only these."""

    geometry: Literal["ball", "sphere"] = "ball"
    logit_scale_init: float = setting(5.0, above=0.0)
    logit_scale_trainable: bool = True
    logit_scale_min: float | None = setting(None, above=0.0)  # bounds of the multiplier, null = none
    logit_scale_max: float | None = setting(100.0, above=0.0)
    prompt_average: PromptAverage = setting("embeddings", decides="evaluation")  # of a class, by the geometry's mean

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class Config:
    """An experiment: a row at a scale."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_patches(self.data, self.model)
