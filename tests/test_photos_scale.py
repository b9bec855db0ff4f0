"""Photos scale on the pre-trained weights themselves: rows of every paper, the text side alone, captions of a BERT."""

import importlib
import io
import json
import math
import shutil
import tarfile
from dataclasses import asdict, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from PIL import Image
from runs import logged, row_config
from safetensors.torch import load_file

from common.base.config import SCALES, ConfigError
from common.data.labelled import open_image_folder
from common.data.pairs import EvaluationSets, open_training_pairs
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import reading_features
from common.run.folder import RunFiles
from euclip.distributions import DrawnPairs
from euclip.evaluate import load_encoder
from geomm.finetune import CODE as FINETUNING
from geomm.finetune import finetune
from geomm.readings import ON_PHOTOGRAPHS
from oblique_topology.class_token_cost import counted
from oblique_topology.evaluate import CACHED_PROBE, evaluate_all
from oblique_topology.loaded_rows import trained_model, training_batch
from oblique_topology.loss_landscape import gradient_norms_on_line, movable_weights, random_directions

STEM, BERT = "tf_efficientnet_lite0", "all-MiniLM-L6-v2"
LIT = {"oblique_topology": "lit_clip", "euclip": "lit_euclip", "contrastive_basics": "lit_ours"}
NUM_PICTURES, BATCH = 12, 6


@pytest.fixture(scope="module")
def weights(data_dir):
    folder = data_dir / "weights"
    if not (folder / STEM).is_dir():
        pytest.skip(f"no {STEM} in {folder}")
    return folder


@pytest.fixture(scope="module")
def photographs(data_dir, tmp_path_factory):
    """Twelve photographs with two captions each, as a table; below it the features of all runs."""
    folder, lines = tmp_path_factory.mktemp("photographs"), ["path\tcaption"]
    with tarfile.open(next((data_dir / "flickr8k").glob("*val*.tar"))) as shard:
        for member in shard.getmembers()[: 2 * NUM_PICTURES]:
            content = shard.extractfile(member).read()
            if member.name.endswith(".json"):
                captions = json.loads(content)["captions"][:2]
                lines += [f"{member.name.removesuffix('.json')}.png\t{caption}" for caption in captions]
            else:
                Image.open(io.BytesIO(content)).save(folder / f"{member.name.removesuffix('.jpg')}.png")
    (folder / "all.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(photographs, weights, tmp_path_factory):
    """(paper, row, overrides) -> what two steps of the row and its evaluation leave."""

    @cache
    def run(paper, row, *overrides):
        config = row_config(
            paper, row, "data.source=tsv", f"data.root={photographs}", "data.train=all.tsv",
            "data.val=all.tsv", "data.test=all.tsv", f"model.weights={weights}", "optim.steps=2",
            "optim.warmup_steps=0", f"optim.global_batch_size={BATCH}", "run.evaluate_every=0", "run.save_every=1",
            "run.keep_checkpoints=2", "run.log_every=1", *overrides, scale="photos",
        )  # fmt: skip
        files = RunFiles(tmp_path_factory.mktemp("run"))
        train = importlib.import_module(f"{paper}.train").train
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("common.run.inputs.outputs", lambda: photographs / "outputs")
            train(config, open_training_pairs(config.data, 0), files, False, Accelerator(cpu=True), "test")
        first, last = (path / "model.safetensors" for path in sorted(files.checkpoints.glob("step-*")))
        before, after = load_file(first), load_file(last)
        shutil.rmtree(first.parent)  # a quarter of a gigabyte for each run
        return SimpleNamespace(
            config=config,
            files=files,
            losses=logged(files),
            metrics=json.loads(files.evaluation.read_text())["evaluations"]["test"]["metrics"],
            moved={name for name in after if not torch.equal(after[name], before[name])},
            tensors=after,
        )

    return run


SIZES = ("method.queue_size=6", "method.branching=[2,2]", "method.allow_complete=true")
OF_POOL = ("start.row=", *SIZES, "method.k_test=10")


@pytest.mark.parametrize(
    ("paper", "row", "overrides"),
    [
        ("oblique_topology", "table2_clip", ()),
        ("euclip", "table4_euclip", ("method.logit_scale_init=0.37",)),  # 1 / 0.07 begins above chance
        # its own code: tests/test_contrastive_basics_model.py at this scale, _train.py; training on features is shared
        pytest.param("contrastive_basics", "table1_ours", (), marks=pytest.mark.slow),
        ("geomm", "albef_geo", OF_POOL),
        pytest.param("geomm", "tcl_geo", (*OF_POOL, "method.mask_probability=0.5"), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_trains_on_features_that_all_papers_share_and_leaves_the_stem_as_it_came(
    paper, row, overrides, trained, photographs, weights
):
    run = trained(paper, row, *overrides)
    matching, words = 2 * math.log(2) * (paper == "geomm"), math.log(30_522) * (row == "tcl_geo")  # of MiniLM
    assert all(0 < loss - words / 2 < 2 * math.log(BATCH) + matching + words for loss in run.losses)
    assert 1 / NUM_PICTURES <= run.metrics["i2t_recall_at_10"] <= 1
    source = load_file(weights / STEM / "model.safetensors")
    pictures = {name: tensor for name, tensor in run.tensors.items() if "image_tower.stem." in name}
    stem = {name.partition(".network.")[2]: tensor for name, tensor in pictures.items()}
    assert not any(".stem." in name for name in run.moved)  # nor that of captions
    assert len(stem) > 100
    assert all(torch.equal(tensor, source[name]) for name, tensor in stem.items())
    assert all(any(part in name for name in run.moved) for part in ("image_tower.", "text_tower.", "logit_scale."))
    assert kept_features(photographs).keys() >= {(1280, 7, 7)}


def kept_features(photographs):
    """By shape: there are two files for each, as the set is trained on, at a fraction of its size, and ranked."""
    kept = [np.load(file) for file in (photographs / "outputs" / "features").glob("*.npy")]
    by_shape = {array.shape[1:]: array for array in kept}
    assert len(kept) == 2 * len(by_shape)
    return by_shape


def test_what_looks_at_a_trained_run_reads_the_features_that_training_kept_of_the_whole_set(
    trained, photographs, monkeypatch
):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: photographs / "outputs")
    run = trained("euclip", "table4_euclip")
    config, encoder = load_encoder(last_checkpoint(run.files.checkpoints), torch.device("cpu"))
    drawn = DrawnPairs(open_training_pairs(config.data, 0), 7)
    without_fingerprint = [{"image": drawn[0]["image"]}]
    wanted, single = encoder.images(drawn)[0], encoder.images(without_fingerprint)[0]
    reading = reading_features(encoder, config)
    torch.testing.assert_close(reading.images(without_fingerprint)[0], single, rtol=0, atol=0)
    monkeypatch.setattr(encoder.model.image_tower.stem, "forward", None)
    torch.testing.assert_close(reading.images(drawn)[0], wanted, rtol=1e-3, atol=1e-3)
    kept_features(photographs)  # no set was kept twice


def test_a_linear_probe_on_a_stem_that_is_held_still_reads_the_trained_class_tokens_of_kept_features(
    trained, photographs, tmp_path, monkeypatch
):
    for part, start in {"imagenet_train": 0, "imagenet": 6}.items():
        for number, file in enumerate(sorted(photographs.glob("*.png"))[start : start + 6]):
            folder = tmp_path / part / "test" / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file.name).symlink_to(file)
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    run = trained("oblique_topology", "table2_multi")
    config, encoder = trained_model(run)
    parts = ("imagenet_train", "imagenet")
    sets = {part: open_image_folder(tmp_path / part / "test", ["a", "b"], ["a {}"]) for part in parts}
    probe = evaluate_all(config, encoder, EvaluationSets(sets, {}))["linear_probe"]
    assert probe.protocol["feature_dim"] == config.method.num_spheres * config.model.image.width
    assert probe.protocol["probe"] == asdict(CACHED_PROBE)
    assert {array.shape[0] for array in map(np.load, (tmp_path / "outputs" / "features").glob("*.npy"))} == {6}


def test_geomm_s_readings_train_two_matrices_on_kept_features(trained, photographs):
    settings = ("start.row=", *SIZES)
    run = trained("geomm", "clip_geo", *ON_PHOTOGRAPHS, *settings)
    assert kept_features(photographs).keys() >= {(1280, 1, 1)}
    learnt = {name for name in run.moved if name.startswith("encoders.")}
    assert learnt == {f"encoders.{side}_projection.{part}" for side in ("image", "text") for part in ("weight", "bias")}


def test_a_task_of_geomm_starts_from_the_stems(photographs, weights, tmp_path):
    """Text assignment, of captioned photographs, as the tasks whose annotations are files."""
    settings = (
        "data.source=tsv", f"data.root={photographs}", "data.train=all.tsv", f"model.weights={weights}", "start.row=",
        "optim.steps=1", "optim.warmup_steps=0", f"optim.global_batch_size={BATCH}", *SIZES,
    )  # fmt: skip
    config, files = FINETUNING.config("assigned_albef.yaml", "photos", settings), RunFiles(tmp_path)
    finetune(config, FINETUNING.open_training(config.data, 0), files, False, Accelerator(cpu=True), "test")
    tensors, side = last_checkpoint(files.checkpoints).model_tensors(), "encoders.image_tower.stem.network."
    source = load_file(weights / STEM / "model.safetensors")
    stem = {name.removeprefix(side): tensor for name, tensor in tensors.items() if name.startswith(side)}
    assert len(stem) > 100
    assert all(torch.equal(tensor, source[name]) for name, tensor in stem.items())


def test_the_loss_landscape_moves_what_was_trained_and_costs_count_no_stem(trained, photographs, monkeypatch):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: photographs / "outputs")
    config, encoder = trained_model(trained("oblique_topology", "table2_clip"))
    images, token_ids = training_batch(config, encoder, BATCH)
    assert images.shape == (BATCH, 1280, 7, 7)
    computed, same_ids = training_batch(config, replace(encoder, cache=None), BATCH)
    torch.testing.assert_close(images.float(), computed, rtol=1e-3, atol=1e-3)
    assert token_ids.equal(same_ids)
    directions = random_directions(movable_weights(encoder.model), torch.Generator().manual_seed(0))
    assert directions[0].keys() == {
        name for name, _ in encoder.model.named_parameters() if "_tower." in name and ".stem." not in name
    }
    assert gradient_norms_on_line(encoder.model, (images, token_ids), directions[0], [0.0], [1.0])[0, 0] > 0
    assert encoder.model.image_tower.picture_shape == (1280, 7, 7)  # what is counted begins behind the stem
    every_patch = replace(config, model=replace(config.model, patch_dropout=0.0))
    assert counted(config, encoder.tokenizer) == counted(every_patch, encoder.tokenizer)


@pytest.mark.parametrize("paper", LIT)
def test_training_of_the_text_side_is_a_row_of_photos_scale(paper):
    config = row_config(paper, LIT[paper], scale="photos")
    assert (config.model.image.layers, config.model.image.projection) == (0, False)
    with torch.device("meta"):
        assert timm.create_model(config.model.image.stem.name).num_features == config.model.embedding_dim
    for scale in SCALES:
        if scale != "photos":
            with pytest.raises(ConfigError, match=r"layers = 0 without a stem; expected: .* as at scale photos"):
                row_config(paper, LIT[paper], scale=scale)


def test_captions_of_a_bert_take_the_place_of_words(trained, weights, photographs, monkeypatch):
    run = trained(
        "oblique_topology", "table2_clip", f"model.text.stem.weights=sentence-transformers/{BERT}",
        "data.tokenizer=bert_wordpiece", f"data.vocabulary=sentence-transformers/{BERT}",
    )  # fmt: skip
    assert all(0 < loss < 2 * math.log(BATCH) for loss in run.losses)
    words = load_file(weights / BERT / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert torch.equal(run.tensors["text_tower.stem.network.token_embedding.weight"], words.float())
    assert not any(".stem.network." in name for name in run.moved)
    assert list((photographs / "outputs" / "features").glob("captions-*.f16"))
    monkeypatch.setattr("common.run.inputs.outputs", lambda: photographs / "outputs")
    config, encoder = trained_model(run)  # what looks at the run reads the kept ones, and computes others
    texts, stem = open_training_pairs(config.data, 0).captions(0), encoder.model.text_tower.stem
    read, stem.kept = encoder.texts(texts), None
    torch.testing.assert_close(read, encoder.texts(texts), rtol=1e-2, atol=1e-2)
    _, encoder = trained_model(run)
    encoder.model.text_tower.stem.kept.compute = None
    assert encoder.texts(texts).equal(read)
    with pytest.raises(TypeError):
        encoder.texts(["nobody has written this"])
