"""Weights in and out: transformers (CLIP, ViT, DeiT, BERT), OpenAI's CLIP archives and open_clip's layout.

A layout is a table of our names and theirs. The same table is read in both directions, and the sizes of the towers are
read off the shapes of what it finds. Whatever a table does not account for, on either side, is an error: weights that
are not understood would be lost silently. Refusals are a `WeightsError` that names what does not fit.

    layouts.py           the tables, and tensors moved by them
    towers.py            two towers from a state dict
    single.py            one tower from a ViT, DeiT or BERT
    reading.py           files, folders, hub names
    open_clip_folder.py  what open_clip_config.json states
    keys.py              keys of configurations: read, without effect, or refused
    pixels.py            how pixels become inputs
    heads.py             attention heads of bare files
    filling.py           into the towers of a run
    exporting.py         out again
"""

from common.encoders.weights.exporting import clip_to_open_clip, clip_to_transformers
from common.encoders.weights.filling import fill_, lock_, settings_of
from common.encoders.weights.heads import (
    HEADS_HELP,
    NOT_STATED,
    Heads,
    agreed_heads,
    heads_argument,
    heads_in,
    heads_of,
)
from common.encoders.weights.layouts import (
    BLOCK,
    OPEN_CLIP,
    OPENAI_BLOCK,
    Layout,
    State,
    WeightsError,
    count_blocks,
    without_ddp,
)
from common.encoders.weights.pixels import pixels_of_processor, preprocess_of, processor_of
from common.encoders.weights.reading import (
    CONFIGURATIONS,
    agreed_activation,
    load_clip,
    read_bare,
    read_bert,
    read_clip,
    read_source,
    read_weights,
)
from common.encoders.weights.single import load_bert_, load_vit_
from common.encoders.weights.towers import (
    Weights,
    clip_from_open_clip,
    clip_from_transformers,
    towers_of_sizes,
    two_towers_from,
)

__all__ = [
    "BLOCK", "CONFIGURATIONS", "HEADS_HELP", "NOT_STATED", "OPENAI_BLOCK", "OPEN_CLIP", "Heads", "Layout", "State",
    "Weights", "WeightsError", "agreed_activation", "agreed_heads", "clip_from_open_clip", "clip_from_transformers",
    "clip_to_open_clip", "clip_to_transformers", "count_blocks", "fill_", "heads_argument", "heads_in", "heads_of",
    "load_bert_", "load_clip", "load_vit_", "lock_", "pixels_of_processor", "preprocess_of", "processor_of",
    "read_bare", "read_bert", "read_clip", "read_source", "read_weights", "settings_of", "towers_of_sizes",
    "two_towers_from", "without_ddp",
]  # fmt: skip
