"""Configuration of EuCLIP's experiments. The defaults are CLIP's; a row says what it changes."""

from dataclasses import dataclass, field
from typing import Literal

from common.base.fields import path_setting, refuse_not_taken
from common.base.settings import DataConfig, ModelConfig, OptimConfig, PromptAverage, RunConfig, check_patches, setting
from common.logit_scale import check_bounds

GeometryName = Literal["sphere", "elliptic", "euclidean", "euclidean_squared", "hyperbolic", "hyperbolic_squared"]
LossName = Literal["info_nce", "sigmoid"]
WITH_ENTAILMENT = ("euclidean", "euclidean_squared", "hyperbolic", "hyperbolic_squared")
# fields of MethodConfig that not every geometry takes -> the geometries that do
_TAKEN_BY = {
    **dict.fromkeys(("entailment_weight", "min_radius"), WITH_ENTAILMENT),
    **dict.fromkeys(
        ("curvature_init", "curvature_min", "curvature_max", "absorbing_curvature_bounds", "embedding_scale_max"),
        ("hyperbolic", "hyperbolic_squared"),
    ),
}


@dataclass(frozen=True)
class EvaluationData(DataConfig):
    """The data, and what the paper's averages are taken over."""

    # over the sets that exist, or over all 38 of DataComp
    averages: Literal["present", "datacomp"] = setting("present", decides="evaluation")
    # folder or hub name of its rows, "" = none; scenes have their own instances
    winogavil: str = path_setting(decides="nothing")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.winogavil and self.source == "scenes":
            raise ValueError(
                f"data.winogavil = {self.winogavil} with data.source = scenes, which has its own instances; "
                "expected an empty value"
            )


@dataclass(frozen=True)
class MethodConfig:
    """How embeddings are compared, the entailment loss, and the trainable scalars.

    Where the paper and its code differ, a setting selects the reading. README.md gives the defaults and the reasons.
    """

    geometry: GeometryName = "sphere"  # the sphere with the cosine is CLIP
    loss: LossName = "info_nce"  # of paired images and texts
    entailment_weight: float = setting(0.0, at_least=0.0)  # lambda
    min_radius: float | None = setting(None, at_least=0.0)  # K, in units of the (lifted) embeddings
    logit_scale_init: float = setting(1 / 0.07, above=0.0)  # beta; paper: 1 / 0.07, for squared distances 1 or exp(-1)
    logit_scale_trainable: bool = True
    logit_scale_min: float | None = setting(None, above=0.0)  # null = the paper's text; 1 = the authors' code
    logit_scale_max: float | None = setting(100.0, above=0.0)
    curvature_init: float = setting(1.0, above=0.0)  # c, hyperbolic only; the space has curvature -c
    curvature_min: float = setting(0.1, above=0.0)
    curvature_max: float = setting(10.0, above=0.0)
    absorbing_curvature_bounds: bool = False  # True: in the forward pass, as EuCLIP's code
    embedding_scale_max: float | None = setting(None, above=0.0)  # of alpha, hyperbolic only; 1 = MERU's code
    logit_bias_init: float = -10.0  # sigmoid: added to all logits at the start
    scalar_gradient_factor: float = setting(1.0, above=0.0)  # of scalars in the loss; 2 = as accumulated by the authors
    # the geometry's own mean of the prompts of a class
    prompt_average: PromptAverage = setting("embeddings", decides="evaluation")

    def __post_init__(self) -> None:
        check_bounds(self)
        refuse_not_taken(self, "method", {"geometry": _TAKEN_BY})
        if self.loss != "sigmoid" and self.logit_bias_init != -10.0:
            raise ValueError(
                f"method.logit_bias_init = {self.logit_bias_init} with method.loss = {self.loss}, which has no bias; "
                "expected method.loss = sigmoid"
            )
        if self.entailment_weight and self.min_radius is None:
            raise ValueError(
                f"method.entailment_weight = {self.entailment_weight} needs method.min_radius (K); the paper: 0.3, "
                "MERU 0.1"
            )
        if not self.curvature_min <= self.curvature_init <= self.curvature_max:
            raise ValueError(
                f"method.curvature_init = {self.curvature_init} is outside [method.curvature_min, "
                f"method.curvature_max] = [{self.curvature_min}, {self.curvature_max}]"
            )


@dataclass(frozen=True)
class Config:
    """A row of a table at a scale."""

    data: EvaluationData = field(default_factory=EvaluationData)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_patches(self.data, self.model)
        if self.method.loss != "info_nce" and self.optim.loss_tile:
            raise ValueError(
                f"optim.loss_tile = {self.optim.loss_tile} with method.loss = {self.method.loss}, which has no tiled "
                "form; expected 0"
            )
