"""The compiled loops of `retrieval.py`; they pass once over the scores.

Arguments of all loops:
    scores      (num_rows, num_texts), the rows that this process holds
    rows        (num_rows,) images of these rows, ascending
    here        (num_images,) row of each image, or -1 where another process holds it
    texts       the positives of image i are texts[starts[i] : starts[i + 1]], ascending
    images      the positives of text j are images[starts[j] : starts[j + 1]], ascending
Results are counts, indices or single scores, so those of several processes combine exactly.
"""

import numba
import numpy as np

from common.base.compiled import compiled


@compiled(parallel=True)
def ranks_of_images(scores, rows, texts, starts):
    """Rank of each row's best positive (0 without one) and how many negatives tie with it."""
    num_rows, num_texts = scores.shape
    ranks = np.zeros(num_rows, np.int64)
    tied = np.zeros(num_rows, np.int64)
    for i in numba.prange(num_rows):
        right = texts[starts[rows[i]] : starts[rows[i] + 1]]
        if len(right) == 0:
            continue
        first = right[0]  # the lowest index among the best positives
        for j in right:
            if scores[i, j] > scores[i, first]:
                first = j
        best = scores[i, first]
        above = equal = num_best = 0
        for j in right:
            num_best += scores[i, j] == best
        for j in range(num_texts):  # no branch: the compiler makes vector instructions of it
            above += scores[i, j] > best
            equal += scores[i, j] == best
        tied[i] = equal - num_best
        if tied[i] > 0:
            for j in range(first):  # equal scores before the best positive are negatives
                above += scores[i, j] == best
        ranks[i] = above
    return ranks, tied


@compiled
def best_of_texts(scores, here, images, starts):
    """Score of each column's best positive among the rows here, and the lowest image that has it."""
    num_texts = len(starts) - 1
    best = np.full(num_texts, -np.inf, scores.dtype)
    first = np.full(num_texts, len(here), np.int64)
    for j in range(num_texts):
        for i in images[starts[j] : starts[j + 1]]:
            if here[i] >= 0 and scores[here[i], j] > best[j]:
                best[j] = scores[here[i], j]
                first[j] = i
    return best, first


@compiled
def equal_positives(scores, here, images, starts, best):
    """How many positives of each column among the rows here have its best score."""
    count = np.zeros(len(best), np.int64)
    for j in range(len(best)):
        for i in images[starts[j] : starts[j + 1]]:
            if here[i] >= 0:
                count[j] += scores[here[i], j] == best[j]
    return count


@compiled(parallel=True)
def counts_of_texts(scores, rows, best, first, num_best):
    """How many of these rows are ahead of each column's best positive, and how many negatives tie with it.

    best, first: (num_texts,) of `best_of_texts`, over all processes. num_best: (num_texts,) of `equal_positives`.
    """
    num_rows, num_texts = scores.shape
    ahead = np.zeros(num_texts, np.int64)
    tied = np.zeros(num_texts, np.int64)
    width = 1024  # columns of a block, whose scores are read row by row, in the order of memory
    for block in numba.prange((num_texts + width - 1) // width):
        start = block * width
        count = min(num_texts, start + width) - start
        best_here = best[start : start + count].copy()
        above, equal = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i in range(num_rows):
            row = scores[i, start : start + count]
            for k in range(count):
                above[k] += row[k] > best_here[k]
                equal[k] += row[k] == best_here[k]
        for k in range(count):
            j = start + k
            ahead[j] = above[k]
            tied[j] = equal[k] - num_best[j]
            if tied[j] > 0:
                for i in range(num_rows):
                    if rows[i] >= first[j]:
                        break
                    ahead[j] += scores[i, j] == best_here[k]
    return ahead, tied


@compiled(parallel=True)
def ranks_of_image_positives(scores, rows, texts, starts):
    """Rank of every positive of the rows here, 0 for those of other rows."""
    ranks = np.zeros(len(texts), np.int64)
    for i in numba.prange(len(rows)):
        row = scores[i]
        for p in range(starts[rows[i]], starts[rows[i] + 1]):
            score = row[texts[p]]
            ahead = 0
            for j in range(len(row)):
                ahead += row[j] > score
            for j in range(texts[p]):
                ahead += row[j] == score
            ranks[p] = ahead
    return ranks


@compiled
def scores_of_text_positives(scores, here, images, starts):
    """Score of every positive of every text, -inf where its row is not here."""
    positive_scores = np.full(len(images), -np.inf, scores.dtype)
    for j in range(len(starts) - 1):
        for p in range(starts[j], starts[j + 1]):
            if here[images[p]] >= 0:
                positive_scores[p] = scores[here[images[p]], j]
    return positive_scores


@compiled(parallel=True)
def ranks_of_text_positives(columns, queries, rows, positive_scores, images, starts):
    """How many of these rows are ahead of every positive of the queried texts; columns (num_queries, num_rows)."""
    ranks = np.zeros(len(images), np.int64)
    for q in numba.prange(len(queries)):
        column = columns[q]
        for p in range(starts[queries[q]], starts[queries[q] + 1]):
            ahead = 0
            for i in range(len(rows)):
                ahead += column[i] > positive_scores[p]
                ahead += (column[i] == positive_scores[p]) & (rows[i] < images[p])
            ranks[p] = ahead
    return ranks
