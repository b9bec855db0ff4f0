"""The models of EuCLIP's tables: CLIP's towers and one of six geometries.

What differs from plain CLIP:
    1. embeddings need not lie on a sphere, and are compared by minus a distance or its square (geometry.py);
    2. hyperbolic geometries learn three scalars: the curvature c and the scales alpha of image and text features;
    3. without the final LayerNorm (model.final_layer_norm) the norms of both towers' outputs are free;
    4. an entailment loss wants each image in the cone behind its text (entailment.py, added in train.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from common.encoders.from_config import causal_text_transformer, vision_transformer
from common.encoders.two_towers import TwoTowers
from common.geometry import Geometry, Sphere
from common.logit_scale import LogitBias, LogitScale
from euclip.geometry import Elliptic, Euclidean, Hyperbolic

if TYPE_CHECKING:
    from common.data.tokenizer import Tokenizer
    from euclip.config import Config, MethodConfig


def build_geometry(method: MethodConfig, dim: int) -> Geometry:
    """The geometry that the row names; `dim` is the size of an embedding."""
    hyperbolic = partial(
        Hyperbolic,
        dim,
        curvature_init=method.curvature_init,
        curvature_min=method.curvature_min,
        curvature_max=method.curvature_max,
        absorbing_bounds=method.absorbing_curvature_bounds,
        embedding_scale_max=method.embedding_scale_max,
    )
    geometries = {
        "sphere": Sphere,
        "elliptic": Elliptic,
        "euclidean": partial(Euclidean, squared=False),
        "euclidean_squared": partial(Euclidean, squared=True),
        "hyperbolic": partial(hyperbolic, squared=False),
        "hyperbolic_squared": partial(hyperbolic, squared=True),
    }
    return geometries[method.geometry]()


def build_model(config: Config, tokenizer: Tokenizer) -> TwoTowers:
    """Both towers with random weights, the geometry and the logit scale."""
    image_tower = vision_transformer(config.data, config.model)
    text_tower = causal_text_transformer(config.data, config.model, tokenizer)
    geometry = build_geometry(config.method, config.model.embedding_dim)
    logit_scale = LogitScale.from_config(config.method)
    bias = LogitBias(config.method.logit_bias_init) if config.method.loss == "sigmoid" else None
    return TwoTowers(image_tower, text_tower, geometry, logit_scale, bias)


@torch.no_grad()
def multiply_scalar_gradients_(model: TwoTowers, factor: float) -> None:
    """Multiplies the gradients of beta, c and a logit bias, which act in the loss; call between backward and clipping.

    The authors' accumulation differentiates beta and c once per part and does not divide: with two parts their
    gradients are twice those of the batch. Adam hides most of it.
    """
    if factor == 1:
        return
    for scalar in model.scalars():
        if scalar.in_loss and scalar.parameter.grad is not None:
            scalar.parameter.grad *= factor
