"""How pixels become inputs belongs to weights: read, evaluated with, folded into runs, written out, as libraries do."""

import copy
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from refusals import refused
from test_common_initial import config_of, model_of, public, run  # noqa: F401
from test_common_transforms import picture
from test_common_weights import our_clip
from test_common_weights_keys import CONFIGURATIONS, shrunk, write_folder

import oblique_topology.published
from common.data.transforms import CLIP_MEAN, CLIP_STD, ImageTransform, normalize
from common.encoders.vision import VisionTransformer
from common.encoders.weights import WeightsError, fill_, pixels_of_processor, read_source
from common.encoders.weights.pixels import pixels_of_open_clip, preprocess_of, processor_of
from common.geometry import unit
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import published_encoder
from common.run.initial import open_source, start_text
from euclip.config import Config
from euclip.evaluate import load_encoder
from euclip.published import open_published
from scripts import export_weights, publish

open_clip = pytest.importorskip("open_clip")
from open_clip.pretrained import _PRETRAINED
from open_clip.transform import PreprocessCfg, image_transform_v2

SHAPES = ((40, 60), (72, 36), (32, 32), (33, 90))
PICTURES = [picture(*shape) for shape in SHAPES]
HALF = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7]}


def ours_of(pixels):
    return torch.stack([pixels.inputs(pixels.eval(image)[None])[0] for image in PICTURES])


def shipped():
    """Every way that a pre-trained model of open_clip names, once."""
    keys = ("mean", "std", "interpolation", "resize_mode")
    ways = {json.dumps({key: tag[key] for key in keys}) for tags in _PRETRAINED.values() for tag in tags.values()}
    return [json.loads(text) for text in sorted(ways)]


@pytest.mark.parametrize(
    "preprocess",
    [*shipped(), {}, {"mean": 0.5, "std": None}, {"interpolation": "random"}, {**HALF, "resize_mode": "squash"},
     {"interpolation": "bilinear", "size": 7, "fill_color": 3}],
    ids=str,
)  # fmt: skip
def test_pixels_are_open_clips(preprocess):
    if preprocess.get("resize_mode") == "longest":
        refused((r'c: resize_mode = "longest"; expected one of: shortest, squash',
                 lambda: pixels_of_open_clip(preprocess, 32, "c: ")), error=WeightsError)  # fmt: skip
        return
    pixels = pixels_of_open_clip(preprocess, 32, "c: ")
    cfg = {key: value for key, value in preprocess.items() if value is not None} | {"size": 32}
    theirs = image_transform_v2(PreprocessCfg(**cfg), is_train=False)
    assert torch.equal(ours_of(pixels), torch.stack([theirs(image) for image in PICTURES]))
    assert pixels_of_open_clip(preprocess_of(pixels), 32, "c: ") == pixels


def test_transparent_and_palette_images_become_rgb_first_and_the_libraries_treat_them_as_the_page_states():
    """docs/weights.md: open_clip resizes first, so that transparent places are black; transformers has them white."""
    pixels, transparent = ImageTransform(20), picture(40, 60).convert("RGBA")
    transparent.putalpha(0)
    white, theirs = (
        torch.ones(3, 20, 20),
        image_transform_v2(PreprocessCfg(size=20, mean=(0, 0, 0), std=(1, 1, 1)), is_train=False),
    )
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 20}, crop_size={"height": 20, "width": 20}, do_normalize=False
    )
    for image in (transparent, picture(40, 60).convert("P")):
        assert torch.equal(pixels.eval(image), pixels.eval(image.convert("RGB")))
        assert not torch.equal(pixels.eval(image) / 255, theirs(image))
    assert torch.equal(theirs(transparent), 1 - white)
    torch.testing.assert_close(processor(transparent, return_tensors="pt")["pixel_values"][0], white)


def test_the_shipped_ways_of_open_clip_are_many():
    assert {way["resize_mode"] for way in shipped()} >= {"shortest", "squash"}


SIDE = {"height": 32, "width": 32}
PROCESSORS = [
    ("CLIP", {"size": {"shortest_edge": 32}, "crop_size": SIDE}),
    ("CLIP", {"size": {"shortest_edge": 40}, "crop_size": SIDE, "image_mean": [0.5, 0.4, 0.3], "resample": 2}),
    ("CLIP", {"size": SIDE, "crop_size": SIDE, "do_normalize": False}),
    ("CLIP", {"size": SIDE, "do_center_crop": False, "rescale_factor": 1 / 127.5, "image_mean": [1.0, 0.9, 0.8]}),
    ("CLIP", {"size": SIDE, "crop_size": SIDE, "do_rescale": False, "image_mean": [99] * 3, "image_std": [9, 8, 7]}),
    ("ViT", {"size": SIDE}),
    ("DeiT", {"size": {"height": 40, "width": 40}, "crop_size": SIDE}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), PROCESSORS)
def test_pixels_are_those_of_transformers_processors(kind, settings):
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")(**settings)
    pixels = pixels_of_processor(theirs.to_dict(), "p: ")
    even = PICTURES[:3]  # odd margins are cut a pixel apart, see pixels_of_processor
    expected = theirs(even, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ours_of(pixels)[:3], expected, rtol=1e-5, atol=1e-5)
    if kind == "CLIP":
        again = transformers.CLIPImageProcessorPil(**processor_of(pixels))
        assert pixels_of_processor(again.to_dict(), "p: ") == pixels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_mean": None}, r"image_mean = null; expected three numbers, or do_normalize = false"),
        ({"do_resize": False}, r"do_resize = false; expected one of: true"),
        ({"do_center_crop": False}, r"do_center_crop = false; .*expected true with shortest_edge"),
        ({"resample": 1}, r"resample = 1; expected one of: 2 \(bilinear\), 3 \(bicubic\)"),
        ({"size": {"height": 32, "width": 24}}, r"size = \[32, 24\]; our towers take squares"),
        ({"crop_size": {"height": 32, "width": 24}}, r"crop_size = \[32, 24\]; our towers take squares"),
        ({"crop_size": {"height": 48, "width": 48}}, r"crop_size = .*; expected at most size, 32"),
        ({"size": {"longest_edge": 32}}, r"size = .*; expected shortest_edge, or height and width"),
        ({"do_pad": True}, r"do_pad = true; expected one of: null, false"),
        ({"image_processor_type": "BitImageProcessor"}, r'type = "BitImageProcessor"; expected one of: "CLIPImage'),
    ],
)  # fmt: skip
def test_what_our_transform_does_not_have_is_refused_by_key_and_value(settings, message):
    usual = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SIDE).to_dict()
    refused((rf"^p: {message}" if "type" not in message else message,
             lambda: pixels_of_processor({**usual, **settings}, "p: ")), error=WeightsError)  # fmt: skip


# ---------------------------------------------------------------- evaluated with


@pytest.mark.parametrize("preprocess", [{**HALF, "resize_mode": "squash"}, {"interpolation": "bilinear"}], ids=str)
@torch.no_grad()
def test_published_weights_are_evaluated_with_their_preprocessing(tmp_path, preprocess):
    config = shrunk(CONFIGURATIONS["ViT-B-32"])
    config["text_cfg"] |= {"vocab_size": 49_408, "context_length": 77}
    theirs, transform = write_folder(tmp_path / "model", config, preprocess)
    expected = unit(theirs.encode_image(torch.stack([transform(image) for image in PICTURES])))
    name, device = str(tmp_path / "model"), torch.device("cpu")
    for encoder in (
        open_published(name, "transformers", "sphere", None, Config(), device),
        oblique_topology.published.open_published(name, "clip", oblique_topology.config.Config(), device),
    ):
        embeddings, _ = encoder.images([{"image": image} for image in PICTURES])
        torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)
        stated = {"squash": "squeeze"}.get(preprocess.get("resize_mode"), "crop")
        assert (encoder.preprocessing["mode"], encoder.preprocessing["size"]) == (stated, 32)
        assert encoder.preprocessing["mean"] == preprocess.get("mean", list(CLIP_MEAN))
        assert encoder.preprocessing.get("interpolation", "bicubic") == preprocess.get("interpolation", "bicubic")


def test_a_picture_size_that_the_tower_does_not_take_is_refused():
    words = SimpleNamespace(vocabulary_size=60, end_id=59)
    with pytest.warns(UserWarning, match="do not state their preprocessing; CLIP's is used"):
        published_encoder(our_clip(), words, Config(), torch.device("cpu"))
    refused(
        (
            r"images of 48 pixels, their image tower takes 32, in patches of 8; expected the same",
            lambda: published_encoder(our_clip(), words, Config(), torch.device("cpu"), ImageTransform(48)),
        )
    )


@torch.no_grad()
def test_weights_in_float64_are_evaluated_in_float32():
    words, model = SimpleNamespace(vocabulary_size=60, end_id=59), our_clip()
    embeddings = []
    for weights in (copy.deepcopy(model).double(), model):
        encoder = published_encoder(weights, words, Config(), torch.device("cpu"), ImageTransform(32))
        embeddings.append(encoder.images([{"image": image} for image in PICTURES])[0])
    assert torch.equal(*embeddings)


# ---------------------------------------------------------------- a run starts from them


@torch.no_grad()
def test_a_run_that_starts_from_weights_has_the_librarys_features(tmp_path):
    """Colours of another kind of tower: test_a_vit_and_a_bert_are_the_towers_of_the_oblique_paper."""
    theirs, _ = write_folder(tmp_path, shrunk(CONFIGURATIONS["ViT-B-32"]), HALF)
    weights = read_source(str(tmp_path))
    source = weights.image_tower
    block = source.transformer.blocks[0]
    tower = VisionTransformer(
        32, 8, source.width, len(source.transformer.blocks), block.attention.heads, source.projection_dim,
        norm_eps=block.mlp_norm.eps, mlp_ratio=block.mlp[0].out_features / source.width,
    )  # fmt: skip
    fill_(tower, weights, "model.init")
    pixels = torch.stack([ImageTransform(32).eval(image) for image in PICTURES])
    expected = theirs.encode_image(normalize(pixels, HALF["mean"], HALF["std"]))
    torch.testing.assert_close(tower(normalize(pixels)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("public")
def test_pictures_that_a_run_prepares_unlike_its_weights_are_reported(tmp_path, public):  # noqa: F811
    folder, models = public
    models["clip"].save_pretrained(tmp_path)
    transformers.CLIPImageProcessor(size=SIDE, crop_size=SIDE, resample=2).save_pretrained(tmp_path)
    differently = "images are preprocessed differently: "
    for source, resize, words in (
        (tmp_path, "crop", f"{differently}data.resize=crop, the weights have squeeze: set data.resize="),
        (tmp_path, "squeeze", f"{differently}bicubic resizing, the weights have bilinear"),
        (folder / "clip", "crop", "the weights do not state their preprocessing"),
    ):
        _, report = model_of("euclip", config_of("euclip", f"model.init={source}", f"data.resize={resize}"))
        assert words in start_text(report)


# ---------------------------------------------------------------- written out


@pytest.mark.slow
def test_an_export_carries_the_runs_pixels_to_both_libraries(tmp_path, monkeypatch):
    files = run(tmp_path / "run", config_of("euclip", "data.resize=squeeze", row="table4_clip"), "euclip")
    checkpoint = last_checkpoint(files.checkpoints).path
    assert open_source(str(checkpoint)).pixels.mode == "squeeze"
    for layout in ("open_clip", "transformers"):
        arguments = ["--model", checkpoint, "--to", layout, "--output", tmp_path / layout]
        monkeypatch.setattr(sys, "argv", ["export_weights.py", *map(str, arguments)])
        export_weights.main()
        assert read_source(str(tmp_path / layout)).pixels == open_source(str(checkpoint)).pixels
    publish.publish(files.folder, tmp_path / "published", "mit")
    assert open_source(str(tmp_path / "published")).pixels == open_source(str(checkpoint)).pixels
    _, encoder = load_encoder(last_checkpoint(files.checkpoints), torch.device("cpu"))
    ours, _ = encoder.images([{"image": image} for image in PICTURES])
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'open_clip'}")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "transformers", backend="pil")
    other = transformers.CLIPModel.from_pretrained(tmp_path / "transformers")
    with torch.no_grad():
        theirs = unit(model.eval().encode_image(torch.stack([transform(image) for image in PICTURES])))
        others = unit(other.get_image_features(**processor(PICTURES, return_tensors="pt")).pooler_output)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-5)


def test_a_transform_of_before_is_read_and_written_as_before():
    text = '{"size": 32, "mode": "crop", "crop_scale": null, "flip_probability": 0.0, "mean": %s, "std": %s}'
    text %= (json.dumps(CLIP_MEAN), json.dumps(CLIP_STD))
    assert (ImageTransform.from_json(text), ImageTransform(32).to_json()) == (ImageTransform(32), text)
