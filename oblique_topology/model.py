"""The models of the oblique-topology paper.

What differs from plain CLIP, for the sphere baseline ("CLIP [our-impl.]"):
    1. the text tower is bidirectional and post-norm, in BERT's order, and reads out its class token;
    2. prompts are combined by averaging scores, not embeddings (evaluate.py).
"""

from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Geometry, Sphere
from common.logit_scale import LogitScale
from oblique_topology.config import Config


def build_geometry(config: Config) -> Geometry:
    """The geometry that the row names."""
    geometries = {"sphere": Sphere}
    return geometries[config.method.geometry]()


def build_model(config: Config, vocabulary_size: int, end_id: int | None = None) -> TwoTowers:
    """Both towers with random weights, the geometry and the logit scale.

    Args:
        config: of one row.
        vocabulary_size: of the tokenizer.
        end_id: of the tokenizer; captions end there, whatever id pads them. None = they end where padding begins.
    """
    model, data, method = config.model, config.data, config.method
    image_tower = VisionTransformer(
        image_size=data.image_size,
        patch_size=model.patch_size,
        width=model.image.width,
        layers=model.image.layers,
        heads=model.image.heads,
        mlp_ratio=model.image.mlp_ratio,
        projection_dim=model.embedding_dim,
        final_layer_norm=model.final_layer_norm,
        patch_dropout=model.patch_dropout,
        gradient_checkpointing=model.gradient_checkpointing,
    )
    text_tower = BidirectionalTextTransformer(
        vocabulary_size=vocabulary_size,
        end_id=end_id,
        context_length=data.context_length,
        width=model.text.width,
        layers=model.text.layers,
        heads=model.text.heads,
        mlp_ratio=model.text.mlp_ratio,
        projection_dim=model.embedding_dim,
        final_layer_norm=model.final_layer_norm,
        gradient_checkpointing=model.gradient_checkpointing,
    )
    logit_scale = LogitScale(
        init=method.logit_scale_init,
        minimum=method.logit_scale_min,
        maximum=method.logit_scale_max,
        trainable=method.logit_scale_trainable,
    )
    return TwoTowers(image_tower, text_tower, build_geometry(config), logit_scale)
