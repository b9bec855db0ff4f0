"""Configurations of open_clip and transformers: every key has a place, every model loads as theirs or is refused."""

import copy
import dataclasses
import functools
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from refusals import refused
from safetensors.torch import save_file
from test_common_weights import IDS, IMAGES, shaken, tiny_transformers_clip

from common.caption_lengths import encode_by_length
from common.encoders.weights import WeightsError, clip_from_transformers, read_source
from common.encoders.weights.heads import PUBLISHED
from common.encoders.weights.keys import (
    OPEN_CLIP_MODEL,
    OPEN_CLIP_TEXT,
    OPEN_CLIP_VISION,
    PREPROCESS,
    PROCESSOR,
    TRANSFORMERS,
)
from common.encoders.weights.open_clip_folder import TEXT_DEFAULTS, VISION_DEFAULTS

open_clip = pytest.importorskip("open_clip")
from open_clip.transform import PreprocessCfg

FILES = sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json"))
CONFIGURATIONS = {file.stem: json.loads(file.read_text()) for file in FILES}
CLASSES = {"vision_cfg": open_clip.CLIPVisionCfg, "text_cfg": open_clip.CLIPTextCfg}


def processor_keys():
    kinds = ("CLIP", "ViT", "DeiT", "Flava")
    keys = {"image_processor_type": "CLIPImageProcessor"} | dict.fromkeys(
        transformers.processing_utils.ImagesKwargs.__annotations__
    )
    for kind in kinds:
        processor = getattr(transformers, f"{kind}ImageProcessor")
        keys |= dict.fromkeys(processor.valid_kwargs.__annotations__) | processor().to_dict()
    return keys


THEIRS = {
    "CLIPVisionCfg": lambda: (OPEN_CLIP_VISION, dataclasses.asdict(open_clip.CLIPVisionCfg())),
    "CLIPTextCfg": lambda: (OPEN_CLIP_TEXT, dataclasses.asdict(open_clip.CLIPTextCfg())),
    "CLIP": lambda: (
        {key: value for key, value in OPEN_CLIP_MODEL.items() if key not in ("custom_text", "multimodal_cfg")},
        {name: argument.default for name, argument in inspect.signature(open_clip.CLIP).parameters.items()},
    ),
    "PreprocessCfg": lambda: (PREPROCESS, dataclasses.asdict(PreprocessCfg())),
    "clip": lambda: (TRANSFORMERS["clip"], transformers.CLIPConfig(text_config={}, vision_config={}).to_dict()),
    "clip_vision_model": lambda: (TRANSFORMERS["clip_vision_model"], transformers.CLIPVisionConfig().to_dict()),
    "clip_text_model": lambda: (TRANSFORMERS["clip_text_model"], transformers.CLIPTextConfig().to_dict()),
    "vit": lambda: (TRANSFORMERS["vit"], transformers.ViTConfig().to_dict()),
    "deit": lambda: (TRANSFORMERS["deit"], transformers.DeiTConfig().to_dict()),
    "bert": lambda: (TRANSFORMERS["bert"], transformers.BertConfig().to_dict()),
    "processor": lambda: (PROCESSOR, processor_keys()),
}


@pytest.mark.parametrize("name", THEIRS)
def test_every_key_of_the_library_has_a_place_and_its_default_is_taken(name):
    """A new key of theirs fails here: it must be read, known to change nothing, or refused."""
    table, defaults = THEIRS[name]()
    assert set(defaults) - set(table) == set()
    if name not in ("processor", "bert"):  # the files of older versions have further keys
        assert set(table) == set(defaults)
    refused = {key: default for key, default in defaults.items() if isinstance(table[key], tuple)}
    assert {key: value for key, value in refused.items() if value not in table[key] and value is not None} == {}


def test_defaults_that_a_configuration_leaves_out_are_open_clips():
    for ours, theirs in ((VISION_DEFAULTS, open_clip.CLIPVisionCfg()), (TEXT_DEFAULTS, open_clip.CLIPTextCfg())):
        assert ours == {key: getattr(theirs, key) for key in ours}


def test_published_heads_are_those_of_open_clips_configurations():
    heads = {"image": {}, "text": {}}
    for config in CONFIGURATIONS.values():
        image, text = CLASSES["vision_cfg"](**config["vision_cfg"]), CLASSES["text_cfg"](**config["text_cfg"])
        if not image.timm_model_name and isinstance(image.layers, int):
            heads["image"].setdefault((image.width, image.layers), set()).add(image.width // image.head_width)
        if not (text.hf_model_name or text.no_causal_mask or text.embed_cls) and text.pool_type in ("argmax", "eos"):
            heads["text"].setdefault((text.width, text.layers), set()).add(text.heads)
    assert heads == {side: {sizes: {heads} for sizes, heads in table.items()} for side, table in PUBLISHED.items()}


# ---------------------------------------------------------------- every configuration that open_clip ships


def shrunk(config):
    """The same keys, with tiny widths; heads, activations, pooling and all else as they are."""
    config = copy.deepcopy(config)
    image, text = config["vision_cfg"], config["text_cfg"]
    if "timm_model_name" not in image and isinstance(image["layers"], int):
        heads = image["width"] // image.get("head_width", 64)
        image |= {"width": 4 * heads, "head_width": 4, "layers": 2, "patch_size": 8, "image_size": 32}
    if "hf_model_name" not in text:
        heads = text.get("heads", 8)
        text |= {"width": 4 * heads, "heads": heads, "layers": 2, "vocab_size": 60, "context_length": 8}
    return config | {"embed_dim": 8}


def write_folder(folder, config, preprocess=None):
    """open_clip's hub layout with random weights; open_clip's model and its preprocessing of the same folder."""
    custom = config.get("custom_text", False)
    arguments = {key: value for key, value in config.items() if key != "custom_text"}
    model = shaken((open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**copy.deepcopy(arguments)))
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    write_configuration(folder, config, preprocess)
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return theirs.eval(), transform


def write_configuration(folder, config, preprocess=None):
    folder.mkdir(exist_ok=True)
    content = {"model_cfg": config} | ({} if preprocess is None else {"preprocess_cfg": preprocess})
    (folder / "open_clip_config.json").write_text(json.dumps(content))


def ids_ending_with(end_id):
    """End tokens where the tokenizer would put them: the largest id of a row, or `eos_id`."""
    ids = torch.where((IDS < 58) & (IDS > 0), 5 + IDS, IDS)
    return torch.where(ids == 59, end_id, ids)


@torch.no_grad()
def assert_same_features(folder, theirs, end_id=59):
    ours = read_source(str(folder)).clip()
    ids = ids_ending_with(end_id)
    torch.testing.assert_close(ours.image_tower(IMAGES), theirs.encode_image(IMAGES), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.text_tower(ids), theirs.encode_text(ids), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encode_by_length(ours.text_tower, ids), theirs.encode_text(ids), rtol=1e-4, atol=1e-4)


@functools.cache
def distinct():
    """Shrunk configuration, as JSON -> names of those that have it."""
    groups = {}
    for name, config in CONFIGURATIONS.items():
        groups.setdefault(json.dumps(shrunk(config), sort_keys=True), []).append(name)
    return groups


def refused_key(message, config):
    """The key of a refusal: the library's default is another value."""
    section, key = re.search(r"open_clip_config\.json: (?:(\w+_cfg)\.)?(\w+) = ", message).groups()
    if section is None:
        return key, config[key] is not None
    return f"{section}.{key}", config[section][key] != getattr(CLASSES[section](), key)


def refusal(folder):
    """What the reader says of a configuration without weights; None where it only misses these."""
    with pytest.raises(ValueError, match="open_clip") as raised:
        read_source(str(folder))
    return None if "is a folder without any of open_clip_model" in str(raised.value) else str(raised.value)


def test_every_model_of_open_clip_loads_as_open_clip_has_it_or_is_refused_by_the_key_that_differs(tmp_path):
    loaded, refused = [], {}
    for number, (text, names) in enumerate(distinct().items()):
        config, folder = json.loads(text), tmp_path / str(number)
        write_configuration(folder, config)  # without weights: a key is refused before they are read
        message = refusal(folder)
        if message is not None:
            key, differs = refused_key(message, config)
            assert differs, message
            refused[key] = refused.get(key, []) + names
        else:
            theirs, _ = write_folder(folder, config)
            stated = config["text_cfg"].get("pool_type", "argmax") == "eos"
            assert_same_features(folder, theirs, config["text_cfg"].get("eos_id", 2) if stated else 59)
            loaded += names
    assert len(loaded) + sum(map(len, refused.values())) == len(CONFIGURATIONS)
    plain = {"ViT-B-32", "ViT-B-32-quickgelu", "ViT-B-16-plus-240", "ViT-L-14-336", "ViT-H-14", "ViT-g-14", "ViT-e-14"}
    assert plain | {"ViT-bigG-14", "ViT-S-16-alt", "ViT-H-14-378-quickgelu"} <= set(loaded)
    assert set(refused) == {
        "multimodal_cfg", "text_cfg.hf_model_name", "text_cfg.hf_tokenizer_name",
        "vision_cfg.layers", "vision_cfg.ls_init_value", "vision_cfg.no_ln_pre", "vision_cfg.timm_model_name",
    }  # fmt: skip


# A configuration that open_clip builds, changed by one key, and what our reader says; None: read, features equal.
ONE_KEY = [
    ("text_cfg", "no_causal_mask", True, r"text_cfg\.no_causal_mask = true; expected one of: false"),
    ("text_cfg", "pool_type", "last", r"text_cfg\.pool_type = \"last\"; expected one of: \"argmax\", \"eos\""),
    ("text_cfg", "pool_type", "first", r"text_cfg\.pool_type = \"first\""),
    ("text_cfg", "pool_type", "eos", None),
    ("text_cfg", "act_kwargs", {"approximate": "tanh"}, r"text_cfg\.act_kwargs = "),
    ("text_cfg", "norm_kwargs", {"eps": 0.1}, None),
    ("text_cfg", "proj_type", "none", r"text_cfg\.proj_type = \"none\""),
    ("text_cfg", "proj_bias", True, r"text_cfg\.proj_bias = true"),
    ("text_cfg", "embed_cls", True, r"text_cfg\.embed_cls = true"),
    ("text_cfg", "qk_norm", True, r"text_cfg\.qk_norm = true"),
    ("text_cfg", "heads", 4, None),
    ("text_cfg", "output_tokens", True, None),
    ("vision_cfg", "head_width", 8, None),
    ("vision_cfg", "norm_kwargs", {"eps": 0.1}, None),
    ("vision_cfg", "norm_kwargs", {"elementwise_affine": False}, r"vision_cfg\.norm_kwargs = .*expected eps only"),
    ("vision_cfg", "act_kwargs", {"approximate": "tanh"}, r"vision_cfg\.act_kwargs = "),
    ("vision_cfg", "pool_type", "avg", r"vision_cfg\.pool_type = \"avg\"; expected one of: \"tok\""),
    ("vision_cfg", "final_ln_after_pool", True, None),
    ("vision_cfg", "pos_embed_type", "sin_cos_2d", None),
    ("vision_cfg", "patch_dropout", 0.5, None),
    ("vision_cfg", "ls_init_value", 0.1, r"vision_cfg\.ls_init_value = 0\.1"),
    ("vision_cfg", "attentional_pool", True, r"vision_cfg\.attentional_pool = true"),
    ("vision_cfg", "scale_fc", True, r"vision_cfg\.scale_fc = true"),
    ("vision_cfg", "image_size", [32, 32], None),
    ("vision_cfg", "image_size", [32, 16], r"vision_cfg\.image_size = \[32, 16\]; .*squares"),
    ("vision_cfg", "image_size", 50, r"vision_cfg\.image_size = 50; not a multiple of patch_size = 8; .*48 or 56"),
    ("vision_cfg", "new_key", 1, r"vision_cfg\.new_key = 1; expected no such key"),
    (None, "quick_gelu", True, None),
    (None, "init_logit_scale", 1.0, None),
    (None, "nonscalar_logit_scale", True, None),
    (None, "custom_text", True, None),
    (None, "init_logit_bias", -10, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "key", "value", "message"), ONE_KEY, ids=[f"{o[0]}.{o[1]}={o[2]}" for o in ONE_KEY]
)
def test_a_key_is_honoured_or_refused_by_name(tmp_path, section, key, value, message):
    config = shrunk(CONFIGURATIONS["ViT-B-32"])
    config["text_cfg"]["eos_id"] = 59 if value == "eos" else 2
    (config if section is None else config[section])[key] = value
    if message is None:
        theirs, _ = write_folder(tmp_path / "model", config)
        if key == "output_tokens":  # the class CLIP reads its text tower out itself
            assert theirs.text_pool_type == "argmax"
        assert_same_features(tmp_path / "model", theirs)
    else:
        write_configuration(tmp_path / "model", config)
        refused((message, lambda: read_source(str(tmp_path / "model"))), error=WeightsError)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (None, "model_cfg", None, "model_cfg = null; expected a mapping"),
        (None, "preprocess_cfg", "x", r"preprocess_cfg = \"x\"; expected a mapping"),
        ("text_cfg", "heads", "8", r"text_cfg\.heads = \"8\"; expected a whole number above 0"),
        ("text_cfg", "mlp_ratio", "4", r"text_cfg\.mlp_ratio = \"4\"; expected a number above 0"),
        ("text_cfg", "norm_kwargs", "x", r"text_cfg\.norm_kwargs = \"x\"; expected eps only"),
        ("text_cfg", "norm_kwargs", {"eps": "x"}, r"text_cfg\.norm_kwargs\.eps = \"x\"; expected a number from 0 on"),
        ("text_cfg", "eos_id", "59", r"text_cfg\.eos_id = \"59\"; expected a whole number"),
        ("vision_cfg", "width", None, r"vision_cfg\.width = null; expected a whole number above 0"),
        ("vision_cfg", "head_width", 0, r"vision_cfg\.head_width = 0; expected a whole number above 0"),
        ("vision_cfg", "patch_size", 0, r"vision_cfg\.patch_size = 0; expected a whole number above 0"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(tmp_path, section, key, value, message):
    config = shrunk(CONFIGURATIONS["ViT-B-32"])
    config["text_cfg"]["pool_type"] = "eos"
    content = {"model_cfg": config}
    (content if section is None else config[section])[key] = value
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    refused((message, lambda: read_source(str(tmp_path))), error=WeightsError)


def test_tensors_of_other_sizes_than_the_configuration_says_are_refused(tmp_path):
    config = shrunk(CONFIGURATIONS["ViT-B-32"])
    write_folder(tmp_path, config)
    for section, key, value in (("vision_cfg", "image_size", 64), ("text_cfg", "context_length", 7)):
        changed = copy.deepcopy(config)
        changed[section][key] = value  # open_clip interpolates the positions when it loads the tensors
        write_configuration(tmp_path, changed)
        message = rf"{section}\.{key} = {value}; the tensors have"
        refused((message, functools.partial(read_source, str(tmp_path))), error=WeightsError)
    write_configuration(tmp_path, config | {"init_logit_bias": -10})
    refused(("init_logit_bias = -10; the tensors have no bias", lambda: read_source(str(tmp_path))), error=WeightsError)
    write_folder(tmp_path, config | {"init_logit_bias": -10})
    write_configuration(tmp_path, config)
    refused(("init_logit_bias = null; the tensors have a bias", lambda: read_source(str(tmp_path))), error=WeightsError)


# ---------------------------------------------------------------- transformers


@torch.no_grad()
def test_the_old_end_token_id_with_added_tokens_is_read_out_as_transformers_does():
    """Two added rows behind the end token's: it is the largest id of a caption, but not of the vocabulary."""
    theirs = tiny_transformers_clip(eos=2, words=62)
    ours = clip_from_transformers(theirs)
    expected = theirs(input_ids=IDS, pixel_values=IMAGES).text_embeds
    torch.testing.assert_close(ours.encode_text(IDS), expected, rtol=1e-5, atol=1e-5)
    with_added = torch.where(IDS == 5, 61, IDS)  # transformers then takes the added token; so do we
    expected = theirs(input_ids=with_added, pixel_values=IMAGES).text_embeds
    torch.testing.assert_close(ours.encode_text(with_added), expected, rtol=1e-5, atol=1e-5)


VIT = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64, "patch_size": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.ViTConfig(**VIT, image_size=[32, 32]), None),
        (lambda: transformers.DeiTConfig(**(VIT | {"patch_size": [8, 8]}), image_size=32), None),
        (
            lambda: transformers.ViTConfig(**VIT, image_size=[32, 16]),
            r"image_size = \[32, 16\]; our towers take squares",
        ),
        (
            lambda: transformers.ViTConfig(**VIT, image_size=50),
            r": image_size = 50; not a multiple of .*; expected 48 or",
        ),
        (
            lambda: transformers.ViTConfig(**VIT, image_size=32, qkv_bias=False),
            r"qkv_bias = false; expected one of: true",
        ),
        (lambda: transformers.ViTConfig(**VIT, image_size=32, num_channels=1), r"num_channels = 1; expected one of: 3"),
        (
            lambda: transformers.BertConfig(**{k: v for k, v in VIT.items() if k != "patch_size"}, is_decoder=True),
            r"is_decoder = true; expected one of: false",
        ),
    ],
)
@torch.no_grad()
def test_keys_of_a_vit_and_a_bert_are_read_or_refused(tmp_path, config, message):
    config = config()
    model = shaken(transformers.AutoModel.from_config(config))
    model.save_pretrained(tmp_path)
    if message is not None:
        with pytest.raises(WeightsError, match=message) as raised:
            read_source(str(tmp_path))
        assert "\n" not in str(raised.value)
    else:
        tokens = read_source(str(tmp_path)).image_tower.forward_tokens(IMAGES)
        torch.testing.assert_close(tokens, model(IMAGES).last_hidden_state, rtol=1e-5, atol=1e-5)
