"""The embedded data set: determinism, splits, captions, hard negatives, noise, ambiguity, vocabulary."""

import hashlib
import itertools
import re

import numpy as np
import pytest

import common.base.compiled as compiled_module
from common.base import random_keys
from common.data.scenes import (
    ANNOTATION_TASKS,
    CLASSIFICATION_TASKS,
    SPLITS,
    SceneDataset,
    annotation_task,
    classification_task,
    describes,
    draw,
    scene_words,
)
from common.data.scenes.statements import Mention, Statement
from common.data.scenes.wording import say
from common.data.scenes.world import INVERSE_RELATION, LEFT


def digest(items) -> str:
    content = hashlib.sha256()
    for item in items:
        content.update(item["image"].tobytes() + "|".join(item["captions"]).encode() + item["image_id"].encode())
    return content.hexdigest()


GOLDEN = {
    "train": "e9bc11bf8630d85d60af1ace38dd97001c3de87d5283db31df34748933d054a1",
    "val": "a6c9afbcf7722bc77d9ad2f4f452b0e8077030d08d5395c92b6550409eac9662",
    "test": "431cbc9f4755de2f93a511c0c4c2f0e32b90d3e5020bf539e6bb8c9468cd7ed9",
    "train_crowded": "07992d4682a40f21a55d4ece3fefbdcac6b94c1333e6e854b2966f8d657678f8",
    "test_crowded": "35eb665a19f27c1b5f38496d19c5b72fcc51d93dcd80dba1008701c771ab872c",
    "test_other_domain": "b06f2f1ab6735e2b4e5b4081d89c9723ab26fa57346c3956ac4e354aad1c2079",
}


@pytest.mark.parametrize("split", SPLITS)
def test_first_pictures_and_captions_never_change(split):
    """Catches a change of world, drawing or wording without a new WORLD_VERSION and new golden values."""
    assert digest(SceneDataset(split)[i] for i in range(8)) == GOLDEN[split]


@pytest.mark.parametrize("ambiguity", [0.0, 1.0])
def test_fewer_captions_are_the_first_ones(ambiguity):
    whole, few = SceneDataset(size=6, ambiguity=ambiguity), SceneDataset(size=6, ambiguity=ambiguity, num_captions=4)
    for index in range(6):
        assert few.captions(index) == whole.captions(index)[:4]
        assert few.statements(index) == tuple(whole.statements(index)[:4])
    assert whole.fingerprint != few.fingerprint == SceneDataset(size=6, ambiguity=ambiguity, num_captions=4).fingerprint


GOLDEN_SETS = {
    "noise": "74264c20eb27d544690ef5f49f4795785b9fe2b68097fed2a9cef281923dec3f",
    "classification": "e129737bd245fcf20d991d2344117d52d91679e78e6854bcfa9ebddf0ec6b733",
    "annotation": "afc516aaa159108cbdc8b8061a507a6db0becef9293e8c237cadafd7408f6b88",
}


def test_noise_and_tasks_never_change_either():
    """In this process, whose seed of `hash()` is another one each time, as in the one that wrote the values."""

    def prints(make, names):
        return hashlib.sha256("|".join(f"{name} {make(name, size=9).fingerprint}" for name in names).encode())

    assert SceneDataset("train", 50, seed=3, caption_noise=0.5, ambiguity=0.5).fingerprint == GOLDEN_SETS["noise"]
    assert prints(classification_task, CLASSIFICATION_TASKS).hexdigest() == GOLDEN_SETS["classification"]
    assert prints(annotation_task, ANNOTATION_TASKS).hexdigest() == GOLDEN_SETS["annotation"]


def test_size_does_not_change_the_pictures():
    assert digest(SceneDataset("train", size=10)[i] for i in range(10)) == digest(
        SceneDataset("train", size=10_000)[i] for i in range(10)
    )


def test_splits_and_seeds_share_no_scene():
    sets = [SceneDataset(split, size=120, seed=seed) for split in SPLITS for seed in (0, 1, -1)]
    scenes = [dataset.scene(i) for dataset in sets for i in range(120)]
    assert len({scene.key for scene in scenes}) == len(scenes)
    assert len({(scene.objects, scene.background) for scene in scenes}) == len(scenes)


def test_draws_are_uniform_and_never_end():
    draws = random_keys.Draws(7)
    values = np.array([draws.below(10) for _ in range(40_000)])
    assert np.abs(np.bincount(values, minlength=10) / 40_000 - 0.1).max() < 0.008  # five standard deviations


def test_splitmix_matches_its_published_test_vector():
    """First outputs for seed 1234567 of the reference implementation."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(random_keys.mix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    draws = random_keys.Draws(1234567)  # of each number the lower half, then the upper one
    assert [draws.below(2**32) | draws.below(2**32) << 32 for _ in range(3)] == outputs


def test_kernels_still_compile_where_no_cache_can_be_written(monkeypatch):
    real = compiled_module.numba.njit

    def refuses_to_cache(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(compiled_module.numba, "njit", refuses_to_cache)
    assert compiled_module.compiled(lambda x: x + 1)(2) == 3


def entails(stronger: Statement, weaker: Statement) -> bool:
    """Whether a longer statement says all of a shorter one, by their form: every scene of the first fits the second."""
    if weaker.background not in (-1, stronger.background) or weaker.count not in (-1, stronger.count):
        return False
    known = {(r, a, b) for a, r, b in stronger.relations}
    known |= {(INVERSE_RELATION[r], b, a) for r, a, b in known}
    return any(
        all(w in (-1, s) for m, thing in zip(weaker.mentions, chosen) for w, s in zip(m, stronger.mentions[thing]))
        and known.issuperset((r, chosen[a], chosen[b]) for a, r, b in weaker.relations)
        for chosen in itertools.permutations(range(len(stronger.mentions)), len(weaker.mentions))
    )


@pytest.mark.parametrize("split", SPLITS)
def test_captions_are_true_of_their_scene_and_each_entails_the_next(split):
    dataset = SceneDataset(split, size=120)
    for i in range(120):
        levels = dataset.statements(i)
        assert len(levels) == 5
        assert all(describes(statement, dataset.scene(i)) for statement in levels)
        assert all(entails(a, b) for a, b in itertools.pairwise(levels)), levels


def test_wording_varies_while_the_meaning_stays():
    """Many sentences for one statement, none of which changes what it says."""
    statement = Statement((Mention(0, 0, 0, 1), Mention(1, 5)), ((0, LEFT, 1),))
    sentences = {say(statement, random_keys.Draws(k)) for k in range(300)}
    assert len(sentences) > 150
    for sentence in sentences:
        words = sentence.split()
        first = min(words.index(w) for w in ("circle", "disc") if w in words)
        second = min(words.index(w) for w in ("square", "box") if w in words)
        leftwards = "left" in words
        assert leftwards != ("right" in words)
        if re.match(r"(to the )?(left|right) of", sentence):  # "left of a square there is a circle"
            assert (second < first) == leftwards, sentence
        else:
            assert (first < second) == leftwards, sentence


def test_hard_negatives_are_false_and_there_is_always_one():
    known = set(scene_words())
    for split in ("test", "test_crowded", "test_other_domain"):
        dataset = SceneDataset(split, size=50)
        for i in range(50):
            pairs, captions = dataset.hard_negatives(i), dataset.captions(i)
            assert pairs
            assert {true for true, _ in pairs} <= set(captions[:3])
            assert not {false for _, false in pairs} & set(captions)
            assert all(set(false.split()) <= known for _, false in pairs)


def test_share_of_noisy_captions_is_as_asked_and_the_truth_is_recorded():
    noisy, clean = (SceneDataset("train", size=4_000, caption_noise=share) for share in (0.3, 0.0))
    sources = [noisy.caption_source(i) for i in range(4_000)]
    assert abs(np.mean([s != i for i, s in enumerate(sources)]) - 0.3) < 0.03  # four standard deviations
    assert all(clean.caption_source(i) == i for i in range(100))
    for i in range(60):
        assert noisy[i]["captions"] == clean[sources[i]]["captions"]
        assert np.array_equal(noisy[i]["image"], clean[i]["image"])
    assert all(SceneDataset("train", size=2, caption_noise=1.0).caption_source(i) == 1 - i for i in range(2))


def test_ambiguity_makes_captions_vague_for_the_asked_share():
    vague, clear = (SceneDataset("train", size=2_000, ambiguity=share) for share in (0.4, 0.0))
    marked = [vague.is_ambiguous(i) for i in range(2_000)]
    assert abs(np.mean(marked) - 0.4) < 0.045
    assert not any(clear.is_ambiguous(i) for i in range(100))
    everything = SceneDataset("train", size=500, ambiguity=1.0)
    captions = [everything.captions(i)[0] for i in range(500)]
    assert len(set(captions)) < 150  # duplicate descriptions
    for i in range(200):
        levels = everything.statements(i)
        assert all(describes(s, everything.scene(i)) for s in levels)
        assert all(entails(a, b) for a, b in itertools.pairwise(levels))
    assert all(vague.captions(i) == clear.captions(i) for i in range(50) if not marked[i])


def test_every_caption_uses_the_closed_vocabulary():
    known = scene_words()
    assert known == sorted(set(known))
    assert all(re.fullmatch("[a-z]+", word) for word in known)
    used = set()
    for split in SPLITS:
        for share in (0.0, 1.0):
            dataset = SceneDataset(split, size=150, ambiguity=share)
            for i in range(150 if not share else 30):
                used.update(word for caption in dataset.captions(i) for word in caption.split())
    assert used <= set(known), used - set(known)


def test_fingerprint_follows_parameters_and_drawing(monkeypatch):
    base = SceneDataset("test", size=10)
    others = [
        SceneDataset("val", size=10),
        SceneDataset("test", size=11),
        SceneDataset("test", size=10, image_size=32),
        SceneDataset("test", size=10, seed=1),
        SceneDataset("test", size=10, caption_noise=0.01),
        SceneDataset("test", size=10, ambiguity=0.01),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 7
    assert base.fingerprint == SceneDataset("test", size=10).fingerprint
    before = base.fingerprint
    monkeypatch.setattr(draw, "PALETTES", draw.PALETTES + 1)
    assert base.fingerprint != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"split": "tset"},
            "unknown split 'tset'; expected one of: train, val, test, train_crowded, test_crowded, test_other_domain",
        ),
        ({"size": 0}, "size = 0, image_size = 48; expected: at least 1 image"),
        ({"image_size": 15}, "image_size = 15; expected: at least 1 image of at least 16 pixels"),
        ({"size": 1, "caption_noise": 0.5}, "at least 2 images"),
        ({"ambiguity": 20}, r"ambiguity = 20; expected: a share in \[0, 1\]"),
        ({"num_captions": 6}, "num_captions = 6; expected: 1 to 5"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SceneDataset(**arguments)
