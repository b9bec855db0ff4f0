"""Protocols: what travels with a number, and the refusal to put unlike ones side by side."""

import json
import warnings

import pytest
from refusals import refused
from toys import ListedPictures, colour_encoder, plain_picture

from common.evaluation.embed import CaptionRule, evaluate_retrieval, evaluate_zero_shot
from common.evaluation.protocol import (
    ProtocolError,
    check_alike,
    evaluation_text,
    first_difference,
    hash_of_captions,
)

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
CAPTIONS = [["red", "A red, red patch!"], ["green", "green-green"], ["blue", "the blue patch", "a blue patch"]]


def patches(captions=CAPTIONS, broken=()):
    """One patch of each colour with captions of unlike number."""
    of_classes = {"class_names": list(COLOURS), "templates": ["a {} patch", "{c}"], "label": lambda row: row}
    images = [plain_picture(colour, 8) for colour in COLOURS.values()]
    return ListedPictures(images, captions.__getitem__, broken, "patches", **of_classes)


@pytest.fixture
def encoder():
    return colour_encoder({"a": (0, 0, 0), "patch": (0, 0, 0), **COLOURS}, size=8)


def test_a_recall_carries_all_that_changes_it(encoder):
    protocol = evaluate_retrieval(encoder, patches()).protocol
    assert json.loads(json.dumps(protocol)) == protocol
    assert protocol == {
        "task": "retrieval",
        "data": "patches",
        "fingerprint": "patches v1",
        "captions_per_image": "all",
        "caption_prefix": "",
        "caption_cleaning": "none",
        "positives": "own captions",
        "candidates": "all",
        "ranking": "similarity",
        "num_images": 3,
        "num_texts": 7,
        "num_image_queries": 3,
        "num_text_queries": 7,
        "captions_hash": hash_of_captions(CAPTIONS),
        "unreadable_images": 0,
        "score_dtype": "float32",
        "preprocessing": {"size": 8, "mode": "crop", "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]},
        "tie_rule": "lower index first",
    }


@pytest.mark.parametrize("average", ["scores", "normalized_mean"])
def test_an_accuracy_carries_the_average_and_counts(encoder, average):
    evaluation = evaluate_zero_shot(encoder, patches(), average)
    assert evaluation.metrics == pytest.approx({"acc1": 1, "mean_per_class_recall": 1})
    assert evaluation.chance["acc1"] == pytest.approx(1 / 3)
    stated = {"prompt_average": average, "num_images": 3, "num_templates": 2}
    assert evaluation.protocol | stated == evaluation.protocol


def test_a_caption_rule_chooses_and_prefixes_and_is_recorded(encoder):
    asked = []
    encode = encoder.tokenizer.encode
    encoder.tokenizer.encode = lambda texts, length: asked.extend(texts) or encode(texts, length)
    rule = CaptionRule(per_image=2, prefix="a ")
    actual = evaluate_retrieval(encoder, patches(), rule)
    assert asked == ["a red", "a A red, red patch!", "a green", "a green-green", "a blue", "a the blue patch"]
    assert actual.protocol | {"captions_per_image": 2, "caption_prefix": "a ", "num_texts": 6} == actual.protocol
    assert actual.metrics["i2t_recall_at_1"] == 1
    encoder.tokenizer.cleaning = "albef"  # of an `AlbefTokenizer`, whatever the rule
    assert evaluate_retrieval(encoder, patches()).protocol["caption_cleaning"] == "albef"
    first_two = patches([group[:2] for group in CAPTIONS])  # "all" and "the first two" are the same here
    rules = {"all": CaptionRule(), "two": CaptionRule(per_image=2)}
    check_alike({name: evaluate_retrieval(encoder, first_two, rule).protocol for name, rule in rules.items()})
    refused(
        ("captions per image = 0; expected: at least 1", lambda: CaptionRule(per_image=0)),
    )


def test_unreadable_pictures_and_pictures_without_captions_are_no_queries_and_are_counted(encoder):
    with pytest.warns(UserWarning, match=r"patches: 1 of 3 pictures cannot be read .*: patches \[0\]: torn$"):
        actual = evaluate_retrieval(encoder, patches([["red"], [], ["blue"]], broken={0}))
    protocol = actual.protocol
    assert [protocol[key] for key in ("num_images", "num_texts", "num_image_queries", "unreadable_images")] == [
        2,
        1,
        1,
        1,
    ]
    assert actual.metrics["t2i_recall_at_1"] == 1
    unread, bare = patches(broken={0, 1, 2}), patches([[], [], []])
    refused(
        ("patches: none of its 3 pictures could be read", lambda: evaluate_retrieval(encoder, unread)),
        ("patches: none of its 3 readable pictures has a caption", lambda: evaluate_retrieval(encoder, bare)),
    )


def test_a_collapsed_model_is_warned_of(encoder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate_retrieval(encoder, patches())
    encoder.model.text_tower.colours.fill_(1.0)
    with pytest.warns(UserWarning, match="patches: more than 0.1% of the captions score their picture and another one"):
        actual = evaluate_retrieval(encoder, patches())
    assert actual.metrics["t2i_tied_share"] == 1


def test_unlike_protocols_are_refused_by_the_first_key_that_differs(encoder):
    one = evaluate_retrieval(encoder, patches()).protocol
    check_alike({"row A": one, "row B": one | {"unreadable_images": 2}})
    check_alike({})
    fewer = evaluate_retrieval(encoder, patches(), CaptionRule(per_image=2)).protocol
    larger = one | {"preprocessing": one["preprocessing"] | {"size": 336}}
    both = {"seed 0": one, "seed 1": larger | {"num_texts": 6}}
    refused(
        ('captions_per_image is "all" for row A but 2 for row C',
         lambda: check_alike({"row A": one, "row B": dict(one), "row C": fewer})),
        (r"preprocessing.size is 8 for seed 0 but 336 for seed 1",
         lambda: check_alike({"seed 0": one, "seed 1": larger})),
        ("num_texts is 7 for seed 0 but 6 for seed 1", lambda: check_alike(both, may_differ=("preprocessing",))),
        error=ProtocolError,
    )  # fmt: skip
    check_alike({"seed 0": one, "seed 1": larger}, may_differ=("preprocessing.size",))


def test_a_key_that_one_protocol_lacks_is_a_difference():
    assert first_difference({"task": "retrieval"}, {"task": "retrieval", "k": 1}) == ("k", "absent", "1")
    assert first_difference({"size": {"a": 1}}, {}) == ("size.a", "1", "absent")
    one, other = ({"fingerprint": f"f{lost}", "num_images": 9 - lost, "unreadable_images": lost} for lost in (0, 1))
    assert first_difference(one, other)[2] == '"f1" (num_images 8, unreadable_images 1)'
    assert first_difference({"task": "retrieval", "mean": (0.5, 1)}, {"mean": [0.5, 1], "task": "retrieval"}) is None


def test_the_hash_of_captions_sees_every_caption_its_order_and_its_image():
    base = [["a", "b"], ["c"]]
    others = [[["a", "b"], ["d"]], [["b", "a"], ["c"]], [["a"], ["b", "c"]], [["a", "b", "c"], []], [["a\nb"], ["c"]]]
    assert len({hash_of_captions(captions) for captions in [base, *others]}) == 6
    assert hash_of_captions([("a", "b"), ("c",)]) == hash_of_captions(base)


def test_a_summary_has_few_lines_and_names_the_protocol_of_each_number():
    protocol = {"task": "zero_shot", "data": "pets", "fingerprint": "0123456789", "num_classes": 37}
    actual = {"metrics": {"acc1": 0.25, "acc5": 0.5}, "chance": {"acc1": 0.027}, "protocol": protocol}
    retrieval = {"metrics": {"score": 0.5}, "chance": {}, "protocol": {**protocol, "task": "mean", "data": "all"}}
    sets = {f"set {number}": actual for number in range(20)} | {"mean_all": retrieval}
    lines = evaluation_text({"paper": "euclip", "step": 7, "training_data": "photos", "evaluations": sets}).splitlines()
    assert lines[:2] == [
        "euclip, step 7, trained on photos; in percent:",
        "  mean_all: mean over sets 50.0; all (01234567), num_classes 37",
    ]
    assert lines[2] == "  set 0: acc 25.0 (chance level: 2.7); pets (01234567), num_classes 37"
    assert (lines[-1], len(lines)) == ("  and 11 more sets in the file", 12)
    public = evaluation_text({"paper": "euclip", "step": 0, "training_data": "tinyclip, published", "evaluations": {}})
    assert public == "tinyclip, published weights, training data not stated; in percent:"
