"""RandAugment: every change against timm's function of the same strength, and the frequencies of the draws."""

import numpy as np
import pytest
from PIL import Image

from common.evaluation.rand_augment import CHANGES, change, rand_augment

FILL = (10, 200, 90)
THEIR_NAMES = {
    "auto_contrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "colour": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}


@pytest.fixture
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 18, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(("magnitude", "sign"), [(0.0, 1), (8.3, 1), (9.4, -1)])
def test_change_equals_timm(name, magnitude, sign, picture, monkeypatch):
    timm = pytest.importorskip("timm.data.auto_augment")
    monkeypatch.setattr(timm, "_randomly_negate", lambda value: sign * value)
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    theirs = timm.AugmentOp(THEIR_NAMES[name], prob=1.0, magnitude=magnitude, hparams=hparams)(picture)
    ours = change(picture, name, magnitude / 10, sign, FILL)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_changes_are_those_of_the_increasing_set():
    timm = pytest.importorskip("timm.data.auto_augment")
    assert {THEIR_NAMES[name] for name in CHANGES} == set(timm._RAND_INCREASING_TRANSFORMS)
    assert len(CHANGES) == 15


def test_full_strength_posterize_is_black_and_not_an_error(picture):
    """A magnitude of 10 is drawn once in 44 times; Pillow's function refuses to keep no bit at all."""
    assert not np.asarray(change(picture, "posterize", 1.0, 1, FILL)).any()


def test_a_quarter_of_the_pictures_stay_and_a_seed_repeats(picture):
    original, unchanged = np.asarray(picture), 0
    for seed in range(200):
        first = np.asarray(rand_augment(picture, np.random.default_rng(seed), FILL))
        assert np.array_equal(first, np.asarray(rand_augment(picture, np.random.default_rng(seed), FILL)))
        assert first.shape == original.shape
        unchanged += np.array_equal(first, original)
    # neither change is made with probability 1/4; auto-contrast leaves this picture nearly as it is
    assert 0.18 < unchanged / 200 < 0.36
