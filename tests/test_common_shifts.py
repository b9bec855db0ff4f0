"""Distribution shift: the drop, the fair drop with the same classes, effective robustness against a fitted line."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from common.data.scenes import classification_task, scene_words
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.evaluation.embed import Encoder
from common.evaluation.shifts import Shift, effective_robustness, evaluate_shifts
from common.geometry import Sphere, unit

COLOURS = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0), "grey": (0.5, 0.5, 0.5)}


class Colours(nn.Module):
    """A picture's embedding is its mean colour, a text's the colour that it names."""

    geometry = Sphere()

    def __init__(self, tokenizer):
        super().__init__()
        self.colour_of = {int(tokenizer.encode([name], 4)[0, 1]): colour for name, colour in COLOURS.items()}

    def encode_image(self, images):
        return unit(images.mean(dim=(2, 3)))

    def encode_text(self, token_ids):
        return unit(
            torch.tensor([next(self.colour_of[i] for i in row.tolist() if i in self.colour_of) for row in token_ids])
        )


class Patches:
    """Flat pictures; `pictures` holds (class name, colour)."""

    templates = ("a {}",)

    def __init__(self, name, class_names, pictures):
        self.name, self.fingerprint, self.class_names, self.pictures = name, f"hash of {name}", class_names, pictures

    def __len__(self):
        return len(self.pictures)

    def label(self, index):
        return self.class_names.index(self.pictures[index][0])

    def __getitem__(self, index):
        colour = np.array(self.pictures[index][1]) * 255
        return {"image": np.broadcast_to(colour, (8, 8, 3)).astype(np.uint8), "label": self.label(index)}


@pytest.fixture
def encoder():
    tokenizer = WordTokenizer.from_words(["a", *COLOURS])
    transform = ImageTransform(size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return Encoder(Colours(tokenizer), transform, tokenizer, 6, 5, torch.device("cpu"))


DULL_RED = (0.6, 0.5, 0.5)  # nearer to grey than to red


def tasks():
    names = list(COLOURS)
    clean = [(name, COLOURS[name]) for name in names]
    return {
        "imagenet": Patches("whole", names, [*clean, ("red", DULL_RED), ("red", DULL_RED)]),
        "fresh": Patches("fresh", names, [*clean, ("red", DULL_RED)]),
        "no_grey": Patches("no grey", ["red", "green"], [("red", DULL_RED), ("green", (1.0, 0.5, 0.5))]),
        "other": Patches("other", ["red", "a grey"], [("red", DULL_RED), ("a grey", COLOURS["grey"])]),
    }


def test_drop_against_all_classes_and_against_the_same_classes(encoder):
    results, shifts = evaluate_shifts(encoder, tasks(), "scores")
    assert set(results) == {"imagenet", "fresh", "no_grey", "other", "imagenet as no_grey"}
    assert set(shifts) == {"fresh", "no_grey", "other"}
    assert results["imagenet"].metrics["acc1"] == pytest.approx(4 / 6)  # dull red is called grey
    assert results["imagenet as no_grey"].metrics["acc1"] == 1  # grey is not among the choices
    assert results["imagenet as no_grey"].protocol["num_images"] == 4
    assert results["imagenet as no_grey"].protocol["num_classes"] == 2
    assert shifts["fresh"].drop == pytest.approx(4 / 6 - 4 / 5)
    assert shifts["fresh"].drop_same_classes == shifts["fresh"].drop
    assert shifts["no_grey"] == Shift(0.5, pytest.approx(4 / 6), 1.0)
    assert shifts["no_grey"].drop == pytest.approx(1 / 6)
    assert shifts["no_grey"].drop_same_classes == pytest.approx(0.5)


def test_a_shift_with_classes_of_its_own_has_no_fair_drop(encoder):
    _, shifts = evaluate_shifts(encoder, tasks(), "scores")
    assert shifts["other"] == Shift(0.5, pytest.approx(4 / 6), None)
    assert shifts["other"].drop == pytest.approx(1 / 6)
    assert shifts["other"].drop_same_classes is None


def test_a_missing_reference_is_named(encoder):
    with pytest.raises(ValueError, match="no reference set 'imagenet1k' among imagenet, fresh, no_grey, other"):
        evaluate_shifts(encoder, tasks(), "scores", reference="imagenet1k")


class Untrained(nn.Module):
    geometry = Sphere()

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 6)
        self.pixels = nn.Linear(3 * 16 * 16, 6)

    def encode_image(self, images):
        return unit(self.pixels(images.flatten(1)))

    def encode_text(self, token_ids):
        return unit(self.words(token_ids).mean(dim=1))


def test_scenes_stand_in_for_imagenet_and_its_shifts():
    tokenizer = WordTokenizer.from_words(scene_words())
    encoder = Encoder(Untrained(), ImageTransform(size=16), tokenizer, 12, 64, torch.device("cpu"))
    names = ("imagenet", "imagenet_v2", "imagenet_a", "imagenet_r")
    sets = {name: classification_task(name, size=96, image_size=16) for name in names}
    results, shifts = evaluate_shifts(encoder, sets, "embeddings")
    assert set(results) == {*names, "imagenet as imagenet_r"}  # the only one with fewer classes
    assert results["imagenet as imagenet_r"].protocol["num_classes"] == 48
    own = [sets["imagenet"].class_names[sets["imagenet"].label(index)] for index in range(96)]
    kept = sum(name in sets["imagenet_r"].class_names for name in own)
    assert results["imagenet as imagenet_r"].protocol["num_images"] == kept
    assert shifts["imagenet_v2"].reference_same_classes == results["imagenet"].metrics["acc1"]


def test_a_model_on_the_line_has_no_effective_robustness_and_one_above_has():
    def line(accuracy):
        logit = 0.8 * math.log(accuracy / (1 - accuracy)) - 0.5
        return 1 / (1 + math.exp(-logit))

    baselines = [0.3, 0.5, 0.6, 0.8]
    on_line = [line(accuracy) for accuracy in baselines]
    assert effective_robustness(0.7, line(0.7), baselines, on_line) == pytest.approx(0, abs=1e-12)
    assert effective_robustness(0.7, line(0.7) + 0.1, baselines, on_line) == pytest.approx(0.1, abs=1e-12)


def test_bad_accuracies_are_refused():
    with pytest.raises(ValueError, match=r"accuracy 1\.0; accepted: strictly between 0 and 1"):
        effective_robustness(0.5, 0.4, [0.3, 1.0], [0.2, 0.3])
    with pytest.raises(ValueError, match="at least two unlike"):
        effective_robustness(0.5, 0.4, [0.3, 0.3], [0.2, 0.3])
