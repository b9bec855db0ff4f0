"""The geometries of EuCLIP: values of the authors' functions, laws, accuracy, finite gradients everywhere."""

import math

import pytest
import torch
from refusals import refused

from common.geometry import Sphere, unit
from common.info_nce import symmetric_info_nce
from euclip.geometry import Elliptic, Euclidean, Hyperbolic

# Values of the authors' functions in float64; embeddings are scaled already.
TEXTS = [[0.6, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.2, -0.1, 0.4, 0.8]]
IMAGES = [[1.2, 0.3, 0.0, 0.0], [0.0, 1.0, 0.8, -0.2], [0.1, 0.1, 0.9, 1.5]]
SIMILARITIES = """
sphere                  0.9701425001  0.1714985851  0.1841467746
                        0.0000000000  0.9819805061  0.0502096445
                        0.0569802882  0.4029114820  0.9703196610
elliptic               -0.2449786631 -1.3984457369 -1.3855926056
                       -1.5707963268 -0.1901256033 -1.5205655618
                       -1.5137851599 -1.1561005829 -0.2442471400
euclidean              -0.6708203932 -1.3152946438 -1.4000000000
                       -1.4282856857 -0.6164414003 -1.5524174696
                       -1.8220867158 -1.6062378404 -0.8888194417
euclidean_squared      -0.4500000000 -1.7300000000 -1.9600000000
                       -2.0400000000 -0.3800000000 -2.4100000000
                       -3.3200000000 -2.5800000000 -0.7900000000
hyperbolic@1           -0.6793571093 -1.3978008510 -1.5274993614
                       -1.4888017202 -0.6252852422 -1.6777907856
                       -1.9033615497 -1.7218251240 -0.9216242696
hyperbolic@0.1         -0.6716302121 -1.3245804627 -1.4147244156
                       -1.4352310183 -0.6172596714 -1.5674039160
                       -1.8319575512 -1.6194274821 -0.8917307220
hyperbolic@2.5         -0.6940072777 -1.4864575351 -1.6537024700
                       -1.5518871389 -0.6414441101 -1.7931395081
                       -1.9792261170 -1.8422046165 -0.9859360103
hyperbolic_squared@1   -0.4615260819 -1.9538472190 -2.3332542989
                       -2.2165305619 -0.3909816341 -2.8149819204
                       -3.6227851889 -2.9646817576 -0.8493912944
hyperbolic_squared@0.1 -0.4510871418 -1.7545134022 -2.0014451720
                       -2.0598880759 -0.3810095019 -2.4567550358
                       -3.3560684695 -2.6225453699 -0.7951836806
"""
WORDS = SIMILARITIES.split()
SIMILARITIES = {WORDS[k]: [float(word) for word in WORDS[k + 1 : k + 10]] for k in range(0, len(WORDS), 10)}


def build(name, dim=4, dtype=torch.float32):
    """A geometry from its name, for the hyperbolic ones with @ and a curvature."""
    kind, *curvature = name.split("@")
    geometry = {
        "sphere": Sphere,
        "elliptic": Elliptic,
        "euclidean": lambda: Euclidean(squared=False),
        "euclidean_squared": lambda: Euclidean(squared=True),
        "hyperbolic": lambda: Hyperbolic(dim, squared=False),
        "hyperbolic_squared": lambda: Hyperbolic(dim, squared=True),
    }[kind]().to(dtype)
    if curvature:
        with torch.no_grad():
            geometry.log_curvature.fill_(math.log(float(curvature[0])))  # to all digits of the dtype
    return geometry


def golden(dtype=torch.float64, name=""):
    """Images and texts of the golden values, normalised for the geometries on the sphere."""
    images, texts = torch.tensor(IMAGES, dtype=dtype), torch.tensor(TEXTS, dtype=dtype)
    return (unit(images), unit(texts)) if name in ("sphere", "elliptic") else (images, texts)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarities_equal_those_of_the_authors(name, dtype, atol):
    geometry, (images, texts) = build(name, dtype=dtype), golden(dtype, name)
    expected = torch.tensor(SIMILARITIES[name], dtype=dtype).reshape(3, 3)
    torch.testing.assert_close(geometry.similarity(images, texts), expected, rtol=0, atol=atol)
    paired = geometry.paired_similarity(images, texts)
    torch.testing.assert_close(paired, expected.diagonal(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "logit_scale", "entailment_weight", "min_radius", "contrastive", "entailment"),
    [
        ("sphere", 1 / 0.07, 0, 0, 0.0001023100, 0),
        ("elliptic", 1 / 0.07, 0, 0, 5.898e-07, 0),
        ("euclidean", 1 / 0.07, 0, 0, 0.0001658069, 0),
        ("euclidean_squared", 1.0, 0, 0, 0.3102260916, 0),
        ("euclidean_squared", math.exp(-1), 0.1, 0.3, 0.7150818897, 0.0055455339),
        ("hyperbolic@1", 1 / 0.07, 0.2, 0.1, 4.61706e-05, 0.0647931368),
        ("hyperbolic@0.1", 1 / 0.07, 0.2, 0.1, 0.0001413749, 0),
        ("hyperbolic_squared@1", math.exp(-1), 0.2, 0.3, 0.6641556761, 0.0062272761),
    ],
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_losses_equal_those_of_the_authors(
    name, logit_scale, entailment_weight, min_radius, contrastive, entailment, dtype, atol
):
    geometry, (images, texts) = build(name, dtype=dtype), golden(dtype, name)
    loss = symmetric_info_nce(logit_scale * geometry.similarity(images, texts))
    assert loss.item() == pytest.approx(contrastive, abs=atol)
    if entailment_weight:
        loss = (
            entailment_weight * geometry.entailment_residual(images=images, texts=texts, min_radius=min_radius).mean()
        )
        assert loss.item() == pytest.approx(entailment, abs=atol)


def gradients_of_the_total_loss(name, log_logit_scale, entailment_weight, min_radius, dtype):
    geometry, (images, texts) = build(name, dtype=dtype), golden(dtype)
    images.requires_grad_()
    texts.requires_grad_()
    log_logit_scale = torch.tensor(log_logit_scale, dtype=dtype, requires_grad=True)
    loss = symmetric_info_nce(log_logit_scale.exp() * geometry.similarity(images, texts))
    loss = (
        loss
        + entailment_weight * geometry.entailment_residual(images=images, texts=texts, min_radius=min_radius).mean()
    )
    loss.backward()
    return geometry, images.grad, texts.grad, log_logit_scale.grad


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_gradients_of_the_total_losses_equal_those_of_the_authors(dtype, atol):
    _, images, texts, scale = gradients_of_the_total_loss("euclidean_squared", -1.0, 0.1, 0.3, dtype)
    assert scale.item() == pytest.approx(-0.3252759295, abs=atol)
    assert texts[2].tolist() == pytest.approx([0.1193225720, 0.0180194544, -0.0792697984, -0.1791835181], abs=atol)
    assert images[2].tolist() == pytest.approx([-0.0194798418, 0.0682724719, 0.0006223204, -0.0872111312], abs=atol)

    geometry, _, texts, scale = gradients_of_the_total_loss("hyperbolic@1", -math.log(0.07), 0.2, 0.1, dtype)
    assert scale.item() == pytest.approx(-0.0004393540, abs=atol)
    assert geometry.log_curvature.grad.item() == pytest.approx(0.0566807280, abs=atol)
    assert texts[0].tolist() == pytest.approx([0.0998314449, -0.2338343120, 0.0000183501, -0.0000028106], abs=atol)

    geometry, _, _, scale = gradients_of_the_total_loss("hyperbolic_squared@1", -1.0, 0.2, 0.3, dtype)
    assert scale.item() == pytest.approx(-0.3576104621, abs=atol)
    assert geometry.log_curvature.grad.item() == pytest.approx(0.0012885577, abs=atol)


def test_squared_euclidean_distance_is_a_linear_classifier():
    """-|x - y|^2 = x.(2y) - |y|^2 - |x|^2, and what is constant in a row leaves its cross-entropy unchanged."""
    images, texts = torch.randn(6, 8).double(), torch.randn(6, 8).double()
    logits = Euclidean(squared=True).similarity(images, texts)
    linear = 2 * images @ texts.T - texts.square().sum(dim=1)
    torch.testing.assert_close(logits.log_softmax(dim=1), linear.log_softmax(dim=1))


# the scales


def test_hyperbolic_features_are_scaled_by_1_over_root_dim_at_the_start():
    geometry = Hyperbolic(512, squared=True)
    assert geometry.log_image_scale.item() == pytest.approx(-3.11916, abs=1e-5)
    features = torch.randn(3, 512)
    torch.testing.assert_close(geometry.embed_image(features), features / 512**0.5)
    torch.testing.assert_close(geometry.embed_text(features), Euclidean(squared=True).embed_text(features))


def test_a_curvature_outside_its_bounds_features_of_another_width_and_a_negative_radius_are_refused():
    geometry, points = Hyperbolic(16, squared=False), torch.ones(2, 16)
    bounds, width = "0 < minimum <= init <= maximum", r"features \(2, 32\) for dim = 16"
    negative = {"images": points, "texts": points, "min_radius": -1.0}
    refused(
        (bounds, lambda: Hyperbolic(4, False, 0.01, 0.1, 10.0)),
        (bounds, lambda: Hyperbolic(4, False, 20.0, 0.1, 10.0)),
        (bounds, lambda: Hyperbolic(4, False, 1.0, 0.0, 10.0)),
        (width, lambda: geometry.embed_image(torch.zeros(2, 32))),
        (width, lambda: geometry.embed_text(torch.zeros(2, 32))),
        ("dim = 0", lambda: Hyperbolic(0, squared=False)),
        (r"min_radius = -1\.0; expected: at least 0", lambda: geometry.entailment_residual(**negative)),
        (r"min_radius = -1\.0; expected: at least 0", lambda: Euclidean(True).entailment_residual(**negative)),
    )
