"""Laws of the geometries in common/geometry.py."""

import pytest
import torch
from scipy.spatial.distance import cdist

from common.geometry import Geometry, Sphere, inner_product_similarity, unit


def test_sphere_is_a_geometry():
    assert isinstance(Sphere(), Geometry)


def test_sphere_similarity_equals_scipy_cosine():
    images, texts = torch.randn(7, 16, dtype=torch.float64), torch.randn(9, 16, dtype=torch.float64)
    sphere = Sphere()
    ours = sphere.similarity(sphere.embed_image(images), sphere.embed_text(texts))
    expected = 1 - cdist(images.numpy(), texts.numpy(), "cosine")
    torch.testing.assert_close(ours, torch.from_numpy(expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_sphere_forgets_the_norm(scale):
    features = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(unit(scale * features), unit(features), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(unit(features).norm(dim=1), torch.ones(5, dtype=torch.float64))


def test_zero_features_stay_zero_with_finite_gradient():
    features = torch.zeros(2, 4, requires_grad=True)
    unit(features).sum().backward()
    assert torch.isfinite(features.grad).all()
    assert (unit(features) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_similarity_is_at_least_float32_and_keeps_float64(dtype):
    features = torch.randn(3, 4).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert unit(features).dtype == expected
    assert inner_product_similarity(features, features).dtype == expected


def test_autocast_does_not_reach_the_similarity():
    images, texts = unit(torch.randn(6, 32)), unit(torch.randn(5, 32))
    expected = inner_product_similarity(images, texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = inner_product_similarity(images, texts)
    assert torch.equal(under_autocast, expected)


def test_shapes_that_do_not_fit_are_both_named():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        inner_product_similarity(torch.zeros(2, 3), torch.zeros(2, 4))


def test_mean_of_prompts_is_the_normalised_mean():
    prompts = unit(torch.randn(4, 3, 8, dtype=torch.float64))
    mean = Sphere().mean(prompts)
    for kind in range(3):
        total = sum(prompts[template, kind] for template in range(4))
        torch.testing.assert_close(mean[kind], total / total.norm())


def test_gradient_of_the_similarity_is_right():
    images = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    texts = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    sphere = Sphere()
    assert torch.autograd.gradcheck(
        lambda x, y: sphere.similarity(sphere.embed_image(x), sphere.embed_text(y)), (images, texts)
    )
