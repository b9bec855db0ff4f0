"""The models of the oblique-topology paper.

What differs from plain CLIP, for the sphere baseline ("CLIP [our-impl.]"):
    1. the text tower is bidirectional and post-norm, in BERT's order, and reads out its class token;
    2. prompts are combined by averaging scores, not embeddings (evaluate.py).
"""

from common.data.tokenizer import Tokenizer
from common.encoders.from_config import bidirectional_text_transformer, vision_transformer
from common.encoders.two_towers import TwoTowers
from common.geometry import Geometry, Sphere
from common.logit_scale import LogitScale
from oblique_topology.config import Config


def build_geometry(config: Config) -> Geometry:
    """The geometry that the row names."""
    geometries = {"sphere": Sphere}
    return geometries[config.method.geometry]()


def build_model(config: Config, tokenizer: Tokenizer) -> TwoTowers:
    """Both towers with random weights, the geometry and the logit scale.

    Args:
        config: of one row.
        tokenizer: gives the number of ids and the end token.
    """
    image_tower = vision_transformer(config.data, config.model)
    text_tower = bidirectional_text_transformer(config.data, config.model, tokenizer)
    return TwoTowers(image_tower, text_tower, build_geometry(config), LogitScale.from_config(config.method))
