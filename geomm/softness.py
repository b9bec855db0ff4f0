"""How soft a softmax over a pool is, and the factor on the logit scale with which two distances are equally soft.

cos(D / 4) spreads similarities less than the cosine, so that a graph makes the softmax softer. A gain may come from
that and not from the graph. At the step of the first graph the logit scale s of a run is therefore multiplied once:

    geodesic distance    f with H(S, f s) = H(c, s)    as sharp as the cosine
    cosine               f with H(c, f s) = H(S, s)    as soft as the geodesic distance

c are the cosines of a batch, S the similarities by a graph, H(X, s) the mean entropy of softmax(s X) over all columns.
The pools keep the factor. The geometric mean of both directions is used, as they share their scale.
"""

import copy
import math
from dataclasses import replace
from typing import Any

import torch

from common.distributed import broadcast_, gather_without_gradient
from common.methods.albef import Losses, QueueClip
from geomm.pool import GeodesicPool

DOUBLINGS = 10  # a factor lies between 2^-10 and 2^10
HALVINGS = 30  # of this interval's exponents


def mean_entropy(similarity: torch.Tensor, logit_scale: float) -> float:
    """Mean over rows of the entropy of softmax(logit_scale * similarity), in nats, in [0, ln num_columns]."""
    log_shares = (logit_scale * similarity).log_softmax(dim=1)
    return float(-(log_shares.exp() * log_shares).sum(dim=1).mean())


def matching_factor(similarity: torch.Tensor, entropy: float, logit_scale: float) -> float:
    """f with mean_entropy(similarity, f * logit_scale) = entropy, by bisection.

    There is at most one, as dH / ds = -s Var(similarity) <= 0 in each row, with the variance under the softmax.

    Raises:
        ValueError: none between 2^-10 and 2^10; with the entropies of both.
    """
    low, high = -float(DOUBLINGS), float(DOUBLINGS)
    softest, sharpest = (mean_entropy(similarity, logit_scale * 2**exponent) for exponent in (low, high))
    if not sharpest <= entropy <= softest:
        raise ValueError(
            f"no factor between 2^-{DOUBLINGS} and 2^{DOUBLINGS} on the logit scale {logit_scale:.4g} gives a mean "
            f"entropy of {entropy:.4g} nats; possible: {sharpest:.4g} to {softest:.4g}. Expected: method.match_entropy "
            "= false, or another reading (method.attach)"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if mean_entropy(similarity, logit_scale * 2**middle) > entropy:
            low = middle
        else:
            high = middle
    return 2 ** ((low + high) / 2)


@torch.no_grad()
def graph_and_cosine(
    pool: GeodesicPool, queries: torch.Tensor, keys: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Similarities of a step's queries by the graph and by the cosine, (num_queries, num_columns) each.

    Args:
        pool: full, before its factor is known; with distance "cosine" a copy of it builds the graph.
        keys: (local_batch, dim) of the step. Call on every process.
    """
    if pool.distance == "cosine":
        pool = copy.deepcopy(pool)
        pool.distance = "geodesic"
        pool.rebuild(step)
    candidates = pool.open(keys)
    return candidates.similarity(queries), replace(candidates, graph=None).similarity(queries)


def match_(model: QueueClip, losses: Losses, step: int) -> dict[str, Any]:
    """Solves for the factor of a model at the step of the first graph and writes it into its pools.

    Args:
        model: unwrapped. losses: of the step's batch, with the weights of the step. Call on every process.
    Returns:
        For the log: scale_factor, and per direction factor, entropy before it, and the entropy to match.
    """
    scale, factors, facts = float(model.logit_scale()), [], {}
    for side, queries, keys, pool in (
        ("i2t", losses.image_embeddings, losses.text_keys, model.text_pool),
        ("t2i", losses.text_embeddings, losses.image_keys, model.image_pool),
    ):
        similarity, other = graph_and_cosine(pool, gather_without_gradient(queries), keys, step)
        if pool.distance == "cosine":
            similarity, other = other, similarity
        entropy = mean_entropy(other, scale)
        factors.append(matching_factor(similarity, entropy, scale))
        facts |= {f"{side}_entropy": mean_entropy(similarity, scale), f"{side}_entropy_to_match": entropy}
        facts[f"{side}_factor"] = factors[-1]
    factor = torch.tensor(math.sqrt(factors[0] * factors[1]), device=model.text_pool.scale_factor.device)
    broadcast_(factor)  # the same on all processes to the last bit
    for pool in (model.image_pool, model.text_pool):
        pool.set_factor_(factor.item())
    return {"scale_factor": factor.item(), **facts}
