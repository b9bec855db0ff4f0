"""Weights from files, folders and names on the hub; no code in them is executed."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from common.base.arguments import some
from common.data.text_files import find_file, read_json_object
from common.data.transforms import ImageTransform
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.transformer import Activation
from common.encoders.two_towers import TwoTowers
from common.encoders.weights.heads import NOT_STATED, Heads
from common.encoders.weights.keys import TRANSFORMERS, check_keys
from common.encoders.weights.layouts import ARCHIVE_NUMBERS, NOT_WEIGHTS, WeightsError, without_ddp
from common.encoders.weights.open_clip_folder import check_sizes, read_configuration
from common.encoders.weights.pixels import pixels_of_folder
from common.encoders.weights.single import load_bert_, vit_tower
from common.encoders.weights.towers import (
    Weights,
    clip_from_open_clip,
    clip_from_transformers,
    our_activation,
    sizes_of,
)

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertModel

SIDES = ("image", "text")
CONFIGURATIONS = ("open_clip_config.json", "config.json")  # one of them states what a folder holds
_OF_OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_OF_TRANSFORMERS = ("vision_model.", "text_model.", "embeddings.", "bert.", "vit.", "deit.")  # first words of names


def read_source(
    name: str, activation: Activation | None = None, key: str = "weights", heads: Heads = NOT_STATED
) -> Weights:
    """Weights that a user names; nothing in them is executed. Runs of this repository: `open_source`.

    Args:
        name: a folder of transformers (CLIP, ViT, DeiT, BERT) or in open_clip's hub layout (open_clip_config.json
            beside the weights), the hub name of such a model (local cache first), or a file of weights in OpenAI's
            layout (.safetensors, .pt, .bin).
        activation: of the MLPs. Needed for a bare file, except OpenAI's archives (TorchScript), which are quick_gelu.
            If the source states it, another one is refused.
        heads: "image", "text" -> attention heads of a bare file whose sizes no published model has; None = not stated.
            A side left out is a tower that nobody takes.
    """
    path, named = Path(name).expanduser(), None
    if described_by(path) is not None:
        name, named = str(path.parent), path
    elif path.is_file():
        state, stated, is_openai = read_bare(path, activation)
        clip = clip_from_open_clip(state, stated, source=str(path), heads=heads)
        pixels = ImageTransform(clip.image_tower.image_size) if is_openai else None
        return _of_clip(clip, name, pixels, heads)
    configuration = find_file(name, CONFIGURATIONS, key)
    if configuration.name == "open_clip_config.json":
        return _read_open_clip(name, named, configuration, activation, key)
    return _read_transformers(name, configuration, activation)


def read_bare(path: Path, activation: Activation | None) -> tuple[dict[str, torch.Tensor], Activation, bool]:
    """Of a bare file of weights: tensors, the activation of the MLPs (see `read_source`), whether it is OpenAI's."""
    if described_by(path) is not None:
        raise WeightsError(
            f"{path}: {CONFIGURATIONS[0]} beside it states activation, heads and preprocessing, which --layout "
            "open_clip does not read; expected the folder without --layout, or, for another geometry than the sphere, "
            "a copy of the file under another name"
        )
    state, is_openai = _read_file(path)
    if any(name.startswith("image_tower.") for name in without_ddp(state)):
        raise WeightsError(
            f"{path} holds towers of this repository; expected: the folder of its run or checkpoint, whose state.json "
            "states what the tensors are"
        )
    theirs = next((name for name in without_ddp(state) if name.startswith(_OF_TRANSFORMERS)), None)
    if theirs is not None:
        raise WeightsError(
            f"{path} is in transformers' layout ({theirs}), where config.json states heads and activation; name the "
            "folder that holds both"
        )
    if activation not in get_args(Activation) and not is_openai:
        got = "" if activation is None else f", got {activation!r}"
        raise WeightsError(
            f"{path} does not state its activation: give quick_gelu (OpenAI's own weights) or gelu (most others), by "
            "--activation, or where a run starts from it by model.image.activation or model.text.activation (of the "
            f"side that starts from it){got}"
        )
    return state, agreed_activation(path, "quick_gelu", activation) if is_openai else activation, is_openai


def described_by(path: Path) -> Path | None:
    """The open_clip_config.json beside a file of weights that states its activation, heads and preprocessing."""
    beside = path.with_name(CONFIGURATIONS[0]) if path.name in _OF_OPEN_CLIP else None
    return beside if beside is not None and beside.is_file() else None


def agreed_activation(source: str | Path, stated: Activation, activation: Activation | None) -> Activation:
    """The activation that a source states; refuses another one from the user, None = not stated."""
    if activation not in (None, stated):
        raise WeightsError(f"{source} states the activation {stated}; expected {stated}, got {activation}")
    return stated


def _of_clip(clip: TwoTowers, source: str, pixels: ImageTransform | None, sides: Collection[str]) -> Weights:
    beside = {name: value for name, value in clip.state_dict().items() if name.startswith("logit_")}
    towers = {f"{side}_tower": getattr(clip, f"{side}_tower") for side in sides}
    return Weights(source, **towers, beside=beside, geometry="sphere", pixels=pixels)


def _read_open_clip(
    name: str, named: Path | None, configuration: Path, activation: Activation | None, key: str
) -> Weights:
    model, image, text, pixels = read_configuration(configuration)
    file = named or find_file(name, _OF_OPEN_CLIP, key)
    activation = agreed_activation(name, "quick_gelu" if model.get("quick_gelu") else "gelu", activation)
    clip = clip_from_open_clip(read_weights(file), activation, str(file), image=image, text=text)
    check_sizes(clip, model, f"{configuration}: ")
    return _of_clip(clip, name, pixels, SIDES)


def _read_transformers(name: str, configuration: Path, activation: Activation | None) -> Weights:
    kind = read_json_object(configuration).get("model_type")
    if kind not in ("clip", "vit", "deit", "bert"):
        raise WeightsError(f"{name} is a {kind} of transformers; expected: clip, vit, deit, bert")
    if kind == "bert":
        check_keys(read_json_object(configuration), TRANSFORMERS["bert"], f"{configuration}: ")
    from transformers import AutoModel

    model, missing = model_of_transformers(AutoModel, name)
    missing = [one for one in missing if "pooler" not in one]
    if missing:
        raise WeightsError(f"{name} lacks {some(missing)}")
    if kind == "clip":
        clip = clip_from_transformers(model)
        agreed_activation(name, sizes_of(clip.image_tower.transformer)["hidden_act"], activation)
        return _of_clip(clip, name, pixels_of_folder(name), SIDES)
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
    return Weights(name, image_tower=vit_tower(model, **shared), pixels=pixels_of_folder(name))


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a weights file: safetensors, a PyTorch file (no code is unpickled) or a TorchScript archive.

    torch.jit.load opens archives, the form of OpenAI's files, and may run TorchScript that they hold (no Python): take
    archives only from where you would take a program.
    """
    return _read_file(Path(path))[0]


def _read_file(path: Path) -> tuple[dict[str, torch.Tensor], bool]:
    # Its tensors, and whether it is an archive of OpenAI's.
    is_openai = False
    if path.suffix == ".safetensors":
        try:
            return load_file(path), is_openai
        except SafetensorError as error:
            raise WeightsError(f"{path} is not a complete safetensors file: {error}") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise WeightsError(f"{path} is no file of weights: {_sentence(error)}") from None
        content = torch.jit.load(str(path), map_location="cpu").state_dict()
        is_openai = set(ARCHIVE_NUMBERS) <= content.keys()  # any model can be saved as TorchScript
        content = {name: value for name, value in content.items() if name not in ARCHIVE_NUMBERS}
    except Exception as error:  # pickle's own errors have no common class
        raise WeightsError(f"{path} cannot be read without executing code from it: {_sentence(error)}") from None
    for key in ("state_dict", "model_state_dict", "model"):  # beside an optimiser's
        if not isinstance(content, dict) or key not in content:
            continue
        states = [name for name, value in content.items() if isinstance(value, dict) and value]
        averaged = next((name for name in states if re.search(r"(^|_)ema(_|$)", str(name))), None)
        if averaged is not None:
            raise WeightsError(
                f"{path} holds raw weights ({key}) and averaged ones ({averaged}); expected one state: save the one to "
                "start from in a separate file"
            )
        content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise WeightsError(f"{path} holds no state dict; expected a mapping of names to tensors")
    return dict(content), is_openai


def _sentence(error: Exception) -> str:
    # The first sentence about the file, of torch's pages of advice with terminal escapes.
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rpartition("WeightsUnpickler error: ")[2].strip() or "it is empty"
    reason = text.splitlines()[0].partition(". ")[0]
    return f"{reason}; expected tensors only, in a whole file of safetensors or of torch.save (pickle protocol 2)"


def read_bert(name: str, key: str = "weights") -> "BertModel | BertForMaskedLM":
    """A BERT for `load_bert_`, with the masked-language head if the weights have one."""
    configuration = find_file(name, ("config.json",), key)
    kind = read_json_object(configuration).get("model_type")
    if kind != "bert":
        raise WeightsError(f"{key} = {name} is a {kind} of transformers; expected: bert")
    check_keys(read_json_object(configuration), TRANSFORMERS["bert"], f"{configuration}: ")
    from transformers import BertForMaskedLM

    model, missing = model_of_transformers(BertForMaskedLM, name)
    body = [one for one in missing if not one.startswith("cls.")]
    if body:
        raise WeightsError(f"{key} = {name} lacks {some(body)}")
    return model.bert if missing else model


_BODY = re.compile(r"(^|\.)((embeddings|encoder|layers|(vision|text)_model|(visual|text)_projection)\.|logit_bias$)")


def model_of_transformers(kind: type, name: str) -> tuple[nn.Module, list[str]]:
    """A model of transformers in float32, and the names of what its weights lack, which are drawn at random.

    Raises:
        WeightsError: weights that cannot be read, have other shapes than config.json states, or more of the body.
    """
    folder = Path(name).expanduser()
    options = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    options["ignore_mismatched_sizes"] = True  # the message below has names and shapes
    try:
        model, info = kind.from_pretrained(folder if folder.is_dir() else name, **options)
    except Exception as error:  # files and configurations are read by libraries with error classes of their own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{name} cannot be read by transformers: {first}") from error
    unlike = [f"{one} {tuple(has)}, by config.json {tuple(wants)}" for one, has, wants in info["mismatched_keys"]]
    if unlike:
        raise WeightsError(f"{name} has tensors of other shapes than its config.json states: {some(sorted(unlike))}")
    # heads for other tasks may stand beside the body; more of the body is another model
    more = [one for one in sorted(info["unexpected_keys"]) if _BODY.search(one) and not NOT_WEIGHTS.search(one)]
    if more:
        raise WeightsError(f"{name} has tensors that a model of its config.json has no place for: {some(more)}")
    return model, [one for one in sorted(info["missing_keys"]) if not NOT_WEIGHTS.search(one)]
