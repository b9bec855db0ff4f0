"""Configuration of the oblique-topology experiments."""

from dataclasses import dataclass, field
from typing import Literal

from common.evaluation.zero_shot import PromptAverage
from common.logit_scale import check_bounds
from common.run.config import DataConfig, ModelConfig, OptimConfig, RunConfig, setting


@dataclass(frozen=True)
class MethodConfig:
    """How embeddings are compared, and the softmax temperature."""

    geometry: Literal["sphere"] = "sphere"  # unit sphere with the inner product: the paper's baseline
    logit_scale_init: float = setting(1 / 0.07, above=0.0)  # multiplier; the paper's "e^2.64" is ln(1/0.07) (spec R5)
    logit_scale_trainable: bool = True  # False: the paper's "gradient = False"
    logit_scale_min: float | None = setting(None, above=0.0)  # bounds of the multiplier, null = none
    logit_scale_max: float | None = setting(100.0, above=0.0)
    prompt_average: PromptAverage = "scores"  # the paper averages distances over templates

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class Config:
    """A row of a table at a scale."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
