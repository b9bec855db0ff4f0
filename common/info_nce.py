"""InfoNCE: one loss for every geometry, kind of target and source of negatives, in one process or many.

For a query i and candidates j, with logits l_ij = logit_scale * similarity and targets t_ij >= 0 that sum to 1 per row:

    loss_i = - sum_j t_ij ( l_ij - log sum_k exp l_ik ),        mean over i

Index targets are the case of one t_ij = 1. A missing candidate has l_ij = -inf (`mask_absent`).
Logits and loss are float32 or better, under autocast too: half precision ties close candidates.

Every mistake that only the values show (an index out of range, a row without a positive, a row with all candidates
masked) raises ValueError on the CPU. On an accelerator the check would stall the device in every step. There the loss
of such a row is NaN or infinite (or the device asserts), and stops the run.
"""

import inspect
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.distributed import gather_with_gradient, gather_without_gradient, rank, world_size
from common.geometry import Geometry, at_least_float32, full_precision, one_matrix


class QueuedPairs(NamedTuple):
    """Pairs of past steps, as constant candidates until the backward pass: row k of all three belongs to one pair.

    image_embeddings, text_embeddings: (num_rows, ...), shaped like those of the step (`FeatureQueue.rows`).
    ids: (num_rows,) int64, negative = not known (`FeatureQueue.row_ids`).
    """

    image_embeddings: torch.Tensor
    text_embeddings: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Distillation:
    """Pseudo-targets: alpha of each row's target mass follows softmax(logit_scale * similarity) of the keys (ALBEF).

    The candidates in the batch are keys too here; a queue's rows stand for themselves.

    image_keys, text_keys: (local_batch, ...) embeddings of the momentum model for this process's pairs, in their order;
        constants.
    alpha: in [0, 1].
    """

    image_keys: torch.Tensor
    text_keys: torch.Tensor
    alpha: float

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)


def info_nce_chance(local_batch: int, queue: QueuedPairs | None = None) -> float:
    """InfoNCE of a model to which all candidates are equal, ln(candidates), in nats.

    Args:
        local_batch: pairs of this process, as many as of each other process.
    """
    return math.log(world_size() * local_batch + (0 if queue is None else len(queue.ids)))


def info_nce(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each row against its positive or positives (oblique submission Eq. 2, one direction).

    Args:
        logits: (num_queries, num_candidates); half precision is cast up. -inf = the candidate is missing.
        targets: (num_queries,) int64 index of each row's positive, or (num_queries, num_candidates) row-stochastic
            (`check_row_stochastic` checks the sums; here they are not checked).
    Returns:
        Scalar in nats, >= 0 for index targets. Equal logits give ln(num_candidates).
    Raises:
        ValueError: shapes or dtypes that do not fit; the message gives them. On the CPU also an index out of range, or
            a positive that is missing.
    """
    if logits.ndim != 2 or not len(logits):
        raise ValueError(
            f"InfoNCE needs logits (num_queries, num_candidates), at least one row, got {tuple(logits.shape)}"
        )
    by_index = targets.dtype == torch.int64 and targets.shape == logits.shape[:1]
    if not by_index and not (targets.is_floating_point() and targets.shape == logits.shape):
        raise ValueError(
            f"targets {tuple(targets.shape)} {targets.dtype} do not fit logits {tuple(logits.shape)}; expected: "
            f"({logits.shape[0]},) int64 indices, or {tuple(logits.shape)} floating row-stochastic"
        )
    if by_index:
        _refuse_rows((targets < 0) | (targets >= logits.shape[1]), f"index targets outside [0, {logits.shape[1]})")
    loss = _cross_entropy(logits, targets)
    if loss.device.type == "cpu" and not torch.isfinite(loss):
        picked = logits.gather(1, targets[:, None]) if by_index else logits.masked_fill(~(targets > 0), 0.0)
        _refuse_rows((picked == -torch.inf).any(dim=1), "the positive is masked (its logit is -inf)")
    return loss


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`info_nce` without checks: the loss of a distance that overflowed is infinite or NaN."""
    with full_precision(logits):
        logits = at_least_float32(logits)
        if targets.ndim == 1:
            return F.cross_entropy(logits, targets)
        positive = targets > 0  # 0 * -inf would be NaN for a masked candidate
        terms = targets.to(logits.dtype) * logits.log_softmax(dim=1).where(positive, 0.0)
        return -terms.sum() / len(logits)


def symmetric_info_nce(logits: torch.Tensor) -> torch.Tensor:
    """Mean of both directions for a square matrix whose diagonal holds the positives (contrastive basics Eq. 6 to 8).

    (1/2B) sum_i [ log sum_k exp l_ik + log sum_k exp l_ki - 2 l_ii ]

    Args:
        logits: (batch, batch), rows are images, columns are texts.
    Returns:
        Scalar in nats.
    Raises:
        ValueError: if the matrix is not square; the message gives its shape.
    """
    if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
        raise ValueError(f"in-batch InfoNCE needs a square matrix of logits, got {tuple(logits.shape)}")
    targets = torch.arange(len(logits), device=logits.device)
    return (info_nce(logits, targets) + info_nce(logits.T, targets)) / 2


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

    The positive of a row is its partner; with ids, its partner and all candidates of the same id, with equal mass
    (as in ALBEF's fine-tuning): a sample drawn twice is no negative. With distillation, alpha
    of each row's mass follows a momentum model instead.

    With W processes each computes its local rows and columns against all candidates: B/W x B similarities instead of
    B x B. The mean of the returned values over processes is the global loss, and since gradients are averaged over
    processes (DDP, FSDP) every parameter gets the gradient of the global loss, trainable scalars included.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process.
        geometry: compares all pairs by its `directions`, and partners by its `paired_similarity`, which keeps the
            digits of close pairs. Two matrices (late interaction) keep their own diagonals.
        logit_scale: scalar tensor, the multiplier.
        ids: (local_batch,) int64 of the samples, negative = not known; None = partners are the only positives.
        queue: pairs of past steps, the same on every process; they get no gradient.
        distillation: what the momentum model made of this process's pairs.
    Returns:
        Scalar in nats: this process's share of the global loss.
    Raises:
        ValueError: no geometry, but its similarity; shapes of texts, ids, queue or keys that do not fit the images.
    """
    check_geometry(geometry)
    check_pairs(image_embeddings, text_embeddings, ids, queue, distillation)
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
    return sum(_cross_entropy(logits, target) for logits, target in zip(both_logits, targets)) / 2


def nt_xent(
    first_embeddings: torch.Tensor,
    second_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
) -> torch.Tensor:
    """SimCLR's loss: each of the 2N views against the other 2N - 1, its partner being the positive.

    With z the 2N views, l_ij = logit_scale * similarity(z_i, z_j), l_ii = -inf and p(i) the other view of the same
    image (SimCLR, Eq. 1):

        mean over the 2N rows of  log sum_j exp l_ij - l_i,p(i)

    Half of what the published code returns, which sums the means of both halves. Processes share the work as in
    `contrastive_loss`, and all gradients are those of the global batch.

    Args:
        first_embeddings, second_embeddings: (local_batch, ...), the same shape on every process; row k of both shows
            one image.
        geometry: compares views, by its `similarity`.
        logit_scale: scalar tensor, the multiplier.
    Returns:
        Scalar in nats: this process's share. Equal logits give ln(2N - 1).
    Raises:
        ValueError: no geometry, but its similarity; shapes that differ, the message gives both.
    """
    check_geometry(geometry)
    if first_embeddings.shape != second_embeddings.shape:
        raise ValueError(
            f"two views of the same images need equal shapes, got {tuple(first_embeddings.shape)} and "
            f"{tuple(second_embeddings.shape)}"
        )
    all_first, all_second = gather_with_gradient(first_embeddings), gather_with_gradient(second_embeddings)
    logits = logit_scale * geometry.similarity(
        torch.cat([first_embeddings, second_embeddings]), torch.cat([all_first, all_second])
    )
    local = torch.arange(len(first_embeddings), device=logits.device) + rank() * len(first_embeddings)
    itself, partner = torch.cat([local, local + len(all_first)]), torch.cat([local + len(all_first), local])
    return _cross_entropy(at_least_float32(logits).scatter(1, itself[:, None], -torch.inf), partner)


def positives_from_ids(
    query_ids: torch.Tensor,
    candidate_ids: torch.Tensor,
    partner_columns: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Targets with equal mass on all candidates of the query's id: t_ij = [id_i = id_j] / sum_k [id_i = id_k].

    A negative id is not known and equals no other.

    Args:
        query_ids: (num_queries,) int64.
        candidate_ids: (num_candidates,) int64.
        partner_columns: (num_queries,) int64 column of each query's partner, a positive for any ids; None = positives
            are those of equal ids only.
        dtype: of the result; float64 where the loss is.
    Returns:
        (num_queries, num_candidates), row-stochastic, for `info_nce`.
    Raises:
        ValueError: ids that are not int64 vectors; on the CPU also a query without any positive, naming rows and ids.
            On an accelerator such a row is NaN.
    """
    for name, vector in (("query_ids", query_ids), ("candidate_ids", candidate_ids)):
        if vector.ndim != 1 or vector.dtype != torch.int64:
            raise ValueError(f"{name} must be a vector of int64, got {tuple(vector.shape)} {vector.dtype}")
    positive = (query_ids[:, None] == candidate_ids) & (query_ids[:, None] >= 0)
    if partner_columns is not None:
        positive = positive.scatter(1, partner_columns[:, None], True)
    count = positive.sum(dim=1, keepdim=True)  # at least 1 with partners: only without them a row may be empty
    if partner_columns is None:
        _refuse_rows(count[:, 0] == 0, "no candidate has the id of the query", query_ids)
    return positive.to(dtype) / count


def distilled_targets(pseudo_logits: torch.Tensor, targets: torch.Tensor, alpha: float) -> torch.Tensor:
    """Pseudo-targets mixed with hard ones: alpha softmax(pseudo_logits) + (1 - alpha) one_hot (ALBEF, Eq. 6).

    Args:
        pseudo_logits: (num_queries, num_candidates), scaled similarities of the momentum model; -inf = missing.
        targets: as in `info_nce`, by index or row-stochastic.
        alpha: distillation weight in [0, 1].
    Returns:
        (num_queries, num_candidates), row-stochastic, float32 or better, without gradient.
    Raises:
        ValueError: alpha out of range, or targets that do not fit.
    """
    _check_alpha(alpha)
    if targets.shape not in (pseudo_logits.shape, pseudo_logits.shape[:1]):
        raise ValueError(f"targets {tuple(targets.shape)} do not fit pseudo-logits {tuple(pseudo_logits.shape)}")
    with torch.no_grad(), full_precision(pseudo_logits):
        mixed = alpha * at_least_float32(pseudo_logits).softmax(dim=1)
        if targets.ndim == 2:
            return mixed + (1 - alpha) * targets.to(mixed.dtype)
        return mixed.scatter_add(1, targets[:, None], torch.full_like(mixed[:, :1], 1 - alpha))


def mask_absent(logits: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """-inf where a candidate is missing (padding, a queue that is not full); its probability and gradient are 0.

    Args:
        logits: (num_queries, num_candidates).
        present: bool, (num_candidates,) or (num_queries, num_candidates).
    Returns:
        Like logits.
    Raises:
        ValueError: a shape or dtype that does not fit; on the CPU also a row with all candidates masked.
    """
    if present.dtype != torch.bool or present.shape not in (logits.shape, logits.shape[1:]):
        raise ValueError(
            f"present must be bool, {tuple(logits.shape[1:])} or {tuple(logits.shape)}, got {tuple(present.shape)} "
            f"{present.dtype}"
        )
    _refuse_rows(~present.any(dim=-1, keepdim=present.ndim == 1), "every candidate is masked")
    return logits.masked_fill(~present, -torch.inf)


def check_row_stochastic(targets: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Raises ValueError, naming the rows, unless entries are >= 0 and every row sums to 1. Reads all of a matrix.

    Args:
        targets: (num_queries, num_candidates).
    """
    sums = targets.double().sum(dim=1)
    wrong = ~((sums - 1).abs() <= tolerance) | (targets < 0).any(dim=1)  # a NaN is wrong too
    _refuse_rows(wrong.cpu(), "targets must be >= 0 and sum to 1 in each row", sums)


def _refuse_rows(bad: torch.Tensor, problem: str, values: torch.Tensor | None = None) -> None:
    """ValueError that names the first bad rows (and their values); only on the CPU, see the module's docstring."""
    if bad.device.type == "cpu" and bad.any():
        rows = bad.nonzero()[:, 0].tolist()
        shown = ", ".join(str(row) if values is None else f"{row} ({values[row].item()})" for row in rows[:4])
        raise ValueError(f"{problem}: {len(rows)} of {len(bad)} rows: {shown}{', ...' if len(rows) > 4 else ''}")


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"the distillation weight alpha must lie in [0, 1], got {alpha}")


def check_geometry(geometry: Geometry) -> None:
    """Raises ValueError for a function: losses take the geometry itself, as its partners keep more digits."""
    if inspect.isroutine(geometry):
        raise ValueError(f"a loss takes a geometry, such as Sphere() of common/geometry.py, not {geometry!r}")


def check_pairs(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    ids: torch.Tensor | None,
    queue: QueuedPairs | None,
    distillation: Distillation | None,
) -> None:
    """Raises ValueError, with the shapes, unless the arguments of `contrastive_loss` fit each other."""
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
