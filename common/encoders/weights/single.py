"""One tower from a model of transformers: ViT and DeiT for images, BERT for captions and fusion."""

from typing import TYPE_CHECKING, Any

import torch

from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.transformer import Transformer
from common.encoders.vision import VisionTransformer
from common.encoders.weights.keys import check_patches_of, square
from common.encoders.weights.layouts import (
    BERT_BLOCK,
    OLDER_VIT_BLOCK,
    VIT_BLOCK,
    WeightsError,
    block_entries,
    entries_of,
    in_our_names,
    put_,
)
from common.encoders.weights.towers import check_config, our_activation, sizes_of

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertModel, DeiTModel, ViTModel


def vit_tower(model: "ViTModel | DeiTModel", **sizes: Any) -> VisionTransformer:
    """A tower of timm's kind with the weights of a ViT or DeiT, in eval mode.

    Args:
        model: its pooler is not used; a distillation token becomes a second class token.
        sizes: what every tower takes (width, layers, heads, ...), from the configuration.
    """
    source = model.config.name_or_path or "the ViT"
    check_config(model.config, source)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("pooler.")}
    class_tokens = [name for name in ("cls_token", "distillation_token") if f"embeddings.{name}" in state]
    sides = [square(getattr(model.config, word), f"{source}: ", word) for word in ("image_size", "patch_size")]
    check_patches_of(*sides, f"{source}: ")
    tower = VisionTransformer(*sides, num_class_tokens=len(class_tokens), patch_bias=True, input_norm=False, **sizes)
    entries = entries_of(
        {
            "class_embedding": f"embeddings.{{{','.join(class_tokens)}}}",
            "position_embedding": "embeddings.position_embeddings",
            "patch_embedding.*": "embeddings.patch_embeddings.projection.*",
            "final_norm.*": "layernorm.*",
        }
    )
    # the names became shorter in the course of transformers 5
    short = "layers.0.attention.q_proj.weight" in state
    prefix, names = ("layers.", VIT_BLOCK) if short else ("encoder.layer.", OLDER_VIT_BLOCK)
    entries += block_entries("transformer.blocks.", prefix, names, sizes["layers"])
    put_(tower, in_our_names(state, entries, source), entries, source, kept=[])
    return tower.eval()


def load_bert_(
    model: "BertModel | BertForMaskedLM",
    text_tower: BidirectionalTextTransformer,
    fusion: FusionTransformer | None = None,
    head: MaskedLanguageHead | None = None,
) -> None:
    """Fills a text tower with BERT's lower layers and, for ALBEF, a fusion transformer with the upper ones, in place.

    The token type of a single sentence is added to the position rows. Cross-attention and a projection of the tower
    stay as they are.

    Args:
        model: its pooler is not used. With a head it must be a BertForMaskedLM.
        text_tower: takes the layers from 0 on; context_length at most BERT's 512.
    """
    config, state = model.config, dict(model.state_dict())
    if not any(name.startswith("bert.") for name in state):
        state = {f"bert.{name}": value for name, value in state.items()}
    source = config.name_or_path or "the BERT"
    check_config(config, source)
    text_layers = len(text_tower.transformer.blocks)
    fusion_layers = 0 if fusion is None else len(fusion.transformer.blocks)
    if text_layers + fusion_layers != config.num_hidden_layers:
        raise WeightsError(
            f"{source} has {config.num_hidden_layers} layers, the text tower takes {text_layers} and the fusion "
            f"{fusion_layers}"
        )
    if head is not None and "cls.predictions.transform.dense.weight" not in state:
        raise WeightsError(f"{source} has no masked-language head; read it as BertForMaskedLM")
    for part in (text_tower, fusion):
        if part is not None:
            _check_same(part.transformer, config)

    # a sentence has one token type, so its row is a constant of all positions
    token_types = state["bert.embeddings.token_type_embeddings.weight"]
    positions = state["bert.embeddings.position_embeddings.weight"] + token_types[0]
    if text_tower.context_length > len(positions):
        raise WeightsError(f"context_length {text_tower.context_length} is above {source}'s {len(positions)} positions")
    state["positions"] = positions[: text_tower.context_length]

    embeddings = {
        "token_embedding.weight": "bert.embeddings.word_embeddings.weight",
        "position_embedding": "positions",
        "input_norm.*": "bert.embeddings.LayerNorm.*",
    }
    # layers from 0 on go to the text tower, those that follow to the fusion
    prefix = "cls.predictions."
    words = {
        "dense.*": f"{prefix}transform.dense.*",
        "norm.*": f"{prefix}transform.LayerNorm.*",
        "bias": f"{prefix}bias",
    }
    blocks = "transformer.blocks.", "bert.encoder.layer.", BERT_BLOCK
    parts = [(text_tower, entries_of(embeddings) + block_entries(*blocks, text_layers))]
    if fusion is not None:
        parts.append((fusion, block_entries(*blocks, fusion_layers, first=text_layers)))
    if head is not None:
        for name, shared in (
            ("decoder.weight", embeddings["token_embedding.weight"]), ("decoder.bias", words["bias"]),
        ):  # fmt: skip
            if not torch.equal(state.get(prefix + name, state[shared]), state[shared]):
                raise WeightsError(
                    f"{source}: {prefix}{name} differs from {shared}, which the masked-language head here takes for "
                    "both; expected equal tensors"
                )
        parts.append((head, entries_of(words)))
    for part, entries in parts:
        kept = [name for name in part.state_dict() if name == "projection" or "cross_attention" in name]
        put_(part, in_our_names(state, entries, source, complete=False), entries, source, kept)


def _check_same(transformer: Transformer, config: Any) -> None:
    # Refuses a configuration of transformers whose eps, heads or activation differ, which no shape shows.
    sizes = sizes_of(transformer)
    _same("norm_eps", sizes["layer_norm_eps"], config.layer_norm_eps)
    _same("heads", sizes["num_attention_heads"], config.num_attention_heads)
    _same("activation", sizes["hidden_act"], our_activation(config.hidden_act))


def _same(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise WeightsError(f"{what} is {ours} here and {theirs} in the weights")
