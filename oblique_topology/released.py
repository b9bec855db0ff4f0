"""The two released checkpoints of the paper, CLIP and Multi(32, 16) with ViT-B/16, in our model.

    model = load_released("vit-b16_mt-ob-32-16_e32_f32k_2.pt")

Their layout: an image tower as in OpenAI's CLIP but with rows of class embeddings, a text tower of PyTorch's own
TransformerEncoderLayer (post-norm, exact GELU) with a LayerNorm on the embeddings, 8 heads, vocabulary of
bert-base-uncased. The files could not be had here: names and shapes are those of the released code, which builds the
model, and the tests fill them with random numbers. Its `forward` returns inner products without the temperature.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.encoders.weights import WeightsError, read_weights
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.oblique import Oblique

HEAD_WIDTH = 64  # of both towers
END_ID = 102  # [SEP] of bert-base-uncased
MAXIMA = {1: 100.0, 16: 3.95}  # upper bound of the multiplier by class tokens (Table 5)

# our name -> theirs; {i} is a block
_ONCE = {
    "image_tower.patch_embedding.weight": "visual.conv1.weight",
    "image_tower.class_embedding": "visual.class_embedding",
    "image_tower.position_embedding": "visual.positional_embedding",
    "image_tower.input_norm.*": "visual.ln_pre.*",
    "image_tower.final_norm.*": "visual.ln_post.*",
    "image_tower.projection": "visual.proj",
    "text_tower.token_embedding.weight": "token_embedding.weight",
    "text_tower.position_embedding": "positional_embedding",
    "text_tower.input_norm.*": "ln_embedding.*",
    "text_tower.final_norm.*": "ln_final.*",
    "text_tower.projection": "text_projection",
    "logit_scale.log_logit_scale": "logit_scale",
}
_IMAGE_BLOCK = {
    "attention_norm.*": "ln_1.*",
    "attention.in_projection.*": "attn.in_proj_*",
    "attention.out_projection.*": "attn.out_proj.*",
    "mlp_norm.*": "ln_2.*",
    "mlp.0.*": "mlp.c_fc.*",
    "mlp.2.*": "mlp.c_proj.*",
}
_TEXT_BLOCK = {
    "attention.in_projection.*": "self_attn.in_proj_*",
    "attention.out_projection.*": "self_attn.out_proj.*",
    "attention_norm.*": "norm1.*",
    "mlp.0.*": "linear1.*",
    "mlp.2.*": "linear2.*",
    "mlp_norm.*": "norm2.*",
}


def load_released(path: str | Path) -> TwoTowers:
    """A released file; see `from_released`. Nothing in it is executed."""
    return from_released(read_weights(path), str(path))


def from_released(state: Mapping[str, torch.Tensor], source: str = "state") -> TwoTowers:
    """The model of a state dict in the released layout; all sizes are read off the shapes.

    Args:
        state: as the released code saves it.
        source: named in errors.
    Returns:
        TwoTowers in eval mode, on the sphere where there is one class token, else on the product of spheres. Captions
        longer than the released code's 77 ids are refused, as there.
    Raises:
        WeightsError: tensors that are missing, left over, or of another shape.
    """
    layers = [
        _count(state, pattern) for pattern in (r"visual\.transformer\.resblocks\.", r"transformer\.encoder\.layers\.")
    ]
    names = _names(*layers)
    missing, left = sorted(set(names.values()) - set(state)), sorted(set(state) - set(names.values()))
    if missing or left:
        raise WeightsError(
            f"{source} is no released checkpoint of the oblique-topology paper: it lacks {len(missing)} tensors "
            f"({', '.join(missing[:3])}), {len(left)} have no place ({', '.join(left[:3])})"
        )
    width, _, patch_size, _ = state["visual.conv1.weight"].shape
    tokens = len(state["visual.class_embedding"])
    grid = round((len(state["visual.positional_embedding"]) - tokens) ** 0.5)
    text_width, projection_dim = state["text_projection"].shape
    with torch.device("meta"):
        image_tower = VisionTransformer(
            grid * patch_size,
            patch_size,
            width,
            layers[0],
            width // HEAD_WIDTH,
            projection_dim,
            num_class_tokens=tokens,
        )
        text_tower = BidirectionalTextTransformer(
            vocabulary_size=len(state["token_embedding.weight"]),
            context_length=len(state["positional_embedding"]) - tokens + 1,
            width=text_width,
            layers=layers[1],
            heads=text_width // HEAD_WIDTH,
            projection_dim=projection_dim,
            num_class_tokens=tokens,
            end_id=END_ID,
        )
    geometry = Sphere() if tokens == 1 else Oblique(projection_dim)
    model = TwoTowers(image_tower, text_tower, geometry, LogitScale(1 / 0.07, maximum=MAXIMA.get(tokens)))
    filled = {ours: state[theirs].detach().float().clone() for ours, theirs in names.items()}
    filled["logit_scale.log_logit_scale"] = filled["logit_scale.log_logit_scale"].reshape(1)
    wrong = [name for name, tensor in model.state_dict().items() if tensor.shape != filled[name].shape]
    if wrong:
        raise WeightsError(
            f"{source}: {names[wrong[0]]} has shape {tuple(filled[wrong[0]].shape)}, {wrong[0]} is "
            f"{tuple(model.state_dict()[wrong[0]].shape)}"
        )
    model.load_state_dict(filled, assign=True)
    return model.eval()


def _names(image_layers: int, text_layers: int) -> dict[str, str]:
    """Our name of every tensor -> the released one."""
    names = dict(_ONCE)
    for i in range(image_layers):
        ours, theirs = f"image_tower.transformer.blocks.{i}", f"visual.transformer.resblocks.{i}"
        names |= {f"{ours}.{key}": f"{theirs}.{name}" for key, name in _IMAGE_BLOCK.items()}
    for i in range(text_layers):
        ours, theirs = f"text_tower.transformer.blocks.{i}", f"transformer.encoder.layers.{i}"
        names |= {f"{ours}.{key}": f"{theirs}.{name}" for key, name in _TEXT_BLOCK.items()}
    return {
        ours.replace("*", part): theirs.replace("*", part)
        for ours, theirs in names.items()
        for part in (("weight", "bias") if "*" in ours else ("",))
    }


def _count(state: Mapping[str, torch.Tensor], pattern: str) -> int:
    """Blocks whose names begin with the pattern."""
    found = [int(match.group(1)) for name in state if (match := re.match(rf"{pattern}(\d+)\.", name))]
    return max(found, default=-1) + 1
