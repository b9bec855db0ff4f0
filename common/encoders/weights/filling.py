"""Weights into the towers of a run: what must agree, what is interpolated or folded, what is locked."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from common.data.transforms import CLIP_MEAN, CLIP_STD, ImageTransform
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.vision import VisionTransformer, interpolate_positions
from common.encoders.weights.layouts import WeightsError
from common.encoders.weights.towers import Weights, sizes_of


def settings_of(tower: VisionTransformer | CausalTextTransformer | BidirectionalTextTransformer) -> dict[str, Any]:
    """What must agree for one tower to fill another: setting, or a name for it -> value.

    Numbers that `fill_` adapts are left out, as is a missing last LayerNorm or projection.
    """
    sizes = sizes_of(tower.transformer)
    is_image = isinstance(tower, VisionTransformer)
    side = "model.image" if is_image else "model.text"
    settings = {
        f"{side}.width": tower.width,
        f"{side}.layers": sizes["num_hidden_layers"],
        f"{side}.heads": sizes["num_attention_heads"],
        f"{side}.mlp_ratio": sizes["intermediate_size"] / tower.width,
        f"{side}.activation": sizes["hidden_act"],
        f"{side}.norm_eps": sizes["layer_norm_eps"],
    }
    if is_image:
        settings["model.patch_size"] = tower.patch_size
        settings["model.image_kind"] = "clip" if tower.patch_embedding.bias is None else "timm"
        settings["model.image.stem.name"] = "" if tower.stem is None else tower.stem.name
        if tower.stem is not None:
            settings |= dict(zip(("model.image.stem.mean", "model.image.stem.std"), map(list, tower.stem.colours)))
        settings["class tokens of the image tower"] = tower.num_class_tokens
    else:
        is_causal = isinstance(tower, CausalTextTransformer)
        settings["the text tower's order"] = "causal (CLIP)" if is_causal else "bidirectional (BERT)"
        settings["ids of data.vocabulary"] = tower.vocabulary_size
        stem = tower.stem
        settings["the text tower's stem"] = stem and (
            f"{len(stem.network.transformer.blocks)} layers of width {stem.width}, {stem.heads} heads, MLPs of "
            f"{round(stem.width * stem.mlp_ratio)}"
        )
        if is_causal:  # the largest id of a row is the end token's, if that is the largest of all
            settings["id of the end token"] = tower.vocabulary_size - 1 if tower.end_id is None else tower.end_id
    has_final_norm = not isinstance(tower.final_norm, nn.Identity)
    if tower.projection is not None:
        tokens = getattr(tower, "num_class_tokens", 1)
        settings["model.embedding_dim"] = tokens * tower.projection_dim
        if not is_image:
            settings["class tokens of the text tower"] = tokens
    if tower.projection is not None or has_final_norm:
        settings["model.final_layer_norm"] = has_final_norm
    return settings


@torch.no_grad()
def fill_(tower: nn.Module, weights: Weights, key: str, projection: nn.Linear | None = None) -> list[str]:
    """Fills the tower of a run with that of the same side, in place.

    Rules for what need not be equal:
        image size     position rows are interpolated bicubically, with antialiasing for CLIP (as open_clip), without
                       it for the other kind (as DeiT's authors); those of a stem as timm does it
        captions       the first data.context_length position rows are taken; more than the weights have is an error.
                       Several class tokens on top of BERT take its first rows
        colours        inputs stay normalised as CLIP's; the weights' mean and std go into the patch embedding
        projection     new, like the last LayerNorm, where the weights have none (ViT, DeiT, BERT); left out where the
                       tower has none

    Args:
        projection: of a tower without one; takes the weights' projection, and a bias of 0.

    Returns:
        Names of the parameters that are filled.
    """
    if not hasattr(tower, "transformer"):
        raise WeightsError(
            f"{key}: a tower of no layers takes weights through its stem; expected: model.*.layers above 0"
        )
    is_image = isinstance(tower, VisionTransformer)
    source = weights.image_tower if is_image else weights.text_tower
    if source is None:
        side, other = ("image", "text") if is_image else ("text", "image")
        raise WeightsError(f"{key} = {weights.source} has no {side} tower; expected: model.{other}.init for the other")
    ours, theirs = settings_of(tower), settings_of(source)
    unlike = {name: value for name, value in theirs.items() if ours.get(name, value) != value}
    if projection is not None and source.projection is not None:
        ours["model.embedding_dim"] = projection.out_features
        if theirs["model.embedding_dim"] != projection.out_features:
            unlike["model.embedding_dim"] = theirs["model.embedding_dim"]
    rows, source_rows = len(tower.position_embedding), len(source.position_embedding)
    if not is_image and rows > source_rows:
        unlike["data.context_length"] = source.context_length
        ours["data.context_length"] = tower.context_length
    if unlike:
        settings = [f"{name}={str(value).lower()}" for name, value in unlike.items() if name.startswith("model.")]
        fit = f"; as the weights have it: {' '.join(settings)}" if settings else ""
        differences = "; ".join(f"{name} = {ours[name]}, in the weights {value}" for name, value in unlike.items())
        raise WeightsError(f"{key} = {weights.source} does not fit: {differences}{fit}")
    # settings agree; what may differ is adapted: positions to the size of images or captions, colours to CLIP's
    state = dict(source.state_dict())
    if is_image:
        grid, tokens = tower.image_size // tower.patch_size, tower.num_class_tokens
        antialias = tower.patch_embedding.bias is None
        state["position_embedding"] = interpolate_positions(state["position_embedding"], tokens, grid, antialias)
        if source.stem is not None:
            state |= {f"stem.{name}": value for name, value in source.stem.state_at(tower.image_size).items()}
    else:
        state["position_embedding"] = state["position_embedding"][:rows]
    pixels = weights.pixels
    if is_image and pixels is not None and (pixels.mean, pixels.std) != (CLIP_MEAN, CLIP_STD):
        if source.stem is not None:
            raise WeightsError(f"{key} = {weights.source} has a stem and mean = {pixels.mean}; expected CLIP's colours")
        _fold_colours_(state, pixels, source.num_class_tokens)
    source_projection = state.get("projection")
    if tower.projection is None:
        state.pop("projection", None)
    left = tower.load_state_dict(state, strict=False).unexpected_keys
    if left:
        raise WeightsError(f"{key} = {weights.source} has {', '.join(left)}, which the tower of this run lacks")
    if projection is not None and source_projection is not None:
        projection.weight.copy_(source_projection.T)
        if projection.bias is not None:
            projection.bias.zero_()
    return [name for name, _ in tower.named_parameters() if name in state]


def _fold_colours_(state: dict[str, torch.Tensor], pixels: ImageTransform, num_class_tokens: int) -> None:
    # Makes a patch embedding of pixels (p - mean) / std one of pixels normalised as CLIP's; exact, as nothing pads.
    #
    # What is constant goes into the bias; CLIP's kind has none, and there into the position rows of the patches.
    colours = pixels.mean, pixels.std, CLIP_MEAN, CLIP_STD
    mean, std, clip_mean, clip_std = (torch.tensor(values).view(3, 1, 1) for values in colours)
    weight = state["patch_embedding.weight"] / std
    constant = (weight * (clip_mean - mean)).sum(dim=(1, 2, 3))
    if "patch_embedding.bias" in state:
        state["patch_embedding.bias"] = state["patch_embedding.bias"] + constant
    else:
        classes, patches = state["position_embedding"].tensor_split([num_class_tokens])
        state["position_embedding"] = torch.cat([classes, patches + constant])
    state["patch_embedding.weight"] = weight * clip_std


def lock_(tower: nn.Module, filled: Iterable[str], lowest: int | str) -> None:
    """Removes the gradient of what the weights have filled: all of it, or the embeddings and the lowest blocks.

    Args:
        filled: from `fill_`; a new projection always trains.
        lowest: "all", or how many blocks.
    """
    parameters = dict(tower.named_parameters())
    for name in filled:
        block = re.match(r"transformer\.blocks\.(\d+)\.", name)
        height = int(block[1]) if block else float("inf") if name.startswith(("final_norm", "projection")) else -1
        # nothing locked changes in train mode: towers have no running statistics, and a locked stem is frozen
        if lowest == "all" or height < lowest:
            parameters[name].requires_grad_(False)
