"""Verdicts with pictures, ties, means and q values, on made-up hits and tables."""

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import test_common_claims
from scipy import stats
from test_common_claims import A_X, A_Y, B_X, B_Y, PROTOCOL, cell, entry, load, table

from common.report.claims.decide import measured_at_every_scale
from common.report.claims.equivalence import UNKNOWN_LEVEL, Rule
from common.report.claims.expressions import margins, parse
from common.report.claims.ours import our_cells
from common.report.claims.read import FAILS, HOLDS
from common.report.claims.show import Judged, PaperClaims, evidence, headline, with_q
from common.report.claims.verdict import (
    HOLDS_BY_LITTLE,
    NO_DIFFERENCE,
    NOT_RUN,
    NOT_TRAINED,
    OUTSIDE,
    UNDECIDED,
    decide,
    smallest_error,
)
from common.report.hits import Hits
from common.report.table import Training

verdict_of = partial(test_common_claims.verdict_of, rule=Rule(0.5, 1.0))
LEVELS = (("a", 5.0), ("b", 50.0))
EASY = np.random.default_rng(7).normal(0, 1, size=400)  # pictures


def with_hits(level, seeds=5, generator=0, validation=None, protocol=PROTOCOL, easy=EASY, **more):
    """A cell whose hits share the pictures' difficulty, `easy`; `level` shifts their mean."""
    noise = np.random.default_rng([generator, seeds]).normal(size=(seeds, len(easy)))
    hits = Hits.of([[[float(hit)] for hit in run] for run in easy + noise + level > 0])
    number = cell(hits.by_picture().mean(axis=1), protocol=protocol, hits=hits, **more)
    return dataclasses.replace(number, validation=validation)


def seeded(mean, spread=0.01, seeds=5, **more):
    """A cell of exact numbers over seeds, without hits."""
    return dataclasses.replace(cell(mean + spread * np.linspace(-1, 1, seeds)), **more)


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_seeds_in_another_order_are_compared_with_the_same_ones(tmp_path):
    a, b = with_hits(0.3, generator=1), with_hits(0.0, generator=2)
    turned = dataclasses.replace(
        b, values=b.values[::-1], seeds=b.seeds[::-1], hits=dataclasses.replace(b.hits, codes=b.hits.codes[::-1])
    )
    one, other = (
        verdict_of(tmp_path, f"{A_X} > {B_X}", table({"a": {"x": a}, "b": {"x": of_b}})) for of_b in (b, turned)
    )
    assert one.decisive.interval == pytest.approx(other.decisive.interval)
    assert headline(one) == "holds at demo scale"  # not only on these pictures


# ---- ties ------------------------------------------------------------------------------------------------------------


def test_the_margin_of_equivalence_is_half_the_papers_difference_at_the_controls_validation_level(tmp_path):
    ours = table({"a": {"x": seeded(30.0)}, "b": {"x": seeded(30.0, validation=30.0)}})
    bound = verdict_of(tmp_path, f"{A_X} > {B_X}", ours).findings[0].bound  # printed: 90 and 85 %
    odds = math.log(0.9 / 0.1) - math.log(0.85 / 0.15)
    moved = [1 / (1 + math.exp(-(math.log(0.3 / 0.7) + share * odds))) for share in (0.5, 1)]
    assert (bound.within, bound.paper) == pytest.approx([100 * moved[0] - 30, 100 * moved[1] - 30])
    low = table({"a": {"x": seeded(1.0)}, "b": {"x": seeded(1.0, validation=1.0)}})
    assert verdict_of(tmp_path, f"{A_X} > {B_X}", low).findings[0].bound.within == 1.0  # at least a point
    unknown = table({name: {"x": seeded(30.0)} for name in "ab"})
    bound = verdict_of(tmp_path, f"{A_X} > {B_X}", unknown).findings[0].bound
    assert (bound.within, bound.reason) == (None, UNKNOWN_LEVEL)


@pytest.mark.parametrize(
    ("difference", "spread", "validation", "verdict"),
    [
        (0.0, 0.3, 30.0, NO_DIFFERENCE),
        (0.8, 0.1, 30.0, HOLDS_BY_LITTLE),
        (9.0, 0.1, 30.0, HOLDS),
        (-9.0, 0.1, 30.0, FAILS),
        (-0.8, 0.1, 30.0, FAILS),  # it does not hold, however little it lacks
        (0.0, 9.0, 30.0, UNDECIDED),
        (0.0, 0.3, None, UNDECIDED),
    ],
)
def test_a_difference_within_the_margin_is_a_result(tmp_path, difference, spread, validation, verdict):
    one = cell(np.array([30.1, 29.8, 30.3, 30.0, 29.8]) + difference + spread * np.array([1, -2, 0, 2, -1]) / 2)
    ours = table({"a": {"x": one}, "b": {"x": seeded(30.0, 0.0, validation=validation)}})
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours)
    assert outcome.verdict == verdict
    if verdict in (NO_DIFFERENCE, HOLDS_BY_LITTLE):
        assert headline(outcome) == f"{verdict[:-1]}{outcome.within:.2g} points at demo scale on these pictures"
        assert outcome.reason == ""  # the paper's 10.8 points in odds are more than x
    if verdict == UNDECIDED:
        assert "a difference of " in outcome.reason


def test_a_margin_wider_than_the_papers_difference_names_it(tmp_path):
    ours = table({"a": {"x": cell((1.1, 1.0, 1.0, 0.9, 1.0))}, "b": {"x": seeded(1.0, validation=1.0)}})
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours)
    assert (outcome.verdict, outcome.reason) == (NO_DIFFERENCE, "the paper's own difference is 0.58 points here")


def test_a_conjunction_is_a_tie_where_all_of_its_comparisons_are(tmp_path):
    even = (30.1, 30.0, 29.8, 30.2, 29.9)
    rows = {"a": {"x": cell(even), "y": cell(even)}, "b": {"x": seeded(30.0, validation=30.0), "y": seeded(30.0)}}
    assert verdict_of(tmp_path, [f"{A_X} > {B_X}", f"{A_Y} > {B_Y}"], table(rows)).verdict == UNDECIDED
    rows["b"]["y"] = seeded(30.0, validation=30.0)
    assert verdict_of(tmp_path, [f"{A_X} > {B_X}", f"{A_Y} > {B_Y}"], table(rows)).verdict == NO_DIFFERENCE
    assert verdict_of(tmp_path, f"{A_X} > {B_X} or {A_Y} > {B_Y}", table(rows)).verdict == UNDECIDED


def test_at_least_as_good_as_holds_at_a_one_sided_error_and_fails_at_the_two_sided_one(tmp_path):
    half_95, half_90 = (stats.t.isf(error / 2, 4) / math.sqrt(5) for error in (0.05, 0.1))
    standard = np.array([-1.0, -1.0, 0.0, 1.0, 1.0])  # of deviation 1
    for shift, verdict in ((-0.5 + half_90, HOLDS), (-0.5 - half_90, UNDECIDED), (-0.5 - half_95, FAILS)):
        values = 50 + shift + np.sign(shift + 0.5) * 0.01 + standard
        ours = table({"a": {"x": cell(values)}, "b": {"x": cell((50.0,) * 5)}})
        assert verdict_of(tmp_path, f"{A_X} > {B_X} - 0.5", ours).verdict == verdict
        assert verdict_of(tmp_path, f"{A_X} - {B_X} + 0.5 > 0", ours).verdict == verdict


def test_as_good_as_may_fall_short_by_the_margin_of_equivalence(tmp_path):
    half_95, half_90 = (stats.t.isf(error / 2, 4) / math.sqrt(5) for error in (0.05, 0.1))
    standard = 0.1 * np.array([-1.0, -1.0, 0.0, 1.0, 1.0])
    control = seeded(50.0, 0.0, validation=50.0)
    same = table({"a": {"x": control}, "b": {"x": control}})
    x = verdict_of(tmp_path, f"{A_X} > {B_X}", same).findings[0].bound.within
    for shift, verdict in ((0.1 * half_90, HOLDS), (-0.1 * half_90, UNDECIDED), (-0.1 * half_95, FAILS)):
        ours = table({"a": {"x": cell(50 - x + 1.05 * shift + standard)}, "b": {"x": control}})
        for text in (f"{A_X} >= {B_X}", f"{B_X} <= {A_X}"):
            outcome = verdict_of(tmp_path, text, ours)
            assert outcome.verdict == verdict
            assert outcome.p < 0.05 if verdict != UNDECIDED else outcome.p > 0.05
        assert f"as good within {x:.2g} points" in evidence(outcome)
        assert verdict_of(tmp_path, f"{A_X} >= {B_X}", ours, rule=None).verdict == FAILS  # without x: as printed


@pytest.mark.parametrize(
    ("text", "allows"),
    [(f"{A_X} > {B_X}", False), (f"{A_X} >= {B_X}", True), (f"{A_X} > {B_X} - 1", True), (f"{A_X} > {B_X} + 1", False),
     (f"{A_X} < 5", False), (f"{A_X} <= 5", False), (f"{A_X} > 0.9 * {B_X}", True), (f"{A_X} < 0.25 * {B_X}", False),
     (f"{A_X} - {B_X} <= 3", True)],
)  # fmt: skip
def test_a_comparison_that_equal_numbers_satisfy_allows_a_difference(text, allows):
    assert parse(text).allows == allows


# ---- rows that did not train -----------------------------------------------------------------------------------------


def test_a_row_that_did_not_train_decides_no_claim_but_those_about_training(tmp_path):
    ours = table({"a": {"x": seeded(50.0)}, "b": {"x": seeded(1.0)}})
    collapsed = Training("r", "r", loss_over_chance=(0.99, 1.0, 1.0, 1.0, 0.2))
    rows = [dataclasses.replace(row, training=collapsed if row.method == "b" else None) for row in ours.rows]
    ours = dataclasses.replace(ours, rows=rows)
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours)
    assert (outcome.verdict, outcome.reason) == (NOT_TRAINED, "b: final loss at 1.00 of its chance level")
    assert outcome.p is None  # no member of the family
    assert verdict_of(tmp_path, f"{A_X} > {B_X}", ours, about="training").verdict == HOLDS
    assert verdict_of(tmp_path, f"{A_X} > 40", ours).verdict == HOLDS  # the other row counts


@pytest.mark.parametrize(
    ("regime", "verdict", "reason"),
    [
        (f"{A_Y} > 3", HOLDS, ""),
        (f"{A_Y} > 3 or {B_Y} > 3", HOLDS, ""),
        ([f"{A_Y} > 3", f"{B_Y} > 3"], OUTSIDE, f"not {B_Y} > 3"),
        ('experiment["state"]["a_inside"] > 0.5', NOT_RUN, "the regime of the runs is unknown: experiment state"),
    ],
)
def test_runs_in_another_regime_neither_hold_nor_fail_a_claim(tmp_path, regime, verdict, reason):
    ours = table({"a": {"x": seeded(50.0), "y": seeded(4.0)}, "b": {"x": seeded(40.0), "y": seeded(2.0)}})
    more = {"regime": regime, "departure": "half the steps"}
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours, **more)
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert ("departure: half the steps" in headline(outcome)) == (verdict == HOLDS)
    assert verdict_of(tmp_path, f"{A_X} < {B_X}", ours, **more).verdict == (FAILS if verdict == HOLDS else verdict)
    if verdict == OUTSIDE:
        assert (headline(outcome), outcome.p) == ("outside the claim's regime at demo scale", None)  # not of the family


def test_a_scale_in_the_claims_regime_comes_before_a_more_telling_one_outside(tmp_path):
    (claim,), printed = load(
        tmp_path,
        entry(f"{A_X} > {B_X}", regime=f"{A_Y} > 3", departure="half the steps"),
    )  # fmt: skip
    ours = {
        scale: our_cells([table({"a": {"x": seeded(50.0), "y": seeded(y)}, "b": {"x": seeded(40.0)}})])["demo"]
        for scale, y in (("paper", 4.0), ("photos", 2.0), ("demo", 4.0), ("smoke", 2.0))
    }
    ours["photos_scratch"] = {}
    verdicts = measured_at_every_scale(claim, printed, ours)
    shown = [(verdict.scale, verdict.verdict, bool(verdict.departure)) for verdict in verdicts]
    assert shown[:2] == [("paper", HOLDS, False), ("demo", HOLDS, True)]
    assert ("photos", OUTSIDE, False) in shown[2:]
    assert OUTSIDE not in {verdict for scale, verdict, _ in shown if scale == "smoke"}  # nothing is decided there


# ---- how many seeds --------------------------------------------------------------------------------------------------


def test_an_undecided_claim_states_the_seeds_that_its_margin_takes(tmp_path):
    values = np.array([20.0, 31.0, 30.0, 40.0, 29.0])
    ours = table({"a": {"x": cell(values)}, "b": {"x": seeded(30.0, 0.0, validation=30.0)}})
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours)
    x = outcome.findings[0].bound.within
    variance = outcome.findings[0].estimate.seed_variance
    assert variance == pytest.approx(values.var(ddof=1), rel=0.03)
    seeds = next(n for n in range(2, 99) if n >= stats.t.ppf([0.975, 0.8], n - 1).sum() ** 2 * variance / x**2)
    assert seeds == math.ceil(7.849 * variance / x**2) + 2  # so few estimate their own spread
    assert outcome.reason == f"a difference of {x:.2g} points takes at least {seeds} seeds"
    with_pictures = table({
        "a": {"x": with_hits(0.0, generator=1)},
        "b": {"x": with_hits(0.0, generator=2, validation=1.0, easy=np.roll(EASY, 1))},  # hard pictures of its own
    })  # fmt: skip
    few = verdict_of(tmp_path, f"{A_X} > {B_X}", with_pictures)
    assert few.reason == "a difference of 1 point takes more pictures, not seeds"


# ---- means of many comparisons ---------------------------------------------------------------------------------------


def test_a_claim_of_more_than_three_comparisons_has_a_verdict_on_their_mean(tmp_path):
    generator = np.random.default_rng(0)
    means = {"a": {"x": 33, "y": 33}, "b": {"x": 30, "y": 30}, "c": {"x": 33, "y": 20}}
    rows = {row: {key: cell(mean + generator.normal(0, 1, 5)) for key, mean in of.items()} for row, of in means.items()}
    texts = [f"{A_X} > {B_X}", f"{A_Y} > {B_Y}", f'{A_X} > t["c"]["x"]', f'{A_Y} > t["c"]["y"]']
    outcome = verdict_of(tmp_path, texts, table(rows))
    assert (outcome.verdict, outcome.mean.verdict) == (UNDECIDED, HOLDS)
    by_seed = np.mean([np.subtract(rows["a"][c].values, rows[r][c].values) for c in "xy" for r in "bc"], axis=0)
    assert outcome.mean.margin == pytest.approx(by_seed.mean())
    expected = stats.t.interval(0.95, 4, by_seed.mean(), stats.sem(by_seed))
    assert outcome.mean.decisive.interval == pytest.approx(expected, abs=0.05)
    # comparisons that allow a difference are no part of the mean: these would cancel to a constant
    spread = f"max({A_X}, {B_X}, {A_Y}) - min({A_X}, {B_X}, {A_Y}) < 9"
    for without in (texts[:3], " or ".join(texts), spread):
        assert verdict_of(tmp_path, without, table(rows)).mean is None


# ---- many tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["A and B", "A or B", "A and (B or C)", "(A or B) and C", "A and B and C"])
def test_p_is_the_smallest_error_at_which_decide_answers(text):
    condition = parse("".join(f"t['{sign}']['x'] > 0" if sign in "ABC" else sign for sign in text))
    names = [margin.cells[0].row for margin in margins(condition)]
    for errors, signs in itertools.product(
        itertools.permutations((0.001, 0.02, 0.3), len(names)), itertools.product((True, False), repeat=len(names))
    ):
        of = {name: (error, sign) for name, error, sign in zip(names, errors, signs)}

        def settle(margin, error_holds, error_fails, of=of):
            error, sign = of[margin.cells[0].row]
            return (sign if error <= (error_holds if sign else error_fails) else None), 0.0

        def error_of(margin, holds, of=of):
            error, sign = of[margin.cells[0].row]
            return error if sign == holds else 1.0

        for holds in (True, False):
            outcome = smallest_error(condition, holds, error_of)
            if outcome < 1:
                assert decide(condition, settle, outcome * 1.001, outcome * 1.001).answer is holds
            assert decide(condition, settle, outcome * 0.999, outcome * 0.999).answer is not holds


def test_p_of_a_claim_is_that_of_the_t_test(tmp_path):
    a, b = np.array([52.0, 53.0, 55.0, 51.0]), np.array([50.0, 52.0, 52.0, 50.5])
    ours = table({"a": {"s": cell(a)}, "b": {"s": cell(b)}})
    outcome = verdict_of(tmp_path, 't["a"]["s"] > t["b"]["s"]', ours)
    assert outcome.p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=0.01)
    assert verdict_of(tmp_path, 't["a"]["s"] < t["b"]["s"]', ours).p == pytest.approx(outcome.p)
    assert verdict_of(tmp_path, 't["a"]["s"] > t["b"]["s"] - 9', ours).p_equal is None


def test_p_of_a_tie_is_that_of_two_one_sided_t_tests_of_the_worst_comparison_and_decides_its_q(tmp_path):
    noise = np.array([0.2, -0.2, 0.3, 0.1, -0.3])
    rows = {"a": {"x": cell(50 + noise), "y": cell(50.2 + 2 * noise)}}
    ours = table({**rows, "b": dict.fromkeys("xy", seeded(50.0, 0.0, validation=50.0))})
    outcome = verdict_of(tmp_path, [f"{A_X} > {B_X}", f"{A_Y} > {B_Y}"], ours)
    assert (outcome.verdict, outcome.within) == (NO_DIFFERENCE, outcome.findings[0].bound.within)  # 5 points, not 1
    differences = noise, 0.2 + 2 * noise
    worst = max(
        stats.ttest_1samp(one, finding.bound.within, alternative="less").pvalue
        for one, finding in zip(differences, outcome.findings)
    )
    assert outcome.p_equal == pytest.approx(worst, rel=0.05)
    (claim,), _ = load(tmp_path, entry(f"{A_X} > {B_X}"))
    (judged,) = with_q(PaperClaims("p", "P", (Judged(claim, outcome, (outcome,)),))).judged
    assert judged.measured[0].q == pytest.approx(2 * outcome.p_equal)  # one of two tests, the other far less clear


def test_q_values_are_those_of_benjamini_and_hochberg_over_the_claims_of_a_paper(tmp_path):
    generator, judged = np.random.default_rng(0), []
    for difference in (0.0, 0.5, 1.0, 2.0, 4.0):
        ours = table({"a": {"s": cell(50 + difference + generator.normal(0, 1, 4))}, "b": {"s": cell((50.0,) * 4)}})
        (claim,), _ = load(tmp_path, entry('t["a"]["s"] > t["b"]["s"]'))
        outcome = verdict_of(tmp_path, 't["a"]["s"] > t["b"]["s"]', ours)
        judged.append(Judged(claim, outcome, (outcome,)))
    p = np.array([one.measured[0].p for one in judged])
    q = [one.measured[0].q for one in with_q(PaperClaims("p", "P", tuple(judged))).judged]
    order = np.argsort(p)
    assert np.array(q)[order] == pytest.approx(np.minimum.accumulate((p[order] * 5 / np.arange(1, 6))[::-1])[::-1])


def test_comparisons_of_shares_of_another_number_have_a_mean_for_every_task(tmp_path):
    """Their slopes do not cancel within a task, so that one mean over two tasks would compare unlike protocols."""
    other = {**PROTOCOL, "task": "zero_shot"}
    spread = np.array([-0.1, 0.0, 0.1, 0.0, 0.0])
    cells = {name: {"x": cell(level + spread), "y": cell(level + spread, protocol=other)} for name, level in LEVELS}
    text = [f"{a} < {share} * {b}" for share in (0.25, 0.3) for a, b in ((A_X, B_X), (A_Y, B_Y))]
    outcome = verdict_of(tmp_path, text, table(cells))
    assert (outcome.verdict, outcome.mean.verdict, len(outcome.mean.findings)) == (HOLDS, HOLDS, 2)
