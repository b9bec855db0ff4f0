"""Random views: the specification's table by name, purity, independence, statistics, parity with torchvision."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from common.base.random_keys import derive_key
from common.data import views
from common.data.transforms import IMAGENET_MEAN, IMAGENET_STD, random_crop_box
from common.data.views import RECIPES, ViewRecipe, colour_jitter, random_view, stacked_views

WHOLE = ViewRecipe((1.0, 1.0))  # a square picture passes whole, mirrored or not
DRAWS = 600


def picture(height=32, width=32, seed=0):
    """Smooth colours that differ everywhere, so that no step leaves it as it is."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def pixels(image):
    return F.pil_to_tensor(image)


# ---- the specification's table --------------------------------------------------------------------------------------

JITTER = {
    "simclr": (0.8, 0.8, 0.8, 0.2), "simclr_cifar10": (0.4, 0.4, 0.4, 0.1), "moco_v1": (0.4, 0.4, 0.4, 0.4),
    "moco_v2": (0.4, 0.4, 0.4, 0.1), "moco_cifar10": (0.4, 0.4, 0.4, 0.1),
    "moco_v3_vit_1": (0.4, 0.4, 0.2, 0.1), "moco_v3_vit_2": (0.4, 0.4, 0.2, 0.1),
    "moco_v3_resnet_1": (0.4, 0.4, 0.2, 0.1), "moco_v3_resnet_2": (0.4, 0.4, 0.2, 0.1),
}  # fmt: skip
TABLE = {  # smallest crop; probability of jitter, grey, blur, solarise
    "simclr": (0.08, 0.8, 0.2, 0.5, 0.0),
    "simclr_cifar10": (0.08, 0.8, 0.2, 0.0, 0.0),
    "moco_v1": (0.2, 1.0, 0.2, 0.0, 0.0),
    "moco_v2": (0.2, 0.8, 0.2, 0.5, 0.0),
    "moco_cifar10": (0.08, 0.8, 0.2, 0.0, 0.0),
    "moco_v3_vit_1": (0.08, 0.8, 0.2, 1.0, 0.0),
    "moco_v3_vit_2": (0.08, 0.8, 0.2, 0.1, 0.2),
    "moco_v3_resnet_1": (0.2, 0.8, 0.2, 1.0, 0.0),
    "moco_v3_resnet_2": (0.2, 0.8, 0.2, 0.1, 0.2),
    "crop_and_flip": (0.08, 0.0, 0.0, 0.0, 0.0),
    "crop_and_flip_cifar10": (0.08, 0.0, 0.0, 0.0, 0.0),
}


def test_the_recipes_are_those_of_the_table():
    assert set(TABLE) == set(RECIPES)
    for name, (smallest, jitter, grey, blur, solarise) in TABLE.items():
        strengths, is_simclr = JITTER.get(name, (0.0, 0.0, 0.0, 0.0)), name.startswith("simclr")
        mean, std = ((0.0,) * 3, (1.0,) * 3) if is_simclr else (IMAGENET_MEAN, IMAGENET_STD)
        if name in ("moco_cifar10", "crop_and_flip_cifar10"):
            mean, std = views.CIFAR10_MEAN, views.CIFAR10_STD
        expected = ViewRecipe(
            (smallest, 1.0), strengths, jitter, grey, blur, solarise, name == "moco_v1", is_simclr, mean, std
        )
        assert RECIPES[name] == expected, name


@pytest.mark.parametrize("name", ["moco_v1", "moco_v3_vit_2"])
def test_every_step_of_a_recipe_happens_as_often_as_it_says(name, monkeypatch):
    happened = Counter()
    steps = ((views, "colour_jitter"), (views.F, "rgb_to_grayscale"), (Image.Image, "filter"),
             (views.ImageOps, "solarize"), (views.ImageOps, "mirror"))  # fmt: skip
    for owner, step in steps:
        monkeypatch.setattr(owner, step, lambda image, *_, step=step: happened.update([step]) or image)
    for seed in range(DRAWS):
        random_view(picture(8, 8), RECIPES[name], 4, seed)
    for (_, step), probability in zip(steps, (*TABLE[name][1:], 0.5)):
        spread = 4.5 * (probability * (1 - probability) / DRAWS) ** 0.5
        assert abs(happened[step] / DRAWS - probability) <= spread, step


def test_sigma_of_the_blur_is_uniform_between_a_tenth_and_two_pixels(monkeypatch):
    sigmas = []
    monkeypatch.setattr(Image.Image, "filter", lambda image, kernel: sigmas.append(kernel.radius) or image)
    for seed in range(DRAWS):
        random_view(picture(8, 8), replace(WHOLE, blur_probability=1.0), 4, seed)
    assert 0.1 <= min(sigmas) < 0.11
    assert 1.99 < max(sigmas) <= 2.0
    assert np.quantile(sigmas, [0.25, 0.5, 0.75]) == pytest.approx([0.575, 1.05, 1.525], abs=0.12)


@pytest.mark.parametrize(("name", "expected"), [("moco_v1", ["grey", "jitter"]), ("moco_v2", ["jitter", "grey"])])
def test_moco_v1_turns_grey_before_the_jitter_and_the_others_after(name, expected, monkeypatch):
    order = []
    monkeypatch.setattr(views, "colour_jitter", lambda image, *_: order.append("jitter") or image)
    monkeypatch.setattr(views.F, "rgb_to_grayscale", lambda image, *_: order.append("grey") or image)
    random_view(picture(), replace(RECIPES[name], jitter_probability=1.0, grey_probability=1.0), 16, 0)
    assert order == expected


# ---- purity and independence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["simclr", "moco_v1", "moco_v3_vit_2"])
def test_a_view_is_a_pure_function_of_picture_and_seed(name):
    image, before = picture(40, 30), picture(40, 30)
    state = torch.get_rng_state()
    first = random_view(image, RECIPES[name], 24, 5)
    assert torch.equal(torch.get_rng_state(), state)  # the global random state is neither moved nor used
    for number in range(3):
        torch.manual_seed(number)
        assert torch.equal(random_view(image, RECIPES[name], 24, 5), first)
    assert torch.equal(pixels(image), pixels(before))  # the picture is not written to
    assert (first.shape, first.dtype) == ((3, 24, 24), torch.uint8)
    assert any(not torch.equal(random_view(image, RECIPES[name], 24, seed), first) for seed in range(6, 9))


def test_arrays_and_grey_or_transparent_pictures_give_the_views_of_their_rgb():
    image, recipe = picture(), RECIPES["moco_v2"]
    assert torch.equal(random_view(np.asarray(image), recipe, 16, 3), random_view(image, recipe, 16, 3))
    for mode in ("L", "RGBA", "P"):
        other = image.convert(mode)
        assert torch.equal(random_view(other, recipe, 16, 3), random_view(other.convert("RGB"), recipe, 16, 3))


def test_a_view_does_not_depend_on_the_rest_of_the_batch():
    images, seeds = [picture(seed=number) for number in range(4)], [7, 8, 9, 10]
    recipes = [RECIPES["moco_v3_vit_1"], RECIPES["moco_v3_vit_2"]]
    whole = stacked_views(images, recipes, 16, seeds)
    single_views = [stacked_views([image], recipes, 16, [seed]) for image, seed in zip(images, seeds)]
    for view in range(2):
        assert torch.equal(whole[view], torch.cat([one[view] for one in single_views]))
        assert torch.equal(whole[view][1], random_view(images[1], recipes[view], 16, derive_key(8, view)))


def test_draws_of_the_two_views_and_of_neighbouring_seeds_are_not_correlated():
    # the mirror stands for all draws: every view has a generator of its own
    image = picture(8, 8)
    first, second = stacked_views([image] * DRAWS, [WHOLE, WHOLE], 8, list(range(DRAWS)))
    mirrored = pixels(image).flip(-1)
    both = np.array([[torch.equal(view, mirrored) for view in stack] for stack in (first, second)], dtype=float)
    for flips in both:
        assert abs(flips.mean() - 0.5) < 0.1
        assert abs(np.corrcoef(flips[:-1], flips[1:])[0, 1]) < 0.17
    assert abs(np.corrcoef(both)[0, 1]) < 0.17


# ---- parity with torchvision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bicubic", [False, True])
def test_a_crop_is_torchvisions_of_the_same_box(bicubic):
    image = picture(48, 40)
    recipe = ViewRecipe((0.2, 1.0), bicubic=bicubic)
    resampling = InterpolationMode.BICUBIC if bicubic else InterpolationMode.BILINEAR
    for seed in range(20):
        rng = np.random.default_rng(seed)
        box = random_crop_box(48, 40, (0.2, 1.0), rng)
        expected = pixels(F.resized_crop(image, *box, [24, 24], resampling))
        expected = expected.flip(-1) if rng.random() < 0.5 else expected
        assert torch.equal(random_view(image, recipe, 24, seed), expected)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("grey_probability", lambda image: F.rgb_to_grayscale(image, 3)),
        ("solarise_probability", lambda image: F.solarize(image, 128)),
    ],
)
def test_grey_and_solarise_are_torchvisions(step, expected):
    image = picture()
    want = expected(pixels(image))
    for seed in range(6):
        view = random_view(image, replace(WHOLE, **{step: 1.0}), 32, seed)
        difference = min((view.int() - one.int()).abs().max() for one in (want, want.flip(-1)))
        assert difference <= 1  # Pillow rounds grey values, tensors cut them off


@pytest.mark.parametrize("place", range(4))
def test_each_colour_change_is_torchvisions_with_the_factor_drawn(place):
    change = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)[place]
    strengths = tuple(0.4 if number == place else 0.0 for number in range(4))
    image, amounts = picture(), []
    for seed in range(30):
        replay = np.random.default_rng(seed)
        drawn = [replay.uniform(0.6, 1.4) if number == place else replay.uniform(1, 1) for number in range(3)]
        amount = replay.uniform(-0.4, 0.4) if place == 3 else drawn[place]
        changed = colour_jitter(image, strengths, np.random.default_rng(seed))
        # hue goes through HSV and back even when it is not shifted, and then rounds
        difference = (pixels(changed).int() - pixels(change(image, amount)).int()).abs()
        assert difference.float().mean() < 1.5
        amounts.append(amount)
    assert max(amounts) - min(amounts) > 0.6


def test_jitter_takes_all_orders(monkeypatch):
    image, strengths = picture(), (0.8, 0.8, 0.8, 0.2)
    orders, now = set(), []
    for name in ("brightness", "contrast", "saturation", "hue"):
        monkeypatch.setattr(views.F, f"adjust_{name}", lambda picture, _, name=name: now.append(name) or picture)
    for seed in range(400):
        now.clear()
        colour_jitter(image, strengths, np.random.default_rng(seed))
        orders.add(tuple(now))
    assert len(orders) == 24


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0])
def test_blur_is_gaussian_of_the_sigma_drawn(sigma, monkeypatch):
    monkeypatch.setattr(views, "BLUR_SIGMA", (sigma, sigma))
    image = picture(64, 64)
    view = random_view(image, replace(WHOLE, blur_probability=1.0), 64, 0)
    exact = F.gaussian_blur(pixels(image), [21, 21], [sigma, sigma])
    inside = (slice(None), slice(8, -8), slice(8, -8))  # the border rules differ
    differences = [(view[inside].float() - one[inside].float()).abs() for one in (exact, exact.flip(-1))]
    measured = min(differences, key=lambda difference: float(difference.mean()))
    assert measured.max() <= 4
    assert measured.mean() < 1.0  # of 255; Pillow takes three box blurs for a Gaussian
