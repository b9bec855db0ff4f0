"""Verdicts at settings near the best of a search, and by seeds that were planned or not, on made-up numbers."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from refusals import refused
from scipy import stats
from test_common_claims import A_X, B_X, cell, entry, folder_with, load, table

from common.base.files import write_json
from common.base.provenance import ROOT
from common.report.claims.decide import seeds_for
from common.report.claims.equivalence import Rule
from common.report.claims.ours import our_cells
from common.report.claims.read import FAILS, HOLDS
from common.report.claims.show import counts, headline, judge, to_page
from common.report.claims.verdict import DEPENDS, UNDECIDED
from common.report.formats import line_below, write_table
from common.report.page import collect, collect_claims, deciding
from common.report.seeds import main as seeds_main
from common.report.statistics import contrast_interval
from common.report.table import Column, from_json, plan_of, to_json
from common.reproduce import command as command_module
from common.reproduce import tables as tables_module
from common.reproduce.command import reproduce_main
from common.reproduce.findings import Findings, findings_table
from common.reproduce.near import near_settings
from common.reproduce.rows import PaperCode, RowRun
from common.reproduce.tables import table_of, train_rows
from common.run.folder import RunFiles
from contrastive_basics.config import Config

SEEDS = np.linspace(-1, 1, 5)
CLAIM = f"{A_X} > {B_X}"
RATE = "optim.learning_rate="
(SEARCH,) = (ROOT / "results/contrastive_basics/search").glob("demo-*/search.json")


def rows(**means):
    return table({name: {"x": cell(mean + SEEDS * (1 if name == "a" else 1.3))} for name, mean in means.items()})


def at(rate, **means):
    """Rows that were trained at a setting near the best."""
    return replace(rows(**means), settings=(RATE + rate,))


def verdict_of(tmp_path, *tables, claim=CLAIM):
    return judge(folder_with(tmp_path, json.dumps({"claims": [entry(claim)]})), tables).judged[0].measured[0]


# ---- settings --------------------------------------------------------------------------------------------------------


def test_the_verdict_stays_where_it_is_the_same_at_every_setting_and_names_them(tmp_path):
    same = verdict_of(tmp_path, rows(a=30, b=20), at("1e-3", b=22), at("3e-3", a=29, b=18))
    assert (same.verdict, same.margin) == (HOLDS, pytest.approx(10))  # the numbers are those of the table
    assert same.reason == f"the same at {RATE}1e-3 and at {RATE}3e-3"


@pytest.mark.parametrize(("b", "there"), [(40, FAILS), (30, UNDECIDED)])
def test_a_verdict_that_another_setting_changes_depends_on_the_setting(tmp_path, b, there):
    outcome = verdict_of(tmp_path, rows(a=30, b=20), at("1e-3", b=22), at("3e-3", b=b))
    assert (outcome.verdict, outcome.reason) == (DEPENDS, f"holds at the settings of the table; {there} at {RATE}3e-3")
    assert headline(outcome) == "depends on the setting at demo scale on these pictures"


def test_a_row_that_is_trained_at_no_other_setting_keeps_its_number_there(tmp_path):
    """Both rows 15 points lower: the verdict is the same; only one of them: it is another one."""
    assert verdict_of(tmp_path, rows(a=30, b=20), at("1e-3", a=15, b=5)).verdict == HOLDS
    assert verdict_of(tmp_path, rows(a=30, b=20), at("1e-3", a=15)).verdict == DEPENDS


def test_settings_that_the_claim_does_not_use_other_seeds_scales_and_data_change_nothing(tmp_path):
    ours = rows(a=30, b=20, c=10)
    few = replace(table({"b": {"x": cell([40.0, 41.0])}}), settings=(RATE + "1e-3",))
    photos = table({"b": {"x": cell(40 + SEEDS, scale="photos")}}, scale="photos")
    trained = replace(at("1e-3", b=40), data="other pictures")
    tested = replace(trained, data=ours.data)
    measured = {row.method: {"x": replace(row.ours["x"], data="other pictures")} for row in tested.rows}
    tested = replace(tested, rows=[replace(row, ours=measured[row.method]) for row in tested.rows])
    for other in (at("1e-3", c=50), few, replace(photos, settings=(RATE + "1e-3",)), trained, tested):
        assert verdict_of(tmp_path, ours, other) == verdict_of(tmp_path, ours)


def test_pages_and_counts_show_it(tmp_path):
    folder = folder_with(tmp_path, json.dumps({"claims": [entry(CLAIM)]}))
    for name, of in (("demo", rows(a=30, b=20)), ("demo-0123456789ab", at("3e-3", b=40))):
        write_table(of, tmp_path / "results" / "no_paper" / "t" / name)
    entries = collect([tmp_path / "results"])
    assert deciding(entries) == [entry.table for entry in entries]
    (claims,) = collect_claims(entries, folder.parent)
    assert f"does not hold at {RATE}3e-3" in to_page(claims)
    assert counts(claims)[1] == "on these pictures: 1 depend on the setting"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_settings_within_a_standard_error_come_from_the_committed_search():
    near = near_settings("contrastive_basics", "demo", ["table1_ours", "beyond_sigmoid", "no_row"], [ROOT / "results"])
    for row, of_row in json.loads(SEARCH.read_text())["rows"].items():
        means = {tuple(trial["settings"]): trial["values"] for trial in of_row["trials"] if None not in trial["values"]}
        best = max(means, key=lambda settings: np.mean(means[settings]))
        lowest = np.mean(means[best]) - stats.sem(means[best])
        expected = {settings for settings, values in means.items() if np.mean(values) >= lowest - 1e-12}
        assert {settings for settings, of_settings in near.items() if row in of_settings} == expected
    assert near_settings("contrastive_basics", "photos_scratch", ["table1_ours"], [ROOT / "results"]) == {}


@pytest.fixture
def reproduced(tmp_path, monkeypatch):
    """The commands that a part gets from a command line, up to now."""
    monkeypatch.setattr(command_module, "join_processes", lambda settings: None)
    commands = []

    def run(*words, part="table1", paper="contrastive_basics", called=commands.append):
        arguments = [part, "--scale", "demo", "--output", str(tmp_path), *words]
        reproduce_main("", paper, {part: lambda command: called(command) or []}, arguments)
        return commands

    return run


def test_near_trains_rows_at_their_settings_beside_the_table_with_the_same_seeds(reproduced):
    commands = reproduced("--seeds", "3", "--near")
    near = near_settings("contrastive_basics", "demo", ["table1_ours", "beyond_sigmoid"], [ROOT / "results"])
    assert {(command.settings, command.rows) for command in commands} == set(near.items())
    assert len({command.folder("contrastive_basics") for command in commands}) == len(commands)
    for command in commands:
        assert (command.seeds, command.overrides) == ((0, 1, 2), ())
        (note,) = table_of(command, "contrastive_basics", "table1", [Column("x", "X")], [], {}).notes
        assert note.startswith("Settings were searched on ")
        assert command.folder("contrastive_basics").name.startswith("demo-")
        assert command.text("contrastive_basics").endswith("SCALE=demo SEEDS=3 NEAR=1")
        assert command.settings_of(f"{command.rows[0]}.yaml") == command.settings
        assert command.settings_of("lit_ours.yaml") == ()  # a row that a column measures beside it keeps its own
    refused(
        ("leave out optim.steps=3", lambda: reproduced("--near", "optim.steps=3")),
        ("make search PAPER=euclip", lambda: reproduced("--near", paper="euclip")),
        ("NEAR=1 takes rows of a table, and batch_size", lambda: reproduced("--near", part="batch_size")),
    )


def test_searched_trains_rows_at_their_best_setting_in_the_folder_of_the_table(tmp_path, reproduced):
    rows = ["table1_ours", "beyond_sigmoid"]
    (command,) = reproduced("--searched", "--rows", " ".join(rows))
    searched = json.loads(SEARCH.read_text())
    for row, of_row in searched["rows"].items():
        means = {tuple(trial["settings"]): np.mean(trial["values"]) for trial in of_row["trials"]}
        assert command.settings_of(f"{row}.yaml") == max(means, key=means.get)
    assert len({command.settings_of(f"{row}.yaml") for row in rows}) == 2
    assert "SEEDS=1 SEARCHED=1 ROWS=" in command.text("contrastive_basics")
    # the data of the table may be others
    of_command = table_of(command, "contrastive_basics", "table1", [Column("x", "X")], [], {})
    assert of_command.notes == (f"Settings were searched on {searched['training_data']}: {SEARCH.parent.name}.",)
    # of the searches of all rows, those of rows that the table trained
    for row, notes in (("table1_ours", of_command.notes), ("lit_ours", ())):
        run = RowRun(RunFiles(tmp_path / f"{row}-demo-0a1b2c3d4e5f" / "seed0"), 0, {}, {}, "", "", "", "", Config())
        runs = {"A row": [run]}
        noted = table_of(command, "contrastive_basics", "table1", [Column("x", "X")], [], runs).notes
        assert tuple(note for note in noted if "searched" in note) == notes
        # an experiment notes the searches of the rows that it measured
        columns = {"x": ("X", "", None)}
        findings = Findings(
            name="x", caption="", protocol="", settings={}, rows={}, columns=columns, values={}, data="d"
        )
        noted = findings_table(command, "contrastive_basics", findings, runs).notes
        assert tuple(note for note in noted if "searched" in note) == notes
    whole = replace(command, rows=())
    assert whole.folder("contrastive_basics") == tmp_path / "results" / "contrastive_basics" / "table1" / "demo"
    # an experiment names its rows only as it trains
    experiment = reproduced("--searched", part="batch_size")[-1]
    assert experiment.searched == command.searched
    configs = {row: f"{row}.yaml" for row in (*rows, "table1_class_tokens")}
    code = PaperCode("contrastive_basics", dict, print, print)
    refused(
        ("has table1_class_tokens; run", lambda: reproduced("--searched", "--rows", "table1_ours table1_class_tokens")),
        ("has table1_class_tokens; run", lambda: train_rows(experiment, code, configs)),
    )


def test_a_search_that_would_not_count_is_refused(tmp_path, reproduced):
    searched = partial(reproduced, "--searched", "--rows", "table1_ours")
    refused(
        ("leave one of them out", partial(searched, RATE + "5e-4")),
        ("SEARCHED=1 has no meaning for negatives",
         lambda: reproduced("--searched", part="negatives", called=command_module.Command.refuse_search)),
    )  # fmt: skip
    content, folder = json.loads(SEARCH.read_text()), tmp_path / "results/contrastive_basics/search"
    file = write_json(folder / SEARCH.parent.name / "search.json", content)
    searched()  # the same search again, of another root
    of_row = {"table1_ours": content["rows"]["table1_ours"]}
    again = write_json(folder / "demo-again" / "search.json", content | {"rows": of_row})
    refused(("two searches choose optim.learning_rate, .*search.json", searched))
    # an experiment is refused for a row that it trains, not for others
    experiment = reproduced("--searched", part="batch_size")[-1]
    code = PaperCode("contrastive_basics", dict, print, print)
    refused(("two searches choose", lambda: train_rows(experiment, code, {"ours": "table1_ours.yaml"})))
    assert [*experiment.searched] == ["beyond_sigmoid"]
    sigmoid = {"sigmoid": "beyond_sigmoid.yaml"}
    by_hand = replace(experiment, overrides=(RATE + "5e-4",))
    refused(("leave one of them out", lambda: train_rows(by_hand, code, sigmoid)))
    again.unlink()
    content["rows"]["table1_ours"]["equivalent"] = []
    write_json(file, content)
    refused(("no setting of table1_ours was trained by all seeds", searched))
    for broken in ('{"rows":', "{}", "[]", '{"scale": "demo", "training_data": "", "rows": {"table1_ours": {}}}'):
        file.write_text(broken)
        refused(("search.json is broken: .* run it again", searched))
    plain = command_module.Command("table1", "demo", (0, 1, 2), (), tmp_path, tmp_path / "results")
    by_hand = replace(plain, overrides=(RATE + "7e-4", "run.log_every=2"))
    of_plain, of_hand = (
        table_of(command, "contrastive_basics", "table1", [Column("x", "X")], [], {}) for command in (plain, by_hand)
    )
    assert not of_plain.notes  # reads no search
    assert of_hand.chosen_by == f"the command ({RATE}7e-4); else {of_plain.chosen_by}"


def test_a_table_names_what_chose_the_settings_of_its_rows(tmp_path, monkeypatch):
    of_rows = "  # chosen by: val\n  # why\n  one two: {}\n  three: {}\n  # chosen by: test\n  one_b: {}\n"
    scale = f"# chosen by: hand\nrows:\n{of_rows}"
    (tmp_path / "paper" / "configs").mkdir(parents=True)
    (tmp_path / "paper" / "configs" / "scale_demo.yaml").write_text(scale)
    monkeypatch.setattr(tables_module, "ROOT", tmp_path)
    command = command_module.Command("t", "demo", (0,), (), tmp_path, tmp_path / "results")

    def chosen(*rows: str, **changed: Any) -> str:
        return tables_module._chosen_by("paper", replace(command, **changed), rows)

    of_one = "of rows that begin with one also by val"
    assert chosen("three_a", "four") == "hand"
    assert chosen("one_a", "three", "two") == "hand; of rows that begin with one two also by val"
    assert chosen("one_b") == f"hand; {of_one}; of rows that begin with one_b also by test"
    assert chosen("one_a", overrides=("optim.steps=3",)) == f"the command (optim.steps=3); else hand; {of_one}"


def test_a_plan_after_the_first_look_does_not_count_and_is_not_recorded(tmp_path, capsys):
    looked = replace(of_seeds([50.0, 51.0, 52.0]), command="make t SEEDS=3 PLAN=6 SEARCHED=1")
    command = command_module.Command("t", "demo", (0, 1, 2), (), tmp_path, tmp_path / "results", planned_seeds=6)
    first = command_module._planned(command, "no_paper", looked)
    assert (first.plan, first.command) == ((3, 6), looked.command)
    write_table(looked, command.folder("no_paper"))
    second = command_module._planned(command, "no_paper", looked)
    assert (second.plan, second.command) == ((), "make t SEEDS=3 SEARCHED=1")
    assert "PLAN=6 does not count: t was looked at before" in capsys.readouterr().out


def test_a_look_at_some_rows_counts_when_the_whole_table_follows(tmp_path):
    of_rows = command_module.Command("t", "demo", (0, 1, 2), (), tmp_path, tmp_path / "results", rows=("a", "b"))
    write_table(of_seeds([50.0, 51.0, 52.0]), of_rows.folder("no_paper"))
    whole = command_module.Command("t", "demo", (0, 1, 2, 3, 4), (), tmp_path, tmp_path / "results")
    assert whole.folder("no_paper") != of_rows.folder("no_paper")
    more = of_seeds([50.0, 51.0, 52.0, 53.0, 54.0])
    assert command_module._planned(whole, "no_paper", more).plan == (3,)
    torn = to_json(replace(of_seeds([50.0, 51.0, 52.0]), hits_file="t_hits.npz"))  # a kill left no such file
    (of_rows.folder("no_paper") / "t.json").write_text(torn)
    assert command_module._planned(whole, "no_paper", more).plan == (3,)


# ---- planned seeds ---------------------------------------------------------------------------------------------------


def of_seeds(values, plan=()):
    """Row a at the values, row b at 0 for each seed, so that the margin's values are those of a."""
    return replace(table({"a": {"x": cell(values)}, "b": {"x": cell(np.zeros(len(values)))}}), plan=plan)


def with_p(p, seeds):
    """Values over seeds whose two-sided t test has this p."""
    values = np.linspace(-1, 1, seeds)
    return 50 + values + stats.t.isf(p / 2, seeds - 1) * stats.sem(values)


@pytest.mark.parametrize(
    ("plan", "p", "verdict"),
    [
        ((), 0.045, HOLDS),
        ((), 0.055, UNDECIDED),
        ((3, 6), 0.03, HOLDS),
        ((3, 6), 0.045, UNDECIDED),
        ((6, 9), 0.0095, HOLDS),
        ((6, 9), 0.03, UNDECIDED),
    ],
)
def test_the_first_seeds_decide_at_1_percent_and_all_planned_ones_at_4(tmp_path, plan, p, verdict):
    outcome = verdict_of(tmp_path, of_seeds(with_p(p, 6), plan), claim=f"{A_X} > 50 + {B_X}")
    assert outcome.verdict == verdict
    share = {(): 1, (3, 6): 5 / 4, (6, 9): 5}[plan]
    assert outcome.p == pytest.approx(share * p, rel=0.05)  # as if it were the only look


@pytest.mark.parametrize("plan", [(3,), (3, 10)])
def test_seeds_beside_the_plan_decide_nothing_beyond_what_the_first_ones_decided(tmp_path, plan):
    values = with_p(0.4, 3).tolist()
    more = of_seeds([*values, *(50.6 + 0.1 * SEEDS)], plan)
    first = of_seeds(values, plan if len(plan) > 1 else ())
    verdict = partial(verdict_of, tmp_path, claim=f"{A_X} > 50 + {B_X}")
    assert verdict(more) == verdict(first)
    assert verdict(replace(more, plan=())).verdict == HOLDS
    assert "the first 3 decide" in line_below(more)


def test_the_plan_is_written_with_the_first_seeds_and_an_extension_without_one_is_marked():
    values = [50.0, 52.0, 51.0, 53.0, 54.0, 52.0]
    one, three, five, six = (of_seeds(values[:count]) for count in (1, 3, 5, 6))
    for table_now, earlier, planned, plan in (
        (three, [], 6, (3, 6)),
        (six, [replace(three, plan=(3, 6))], 0, (3, 6)),
        (six, [replace(three, plan=(3, 6))], 9, (3, 6)),  # too late
        (five, [three], 0, (3,)),
        (six, [three, replace(five, plan=(3,))], 9, (3,)),
        # fewer seeds after a look at more are no new table
        (three, [replace(six, plan=(3, 6))], 0, (3, 6)),
        (three, [six], 0, (3, 6)),
        (three, [three], 0, ()),
        (six, [one], 0, ()),  # one seed is no look
        (six, [], 0, ()),
        (six, [of_seeds([1.0, 2.0, 3.0])], 0, ()),  # other runs
    ):
        assert plan_of(table_now, earlier, planned) == plan
    assert from_json(to_json(replace(three, plan=(3, 6)))).plan == (3, 6)


def test_a_plan_needs_more_seeds_than_the_first_ones(reproduced):
    planned = partial(reproduced, "--seeds", "3", "--plan")
    refused(*((f"PLAN={plan}: expected", partial(planned, plan)) for plan in ("2", "3", "x", "1001")))
    refused(("SEEDS=1, .* SEEDS of at least 2 beside PLAN", lambda: reproduced("--plan", "3")))


@pytest.mark.parametrize(("first", "final"), [(3, 5), (3, 10), (5, 10)])
def test_looks_at_first_and_planned_seeds_give_at_most_5_percent_false_verdicts(first, final):
    """Stopping where the first seeds decide. With 5 % for both looks there are more."""
    draws, trials = np.random.default_rng([first, final]).normal(size=(4000, final)), 4000
    plan = (first, final)
    errors = [of_seeds(np.arange(50.0, 50 + count), plan).deciding[1] for count in plan]

    def false_verdicts(errors):
        wrong = np.zeros(trials, dtype=bool)
        for count, error in zip(plan, errors):
            seen = draws[:, :count]
            wrong |= abs(seen.mean(axis=1)) > (stats.t.isf(error / 2, count - 1) * stats.sem(seen, axis=1))
        return wrong.mean()

    low, high = contrast_interval([draws[0, :first]], 1 - errors[0])
    assert (high - low) / 2 == pytest.approx(stats.t.isf(errors[0] / 2, first - 1) * stats.sem(draws[0, :first]))
    error = 3 * (0.05 * 0.95 / trials) ** 0.5
    assert false_verdicts(errors) < 0.05 + error
    assert false_verdicts((0.05, 0.05)) > 0.05 + error


def test_seeds_for_a_claim_follow_from_the_spread_and_no_difference(tmp_path, monkeypatch, capsys):
    (claim,), printed = load(tmp_path, entry(CLAIM))
    claim = replace(claim, equal_within=Rule(0.5, 1.0))

    def count(ours, claim=claim):
        return seeds_for(claim, printed, our_cells([ours])["demo"], "demo")

    noise = np.array([0.0, 2.0, -1.0, -2.0, 1.0])
    (only,) = {
        count(table({"a": {"x": cell(50 + gap + noise)}, "b": {"x": cell(50 + 0 * noise)}})) for gap in (0.0, 0.5)
    }
    variance = (noise / 50).var(ddof=1) * 50**2  # points
    needed = [(stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) ** 2 * variance for n in (only - 1, only)]
    assert needed[0] > only - 1  # x is one point, on these pictures
    assert needed[1] <= only
    assert count(table({"a": {"x": cell([1.0])}, "b": {"x": cell([2.0])}})) == 0
    folder = tmp_path / "results/oblique_topology/table3"
    folder.mkdir(parents=True)
    (folder / "demo").symlink_to(ROOT / "results/oblique_topology/table3/demo")  # to read all takes a second
    monkeypatch.setenv("HOME", str(tmp_path))
    seeds_main(["oblique_topology", "--results", "~/results"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert all(re.fullmatch(r"C[\w-]+ +(\d+|more images, not seeds)", line) for line in lines)
