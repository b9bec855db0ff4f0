"""EuCLIP's claims: the audit of its printed numbers, and the claim that a test can decide."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from common.report.claims import FAILS, HOLDS, UNCHECKED, audit, load_claims, load_paper_tables
from common.report.expressions import EXPERIMENT, cells
from common.report.verdicts import judge
from euclip.figures import COLUMNS, LABELS
from euclip.geometry import Euclidean
from euclip.reproduce import AT_THE_END
from euclip.stability import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "euclip"
PRINTED = load_paper_tables(PAPER / "paper_tables.yaml")
CLAIMS = {claim.id: claim for claim in load_claims(PAPER / "claims.yaml", PRINTED)}
NOT_BORNE_OUT = {"C4"}
WITHOUT_NUMBERS = {f"C{number}" for number in (10, 11, 14, 19, 20, 21, 22, 24)}


def test_all_claims_of_the_paper_are_there():
    assert list(CLAIMS) == [f"C{number}" for number in range(1, 25)]


@pytest.mark.parametrize("name", CLAIMS)
def test_the_audit_of_a_claim_says_what_the_printed_numbers_say(name):
    expected = FAILS if name in NOT_BORNE_OUT else UNCHECKED if name in WITHOUT_NUMBERS else HOLDS
    assert audit(CLAIMS[name], PRINTED).verdict == expected


@pytest.mark.parametrize(
    ("name", "holding", "of", "margin"),
    [
        ("C1", 2, 2, 1 - (27.92 - 27.80)),
        ("C2", 10, 10, 21.0 - 18.0),
        ("C3", 1, 1, 1 - (29.48 - 28.97)),
        ("C4", 2, 5, 31.2 - 32.4),
        ("C5", 7, 7, 27.51 - 26.88),
        ("C6", 6, 6, 21.1 - 20.8),
        ("C8", 10, 10, 21.0 - 21.1 + 0.6),
        ("C9", 10, 10, 33.5 - 33.4),
        ("C12", 1, 1, 1.235 - 0.3022),
        ("C13", 1, 1, 3.896 - 2 * 1.288),
        ("C17", 2, 2, 3.383 - 1.783),
        ("C23", 3, 3, 4 - (37.5 - 33.84)),
    ],
)
def test_counts_and_margins_of_the_audit_are_those_computed_by_hand(name, holding, of, margin):
    verdict = audit(CLAIMS[name], PRINTED)
    assert (verdict.holding, verdict.of) == (holding, of)
    assert verdict.margin == pytest.approx(margin, abs=1e-9)


def test_without_results_no_claim_is_decided_but_those_of_tests():
    claims = judge(PAPER, [], [])
    decided = {each.claim.id for each in claims.judged if each.measured[0].verdict in (HOLDS, FAILS)}
    assert decided == {"C21", "C22"}


def test_claims_about_experiments_name_what_the_experiments_hold():
    printed = yaml.safe_load((PAPER / "paper_tables.yaml").read_text())["tables"]["table4"]["rows"]
    rows = {Path(row["config"]).stem.removeprefix("table4_") for row in printed}
    scalars = {f"{row}_{name}" for row in rows for name in AT_THE_END}
    outcomes = {f"{setting.key}_unstable" for setting in SETTINGS.values()}
    distances = {f"{model}_{point}_{name}" for model in LABELS for point in ("origin", "mean") for name in COLUMNS}
    known = {"table4_scalars": scalars, "stability": outcomes, "figure2": distances, "figure4": distances}
    used = [cell for claim in CLAIMS.values() for condition in claim.measured for cell in cells(condition)]
    of_experiments = [cell for cell in used if cell.table == EXPERIMENT]
    assert {cell.row for cell in of_experiments} == set(known)
    assert all(cell.column in known[cell.row] for cell in of_experiments)


def test_each_test_that_decides_a_claim_exists():
    for claim in CLAIMS.values():
        for name in claim.tests:
            file, _, function = name.partition("::")
            assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name


def bare_residual(text, image, radius, clamped=True):
    """Section 3.2 as it stands, with no guard but the clamp."""
    ratio = radius / text.norm(dim=1)
    aperture = torch.arcsin(ratio.clamp(max=1) if clamped else ratio)
    away = image - text
    exterior = torch.arccos((away * text).sum(dim=1) / (away.norm(dim=1) * text.norm(dim=1)))
    return torch.relu(exterior - aperture)


def test_the_formulas_with_no_guard_but_the_clamp_are_right_away_from_their_edges():
    torch.manual_seed(1)
    texts, images = 0.4 * torch.randn(2000, 16, dtype=torch.float64) / 4, torch.randn(2000, 16, dtype=torch.float64) / 4
    inside = texts.norm(dim=1) < 0.3
    assert 0.05 < inside.double().mean() < 0.95
    texts.requires_grad_()
    bare, ours = bare_residual(texts, images, 0.3), Euclidean(squared=True).entailment_residual(texts, images, 0.3)
    torch.testing.assert_close(bare, ours, rtol=0, atol=1e-9)
    (of_bare,) = torch.autograd.grad(bare.mean(), texts)
    (of_ours,) = torch.autograd.grad(ours.mean(), texts)
    torch.testing.assert_close(of_bare, of_ours, rtol=1e-7, atol=1e-12)
    # the clamp is needed: without it every text inside the ball is lost
    without = bare_residual(texts, images, 0.3, clamped=False)
    assert torch.equal(without.isnan(), inside)


def test_at_its_edges_the_formula_without_guards_has_no_gradient():
    image = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    radius = 0.3
    for text in ([0.3, 0.0], [1.0, 0.5], [0.5, 0.25]):  # at radius K, on the image, on its ray
        text = torch.tensor([text], dtype=torch.float64, requires_grad=True)
        (bare,) = torch.autograd.grad(bare_residual(text, image, radius).sum(), text)
        (ours,) = torch.autograd.grad(Euclidean(squared=True).entailment_residual(text, image, radius).sum(), text)
        assert ours.isfinite().all()
        assert not bare.isfinite().all() or math.isclose(float((bare - ours).abs().max()), 0, abs_tol=1e-6)
