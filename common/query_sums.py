"""Running sums of InfoNCE over tiles of candidates: log-sum-exp, positives, soft targets; losses and residuals."""

import math

import torch
import torch.distributed as dist

from common.distributed import world_size

LOG2_E = 1 / math.log(2)  # exp2 takes a third of the time of exp on a CPU


class QuerySums:
    """What InfoNCE needs of every query, added up over its candidates tile by tile.

    All is relative to the partner's logit l. Where it dominates, 1 - p and log sum exp - l would otherwise be small
    differences of two rounded numbers.
        others      log sum exp of all logits but the partner's
        hard, count sum of the positives' logits minus l, and their number
        pseudo_lse  log sum exp of the pseudo-logits
        soft        mean of the logits minus l under the softmax of the pseudo-logits

    Args:
        partners: (queries,) logits; of this process's rows, or of the columns of all processes.
        alpha: target mass that follows the pseudo-logits.
    """

    def __init__(self, partners: torch.Tensor, alpha: float) -> None:
        self.partners, self.alpha = partners, alpha
        self.others, self.pseudo_lse = (torch.full_like(partners, -torch.inf) for _ in range(2))
        self.hard, self.count, self.soft = (torch.zeros_like(partners) for _ in range(3))

    def add(
        self,
        at: slice,
        logits: torch.Tensor,
        positive: torch.Tensor | None,
        pseudo: torch.Tensor | None,
        on_diagonal: bool = False,
    ) -> None:
        """Adds candidates of the queries `at`.

        Args:
            logits: (queries, candidates).
            positive: (queries, candidates) bool; None = no candidate is a positive.
            pseudo: (queries, candidates) pseudo-logits; None without distillation.
            on_diagonal: the tile is square and its diagonal holds the partners.
        """
        others = logits.clone().fill_diagonal_(-torch.inf) if on_diagonal else logits
        self.others[at] = torch.logaddexp(self.others[at], _logsumexp_of_rows(others))
        if positive is not None:
            self.hard[at] += torch.where(positive, logits - self.partners[at, None], 0.0).sum(dim=1)
            self.count[at] += positive.sum(dim=1)
        if pseudo is not None:
            before = self.pseudo_lse[at].clone()
            self.pseudo_lse[at] = torch.logaddexp(before, _logsumexp_of_rows(pseudo))
            mass = (pseudo - self.pseudo_lse[at, None]).exp_()
            self.soft[at] *= (before - self.pseudo_lse[at]).exp()
            self.soft[at] += (logits - self.partners[at, None]).mul_(mass).sum(dim=1)

    def combine(self) -> None:
        """Puts together what all processes added to the same queries."""
        if world_size() == 1:
            return
        self.others = _logsumexp_over_processes(self.others)
        if self.alpha:
            before, self.pseudo_lse = self.pseudo_lse, _logsumexp_over_processes(self.pseudo_lse)
            self.soft *= (before - self.pseudo_lse).exp()
        for total in (self.hard, self.count, self.soft):
            dist.all_reduce(total)

    def losses(self, at: slice) -> torch.Tensor:
        """(queries,): log sum exp minus the mean logit under the targets."""
        lse = torch.logaddexp(self.others[at] - self.partners[at], torch.zeros_like(self.partners[at]))
        return lse - (1 - self.alpha) * self.hard[at] / self.count[at] - self.alpha * self.soft[at]

    def residuals(
        self,
        at: slice,
        logits: torch.Tensor,
        positive: torch.Tensor | None,
        pseudo: torch.Tensor | None,
        on_diagonal: bool = False,
    ) -> torch.Tensor:
        """Softmax minus targets: the gradient of `losses` by the logits of the same call of `add`."""
        lse = torch.logaddexp(self.others[at], self.partners[at])
        residuals = torch.add(-LOG2_E * lse[:, None], logits, alpha=LOG2_E).exp2_()
        if positive is not None:
            residuals -= positive * ((1 - self.alpha) / self.count[at, None])
        if pseudo is not None:
            soft = (pseudo - self.pseudo_lse[at, None]).exp_().mul_(self.alpha)
            residuals -= soft
        if on_diagonal:  # p - 1 of the partner from its complement: p itself may be rounded to 1
            missing = 1 - (1 - self.alpha) / self.count[at] - (0.0 if pseudo is None else soft.diagonal())
            residuals.diagonal().copy_(missing - torch.sigmoid(self.others[at] - self.partners[at]))
        return residuals


def _logsumexp_of_rows(logits: torch.Tensor) -> torch.Tensor:
    """logsumexp(dim=1) through the fused log-softmax, whose largest entry in a row is -log sum exp(l - max)."""
    top = logits.amax(dim=1)
    # of a transposed tile along its memory: log_softmax copies what is not contiguous
    log_probabilities = logits.log_softmax(1) if logits.is_contiguous() else logits.T.log_softmax(0).T
    return torch.where(top == -torch.inf, top, top - log_probabilities.amax(dim=1))


def _logsumexp_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Element by element, of a vector that every process has."""
    top = values.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    total = (values - top).exp_()
    dist.all_reduce(total)
    return total.log_() + top
