"""Weights in and out: transformers (CLIP, ViT, DeiT, BERT), OpenAI's CLIP archives and open_clip's layout.

A layout (layouts.py) is a table of our names and theirs, read in both directions; sizes of towers come from the shapes
of the tensors. What a table does not account for, on either side, is a `WeightsError` that names it: it would be lost
silently.
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
    model_of_transformers,
    read_bare,
    read_bert,
    read_source,
    read_weights,
)
from common.encoders.weights.single import load_bert_
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
    "load_bert_", "lock_", "model_of_transformers", "pixels_of_processor", "preprocess_of", "processor_of",
    "read_bare", "read_bert", "read_source", "read_weights", "settings_of", "towers_of_sizes",
    "two_towers_from", "without_ddp",
]  # fmt: skip
