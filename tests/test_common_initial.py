"""Runs that start from weights: towers are the public model's, what is locked stays, what does not fit is named."""

import importlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
import yaml
from accelerate import Accelerator
from killed_run import resumed_after
from refusals import refused
from runs import called, lines, row_config, trained, weights
from safetensors.torch import load_file, save_file
from tars import good_tar
from test_common_weights import shaken

from common.base.config import ConfigError, load_row
from common.base.provenance import ROOT, git_revision, hash_of
from common.data.clip_tokenizer import ClipTokenizer
from common.data.pairs import open_training_pairs
from common.data.text import build_tokenizer
from common.data.transforms import CLIP_MEAN, CLIP_STD
from common.encoders.weights import Weights, WeightsError, clip_from_transformers, clip_to_open_clip, settings_of
from common.geometry import unit
from common.run.checkpoint import CheckpointError, last_checkpoint, save_checkpoint
from common.run.folder import RunFiles, run_key
from common.run.initial import InitialWeights, open_source
from common.run.log import read_log
from common.run.sources import weights_fingerprint
from scripts import export_weights, publish

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
# of a smoke scale the sizes of the tiny public models; the evaluation at the end is not the point
SMALL = (
    "model.image.width=32", "model.image.layers=2", "model.image.heads=2", "model.image.mlp_ratio=2",
    "run.save_every=2", "model.text.width=32", "model.text.layers=2", "model.text.heads=2", "model.text.mlp_ratio=2",
    "run.log_every=1", "model.patch_size=8", "model.embedding_dim=16", "data.image_size=32", "data.context_length=16",
    "optim.steps=4", "run.evaluate_every=0", "data.num_test=4", "data.num_labelled=4", "run.diagnose_every=0",
)  # fmt: skip
ROWS = {"contrastive_basics": "table1_ours", "euclip": "table4_meru", "oblique_topology": "table2_clip"}


def config_of(paper, *overrides, row=None):
    return row_config(paper, row or ROWS[paper], *SMALL, *overrides)


WORDS = build_tokenizer(config_of("euclip").data, None)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Folders that transformers wrote: random CLIP, ViT with its own colours, DeiT, BERT."""
    folder = tmp_path_factory.mktemp("public")
    text = {**SIZES, "vocab_size": WORDS.vocabulary_size, "max_position_embeddings": 20}
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    ends = {"eos_token_id": WORDS.end_id, "bos_token_id": WORDS.cls_id, "pad_token_id": 0}
    torch.manual_seed(7)
    models = {
        "clip": transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={**text, **ends, "hidden_act": "quick_gelu"},
                vision_config={**vision, "hidden_act": "quick_gelu"},
                projection_dim=16,
            )
        ),
        "vit": transformers.ViTModel(transformers.ViTConfig(**{**vision, "image_size": 48})),
        "deit": transformers.DeiTModel(transformers.DeiTConfig(**vision)),
        "bert": transformers.BertModel(transformers.BertConfig(**text)),
    }
    for name, model in models.items():
        shaken(model).save_pretrained(folder / name)
    processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (folder / "vit/preprocessor_config.json").write_text(json.dumps(processor))
    return folder, models


def model_of(paper, config):
    """A run's model before its first step, and what the log would say."""
    initial = InitialWeights.opened(config)
    config = initial.resolved(config)
    torch.manual_seed(config.run.seed)
    model = importlib.import_module(f"{paper}.model").build_model(config, WORDS)
    return model, initial.start_(model, config, WORDS)


def run(folder, config, paper, resume=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.run.training.evaluate_and_save", lambda *arguments: None)
        return trained(paper, config, folder, resume)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run that others start from."""
    return run(tmp_path_factory.mktemp("first"), config_of("euclip", "optim.steps=2"), "euclip")


def inputs():
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return images, WORDS.encode(["a red cube", "two balls", "a cone left of a cube"], 16)


def test_a_locked_public_clip_is_itself_after_training(tmp_path, public):
    paper = "contrastive_basics"
    lock = (f"model.init={public[0] / 'clip'}", "model.image.lock=all", "model.text.lock=all")
    files = run(tmp_path / "run", config_of(paper, *lock, "optim.micro_batch_size=9"), paper)
    checkpoint = last_checkpoint(files.checkpoints)
    _, encoder = importlib.import_module(f"{paper}.evaluate").load_encoder(checkpoint, torch.device("cpu"))
    (images, ids), theirs = inputs(), public[1]["clip"]
    expected = theirs(input_ids=ids, pixel_values=images)
    embeddings = encoder.model.image_tower(images), encoder.model.text_tower(ids)
    for ours, other in zip(embeddings, (expected.image_embeds, expected.text_embeds)):
        torch.testing.assert_close(unit(ours), other, rtol=1e-4, atol=1e-5)
    first = read_log(files.log)[-4]["logit_scale"]  # the multiplier goes on from theirs, and trains
    assert first == pytest.approx(min(100.0, theirs.logit_scale.exp().item()), rel=1e-5)
    # no optimiser state for what is locked, and the log says how much that is
    named = {name.partition(".")[0] for name in load_file(checkpoint.path / "optimizer.safetensors")}
    assert named == {"logit_scale"}
    (logged,) = lines(files, "initial_weights")
    assert logged["image"]["trained_parameters"] == logged["text"]["trained_parameters"] == 0
    assert logged["image"]["locked_parameters"] == sum(p.numel() for p in encoder.model.image_tower.parameters())


@torch.no_grad()
def test_a_vit_and_a_bert_are_the_towers_of_the_oblique_paper(public):
    """Another picture size, other colours: positions as transformers interpolates them, the same pixels."""
    folder, models = public
    init = (f"model.image.init={folder / 'vit'}", f"model.text.init={folder / 'bert'}", "model.image.lock=all")
    model, logged = model_of("oblique_topology", config_of("oblique_topology", *init))
    images, ids = inputs()
    pixels = images * torch.tensor(CLIP_STD).view(3, 1, 1) + torch.tensor(CLIP_MEAN).view(3, 1, 1)
    mean, std = (torch.tensor(element).view(3, 1, 1) for element in ([0.5, 0.4, 0.3], [0.5, 0.6, 0.7]))
    expected = models["vit"]((pixels - mean) / std, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(model.image_tower.forward_tokens(images), expected, rtol=1e-4, atol=1e-4)
    mask = ids != 0
    text = models["bert"](ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(model.text_tower._blocks(ids)[mask], text[mask], rtol=1e-4, atol=1e-4)
    # what the weights lack is new, and is trained though the tower is locked
    assert logged["image"]["new"] == ["projection"]
    assert set(logged["text"]["new"]) == {"final_norm.weight", "final_norm.bias", "projection"}
    assert [name for name, p in model.image_tower.named_parameters() if p.requires_grad] == ["projection"]


def test_a_deit_with_its_distillation_token_fills_two_class_tokens(public):
    two = ("method.num_spheres=2", f"model.image.init={public[0] / 'deit'}")
    model, _ = model_of("oblique_topology", config_of("oblique_topology", *two, row="table2_multi"))
    reference = public[1]["deit"].state_dict()
    assert torch.equal(model.image_tower.class_embedding[1], reference["embeddings.distillation_token"][0, 0])


def test_the_lowest_layers_are_locked_and_all_others_move(tmp_path, public):
    clip = f"model.init={public[0] / 'clip'}"
    before, _ = model_of("euclip", config_of("euclip", clip))
    config = config_of("euclip", clip, "model.text.lock=0", "model.image.lock=1", "optim.steps=2")
    after = last_checkpoint(run(tmp_path, config, "euclip").checkpoints).model_tensors()
    still = {name for name, value in before.state_dict().items() if torch.equal(value, after[name])}
    of_images = ("patch_embedding", "class_embedding", "position_embedding", "input_norm", "transformer.blocks.0.")
    names = (*(f"image_tower.{name}" for name in of_images), "text_tower.token_emb", "text_tower.position_emb")
    assert still == {name for name in after if name.startswith(names)}


def test_a_run_that_started_from_weights_resumes_to_the_last_bit_and_from_no_others(tmp_path, public):
    source = shutil.copytree(public[0] / "clip", tmp_path / "clip")
    config = config_of("euclip", f"model.init={source}", "model.image.lock=1")
    resumed_after(2, partial(run, config=config, paper="euclip"), tmp_path)
    assert len(lines(RunFiles(tmp_path / "resumed"), "initial_weights")) == 1
    key = run_key("euclip", config, "data")
    moved = config_of("euclip", f"model.init={source.rename(tmp_path / 'moved')}", "model.image.lock=1")
    assert run_key("euclip", moved, "data") == key  # the bytes count, not where they lie
    gone = "the run in .*unbroken began with these weights, and needs them to resume"
    refused((gone, lambda: run(tmp_path / "unbroken", config, "euclip", resume=True)), error=ConfigError)
    (tmp_path / "moved/model.safetensors").write_bytes((public[0] / "bert/model.safetensors").read_bytes())
    assert run_key("euclip", moved, "data") != key
    shutil.copy(public[0] / "clip/model.safetensors", tmp_path / "moved")
    (tmp_path / "moved/config.json").write_text((tmp_path / "moved/config.json").read_text() + " ")
    refused((r"holds a run that started from other weights than model\.init",
             lambda: run(tmp_path / "resumed", moved, "euclip", resume=True)), error=ConfigError)  # fmt: skip


def test_a_run_of_ours_goes_on_as_a_new_run_with_all_its_scalars(first):
    tensors = weights(first)
    for name in (first.folder, first.checkpoints / "step-00000002"):
        model, logged = model_of("euclip", config_of("euclip", f"model.init={name}"))
        assert all(torch.equal(tensors[key], value) for key, value in model.state_dict().items())
        assert len(logged["scalars"]) == 4
    # with another geometry the towers alone; the multiplier is the row's
    model, logged = model_of("euclip", config_of("euclip", f"model.init={first.folder}", row="table4_elliptic"))
    assert logged["scalars"] == []
    assert model.logit_scale().item() == pytest.approx(1 / 0.07)


def test_the_multiplier_of_a_product_of_spheres_goes_on_only_on_as_many_spheres(tmp_path):
    """Ob(8, 2) sums two cosines, Ob(2, 8) eight."""

    def config(spheres, *overrides):
        return config_of("oblique_topology", f"method.num_spheres={spheres}", *overrides, row="ablation_ob_256_2")

    files = run(tmp_path, config(2, "optim.steps=2", "method.logit_scale_init=3"), "oblique_topology")
    for spheres, scalars in ((2, ["logit_scale.log_logit_scale"]), (8, [])):
        model, logged = model_of("oblique_topology", config(spheres, f"model.init={files.folder}"))
        assert logged["scalars"] == scalars
        assert (model.logit_scale().item() == pytest.approx(3, rel=0.1)) == bool(scalars)


def test_one_source_in_two_spellings_is_one_pair(public):
    folder = public[0] / "clip"
    inits = (f"model.image.init={folder}", f"model.text.init={folder.parent}/vit/../clip/")
    _, logged = model_of("contrastive_basics", config_of("contrastive_basics", *inits))
    assert logged["scalars"] == ["logit_scale.log_logit_scale"]


def test_towers_without_projections_go_on_and_have_no_place_in_other_layouts(tmp_path):
    settings = ("optim.steps=2", "model.embedding_dim=32")
    files = run(tmp_path, config_of("contrastive_basics", *settings, row="table1_class_tokens"), "contrastive_basics")
    again = config_of("contrastive_basics", *settings, f"model.init={files.folder}", row="table1_class_tokens")
    model, _ = model_of("contrastive_basics", again)
    trained = weights(files)
    assert "image_tower.projection" not in trained
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    refused(("only a vision transformer with a causal text tower",
             lambda: clip_to_open_clip(open_source(str(files.folder)).clip())), error=WeightsError)  # fmt: skip


@pytest.mark.parametrize("row", ["table1_late_interaction", "negatives_queue"])
def test_wrapped_towers_and_momentum_copies_start_from_the_weights(tmp_path, public, row):
    lock = ("model.image.lock=all", "model.text.lock=all")
    config = config_of("contrastive_basics", f"model.init={public[0] / 'clip'}", "optim.steps=2", *lock, row=row)
    files = run(tmp_path, config, "contrastive_basics")
    tensors, source = weights(files), open_source(str(files.folder))
    reference = public[1]["clip"].state_dict()["vision_model.post_layernorm.weight"]
    copies = [tensors[name] for name in tensors if name.endswith("final_norm.weight") and "image" in name]
    if row == "negatives_queue":
        copies.append(clip_to_open_clip(source.clip())[0]["visual.ln_post.weight"])
    else:
        refused(
            ("geometry 'late_interaction': other code compares by cosine.*publish.py writes", source.clip),
            error=WeightsError,
        )
    assert len(copies) == (1 if row == "table1_late_interaction" else 3)
    for copied in copies:
        torch.testing.assert_close(copied, reference)


@pytest.mark.parametrize(
    ("paper", "source", "overrides", "message"),
    [
        ("euclip", "clip", ("model.image.layers=1", "model.patch_size=16", "model.text.layers=1"),
         r"(?=.*patch_size = 16, in the weights 8).*image\.layers = 1, in the weights 2.*; as the weights have .*\n"
         r".*text\.layers = 1, in the weights 2"),
        ("euclip", "clip", ("model.text.width=16",), r"text\.width = 16, in the weights 32.*model\.text\.width=32"),
        ("euclip", "clip", ("data.context_length=24",), r"data\.context_length = 24, in the weights 20"),
        ("euclip", "clip", ("model.image.activation=gelu",), r"expected quick_gelu, got gelu"),
        ("euclip", "vit", (), r"model\.init = .*vit has no text tower; expected: model\.image\.init"),
        ("oblique_topology", "clip", (), r"order = bidirectional \(BERT\), in the weights causal \(CLIP\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_key_and_both_values(public, paper, source, overrides, message):
    refused(
        (message, lambda: model_of(paper, config_of(paper, f"model.init={public[0] / source}", *overrides))),
        error=WeightsError,
    )


def test_the_file_for_fine_tuning_has_the_sizes_of_the_public_clip_that_it_names():
    path = ROOT / "docs/finetune_meru.yaml"
    config = load_row(importlib.import_module("euclip.config").Config, ROOT / "euclip", path, "photos_scratch")
    with torch.device("meta"):  # transformers' defaults are those of openai/clip-vit-base-patch32
        clip = clip_from_transformers(transformers.CLIPModel(transformers.CLIPConfig()))
        weights = Weights("clip", clip.image_tower, clip.text_tower)
        initial = InitialWeights(dict.fromkeys(("image", "text"), ("model.init", weights)))
        tokenizer = ClipTokenizer.from_vocabulary()
        ours = importlib.import_module("euclip.model").build_model(initial.resolved(config), tokenizer)
        assert settings_of(ours.image_tower) == settings_of(clip.image_tower)
        assert settings_of(ours.text_tower) == settings_of(clip.text_tower)
        assert ours.image_tower.image_size == clip.image_tower.image_size


def test_other_words_and_class_tokens_are_named(first, public):
    multi = config_of("oblique_topology", f"model.image.init={public[0] / 'clip'}", "method.num_spheres=2",
                      row="table2_multi")  # fmt: skip
    path = first.checkpoints / "step-00000002/state.json"
    other = type(WORDS)([*WORDS.words[:-1], "zebra"])
    state = json.loads(path.read_text()) | {"tokenizer": other.to_json()}
    initial = importlib.import_module("common.run.initial")
    weights = initial._of_checkpoint(type(last_checkpoint(first.checkpoints))(path.parent, state), None)
    assert weights.tokenizer == other.fingerprint
    config = config_of("euclip", f"model.text.init={first.folder}")
    model, of_text = model_of("euclip", config)[0], InitialWeights({"text": ("model.text.init", weights)})
    refused(
        ("class tokens of the image tower = 2, in the weights 1", lambda: model_of("oblique_topology", multi)),
        (r"model\.text\.init = .* another tokenizer than data\.tokenizer = words",
         lambda: of_text.start_(model, config, WORDS)),
        error=WeightsError,
    )  # fmt: skip


def test_a_run_goes_on_with_its_words_on_other_captions(tmp_path, first):
    shards = [good_tar(tmp_path / f"set-{role}.tar", 40, 40 * number) for number, role in enumerate(("train", "val"))]
    of_files = ("data.source=shards", *(f"data.{file.stem[4:]}={file}" for file in shards), "run.test=false")
    of_files += ("data.num_test=1000", "data.num_labelled=1000")  # the defaults: scenes have others here
    settings = (f"model.init={first.folder}", "optim.steps=2", *of_files)
    with pytest.warns(UserWarning, match="of the words are unknown to the tokenizer of this run"):
        second = run(tmp_path / "photos", config_of("euclip", *settings), "euclip")
    states = [last_checkpoint(files.checkpoints).state for files in (first, second)]
    assert states[0]["tokenizer"] == states[1]["tokenizer"]
    counting = config_of("euclip", *settings, "data.min_word_count=7")
    refused((r"data\.min_word_count = 7 counts no words here.*; expected: 2",
             lambda: run(tmp_path / "counted", counting, "euclip")), error=ConfigError)  # fmt: skip


def test_a_lock_that_means_nothing_is_refused():
    cases = (
        (["model.image.lock=all"], r"model\.image\.lock = all without model\.init and model\.image\.init would freeze"),
        (["model.init=x", "model.text.lock=9"], r"model\.text\.lock = 9 is more than model\.text\.layers = 2"),
        (["model.init=x", "model.text.lock=some"], r"model\.text\.lock = 'some'; expected one of: all, a whole number"),
        (["model.init=x", "model.text.lock=-1"], r"model\.text\.lock = '-1'; expected one of: all, >= 0"),
        (
            ["model.init=x", "model.image.lock=0", "model.image.stem.name=x", "model.image.stem.trainable=true"],
            r"model\.image\.lock = 0 freezes the stem, .*; expected: lock=null, or trainable=false",
        ),
    )
    refused(*((message, partial(config_of, "euclip", *overrides)) for overrides, message in cases), error=ConfigError)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/no-such-model", r"model\.init = 'nobody/no-such-model': no such file or folder, and no .* hub"),
        ("./nowhere", r"model\.init = './nowhere': no such file; expected: a file or a folder that holds"),
        ("vit-b-32.pt", r"model\.init = 'vit-b-32\.pt': no such file; expected: a file or a folder that holds"),
    ],
)
def test_weights_that_cannot_be_had_are_named_offline_too(name, message, monkeypatch):
    if "/no-such" not in name:
        monkeypatch.setattr("common.data.text_files._hub_file", lambda *_: pytest.fail("asked the hub for a path"))
    config = config_of("euclip", f"model.init={name}")
    refused((message, lambda: InitialWeights.opened(config)), error=(ValueError, FileNotFoundError))
    refused((r"model\.init = .*: no such file", lambda: run_key("euclip", config, "data")))


@torch.no_grad()
def test_a_run_that_starts_from_a_bare_file_states_its_heads(tmp_path, public):
    """The side that is taken decides: the other tower of the file needs no number, and its key may say another one."""
    clip = clip_from_transformers(public[1]["clip"])
    save_file(clip_to_open_clip(clip)[0], tmp_path / "clip.safetensors")
    init = (f"model.image.init={tmp_path / 'clip.safetensors'}", "model.image.activation=quick_gelu")
    model, _ = model_of("euclip", config_of("euclip", *init, "model.text.heads=4"))
    images, _ = inputs()
    torch.testing.assert_close(model.image_tower(images), clip.image_tower(images))
    model, _ = model_of("euclip", config_of("euclip", *init, "model.image.heads=4"))
    assert model.image_tower.transformer.blocks[0].attention.heads == 4


def test_a_configuration_that_is_read_with_a_file_is_part_of_what_a_run_starts_from(tmp_path, public):
    state, configuration = clip_to_open_clip(clip_from_transformers(public[1]["clip"]))
    clip, stem = tmp_path / "open_clip_model.safetensors", tmp_path / "model.safetensors"
    save_file(state, clip)
    save_file({"weight": torch.ones(1)}, stem)
    keys = set()
    for number in range(2):
        content = {"model_cfg": configuration | {"quick_gelu": bool(number)}}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "mean": [number] * 3}))
        keys |= {run_key("euclip", config_of("euclip", f"model.init={clip}"), "data"), weights_fingerprint(str(stem))}
    assert len(keys) == 4


def test_weights_that_transformers_would_draw_at_random_or_leave_out_are_named(tmp_path, public):
    no_place = r"config\.json has no place for: .*layers?\.1\."  # those of vit and deit are shorter once they are read
    lacks = r"bert lacks encoder\.layer\.2\.att"
    for kind, layers, message in (("bert", 3, lacks), *((kind, 1, no_place) for kind in ("bert", "vit", "deit"))):
        folder = shutil.copytree(public[0] / kind, tmp_path / kind, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
        refused((message, partial(open_source, str(folder))), error=WeightsError)
    folder = shutil.copytree(public[0] / "clip", tmp_path / "clip")
    state = load_file(folder / "model.safetensors") | {"classifier.bias": torch.ones(3)}  # for another task: no fault
    for name in ("visual_projection.bias", "text_projection.bias", "logit_bias"):
        save_file(state | {name: torch.ones(())}, folder / "model.safetensors", {"format": "pt"})
        refused((f"no place for: {name}$", partial(open_source, str(folder))), error=WeightsError)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert open_source(str(folder)).geometry == "sphere"


@pytest.mark.parametrize(
    ("paper", "row", "message"),
    [
        ("contrastive_basics", "table1_ours", None),
        (
            "contrastive_basics",
            "beyond_sigmoid",
            "CLIP has no logit bias, which the sigmoid loss trains; expected: open_clip",
        ),
        ("geomm", "clip", "expected a run of two towers: contrastive_basics, euclip or oblique_topology"),
        pytest.param("euclip", "table4_clip", None, marks=pytest.mark.slow),
        ("oblique_topology", "table2_clip", "these are VisionTransformer and BidirectionalTextTransformer"),
    ],
)
def test_runs_of_every_paper_are_exported_or_refused_in_words(tmp_path, capsys, paper, row, message):
    files = run(tmp_path / "run", config_of(paper, "optim.steps=2", row=row), paper)
    if message is None:
        export(files.folder, "transformers", tmp_path / "out")
        out = capsys.readouterr().out
        assert "read again by transformers" in out
        assert "(data.tokenizer=words): other programs cannot make its ids" in out
    else:
        refused((message, partial(export, files.folder, "transformers", tmp_path / "out")), error=WeightsError)


def export(model, layout, output):
    called(export_weights.main, "--model", model, "--to", layout, "--output", output)


@pytest.mark.filterwarnings("ignore:.* has 9 merges")
def test_the_exported_tokenizer_is_that_of_the_run(tmp_path, capsys):
    merges = ("r e", "re d</w>", "b o", "bo a", "boa t</w>", "l e", "le f", "lef t</w>", "o f</w>")
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    vocabulary = ("data.tokenizer=clip_bpe", f"data.vocabulary={tmp_path / 'merges.txt'}")
    files = run(tmp_path / "run", config_of("contrastive_basics", "optim.steps=2", *vocabulary), "contrastive_basics")
    export(files.folder, "transformers", tmp_path / "out")
    export(tmp_path / "out", "transformers", tmp_path / "again")
    export(files.folder, "open_clip", tmp_path / "other")
    assert "Its 9 merges have no place in this layout" in capsys.readouterr().out
    texts = ["A red boat, left of a boat", "", "boat " * 40]
    ours = ClipTokenizer(merges)
    for folder in (tmp_path / "out", tmp_path / "again"):
        theirs = transformers.AutoProcessor.from_pretrained(folder)(text=texts, padding="max_length", truncation=True)
        for ids, expected in zip(theirs.input_ids, ours.encode(texts, 16).tolist()):
            assert ids == [token or ours.end_id for token in expected]  # theirs pads with the end


def test_weights_without_a_text_tower_are_named(tmp_path):
    state = {"kind": "vision", "paper": "contrastive_basics"}
    model = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, model, torch.optim.AdamW(model.parameters()), state)
    refused((r"written by pretrain\.py and holds a ResNet; expected a run of two trans",
             lambda: open_source(str(tmp_path))), error=WeightsError)  # fmt: skip


def test_a_published_run_is_evaluated_and_started_from_again_and_uploaded_if_asked(tmp_path, monkeypatch, capsys):
    run_folder, uploads = tmp_path / "table1_ours-smoke-0123abcd/seed0", []
    script = importlib.import_module("contrastive_basics.train")
    config = config_of("contrastive_basics", "optim.steps=2", f"model.weights={tmp_path}")
    script.train(config, open_training_pairs(config.data, 0), RunFiles(run_folder), False, Accelerator(cpu=True))

    def upload(repo_id, folder_path):
        uploads.append(sorted(file.name for file in Path(folder_path).iterdir()))
        return f"https://hub/{repo_id}"

    hub = SimpleNamespace(create_repo=lambda name, exist_ok: uploads.append(name), upload_folder=upload)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)

    def published(name, *more, run=run_folder):
        called(publish.main, "--run", run, "--licence", "cc-by-4.0", "--output", tmp_path / name, *more)
        return tmp_path / name

    folder = published("mine")
    assert uploads == []
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["weights"] == tmp_path.name
    assert not [file for file in folder.iterdir() if str(tmp_path).encode() in file.read_bytes()]
    card = (folder / "README.md").read_text()
    assert all(text in card for text in ("license: cc-by-4.0", "row table1_ours at smoke scale", "seed 0, after"))
    assert "python contrastive_basics/train.py --config table1_ours --scale smoke model.init=mine\n" in card
    code = hash_of(json.loads((run_folder / "dependencies.json").read_text()))
    assert f"Code: {git_revision()}, hash of its files {code}; all settings" in card
    measured = json.loads((run_folder / "evaluation.json").read_text())["evaluations"]
    of_test = measured["test"]
    number = f"{100 * of_test['metrics']['i2t_recall_at_1']:.1f}"
    assert f"| test | {of_test['protocol']['data']} | i2t_recall_at_1 | {number} | " in card
    assert (folder / "vocabulary.txt").read_text().split("\n")[:-1] == list(WORDS.vocabulary)
    # the same numbers again, the same way through published.py, the same weights by model.init
    arguments = ("--checkpoint", folder, "--output", tmp_path / "a.json")
    called(importlib.import_module("contrastive_basics.evaluate").main, *arguments)
    actual = json.loads((tmp_path / "a.json").read_text())["evaluations"]
    assert actual["test"]["metrics"] == measured["test"]["metrics"]
    asked, where = [], "common.run.evaluation"
    monkeypatch.setattr(
        f"{where}.evaluate_checkpoint", lambda models, reference, _: asked.append(reference.path) or ({}, {})
    )
    monkeypatch.setattr(f"{where}.save_answer", lambda *arguments: None)
    for paper in ("euclip", "oblique_topology"):
        called(importlib.import_module(f"{paper}.published").main, *arguments)
    assert asked == [folder, folder]
    model, _ = model_of("contrastive_basics", config_of("contrastive_basics", f"model.init={folder}"))
    tensors = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    published("again", "--to", "me/mine")
    assert uploads == ["me/mine", sorted(file.name for file in folder.iterdir())]
    assert "uploaded to https://hub/me/mine" in capsys.readouterr().out
    # by hub name, as from its cache
    cached = staticmethod(lambda name, files, key: next(folder / file for file in files if (folder / file).is_file()))
    for module in ("sources", "checkpoint"):
        monkeypatch.setattr(f"common.run.{module}.find_file", cached)
    assert open_source("me/mine").tokenizer == WORDS.fingerprint
    (folder / "state.json").write_text((folder / "state.json").read_text() + " ")
    checkpoint = last_checkpoint(run_folder / "checkpoints").path
    refused(
        ("mine exists already; expected --output with a new folder", lambda: published("mine")),
        ("has no config.yaml; expected the folder of a run", lambda: published("new", run=checkpoint)),
        (r"damaged: the sha256 of state\.json", lambda: open_source(str(folder))),
    )
    with monkeypatch.context() as full:
        full.setattr(publish, "card", Mock(side_effect=OSError(28, "No space left on device")))
        refused((r"cannot write .*new: .*No space left", lambda: published("new")), error=CheckpointError)
    assert not [*tmp_path.glob("new"), *tmp_path.glob(".writing*")]
    assert "seed 0, after 2 steps.\n" in card
    last = last_checkpoint(run_folder / "checkpoints")
    unfinished = replace(last, state={**last.state, "step": 1})
    card = publish.card(unfinished, run_folder, {}, "mit", "mine")
    assert "after 1 of 2 steps: its training is not" in card
    assert "## Measured\n\nThis model was not evaluated;" in card
    config = last.state["config"]
    named = {**config, "data": {**config["data"], "root": "", "test": "/data/mine/test.tsv"}}  # files, and no folder
    card = publish.card(replace(last, state={**last.state, "config": named}), run_folder, {}, "mit", "mine")
    assert "evaluate.py --checkpoint mine data.root=<folder of the data>\n" in card
    assert "/data/mine" not in card
    monkeypatch.chdir(run_folder)
    called(publish.main, "--run", ".", "--licence", "mit")
    assert [path.name for path in Path("published").iterdir()] == ["table1_ours-smoke-0123abcd-seed0"]
