"""Weighted nearest neighbours: what a representation is worth, without training anything.

The vote is that of instance discrimination (Wu et al. 2018), SimSiam's monitor. Features are those before projection
and geometry.
"""

from typing import Any

import torch

from common.data.pairs import lost_at_open
from common.evaluation.accuracy import classification_evaluation
from common.evaluation.arrays import labels_of, tensor_of
from common.evaluation.protocol import Evaluation
from common.vectors import inner_product_similarity, unit

_SCORES_PER_CHUNK = 1 << 25  # cosines held at once, 128 MB


@torch.no_grad()
def knn_scores(
    features: torch.Tensor,
    bank_features: torch.Tensor,
    bank_labels: torch.Tensor,
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Share of each class in the weighted vote of the k nearest bank features.

    A neighbour with cosine s has weight exp(s / temperature). Of equal cosines the first in the bank counts, of equal
    shares the lower class wins an arg-max.

    Args:
        features, bank_features: (num_images, dim) and (bank, dim), any norm.
        bank_labels: (bank,) in [0, num_classes).
        k: a smaller bank votes as a whole.
        chunk_size: images at a time, without effect beyond rounding; None = 128 MB of cosines.
    Returns:
        (num_images, num_classes), rows sum to 1; float32, or float64 where the features are.
    Raises:
        ValueError: an empty bank, unlike shapes, labels out of range, non-finite features, k below 1 or temperature not
            above 0.
    """
    features, bank_features = tensor_of(features, "features"), tensor_of(bank_features, "bank features")
    bank_labels = labels_of(bank_labels, "bank labels").to(features.device)
    _check(features, bank_features, bank_labels, num_classes)
    if k < 1 or not temperature > 0 or (chunk_size is not None and chunk_size < 1):
        raise ValueError(f"k = {k}, temperature = {temperature}, chunk_size = {chunk_size}; expected: positive ones")
    k = min(k, len(bank_features))
    bank = unit(bank_features)
    if chunk_size is None:
        chunk_size = max(1, _SCORES_PER_CHUNK // len(bank_features))
    shares = []
    for chunk in unit(features).split(chunk_size):
        cosines = inner_product_similarity(chunk, bank)
        nearest, indices = _first_k(cosines, k)
        weights = (nearest / temperature).softmax(dim=1)  # exp(s / T), each row scaled so that it sums to 1
        empty = weights.new_zeros(len(chunk), num_classes)
        shares.append(empty.scatter_add(1, bank_labels[indices], weights))
    return torch.cat(shares)


def evaluate_knn(encoder: Any, bank: Any, task: Any, k: int = 200, temperature: float = 0.1) -> Evaluation:
    """Accuracy of the weighted vote on a labelled set; the bank has the same classes, e.g. its part="train"."""
    check_classes(bank, task)
    bank_features, bank_labels = labelled_features(encoder, bank)
    features, labels = labelled_features(encoder, task)
    num_classes = len(task.class_names)
    scores = knn_scores(features, bank_features, bank_labels, num_classes, k, temperature)
    return classification_evaluation(
        scores,
        labels,
        {
            "task": "knn",
            "data": task.name,
            "fingerprint": task.fingerprint,
            "bank_fingerprint": bank.fingerprint,
            "num_images": len(labels),
            "bank_size": len(bank_labels),
            "num_classes": num_classes,
            "neighbours": min(k, len(bank_labels)),
            "temperature": temperature,
            "feature_dim": features.shape[1],
            "unreadable_images": len(task) - len(labels) + len(lost_at_open(task)),
            "preprocessing": encoder.preprocessing,
        },
    )


def check_classes(train: Any, test: Any) -> None:
    """Refuses two labelled sets whose class names differ (ValueError)."""
    if list(train.class_names) != list(test.class_names):
        raise ValueError(f"{train.name} and {test.name} have unlike class names; expected: the same ones")


def labelled_features(encoder: Any, task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (num_images, dim), flattened, on the CPU, and labels (num_images,) of the images that can be read."""
    features, readable = encoder.images(task)
    kept = readable.nonzero().squeeze(1)
    if not len(kept):
        raise ValueError(f"{task.name}: none of its {len(task)} pictures could be read")
    return features[kept].flatten(1), torch.tensor([task.label(index) for index in kept.tolist()])


def _first_k(cosines: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The k largest of each row; where more tie for the last places than fit, those with the lower index.
    values, indices = cosines.topk(k, dim=1)
    crowded = ((cosines >= values[:, -1:]).sum(dim=1) > k).nonzero().squeeze(1)
    if len(crowded):  # duplicates in the bank; top-k may take any of them
        order = cosines[crowded].sort(dim=1, descending=True, stable=True)
        values[crowded], indices[crowded] = order.values[:, :k], order.indices[:, :k]
    return values, indices


def _check(features: torch.Tensor, bank_features: torch.Tensor, bank_labels: torch.Tensor, num_classes: int) -> None:
    if features.ndim != 2 or bank_features.ndim != 2 or features.shape[1] != bank_features.shape[1]:
        raise ValueError(
            f"features {tuple(features.shape)} and bank features {tuple(bank_features.shape)}; "
            "expected: (count, dim) with one dim"
        )
    if not len(bank_features) or bank_labels.shape != (len(bank_features),):
        raise ValueError(
            f"{len(bank_features)} bank features and labels of shape {tuple(bank_labels.shape)}; expected: one label "
            "per feature, at least one"
        )
    if int(bank_labels.min()) < 0 or int(bank_labels.max()) >= num_classes:
        labels_range = f"{int(bank_labels.min())}..{int(bank_labels.max())}"
        raise ValueError(f"bank labels {labels_range}; expected: 0..{num_classes - 1}")
    for name, values in (("features", features), ("bank features", bank_features)):
        if not torch.isfinite(values).all():
            raise ValueError(f"{int((~torch.isfinite(values)).sum())} of {values.numel()} {name} are not finite")
