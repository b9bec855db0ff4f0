"""Accuracy-type metrics as pure functions of arrays, numpy or tensors; all results are fractions in [0, 1].

Labels and predictions are class indices, hits are 0 or 1 per item.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from common.evaluation.arrays import array_of, labels_of, tensor_of
from common.evaluation.protocol import Evaluation
from common.evaluation.zero_shot import classification_hits

OTHER_REGION = "Other"  # of FMoW


def accuracy(predictions: Any, labels: Any) -> float:
    """Share of items whose prediction is the label (micro accuracy)."""
    predictions, labels = _pair(predictions, labels)
    return float((predictions == labels).mean())


def accuracy_at_k(scores: torch.Tensor, labels: torch.Tensor, k: int) -> float:
    """Share of items whose label is among the k best classes: the mean of `classification_hits`.

    Raises:
        ValueError: as `classification_hits`; no items.
    """
    hits = classification_hits(scores, labels, k)
    if not len(hits):
        raise ValueError("no items to average over")
    return float(hits.double().mean())


def mean_per_class_recall(predictions: Any, labels: Any) -> float:
    """Mean recall of the classes that occur in the labels (scikit-learn's balanced accuracy).

    torchmetrics' macro accuracy also counts classes that are only predicted, as 0.
    """
    predictions, labels = _pair(predictions, labels)
    return float(per_class_hits(predictions == labels, labels).mean())


def per_class_hits(hits: Any, labels: Any) -> np.ndarray:
    """(num_items,) numbers whose mean is the mean hit of each class, averaged over the classes that occur.

    An item gets w (hit - mean of its class) + metric, where w makes the classes equal, so the spread over items is that
    of the metric over test sets.
    """
    hits, labels = _pair(hits, labels)
    _, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    of_class = np.bincount(place, weights=hits) / counts
    # the spread of w * hit would also hold how many items each class has
    return len(labels) / (len(counts) * counts[place]) * (hits - of_class[place]) + of_class.mean()


def f1_macro_present(predictions: Any, labels: Any) -> float:
    """F1 = 2 * right / (predicted + occurring), averaged over the classes in the labels.

    WILDS reports it, and DataComp as "F1-macro_all".
    """
    return float(f1_macro_hits(predictions, labels).mean())


def f1_macro_hits(predictions: Any, labels: Any) -> np.ndarray:
    """(num_items,) numbers whose mean is `f1_macro_present`, with the spread of the metric, as in `per_class_hits`."""
    predictions, labels = _pair(predictions, labels)
    classes, place, occurring = np.unique(labels, return_inverse=True, return_counts=True)
    guessed = np.searchsorted(classes, predictions).clip(max=len(classes) - 1)
    occurs = classes[guessed] == predictions  # a class that is only predicted has no F1
    size = occurring + np.bincount(guessed[occurs], minlength=len(classes))
    hits = predictions == labels
    f1 = 2 * np.bincount(place, weights=hits) / size
    # to first order an item moves F1 of class c by (2 [right, of c] - F1 ([predicted c] + [of c])) / size
    moved = (2 * hits - f1[place]) / size[place]
    moved[occurs] -= (f1 / size)[guessed[occurs]]
    return len(labels) / len(classes) * moved + f1.mean()


def group_accuracies(hits: Any, groups: Sequence[Any]) -> dict[Any, float]:
    """Accuracy of each group, in order of first appearance."""
    hits = array_of(hits).astype(np.float64)
    if len(hits) != len(groups) or not len(hits) or not np.isfinite(hits).all():
        raise ValueError(f"{len(hits)} hits and {len(groups)} groups; expected: equal counts, finite hits")
    keys = [group.item() if hasattr(group, "item") else group for group in groups]
    members_of = {key: [] for key in keys}
    for key, hit in zip(keys, hits):
        members_of[key].append(hit)
    return {key: float(np.mean(members)) for key, members in members_of.items()}


def worst_group_accuracy(hits: Any, groups: Sequence[Any]) -> float:
    """Least of `group_accuracies`: acc_wg (GeoDE); of top-5 hits acc_top5_wg (Dollar Street)."""
    return min(group_accuracies(hits, groups).values())


def worst_group_hits(hits: Any, groups: Sequence[Any]) -> list[list[float]]:
    """One list per item, empty outside the worst group; the mean of all entries is `worst_group_accuracy`."""
    by_group = group_accuracies(hits, groups)
    worst = min(by_group, key=by_group.get)
    return [[float(hit)] if group == worst else [] for hit, group in zip(hits, groups)]


def worst_region_accuracy(hits: Any, regions: Sequence[str]) -> dict[str, float]:
    """FMoW in both readings: the published evaluator keeps the region "Other", which it intends to leave out.

    Returns:
        "acc_worst_region": as published; "acc_worst_region_without_other": as intended.
    Raises:
        ValueError: all items lie in "Other".
    """
    readings = worst_region_hits(hits, regions)
    return {name: float(np.mean([hit for item in lists for hit in item])) for name, lists in readings.items()}


def worst_region_hits(hits: Any, regions: Sequence[str]) -> dict[str, list[list[float]]]:
    """`worst_group_hits` for both readings of `worst_region_accuracy`."""
    named = [place for place, region in enumerate(regions) if region != OTHER_REGION]
    if not named:
        raise ValueError(f"all {len(regions)} items lie in region {OTHER_REGION}; expected: at least one named region")
    without_other: list[list[float]] = [[] for _ in regions]
    for place, item in zip(named, worst_group_hits([hits[i] for i in named], [regions[i] for i in named])):
        without_other[place] = item
    return {
        "acc_worst_region": worst_group_hits(hits, regions),
        "acc_worst_region_without_other": without_other,
    }


def winogavil_prompt(cue: str) -> str:
    """The cue in lower case after "An " before a, e, i, o, u, else after "A "."""
    if not (word := cue.strip().lower()):
        raise ValueError(f"empty WinoGAViL cue {cue!r}; expected: a word")
    return f"{'An' if word[0] in 'aeiou' else 'A'} {word}"


def winogavil_jaccard(scores: Any, gold: Sequence[int]) -> float:
    """Jaccard index h / (2k - h) of the k best candidates and the k gold ones, h of them in common.

    Of equal scores the higher index wins, as in the reference (last k of an ascending sort, here a stable one).

    Args:
        scores: (num_candidates,), higher is closer.
        gold: indices of the k associated candidates.
    Raises:
        ValueError: non-finite scores, or gold indices that are missing, repeated or out of range.
    """
    scores, gold = array_of(scores), array_of(gold)
    whole, gold = gold.dtype.kind in "iu", gold.tolist()
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(f"WinoGAViL scores of shape {scores.shape}; expected: one finite score per candidate")
    k = len(set(gold))
    if not whole or not k or k != len(gold) or min(gold) < 0 or max(gold) >= len(scores):
        raise ValueError(f"gold = {list(gold)} of {len(scores)} candidates; expected: distinct indices, at least one")
    chosen = np.argsort(scores, kind="stable")[-k:]
    common = len(set(chosen.tolist()) & set(gold))
    return common / (2 * k - common)


WINOGAVIL_GROUPS: Mapping[str, Callable[[int], bool]] = {  # metric -> which instances, by their number of candidates
    **{f"jaccard_score_{size}": partial(operator.eq, size) for size in (5, 6, 10, 12)},
    "jaccard_score_5-6": lambda size: size <= 6,
    "jaccard_score_10-12": lambda size: size >= 10,
    "jaccard_score_all": lambda size: True,
}


def winogavil_metrics(jaccards: Sequence[float], num_candidates: Sequence[int]) -> dict[str, float]:
    """Means over the instances of each of `WINOGAVIL_GROUPS`; the main metric is "jaccard_score_10-12".

    Args:
        num_candidates: 5, 6, 10 or 12 per instance.
    Raises:
        ValueError: unequal counts, or a group without instances.
    """
    values, sizes = _pair(jaccards, num_candidates)
    members = {name: np.array([inside(size) for size in sizes.tolist()]) for name, inside in WINOGAVIL_GROUPS.items()}
    empty = [name for name, inside in members.items() if not inside.any()]
    if empty:
        raise ValueError(f"no WinoGAViL instances for {', '.join(empty)}; the sizes are {sorted(set(sizes.tolist()))}")
    return {name: float(values[inside].mean()) for name, inside in members.items()}


def classification_evaluation(scores: torch.Tensor, labels: torch.Tensor, protocol: dict[str, Any]) -> Evaluation:
    """acc1, acc5 (with more than five classes) and mean_per_class_recall of scores (num_images, num_classes)."""
    scores, labels = tensor_of(scores, "scores"), labels_of(labels, "labels")
    num_classes = scores.shape[1]
    hits = {f"acc{k}": classification_hits(scores, labels, k).double() for k in (1, 5) if k == 1 or k < num_classes}
    hits["mean_per_class_recall"] = torch.from_numpy(per_class_hits(hits["acc1"], labels))
    chance = {"acc1": 1 / num_classes, "acc5": 5 / num_classes, "mean_per_class_recall": 1 / num_classes}
    return Evaluation(
        metrics={name: float(hit.mean()) for name, hit in hits.items()},
        protocol=protocol,
        chance={name: chance[name] for name in hits},
        hits={name: [[float(item)] for item in hit] for name, hit in hits.items()},
    )


def _pair(one: Any, other: Any) -> tuple[np.ndarray, np.ndarray]:
    one, other = array_of(one), array_of(other)
    if one.shape != other.shape or one.ndim != 1 or not len(one):
        raise ValueError(f"shapes {one.shape} and {other.shape}; expected: two equal lengths, at least one item")
    return one, other
