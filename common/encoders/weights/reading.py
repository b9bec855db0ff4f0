"""From what a user names to weights: files, folders and names on the hub; nothing in them is executed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from common.base.arguments import some
from common.data.text_files import find_file, read_json_object
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.transformer import Activation
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.encoders.weights.layouts import ARCHIVE_NUMBERS, NOT_WEIGHTS, WeightsError
from common.encoders.weights.single import load_bert_, load_vit_
from common.encoders.weights.towers import (
    Weights,
    clip_from_open_clip,
    clip_from_transformers,
    our_activation,
    sizes_of,
)

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertModel

CONFIGURATIONS = ("open_clip_config.json", "config.json")  # one of them tells what a folder holds
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")  # of files of weights: no hub name


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
        agreed_activation(name, sizes_of(clip.image_tower.transformer)["hidden_act"], activation)
        return _of_clip(clip, name)
    config = model.config
    shared = {
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "projection_dim": None,
        "activation": agreed_activation(name, our_activation(config.hidden_act), activation),
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
        content = {name: value for name, value in content.items() if name not in ARCHIVE_NUMBERS}
        is_archive = True
    except Exception as error:  # pickle's own errors have no common class
        raise WeightsError(f"{path} cannot be read without executing code from it: {error}") from None
    for key in ("state_dict", "model"):  # beside an optimiser's
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise WeightsError(f"{path} holds no state dict: accepted is a mapping of names to tensors")
    return dict(content), is_archive


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
    return model, [one for one in sorted(info["missing_keys"]) if not NOT_WEIGHTS.search(one)]
