"""Configuration of MoCo v2 and SwAV, with the cosine or a geodesic distance."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from common.base.settings import RunConfig, SgdConfig, setting
from common.base.vision_settings import VisionDataConfig, VisionEvaluationConfig, VisionModelConfig
from geomm.config import DistanceConfig, check_graph

_ONLY = {  # settings of one method
    **dict.fromkeys(("symmetric", "ema_schedule", "batch_norm_parts", "shuffle_keys"), "moco_v2"),
    **dict.fromkeys(("sinkhorn_scale", "sinkhorn_iterations", "small_views", "code_queue"), "swav"),
}


@dataclass(frozen=True)
class VisionMethodConfig(DistanceConfig):
    """The method, and the distance between images and keys (MoCo v2) or prototypes (SwAV)."""

    name: Literal["moco_v2", "swav", "random_weights"] = "moco_v2"
    logit_scale: float = setting(5.0, above=0.0)  # 1/T, fixed; MoCo v2: 5, SwAV: 10
    # of all similarities, beside the scales of scores and codes, from geodesic_from_step on (MoCo v2: and a full pool):
    # cos(D / 4) spreads them less than the cosine. A reading `_st` keeps the size of its gradient.
    scale_factor: float = setting(1.0, above=0.0)
    head_dim: int = setting(128, at_least=1)  # of what is compared
    ema_momentum: float | None = setting(None, at_least=0.0, at_most=1.0)  # MoCo v2: of the encoder of keys
    ema_schedule: Literal["constant", "half_cosine"] = "constant"  # MoCo v2: half_cosine rises to 1
    symmetric: bool = False  # MoCo v2: each view is query once and key once, half the published sum
    batch_norm_parts: int = setting(1, at_least=1)  # MoCo v2: statistics of parts of a batch, as on that many GPUs
    shuffle_keys: bool = True  # MoCo v2: statistics of keys differ from those of their queries
    num_prototypes: int = setting(3_000, at_least=2)  # SwAV
    sinkhorn_scale: float = setting(20.0, above=0.0)  # SwAV: 1/epsilon
    sinkhorn_iterations: int = setting(3, at_least=1)  # SwAV
    frozen_steps: int = setting(313, at_least=0)  # SwAV: first steps with frozen prototypes
    code_queue: int = setting(0, at_least=0)  # SwAV: past images that share in the codes; for small batches
    small_views: int = setting(0, at_least=0)  # SwAV: multi-crop, of 96 pixels beside 224; the paper has none

    @property
    def top_nodes(self) -> tuple[str, int]:
        """SwAV's nodes are its prototypes."""
        if self.name == "swav":
            return f"method.num_prototypes = {self.num_prototypes}", self.num_prototypes
        return super().top_nodes

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ema_momentum is None) == (self.name == "moco_v2"):
            expected = "a number, as MoCo v2 has a momentum encoder" if self.name == "moco_v2" else "null"
            raise ValueError(f"method.ema_momentum = {self.ema_momentum} with {self.name}; expected: {expected}")
        for item in fields(self):  # the number of prototypes and their frozen steps are those of a scale, for all rows
            only, value = _ONLY.get(item.name, self.name), getattr(self, item.name)
            if self.name != only and value != item.default:
                raise ValueError(f"method.{item.name} = {value} with {self.name}; expected: only with {only}")


@dataclass(frozen=True)
class VisionConfig:
    """A method at a scale."""

    data: VisionDataConfig = field(default_factory=VisionDataConfig)
    model: VisionModelConfig = field(default_factory=VisionModelConfig)
    method: VisionMethodConfig = field(default_factory=lambda: VisionMethodConfig(ema_momentum=0.999))
    optim: SgdConfig = field(default_factory=SgdConfig)
    evaluation: VisionEvaluationConfig = field(default_factory=VisionEvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        batch, parts = self.optim.global_batch_size, self.method.batch_norm_parts
        if batch % parts:
            raise ValueError(
                f"optim.global_batch_size = {batch} does not split into method.batch_norm_parts = {parts} equal parts"
            )
        keys, queue = batch * (1 + self.method.symmetric), self.method.queue_size
        if self.method.name == "moco_v2" and queue < keys:
            raise ValueError(
                f"method.queue_size = {queue} with optim.global_batch_size = {batch}, method.symmetric = "
                f"{self.method.symmetric}; expected: at least the {keys} keys of a step"
            )
        full_at = 0 if self.method.name == "swav" else math.ceil(queue / keys)  # SwAV has no pool
        check_graph(self.method, self.optim, full_at)
