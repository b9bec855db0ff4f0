"""Ranks, recall and precision from a matrix of scores and the relation of what is right.

Protocol: a query is found if any of its positives is in the top K; ties go to the lower index, as in a stable
descending sort; a query without positives is not counted, but stays a candidate. The share of tied queries is reported,
because a collapsed model scores ties everywhere.

The scores may be split by rows, over processes (argument `rows`) or in memory (`ranks_of_parts`). Only maxima and
counts are exchanged: the result is equal to the last bit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from common.distributed import world_size
from common.evaluation.arrays import labels_of, tensor_of
from common.evaluation.positives import Positives
from common.evaluation.rank_loops import (
    best_of_texts,
    counts_of_texts,
    equal_positives,
    ranks_of_image_positives,
    ranks_of_images,
    ranks_of_text_positives,
    scores_of_text_positives,
)

RECALL_AT = (1, 5, 10)


@dataclass(frozen=True)
class Ranks:
    """0-based rank of the best positive of each query.

    image_to_text: (num_image_queries,); query_images holds their images.
    text_to_image: (num_text_queries,); query_texts holds their texts.
    tied_share: share of queries whose best positive ties with a negative. Equal captions of two images explain ties of
        image queries, not of text queries.
    """

    image_to_text: torch.Tensor
    text_to_image: torch.Tensor
    query_images: torch.Tensor
    query_texts: torch.Tensor
    tied_share: float
    i2t_tied_share: float
    t2i_tied_share: float

    @classmethod
    def of(
        cls, positives: Positives, image_ranks: np.ndarray, image_tied: np.ndarray, text_ranks: np.ndarray,
        text_tied: np.ndarray,
    ) -> "Ranks":  # fmt: skip
        both = np.concatenate([image_tied, text_tied])
        arrays = (image_ranks, text_ranks, positives.query_images, positives.query_texts)
        shares = (float(tied.mean()) if len(tied) else 0.0 for tied in (both, image_tied, text_tied))
        return cls(*map(torch.from_numpy, arrays), *shares)


@dataclass(frozen=True)
class PerQuery:
    """Results of single queries: metric -> (num_queries,) in [0, 1], for the queries of `Ranks`."""

    image_to_text: dict[str, np.ndarray]
    text_to_image: dict[str, np.ndarray]
    query_images: np.ndarray
    query_texts: np.ndarray


class Part(NamedTuple):
    """Scores of some images.

    rows: (num_rows,) ascending: which images these are.
    scores: (num_rows, num_texts), float32 or float64, higher is closer.
    text_scores: as scores, where texts rank images by other ones (late interaction).
    """

    rows: torch.Tensor
    scores: torch.Tensor
    text_scores: torch.Tensor | None = None

    @classmethod
    def of(cls, scores: Any, num_images: int, rows: Any = None, text_scores: Any = None) -> "Part":
        """From tensors or arrays; rows None = all images."""
        images = torch.arange(num_images) if rows is None else labels_of(rows, "rows")
        others = None if text_scores is None else tensor_of(text_scores, "text_scores")
        return cls(images, tensor_of(scores, "scores"), others)


def retrieval_ranks(
    scores: torch.Tensor,
    positives: torch.Tensor | Positives,
    *,
    rows: torch.Tensor | None = None,
    text_scores: torch.Tensor | None = None,
) -> Ranks:
    """Exact ranks in both directions, in two passes over the scores, which are neither sorted nor copied.

    Args:
        scores, text_scores: as in `Part`.
        positives: Positives, or (num_texts,) row of each caption's image; with `rows` Positives.
        rows: (num_rows,) ascending: the images whose scores this process holds, each on exactly one process; all make
            this call and get the result. None = all images.
    Raises:
        ValueError: half precision, NaN or infinite scores, shapes that do not fit, or an image held twice or by no
            process.
    """
    if not isinstance(positives, Positives):
        positives = Positives.from_owners(positives, len(scores))
    return ranks_of_parts(
        [Part.of(scores, positives.num_images, rows, text_scores)], positives, shared=rows is not None
    )


def ranks_of_parts(parts: Iterable[Part], positives: Positives, *, shared: bool = False) -> Ranks:
    """`retrieval_ranks` of scores of which some rows are in memory at a time.

    Args:
        parts: iterated twice, with the same scores; at least one, each image in exactly one.
        shared: other processes hold the other images; all make this call and get the result.
    """
    over = _Over(positives, shared)
    # first pass: the ranks of images, which need one row only, and the best positive of each text
    image_ranks, image_tied = np.zeros((2, positives.num_images), np.int64)
    best = first = None
    for by_image, by_text in over.checked(parts):
        image_ranks[by_image.rows], image_tied[by_image.rows] = ranks_of_images(
            by_image.table, by_image.rows, positives.texts, positives.image_starts
        )
        best_here, first_here = best_of_texts(by_text.table, by_text.here, positives.images, positives.text_starts)
        if best is None:
            best, first = best_here, first_here
        first = np.where(
            best_here > best, first_here, np.where(best_here == best, np.minimum(first, first_here), first)
        )
        best = np.maximum(best, best_here)
    # of equal best positives the lowest image counts, whichever process holds it
    image_ranks, image_tied = over.combine(np.stack([image_ranks, image_tied]), "SUM")
    best_anywhere = over.combine(best, "MAX")
    first = over.combine(np.where(best == best_anywhere, first, positives.num_images), "MIN")

    # second pass: the ranks of texts count images of all parts against that best positive
    text_ranks, text_tied = np.zeros((2, positives.num_texts), np.int64)
    for _, by_text in over.tables(parts):
        num_best = equal_positives(by_text.table, by_text.here, positives.images, positives.text_starts, best_anywhere)
        ahead, tied = counts_of_texts(by_text.table, by_text.rows, best_anywhere, first, num_best)
        text_ranks += ahead
        text_tied += tied
    text_ranks, text_tied = over.combine(np.stack([text_ranks, text_tied]), "SUM")

    images, texts = positives.query_images, positives.query_texts
    of_images, of_texts = (image_ranks[images], image_tied[images] > 0), (text_ranks[texts], text_tied[texts] > 0)
    return Ranks.of(positives, *of_images, *of_texts)


def recalls(ranks: Ranks) -> PerQuery:
    """Whether each query is found, 0 or 1: recall_at_1, recall_at_5, recall_at_10; mean_recall is their mean."""
    both = []
    for of_queries in (ranks.image_to_text, ranks.text_to_image):
        recall_of = {f"recall_at_{k}": (of_queries < k).numpy().astype(np.float64) for k in RECALL_AT}
        both.append(recall_of | {"mean_recall": sum(recall_of.values()) / len(recall_of)})
    return PerQuery(*both, ranks.query_images.numpy(), ranks.query_texts.numpy())


def precisions_at_r(
    scores: torch.Tensor,
    positives: torch.Tensor | Positives,
    *,
    rows: torch.Tensor | None = None,
    text_scores: torch.Tensor | None = None,
) -> PerQuery:
    """mAP@R, R-Precision and R@1 of every query with R positives (ECCV Caption).

    With P(r) the share of positives among the first r candidates: mAP@R is the sum of P(r) over the places r <= R that
    hold a positive, over R; R-Precision is P(R).

    Args and Raises: as `retrieval_ranks`.
    Returns:
        PerQuery of "map_at_r", "r_precision" and "recall_at_1".
    """
    if not isinstance(positives, Positives):
        positives = Positives.from_owners(positives, len(scores))
    return precisions_of_parts(
        [Part.of(scores, positives.num_images, rows, text_scores)], positives, shared=rows is not None
    )


def precisions_of_parts(parts: Iterable[Part], positives: Positives, *, shared: bool = False) -> PerQuery:
    """`precisions_at_r` of scores in parts; arguments as in `ranks_of_parts`."""
    over = _Over(positives, shared)
    image_ranks, positive_scores = np.zeros(len(positives.texts), np.int64), None
    for by_image, by_text in over.checked(parts):
        image_ranks += ranks_of_image_positives(by_image.table, by_image.rows, positives.texts, positives.image_starts)
        here = scores_of_text_positives(by_text.table, by_text.here, positives.images, positives.text_starts)
        positive_scores = here if positive_scores is None else np.maximum(positive_scores, here)
    image_ranks, positive_scores = over.combine(image_ranks, "SUM"), over.combine(positive_scores, "MAX")

    queries, text_ranks = positives.query_texts, np.zeros(len(positives.images), np.int64)
    for _, by_text in over.tables(parts):
        columns = np.ascontiguousarray(by_text.table[:, queries].T)
        text_ranks += ranks_of_text_positives(
            columns, queries, by_text.rows, positive_scores, positives.images, positives.text_starts
        )
    text_ranks = over.combine(text_ranks, "SUM")
    return PerQuery(
        _precisions(image_ranks, positives.image_starts, positives.texts_outside),
        _precisions(text_ranks, positives.text_starts, np.zeros(positives.num_texts, np.int64)),
        positives.query_images,
        queries,
    )


def recall_at_k(ranks: torch.Tensor, k: int) -> float:
    """Share of queries whose best positive is among the first k candidates, in [0, 1]."""
    if k < 1 or k % 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k}")
    if not len(ranks):
        raise ValueError("ranks are empty; expected: those of at least one query")
    return float((tensor_of(ranks, "ranks") < k).double().mean())


def retrieval_metrics(ranks: Ranks) -> dict[str, float]:
    """R@1, R@5, R@10 both ways, their means and sum, and the shares of tied queries.

    i2t_mean_recall, t2i_mean_recall: of a direction's three recalls (ALBEF's txt_r_mean, img_r_mean).
    mean_recall: of all six (ALBEF's r_mean). rsum: their sum, in [0, 6]; papers print it in percent, to 600.
    mean_recall_at_1: of the two directions (DataComp's mean_recall@1).
    """
    ties = {name: getattr(ranks, name) for name in ("tied_share", "i2t_tied_share", "t2i_tied_share")}
    return means(recalls(ranks)) | ties


def means(results: PerQuery) -> dict[str, float]:
    """Means over the queries of each direction; means over both if all six recalls exist."""
    metrics = {}
    for name, values in (("i2t", results.image_to_text), ("t2i", results.text_to_image)):
        for metric, of_queries in values.items():
            if not len(of_queries):
                raise ValueError(f"no {name} query has a positive among the candidates")
            metrics[f"{name}_{metric}"] = float(of_queries.mean())
    return metrics | _means_of_both(metrics)


def hits_by_image(results: PerQuery, text_to_image: torch.Tensor, num_images: int) -> dict[str, list[list[float]]]:
    """Results of the queries of each image, for a bootstrap over images: metric -> one list per image.

    Lists of t2i hold one number per caption, others one. Images without a query of the metric are left out.
    With unlike numbers of text queries their mean differs from the metric.

    Args:
        text_to_image: as in `Positives.from_owners`, for any positives.
    """
    owners = labels_of(text_to_image, "text_to_image").cpu()[torch.from_numpy(results.query_texts)].tolist()
    hits: dict[str, list[list[float]]] = {}
    for name, values, images in (
        ("i2t", results.image_to_text, results.query_images.tolist()),
        ("t2i", results.text_to_image, owners),
    ):
        for metric, of_queries in values.items():
            lists = hits[f"{name}_{metric}"] = [[] for _ in range(num_images)]
            for image, value in zip(images, of_queries.tolist()):
                lists[image].append(value)
    all_recalls = [hits[key] for key in _RECALL_KEYS if key in hits]  # fewer than six: no means, as in the metrics
    for of_image in zip(*all_recalls) if len(all_recalls) == len(_RECALL_KEYS) else ():
        if all(of_image):
            recall_means = {key: sum(values) / len(values) for key, values in zip(_RECALL_KEYS, of_image)}
            for key, value in _means_of_both(recall_means).items():
                hits.setdefault(key, []).append([value])
    return {key: [values for values in lists if values] for key, lists in hits.items()}


def chance_level(positives: Positives) -> dict[str, float]:
    """Expected metrics of a random ranking, with the keys of retrieval_metrics but for the ties.

    A query with p positives among C candidates is found in the top K with probability 1 - C(C - p, K) / C(C, K).
    """
    chance = {}
    for name, starts, candidates in _directions(positives):
        counts = np.diff(starts)[np.diff(starts) > 0].astype(np.float64)
        for k in RECALL_AT:
            missed = np.ones_like(counts)
            for drawn in range(min(k, candidates)):
                missed *= np.clip((candidates - counts - drawn) / (candidates - drawn), 0, None)
            chance[f"{name}_recall_at_{k}"] = float((1 - missed).mean())
        chance[f"{name}_mean_recall"] = sum(chance[f"{name}_recall_at_{k}"] for k in RECALL_AT) / len(RECALL_AT)
    return chance | _means_of_both(chance)


def precision_chance_level(positives: Positives) -> dict[str, float]:
    """Expected metrics of a random ranking, with the keys of means(precisions_at_r(...)).

    For p positives among C candidates, R = p plus those outside, N = min(R, C) and H the N-th harmonic number:
    mAP@R is p / (C R) (H + (N - H) (p - 1) / (C - 1)), R-Precision is p N / (C R), R@1 is p / C.
    """
    chance = {}
    for name, starts, candidates in _directions(positives):
        counts = np.diff(starts)
        total = counts + (positives.texts_outside if name == "i2t" else 0)
        counts, total = counts[counts > 0], total[counts > 0]
        places = np.minimum(total, candidates)
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, places.max(initial=0) + 1))])[places]
        # place r holds a positive with probability p / C, places q and r both do with p (p - 1) / (C (C - 1))
        pairs = (places - harmonic) * (counts - 1) / max(candidates - 1, 1)
        chance[f"{name}_map_at_r"] = float((counts * (harmonic + pairs) / (candidates * total)).mean())
        chance[f"{name}_r_precision"] = float((counts * places / (candidates * total)).mean())
        chance[f"{name}_recall_at_1"] = float((counts / candidates).mean())
    return chance


def combine_over_processes(values: np.ndarray, operation: str) -> np.ndarray:
    """Element-wise "SUM", "MAX" or "MIN" over processes, for counts and single scores: exact in any order."""
    if world_size() == 1:
        return values
    tensor = torch.from_numpy(np.array(values, order="C"))  # a copy: the reduction writes into it
    if dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor.cpu().numpy()


_RECALL_KEYS = tuple(f"{name}_recall_at_{k}" for name in ("i2t", "t2i") for k in RECALL_AT)


def _means_of_both(metrics: dict[str, float]) -> dict[str, float]:
    # Sum and means over both directions; nothing where a recall is missing (ECCV Caption has R@1 only).
    if not all(key in metrics for key in _RECALL_KEYS):
        return {}
    rsum = sum(metrics[key] for key in _RECALL_KEYS)
    at_1 = (metrics["i2t_recall_at_1"] + metrics["t2i_recall_at_1"]) / 2
    return {"rsum": rsum, "mean_recall": rsum / len(_RECALL_KEYS), "mean_recall_at_1": at_1}


def _directions(positives: Positives) -> list[tuple[str, np.ndarray, int]]:
    return [
        ("i2t", positives.image_starts, positives.num_texts),
        ("t2i", positives.text_starts, positives.num_images),
    ]


class _Table(NamedTuple):
    # Scores of some images as the loops take them.
    #
    # table: (num_rows, num_texts). rows: (num_rows,) their images. here: (num_images,) row of each image or -1.

    table: np.ndarray
    rows: np.ndarray
    here: np.ndarray

    @classmethod
    def of(cls, scores: torch.Tensor, rows: torch.Tensor, positives: Positives) -> "_Table":
        if scores.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"scores to be ranked must be float32 or float64 (half precision ties them), got {scores.dtype}"
            )
        images = rows.cpu().long().contiguous().numpy()  # one layout: the loops compile for each anew
        if scores.shape != (len(images), positives.num_texts):
            raise ValueError(
                f"scores have shape {tuple(scores.shape)}, the positives are those of {len(images)} images here and "
                f"{positives.num_texts} texts"
            )
        if (np.diff(images) <= 0).any() or (len(images) and (images[0] < 0 or images[-1] >= positives.num_images)):
            raise ValueError(f"rows must ascend within [0, {positives.num_images}): ties go to the lower index")
        here = np.full(positives.num_images, -1)
        here[images] = np.arange(len(images))
        return cls(scores.detach().cpu().contiguous().numpy(), images, here)

    def count_bad(self) -> int:
        # NaN and infinities survive a sum, which is fast; only if the sum is not finite are the scores counted
        scores = torch.from_numpy(self.table)
        return 0 if scores.sum().isfinite() else int((~scores.isfinite()).sum())


@dataclass(frozen=True)
class _Over:
    # How passes over the parts of this process become results over all images.
    #
    # shared: other processes hold the other images.

    positives: Positives
    shared: bool

    def tables(self, parts: Iterable[Part]) -> Iterator[tuple[_Table, _Table]]:
        # Each part's scores by which images rank texts, and texts images.
        for rows, scores, text_scores in parts:
            by_image = _Table.of(scores, rows, self.positives)
            yield by_image, by_image if text_scores is None else _Table.of(text_scores, rows, self.positives)

    def checked(self, parts: Iterable[Part]) -> Iterator[tuple[_Table, _Table]]:
        # The check at the end is made by all processes together: otherwise one stops and the others wait.
        if iter(parts) is parts:
            raise ValueError("parts is an iterator, which ends after one pass; expected: a list, to be read twice")
        times, bad = np.zeros(self.positives.num_images, np.int64), np.zeros(2, np.int64)
        for by_image, by_text in self.tables(parts):
            times[by_image.rows] += 1
            bad += by_image.count_bad(), 0 if by_text is by_image else by_text.count_bad()
            yield by_image, by_text
        times, bad = self.combine(times, "SUM"), self.combine(bad, "SUM")
        if (times != 1).any():
            wrong = int(np.flatnonzero(times != 1)[0])
            raise ValueError(f"image {wrong} of the scores is held by {times[wrong]} processes; expected: exactly one")
        if bad.any():
            total = self.positives.num_images * self.positives.num_texts
            raise ValueError(f"{bad[bad > 0][0]} of {total} scores are not finite; a sort would rank NaN first")

    def combine(self, values: np.ndarray, operation: str) -> np.ndarray:
        return combine_over_processes(values, operation) if self.shared else values


def _precisions(ranks: np.ndarray, starts: np.ndarray, outside: np.ndarray) -> dict[str, np.ndarray]:
    # From the ranks of all positives to mAP@R, R-Precision and R@1 of each query that has some.
    #
    # outside: (num_queries,) positives that have no rank and count in R.
    counts = np.diff(starts)
    total = counts + outside
    queries = np.repeat(np.arange(len(counts)), counts)
    ranks = ranks[np.lexsort((ranks, queries))]  # ascending within each query
    places = np.arange(len(ranks)) - starts[queries] + 1  # the k-th positive of its query
    in_top_r = ranks < total[queries]
    precision = in_top_r * places / (ranks + 1)  # P(r) at the place of this positive
    summed = {
        "map_at_r": np.bincount(queries, precision, len(counts)),
        "r_precision": np.bincount(queries, in_top_r, len(counts)),
    }
    has_positives = counts > 0
    results = {name: values[has_positives] / total[has_positives] for name, values in summed.items()}
    return results | {"recall_at_1": (ranks[starts[:-1][has_positives]] == 0).astype(np.float64)}
