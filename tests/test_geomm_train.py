"""geomm/train.py and evaluate.py at smoke scale: runs that start from others, resumes, what is evaluated."""

import shutil
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from killed_run import records, resumed_after
from refusals import refused
from runs import lines, row_config, trained, weights
from test_common_initial import WORDS, inputs, public  # noqa: F401

from common.base.config import ConfigError
from common.base.provenance import ROOT
from common.data.clip_tokenizer import ClipTokenizer
from common.data.pairs import open_evaluation_sets, open_training_pairs, open_validation_pairs
from common.data.text import build_tokenizer
from common.encoders.transformer import Attention, CrossAttention
from common.encoders.vision import interpolate_positions
from common.encoders.weights import Weights, WeightsError, clip_from_transformers, fill_
from common.evaluation.embed import CaptionRule, embed_pairs
from common.evaluation.rerank import evaluate_two_stage
from common.reproduce.rows import Job, run_row, started
from common.reproduce.search import _metric_of
from common.run.checkpoint import CheckpointError, last_checkpoint
from common.run.folder import RunFiles, check_same_run, run_key
from common.run.initial import InitialWeights
from geomm.downstream.data import open_task_training
from geomm.evaluate import load_encoder, matching
from geomm.finetune import CODE as TASKS
from geomm.finetune import code_of
from geomm.ground import measure, scenes_to_ground
from geomm.model import build_model, start_, tensors_of_run
from geomm.train import CODE, open_data

FEW = ("optim.steps=2", "optim.warmup_steps=0", "data.num_train=64", "data.num_val=16", "data.num_test=16",
       "run.evaluate_every=0", "run.save_every=0", "method.queue_size=16")  # fmt: skip


config_of = partial(row_config, "geomm")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finetuned(runs):
    """The third of three runs that start from one another."""
    return run_row(Job(CODE, "finetuned_albef_geo.yaml", "smoke", 0, FEW, runs))


def encoder_of(run):
    return load_encoder(last_checkpoint(run.files.checkpoints), torch.device("cpu"))


def test_a_row_trains_what_it_starts_from_and_finds_it_again(finetuned, runs, capsys):
    parents = {path.parent.name.rpartition("-smoke-")[0]: path for path in runs.glob("geomm/*/seed0")}
    assert parents.keys() == {"towers", "albef_geo", "finetuned_albef_geo"}
    again = run_row(Job(CODE, "finetuned_albef_geo.yaml", "smoke", 0, FEW, runs))
    assert again.files.folder == finetuned.files.folder
    assert capsys.readouterr().out.count("found in") == 3
    (first,), (last,) = (lines(files, "start") for files in (RunFiles(parents["albef_geo"]), finetuned.files))
    assert last["filled"] > 40
    assert last["new"] == 0
    assert first["new"] > 20  # fusion and heads


def test_weights_of_the_run_that_it_starts_from_are_in_the_key(finetuned, runs, tmp_path):
    start, (other,) = finetuned.config.start.run, runs.glob("geomm/towers-*/seed0")

    def key(folder):
        return run_key("geomm", config_of("finetuned_albef_geo", *FEW, f"start.run={folder}"), "data")

    moved = shutil.copytree(start, tmp_path / "moved")
    assert key(start) == key(moved) != key(other)
    refused(
        (r"start.run = /nowhere: no such .*; expected the folder of", lambda: key("/nowhere")), error=CheckpointError
    )


def test_a_resume_names_the_setting_whose_weights_differ(finetuned, runs):
    (other,) = runs.glob("geomm/towers-*/seed0")
    config = replace(finetuned.config, start=replace(finetuned.config.start, run=str(other)))
    checkpoint = last_checkpoint(finetuned.files.checkpoints)
    refused(
        (
            r"started from other weights than start\.run names now",
            lambda: check_same_run(checkpoint, finetuned.files, config, checkpoint.state["data_fingerprint"]),
        ),
        error=ConfigError,
    )


def test_what_a_run_starts_from_is_what_it_takes(finetuned):
    _, parent = encoder_of(finetuned)
    weights = parent.model.state_dict()
    for row, taken in (("finetuned_albef_geo", ("encoders.", "matching_head.", "logit_scale.")),
                       ("albef_geo", ("encoders.image_tower", "encoders.text_proj", "logit_scale."))):  # fmt: skip
        config = config_of(row, f"start.run={finetuned.files.folder}")
        torch.manual_seed(9)
        model = build_model(config, parent.tokenizer)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        start_(model, config)
        for name, value in model.state_dict().items():
            if name.startswith(taken):
                assert torch.equal(value, weights[name]), name
            elif name.startswith(("encoders.fusion", "matching_head", "image_pool", "momentum")):
                assert torch.equal(value, before[name]), name
    for factor, expected in ((0.5, parent.model.logit_scale().item() / 2), (1000, 500)):  # the upper bound
        config = config_of("tcl_oblique_halved", f"start.run={finetuned.files.folder}", f"start.scale_factor={factor}")
        model = build_model(config, parent.tokenizer)
        start_(model, config)
        assert model.logit_scale().item() == pytest.approx(expected)


def test_a_run_of_other_sizes_or_papers_is_refused(finetuned, monkeypatch):
    folder, tokenizer = finetuned.files.folder, encoder_of(finetuned)[1].tokenizer

    def start(*arguments):
        config = config_of(*arguments, f"start.run={folder}")
        start_(build_model(config, tokenizer), config)

    job = Job(CODE, "clip_geo.yaml", "smoke", 0, (*FEW, "start.row=tower"), folder)
    refused(
        (
            "start.run = .* does not fit this row: encoders.image_proj.* for",
            lambda: start("albef_geo", "model.image.width=48"),
        ),
        (r"does not fit this row: encoders.fusion\..* for none", lambda: start("clip_geo")),  # all of an ALBEF
        ("start.row = tower; expected another row of geomm: albef, ", lambda: run_row(job)),
        error=ConfigError,
    )
    monkeypatch.setattr("geomm.model.named_checkpoint", lambda *_: SimpleNamespace(state={"paper": "euclip"}))
    words = "start.run = .* was trained by euclip; expected: a run of geomm"
    refused((words, lambda: start("clip_geo")), error=ConfigError)


def test_another_tokenizer_than_that_of_the_start_is_refused(finetuned, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog"]))
    more = [f"start.run={finetuned.files.folder}", "data.tokenizer=bert_wordpiece", f"data.vocabulary={tmp_path}"]
    message = r"data\.tokenizer = bert_wordpiece, .* the text tower starts from start\.run = .*; expected: .* = words, "
    refused(
        (message, lambda: open_data(CODE.config("clip_geo.yaml", "smoke", more), None, None)),
        (message, lambda: open_task_training(TASKS.config("vqa_albef.yaml", "smoke", more), None, None)),
        error=ConfigError,
    )


@pytest.mark.parametrize(
    ("setting", "trained_with"),
    [
        ("text.heads = 1", 2),
        ("image.heads = 4", 2),
        ("image.activation = quick_gelu", "gelu"),
        ("text.norm_eps = 0.001", 1e-5),
    ],
)
@pytest.mark.parametrize("row", ["clip_geo", "mafa"])
def test_a_run_whose_tensors_fit_but_meant_other_embeddings_is_refused(row, setting, trained_with, finetuned):
    key = "discriminator_run" if row == "mafa" else "run"
    config = config_of(row, f"start.{key}={finetuned.files.folder}", f"model.{setting.replace(' ', '')}")
    tower = SimpleNamespace(image_size=32, patch_size=16, num_class_tokens=1)
    with pytest.raises(
        ConfigError, match=rf"model.{setting} with start.{key} = .* trained with {trained_with}; expected"
    ):
        tensors_of_run(config, tower, key)


@pytest.mark.usefixtures("finetuned")  # has trained the row
def test_a_search_compares_rows_with_a_matching_head_by_its_recalls_on_validation_pairs(runs):
    run = run_row(Job(CODE, "albef_geo.yaml", "smoke", 0, (*FEW, "run.test=false"), runs))
    assert _metric_of(run) == ("matched_mean_recall", "scenes/val")
    config, encoder = encoder_of(run)
    pairs = open_validation_pairs(config.data)
    rankings = evaluate_two_stage(encoder, pairs, partial(matching, encoder), config.method.k_test)
    expected = rankings["matched"].metrics
    numbers = run.validation["scenes/val"]
    assert {metric: numbers[f"matched_{metric}"] for metric in expected} == expected
    assert numbers["mean_recall"] == rankings["contrastive"].metrics["mean_recall"] != expected["mean_recall"]


@pytest.mark.usefixtures("finetuned")
def test_a_search_compares_rows_trained_on_expressions_by_their_right_boxes(runs):
    run = run_row(Job(CODE, "grounded_albef_geo.yaml", "smoke", 0, (*FEW, "run.test=false"), runs))
    assert _metric_of(run) == ("right_boxes", "scenes/val")
    config, encoder = encoder_of(run)
    boxes = scenes_to_ground("val", None, config.data.validation_size, config.data.image_size)
    assert run.validation["scenes/val"]["right_boxes"] == measure(encoder, boxes, layer=1)["own_accuracy"]


TWO_VIEWS = ("method.two_views=true", "data.crop_scale=[0.3, 0.9]")


@pytest.mark.usefixtures("not_evaluated")
@pytest.mark.parametrize(("row", "more"), [("albef_geo", ()), ("albef_geo", TWO_VIEWS), ("finetuned_albef_geo", ())])
def test_a_step_gets_what_its_row_says(row, more, finetuned, tmp_path, monkeypatch):
    config = config_of(row, *FEW, f"start.run={finetuned.config.start.run}", "optim.steps=3", *more)
    steps = []

    def watched(config, tokenizer, order):
        model = build_model(config, tokenizer)

        def note(model, arguments, named):
            weights = [list(part.parameters()) for part in (model.encoders, model.momentum_encoders)]
            if not arguments[0].is_meta:  # somebody counts what a sample costs
                copied = [[weight.detach().clone() for weight in part] for part in weights]
                steps.append((*arguments, named.get("momentum_images"), *copied))

        model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    monkeypatch.setattr("geomm.train.build_model", watched)
    trained("geomm", config, tmp_path)
    momentum = start = steps[0][-2]  # copies of what the run started from
    for step, (images, _, masked_ids, _, alpha, ids, second_views, online, copies) in enumerate(steps):
        assert alpha == pytest.approx(0.4 * step / 4)
        assert (masked_ids is None, ids is None) == ((True, False) if row.startswith("finetuned") else (False, True))
        assert (second_views is not None and not second_views.equal(images)) == bool(more)
        momentum = [old + (1 - config.method.ema_momentum) * (new - old) for old, new in zip(momentum, online)]
        torch.testing.assert_close(copies, momentum, rtol=1e-5, atol=1e-7)
    assert not torch.equal(start[0], online[0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.branching=[9, 5]"], r"method.branching = \[9, 5\] with method.queue_size = 40"),
        (
            ["method.num_neighbors=7"],
            r"num_neighbors = 7 with method.branching = \[8, 2\]: a graph of 8 nodes is complete, .* more than 8 nodes",
        ),
        (
            ["method.scale_factor=0.5", "method.match_entropy=true"],
            "match_entropy = true with method.scale_factor = 0.5",
        ),
        (["method.distance=oblique", "method.scale_factor=2"], "distance = oblique, whose pool has no factor"),
        (
            ["method.distance=cosine", "method.match_entropy=true", "method.num_neighbors=7"],
            "a graph of 8 nodes is complete",
        ),
        (
            ["method.distance=cosine", "method.scale_factor=2", "method.queue_size=96"],
            "the first graph would be that of",
        ),
        (["method.branching=[8, 1]"], "at least two clusters in each layer"),
        (["method.queue_size=15", "method.branching=[6]"], r"queue_size = 15 with optim.global_batch_size = 16"),
        (["method.queue_size=81"], r"steps = 6: the first graph would be that of step 6 .* 81 full at step 6\), "),
        (["method.geodesic_from_step=6"], r"step 6 \(method.geodesic_from_step = 6, .* expected: more steps than 6"),
        (["method.attach=far"], "method.attach.*far.*knn_local"),
        (
            ["method.base=clip", "model.text.layers=0", "model.text.stem.weights=x", "model.text.dropout=0.1"],
            r"model.text.dropout = 0.1 with model.text.layers = 0, a tower without layers; expected: 0, or",
        ),
        (["model.text.dropout=1"], "model.text.dropout"),
        (["method.causal_text=true"], "causal_text = true with method.base = albef, whose fusion starts from"),
        (["method.base=clip", "method.two_views=true"], "two_views = true with method.base = clip, whose encoders see"),
        (["method.two_views=true"], "crop_scale = null and data.augmentation = none: both views of an image would be"),
        (
            ["method.num_spheres=4"],
            "num_spheres = 4 has no effect with method.distance = geodesic; expected: .* = oblique, or the default, 2",
        ),
        (["method.projection_bias=false"], "projection_bias = False has no effect with method.base = albef"),
        (
            ["method.smoothing=0.1"],
            r"smoothing = 0.1 has no effect with method.base = albef; expected: method.base = mafa, or the default, ",
        ),
        (["optim.micro_batch_size=4"], "micro_batch_size = 4, a pool compares whole batches; expected: None"),
        (["optim.loss_tile=2"], "loss_tile = 2, a pool compares whole batches; expected: 0"),
        (
            ["model.text.layers=0", "model.text.stem.weights=x"],
            "is 0 with method.base = albef, whose fusion attends to tokens; expected: at least 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_of("albef_geo", *overrides)


def test_a_complete_graph_is_a_control_and_a_nearly_complete_one_is_warned_of():
    assert config_of("clip_geo", "method.num_neighbors=7", "method.allow_complete=true").method.allow_complete
    assert config_of("clip_geo", "method.num_neighbors=7", "method.attach=angle_st")  # which needs no path
    with pytest.warns(UserWarning, match=r"num_neighbors = 3 with .*\[8, 2\]: a graph of 8 nodes is nearly complete"):
        config_of("clip_geo", "method.num_neighbors=3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_of("clip_geo", "method.num_neighbors=2", "method.branching=[6, 2]")
        for scale in ("demo", "paper"):
            config_of("clip_geo", scale=scale)


def test_a_graph_of_the_last_step_suffices_and_neither_cosine_nor_task_needs_one():
    last = ("method.queue_size=80", "method.geodesic_from_step=5")
    assert config_of("albef_geo", *last).method.distance == "geodesic"
    config_of("albef", "method.queue_size=400")
    TASKS.config("vqa_albef_geo.yaml", "smoke", ["method.queue_size=400"])


@pytest.mark.usefixtures("two_threads", "not_evaluated")
def test_a_run_goes_on_within_a_period_to_the_last_bit(tmp_path):
    config = config_of("albef_geo", *FEW, "start.row=", "optim.steps=7", "run.save_every=5", "run.keep_checkpoints=2",
                       "model.text.dropout=0.1",
                       "method.graph_update_interval=3", "method.queue_size=40",
                       "method.match_entropy=true")  # fmt: skip
    unbroken = resumed_after(5, partial(trained, "geomm", config), tmp_path)  # between the graphs of steps 3 and 6
    whole = weights(unbroken)
    assert whole["image_pool.has_graph"]
    assert whole["image_pool.scale_factor"] == whole["text_pool.scale_factor"] > 0
    assert [line["step"] for line in records(unbroken, "graph", "scale_factor")] == [4, 4, 4, 7, 7]


@pytest.mark.parametrize("row", ["towers_flip", "flip", "flip_geo"])
def test_flip_masks_half_of_the_patches_in_training_and_begins_at_a_temperature_of_a_hundredth(row):
    model = build_model(config_of(row), SimpleNamespace(vocabulary_size=30, mask_id=4, end_id=3, pad_id=0)).train()
    assert model.logit_scale().item() == pytest.approx(100)
    assert model.encoders.image_projection.bias is model.encoders.text_projection.bias is None
    pictures, seen = torch.randn(3, 3, 32, 32), []
    model.image_tower.transformer.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    model.encode_image(pictures)
    model.eval().encode_image(pictures)
    assert seen == [1 + 2, 1 + 4]


def test_logits_of_pairs_are_those_of_their_pictures_and_captions(finetuned):
    config, encoder = encoder_of(finetuned)
    pairs = open_evaluation_sets(config.data).retrieval["test"]
    embedded = embed_pairs(encoder, pairs, CaptionRule())
    images, texts = torch.tensor([0, 3, 15, 3]), torch.tensor([7, 0, 41, 16])
    logits = matching(encoder, embedded)(images, texts)
    model = encoder.model.eval()
    for logit, image, text in zip(logits, images, texts):
        pixels = encoder.transform.inputs(encoder.transform.eval(pairs[int(image)]["image"])[None])
        ids = encoder.tokenizer.encode([embedded.captions[int(text)]], encoder.context_length)
        with torch.no_grad():
            tokens = model.encoders.text_tower.forward_tokens(ids), model.encoders.image_tower.forward_tokens(pixels)
            wanted = model.match(tokens[0], model.encoders.text_mask(ids), tokens[1])[0, 1]
        torch.testing.assert_close(logit, wanted, rtol=1e-4, atol=1e-5)


def test_words_keep_the_ids_of_the_run_that_another_starts_from(finetuned, monkeypatch):
    """Other captions would number them in another way, and every word embedding would stand for another word."""
    config = config_of("finetuned_crowded_albef_geo", *FEW, f"start.run={finetuned.config.start.run}")
    monkeypatch.setattr("common.run.inputs.build_tokenizer", lambda *_: pytest.fail("made anew"))
    tokenizer = open_data(config, open_training_pairs(config.data, 0), None).tokenizer
    assert tokenizer.fingerprint == encoder_of(finetuned)[1].tokenizer.fingerprint


def test_larger_pictures_take_the_positions_of_smaller_ones_resampled(finetuned):
    config = config_of("albef_geo", f"start.run={finetuned.files.folder}", "data.image_size=64")
    parent = encoder_of(finetuned)[1]
    model = build_model(config, parent.tokenizer)
    start_(model, config)
    expected = interpolate_positions(parent.model.image_tower.position_embedding, 1, 4, antialias=False)
    torch.testing.assert_close(model.image_tower.position_embedding, expected, rtol=0, atol=0)
    assert len(expected) == 17


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Three random layers with the head of masked words, and a vocabulary, as transformers writes them."""
    folder = tmp_path_factory.mktemp("weights") / "bert"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128, vocab_size=len(words),
        max_position_embeddings=40,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    return folder


OF_BERT = ("start.row=", "start.bert=someone/bert", "data.tokenizer=bert_wordpiece", "data.vocabulary=someone/bert",
           "model.text.layers=1", "method.fusion_layers=2", "model.text.norm_eps=1e-12")  # fmt: skip


@pytest.mark.usefixtures("not_evaluated")
def test_a_bert_starts_the_text_tower_the_fusion_and_the_word_head(bert, tmp_path):
    config = config_of("albef", *FEW, *OF_BERT, f"model.weights={bert.parent}")
    files, theirs = trained("geomm", config, tmp_path), transformers.BertForMaskedLM.from_pretrained(bert).eval()
    event = lines(files, "start")[0]
    assert event["of_bert"] == len(list(theirs.parameters()))
    assert event["dropout_of_bert"] == [0.1, 0.1]  # not read: model.text.dropout decides
    tokenizer = encoder_of(SimpleNamespace(files=files))[1].tokenizer
    model = build_model(config, tokenizer).eval()
    start_(model, config)
    ids, encoders = tokenizer.encode(["a b c", "x"], 8), model.encoders
    mask = encoders.text_mask(ids)
    for block in encoders.fusion.transformer.blocks:
        block.cross_attention = None
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask.long()).logits
        tokens = encoders.fusion.transformer(encoders.text_tower.forward_tokens(ids), mask)
        logits = encoders.word_head(tokens, encoders.text_tower.token_embedding.weight)
    torch.testing.assert_close(logits[mask], expected[mask], rtol=1e-4, atol=1e-5)


def test_the_run_of_a_row_stands_over_a_bert_whose_lower_layers_it_began_with(bert, tmp_path):
    overrides = (*FEW, *OF_BERT[1:], f"model.weights={bert.parent}")
    towers = run_row(Job(CODE, "clip_geo.yaml", "smoke", 0, overrides, tmp_path).parents()["start.run"])
    config = config_of("albef", *overrides, f"start.run={towers.files.folder}")
    model = build_model(config, encoder_of(towers)[1].tokenizer)
    theirs = transformers.BertForMaskedLM.from_pretrained(bert)
    assert start_(model, config)["of_bert"] == len(list(theirs.parameters()))
    ours = model.state_dict()
    for name, tensor in weights(towers.files).items():
        assert not name.startswith("encoders.") or torch.equal(ours[name], tensor), name
    of_text, of_fusion = (part.transformer.blocks[0].mlp[0].bias for part in (model.text_tower, model.encoders.fusion))
    biases = [layer.intermediate.dense.bias for layer in theirs.bert.encoder.layer]
    assert torch.equal(of_fusion, biases[1])
    assert 0 < (of_text - biases[0]).abs().max() < 0.01  # two steps from where it began


def test_a_bert_with_another_norm_is_refused(bert):
    config = config_of("albef", *OF_BERT, f"model.weights={bert.parent}", "model.text.norm_eps=1e-5")
    model = build_model(config, build_tokenizer(config.data, None))
    refused(("norm_eps is 1e-05 here and 1e-12 in the weights", lambda: start_(model, config)), error=WeightsError)


def test_a_bert_beside_another_vocabulary_is_refused(bert, tmp_path):
    *first, one, other = (bert / "vocab.txt").read_text().split("\n")
    (tmp_path / "vocab.txt").write_text("\n".join([*first, other, one]))
    places = (f"model.weights={bert.parent}", f"data.vocabulary={tmp_path / 'vocab.txt'}")
    with pytest.raises(ValueError, match=f"start.bert = .*: token {len(first)} is '{one}', .* is '{other}'"):
        trained("geomm", config_of("albef", *FEW, *OF_BERT, *places), tmp_path / "run")


def test_weights_of_a_bert_are_in_the_key(bert, tmp_path):
    changed = shutil.copytree(bert, tmp_path / "weights" / "bert")
    (changed / "config.json").write_text((changed / "config.json").read_text() + "\n")

    def key(folder):
        return run_key("geomm", config_of("albef", *OF_BERT, f"model.weights={folder.parent}"), "data")

    assert key(bert) != key(changed)


@pytest.mark.parametrize("row", ["albef_geo", "finetuned_crowded_albef"])
def test_paper_scale_takes_deit_and_bert_whole_and_fine_tuning_what_comes_of_them(row):
    """Sizes and kinds alone: on the meta device."""
    config = config_of(row, scale="paper")
    tokenizer = SimpleNamespace(vocabulary_size=30_522, mask_id=103, end_id=102, pad_id=0)
    with torch.device("meta"):
        model = build_model(config, tokenizer)
    of_bert, of_deit = transformers.BertConfig(), transformers.DeiTConfig()
    text, tower = model.text_tower, model.image_tower
    blocks = [*text.transformer.blocks, *model.encoders.fusion.transformer.blocks]
    assert (len(blocks), *text.token_embedding.weight.shape, {block.mlp_norm.eps for block in blocks}) == (
        of_bert.num_hidden_layers, of_bert.vocab_size, of_bert.hidden_size, {of_bert.layer_norm_eps},
    )  # fmt: skip
    assert (tower.width, len(tower.transformer.blocks)) == (of_deit.hidden_size, of_deit.num_hidden_layers)
    assert tower.patch_embedding.bias is not None
    assert (config.start.bert, config.start.row) == (("", "albef") if "finetuned" in row else ("bert-base-uncased", ""))


OF_CLIP = (
    "start.row=", "method.causal_text=true", "model.patch_size=8", "model.embedding_dim=16", "data.context_length=16",
    *(f"model.{side}.{key}" for side in ("image", "text") for key in ("layers=2", "mlp_ratio=2", "width=32")),
)  # fmt: skip


@pytest.mark.parametrize("bias", ["true", "false"])
@torch.no_grad()
def test_table_4s_rows_start_from_a_public_clip_as_the_library_has_it(bias, public):  # noqa: F811
    folder, theirs = public[0] / "clip", public[1]["clip"]
    images, ids = inputs()
    output = theirs.eval()(input_ids=ids, pixel_values=images)
    for row in ("clip", "clip_geo"):
        config = config_of(row, *OF_CLIP, f"model.init={folder}", f"method.projection_bias={bias}")
        initial = InitialWeights.opened(config)
        config = initial.resolved(config)
        model = build_model(config, WORDS)
        facts = initial.start_(model, config, WORDS)
        model.start_momentum_()
        assert facts["scalars"] == ["logit_scale.log_logit_scale"]
        assert facts["image"]["new"] == facts["text"]["new"] == []
        losses = model.eval()(images, ids, 0.0)
        for actual in (model.encode_image(images), losses.image_embeddings, losses.image_keys):
            torch.testing.assert_close(actual, output.image_embeds, rtol=1e-4, atol=1e-5)
        for actual in (model.encode_text(ids), losses.text_embeddings, losses.text_keys):
            torch.testing.assert_close(actual, output.text_embeds, rtol=1e-4, atol=1e-5)


def test_albefs_image_tower_starts_from_a_public_clip_and_its_projection_is_new(public):  # noqa: F811
    sizes = [setting for setting in OF_CLIP if "causal" not in setting and "model.text" not in setting]
    config = config_of("albef_geo", *sizes, f"model.image.init={public[0] / 'clip'}", "model.embedding_dim=24")
    initial = InitialWeights.opened(config)
    config = initial.resolved(config)
    model, (images, _) = build_model(config, WORDS), inputs()
    before = model.encoders.image_projection.weight.clone()
    initial.start_(model, config, WORDS)
    assert torch.equal(model.encoders.image_projection.weight, before)
    expected = public[1]["clip"].eval().vision_model(images).pooler_output
    torch.testing.assert_close(model.image_tower.eval().forward_tokens(images)[:, 0], expected, rtol=1e-4, atol=1e-5)


def dropouts_of(module):
    """Rates of all that drops: modules, and attention."""
    inner = {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)}
    attention = {part.dropout for part in module.modules() if isinstance(part, Attention | CrossAttention)}
    assert inner
    assert attention
    return inner | attention


@pytest.mark.parametrize(("row", "rate"), [("albef_geo", 0.2), ("tcl", 0.2), ("clip", 0.2), ("albef", 0.0)])
def test_the_rate_of_the_text_tower_is_that_of_the_fusion_and_the_momentum_copies_too(row, rate):
    config = config_of(row, *([f"model.text.dropout={rate}"] if rate else []))
    model = build_model(config, SimpleNamespace(vocabulary_size=40, mask_id=39, end_id=3, pad_id=0))
    for encoders in (model.encoders, model.momentum_encoders.encoder):
        assert dropouts_of(encoders.text_tower) == {rate}
        assert row == "clip" or dropouts_of(encoders.fusion) == {rate}
        assert dropouts_of(encoders.image_tower) == {0.0}


def test_only_paper_scale_drops_and_there_what_has_a_bert():
    # at paper scale rows start from DeiT and BERT, which have no logit scale to halve
    others = ("scale_", "vision_", "tcl_oblique_halved")
    files = [file for file in (ROOT / "geomm" / "configs").glob("*.yaml") if not file.stem.startswith(others)]
    assert len(files) > 50
    for file in files:
        name = file.stem
        for scale in ("smoke", "demo", "paper"):
            config = code_of(file).config(file.name, scale)
            drops = scale == "paper" and not name.startswith(("clip", "flip", "towers"))
            assert config.model.text.dropout == (0.1 if drops else 0.0), (name, scale)
        # TCL's code has its augmentation in fine-tuning, too
        assert config.data.augmentation == ("tcl" if "tcl" in name.split("_") else "albef"), name


def test_paper_scale_tunes_an_open_clip_for_one_epoch():
    """Sizes only: on the meta device."""
    config = config_of("clip_geo", scale="paper")
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    text = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    vision |= {"image_size": 336, "patch_size": 14}  # config.json of openai/clip-vit-large-patch14-336
    sizes = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    with torch.device("meta"):
        clip = clip_from_transformers(transformers.CLIPModel(sizes))
        weights = Weights("clip", clip.image_tower, clip.text_tower)
        initial = InitialWeights(dict.fromkeys(("image", "text"), ("model.init", weights)))
        tokenizer = ClipTokenizer.from_vocabulary()
        model = build_model(initial.resolved(config), tokenizer)
        for side, projection in (("image", model.encoders.image_projection), ("text", model.encoders.text_projection)):
            assert fill_(getattr(model, f"{side}_tower"), weights, "model.init", projection)
    assert (config.start.row, config.start.bert, config.optim.steps) == ("", "", 10_050)
    assert model.image_tower.image_size == clip.image_tower.image_size


def test_a_resumed_run_trains_no_other_start(tmp_path, monkeypatch):
    monkeypatch.setattr("common.reproduce.rows.outputs", lambda: tmp_path)
    monkeypatch.setattr("common.reproduce.rows.run_row", lambda job: pytest.fail("trained"))
    config = CODE.config("clip_geo.yaml", "smoke", ())
    options = {"config": "clip_geo", "scale": "smoke", "overrides": (), "dry_run": False, "resume": "last"}
    with pytest.raises(ConfigError, match=r"--resume: towers, seed 0, which this run starts from, is missing"):
        started(CODE, config, SimpleNamespace(**options))
