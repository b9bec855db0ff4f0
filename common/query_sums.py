"""Running sums of InfoNCE over tiles of candidates, and the losses and residuals that they give."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from common.distributed import world_size

LOG2_E = 1 / math.log(2)  # exp2 takes a third of the time of exp on a CPU


class Block(NamedTuple):
    """A square part of a tile, (queries, candidates), whose diagonal holds partners."""

    queries: slice
    candidates: slice

    def diagonal(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.queries, self.candidates].diagonal()

    @property
    def T(self) -> "Block":  # as of a tensor
        return Block(self.candidates, self.queries)


def part_of(outer: slice, inner: slice) -> slice:
    """`inner`, which counts from the start of `outer`, counted as `outer` is."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


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
        block: Block | None = None,
    ) -> None:
        """Adds candidates of the queries `at`.

        Args:
            logits: (queries, candidates); the partners' are overwritten.
            positive: (queries, candidates) bool, False at partners; None = only partners are positives.
            pseudo: (queries, candidates) pseudo-logits; None without distillation.
            block: where the partners are, if the tile has some.
        """
        if block is not None:
            partners = block.diagonal(logits)
            partners.fill_(-torch.inf)
        self.add_others(at, _logsumexp_of_rows(logits))
        if block is not None:
            queries = part_of(at, block.queries)
            self.count[queries] += 1
            if pseudo is not None:
                partners.copy_(self.partners[queries])
        if positive is not None:
            self.hard[at] += torch.where(positive, logits - self.partners[at, None], 0.0).sum(dim=1)
            self.count[at] += positive.sum(dim=1)
        if pseudo is not None:
            before = self.pseudo_lse[at].clone()
            self.pseudo_lse[at] = torch.logaddexp(before, _logsumexp_of_rows(pseudo))
            mass = (pseudo - self.pseudo_lse[at, None]).exp_()
            self.soft[at] *= (before - self.pseudo_lse[at]).exp()
            self.soft[at] += (logits - self.partners[at, None]).mul_(mass).sum(dim=1)

    def add_others(self, at: slice, log_sums: torch.Tensor) -> None:
        """Adds candidates that are no positives, by the log sum exp of their logits."""
        self.others[at] = torch.logaddexp(self.others[at], log_sums)

    def combine(self) -> None:
        """Combines what all processes added to the same queries."""
        if world_size() == 1:
            return
        self.others = _logsumexp_over_processes(self.others)
        if self.alpha:
            before, self.pseudo_lse = self.pseudo_lse, _logsumexp_over_processes(self.pseudo_lse)
            self.soft *= (before - self.pseudo_lse).exp()
        for total in (self.hard, self.count, self.soft):
            dist.all_reduce(total)

    def take(self, places: torch.Tensor) -> "QuerySums":
        taken = QuerySums(self.partners[places], self.alpha)
        for name in _SUMS:
            setattr(taken, name, getattr(self, name)[places])
        return taken

    def put_(self, places: torch.Tensor, taken: "QuerySums") -> None:
        for name in _SUMS:
            getattr(self, name)[places] = getattr(taken, name)

    def losses(self) -> torch.Tensor:
        """(queries,): log sum exp minus the mean logit under the targets."""
        lse = torch.logaddexp(self.others - self.partners, torch.zeros_like(self.partners))
        return lse - (1 - self.alpha) * self.hard / self.count - self.alpha * self.soft

    def partner_residuals(self, at: slice, pseudo_partners: torch.Tensor | None) -> torch.Tensor:
        """(queries,): the gradient of `losses` by the partners' logits."""
        # p - 1 from its complement: p itself may be rounded to 1
        missing = 1 - (1 - self.alpha) / self.count[at]
        if pseudo_partners is not None:
            missing -= self.alpha * (pseudo_partners - self.pseudo_lse[at]).exp()
        return missing - torch.sigmoid(self.others[at] - self.partners[at])


_SUMS = ("others", "pseudo_lse", "hard", "count", "soft")


class Direction(NamedTuple):
    """One of the two cross-entropies that a tile is part of.

    at: the tile's queries among those of the sums.
    weights: of their losses, at least 0: a scalar, or (queries,).
    axis: of the tile along which the queries lie.
    """

    sums: QuerySums
    at: slice
    weights: torch.Tensor
    axis: int = 0

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        return values[:, None] if self.axis == 0 else values

    def shifts(self) -> torch.Tensor:
        """(queries,): added to logits, their exponentials are the weighted softmax."""
        return self.weights.log() - torch.logaddexp(self.sums.others[self.at], self.sums.partners[self.at])


class Logits(Protocol):
    """Of a tile, which may not be made yet."""

    logits: Callable[[], torch.Tensor]
    add_to_: Callable[[torch.Tensor], torch.Tensor]  # a matrix, in place


def residuals(
    tile: Logits,
    directions: Sequence[Direction],
    positive: torch.Tensor | None,
    pseudo: torch.Tensor | None,
    pseudo_partners: torch.Tensor | None = None,
    block: Block | None = None,
) -> torch.Tensor:
    """Softmax minus targets: the gradient of the weighted losses of `directions` by the logits of a tile.

    Args:
        positive, pseudo, block: as in `QuerySums.add` of the first direction.
        pseudo_partners: the pseudo-logits of the block's partners.
    """
    shifts, hard, soft = [], [], []
    for direction in directions:
        sums, at, weights, _ = direction
        shifts.append(direction.spread(direction.shifts()))
        if positive is not None:
            hard.append(direction.spread(weights * (1 - sums.alpha) / sums.count[at]))
        if pseudo is not None:
            soft.append(direction.spread((weights * sums.alpha).log() - sums.pseudo_lse[at]))
    result = _sum_of_exp(tile.logits, tile.add_to_, shifts)
    if positive is not None:
        result -= positive * sum(hard)
    if pseudo is not None:
        result -= _sum_of_exp(lambda: pseudo, lambda matrix: matrix.add_(pseudo), soft)
    if block is not None:
        partners = torch.zeros_like(block.diagonal(result))
        for sums, at, weights, axis in directions:
            part = block[axis]
            weights = weights[part] if weights.ndim else weights
            partners += weights * sums.partner_residuals(part_of(at, part), pseudo_partners)
        block.diagonal(result).copy_(partners)
    return result


def _sum_of_exp(
    logits: Callable[[], torch.Tensor],
    add_to_: Callable[[torch.Tensor], torch.Tensor],
    shifts: list[torch.Tensor],
) -> torch.Tensor:
    # exp(logits + shift), added up over shifts that broadcast
    if shifts[0].is_cuda and len(shifts) == 2:  # bound by memory: one exponential, and few passes over the tile
        return add_to_(torch.logaddexp(*shifts)).exp_()
    values = logits()  # on a CPU logaddexp takes as long as the tile's product
    terms = [torch.add(LOG2_E * shift, values, alpha=LOG2_E).exp2_() for shift in shifts]
    return terms[0] if len(terms) == 1 else terms[0].add_(terms[1])


def _logsumexp_of_rows(logits: torch.Tensor) -> torch.Tensor:
    # logsumexp(dim=1); of a transposed tile along its memory: log_softmax copies what is not contiguous
    matrix, axis = (logits, 1) if logits.is_contiguous() else (logits.T, 0)
    if not logits.is_cuda:
        top = matrix.amax(axis, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)  # nothing but partners
        return torch.add(-LOG2_E * top, matrix, alpha=LOG2_E).exp2_().sum(axis).log_().add_(top.squeeze(axis))
    if axis == 0:  # there log-softmax is fast along the rows of the memory only
        return matrix.logsumexp(0)
    # bound by memory: top - log p(top), with the fused log-softmax and the place of the largest entry
    top, place = (column.flatten() for column in matrix.max(axis, keepdim=True))
    log_largest = matrix.log_softmax(axis).gather(axis, place[:, None]).flatten()
    return torch.where(top == -torch.inf, top, top - log_largest)


def _logsumexp_over_processes(values: torch.Tensor) -> torch.Tensor:
    # element by element, of a vector that every process has
    top = values.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    total = (values - top).exp_()
    dist.all_reduce(total)
    return total.log_() + top
