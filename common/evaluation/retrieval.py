"""Ranks and recall from a matrix of scores and the map from captions to images. Arrays in, numbers out; no model.

Protocol (papers/evaluation.md, Sec. 1): i2t counts an image as found if any of its captions is in the top K; ties go to
the lower index, as a stable descending sort does; the share of queries whose best positive ties with a negative is
reported, because a collapsed model scores ties everywhere.
"""

from dataclasses import dataclass

import torch

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


def retrieval_ranks(scores: torch.Tensor, text_to_image: torch.Tensor, chunk_size: int = 512) -> Ranks:
    """Exact ranks in both directions.

    Args:
        scores: (num_images, num_texts), float32 or float64, higher is closer.
        text_to_image: (num_texts,) row of the image that each caption belongs to.
        chunk_size: rows compared at a time; memory is about 3 * chunk_size * num_texts bytes. Does not change results.
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
    if num_texts and not (int(text_to_image.min()) >= 0 and int(text_to_image.max()) < num_images):
        raise ValueError(
            f"text_to_image must hold rows in [0, {num_images}), got {text_to_image.min()}..{text_to_image.max()}"
        )

    device = scores.device
    text_index = torch.arange(num_texts, device=device)
    positive_scores = scores[text_to_image, text_index]  # of each caption with its own image
    text_ranks = torch.zeros(num_texts, dtype=torch.long, device=device)
    text_tied = torch.zeros(num_texts, dtype=torch.bool, device=device)
    image_ranks = torch.zeros(num_images, dtype=torch.long, device=device)
    image_tied = torch.zeros(num_images, dtype=torch.bool, device=device)
    has_captions = torch.zeros(num_images, dtype=torch.bool, device=device)
    has_captions[text_to_image] = True

    for start in range(0, num_images, chunk_size):
        block = scores[start : start + chunk_size]  # (rows, num_texts)
        rows = torch.arange(start, start + len(block), device=device)
        positive = rows[:, None] == text_to_image[None]

        above, equal = block > positive_scores, block == positive_scores
        text_ranks += (above | (equal & (rows[:, None] < text_to_image))).sum(dim=0)
        text_tied |= (equal & ~positive).any(dim=0)

        best = block.masked_fill(~positive, -torch.inf).max(dim=1, keepdim=True).values
        above, equal = block > best, block == best
        first = torch.where(positive & equal, text_index, num_texts).min(dim=1, keepdim=True).values
        image_ranks[start : start + len(block)] = (above | (equal & (text_index < first))).sum(dim=1)
        image_tied[start : start + len(block)] = (equal & ~positive).any(dim=1)

    query_images = has_captions.nonzero().squeeze(1)
    tied = torch.cat([text_tied, image_tied[query_images]]).double()
    return Ranks(
        image_to_text=image_ranks[query_images],
        text_to_image=text_ranks,
        query_images=query_images,
        tied_share=float(tied.mean()) if len(tied) else 0.0,
    )


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
