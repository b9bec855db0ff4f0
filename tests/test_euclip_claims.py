"""EuCLIP's claims: the experiments that they ask for, and the claim that a test decides."""

import pytest
import torch

from common.base.places import ROOT
from common.info_nce import contrastive_loss
from common.report.claims.expressions import EXPERIMENT, cells
from common.report.claims.read import load_claims, load_paper_tables
from common.report.conclusions import load_conclusions
from common.report.table import read_table
from euclip.geometry import Euclidean, Hyperbolic

PAPER = ROOT / "euclip"
PRINTED = load_paper_tables(PAPER / "paper_tables.yaml")
CLAIMS = {claim.id: claim for claim in load_claims(PAPER / "claims.yaml", PRINTED)}


def columns_of_claims(experiment):
    """Names of the values that claims ask of an experiment; compared with those that a smoke run writes."""
    used = [cell for claim in CLAIMS.values() for cell in cells(*claim.measured, *claim.regime)]
    return {cell.column for cell in used if cell.table == EXPERIMENT and cell.row == experiment}


def test_claims_ask_nothing_of_experiments_whose_values_no_test_looks_at():
    used = {cell.row for claim in CLAIMS.values() for cell in cells(*claim.measured, *claim.regime)
            if cell.table == EXPERIMENT}  # fmt: skip
    in_figures = {"figure2", "figure4", "figure6", "figure7", "traversal"}  # tests/test_euclip_figures.py
    of_tables = {f"table{number}_scalars" for number in (1, 4, 5, 8)}  # tests/test_euclip_reproduce.py, as stability
    assert used == in_figures | of_tables | {"stability", "hierarchies"}  # tests/test_euclip_hierarchies.py


# C21: the formulas of Section 3.2 as they stand, with no guard but the clamp


def bare_residual(texts, images, min_radius, clamped=True):
    """Euclidean."""
    ratio = min_radius / texts.norm(dim=1)
    aperture = torch.arcsin(torch.minimum(ratio, torch.ones_like(ratio)) if clamped else ratio)
    away = images - texts
    exterior = torch.arccos((away * texts).sum(dim=1) / (away.norm(dim=1) * texts.norm(dim=1)))
    return torch.relu(exterior - aperture)


def bare_hyperbolic_residual(texts, images, min_radius, clamped=True, c=1.0):
    """Hyperbolic, of tangent vectors: exponential map, Lorentz product, angles."""

    def lifted(u):
        z = c**0.5 * u.norm(dim=1, keepdim=True)
        space = torch.sinh(z) / z * u
        return space, (1 / c + space.square().sum(dim=1)).sqrt()

    (x, x_time), (y, y_time) = lifted(texts), lifted(images)
    inner = c * ((x * y).sum(dim=1) - x_time * y_time)
    ratio = 2 * min_radius / (c**0.5 * x.norm(dim=1))
    aperture = torch.arcsin(torch.minimum(ratio, torch.ones_like(ratio)) if clamped else ratio)
    cosine = (y_time + x_time * inner) / (x.norm(dim=1) * (inner.square() - 1).sqrt())
    return torch.relu(torch.arccos(cosine) - aperture)


BARE = {  # formula, ours, K: about as many texts within the radius as beyond
    "Euclidean": (bare_residual, Euclidean(squared=True), 0.4),
    "hyperbolic": (bare_hyperbolic_residual, Hyperbolic(16, squared=False), 0.2),
}
TOLERANCE = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 1e-4)}  # of values, of gradients


def pairs_of(num, dtype):
    """Texts nearer to the origin than images, in 16 dimensions."""
    draws = torch.Generator().manual_seed(1)
    texts, images = torch.randn(2, num, 16, generator=draws, dtype=torch.float64).unbind()
    return (0.4 * texts / 4).to(dtype).requires_grad_(), (images / 4).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", BARE)
def test_the_formulas_with_no_guard_but_the_clamp_are_right_away_from_their_edges(name, dtype):
    formula, geometry, radius = BARE[name]
    texts, images = pairs_of(2000, dtype)
    given = {"texts": texts, "images": images, "min_radius": radius}
    bare, ours = formula(**given), geometry.to(dtype).entailment_residual(**given)
    of_value, of_gradient = TOLERANCE[dtype]
    torch.testing.assert_close(bare, ours, rtol=0, atol=of_value)
    (of_bare,) = torch.autograd.grad(bare.mean(), texts)
    (of_ours,) = torch.autograd.grad(ours.mean(), texts)
    assert (of_bare - of_ours).norm() < of_gradient * of_ours.norm()
    # the clamp is needed: without it every text inside the ball is lost
    lost = formula(**given, clamped=False).isnan()
    assert 0.05 < lost.double().mean() < 0.95
    if name == "Euclidean":
        assert torch.equal(lost, texts.norm(dim=1) < radius)


@pytest.mark.parametrize("name", BARE)
def test_some_steps_with_no_guard_but_the_clamp_go_where_ours_go(name):
    """Contrastive and entailment loss on free float32 embeddings."""
    formula, geometry, radius = BARE[name]
    geometry = geometry.float()
    ends = []
    for residual in (formula, geometry.entailment_residual):
        texts, images = pairs_of(64, torch.float32)
        images.requires_grad_()
        optimizer = torch.optim.Adam([texts, images], lr=1e-2)
        for _ in range(200):
            loss = contrastive_loss(images, texts, geometry, torch.tensor(5.0))
            loss = loss + 0.2 * residual(texts=texts, images=images, min_radius=radius).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert loss.isfinite()
        missed = geometry.entailment_residual(texts=texts, images=images, min_radius=radius).mean()
        ends.append((loss.item(), missed.item()))
    assert ends[0] == pytest.approx(ends[1], abs=0.01)
    assert max(ends[0]) < 0.1  # from 4 nats and 0.6 radians or more


@pytest.mark.parametrize(
    ("text", "image"),
    [([0.5, 0.0], [0.0, 1.0]), ([1.0, 0.5], [1.0, 0.5]), ([1.0, 0.0], [2.0, 0.0])],
    ids=["text at radius K, image outside its cone", "image on its text", "image on the ray of its text"],
)
def test_at_its_edges_the_formula_without_guards_has_no_finite_gradient_and_ours_has(text, image):
    image = torch.tensor([image], dtype=torch.float64)
    text = torch.tensor([text], dtype=torch.float64, requires_grad=True)
    given = {"texts": text, "images": image, "min_radius": 0.5}
    (bare,) = torch.autograd.grad(bare_residual(**given).sum(), text)
    (ours,) = torch.autograd.grad(Euclidean(squared=True).entailment_residual(**given).sum(), text)
    assert not bare.isfinite().all()
    assert ours.isfinite().all()


def test_the_conclusion_on_stability_is_that_of_the_committed_runs():
    table = read_table(ROOT / "results/euclip/stability/photos/stability.json")
    runs = [value for row in table.rows for value in row.ours["unstable"].values]
    assert (len(table.rows), len(table.seeds), len(runs), sum(runs)) == (9, 5, 45, 0)
    text = " ".join(one.text for one in load_conclusions(ROOT / "euclip"))
    assert "None of 45 runs on photographs trained unstably (nine settings, five seeds, 400 steps)" in text
