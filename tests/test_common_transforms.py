"""common/data/transforms.py: pictures to tensors, checked against torchvision and Pillow themselves."""

import json
import re

import numpy as np
import pytest
import torch
from little_memory import at_most
from PIL import Image
from refusals import refused
from scipy import stats
from torchvision import transforms as tv
from torchvision.transforms.v2 import functional as v2

from common.data.transforms import CLIP_MEAN, CLIP_STD, ImageTransform, normalize, random_crop_box


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


@pytest.mark.parametrize("shape", [(40, 60), (61, 37), (32, 32), (20, 90), (7, 5)])
def test_crop_is_the_usual_clip_preprocessing(shape):
    clip = tv.Compose(
        [
            tv.Resize(32, tv.InterpolationMode.BICUBIC),
            tv.CenterCrop(32),
            tv.ToTensor(),
        ]
    )
    pixels, floats = ImageTransform(32, "crop").eval(picture(*shape)), clip(picture(*shape))
    assert (pixels.shape, pixels.dtype) == ((3, 32, 32), torch.uint8)
    assert torch.equal(normalize(pixels[None])[0], tv.Normalize(CLIP_MEAN, CLIP_STD)(floats))
    other_colours = (0.0, 0.2, 0.5), (1.0, 1.0, 0.5)
    assert torch.equal(normalize(pixels[None], *other_colours)[0], tv.Normalize(*other_colours)(floats))


@pytest.mark.parametrize("shape", [(40, 60), (61, 37), (32, 32), (7, 5)])
def test_squeeze_is_pillows_bicubic_resize(shape):
    expected = np.asarray(picture(*shape).resize((32, 32), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(ImageTransform(32, "squeeze").eval(picture(*shape)).numpy(), expected)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["crop", "squeeze"])
@pytest.mark.parametrize("shape", [(256, 341), (61, 37), (20, 90), (500, 33), (64, 64), (7, 5)])
def test_torchvisions_resize_is_that_of_its_tensors_and_close_to_pillows(shape, mode, interpolation):
    options = {"interpolation": interpolation, "resized": 72}
    ours = ImageTransform(64, mode, resize_with="torchvision", **options).eval(picture(*shape))
    assert (ours.shape, ours.dtype, ours.is_contiguous()) == ((3, 64, 64), torch.uint8, True)
    tensor, how = v2.pil_to_tensor(picture(*shape)), tv.InterpolationMode(interpolation)
    theirs = v2.center_crop(v2.resize(tensor, [72] if mode == "crop" else [72, 72], how, antialias=True), [64, 64])
    # by weights in fixed point on a CPU with AVX2; torchvision computes in floats on others
    assert (ours.int() - theirs.int()).abs().max() <= (torch.backends.cpu.get_cpu_capability() == "DEFAULT")
    # bilinear enlarging by a ratio of small numbers gives halves, which both round in their way; the passes along both
    # axes are rounded separately, which shows where a tall image is squeezed
    average = 0.25 if shape == (500, 33) and mode == "squeeze" else 0.06 if interpolation == "bilinear" else 0.02
    check_close(ours, ImageTransform(64, mode, **options).eval(picture(*shape)), average)


def test_torchvisions_resize_of_random_crops_grey_images_and_noise_is_close_to_pillows():
    for seed, shape in enumerate([(256, 341), (90, 50), (30, 40)]):
        for image in (picture(*shape, seed), picture(*shape, seed).convert("L")):
            views = [
                ImageTransform(64, crop_scale=(0.2, 1.0), flip_probability=0.5, resize_with=name).train(image, seed)
                for name in ("pillow", "torchvision")
            ]
            check_close(*views, average=0.02)
    noise = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    for size in (48, 120, 200):
        check_close(*(ImageTransform(size, resize_with=name).eval(noise) for name in ("pillow", "torchvision")))
    grey = ImageTransform(64, resize_with="torchvision").eval(picture(90, 50).convert("L"))
    assert torch.equal(grey, grey[:1].expand(3, -1, -1))


def check_close(one: torch.Tensor, other: torch.Tensor, average: float = 0.01) -> None:
    difference = (one.int() - other.int()).abs().float()
    assert difference.mean() <= average
    assert difference.max() <= 2


def test_an_array_and_a_pillow_image_of_the_same_pixels_give_the_same():
    for shape in ((32, 32), (40, 60)):
        image = picture(*shape)
        for transform in (
            ImageTransform(32),
            ImageTransform(32, "squeeze"),
            ImageTransform(32, crop_scale=(0.3, 0.9)),
            ImageTransform(32, crop_scale=(0.3, 0.9), resize_with="torchvision"),
        ):
            assert torch.equal(transform.eval(np.asarray(image)), transform.eval(image))
            assert torch.equal(transform.train(np.asarray(image), 5), transform.train(image, 5))


def test_an_array_of_the_right_size_passes_unchanged_as_a_copy():
    array = np.asarray(picture(16, 16)).copy()
    array.flags.writeable = False  # memory maps are like that; torch warns about a view of one
    for mode in ("crop", "squeeze"):
        pixels = ImageTransform(16, mode).train(array, 0)
        assert np.array_equal(pixels.numpy(), array.transpose(2, 0, 1))
        assert not np.shares_memory(pixels.numpy(), array)
        assert pixels.is_contiguous()


@pytest.mark.parametrize("shape", [(1, 65_500), (65_500, 1)])
@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform(224),
        ImageTransform(224, "squeeze"),
        ImageTransform(224, resize_with="torchvision"),
        ImageTransform(224, "squeeze", resize_with="torchvision"),
    ],
)
def test_a_line_of_pixels_takes_little_memory_and_shows_its_centre(shape, transform):
    line = np.zeros((*shape, 3), dtype=np.uint8)
    np.moveaxis(line, np.argmax(shape), 0)[max(shape) // 4 : -max(shape) // 4] = 200  # the middle half
    with at_most(megabytes=200):
        pixels = transform.eval(line)
    assert pixels.shape == (3, 224, 224)
    if transform.mode == "crop":
        assert (pixels == 200).all()


# --- training views --------------------------------------------------------------------------------------------------


def test_a_training_view_is_a_function_of_picture_and_seed_only():
    transform = ImageTransform(24, crop_scale=(0.2, 1.0), flip_probability=0.5)
    image = picture(50, 70)
    views = []
    for seed in range(20):
        np.random.seed(seed % 3)  # noqa: NPY002 - global states must not matter
        torch.manual_seed(seed % 5)
        state = torch.get_rng_state()
        views.append(transform.train(image, seed))
        assert torch.equal(views[-1], transform.train(image, np.random.default_rng(seed)))
        assert torch.equal(views[-1], transform.train(image, np.int64(seed)))
        assert torch.equal(torch.get_rng_state(), state)
    assert len({view.numpy().tobytes() for view in views}) == 20
    rng = np.random.default_rng(0)
    assert not torch.equal(transform.train(image, rng), transform.train(image, rng))  # a generator advances


def test_a_training_view_is_a_resized_crop_of_the_drawn_box():
    image = picture(50, 70)
    for seed in range(10):
        top, left, height, width = random_crop_box(50, 70, (0.2, 0.8), np.random.default_rng(seed))
        crop = image.crop((left, top, left + width, top + height)).resize((24, 24), Image.Resampling.BICUBIC)
        pixels = ImageTransform(24, crop_scale=(0.2, 0.8)).train(image, seed)
        assert np.array_equal(pixels.numpy(), np.asarray(crop).transpose(2, 0, 1))


def test_mirror_images_come_as_often_as_asked():
    image, plain = picture(24, 24), ImageTransform(24).eval(picture(24, 24))
    views = [ImageTransform(24, flip_probability=0.3).train(image, seed) for seed in range(1000)]
    flipped = sum(torch.equal(view, plain.flip(-1)) for view in views)
    assert flipped + sum(torch.equal(view, plain) for view in views) == 1000
    assert 230 <= flipped <= 370  # five standard deviations


@pytest.mark.parametrize(("height", "width", "scale"), [(100, 160, (0.2, 1.0)), (48, 48, (0.9, 1.0))])
def test_crop_boxes_are_distributed_as_torchvisions(height, width, scale):
    torch.manual_seed(0)
    image = Image.new("RGB", (width, height))
    theirs = np.array([tv.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(3000)])
    ours = np.array([random_crop_box(height, width, scale, np.random.default_rng(seed)) for seed in range(3000)])
    for boxes in (ours, theirs):
        assert (boxes >= 0).all()
        assert (boxes[:, :2] + boxes[:, 2:] <= (height, width)).all()
    measures = {
        "top": lambda box: box[:, 0],
        "left": lambda box: box[:, 1],
        "area": lambda box: box[:, 2] * box[:, 3],
        "ratio": lambda box: box[:, 3] / box[:, 2],
    }
    for name, measure in measures.items():
        result = stats.ks_2samp(measure(ours), measure(theirs))
        assert result.pvalue > 1e-4, (name, result)


@pytest.mark.parametrize(
    ("shape", "box"), [((10, 100), (0, 43, 10, 13)), ((100, 10), (43, 0, 13, 10)), ((1, 1), (0, 0, 1, 1))]
)
def test_a_picture_too_narrow_for_any_crop_gives_the_central_one(shape, box):
    for seed in range(5):
        assert random_crop_box(*shape, (1.0, 1.0), np.random.default_rng(seed)) == box
    assert ImageTransform(8, crop_scale=(1.0, 1.0)).train(picture(*shape), 0).shape == (3, 8, 8)


# --- saved values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform(48),
        ImageTransform(64, "squeeze", (0.2, 1.0), 0.5, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        ImageTransform(48, resize_with="torchvision"),
        ImageTransform(32, interpolation="bilinear", resized=40),
        ImageTransform(size=32, crop_scale=[1, 1], mean=[0, 0, 0], std=[1, 1, 1]),  # as JSON and YAML give them
    ],
)
def test_json_gives_an_equal_transform(transform):
    for stored in (transform.to_json(), json.loads(transform.to_json())):
        assert ImageTransform.from_json(stored) == transform


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ImageTransform(size=0), "size\n  Input should be greater than or equal to 1"),
        (lambda: ImageTransform(4.5), "valid integer, got a number with a fractional part"),
        (lambda: ImageTransform(8, sizes=3), "sizes\n  Unexpected keyword argument"),
        (lambda: ImageTransform(8, mode="stretch"), "mode\n  Input should be 'squeeze' or 'crop'"),
        (lambda: ImageTransform(8, resized=4), "resized is 4; expected: at least size, 8"),
        (lambda: ImageTransform(8, crop_scale=(0.0, 1.0)), "crop_scale.0\n  Input should be greater than 0"),
        (lambda: ImageTransform(8, crop_scale=(0.9, 0.5)), "crop_scale is (0.9, 0.5); expected: (low, high) with"),
        (lambda: ImageTransform(8, crop_scale=(0.5, 1.1)), "crop_scale.1\n  Input should be less than or equal to 1"),
        (lambda: ImageTransform(8, crop_scale=0.5), "crop_scale\n  Input should be a valid tuple"),
        (lambda: ImageTransform(8, flip_probability=2), "flip_probability\n  Input should be less than or equal to 1"),
        (lambda: ImageTransform(8, mean=(1.0, 2.0, 0.0)), "mean.1\n  Input should be less than or equal to 1"),
        (lambda: ImageTransform(8, std=(1.0, 0.0, 1.0)), "std.1\n  Input should be greater than 0"),
        (lambda: ImageTransform(8, std=(1.0, float("nan"), 1.0)), "std.1\n  Input should be a finite number"),
        (lambda: ImageTransform(8, resize_with="pil"), "resize_with\n  Input should be 'pillow' or 'torchvision'"),
        (lambda: ImageTransform(8).eval(np.zeros((8, 8), np.uint8)), "uint8 of shape (8, 8)"),
        (lambda: ImageTransform(8).eval(np.zeros((3, 8, 8), np.uint8)), "shape (3, 8, 8)"),
        (lambda: ImageTransform(8).eval(np.zeros((8, 8, 3), np.float32)), "float32"),
        (lambda: ImageTransform(8).eval(np.zeros((0, 8, 3), np.uint8)), "shape (0, 8, 3)"),
        (lambda: ImageTransform(8).eval(torch.zeros(8, 8, 3)), "type Tensor"),
        (lambda: normalize(torch.zeros(1, 3, 2, 2)), "torch.float32 of shape (1, 3, 2, 2)"),
        (lambda: normalize(torch.zeros(3, 2, 2, dtype=torch.uint8)), "shape (3, 2, 2)"),
        (lambda: ImageTransform.from_json("no"), "not valid JSON"),
        (lambda: ImageTransform.from_json("{}"), "has the keys crop_scale"),
        (lambda: ImageTransform.from_json('{"size": 8, "resize": 1}'), "found ['resize', 'size']"),
    ],
)
def test_bad_values_are_refused_with_the_value_and_what_is_accepted(call, words):
    refused((re.escape(words), call))
