"""The model: CLIP's towers with my geometry."""

from common.data.tokenizer import Tokenizer
from common.encoders.from_config import causal_text_transformer, vision_transformer
from common.encoders.two_towers import TwoTowers
from common.geometry import Sphere
from common.logit_scale import LogitScale
from my_geometry.config import Config
from my_geometry.geometry import Ball

GEOMETRIES = {"ball": Ball, "sphere": Sphere}


def build_model(config: Config, tokenizer: Tokenizer) -> TwoTowers:
    """Both towers with random weights, the row's geometry, and the logit scale."""
    image_tower = vision_transformer(config.data, config.model)
    text_tower = causal_text_transformer(config.data, config.model, tokenizer)
    geometry = GEOMETRIES[config.method.geometry]()
    return TwoTowers(image_tower, text_tower, geometry, LogitScale.from_config(config.method))
