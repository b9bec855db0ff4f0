"""The two released checkpoints of the paper, CLIP and Multi(32, 16) with ViT-B/16, loaded into our model.

    model = load_released("vit-b16_mt-ob-32-16_e32_f32k_2.pt")

Their layout: an image tower as in OpenAI's CLIP, with several class embeddings; a text tower of PyTorch's
TransformerEncoderLayer (post-norm, exact GELU) with a LayerNorm on the embeddings, 8 heads, vocabulary of
bert-base-uncased. The files were not available here. Names and shapes come from the released code, and the tests fill
them with random numbers. The released `forward` returns inner products without the temperature.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from common.encoders.two_towers import TwoTowers
from common.encoders.weights import (
    NOT_STATED,
    OPEN_CLIP,
    Heads,
    Layout,
    WeightsError,
    count_blocks,
    heads_of,
    read_weights,
    two_towers_from,
    without_ddp,
)
from common.oblique import Oblique

DECIDES = "evaluation"

END_ID = 102  # [SEP] of bert-base-uncased
MAXIMA = {1: 100.0, 16: 3.95}  # upper bound of the multiplier by class tokens (Table 5)
RELEASED = Layout(
    OPEN_CLIP.single | {"text_tower.input_norm.*": "ln_embedding.*"},
    OPEN_CLIP.image_blocks,
    (  # PyTorch's names
        "transformer.encoder.layers.",
        ("norm1.*", "self_attn.in_proj_*", "self_attn.out_proj.*", "norm2.*", "linear1.*", "linear2.*"),
    ),
)


def load_released(path: str | Path, heads: Heads = NOT_STATED) -> TwoTowers:
    """The model of a released file, see `from_released`; no code in the file is executed."""
    return from_released(read_weights(path), str(path), heads)


def from_released(state: Mapping[str, torch.Tensor], source: str = "state", heads: Heads = NOT_STATED) -> TwoTowers:
    """The model of a state dict in the released layout; other sizes come from the shapes.

    Args:
        source: named in errors.
        heads: as the user states them, for sizes that are those of no published CLIP (as released: 12 and 8).
    Returns:
        TwoTowers in eval mode; its geometry is the sphere for one class token, else the product of spheres. Captions
        longer than the released code's 77 ids are an error, as there.
    Raises:
        WeightsError: tensors that are missing, left over, of another shape or not finite; heads that do not divide a
            width.
    """
    state = without_ddp(state)
    missing = [name for name in ("visual.class_embedding", "text_projection") if name not in state]
    if missing:
        raise WeightsError(f"{source} is no released checkpoint of the oblique-topology paper: it lacks {missing[0]}")
    tokens, width = torch.atleast_2d(state["visual.class_embedding"]).shape  # OpenAI's single one is a vector
    text_width, projection_dim = state["text_projection"].shape
    image_heads = heads_of("image", width, count_blocks(state, RELEASED.image_blocks[0]), heads["image"], source)
    text_heads = heads_of("text", text_width, count_blocks(state, RELEASED.text_blocks[0]), heads["text"], source)
    image, text = {"heads": image_heads}, {"heads": text_heads, "end_id": END_ID}
    model = two_towers_from(state, RELEASED, image, text, source, maximum=MAXIMA.get(tokens))
    if tokens == 1:
        return model
    return TwoTowers(model.image_tower, model.text_tower, Oblique(projection_dim), model.logit_scale).eval()
