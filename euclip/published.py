"""Evaluates published weights like a trained row: MERU, HyCoCLIP, EuCLIP, CLIP of open_clip, OpenAI and transformers.

python euclip/published.py --checkpoint meru_vit_b.pth --layout meru data.source=shards data.root=/data/flickr8k
python euclip/published.py --checkpoint euclip.pt --layout open_clip --geometry euclidean_squared --activation gelu \\
    data.source=shards data.root=/data/flickr8k
python euclip/published.py --checkpoint openai/clip-vit-base-patch32

What differs between the layouts:
    meru         timm's ViT (patch bias, no LayerNorm before the blocks, fixed positions) and a CLIP-like text tower;
                 two buffers normalise the images. With `curv` it is MERU, without it their CLIP on the sphere.
                 HyCoCLIP's code writes the same names: its boxes matter in training only.
    open_clip    CLIP's towers. EuCLIP's fork adds alpha_img, alpha_txt and curvature for hyperbolic models, and the
                 final LayerNorm is optional. No tensor names the geometry in full, so the user does (--geometry).
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.base.config import load_beside_weights
from common.data.clip_tokenizer import ClipTokenizer
from common.data.pairs import open_evaluation_sets
from common.data.transforms import IMAGENET_MEAN, IMAGENET_STD, ImageTransform
from common.encoders.transformer import Activation
from common.encoders.two_towers import TwoTowers
from common.encoders.weights import (
    NOT_STATED,
    OPENAI_BLOCK,
    Heads,
    Layout,
    WeightsError,
    agreed_activation,
    agreed_heads,
    clip_from_open_clip,
    count_blocks,
    heads_in,
    heads_of,
    read_bare,
    read_source,
    read_weights,
    two_towers_from,
    without_ddp,
)
from common.evaluation.embed import Encoder
from common.geometry import clamp_scalars_
from common.run.evaluation import (
    answer_of_published,
    check_layout,
    command_line,
    evaluate_if_run,
    published_encoder,
    this_device,
)
from common.run.launch import join_processes, run_or_explain
from euclip.config import Config, GeometryName, MethodConfig
from euclip.evaluate import MODELS, PAPER
from euclip.model import build_geometry
from euclip.suite import evaluate_suite

DECIDES = "evaluation"

LAYOUTS = ("transformers", "open_clip", "meru")
SCALARS = {  # ours -> EuCLIP's fork of open_clip, MERU
    "curvature": ("curvature", "curv"),
    "image_scale": ("alpha_img", "visual_alpha"),
    "text_scale": ("alpha_txt", "textual_alpha"),
}
MERU = Layout(  # of the MERU authors' code; the image tower is timm's
    {
        "image_tower.patch_embedding.*": "visual.patch_embed.proj.*",
        "image_tower.position_embedding": "visual.pos_embed",
        "image_tower.class_embedding": "visual.cls_token",
        "image_tower.final_norm.*": "visual.norm.*",
        "image_tower.projection": "visual_proj.weight.T",
        "text_tower.token_embedding.weight": "textual.token_embed.weight",
        "text_tower.position_embedding": "textual.posit_embed",
        "text_tower.final_norm.*": "textual.ln_final.*",
        "text_tower.projection": "textual_proj.weight.T",
        "logit_scale.log_logit_scale": "logit_scale",
    },
    ("visual.blocks.", ("norm1.*", "attn.qkv.*", "attn.proj.*", "norm2.*", "mlp.fc1.*", "mlp.fc2.*")),
    ("textual.resblocks.", OPENAI_BLOCK),
)
MERU_HEADS = {384: 12, 768: 12, 1024: 16}  # width of the image tower -> heads, of ViT-S, B and L
_LOGIT_SCALES = {  # the fork's names -> how the geometries begin that have them
    "logit_scale": "",
    "eu_logit_scale": "euclidean",
    "hyper_logit_scale": "hyperbolic",
}


def euclip_from_open_clip(
    state: Mapping[str, torch.Tensor],
    geometry: GeometryName,
    activation: Activation = "gelu",
    source: str = "state",
    heads: Heads = NOT_STATED,
) -> TwoTowers:
    """A model of EuCLIP's fork of open_clip, or open_clip's own CLIP.

    Args:
        state: "visual.conv1.weight", ... ; with or without the two final LayerNorms.
        source: named in errors.
        heads: as the user states them, of towers whose sizes no published model has.
    Raises:
        WeightsError: tensors that are missing, left over or not finite; hyperbolic scalars or a logit scale of another
            geometry; heads that do not divide a width.
    Warns:
        UserWarning: the sphere without the final LayerNorms, which every CLIP has.
    """
    state = without_ddp(state)
    if "textual.posit_embed" in state:
        raise WeightsError(f"{source} is in the layout of MERU and HyCoCLIP; expected: --layout meru")
    scales = [name for name in _LOGIT_SCALES if name in state]
    if len(scales) != 1:
        raise WeightsError(f"{source} has {len(scales)} logit scales; expected one of: {', '.join(_LOGIT_SCALES)}")
    space = _LOGIT_SCALES[scales[0]]
    if not geometry.startswith(space):
        expected = f"--geometry {space} or {space}_squared"
        raise WeightsError(f"{source} has {scales[0]}, of a {space} geometry; expected {expected}, got {geometry}")
    if geometry == "sphere" and "visual.ln_post.weight" not in state:
        warnings.warn(
            f"{source} has no final LayerNorm, as EuCLIP, and is read on the sphere; expected --geometry "
            "euclidean_squared, unless it was trained with the cosine",
            stacklevel=2,
        )
    state["logit_scale"] = state.pop(scales[0])
    scalars = _scalars_of(state, 0)
    clip = clip_from_open_clip(state, activation, source, heads)
    model = _with_geometry(clip, geometry, scalars, source)
    clamp_scalars_(model.geometry.scalars())  # the fork keeps a curvature beyond its bounds and clamps it in each pass
    return model


def meru_from_state(state: Mapping[str, torch.Tensor], source: str = "state", heads: Heads = NOT_STATED) -> TwoTowers:
    """MERU, HyCoCLIP, or their authors' CLIP baseline, from MERU's layout; sizes are read off the shapes.

    Args:
        state: "visual.cls_token", "textual.token_embed.weight", "visual_proj.weight", ...
        source: named in errors.
        heads: as the user states them, for widths that are not theirs; of their image towers width / 64, but 12 for the
            width of 384 (their ViT-S follows MoCo v3).
    Raises:
        WeightsError: tensors that are missing or left over.
    """
    state = without_ddp(state)
    for name in ("pixel_mean", "pixel_std"):  # see `meru_pixels`
        state.pop(name, None)
    needed = ("visual.patch_embed.proj.weight", "visual.pos_embed", "textual.posit_embed", "visual_proj.weight")
    missing = [name for name in needed if name not in state]
    if missing:
        raise WeightsError(f"{source} is not in the layout of MERU and HyCoCLIP: it lacks {', '.join(missing)}")
    scalars = _scalars_of(state, 1)
    width, text_width = (state[name].shape[-1] for name in ("visual.pos_embed", "textual.posit_embed"))
    image_heads = MERU_HEADS.get(width)
    if image_heads is None:
        image_heads = heads_of("image", width, count_blocks(state, MERU.image_blocks[0]), heads["image"], source)
    text_heads = heads_of("text", text_width, count_blocks(state, MERU.text_blocks[0]), heads["text"], source)
    model = two_towers_from(state, MERU, {"heads": image_heads}, {"heads": text_heads}, source)
    return _with_geometry(model, "hyperbolic" if scalars else "sphere", scalars, source)


def meru_pixels(state: Mapping[str, torch.Tensor], size: int) -> ImageTransform:
    """Preprocessing of MERU's images: scale, crop, normalise by the two buffers, or by ImageNet's colours without them.

    Args:
        state: as for `meru_from_state`.
        size: input size of the image tower, in pixels.
    """
    state = without_ddp(state)
    colours = (("pixel_mean", IMAGENET_MEAN), ("pixel_std", IMAGENET_STD))
    mean, std = (tuple(state[name].flatten().tolist()) if name in state else usual for name, usual in colours)
    return ImageTransform(size, "crop", mean=mean, std=std)


def _scalars_of(state: dict[str, torch.Tensor], layout: int) -> dict[str, torch.Tensor]:
    """Takes the hyperbolic scalars out of a state dict: our name -> value; empty if it has none."""
    names = {ours: theirs[layout] for ours, theirs in SCALARS.items()}
    return {ours: state.pop(theirs) for ours, theirs in names.items() if theirs in state}


def _with_geometry(clip: TwoTowers, name: GeometryName, scalars: Mapping[str, torch.Tensor], source: str) -> TwoTowers:
    """The same towers and logit scale with another geometry, whose scalars are filled."""
    geometry = build_geometry(MethodConfig(geometry=name), clip.image_tower.projection_dim)
    geometry.to(clip.logit_scale.log_logit_scale.dtype)
    parameters = {scalar.name: scalar.parameter for scalar in geometry.scalars()}
    if set(scalars) != set(parameters):
        raise WeightsError(
            f"{source} has the scalars {sorted(scalars) or 'none'}, geometry {name} has {sorted(parameters) or 'none'}"
        )
    with torch.no_grad():
        for ours, value in scalars.items():
            parameters[ours].fill_(value.item())
    return TwoTowers(clip.image_tower, clip.text_tower, geometry, clip.logit_scale, clip.logit_bias).eval()


def open_published(
    checkpoint: str,
    layout: str,
    geometry: GeometryName,
    activation: Activation | None,
    config: Config,
    device: torch.device,
    heads: Heads = NOT_STATED,
) -> Encoder:
    """Model, preprocessing and tokenizer of published weights.

    Args:
        checkpoint: file of weights; layout transformers: a folder or hub name, or whatever `read_source` takes.
        layout: one of LAYOUTS.
        geometry: of the training; only for layout open_clip.
        activation: of a bare file in open_clip's layout; otherwise the source states it (MERU: gelu).
        config: data.vocabulary names the tokenizer's file, run its batch size.
        heads: of a bare file whose sizes are those of no published model.
    Raises:
        WeightsError, FileNotFoundError, ValueError: the weights cannot be read, or do not fit.
    """
    if geometry != "sphere" and layout != "open_clip":
        raise ValueError(f"geometry {geometry} with layout {layout}, which states its own; expected: layout open_clip")
    check_layout(checkpoint, layout, of_files=LAYOUTS[1:], of_folders=LAYOUTS[:1])
    if layout == "meru":
        agreed_activation(checkpoint, "gelu", activation)
        state = read_weights(checkpoint)
        model = meru_from_state(state, source=checkpoint, heads=heads)
        pixels = meru_pixels(state, model.image_tower.image_size)
    elif layout == "open_clip":
        state, activation, _ = read_bare(Path(checkpoint), activation)
        model, pixels = euclip_from_open_clip(state, geometry, activation, checkpoint, heads=heads), None
    else:
        weights = read_source(checkpoint, activation, heads=heads)
        model, pixels = weights.clip(), weights.pixels
    agreed_heads(checkpoint, heads_in(model), heads)
    tokenizer = ClipTokenizer.from_vocabulary(config.data.vocabulary)
    if layout == "transformers":
        tokenizer.check_beside(weights.source, "model")
    return published_encoder(model, tokenizer, config, device, pixels)


def published_config(overrides: Sequence[str], geometry: str) -> Config:
    """Settings of data and run; the weights state all others.

    Args:
        overrides: "data.key=value" and "run.key=value".
    Raises:
        ConfigError: another section, or data.root for a source that has none.
    """
    return load_beside_weights(Config, overrides, [f"method.geometry={geometry}"])


def main() -> None:
    parser = command_line(__doc__, "file of weights; layout transformers: folder or hub name", published=True)
    parser.add_argument("--layout", help=f"{', '.join(LAYOUTS)}; default: transformers")
    parser.add_argument("--geometry", help="layout open_clip: the geometry of its training, default sphere")
    arguments = parser.parse_intermixed_args()
    join_processes(arguments.overrides)
    if evaluate_if_run(MODELS, arguments):  # a checkpoint of this repository records its settings
        return

    layout, geometry = arguments.layout or "transformers", arguments.geometry or "sphere"
    config = published_config(arguments.overrides, geometry)
    stated = layout, geometry, arguments.activation
    encoder = open_published(arguments.checkpoint, *stated, config, this_device(), arguments.heads)
    results = evaluate_suite(config, encoder, open_evaluation_sets(config.data))
    answer_of_published(PAPER, arguments.checkpoint, layout, encoder, results, arguments.output)


if __name__ == "__main__":
    run_or_explain(main)
