"""Intervals over seeds and pictures: laws, loops from the formula, how often they cover. All numbers are made up."""

import math

import numpy as np
import pytest
from scipy import stats

from common.report.crossed import components, crossed_half_width, picture_variance, seeds_needed
from common.report.statistics import interval_over_seeds, shared_spread


@pytest.mark.parametrize("seeds", [2, 4])
def test_components_are_those_of_a_two_way_analysis_of_variance_in_loops(seeds):
    z = np.random.default_rng(0).normal(size=(seeds, 7)) + np.arange(7) + 3 * np.arange(seeds)[:, None]
    pictures, mean = 7, z.mean()
    of_seed = [sum(z[s, p] for p in range(pictures)) / pictures for s in range(seeds)]
    of_picture = [sum(z[s, p] for s in range(seeds)) / seeds for p in range(pictures)]
    between_seeds = pictures * sum((m - mean) ** 2 for m in of_seed) / (seeds - 1)
    between_pictures = seeds * sum((m - mean) ** 2 for m in of_picture) / (pictures - 1)
    squares = (z[s, p] - of_seed[s] - of_picture[p] + mean for s in range(seeds) for p in range(pictures))
    residual = sum(square**2 for square in squares) / ((seeds - 1) * (pictures - 1))
    assert components(z) == pytest.approx([square / z.size for square in (between_seeds, between_pictures, residual)])
    # Cornfield and Tukey's estimate of the variance of the mean: (MS_S + MS_P - MS_rest) / (seeds * pictures)
    total = (between_seeds + between_pictures - residual) / z.size
    assert components(z)[0] + picture_variance(z) == pytest.approx(total)
    stacked = np.stack([z, 2 * z])
    assert np.allclose(components(stacked), np.array([components(z), [4 * part for part in components(z)]]).T)


def test_where_pictures_do_not_differ_the_interval_is_the_t_interval_over_seeds():
    values = np.array([11.25, 12.5, 10.0, 13.0])
    z = np.repeat(values[:, None], 50, axis=1)
    low, high = interval_over_seeds(values)
    assert picture_variance(z) == pytest.approx(0, abs=1e-12)
    assert crossed_half_width((high - low) / 2, picture_variance(z), 0.05) == pytest.approx((high - low) / 2)


def test_where_seeds_do_not_differ_the_interval_is_the_normal_one_over_pictures():
    hits = (np.random.default_rng(1).random(400) < 0.3).astype(float)
    standard_error = hits.std(ddof=1) / 20
    for z in (np.repeat(hits[None], 3, axis=0), hits[None]):  # one seed: pictures only
        half_width = crossed_half_width(0.0, picture_variance(z), 0.05)
        assert half_width == pytest.approx(stats.norm.isf(0.025) * standard_error)


def test_blocks_of_unlike_seeds_share_the_pictures_and_no_noise():
    generator = np.random.default_rng(3)
    easy = generator.normal(size=500)  # in both, so that it cancels in the difference
    one, other = (easy + generator.normal(size=(seeds, 500)) for seeds in (3, 7))
    assert picture_variance(one, -other) < 0.2 * picture_variance(one)
    assert picture_variance(one, np.zeros((5, 500))) == pytest.approx(picture_variance(one))


@pytest.mark.parametrize("freedom", [1, 4])
@pytest.mark.parametrize("difference", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_so_many_seeds_find_the_difference_in_four_cases_of_five(difference, freedom):
    """By the power of the t test on one side, whose spread has (n - 1) times `freedom` degrees."""

    def power(count):
        degrees = freedom * (count - 1)
        return stats.nct.sf(stats.t.isf(0.025, degrees), degrees, difference * math.sqrt(count))

    count = seeds_needed(1.0, 0.0, difference, freedom)
    assert power(count) > 0.795
    assert count == 2 or power(count - 1) < 0.805


def test_pictures_take_their_part_of_the_seeds_needed():
    few, many = (seeds_needed(400.0, pictures, 1.0) for pictures in (0.0, 0.05))
    assert few == pytest.approx(7.85 * 400, rel=2e-3)  # of so many seeds the normal quantiles
    assert many == pytest.approx(7.85 * 400 / (1 - 7.85 * 0.05), rel=2e-3)
    assert seeds_needed(4.0, 0.05, 2.8 * math.sqrt(0.05)) is None
    assert seeds_needed(0.0, 0.0, 1.0) == 2


def simulated_hits(generator, seeds, rows, difference, seed_sd, shared, trials, pictures=200, captions=2, level=22.0):
    """z in percent, (trials, rows, seeds, pictures), of hits by probit; row 0 is `difference` points above the others.

    A hit's latent score: row + seed (`shared` of its variance in all rows) + picture + row by picture + caption + rest.
    """

    def normal(*shape):
        return generator.standard_normal((trials, *shape), dtype=np.float32)

    by_row, by_caption, of_picture = 0.4, 0.7, 2.0
    total = math.sqrt(1 + of_picture**2 + 2 * by_row**2 + by_caption**2 + seed_sd**2)
    levels = np.full(rows, level)
    levels[0] += difference
    threshold = (total * stats.norm.ppf(levels / 100)).astype(np.float32)[:, None, None]
    seed = math.sqrt(shared) * normal(1, seeds, 1) + math.sqrt(1 - shared) * normal(rows, seeds, 1)
    score = threshold + seed_sd * seed + of_picture * normal(1, 1, pictures) + by_row * normal(rows, 1, pictures)
    hits = np.zeros((trials, rows, seeds, pictures), dtype=np.float32)
    of_run = math.sqrt(0.5) * normal(rows, seeds, pictures)  # what a run makes of a picture, and of each caption
    for _ in range(captions):
        caption = by_caption * normal(1, 1, pictures) + by_row * normal(rows, 1, pictures)
        hits += score + caption + of_run + math.sqrt(0.5) * normal(rows, seeds, pictures) > 0
    return 100 * hits / captions


# in the hits of 200 pictures: none, about a third of the picture's spread, more than the picture's
SEED_SDS = {"none": 0.0, "small": 0.09, "large": 0.4}


@pytest.mark.parametrize("seeds", [3, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in (5, 10))])
def test_intervals_over_seeds_and_pictures_cover_as_they_say_and_false_verdicts_are_few(seeds):
    """Prints both: `pytest -s -k as_they_say`."""
    false_verdicts, weights = [], np.array([1.0, -1.0])
    for name, seed_sd in SEED_SDS.items():
        for rows, shared in ((2, 0.0), (2, 0.5), (6, 0.5)):
            generator = np.random.default_rng([seeds, rows, int(100 * seed_sd), int(10 * shared)])
            missed = false = count = 0
            for difference in (0.0, 3.0):
                for _ in range(4):
                    z = simulated_hits(generator, seeds, rows, difference, seed_sd, shared, trials=150)
                    spread = shared_spread(z.mean(axis=-1))
                    over_seeds = spread.half_width(np.pad(weights, (0, rows - 2)), 0.05)
                    margin = (z[:, 0] - z[:, 1]).mean(axis=(-1, -2))
                    half_width = crossed_half_width(over_seeds, picture_variance(z[:, 0] - z[:, 1]), 0.05)
                    missed += (abs(margin - difference) > half_width).sum()
                    false += (abs(margin) > half_width).sum() if difference == 0 else 0
                    count += len(z)
            coverage = 1 - missed / count
            false_verdicts.append(false / (count / 2))
            text = f"{seeds} seeds, spread over seeds {name}, {shared:.0%} shared, {rows} rows"
            print(f"{text}: covers {coverage:.1%}, false {false_verdicts[-1]:.1%}")
            error = 3 * math.sqrt(0.05 * 0.95 / count)
            assert 0.94 - error < coverage < (0.97 if rows > 2 else 0.985) + error, text
    assert np.mean(false_verdicts) < 0.06
    assert max(false_verdicts) < 0.06 + 3 * math.sqrt(0.06 * 0.94 / (count / 2))
