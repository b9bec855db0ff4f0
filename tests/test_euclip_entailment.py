"""Entailment cones: values of the authors' functions, hand-made cones, laws, finite gradients."""

import math
from functools import partial

import mpmath
import pytest
import torch
from euclip_formulas import excess, exterior_angle
from hard_pairs import Dtypes, hard_pairs
from refusals import refused

from common.geometry import unit
from euclip.entailment import (
    euclidean_entailment_residual,
    euclidean_exterior_angle,
    euclidean_half_aperture,
    lorentz_entailment_residual,
    lorentz_exterior_angle,
    lorentz_half_aperture,
)

# Values of the authors' functions in float64.
TEXTS = [[0.6, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.2, -0.1, 0.4, 0.8]]
IMAGES = [[1.2, 0.3, 0.0, 0.0], [0.0, 1.0, 0.8, -0.2], [0.1, 0.1, 0.9, 1.5]]
PRECISIONS = pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])


def golden(dtype):
    return torch.tensor(TEXTS, dtype=dtype), torch.tensor(IMAGES, dtype=dtype)


def scalar(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def vectors(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@PRECISIONS
def test_euclidean_cones_equal_those_of_the_authors(dtype, atol):
    texts, images = golden(dtype)
    exterior = euclidean_exterior_angle(images=images, texts=texts)
    assert exterior.dtype == dtype
    assert exterior.tolist() == pytest.approx([0.4636476090, 0.4086378551, 0.4977961740], abs=atol)
    for min_radius, apertures in (
        (0.1, [0.1674480792, 0.1418970546, 0.1086790397]),
        (0.3, [0.5235987756, 0.4381490306, 0.3314301582]),
        (0.8, [1.5707963268, 1.5707963268, 1.0506004410]),
    ):
        assert euclidean_half_aperture(texts, min_radius).tolist() == pytest.approx(apertures, abs=atol)
    for first, second, min_radius, residuals in (
        (texts, images, 0.1, [0.2961995298, 0.2667408005, 0.3891171343]),
        (texts, images, 0.3, [0, 0, 0.1663660158]),
        (images, texts, 0.3, [2.6779450446, 2.6895073463, 2.7162591096]),  # swapped: the apex is the text's
    ):
        assert euclidean_entailment_residual(
            images=second, texts=first, min_radius=min_radius
        ).tolist() == pytest.approx(residuals, abs=atol)


@PRECISIONS
@pytest.mark.parametrize(
    ("c", "exterior", "min_radius", "residual"),
    [
        (1.0, [0.5492438666, 0.4997164049, 0.6962500372], 0.1, [0.2296904865, 0.2360950900, 0.5061114754]),
        (1.0, [0.5492438666, 0.4997164049, 0.6962500372], 0.3, [0, 0, 0.0934091414]),
        (0.1, [0.4720641124, 0.4174801835, 0.5168755994], 0.1, [0, 0, 0]),
        (2.5, None, 0.1, [0.4997321876, 0.4997201800, 0.9179279983]),
    ],
)
def test_hyperbolic_cones_equal_those_of_the_authors(c, exterior, min_radius, residual, dtype, atol):
    texts, images = golden(dtype)
    if exterior:
        assert lorentz_exterior_angle(images=images, texts=texts, curvature=scalar(c, dtype)).tolist() == pytest.approx(
            exterior, abs=atol
        )
    actual = lorentz_entailment_residual(images=images, texts=texts, min_radius=min_radius, curvature=scalar(c, dtype))
    assert actual.dtype == dtype
    assert actual.tolist() == pytest.approx(residual, abs=atol)


# the formulas as the paper prints them


@pytest.mark.parametrize("min_radius", [0.0, 0.3])  # 0 closes the cone
def test_euclidean_residual_equals_loops_from_the_paper(min_radius):
    texts, images = vectors(40, 5), vectors(40, 5)
    residuals = euclidean_entailment_residual(images=images, texts=texts, min_radius=min_radius)
    for text, image, residual in zip(texts.tolist(), images.tolist(), residuals.tolist()):
        assert residual == pytest.approx(max(0.0, excess("euclidean", text, image, min_radius)), abs=1e-12)


@pytest.mark.parametrize("min_radius", [0.0, 0.3])
@pytest.mark.parametrize("c", [0.1, 1.0, 10.0])
def test_lorentz_residual_equals_loops_from_the_paper(c, min_radius):
    texts, images = vectors(40, 5) / 2, vectors(40, 5) / 2
    exteriors = lorentz_exterior_angle(images=images, texts=texts, curvature=scalar(c))
    residuals = lorentz_entailment_residual(images=images, texts=texts, min_radius=min_radius, curvature=scalar(c))
    for k, (text, image) in enumerate(zip(texts.tolist(), images.tolist())):
        assert exteriors[k].item() == pytest.approx(exterior_angle("hyperbolic", text, image, c), abs=1e-8)
        expected = max(0.0, excess("hyperbolic", text, image, min_radius, c))
        assert residuals[k].item() == pytest.approx(expected, abs=1e-8)


def test_hyperbolic_cone_tends_to_the_euclidean_one_of_radius_2k_over_root_c():
    """Deviations on the parity data: 2.4e-2, 2.4e-3, 2.4e-5, 2.4e-7, linear in c."""
    texts, images = golden(torch.float64)
    euclidean = euclidean_entailment_residual(images=images, texts=texts, min_radius=0.3)
    for c in (1e-1, 1e-2, 1e-4, 1e-6):
        hyperbolic = lorentz_entailment_residual(
            images=images, texts=texts, min_radius=0.3 * c**0.5 / 2, curvature=scalar(c)
        )
        assert (hyperbolic - euclidean).abs().max().item() == pytest.approx(0.24 * c, rel=0.05)


# laws


def test_entailment_is_transitive_outside_min_radius():
    """An image in the cone of a text has its own cone inside that cone (Ganea et al. 2018)."""
    texts = 0.5 * unit(vectors(4_000, 2)) * (1 + vectors(4_000, 1).abs())
    middles = 2 * texts + 0.5 * vectors(4_000, 2)
    ends = 2 * middles + vectors(4_000, 2)
    first = euclidean_entailment_residual(images=middles, texts=texts, min_radius=0.3) == 0
    second = euclidean_entailment_residual(images=ends, texts=middles, min_radius=0.3) == 0
    both = first & second & (middles.norm(dim=1) > 0.3)
    assert 200 < both.sum() < 3_500
    assert (euclidean_entailment_residual(images=ends, texts=texts, min_radius=0.3)[both] < 1e-9).all()


@pytest.mark.parametrize("c", [0.1, 1.0, 10.0])
def test_points_on_the_ray_are_at_0_behind_the_text_and_at_pi_before_it(c):
    texts = unit(torch.randn(20, 8))
    for exterior in (euclidean_exterior_angle, partial(lorentz_exterior_angle, curvature=torch.tensor(c))):
        assert exterior(images=1.5 * texts, texts=texts).abs().max() < 1e-4
        for before in (0.5, 0.0, -1.0):
            torch.testing.assert_close(
                exterior(images=before * texts, texts=texts), torch.full((20,), math.pi), rtol=0, atol=1e-4
            )


@pytest.mark.parametrize("c", [0.1, 1.0, 10.0])
def test_a_pair_that_coincides_and_a_text_at_the_origin_entail_without_gradient(c):
    texts = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    images = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    curvature = torch.tensor(c, requires_grad=True)
    for residual in (
        euclidean_entailment_residual(images=images, texts=texts, min_radius=0.1),
        lorentz_entailment_residual(images=images, texts=texts, min_radius=0.1, curvature=curvature),
    ):
        assert residual.tolist() == [0, 0, 0]
        residual.sum().backward()
        assert (texts.grad == 0).all()
        assert (images.grad == 0).all()


def test_leading_axes_broadcast_to_all_pairs():
    texts, points = vectors(5, 3), vectors(4, 3)
    for residual in (
        partial(euclidean_entailment_residual, min_radius=0.3),
        partial(lorentz_entailment_residual, min_radius=0.3, curvature=scalar(0.7)),
    ):
        matrix = residual(images=points, texts=texts[:, None])
        assert matrix.shape == (5, 4)
        for k in range(5):
            torch.testing.assert_close(
                matrix[k], residual(images=points, texts=texts[k].expand(4, 3)), rtol=1e-12, atol=1e-12
            )


def test_axes_that_do_not_fit_are_both_named():
    given = {"images": torch.zeros(2, 4), "texts": torch.zeros(2, 3)}
    refused(
        (r"images \(2, 4\) and texts \(2, 3\)", partial(euclidean_exterior_angle, **given)),
        (r"images \(2, 4\) and texts \(2, 3\)", partial(lorentz_exterior_angle, **given, curvature=torch.tensor(1.0))),
    )


# gradients and precision


@pytest.mark.parametrize("ratio", [1e-4, 1e3, 1e9])
def test_exterior_angle_keeps_its_digits_in_float32_whatever_the_norms(ratio):
    """Against mpmath. A difference of norms alone, or an area from u + v, loses 2.2e-5 rad at a ratio of 1,000."""
    longer, shorter = torch.randn(40, 64) / 8, torch.randn(40, 64) / 8 / max(ratio, 1 / ratio)
    images, texts = (longer, shorter) if ratio > 1 else (shorter, longer)
    with mpmath.workdps(50):
        sides = [[(x, mpmath.norm(x)) for x in map(mpmath.matrix, side.double().tolist())] for side in (texts, images)]

        def exact(root_c):
            for (x, r), (y, s) in zip(*sides):
                cosine, r, s = (x.T * y)[0] / (r * s), root_c * r, root_c * s
                opposite = mpmath.sinh(s) * mpmath.sqrt(1 - cosine**2)
                yield float(
                    mpmath.atan2(opposite, mpmath.sinh(s) * mpmath.cosh(r) * cosine - mpmath.cosh(s) * mpmath.sinh(r))
                )

        flat, curved = (torch.tensor(list(exact(mpmath.mpf(root_c)))) for root_c in (1e-12, 1))
    assert (euclidean_exterior_angle(images=images, texts=texts) - flat).abs().max() < 4e-7
    assert (lorentz_exterior_angle(images=images, texts=texts, curvature=torch.tensor(1.0)) - curved).abs().max() < 1e-6


def test_one_guard_on_the_hypotenuse_and_none_on_the_text_s_norm():
    apex, across = torch.tensor([0.5, 0.0]), torch.tensor([1.0, 1.0]) / 2**0.5
    for angle in (euclidean_exterior_angle, partial(lorentz_exterior_angle, curvature=torch.tensor(1e-3))):
        # legs below the guard, a hypotenuse above it; just within it
        assert angle(images=apex + 1.2e-4 * across, texts=apex).item() == pytest.approx(math.pi / 4, abs=2e-3)
        assert angle(images=apex + 0.9e-4 * across, texts=apex).item() == 0
        # a text near the origin has a direction like any other
        image = torch.tensor([math.cos(1.683), math.sin(1.683)])
        assert angle(images=image, texts=torch.tensor([1e-9, 0.0])).item() == pytest.approx(1.683, abs=1e-6)
    residual = euclidean_entailment_residual(images=image, texts=torch.tensor([1e-9, 0.0]), min_radius=0.3)
    assert residual.item() == pytest.approx(1.683 - math.pi / 2, abs=1e-6)


def test_gradients_are_right():
    texts, images, c = vectors(6, 3).requires_grad_(), vectors(6, 3).requires_grad_(), scalar(0.7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: euclidean_exterior_angle(images=y, texts=x), (texts, images))
    assert torch.autograd.gradcheck(
        lambda x, y, k: lorentz_exterior_angle(images=y, texts=x, curvature=k), (texts, images, c)
    )
    assert torch.autograd.gradcheck(lambda x: euclidean_half_aperture(x, 0.3), (texts,))
    assert torch.autograd.gradcheck(lambda x, k: lorentz_half_aperture(x, 0.1, k), (texts, c))
    assert torch.autograd.gradcheck(
        lambda x, y, k: lorentz_entailment_residual(images=y, texts=x, min_radius=0.1, curvature=k), (texts, images, c)
    )


def test_the_slope_of_the_aperture_is_bounded_at_min_radius():
    lengths = 0.3 * (1 + torch.tensor([-1e-3, -1e-7, 0.0, 1e-7, 2e-7, 1e-6, 2e-6, 1e-5, 1e-3]))
    texts = lengths[:, None] * torch.tensor([1.0, 0.0])
    texts.requires_grad_()
    apertures = euclidean_half_aperture(texts, 0.3)
    apertures.sum().backward()
    assert texts.grad.abs().max() < 710 / 0.3
    assert apertures[:3].tolist() == pytest.approx([math.pi / 2] * 3)
    assert texts.grad[-1, 0] < -10


def test_the_slope_of_the_exterior_angle_is_bounded_near_coincidence():
    texts = unit(torch.randn(2_000, 16))
    step = 10 ** torch.empty(2_000, 1).uniform_(-7, 0) * unit(torch.randn(2_000, 16))
    for c in (None, 0.1, 1.0):
        x, y = texts.clone().requires_grad_(), (texts + step).requires_grad_()
        exterior = (
            euclidean_exterior_angle(images=y, texts=x)
            if c is None
            else lorentz_exterior_angle(images=y, texts=x, curvature=torch.tensor(c))
        )
        exterior.sum().backward()
        assert max(x.grad.norm(dim=1).max(), y.grad.norm(dim=1).max()) < 2.5e4
        assert (exterior[step.norm(dim=1) < 5e-5] == 0).all()


@pytest.mark.parametrize("distance", [1e-3, 0.1])
@pytest.mark.parametrize("c", [0.1, 1.0])
def test_exterior_angle_keeps_its_digits_in_float32(c, distance):
    texts = torch.randn(200, 512) / 512**0.5
    images = texts + distance * unit(torch.randn(200, 512))
    for ours, exact in (
        (
            euclidean_exterior_angle(images=images, texts=texts),
            euclidean_exterior_angle(images=images.double(), texts=texts.double()),
        ),
        (
            lorentz_exterior_angle(images=images, texts=texts, curvature=torch.tensor(c)),
            lorentz_exterior_angle(images=images.double(), texts=texts.double(), curvature=torch.tensor(c).double()),
        ),
    ):
        assert (ours - exact).abs().max() < 2e-6


@pytest.mark.parametrize("rounds", [1, pytest.param(100, marks=pytest.mark.slow)])  # of 10,000 pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residuals_and_gradients_are_finite_at_hard_pairs(dtype, rounds):
    for curvature in [None, 0.1, 1.0, 10.0] * rounds:
        texts, images = (side.requires_grad_() for side in hard_pairs(10_000, 64, dtype))
        if curvature is None:
            residual = euclidean_entailment_residual(images=images, texts=texts, min_radius=0.3)
        else:
            curvature = torch.tensor(curvature, requires_grad=True)
            residual = lorentz_entailment_residual(images=images, texts=texts, min_radius=0.3, curvature=curvature)
            residual.mean().backward(retain_graph=True)
            assert torch.isfinite(curvature.grad)
        assert residual.dtype == torch.float32
        assert torch.isfinite(residual).all()
        assert ((residual >= 0) & (residual <= math.pi + 1e-6)).all()
        residual.sum().backward()
        assert torch.isfinite(texts.grad).all()
        assert torch.isfinite(images.grad).all()


def test_everything_runs_in_float32_under_autocast():
    texts, images, c = torch.randn(9, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.tensor(0.7)
    with Dtypes() as dtypes:
        expected = lorentz_entailment_residual(
            images=images, texts=texts, min_radius=0.3, curvature=c
        ) + euclidean_entailment_residual(images=images, texts=texts, min_radius=0.3)
        expected.sum().backward()
    assert dtypes.seen <= {torch.float32, torch.bool}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = lorentz_entailment_residual(
            images=images, texts=texts, min_radius=0.3, curvature=c
        ) + euclidean_entailment_residual(images=images, texts=texts, min_radius=0.3)
    assert torch.equal(actual, expected)
