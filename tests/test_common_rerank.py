"""Two-stage retrieval against the dense matrix with a fill, as ALBEF's code has it, and its edge cases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from common.evaluation.rerank import best_candidates, two_stage_ranks
from common.evaluation.retrieval import Positives, recall_at_k, retrieval_metrics, retrieval_ranks


def from_table(logits):
    return lambda rows, columns: logits[rows, columns]


def filled_recalls(scores, logits, positives, k_test):
    """R@1, 5, 10 both ways from two dense matrices: logits of the k best, -100 everywhere else."""
    recalls = []
    for table, head, starts, right in (
        (scores, logits, positives.image_starts, positives.texts),
        (scores.T, logits.T, positives.text_starts, positives.images),
    ):
        filled = np.full(table.shape, -100.0)
        for query, row in enumerate(table.numpy()):
            kept = np.argsort(-row, kind="stable")[:k_test]
            filled[query, kept] = head[query].numpy()[kept]
        orders = np.argsort(-filled, axis=1, kind="stable")
        hits = [
            [np.isin(order[:k], right[starts[query] : starts[query + 1]]).any() for k in (1, 5, 10)]
            for query, order in enumerate(orders)
            if starts[query + 1] > starts[query]
        ]
        recalls += np.mean(hits, axis=0).tolist()
    return recalls


@settings(max_examples=20, deadline=None)
@given(
    num_images=st.integers(1, 24),
    num_texts=st.integers(1, 40),
    levels=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    pairs_at_once=st.integers(1, 300),
)
def test_recalls_equal_those_of_the_filled_matrices(num_images, num_texts, levels, seed, pairs_at_once):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, levels, (num_images, num_texts)).astype(np.float32))
    logits = torch.from_numpy(rng.integers(-3, 4, (num_images, num_texts)).astype(np.float32))
    positives = Positives.from_owners(torch.from_numpy(rng.integers(0, num_images, num_texts)), num_images)
    k_test = int(rng.integers(10, 45))  # also more than there are candidates, of one direction or of both
    actual = two_stage_ranks(scores, positives, from_table(logits), k_test, pairs_at_once=pairs_at_once)
    metrics = retrieval_metrics(actual.matched)
    names = [f"{name}_recall_at_{k}" for name in ("i2t", "t2i") for k in (1, 5, 10)]
    assert [metrics[name] for name in names] == pytest.approx(filled_recalls(scores, logits, positives, k_test))
    assert retrieval_metrics(actual.contrastive) == retrieval_metrics(retrieval_ranks(scores, positives))
    most = {"i2t": actual.i2t_kept_share, "t2i": actual.t2i_kept_share}
    assert all(metrics[name] <= most[name[:3]] + 1e-12 for name in names)


def test_what_was_not_matched_keeps_its_place_behind_all_that_was_however_low_the_logits():
    # the positive of image 0 is its 12th best text: never matched, so still 12th, and no fill can overtake it
    scores = torch.arange(20.0).flip(0).repeat(12, 1)
    positives = Positives.from_lists([[11], [3], *[[]] * 10], [[0], *[[]] * 19])
    actual = two_stage_ranks(scores, positives, lambda rows, columns: -1000.0 - columns.float(), 10)
    assert actual.contrastive.image_to_text.tolist() == [11, 3]
    assert actual.matched.image_to_text.tolist() == [11, 3]
    assert (actual.i2t_kept_share, actual.t2i_kept_share) == (0.5, 1.0)
    turned = two_stage_ranks(scores, positives, lambda rows, columns: columns.float(), 10)
    assert turned.matched.image_to_text.tolist() == [11, 6]


def test_equal_logits_go_to_the_lower_index_and_are_counted_as_ties():
    owners = torch.arange(12)
    actual = two_stage_ranks(torch.eye(12), owners, lambda rows, columns: torch.zeros(len(rows)), 12)
    assert actual.matched.image_to_text.tolist() == actual.matched.text_to_image.tolist() == list(range(12))
    assert actual.matched.tied_share == actual.matched.i2t_tied_share == actual.matched.t2i_tied_share == 1
    assert recall_at_k(actual.matched.image_to_text, 1) == pytest.approx(1 / 12)  # chance
    assert actual.contrastive.tied_share == 0


def test_the_two_directions_match_different_pairs_in_calls_of_bounded_size():
    calls = []

    def match(rows, columns):
        calls.append((rows, columns))
        return torch.zeros(len(rows))

    two_stage_ranks(torch.randn(11, 33), torch.arange(33) % 11, match, 10, pairs_at_once=25)
    assert max(len(rows) for rows, _ in calls) == 20  # whole queries of ten pairs
    assert sum(len(rows) for rows, _ in calls) == 10 * (11 + 33)
    by_image = torch.cat([rows for rows, _ in calls[:6]]), torch.cat([columns for _, columns in calls[:6]])
    assert torch.equal(by_image[0], torch.arange(11).repeat_interleave(10))
    assert torch.equal(calls[6][1], torch.arange(2).repeat_interleave(10))
    assert int(by_image[1].max()) > 10


def test_the_other_direction_may_have_separate_scores():
    scores, text_scores, logits = torch.randn(12, 12), torch.randn(12, 12), torch.randn(12, 12)
    actual = two_stage_ranks(scores, torch.arange(12), from_table(logits), 10, text_scores=text_scores)
    mirrored = two_stage_ranks(text_scores.T.contiguous(), torch.arange(12), from_table(logits.T), 10)
    assert torch.equal(actual.matched.text_to_image, mirrored.matched.image_to_text)


@pytest.mark.parametrize("levels", [2, 1000])
def test_best_candidates_are_the_first_of_a_stable_sort(levels):
    scores = torch.randint(0, levels, (7, 50)).float()
    expected = [sorted(np.argsort(-row, kind="stable")[:13].tolist()) for row in scores.numpy()]
    assert best_candidates(scores, 13).tolist() == expected


def test_a_k_test_that_cannot_give_all_recalls_and_logits_that_cannot_be_ranked_are_refused():
    def ranked(logits, k_test=10):
        return two_stage_ranks(torch.randn(12, 24), torch.arange(24) % 12, lambda rows, columns: logits(rows), k_test)

    refused(
        ("k_test = 9; expected: at least 10", lambda: ranked(torch.zeros_like, 9)),
        (
            r"match returned \(\d+, 2\) torch.float32 for \d+ pairs",
            lambda: ranked(lambda rows: torch.zeros(len(rows), 2)),
        ),
        ("half precision ties them", lambda: ranked(lambda rows: rows.bfloat16())),
        ("120 match logits are not finite", lambda: ranked(lambda rows: rows * torch.nan)),
    )
