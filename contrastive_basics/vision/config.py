"""Configuration of learning from images only: a row file has the method, a scale file all other settings."""

from dataclasses import dataclass, field, fields
from typing import Literal

from common.base.settings import RunConfig, SgdConfig, setting
from common.base.vision_settings import VisionDataConfig, VisionEvaluationConfig, VisionModelConfig

# required settings of a method, and optional ones
_NEEDED = {
    "simclr": ("logit_scale", "head_dim"),
    "moco_v1": ("logit_scale", "head_dim", "queue_size", "ema_momentum"),
    "moco_v2": ("logit_scale", "head_dim", "queue_size", "ema_momentum"),
    "moco_v3": ("logit_scale", "head_dim", "ema_momentum"),
    "simsiam": (),
    "supervised": (),
    "random_weights": (),
}
_ALLOWED = {
    "moco_v1": ("ema_schedule", "symmetric", "batch_norm_parts", "shuffle_keys"),
    "moco_v2": ("ema_schedule", "symmetric", "batch_norm_parts", "shuffle_keys"),
    "moco_v3": ("ema_schedule",),
    "simsiam": ("stop_gradient", "predictor"),
}


@dataclass(frozen=True)
class VisionMethodConfig:
    """The method. null = not a setting of this method; any other value is then an error."""

    name: Literal["simclr", "moco_v1", "moco_v2", "moco_v3", "simsiam", "supervised", "random_weights"] = "simsiam"
    logit_scale: float | None = setting(None, above=0.0)  # 1/T, fixed
    head_dim: int | None = setting(None, at_least=1)  # of what is compared
    queue_size: int | None = setting(None, at_least=1)  # MoCo v1, v2: keys of past steps
    ema_momentum: float | None = setting(None, at_least=0.0, at_most=1.0)  # MoCo: at the start
    ema_schedule: Literal["constant", "half_cosine"] = "constant"  # MoCo: half_cosine rises to 1 (v3)
    symmetric: bool = False  # MoCo v1, v2: each view is query once and key once, half the published sum
    batch_norm_parts: int = setting(1, at_least=1)  # MoCo v1, v2: statistics of parts of a batch, as on that many GPUs
    shuffle_keys: bool = True  # MoCo v1, v2: statistics of keys differ from those of their queries
    stop_gradient: bool = True  # SimSiam: false lets the gradient through the targets, too
    predictor: bool = True  # SimSiam: false compares the projections themselves

    def __post_init__(self) -> None:
        missing = [key for key in _NEEDED[self.name] if getattr(self, key) is None]
        if missing:
            raise ValueError(f"{self.name} needs method.{missing[0]}, which is null")
        settings = ("name", *_NEEDED[self.name], *_ALLOWED.get(self.name, ()))
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in settings and value != item.default:
                has = ", ".join(settings[1:]) or "none"
                raise ValueError(f"method.{item.name} = {value} is no setting of {self.name}; it has: {has}")


@dataclass(frozen=True)
class VisionConfig:
    """A method at a scale."""

    data: VisionDataConfig = field(default_factory=VisionDataConfig)
    model: VisionModelConfig = field(default_factory=VisionModelConfig)
    method: VisionMethodConfig = field(default_factory=VisionMethodConfig)
    optim: SgdConfig = field(default_factory=SgdConfig)
    evaluation: VisionEvaluationConfig = field(default_factory=VisionEvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        batch, parts = self.optim.global_batch_size, self.method.batch_norm_parts
        if batch % parts:
            raise ValueError(
                f"optim.global_batch_size = {batch} does not split into method.batch_norm_parts = {parts} equal parts"
            )
