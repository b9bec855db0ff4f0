"""The models of the oblique-topology paper.

What differs from plain CLIP:
    1. embeddings lie on a product of spheres, or in the plain space, and are compared there (geometry.py);
    2. Multi(n, m): both towers have m class tokens, one per sphere. They share the tower's projection, a matrix to n
       numbers without bias. They differ by class embedding and position row (images), or only by position row
       (captions, whose class id is repeated). Token k of an image is compared only with token k of a caption;
    3. Ob(n, m): one class token, whose n m numbers are cut into m spheres. It has as many parameters as the sphere;
    4. the text tower is bidirectional and post-norm, in BERT's order, and outputs its class tokens;
    5. the multiplier has an upper bound, 100 or, for Multi(32, 16), 3.95, and still learns at the bound;
    6. prompts are combined by averaging scores, not embeddings (evaluate.py).
"""

from dataclasses import replace

from common.data.tokenizer import Tokenizer
from common.encoders.from_config import bidirectional_text_transformer, vision_transformer
from common.encoders.two_towers import TwoTowers
from common.geometry import Geometry, Sphere
from common.logit_scale import LogitScale
from common.oblique import Oblique
from oblique_topology.config import Config
from oblique_topology.geometry import L2, ObliqueGeodesic, max_average


def build_geometry(config: Config) -> Geometry:
    """The geometry that the row names."""
    geometries = {
        "sphere": Sphere,
        "euclidean": L2,
        "oblique": lambda: Oblique(config.sphere_dim),
        "oblique_geodesic": lambda: ObliqueGeodesic(config.sphere_dim),
        "max_average": lambda: max_average(config.sphere_dim),
    }
    return geometries[config.method.geometry]()


def build_model(config: Config, tokenizer: Tokenizer) -> TwoTowers:
    """Both towers with random weights, the geometry and the logit scale."""
    tokens = config.num_class_tokens
    per_token = replace(config.model, embedding_dim=config.model.embedding_dim // tokens)
    image_tower = vision_transformer(config.data, per_token, tokens)
    text_tower = bidirectional_text_transformer(config.data, per_token, tokenizer, tokens)
    return TwoTowers(image_tower, text_tower, build_geometry(config), LogitScale.from_config(config.method))
