"""Two-stage retrieval (ALBEF, TCL, GeoMM): contrastive scores choose k candidates, a matching head ranks these.

Candidates are ranked by the logit of "these two match"; all others keep their places behind them. The released code
fills the others with -100 instead: the same recalls for K <= k, as long as no logit lies below.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from common.data.pairs import Pairs
from common.distributed import rank, world_size
from common.evaluation.arrays import tensor_of
from common.evaluation.embed import (
    CaptionRule,
    EmbeddedPairs,
    Encoder,
    ScoreParts,
    batches_here,
    embed_pairs,
    retrieval_evaluation,
)
from common.evaluation.protocol import Evaluation
from common.evaluation.retrieval import (
    RECALL_AT,
    Part,
    Positives,
    Ranks,
    combine_over_processes,
    ranks_of_parts,
)

SCORES_AT_ONCE = 1 << 22  # searched for the best candidates; 40 bytes a score
# (num_pairs,) image rows and (num_pairs,) text columns, int64 on the CPU -> (num_pairs,) logits, larger matches better
Match = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TwoStage:
    """Ranks by the contrastive scores and after matching.

    i2t_kept_share, t2i_kept_share: share of queries with a positive among the k candidates, an upper bound of the
        second stage.
    """

    contrastive: Ranks
    matched: Ranks
    i2t_kept_share: float
    t2i_kept_share: float


def two_stage_ranks(
    scores: torch.Tensor,
    positives: torch.Tensor | Positives,
    match: Match,
    k_test: int,
    *,
    pairs_at_once: int = 1024,
    text_scores: torch.Tensor | None = None,
) -> TwoStage:
    """Ranks of both stages, on every process; each matches its share of the queries, in equally many calls of `match`.

    Args:
        scores: (num_images, num_texts) of the first stage, float32 or float64; all of them on every process.
        positives, text_scores: as in `retrieval_ranks`.
        match: logits of pairs of several queries in one call. i2t asks image by image, t2i text by text.
        k_test: candidates matched per query (COCO 256, Flickr30k 128); all of them where there are fewer.
        pairs_at_once: most pairs per call of `match`, but at least one query; bounds the memory beyond the scores.
    Raises:
        ValueError: k_test below 10 (R@10 would count what was not matched), logits of another shape, in half precision
            or not finite; and as `retrieval_ranks`.
    """
    tables = [None if table is None else tensor_of(table, "scores").detach().cpu() for table in (scores, text_scores)]
    if not isinstance(positives, Positives):
        positives = Positives.from_owners(positives, len(tables[0]))
    part = Part(torch.arange(positives.num_images), *tables)
    return two_stage_of_parts([part], positives, match, k_test, pairs_at_once=pairs_at_once)


def two_stage_of_parts(
    parts: Iterable[Part],
    positives: Positives,
    match: Match,
    k_test: int,
    *,
    pairs_at_once: int = 1024,
) -> TwoStage:
    """`two_stage_ranks` of scores in parts, as in `ranks_of_parts`; every process has all of them."""
    if k_test < max(RECALL_AT):
        raise ValueError(f"k_test = {k_test}; expected: at least {max(RECALL_AT)}")
    contrastive = ranks_of_parts(parts, positives)

    def by_text(texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return match(images, texts)

    candidates_of_images, candidates_of_texts = _candidates(parts, positives, k_test)
    *of_images, images_kept = _rerank(
        candidates_of_images, positives.texts, positives.image_starts, contrastive.image_to_text, match, pairs_at_once
    )
    *of_texts, texts_kept = _rerank(
        candidates_of_texts, positives.images, positives.text_starts, contrastive.text_to_image, by_text, pairs_at_once
    )
    matched = Ranks.of(positives, *of_images, *of_texts)
    return TwoStage(contrastive, matched, float(images_kept.mean()), float(texts_kept.mean()))


def evaluate_two_stage(
    encoder: Encoder,
    pairs: Pairs,
    build_match: Callable[[EmbeddedPairs], Match],
    k_test: int,
    rule: CaptionRule = CaptionRule(),  # noqa: B008
    pairs_at_once: int = 1024,
) -> dict[str, Evaluation]:
    """Both stages on a test set; each process matches its share.

    Args:
        build_match: embedded test set, whose `indices` and `captions` say what row and column are -> `match`.
        k_test: as in `two_stage_ranks`.
    Returns:
        "contrastive" and "matched" -> Evaluation.
    """
    embedded = embed_pairs(encoder, pairs, rule)
    parts = ScoreParts(encoder, embedded.images, embedded.texts, shared=False)
    positives = Positives.from_owners(embedded.text_to_image, len(embedded.images))
    stages = two_stage_of_parts(parts, positives, build_match(embedded), k_test, pairs_at_once=pairs_at_once)
    matched_at_most = min(k_test, max(positives.num_images, positives.num_texts))

    def evaluation(ranks: Ranks, ranking: str) -> Evaluation:
        protocol = embedded.protocol(encoder, positives, parts.dtype, ranking=ranking)
        return retrieval_evaluation(ranks, positives, embedded.text_to_image, protocol)

    matched = evaluation(stages.matched, f"matching head on the {matched_at_most} most similar")
    matched.metrics.update(i2t_kept_share=stages.i2t_kept_share, t2i_kept_share=stages.t2i_kept_share)
    return {"contrastive": evaluation(stages.contrastive, "similarity"), "matched": matched}


def _candidates(parts: Iterable[Part], positives: Positives, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The k candidates of every image and of every text, or all if there are fewer, int32, ascending.
    #
    # Parts come in ascending order of their images, so a text keeps its best k among the images so far.
    of_images = torch.empty(positives.num_images, min(k, positives.num_texts), dtype=torch.int32)
    best, places = None, torch.empty(positives.num_texts, 0, dtype=torch.int32)
    for rows, scores, text_scores in parts:
        for block in _blocks(len(rows), positives.num_texts):
            of_images[rows[block]] = best_candidates(scores[block], of_images.shape[1]).int()
        table = scores if text_scores is None else text_scores
        best = table.new_empty(positives.num_texts, 0) if best is None else best
        merged = []
        for block in _blocks(positives.num_texts, len(rows) + best.shape[1]):
            texts = table[:, block].T
            values = torch.cat([best[block], texts], dim=1)
            images = torch.cat([places[block], rows.int().expand(len(texts), -1)], dim=1)
            kept = best_candidates(values, min(k, values.shape[1]))
            merged.append((values.gather(1, kept), images.gather(1, kept)))
        best, places = (torch.cat(tables) for tables in zip(*merged))
    return of_images, places


def _blocks(count: int, width: int) -> Iterator[slice]:
    # Rows of a table of so many columns, some millions of scores at a time.
    size = max(1, SCORES_AT_ONCE // width)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _rerank(
    candidates_of: torch.Tensor,
    positives: np.ndarray,
    starts: np.ndarray,
    first_ranks: torch.Tensor,
    match: Match,
    pairs_at_once: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # One direction; candidates_of (all queries, k), first_ranks those of the queries that have positives.
    #
    # Of every query with positives: rank, whether a negative ties with its best positive, whether one was matched.
    k = candidates_of.shape[1]
    queries = np.flatnonzero(np.diff(starts))
    results = np.zeros((3, len(queries)), np.int64)
    bad = np.zeros(1, np.int64)
    size = max(1, pairs_at_once // k)
    for number, places in enumerate(batches_here(len(queries), size)):
        query_indices = torch.from_numpy(queries[places])
        kept = candidates_of[query_indices].long()
        logits = match(query_indices.repeat_interleave(k), kept.flatten())
        if logits.shape != (kept.numel(),) or logits.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"match returned {tuple(logits.shape)} {logits.dtype} for {kept.numel()} pairs; expected: one float32 "
                "or float64 logit per pair (half precision ties them)"
            )
        logits = logits.detach().cpu().view_as(kept).numpy()
        if (rank() + number * world_size()) * size >= len(queries):  # padding, for equally many calls everywhere
            continue
        bad += (~np.isfinite(logits)).sum()
        for place, candidates, row in zip(places, kept.numpy(), logits):
            is_positive = np.isin(candidates, positives[starts[queries[place]] : starts[queries[place] + 1]])
            if is_positive.any():
                first = np.argmax(np.where(is_positive, row, -np.inf))  # the lowest index among the best positives
                equal = (row == row[first]) & ~is_positive
                results[:, place] = (row > row[first]).sum() + equal[:first].sum(), equal.any(), 1
            else:
                results[:, place] = int(first_ranks[place]), 0, 0
    results, bad = combine_over_processes(results, "SUM"), combine_over_processes(bad, "SUM")
    if bad[0]:
        raise ValueError(f"{bad[0]} match logits are not finite; a sort would rank NaN first")
    return results[0], results[1] > 0, results[2] > 0


def best_candidates(scores: torch.Tensor, k: int) -> torch.Tensor:
    """(num_queries, k) ascending indices of the highest scores, ties to the lower index (torch.topk keeps any)."""
    scores = tensor_of(scores, "scores")
    last = scores.topk(k, dim=1).values[:, -1:]
    above, equal = scores > last, scores == last
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(len(scores), k)
