"""RandAugment: every change against timm's function of the same strength, and the frequencies of the draws."""

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment

from common.data.rand_augment import ALBEF_CHANGES, CHANGES, albef_augment, change, rand_augment, tcl_augment

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
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: sign * value)
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    theirs = auto_augment.AugmentOp(THEIR_NAMES[name], prob=1.0, magnitude=magnitude, hparams=hparams)(picture)
    ours = change(picture, name, magnitude / 10, sign, FILL)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_changes_are_those_of_the_increasing_set():
    assert sorted(THEIR_NAMES[name] for name in CHANGES) == sorted(auto_augment._RAND_INCREASING_TRANSFORMS)


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


def test_albefs_changes_are_those_of_its_code_at_magnitude_7():
    """Read off a ramp: factors of brightness, pixels of a shift, degrees of a turn; the draws by their frequencies."""
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (64, 1, 3)) * 2)
    strengths = dict(ALBEF_CHANGES)
    brighter = np.asarray(change(ramp, "brightness", strengths["brightness"], 1, FILL))
    np.testing.assert_allclose(brighter, np.minimum(255, np.asarray(ramp) * (7 / 10 * 1.8 + 0.1)), atol=1)
    shifted = change(ramp, "translate_x", strengths["translate_x"] / (0.45 * 64), 1, FILL)
    np.testing.assert_array_equal(np.asarray(shifted)[:, :57], np.asarray(ramp)[:, 7:])
    turned = change(ramp, "rotate", strengths["rotate"], 1, FILL)
    np.testing.assert_array_equal(turned, ramp.rotate(21, Image.Resampling.BICUBIC, fillcolor=FILL))
    assert strengths["shear_x"] * 0.3 == pytest.approx(0.21)
    augmented = [np.asarray(albef_augment(ramp, np.random.default_rng(seed))) for seed in range(400)]
    same = np.mean([np.array_equal(image, np.asarray(ramp)) for image in augmented])
    # not mirrored, and two draws, each left out or the identity; one or two of the ten change nothing of this ramp
    assert 0.5 * 0.55**2 - 0.06 < same < 0.5 * 0.65**2 + 0.06
    assert len({image.tobytes() for image in augmented}) > 25


def test_tcls_views_change_colours_too(picture):
    views = [np.asarray(tcl_augment(picture, np.random.default_rng(seed))) for seed in range(200)]
    assert 0.12 < np.mean([np.ptp(view, axis=2).max() == 0 for view in views]) < 0.28  # grey ones
