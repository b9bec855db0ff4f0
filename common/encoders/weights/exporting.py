"""A CLIP of ours in the layouts of open_clip and transformers."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.base.arguments import some
from common.encoders.text import CausalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.encoders.weights.layouts import (
    LOGIT_BIAS,
    OPEN_CLIP,
    TRANSFORMERS_CLIP,
    Layout,
    WeightsError,
    tower_entries,
)
from common.encoders.weights.towers import ONLY_THE_SPHERE, sizes_of

if TYPE_CHECKING:
    from transformers import CLIPModel


def clip_to_open_clip(model: TwoTowers) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Our CLIP in open_clip's layout.

    Args:
        model: sphere, one class token, causal text tower, final LayerNorms; others are refused.
    Returns:
        (state dict, model configuration): open_clip's CLIP(**configuration) takes the state dict.
    """
    image, text = _exportable_towers(model)
    of_image, of_text = sizes_of(image.transformer), sizes_of(text.transformer)
    activations = {of_image["hidden_act"], of_text["hidden_act"]}
    if len(activations) > 1:
        raise WeightsError(f"the towers' activations differ ({sorted(activations)}); open_clip has one for both")

    def shared(tower: VisionTransformer | CausalTextTransformer, sizes: dict[str, Any]) -> dict[str, Any]:
        mlp_ratio = ratio_rounded_down(sizes["intermediate_size"], tower.width)
        shared = {"width": tower.width, "layers": sizes["num_hidden_layers"], "mlp_ratio": mlp_ratio}
        eps = sizes["layer_norm_eps"]
        return shared if eps == 1e-5 else {**shared, "norm_kwargs": {"eps": eps}}

    # open_clip reads out the largest id of a row, if no end token is named
    reads_out_largest = text.end_id in (None, text.vocabulary_size - 1)
    configuration = {
        "embed_dim": image.projection_dim,
        "quick_gelu": activations == {"quick_gelu"},
        **({} if model.logit_bias is None else {"init_logit_bias": model.logit_bias().item()}),
        "vision_cfg": {
            **shared(image, of_image),
            "image_size": image.image_size,
            "patch_size": image.patch_size,
            "head_width": image.width // of_image["num_attention_heads"],
        },
        "text_cfg": {
            **shared(text, of_text),
            "context_length": text.context_length,
            "vocab_size": text.vocabulary_size,
            "heads": of_text["num_attention_heads"],
            **({} if reads_out_largest else {"pool_type": "eos", "eos_id": text.end_id}),
        },
    }
    return _exported(model, OPEN_CLIP), configuration


def clip_to_transformers(model: TwoTowers) -> "CLIPModel":
    """Our CLIP, as in `clip_to_open_clip`, as transformers' CLIPModel in eval mode; `save_pretrained` writes it."""
    from transformers import CLIPConfig, CLIPModel

    image, text = _exportable_towers(model)
    if model.logit_bias is not None:
        raise WeightsError("transformers' CLIP has no logit bias, which the sigmoid loss trains; expected: open_clip")

    def shared(tower: VisionTransformer | CausalTextTransformer) -> dict[str, Any]:
        return {**sizes_of(tower.transformer), "hidden_size": tower.width, "projection_dim": tower.projection_dim}

    config = CLIPConfig(
        vision_config={**shared(image), "image_size": image.image_size, "patch_size": image.patch_size},
        text_config={
            **shared(text),
            "vocab_size": text.vocabulary_size,
            "max_position_embeddings": text.context_length,
            # with 2 transformers reads out the largest id of a row
            "eos_token_id": 2 if text.end_id is None else text.end_id,
            "bos_token_id": 0 if text.end_id is None else max(text.end_id - 1, 0),
            "pad_token_id": 0,
        },
        projection_dim=image.projection_dim,
    )
    exported = CLIPModel(config).eval()
    shapes = {name: value.shape for name, value in exported.state_dict().items()}
    state = {name: value.reshape(shapes[name]) for name, value in _exported(model, TRANSFORMERS_CLIP).items()}
    exported.load_state_dict(state)
    return exported


def _exported(model: TwoTowers, layout: Layout) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    exported = {}
    layers = (len(tower.transformer.blocks) for tower in (model.image_tower, model.text_tower))
    for entry in tower_entries(layout, *layers):
        if entry.ours == LOGIT_BIAS and model.logit_bias is None:
            continue
        value = state.pop(entry.ours).detach().cpu()
        if entry.ours in ("image_tower.class_embedding", "logit_scale.log_logit_scale", LOGIT_BIAS):
            value = value[0]  # theirs has no axis for several
        value = value.T if entry.transposed else value
        parts = value.chunk(len(entry.theirs)) if len(entry.theirs) > 1 else [value]
        exported |= {name: part.contiguous().clone() for name, part in zip(entry.theirs, parts)}
    if state:
        raise WeightsError(f"the layout has no place for {some(list(state))}")
    return exported


def _exportable_towers(model: TwoTowers) -> tuple[VisionTransformer, CausalTextTransformer]:
    image, text = model.image_tower, model.text_tower
    if not isinstance(image, VisionTransformer) or not isinstance(text, CausalTextTransformer):
        names = f"{type(image).__name__} and {type(text).__name__}"
        raise WeightsError(f"only a vision transformer with a causal text tower is a CLIP; these are {names}")
    if model.geometry.name != "sphere":
        raise WeightsError(f"geometry {model.geometry.name!r}: {ONLY_THE_SPHERE}")
    if image.num_class_tokens != 1:
        raise WeightsError(f"{image.num_class_tokens} class tokens; CLIP has one")
    for tower in (image, text):
        if isinstance(tower.final_norm, nn.Identity) or tower.projection is None:
            raise WeightsError(f"{type(tower).__name__} has no final LayerNorm or no projection; CLIP has both")
    if isinstance(image.input_norm, nn.Identity) or image.patch_embedding.bias is not None:
        raise WeightsError("the image tower is timm's kind (no LayerNorm before the blocks, patch bias), not CLIP's")
    return image, text


def ratio_rounded_down(size: int, width: int) -> float:
    """The ratio r with int(width * r) == size, as open_clip computes it: 448 * (941 / 448) is below 941."""
    ratio = size / width
    return ratio if int(width * ratio) == size else math.nextafter(ratio, math.inf)
