"""What a number means: its protocol, and the refusal to compare numbers whose protocols differ.

Recalls of one model differ by points between splits, caption counts, tie rules and preprocessings. So every evaluation
carries these, and `check_alike` runs wherever numbers stand next to each other.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.base.dependencies import loaded_files
from common.base.fields import flattened

TIE_RULE = "lower index first"
PUBLISHED = ", published"  # ends the training data of weights that no run of this repository has trained
# how a set or weights were read does not change what is ranked (the hash of the captions and the counts state that);
# the width of features belongs to the method
MAY_DIFFER = ("unreadable_images", "activation", "feature_dim")
LEFT_OUT = "left out: {} broken or surplus files or rows"
HEADLINES = {  # of all metrics those that a summary and a comparison show: key -> name
    "i2t_recall_at_1": "i2t R@1",
    "t2i_recall_at_1": "t2i R@1",
    "mean_recall": "mean of R@1, 5, 10",
    "acc1": "acc",
    "accuracy": "accuracy",
    "score": "mean over sets",
}
_MOST_LINES = 10  # of a summary
# of a protocol, what a reader needs to know; the rest stays in the evaluation's file
_PROTOCOL_KEYS = ("num_images", "num_texts", "candidates", "num_classes", "prompt_average", "tie_rule", "captions_hash")


class ProtocolError(ValueError):
    """Numbers of unlike protocols were to be put side by side."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one data set, with what comparisons and intervals need.

    metrics: fractions; only "rsum" is a sum of six.
    protocol: only equal ones may share a column (`check_alike`).
    chance: expected metrics of a random model, where known.
    hits: metric -> one list per image of its queries' results, for a bootstrap over images.
    """

    metrics: dict[str, float]
    protocol: dict[str, Any]
    chance: dict[str, float]
    hits: dict[str, list[list[float]]] = field(repr=False)


def mean_of_folds(folds: Sequence[Evaluation], candidates: str) -> Evaluation:
    """The mean over separately ranked parts of a test set; a bootstrap draws from the images of all.

    Args:
        folds: of equally many images.
        candidates: of a query, for the protocol, e.g. "own fold of 1000 images".
    """
    first, count = folds[0], len(folds)
    return Evaluation(
        metrics={key: sum(fold.metrics[key] for fold in folds) / count for key in first.metrics},
        protocol=first.protocol | {"candidates": f"{candidates}, mean over {count} folds"},
        chance={key: sum(fold.chance[key] for fold in folds) / count for key in first.chance},
        hits={key: [values for fold in folds for values in fold.hits[key]] for key in first.hits},
    )


def hash_of_captions(captions_of: Sequence[Sequence[str]]) -> str:
    """16 hex digits that change with any caption, their order, or the image that one belongs to."""
    text = json.dumps([list(captions) for captions in captions_of], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_alike(protocols: Mapping[str, Mapping[str, Any]], may_differ: Sequence[str] = MAY_DIFFER) -> None:
    """Refuses to put numbers of unlike protocols side by side: in a column, over seeds, in an average.

    Args:
        protocols: label of the number (a row, a seed) for the message -> its protocol.
        may_differ: keys that are not compared, with all that is nested below.
    Raises:
        ProtocolError: names the first key that differs, both values and their labels.
    """
    labels = list(protocols)
    for label in labels[1:]:
        difference = first_difference(protocols[labels[0]], protocols[label], may_differ)
        if difference is not None:
            key, one, other = difference
            raise ProtocolError(
                f"unlike protocols: {key} is {one} for {labels[0]} but {other} for {label}; numbers are compared only "
                "under the same protocol"
            )


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], may_differ: Sequence[str] = MAY_DIFFER
) -> tuple[str, str, str] | None:
    """First key (dotted where nested, in the order of `one`) whose values differ, and both values as text.

    A value that one protocol lacks reads "absent". Tuples equal lists, as in JSON.
    """
    first, second = flattened(one), flattened(other)
    for key in [*first, *(key for key in second if key not in first)]:
        if any(key == skipped or key.startswith(skipped + ".") for skipped in may_differ):
            continue
        values = [json.dumps(flat[key], ensure_ascii=False) if key in flat else "absent" for flat in (first, second)]
        if values[0] != values[1]:
            if key == "fingerprint":  # what it may be: the number of samples, or what is left out
                values = [f"{value} ({_counts(flat)})" for value, flat in zip(values, (first, second))]
            return key, values[0], values[1]
    return None


def _counts(flat: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {flat[key]}" for key in ("num_images", "num_texts", "unreadable_images") if key in flat)


def data_text(protocol: Mapping[str, Any]) -> str:
    """Name of a data set with a short fingerprint."""
    return f"{protocol['data']} ({protocol['fingerprint'][:8]})"


def protocol_text(protocol: Mapping[str, Any]) -> str:
    """What two protocols must share for their numbers to stand in one column."""
    return ", ".join(f"{key} {protocol[key]}" for key in _PROTOCOL_KEYS if protocol.get(key, "all") != "all")


def as_json(
    paper: str, results: dict[str, Evaluation], step: int, training: dict[str, Any], provenance: dict[str, str]
) -> dict[str, Any]:
    """Metrics with their protocols, and what produced them.

    Args:
        training: the checkpoint's state, with the origin of the weights.
    """
    return {
        "paper": paper,
        "step": step,
        "training_data": training["training_data"],
        "training_revision": training["training_revision"],
        "training_versions": training.get("training_versions", "not known"),
        "precision": training.get("precision", "not known"),
        "evaluation_code": loaded_files("weights", "evaluation"),
        **provenance,
        "evaluations": {
            name: {"metrics": result.metrics, "chance": result.chance, "protocol": result.protocol}
            for name, result in results.items()
        },
    }


def evaluation_text(content: Mapping[str, Any]) -> str:
    """`as_json` on about ten lines for the screen: metrics in percent, each with its protocol."""
    lines = []
    for role, evaluation in content["evaluations"].items():
        metrics, chances, protocol = evaluation["metrics"], evaluation["chance"], evaluation["protocol"]
        shown = {key: name for key, name in HEADLINES.items() if key in metrics}
        if shown:
            numbers = ", ".join(f"{name} {100 * metrics[key]:.1f}" for key, name in shown.items())
            chance = ", ".join(f"{100 * chances[key]:.1f}" for key in shown if key in chances)
            about = ", ".join(filter(None, (data_text(protocol), protocol_text(protocol))))
            text = f"  {role}: {numbers}{f' (chance level: {chance})' if chance else ''}; {about}"
            lost = protocol.get("unreadable_images")
            if lost:
                text += f"; {LEFT_OUT.format(lost)}"
            # there may be many zero-shot sets: those of which nothing is lost come last
            lines.append((protocol.get("task") == "zero_shot" and not lost, text))
    lines = [text for _, text in sorted(lines, key=lambda line: line[0])]
    more = len(lines) - _MOST_LINES
    if more > 0:
        lines[_MOST_LINES:] = [f"  and {more} more sets in the file"]
    origin = f"{content['paper']}, step {content['step']}, trained on {content['training_data']}"
    if content["training_data"].endswith(PUBLISHED):
        origin = f"{content['training_data']} weights, training data not stated"
    return "\n".join([f"{origin}; in percent:", *lines])
