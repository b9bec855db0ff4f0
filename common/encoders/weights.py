"""Weights in and out: transformers (CLIP, ViT, DeiT, BERT), OpenAI's CLIP archives and open_clip's layout.

Each layout is a table of (our key, their keys); the same table is read in both directions. Whatever a table does not
account for, on either side, is an error: weights that are not understood would be lost silently.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import BertForMaskedLM, BertModel, CLIPConfig, CLIPModel, DeiTModel, ViTModel

from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.transformer import Activation, QuickGELU, Transformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer, interpolate_positions
from common.geometry import Sphere
from common.logit_scale import LogitScale

State = Mapping[str, torch.Tensor]


class WeightsError(ValueError):
    """Weights that do not fit; the message is meant for the user as it stands."""


@dataclass(frozen=True)
class Entry:
    """One of our tensors and where another layout keeps it.

    form: "same" up to axes of length 1; "transposed"; "stacked": theirs are several, one after the other along ours'
        first axis.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Literal["same", "transposed", "stacked"] = "same"


# ---------------------------------------------------------------- CLIP


def clip_from_open_clip(
    state: State,
    activation: Activation,
    vision_head_width: int = 64,
    text_heads: int | None = None,
    source: str = "state",
) -> TwoTowers:
    """CLIP from a state dict in OpenAI's layout, which open_clip shares; sizes are read off the shapes.

    Weights without both final LayerNorms, as EuCLIP's, give towers without them.

    Args:
        state: "visual.conv1.weight", ... ; open_clip's "text." and DDP's "module." prefixes are understood.
        activation: "quick_gelu" for OpenAI's own weights and those trained from them, "gelu" for most of open_clip's.
            The weights do not tell, and the wrong one costs accuracy without any error.
        vision_head_width: width of an attention head; 64 in all of OpenAI's models, 80 in open_clip's ViT-H/14.
        text_heads: None = text width / 64.
        source: named in errors.
    Returns:
        TwoTowers on the sphere, float32, in eval mode.
    Raises:
        WeightsError: not a CLIP with a ViT, or tensors left over.
    """
    state = _bare(state)
    if "visual.conv1.weight" not in state or "visual.layer1.0.conv1.weight" in state:
        raise WeightsError(
            f"{source} is no CLIP with a vision transformer: it has no patch embedding visual.conv1.weight"
        )
    missing = [name for name in _SIZES_ARE_READ_OFF if name not in state]
    if missing:
        raise WeightsError(f"{source} lacks {_some(missing)}")
    width, _, patch_size, _ = state["visual.conv1.weight"].shape
    positions, text_width = state["visual.positional_embedding"], state["token_embedding.weight"].shape[1]
    final_layer_norm = "ln_final.weight" in state
    with torch.device("meta"):
        image_tower = VisionTransformer(
            image_size=round((len(positions) - 1) ** 0.5) * patch_size,
            patch_size=patch_size,
            width=width,
            layers=_count(state, r"visual\.transformer\.resblocks\.(\d+)\."),
            heads=width // vision_head_width,
            mlp_ratio=state["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0] / width,
            projection_dim=state["visual.proj"].shape[1],
            final_layer_norm=final_layer_norm,
            activation=activation,
        )
        vocabulary_size = state["token_embedding.weight"].shape[0]
        text_tower = CausalTextTransformer(
            vocabulary_size=vocabulary_size,
            context_length=state["positional_embedding"].shape[0],
            width=text_width,
            layers=_count(state, r"transformer\.resblocks\.(\d+)\."),
            heads=text_width // 64 if text_heads is None else text_heads,
            mlp_ratio=state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0] / text_width,
            projection_dim=state["text_projection"].shape[1],
            end_id=vocabulary_size - 1,
            final_layer_norm=final_layer_norm,
            activation=activation,
        )
    layout = partial(_open_clip_entries, final_layer_norm=final_layer_norm)
    return _filled(_two_towers(image_tower, text_tower), state, layout, source)


def clip_from_transformers(model: CLIPModel) -> TwoTowers:
    """CLIP from transformers' model, with its activation and LayerNorm eps.

    Args:
        model: any CLIPModel; a folder or hub name is read by CLIPModel.from_pretrained.
    Returns:
        TwoTowers on the sphere, float32, in eval mode.
    Raises:
        WeightsError: a configuration that our towers cannot express.
    """
    config = model.config
    vision, text = config.vision_config, config.text_config
    with torch.device("meta"):
        image_tower = VisionTransformer(
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            width=vision.hidden_size,
            layers=vision.num_hidden_layers,
            heads=vision.num_attention_heads,
            mlp_ratio=vision.intermediate_size / vision.hidden_size,
            projection_dim=config.projection_dim,
            activation=_our_activation(vision.hidden_act),
            norm_eps=vision.layer_norm_eps,
        )
        # id 2 stands in configurations older than the tokenizer's; the true end token is the largest id
        end_id = text.vocab_size - 1 if text.eos_token_id == 2 else text.eos_token_id
        text_tower = CausalTextTransformer(
            vocabulary_size=text.vocab_size,
            context_length=text.max_position_embeddings,
            width=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            mlp_ratio=text.intermediate_size / text.hidden_size,
            projection_dim=config.projection_dim,
            end_id=end_id,
            activation=_our_activation(text.hidden_act),
            norm_eps=text.layer_norm_eps,
        )
    model_name = config.name_or_path or "the transformers model"
    return _filled(_two_towers(image_tower, text_tower), model.state_dict(), _transformers_entries, model_name)


def clip_to_open_clip(model: TwoTowers) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Our CLIP in open_clip's layout.

    Args:
        model: sphere, one class token, causal text tower, final LayerNorms, LayerNorm eps 1e-5.
    Returns:
        (state dict, model configuration): open_clip's CLIP(**configuration) takes the state dict.
    Raises:
        WeightsError: a model that the layout cannot express; says what.
    """
    image, text = _exportable_towers(model)
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    if eps != {1.0e-5}:
        raise WeightsError(f"LayerNorm eps is {sorted(eps)}; open_clip's layout has 1e-05 alone")
    quick = {_activation_of(image.transformer), _activation_of(text.transformer)}
    if len(quick) > 1:
        raise WeightsError(f"the towers' activations differ ({sorted(quick)}); open_clip has one for both")
    configuration = {
        "embed_dim": image.projection_dim,
        "quick_gelu": quick == {"quick_gelu"},
        "vision_cfg": {
            "image_size": image.image_size,
            "patch_size": image.patch_size,
            "width": image.width,
            "layers": len(image.transformer.blocks),
            "head_width": image.width // image.transformer.blocks[0].attention.heads,
            "mlp_ratio": _mlp_ratio(image.transformer),
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.token_embedding.num_embeddings,
            "width": text.width,
            "heads": text.transformer.blocks[0].attention.heads,
            "layers": len(text.transformer.blocks),
            "mlp_ratio": _mlp_ratio(text.transformer),
        },
    }
    return _exported(model, _open_clip_entries), configuration


def clip_to_transformers(model: TwoTowers) -> CLIPModel:
    """Our CLIP as transformers' CLIPModel, in eval mode; `save_pretrained` writes it.

    Args:
        model: sphere, one class token, causal text tower, final LayerNorms.
    Raises:
        WeightsError: a model that the layout cannot express; says what.
    """
    image, text = _exportable_towers(model)

    def shared(tower: VisionTransformer | CausalTextTransformer) -> dict[str, Any]:
        blocks = tower.transformer.blocks
        return {
            "hidden_size": tower.width,
            "intermediate_size": blocks[0].mlp[0].out_features,
            "num_hidden_layers": len(blocks),
            "num_attention_heads": blocks[0].attention.heads,
            "hidden_act": _activation_of(tower.transformer),
            "layer_norm_eps": blocks[0].mlp_norm.eps,
            "projection_dim": tower.projection_dim,
        }

    vocabulary_size = text.token_embedding.num_embeddings
    config = CLIPConfig(
        vision_config={**shared(image), "image_size": image.image_size, "patch_size": image.patch_size},
        text_config={
            **shared(text),
            "vocab_size": vocabulary_size,
            "max_position_embeddings": text.context_length,
            "eos_token_id": text.end_id,
            "bos_token_id": max(text.end_id - 1, 0),
            "pad_token_id": 0,
        },
        projection_dim=image.projection_dim,
    )
    exported = CLIPModel(config).eval()
    shapes = {name: value.shape for name, value in exported.state_dict().items()}
    state = {name: value.reshape(shapes[name]) for name, value in _exported(model, _transformers_entries).items()}
    exported.load_state_dict(state)
    return exported


def load_clip(path: str | Path, activation: Activation | None = None) -> TwoTowers:
    """CLIP from whatever stands at a path, without executing anything from it.

    Args:
        path: a transformers folder or hub name, a folder in open_clip's hub layout (open_clip_config.json beside the
            weights), or a file of weights in OpenAI's layout (.safetensors, .pt, .bin; of TorchScript archives the
            tensors alone are taken).
        activation: must be given for a bare file of weights, which does not tell it; elsewhere it must be left out.
    Raises:
        WeightsError, FileNotFoundError.
    """
    name, path = str(path), Path(path)
    if not path.exists() and (path.is_absolute() or name.startswith(".")):
        raise FileNotFoundError(f"{path} does not exist; accepted: a file of weights, a folder, a hub name")
    if path.is_file():
        if activation is None:
            raise WeightsError(
                f"{path} does not tell its activation: give quick_gelu (OpenAI's own weights) or gelu (most others)"
            )
        return clip_from_open_clip(read_weights(path), activation, source=str(path))
    if activation is not None:
        raise WeightsError(
            f"{path} has a configuration with its own activation; activation = {activation!r} is not taken"
        )
    if (path / "open_clip_config.json").is_file():
        try:
            content = json.loads((path / "open_clip_config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise WeightsError(f"{path / 'open_clip_config.json'} is no JSON: {error}") from None
        config = content.get("model_cfg", content)
        files = [path / name for name in ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{path} has no weights; looked for {', '.join(file.name for file in files)}")
        return clip_from_open_clip(
            read_weights(found),
            "quick_gelu" if config.get("quick_gelu", False) else "gelu",
            vision_head_width=config["vision_cfg"].get("head_width", 64),
            text_heads=config["text_cfg"].get("heads"),
            source=str(found),
        )
    return clip_from_transformers(CLIPModel.from_pretrained(name))


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a weights file: safetensors, a PyTorch file (no code is unpickled) or a TorchScript archive.

    A TorchScript archive, the form of OpenAI's files, can only be opened by torch.jit.load, which may run TorchScript
    that it holds (no Python): take archives from where you would take a program.

    Raises:
        WeightsError: the file holds no state dict or cannot be read; names it.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise WeightsError(f"{path} is no whole safetensors file: {error}") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise WeightsError(f"{path} is no file of weights: {error}") from None
        content = torch.jit.load(str(path), map_location="cpu").state_dict()
        content = {name: value for name, value in content.items() if name not in _ARCHIVE_NUMBERS}
    except Exception as error:  # pickle's own errors have no common class
        raise WeightsError(f"{path} cannot be read without executing code from it: {error}") from None
    for key in ("state_dict", "model"):  # beside an optimiser's
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise WeightsError(f"{path} holds no state dict: accepted is a mapping of names to tensors")
    return dict(content)


# ---------------------------------------------------------------- ViT, DeiT, BERT


def load_vit_(tower: VisionTransformer, model: ViTModel | DeiTModel, antialias: bool = False) -> None:
    """Fills a tower of timm's kind (`patch_bias=True, input_norm=False`) with the weights of a ViT or DeiT, in place.

    DeiT's distillation token is a second class token. Positions are interpolated where the picture's size differs.
    The tower's projection, if it has one, is left as it is.

    Args:
        tower: one class token for ViT, two for a DeiT with distillation token; norm_eps as in model.config.
        model: transformers' model; its pooler is not used.
        antialias: of the interpolation; False as ALBEF does it.
    Raises:
        WeightsError: sizes, activation or eps that differ.
    """
    config = model.config
    _same("norm_eps", tower.transformer.blocks[0].mlp_norm.eps, config.layer_norm_eps)
    _same("activation", _activation_of(tower.transformer), _our_activation(config.hidden_act))
    _same("heads", tower.transformer.blocks[0].attention.heads, config.num_attention_heads)
    _same("layers", len(tower.transformer.blocks), config.num_hidden_layers)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("pooler.")}
    class_tokens = [name for name in ("embeddings.cls_token", "embeddings.distillation_token") if name in state]
    _same("class tokens", tower.num_class_tokens, len(class_tokens))
    if tower.num_class_tokens == 2:
        tokens = [state.pop(name)[0] for name in class_tokens]
        state["embeddings.cls_token"] = torch.cat(tokens)
    positions = state["embeddings.position_embeddings"][0].detach()
    grid = tower.image_size // tower.patch_size
    state["embeddings.position_embeddings"] = interpolate_positions(positions, len(class_tokens), grid, antialias)
    blocks = len(tower.transformer.blocks)
    entries = [
        Entry("class_embedding", ("embeddings.cls_token",)),
        Entry("position_embedding", ("embeddings.position_embeddings",)),
        *affine("patch_embedding", "embeddings.patch_embeddings.projection"),
        *affine("final_norm", "layernorm"),
        *(entry for i in range(blocks) for entry in _vit_block(i, "layers.0.attention.q_proj.weight" in state)),
    ]
    kept = ["projection"] if tower.projection is not None else []
    fill_(tower, state, entries, config.name_or_path or "the ViT", kept)


def load_bert_(
    model: BertModel | BertForMaskedLM,
    text_tower: BidirectionalTextTransformer,
    fusion: FusionTransformer | None = None,
    head: MaskedLanguageHead | None = None,
) -> None:
    """Fills a text tower with BERT's lower layers and, for ALBEF, a fusion transformer with the upper ones, in place.

    The token type of a single sentence is added to the position rows, so that the tower needs none. Cross-attention is
    new in ALBEF and stays as it is, and so does the tower's projection, if it has one.

    Args:
        model: transformers' model; its pooler is not used. With a head it must be a BertForMaskedLM.
        text_tower: takes the layers from 0 on; context_length at most BERT's 512.
        fusion: takes the layers that follow.
        head: of masked language modelling.
    Raises:
        WeightsError: sizes that do not fit, layers left over, a head without weights for it.
    """
    config, state = model.config, dict(model.state_dict())
    if not any(name.startswith("bert.") for name in state):
        state = {f"bert.{name}": value for name, value in state.items()}
    source = config.name_or_path or "the BERT"
    text_layers = len(text_tower.transformer.blocks)
    fusion_layers = 0 if fusion is None else len(fusion.transformer.blocks)
    if text_layers + fusion_layers != config.num_hidden_layers:
        raise WeightsError(
            f"{source} has {config.num_hidden_layers} layers, the text tower takes {text_layers} and the fusion "
            f"{fusion_layers}"
        )
    if head is not None and "cls.predictions.transform.dense.weight" not in state:
        raise WeightsError(f"{source} has no masked-language head; read it as BertForMaskedLM")
    for part in (text_tower, *([fusion] if fusion is not None else [])):
        _same("norm_eps", part.transformer.blocks[0].mlp_norm.eps, config.layer_norm_eps)
        _same("heads", part.transformer.blocks[0].attention.heads, config.num_attention_heads)
        _same("activation", _activation_of(part.transformer), _our_activation(config.hidden_act))

    embeddings = "bert.embeddings"
    positions = (
        state[f"{embeddings}.position_embeddings.weight"] + state[f"{embeddings}.token_type_embeddings.weight"][0]
    )
    if text_tower.context_length > len(positions):
        raise WeightsError(f"context_length {text_tower.context_length} is above {source}'s {len(positions)} positions")
    state["positions"] = positions[: text_tower.context_length]
    text_entries = [
        Entry("token_embedding.weight", (f"{embeddings}.word_embeddings.weight",)),
        Entry("position_embedding", ("positions",)),
        *affine("input_norm", f"{embeddings}.LayerNorm"),
        *(entry for i in range(text_layers) for entry in _bert_block(i, i)),
    ]
    kept = ["projection"] if text_tower.projection is not None else []
    fill_(text_tower, state, text_entries, source, kept, complete=False)
    if fusion is not None:
        fusion_entries = [entry for i in range(fusion_layers) for entry in _bert_block(i, text_layers + i)]
        kept = [name for name in fusion.state_dict() if "cross_attention" in name]
        fill_(fusion, state, fusion_entries, source, kept, complete=False)
    if head is not None:
        prefix = "cls.predictions"
        head_entries = [
            *affine("dense", f"{prefix}.transform.dense"),
            *affine("norm", f"{prefix}.transform.LayerNorm"),
            Entry("bias", (f"{prefix}.bias",)),
        ]
        fill_(head, state, head_entries, source, [], complete=False)


# ---------------------------------------------------------------- the layouts


def affine(ours: str, theirs: str) -> list[Entry]:
    """Weight and bias of a layer."""
    return [Entry(f"{ours}.{part}", (f"{theirs}.{part}",)) for part in ("weight", "bias")]


def _stacked_affine(ours: str, theirs: Iterable[str]) -> list[Entry]:
    theirs = list(theirs)
    return [
        Entry(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), "stacked") for part in ("weight", "bias")
    ]


def _open_clip_entries(image_layers: int, text_layers: int, final_layer_norm: bool = True) -> list[Entry]:
    """OpenAI's and open_clip's CLIP."""

    def block(ours: str, theirs: str) -> list[Entry]:
        return [
            *affine(f"{ours}.attention_norm", f"{theirs}.ln_1"),
            Entry(f"{ours}.attention.in_projection.weight", (f"{theirs}.attn.in_proj_weight",)),
            Entry(f"{ours}.attention.in_projection.bias", (f"{theirs}.attn.in_proj_bias",)),
            *affine(f"{ours}.attention.out_projection", f"{theirs}.attn.out_proj"),
            *affine(f"{ours}.mlp_norm", f"{theirs}.ln_2"),
            *affine(f"{ours}.mlp.0", f"{theirs}.mlp.c_fc"),
            *affine(f"{ours}.mlp.2", f"{theirs}.mlp.c_proj"),
        ]

    image, text = "image_tower", "text_tower"
    entries = [
        Entry(f"{image}.patch_embedding.weight", ("visual.conv1.weight",)),
        Entry(f"{image}.class_embedding", ("visual.class_embedding",)),
        Entry(f"{image}.position_embedding", ("visual.positional_embedding",)),
        *affine(f"{image}.input_norm", "visual.ln_pre"),
        Entry(f"{image}.projection", ("visual.proj",)),
        Entry(f"{text}.token_embedding.weight", ("token_embedding.weight",)),
        Entry(f"{text}.position_embedding", ("positional_embedding",)),
        Entry(f"{text}.projection", ("text_projection",)),
        Entry("logit_scale.log_logit_scale", ("logit_scale",)),
    ]
    if final_layer_norm:
        entries += [*affine(f"{image}.final_norm", "visual.ln_post"), *affine(f"{text}.final_norm", "ln_final")]
    for i in range(image_layers):
        entries += block(f"{image}.transformer.blocks.{i}", f"visual.transformer.resblocks.{i}")
    for i in range(text_layers):
        entries += block(f"{text}.transformer.blocks.{i}", f"transformer.resblocks.{i}")
    return entries


def _transformers_entries(image_layers: int, text_layers: int) -> list[Entry]:
    """transformers' CLIPModel."""

    def block(ours: str, theirs: str) -> list[Entry]:
        return [
            *affine(f"{ours}.attention_norm", f"{theirs}.layer_norm1"),
            *_stacked_affine(f"{ours}.attention.in_projection", (f"{theirs}.self_attn.{x}_proj" for x in "qkv")),
            *affine(f"{ours}.attention.out_projection", f"{theirs}.self_attn.out_proj"),
            *affine(f"{ours}.mlp_norm", f"{theirs}.layer_norm2"),
            *affine(f"{ours}.mlp.0", f"{theirs}.mlp.fc1"),
            *affine(f"{ours}.mlp.2", f"{theirs}.mlp.fc2"),
        ]

    image, text = "image_tower", "text_tower"
    entries = [
        Entry(f"{image}.patch_embedding.weight", ("vision_model.embeddings.patch_embedding.weight",)),
        Entry(f"{image}.class_embedding", ("vision_model.embeddings.class_embedding",)),
        Entry(f"{image}.position_embedding", ("vision_model.embeddings.position_embedding.weight",)),
        *affine(f"{image}.input_norm", "vision_model.pre_layrnorm"),  # their spelling
        *affine(f"{image}.final_norm", "vision_model.post_layernorm"),
        Entry(f"{image}.projection", ("visual_projection.weight",), "transposed"),
        Entry(f"{text}.token_embedding.weight", ("text_model.embeddings.token_embedding.weight",)),
        Entry(f"{text}.position_embedding", ("text_model.embeddings.position_embedding.weight",)),
        *affine(f"{text}.final_norm", "text_model.final_layer_norm"),
        Entry(f"{text}.projection", ("text_projection.weight",), "transposed"),
        Entry("logit_scale.log_logit_scale", ("logit_scale",)),
    ]
    for i in range(image_layers):
        entries += block(f"{image}.transformer.blocks.{i}", f"vision_model.encoder.layers.{i}")
    for i in range(text_layers):
        entries += block(f"{text}.transformer.blocks.{i}", f"text_model.encoder.layers.{i}")
    return entries


def _vit_block(i: int, short_names: bool) -> list[Entry]:
    """A layer of transformers' ViT and DeiT, whose names became shorter in the course of version 5."""
    ours, theirs = f"transformer.blocks.{i}", f"layers.{i}" if short_names else f"encoder.layer.{i}"
    if short_names:
        qkv, out = [f"attention.{x}_proj" for x in "qkv"], "attention.o_proj"
        mlp = ("mlp.fc1", "mlp.fc2")
    else:
        qkv, out = [f"attention.attention.{x}" for x in ("query", "key", "value")], "attention.output.dense"
        mlp = ("intermediate.dense", "output.dense")
    return [
        *affine(f"{ours}.attention_norm", f"{theirs}.layernorm_before"),
        *_stacked_affine(f"{ours}.attention.in_projection", (f"{theirs}.{name}" for name in qkv)),
        *affine(f"{ours}.attention.out_projection", f"{theirs}.{out}"),
        *affine(f"{ours}.mlp_norm", f"{theirs}.layernorm_after"),
        *affine(f"{ours}.mlp.0", f"{theirs}.{mlp[0]}"),
        *affine(f"{ours}.mlp.2", f"{theirs}.{mlp[1]}"),
    ]


def _bert_block(our_layer: int, their_layer: int) -> list[Entry]:
    ours, theirs = f"transformer.blocks.{our_layer}", f"bert.encoder.layer.{their_layer}"
    qkv = (f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))
    return [
        *_stacked_affine(f"{ours}.attention.in_projection", qkv),
        *affine(f"{ours}.attention.out_projection", f"{theirs}.attention.output.dense"),
        *affine(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *affine(f"{ours}.mlp.0", f"{theirs}.intermediate.dense"),
        *affine(f"{ours}.mlp.2", f"{theirs}.output.dense"),
        *affine(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm"),
    ]


# ---------------------------------------------------------------- moving tensors

_ARCHIVE_NUMBERS = ("input_resolution", "context_length", "vocab_size")  # of OpenAI's archives, not weights
_SIZES_ARE_READ_OFF = (
    "visual.positional_embedding",
    "visual.proj",
    "visual.transformer.resblocks.0.mlp.c_fc.weight",
    "token_embedding.weight",
    "positional_embedding",
    "transformer.resblocks.0.mlp.c_fc.weight",
    "text_projection",
)
_NOT_WEIGHTS = re.compile(r"(^|\.)(attn_mask|position_ids)$")  # buffers that older versions saved


def _two_towers(image_tower: VisionTransformer, text_tower: CausalTextTransformer) -> TwoTowers:
    return TwoTowers(image_tower, text_tower, Sphere(), LogitScale(init=1 / 0.07, maximum=100.0))


def _filled(model: TwoTowers, state: State, layout: Any, source: str) -> TwoTowers:
    entries = layout(len(model.image_tower.transformer.blocks), len(model.text_tower.transformer.blocks))
    fill_(model, state, entries, source, kept=[])
    return model.eval()


def fill_(
    module: nn.Module, state: State, entries: list[Entry], source: str, kept: list[str], complete: bool = True
) -> None:
    """Puts a foreign state dict into a module; every tensor of ours is filled or named in `kept`.

    Args:
        complete: every tensor of theirs must be used too.
    """
    target = module.state_dict()
    missing = [name for entry in entries for name in entry.theirs if name not in state]
    if missing:
        raise WeightsError(f"{source} lacks {_some(missing)}")
    used = {name for entry in entries for name in entry.theirs}
    left = [name for name in state if name not in used and not _NOT_WEIGHTS.search(name)]
    if complete and left:
        raise WeightsError(f"{source} has tensors that this model has no place for: {_some(left)}")
    filled = {}
    for entry in entries:
        parts = [state[name].detach() for name in entry.theirs]
        value = torch.cat(parts) if entry.form == "stacked" else parts[0]
        value = value.T if entry.form == "transposed" else value
        expected = target[entry.ours].shape
        if [n for n in value.shape if n > 1] != [n for n in expected if n > 1]:
            raise WeightsError(
                f"{source}: {', '.join(entry.theirs)} has shape {tuple(value.shape)}, {entry.ours} is {tuple(expected)}"
            )
        filled[entry.ours] = value.reshape(expected).float().clone(memory_format=torch.contiguous_format)
    filled |= {name: target[name] for name in kept}
    unfilled = [name for name in target if name not in filled]
    if unfilled:
        raise WeightsError(f"{source} has nothing for {_some(unfilled)}")
    module.load_state_dict(filled, assign=any(parameter.is_meta for parameter in module.parameters()))


def _exported(model: TwoTowers, layout: Any) -> dict[str, torch.Tensor]:
    """Our state dict in another layout."""
    state = model.state_dict()
    exported = {}
    for entry in layout(len(model.image_tower.transformer.blocks), len(model.text_tower.transformer.blocks)):
        value = state.pop(entry.ours).detach().cpu()
        value = value.T if entry.form == "transposed" else value
        if entry.ours in ("image_tower.class_embedding", "logit_scale.log_logit_scale"):
            value = value[0]  # theirs has no axis for several
        for name, part in (
            zip(entry.theirs, value.chunk(len(entry.theirs))) if value.ndim else [(entry.theirs[0], value)]
        ):
            exported[name] = part.contiguous().clone()
    if state:
        raise WeightsError(f"the layout has no place for {_some(list(state))}")
    return exported


def _exportable_towers(model: TwoTowers) -> tuple[VisionTransformer, CausalTextTransformer]:
    image, text = model.image_tower, model.text_tower
    if not isinstance(image, VisionTransformer) or not isinstance(text, CausalTextTransformer):
        names = f"{type(image).__name__} and {type(text).__name__}"
        raise WeightsError(f"only a vision transformer with a causal text tower is a CLIP; these are {names}")
    if model.geometry.name != "sphere":
        raise WeightsError(
            f"geometry {model.geometry.name!r}: other code compares by cosine, only the sphere can be exported"
        )
    if image.num_class_tokens != 1:
        raise WeightsError(f"{image.num_class_tokens} class tokens; CLIP has one")
    for tower in (image, text):
        if isinstance(tower.final_norm, nn.Identity) or tower.projection is None:
            raise WeightsError(f"{type(tower).__name__} has no final LayerNorm or no projection; CLIP has both")
    if isinstance(image.input_norm, nn.Identity) or image.patch_embedding.bias is not None:
        raise WeightsError("the image tower is timm's kind (no LayerNorm before the blocks, patch bias), not CLIP's")
    return image, text


def _bare(state: State) -> dict[str, torch.Tensor]:
    """Without the prefixes of DDP and of open_clip's custom text towers, and without numbers that are no weights."""
    bare = {name.removeprefix("module."): value for name, value in state.items()}
    bare = {name.removeprefix("text."): value for name, value in bare.items()}
    return {name: value for name, value in bare.items() if name not in _ARCHIVE_NUMBERS}


def _count(state: State, pattern: str) -> int:
    found = [int(match[1]) for match in (re.match(pattern, name) for name in state) if match]
    return max(found) + 1 if found else 0


def _our_activation(name: str) -> Activation:
    if name not in ("gelu", "quick_gelu"):
        raise WeightsError(f"activation {name!r}; accepted: gelu, quick_gelu")
    return name


def _activation_of(transformer: Transformer) -> Activation:
    return "quick_gelu" if isinstance(transformer.blocks[0].mlp[1], QuickGELU) else "gelu"


def _mlp_ratio(transformer: Transformer) -> float:
    first = transformer.blocks[0].mlp[0]
    return first.out_features / first.in_features


def _same(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise WeightsError(f"{what} is {ours} here and {theirs} in the weights")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
