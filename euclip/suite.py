"""The paper's test sets: DataComp's 38 with their metrics, and the means of Tables 1, 4, 5 and 8.

    mean             DataComp                                       on the scenes
    mean_imagenet    ImageNet                                       imagenet
    mean_shifts      6 distribution shifts                          imagenet_v2, imagenet_a, imagenet_r
    mean_vtab        13 sets                                        14 tasks of the same three groups
    mean_retrieval   Flickr30k, MSCOCO (R@1 both ways), WinoGAViL   test, second_test, winogavil
    mean_all         all 38                                         all 21

A mean takes one number per set, without weights. With `data.averages = datacomp` all 38 sets must exist; with `present`
a mean is over the existing ones, and its protocol names them.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.broken import BrokenSample
from common.data.pairs import ZERO_SHOT_SETS, EvaluationSets, Pairs, open_evaluation_sets
from common.data.scenes import CLASSIFICATION_TASKS, classification_task
from common.evaluation.accuracy import (
    OTHER_REGION,
    f1_macro_hits,
    worst_group_hits,
    worst_region_hits,
)
from common.evaluation.embed import Encoder, FurtherMetrics, evaluate_retrieval, evaluate_zero_shot
from common.evaluation.protocol import Evaluation
from common.evaluation.zero_shot import classification_hits
from euclip.config import Config, EvaluationData
from euclip.datacomp import DATACOMP_AVERAGES, DATACOMP_TASKS, DATACOMP_UNSCORED, datacomp_averages
from euclip.winogavil import Associations, SceneAssociations, evaluate_associations, open_winogavil

DECIDES = "evaluation"

MEAN_RECALL_AT_1 = "mean_recall_at_1"
SCORE = "score"  # the metric of a mean
WINOGAVIL = "winogavil"
_ROLE_OF = {  # DataComp's key -> role here; the others' is the name of their folder
    "retrieval/flickr_1k_test_image_text_retrieval": "test",
    "retrieval/mscoco_2014_5k_test_image_text_retrieval": "second_test",
    "misc/winogavil": WINOGAVIL,
}


def _role(key: str) -> str:
    # DataComp's folders of "fairness/geode" and the like have no "fairness" in their names
    return _ROLE_OF.get(key, key.removeprefix("fairness/").replace("/", "-"))


_TASK_OF = {_role(task.key): task for task in DATACOMP_TASKS}
_METRIC_OF = {"mean_recall@1": MEAN_RECALL_AT_1}  # DataComp's names that are other ones here
_GROUPED = ("wilds-fmow", "geode", "dollar_street")  # scored by the groups in their metadata
_REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania", OTHER_REGION)  # of FMoW, in the order of WILDS


@dataclass(frozen=True)
class Mean:
    """One of the five means: its sets by role, and the metric of each set."""

    name: str
    sets: Mapping[str, Any]
    metrics: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Changes with any of its sets and with their metrics."""
        content = [f"{role} {self.metrics[role]} {entry.fingerprint}" for role, entry in self.sets.items()]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


@dataclass(frozen=True)
class Suite:
    """All evaluated sets by role, and the means that they allow."""

    zero_shot: Mapping[str, Any]
    retrieval: Mapping[str, Pairs]
    associations: Mapping[str, Associations]
    means: Mapping[str, Mean]


def open_suite(data: EvaluationData, sets: EvaluationSets) -> Suite:
    """All test sets of a row but those without a score; scenes add their VTAB tasks and associations to `sets`.

    Raises:
        ValueError: sets of DataComp that are missing or lack what their metric needs; names them.
    """
    # a folder may be named by the whole key, too
    zero_shot: dict[str, Any] = {}
    for folder, task in sets.zero_shot.items():
        role = folder.removeprefix("fairness-")
        if role in zero_shot:
            raise ValueError(f"{role} and fairness-{role} are two folders of one DataComp task; expected: one of them")
        zero_shot[role] = task
    for key in DATACOMP_UNSCORED:
        zero_shot.pop(_role(key), None)
    associations: dict[str, Associations] = {}
    if data.source == "scenes":
        for name in CLASSIFICATION_TASKS:
            if name not in zero_shot:
                zero_shot[name] = classification_task(name, size=data.num_labelled, image_size=data.image_size)
        associations[WINOGAVIL] = SceneAssociations(data.num_labelled, data.image_size)
    elif data.winogavil:
        associations[WINOGAVIL] = open_winogavil(data.winogavil, Path(data.root).expanduser())
    for role in zero_shot.keys() & set(_GROUPED):
        _group(zero_shot[role], 0)  # of one image: missing metadata is an error now, not after hours of training
    by_role = {**zero_shot, **sets.retrieval, **associations}
    means = _datacomp_means(by_role) if data.averages == "datacomp" else _means_of_present(by_role)
    return Suite(zero_shot, sets.retrieval, associations, means)


def open_tests(data: EvaluationData) -> dict[str, Any]:
    """All test sets of a row by role, means included; every value has a fingerprint."""
    suite = open_suite(data, open_evaluation_sets(data))
    return {**suite.zero_shot, **suite.retrieval, **suite.associations, **suite.means}


def evaluate_suite(config: Config, encoder: Encoder, sets: EvaluationSets) -> dict[str, Evaluation]:
    """Evaluates every set by the model's similarity, then the means; returns evaluations by role.

    Call on every process. `sets` comes from `open_evaluation_sets`.
    """
    suite, average = open_suite(config.data, sets), config.method.prompt_average
    results = {
        role: evaluate_zero_shot(encoder, task, average, further_metrics(role, task))
        for role, task in suite.zero_shot.items()
    }
    gallery = config.data.gallery
    results |= {role: evaluate_retrieval(encoder, pairs, gallery=gallery) for role, pairs in suite.retrieval.items()}
    results |= {role: evaluate_associations(encoder, instances) for role, instances in suite.associations.items()}
    return results | {name: mean_evaluation(mean, results) for name, mean in suite.means.items()}


def mean_evaluation(mean: Mean, results: Mapping[str, Evaluation]) -> Evaluation:
    """The mean over sets of one metric per set, without weights; `results` holds evaluations by role."""
    parts = [(results[role], metric) for role, metric in mean.metrics.items()]
    lists = [part.hits[metric] for part, metric in parts]
    entries = [sum(map(len, queries)) for queries in lists]
    score = math.fsum(part.metrics[metric] for part, metric in parts) / len(parts)
    # an entry counts by what it moves the mean over sets; neither the sets' levels nor their sizes add to the spread
    levels = [
        math.fsum(value for values in queries for value in values) / count for queries, count in zip(lists, entries)
    ]
    hits = [
        [score + sum(entries) / (len(parts) * count) * (value - level) for value in values]
        for queries, count, level in zip(lists, entries, levels)
        for values in queries
    ]
    chances = [part.chance.get(metric) for part, metric in parts]
    names = [part.protocol["data"] for part, _ in parts]
    return Evaluation(
        metrics={SCORE: score},
        protocol={
            "task": "mean",
            "data": _in_short(names),
            "fingerprint": mean.fingerprint,
            "metrics": dict(mean.metrics),
            "sets": {role: results[role].protocol for role in mean.sets},
        },
        chance={} if None in chances else {SCORE: math.fsum(chances) / len(chances)},
        hits={SCORE: hits},
    )


def _in_short(names: list[str]) -> str:
    """Names of a mean's sets, short enough for a column of a table; the protocol has all names."""
    if len(names) > 3:
        return f"mean of {len(names)} sets, {names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"mean of {', '.join(names)}"


def further_metrics(role: str, task: Any) -> FurtherMetrics | None:
    """DataComp's metric of a set beside accuracy and mean per-class recall; None where it has no other.

    Args:
        role: name of the set; those of DataComp are its folders' names.
        task: the first entry of its `metadata(index)` is the region or income group.
    """
    metrics = {
        "wilds-iwildcam": _f1_macro,
        "wilds-fmow": partial(_worst_region, task),
        "geode": partial(_worst_group, task, "acc_wg", 1),
        "dollar_street": partial(_worst_group, task, "acc_top5_wg", 5),
    }
    return metrics.get(role)


def _f1_macro(scores: torch.Tensor, labels: torch.Tensor, indices: list[int]) -> dict[str, list[list[float]]]:
    values = f1_macro_hits(scores.argmax(dim=1).numpy(), labels.numpy())
    return {"F1-macro_all": [[float(value)] for value in values]}


def _worst_group(
    task: Any, metric: str, k: int, scores: torch.Tensor, labels: torch.Tensor, indices: list[int]
) -> dict[str, list[list[float]]]:
    hits = classification_hits(scores, labels, k).tolist()
    return {metric: worst_group_hits(hits, [_group(task, index) for index in indices])}


def _worst_region(
    task: Any, scores: torch.Tensor, labels: torch.Tensor, indices: list[int]
) -> dict[str, list[list[float]]]:
    hits = classification_hits(scores, labels).tolist()
    try:
        return worst_region_hits(hits, [_region(task, index) for index in indices])
    except ValueError as error:
        raise ValueError(f"{task.name}: {error}") from None


def _group(task: Any, index: int) -> int:
    """First number of an image's metadata; ValueError if it has none, or no whole number."""
    try:
        metadata = task.metadata(index) if hasattr(task, "metadata") else None
    except BrokenSample as broken:
        raise ValueError(f"{task.name}: {broken}") from None
    if metadata is None or not np.size(metadata):
        raise ValueError(f"{task.name}, picture {index}: no metadata (.npy member), which its metric needs")
    number = np.ravel(metadata)[0]
    if not np.issubdtype(np.asarray(number).dtype, np.number) or not np.isreal(number) or number % 1:  # NaN, too
        raise ValueError(f"{task.name}, picture {index}: metadata begins with {number!r}; expected: a whole number")
    return int(number)


def _region(task: Any, index: int) -> str:
    """Name of a picture's region of FMoW."""
    number = _group(task, index)
    if not 0 <= number < len(_REGIONS):
        raise ValueError(f"{task.name}, picture {index}: region {number}; expected: 0 to {len(_REGIONS) - 1}")
    return _REGIONS[number]


def _datacomp_means(by_role: Mapping[str, Any]) -> dict[str, Mean]:
    """The five means over all 38 sets; ValueError if one is missing."""
    try:
        averages = datacomp_averages([_TASK_OF[role].key for role in by_role if role in _TASK_OF])
    except ValueError as error:
        raise ValueError(f"data.averages = datacomp: {error}; or take data.averages=present") from None
    role_of = {task: role for role, task in _TASK_OF.items()}
    return {f"mean_{name}": _mean(name, [role_of[task] for task in tasks], by_role) for name, tasks in averages.items()}


def _means_of_present(by_role: Mapping[str, Any]) -> dict[str, Mean]:
    """Means over the existing sets; the mean over all requires a set of each of the four groups."""
    members = {
        name: [role for role in by_role if _group_and_metric(role)[0] in groups]
        for name, groups in DATACOMP_AVERAGES.items()
    }
    if not all(members.values()):
        del members["all"]
    return {f"mean_{name}": _mean(name, roles, by_role) for name, roles in members.items() if roles}


def _mean(name: str, roles: Sequence[str], by_role: Mapping[str, Any]) -> Mean:
    metrics = {role: _group_and_metric(role)[1] for role in roles}
    return Mean(f"mean_{name}", {role: by_role[role] for role in roles}, metrics)


def _group_and_metric(role: str) -> tuple[str, str]:
    """From DataComp's table for its sets; the name of a scenes' set states its group."""
    if role in _TASK_OF:
        task = _TASK_OF[role]
        return task.group, _METRIC_OF.get(task.metric, task.metric)
    if role in ZERO_SHOT_SETS:
        return "imagenet" if role == "imagenet" else "shifts", "acc1"
    return "vtab" if role.startswith("vtab/") else "other", "acc1"
