"""Towers with random weights, as the shared sections of a config describe them."""

from common.data.tokenizer import Tokenizer
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.vision import VisionTransformer
from common.run.config import DataConfig, ModelConfig


def vision_transformer(data: DataConfig, model: ModelConfig, num_class_tokens: int = 1) -> VisionTransformer:
    """The image tower.

    Args:
        data: gives the size of a picture.
        model: sizes.
        num_class_tokens: each has its own output of model.embedding_dim numbers.
    """
    return VisionTransformer(
        image_size=data.image_size,
        patch_size=model.patch_size,
        width=model.image.width,
        layers=model.image.layers,
        heads=model.image.heads,
        mlp_ratio=model.image.mlp_ratio,
        projection_dim=model.embedding_dim,
        num_class_tokens=num_class_tokens,
        final_layer_norm=model.final_layer_norm,
        patch_dropout=model.patch_dropout,
        gradient_checkpointing=model.gradient_checkpointing,
    )


def causal_text_transformer(data: DataConfig, model: ModelConfig, tokenizer: Tokenizer) -> CausalTextTransformer:
    """CLIP's text tower.

    Args:
        data: gives the length of a caption.
        model: sizes.
        tokenizer: gives the number of ids and the end token.
    """
    return CausalTextTransformer(
        vocabulary_size=tokenizer.vocabulary_size,
        context_length=data.context_length,
        width=model.text.width,
        layers=model.text.layers,
        heads=model.text.heads,
        mlp_ratio=model.text.mlp_ratio,
        projection_dim=model.embedding_dim,
        end_id=tokenizer.end_id,
        final_layer_norm=model.final_layer_norm,
        gradient_checkpointing=model.gradient_checkpointing,
    )


def bidirectional_text_transformer(
    data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, num_class_tokens: int = 1
) -> BidirectionalTextTransformer:
    """BERT's order, with a projection.

    Args:
        data: gives the length of a caption.
        model: sizes.
        tokenizer: gives the number of ids, and the end token, after which all is padding.
        num_class_tokens: each has its own output of model.embedding_dim numbers.
    """
    return BidirectionalTextTransformer(
        vocabulary_size=tokenizer.vocabulary_size,
        context_length=data.context_length,
        width=model.text.width,
        layers=model.text.layers,
        heads=model.text.heads,
        mlp_ratio=model.text.mlp_ratio,
        projection_dim=model.embedding_dim,
        num_class_tokens=num_class_tokens,
        end_id=tokenizer.end_id,
        final_layer_norm=model.final_layer_norm,
        gradient_checkpointing=model.gradient_checkpointing,
    )
