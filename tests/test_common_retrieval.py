"""Ranks, recall and precision against loops, torchmetrics, and the degenerate cases that collapsed models produce."""

import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from evaluation_processes import evaluations_as_json
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_processes
from refusals import refused

from common.evaluation.retrieval import (
    Positives,
    chance_level,
    hits_by_image,
    means,
    precision_chance_level,
    precisions_at_r,
    precisions_of_parts,
    ranks_of_parts,
    recall_at_k,
    recalls,
    retrieval_metrics,
    retrieval_ranks,
)


def test_recall_equals_torchmetrics_hit_rate():
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    scores = torch.randn(30, 90)
    text_to_image = torch.randint(0, 30, (90,))
    text_to_image[:30] = torch.arange(30)
    ranks = retrieval_ranks(scores, text_to_image)
    for k in (1, 5, 10):
        hits = [functional.retrieval_hit_rate(scores[i], text_to_image == i, top_k=k) for i in range(30)]
        assert recall_at_k(ranks.image_to_text, k) == pytest.approx(float(torch.stack(hits).mean()), abs=1e-7)
        images = torch.arange(30)
        hits = [functional.retrieval_hit_rate(scores[:, j], images == text_to_image[j], top_k=k) for j in range(90)]
        assert recall_at_k(ranks.text_to_image, k) == pytest.approx(float(torch.stack(hits).mean()), abs=1e-7)


def test_what_cannot_be_ranked_is_refused():
    scores, whole, three = torch.zeros(2, 2), torch.arange(2), Positives.from_owners(torch.arange(3), 3)
    whole_k = "k must be a whole number of at least 1, got"
    refused(
        *((f"{whole_k} {k}", partial(recall_at_k, np.zeros(2), k)) for k in (0, 1.5)),
        ("ranks are empty", partial(recall_at_k, np.zeros(0), 1)),
        ("bfloat16", lambda: retrieval_ranks(scores.bfloat16(), whole)),
        (r"\[0, 2\)", lambda: retrieval_ranks(scores, torch.tensor([0, 2]))),
        (r"\(2, 2\), the positives are those of 2 images here and 1 texts",
         lambda: retrieval_ranks(scores, torch.tensor([0]))),
        (r"shape \(1, 2\)", lambda: retrieval_ranks(scores, whole[None])),
        ("1 of 4 scores are not finite", lambda: retrieval_ranks(torch.tensor([[0, torch.nan], [0, 0]]), whole)),
        ("1 of 4 scores are not finite", lambda: retrieval_ranks(torch.tensor([[0, -torch.inf], [0, 0]]), whole)),
        ("no t2i query has a positive",
         lambda: retrieval_metrics(retrieval_ranks(torch.zeros(1, 1), Positives.from_lists([[0]], [[]])))),
        ("must ascend", lambda: retrieval_ranks(torch.zeros(3, 3), three, rows=torch.tensor([0, 2, 1]))),
        (r"within \[0, 3\)", lambda: retrieval_ranks(torch.zeros(3, 3), three, rows=torch.tensor([0, 1, 3]))),
        (r"image 0 has the positive text 2; expected: \[0, 2\)", lambda: Positives.from_lists([[0, 2]], [[0], []])),
        (r"text 1 has the positive image -1; expected: \[0, 1\)", lambda: Positives.from_lists([[0]], [[0], [-1]])),
        ("image 1 has the positive text 1 more than once", lambda: Positives.from_lists([[], [1, 0, 1]], [[0], []])),
        ("positives of images: 'float' object", lambda: Positives.from_lists([[0.9]], [[0]])),
        *(("parts is an iterator", partial(of_parts, iter([]), Positives.from_owners(whole, 2)))
          for of_parts in (ranks_of_parts, precisions_of_parts)),
        ("image 0 has no positive among the candidates, but 2 outside",
         lambda: Positives.from_lists([[]], [[0]], [2])),
    )  # fmt: skip


def loops_of_lists(scores, texts_of_image, images_of_text, texts_outside=None):
    """Best ranks, mAP@R, R-Precision and R@1 of every query with positives, from the definitions."""
    results = {"i2t": [], "t2i": []}
    for name, table, lists in (("i2t", scores, texts_of_image), ("t2i", scores.T, images_of_text)):
        for query, positives in enumerate(lists):
            if not positives:
                continue
            order = sorted(range(table.shape[1]), key=lambda candidate: -float(table[query, candidate]))
            right = [candidate in positives for candidate in order]
            total = len(positives) + (texts_outside[query] if texts_outside and name == "i2t" else 0)
            summed = sum(sum(right[:r]) / r for r in range(1, min(total, len(order)) + 1) if right[r - 1])
            results[name].append((right.index(True), summed / total, sum(right[:total]) / total, float(right[0])))
    return results


def test_ranks_equal_a_stable_sort_beyond_one_block_of_columns():
    scores, owners = torch.randn(3, 1100).mul(20).round(), torch.randint(0, 3, (1100,))
    ranks = retrieval_ranks(scores, owners)
    expected = loops_of_lists(
        scores, [(owners == i).nonzero()[:, 0].tolist() for i in range(3)], owners[:, None].tolist()
    )
    for name, actual in (("i2t", ranks.image_to_text), ("t2i", ranks.text_to_image)):
        assert actual.tolist() == [query[0] for query in expected[name]]


def test_a_collapsed_model_scores_chance_and_is_reported_as_tied():
    text_to_image = torch.arange(40).repeat_interleave(5)
    ranks = retrieval_ranks(torch.zeros(40, 200), text_to_image)
    metrics = retrieval_metrics(ranks)
    assert metrics["i2t_recall_at_1"] == pytest.approx(1 / 40)
    for k in (1, 5, 10):
        assert metrics[f"t2i_recall_at_{k}"] == pytest.approx(k / 40)
        assert metrics[f"i2t_recall_at_{k}"] == pytest.approx(math.ceil(k / 5) / 40)
    assert metrics["tied_share"] == metrics["i2t_tied_share"] == metrics["t2i_tied_share"] == 1.0


def random_relation(rng, num_images, num_texts):
    """Lists with empty ones among them; the two directions do not mirror each other."""
    texts = [sorted(rng.choice(num_texts, rng.integers(0, num_texts + 1), False).tolist()) for _ in range(num_images)]
    images = [sorted(rng.choice(num_images, rng.integers(0, num_images + 1), False).tolist()) for _ in range(num_texts)]
    texts[0], images[0] = texts[0] or [0], images[0] or [0]
    return texts, images


@settings(max_examples=60, deadline=None)
@given(
    num_images=st.integers(1, 9),
    num_texts=st.integers(1, 12),
    levels=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_any_relation_ranks_and_scores_as_the_definitions_say(num_images, num_texts, levels, seed):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, levels, (num_images, num_texts)).astype(np.float32))
    texts, images = random_relation(rng, num_images, num_texts)
    outside = [int(rng.integers(0, 3)) if query_positives else 0 for query_positives in texts]
    positives = Positives.from_lists(texts, images, outside)
    expected = loops_of_lists(scores, texts, images, outside)

    ranks = retrieval_ranks(scores, positives)
    assert ranks.query_images.tolist() == [image for image, query_positives in enumerate(texts) if query_positives]
    assert ranks.query_texts.tolist() == [text for text, query_positives in enumerate(images) if query_positives]
    assert ranks.image_to_text.tolist() == [query[0] for query in expected["i2t"]]
    assert ranks.text_to_image.tolist() == [query[0] for query in expected["t2i"]]

    actual = precisions_at_r(scores, positives)
    for name, values in (("i2t", actual.image_to_text), ("t2i", actual.text_to_image)):
        for place, metric in enumerate(("map_at_r", "r_precision", "recall_at_1"), start=1):
            assert values[metric] == pytest.approx([query[place] for query in expected[name]], abs=1e-12)
        assert (values["map_at_r"] <= values["r_precision"] + 1e-12).all()


def test_ties_of_the_best_positive_are_counted_by_direction():
    scores = torch.tensor([[3.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
    ranks = retrieval_ranks(scores, Positives.from_lists([[0, 1], [1]], [[0], [], [1]]))
    assert ranks.image_to_text.tolist() == [0, 1]  # two tied positives are no tie; text 2 ties with text 1 of image 1
    assert (ranks.i2t_tied_share, ranks.t2i_tied_share, ranks.tied_share) == (1 / 2, 0, 1 / 4)
    precise = retrieval_ranks(
        torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64), Positives.from_lists([[0]], [[0], []])
    )
    assert precise.image_to_text.tolist() == [1]  # in float32 the two would tie


def test_chance_levels_equal_the_mean_over_all_rankings():
    relations = [
        Positives.from_lists([[0, 2, 3]], [[0], [], [0], [0], []], [1]),
        Positives.from_lists([[0, 2, 3]], [[0], [], [0], [0], []], [4]),  # more positives than candidates
        Positives.from_lists([[1]], [[], [0], [], [], []]),
    ]
    for positives in relations:
        rankings = [torch.tensor([order], dtype=torch.float32) for order in itertools.permutations(range(5))]
        for chance, metrics in (
            (chance_level(positives), [retrieval_metrics(retrieval_ranks(scores, positives)) for scores in rankings]),
            (precision_chance_level(positives), [means(precisions_at_r(scores, positives)) for scores in rankings]),
        ):
            for key, value in chance.items():
                assert value == pytest.approx(sum(actual[key] for actual in metrics) / len(metrics), abs=1e-12), key


def test_means_and_rsum_are_those_of_the_papers():
    metrics = retrieval_metrics(retrieval_ranks(torch.randn(20, 100), torch.arange(20).repeat_interleave(5)))
    i2t, t2i = ([metrics[f"{name}_recall_at_{k}"] for k in (1, 5, 10)] for name in ("i2t", "t2i"))
    expected = {"rsum": sum(i2t + t2i), "mean_recall": sum(i2t + t2i) / 6, "mean_recall_at_1": (i2t[0] + t2i[0]) / 2}
    expected |= {"i2t_mean_recall": sum(i2t) / 3, "t2i_mean_recall": sum(t2i) / 3}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_hits_by_image_average_to_the_metrics():
    scores, owners = torch.randn(12, 36), torch.arange(12).repeat_interleave(3)
    ranks = retrieval_ranks(scores, owners)
    metrics, hits = retrieval_metrics(ranks), hits_by_image(recalls(ranks), owners, 12)
    assert set(hits) == {key for key in metrics if "tied" not in key}
    for key, lists in hits.items():
        assert len(lists) == 12
        assert np.mean([value for values in lists for value in values]) == pytest.approx(metrics[key]), key
    positives = Positives.from_lists([[0, 5], *[[]] * 11], [[], [1], *[[]] * 28, [3], *[[]] * 5])
    of_owners = (precisions_at_r(scores, given) for given in (owners, Positives.from_owners(owners, 12)))
    assert len({str(vars(precisions)) for precisions in of_owners}) == 1
    few = hits_by_image(precisions_at_r(scores, positives), owners, 12)
    # of one image, and of two captions of different images
    assert {key: len(lists) for key, lists in few.items()} == {key: 1 + key.startswith("t2i") for key in few}
    assert "mean_recall_at_1" not in few


def test_other_scores_may_rank_the_other_direction():
    scores, text_scores, owners = torch.randn(6, 12), torch.randn(6, 12), torch.arange(6).repeat_interleave(2)
    both = retrieval_ranks(scores, owners, text_scores=text_scores)
    assert torch.equal(both.image_to_text, retrieval_ranks(scores, owners).image_to_text)
    assert torch.equal(both.text_to_image, retrieval_ranks(text_scores, owners).text_to_image)
    positives = Positives.from_owners(owners, 6)
    actual = precisions_at_r(scores, positives, text_scores=text_scores)
    assert np.array_equal(
        actual.text_to_image["map_at_r"], precisions_at_r(text_scores, positives).text_to_image["map_at_r"]
    )


def test_an_evaluation_is_the_same_to_the_last_byte_on_one_and_on_three_processes():
    (one,) = in_processes(1, evaluations_as_json)
    assert in_processes(3, evaluations_as_json) == [one] * 3
    content = json.loads(one)
    assert content["not finite"] == "2 of 2000 scores are not finite; a sort would rank NaN first"
    assert content["match not finite"].startswith("1 match logits are not finite")
    assert content["retrieval"]["protocol"]["num_images"] == 68  # of 70, two cannot be read
    assert 0 < content["retrieval"]["metrics"]["i2t_recall_at_10"] < 1
    for name in ("retrieval", "contrastive", "matched"):
        assert content[f"{name} in parts"] == content[name]
    assert content["contrastive"]["metrics"] == content["retrieval"]["metrics"]
    assert content["matched"]["protocol"]["ranking"] == "matching head on the 10 most similar"
    assert set(content["matched"]["metrics"]) - set(content["retrieval"]["metrics"]) == {
        "i2t_kept_share",
        "t2i_kept_share",
    }
    assert content["coco"]["coco_1k"]["metrics"]["rsum"] > content["coco"]["coco_5k"]["metrics"]["rsum"]


def test_large_scores_whose_sum_overflows_are_finite():
    scores = torch.full((2, 2), 3.0e38) - torch.tensor([[0.0, 1.0e38], [1.0e38, 0.0]])
    ranks = retrieval_ranks(scores, torch.tensor([0, 1]))
    assert ranks.image_to_text.tolist() == ranks.text_to_image.tolist() == [0, 0]
