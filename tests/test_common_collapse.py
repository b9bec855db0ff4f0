"""What tells a collapsed representation: known representations, loops, singular values."""

import itertools

import numpy as np
import pytest
import torch

from common.diagnosis import collapse_statistics
from common.geometry import unit


def test_a_constant_representation_has_no_spread_one_cosine_and_one_direction():
    actual = collapse_statistics(torch.full((40, 7), 2.5))
    assert actual["channel_std"] == pytest.approx(0, abs=1e-7)
    assert actual["mean_cosine"] == pytest.approx(1, abs=1e-6)
    assert actual["effective_rank"] == pytest.approx(1)


def test_directions_spread_over_the_sphere_have_the_spread_of_their_dimension():
    actual = collapse_statistics(torch.randn(20000, 32, generator=torch.Generator().manual_seed(0)))
    assert actual["channel_std"] == pytest.approx(32**-0.5, rel=0.01)
    assert actual["mean_cosine"] == pytest.approx(0, abs=1e-3)
    assert actual["effective_rank"] == pytest.approx(32, rel=0.01)


def test_spread_and_cosine_equal_loops():
    features = torch.randn(30, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([5.0, 3, 1, 1, 0.1, 0.1])
    actual = collapse_statistics(features)
    directions = unit(features).double().numpy()
    pairs = [float(a @ b) for a, b in itertools.combinations(directions, 2)]
    assert actual["mean_cosine"] == pytest.approx(np.mean(pairs), rel=1e-9)
    assert actual["channel_std"] == pytest.approx(np.mean(directions.std(axis=0, ddof=1)), rel=1e-9)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (2, 300)])
def test_the_effective_rank_is_that_of_the_singular_values_whichever_side_is_longer(shape):
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 3, shape[1])
    directions = unit(features).double().numpy()
    variances = np.linalg.svd(directions - directions.mean(axis=0), compute_uv=False) ** 2
    shares = variances[variances > 1e-20] / variances.sum()
    expected = np.exp(-np.sum(shares * np.log(shares)))
    assert collapse_statistics(features)["effective_rank"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_features_that_are_not_finite_give_nan_and_no_error(wrong):
    features = torch.ones(4, 3)
    features[1, 2] = wrong
    assert all(np.isnan(value) for value in collapse_statistics(features).values())


@pytest.mark.parametrize("shape", [(1, 3), (3,), (2, 3, 4)])
def test_features_without_two_rows_are_refused(shape):
    with pytest.raises(ValueError, match="at least 2 rows"):
        collapse_statistics(torch.ones(shape))
