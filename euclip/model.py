"""The models of EuCLIP's tables: CLIP's towers and one of six geometries.

What differs from plain CLIP:
    1. embeddings need not lie on a sphere, and are compared by minus a distance or its square (geometry.py);
    2. hyperbolic geometries learn three scalars: the curvature c and the scales alpha of image and text features;
    3. without the final LayerNorm (model.final_layer_norm) the norms of both towers' outputs are free;
    4. an entailment loss wants each image in the cone behind its text (entailment.py, added in train.py).
"""

import math
from functools import partial

import torch

from common.data.tokenizer import Tokenizer
from common.distributed import whole
from common.encoders.from_config import causal_text_transformer, vision_transformer
from common.encoders.two_towers import TwoTowers
from common.geometry import Geometry, Sphere
from common.logit_scale import LogitScale
from euclip.config import Config, MethodConfig
from euclip.geometry import Elliptic, Euclidean, Hyperbolic


def build_geometry(method: MethodConfig, dim: int) -> Geometry:
    """The geometry that the row names.

    Args:
        method: of the row.
        dim: numbers of an embedding.
    """
    hyperbolic = partial(
        Hyperbolic,
        dim,
        curvature_init=method.curvature_init,
        curvature_min=method.curvature_min,
        curvature_max=method.curvature_max,
        absorbing_bounds=method.absorbing_curvature_bounds,
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
    """Both towers with random weights, the geometry and the logit scale.

    Args:
        config: of one row.
        tokenizer: gives the number of ids and the end token.
    """
    image_tower = vision_transformer(config.data, config.model)
    text_tower = causal_text_transformer(config.data, config.model, tokenizer)
    geometry = build_geometry(config.method, config.model.embedding_dim)
    return TwoTowers(image_tower, text_tower, geometry, LogitScale.from_config(config.method))


def trained_scalars(model: TwoTowers) -> dict[str, float]:
    """Beta, and where the geometry has them c and both alphas, as they act: after the exponential."""
    geometry, values = model.geometry, {"logit_scale": model.logit_scale().item()}
    if isinstance(geometry, Hyperbolic):
        values["curvature"] = geometry.curvature().item()
        values["image_scale"] = whole(geometry.log_image_scale).exp().item()
        values["text_scale"] = whole(geometry.log_text_scale).exp().item()
    return values


@torch.no_grad()
def multiply_scalar_gradients_(model: TwoTowers, factor: float) -> None:
    """Multiplies the gradients of beta and c (spec Sec. 6); call between backward and clipping.

    The authors' accumulation differentiates these two anew in each of its parts and does not divide: over two parts
    their gradients are twice those of the batch. Adam hides most of it.
    """
    if factor == 1:
        return
    parameters = [model.logit_scale.log_logit_scale]
    if isinstance(model.geometry, Hyperbolic):
        parameters.append(model.geometry.log_curvature)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= factor


@torch.no_grad()
def clamp_scalars_(model: TwoTowers, embedding_scale_max: float | None) -> int:
    """Moves the trainable scalars back into their bounds; call once after every optimiser step.

    In place and after the step: a clamp in the forward pass would have no gradient beyond the bound and hold the scalar
    there (`absorbing_curvature_bounds` does that for c, on purpose).

    Args:
        model: of the row.
        embedding_scale_max: of both alphas; None = none.
    Returns:
        How many scalars the step had carried out of their bounds.
    """
    parameters = [model.logit_scale.log_logit_scale]
    if isinstance(model.geometry, Hyperbolic):
        scales = [model.geometry.log_image_scale, model.geometry.log_text_scale]
        parameters += [model.geometry.log_curvature, *scales]
    before = torch.cat([whole(parameter).detach().clone() for parameter in parameters])
    model.logit_scale.clamp_()
    hits = 0
    if isinstance(model.geometry, Hyperbolic):
        model.geometry.clamp_()
        if embedding_scale_max is not None:
            for scale in scales:
                scale.clamp_(max=math.log(embedding_scale_max))
        if model.geometry.absorbing_bounds:  # acts in the forward pass; the parameter stays outside
            outside = whole(model.geometry.log_curvature).exp() != model.geometry.curvature()
            hits += int(outside.sum())
    after = torch.cat([whole(parameter).detach() for parameter in parameters])
    return hits + int((after != before).sum())
