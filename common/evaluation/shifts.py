"""Accuracy under distribution shift: ImageNet's relatives, and what is lost against the reference set.

ImageNet-A and -R have 200 of the 1,000 classes, and fewer classes are easier to choose from, so the plain drop of such
a set mixes two effects. Each shift is therefore compared with the reference restricted to the shift's own classes too
(Hendrycks et al.; papers/evaluation.md, Sec. 7, trap 2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.evaluation.embed import Encoder, evaluate_zero_shot
from common.evaluation.protocol import Evaluation
from common.evaluation.zero_shot import ClassSubset, PromptAverage

METRIC = "acc1"


@dataclass(frozen=True)
class Shift:
    """One set against the reference, all fractions.

    accuracy, reference: on the shifted set, and on the reference set with all its classes.
    reference_same_classes: on the reference set restricted to the shift's classes, before the arg-max; None where the
        shift has classes that the reference lacks.
    """

    accuracy: float
    reference: float
    reference_same_classes: float | None

    @property
    def drop(self) -> float:
        """Lost against the whole reference set; negative where the shift is easier."""
        return self.reference - self.accuracy

    @property
    def drop_same_classes(self) -> float | None:
        """Lost against the reference set with the same classes to choose from."""
        return None if self.reference_same_classes is None else self.reference_same_classes - self.accuracy


def evaluate_shifts(
    encoder: Encoder, tasks: Mapping[str, Any], average: PromptAverage, reference: str = "imagenet"
) -> tuple[dict[str, Evaluation], dict[str, Shift]]:
    """Zero-shot accuracy on a reference set and its shifts.

    Args:
        encoder: model and preprocessing.
        tasks: name -> labelled set (scenes, image folders, ...), the reference among them.
        average: how prompts are combined.
        reference: name of the set that the others are compared with.
    Returns:
        Evaluations of all sets by name, and of "<reference> as <name>" where the reference is restricted to the classes
        of a shift with fewer; and a Shift for each name but the reference.
    Raises:
        ValueError: if the reference is not among the tasks.
    """
    if reference not in tasks:
        raise ValueError(f"no reference set {reference!r} among {', '.join(tasks) or 'no sets'}")
    whole = tasks[reference]
    results = {name: evaluate_zero_shot(encoder, task, average) for name, task in tasks.items()}
    shifts = {}
    for name, task in tasks.items():
        if name == reference:
            continue
        same = None
        if list(task.class_names) == list(whole.class_names):
            same = results[reference].metrics[METRIC]
        elif set(task.class_names) <= set(whole.class_names):
            restricted = f"{reference} as {name}"
            results[restricted] = evaluate_zero_shot(encoder, ClassSubset(whole, task.class_names), average)
            same = results[restricted].metrics[METRIC]
        shifts[name] = Shift(results[name].metrics[METRIC], results[reference].metrics[METRIC], same)
    return results, shifts


def effective_robustness(
    reference: float, shifted: float, baseline_reference: Sequence[float], baseline_shifted: Sequence[float]
) -> float:
    """Accuracy under shift beyond what the reference accuracy predicts (Taori et al. 2020).

    The prediction is a straight line through baseline models, fitted where both accuracies are logits.

    Args:
        reference, shifted: accuracies of the model, strictly between 0 and 1.
        baseline_reference, baseline_shifted: those of at least two baseline models with unlike reference accuracies.
    Returns:
        A difference of accuracies; 0 for a model on the line, positive above it.
    Raises:
        ValueError: an accuracy of 0 or 1 or outside, fewer than two unlike baselines, or unequal counts.
    """
    values = [reference, shifted, *baseline_reference, *baseline_shifted]
    if not all(0.0 < value < 1.0 for value in values):
        outside = next(value for value in values if not 0.0 < value < 1.0)
        raise ValueError(f"accuracy {outside}; accepted: strictly between 0 and 1, where the logit is finite")
    if len(baseline_reference) != len(baseline_shifted) or len(set(baseline_reference)) < 2:
        raise ValueError(
            f"{len(baseline_reference)} and {len(baseline_shifted)} baseline accuracies; accepted: equal counts, at "
            "least two unlike reference accuracies"
        )
    x, y = _logit(np.asarray(baseline_reference)), _logit(np.asarray(baseline_shifted))
    slope, intercept = np.polyfit(x, y, 1)
    predicted = 1 / (1 + math.exp(-(slope * float(_logit(np.asarray(reference))) + intercept)))
    return shifted - predicted


def _logit(values: np.ndarray) -> np.ndarray:
    return np.log(values / (1 - values))
