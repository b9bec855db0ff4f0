"""Interval of a margin over two crossed random effects: training seeds and test pictures.

Seed s and picture p, with all its queries, add z[s, p] to a margin, the mean of z. In the model
z = margin + seed + picture + rest, new seeds on these pictures move the margin by V_S, new pictures with these seeds by
V_P. Both contain V_C, the part of the rest, so the variance for new seeds and pictures is V_S + V_P - V_C:

    half-width^2 = t^2 V_S + normal^2 * sum over test sets of max(0, V_P - V_C)

t has the degrees of freedom of V_S, which may come from all rows of a table (`statistics.shared_spread`). Pictures are
many, so their quantile is normal. `tests/test_common_report_crossed.py` simulates the coverage.
"""

import math

import numpy as np
from scipy import special

# (normal quantile of 5 % two-sided + that of 80 % power)^2, about 7.85
_POWER_FACTOR = (special.ndtri(0.975) + special.ndtri(0.8)) ** 2


def components(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """V_S, V_P and V_C of the mean of z, see the module.

    Args:
        z: (..., seeds, pictures), at least two of each, in any unit.
    Returns:
        Three arrays of the leading axes, in the square of the unit.
    """
    seeds, pictures = z.shape[-2:]
    by_seed, by_picture = z.mean(axis=-1), z.mean(axis=-2)
    rest = z - by_seed[..., :, None] - by_picture[..., None, :] + z.mean(axis=(-1, -2), keepdims=True)
    v_s, v_p = by_seed.var(axis=-1, ddof=1) / seeds, by_picture.var(axis=-1, ddof=1) / pictures
    return v_s, v_p, (rest**2).sum(axis=(-1, -2)) / ((seeds - 1) * (pictures - 1)) / (seeds * pictures)


def picture_variance(*blocks: np.ndarray) -> np.ndarray:
    """max(0, V_P - V_C): what new pictures add to the variance that the seeds show; with one seed V_P.

    Args:
        blocks: (..., seeds, pictures) of one test set; the margin is the sum of their means. Runs that share their
            seeds are one block; blocks are independent.
    """
    v_p = sum(z.mean(axis=-2) for z in blocks).var(axis=-1, ddof=1) / blocks[0].shape[-1]
    return np.maximum(0, v_p - sum(components(z)[2] for z in blocks if z.shape[-2] > 1))


def crossed_half_width(over_seeds: np.ndarray | float, pictures: np.ndarray | float, error: float) -> np.ndarray:
    """Half-width of the two-sided interval over seeds and pictures that misses with probability `error`.

    Args:
        over_seeds: the same over seeds only, t * sqrt(V_S).
        pictures: sum of `picture_variance` over the test sets, in the square of the unit.
    """
    return np.sqrt(np.square(over_seeds) + special.ndtri(error / 2) ** 2 * pictures)


def seeds_needed(variance: float, pictures: float, difference: float, freedom: float = 1.0) -> int | None:
    """Seeds that show a true margin of `difference` in four cases of five; None if only more pictures help.

    n = (t(97.5 %) + t(80 %))^2 s^2 / (x^2 - 7.85 b^2) for a two-sided error of 5 %, with the quantiles of t at n seeds;
    for many seeds the factor is 7.85.

    Args:
        variance: s^2, of one seed's margin on these pictures.
        pictures: b^2, as in `crossed_half_width`.
        difference: x, above 0.
        freedom: degrees of freedom of s^2 for each seed beyond the first; above 1 where rows share their spread.
    """
    room = difference**2 - _POWER_FACTOR * pictures
    if room <= 0:
        return None
    count = max(2, math.ceil(_POWER_FACTOR * variance / room))
    while _power_factor(freedom * (count - 1)) * variance > count * room:
        count += 1
    return count


def _power_factor(freedom: float) -> float:
    return float(special.stdtrit(freedom, 0.975) + special.stdtrit(freedom, 0.8)) ** 2
