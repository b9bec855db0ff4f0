"""InfoNCE of a matrix of logits and its targets, whatever compared the pairs."""

import torch
import torch.nn.functional as F

from common.vectors import at_least_float32, full_precision


def info_nce(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each row against its positive or positives (oblique submission Eq. 2, one direction).

    Args:
        logits: (num_queries, num_candidates); half precision is cast up. -inf = the candidate is missing.
        targets: (num_queries,) int64 index of each row's positive, or (num_queries, num_candidates) row-stochastic,
            whose sums only `check_row_stochastic` checks.
    Returns:
        Scalar in nats, >= 0 for index targets. Equal logits give ln(num_candidates).
    Raises:
        ValueError: shapes or dtypes that do not fit; on the CPU also an index out of range, or a missing positive.
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
    loss = cross_entropy(logits, targets)
    if loss.device.type == "cpu" and not torch.isfinite(loss):
        picked = logits.gather(1, targets[:, None]) if by_index else logits.masked_fill(~(targets > 0), 0.0)
        _refuse_rows((picked == -torch.inf).any(dim=1), "the positive is masked (its logit is -inf)")
    return loss


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
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
        ValueError: if the matrix is not square.
    """
    if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
        raise ValueError(f"in-batch InfoNCE needs a square matrix of logits, got {tuple(logits.shape)}")
    targets = torch.arange(len(logits), device=logits.device)
    return (info_nce(logits, targets) + info_nce(logits.T, targets)) / 2


def positives_from_ids(
    query_ids: torch.Tensor,
    candidate_ids: torch.Tensor,
    partner_columns: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Targets with equal mass on all candidates of the query's id: t_ij = [id_i = id_j] / sum_k [id_i = id_k].

    A negative id is unknown and equals no other.

    Args:
        query_ids, candidate_ids: (num_queries,) and (num_candidates,) int64.
        partner_columns: (num_queries,) int64 column of each query's partner, a positive for any ids; None = only equal
            ids.
        dtype: of the result; float64 where the loss is.
    Returns:
        (num_queries, num_candidates), row-stochastic.
    Raises:
        ValueError: ids that are not int64 vectors; on the CPU also a query without a positive, whose row is NaN
            elsewhere.
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
        pseudo_logits: (num_queries, num_candidates), logits of the momentum model; -inf = missing.
        targets: as in `info_nce`.
        alpha: in [0, 1].
    Returns:
        (num_queries, num_candidates), row-stochastic, float32 or better, without gradient.
    Raises:
        ValueError: alpha out of range, or targets that do not fit.
    """
    check_alpha(alpha)
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
        present: bool, (num_candidates,) or (num_queries, num_candidates).
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
    """Raises ValueError, naming the rows, unless entries are >= 0 and every row sums to 1. Reads the whole matrix."""
    sums = targets.double().sum(dim=1)
    wrong = ~((sums - 1).abs() <= tolerance) | (targets < 0).any(dim=1)  # a NaN is wrong too
    _refuse_rows(wrong.cpu(), "targets must be >= 0 and sum to 1 in each row", sums)


def _refuse_rows(bad: torch.Tensor, problem: str, values: torch.Tensor | None = None) -> None:
    # only on the CPU: elsewhere the host would wait for the device
    if bad.device.type == "cpu" and bad.any():
        rows = bad.nonzero()[:, 0].tolist()
        shown = ", ".join(str(row) if values is None else f"{row} ({values[row].item()})" for row in rows[:4])
        raise ValueError(f"{problem}: {len(rows)} of {len(bad)} rows: {shown}{', ...' if len(rows) > 4 else ''}")


def check_alpha(alpha: float) -> None:
    """Raises ValueError for a distillation weight outside [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"the distillation weight alpha must lie in [0, 1], got {alpha}")
