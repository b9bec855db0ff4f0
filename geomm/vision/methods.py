"""MoCo v2 and SwAV, which compare images with keys or prototypes by the cosine or by a geodesic distance.

Two more differences from MoCo v2, in both rows: the pool starts empty, and the keys of the whole batch are candidates
(GeoMM, Alg. 2).
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from common.distributed import is_main_process
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.methods.momentum_contrast import MomentumContrast, mlp_head
from common.methods.self_supervised import Method, MoCo, RandomWeights, build_backbone, with_head
from geomm.graph_report import pool_report
from geomm.pool import GeodesicPool
from geomm.vision.config import VisionConfig, VisionMethodConfig
from geomm.vision.swav import Prototypes, Swav, swav_head


class GeodesicMoCo(MoCo):
    """MoCo that reports each new graph of its pool.

    Args:
        contrast, shuffle_keys: as in MoCo.
        method: the factor on the pool's similarities.
    """

    def __init__(self, contrast: MomentumContrast, shuffle_keys: bool, method: VisionMethodConfig) -> None:
        super().__init__(contrast, shuffle_keys)
        self.scale_factor = method.scale_factor

    @property
    def loss_at_chance(self) -> float | None:
        """Of a full queue; while it fills, a step has fewer candidates, and no level is stated."""
        queue = self.contrast.pool.queue
        return math.log(queue.capacity) if queue.is_full else None

    def start_step(self, step: int) -> Mapping[str, Any]:
        """Rebuilds the pool's graph if it is due; then facts about it."""
        pool = self.contrast.pool
        if self.scale_factor != 1 and pool.factor_is_due(step):
            pool.set_factor_(self.scale_factor)
        return pool_report(pool) if pool.rebuild(step) and is_main_process() else {}


def build_method(config: VisionConfig, num_classes: int, seed: int) -> Method:
    """The method of a config, with random weights from the global random state; classes and seed have no effect."""
    method = config.method
    backbone = build_backbone(config.model, method.batch_norm_parts)
    width, dim = backbone.output_dim, method.head_dim
    logit_scale = LogitScale(method.logit_scale, maximum=None, trainable=False)
    if method.name == "moco_v2":
        encoder, pool = with_head(backbone, mlp_head(width, dim)), GeodesicPool.from_config(method, dim)
        contrast = MomentumContrast(encoder, Sphere(), logit_scale, pool, method.symmetric)
        return GeodesicMoCo(contrast, method.shuffle_keys, method)
    if method.name == "swav":
        return Swav(
            with_head(backbone, swav_head(width, dim)),
            Prototypes(method.num_prototypes, dim, method),
            logit_scale,
            method.sinkhorn_scale,
            method.sinkhorn_iterations,
            method.frozen_steps,
            method.code_queue,
        )
    return RandomWeights(with_head(backbone, nn.Identity()))
