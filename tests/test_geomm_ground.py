"""Grounding without boxes: heat of one fusion layer, and measurements on maps whose score is known."""

import json
from dataclasses import replace

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
from common.evaluation.grad_cam import box_coverage, share_in_box
from geomm import ground as module
from geomm import refcoco_plus
from geomm.config import Config
from geomm.ground import (
    RefcocoFiles,
    as_fractions,
    file_to_ground,
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


def inputs_of(encoder, scenes, count):
    images = torch.stack([encoder.transform.eval(scenes[index]["image"]) for index in range(count)])
    texts = [scenes.captions(index)[0] for index in range(count)]
    return encoder.transform.inputs(images), encoder.tokenizer.encode(texts, encoder.context_length)


def test_heat_is_attention_times_positive_gradient_of_the_layer_that_is_asked_for(encoder):
    images, ids = inputs_of(encoder, ReferringScenes("val"), 3)
    model, heats = encoder.model, {}
    for layer in (1, 2, 3):
        heat, logits = match_heat(model, images, ids, layer)
        recorded, encoders = [], model.encoders
        mask = encoders.text_mask(ids)
        tokens = encoders.text_tower.forward_tokens(ids), mask, encoders.image_tower.forward_tokens(images)
        yes = model.match(*tokens, recorded)[:, 1]
        attention = recorded[layer - 1]
        (gradient,) = torch.autograd.grad(yes.sum(), attention)
        expected = torch.zeros(3, 4)
        for pair in range(3):
            words = int(mask[pair].sum())  # tokens behind them are padding
            for word in range(words):
                expected[pair] += (attention * gradient.clamp(min=0))[pair, :, word, 1:].sum(dim=0)
        expected /= attention.shape[1] * attention.shape[2]
        torch.testing.assert_close(heat.flatten(1), expected.detach())
        torch.testing.assert_close(logits, yes.detach())
        heats[layer] = heat
    assert torch.equal(match_heat(model, images, ids)[0], heats[2])  # the middle one, as the third of six
    assert not torch.allclose(heats[1], heats[2])
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"grounding\.layer = 4; expected: 1 to 3, the layers of the fusion"):
        match_heat(model, images, ids, 4)


def test_maps_that_know_score_all_and_those_of_other_words_nothing(encoder, monkeypatch):
    """Heat in the box that the words mean: all right with the own words, none with those of another thing."""
    data = scenes_to_ground("val", None, 20, SIZE)
    assert len(data.expressions) > 40
    meant = {(line.picture, line.text): line.box for line in data.expressions}
    assert all((line.picture, line.other) in meant for line in data.expressions)

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
    assert share_in_box(np.ones((3, 5)), (0.1, 0.2, 0.5, 0.9)) == pytest.approx(0.4 * 0.7)  # even heat: the area
    right = []
    for line in data.expressions:  # a flat map takes the box of most pixels over the root of its area
        first, last = line.proposals[:, :2].astype(int), (line.proposals[:, :2] + line.proposals[:, 2:]).astype(int)
        place = ((last - first).prod(axis=1) / line.proposals[:, 2:].prod(axis=1) ** 0.5).argmax()
        right.append(np.allclose(line.proposals[place], line.box))
    assert metrics["flat_accuracy"] == pytest.approx(np.mean(right))


def test_expressions_mean_one_thing_and_every_picture_has_several():
    scenes = ReferringScenes("test", 60)
    for index in range(60):
        scene, phrases = scenes.scene(index), scenes.expressions(index)
        assert [phrase["text"] for phrase in phrases] == scenes.captions(index) == scenes[index]["captions"]
        assert len(set(scenes.captions(index))) == len(phrases) == len(scene.objects) > 1
        proposals = scenes.proposals(index)
        assert proposals.shape == (8, 4)
        for item, phrase in zip(scene.objects, phrases):
            assert np.isclose(proposals, phrase["box"]).all(axis=1).sum() == 1
            assert phrase["box"] == item.box
        for place, item in enumerate(scene.objects):
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
    large, small = (scenes_to_ground("test", size, 30, SIZE) for size in (True, False))
    both = scenes_to_ground("test", None, 30, SIZE)
    assert len(large.expressions) + len(small.expressions) == len(both.expressions)
    assert len({large.fingerprint, small.fingerprint, both.fingerprint}) == 3
    assert min(line.box[2:].max() for line in large.expressions) > np.mean(
        [line.box[2:].max() for line in small.expressions]
    )


def test_files_are_measured_with_the_words_of_another_box(encoder, tmp_path):
    Image.new("RGB", (60, 40), (200, 30, 30)).save(tmp_path / "a.png")
    Image.new("RGB", (40, 60), (30, 30, 200)).save(tmp_path / "b.png")
    proposals = [[0, 0, 20, 20], [20, 10, 20, 20], [10, 10, 25, 30]]
    phrases = [("a", "red one", 0), ("a", "the first", 0), ("a", "blue one", 1), ("b", "alone", 2)]
    rows = [
        {"image": f"{name}.png", "sentence": text, "box": proposals[place], "proposals": proposals}
        for name, text, place in phrases
    ]
    path = tmp_path / "refcoco_plus_val.json"
    path.write_text(json.dumps(rows))
    data = file_to_ground(path, None)
    assert [line.other for line in data.expressions] == ["blue one", "blue one", "red one", ""]
    (tmp_path / "more").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "more" / "a.png")  # another image of the same file name
    path.write_text(json.dumps([*rows, rows[2] | {"image": "more/a.png", "sentence": "elsewhere"}]))
    others = [line.other for line in file_to_ground(path, tmp_path).expressions]
    assert others == ["blue one", "blue one", "red one", "", ""]
    (tmp_path / "more" / "a.png").unlink()
    path.write_text(json.dumps(rows))
    metrics = measure(encoder, data, 1)
    assert metrics["oracle_accuracy"] == 1
    assert metrics["chance"] == pytest.approx(1 / 3)
    data = DataConfig(source="karpathy", root=str(tmp_path), resize="squeeze")
    assert list(open_sets("photos", data, RefcocoFiles())) == ["val"]
    elsewhere = tmp_path / "lists" / "val.json"  # images lie below data.root, and half of them may be missing
    elsewhere.parent.mkdir()
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
    with pytest.raises(ConfigError, match="no picture has expressions for two boxes"):
        file_to_ground(path, None)


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
    path.write_text(json.dumps([*rows, rows[0] | {"image": "missing.png"}, rows[0] | {"proposals": []}]))
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
