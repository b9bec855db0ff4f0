"""Tables of made-up numbers: round trips, a golden Markdown, and that the paper's numbers stay on the paper's lines."""

import csv
import dataclasses
import io
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
from refusals import refused
from scipy import stats

from common.base.config import ConfigError
from common.base.files import write_atomically
from common.report.crossed import crossed_half_width, picture_variance
from common.report.formats import (
    format_measured,
    glossary,
    lay_out,
    line_below,
    panel_label,
    reading,
    remarks,
    to_csv,
    to_latex,
    to_markdown,
    to_text,
    write_table,
)
from common.report.hits import Hits
from common.report.page import outdated
from common.report.statistics import bootstrap_interval, interval_over_seeds
from common.report.table import (
    CUT,
    SEEDS_INTERVAL,
    Column,
    Measured,
    Row,
    Table,
    Training,
    from_json,
    measured_over_seeds,
    to_json,
)
from common.reproduce.command import Command, _check_revisions, reproduce_main
from common.reproduce.tables import trained_on

HOSTILE = r"<script>alert('x')</script> a|b & 100 % of_it #1 $x$ \end{table} [a](http://x.invalid) `code`"


def cell(*values, scale="demo", data="scenes 0000", protocol="10 x 50", chance=None, **more):
    return measured_over_seeds(
        values, range(len(values)), scale=scale, data=data, protocol=protocol, chance=chance, **more
    )


def made_up_table(**changes):
    """Paper numbers are 9x.x and ours 1x.x, so that they can be told apart in any output."""
    columns = (Column("i2t_r1", "i2t R@1", stands_in_for="scenes/b"), Column("loss", "loss", "nats", better="lower"))
    rows = (
        Row(
            "first", {"i2t_r1": 91.25, "loss": None}, {"i2t_r1": cell(11.0, 13.0, chance=2.0), "loss": None}, "measured"
        ),
        Row("second", {"i2t_r1": 92.0}, {}, "not run: needs published weights", "made up"),
    )
    content = {
        "paper": "no_paper", "paper_title": "A title", "paper_version": "v0", "table_id": "table0",
        "caption": "Nothing here is real.", "columns": columns, "rows": rows, "scale": "demo", "data": "scenes 0000",
        "seeds": (0, 1), "git_revision": "abc", "command": "make nothing", "created": "2000-01-01",
        "hardware": "1 abacus", "errata": ("a slip",), "notes": ("a note",),
    }  # fmt: skip
    return Table(**(content | changes))


def with_training(**signs):
    row = made_up_table().rows[0]
    training = Training("0123abc", "4567def", "k", **signs)
    return made_up_table(
        rows=[dataclasses.replace(row, training=training)],
        models="Small 2 x 1, 8 px",
        code={"k": {"common/pool.py": "0"}},
    )


def test_json_round_trip_gives_the_same_table():
    nothing_right = dataclasses.replace(cell(11.0, 13.0), validation=0.0)
    validated = {"validation_metric": "acc1", "validation": (0.4,), "validation_chance": 0.1}
    tables = [made_up_table(), with_training(loss_over_chance=(0.5, 0.6), **validated)]
    tables += [made_up_table(rows=(Row("first", {}, {"i2t_r1": nothing_right, "loss": None}, "measured"),))]
    assert [from_json(to_json(table)) for table in tables] == tables
    assert json.loads(to_json(tables[0]))["rows"][0]["training"] is None


@pytest.mark.parametrize(
    ("signs", "failure"),
    [
        ({}, ""),
        ({"loss_over_chance": (0.2, 1.0, 1.0)}, "final loss at 1.00 of its chance level"),
        ({"loss_over_chance": (0.2, 0.2, 1.0)}, ""),  # one collapsed seed stays
        ({"loss_over_chance": (0.951,)}, "final loss at 0.95 of its chance level"),
        ({"loss_over_chance": (0.949,)}, ""),
        # odds of 0.18 are 0.2195, of 0.1 they are 0.1111
        ({"validation_metric": "acc1", "validation": (0.18, 0.18), "validation_chance": 0.1},
         "acc1 of 18 % on validation data, chance level 10 %"),
        ({"validation_metric": "acc1", "validation": (0.19, 0.19), "validation_chance": 0.1}, ""),
        ({"validation_metric": "acc1", "validation": (0.01,)}, ""),  # chance unknown
    ],
)  # fmt: skip
def test_a_row_did_not_train_by_its_loss_or_its_validation_figure(signs, failure):
    table = with_training(**signs)
    assert table.rows[0].training.failure == failure
    assert (f"first: not trained: {failure}" in to_markdown(table)) == bool(failure)


def test_notes_name_revisions_and_by_what_settings_were_chosen():
    trained, bare = with_training(), made_up_table()
    of_images = [dataclasses.replace(row, note="ours: 32 px, ResNet of width 16") for row in bare.rows]
    for table, label, text in (
        (trained, "all rows", "trained at revision 0123abc, evaluated at 4567def"),
        (trained, "settings", "chosen by test data"),
        (dataclasses.replace(trained, chosen_by="val mean, 0123abc"), "settings", "chosen by val mean, 0123abc"),
        (dataclasses.replace(trained, chosen_by="test data (before)"), "settings", "chosen by test data (before)"),
        (made_up_table(models="Small"), "rows", "which of them trained, and at which revision, was not kept"),
        (bare, "settings", None),  # nothing was trained for it
        (dataclasses.replace(bare, rows=of_images), "settings", "chosen by test data"),
    ):
        assert dict(remarks(table)).get(label) == text


def test_a_row_is_marked_where_the_code_that_trained_it_has_changed(monkeypatch):
    table = with_training()
    ((row, text),) = outdated(table)
    assert row == "first"
    assert re.fullmatch(r"trained before [\w ]+, which changed the code", text)
    monkeypatch.setattr("common.report.page.changed_files", lambda files: [])
    assert outdated(table) == []
    assert outdated(made_up_table()) == []


@pytest.mark.parametrize("revision", ["0123abc+changes", "unknown", "0123abc"])
def test_uncommitted_code_makes_no_committed_results(monkeypatch, tmp_path, revision):
    monkeypatch.setattr("common.reproduce.command.COMMITTED", tmp_path / "results")
    monkeypatch.setattr("common.reproduce.command.git_revision", lambda: revision)
    command = Command("table2", "demo", (0,), (), tmp_path, tmp_path / "results")
    row = dataclasses.replace(with_training().rows[0], training=Training("0123abc", revision))
    table = made_up_table(rows=[row])
    arguments = ["table2", "--results", str(tmp_path / "results"), "--output", str(tmp_path)]
    parts = {"table2": lambda command: []}
    calls = partial(_check_revisions, command, [table]), partial(reproduce_main, "", "euclip", parts, arguments)
    if revision == "0123abc":
        for call in calls:
            call()
    else:
        reason = "tracked files differ from it; commit" if "+" in revision else "git names none of .*git status"
        of_row = "RESULTS=results: table0, row first was trained and evaluated at .*commit"
        refused(*zip((of_row, reason), calls), error=ConfigError)
        _check_revisions(dataclasses.replace(command, results=tmp_path / "elsewhere"), [table])


def test_a_column_that_is_no_quality_is_neither_better_for_being_higher_nor_lower():
    columns = (Column("i2t_r1", "i2t R@1"), Column("loss", "loss", better="lower"), Column("ln", "ln B", better=None))
    table = made_up_table(columns=columns)
    assert "; lower is better: loss; units: " in to_markdown(table)
    first = list(csv.DictReader(io.StringIO(to_csv(table))))[:3]
    assert [record["better"] for record in first] == ["higher", "lower", ""]
    assert from_json(to_json(table)) == table
    older = json.loads(to_json(table))  # of before there was the key
    for column in older["columns"]:
        column.pop("better", None)
    assert [column.better for column in from_json(json.dumps(older)).columns] == ["higher"] * 3


MARKDOWN = (
    "## table0: Nothing here is real.\n\n"
    "paper: A title (no_paper, v0); table: table0; scale: demo; data: scenes 0000; seeds: 0, 1; "
    "git revision: `abc`; command: `make nothing`; created: 2000-01-01; hardware: 1 abacus.\n\n"
    "**Scale demo: our numbers are measured on other data than the paper's (line “data (ours)”). "
    "They reproduce no cell of the paper, and no difference is printed.**\n\n"
    "| method         | source     |                    i2t R@1 | loss | status                           |\n"
    "| -------------- | ---------- | -------------------------: | ---: | -------------------------------- |\n"
    "| *data (ours)*  |            |                   scenes/b |    — |                                  |\n"
    "| first          | paper      |                      91.25 |    — |                                  |\n"
    "|                | ours, demo | 12.0 [2.5, 27.3] (2 seeds) |    — | measured in 1 of 2 columns       |\n"
    "| second         | paper      |                       92.0 |    — |                                  |\n"
    "|                | ours       |                          — |    — | not run: needs published weights |\n"
    "| *chance level* |            |                        2.0 |    — |                                  |\n\n"
    "Ours: on scenes 0000; seeds 0, 1.\n\n"
    "- second: made up\n- note: a note\n- erratum of the printed table: a slip\n\n"
    "R@K: share of queries with a correct match among the K best candidates; "
    "i2t: image query, captions ranked (any caption of the image counts); "
    "[low, high]: interval, 95 % t over seeds on the arcsine scale; "
    "lower is better: loss; units: i2t R@1: percent; loss: nats; —: no number; see the status.\n"
)


def test_markdown_is_this():
    assert to_markdown(made_up_table()) == MARKDOWN


def test_what_all_notes_begin_with_is_printed_once():
    def shared_notes(*notes):
        rows = [Row(f"row {number}", {}, {"loss": cell(1.0)}, "measured", note) for number, note in enumerate(notes)]
        return re.findall(r"^- ((?:all|row) .*)$", to_markdown(made_up_table(rows=rows)), re.MULTILINE)

    assert shared_notes("ours: 4 px (of 9; cut); 2 steps; pool", "ours: 4 px (of 9; cut); 2 steps; no pool") == [
        "all measured rows: 4 px (of 9; cut); 2 steps",
        "row 0: pool",
        "row 1: no pool",
    ]
    assert shared_notes("pool", "none", "pool") == ["row 0; row 2: pool", "row 1: none"]
    assert shared_notes("4 px (of 9; cut)", "4 px (of 9; grown)") == [
        "row 0: 4 px (of 9; cut)",
        "row 1: 4 px (of 9; grown)",
    ]
    assert shared_notes("4 px", "") == shared_notes("4 px") == ["row 0: 4 px"]


@pytest.mark.parametrize("scale", ["demo", "paper"])
def test_without_measurements_no_number_stands_in_a_cell_of_ours(scale):
    columns = tuple(Column(f"c{place}", f"label {chr(97 + place)}") for place in range(7))
    rows = [
        Row(
            f"row {chr(97 + n)}",
            {column.key: 90 + n + place / 7 for place, column in enumerate(columns)},
            {},
            "not run",
        )
        for n in range(4)
    ]
    table = made_up_table(columns=columns, rows=rows, scale=scale)
    for record in csv.DictReader(io.StringIO(to_csv(table))):
        assert not any(record[key] for key in ("ours_mean", "ours_low", "ours_high", "ours_values"))
    assert {line.kind for group in lay_out(table) for line in group} == {"paper", "ours"}
    assert all(text == "—" for group in lay_out(table) for line in group if line.kind == "ours" for text in line.cells)


def test_a_bare_number_cannot_be_a_cell_of_ours_nor_a_measurement_one_of_the_papers():
    ours, papers = (json.loads(to_json(made_up_table())) for _ in range(2))
    ours["rows"][1]["ours"]["i2t_r1"] = 91.0
    papers["rows"][1]["paper"]["i2t_r1"] = papers["rows"][0]["ours"]["i2t_r1"]
    refused(
        (r"rows\.1\.ours\.i2t_r1: .*, got 91\.0", lambda: from_json(json.dumps(ours))),
        (r"rows\.1\.paper\.i2t_r1: .*number, got {'values'", lambda: from_json(json.dumps(papers))),
    )


def test_the_difference_is_printed_at_scale_paper_only_and_never_for_a_stand_in():
    ours = {"a": cell(80.0, 82.0, scale="paper"), "b": cell(70.0, 72.0, scale="paper")}
    row = Row("x", {"a": 90.5, "b": 60.0}, ours, "measured")
    columns = (Column("a", "A"), Column("b", "B", stands_in_for="another set"))
    table = made_up_table(columns=columns, rows=[row], scale="paper")
    (difference,) = [line for group in lay_out(table) for line in group if line.kind == "difference"]
    assert difference.cells == ("-9.5", "—")
    ours = {key: dataclasses.replace(measured, scale="demo") for key, measured in ours.items()}
    table = made_up_table(columns=columns, rows=[dataclasses.replace(row, ours=ours)], scale="demo")
    assert not [line for group in lay_out(table) for line in group if line.kind == "difference"]
    stand_ins = lay_out(table)[0][0]
    assert stand_ins.cells == ("scenes 0000", "another set")  # without a label the data of our cells is named
    assert panel_label(table, columns[1]) == "B: ours on another set"
    single = dataclasses.replace(table, rows=[dataclasses.replace(table.rows[0], paper={"a": 90.5, "b": None})])
    assert panel_label(single, columns[1]) == "B, on another set"  # the paper has nothing to stand in for


def of_loss(**more):
    return Row("x", {}, {"loss": cell(1.0, 2.0, **more)}, "measured")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Row("x", {}, {}, "measured"), "no measured cell"),
        (lambda: Row("x", {}, {"loss": cell(1.0, 2.0)}, "not run: y"), "measured cells but status"),
        (lambda: Measured((1.0,), (0, 1), None, "", "demo", "d", "p", None), "one value for each"),
        (lambda: Measured((1.0, 2.0), (0, 0), None, "", "demo", "d", "p", None), "distinct seed"),
        (lambda: Measured((float("inf"),), (0,), None, "", "demo", "d", "p", None), "finite"),
        (lambda: Column("a", "A", better="more"), "must be 'higher', 'lower' or None, got 'more'"),
        (lambda: made_up_table(rows=[of_loss(), of_loss(protocol="other")]), "column loss mixes protocol: .*other"),
        (lambda: made_up_table(rows=[of_loss(scale="smoke")]), "cells smoke, table demo"),
        (lambda: made_up_table(seeds=(0,)), r"seeds \[1\] are not in \(0,\)"),
        (lambda: made_up_table(table_id="../table"), "table_id"),
        (lambda: made_up_table(columns=()), "distinct keys"),
        (lambda: made_up_table(columns=(Column("i2t_r1", "x"),)), r"unknown columns \['loss'\]"),
        (lambda: from_json("{}"), "its format is not 'report table'"),
        (lambda: from_json(to_json(made_up_table()).replace('"caption"', '"captions"')), "caption: .*required"),
        (lambda: from_json(to_json(made_up_table()).replace('"hardware"', '"more": 1, "hardware"')), "more: "),
        (lambda: from_json(to_json(made_up_table())[:200]), "line"),
        (lambda: from_json(to_json(made_up_table()).replace('_version": 1', '_version": 0')), "version 1"),
    ],
)
def test_a_broken_table_is_an_error_that_says_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_seed_prints_its_interval_over_queries_and_more_seeds_theirs():
    one = cell(11.0, query_interval=(9.04, 12.96))
    rows = [Row("x", {}, {"i2t_r1": one}, "measured"), Row("y", {}, {"i2t_r1": cell(11.0)}, "measured")]
    text = to_markdown(made_up_table(rows=rows))
    assert " 11.0 [9.0, 13.0] " in text
    assert " 11.0 (1 seed) " in text
    assert "[low, high]: interval, 95 % bootstrap over queries, one seed" in text
    assert cell(11.0, 12.0, query_interval=(0.0, 1.0)).interval_kind == SEEDS_INTERVAL


def test_a_row_with_hits_has_the_interval_over_seeds_and_pictures_and_rows_are_compared_by_their_difference():
    hits = Hits.of([[[1.0], [0.0], [1.0], [0.0]] * 25, [[1.0], [0.0], [1.0], [1.0]] * 25])
    crossed = cell(50.0, 75.0, hits=hits)
    over_seeds = 12.5 * stats.t.isf(0.025, 1)
    half_width = crossed_half_width(over_seeds, picture_variance(hits.by_picture()), 0.05)
    assert crossed.interval[1] - 62.5 == pytest.approx(half_width)
    assert half_width > over_seeds
    table = made_up_table(rows=[Row("x", {}, {"i2t_r1": crossed}, "measured")])
    assert "interval, 95 % over seeds and test pictures on the arcsine scale" in to_markdown(table)
    assert reading(table).endswith("compared by the interval of their difference, which may be narrower or wider.")
    assert "difference" not in reading(made_up_table())


def test_seeds_that_tie_have_the_interval_over_the_queries_of_their_mean():
    none = [[0.0]] * 40
    (first, second), others = ([[[1.0], [0.0]], [[0.0], [1.0]]], [[0.0]] * 38)
    for runs, mean, interval in (
        ([none] * 3, 0.0, (0.0, 384.15 / 43.8415)),  # Wilson: z^2 / (n + z^2)
        ([[*first, *others], [*second, *others]], 2.5, bootstrap_interval([[50.0]] * 2 + others)),  # of other queries
    ):
        of_ties = cell(*[mean] * len(runs), hits=Hits.of(runs))
        row = Row("x", {}, {"i2t_r1": of_ties}, "measured")
        text = to_markdown(made_up_table(rows=[row], seeds=range(len(runs))))
        assert of_ties.interval == pytest.approx(interval, rel=1e-4)
        assert f" {mean} [{interval[0]:.1f}, {interval[1]:.1f}] ({len(runs)} seeds) " in text
        assert f"[low, high]: interval, {of_ties.interval_kind}" in text


def test_a_share_never_has_an_interval_beyond_its_range():
    rows = [
        Row("x", {}, {"i2t_r1": cell(0.5, 1.0)}, "measured"),
        Row("y", {}, {"i2t_r1": cell(50.0, 51.0)}, "measured"),
    ]
    table = made_up_table(rows=rows)
    low, high = table.rows[0].ours["i2t_r1"].interval
    assert 0 <= low < 0.75 < high < 10
    assert table.rows[1].ours["i2t_r1"].interval_kind == SEEDS_INTERVAL  # within it, so ± stays
    units = made_up_table(rows=rows, columns=(Column("i2t_r1", "x", unit="nats"), Column("loss", "loss")))
    assert units.rows[0].ours["i2t_r1"].interval[0] < 0
    # of a mean of sets
    table = made_up_table(rows=[Row("x", {}, {"i2t_r1": cell(1.7, query_interval=(-0.1, 4.2))}, "measured")])
    assert table.rows[0].ours["i2t_r1"].interval == (0.0, 4.2)


def test_hostile_texts_are_escaped_in_markdown_and_latex_and_stay_whole_in_csv():
    row = Row(HOSTILE, {"i2t_r1": 91.0}, {}, HOSTILE, HOSTILE)
    columns = (Column("i2t_r1", HOSTILE),)
    table = made_up_table(rows=[row], columns=columns, caption=HOSTILE, command=HOSTILE, notes=[HOSTILE])
    markdown = to_markdown(table)
    outside_code = markdown.replace(markdown[markdown.index("``") : markdown.rindex("``") + 2], "")
    assert "<script" not in outside_code
    assert "](http" not in outside_code
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    latex = to_latex(table)
    body = latex.split(r"\end{table*}")[0]
    assert r"\textless{}script\textgreater{}" in latex
    assert r"a\textbar{}b \& 100 \% of\_\allowbreak{}it \#1 \$x\$ \textbackslash{}end\{table\}" in latex
    assert not re.search(r"(?<!\\)[%#_]", body)
    assert [row["method"] for row in csv.DictReader(io.StringIO(to_csv(table)))] == [HOSTILE]


@pytest.mark.parametrize("width", [60, 120])
def test_terminal_text_keeps_to_its_width_and_shows_every_column(width):
    columns = tuple(Column(f"c{n}", f"Set number {n} i2t R@1", stands_in_for=f"scenes/stand_in_{n}") for n in range(9))
    ours = {column.key: cell(10.0 + n, 11.0 + n) for n, column in enumerate(columns)}
    row = Row("a method with a long name, variant (32, 16)", {column.key: 90.5 for column in columns}, ours, "measured")
    text = to_text(made_up_table(columns=columns, rows=[row], command="make " + "x" * 30), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("90.5") == 9
    for number in range(9):
        assert f"{10.5 + number:.1f} ± 6.4" in text


def test_columns_of_one_name_state_their_data_in_a_terminal():
    columns = tuple(Column(f"{name}_r1", "R@1", stands_in_for=f"scenes/{name}") for name in ("test", "crowded"))
    row = Row("Sphere", {}, {column.key: cell(10.0, 11.0) for column in columns}, "measured")
    text = to_text(made_up_table(columns=(*columns, Column("loss", "loss")), rows=[row]), 100)
    assert re.search(r"^method +R@1 +R@1 +loss\n +scenes/test +scenes/crowded$", text, re.MULTILINE)


def test_csv_holds_every_number_in_full():
    table = made_up_table()
    record = next(csv.DictReader(io.StringIO(to_csv(table))))
    ours = table.rows[0].ours["i2t_r1"]
    numbers = [float(record[name]) for name in ("paper_number", "ours_mean", "ours_low", "ours_high", "chance")]
    assert numbers == [91.25, ours.mean, *ours.interval, 2.0]
    assert (record["ours_values"], record["seeds"], record["stands_in_for"]) == ("11.0;13.0", "0;1", "scenes/b")


def test_csv_names_what_ran_at_which_settings_and_csv_and_latex_print_that_it_did_not_train():
    failed = Training("abc", "abc", loss_over_chance=(1.0, 1.0))
    row = dataclasses.replace(made_up_table().rows[0], ran="Multi(2, 4)", training=failed)
    table = made_up_table(rows=[row], settings=("optim.learning_rate=1e-3",), command="make it NEAR=1")
    record = next(csv.DictReader(io.StringIO(to_csv(table))))
    assert [record[name] for name in ("method", "ran", "not_trained", "command", "settings")] == [
        "first", "Multi(2, 4)", "final loss at 1.00 of its chance level", "make it NEAR=1", "optim.learning_rate=1e-3"
    ]  # fmt: skip
    caption = re.search(r"^.*\\caption.*$", to_latex(table), re.MULTILINE)[0]  # comments are not printed
    assert "Multi(2, 4): not trained: final loss at 1.00 of its chance level" in caption


def test_latex_holds_the_cells_of_the_layout_in_blocks_of_five_columns():
    columns = [Column(f"c{number}", f"label {number}") for number in range(12)]
    row = Row(
        "[a] method", {"c0": 91.0}, {f"c{number}": cell(number, number + 2.5) for number in range(12)}, "measured"
    )
    table = made_up_table(columns=columns, rows=[row, Row("b", {}, {}, "not run: needs a GPU")])
    latex = to_latex(table).replace(r"\allowbreak{}", "").replace("{[}", "[").replace("---", "—").replace(r"$\pm$", "±")
    blocks = [part.splitlines()[1:] for part in latex.split(r"\begin{tabular}")[1:]]
    rows = [[line.removesuffix(r" \\").split(" & ") for line in block if line.endswith(r"\\")] for block in blocks]
    assert [len(block[0]) - 2 for block in rows] == [5, 5, 2]
    lines = [line for group in lay_out(table, compact=True) for line in group]
    joined = [[text for block in rows for text in block[1 + number][2:]] for number in range(len(lines))]
    assert joined == [list(line.cells) for line in lines]
    assert [row[:2] for row in rows[2][2:]] == [
        ["[a] method", "paper"], ["", "ours, demo"], ["b", "paper"], ["", "ours: not run: needs a GPU"]
    ]  # fmt: skip
    assert "toprule" not in latex  # so it needs no package
    assert latex.count("{") == latex.count("}")
    assert "{[}a] method" in to_latex(table)  # after a line break LaTeX would take "[" for an argument of the break


def test_a_table_without_numbers_of_the_paper_has_no_paper_lines():
    assert "paper" not in {line.kind for group in lay_out(made_up_table(rows=[of_loss()])) for line in group}


def test_write_table_writes_what_was_asked_for_and_leaves_nothing_else(tmp_path):
    folder = tmp_path / "new" / "folder"
    for formats, endings in ((("csv", "latex"), "json md csv tex"), (("latex",), "json md tex"), ((), "json md")):
        paths = write_table(made_up_table(), folder, formats)
        assert [path.name for path in paths] == [f"table0.{ending}" for ending in endings.split()]
        assert sorted(folder.iterdir()) == sorted(paths)
    assert from_json(paths[0].read_text(encoding="utf-8")) == made_up_table()


def test_a_row_of_ours_is_named_by_what_ran_and_a_line_below_says_what_that_was():
    row = Row("Big(32, 16)", {"i2t_r1": 91.0}, {"i2t_r1": cell(11.0, 12.0)}, "measured", ran="Small(2, 1), 8 px")
    table = made_up_table(rows=[row], data="scenes (0123abcd)", models="Small 2 x 1, 8 px, 5M parameters, 9 steps")
    named = {line.kind: line.method for group in lay_out(table) for line in group}
    assert (named["paper"], named["ours"]) == ("Big(32, 16)", "Small(2, 1), 8 px")
    below = "Ours: Small 2 x 1, 8 px, 5M parameters, 9 steps; on scenes; seeds 0, 1."
    assert line_below(table) == below
    for write in (to_markdown, to_text, to_latex):
        text = " ".join(write(table).split())
        assert "Small(2, 1), 8 px" in text
        assert below in text


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_one(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "file.txt", "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: '.*file\.txt'"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("mean", "half", "unit", "text"),
    [
        (0.99923, 4.5e-5, "cosine", "0.9992 ± 0.0000"),
        (0.3296, 0.04805, "cosine", "0.330 ± 0.048"),
        (-0.001609, 0.001409, "nats", "-0.0016 ± 0.0014"),
        (21.51, 0.151, "multiplier", "21.51 ± 0.15"),
        (353.2, 41.7, "multiplier", "353 ± 42"),
        (14.2857, 1e-4, "multiplier", "14.29 ± 0.00"),
        (0.09999999, 1e-5, "curvature", "0.1000 ± 0.0000"),
        (123456.0, 20.0, "multiplier", "1.235e+05 ± 20"),
        (51.23, 0.04, "percent", "51.2 ± 0.0"),
        (0.01562, 0.00031, "percent", "0.016 ± 0.00031"),
        (0.0, 0.0, "percent", "0.0"),
        (0.4567, 0.1234, "fraction", "0.457 ± 0.123"),
    ],
)
def test_a_mean_has_the_decimals_that_its_interval_allows(mean, half, unit, text):
    measured = dataclasses.replace(cell(mean, mean), interval=(mean - half, mean + half))
    assert format_measured(measured, unit, with_seeds=False) == text


def test_equal_numbers_of_all_seeds_have_no_half_width_and_the_table_says_so():
    equal = dataclasses.replace(cell(0.3, 0.3), interval=(0.3 - 1e-17, 0.3 + 1e-17))
    assert format_measured(equal, "percent") == "0.3 (2 seeds, all equal)"
    for loss, meaning in ((equal, "sign of equal numbers of all seeds"), (cell(1.0, 2.0), None)):
        legend = dict(
            glossary(made_up_table(rows=(Row("a", {}, {"i2t_r1": cell(50.0, 51.0), "loss": loss}, "measured"),)))
        )
        assert (legend.get("no interval"), "±" in legend) == (meaning, True)


def test_what_runs_were_trained_on_names_each_set_once():
    def of(*texts):
        return trained_on([SimpleNamespace(training_data=text) for text in texts])

    seeds = ("scenes/train, 5 pictures (aaaa1111)", "scenes/train, 5 pictures (bbbb2222)")
    assert of(*reversed(seeds), seeds[0]) == "scenes/train, 5 pictures (aaaa1111, bbbb2222)"
    clip = "clip (0123456789ab), published"
    assert of(seeds[0], clip, "toy/pairs") == f"{clip}, {seeds[0]}, toy/pairs"


def test_a_count_has_no_interval_below_the_least_possible_one():
    values = (1.0, 1.5, 1.0)
    low, high = interval_over_seeds(values)
    units = ("components", "ratio", "norm", "radians", "distance")
    close_to_0 = {unit: cell(0.0, 0.5, 0.0) for unit in units[2:]}
    table = made_up_table(
        columns=[Column(unit, unit, unit) for unit in units],
        rows=[Row("a", {}, {unit: cell(*values) for unit in units[:2]} | close_to_0, "measured")],
        seeds=(0, 1, 2),
    )
    cut, free, *others = (table.measured(unit)[0] for unit in units)
    assert [other.interval[0] < 0 for other in others] == [False, False, True]  # a distance: minus an inner product
    assert low < 1
    assert (free.interval, free.interval_kind) == ((low, high), SEEDS_INTERVAL)
    assert (cut.interval, cut.interval_kind) == ((1.0, high), SEEDS_INTERVAL + CUT)
    assert "[1, 1.884]" in to_markdown(table)
