"""Intervals: against scipy, and how often they cover the truth in simulations. All numbers are made up."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from refusals import refused
from scipy import stats

from common.report.statistics import (
    _brown_forsythe,
    bootstrap_interval,
    bootstrap_means,
    bounded_interval,
    contrast_interval,
    interval_of_hits,
    interval_over_seeds,
    percentile_interval,
    share_angle,
    share_interval,
    shared_spread,
    sign_flip_p_value,
)


def _images_whose_captions_agree(generator, num_images=150, captions=5):
    """Hits in which the captions of one image share its difficulty; the expected hit rate is 0.4."""
    difficulty = generator.beta(0.4, 0.6, size=num_images)
    return list(generator.random((num_images, captions)) < difficulty[:, None])


def test_bootstrap_over_images_covers_the_truth_where_one_over_captions_does_not():
    generator = np.random.default_rng(1)
    clustered = single = 0
    for trial in range(200):
        hits = _images_whose_captions_agree(generator)
        low, high = bootstrap_interval(hits, num_resamples=300, seed=trial)
        clustered += low <= 0.4 <= high
        low, high = bootstrap_interval(np.concatenate(hits)[:, None], num_resamples=300, seed=trial)
        single += low <= 0.4 <= high
    assert clustered / 200 == pytest.approx(0.95, abs=0.05)
    assert single / 200 < 0.85


def test_bootstrap_agrees_with_scipy_when_every_image_is_one_query():
    hits = np.random.default_rng(2).random(300) < 0.3
    ours = bootstrap_interval(hits[:, None], num_resamples=4000)
    theirs = stats.bootstrap((hits,), np.mean, method="percentile", n_resamples=4000, rng=0).confidence_interval
    np.testing.assert_allclose(ours, theirs, atol=0.008)


def test_bootstrap_is_a_mean_over_queries_not_over_images():
    low, high = bootstrap_interval([[1.0]] * 50 + [[0.0] * 9] * 50)
    assert low < 0.1 < high < 0.2  # 50 hits in 500 queries; the mean over images would be 0.5


def test_bootstrap_gives_the_same_interval_for_the_same_seed_and_any_block_size(monkeypatch):
    hits = _images_whose_captions_agree(np.random.default_rng(3))
    first = bootstrap_interval(hits, seed=5)
    assert first == bootstrap_interval(hits, seed=5) != bootstrap_interval(hits, seed=6)
    monkeypatch.setattr("common.report.statistics._RESAMPLED_CLUSTERS_AT_ONCE", 999)
    assert bootstrap_interval(hits, seed=5) == first


def test_hits_that_are_all_alike_have_wilsons_interval():
    z = stats.norm.ppf(0.975)
    for hits in ([[0.0]] * 40, [[0.0] * 5] * 40, [*[[0]] * 40, []]):
        (low, high), kind = interval_of_hits(hits)
        assert (low, kind) == (0, "Wilson")
        assert high == pytest.approx(z**2 / (40 + z**2), rel=1e-12)
    (low, high), kind = interval_of_hits([[1.0]] * 40)
    assert (low, high) == (pytest.approx(40 / (40 + z**2), rel=1e-12), 1)
    mixed = [[1.0], *[[0.0]] * 39]
    assert interval_of_hits(mixed) == (bootstrap_interval(mixed), "bootstrap")
    assert interval_of_hits([[0.3]] * 9)[1] == "bootstrap"  # no share of hits


def test_bootstrap_leaves_out_images_without_queries_and_needs_two_others():
    assert bootstrap_interval([[1], [], [0], []]) == bootstrap_interval([[1], [0]])
    refused(
        ("at least two images", lambda: bootstrap_interval([[1, 0], []])),
        ("finite", lambda: bootstrap_interval([[1], [float("nan")]])),
        ("num_resamples", lambda: bootstrap_interval([[1], [0]], num_resamples=0)),
    )


def test_a_contrast_of_one_block_is_the_paired_interval_and_of_two_that_of_welch():
    generator = np.random.default_rng(0)
    for size, other in ((2, 2), (3, 3), (3, 7), (20, 4)):
        a, b = generator.normal(1, 2, size), generator.normal(0, 0.5, other)
        for level in (0.8, 0.95, 0.999):
            welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
            assert contrast_interval([a, -b], level) == pytest.approx((welch.low, welch.high), rel=1e-9)
            if size == other:
                paired = stats.ttest_rel(a, b).confidence_interval(level)
                assert contrast_interval([a - b], level) == pytest.approx((paired.low, paired.high), rel=1e-9)
    assert contrast_interval([a]) == pytest.approx(interval_over_seeds(a))


def test_a_contrast_of_equal_values_has_width_zero_and_wrong_input_is_named():
    assert contrast_interval([[2.0, 2.0], [-1.0, -1.0, -1.0]]) == (1.0, 1.0)
    refused(
        *(("level", partial(interval_over_seeds, [1.0, 2.0], level)) for level in (0, 1, 95)),
        *(("level", partial(bootstrap_interval, [[1], [0]], level)) for level in (0, 1, 95)),
        *(("two values", partial(interval_over_seeds, values)) for values in ([], [1.0], [[1.0, 2.0]])),
        ("two values", lambda: contrast_interval([])),
        ("finite", lambda: contrast_interval([[1.0, math.nan]])),
    )


def test_bootstrap_means_of_one_test_set_are_drawn_together():
    generator = np.random.default_rng(0)
    sums, counts = generator.random(300), np.ones(300)
    shifted = bootstrap_means(sums + 1, counts, 500, seed=3) - bootstrap_means(sums, counts, 500, seed=3)
    assert np.allclose(shifted, 1)
    assert (bootstrap_means(sums + 1, counts, 500, seed=3) - bootstrap_means(sums, counts, 500, seed=4)).std() > 0.01
    assert percentile_interval(np.arange(1001.0), 0.9) == pytest.approx((50.0, 950.0))


def test_the_sign_flip_test_is_that_of_all_signs_and_with_one_result_per_image_mcnemars():
    differences = np.array([3.0, -1.0, 0.0, 2.0, 2.5, -0.5, 1.0, 4.0, -2.0])
    signs = np.array(list(itertools.product([-1, 1], repeat=9)))
    exact = float((abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean())
    assert sign_flip_p_value(differences, num_draws=200_000) == pytest.approx(exact, abs=0.004)
    hits = np.repeat([1.0, -1.0, 0.0], [9, 2, 30])
    assert sign_flip_p_value(20 * hits) == pytest.approx(2 * (1 + 11 + 55) / 2**11)
    assert sign_flip_p_value(np.zeros(5)) == 1.0
    assert sign_flip_p_value(np.ones(40) + np.arange(40)) == 1 / 10_001


# ---- rows that lend each other their spread --------------------------------------------------------------------------


def test_the_test_of_spreads_is_that_of_scipy_and_rows_leave_the_pool_one_by_one():
    values = np.random.default_rng(0).normal(size=(8, 3))
    values[0] *= 0.3
    p_values, noisier, pooled = _brown_forsythe(values)
    assert pooled.all()
    moved = values - np.median(values, axis=1, keepdims=True)
    moved = moved - np.median(moved, axis=0)
    centred = moved - np.median(moved, axis=1, keepdims=True)  # of an odd number the median of the others is 0 too
    for row in range(8):
        theirs = stats.levene(moved[row], np.delete(centred, row, axis=0).ravel(), center="median")
        assert p_values[row] == pytest.approx(theirs.pvalue, rel=1e-9)
        assert noisier[row] == (abs(centred[row]).mean() > abs(np.delete(centred, row, axis=0)).mean())
    values[[2, 5]] *= [[40.0], [900.0]]  # beside the second the first one is not seen
    values[7] = 1.0
    assert _brown_forsythe(values)[2].tolist() == [True, True, False, True, True, False, True, False]
    assert _brown_forsythe(values[:2])[2].all()


def test_rows_are_pooled_as_in_an_analysis_of_variance_and_a_single_one_is_the_t_interval():
    values, weights = np.random.default_rng(0).normal(size=(6, 4)), np.array([1.0, -1.0, 0, 0, 0, 0])
    spread = shared_spread(values)
    assert (*map(bool, spread.rules(weights)), int(spread.freedom)) == (True, False, 15)
    # the difference of two means of a randomised block design, its error mean square by hand
    rest = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    expected = stats.t.ppf(0.975, 15) * math.sqrt((rest**2).sum() / 15 * 2 / 4)
    assert spread.half_width(weights, 0.05) == pytest.approx(expected, rel=1e-9)
    assert spread.variance(weights) == pytest.approx((rest**2).sum() / 15 * 2 / 4, rel=1e-9)
    assert shared_spread(values + 7 * np.arange(4)).half_width(weights, 0.05) == pytest.approx(expected, rel=1e-9)
    low, high = interval_over_seeds(values[0])
    assert shared_spread(values[:1]).half_width(np.ones(1), 0.05) == pytest.approx((high - low) / 2)


def test_intervals_of_shares_are_those_of_their_numbers_in_the_middle_and_stay_in_range():
    low, high = interval_over_seeds([49.0, 50.0, 51.0])
    assert share_interval(low, high, 100.0) == pytest.approx((low, high), abs=0.01)
    low, high = share_interval(*interval_over_seeds([0.99, 1.0, 1.0]), 1.0)
    assert 0.9 < low < 0.99 < high <= 1
    assert share_interval(1.0, 1.0, 1.0) == (1.0, 1.0)
    for values in ([0.99, 1.0, 1.0], [0.01, 0.0, 0.0]):  # one end leaves [0, 1]
        (low, high), is_moved = bounded_interval(interval_over_seeds(values), values, 1.0)
        assert is_moved
        assert 0 <= low < high <= 1


SHAPES = {  # name: rows of the table, comparisons of the claim (greater, lesser), all of which must hold
    "pair": (4, [(0, 1)]),
    "chain": (8, [(0, 1), (1, 2), (2, 3)]),
    "twelve-fold": (16, [(0, other) for other in range(1, 13)]),
}
SPREADS = {
    "alike": 1.0,
    "x 2": 2.0,
    "x 3": 3.0,
    "x 10": 10.0,
    "/ 100": 0.01,
}  # of the first row, in deviations of another


def simulated(rows, seeds, comparisons, seed_effect=0.0, spread="alike", shares=False, number=1000, error=0.05):
    """Share of verdicts, all of them false; how often the first comparison's interval covers."""
    generator = np.random.default_rng([rows, seeds, int(10 * seed_effect), shares])
    values = (
        generator.normal(size=(number, rows, seeds)) * np.where(np.arange(rows) == 0, SPREADS[spread], 1.0)[:, None]
    )
    values += seed_effect * generator.normal(size=(number, 1, seeds))
    if shares:  # around 3 %, and so looked at as angles
        values = share_angle(1 / (1 + np.exp(3.5 - 0.2 * values)))
    pooled, covered = shared_spread(values), None
    holds, fails = np.ones(number, dtype=bool), np.zeros(number, dtype=bool)
    for greater, lesser in comparisons:
        weights = (np.arange(rows) == greater) * 1.0 - (np.arange(rows) == lesser)
        margin, half_width = values.mean(axis=-1) @ weights, pooled.half_width(weights, error)
        holds &= margin > half_width
        fails |= margin < -pooled.half_width(weights, 0.05 / len(comparisons))
        covered = np.mean(np.abs(margin) <= half_width) if covered is None else covered
    return (holds | fails).mean(), covered


def test_equal_methods_get_a_false_verdict_in_one_case_of_twenty_at_most_and_intervals_cover_as_they_say():
    """Prints both: `pytest -s -k false_verdict`."""
    print("\n        no effect: false verdicts, %   95 % intervals cover, %")
    print("seeds   pair   chain  12-fold   alike   block  shares   x 2     x 3    x 10   / 100")
    for seeds in (2, 3, 5, 10):
        false = [simulated(rows, seeds, comparisons, seed_effect=1.0)[0] for rows, comparisons in SHAPES.values()]
        ways = ({}, {"seed_effect": 2.0}, {"shares": True}, *({"spread": spread} for spread in [*SPREADS][1:]))
        covered = [simulated(8, seeds, [(0, 1)], number=1500, **way)[1] for way in ways]
        print(f"{seeds:>5}" + "".join(f"{100 * share:>8.1f}" for share in (*false, *covered)))
        assert max(false) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000), seeds  # three standard errors
        assert min(covered[:3]) > 0.93, seeds
        assert max(covered) < 0.985, seeds  # a row that may be noisier gets the wider of two intervals
        assert min(covered[3:]) > (0.92 if seeds == 2 else 0.93), seeds  # of two seeds no test sees every other spread
    of_twelve = simulated(8, 3, [(0, 1)], spread="x 3", number=6000, error=0.05 / 12)[1]  # Bonferroni's
    assert 1 - of_twelve < 4 * 0.05 / 12


def test_a_far_quieter_row_keeps_its_own_interval_and_a_somewhat_quieter_one_is_pooled():
    values = np.random.default_rng(0).normal(size=(6, 5))
    row = np.eye(6)[0]
    for factor, is_quiet in ((1e-3, True), (0.3, False)):
        scaled = values * np.where(row == 1, factor, 1.0)[:, None]
        spread, (low, high) = shared_spread(scaled), interval_over_seeds(scaled[0])
        assert spread.quiet.tolist() == [is_quiet, *[False] * 5]
        assert (spread.half_width(row, 0.05) == pytest.approx((high - low) / 2)) == is_quiet


@pytest.mark.parametrize("seed_effect", [0.0, 2.0])
def test_a_number_against_a_threshold_is_covered_at_least_as_often_as_it_says(seed_effect):
    for seeds in (2, 3, 10):
        generator = np.random.default_rng(seeds)
        values = generator.normal(size=(1000, 8, seeds)) + seed_effect * generator.normal(size=(1000, 1, seeds))
        for weights in (np.eye(8)[0], np.eye(8)[0] - 0.25 * np.eye(8)[1]):
            half_width = shared_spread(values).half_width(weights, 0.05)
            assert np.mean(np.abs(values.mean(axis=-1) @ weights) <= half_width) > 0.935
