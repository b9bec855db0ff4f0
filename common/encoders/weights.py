"""Weights in and out: transformers (CLIP, ViT, DeiT, BERT), OpenAI's CLIP archives and open_clip's layout.

A layout is a table of our names and theirs. The same table is read in both directions, and the sizes of the towers are
read off the shapes of what it finds. Whatever a table does not account for, on either side, is an error: weights that
are not understood would be lost silently. In tables

    name.*         stands for weight and bias, also where another sign is before the star;
    {q,k,v}_proj   for several tensors that lie one after the other along our first axis;
    name.T         for the transpose.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from common.base.arguments import some
from common.data.text_files import find_file, read_json_object
from common.data.transforms import CLIP_MEAN, CLIP_STD
from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.transformer import Activation, QuickGELU, Transformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer, interpolate_positions
from common.geometry import Sphere
from common.logit_scale import LogitScale

if TYPE_CHECKING:  # half a second, which is paid by the functions that read or write transformers' models
    from transformers import BertForMaskedLM, BertModel, CLIPModel, DeiTModel, ViTModel

State = Mapping[str, torch.Tensor]


class WeightsError(ValueError):
    """Weights that do not fit; the message is meant for the user as it stands."""


# ---------------------------------------------------------------- the tables

# Of a block: our layers, and in their order the names of others.
BLOCK = ("attention_norm", "attention.in_projection", "attention.out_projection", "mlp_norm", "mlp.0", "mlp.2")
OPENAI_BLOCK = ("ln_1.*", "attn.in_proj_*", "attn.out_proj.*", "ln_2.*", "mlp.c_fc.*", "mlp.c_proj.*")
_CLIP_BLOCK = (
    "layer_norm1.*", "self_attn.{q,k,v}_proj.*", "self_attn.out_proj.*", "layer_norm2.*", "mlp.fc1.*", "mlp.fc2.*",
)  # fmt: skip
_VIT_BLOCK = (
    "layernorm_before.*", "attention.{q,k,v}_proj.*", "attention.o_proj.*", "layernorm_after.*", "mlp.fc1.*",
    "mlp.fc2.*",
)  # fmt: skip
_OLDER_VIT_BLOCK = (
    "layernorm_before.*", "attention.attention.{query,key,value}.*", "attention.output.dense.*", "layernorm_after.*",
    "intermediate.dense.*", "output.dense.*",
)  # fmt: skip
_BERT_BLOCK = (
    "attention.output.LayerNorm.*", "attention.self.{query,key,value}.*", "attention.output.dense.*",
    "output.LayerNorm.*", "intermediate.dense.*", "output.dense.*",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where another code keeps the tensors of two towers, in the shorthand at the top of this file.

    single: our name -> theirs.
    image_blocks, text_blocks: what stands before the number of a block, and its names in the order of `BLOCK`.
    """

    single: Mapping[str, str]
    image_blocks: tuple[str, Sequence[str]]
    text_blocks: tuple[str, Sequence[str]]


OPEN_CLIP = Layout(  # OpenAI's own too
    {
        "image_tower.patch_embedding.weight": "visual.conv1.weight",
        "image_tower.position_embedding": "visual.positional_embedding",
        "image_tower.class_embedding": "visual.class_embedding",
        "image_tower.input_norm.*": "visual.ln_pre.*",
        "image_tower.final_norm.*": "visual.ln_post.*",
        "image_tower.projection": "visual.proj",
        "text_tower.token_embedding.weight": "token_embedding.weight",
        "text_tower.position_embedding": "positional_embedding",
        "text_tower.final_norm.*": "ln_final.*",
        "text_tower.projection": "text_projection",
        "logit_scale.log_logit_scale": "logit_scale",
    },
    ("visual.transformer.resblocks.", OPENAI_BLOCK),
    ("transformer.resblocks.", OPENAI_BLOCK),
)
_TRANSFORMERS_CLIP = Layout(
    {
        "image_tower.patch_embedding.weight": "vision_model.embeddings.patch_embedding.weight",
        "image_tower.position_embedding": "vision_model.embeddings.position_embedding.weight",
        "image_tower.class_embedding": "vision_model.embeddings.class_embedding",
        "image_tower.input_norm.*": "vision_model.pre_layrnorm.*",  # their spelling
        "image_tower.final_norm.*": "vision_model.post_layernorm.*",
        "image_tower.projection": "visual_projection.weight.T",
        "text_tower.token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "text_tower.position_embedding": "text_model.embeddings.position_embedding.weight",
        "text_tower.final_norm.*": "text_model.final_layer_norm.*",
        "text_tower.projection": "text_projection.weight.T",
        "logit_scale.log_logit_scale": "logit_scale",
    },
    ("vision_model.encoder.layers.", _CLIP_BLOCK),
    ("text_model.encoder.layers.", _CLIP_BLOCK),
)


@dataclass(frozen=True)
class _Entry:
    """One of our tensors and where it is kept: several of theirs lie one after the other along our first axis."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool


def _entries(table: Mapping[str, str], our_prefix: str = "", their_prefix: str = "") -> list[_Entry]:
    """The rows of a table without its shorthand."""
    entries = []
    for ours, theirs in table.items():
        for part in ("weight", "bias") if "*" in theirs else ("",):
            name = their_prefix + theirs.replace("*", part).removesuffix(".T")
            before, _, rest = name.partition("{")
            several, _, after = rest.partition("}")
            names = tuple(f"{before}{one}{after}" for one in several.split(","))
            entries.append(_Entry(our_prefix + ours.replace("*", part), names, theirs.endswith(".T")))
    return entries


def _block_entries(ours: str, theirs: str, names: Sequence[str], layers: int, first: int = 0) -> list[_Entry]:
    """Of so many blocks behind a prefix; `first` of theirs is our number 0."""
    table = {f"{layer}.*": name for layer, name in zip(BLOCK, names, strict=True)}
    return [entry for i in range(layers) for entry in _entries(table, f"{ours}{i}.", f"{theirs}{first + i}.")]


def _tower_entries(layout: Layout, image_layers: int, text_layers: int) -> list[_Entry]:
    entries = _entries(layout.single)
    entries += _block_entries("image_tower.transformer.blocks.", *layout.image_blocks, image_layers)
    return entries + _block_entries("text_tower.transformer.blocks.", *layout.text_blocks, text_layers)


# ---------------------------------------------------------------- two towers


def two_towers_from(
    state: State,
    layout: Layout,
    image: dict[str, Any],
    text: dict[str, Any],
    source: str,
    maximum: float | None = 100.0,
) -> TwoTowers:
    """Two towers from a foreign state dict; all sizes are read off the shapes, so each layout needs its table alone.

    A text tower with a LayerNorm on its embeddings is BERT's kind, every other one CLIP's.

    Args:
        state: theirs, all of it; buffers that older versions saved are left out.
        layout: where they keep what. Final LayerNorms that the state lacks altogether are not in the towers either.
        image, text: what no shape tells, for the towers: "heads", and where they are not the usual ones "activation",
            "norm_eps", "end_id" (default: the largest id).
        source: named in errors.
        maximum: of the logit scale.
    Returns:
        TwoTowers on the sphere, float32 (float64 where all weights are), in eval mode.
    Raises:
        WeightsError: tensors that are missing, left over, of another shape or not finite; heads that do not divide a
            width.
    """
    entries = _tower_entries(
        layout, *(_count(state, blocks[0]) for blocks in (layout.image_blocks, layout.text_blocks))
    )
    final_norms = {name for entry in entries if ".final_norm." in entry.ours for name in entry.theirs}
    if not final_norms & state.keys():
        entries = [entry for entry in entries if ".final_norm." not in entry.ours]
    found = _in_our_names(state, entries, source)
    towers = towers_of_sizes(found, image, text, source)
    model = TwoTowers(*towers, Sphere(), LogitScale(init=1 / 0.07, maximum=maximum))
    _put(model, found, entries, source, kept=[])
    return model.eval()


def towers_of_sizes(
    tensors: State, image: dict[str, Any], text: dict[str, Any], source: str
) -> tuple[VisionTransformer, CausalTextTransformer | BidirectionalTextTransformer]:
    """Towers on the meta device for tensors under our names, of the sizes that their shapes tell.

    Args:
        tensors: "image_tower.patch_embedding.weight", ...
        image, text, source: as in `two_towers_from`.
    Raises:
        WeightsError: a number of heads that does not divide the width.
    """
    image_tensors, text_tensors = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in ("image_tower.", "text_tower.")
    )
    width, _, patch_size, _ = image_tensors["patch_embedding.weight"].shape
    embedding = text_tensors["token_embedding.weight"]
    vocabulary_size, text_width = embedding.shape
    if text.get("stem") is not None:  # a linear map of its tokens
        vocabulary_size, text_width = text["stem"].network.vocabulary_size, len(embedding)
    num_class_tokens = image_tensors["class_embedding"].numel() // width
    num_patches = image_tensors["position_embedding"].numel() // width - num_class_tokens
    context_length = text_tensors["position_embedding"].numel() // text_width
    for side, tower_width, heads in (("image", width, image["heads"]), ("text", text_width, text["heads"])):
        if not heads or heads < 0 or tower_width % heads:
            raise WeightsError(
                f"{source}: the {side} tower's width {tower_width} cannot be cut into {heads} heads, which no shape "
                f"tells; accepted: {side}_heads that divide it"
            )
    with torch.device("meta"):  # the tensors of the state take the place of these
        stem = image.get("stem")
        patch_size = patch_size if stem is None else stem.image_size // stem.grid
        image_tower = VisionTransformer(
            image_size=round(num_patches**0.5) * patch_size,
            patch_size=patch_size,
            num_class_tokens=num_class_tokens,
            patch_bias="patch_embedding.bias" in image_tensors,
            input_norm="input_norm.weight" in image_tensors,
            **_read_sizes(image_tensors, width),
            **image,
        )
        shared = _read_sizes(text_tensors, text_width) | {"vocabulary_size": vocabulary_size}
        shared |= {"end_id": vocabulary_size - 1} | text
        if "input_norm.weight" in text_tensors:  # its class tokens share one embedding and have a position each
            length = context_length - num_class_tokens + 1
            text_tower = BidirectionalTextTransformer(
                context_length=length, num_class_tokens=num_class_tokens, **shared
            )
        else:
            text_tower = CausalTextTransformer(context_length=context_length, **shared)
    return image_tower, text_tower


def _read_sizes(tensors: State, width: int) -> dict[str, Any]:
    """The arguments that every tower takes, from its tensors under our names."""
    return {
        "width": width,
        "layers": _count(tensors, "transformer.blocks."),
        "projection_dim": tensors["projection"].shape[1],
        "mlp_ratio": tensors["transformer.blocks.0.mlp.0.weight"].shape[0] / width,
        "final_layer_norm": "final_norm.weight" in tensors,
    }


def clip_from_open_clip(
    state: State,
    activation: Activation,
    vision_head_width: int = 64,
    text_heads: int | None = None,
    source: str = "state",
    image_heads: int | None = None,
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
        image_heads: None = image width / vision_head_width.
    Returns:
        TwoTowers on the sphere, float32 (float64 where all weights are), in eval mode.
    Raises:
        WeightsError: not a CLIP with a ViT, or tensors left over.
    """
    # open_clip's custom text towers have a prefix of their own, OpenAI's archives numbers that are no weights
    state = {name.removeprefix("text."): value for name, value in without_ddp(state).items()}
    state = {name: value for name, value in state.items() if name not in _ARCHIVE_NUMBERS}
    if "visual.conv1.weight" not in state or "visual.layer1.0.conv1.weight" in state:
        raise WeightsError(
            f"{source} is no CLIP with a vision transformer: it has no patch embedding visual.conv1.weight"
        )
    if text_heads is None and "token_embedding.weight" in state:
        text_heads = state["token_embedding.weight"].shape[1] // 64
    if image_heads is None:
        image_heads = len(state["visual.conv1.weight"]) // vision_head_width
    image = {"heads": image_heads, "activation": activation}
    return two_towers_from(state, OPEN_CLIP, image, {"heads": text_heads, "activation": activation}, source)


def clip_from_transformers(model: "CLIPModel") -> TwoTowers:
    """CLIP from transformers' model, with its activation and LayerNorm eps.

    Args:
        model: any CLIPModel; a folder or hub name is read by CLIPModel.from_pretrained.
    Returns:
        TwoTowers on the sphere, float32 (float64 where all weights are), in eval mode.
    Raises:
        WeightsError: a configuration that our towers cannot express.
    """
    image, text = (
        {
            "heads": side.num_attention_heads,
            "activation": _our_activation(side.hidden_act),
            "norm_eps": side.layer_norm_eps,
        }
        for side in (model.config.vision_config, model.config.text_config)
    )
    if model.config.text_config.eos_token_id != 2:
        # id 2 stands in configurations older than the tokenizer's; the true end token is the largest id
        text["end_id"] = model.config.text_config.eos_token_id
    source = model.config.name_or_path or "the transformers model"
    return two_towers_from(model.state_dict(), _TRANSFORMERS_CLIP, image, text, source)


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
    of_image, of_text = _sizes(image.transformer), _sizes(text.transformer)
    activations = {of_image["hidden_act"], of_text["hidden_act"]}
    if len(activations) > 1:
        raise WeightsError(f"the towers' activations differ ({sorted(activations)}); open_clip has one for both")

    def shared(tower: VisionTransformer | CausalTextTransformer, sizes: dict[str, Any]) -> dict[str, Any]:
        mlp_ratio = sizes["intermediate_size"] / tower.width
        return {"width": tower.width, "layers": sizes["num_hidden_layers"], "mlp_ratio": mlp_ratio}

    configuration = {
        "embed_dim": image.projection_dim,
        "quick_gelu": activations == {"quick_gelu"},
        "vision_cfg": {
            **shared(image, of_image),
            "image_size": image.image_size,
            "patch_size": image.patch_size,
            "head_width": image.width // of_image["num_attention_heads"],
        },
        "text_cfg": {
            **shared(text, of_text),
            "context_length": text.context_length,
            "vocab_size": text.vocabulary_size,
            "heads": of_text["num_attention_heads"],
        },
    }
    return _exported(model, OPEN_CLIP), configuration


def clip_to_transformers(model: TwoTowers) -> "CLIPModel":
    """Our CLIP as transformers' CLIPModel, in eval mode; `save_pretrained` writes it.

    Args:
        model: sphere, one class token, causal text tower, final LayerNorms.
    Raises:
        WeightsError: a model that the layout cannot express; says what.
    """
    from transformers import CLIPConfig, CLIPModel

    image, text = _exportable_towers(model)

    def shared(tower: VisionTransformer | CausalTextTransformer) -> dict[str, Any]:
        return {**_sizes(tower.transformer), "hidden_size": tower.width, "projection_dim": tower.projection_dim}

    config = CLIPConfig(
        vision_config={**shared(image), "image_size": image.image_size, "patch_size": image.patch_size},
        text_config={
            **shared(text),
            "vocab_size": text.vocabulary_size,
            "max_position_embeddings": text.context_length,
            "eos_token_id": text.end_id,
            "bos_token_id": max(text.end_id - 1, 0),
            "pad_token_id": 0,
        },
        projection_dim=image.projection_dim,
    )
    exported = CLIPModel(config).eval()
    shapes = {name: value.shape for name, value in exported.state_dict().items()}
    state = {name: value.reshape(shapes[name]) for name, value in _exported(model, _TRANSFORMERS_CLIP).items()}
    exported.load_state_dict(state)
    return exported


@dataclass(frozen=True)
class Weights:
    """Weights that somebody has trained, in towers of ours, filled, float32, in eval mode.

    source: named in errors.
    image_tower, text_tower: None where the source has no such side.
    beside: what a model holds beside its towers, under our names: "logit_scale.log_logit_scale", "geometry....".
    geometry: name of the geometry that both were trained with; None = they were not trained together.
    tokenizer: fingerprint of the tokenizer that made the ids; None = not told.
    pixels: mean and standard deviation of the colours that the image tower was trained with; None = CLIP's.
    """

    source: str
    image_tower: VisionTransformer | None = None
    text_tower: CausalTextTransformer | BidirectionalTextTransformer | None = None
    beside: State = field(default_factory=dict)
    geometry: str | None = None
    tokenizer: str | None = None
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def clip(self) -> TwoTowers:
        """Both towers on the sphere.

        Raises:
            WeightsError: a side is missing, or they were trained with another geometry.
        """
        if self.geometry is None:
            raise WeightsError(f"{self.source} has one tower only; accepted: a model of pictures and captions")
        if self.geometry != "sphere":
            raise WeightsError(
                f"{self.source} was trained with geometry {self.geometry!r}: other code compares by cosine, only the "
                "sphere can be exported"
            )
        model = TwoTowers(self.image_tower, self.text_tower, Sphere(), LogitScale(init=1 / 0.07, maximum=100.0))
        with torch.no_grad():
            model.logit_scale.log_logit_scale.copy_(self.beside["logit_scale.log_logit_scale"])
        return model.eval()


def read_source(name: str, activation: Activation | None = None, key: str = "weights") -> Weights:
    """Weights from whatever a user names, without executing anything from it; runs of ours: `open_source`.

    Args:
        name: a folder that transformers wrote (CLIP, ViT, DeiT, BERT) or that is in open_clip's hub layout
            (open_clip_config.json beside the weights), the name of such a model on the Hugging Face hub (looked for in
            the local cache, then downloaded), or a file of weights in OpenAI's layout (.safetensors, .pt, .bin).
        activation: of the MLPs. A bare file of weights does not tell it, so it must be given, except for an archive of
            OpenAI's (TorchScript), which is quick_gelu; where the source tells it, another one is refused.
        key: setting or option that the user named it with, for messages.
    Raises:
        WeightsError, FileNotFoundError, ValueError: what cannot be read or had.
    """
    path = Path(name).expanduser()
    if not path.exists() and (path.is_absolute() or name.startswith(".") or path.suffix in _SUFFIXES):
        raise FileNotFoundError(f"{path} does not exist; accepted: a file of weights, a folder, a hub name")
    if path.is_file():
        state, told = read_bare(path, activation)
        return _of_clip(clip_from_open_clip(state, told, source=str(path)), name)
    told = find_file(name, CONFIGURATIONS, key)
    if told.name == "open_clip_config.json":
        return _of_clip(_read_open_clip(name, told, activation, key), name)
    return _read_transformers(name, told, activation)


def load_clip(path: str | Path, activation: Activation | None = None) -> TwoTowers:
    """CLIP from whatever `read_source` reads; arguments and errors as there."""
    return read_source(str(path), activation).clip()


def read_bare(path: str | Path, activation: Activation | None) -> tuple[dict[str, torch.Tensor], Activation]:
    """Tensors of a bare file of weights, and the activation of its MLPs, which no tensor tells.

    Args:
        path: as in `read_weights`.
        activation: must be given but for a TorchScript archive: OpenAI's, quick_gelu.
    Raises:
        WeightsError: it is not given, or not the archive's.
    """
    state, is_archive = _read_file(Path(path))
    if activation is None and not is_archive:
        raise WeightsError(
            f"{path} does not tell its activation: give quick_gelu (OpenAI's own weights) or gelu (most others), by "
            "--activation, or by model.image.activation where a run starts from it"
        )
    return state, agreed_activation(path, "quick_gelu", activation) if is_archive else activation


def agreed_activation(source: str | Path, told: Activation, activation: Activation | None) -> Activation:
    """The activation that a source tells; a user may say the same (None = says nothing).

    Raises:
        WeightsError: the user says another one.
    """
    if activation not in (None, told):
        raise WeightsError(f"{source} tells its own activation, {told}; {activation} is not taken")
    return told


def _of_clip(clip: TwoTowers, source: str) -> Weights:
    beside = {"logit_scale.log_logit_scale": clip.logit_scale.log_logit_scale.detach()}
    return Weights(source, clip.image_tower, clip.text_tower, beside, "sphere")


def _read_open_clip(name: str, told: Path, activation: Activation | None, key: str) -> TwoTowers:
    """Of open_clip's hub layout, whose configuration is `told`."""
    try:
        content = json.loads(told.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{told} is no JSON: {error}") from None
    config = content.get("model_cfg", content)
    found = find_file(name, ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"), key)
    return clip_from_open_clip(
        read_weights(found),
        agreed_activation(name, "quick_gelu" if config.get("quick_gelu", False) else "gelu", activation),
        vision_head_width=config["vision_cfg"].get("head_width", 64),
        text_heads=config["text_cfg"].get("heads"),
        source=str(found),
    )


def _read_transformers(name: str, told: Path, activation: Activation | None) -> Weights:
    """Of a model of transformers, whose config.json is `told`."""
    kind = read_json_object(told).get("model_type")
    if kind not in ("clip", "vit", "deit", "bert"):
        raise WeightsError(f"{name} is a {kind} of transformers; accepted: clip, vit, deit, bert")
    from transformers import AutoModel

    model, missing = _of_transformers(AutoModel, name)
    missing = [one for one in missing if "pooler" not in one]
    if missing:
        raise WeightsError(f"{name} lacks {some(missing)}")
    if kind == "clip":
        clip = clip_from_transformers(model)
        agreed_activation(name, _sizes(clip.image_tower.transformer)["hidden_act"], activation)
        return _of_clip(clip, name)
    config = model.config
    shared = {
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "projection_dim": None,
        "activation": agreed_activation(name, _our_activation(config.hidden_act), activation),
        "norm_eps": config.layer_norm_eps,
    }
    if kind == "bert":
        text_tower = BidirectionalTextTransformer(
            config.vocab_size, config.max_position_embeddings, final_layer_norm=False, **shared
        )
        load_bert_(model, text_tower)
        return Weights(name, text_tower=text_tower.eval())
    tokens = 1 + ("embeddings.distillation_token" in model.state_dict())
    image_tower = VisionTransformer(
        config.image_size, config.patch_size, num_class_tokens=tokens, patch_bias=True, input_norm=False, **shared
    )
    load_vit_(image_tower, model)
    try:
        processor = read_json_object(find_file(name, ("preprocessor_config.json",), "weights"))
        pixels = tuple(processor["image_mean"]), tuple(processor["image_std"])
    except (ValueError, KeyError):  # a model that was saved without it
        pixels = None
    return Weights(name, image_tower=image_tower.eval(), pixels=pixels)


CONFIGURATIONS = ("open_clip_config.json", "config.json")  # one of them tells what a folder holds
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")  # of files of weights: no hub name
_ARCHIVE_NUMBERS = ("input_resolution", "context_length", "vocab_size")  # of OpenAI's archives, not weights


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a weights file: safetensors, a PyTorch file (no code is unpickled) or a TorchScript archive.

    A TorchScript archive, the form of OpenAI's files, can only be opened by torch.jit.load, which may run TorchScript
    that it holds (no Python): take archives from where you would take a program.

    Raises:
        WeightsError: the file holds no state dict or cannot be read; names it.
    """
    return _read_file(Path(path))[0]


def _read_file(path: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Its tensors, and whether it is a TorchScript archive."""
    is_archive = False
    if path.suffix == ".safetensors":
        try:
            return load_file(path), is_archive
        except SafetensorError as error:
            raise WeightsError(f"{path} is no whole safetensors file: {error}") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise WeightsError(f"{path} is no file of weights: {error}") from None
        content = torch.jit.load(str(path), map_location="cpu").state_dict()
        content = {name: value for name, value in content.items() if name not in _ARCHIVE_NUMBERS}
        is_archive = True
    except Exception as error:  # pickle's own errors have no common class
        raise WeightsError(f"{path} cannot be read without executing code from it: {error}") from None
    for key in ("state_dict", "model"):  # beside an optimiser's
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise WeightsError(f"{path} holds no state dict: accepted is a mapping of names to tensors")
    return dict(content), is_archive


def without_ddp(state: State) -> dict[str, torch.Tensor]:
    """A state dict without the prefix "module." of DDP."""
    return {name.removeprefix("module."): value for name, value in state.items()}


# ---------------------------------------------------------------- ViT, DeiT, BERT


def load_vit_(tower: VisionTransformer, model: "ViTModel | DeiTModel", antialias: bool = False) -> None:
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
    layers = len(tower.transformer.blocks)
    _check_same(tower.transformer, model.config)
    _same("layers", layers, model.config.num_hidden_layers)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("pooler.")}
    class_tokens = [name for name in ("cls_token", "distillation_token") if f"embeddings.{name}" in state]
    _same("class tokens", tower.num_class_tokens, len(class_tokens))
    positions = state["embeddings.position_embeddings"][0].detach()
    grid = tower.image_size // tower.patch_size
    state["embeddings.position_embeddings"] = interpolate_positions(positions, len(class_tokens), grid, antialias)
    entries = _entries(
        {
            "class_embedding": f"embeddings.{{{','.join(class_tokens)}}}",
            "position_embedding": "embeddings.position_embeddings",
            "patch_embedding.*": "embeddings.patch_embeddings.projection.*",
            "final_norm.*": "layernorm.*",
        }
    )
    # the names became shorter in the course of transformers 5
    short = "layers.0.attention.q_proj.weight" in state
    prefix, names = ("layers.", _VIT_BLOCK) if short else ("encoder.layer.", _OLDER_VIT_BLOCK)
    entries += _block_entries("transformer.blocks.", prefix, names, layers)
    source = model.config.name_or_path or "the ViT"
    kept = ["projection"] if tower.projection is not None else []
    _put(tower, _in_our_names(state, entries, source), entries, source, kept)


def load_bert_(
    model: "BertModel | BertForMaskedLM",
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
    for part in (text_tower, fusion):
        if part is not None:
            _check_same(part.transformer, config)

    token_types = state["bert.embeddings.token_type_embeddings.weight"]
    positions = state["bert.embeddings.position_embeddings.weight"] + token_types[0]
    if text_tower.context_length > len(positions):
        raise WeightsError(f"context_length {text_tower.context_length} is above {source}'s {len(positions)} positions")
    state["positions"] = positions[: text_tower.context_length]

    embeddings = {
        "token_embedding.weight": "bert.embeddings.word_embeddings.weight",
        "position_embedding": "positions",
        "input_norm.*": "bert.embeddings.LayerNorm.*",
    }
    own = "cls.predictions."
    words = {"dense.*": f"{own}transform.dense.*", "norm.*": f"{own}transform.LayerNorm.*", "bias": f"{own}bias"}
    blocks = "transformer.blocks.", "bert.encoder.layer.", _BERT_BLOCK
    parts = [(text_tower, _entries(embeddings) + _block_entries(*blocks, text_layers))]
    if fusion is not None:
        parts.append((fusion, _block_entries(*blocks, fusion_layers, first=text_layers)))
    if head is not None:
        parts.append((head, _entries(words)))
    for part, entries in parts:
        kept = [name for name in part.state_dict() if name == "projection" or "cross_attention" in name]
        _put(part, _in_our_names(state, entries, source, complete=False), entries, source, kept)


def read_bert(name: str, key: str = "weights") -> "BertModel | BertForMaskedLM":
    """A BERT for `load_bert_`, with the head of masked language modelling where the weights have one.

    Args:
        name: folder that transformers wrote, or a name on the hub.
        key: setting that names it, for messages.
    Raises:
        WeightsError, ValueError: what is no BERT, or cannot be read or had.
    """
    told = find_file(name, ("config.json",), key)
    kind = read_json_object(told).get("model_type")
    if kind != "bert":
        raise WeightsError(f"{key} = {name} is a {kind} of transformers; accepted: bert")
    from transformers import BertForMaskedLM

    model, missing = _of_transformers(BertForMaskedLM, name)
    body = [one for one in missing if not one.startswith("cls.")]
    if body:
        raise WeightsError(f"{key} = {name} lacks {some(body)}")
    return model.bert if missing else model


def _of_transformers(kind: type, name: str) -> tuple[nn.Module, list[str]]:
    """A model of transformers in float32, and the names of what its weights lack, which are drawn at random."""
    folder = Path(name).expanduser()
    options = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    try:
        model, info = kind.from_pretrained(folder if folder.is_dir() else name, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise WeightsError(f"{name} cannot be read by transformers: {str(error).strip().splitlines()[0]}") from error
    return model, [one for one in sorted(info["missing_keys"]) if not _NOT_WEIGHTS.search(one)]


# ---------------------------------------------------------------- into the towers of a run


def settings_of(tower: VisionTransformer | CausalTextTransformer | BidirectionalTextTransformer) -> dict[str, Any]:
    """What must agree where the tensors of one tower are to fill another: setting, or words for it -> value.

    Left out are the numbers that `fill_` has a rule for, and a last LayerNorm and projection that are not there.
    """
    sizes = _sizes(tower.transformer)
    is_image = isinstance(tower, VisionTransformer)
    side = "model.image" if is_image else "model.text"
    told = {
        f"{side}.width": tower.width,
        f"{side}.layers": sizes["num_hidden_layers"],
        f"{side}.heads": sizes["num_attention_heads"],
        f"{side}.mlp_ratio": sizes["intermediate_size"] / tower.width,
        f"{side}.activation": sizes["hidden_act"],
        f"{side}.norm_eps": sizes["layer_norm_eps"],
    }
    if is_image:
        told["model.patch_size"] = tower.patch_size
        told["model.image_kind"] = "clip" if tower.patch_embedding.bias is None else "timm"
        told["model.image.stem.name"] = "" if tower.stem is None else tower.stem.name
        told["class tokens of the image tower"] = tower.num_class_tokens
    else:
        is_causal = isinstance(tower, CausalTextTransformer)
        told["the text tower's order"] = "causal (CLIP)" if is_causal else "bidirectional (BERT)"
        told["ids of data.vocabulary"] = tower.vocabulary_size
        stem = tower.stem
        told["model.text.stem"] = stem and f"{len(stem.network.transformer.blocks)} layers of width {stem.width}"
        if is_causal:
            told["id of the end token"] = tower.end_id
    has_final_norm = not isinstance(tower.final_norm, nn.Identity)
    if tower.projection is not None:
        tokens = getattr(tower, "num_class_tokens", 1)
        told["model.embedding_dim"] = tokens * tower.projection_dim
        if not is_image:
            told["class tokens of the text tower"] = tokens
    if tower.projection is not None or has_final_norm:
        told["model.final_layer_norm"] = has_final_norm
    return told


@torch.no_grad()
def fill_(tower: nn.Module, weights: Weights, key: str) -> list[str]:
    """Fills the tower of a run with that of the same side, in place.

    Rules for what need not be equal:
        image size     position rows are interpolated bicubically, with antialiasing as open_clip does it for CLIP,
                       without it as DeiT's authors do for the other kind; those of a stem as timm does it
        captions       of data.context_length ids take the first position rows; longer than the weights' is an error.
                       Several class tokens on top of BERT take its first rows
        colours        pictures are normalised as CLIP's; what the weights were trained with instead is folded into the
                       patch embedding, which has a bias there
        projection     new, and with it the last LayerNorm where the weights have none (ViT, DeiT, BERT)

    Args:
        tower: of the run, not yet wrapped.
        weights: with a tower of the same side.
        key: setting that names them, for messages.
    Returns:
        Names of the tower's parameters that are filled.
    Raises:
        WeightsError: what does not fit, each with its key and both values.
    """
    if not hasattr(tower, "transformer"):
        raise WeightsError(
            f"{key}: a tower of no layers takes weights through its stem; accepted: model.*.layers above 0"
        )
    is_image = isinstance(tower, VisionTransformer)
    source = weights.image_tower if is_image else weights.text_tower
    if source is None:
        side, other = ("image", "text") if is_image else ("text", "image")
        raise WeightsError(f"{key} = {weights.source} has no {side} tower; accepted: model.{other}.init for the other")
    ours, theirs = settings_of(tower), settings_of(source)
    unlike = {name: value for name, value in theirs.items() if ours.get(name, value) != value}
    rows, told_rows = len(tower.position_embedding), len(source.position_embedding)
    if not is_image and rows > told_rows:
        unlike["data.context_length"] = source.context_length
        ours["data.context_length"] = tower.context_length
    if unlike:
        settings = [f"{name}={str(value).lower()}" for name, value in unlike.items() if name.startswith("model.")]
        fit = f"; as the weights have it: {' '.join(settings)}" if settings else ""
        found = "; ".join(f"{name} = {ours[name]}, in the weights {value}" for name, value in unlike.items())
        raise WeightsError(f"{key} = {weights.source} does not fit: {found}{fit}")
    state = dict(source.state_dict())
    if is_image:
        grid, tokens = tower.image_size // tower.patch_size, tower.num_class_tokens
        antialias = tower.patch_embedding.bias is None
        state["position_embedding"] = interpolate_positions(state["position_embedding"], tokens, grid, antialias)
        if source.stem is not None:
            state |= {f"stem.{name}": value for name, value in source.stem.state_at(tower.image_size).items()}
    else:
        state["position_embedding"] = state["position_embedding"][:rows]
    if weights.pixels is not None:
        _fold_colours_(state, *weights.pixels)
    left = tower.load_state_dict(state, strict=False).unexpected_keys
    assert not left, left  # the settings agree
    return [name for name, _ in tower.named_parameters() if name in state]


def _fold_colours_(state: dict[str, torch.Tensor], mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Makes a patch embedding of pixels (p - mean) / std one of pixels normalised as CLIP's; exact, as nothing pads."""
    mean, std, clip_mean, clip_std = (torch.tensor(each).view(3, 1, 1) for each in (mean, std, CLIP_MEAN, CLIP_STD))
    weight = state["patch_embedding.weight"] / std
    state["patch_embedding.bias"] = state["patch_embedding.bias"] + (weight * (clip_mean - mean)).sum(dim=(1, 2, 3))
    state["patch_embedding.weight"] = weight * clip_std


def lock_(tower: nn.Module, filled: Iterable[str], lowest: int | str) -> None:
    """Takes the gradient from what the weights have filled: all of it, or the embeddings and the lowest blocks.

    The towers have no running statistics, and a locked stem is one that is held still, so nothing of what is locked
    moves in train mode either.

    Args:
        tower: of the run.
        filled: as `fill_` returns them; a new projection is always trained.
        lowest: "all", or how many blocks.
    """
    parameters = dict(tower.named_parameters())
    for name in filled:
        block = re.match(r"transformer\.blocks\.(\d+)\.", name)
        height = int(block[1]) if block else float("inf") if name.startswith(("final_norm", "projection")) else -1
        if lowest == "all" or height < lowest:
            parameters[name].requires_grad_(False)


# ---------------------------------------------------------------- moving tensors

_NOT_WEIGHTS = re.compile(r"(^|\.)(attn_mask|position_ids)$")  # buffers that older versions saved


def _in_our_names(state: State, entries: list[_Entry], source: str, complete: bool = True) -> dict[str, torch.Tensor]:
    """Their tensors under our names.

    Args:
        complete: every tensor of theirs must be used.
    """
    used = [name for entry in entries for name in entry.theirs]
    missing = [name for name in used if name not in state]
    if missing:
        raise WeightsError(f"{source} lacks {some(missing)}")
    left = [name for name in state.keys() - set(used) if not _NOT_WEIGHTS.search(name)]
    if complete and left:
        raise WeightsError(f"{source} has tensors that this model has no place for: {some(sorted(left))}")
    spoilt = [name for name in used if not state[name].is_meta and not state[name].isfinite().all()]
    if spoilt:
        raise WeightsError(f"{source} holds weights that are not finite: {some(spoilt)}")
    found = {}
    for entry in entries:
        parts = [state[name].detach() for name in entry.theirs]
        found[entry.ours] = parts[0].T if entry.transposed else torch.cat(parts) if len(parts) > 1 else parts[0]
    return found


def _put(module: nn.Module, found: State, entries: list[_Entry], source: str, kept: list[str]) -> None:
    """Copies tensors under our names into a module; every tensor of ours is filled or named in `kept`."""
    target = module.state_dict()
    filled = {name: target[name] for name in kept}
    dtype = torch.float64 if all(value.dtype == torch.float64 for value in found.values()) else torch.float32
    for entry in entries:
        value, expected = found[entry.ours], target[entry.ours].shape
        if [n for n in value.shape if n > 1] != [n for n in expected if n > 1]:  # axes of length 1 may come and go
            raise WeightsError(
                f"{source}: {', '.join(entry.theirs)} has shape {tuple(value.shape)}, {entry.ours} is {tuple(expected)}"
            )
        filled[entry.ours] = value.reshape(expected).to(dtype).clone(memory_format=torch.contiguous_format)
    unfilled = [name for name in target if name not in filled]
    if unfilled:
        raise WeightsError(f"{source} has nothing for {some(unfilled)}")
    module.load_state_dict(filled, assign=any(parameter.is_meta for parameter in module.parameters()))


def _exported(model: TwoTowers, layout: Layout) -> dict[str, torch.Tensor]:
    """Our state dict in another layout."""
    state = model.state_dict()
    exported = {}
    layers = (len(tower.transformer.blocks) for tower in (model.image_tower, model.text_tower))
    for entry in _tower_entries(layout, *layers):
        value = state.pop(entry.ours).detach().cpu()
        if entry.ours in ("image_tower.class_embedding", "logit_scale.log_logit_scale"):
            value = value[0]  # theirs has no axis for several
        value = value.T if entry.transposed else value
        parts = value.chunk(len(entry.theirs)) if len(entry.theirs) > 1 else [value]
        exported |= {name: part.contiguous().clone() for name, part in zip(entry.theirs, parts)}
    if state:
        raise WeightsError(f"the layout has no place for {some(list(state))}")
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


def _sizes(transformer: Transformer) -> dict[str, Any]:
    """Of a transformer of ours, under the names of transformers' configurations."""
    first = transformer.blocks[0]
    return {
        "num_hidden_layers": len(transformer.blocks),
        "num_attention_heads": first.attention.heads,
        "intermediate_size": first.mlp[0].out_features,
        "hidden_act": "quick_gelu" if isinstance(first.mlp[1], QuickGELU) else "gelu",
        "layer_norm_eps": first.mlp_norm.eps,
    }


def _check_same(transformer: Transformer, config: Any) -> None:
    """Refuses a configuration of transformers whose eps, heads or activation differ, which no shape tells."""
    sizes = _sizes(transformer)
    _same("norm_eps", sizes["layer_norm_eps"], config.layer_norm_eps)
    _same("heads", sizes["num_attention_heads"], config.num_attention_heads)
    _same("activation", sizes["hidden_act"], _our_activation(config.hidden_act))


def _same(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise WeightsError(f"{what} is {ours} here and {theirs} in the weights")


def _our_activation(name: str) -> Activation:
    if name not in ("gelu", "quick_gelu"):
        raise WeightsError(f"activation {name!r}; accepted: gelu, quick_gelu")
    return name


def _count(names: Iterable[str], prefix: str) -> int:
    """Blocks behind a prefix: one more than the highest number."""
    found = [int(match[1]) for match in (re.match(rf"{re.escape(prefix)}(\d+)\.", name) for name in names) if match]
    return max(found, default=-1) + 1
