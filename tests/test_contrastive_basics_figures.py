"""Numbers of the chapter's figures by loops over matrices."""

import numpy as np
import pytest
import torch

from contrastive_basics.figures import RANKED, measured, rankings


def test_a_matrix_of_cosines_by_loops():
    cosines = (1.8 * torch.rand(7, 7) - 0.9).fill_diagonal_(0.95)
    cosines[:, 0] = torch.tensor([0.97, 0.97, 0.97, 0, 0.97, 0.97, 0.97])  # one caption nearest to six pictures
    of_pairs, other, nearest = [], [], 0
    for row in range(7):
        of_pairs.append(float(cosines[row, row]))
        other += [float(cosines[row, column]) for column in range(7) if column != row]
        nearest += all(cosines[row, row] >= cosines[row, column] for column in range(7))
    expected = {"pair_cosine": np.mean(of_pairs), "other_cosine": np.mean(other), "nearest": 100 * nearest / 7}
    assert measured(cosines) == pytest.approx(expected)
    assert measured(cosines.T)["nearest"] == 100.0
    assert measured(torch.eye(5)) == {"pair_cosine": 1.0, "other_cosine": 0.0, "nearest": 100.0}


def test_results_stand_in_the_order_of_their_scores_and_equal_ones_as_in_the_set():
    scores = torch.randint(0, 4, (6, 20)).float()
    is_right = torch.rand(6, 20) < 0.3
    for found, query in zip(rankings(scores, is_right, [4, 1]), (4, 1)):
        order = sorted(range(20), key=lambda column: (-float(scores[query, column]), column))[:RANKED]
        assert found == (query, order, [bool(is_right[query, column]) for column in order])
