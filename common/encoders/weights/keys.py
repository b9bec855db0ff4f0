"""Keys of the configurations of open_clip and transformers: read into our towers, without effect, or restricted.

For restricted keys the tables list the values that our towers compute; another value is refused by name. Dropout is no
part of the weights: whatever a configuration states, model.text.dropout and model.patch_dropout of a run decide.
"""

import json
from collections.abc import Mapping
from typing import Any

from common.base.arguments import multiples_beside
from common.encoders.weights.layouts import WeightsError

READ = "read into our towers"
FREE = "changes no feature, at any value"
TRAINING = "acts in training only, where the settings of the run decide"
Table = Mapping[str, str | tuple[Any, ...]]  # a tuple: the values that our towers compute, the library's default first


def _same(word: str, *keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, word)


_OFF = (False,)
_CUSTOM_BLOCKS: Table = {
    "block_type": (None, "default"), "qk_norm": _OFF, "scaled_cosine_attn": _OFF, "scale_heads": _OFF,
    "scale_attn_inner": _OFF, "scale_attn": _OFF, "scale_fc": _OFF,
}  # fmt: skip

# ---------------------------------------------------------------- open_clip

OPEN_CLIP_MODEL: Table = {
    **_same(READ, "embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_bias"),
    **_same(FREE, "init_logit_scale", "nonscalar_logit_scale", "cast_dtype", "output_dict", "custom_text"),
    "multimodal_cfg": (None,),
}
OPEN_CLIP_VISION: Table = {
    **_same(READ, "layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "norm_kwargs"),
    "patch_dropout": TRAINING,
    # only with attentional_pool or timm; one LayerNorm row does not depend on the others
    **_same(FREE, "attn_pooler_queries", "attn_pooler_heads", "final_ln_after_pool", "output_tokens"),
    **_same(FREE, "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path"),
    "pos_embed_type": FREE,  # the tensor is in the weights in either case
    "ls_init_value": (None,),
    "attentional_pool": _OFF,
    "no_ln_pre": _OFF,
    "pool_type": ("tok",),
    "act_kwargs": (None, {}),
    "timm_model_name": (None, ""),
    **_CUSTOM_BLOCKS,
}
OPEN_CLIP_TEXT: Table = {
    **_same(READ, "context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "norm_kwargs", "eos_id"),
    # pad_id only with embed_cls, the hf_... only with hf_model_name
    **_same(FREE, "pad_id", "final_ln_after_pool", "output_tokens"),
    **_same(FREE, "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"),
    "hf_tokenizer_name": (None, ""),
    "tokenizer_mode": (None,),
    "tokenizer_kwargs": (None, {}, {"clean": "lower"}),
    "ls_init_value": (None,),
    "embed_cls": _OFF,
    "no_causal_mask": _OFF,
    "pool_type": ("argmax", "eos"),
    "proj_bias": _OFF,
    "proj_type": ("linear",),
    "act_kwargs": (None, {}),
    "hf_model_name": (None, ""),
    **_CUSTOM_BLOCKS,
}

# ---------------------------------------------------------------- transformers

_EVERY: Table = {  # of transformers' configurations
    **_same(FREE, "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype"),
    **_same(FREE, "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "_name_or_path", "model_type"),
    **_same(FREE, "output_attentions"),
    "is_encoder_decoder": _OFF,
}
_SIZES: Table = {
    **_same(READ, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps"),
    "hidden_act": ("quick_gelu", "gelu"),
    "initializer_range": FREE,
}
_CLIP_SIDE: Table = {
    **_EVERY, **_SIZES, **_same(FREE, "projection_dim", "initializer_factor"), "attention_dropout": TRAINING,
}  # fmt: skip
_PICTURES: Table = {**_same(READ, "image_size", "patch_size"), "num_channels": (3,)}
_VIT: Table = {
    **_EVERY, **_SIZES, **_PICTURES,
    **_same(TRAINING, "hidden_dropout_prob", "attention_probs_dropout_prob"),
    **_same(FREE, "encoder_stride", "pooler_output_size", "pooler_act"),
    "qkv_bias": (True,),
}  # fmt: skip
TRANSFORMERS: Mapping[str, Table] = {  # by model_type
    "clip": {
        **_EVERY, **_same(READ, "text_config", "vision_config"),
        **_same(FREE, "projection_dim", "logit_scale_init_value", "initializer_factor"),
    },
    "clip_vision_model": {**_CLIP_SIDE, **_PICTURES},
    "clip_text_model": {
        **_CLIP_SIDE, **_same(READ, "vocab_size", "max_position_embeddings", "eos_token_id"),
        **_same(FREE, "pad_token_id", "bos_token_id"),
    },
    "vit": _VIT,
    "deit": _VIT,
    "bert": {
        **_EVERY, **_SIZES, **_same(READ, "vocab_size", "max_position_embeddings", "type_vocab_size"),
        **_same(TRAINING, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        **_same(FREE, "classifier_dropout", "use_cache"),  # of a head that is not taken
        **_same(FREE, "num_labels", "gradient_checkpointing", "directionality", "pooler_fc_size", "pooler_type"),
        **_same(FREE, "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        **_same(FREE, "pad_token_id", "bos_token_id", "eos_token_id"),  # ids come from the tokenizer
        **_same(FREE, "torch_dtype", "finetuning_task"),
        "is_decoder": _OFF,
        "add_cross_attention": _OFF,
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    },
}  # fmt: skip
PROCESSOR: Table = {
    **_same(READ, "size", "crop_size", "do_center_crop", "do_rescale", "rescale_factor", "do_normalize"),
    **_same(READ, "image_mean", "image_std", "resample"),
    # ours are always RGB (of a transparent picture its colours, not its blend with white: docs/weights.md); the form of
    # the answer; FLAVA's codebook and masks are not used
    **_same(FREE, "do_convert_rgb", "default_to_square", "input_data_format", "device", "return_tensors"),
    **_same(FREE, "disable_grouping", "image_seq_length", "return_image_mask", "input_size_patches", "pad_size"),
    **_same(FREE, "total_mask_patches", "mask_group_min_patches", "mask_group_max_patches"),
    **_same(FREE, "mask_group_min_aspect_ratio", "mask_group_max_aspect_ratio", "return_codebook_pixels"),
    **_same(FREE, "codebook_do_resize", "codebook_size", "codebook_resample", "codebook_do_center_crop"),
    **_same(FREE, "codebook_crop_size", "codebook_do_rescale", "codebook_rescale_factor", "codebook_do_map_pixels"),
    **_same(FREE, "codebook_do_normalize", "codebook_image_mean", "codebook_image_std"),
    "do_resize": (True,),
    "do_pad": (None, False),
    "data_format": (None, "channels_first"),
    "image_processor_type": tuple(
        f"{kind}ImageProcessor{form}" for kind in ("CLIP", "ViT", "DeiT", "Flava") for form in ("", "Fast", "Pil")
    ),
}
PREPROCESS: Table = {  # open_clip's preprocess_cfg
    **_same(READ, "mean", "std", "interpolation", "resize_mode"),
    **_same(FREE, "size", "fill_color"),  # open_clip takes the size from the model; only resize_mode longest fills
    "mode": ("RGB",),
}


def check_keys(config: Mapping[str, Any], table: Table, where: str, strict: bool = True) -> None:
    """Refuses a configuration with a value that our towers do not compute.

    Args:
        config: a missing key has the library's default, which every table accepts.
        strict: refuses a key that the table lacks, as open_clip does; transformers ignores it.
    """
    for key, value in config.items():
        accepted = table.get(key, () if strict else FREE)
        if isinstance(accepted, tuple) and value not in accepted:
            expected = (
                f"expected one of: {', '.join(map(json.dumps, accepted))}" if accepted else "expected no such key"
            )
            raise refused(where, key, value, expected)


def refused(where: str, key: str, value: Any, expected: str) -> WeightsError:
    """The error for a key whose value our towers do not compute."""
    return WeightsError(f"{where}{key} = {json.dumps(value, default=str)}; {expected}")


def square(value: Any, where: str, key: str) -> int:
    """The side of a square: a number, or two equal ones."""
    sides = {value} if isinstance(value, int) else set(value) if isinstance(value, list | tuple) else set()
    if len(sides) != 1 or not all(isinstance(side, int) for side in sides):
        raise refused(where, key, value, "our towers take squares; expected a number, or equal ones")
    return sides.pop()


def check_patches_of(image_size: int, patch_size: int, where: str) -> None:
    """Refuses images that are not cut into whole patches; other libraries leave out a rim."""
    if image_size % patch_size:
        sizes = multiples_beside(image_size, patch_size)
        raise refused(where, "image_size", image_size, f"not a multiple of patch_size = {patch_size}; expected {sizes}")
