"""Published layouts with random weights: MERU's own code written anew from its formulas, EuCLIP's fork, open_clip."""

import json
import math
import sys
from functools import partial

import open_clip
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from test_oblique_topology_released import ReleasedBlock
from torch import nn
from transformers import CLIPConfig, CLIPModel

from common.base.config import ConfigError, load_beside_weights
from common.data.clip_tokenizer import ClipTokenizer
from common.encoders.weights import WeightsError
from common.geometry import unit
from common.run.named_models import open_model
from euclip.config import Config
from euclip.lorentz import exp_map0
from euclip.published import euclip_from_open_clip, main, meru_from_state, open_published, published_config
from oblique_topology.published import open_published as of_oblique_topology

ONE_HEAD, MERU_HEADS = {"image": 1, "text": 1}, {"image": 2, "text": 1}
WIDTH, TEXT_WIDTH, DIM, WORDS, LENGTH, PATCH, SIDE = 128, 64, 24, 60, 9, 8, 32


class TimmBlock(nn.Module):
    """A block of timm's ViT, with its names."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (qkv[0] @ qkv[1].transpose(-1, -2) / math.sqrt(width // self.heads)).softmax(dim=-1)
        x = x + self.attn["proj"]((weights @ qkv[2]).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class Meru(nn.Module):
    """MERU's layout in our words: parameters under its names, and its forward pass up to the tangent vectors."""

    def __init__(self, hyperbolic=True):
        super().__init__()
        self.visual, self.textual = nn.Module(), nn.Module()
        self.visual.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)})
        self.visual.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.visual.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, WIDTH), requires_grad=False)
        self.visual.blocks = nn.ModuleList(TimmBlock(WIDTH, 2) for _ in range(2))
        self.visual.norm = nn.LayerNorm(WIDTH)
        self.textual.token_embed = nn.Embedding(WORDS, TEXT_WIDTH)
        self.textual.posit_embed = nn.Parameter(torch.randn(LENGTH, TEXT_WIDTH))
        self.textual.resblocks = nn.ModuleList(ReleasedBlock(TEXT_WIDTH, 1) for _ in range(3))
        self.textual.ln_final = nn.LayerNorm(TEXT_WIDTH)
        self.textual.register_buffer("attn_mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        self.visual_proj = nn.Linear(WIDTH, DIM, bias=False)
        self.textual_proj = nn.Linear(TEXT_WIDTH, DIM, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("pixel_mean", torch.zeros(3, 1, 1))
        self.register_buffer("pixel_std", torch.ones(3, 1, 1))
        if hyperbolic:
            self.curv = nn.Parameter(torch.tensor(math.log(0.5)))
            self.visual_alpha, self.textual_alpha = nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.tensor(-1.5))

    def image_features(self, images):
        patches = self.visual.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.visual.cls_token.expand(len(images), -1, -1), patches], 1) + self.visual.pos_embed
        for block in self.visual.blocks:
            tokens = block(tokens)
        return self.visual_proj(self.visual.norm(tokens)[:, 0])

    def text_features(self, ids):
        tokens = self.textual.token_embed(ids) + self.textual.posit_embed
        for block in self.textual.resblocks:
            tokens = block(tokens, self.textual.attn_mask)
        return self.textual_proj(self.textual.ln_final(tokens)[torch.arange(len(ids)), ids.argmax(dim=1)])


def with_clips_vocabulary(model):
    model.textual.token_embed = nn.Embedding(49_408, TEXT_WIDTH)
    model.textual.posit_embed = nn.Parameter(torch.randn(77, TEXT_WIDTH))
    model.textual.register_buffer("attn_mask", torch.ones(77, 77, dtype=torch.bool).triu(1))
    return model


def inputs(words=WORDS, length=LENGTH, side=SIDE):
    ids = torch.randint(1, words - 1, (5, length))
    ids[:, -2] = words - 1
    return torch.randn(5, 3, side, side), ids


@torch.no_grad()
def test_merus_weights_give_merus_embeddings_and_distances():
    theirs = Meru().eval()
    ours = meru_from_state(theirs.state_dict(), heads=MERU_HEADS)
    images, ids = inputs()
    tangent = [math.exp(-1.0) * theirs.image_features(images), math.exp(-1.5) * theirs.text_features(ids)]
    torch.testing.assert_close(ours.encode_image(images), tangent[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_text(ids), tangent[1], rtol=1e-4, atol=1e-5)
    c = torch.tensor(0.5, dtype=torch.float64)
    points = [exp_map0(vectors.double(), c) for vectors in tangent]
    times = [(1 / c + vectors.square().sum(dim=1)).sqrt() for vectors in points]
    inner = points[0] @ points[1].T - times[0][:, None] * times[1][None, :]
    distances = torch.arccosh(-c * inner) / c.sqrt()
    similarity = ours.geometry.similarity(ours.encode_image(images), ours.encode_text(ids))
    torch.testing.assert_close(similarity.double(), -distances, rtol=1e-4, atol=1e-4)
    assert ours.logit_scale().item() == pytest.approx(math.exp(2.0))
    # its bounds lie about the curvature that its training starts from, and its evaluation has none
    theirs.curv.fill_(math.log(0.02))
    curvature = meru_from_state(theirs.state_dict(), heads=MERU_HEADS).geometry.curvature()
    assert curvature.item() == pytest.approx(0.02)


@torch.no_grad()
def test_their_clip_baseline_is_on_the_sphere():
    theirs = Meru(hyperbolic=False).eval()
    ours = meru_from_state(theirs.state_dict(), heads=MERU_HEADS)
    images, _ = inputs()
    assert ours.geometry.name == "sphere"
    torch.testing.assert_close(ours.encode_image(images), unit(theirs.image_features(images)), rtol=1e-4, atol=1e-5)


def open_clips():
    torch.manual_seed(0)
    image = open_clip.CLIPVisionCfg(image_size=32, patch_size=16, width=64, layers=2, head_width=64)
    text = open_clip.CLIPTextCfg(context_length=8, vocab_size=50, width=64, heads=1, layers=1)
    return open_clip.CLIP(16, image, text).eval()


def without_final_norms(model):
    """As EuCLIP's fork builds it: both are the identity, and the state dict has neither."""
    model.visual.ln_post = model.ln_final = nn.Identity()
    return model


@torch.no_grad()
def test_weights_of_the_fork_give_its_embeddings():
    theirs = without_final_norms(open_clips())
    ours = euclip_from_open_clip(theirs.state_dict(), "euclidean_squared", heads=ONE_HEAD)
    images, ids = inputs(50, 8)
    expected = 16**-0.5 * theirs.encode_image(images), 16**-0.5 * theirs.encode_text(ids)
    torch.testing.assert_close(ours.encode_image(images), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_text(ids), expected[1], rtol=1e-4, atol=1e-5)
    assert ours.geometry.name == "euclidean_squared"


@torch.no_grad()
def test_weights_of_open_clip_evaluate_on_the_sphere():
    theirs = open_clips()
    ours = euclip_from_open_clip(theirs.state_dict(), "sphere", heads=ONE_HEAD)
    images, ids = inputs(50, 8)
    torch.testing.assert_close(ours.encode_image(images), theirs.encode_image(images, True), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_text(ids), theirs.encode_text(ids, True), rtol=1e-4, atol=1e-5)
    assert ours.logit_bias is None
    state = theirs.state_dict() | {"logit_bias": torch.tensor(-7.5)}  # of the sigmoid loss
    for geometry in ("sphere", "euclidean"):
        assert euclip_from_open_clip(state, geometry, heads=ONE_HEAD).logit_bias().item() == -7.5


def test_weights_of_the_fork_are_not_read_on_the_sphere_without_a_word():
    state = dict(without_final_norms(open_clips()).state_dict())
    opened = partial(euclip_from_open_clip, source="fork.pt", heads=ONE_HEAD)
    with pytest.warns(UserWarning, match=r"fork\.pt has no final LayerNorm.*--geometry euclidean_squared"):
        opened(state, "sphere")
    state["eu_logit_scale"] = state.pop("logit_scale")
    assert opened(state, "euclidean").geometry.name == "euclidean"
    message = "eu_logit_scale.*euclidean or euclidean_squared, got"
    cases = ((f"{message} {geometry}", partial(opened, state, geometry)) for geometry in ("sphere", "hyperbolic"))
    refused(*cases, error=WeightsError)


@torch.no_grad()
def test_float64_weights_stay_float64():
    image = open_clip.CLIPVisionCfg(image_size=32, patch_size=16, width=48, layers=2, head_width=16)
    text = open_clip.CLIPTextCfg(context_length=8, vocab_size=50, width=32, heads=2, layers=1)
    theirs = without_final_norms(open_clip.CLIP(16, image, text)).eval().double()
    scalars = {"alpha_img": -1.2, "alpha_txt": -1.9, "curvature": -4.0}
    state = theirs.state_dict() | {name: torch.tensor(value).double() for name, value in scalars.items()}
    state["hyper_logit_scale"] = state.pop("logit_scale")
    ours = euclip_from_open_clip(state, "hyperbolic", heads={"image": 3, "text": 2})
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float64}
    assert ours.geometry.name == "hyperbolic"
    assert ours.geometry.curvature().item() == pytest.approx(0.1)  # the fork's clamp in the forward pass
    images, ids = inputs(50, 8)
    expected = math.exp(-1.2) * theirs.encode_image(images.double())
    torch.testing.assert_close(ours.encode_image(images.double()), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(ours.encode_text(ids), math.exp(-1.9) * theirs.encode_text(ids), rtol=1e-7, atol=1e-9)


def test_weights_that_do_not_fit_say_what_is_missing_or_left():
    state, clip = Meru().state_dict(), dict(open_clips().state_dict())
    incomplete = {name: value for name, value in state.items() if name != "visual.norm.weight"}
    broken = {name: value for name, value in clip.items() if name != "ln_final.weight"}
    hyperbolic = {**clip, "curvature": torch.zeros(())}
    infinite = {**clip, "ln_final.weight": clip["ln_final.weight"] * math.inf}
    refused(
        (r"state lacks visual\.norm\.weight", lambda: meru_from_state(incomplete, heads=MERU_HEADS)),
        ("no place for: extra", lambda: meru_from_state({**state, "extra": torch.zeros(1)}, heads=MERU_HEADS)),
        (
            r"is not in the layout of MERU and HyCoCLIP: it lacks visual\.patch",
            lambda: meru_from_state(clip),
        ),
        (
            r"state is in the layout of MERU and HyCoCLIP; expected: --layout meru",
            lambda: euclip_from_open_clip(state, "hyperbolic"),
        ),
        (
            r"has the scalars none, geometry hyperbolic has \['curvature'",
            lambda: euclip_from_open_clip(clip, "hyperbolic", heads=ONE_HEAD),
        ),
        (
            r"has the scalars \['curvature'\], geometry sphere has none",
            lambda: euclip_from_open_clip(hyperbolic, "sphere", heads=ONE_HEAD),
        ),
        (
            r"state holds weights that are not finite: ln_final\.weight$",
            lambda: euclip_from_open_clip(infinite, "sphere", heads=ONE_HEAD),
        ),
        ("ln_final|final_norm", lambda: euclip_from_open_clip(broken, "sphere", heads=ONE_HEAD)),
        error=WeightsError,
    )


@pytest.mark.parametrize(
    ("checkpoint", "layout", "geometry", "message"),
    [
        ("x.pt", "timm", "sphere", "layout 'timm'; expected one of: transformers, open_clip, meru"),
        ("x.pt", "meru", "euclidean", "geometry euclidean with layout meru, which states its own"),
        ("x.pt", "meru", "sphere", "x.pt does not exist; layout meru takes a file of weights"),
        (".", "open_clip", "sphere", "^. is a folder; layout open_clip takes a file of weights"),
    ],
)
def test_what_cannot_be_opened_is_named(checkpoint, layout, geometry, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_published(checkpoint, layout, geometry, None, Config(), torch.device("cpu"))


def test_a_bare_file_needs_its_activation_in_every_layout(tmp_path):
    torch.save(open_clips().state_dict(), tmp_path / "bare.pt")
    for layout, geometry in (("transformers", "sphere"), ("open_clip", "sphere"), ("open_clip", "euclidean")):
        opened = partial(open_published, str(tmp_path / "bare.pt"), layout, geometry)
        opened = partial(opened, config=Config(), device=torch.device("cpu"))
        refused(
            (r"does not state its activation: give quick_gelu .* by --activation", partial(opened, activation=None)),
            (r"model\.image\.activation .*, got 'relu'", partial(opened, activation="relu")),
            error=WeightsError,
        )


def test_a_file_with_open_clips_configuration_beside_it_is_not_read_as_a_bare_one(tmp_path):
    file = tmp_path / "open_clip_pytorch_model.bin"
    torch.save(open_clips().state_dict(), file)
    opened = partial(open_published, str(file), "open_clip", "sphere", "gelu", Config(), torch.device("cpu"), ONE_HEAD)
    configuration = tmp_path / "open_clip_config.json"
    configuration.write_text('{"model_cfg": {"quick_gelu": true}, "preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}')
    refused((r"open_clip_config\.json beside it states activation, heads and pre", opened), error=WeightsError)


def test_the_command_line_evaluates_a_file_of_hycoclips_training_as_merus(tmp_path, monkeypatch):
    """Its code adds losses to MERU's, no tensor, and saves what else a training needs beside the model."""
    torch.manual_seed(0)
    model = with_clips_vocabulary(Meru())
    model.pixel_mean += torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)  # counts instead of ImageNet's colours
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    training = {"optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict(), "scaler": {"scale": 65536.0}}
    torch.save({"model": state, **training, "iteration": 7}, tmp_path / "meru.pth")
    small = ["data.num_test=4", "data.num_labelled=8", "data.image_size=32"]
    arguments = ["--checkpoint", str(tmp_path / "meru.pth"), "--layout", "meru", "--output", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments, "--heads", "2,1", *small])
    main()
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["training_data"] == "meru.pth, published"
    assert (results["layout"], results["geometry"], results["heads"]) == ("meru", "hyperbolic", [2, 1])
    assert results["evaluations"]["test"]["protocol"]["activation"] == "gelu"
    assert 0 <= results["evaluations"]["mean_all"]["metrics"]["score"] <= 1
    preprocessing = results["evaluations"]["imagenet"]["protocol"]["preprocessing"]
    assert (preprocessing["mean"], preprocessing["std"]) == (pytest.approx([0.1, 0.2, 0.3]), [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method.geometry=hyperbolic",
            r"method\.geometry=hyperbolic: published weights bring their own; expected: data\.\*",
        ),
        ("model.patch_size=8", r"model\.patch_size=8: published weights bring their own"),
        ("data.root=/data", r"data\.root without data\.source; expected: data\.source=shards"),
        ("data.resize=squeeze", r"data\.resize: published weights state how pictures and captions become their inputs"),
        ("data.resize_with=torchvision", r"data\.resize_with: published weights state"),
        ("data.source=tsv data.root=/data data.image_size=64", r"data\.image_size: published weights state"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        published_config(override.split(), "sphere")


@pytest.mark.filterwarnings("ignore:.*2 merges", "ignore:.*preprocessing")
def test_a_clip_folder_with_other_merges_than_the_vocabulary_is_refused(tmp_path):
    """As many ids, so no size differs: captions would get the embeddings of other words."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=sizes | {"vocab_size": 512 + 2 + 2, "max_position_embeddings": LENGTH, "eos_token_id": 515},
        vision_config=sizes | {"image_size": SIDE, "patch_size": PATCH},
        projection_dim=DIM,
    )
    merges = {"here": ["a b</w>", "c d</w>"], "beside": ["c d</w>", "a b</w>"]}
    CLIPModel(config).save_pretrained(tmp_path / "beside")
    for name, lines in merges.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    model, here = str(tmp_path / "beside"), f"data.vocabulary={tmp_path / 'here'}"
    released = partial(of_oblique_topology, model, "clip", load_beside_weights(Config, [here]), torch.device("cpu"))
    for opened in (partial(open_model, model, [here]), released):
        refused((rf"{model}: merges.txt in it has other merges.*data.vocabulary={model}", opened))
    _, encoder = open_model(model, [f"data.vocabulary={model}"])
    assert encoder.tokenizer == ClipTokenizer(merges["beside"])
    encoder.tokenizer.check_beside(model, "model.text.init")
