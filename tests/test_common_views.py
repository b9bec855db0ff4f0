"""Random views: the specification's table by name, purity, independence, parity with torchvision."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from common.base.random_keys import derive_key
from common.data import views
from common.data.transforms import IMAGENET_MEAN, IMAGENET_STD, random_crop_box
from common.data.views import RECIPES, ViewRecipe, random_view, stacked_views

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


def by_hand(image, recipe, size, seed):
    """A recipe's steps one after the other, by torchvision's functions, with the draws of the seed."""
    rng = np.random.default_rng(seed)
    box = random_crop_box(image.height, image.width, recipe.crop_scale, rng)
    resampling = InterpolationMode.BICUBIC if recipe.bicubic else InterpolationMode.BILINEAR
    view = F.resized_crop(image, *box, [size, size], resampling)
    view = F.hflip(view) if rng.random() < 0.5 else view

    def grey(view):
        return F.rgb_to_grayscale(view, 3) if rng.random() < recipe.grey_probability else view

    view = grey(view) if recipe.grey_first else view
    if rng.random() < recipe.jitter_probability:
        amounts = [rng.uniform(max(0, 1 - strength), 1 + strength) for strength in recipe.jitter[:3]]
        amounts.append(rng.uniform(-recipe.jitter[3], recipe.jitter[3]))
        for step in rng.permutation(4):
            change = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)[step]
            view = change(view, amounts[step])
    view = view if recipe.grey_first else grey(view)
    if rng.random() < recipe.blur_probability:
        view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))
    return F.solarize(view, 128) if rng.random() < recipe.solarise_probability else view


@pytest.mark.parametrize("name", RECIPES)
def test_a_view_is_its_recipe_step_by_step(name):
    for seed in range(20):
        image = picture(48, 40, seed)
        expected = pixels(by_hand(image, RECIPES[name], 24, seed))
        assert torch.equal(random_view(image, RECIPES[name], 24, seed), expected), seed


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
