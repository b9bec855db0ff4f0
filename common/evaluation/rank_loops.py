"""The loops behind `retrieval.py`, compiled: one pass over the scores each, no sorting, no copy of them.

Everywhere scores are (num_rows, num_texts), the rows that this process holds; rows (num_rows,) are their images,
ascending; here (num_images,) is the row of each image or -1. The positives of image i are texts[starts[i] :
starts[i + 1]], those of text j images[starts[j] : starts[j + 1]], ascending. All results are counts, indices or single
scores, so what several processes find adds up exactly.
"""

import numba
import numpy as np

from common.base.compiled import compiled


@compiled(parallel=True)
def ranks_of_images(scores, rows, texts, starts):
    """Rank of the best positive of each row (0 without one) and how many negatives tie with it."""
    num_rows, num_texts = scores.shape
    ranks = np.zeros(num_rows, np.int64)
    tied = np.zeros(num_rows, np.int64)
    for i in numba.prange(num_rows):
        own = texts[starts[rows[i]] : starts[rows[i] + 1]]
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
        tied[i] = equal - equal_own
        if tied[i] > 0:
            for j in range(first):  # equal scores before the best positive are negatives
                above += scores[i, j] == best
        ranks[i] = above
    return ranks, tied


@compiled
def best_of_texts(scores, here, images, starts):
    """Score of the best positive of each column among the rows here, and the lowest image that has it."""
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
def counts_of_texts(scores, rows, best, first, equal_own):
    """How many of these rows are ahead of each column's best positive, and how many negatives tie with it.

    A block of columns at a time, row by row: the scores are read in the order in which they lie.
    """
    num_rows, num_texts = scores.shape
    ahead = np.zeros(num_texts, np.int64)
    tied = np.zeros(num_texts, np.int64)
    width = 1024
    for block in numba.prange((num_texts + width - 1) // width):
        start = block * width
        count = min(num_texts, start + width) - start
        own = best[start : start + count].copy()
        above, equal = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i in range(num_rows):
            row = scores[i, start : start + count]
            for k in range(count):
                above[k] += row[k] > own[k]
                equal[k] += row[k] == own[k]
        for k in range(count):
            j = start + k
            ahead[j] = above[k]
            tied[j] = equal[k] - equal_own[j]
            if tied[j] > 0:
                for i in range(num_rows):
                    if rows[i] >= first[j]:
                        break
                    ahead[j] += scores[i, j] == own[k]
    return ahead, tied


@compiled(parallel=True)
def ranks_of_image_positives(scores, rows, texts, starts):
    """Rank of every positive of the rows here, 0 for those of other rows."""
    ranks = np.zeros(len(texts), np.int64)
    for i in numba.prange(len(rows)):
        row = scores[i]
        for p in range(starts[rows[i]], starts[rows[i] + 1]):
            own = row[texts[p]]
            ahead = 0
            for j in range(len(row)):
                ahead += row[j] > own
            for j in range(texts[p]):
                ahead += row[j] == own
            ranks[p] = ahead
    return ranks


@compiled
def scores_of_text_positives(scores, here, images, starts):
    """Score of every positive of every text, -inf where its row is not here."""
    own = np.full(len(images), -np.inf, scores.dtype)
    for j in range(len(starts) - 1):
        for p in range(starts[j], starts[j + 1]):
            if here[images[p]] >= 0:
                own[p] = scores[here[images[p]], j]
    return own


@compiled(parallel=True)
def ranks_of_text_positives(columns, queries, rows, own, images, starts):
    """How many of these rows are ahead of every positive of the queried texts; columns (num_queries, num_rows)."""
    ranks = np.zeros(len(images), np.int64)
    for q in numba.prange(len(queries)):
        column = columns[q]
        for p in range(starts[queries[q]], starts[queries[q] + 1]):
            ahead = 0
            for i in range(len(rows)):
                ahead += column[i] > own[p]
                ahead += (column[i] == own[p]) & (rows[i] < images[p])
            ranks[p] = ahead
    return ranks
