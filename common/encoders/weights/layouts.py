"""Layouts: tables of our names and theirs, read in both directions, and the moving of tensors by them. In tables

name.*         stands for weight and bias, also where another sign is before the star;
{q,k,v}_proj   for several tensors that lie one after the other along our first axis;
name.T         for the transpose.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from common.base.arguments import some

State = Mapping[str, torch.Tensor]


class WeightsError(ValueError):
    """Weights that do not fit; the message is for the user."""


BLOCK = ("attention_norm", "attention.in_projection", "attention.out_projection", "mlp_norm", "mlp.0", "mlp.2")
OPENAI_BLOCK = ("ln_1.*", "attn.in_proj_*", "attn.out_proj.*", "ln_2.*", "mlp.c_fc.*", "mlp.c_proj.*")
CLIP_BLOCK = (
    "layer_norm1.*", "self_attn.{q,k,v}_proj.*", "self_attn.out_proj.*", "layer_norm2.*", "mlp.fc1.*", "mlp.fc2.*",
)  # fmt: skip
VIT_BLOCK = (
    "layernorm_before.*", "attention.{q,k,v}_proj.*", "attention.o_proj.*", "layernorm_after.*", "mlp.fc1.*",
    "mlp.fc2.*",
)  # fmt: skip
OLDER_VIT_BLOCK = (
    "layernorm_before.*", "attention.attention.{query,key,value}.*", "attention.output.dense.*", "layernorm_after.*",
    "intermediate.dense.*", "output.dense.*",
)  # fmt: skip
BERT_BLOCK = (
    "attention.output.LayerNorm.*", "attention.self.{query,key,value}.*", "attention.output.dense.*",
    "output.LayerNorm.*", "intermediate.dense.*", "output.dense.*",
)  # fmt: skip
ARCHIVE_NUMBERS = ("input_resolution", "context_length", "vocab_size")  # of OpenAI's archives, not weights
LOGIT_BIAS = "logit_bias.logit_bias"  # of models that were trained by the sigmoid loss
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NOT_WEIGHTS = re.compile(r"(^|\.)(attn_mask|position_ids)$")  # buffers that older versions saved


@dataclass(frozen=True)
class Layout:
    """Where another code keeps the tensors of two towers, in the shorthand at the top of this file.

    single: our name -> theirs.
    image_blocks, text_blocks: prefix before the number of a block, and its names in the order of `BLOCK`.
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
        LOGIT_BIAS: "logit_bias",
    },
    ("visual.transformer.resblocks.", OPENAI_BLOCK),
    ("transformer.resblocks.", OPENAI_BLOCK),
)
TRANSFORMERS_CLIP = Layout(
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
    ("vision_model.encoder.layers.", CLIP_BLOCK),
    ("text_model.encoder.layers.", CLIP_BLOCK),
)


@dataclass(frozen=True)
class Entry:
    """One of our tensors; several of theirs are joined along our first axis."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool


def entries_of(table: Mapping[str, str], our_prefix: str = "", their_prefix: str = "") -> list[Entry]:
    """The rows of a table without its shorthand."""
    entries = []
    for ours, theirs in table.items():
        for part in ("weight", "bias") if "*" in theirs else ("",):
            name = their_prefix + theirs.replace("*", part).removesuffix(".T")
            before, _, rest = name.partition("{")
            several, _, after = rest.partition("}")
            names = tuple(f"{before}{one}{after}" for one in several.split(","))
            entries.append(Entry(our_prefix + ours.replace("*", part), names, theirs.endswith(".T")))
    return entries


def block_entries(ours: str, theirs: str, names: Sequence[str], layers: int, first: int = 0) -> list[Entry]:
    """Of `layers` blocks behind a prefix; their block `first` is our block 0."""
    table = {f"{layer}.*": name for layer, name in zip(BLOCK, names, strict=True)}
    return [entry for i in range(layers) for entry in entries_of(table, f"{ours}{i}.", f"{theirs}{first + i}.")]


def tower_entries(layout: Layout, image_layers: int, text_layers: int) -> list[Entry]:
    """Of both towers."""
    entries = entries_of(layout.single)
    entries += block_entries("image_tower.transformer.blocks.", *layout.image_blocks, image_layers)
    return entries + block_entries("text_tower.transformer.blocks.", *layout.text_blocks, text_layers)


def without_ddp(state: State) -> dict[str, torch.Tensor]:
    """A state dict without wrappers' prefixes: DDP's "module.", torch.compile's "_orig_mod.", Lightning's "model.".

    A "model." that only some names have stays.
    """
    state = {re.sub(r"^module\.|(?<![^.])_orig_mod\.", "", name): value for name, value in state.items()}
    prefix = next(
        (prefix for prefix in ("model.", "module.") if state and all(n.startswith(prefix) for n in state)), ""
    )
    return without_ddp({n.removeprefix(prefix): value for n, value in state.items()}) if prefix else state


def in_our_names(state: State, entries: list[Entry], source: str, complete: bool = True) -> dict[str, torch.Tensor]:
    """Their tensors under our names.

    Args:
        complete: every tensor of theirs must be used.
    """
    used = [name for entry in entries for name in entry.theirs]
    missing = [name for name in used if name not in state]
    if missing:
        raise WeightsError(f"{source} lacks {some(missing)}")
    left = [name for name in state.keys() - set(used) if not NOT_WEIGHTS.search(name)]
    if complete and left:
        raise WeightsError(f"{source} has tensors that this model has no place for: {some(sorted(left))}")
    for name in used:
        value = state[name]
        if value.layout != torch.strided or value.dtype not in _DTYPES:  # an integer is a weight only with its scale
            raise WeightsError(
                f"{source}: {name} is a tensor of {value.dtype}, {value.layout}; expected dense weights of one of: "
                f"{', '.join(map(str, _DTYPES))}"
            )
    spoilt = [name for name in used if not state[name].is_meta and not state[name].isfinite().all()]
    if spoilt:
        raise WeightsError(f"{source} holds weights that are not finite: {some(spoilt)}")
    renamed = {}
    for entry in entries:
        parts = [state[name].detach() for name in entry.theirs]
        renamed[entry.ours] = parts[0].T if entry.transposed else torch.cat(parts) if len(parts) > 1 else parts[0]
    return renamed


def put_(module: nn.Module, tensors: State, entries: list[Entry], source: str, kept: list[str]) -> None:
    """Copies tensors under our names into a module; every tensor of ours is filled, or is named in `kept` and stays."""
    target = module.state_dict()
    filled = {name: target[name] for name in kept}
    dtype = torch.float64 if all(value.dtype == torch.float64 for value in tensors.values()) else torch.float32
    for entry in entries:
        value, expected = tensors[entry.ours], target[entry.ours].shape
        if [n for n in value.shape if n > 1] != [n for n in expected if n > 1]:  # axes of length 1 may come and go
            raise WeightsError(
                f"{source}: {', '.join(entry.theirs)} has shape {tuple(value.shape)}, {entry.ours} is {tuple(expected)}"
            )
        filled[entry.ours] = value.reshape(expected).to(dtype).clone(memory_format=torch.contiguous_format)
    unfilled = [name for name in target if name not in filled]
    if unfilled:
        raise WeightsError(f"{source} lacks tensors for {some(unfilled)}")
    module.load_state_dict(filled, assign=any(parameter.is_meta for parameter in module.parameters()))


def count_blocks(names: Iterable[str], prefix: str) -> int:
    """Blocks behind a prefix: one more than the highest number."""
    numbers = [int(match[1]) for match in (re.match(rf"{re.escape(prefix)}(\d+)\.", name) for name in names) if match]
    return max(numbers, default=-1) + 1
