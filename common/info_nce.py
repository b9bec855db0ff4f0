"""InfoNCE: one loss for every geometry, kind of target and source of negatives, in one process or many.

Here embeddings of all processes become logits, logit_scale * similarity, in float32 or better. The loss of a matrix of
logits is in cross_entropy.py, whose functions can be imported from here.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

import torch

from common.cross_entropy import (  # noqa: F401
    check_alpha,
    check_row_stochastic,
    cross_entropy,
    distilled_targets,
    info_nce,
    mask_absent,
    positives_from_ids,
    symmetric_info_nce,
)
from common.distributed import gather_with_gradient, gather_without_gradient, rank, world_size
from common.vectors import at_least_float32, one_matrix

if TYPE_CHECKING:
    from common.geometry import Geometry


class QueuedPairs(NamedTuple):
    """Pairs of past steps, as constants until the backward pass: row k of all three belongs to one pair.

    image_embeddings, text_embeddings: (num_rows, ...), shaped like those of the step (`FeatureQueue.rows`).
    ids: (num_rows,) int64, negative = unknown (`FeatureQueue.row_ids`).
    """

    image_embeddings: torch.Tensor
    text_embeddings: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Distillation:
    """Pseudo-targets: alpha of each row's target mass follows softmax(logit_scale * similarity) of the keys (ALBEF).

    The candidates in the batch are keys too here; a queue's rows stand for themselves.

    image_keys, text_keys: (local_batch, ...) momentum embeddings of this process's pairs, in their order; constants.
    alpha: in [0, 1].
    """

    image_keys: torch.Tensor
    text_keys: torch.Tensor
    alpha: float

    def __post_init__(self) -> None:
        check_alpha(self.alpha)


def info_nce_chance(local_batch: int, queue: QueuedPairs | None = None) -> float:
    """InfoNCE of a model to which all candidates are equal, ln(candidates), in nats."""
    return math.log(world_size() * local_batch + (0 if queue is None else len(queue.ids)))


def contrastive_loss(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
    ids: torch.Tensor | None = None,
    queue: QueuedPairs | None = None,
    distillation: Distillation | None = None,
) -> torch.Tensor:
    """InfoNCE over the global batch; row k of either side is the partner of row k of the other.

        1/2 mean_i [ info_nce of image i against all B texts, then the queue's texts ]
      + 1/2 mean_i [ info_nce of text i against all B images, then the queue's images ]

    The positive of a row is its partner; with ids, also all candidates of the same id, with equal mass (as in ALBEF's
    fine-tuning). With distillation, alpha of each row's mass follows a momentum model instead.

    With W processes each computes its rows and columns against all candidates: B/W x B similarities. The mean of the
    returned values over processes is the global loss, and gradients that are averaged over processes (DDP, FSDP) are
    its gradients, also for scalars.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process.
        geometry: compares all pairs by `directions`, and partners by `paired_similarity`. Two matrices (late
            interaction) keep their own diagonals.
        logit_scale: scalar tensor.
        ids: (local_batch,) int64 of the samples, negative = unknown; None = partners are the only positives.
        queue: the same on every process; its pairs get no gradient.
        distillation: of this process's pairs.
    Returns:
        Scalar in nats: this process's share of the global loss.
    Raises:
        ValueError: a function or class in place of a geometry, a module in place of the multiplier; shapes of texts,
            ids, queue or keys that do not fit the images.
    """
    check_geometry(geometry)
    check_pairs(image_embeddings, text_embeddings, ids, queue, distillation)
    logit_scale = as_scale(logit_scale, image_embeddings)
    columns = torch.arange(len(image_embeddings), device=image_embeddings.device) + rank() * len(image_embeddings)

    def both_directions(images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_images, all_texts = gather_with_gradient(images), gather_with_gradient(texts)
        image_to_text, text_to_image = both = geometry.directions(images, all_texts)
        symmetric = one_matrix(both)
        partners = geometry.paired_similarity(images, texts)[:, None] if symmetric else None

        def logits(scores: torch.Tensor) -> torch.Tensor:
            # partners are close pairs: their digits go over the diagonal; two matrices have a diagonal each
            return logit_scale * (scores.scatter(1, columns[:, None], partners) if symmetric else scores)

        image_to_text = logits(image_to_text)
        if world_size() == 1:  # both directions have the same pairs: one matrix, scaled once
            text_to_image = image_to_text.T if symmetric else logits(text_to_image)
        else:
            text_to_image = logits(geometry.directions(all_images, texts)[1])
        if queue is None:
            return image_to_text, text_to_image
        # compared apart from the batch: one matrix of all embeddings would copy the queue
        old_texts = geometry.directions(images, queue.text_embeddings.detach())[0]
        old_images = geometry.directions(queue.image_embeddings.detach(), texts)[1]
        return (
            torch.cat([image_to_text, logit_scale * old_texts], dim=1),
            torch.cat([text_to_image, logit_scale * old_images], dim=1),
        )

    both_logits = both_directions(image_embeddings, text_embeddings)
    # targets: the partner's column; all columns of its id; then alpha of the mass by the momentum model
    targets = [columns, columns]
    if ids is not None:
        all_ids = gather_without_gradient(ids)
        if queue is not None:
            all_ids = torch.cat([all_ids, queue.ids])
        targets = [positives_from_ids(ids, all_ids, columns, at_least_float32(both_logits[0]).dtype)] * 2
    if distillation is not None:
        with torch.no_grad():
            pseudo = both_directions(distillation.image_keys, distillation.text_keys)
        targets = [distilled_targets(logits, hard, distillation.alpha) for logits, hard in zip(pseudo, targets)]
    return sum(cross_entropy(logits, target) for logits, target in zip(both_logits, targets)) / 2


def nt_xent(
    first_embeddings: torch.Tensor,
    second_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
) -> torch.Tensor:
    """SimCLR's loss: each of the 2N views against the other 2N - 1, its partner being the positive (SimCLR, Eq. 1).

    With z the 2N views, l_ij = logit_scale * similarity(z_i, z_j), l_ii = -inf and p(i) the other view of the same
    image:

        mean over the 2N rows of  log sum_j exp l_ij - l_i,p(i)

    The published code returns twice as much, as it sums the means of both halves. Processes share the work as in
    `contrastive_loss`.

    Args:
        first_embeddings, second_embeddings: (local_batch, ...), the same shape on every process; row k of both shows
            one image.
        logit_scale: scalar tensor.
    Returns:
        Scalar in nats: this process's share. Equal logits give ln(2N - 1).
    Raises:
        ValueError: a function in place of a geometry, a module in place of the multiplier; shapes that differ.
    """
    check_geometry(geometry)
    logit_scale = as_scale(logit_scale, first_embeddings)
    if first_embeddings.shape != second_embeddings.shape:
        raise ValueError(
            f"two views of the same images need equal shapes, got {tuple(first_embeddings.shape)} and "
            f"{tuple(second_embeddings.shape)}"
        )
    all_first, all_second = gather_with_gradient(first_embeddings), gather_with_gradient(second_embeddings)
    views, other_views = (torch.cat(pair) for pair in permutations((first_embeddings, second_embeddings)))
    both = geometry.directions(views, torch.cat([all_first, all_second]))
    scores = both[0]
    local = torch.arange(len(first_embeddings), device=scores.device) + rank() * len(first_embeddings)
    itself, partner = torch.cat([local, local + len(all_first)]), torch.cat([local + len(all_first), local])
    if one_matrix(both):  # partners have all their digits, as in `contrastive_loss`
        scores = scores.scatter(1, partner[:, None], geometry.paired_similarity(views, other_views)[:, None])
    return cross_entropy(at_least_float32(logit_scale * scores).scatter(1, itself[:, None], -torch.inf), partner)


def check_geometry(geometry: Geometry) -> None:
    """Raises ValueError for a function, class or name: losses take the geometry itself, which has more digits."""
    if inspect.isroutine(geometry) or inspect.isclass(geometry) or type(geometry) is str:
        raise ValueError(f"a loss takes a geometry, such as Sphere() of common/geometry.py, not {geometry!r}")


def as_scale(logit_scale: torch.Tensor | float, embeddings: torch.Tensor) -> torch.Tensor:
    """The multiplier as a tensor beside the embeddings. Raises ValueError for a module in place of its value."""
    if isinstance(logit_scale, torch.nn.Module):
        raise ValueError(f"logit_scale is a {type(logit_scale).__name__}; expected its value, logit_scale()")
    if isinstance(logit_scale, torch.Tensor):
        return logit_scale
    dtype = torch.float64 if embeddings.dtype == torch.float64 else torch.float32
    return torch.tensor(float(logit_scale), dtype=dtype, device=embeddings.device)


def check_pairs(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    ids: torch.Tensor | None,
    queue: QueuedPairs | None,
    distillation: Distillation | None,
) -> None:
    """Raises ValueError unless the arguments of `contrastive_loss` fit each other."""
    for name, embeddings in (("image", image_embeddings), ("text", text_embeddings)):
        if not isinstance(embeddings, torch.Tensor) or embeddings.ndim < 2 or not len(embeddings):
            shape = tuple(getattr(embeddings, "shape", ()))
            raise ValueError(
                f"{name}_embeddings is a {type(embeddings).__name__} of shape {shape}; expected a tensor (batch, ...) "
                "of at least one pair"
            )
    batch = len(image_embeddings)
    if len(text_embeddings) != batch:
        raise ValueError(f"row k of images and texts is one pair: got {batch} images and {len(text_embeddings)} texts")
    if ids is not None and (ids.shape != (batch,) or ids.dtype != torch.int64):
        raise ValueError(f"ids of a batch of {batch} must be ({batch},) int64, got {tuple(ids.shape)} {ids.dtype}")
    sides = {"image": image_embeddings, "text": text_embeddings}
    if queue is not None:
        for (name, embeddings), rows in zip(sides.items(), (queue.image_embeddings, queue.text_embeddings)):
            if rows.shape[1:] != embeddings.shape[1:] or len(rows) != len(queue.ids):
                raise ValueError(
                    f"the queue's {name} embeddings {tuple(rows.shape)} and {len(queue.ids)} ids do not fit embeddings "
                    f"{tuple(embeddings.shape)}: all axes but the first must agree, and rows and ids in number"
                )
    if distillation is not None:
        for (name, embeddings), keys in zip(sides.items(), (distillation.image_keys, distillation.text_keys)):
            if keys.shape != embeddings.shape:
                raise ValueError(
                    f"{name} keys {tuple(keys.shape)} must be shaped as embeddings {tuple(embeddings.shape)}"
                )
