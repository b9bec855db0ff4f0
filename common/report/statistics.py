"""Intervals for measured numbers: over training seeds, or over the queries of one seed.

The interval over seeds covers newly trained models, the interval over queries this one model on new test pictures. An
interval is (low, high) in the unit of the values; its `level` is the coverage, a fraction in (0, 1).

Rows of a table that share their seeds are compared by `shared_spread`. Its model: a number is the row's mean, plus what
its seed does to every row, plus a rest of one variance. Three seeds estimate a variance poorly, so the rows of a column
pool theirs. The seed is always a block: a difference of rows loses what the seeds share, and where they share nothing
the block costs (seeds - 1) degrees of freedom. `tests/test_common_report_statistics.py` simulates it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special, stats

# Brown-Forsythe, p of a row whose spread is another one (of two seeds there is but one deviation a row), and of one in
# doubt: Bancroft (1964) would have a test that precedes pooling be lenient. At 0.25 a row of two or three times the
# spread missed up to 9 % of 95 % intervals, and ten times as many of Bonferroni's as it may
APART, APART_OF_TWO, DOUBTFUL = 0.05, 0.01, 0.75
QUIET = 0.001  # F, p of a row that the others' spread would drown: it keeps its own interval
SHARE_OF = {"percent": 100.0, "fraction": 1.0}  # unit -> the whole
RUNS = "share of runs"  # unit of a column that is 0 or 1 of a run
_RESAMPLED_CLUSTERS_AT_ONCE = 2_000_000  # bounds the memory of one bootstrap block to about 50 MB


def interval_over_seeds(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student t interval of the mean over seeds: mean +- t(level, n - 1) s / sqrt(n).

    It may leave the range of the metric (below 0 %).

    Args:
        values: one finite number per seed, at least two.
    Raises:
        ValueError: fewer than two values, a value that is not finite, or a level outside (0, 1).
    """
    return contrast_interval([values], level)


def contrast_interval(blocks: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """Interval of a sum of means over seeds, one mean per block; blocks are independent of each other.

    A contrast a - b is one block of differences per seed where both share seeds and data (the paired t interval), else
    two blocks, a and -b (Welch's interval). The degrees of freedom are Satterthwaite's. The width is 0 if no block
    varies.

    Args:
        blocks: per block one value per seed, at least two each.
    Raises:
        ValueError: as `interval_over_seeds`, or without blocks.
    """
    _check_level(level)
    samples = [np.asarray(block, dtype=np.float64) for block in blocks]
    if not samples or any(sample.ndim != 1 or sample.size < 2 for sample in samples):
        raise ValueError(f"an interval over seeds needs at least two values, got {[s.tolist() for s in samples]}")
    if not all(np.isfinite(sample).all() for sample in samples):
        raise ValueError(f"values must be finite, got {[sample.tolist() for sample in samples]}")
    center = math.fsum(sample.mean() for sample in samples)
    variances = np.array([sample.var(ddof=1) / sample.size for sample in samples])
    if not variances.any():
        return center, center
    freedom = variances.sum() ** 2 / sum(v**2 / (sample.size - 1) for v, sample in zip(variances, samples))
    half_width = float(stats.t.ppf(0.5 + level / 2, freedom) * np.sqrt(variances.sum()))
    return center - half_width, center + half_width


@dataclass(frozen=True)
class SharedSpread:
    """The spread over seeds that the rows of a column share; arrays have the leading axes of `shared_spread`.

    values: (..., rows, seeds).
    p_values: (..., rows), of Brown and Forsythe's test.
    pooled, doubtful: (..., rows), the rows that are pooled, and those of them that may be noisier.
    quiet: (..., rows), those that are not pooled as their spread is far smaller.
    within, between: mean squares over the pooled rows, of the rest and of what seeds do to all rows.
    freedom: of `within`; that of `between` is seeds - 1.
    """

    values: np.ndarray
    p_values: np.ndarray
    pooled: np.ndarray
    doubtful: np.ndarray
    quiet: np.ndarray
    within: np.ndarray
    between: np.ndarray
    freedom: np.ndarray

    def rules(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether a sum of row means, `weights` (..., rows), uses the pooled rows, and whether its own values."""
        used = weights != 0
        apart = (used & ~self.pooled).any(axis=-1) | (self.pooled.sum(axis=-1) < 3)
        return ~apart, apart | (used & self.doubtful).any(axis=-1)

    def half_width(self, weights: np.ndarray, error: float) -> np.ndarray:
        """Of the two-sided interval of a sum of row means that misses with probability `error`.

        If the weights do not add up to 0, two variances of different freedom add up: their quantiles are weighted so
        that the interval never covers too rarely (Banerjee 1960).
        """
        few, many = (special.stdtrit(freedom, error / 2) ** 2 for freedom in (self.values.shape[-1] - 1, self.freedom))
        return np.sqrt(self._weighted_variance(weights, few, many))

    def variance(self, weights: np.ndarray) -> np.ndarray:
        """Of a sum of row means, by the same rules."""
        return self._weighted_variance(weights, 1.0, 1.0)

    def _weighted_variance(self, weights: np.ndarray, few: float, many: np.ndarray | float) -> np.ndarray:
        # `few` multiplies what has the freedom of the seeds, `many` what has that of the rows
        seeds = self.values.shape[-1]
        counted = np.where(self.pooled, weights, 0)
        alike = counted.sum(axis=-1) ** 2 / np.maximum(self.pooled.sum(axis=-1), 2)  # what all rows have of the weights
        rows = many * self.within * ((counted**2).sum(axis=-1) - alike) + few * self.between * alike
        by_values = few * (weights[..., None] * self.values).sum(axis=-2).var(axis=-1, ddof=1)
        uses_rows, uses_values = self.rules(weights)
        return np.maximum(np.where(uses_rows, rows, 0), np.where(uses_values, by_values, 0)) / seeds


def shared_spread(values: np.ndarray) -> SharedSpread:
    """The spread over seeds of a column's rows, which share their seeds.

    Rows are pooled except those without spread, those far quieter than all others (`QUIET`), and those that Brown and
    Forsythe's test sets apart (`APART`; one by one, the clearest first). A sum with such a row, and every sum if fewer
    than three are pooled, uses its own values over seeds (the paired t interval). A row that may be noisier
    (`DOUBTFUL`) is pooled, but a sum with it gets the wider of the two intervals.

    Args:
        values: (..., rows, seeds), at least two seeds: all rows, of which a sum may take a few.
    """
    p_values, noisier, pooled = _brown_forsythe(values)
    quiet = pooled & _is_quiet(values, pooled)
    pooled = pooled & ~quiet
    seeds, rows = values.shape[-1], np.maximum(pooled.sum(axis=-1), 2)
    moved = np.where(pooled[..., None], values - values.mean(axis=-1, keepdims=True), 0)
    of_seed = moved.sum(axis=-2) / rows[..., None]
    rest = np.where(pooled[..., None], moved - of_seed[..., None, :], 0)
    freedom = (rows - 1) * (seeds - 1)
    return SharedSpread(
        values,
        p_values,
        pooled,
        doubtful=pooled & noisier & (p_values < DOUBTFUL),
        quiet=quiet,
        within=(rest**2).sum(axis=(-1, -2)) / freedom,
        between=rows * (of_seed**2).sum(axis=-1) / (seeds - 1),
        freedom=freedom,
    )


def _brown_forsythe(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # For each row: p of the test that its spread is that of the other pooled rows; is it greater; is the row pooled.
    # Deviations are from the median over seeds, after each seed's median over rows is subtracted. With fewer than three
    # rows p is 1.
    pooled = np.ptp(values, axis=-1) > 0
    p_values, noisier = np.ones(pooled.shape), np.zeros(pooled.shape, dtype=bool)
    rows, seeds = values.shape[-2:]
    moved = values - np.median(values, axis=-1, keepdims=True)
    moved = moved - np.median(moved, axis=-2, keepdims=True)
    sizes = np.abs(moved - np.median(moved, axis=-1, keepdims=True))
    sizes = sizes[..., :1] if seeds == 2 else sizes  # two seeds deviate alike
    count, means, squares = sizes.shape[-1], sizes.mean(axis=-1), (sizes**2).sum(axis=-1)
    for _ in range(rows if rows > 2 else 0):
        others = count * (pooled.sum(axis=-1, keepdims=True) - pooled)
        enough = others >= 2 * count
        counted = np.maximum(others, 1)
        total, square = ((np.where(pooled, part, 0)) for part in (count * means, squares))
        of_others = (total.sum(axis=-1, keepdims=True) - total) / counted
        rest = square.sum(axis=-1, keepdims=True) - square - others * of_others**2 + squares - count * means**2
        freedom = np.maximum(others + count - 2, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (means - of_others) ** 2 / (1 / count + 1 / counted) / (np.maximum(rest, 0) / freedom)
        p_values = np.where(enough & ~np.isnan(ratio), stats.f.sf(ratio, 1, freedom), 1.0)
        noisier = means > of_others
        clearest = np.where(pooled, p_values, 2).argmin(axis=-1)[..., None] == np.arange(rows)
        dropped = clearest & pooled & (p_values < (APART_OF_TWO if seeds == 2 else APART))
        if not dropped.any():
            break
        pooled = pooled & ~dropped
    return p_values, noisier, pooled


def _is_quiet(values: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    # Whether a row's variance is too small for that of the other pooled rows, by the F test at `QUIET`; (..., rows).
    # Brown and Forsythe's test cannot see it: it takes from each row what a seed does to all of them, which for such a
    # row is noise of the others.
    freedom = values.shape[-1] - 1
    variances = values.var(axis=-1, ddof=1)
    counted = np.where(pooled, variances, 0)
    others = np.maximum(pooled.sum(axis=-1, keepdims=True) - pooled, 1)
    of_others = (counted.sum(axis=-1, keepdims=True) - counted) / others
    return variances < stats.f.ppf(QUIET, freedom, others * freedom) * of_others


def share_angle(shares: np.ndarray | float) -> np.ndarray:
    """arcsin sqrt of shares in [0, 1], which spreads as much near the ends as in the middle; in [0, pi / 2]."""
    return np.arcsin(np.sqrt(shares))


def share_of_angle(angles: np.ndarray | float) -> np.ndarray:
    """Inverse of `share_angle`; an angle beyond its range is clipped."""
    return np.sin(np.clip(angles, 0, math.pi / 2)) ** 2


def share_interval(low: float, high: float, whole: float) -> tuple[float, float]:
    """A symmetric interval of a share of `whole`, on the scale of `share_angle`: it stays in [0, whole]."""
    mean = (low + high) / 2 / whole
    slope = 2 * math.sqrt(mean * (1 - mean))  # of a share by its angle
    half_width = (high - low) / 2 / whole / slope if slope else 0.0
    ends = share_of_angle(share_angle(mean) + np.array([-half_width, half_width]))
    return whole * float(ends[0]), whole * float(ends[1])


def interval_of_runs(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's exact interval of a share of runs: from 0 to 0.71 for none of three.

    Args:
        values: 0 or 1 of each run.
    """
    ones, tail = round(sum(values)), (1 - level) / 2
    zeros = len(values) - ones
    low = special.betaincinv(ones, zeros + 1, tail) if ones else 0.0
    high = 1 - special.betaincinv(zeros, ones + 1, tail) if zeros else 1.0
    return float(low), float(high)


def bounded_interval(
    interval: tuple[float, float], values: Sequence[float], whole: float | None
) -> tuple[tuple[float, float], bool]:
    """A symmetric interval of the mean of `values`, or `share_interval` where it would leave [0, whole].

    Args:
        whole: None = the values are no shares; nor are values outside [0, whole].
    Returns:
        The interval, and whether it is that of shares.
    """
    low, high = interval
    if whole is None or (low >= 0 and high <= whole) or min(values) < 0 or max(values) > whole:
        return interval, False
    return share_interval(low, high, whole), True


def interval_of_hits(
    hits_per_query: Sequence[Sequence[float]],
) -> tuple[tuple[float, float], Literal["bootstrap", "Wilson"]]:
    """95 % interval of a share of hits over the queries of one seed, and its kind.

    Where all queries are hits, or none is, it is Wilson's over the images.

    Raises:
        ValueError: as `bootstrap_interval`.
    """
    interval = bootstrap_interval(hits_per_query)
    if interval not in ((0.0, 0.0), (1.0, 1.0)):
        return interval, "bootstrap"
    images = sum(len(hits) > 0 for hits in hits_per_query)
    wilson = stats.binomtest(round(interval[0]) * images, images).proportion_ci(method="wilson")
    return (float(wilson.low), float(wilson.high)), "Wilson"


def bootstrap_interval(
    hits_per_query: Sequence[Sequence[float]], level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over queries, clustered by image; no width if all hits are equal.

    Whole images are drawn with replacement, as captions of one image have similar hits. The mean is over *queries*:
    images with more captions weigh more, as in a recall.

    Args:
        hits_per_query: per image the hits (0 or 1, or any score) of its queries; images without queries are left out.
        seed: of the resampling.
    Raises:
        ValueError: fewer than two images with queries, a hit that is not finite, a bad level or number of samples.
    """
    _check_level(level)
    clusters = [np.ravel(np.asarray(hits, dtype=np.float64)) for hits in hits_per_query]
    clusters = [hits for hits in clusters if hits.size]
    if len(clusters) < 2:
        raise ValueError(f"a bootstrap over queries needs at least two images with queries, got {len(clusters)}")
    sums = np.array([hits.sum() for hits in clusters])
    counts = np.array([hits.size for hits in clusters], dtype=np.float64)
    if not np.isfinite(sums).all():
        raise ValueError("hits must be finite")
    return percentile_interval(bootstrap_means(sums, counts, num_resamples, seed), level)


def bootstrap_means(sums: np.ndarray, counts: np.ndarray, num_resamples: int = 2000, seed: int = 0) -> np.ndarray:
    """The mean over queries in each of `num_resamples` draws of whole images with replacement.

    The draws depend only on `seed` and the number of images, so differences can be resampled in pairs.

    Args:
        sums: (num_images,) sum over the queries of an image.
        counts: (num_images,) number of its queries, at least one.
    Returns:
        (num_resamples,)
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}")
    generator = np.random.default_rng(seed)
    block = max(1, _RESAMPLED_CLUSTERS_AT_ONCE // len(sums))
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, block):
        stop = min(start + block, num_resamples)
        drawn = generator.integers(len(sums), size=(stop - start, len(sums)))
        means[start:stop] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return means


def sign_flip_p_value(differences: np.ndarray, num_draws: int = 10_000) -> float:
    """Two-sided p value of "the two models do equally well on such images", paired by test image.

    If they do, each image's difference could have either sign. Where all differences have one size, as with one hit or
    miss per image, this is McNemar's exact test: binomial, over the images on which the models disagree. Otherwise
    signs are drawn at random.

    Args:
        differences: (num_images,) sums over an image's queries.
        num_draws: of random signs; p is at least 1 / (num_draws + 1).
    Returns:
        p in (0, 1]; 1 if the models agree on every image.
    """
    differences = np.asarray(differences, dtype=np.float64)
    differences = differences[np.abs(differences) > 1e-9 * max(1.0, np.abs(differences).max(initial=0.0))]
    if not len(differences):
        return 1.0
    sizes = np.abs(differences)
    if np.allclose(sizes, sizes[0]):
        return float(stats.binomtest(int((differences > 0).sum()), len(differences), 0.5).pvalue)
    generator = np.random.default_rng(0)
    observed, block, extreme = abs(differences.sum()), max(1, _RESAMPLED_CLUSTERS_AT_ONCE // len(differences)), 0
    for start in range(0, num_draws, block):
        signs = generator.integers(2, size=(min(block, num_draws - start), len(differences))) * 2 - 1
        extreme += int((np.abs(signs @ differences) >= observed * (1 - 1e-9)).sum())
    return (1 + extreme) / (1 + num_draws)


def percentile_interval(resampled: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The central `level` of resampled values."""
    _check_level(level)
    low, high = np.quantile(resampled, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
