"""The model: CLIP's towers with my geometry, and its evaluation."""

from common.data.tokenizer import Tokenizer
from common.encoders.from_config import causal_text_transformer, vision_transformer
from common.encoders.two_towers import TwoTowers
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.run.evaluation import TrainedModels, zero_shot_and_retrieval
from my_geometry.config import Config
from my_geometry.geometry import Ball

PAPER = "my_geometry"
GEOMETRIES = {"ball": Ball, "sphere": Sphere}


def build_model(config: Config, tokenizer: Tokenizer) -> TwoTowers:
    """Both towers with random weights, the row's geometry, and the logit scale."""
    image_tower = vision_transformer(config.data, config.model)
    text_tower = causal_text_transformer(config.data, config.model, tokenizer)
    geometry = GEOMETRIES[config.method.geometry]()
    return TwoTowers(image_tower, text_tower, geometry, LogitScale.from_config(config.method))


MODELS = TrainedModels(PAPER, Config, build_model, zero_shot_and_retrieval)
