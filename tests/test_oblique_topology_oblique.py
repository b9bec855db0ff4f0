"""Products of spheres: golden vectors, laws, accuracy, finite gradients everywhere."""

import math

import pytest
import torch
from refusals import refused

from common.geometry import Sphere, euclidean_distance, unit
from common.info_nce import contrastive_loss, symmetric_info_nce
from common.oblique import Oblique, oblique_similarity, paired_oblique_similarity, to_spheres
from common.tiled import tiled_contrastive_loss
from oblique_topology.geometry import L2, ObliqueGeodesic
from oblique_topology.oblique import oblique_geodesic_distance, paired_oblique_geodesic_distance

# golden vectors, by hand
U = torch.tensor([[1.0, 2, 2, 0, 0, 3, 0, 4]], dtype=torch.float64)
V = torch.tensor([[2.0, 1, 2, 0, 4, 0, 3, 0]], dtype=torch.float64)


def build(name, sphere_dim=4):
    return {
        "oblique": lambda: Oblique(sphere_dim),
        "oblique_geodesic": lambda: ObliqueGeodesic(sphere_dim),
        "euclidean": L2,
    }[name]()


NAMES = ["oblique", "oblique_geodesic", "euclidean"]


def on_spheres(num, num_spheres, sphere_dim, dtype=torch.float64):
    return to_spheres(torch.randn(num, num_spheres * sphere_dim, dtype=dtype), sphere_dim)


def test_golden_vectors():
    u, v = to_spheres(U, 4), to_spheres(V, 4)
    for similarity in (oblique_similarity, paired_oblique_similarity):
        assert similarity(u, v).item() == pytest.approx(0.8888889, abs=1e-7)
    for distance in (oblique_geodesic_distance, paired_oblique_geodesic_distance):
        assert distance(u, v).item() == pytest.approx(1.6412998, abs=1e-7)
    sphere = Sphere()
    assert sphere.similarity(sphere.embed_image(U), sphere.embed_text(V)).item() == pytest.approx(0.2352941, abs=1e-7)
    assert euclidean_distance(U, V).item() == pytest.approx(7.2111026, abs=1e-7)


def test_golden_loss_and_its_gradient():
    spheres = to_spheres(torch.cat([U, V]), 4)
    similarity = oblique_similarity(spheres, spheres.flip(0))
    torch.testing.assert_close(similarity, torch.tensor([[8 / 9, 2], [2, 8 / 9]], dtype=torch.float64))
    for log_logit_scale, expected in ((0.0, 1.3956831), (-math.log(0.07), 15.8730160)):
        log_logit_scale = torch.tensor(log_logit_scale, dtype=torch.float64, requires_grad=True)
        loss = symmetric_info_nce(log_logit_scale.exp() * similarity)
        assert loss.item() == pytest.approx(expected, abs=1e-7)
        if log_logit_scale == 0:
            loss.backward()
            assert log_logit_scale.grad.item() == pytest.approx(0.8359291, abs=1e-7)


# the manifold


def test_a_class_token_gives_a_sphere():
    tokens = torch.randn(3, 5, 4)
    for geometry in (build("oblique"), build("oblique_geodesic")):
        torch.testing.assert_close(geometry.embed_image(tokens), unit(tokens))
        assert torch.equal(geometry.embed_text(tokens), geometry.embed_text(tokens.flatten(1)))


def test_similarity_is_the_chordal_distance_turned_round():
    """|U - V|^2 = 2m - 2 tr(U^T V), and m times the cosine of the flattened points."""
    images, texts = on_spheres(7, 8, 4), on_spheres(7, 8, 4)
    ours = paired_oblique_similarity(images, texts)
    torch.testing.assert_close((images - texts).square().sum(dim=(1, 2)), 16 - 2 * ours)
    torch.testing.assert_close(ours, 8 * torch.cosine_similarity(images.flatten(1), texts.flatten(1)))


def test_inner_product_obeys_only_the_relaxed_triangle_inequality():
    """Per sphere, with x.z = p and z.y = q: x.y >= p q - sqrt((1 - p^2)(1 - q^2)), and summed over spheres."""
    x, y, z = (on_spheres(3_000, 4, 3) for _ in range(3))
    p, q = (x * z).sum(dim=-1), (z * y).sum(dim=-1)
    slack = ((1 - p**2).clamp(min=0) * (1 - q**2).clamp(min=0)).sqrt()
    similarity = paired_oblique_similarity(x, y)
    assert (similarity >= (p * q - slack).sum(dim=1) - 1e-9).all()
    assert (similarity <= (p * q + slack).sum(dim=1) + 1e-9).all()
    distances = [4 - paired_oblique_similarity(*pair) for pair in ((x, y), (x, z), (z, y))]
    assert (distances[0] > distances[1] + distances[2]).any()  # as a distance it breaks the ordinary one


def test_random_directions_have_the_statistics_of_the_paper():
    """Sphere: 0 +- 1 / sqrt(d); tr: 0 +- m / sqrt(d); Geo: (pi / 2) sqrt(m) +- 1 / sqrt(n); l2, variance 1: 32 +- 1."""
    features, others = torch.randn(1_000, 512), torch.randn(1_000, 512)

    def scores(geometry):
        return geometry.similarity(geometry.embed_image(features), geometry.embed_text(others))

    for values, mean, within, std in (
        (scores(Sphere()), 0, 0.0025, 0.044),
        (scores(build("oblique", 64)), 0, 0.02, 0.354),
        (-scores(build("oblique_geodesic", 64)), 4.44, 0.05 * 4.44, 0.126),
        (-scores(L2()), 32.0, 0.05 * 32, 1.0),
    ):
        assert values.mean().item() == pytest.approx(mean, abs=within)
        assert values.std().item() == pytest.approx(std, rel=0.05)


def test_what_cannot_be_cut_or_compared_is_refused_with_its_shapes():
    shapes = r"\(2, 4, 8\).*\(2, 8, 4\)", (torch.zeros(2, 4, 8), torch.zeros(2, 8, 4))
    geometry, features = Oblique(8), torch.randn(4, 32)
    no_points = r"on spheres of 8 numbers; expected: those of embed_image"
    refused(
        ("10 features cannot be cut into spheres of 4", lambda: to_spheres(torch.zeros(2, 10), 4)),
        (shapes[0], lambda: oblique_similarity(*shapes[1])),
        (shapes[0], lambda: paired_oblique_similarity(*shapes[1])),
        (shapes[0], lambda: oblique_geodesic_distance(*shapes[1])),
        (shapes[0], lambda: paired_oblique_geodesic_distance(*shapes[1])),
        (no_points, lambda: contrastive_loss(features, features, geometry, 10.0)),
        (no_points, lambda: contrastive_loss(*[features.view(4, 2, 16)] * 2, geometry, 10.0)),
        ("on spheres of 8 numbers", lambda: tiled_contrastive_loss(features, features, geometry, 10.0)),
        ("on spheres of 8 numbers", lambda: tiled_contrastive_loss(*[features.view(4, 2, 16)] * 2, geometry, 10.0)),
        ("sphere_dim = 0", lambda: Oblique(0)),
    )


# what the range of a similarity allows the loss to reach


@pytest.mark.slow  # 400 full-batch steps for each of four geometries
def test_free_embeddings_reach_a_floor_that_the_range_of_the_similarity_sets():
    """256 free pairs at temperature 1: the order of the paper's last block of Table 3, without any data (P15)."""
    floors = {}
    for name, geometry in {"sphere": Sphere(), **{name: build(name, 8) for name in NAMES}}.items():
        torch.manual_seed(0)
        images, texts = (torch.randn(256, 64, requires_grad=True) for _ in range(2))
        optimiser = torch.optim.Adam([images, texts], lr=0.05)
        for _ in range(400):
            optimiser.zero_grad()
            loss = symmetric_info_nce(geometry.similarity(geometry.embed_image(images), geometry.embed_text(texts)))
            loss.backward()
            optimiser.step()
        floors[name] = loss.item()
    assert 4.5 < floors["sphere"] < 4.6
    assert floors["oblique_geodesic"] == pytest.approx(1.33, abs=0.1)
    assert floors["oblique"] < 0.2
    assert floors["euclidean"] < 0.01


# digits in float32
