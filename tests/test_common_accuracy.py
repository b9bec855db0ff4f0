"""Accuracy-type metrics against scikit-learn and worked examples."""

import math
import warnings

import numpy as np
import pytest
import torch
from refusals import refused

from common.evaluation.accuracy import (
    accuracy,
    accuracy_at_k,
    classification_evaluation,
    f1_macro_hits,
    f1_macro_present,
    group_accuracies,
    mean_per_class_recall,
    per_class_hits,
    winogavil_jaccard,
    winogavil_metrics,
    winogavil_prompt,
    worst_group_accuracy,
    worst_region_accuracy,
)


@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_scikit_learn_with_absent_classes(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(seed)
    labels = random.choice(random.permutation(12)[: random.integers(1, 9)], 60)
    predictions = np.where(random.random(60) < 0.5, labels, random.integers(0, 12, 60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "y_pred contains classes not in y_true" is the case under test
        balanced = metrics.balanced_accuracy_score(labels, predictions)
        f1 = metrics.f1_score(labels, predictions, labels=np.unique(labels), average="macro")
    assert mean_per_class_recall(predictions, labels) == pytest.approx(balanced, abs=1e-12)
    assert f1_macro_present(torch.tensor(predictions), torch.tensor(labels)) == pytest.approx(f1, abs=1e-12)
    assert accuracy(predictions, labels) == metrics.accuracy_score(labels, predictions)


def test_worst_group_is_the_least_accuracy_over_groups_with_items():
    hits, groups = [1, 1, 0, 0, 1, 1], ["a", "a", "a", "b", "b", "c"]
    assert group_accuracies(hits, groups) == pytest.approx({"a": 2 / 3, "b": 1 / 2, "c": 1})
    assert worst_group_accuracy(hits, groups) == 0.5
    refused(("2 hits and 2 groups; .* finite hits", lambda: worst_group_accuracy([1, math.nan], ["a", "b"])))


def test_both_readings_of_the_worst_region_are_labelled():
    hits, regions = [1, 0, 1, 1, 0, 0], ["Asia", "Asia", "Europe", "Africa", "Other", "Other"]
    assert worst_region_accuracy(hits, regions) == {"acc_worst_region": 0, "acc_worst_region_without_other": 0.5}


@pytest.mark.parametrize("seed", range(4))
def test_winogavil_jaccard_equals_scikit_learn(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(seed)
    number = int(random.choice([5, 6, 10, 12]))
    gold = random.permutation(number)[: random.integers(1, number // 2 + 1)].tolist()
    scores = random.standard_normal(number)
    chosen = np.isin(np.arange(number), np.argsort(scores)[-len(gold) :])
    assert winogavil_jaccard(scores, gold) == metrics.jaccard_score(np.isin(np.arange(number), gold), chosen)


def test_winogavil_ties_go_to_the_last_candidates_as_in_the_reference():
    assert winogavil_jaccard([0.5] * 6, [4, 5]) == 1
    assert winogavil_jaccard([0.5] * 6, [1, 5]) == pytest.approx(1 / 3)


def test_winogavil_prompts_and_groups():
    assert winogavil_prompt("Apple") == winogavil_prompt(" Apple ") == "An apple"
    assert winogavil_prompt("horse") == "A horse"
    metrics = winogavil_metrics([0.0, 0.2, 0.4, 1.0], [5, 6, 10, 12])
    assert [metrics[f"jaccard_score_{of}"] for of in ("10-12", "5-6", "all", "12")] == pytest.approx([0.7, 0.1, 0.4, 1])
    refused(
        ("empty WinoGAViL cue", lambda: winogavil_prompt(" ")),
        (
            "no WinoGAViL instances for jaccard_score_5, jaccard_score_6",
            lambda: winogavil_metrics([0.4, 1.0], [10, 12]),
        ),
    )


def test_evaluation_carries_metrics_whose_hits_average_to_them():
    scores, labels = torch.randn(30, 7), torch.tensor([0] * 20 + [1, 2, 3, 4, 6] * 2)
    evaluation = classification_evaluation(scores, labels, {"task": "zero_shot"})
    predictions = scores.argmax(dim=1)
    assert evaluation.metrics["acc1"] == pytest.approx(accuracy(predictions, labels))
    assert evaluation.metrics["acc5"] == pytest.approx(accuracy_at_k(scores, labels, 5))
    assert evaluation.metrics["mean_per_class_recall"] == pytest.approx(mean_per_class_recall(predictions, labels))
    assert evaluation.chance == pytest.approx({"acc1": 1 / 7, "acc5": 5 / 7, "mean_per_class_recall": 1 / 7})
    assert set(classification_evaluation(scores[:, :5], labels.clamp(max=4), {}).metrics) == {
        "acc1",
        "mean_per_class_recall",
    }
    for name, value in evaluation.metrics.items():
        assert np.mean([hit for (hit,) in evaluation.hits[name]]) == pytest.approx(value)


@pytest.mark.parametrize("name", ["mean_per_class_recall", "f1_macro"])
def test_the_spread_of_weighted_hits_is_that_of_the_metric_over_test_sets(name):
    random = np.random.default_rng(0)

    def drawn(num_items):
        labels = random.choice(5, num_items, p=[0.5, 0.2, 0.15, 0.1, 0.05])
        return np.where(random.random(num_items) < 0.8, labels, random.integers(0, 5, num_items)), labels

    of, metric = {
        "mean_per_class_recall": (lambda guess, labels: per_class_hits(guess == labels, labels), mean_per_class_recall),
        "f1_macro": (f1_macro_hits, f1_macro_present),
    }[name]
    over_sets = np.std([metric(*drawn(1000)) for _ in range(400)], ddof=1)
    of_one = np.mean([of(*drawn(1000)).std() / math.sqrt(1000) for _ in range(20)])
    assert of_one == pytest.approx(over_sets, rel=0.12)
    labels = drawn(500)[1]
    assert set(of(labels, labels)) == {1.0}  # all right: no spread, and no share above 1


def test_bad_input_is_refused_by_name():
    refused(
        ("at least one named region", lambda: worst_region_accuracy([1], ["Other"])),
        ("equal lengths", lambda: accuracy([1, 2], [1])),
        ("at least one item", lambda: mean_per_class_recall([], [])),
        ("2 hits and 1 groups", lambda: worst_group_accuracy([1, 0], ["a"])),
        ("finite", lambda: winogavil_jaccard([float("nan"), 1.0], [0])),
        ("distinct indices", lambda: winogavil_jaccard([0.1, 0.2], [2])),
        ("distinct indices", lambda: winogavil_jaccard([0.1, 0.2], [0.5])),
    )
