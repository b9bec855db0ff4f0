"""Claims on hand-made tables: the language, three-valued logic, intervals, both verdicts, and the messages."""

import itertools
import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from scipy import stats
from test_common_report_tables import made_up_table

from common.report.claims.decide import audit, measured, measured_at_every_scale
from common.report.claims.expressions import Cell, ExpressionError, Logic, margins, parse
from common.report.claims.intervals import estimate
from common.report.claims.ours import our_cells
from common.report.claims.read import FAILS, HOLDS, ClaimError, load_claims, load_paper_tables
from common.report.claims.show import (
    Judged,
    PaperClaims,
    counts,
    effect,
    evidence,
    headline,
    judge,
    to_page,
    to_text,
    with_q,
)
from common.report.claims.verdict import NEEDS, NOT_RUN, ONE_SEED, UNCHECKED, UNDECIDED, UNLIKE, Finding, decide
from common.report.conclusions import load_conclusions
from common.report.formats import write_table
from common.report.page import write_page
from common.report.table import Column, Row, Table, Training, measured_over_seeds
from common.reproduce.command import Command, _print_claims

TABLES = """
paper: {title: "Made up", version: "0"}
tables:
  t:
    version: A
    caption: "Nothing."
    columns: [{key: x, label: X}, {key: y, label: Y}, {key: s, label: S, unit: steps}]
    rows:
      - {method: a, config: a.yaml, values: [90.0, 80.0, 1.0]}
      - {method: b, config: b.yaml, values: [85.0, 80.0, 2.0]}
      - {method: c, needs: "published weights", values: [70.0, null, 3.0]}
      - {method: d, needs: "code that is to come", not_run_yet: true, values: [0.0, 60.0, 4.0]}
  u:
    version: A
    not_run_yet: true
    caption: "Nothing."
    columns: [{key: x, label: X}]
    rows:
      - {method: a, values: [50.0]}
"""
A_X, B_X, A_Y, B_Y = 't["a"]["x"]', 't["b"]["x"]', 't["a"]["y"]', 't["b"]["y"]'
PROTOCOL = {"data": "test", "fingerprint": "00", "preprocessing": {"size": 32}, "unreadable_images": 0}


# ---- hand-made claims and tables ------------------------------------------------------------------------------------


def folder_with(tmp_path, claims, tables=TABLES):
    folder = tmp_path / "no_paper"
    folder.mkdir(exist_ok=True)
    (folder / "paper_tables.yaml").write_text(tables, encoding="utf-8")
    (folder / "claims.yaml").write_text(claims, encoding="utf-8")
    return folder


def entry(holds_if, name="C1", **more):
    """One claim as YAML (JSON is YAML)."""
    content = {"id": name, "claim": f"Sentence {name}.", "where": "A, Table t", "holds_if": holds_if}
    return {key: value for key, value in (content | more).items() if value is not None}


def of_experiment(measured_side):
    return entry(None, no_numbers="a figure", measured=measured_side)


def load(tmp_path, *entries):
    folder = folder_with(tmp_path, json.dumps({"claims": list(entries)}))
    printed = load_paper_tables(folder / "paper_tables.yaml")
    return load_claims(folder / "claims.yaml", printed), printed


def cell(values, data="test (00)", protocol=PROTOCOL, scale="demo", seeds=None, **more):
    return measured_over_seeds(
        values,
        range(len(values)) if seeds is None else seeds,
        scale=scale,
        data=data,
        protocol="short",
        full_protocol=protocol,
        **more,
    )


def table(rows, name="t", scale="demo", paper=None, data="scenes/train (1)"):
    """rows: method -> column -> Measured."""
    units = {"s": "steps", "r": "share of runs"}
    columns = [Column(key, key.upper(), units.get(key, "percent")) for key in "xysr"]
    printed = paper if paper is not None else {}
    lines = [Row(method, printed, ours, "measured") for method, ours in rows.items()]
    seeds = sorted({seed for ours in rows.values() for number in ours.values() for seed in number.seeds})
    return Table(
        paper="no_paper", paper_title="Made up", paper_version="0", table_id=name, caption="", columns=columns,
        rows=lines, scale=scale, data=data, seeds=seeds, git_revision="", command="", created="", hardware="",
    )  # fmt: skip


def verdict_of(tmp_path, expression, *tables, scale="demo", rule=None, **more):
    """Of a claim on tables of the paper, or on an experiment, which has no numbers of the paper."""
    is_ours = "experiment[" in str(expression)
    (claim,), printed = load(tmp_path, of_experiment(expression) if is_ours else entry(expression, **more))
    return measured(replace(claim, equal_within=rule), printed, our_cells(tables)[scale], scale)


# ---- three values ---------------------------------------------------------------------------------------------------


def margin(name):
    return parse(f't["{name}"]["x"] > 0')


@pytest.mark.parametrize(
    ("text", "rule"),
    [("A and B", lambda a, b, c: a and b), ("A or B", lambda a, b, c: a or b),
     ("A and B or C", lambda a, b, c: (a and b) or c), ("(A or B) and C", lambda a, b, c: (a or b) and c)],
)  # fmt: skip
def test_an_answer_of_three_values_is_right_however_the_open_parts_turn_out(text, rule):
    condition = parse(re.sub("[ABC]", lambda match: f"t['{match[0]}']['x'] > 0", text))
    for given_ in itertools.product((True, False, None), repeat=3):
        filled = itertools.product(*([value] if value is not None else [True, False] for value in given_))
        outcomes, by_margin = {rule(*answers) for answers in filled}, dict(zip(margins(condition), given_))
        answer = decide(condition, lambda comparison, *_, of=by_margin: (of[comparison], 0.0)).answer
        assert answer is (outcomes.pop() if len(outcomes) == 1 else None)


def test_the_error_is_shared_where_one_part_would_be_enough():
    seen = {}

    def settle(comparison, error_holds, error_fails):
        seen[comparison.cells[0].row] = (error_holds, error_fails)
        return None, None

    decide(Logic("and", (margin("a"), Logic("or", (margin("b"), margin("c"))))), settle)
    assert seen["a"] == pytest.approx((0.05, 0.025))
    # one of b and c is enough to hold the whole, as far as they can; both must fail to refute it
    assert seen["b"] == seen["c"] == pytest.approx((0.05 / 2, 0.025))


@pytest.mark.parametrize(
    ("kind", "answers", "deciding"),
    [
        ("and", (True, True, True), 1),  # the nearest to its threshold
        ("and", (False, None, False), 2),  # the clearest that fails
        ("and", (True, None, None), 1),  # of those that block, the furthest down
        ("or", (True, None, True), 2),
        ("or", (False, False, False), 2),
        ("or", (False, None, None), 2),
    ],
)
def test_the_comparison_that_is_shown_is_one_that_decides(kind, answers, deciding):
    strengths = dict(zip("abc", (-1.0, -2.0, -3.0) if False in answers and kind == "and" else (2.0, 1.0, 3.0)))
    settled = dict(zip("abc", zip(answers, strengths.values())))
    decision = decide(Logic(kind, tuple(map(margin, "abc"))), lambda comparison, *_: settled[comparison.cells[0].row])
    assert (decision.margin.cells[0].row, decision.strength) == ("abc"[deciding], strengths["abc"[deciding]])


# ---- the language ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "().__class__.__bases__[0].__subclasses__() > 1", "t.a > 1", 't["a"].x > 1', '__import__("os") > 1',
        'open("x") > 1', "[x for x in y] > 1", "{1: 2}[1] > 0", "{1} > 0", "(lambda: 1)() > 0", "lambda: 1",
        "9**9**9 > 1", "2 ** 3 > 1", "7 // 2 > 1", "7 % 2 > 1", "1 << 9 > 1", "1 @ 2 > 0", "~1 > 0", "x > 1",
        't["a"] > 1', 't["a"]["x"]["y"] > 1', 't[0]["x"] > 1', 't[t]["x"] > 1', 't["a":"b"]["x"] > 1', "f(1) > 2",
        't["a"]["x"]', "1", "1 + 1", "1 if 2 > 1 else 3", "(1 if 2 > 1 else 3) > 0", "(x := 1) > 0", "x = 1",
        't["a"]["x"] == 1', 't["a"]["x"] != 1', '1 in t["a"]["x"]', 't["a"]["x"] is 1', "(1 > 0) + 1 > 2",
        'max(1 > 0, 2) > 1', '"a" > "b"', "b'a' > 1", 'f"{1}" > 1', "True > 0", "None > 0", "1j > 0", "... > 0",
        "(1 > 0)(2)", "max(*t) > 1", "max(1, 2, key=abs) > 0", "max() > 0", "abs(1) > 0",
        "approximately(1, 2)", "approximately(1, 2, 3) > 0", "approximately(1, 2, within=3)", "1 / 0 > 1",
        't["a"]["x"] / 2 > 1', 'max(t["a"]["x"], 1) * t["b"]["x"] > 1', 'not t["a"]["x"] > 1', "await x", "yield", "",
        ">", "1 >", "(",
        't["a"]["x"] > 1 and 5', 'not t["a"]["x"]', "print(1)", "import os", "1;", "exec('1')", "eval('1') > 0",
    ],
)  # fmt: skip
def test_what_is_not_of_the_language_is_refused_with_its_place(text):
    with pytest.raises(ExpressionError, match="column"):
        parse(text)


_PIECES = ['t["a"]["x"]', "1", "2.5", "+", "-", "*", "/", "**", "//", ">", "<", ">=", "==", "and", "or", "not",
           "(", ")", "abs(", "max(", "min(", "mean(", "approximately(", ",", ".", "[", "]", "lambda", ":", "for", "in",
           "x", "if", "else", "{", "}", "__class__", "'", '"', "\n", ":=", "await", "*t", "\\", "é", "#", "0x1", "1_0",
           "@"]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=25).map(" ".join))
def test_any_text_gives_a_condition_of_known_parts_or_an_expression_error(text):
    try:
        condition = parse(text)
    except ExpressionError:
        return
    for comparison in margins(condition):
        assert math.isfinite(comparison.value(defaultdict(lambda: 1.25)))


CELLS = [f't["{row}"]["x"]' for row in "abcd"]


# texts of numbers; products are with constants, as the language wants them around min and max
VALUES = st.recursive(
    st.sampled_from(CELLS) | st.integers(-3, 3).map("({})".format),
    lambda inner: (
        st.builds(
            str.format,
            st.sampled_from(["({} + {})", "({} - {})", "max({}, {})", "min({}, {})", "mean({}, {})"]),
            inner,
            inner,
        )
        | st.builds(str.format, st.sampled_from(["2 * {}", "(-3) * {}", "0.5 * {}", "(-{})"]), inner)
    ),
    max_leaves=4,
)
SIGNS = st.sampled_from([">", ">=", "<", "<="])
CONDITIONS = st.recursive(
    st.builds("{} {} {} {} {}".format, VALUES, SIGNS, VALUES, SIGNS, VALUES)
    | st.builds("approximately({}, {}, 1.5)".format, VALUES, VALUES),
    lambda inner: st.builds("({}) {} ({})".format, inner, st.sampled_from(["and", "or"]), inner),
    max_leaves=2,
)


@settings(max_examples=120, deadline=None)
@given(CONDITIONS, st.lists(st.integers(-4, 4), min_size=4, max_size=4))
def test_margins_and_logic_agree_with_python(text, numbers):
    """The resolved condition is true where Python says so of the same text (evaluated here, in the test, alone)."""
    by_row = dict(zip("abcd", map(float, numbers)))
    names = {
        "t": {row: {"x": number} for row, number in by_row.items()},
        "mean": lambda *parts: sum(parts) / len(parts),
        "approximately": lambda a, b, within: abs(a - b) <= within,
        "max": max, "min": min, "__builtins__": {},
    }  # fmt: skip
    given_ = {Cell("t", row, "x"): number for row, number in by_row.items()}
    condition = parse(text)

    def settle(comparison, *_):
        return (comparison.value(given_) > 0 if comparison.strict else comparison.value(given_) >= 0), 0.0

    assert decide(condition, settle).answer is eval(text, names)


def test_a_spread_becomes_the_comparisons_of_all_pairs():
    condition = parse("max(t['a']['x'], t['b']['x'], t['c']['x']) - min(t['a']['x'], t['b']['x'], t['c']['x']) < 2")
    comparisons = list(margins(condition))
    assert len(comparisons) == 6  # of nine pairs three are of a cell with itself
    assert comparisons[0].text == 't["a"]["x"] - t["b"]["x"] < 2'


def test_slopes_are_those_of_differences_and_what_cancels_does_not_count():
    (comparison,) = margins(
        parse("t['a']['x'] * t['b']['x'] - 2 * t['a']['x'] > mean(t['c']['x'], 3) + 0 * t['d']['x']")
    )
    at = {Cell("t", row, "x"): number for row, number in zip("abcd", (2.0, 3.0, 4.0, 5.0))}
    assert [cell.row for cell in comparison.cells] == ["a", "b", "c"]
    for one, slope in comparison.slopes(at).items():
        moved = [comparison.value(at | {one: at[one] + step}) for step in (-1e-5, 1e-5)]
        assert slope == pytest.approx((moved[1] - moved[0]) / 2e-5, rel=1e-6)


# ---- reading a file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"holds_if": 'v["a"]["x"] > 1'}, r'v\["a"\]\["x"\] names no table; expected: t, u, experiment'),
        ({"holds_if": 't["e"]["x"] > 1'}, r't\["e"\]\["x"\] names no row of t; expected: "a", "b", "c", "d"'),
        ({"holds_if": 't["a"]["z"] > 1'}, r'names no column of t; expected: "x", "y", "s"'),
        ({"holds_if": f"{A_X} > > 1"}, r"holds_if, column \d+: invalid syntax"),
        ({"holds_if": f"{A_X} == 1"}, r"holds_if, column 16: only > >= < <= compare"),
        ({"holds_if": f"{A_Y} >= {A_Y}"}, "refers to no cell"),  # no number could change it
        ({"holds_if": 5}, r"holds_if: .*tuple, got 5"),
        ({"holds_if": None}, "'no_numbers', why there is none"),
        ({"holds_if": None, "no_numbers": "a figure"}, "measured side, 'test' or 'needs'"),
        ({"no_numbers": "a figure"}, "either an expression for the audit or 'no_numbers'"),
        ({"audit": f"{A_X} > 1"}, "holds_if stands for audit and measured"),
        ({"kind": "cells"}, r"kind: Unexpected keyword argument, got cells"),
        ({"test": "tests/test_x.py::test_y"}, "'test' decides the measured side"),
        ({"holds_if": None, "audit": f"{A_X} > 1", "test": "rm -rf"}, r"test\.0: .*tests/.*, got rm -rf"),
        ({"holds_if": None, "no_numbers": "x", "test": "tests/a.py::b", "shows": "maybe"}, "shows: .*, got maybe"),
        ({"shows": "does not hold"}, "'shows' goes with 'test' only"),
        ({"holds_if": 'experiment["e"]["v"] > 1'}, "an audit uses only the paper's tables"),
        ({"holds_if": 't["{row}"]["x"] > 1'}, r"\{row\} is not a name of 'for'; expected: none"),
        ({"for": {"row": ["a"]}}, "'for' gives row, which no expression uses"),
        ({"for": {"row": []}}, r"for\.row: .*at least 1 item"),
        ({"holds_if": None, "audit": f"{A_X} > 1", "needs": "x", "after_the_data": A_X + " > 2"}, "needs the earlier"),
        ({"claim": ""}, "claim: .*, got $"),
        ({"id": "a b"}, "id: .*, got a b"),
        ({"exact": "so"}, "exact: .*'by construction' or 'parity check', got so"),
        ({"threshold": "now"}, "threshold: .*, got now"),
        ({"control_of": "C2"}, "control_of is 'C2'; expected an earlier claim: none"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_claim_is_named_with_file_and_claim(tmp_path, change, message):
    content = entry(f"{A_X} > {B_X}") | change
    stated = {key: value for key, value in content.items() if value is not None}
    message = f"(?s)^no_paper/claims.yaml, claim {content['id']}.*{message}"
    refused((message, lambda: load(tmp_path, stated)), error=ClaimError)


def test_doubles_a_missing_id_and_broken_files_are_named(tmp_path):
    refused(
        ("claim C1: the id stands twice", lambda: load(tmp_path, entry(f"{A_X} > 1"), entry(f"{B_X} > 1"))),
        ("claim number 2: id: Field required", lambda: load(tmp_path, entry(f"{A_X} > 1"), {"claim": "x"})),
        error=ClaimError,
    )
    for broken, message in (("claims: [", "is no YAML"), ("- a", r"\['a'\]"), ("claims: a", "claims: .*list, got a")):
        folder = folder_with(tmp_path, broken)
        of_file = partial(load_claims, folder / "claims.yaml", load_paper_tables(folder / "paper_tables.yaml"))
        refused((f"(?s)no_paper/claims.yaml.*{message}", of_file), error=ClaimError)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("values: [50.0]", "values: [50.0, 1]", "no_paper/paper_tables.yaml, u, row a: one value for each column"),
        ("values: [50.0]", 'values: ["50"]', "row a: x is '50', not a number"),
        ("method: b", "method: a", "t: rows and columns need distinct names"),
    ],
)
def test_a_broken_table_of_the_paper_is_named(tmp_path, old, new, message):
    folder = folder_with(tmp_path, "claims: []", TABLES.replace(old, new))
    refused((message, lambda: load_paper_tables(folder / "paper_tables.yaml")), error=ClaimError)


def test_for_stands_for_all_combinations_and_a_list_for_all_its_expressions(tmp_path):
    texts = ['t["{row}"]["{column}"] > 1', f"{A_X} > {B_X}"]
    (claim,), _ = load(tmp_path, entry(texts, **{"for": {"row": ["a", "b"], "column": ["x", "y", "s"]}}))
    assert len(claim.audit) == 7
    assert claim.audit_text[-2:] == ("for every row of: a; b", "for every column of: x; y; s")


# ---- audit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        (f"{A_X} > {B_X}", HOLDS),
        (f"{B_X} > {A_X}", FAILS),
        (f"{A_Y} > {B_Y}", FAILS),  # a tie
        (f"{A_Y} >= {B_Y}", HOLDS),
        (f"approximately({A_X} - {B_X}, 5.05, 0.05)", HOLDS),  # to the printed digits, in spite of rounding
        (f"approximately({A_X} - {B_X}, 5.1, 0.05)", FAILS),
        ('0.1 * t["a"]["s"] + 0.2 * t["a"]["s"] > 0.3', FAILS),  # floats say 0.30000000000000004
        ('t["c"]["y"] > 1', UNCHECKED),
        (f't["c"]["y"] > 1 and {B_X} > {A_X}', FAILS),
        (f't["c"]["y"] > 1 or {A_X} > {B_X}', HOLDS),
        (f"{A_X} > {B_X} > 80 > {A_Y} - 1", HOLDS),
        ("u['a']['x'] > 49.9 and u['a']['x'] <= 50", HOLDS),
    ],
)
def test_the_audit_puts_the_printed_numbers_in(tmp_path, expression, verdict):
    (claim,), printed = load(tmp_path, entry(expression))
    outcome = audit(claim, printed)
    assert outcome.verdict == verdict
    if verdict == UNCHECKED:
        assert outcome.reason == 'the paper prints no t["c"]["y"]'


# ---- measured -------------------------------------------------------------------------------------------------------

A, B = (52.0, 55.0, 51.0), (48.0, 52.5, 46.0)


def test_cells_that_share_seeds_and_data_are_compared_in_pairs(tmp_path):
    expected = stats.ttest_rel(A, B).confidence_interval(0.95)
    for b in (cell(B[::-1], seeds=(2, 1, 0)), cell(B)):  # by seed and not by place
        outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", table({"a": {"x": cell(A)}, "b": {"x": b}}))
        assert outcome.decisive.interval == pytest.approx((expected.low, expected.high), abs=0.05)  # of the arcsine
    assert evidence(outcome) == "margin +3.8 ± 3.1 points; 3 seeds, paired"
    assert headline(outcome) == "holds at demo scale on these pictures"


def test_numbers_of_one_row_are_multiplied_only_if_their_runs_are_the_same(tmp_path):
    for seeds, verdict in ((None, HOLDS), ((7, 8, 9), UNDECIDED)):
        tables = table({"a": {"x": cell(A, seeds=seeds)}, "b": {"x": cell(B)}})
        for product in (f"{A_X} * {B_X}", f"({A_X} - 3 * {B_X}) * ({A_X} - 3 * {B_X})"):
            outcome = verdict_of(tmp_path, f"{product} > 0", tables)
            assert outcome.verdict == verdict
            assert ("other seeds" in outcome.reason) == (verdict == UNDECIDED)


@pytest.mark.parametrize("why", ["other seeds", "other training data", "more seeds"])
def test_other_cells_are_compared_by_welch(tmp_path, why):
    b = (*B, 50.0, 49.0) if why == "more seeds" else B
    seeds = (7, 8, 9) if why == "other seeds" else None
    tables = [table({"a": {"x": cell(A)}, "b": {"x": cell(b, seeds=seeds)}})]
    if why == "other training data":
        tables = [table({"a": {"x": cell(A)}}), table({"b": {"x": cell(B)}}, data="scenes/train (2)")]
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", *tables)
    expected = stats.ttest_ind(A, b, equal_var=False).confidence_interval(0.95)
    assert outcome.decisive.interval == pytest.approx((expected.low, expected.high), abs=0.05)
    assert outcome.verdict == UNDECIDED  # the same numbers that hold in pairs
    assert outcome.decisive.basis == f"{'3 to 5' if why == 'more seeds' else 3} seeds, Welch"


@pytest.mark.parametrize(
    ("expression", "verdict", "reason"),
    [
        (f"{A_X} < {B_X}", FAILS, ""),
        (f"{A_X} > {B_X} and {A_Y} > {B_Y}", FAILS, ""),
        (f"{A_X} > {B_X} or {A_Y} > {B_Y}", HOLDS, ""),
        (f"{A_X} > {B_X} + 3.9", UNDECIDED, ""),
        (f"{A_X} > {B_X} and {A_X} > {B_X} + 3.9", UNDECIDED, ""),
        (f"{A_X} > 40", HOLDS, ""),
        (f"max({A_X}, {B_X}) - min({A_X}, {B_X}) < 10", HOLDS, ""),
        (f"max({A_X}, {B_X}) - min({A_X}, {B_X}) < 0.1", FAILS, ""),
        (f"approximately({A_X}, {B_X}, 10)", HOLDS, ""),
        (f"approximately({A_X}, {B_X}, 4)", UNDECIDED, ""),
        (f"{A_X} > 1.01 * {B_X}", HOLDS, ""),
        (f"{A_X} > 2 * {B_X}", FAILS, ""),
        (f't["c"]["x"] > {A_X}', NEEDS, "published weights"),
        (f't["d"]["x"] > {A_X}', NOT_RUN, "t, d"),
        (f'u["a"]["x"] > {A_X}', NOT_RUN, "u, a"),
        (f't["c"]["x"] > {A_X} and u["a"]["x"] > {A_X}', NEEDS, "published weights"),
        (f'{A_X} > {B_X} or t["c"]["x"] > 1', HOLDS, ""),
        (f'{A_X} < {B_X} and t["c"]["x"] > 1', FAILS, ""),
        (f'{A_X} < {B_X} or t["d"]["x"] > 1', NOT_RUN, "t, d"),
        ('t["a"]["s"] > 1', NOT_RUN, "t, column s"),
    ],
)  # fmt: skip
def test_measured_verdicts_of_hand_made_tables(tmp_path, expression, verdict, reason):
    a, b = cell((52.0, 55.0, 51.0)), cell((48.2, 51.0, 47.1))  # +3.9 in pairs, give or take 0.2
    below, above = cell((10.0, 10.5, 10.2)), cell((30.0, 31.0, 30.5))
    outcome = verdict_of(tmp_path, expression, table({"a": {"x": a, "y": below}, "b": {"x": b, "y": above}}))
    assert (outcome.verdict, outcome.reason if reason else "") == (verdict, reason)


def test_a_product_has_the_interval_of_its_linear_part(tmp_path):
    generator = np.random.default_rng(0)
    a, b = generator.normal(60, 0.5, 12), generator.normal(50, 0.5, 12)
    outcome = verdict_of(tmp_path, f"{A_X} * {B_X} > 2900", table({"a": {"x": cell(a)}, "b": {"x": cell(b)}}))
    per_seed = stats.ttest_1samp(a * b - 2900, 0).confidence_interval(0.95)
    assert outcome.decisive.interval == pytest.approx((per_seed.low, per_seed.high), abs=1)


def test_one_seed_decides_nothing(tmp_path):
    one = verdict_of(tmp_path, f"{A_X} > {B_X}", table({"a": {"x": cell((90.0,))}, "b": {"x": cell((10.0,))}}))
    assert (one.verdict, one.margin, one.decisive.interval) == (ONE_SEED, 80.0, None)
    assert headline(one) == "undecided (one seed) at demo scale"
    mixed = verdict_of(tmp_path, f"{A_X} > {B_X}", table({"a": {"x": cell((90.0,))}, "b": {"x": cell(B)}}))
    assert (mixed.verdict, mixed.reason) == (ONE_SEED, "one seed on one side")


def test_rows_of_a_column_share_their_spread_and_one_of_another_spread_stays_apart(tmp_path):
    generator = np.random.default_rng(0)
    draws = {name: tuple(generator.normal(place, 1, 4)) for name, place in zip("abcdef", (50, 47, 40, 55, 60, 45))}
    ours = table({name: {"s": cell(values)} for name, values in draws.items()})
    text = 't["a"]["s"] > t["b"]["s"]'
    pooled = verdict_of(tmp_path, text, ours).decisive
    assert pooled.basis == "4 seeds, pooled over 6 rows"
    loud = {**draws, "b": tuple(20 * np.array(draws["b"]))}
    apart = verdict_of(tmp_path, text, table({name: {"s": cell(values)} for name, values in loud.items()})).decisive
    assert re.fullmatch(r"4 seeds, paired; not pooled: b \(Brown-Forsythe p \S+\)", apart.basis)
    expected = stats.ttest_rel(loud["a"], loud["b"]).confidence_interval(0.95)
    assert apart.interval == pytest.approx((expected.low, expected.high))


def test_rows_of_an_experiment_are_pooled_where_they_are_runs(tmp_path):
    values = {row: np.random.default_rng([1, k]).normal(k, 1, 3) for k, row in enumerate(("p", "q", "r", "s"))}
    for are_runs, basis in ((False, "3 seeds, paired"), (True, "3 seeds, pooled over 4 rows")):
        made = replace(experiment(values, column="v"), rows_are_runs=are_runs)
        assert verdict_of(tmp_path, Q_ABOVE_P, made).decisive.basis == basis


Q_ABOVE_P = 'experiment["memory"]["q_v"] > experiment["memory"]["p_v"]'


def verdict_of_shares(tmp_path, expression, **values):
    """values: for each run whether it ended well."""
    return verdict_of(tmp_path, expression, experiment(values, "share of runs"))


def test_a_share_of_runs_is_decided_by_mistake_as_rarely_as_it_may_be(tmp_path):
    """Runs that all end alike have no spread: by t three of three would decide."""

    def outcome(successes, runs):
        values = tuple(float(run < successes) for run in range(runs))
        return verdict_of_shares(tmp_path, 'experiment["memory"]["q_v"] > 0.5', q_v=values)

    def verdict(successes, runs):
        return outcome(successes, runs).verdict

    assert [verdict(0, runs) for runs in (3, 5, 6)] == [UNDECIDED, UNDECIDED, FAILS]
    assert verdict(6, 6) == HOLDS
    assert {outcome(count, 5).reason for count in (0, 5)} == {"the same share of 6 seeds would decide"}
    needed = int(re.search(r"\d+", outcome(2, 8).reason)[0])
    assert verdict(needed // 4, needed) == FAILS
    for runs in (4, 6, 9):
        decided = [count for count in range(runs + 1) if verdict(count, runs) != UNDECIDED]
        assert sum(math.comb(runs, count) for count in decided) / 2**runs <= 0.05  # where the share is a half


def test_two_shares_of_runs_divide_the_chance_to_err(tmp_path):
    verdict = verdict_of_shares(tmp_path, Q_ABOVE_P, q_v=(1.0,) * 6, p_v=(0.0,) * 5 + (1.0,))
    (low, _), (_, high) = (stats.binomtest(count, 6).proportion_ci(0.975) for count in (6, 1))
    assert verdict.decisive.interval[0] == pytest.approx(low - high)
    assert verdict.verdict == UNDECIDED


def test_the_interval_of_a_share_of_runs_is_exact():
    of_runs = ((0.0,) * 5, (0.0, 1.0, 1.0), (1.0,) * 4)
    made = table({name: {"r": cell(values)} for name, values in zip("abc", of_runs)})
    for row, successes, runs in zip(made.rows, (0, 2, 4), (5, 3, 4), strict=True):
        assert row.ours["r"].interval == pytest.approx(stats.binomtest(successes, runs).proportion_ci(0.95))


def test_near_is_what_its_seeds_leave_near(tmp_path):
    ours = table({"a": {"s": cell((100.0, 110.0, 90.0)), "y": cell((52.0, 52.1, 51.9))}})
    outcome = verdict_of(tmp_path, 't["a"]["s"] > 70 and t["a"]["y"] > 40', ours)  # by 30 +- 25 and by 12 +- 0.3
    assert (outcome.verdict, outcome.decisive.text) == (HOLDS, 't["a"]["s"] > 70')


def test_what_follows_by_construction_has_no_interval_and_is_counted_apart(tmp_path):
    ours = table({"a": {"x": cell((90.0,))}, "b": {"x": cell((10.0,))}})
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours, exact="by construction")
    assert (outcome.decisive.interval, evidence(outcome)) == (None, "margin +80.0 points")
    assert headline(outcome) == "holds by construction at demo scale"
    assert headline(verdict_of(tmp_path, f"{A_X} < {B_X}", ours, exact="parity check")).startswith("does not hold in a")


def test_no_rounding_moves_an_end_to_the_threshold():
    for low, high, text in ((0.04, 9.0, "+4.52 ± 4.48"), (0.05, 0.63, "+0.34 ± 0.29"), (1.0, 3.0, "+2.0 ± 1.0")):
        assert effect(Finding("", HOLDS, (low + high) / 2, (low, high))) == text


def test_a_threshold_chosen_after_the_data_is_named_beside_the_verdict_by_the_earlier_one(tmp_path):
    ours = table({"a": {"x": cell(A)}, "b": {"x": cell(B)}})
    outcome = verdict_of(
        tmp_path, None, ours, audit=f"{A_X} > 1", measured=f"{A_X} > {B_X} + 3.9", after_the_data=f"{A_X} > {B_X}"
    )
    assert headline(outcome) == "undecided at demo scale on these pictures; threshold chosen after the data: holds"


def test_an_interval_that_begins_at_0_does_not_hold_a_strict_claim(tmp_path):
    outcome = verdict_of(tmp_path, f"{A_X} > 0", table({"a": {"x": cell((0.5, 0.0, 2.0))}}))
    assert (outcome.verdict, outcome.decisive.interval[0]) == (UNDECIDED, 0)
    ties = table({name: {"s": cell((7.0, 7.0))} for name in "ab"})  # steps: a count may be the same by its nature
    assert verdict_of(tmp_path, f"{A_X} > {B_X}".replace('"x"', '"s"'), ties).verdict == FAILS
    assert verdict_of(tmp_path, f"{A_X} >= {B_X}".replace('"x"', '"s"'), ties).verdict == HOLDS


def test_shares_whose_seeds_tie_by_chance_decide_nothing(tmp_path):
    for of_a, of_b, verdict in (
        (50.0, (0.2, 0.2), UNDECIDED),
        (50.0, (0.2, 0.3), HOLDS),
        (50.0, (0.0, 0.0), HOLDS),
        (100.0, (100.0, 100.0), UNDECIDED),
        (0.0, (0.0, 0.0), UNDECIDED),
    ):
        rows = {"a": {"x": cell((of_a, of_a))}, "b": {"x": cell(of_b)}}
        assert verdict_of(tmp_path, f"{A_X} > {B_X}", table(rows)).verdict == verdict, of_b


def test_nothing_is_decided_at_smoke_scale(tmp_path):
    ours = table({"a": {"x": cell(A, scale="smoke")}, "b": {"x": cell(B, scale="smoke")}}, scale="smoke")
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", ours, scale="smoke")
    assert (outcome.verdict, outcome.reason) == (UNDECIDED, "nothing is decided at smoke scale")


def test_cells_of_unlike_protocols_are_not_compared_and_the_key_is_named(tmp_path):
    other = {**PROTOCOL, "preprocessing": {"size": 64}}
    tables = [table({"a": {"x": cell(A)}}), table({"b": {"x": cell(B, protocol=other)}})]
    outcome = verdict_of(tmp_path, f"{A_X} > {B_X}", *tables)
    assert (outcome.verdict, outcome.reason) == (UNLIKE, f"preprocessing.size is 32 for {A_X} but 64 for {B_X}")
    tables[1] = table({"b": {"x": cell(B, protocol={**PROTOCOL, "unreadable_images": 3})}})
    assert verdict_of(tmp_path, f"{A_X} > {B_X}", *tables).verdict == HOLDS


def test_an_average_over_test_sets_is_fine_where_every_set_is_compared_with_itself(tmp_path):
    other = {**PROTOCOL, "data": "second", "fingerprint": "11"}
    ours = table({
        "a": {"x": cell(A), "y": cell((62.0, 63.0, 61.0), "second (11)", other)},
        "b": {"x": cell(B), "y": cell((58.0, 60.0, 58.0), "second (11)", other)},
    })  # fmt: skip
    outcome = verdict_of(tmp_path, f"mean({A_X} - {B_X}, {A_Y} - {B_Y}) > 0", ours)
    assert outcome.verdict == HOLDS
    expected = stats.ttest_rel(np.add(A, (62, 63, 61)) / 2, np.add(B, (58, 60, 58)) / 2).confidence_interval(0.95)
    assert outcome.decisive.interval == pytest.approx((expected.low, expected.high), abs=0.05)
    assert outcome.decisive.data == ("test (00)", "second (11)")
    crossed = verdict_of(tmp_path, f"{A_X} > {B_Y}", ours)
    assert (crossed.verdict, 'data is "test"' in crossed.reason) == (UNLIKE, True)
    assert verdict_of(tmp_path, f"mean({A_X} - {B_X}, {A_Y}) > 0", ours).verdict == HOLDS  # against a number


@pytest.mark.parametrize(
    ("text", "unit"),
    [(f"{A_X} * {B_Y} > {B_X} * {A_Y}", ""), (f"{A_X} > 0.25 * {B_X}", "points"),
     (f"mean({A_X}, {A_Y}) > {B_X} - 1", "points")],
)  # fmt: skip
def test_a_product_of_two_percentages_is_not_in_points(tmp_path, text, unit):
    ours = table({"a": {"x": cell(A), "y": cell(B)}, "b": {"x": cell(B), "y": cell(A)}})
    (claim,), printed = load(tmp_path, entry(text))
    both = audit(claim, printed), measured(claim, printed, our_cells([ours])["demo"], "demo")
    assert [finding.unit for verdict in both for finding in verdict.findings] == [unit, unit]


def test_two_comparisons_that_share_the_error_need_more_than_one_does(tmp_path):
    a, b = (10.0, 11.0, 12.5), (12.0, 12.6, 13.6)
    ours = table({"a": {"x": cell(a), "y": cell((90.0, 91.0, 92.0))}, "b": {"x": cell(b), "y": cell((1.0, 2.0, 3.0))}})
    single = verdict_of(tmp_path, f"{A_X} > {B_X}", ours)
    both = verdict_of(tmp_path, [f"{A_X} > {B_X}", f"{A_Y} > {B_Y}"], ours)
    assert (single.verdict, both.verdict) == (FAILS, UNDECIDED)
    # the interval is the one that left it open, so that it does not contradict the verdict
    assert both.decisive.interval[0] < 0 < both.decisive.interval[1]
    assert both.decisive.basis == "3 seeds, paired, 97.5 % as one of 2"
    missing = verdict_of(tmp_path, [f"{A_Y} > {B_Y}", 't["d"]["x"] > 1'], ours)
    assert evidence(missing) == "1 of 2 comparisons hold so far"


def test_scales_are_judged_apart_and_the_more_telling_one_comes_first(tmp_path):
    (claim,), printed = load(tmp_path, entry(f"{A_X} > {B_X}"))
    demo = table({"a": {"x": cell(A)}, "b": {"x": cell(B)}})
    half = table({"a": {"x": cell(A, scale="paper")}}, scale="paper")
    photos = table({"a": {"x": cell(B, scale="photos")}, "b": {"x": cell(A, scale="photos")}}, scale="photos")
    verdicts = measured_at_every_scale(claim, printed, our_cells([demo, half, photos]))
    assert [(verdict.scale, verdict.verdict) for verdict in verdicts] == [("photos", FAILS), ("demo", HOLDS)]
    single = table({name: {"x": cell((9.0,), scale="paper")} for name in "ab"}, scale="paper")
    verdicts = measured_at_every_scale(claim, printed, our_cells([demo, single]))
    assert [(verdict.scale, verdict.verdict) for verdict in verdicts] == [("demo", HOLDS), ("paper", ONE_SEED)]
    (only,) = measured_at_every_scale(claim, printed, our_cells([half]))
    assert (only.verdict, only.reason) == (NOT_RUN, "t, b")
    (nothing,) = measured_at_every_scale(claim, printed, our_cells([]))
    assert (nothing.verdict, nothing.reason, nothing.scale) == (NOT_RUN, "t, 2 rows", "")


def test_of_several_runs_of_a_table_the_one_with_most_seeds_counts_and_of_equal_ones_the_last():
    few, many, last = (table({"a": {"x": cell(values_)}}) for values_ in ((1.0,), (2.0, 2.0), (3.0, 3.0)))
    key = Cell("t", "a", "x")
    assert our_cells([many, few])["demo"][key].number.values == (2.0, 2.0)
    assert our_cells([many, last, few])["demo"][key].number.values == (3.0, 3.0)


def test_what_cannot_be_run_and_what_a_test_decides(tmp_path):
    contents = [
        entry(f"{A_X} > {B_X}", "C1", needs="a private data set"),
        entry(None, "C3", no_numbers="a theorem", test="tests/test_x.py::test_y"),
        entry(None, "C4", no_numbers="a theorem", test=["tests/test_x.py::test_z"], shows=FAILS),
    ]
    claims, printed = load(tmp_path, *contents)
    full = our_cells([table({"a": {"x": cell(A)}, "b": {"x": cell(B)}})])["demo"]
    verdicts = [measured(claim, printed, full, "demo") for claim in claims]
    assert [headline(verdict) for verdict in verdicts] == [
        "needs a private data set", "held by test test_y, run with the tests",
        "refuted by test test_z, run with the tests",
    ]  # fmt: skip
    assert "tests/test_x.py::test_y" in verdicts[1].reason


def test_rows_of_the_same_runs_count_once_for_the_spread_over_seeds_and_are_paired_with_each_other():
    rows = {"a": (50.0, 52.0, 54.5), "b": (40.0, 43.0, 44.0), "c": (30.0, 33.5, 34.0), "a, again": (54.0, 52.5, 50.0)}
    whole = table({name: {"x": cell(values)} for name, values in rows.items()})
    runs = dict(zip("abc", ((0.5, 0.6, 0.7), (0.5, 0.6, 0.8), (0.4, 0.6, 0.7))))
    made = [replace(row, training=Training("r", "r", "", runs[row.method[0]])) for row in whole.rows]

    def interval_of(margin, rows):
        cells, margin = our_cells([replace(whole, rows=rows)])["demo"], parse(margin)
        used = {name: cells[name] for name in margin.cells}
        result = estimate(margin, margin.slopes({name: number.number.mean for name, number in used.items()}), used)
        return result.basis, result.interval_at(0.05)

    between = 't["a"]["x"] > t["b"]["x"]'
    assert interval_of(between, made) == interval_of(between, made[:3])
    assert "pooled over 3 rows" in interval_of(between, made)[0]
    assert interval_of('t["a"]["x"] > t["a, again"]["x"]', made)[0] == "3 seeds, paired"
    assert interval_of(between, whole.rows) != interval_of(between, made)


# ---- experiments ----------------------------------------------------------------------------------------------------


V_AND_W = {"v": (1.0, 1.2), "w": (3.0, 3.1)}
V_BELOW_W = 'experiment["memory"]["v"] < experiment["memory"]["w"]'


def experiment(values, unit="GB", column=""):
    """A table `memory` of ours; values: key of a row -> a number per seed."""
    ours = {key: measured_over_seeds(of_row, range(len(of_row)), scale="demo", data="noise", protocol="short")
            for key, of_row in values.items()}  # fmt: skip
    made = table({f"row {key}": {"x": number} for key, number in ours.items()}, "memory")
    rows = [replace(row, ours={column: row.ours["x"]}, key=key) for row, key in zip(made.rows, values)]
    columns, protocol = [Column(column, "X", unit)], {"settings": {"steps": 3}}
    return replace(made, columns=columns, rows=rows, protocol=protocol, rows_are_runs=False)


def test_a_sentence_takes_a_mean_a_cell_as_its_table_shows_it_and_verdicts_that_are_alike(tmp_path):
    write_table(experiment(V_AND_W, column="gb"), tmp_path / "results/no_paper/memory/demo")
    _, page, *_ = write_table(made_up_table(), tmp_path / "results/no_paper/table0/demo")
    verdicts = "{C1: holds, C2: 'undecided; on the mean: holds', C3: undecided, C4: 'undecided; on the mean: holds'}"
    folder = tmp_path / "no_paper"
    folder.mkdir()
    (folder / "conclusions.yaml").write_text(
        "- text: '{memory/demo/memory | row v | gb} GB'\n"
        "- text: '{table0/demo/table0 | first | i2t_r1 | ±} (2 seeds)'\n"
        f"- {{claims: {verdicts}, scale: demo, text: A. B., details: '{{memory/demo/memory | row w | gb}}'}}\n"
        "- text: '{memory/demo/memory | row w minus row v | gb | ±}'\n"
    )
    value, shown, judged_, paired = load_conclusions(folder, tmp_path / "results")
    assert value.text == "1.1 GB"
    assert f"| {shown.text}" in page.read_text()
    assert (judged_.short, judged_.rest, judged_.details) == ("A.", "B.", "3.05")
    low, high = stats.ttest_rel(V_AND_W["w"], V_AND_W["v"]).confidence_interval()
    assert paired.text == f"{(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"
    assert (value.measured, judged_.measured) == ("numbers: demo, 2 seeds", "")  # of the text alone
    assert judged_.verdicts == ("C1: holds; C2, C4: undecided, on the mean holds; C3: undecided; scale demo")


def test_numbers_of_a_row_with_a_key_decide_a_claim_on_an_experiment(tmp_path):
    (claim,), printed = load(tmp_path, of_experiment(V_BELOW_W))
    (outcome,) = measured_at_every_scale(claim, printed, our_cells([experiment(V_AND_W)]))
    assert outcome.verdict == HOLDS
    assert evidence(outcome) == "margin +1.9 ± 0.6 GB; 2 seeds, paired"
    page = write_page([], tmp_path / "page.html", claims=[PaperClaims("p", "P", (Judged(claim, outcome, (outcome,)),))])
    assert "2 seeds, paired, data noise<" in page.read_text()  # often the training set: not "on"
    (missing,) = measured_at_every_scale(claim, printed, our_cells([]))
    assert missing.reason == "experiment memory"


def test_settings_of_a_table_are_compared_where_numbers_have_no_protocol(tmp_path):
    first, second = experiment({"v": (1.0, 1.2)}), replace(experiment({"w": (3.0, 3.1)}), experiment="other")
    both = 'experiment["memory"]["v"] < experiment["other"]["w"]'
    assert verdict_of(tmp_path, both, first, second).verdict == HOLDS
    outcome = verdict_of(tmp_path, both, first, replace(second, protocol={"settings": {"steps": 4}}))
    assert outcome.verdict == UNLIKE
    assert outcome.unlike.startswith("settings.steps is 4 for")


def test_a_command_judges_the_claims_on_the_experiments_that_it_measured(tmp_path, monkeypatch, capsys):
    folder_with(tmp_path, json.dumps({"claims": [of_experiment(V_BELOW_W)]}))
    monkeypatch.setattr("common.reproduce.command.ROOT", tmp_path)
    command = Command("table9", "demo", (0, 1), (), tmp_path, tmp_path / "results")  # a part of another name
    named = replace(experiment({"v": (9.0, 9.2), "w": (3.0, 3.1)}), table_id="table9", experiment="memory")
    for table_now, verdicts in ((named, [FAILS]), (replace(named, experiment="other"), [])):
        _print_claims(command, "no_paper", [table_now], [])
        assert re.findall(r"measured: ([\w ]+) at demo", " ".join(capsys.readouterr().out.split())) == verdicts


@pytest.mark.parametrize("rows", [(), ("table4_clip",)])
def test_a_command_at_smoke_scale_names_a_scale_that_decides(tmp_path, capsys, rows):
    command = Command("table4", "smoke", (0, 1), (), tmp_path, tmp_path / "results", rows)
    _print_claims(command, "no_paper", [], [])
    assert capsys.readouterr().out == ("No claim is decided at scale smoke, where runs are too short; use SCALE=demo\n")


# ---- for readers ----------------------------------------------------------------------------------------------------


MEASURED = [table({"a": {"x": cell(A)}, "b": {"x": cell(B)}})]


@pytest.fixture
def judged(tmp_path):
    contents = [
        entry(f"{A_X} > {B_X}", "C1", note="A note."),
        entry(f"{A_X} < {B_X}", "C2"),
        entry(f"{A_X} > {B_X} + 3.9", "C3"),
        entry(f'{A_X} > t["d"]["x"]', "C4"),
        entry(f'{A_X} > t["c"]["x"]', "C5"),
        entry(None, "C6", no_numbers="a theorem", test="tests/test_x.py::test_y"),
        entry('u["a"]["x"] > 60', "C7", claim="<b>Hostile</b> | sentence."),
    ]
    return judge(folder_with(tmp_path, json.dumps({"claims": contents})), MEASURED)


def test_counts_name_every_verdict(judged):
    assert counts(judged) == (
        "4 hold, 2 do not hold, 1 cannot be checked",
        "2 not run yet, 1 need what is not here; on these pictures: 1 hold, 1 do not hold, 1 undecided; "
        "by test: 1 hold",
    )


def test_a_control_is_answered_and_counts_as_no_claim_of_the_paper(judged):
    first, *rest = judged.judged
    control = replace(first, claim=replace(first.claim, id="C1-soft", control_of="C1"))
    both = replace(judged, judged=(first, control, *rest))
    assert counts(both) == counts(judged)
    before, after = with_q(judged).judged, with_q(both).judged
    assert [one.measured for one in after if one is not after[1]] == [one.measured for one in before]
    assert after[1].measured[0].verdict == first.measured[0].verdict
    assert "A control of ours beside C1." in to_page(both)


def test_only_claims_of_the_asked_tables_are_kept(judged, tmp_path):
    kept = judge(tmp_path / judged.paper, MEASURED, ["u", "v"])
    assert kept.judged == tuple(entry for entry in judged.judged if entry.claim.id == "C7")
    assert judge(Path("/nowhere"), []) is None


def test_terminal_text_has_both_verdicts_and_keeps_to_its_width(judged):
    text = to_text(judged, 80)
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert (
        "C1 Sentence C1. audit: holds; measured: holds at demo scale on these pictures (margin +3.8 ± 3.1 points; "
        "3 seeds, paired)" in joined
    )
    assert "C5 Sentence C5. audit: holds; measured: needs published weights" in joined
    assert "C6 Sentence C6. audit: cannot be checked: a theorem; measured: held by test " in joined


def test_the_page_of_all_claims_is_not_broken_by_a_sentence(judged):
    text = to_page(judged)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}
    assert len(lines) == 2 + 7
    assert "<b>" not in text
    assert f"Decided by `{A_X} > {B_X}`. A note." in text


def test_the_page_of_all_claims_leads_from_a_few_words_to_what_decides_each(judged):
    page = to_page(judged, lambda claim, scale: [f"{claim.id}: {scale}"])
    scales = dict(re.findall(r"^  - (C\d): (\w*)$", page, re.MULTILINE))
    assert scales == {**dict.fromkeys(("C1", "C2", "C3", "C4", "C5"), "demo"), "C7": ""}  # C6 is decided by a test
    assert "- measured: holds at demo scale on these pictures\n  - margin +3.8 ± 3.1 points\n  - 3 seeds" in page
    head, *sections = re.split(r"^## (?=C\d+$)", page, flags=re.MULTILINE)
    lines = re.findall(r"^\| \[(C\d)\]\(#(c\d)\) \| (.*) \|$", head, re.MULTILINE)
    assert [line[0] for line in lines] == [f"C{number}" for number in range(1, 8)]
    assert all(line[1] == line[0].lower() for line in lines)
    words = {line[0]: re.split(r"(?<!\\) \| ", line[2]) for line in lines}
    assert words["C1"] == ["Sentence C1.", "holds", "holds (demo)"]
    assert words["C5"][1:] == ["holds", "needs published weights"]
    assert words["C6"][1:] == ["cannot be checked", "holds by test"]
    for (name, *_), one, section in zip(lines, judged.judged, sections, strict=True):
        title, sentence, verdicts, rule = section.strip().split("\n\n")
        assert (title, len(re.findall("^- ", verdicts, re.MULTILINE))) == (name, 1 + len(one.measured))
        assert sentence.endswith(")*")
        assert rule.startswith("Decided by ")
