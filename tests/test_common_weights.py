"""Weights in and out, against the libraries whose layouts they are, on tiny random models."""

import argparse
import copy
import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from refusals import refused
from runs import called
from safetensors.torch import load_file, save_file
from torch import nn

from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.encoders.weights import (
    NOT_STATED,
    WeightsError,
    agreed_heads,
    clip_from_open_clip,
    clip_from_transformers,
    clip_to_open_clip,
    clip_to_transformers,
    heads_argument,
    heads_in,
    load_bert_,
    read_bert,
    read_source,
    read_weights,
)
from common.encoders.weights.exporting import ratio_rounded_down
from common.encoders.weights.single import vit_tower
from common.encoders.weights.towers import towers_of_sizes
from common.geometry import Sphere
from common.logit_scale import LogitBias, LogitScale
from common.run.checkpoint import CheckpointError
from scripts import export_weights

open_clip = pytest.importorskip("open_clip")

HEADS = {"image": 3, "text": 2}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[58, 5, 6, 59, 0, 0, 0, 0], [58, 7, 59, 0, 0, 0, 0, 0], [58, 1, 2, 3, 4, 5, 6, 59]])


def shaken(model):
    """Every tensor random, biases and norms included, so that a swapped pair cannot hide."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny_transformers_clip(activation="quick_gelu", eps=1e-5, eos=59, words=60):
    sides = {"intermediate_size": 96, "num_hidden_layers": 2, "hidden_act": activation, "layer_norm_eps": eps}
    text = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": words, "max_position_embeddings": 8}
    vision = {"hidden_size": 48, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    ids = {"eos_token_id": eos, "bos_token_id": 58, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**text, **sides, **ids}, vision_config={**vision, **sides}, projection_dim=16
    )
    return shaken(transformers.CLIPModel(config))


def tiny_open_clip(quick_gelu=False):
    vision = open_clip.CLIPVisionCfg(layers=2, width=48, head_width=16, image_size=32, patch_size=8)
    text = open_clip.CLIPTextCfg(context_length=8, vocab_size=60, width=32, heads=2, layers=2)
    return shaken(open_clip.CLIP(16, vision, text, quick_gelu=quick_gelu))


def load_clip(path, activation=None, heads=NOT_STATED):
    return read_source(str(path), activation, heads=heads).clip()


def our_clip(activation="gelu", norm_eps=1e-5, **more):
    image = VisionTransformer(
        32, 8, 48, 2, more.pop("image_heads", 3), 16, activation=activation, norm_eps=norm_eps, **more
    )
    text = CausalTextTransformer(60, 8, 32, 2, 2, 16, end_id=59, activation=activation, norm_eps=norm_eps)
    return shaken(TwoTowers(image, text, Sphere(), LogitScale(init=5.0)))


def test_random_towers_are_drawn_as_open_clips():
    """Mean, deviation and fourth moment of every tensor (uniform or normal), within their errors of sampling."""
    width, heads, layers, patch = 192, 3, 3, 16
    vision = open_clip.CLIPVisionCfg(layers=layers, width=width, head_width=64, image_size=96, patch_size=patch)
    text = open_clip.CLIPTextCfg(context_length=77, vocab_size=500, width=width, heads=heads, layers=layers)
    torch.manual_seed(0)
    theirs = open_clip.CLIP(96, vision, text).state_dict()
    image_tower = VisionTransformer(96, patch, width, layers, heads, 96)
    text_tower = CausalTextTransformer(500, 77, width, layers, heads, 96, end_id=499)
    ours, _ = clip_to_open_clip(TwoTowers(image_tower, text_tower, Sphere(), LogitScale(init=1 / 0.07)))
    names = theirs.keys() - {"attn_mask"}
    assert names == ours.keys()
    for name in sorted(names):
        a, b = ours[name].double().flatten(), theirs[name].double().flatten()
        deviation = b.std() if len(b) > 1 else b.new_zeros(())
        if not deviation:
            torch.testing.assert_close(a, b, msg=lambda message, name=name: f"{name}: {message}")
            continue
        error = 5 * (2 / len(a)) ** 0.5  # five standard errors of a difference of means of normal numbers
        assert abs(a.mean() - b.mean()) < error * deviation, name
        assert abs(a.std() / deviation - 1) < error, name
        kurtosis = [((x - x.mean()) / x.std()).pow(4).mean() for x in (a, b)]  # 1.8 uniform, 3 normal
        assert abs(kurtosis[0] - kurtosis[1]) < 5 * (2 * 24 / len(a)) ** 0.5, name


def as_open_clip(model, folder):
    """The library's model of the folder that is written."""
    state, configuration = clip_to_open_clip(model)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": configuration}))
    return open_clip.create_model_and_transforms(f"local-dir:{folder}")[0].eval()


@torch.no_grad()
def assert_same_as_transformers(ours, theirs):
    output = theirs(input_ids=IDS, pixel_values=IMAGES, attention_mask=(IDS != 0).long())
    torch.testing.assert_close(ours.encode_image(IMAGES), output.image_embeds, **TOLERANCE)
    torch.testing.assert_close(ours.encode_text(IDS), output.text_embeds, **TOLERANCE)
    logits = ours.logit_scale() * ours.geometry.similarity(ours.encode_image(IMAGES), ours.encode_text(IDS))
    torch.testing.assert_close(logits, output.logits_per_image, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def assert_same_as_open_clip(ours, theirs):
    torch.testing.assert_close(ours.image_tower(IMAGES), theirs.encode_image(IMAGES), **TOLERANCE)
    torch.testing.assert_close(ours.text_tower(IDS), theirs.encode_text(IDS), **TOLERANCE)
    torch.testing.assert_close(ours.logit_scale(), theirs.logit_scale.exp(), **TOLERANCE)


def test_clip_from_transformers_gives_the_same_features():
    theirs = tiny_transformers_clip("gelu", eps=1e-3)
    ours = clip_from_transformers(theirs)
    assert_same_as_transformers(ours, theirs)
    assert not ours.training
    with torch.no_grad():  # the tensors are copies: training ours leaves theirs alone
        before = theirs.logit_scale.clone()
        ours.logit_scale.log_logit_scale.add_(1.0)
    assert torch.equal(theirs.logit_scale, before)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "model._orig_mod."])
def test_prefixes_of_wrappers_and_of_custom_text_towers_are_understood(prefix):
    state = tiny_open_clip().state_dict()
    plain = clip_from_open_clip(state, "gelu", heads=HEADS)
    dressed = {
        f"{prefix}{name if name.startswith('visual') or name == 'logit_scale' else f'text.{name}'}": value
        for name, value in state.items()
    }
    assert torch.equal(clip_from_open_clip(dressed, "gelu", heads=HEADS).text_tower(IDS), plain.text_tower(IDS))
    compiled_tower = {name.replace("visual.", "visual._orig_mod."): value for name, value in state.items()}
    assert torch.equal(clip_from_open_clip(compiled_tower, "gelu", heads=HEADS).text_tower(IDS), plain.text_tower(IDS))


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_our_clip_goes_out_to_both_libraries_and_comes_back(activation, tmp_path):
    ours = our_clip(activation)
    theirs, exported = as_open_clip(ours, tmp_path), clip_to_transformers(ours)
    assert_same_as_open_clip(ours, theirs)
    assert_same_as_transformers(ours, exported)
    for back in (clip_from_transformers(exported), clip_from_open_clip(theirs.state_dict(), activation, heads=HEADS)):
        for name, value in ours.state_dict().items():
            assert torch.equal(back.state_dict()[name], value), name


@torch.no_grad()
def test_a_logit_bias_goes_out_to_open_clip_and_comes_back(tmp_path):
    ours = our_clip()
    ours.logit_bias = LogitBias(-7.5)
    theirs = as_open_clip(ours, tmp_path)
    for model in (ours, load_clip(tmp_path), read_source(str(tmp_path)).clip()):
        similarity = model.geometry.similarity(model.encode_image(IMAGES), model.encode_text(IDS))
        logits = model.logit_scale() * similarity + model.logit_bias()
        torch.testing.assert_close(logits, theirs.get_logits(IMAGES, IDS)[0], **TOLERANCE)


@torch.no_grad()
def test_another_eps_and_an_end_token_that_is_not_the_largest_id_go_out_too(tmp_path):
    ours = our_clip(norm_eps=0.1)
    ours.text_tower.end_id = 40
    ids = torch.where(IDS == 59, 40, IDS)  # 58 is larger: open_clip reads that out, if nothing else is said
    theirs = as_open_clip(ours, tmp_path)
    torch.testing.assert_close(ours.image_tower(IMAGES), theirs.encode_image(IMAGES), **TOLERANCE)
    for features in (theirs.encode_text(ids), load_clip(tmp_path).text_tower(ids)):
        torch.testing.assert_close(ours.text_tower(ids), features, **TOLERANCE)
    output = clip_to_transformers(ours).get_text_features(input_ids=ids)
    torch.testing.assert_close(ours.text_tower(ids), output.pooler_output, **TOLERANCE)


@torch.no_grad()
def test_of_two_files_beside_a_configuration_the_named_one_is_read(tmp_path):
    original = our_clip()
    tuned = copy.deepcopy(original)
    tuned.image_tower.load_state_dict({name: 2 * value for name, value in original.image_tower.state_dict().items()})
    as_open_clip(original, tmp_path)
    torch.save(clip_to_open_clip(tuned)[0], tmp_path / "open_clip_pytorch_model.bin")
    for name, model in {"open_clip_pytorch_model.bin": tuned, "open_clip_model.safetensors": original}.items():
        read = read_source(str(tmp_path / name)).clip()
        torch.testing.assert_close(read.encode_image(IMAGES), model.encode_image(IMAGES), **TOLERANCE)


def test_weights_files_are_read_in_every_form(tmp_path):
    theirs = tiny_open_clip(quick_gelu=True)
    state = theirs.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "c.pt")
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}}, tmp_path / "e.pt")

    class Archive(nn.Module):  # OpenAI's files: a scripted module with three numbers beside the weights
        def __init__(self):
            super().__init__()
            self.visual, self.transformer = theirs.visual, theirs.transformer
            for name, number in {"input_resolution": 32, "context_length": 8, "vocab_size": 60}.items():
                self.register_buffer(name, torch.tensor(number))

        def forward(self, images):
            return self.visual(images)

    torch.jit.trace(Archive(), IMAGES).save(str(tmp_path / "d.pt"))
    for file in "a.safetensors", "b.pt", "c.pt", "e.pt":
        read = clip_from_open_clip(read_weights(tmp_path / file), "quick_gelu", heads=HEADS)
        assert torch.equal(
            read.image_tower(IMAGES), clip_from_open_clip(state, "quick_gelu", heads=HEADS).image_tower(IMAGES)
        )
    archive = read_weights(tmp_path / "d.pt")
    assert "input_resolution" not in archive
    assert torch.equal(archive["visual.conv1.weight"], state["visual.conv1.weight"])
    stated = r"d\.pt states the activation quick_gelu; expected quick_gelu, got gelu"
    refused((stated, lambda: load_clip(tmp_path / "d.pt", "gelu")), error=WeightsError)


@torch.no_grad()
def test_an_archive_of_another_model_than_openais_is_a_bare_file(tmp_path):
    theirs, file = tiny_open_clip(), tmp_path / "laion.pt"
    torch.jit.trace(theirs, (IMAGES, IDS), check_trace=False).save(str(file))
    assert_same_as_open_clip(load_clip(file, "gelu", HEADS), theirs)
    assert read_source(str(file), "gelu", heads=HEADS).pixels is None
    message = r"laion\.pt does not state its activation: .*model\.image\.activation or model\.text\.activation"
    refused((message, lambda: load_clip(file, heads=HEADS)), error=WeightsError)


@pytest.mark.parametrize(("raw", "averaged"), [("state_dict", "state_dict_ema"), ("model", "model_ema")])
def test_a_file_with_raw_and_averaged_weights_is_refused(tmp_path, raw, averaged):
    state = tiny_open_clip().state_dict()
    torch.save({raw: state, averaged: state}, tmp_path / "both.pt")
    message = rf"both\.pt holds raw weights \({raw}\) and averaged ones \({averaged}\); expected one state"
    refused((message, lambda: read_weights(tmp_path / "both.pt")), error=WeightsError)
    torch.save({raw: state, "ema_decay": 0.999, averaged: None}, tmp_path / "one.pt")
    assert read_weights(tmp_path / "one.pt").keys() == state.keys()


def test_a_file_that_would_execute_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'owned')!r}, 'w').close()",))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(
        WeightsError,
        match=r"without executing code from it: .*GLOBAL (builtins\.)?exec was not .*; expected tensors only",
    ) as raised:
        read_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()
    assert str(raised.value).isprintable()  # one sentence, without torch's terminal escapes and advice


def test_files_that_hold_no_weights_are_named(tmp_path):
    contents = {"empty.pt": b"", "text.pt": b"not a file of weights", "cut.safetensors": b"\x10\0\0"}
    for name, content in (contents | {"open_clip_config.json": b"{"}).items():
        (tmp_path / name).write_bytes(content)
    torch.save([1, 2], tmp_path / "list.pt")
    for name, message in (
        ("empty.pt", "cannot be read"),
        ("text.pt", "cannot be read"),
        ("list.pt", "no state dict"),
        ("cut.safetensors", "is not a complete safetensors file"),
    ):
        with pytest.raises(WeightsError, match=message) as caught:
            read_weights(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert str(caught.value).isprintable()
    refused((r"open_clip_config\.json: not valid JSON", lambda: load_clip(tmp_path)))


def test_a_bare_file_in_transformers_layout_is_named_before_anything_is_asked(tmp_path):
    for model in (tiny_transformers_clip(), tiny_bert(), tiny_vit("ViT")):
        torch.save(model.state_dict(), tmp_path / "model.pt")
        message = r"is in transformers' layout \(.*\), where config.json states .* folder"
        refused((message, partial(load_clip, tmp_path / "model.pt")), error=WeightsError)


def test_integers_and_sparse_tensors_are_no_weights(tmp_path):
    state = tiny_open_clip(quick_gelu=True).state_dict()
    for change in (torch.Tensor.char, torch.Tensor.to_sparse):  # as of a quantised model
        torch.save(state | {"visual.proj": change(state["visual.proj"])}, tmp_path / "model.pt")
        message = r"model\.pt: visual\.proj is a tensor of torch\..*, torch\..*; expected dense weights of one of: "
        refused((message, partial(load_clip, tmp_path / "model.pt", "quick_gelu", heads=HEADS)), error=WeightsError)


def test_a_logit_scale_that_is_no_logarithm_is_refused():
    state = tiny_open_clip(quick_gelu=True).state_dict()
    for value, is_logarithm in ((math.log(100), True), (1 / 0.07, False), (100.0, False)):
        read = partial(clip_from_open_clip, state | {"logit_scale": torch.tensor(value)}, "quick_gelu", heads=HEADS)
        if is_logarithm:
            assert read().logit_scale().item() == pytest.approx(100)
        else:
            stored = re.escape(f"If it is the multiplier, store {math.log(value):.4g}")
            refused((rf"logit_scale is {value:.4g}, .*expected its logarithm, .*{stored}", read), error=WeightsError)


def test_the_weights_of_a_run_without_its_state_are_named(tmp_path):
    ours = clip_from_open_clip(tiny_open_clip(quick_gelu=True).state_dict(), "quick_gelu", heads=HEADS)
    save_file(ours.state_dict(), tmp_path / "model.safetensors")
    message = r"holds towers of this repository; expected: the folder of its run or checkpoint, whose state\.json"
    refused((message, partial(load_clip, tmp_path / "model.safetensors")), error=WeightsError)


def test_heads_of_a_bare_file_are_those_of_the_published_model_or_asked_for(tmp_path):
    """H/14 has 16 heads, not width / 64 = 20; other widths are not guessed."""
    with torch.device("meta"):
        state = open_clip.CLIP(**open_clip.get_model_config("ViT-H-14")).state_dict()
    assert heads_in(clip_from_open_clip(state, "gelu")) == {"image": 16, "text": 16}
    theirs, file = tiny_open_clip(), tmp_path / "a.safetensors"
    save_file(theirs.state_dict(), file)
    assert_same_as_open_clip(load_clip(file, "gelu", heads_argument("3,2")), theirs)
    assert heads_in(load_clip(file, "gelu", heads_argument("4"))) == {"image": 4, "text": 4}
    as_open_clip(our_clip(), tmp_path / "exported")
    # beside its configuration a file is no bare one
    assert heads_in(load_clip(tmp_path / "exported" / "open_clip_model.safetensors")) == {"image": 3, "text": 2}
    stated = "has 3 attention heads in its image tower, --heads states 4; expected 3"
    refused(
        (
            r"a\.safetensors: no tensor states the heads of the image tower, .* width 48 .* give --heads IMAGE,TEXT",
            lambda: load_clip(file, "gelu"),
        ),
        ("heads of the text tower, .* width 32 ", lambda: load_clip(file, "gelu", {"image": 3, "text": None})),
        (stated, lambda: agreed_heads("a folder", heads_in(load_clip(tmp_path / "exported")), heads_argument("4"))),
        ("does not state its activation: give quick_gelu", lambda: load_clip(file)),
        error=WeightsError,
    )
    expected = "expected a number for both towers, or two: IMAGE,TEXT"
    cases = ((expected, partial(heads_argument, text)) for text in ("", "0", "4,x", "1,2,3"))
    refused(*cases, error=argparse.ArgumentTypeError)


def test_tensors_that_are_missing_left_over_or_of_another_shape_are_named():
    state = tiny_open_clip().state_dict()

    def load(changed):
        return clip_from_open_clip(changed, "gelu", heads=HEADS, source="weights.pt")

    without = {name: value for name, value in state.items() if name != "visual.ln_pre.bias"}
    more = {**state, "visual.transformer.resblocks.0.ls_1.gamma": torch.ones(48)}
    resnet = {"visual.layer1.0.conv1.weight": torch.ones(1), "visual.conv1.weight": torch.ones(1)}
    first = {"visual.conv1.weight": state["visual.conv1.weight"]}
    refused(
        (r"weights\.pt lacks visual\.ln_pre\.bias", lambda: load(without)),
        (r"no place for: visual\.transformer\.resblocks\.0\.ls_1\.gamma", lambda: load(more)),
        (r"ln_final\.bias has shape \(5,\)", lambda: load({**state, "ln_final.bias": torch.ones(5)})),
        ("no CLIP with a vision transformer", lambda: load(resnet)),
        (r"weights\.pt lacks visual\.positional_embedding", lambda: load(first)),
        error=WeightsError,
    )
    assert load({**state, "attn_mask": torch.zeros(8, 8)}) is not None  # a buffer of older versions


@pytest.mark.parametrize("export", [clip_to_open_clip, clip_to_transformers])
def test_what_clip_cannot_express_is_not_exported(export):
    refused(
        ("2 class tokens; CLIP has one", lambda: export(our_clip(num_class_tokens=2))),
        ("no final LayerNorm", lambda: export(our_clip(final_layer_norm=False))),
        ("timm's kind", lambda: export(our_clip(input_norm=False))),
        error=WeightsError,
    )


def test_an_exported_mlp_ratio_gives_open_clip_the_same_hidden_width():
    sizes = [(width, hidden) for width in range(8, 1500, 8) for hidden in range(width, 5 * width, width // 8)]
    rounded = [int(width * ratio_rounded_down(hidden, width)) for width, hidden in sizes]
    assert rounded == [hidden for _, hidden in sizes]


def tiny_vit(kind, **more):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8,
        **more,
    )  # fmt: skip
    return shaken(getattr(transformers, f"{kind}Model")(config))


def our_vit(model):
    return vit_tower(
        model, width=48, layers=2, heads=3, mlp_ratio=2.0, projection_dim=None, activation="gelu", norm_eps=1e-12
    )


@pytest.mark.parametrize(("kind", "tokens"), [("ViT", 1), ("DeiT", 2)])
@torch.no_grad()
def test_vit_and_deit_give_the_same_tokens(kind, tokens):
    theirs = tiny_vit(kind)
    ours = our_vit(theirs)
    torch.testing.assert_close(ours.forward_tokens(IMAGES), theirs(IMAGES).last_hidden_state, **TOLERANCE)
    assert ours(IMAGES).shape == (3, tokens * 48)


@torch.no_grad()
def test_vit_weights_under_their_older_names_are_read_too():
    theirs = tiny_vit("ViT")
    older = {
        "layers.": "encoder.layer.", "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
    }  # fmt: skip
    state = {}
    for name, value in theirs.state_dict().items():
        for new, old in older.items():
            name = name.replace(new, old)
        state[name] = value

    again = our_vit(SimpleNamespace(config=theirs.config, state_dict=lambda: state))
    assert torch.equal(again.forward_tokens(IMAGES), our_vit(theirs).forward_tokens(IMAGES))


def tiny_bert(layers=3, **more):
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64, vocab_size=60,
        max_position_embeddings=20, **more,
    )  # fmt: skip
    return shaken(transformers.BertForMaskedLM(config))


def our_bert(layers, **more):
    return BidirectionalTextTransformer(
        60, 8, 32, layers, 2, None, mlp_ratio=2.0, final_layer_norm=False, norm_eps=1e-12, **more
    ).eval()


@torch.no_grad()
def test_bert_gives_the_same_tokens_and_masked_word_logits():
    theirs, ours, head = tiny_bert(), our_bert(3), MaskedLanguageHead(32, 60).eval()
    load_bert_(theirs, ours, head=head)
    mask = IDS != 0
    output = theirs(IDS, attention_mask=mask.long(), output_hidden_states=True)
    tokens = ours.forward_tokens(IDS)
    torch.testing.assert_close(tokens[mask], output.hidden_states[-1][mask], **TOLERANCE)
    torch.testing.assert_close(head(tokens, ours.token_embedding.weight)[mask], output.logits[mask], **TOLERANCE)
    again = our_bert(3)
    load_bert_(theirs.bert, again)  # without the head, BertModel is enough
    assert torch.equal(again.forward_tokens(IDS), tokens)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_in_training_the_dropout_is_berts_draw_for_draw(attention):
    """Whatever a BERT's configuration states, the tower's own rate decides."""
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    theirs, ours = tiny_bert(**rates, attn_implementation=attention), our_bert(3, dropout=0.2)
    load_bert_(theirs, ours)
    mask = IDS != 0
    torch.manual_seed(5)
    expected = theirs.bert.train()(IDS, attention_mask=mask.long()).last_hidden_state[mask]
    torch.manual_seed(5)
    actual = ours.train().forward_tokens(IDS)[mask]
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert (actual - ours.eval().forward_tokens(IDS)[mask]).abs().max() > 0.1
    plain = our_bert(3)
    load_bert_(theirs, plain)
    assert torch.equal(plain.train().forward_tokens(IDS), ours.forward_tokens(IDS))


@torch.no_grad()
def test_albefs_split_gives_berts_lower_layers_to_the_text_and_the_upper_ones_to_the_fusion():
    theirs, text, fusion = tiny_bert(), our_bert(1), FusionTransformer(32, 48, 2, 2, mlp_ratio=2.0).eval()
    cross = {name: value.clone() for name, value in fusion.state_dict().items() if "cross_attention" in name}
    load_bert_(theirs, text, fusion)
    mask = IDS != 0
    hidden = theirs(IDS, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(text.forward_tokens(IDS)[mask], hidden[1][mask], **TOLERANCE)
    for name, value in cross.items():
        assert torch.equal(fusion.state_dict()[name], value)
    # without the cross-attention sub-layer the fusion layers are BERT's own
    for block in fusion.transformer.blocks:
        block.cross_attention = None
    torch.testing.assert_close(fusion.transformer(text.forward_tokens(IDS), mask)[mask], hidden[3][mask], **TOLERANCE)


def test_towers_without_a_tensor_that_gives_a_size_are_refused_by_its_name():
    tensors = our_clip().state_dict()
    for name in ("text_tower.token_embedding.weight", "image_tower.transformer.blocks.0.mlp.0.weight"):
        some = {other: value for other, value in tensors.items() if other != name}
        read = partial(towers_of_sizes, some, {"heads": 3}, {"heads": 2}, "the run")
        refused((f"the run has no {name}; expected the weights of two tran", read), error=WeightsError)


def test_a_folder_of_transformers_that_does_not_fit_is_refused_by_name(tmp_path):
    clip, whole = tmp_path / "clip", tmp_path / "whole"
    tiny_transformers_clip().save_pretrained(whole)
    config = json.loads((whole / "config.json").read_text())
    for section, key, value, message in (
        (None, "projection_dim", 24, r"other shapes .*: text_projection.weight \(16, 32\), by config.json \(24, 32\)"),
        ("vision_config", "num_attention_heads", 5, "cannot be read by transformers: .*"),
        ("vision_config", "image_size", 36, "vision_config.image_size = 36; not a multiple of patch_size = 8"),
        ("text_config", "eos_token_id", [59, 2], r"text_config.eos_token_id = \[59, 2\].*expected one id"),
    ):
        shutil.copytree(whole, clip)
        changed = copy.deepcopy(config)
        (changed if section is None else changed[section])[key] = value
        (clip / "config.json").write_text(json.dumps(changed))
        refused((message, partial(load_clip, clip)), error=WeightsError)
        shutil.rmtree(clip)
    shutil.copytree(whole, clip)
    weights = clip / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(("clip cannot be read by transformers: .*not fully covered", partial(load_clip, clip)), error=WeightsError)


def untied_bert_with_a_head(folder, part):
    bert, name = tiny_bert(), f"cls.predictions.decoder.{part}"
    bert.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: 1 + bert.state_dict()[name]}, file, {"format": "pt"})
    load_bert_(read_bert(str(folder)), our_bert(3), head=MaskedLanguageHead(32, 60))


def test_a_bert_that_does_not_fit_is_refused(tmp_path):
    bert, head, fusion = tiny_bert(), MaskedLanguageHead(32, 60), FusionTransformer(32, 48, 1, 2, mlp_ratio=2.0)
    long = BidirectionalTextTransformer(60, 30, 32, 3, 2, None, 2.0, final_layer_norm=False, norm_eps=1e-12)
    refused(
        ("has 3 layers, the text tower takes 1 and the fusion 1", lambda: load_bert_(bert, our_bert(1), fusion)),
        (
            "no masked-language head; read it as BertForMaskedLM",
            lambda: load_bert_(bert.bert, our_bert(3), head=head),
        ),
        *(
            (
                rf"cls\.predictions\.decoder\.{part} differs from .*expected equal tensors",
                partial(untied_bert_with_a_head, tmp_path, part),
            )
            for part in ("weight", "bias")
        ),
        (r"context_length 30 is above .* 20 positions", lambda: load_bert_(bert, long)),
        error=WeightsError,
    )


@pytest.mark.parametrize("layout", ["transformers", "open_clip"])
def test_the_export_script_prints_the_parity_figure(tmp_path, layout, monkeypatch, capsys):
    ours = our_clip("quick_gelu")
    clip_to_transformers(ours).save_pretrained(tmp_path / "in")
    arguments = ["--model", tmp_path / "in", "--to", layout, "--output", tmp_path / "out"]
    monkeypatch.setattr("sys.argv", ["export_weights.py", *map(str, arguments)])
    export_weights.main()
    printed = capsys.readouterr().out
    figures = rf"read again by {layout}; .*: ([\d.e+-]+) \(8 random pictures\), ([\d.e+-]+) \(8 random"
    ((pictures, captions),) = re.findall(figures, printed)
    assert max(float(pictures), float(captions)) < 1e-5
    for loaded in (load_clip(tmp_path / "in"), load_clip(tmp_path / "out")):
        torch.testing.assert_close(loaded.encode_image(IMAGES), ours.encode_image(IMAGES), **TOLERANCE)
        torch.testing.assert_close(loaded.encode_text(IDS), ours.encode_text(IDS), **TOLERANCE)
    refused(
        ("states the activation quick_gelu; expected quick_gelu, got gelu", lambda: load_clip(tmp_path / "in", "gelu")),
        error=WeightsError,
    )
    # a folder with the files of both layouts is read as open_clip's, whichever model was written last
    other = {"transformers": "open_clip", "open_clip": "transformers"}[layout]
    arguments = ["--model", tmp_path / "in", "--to", other, "--output", tmp_path / "out"]
    monkeypatch.setattr("sys.argv", ["export_weights.py", *map(str, arguments)])
    refused(("out exists already; expected --output with a new folder", export_weights.main), error=CheckpointError)
    # what open_clip's configuration cannot state is refused before a file is written
    sizes = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessor(**sizes).save_pretrained(tmp_path / "in")
    arguments = ["--model", tmp_path / "in", "--to", "open_clip", "--output", tmp_path / "none"]
    monkeypatch.setattr("sys.argv", ["export_weights.py", *map(str, arguments)])
    refused(("open_clip has one size only", export_weights.main), error=WeightsError)
    assert not (tmp_path / "none").exists()


def test_weights_in_float64_are_exported_in_float32_and_a_model_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    file = tmp_path / "double.safetensors"
    save_file(tiny_open_clip().double().state_dict(), file)
    arguments = ("--model", file, "--activation", "gelu", "--heads", "3,2", "--to", "open_clip")
    called(export_weights.main, *arguments, "--output", tmp_path / "out")
    assert {value.dtype for value in read_weights(tmp_path / "out/open_clip_model.safetensors").values()} == {
        torch.float32
    }
    monkeypatch.delattr(TwoTowers, "encode_text")
    with pytest.raises(AttributeError):
        called(export_weights.main, *arguments, "--output", tmp_path / "none")
    assert not (tmp_path / "none").exists()
