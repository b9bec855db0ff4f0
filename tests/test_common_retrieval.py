"""Ranks and recall against loops, torchmetrics, and the degenerate cases that collapsed models produce."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.evaluation.retrieval import chance_level, recall_at_k, retrieval_metrics, retrieval_ranks


def loops_ranks(scores, text_to_image):
    """Both directions by Python's stable sort, from the definition."""
    num_images, num_texts = scores.shape
    image_ranks, text_ranks = [], []
    for i in range(num_images):
        order = sorted(range(num_texts), key=lambda j: -float(scores[i, j]))
        positives = [place for place, j in enumerate(order) if text_to_image[j] == i]
        if positives:
            image_ranks.append(min(positives))
    for j in range(num_texts):
        order = sorted(range(num_images), key=lambda i: -float(scores[i, j]))
        text_ranks.append(order.index(int(text_to_image[j])))
    return image_ranks, text_ranks


@settings(max_examples=60, deadline=None)
@given(
    num_images=st.integers(1, 9),
    num_texts=st.integers(1, 20),
    levels=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_ranks_equal_a_stable_sort_with_ties_and_missing_captions(num_images, num_texts, levels, seed):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, levels, (num_images, num_texts)).astype(np.float64))
    text_to_image = torch.from_numpy(rng.integers(0, num_images, num_texts))
    ranks = retrieval_ranks(scores, text_to_image)
    image_ranks, text_ranks = loops_ranks(scores, text_to_image)
    assert ranks.image_to_text.tolist() == image_ranks
    assert ranks.text_to_image.tolist() == text_ranks
    assert ranks.query_images.tolist() == sorted(set(text_to_image.tolist()))


def test_recall_equals_torchmetrics_hit_rate():
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    scores = torch.randn(30, 90, dtype=torch.float64)
    text_to_image = torch.randint(0, 30, (90,))
    text_to_image[:30] = torch.arange(30)
    ranks = retrieval_ranks(scores, text_to_image)
    for k in (1, 5, 10):
        hits = [functional.retrieval_hit_rate(scores[i], text_to_image == i, top_k=k) for i in range(30)]
        assert recall_at_k(ranks.image_to_text, k) == pytest.approx(float(torch.stack(hits).mean()), abs=1e-7)
        images = torch.arange(30)
        hits = [functional.retrieval_hit_rate(scores[:, j], images == text_to_image[j], top_k=k) for j in range(90)]
        assert recall_at_k(ranks.text_to_image, k) == pytest.approx(float(torch.stack(hits).mean()), abs=1e-7)


def test_ranks_equal_a_stable_sort_beyond_one_block_of_columns():
    scores = torch.randn(3, 1100).mul(20).round()
    text_to_image = torch.randint(0, 3, (1100,))
    ranks = retrieval_ranks(scores, text_to_image)
    assert (ranks.image_to_text.tolist(), ranks.text_to_image.tolist()) == loops_ranks(scores, text_to_image)


def test_hand_made_case():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.4], [0.8, 0.2, 0.7, 0.6]])
    ranks = retrieval_ranks(scores, torch.tensor([0, 0, 1, 1]))
    assert ranks.image_to_text.tolist() == [0, 1]  # text 0 (image 0's) beats image 1's best caption, text 2
    assert ranks.text_to_image.tolist() == [0, 1, 0, 0]


def test_a_collapsed_model_scores_chance_and_is_reported_as_tied():
    text_to_image = torch.arange(40).repeat_interleave(5)
    ranks = retrieval_ranks(torch.zeros(40, 200), text_to_image)
    metrics = retrieval_metrics(ranks)
    assert metrics["i2t_recall_at_1"] == pytest.approx(1 / 40)
    for k in (1, 5, 10):
        assert metrics[f"t2i_recall_at_{k}"] == pytest.approx(k / 40)
        assert metrics[f"i2t_recall_at_{k}"] == pytest.approx(math.ceil(k / 5) / 40)
    assert metrics["tied_share"] == 1.0


def test_ties_go_to_the_lower_index():
    scores = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert retrieval_ranks(scores, torch.tensor([0, 1])).text_to_image.tolist() == [0, 1]
    assert retrieval_ranks(scores, torch.tensor([1, 0])).text_to_image.tolist() == [1, 0]


def test_recall_grows_with_k_and_is_one_beyond_the_candidates():
    ranks = retrieval_ranks(torch.randn(6, 6), torch.arange(6))
    values = [recall_at_k(ranks.text_to_image, k) for k in range(1, 9)]
    assert values == sorted(values)
    assert values[5] == values[7] == 1.0


def test_shifting_and_scaling_scores_changes_nothing():
    scores, text_to_image = torch.randn(8, 24, dtype=torch.float64), torch.arange(8).repeat_interleave(3)
    before, after = retrieval_ranks(scores, text_to_image), retrieval_ranks(3 * scores - 7, text_to_image)
    assert torch.equal(before.image_to_text, after.image_to_text)
    assert torch.equal(before.text_to_image, after.text_to_image)


def test_permuting_candidates_with_their_ids_changes_no_metric():
    scores, text_to_image = torch.randn(8, 24, dtype=torch.float64), torch.arange(8).repeat_interleave(3)
    rows, columns = torch.randperm(8), torch.randperm(24)
    new_row = torch.empty(8, dtype=torch.long)
    new_row[rows] = torch.arange(8)
    shuffled = retrieval_ranks(scores[rows][:, columns], new_row[text_to_image[columns]])
    assert retrieval_metrics(shuffled) == retrieval_metrics(retrieval_ranks(scores, text_to_image))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_refused(bad):
    scores = torch.zeros(3, 3)
    scores[1, 1] = bad
    with pytest.raises(ValueError, match="1 of 9 scores are not finite"):
        retrieval_ranks(scores, torch.arange(3))


def test_half_precision_and_wrong_maps_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        retrieval_ranks(torch.zeros(2, 2, dtype=torch.bfloat16), torch.arange(2))
    with pytest.raises(ValueError, match=r"\[0, 2\)"):
        retrieval_ranks(torch.zeros(2, 2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="2 texts"):
        retrieval_ranks(torch.zeros(2, 2), torch.tensor([0]))


def test_chance_level_equals_random_rankings():
    rng = np.random.default_rng(0)
    text_to_image = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 11])
    totals = {}
    for _ in range(1500):
        scores = torch.from_numpy(rng.random((12, 20)))
        for key, value in retrieval_metrics(retrieval_ranks(scores, text_to_image)).items():
            totals[key] = totals.get(key, 0.0) + value / 1500
    for key, expected in chance_level(text_to_image, 12).items():
        assert totals[key] == pytest.approx(expected, abs=0.015), key
