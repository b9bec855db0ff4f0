"""Noise, order, rate and precision of the learned temperature: against hand-made cases, scipy and other arithmetic."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from common.geometry import Sphere
from oblique_topology.equilibrium import mean_of
from oblique_topology.low_precision import gradient_error
from oblique_topology.noise import SHARES, Noise, holm, holm_notes, rows_of, series_of, steps_of
from oblique_topology.temperature import TOPOLOGIES, converged_step
from oblique_topology.temperature_order import half_of_best, order_of_runs
from oblique_topology.temperature_rate import converged_or_end
from oblique_topology.temperature_rate import rows_of as rows_of_rates


def test_holm_rejects_what_its_steps_reject():
    # worked example: 4 x 0.005, 3 x 0.01, 2 x 0.03, 0.04 is pulled up to its predecessor
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    rng = np.random.default_rng(0)
    for _ in range(200):
        p_values = rng.random(4) ** 3
        rejected, level = set(), 0.05
        for place, index in enumerate(np.argsort(p_values)):  # Holm's procedure, step by step
            if p_values[index] > level / (4 - place):
                break
            rejected.add(int(index))
        assert {index for index, p in enumerate(holm(p_values)) if p <= level} == rejected


def test_steps_are_paired_t_tests_of_neighbouring_shares():
    rng = np.random.default_rng(1)
    values = [rng.normal(level, 1.0, 6) for level in (9.0, 7.5, 7.0, 4.0, 1.0)]
    steps = steps_of(list(zip(SHARES, values)))
    expected = holm([stats.ttest_rel(later, earlier).pvalue for earlier, later in itertools.pairwise(values)])
    assert [p for _, p in steps] == pytest.approx(expected)
    assert [change for change, _ in steps] == pytest.approx(
        [b.mean() - a.mean() for a, b in itertools.pairwise(values)]
    )


def test_the_verdict_on_a_curve_needs_every_step():
    falling = [(share, [level, level + 0.5, level + 1.1]) for share, level in zip(SHARES, (40, 30, 25, 20, 10))]
    varied = [(share, [v + 0.1 * k * n for n, v in enumerate(values)]) for k, (share, values) in enumerate(falling)]
    turning = [*varied[:-1], (0.5, [25.0, 25.4, 26.3])]
    notes = holm_notes(
        {("drawn", "sphere"): varied, ("fixed", "sphere"): turning, ("drawn", "oblique"): [(0.0, [1.0])]}
    )
    assert len(notes) == 2
    assert "the final multiplier falls" in notes[0]
    assert "is not shown to be monotone" in notes[1]


def test_photographs_have_five_shares_of_each_topology_and_a_fixed_shuffle_shares_the_run_without_noise():
    rows = rows_of("photos")
    assert len(rows) == len(TOPOLOGIES) * (5 + 4)
    assert rows["sphere_fixed_20"].settings == ("data.partners_drawn=once", "data.partner_noise=0.2")
    assert rows["sphere_drawn_0"].settings == ()
    values = {(key, "final_multiplier"): [float(place)] for place, key in enumerate(rows)}
    series = series_of(rows, values)
    assert series["fixed", "oblique"][0] == series["drawn", "oblique"][0]
    assert [share for share, _ in series["fixed", "oblique"]] == list(SHARES)
    assert Noise("sphere", "ambiguous", 0.5).settings == ("data.ambiguity=1", "data.partner_noise=0.5")
    assert len(rows_of("demo")) == 2 * 2 * 3


def test_the_temperature_settles_where_three_starts_have_met():
    steps = list(range(0, 100, 10))
    target = np.linspace(3.0, 3.9, 10)  # rises gradually
    gap = np.array([1.0, 0.6, 0.3, 0.09, 0.05, 0.02, 0.01, 0.0, 0.0, 0.0])
    t = [target + 2 * gap, target, target - gap]
    evaluations = [[(20, 1.0), (40, 6.0), (60, 10.0)], [(20, 1.0), (40, 4.0), (60, 10.0)], [(60, 2.0)]]
    order = order_of_runs(steps, t, evaluations)
    assert order.temperature_step == 30  # spread 0.27 of 3
    assert order.representation_step == 40
    assert order.rise == pytest.approx(0.6 - 0.18)  # of the start above
    falls_first = stats.spearmanr(steps[3:], t[0][3:]).statistic
    assert order.spearman == pytest.approx(falls_first)
    never = order_of_runs(steps, [target, target + 1, target - 1], evaluations)
    assert (never.temperature_step, never.rise, never.spearman) == (90, 0, 0)
    learning = [(20, 1.0), (40, 3.0), (60, 5.0)]
    assert half_of_best([learning, [(20, 0.4), (40, 0.5), (60, 0.4)], [(20, 0.0), (60, 0.0)]]) == 40
    assert half_of_best([[(20, 0.0), (40, 0.0)]]) == 40


def test_a_run_that_never_converges_counts_with_its_end():
    steps = np.arange(150.0)
    settling = 4 - 3 * np.exp(-steps / 20)
    assert converged_or_end(steps, settling, 5) == converged_step(steps, settling, 10.0, 5)
    assert converged_or_end(steps, 1 + steps, 5) == 149
    late = 4 - 3 * np.exp(-np.maximum(0, steps - 30) / 20)  # still in the warm-up
    assert converged_or_end(steps, late, 0) == 0
    assert converged_or_end(steps, late, 31) > 60


def test_faster_temperatures_can_be_left_out():
    every, slow = (rows_of_rates("photos", faster) for faster in (True, False))
    assert slow == {key: row for key, row in every.items() if row[-1] == 1}
    assert 3 * len(slow) == len(every) == 36


@pytest.mark.parametrize("multiplier", [1, 100])
def test_the_error_of_the_gradient_is_that_of_factors_rounded_by_hand(multiplier):
    draws = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(64, 32, generator=draws), dim=-1) for _ in range(2))
    texts = F.normalize(0.5 * images + texts, dim=-1)  # so close that no pair is without a gradient at 100

    def gradients(rounded):
        """By the formula: d loss / d logits = (mean of both softmaxes - I) / B; I, the partners, is not rounded."""
        x, y = images.double(), multiplier * texts.double()
        logits = rounded(x) @ rounded(y).T
        logits.diagonal().copy_((x * y).sum(dim=1))
        pushes = (logits.softmax(1) + logits.softmax(0)) / 2 / 64
        of_images = rounded(pushes) @ rounded(y) - y / 64
        return torch.cat([of_images, multiplier * (rounded(pushes.T) @ rounded(x) - x / 64)])

    exact = gradients(lambda factor: factor)
    by_hand = gradients(lambda factor: factor.float().bfloat16().double())
    expected = float((by_hand - exact).norm() / exact.norm())
    assert gradient_error(images, texts, Sphere(), multiplier, True) == pytest.approx(expected, rel=0.1)
    assert gradient_error(images, texts, Sphere(), multiplier, False) < 2e-5


def test_a_batch_without_a_balance_leaves_the_mean_empty():
    assert mean_of([{"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": None}
