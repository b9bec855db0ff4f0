"""Ranks and recall from a matrix of scores and the map from captions to images. Arrays in, numbers out; no model.

Protocol (papers/evaluation.md, Sec. 1): i2t counts an image as found if any of its captions is in the top K; ties go to
the lower index, as a stable descending sort does; the share of queries whose best positive ties with a negative is
reported, because a collapsed model scores ties everywhere.
"""

from dataclasses import dataclass

import numba
import numpy as np
import torch

from common.compiled import compiled

RECALL_AT = (1, 5, 10)
TIE_WARNING = 1.0e-3  # share of queries


@dataclass(frozen=True)
class Ranks:
    """0-based rank of the best positive of each query.

    image_to_text: (num_image_queries,) images without captions are no queries; query_images says which these are.
    text_to_image: (num_texts,).
    tied_share: share of queries whose best positive ties with a candidate that is no positive.
    """

    image_to_text: torch.Tensor
    text_to_image: torch.Tensor
    query_images: torch.Tensor
    tied_share: float


def retrieval_ranks(scores: torch.Tensor, text_to_image: torch.Tensor) -> Ranks:
    """Exact ranks in both directions, in two passes over the scores and without sorting or copying them.

    Args:
        scores: (num_images, num_texts), float32 or float64, higher is closer.
        text_to_image: (num_texts,) row of the image that each caption belongs to.
    Returns:
        Ranks.
    Raises:
        ValueError: half precision, NaN or infinite scores, or a caption that points to no image.
    """
    num_images, num_texts = scores.shape
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"scores to be ranked must be float32 or float64 (half precision ties them), got {scores.dtype}"
        )
    if not torch.isfinite(scores).all():
        bad = int((~torch.isfinite(scores)).sum())
        raise ValueError(f"{bad} of {scores.numel()} scores are not finite; a sort would rank NaN first")
    if text_to_image.shape != (num_texts,):
        raise ValueError(f"text_to_image has shape {tuple(text_to_image.shape)}, scores have {num_texts} texts")
    if num_texts and (int(text_to_image.min()) < 0 or int(text_to_image.max()) >= num_images):
        found = f"{text_to_image.min()}..{text_to_image.max()}"
        raise ValueError(f"text_to_image must hold rows in [0, {num_images}), got {found}")

    table = scores.detach().cpu().contiguous().numpy()
    owners = text_to_image.cpu().long().numpy()
    captions = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[captions], np.arange(num_images + 1))
    image_ranks, image_tied = _ranks_of_images(table, captions, starts)
    text_ranks, text_tied = _ranks_of_texts(table, owners)
    query_images = np.flatnonzero(image_ranks >= 0)
    tied = np.concatenate([text_tied, image_tied[query_images]])
    return Ranks(
        image_to_text=torch.from_numpy(image_ranks[query_images]),
        text_to_image=torch.from_numpy(text_ranks),
        query_images=torch.from_numpy(query_images),
        tied_share=float(tied.mean()) if len(tied) else 0.0,
    )


@compiled(parallel=True)
def _ranks_of_images(scores, captions, starts):
    """Rank of each row's best positive (-1: no positive) and whether a negative ties with it.

    captions[starts[i] : starts[i + 1]] are the columns of row i's positives, ascending.
    """
    num_images, num_texts = scores.shape
    ranks = np.full(num_images, -1, np.int64)
    tied = np.zeros(num_images, np.bool_)
    for i in numba.prange(num_images):
        own = captions[starts[i] : starts[i + 1]]
        if len(own) == 0:
            continue
        first = own[0]  # the lowest index among the best positives
        for j in own:
            if scores[i, j] > scores[i, first]:
                first = j
        best = scores[i, first]
        above = equal = equal_own = 0
        for j in own:
            equal_own += scores[i, j] == best
        for j in range(num_texts):  # no branch: the compiler makes vector instructions of it
            above += scores[i, j] > best
            equal += scores[i, j] == best
        if equal > equal_own:
            tied[i] = True
            for j in range(first):  # equal scores before the best positive are negatives
                above += scores[i, j] == best
        ranks[i] = above
    return ranks, tied


@compiled(parallel=True)
def _ranks_of_texts(scores, owners):
    """Rank of each column's image and whether another image ties with it; a block of columns at a time."""
    num_images, num_texts = scores.shape
    ranks = np.zeros(num_texts, np.int64)
    tied = np.zeros(num_texts, np.bool_)
    width = 1024
    for block in numba.prange((num_texts + width - 1) // width):
        start = block * width
        count = min(num_texts, start + width) - start
        own = np.empty(count, scores.dtype)
        for k in range(count):
            own[k] = scores[owners[start + k], start + k]
        above, equal = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i in range(num_images):
            row = scores[i, start : start + count]
            for k in range(count):
                above[k] += row[k] > own[k]
                equal[k] += row[k] == own[k]
        for k in range(count):
            ranks[start + k] = above[k]
            if equal[k] > 1:
                tied[start + k] = True
                for i in range(owners[start + k]):
                    ranks[start + k] += scores[i, start + k] == own[k]
    return ranks, tied


def recall_at_k(ranks: torch.Tensor, k: int) -> float:
    """Share of queries whose best positive is among the first k candidates, in [0, 1]."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return float((ranks < k).double().mean())


def retrieval_metrics(ranks: Ranks) -> dict[str, float]:
    """R@1, R@5 and R@10 both ways, their mean (RSUM / 6) and the share of tied queries, all fractions in [0, 1]."""
    metrics = {f"i2t_recall_at_{k}": recall_at_k(ranks.image_to_text, k) for k in RECALL_AT}
    metrics |= {f"t2i_recall_at_{k}": recall_at_k(ranks.text_to_image, k) for k in RECALL_AT}
    metrics["mean_recall"] = sum(metrics.values()) / len(metrics)
    metrics["tied_share"] = ranks.tied_share
    return metrics


def chance_level(text_to_image: torch.Tensor, num_images: int) -> dict[str, float]:
    """Expected metrics of a random ranking, same keys as retrieval_metrics.

    An image with p captions among M texts is found in the top K with probability 1 - C(M - p, K) / C(M, K).
    """
    num_texts = len(text_to_image)
    captions = torch.bincount(text_to_image, minlength=num_images).double()
    captions = captions[captions > 0]
    chance = {}
    for k in RECALL_AT:
        missed = torch.ones_like(captions)
        for drawn in range(min(k, num_texts)):
            missed *= ((num_texts - captions - drawn) / (num_texts - drawn)).clamp(min=0)
        chance[f"i2t_recall_at_{k}"] = float((1 - missed).mean())
    chance |= {f"t2i_recall_at_{k}": min(1.0, k / num_images) for k in RECALL_AT}
    chance["mean_recall"] = sum(chance.values()) / len(chance)
    return chance
