"""Towers of this repository from a foreign state dict, sized by the shapes of its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.base.arguments import some
from common.data.transforms import ImageTransform
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.transformer import Activation, QuickGELU, Transformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.encoders.weights.heads import NOT_STATED, Heads, heads_of
from common.encoders.weights.keys import TRANSFORMERS, check_keys, check_patches_of, refused
from common.encoders.weights.layouts import (
    ARCHIVE_NUMBERS,
    LOGIT_BIAS,
    OPEN_CLIP,
    TRANSFORMERS_CLIP,
    Layout,
    State,
    WeightsError,
    count_blocks,
    in_our_names,
    put_,
    tower_entries,
    without_ddp,
)
from common.geometry import Sphere
from common.logit_scale import LogitBias, LogitScale

if TYPE_CHECKING:
    from transformers import CLIPModel, PreTrainedConfig

ONLY_THE_SPHERE = (
    "other code compares by cosine, only the sphere can be exported; scripts/publish.py writes a model folder that "
    "open_model (docs/library.md) and scripts/evaluate.py read"
)
LARGEST_LOG_SCALE = 10.0  # a multiplier of 22,026: more is no logarithm


@dataclass(frozen=True)
class Weights:
    """Published weights in towers of this repository, float32, in eval mode.

    image_tower, text_tower: None where the source has no such side.
    beside: further tensors of a model, under our names: "logit_scale.log_logit_scale", "geometry....".
    geometry: name of the one that both were trained with; None = not trained together.
    num_spheres: of that geometry.
    tokenizer: fingerprint of the one that made the ids; None = not stated.
    pixels: how they become inputs of the image tower; None = not stated.
    """

    source: str
    image_tower: VisionTransformer | None = None
    text_tower: CausalTextTransformer | BidirectionalTextTransformer | None = None
    beside: State = field(default_factory=dict)
    geometry: str | None = None
    num_spheres: int = 1
    tokenizer: str | None = None
    pixels: ImageTransform | None = None

    def clip(self) -> TwoTowers:
        """Both towers on the sphere."""
        if self.geometry is None:
            raise WeightsError(f"{self.source} has one tower only; expected: a model of pictures and captions")
        if self.geometry != "sphere":
            raise WeightsError(f"{self.source} was trained with geometry {self.geometry!r}: {ONLY_THE_SPHERE}")
        model = _on_the_sphere(self.image_tower, self.text_tower, self.beside)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name in self.beside:
                    value.copy_(self.beside[name])
        return model.eval()


def two_towers_from(
    state: State,
    layout: Layout,
    image: dict[str, Any],
    text: dict[str, Any],
    source: str,
    maximum: float | None = 100.0,
) -> TwoTowers:
    """Two towers from a foreign state dict.

    A text tower with a LayerNorm on its embeddings is BERT's kind, any other CLIP's.

    Args:
        state: all of theirs; buffers that older versions saved are ignored.
        layout: where they keep what. If the state has no final LayerNorm (EuCLIP), neither have the towers.
        image, text: what no shape shows: "heads", and if they are not the usual ones "activation", "norm_eps", "end_id"
            (default: the largest id of a row).
    Returns:
        TwoTowers on the sphere, float32 (float64 where all weights are), in eval mode.
    """
    entries = tower_entries(
        layout, *(count_blocks(state, blocks[0]) for blocks in (layout.image_blocks, layout.text_blocks))
    )
    final_norms = {name for entry in entries if ".final_norm." in entry.ours for name in entry.theirs}
    if not final_norms & state.keys():
        entries = [entry for entry in entries if ".final_norm." not in entry.ours]
    entries = [entry for entry in entries if entry.ours != LOGIT_BIAS or entry.theirs[0] in state]
    tensors = in_our_names(state, entries, source)
    stored = tensors["logit_scale.log_logit_scale"]
    scale = 0.0 if stored.is_meta else stored.max().item()
    if scale > LARGEST_LOG_SCALE:
        raise WeightsError(
            f"{source}: logit_scale is {scale:.4g}, a multiplier of e^{scale:.4g}; expected its logarithm, at most "
            f"{LARGEST_LOG_SCALE:g} (CLIP: {math.log(100):.4g}). If it is the multiplier, store {math.log(scale):.4g}"
        )
    model = _on_the_sphere(*towers_of_sizes(tensors, image, text, source), tensors, maximum)
    put_(model, tensors, entries, source, kept=[])
    return model.eval()


def _on_the_sphere(
    image_tower: nn.Module, text_tower: nn.Module, tensors: State, maximum: float | None = 100.0
) -> TwoTowers:
    # with a bias where the tensors have one
    bias = LogitBias() if LOGIT_BIAS in tensors else None
    return TwoTowers(image_tower, text_tower, Sphere(), LogitScale(init=1 / 0.07, maximum=maximum), bias)


def towers_of_sizes(
    tensors: State, image: dict[str, Any], text: dict[str, Any], source: str
) -> tuple[VisionTransformer, CausalTextTransformer | BidirectionalTextTransformer]:
    """Towers on the meta device, with the sizes of tensors under our names."""
    image_tensors, text_tensors = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in ("image_tower.", "text_tower.")
    )
    first_layer = "transformer.blocks.0.mlp.0.weight"
    needed = [("image_tower", name) for name in ("patch_embedding.weight", "class_embedding", "position_embedding")]
    needed += [("text_tower", name) for name in ("token_embedding.weight", "position_embedding")]
    needed += [("image_tower", first_layer), ("text_tower", first_layer)]
    missing = [".".join(name) for name in needed if ".".join(name) not in tensors]
    if missing:
        raise WeightsError(f"{source} has no {some(missing)}; expected the weights of two transformers")
    width, _, patch_size, _ = image_tensors["patch_embedding.weight"].shape
    embedding = text_tensors["token_embedding.weight"]
    vocabulary_size, text_width = embedding.shape
    if text.get("stem") is not None:  # a linear map of its tokens
        vocabulary_size, text_width = text["stem"].network.vocabulary_size, len(embedding)
    # some layouts keep class and position rows with further axes of length 1, so rows are counted by numbers
    num_class_tokens = image_tensors["class_embedding"].numel() // width
    num_patches = image_tensors["position_embedding"].numel() // width - num_class_tokens
    context_length = text_tensors["position_embedding"].numel() // text_width
    grid = round(num_patches**0.5)
    if grid**2 != num_patches:
        raise WeightsError(
            f"{source} was trained on pictures that are not square ({num_patches} patches); expected a "
            "square number of patches"
        )
    for side, tower_width, heads in (("image", width, image["heads"]), ("text", text_width, text["heads"])):
        if not heads or heads < 0 or tower_width % heads:
            raise WeightsError(
                f"{source}: the {side} tower's width {tower_width} cannot be cut into {heads} heads; expected: "
                f"{side}_heads that divide it"
            )
    with torch.device("meta"):  # no memory: the tensors of the state replace these
        stem = image.get("stem")
        patch_size = patch_size if stem is None else stem.image_size // stem.grid
        image_tower = VisionTransformer(
            image_size=grid * patch_size,
            patch_size=patch_size,
            num_class_tokens=num_class_tokens,
            patch_bias="patch_embedding.bias" in image_tensors,
            input_norm="input_norm.weight" in image_tensors,
            **_read_sizes(image_tensors, width),
            **image,
        )
        shared = _read_sizes(text_tensors, text_width) | {"vocabulary_size": vocabulary_size}
        shared |= {"end_id": None} | text
        if "input_norm.weight" in text_tensors:  # its class tokens share one embedding and have a position each
            length = context_length - num_class_tokens + 1
            text_tower = BidirectionalTextTransformer(
                context_length=length, num_class_tokens=num_class_tokens, **shared
            )
        else:
            text_tower = CausalTextTransformer(context_length=context_length, **shared)
    return image_tower, text_tower


def _read_sizes(tensors: State, width: int) -> dict[str, Any]:
    # The arguments that every tower takes, from its tensors under our names.
    return {
        "width": width,
        "layers": count_blocks(tensors, "transformer.blocks."),
        "projection_dim": tensors["projection"].shape[1] if "projection" in tensors else None,
        "mlp_ratio": tensors["transformer.blocks.0.mlp.0.weight"].shape[0] / width,
        "final_layer_norm": "final_norm.weight" in tensors,
    }


def clip_from_open_clip(
    state: State,
    activation: Activation,
    source: str = "state",
    heads: Heads = NOT_STATED,
    image: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
) -> TwoTowers:
    """CLIP from a state dict in OpenAI's layout, which open_clip shares.

    Args:
        state: "visual.conv1.weight", ...; open_clip's "text." and the prefixes of `without_ddp` are understood.
        activation: "quick_gelu" for OpenAI's weights and those trained from them, "gelu" for most of open_clip's. The
            weights do not state it, and the wrong one costs accuracy without an error.
        heads: as in `read_source`; a tower of published sizes (`PUBLISHED`) has the heads of that model.
        image, text: what else no shape shows, as in `two_towers_from`; "heads" there come first.
    """
    # open_clip's custom text towers have a prefix of their own, OpenAI's archives numbers that are no weights
    state = {name.removeprefix("text."): value for name, value in without_ddp(state).items()}
    state = {name: value for name, value in state.items() if name not in ARCHIVE_NUMBERS}
    if "visual.conv1.weight" not in state or "visual.layer1.0.conv1.weight" in state:
        raise WeightsError(
            f"{source} is no CLIP with a vision transformer: it has no patch embedding visual.conv1.weight"
        )
    widths = {"image": len(state["visual.conv1.weight"])}
    if "token_embedding.weight" in state:  # else it is missed below
        widths["text"] = state["token_embedding.weight"].shape[1]
    blocks = {"image": OPEN_CLIP.image_blocks, "text": OPEN_CLIP.text_blocks}
    stated = {side: {"activation": activation, **(more or {})} for side, more in (("image", image), ("text", text))}
    for side, width in widths.items():
        if "heads" not in stated[side]:
            layers = count_blocks(state, blocks[side][0])
            stated[side]["heads"] = heads_of(side, width, layers, heads.get(side, 1), source)
    return two_towers_from(state, OPEN_CLIP, stated["image"], stated["text"], source)


def clip_from_transformers(model: "CLIPModel") -> TwoTowers:
    """CLIP from transformers' model, with its activation and LayerNorm eps."""
    source = model.config.name_or_path or "the transformers model"
    check_config(model.config, source)
    image, text = (
        {
            "heads": side.num_attention_heads,
            "activation": our_activation(side.hidden_act),
            "norm_eps": side.layer_norm_eps,
        }
        for side in (model.config.vision_config, model.config.text_config)
    )
    vision, end_id = model.config.vision_config, model.config.text_config.eos_token_id
    check_patches_of(vision.image_size, vision.patch_size, f"{source}: vision_config.")
    if not isinstance(end_id, int):
        raise refused(f"{source}: text_config.", "eos_token_id", end_id, "expected one id")
    if end_id != 2:
        # id 2 stands in configurations older than the tokenizer's; transformers then reads out the largest id of a row
        text["end_id"] = end_id
    return two_towers_from(model.state_dict(), TRANSFORMERS_CLIP, image, text, source)


def check_config(config: "PreTrainedConfig", source: str) -> None:
    """`check_keys` for a configuration of transformers and its sections."""
    table = TRANSFORMERS[config.model_type]
    check_keys({key: getattr(config, key) for key in table if hasattr(config, key)}, table, f"{source}: ")
    for section in ("vision_config", "text_config"):
        if section in table:
            check_config(getattr(config, section), f"{source}: {section}")


def sizes_of(transformer: Transformer) -> dict[str, Any]:
    """Sizes of a transformer of ours, under the names of transformers' configurations."""
    first = transformer.blocks[0]
    return {
        "num_hidden_layers": len(transformer.blocks),
        "num_attention_heads": first.attention.heads,
        "intermediate_size": first.mlp[0].out_features,
        "hidden_act": "quick_gelu" if isinstance(first.mlp[1], QuickGELU) else "gelu",
        "layer_norm_eps": first.mlp_norm.eps,
    }


def our_activation(name: str) -> Activation:
    """The name of an activation that our towers have."""
    if name not in ("gelu", "quick_gelu"):
        raise WeightsError(f"activation {name!r}; expected: gelu, quick_gelu")
    return name
