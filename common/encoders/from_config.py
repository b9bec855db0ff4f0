"""Towers with random weights, from the shared sections of a config.

Each function imports the files of its tower, so that a paper's model.py can be imported for its geometry only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.base.settings import DataConfig, ModelConfig, TowerConfig
    from common.data.tokenizer import Tokenizer
    from common.encoders.stem import PooledStem
    from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
    from common.encoders.text_stem import PooledTextStem, TextStem
    from common.encoders.transformer import Initialisation
    from common.encoders.vision import VisionTransformer


def vision_transformer(
    data: DataConfig,
    model: ModelConfig,
    num_class_tokens: int = 1,
    projected: bool = True,
    initialisation: Initialisation = "clip_image",
) -> VisionTransformer | PooledStem:
    """The image tower; a pooled stem where model.image.layers is 0.

    Args:
        num_class_tokens: each has an output of model.embedding_dim numbers.
        projected: False leaves the projection to the caller, who uses the tokens.
    """
    from common.encoders.stem import PooledStem, Stem
    from common.encoders.vision import VisionTransformer

    stem = model.image.stem
    colours = None if stem.mean is stem.std is None else (stem.mean, stem.std)
    stem = Stem(stem.name, data.image_size, stem.trainable, stem.dropout, colours) if stem.name else None
    if not model.image.layers:
        dim = model.embedding_dim
        if not model.image.projection and dim != stem.channels:
            raise ValueError(
                f"model.embedding_dim = {dim} with model.image.projection = false; expected: {stem.channels}, as the "
                f"features of {stem.name}"
            )
        return PooledStem(stem, dim if projected and model.image.projection else None)
    return VisionTransformer(
        image_size=data.image_size,
        patch_size=model.patch_size,
        num_class_tokens=num_class_tokens,
        patch_bias=model.image_kind == "timm",
        input_norm=model.image_kind != "timm",
        patch_dropout=model.patch_dropout,
        stem=stem,
        initialisation=initialisation,
        **_sizes(model, model.image, projected),
    )


def causal_text_transformer(
    data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, projected: bool = True
) -> CausalTextTransformer | PooledTextStem:
    """CLIP's text tower, with the tokenizer's ids and end token; `projected` as in `vision_transformer`."""
    from common.encoders.text import CausalTextTransformer

    stem = _text_stem(data, model, tokenizer)
    if not model.text.layers:
        return _pooled(stem, model.embedding_dim if projected else None)
    return CausalTextTransformer(
        vocabulary_size=tokenizer.vocabulary_size,
        context_length=data.context_length,
        end_id=tokenizer.end_id,
        stem=stem,
        dropout=model.text.dropout,
        **_sizes(model, model.text, projected),
    )


def bidirectional_text_transformer(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: Tokenizer,
    num_class_tokens: int = 1,
    projected: bool = True,
    vocabulary_size: int | None = None,
) -> BidirectionalTextTransformer | PooledTextStem:
    """A text tower in BERT's order; arguments as in `causal_text_transformer`.

    Args:
        vocabulary_size: number of ids; None = the tokenizer's.
    """
    from common.encoders.text import BidirectionalTextTransformer

    stem = _text_stem(data, model, tokenizer)
    if not model.text.layers:
        return _pooled(stem, model.embedding_dim if projected else None)
    return BidirectionalTextTransformer(
        vocabulary_size=tokenizer.vocabulary_size if vocabulary_size is None else vocabulary_size,
        context_length=data.context_length,
        num_class_tokens=num_class_tokens,
        end_id=tokenizer.end_id,
        stem=stem,
        dropout=model.text.dropout,
        **_sizes(model, model.text, projected),
    )


def _text_stem(data: DataConfig, model: ModelConfig, tokenizer: Tokenizer) -> TextStem | None:
    # The stem of the text tower, of the sizes that `InitialWeights.resolved` has written down.
    from common.encoders.text_stem import TextStem

    stem = model.text.stem
    if not stem.weights:
        return None
    return TextStem(
        stem.trainable, vocabulary_size=tokenizer.vocabulary_size, context_length=data.context_length,
        end_id=tokenizer.end_id, width=stem.width, layers=stem.layers, heads=stem.heads, mlp_ratio=stem.mlp_ratio,
    )  # fmt: skip


def _pooled(stem: TextStem, dim: int | None) -> PooledTextStem:
    from common.encoders.text_stem import PooledTextStem

    return PooledTextStem(stem, dim)


def not_in_tensors(tower: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a tower, as `TowerConfig` has them, that its tensors do not show; null has its meaning."""
    of_null = {"heads": None, "activation": "gelu", "norm_eps": 1.0e-5}
    return {name: value if tower.get(name) is None else tower[name] for name, value in of_null.items()}


def _sizes(model: ModelConfig, tower: TowerConfig, projected: bool = True) -> dict[str, Any]:
    # The arguments that every tower takes.
    return {
        "width": tower.width,
        "layers": tower.layers,
        "mlp_ratio": tower.mlp_ratio,
        **not_in_tensors(vars(tower)),
        "projection_dim": model.embedding_dim if projected else None,
        "final_layer_norm": model.final_layer_norm,
        "gradient_checkpointing": model.gradient_checkpointing,
    }
