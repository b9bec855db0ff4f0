"""Grounding without boxes: heat of one fusion layer, and measurements on maps whose score is known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from common.base.config import ConfigError, load_row
from common.base.random_keys import Draws
from common.base.settings import DataConfig
from common.data.broken import TooManyBroken
from common.data.karpathy import open_karpathy
from common.data.pairs import open_training_pairs
from common.data.scenes import ReferringScenes
from common.data.scenes.statements import fits
from common.data.scenes.tasks.grounding import appearance_statement, referents
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.evaluation.embed import Encoder
from common.evaluation.grad_cam import box_coverage
from common.reproduce.command import Command
from geomm import ground as module
from geomm import refcoco_plus
from geomm.config import Config
from geomm.ground import (
    RefcocoFiles,
    as_fractions,
    file_to_ground,
    layer_of,
    match_heat,
    measure,
    open_sets,
    scenes_to_ground,
)
from geomm.lookalikes import SugarCrepeFiles, open_lookalikes
from geomm.model import build_model
from geomm.train import CODE

SIZE = 48


@pytest.fixture(scope="module")
def encoder():
    config = load_row(
        Config, CODE.folder, CODE.folder / "configs" / "grounded_albef.yaml", "smoke", ["method.fusion_layers=3"]
    )
    tokenizer = WordTokenizer.from_captions(
        text for index in range(40) for text in ReferringScenes("val").captions(index)
    )
    torch.manual_seed(0)
    model = build_model(config, tokenizer).eval()
    transform = ImageTransform(config.data.image_size)
    return Encoder(model, transform, tokenizer, config.data.context_length, 8, torch.device("cpu"))


def test_heat_is_attention_times_positive_gradient_of_the_layer_that_is_asked_for(encoder):
    scenes, model = ReferringScenes("val"), encoder.model
    pixels = torch.stack([encoder.transform.eval(scenes[index]["image"]) for index in range(3)])
    images = encoder.transform.inputs(pixels)
    ids = encoder.tokenizer.encode([scenes.captions(index)[0] for index in range(3)], encoder.context_length)
    heats = [match_heat(model, images, ids, layer) for layer in (1, 2, 3)]
    recorded, mask = [], model.encoders.text_mask(ids)
    tokens = model.encoders.text_tower.forward_tokens(ids), model.encoders.image_tower.forward_tokens(images)
    yes = model.match(tokens[0], mask, tokens[1], recorded)[:, 1]
    gradients = torch.autograd.grad(yes.sum(), recorded)
    for (heat, logits), attention, gradient in zip(heats, recorded, gradients, strict=True):
        of_words = (attention * gradient.clamp(min=0))[:, :, :, 1:] * mask[:, None, :, None]  # none of padding
        torch.testing.assert_close(heat.flatten(1), of_words.mean(dim=(1, 2)).detach())
        torch.testing.assert_close(logits, yes.detach())
    assert torch.equal(match_heat(model, images, ids)[0], heats[1][0])  # the default of three
    assert not torch.allclose(heats[0][0], heats[1][0])
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"grounding\.layer = 4; expected: 1 to 3, the layers of the fusion"):
        match_heat(model, images, ids, 4)


def test_maps_that_know_score_all_and_those_of_other_words_nothing(encoder, monkeypatch):
    """Heat in the box that the words mean: all right with the own words, none with those of another thing."""
    data = scenes_to_ground("val", None, 20, SIZE)
    assert len(data.expressions) > 40
    meant = {(line.picture, line.text): line.box for line in data.expressions}
    assert {(line.picture, line.other) for line in data.expressions} <= meant.keys()

    def heat_of(encoder, pictures, texts, layer):
        for picture, text in zip(pictures, texts):
            index = next(index for index in range(20) if np.array_equal(data.pictures[index]["image"], picture))
            heat = box_coverage(as_fractions(meant[index, text], SIZE, SIZE), SIZE, SIZE) == 1
            yield heat.astype(float), heat.astype(float)

    monkeypatch.setattr(module, "heat_of", heat_of)
    metrics = measure(encoder, data, None)
    assert metrics["own_accuracy"] == metrics["own_pointing_accuracy"] == metrics["own_in_box"] == 1
    assert metrics["other_accuracy"] == metrics["other_pointing_accuracy"] == metrics["other_in_box"] == 0
    assert metrics["oracle_accuracy"] == metrics["oracle_pointing_accuracy"] == 1
    assert metrics["chance"] == pytest.approx(1 / 8)
    assert metrics["area"] == pytest.approx(np.mean([line.box[2:].prod() for line in data.expressions]) / SIZE**2)
    right = []
    for line in data.expressions:  # a flat map takes the box of most pixels over the root of its area
        first, last = line.proposals[:, :2].astype(int), (line.proposals[:, :2] + line.proposals[:, 2:]).astype(int)
        place = ((last - first).prod(axis=1) / line.proposals[:, 2:].prod(axis=1) ** 0.5).argmax()
        right.append(np.allclose(line.proposals[place], line.box))
    assert metrics["flat_accuracy"] == pytest.approx(np.mean(right))


def test_expressions_mean_one_thing_and_every_picture_has_several():
    scenes = ReferringScenes("test", 60)
    for index in range(60):
        scene, phrases, proposals = scenes.scene(index), scenes.expressions(index), scenes.proposals(index)
        assert [phrase["text"] for phrase in phrases] == scenes.captions(index) == scenes[index]["captions"]
        assert len(set(scenes.captions(index))) == len(phrases) == len(scene.objects) > 1
        assert proposals.shape == (8, 4)
        for place, (item, phrase) in enumerate(zip(scene.objects, phrases)):
            assert np.isclose(proposals, phrase["box"]).all(axis=1).sum() == 1
            assert phrase["box"] == item.box
            statement = appearance_statement(scene, place, Draws(index))
            assert referents(statement, scene) == [place]
            assert fits(statement.mentions[0], item)
    trained = open_training_pairs(DataConfig(train="train_referring", num_train=5, num_captions=1), seed=3)
    assert (trained.name, len(trained), len(trained.captions(0))) == ("scenes/referring_train", 5, 1)
    assert trained.fingerprint == ReferringScenes("train", 5, SIZE, 3, num_captions=1).fingerprint
    refused(
        ("unknown part 'dev'; expected one of: train, val, test", lambda: ReferringScenes("dev")),
        (
            r"have no effect with data\.train = train_referring; expected: 0",
            lambda: DataConfig(train="train_referring", caption_noise=0.1),
        ),
    )


def test_things_of_another_size_are_another_set():
    sets = [scenes_to_ground("test", size, 30, SIZE) for size in (True, False, None)]
    large, small, both = ([line.box[2:].max() for line in data.expressions] for data in sets)
    assert len(large) + len(small) == len(both)
    assert len({data.fingerprint for data in sets}) == 3
    assert min(large) > np.mean(small)


def test_files_are_measured_with_the_words_of_another_box(encoder, tmp_path):
    Image.new("RGB", (60, 40), (200, 30, 30)).save(tmp_path / "a.png")
    Image.new("RGB", (40, 60), (30, 30, 200)).save(tmp_path / "b.png")
    proposals = [[0, 0, 20, 20], [20, 10, 20, 20], [10, 10, 25, 30]]
    phrases = [("a", "red one", 0), ("a", "the first", 0), ("a", "blue one", 1), ("b", "alone", 2)]
    rows = [
        {"image": f"{name}.png", "sentence": text, "box": proposals[place], "proposals": proposals}
        for name, text, place in phrases
    ]
    path, elsewhere = tmp_path / "refcoco_plus_val.json", tmp_path / "lists" / "val.json"
    for folder in (tmp_path / "more", elsewhere.parent):
        folder.mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "more" / "a.png")  # another image of the same file name
    path.write_text(json.dumps([*rows, rows[2] | {"image": "more/a.png", "sentence": "elsewhere"}]))
    data = file_to_ground(path, tmp_path)
    assert [line.other for line in data.expressions] == ["blue one", "blue one", "red one", "", ""]
    metrics = measure(encoder, data, 1)
    assert metrics["oracle_accuracy"] == 1
    assert metrics["chance"] == pytest.approx(1 / 3)
    (tmp_path / "more" / "a.png").unlink()
    path.write_text(json.dumps(rows))
    data = DataConfig(source="karpathy", root=str(tmp_path), resize="squeeze")
    assert list(open_sets("photos", data, RefcocoFiles())) == ["val"]
    # images lie below data.root, and half of them may be missing
    elsewhere.write_text(json.dumps([*rows * 25, *[rows[0] | {"image": "missing.png"}] * 40]))
    far, tolerant = RefcocoFiles(val=str(elsewhere)), replace(data, max_broken_share=0.5)
    (val,) = open_sets("photos", tolerant, far).values()
    assert len(val.expressions) == 100
    with pytest.raises(TooManyBroken, match="max_broken_share"):
        open_sets("photos", data, far)
    other, scenes = RefcocoFiles(val="x.json"), DataConfig(source="scenes")
    refused(
        (
            r"data\.resize = crop cuts off .*expected: squeeze",
            lambda: open_sets("photos", replace(data, resize="crop"), RefcocoFiles()),
        ),
        (
            r"no expressions with boxes: .*x\.json, .*expected: DATA=<folder with",
            lambda: open_sets("photos", data, other),
        ),
        (
            r"RefcocoFiles\(val='x.json'.* on scenes; expected: refcoco\.\* at a scale of",
            lambda: open_sets("demo", scenes, other),
        ),
        (
            r"sugarcrepe.pairs = 'x.json' on scenes; expected: at a scale of photographs",
            lambda: open_lookalikes(scenes, SugarCrepeFiles(pairs="x.json")),
        ),
        error=ConfigError,
    )
    (pair,) = [row for row in open_karpathy(path) if row["image_id"] == "b.png"]  # to train on, without boxes
    assert pair["captions"] == ["alone"]
    path.write_text(json.dumps(rows[-1:]))
    refused(("no picture has expressions for two boxes", lambda: file_to_ground(path, None)), error=ConfigError)


def test_an_unreadable_photograph_is_named_and_not_drawn(encoder, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.png").write_bytes(b"no image")
    Image.new("RGB", (60, 40)).save(tmp_path / "b.png")
    boxes = {"left": [0, 0, 30, 40], "right": [30, 0, 30, 40]}
    rows = [
        {"image": f"{name}.png", "sentence": text, "box": box, "proposals": [*boxes.values()]}
        for name in "ab"
        for text, box in boxes.items()
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows * 3))
    with pytest.raises(TooManyBroken, match="image cannot be decoded"):
        measure(encoder, file_to_ground(path, None), 1)
    path.write_text(json.dumps([*rows, rows[0] | {"image": "missing.png"}, rows[0] | {"proposals": []}]))
    capsys.readouterr()
    data, drawn = file_to_ground(path, None), []
    assert refcoco_plus._described(data, measure(encoder, data, 1)).endswith("), 2 expressions, 4 left out")
    printed = capsys.readouterr().out
    for fault in ("missing.png: missing image", "no proposals", "a.png: image cannot be decoded"):
        assert fault in printed
    monkeypatch.setattr(refcoco_plus, "_encoder", lambda run: encoder)
    monkeypatch.setattr(refcoco_plus, "plot_heat_on_pictures", lambda lines, path, beside: drawn.extend(lines))
    grounding = refcoco_plus.Grounded(None, {"ALBEF": [None]}, {}, {}, 1, on_scenes=False)
    refcoco_plus._draw(grounding, data, tmp_path / "figure3.png")
    assert [line.caption for line in drawn] == ["left", "right"]
    (tmp_path / "b.png").write_bytes(b"no image either")
    none = "^rows: none of its 4 expressions has an image that can be read and words for another box of it; expected"
    refused((none, lambda: measure(encoder, file_to_ground(path, None), 1)), error=ConfigError)


def test_the_committed_numbers_are_of_the_layer_that_is_used():
    committed = Path(__file__).parents[1] / "results" / "geomm" / "refcoco_plus" / "demo" / "grounding.json"
    layers = CODE.config("grounded_albef.yaml", "demo", ()).method.fusion_layers
    assert json.loads(committed.read_text("utf-8"))["protocol"]["settings"]["layer"] == layer_of(None, layers) == 2
    assert layer_of(None, 6) == 3


def test_a_layer_that_the_fusion_does_not_have_is_refused_before_anything_is_trained(tmp_path):
    command = Command("refcoco_plus", "smoke", (0,), ("grounding.layer=9",), tmp_path, tmp_path / "results")
    refused(("grounding.layer = 9; expected: 1 to [1-9], ", lambda: refcoco_plus.grounded(command, CODE)))
    assert not [*tmp_path.iterdir()]
