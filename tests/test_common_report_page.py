"""The HTML page and the figures, from made-up tables and logs."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from plotted import read_plotted
from test_common_report_tables import HOSTILE, cell, made_up_table

from common.base import drawing
from common.base.places import ROOT
from common.report import figures
from common.report.claims.read import FAILS
from common.report.conclusions import Conclusion, load_conclusions
from common.report.figures import MOST_ROWS, plot_distributions, plot_table
from common.report.formats import title_in_words, to_markdown, write_table
from common.report.page import Entry, Picture, collect_page, deciding, main, write_page
from common.report.table import CROSSED_INTERVAL, CUT, SEEDS_INTERVAL, Column, Row, from_json, to_json
from common.run.curves import plot_training

VOID = {"meta", "img", "wbr", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced and gathers elements and texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    def find(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def picture(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "table0.png")
    return Picture(tmp_path / "table0.png", f"caption {HOSTILE}")


def read(path):
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_page_parses_refers_to_nothing_outside_describes_its_pictures_and_names_all_that_was_run(tmp_path, picture):
    text, page = read(write_page([Entry(made_up_table(), (picture,)), Entry(made_up_table())], tmp_path / "page.html"))
    assert not re.search(r"@import|url\(", text)
    assert page.find("script") == page.find("link") == []
    for _, attributes in page.elements:
        for value in (attributes.get(name, "") for name in ("src", "href", "srcset", "action")):
            assert value == "" or value.startswith(("data:image/png;base64,", "#"))  # no other page is given
    assert [image["alt"] for image in page.find("img")] == [f"caption {HOSTILE}"]
    assert all("scope" in attributes for attributes in page.find("th"))
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {attributes["href"][1:] for attributes in page.find("a")} <= ids
    assert page.find("html")[0]["lang"] == "en"
    shown = " ".join(page.texts)
    for expected in ("A title (v0)", "no_paper, table0, scale demo", "scenes 0000", "0, 1", "abc", "make nothing",
                     "1 abacus", "2000-01-01", "a slip", "a note", "made up", "Nothing here is real.", "27.3]",
                     "reproduce no cell of the paper", "not run: needs published weights", "image query"):  # fmt: skip
        assert expected in shown, expected


def test_hostile_texts_arrive_on_the_page_as_text(tmp_path, picture):
    row = Row(HOSTILE, {"x": 91.0}, {}, HOSTILE, HOSTILE)
    names = ("paper", "paper_title", "paper_version", "caption", "scale", "data", "git_revision", "command", "hardware")
    table = made_up_table(columns=[Column("x", HOSTILE)], rows=[row], notes=[HOSTILE], **dict.fromkeys(names, HOSTILE))
    conclusions = [Conclusion(HOSTILE, HOSTILE, {HOSTILE: HOSTILE})]
    path = write_page([Entry(table, (picture,))], tmp_path / "page.html", title=HOSTILE, conclusions=conclusions)
    _, page = read(path)
    assert page.find("script") == []
    assert page.texts.count(HOSTILE) >= 8


def test_a_conclusion_stands_on_the_page_with_its_numbers_details_verdicts_and_seeds(tmp_path):
    conclusion = Conclusion("A is B. It has 3.", "C has 4.", {"C1": "holds"}, "demo", {"demo": {3, 5}})
    _, page = read(write_page([], tmp_path / "page.html", title="t", conclusions=[conclusion]))
    shown = " ".join(" ".join(page.texts).split())
    assert "A is B. It has 3. (C1: holds; scale demo; numbers: demo, 3 to 5 seeds) details C has 4." in shown


def test_command_line_collects_tables_with_their_pictures_and_names_the_root_of_doubles(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = made_up_table()
    longer = dataclasses.replace(table, table_id="table0_recalls")
    tenth, second = (dataclasses.replace(table, table_id=name) for name in ("table10", "table2"))
    folder = tmp_path / "results/no_paper/table0/demo"
    for entry in (table, longer):
        write_table(entry, folder)
    for name in ("table0", "table0_recalls", "table0_training"):
        Image.new("RGB", (4, 4)).save(folder / f"{name}.png")
    (folder / "metrics.json").write_text('{"not": "a table"}')
    for entry in (table, tenth, second):
        write_table(entry, tmp_path / "outputs/no_paper" / entry.table_id / "demo")
    main(["--results", "results", "outputs", "nowhere", "--output", "outputs/report.html"])
    first, _, title, head, *_ = capsys.readouterr().out.splitlines()
    assert first == "outputs/report.html: 5 tables, on a page for each paper beside it"
    assert (title, head.partition(":")[0]) == ("Verdicts on claims, measured:", "contrastive_basics")
    _, index = read(tmp_path / "outputs/report.html")
    assert "report_no_paper.html" in [link["href"] for link in index.find("a")]
    _, page = read(tmp_path / "outputs/report_no_paper.html")
    headings = [text.strip() for text in page.texts if text.strip().startswith("no_paper, table")]
    assert headings[:5] == [
        "no_paper, table0, scale demo, from results",
        "no_paper, table0, scale demo, from outputs",
        "no_paper, table0_recalls, scale demo",
        "no_paper, table2, scale demo",
        "no_paper, table10, scale demo",
    ]
    alts = [image["alt"] for image in page.find("img")]
    assert [("training" in alt, "recalls" in alt) for alt in alts] == [(False, False), (True, False), (False, True)]
    assert collect_page([tmp_path / "results"], tmp_path / "other.html")[0] == 2


def test_the_report_of_the_committed_results_is_light_and_answers_in_words(tmp_path, committed_claims, monkeypatch):
    monkeypatch.setattr("common.report.page.collect_claims", lambda *_: committed_claims)  # judged once
    path = tmp_path / "report.html"
    number, _ = collect_page([ROOT / "results"], path)
    assert path.stat().st_size <= 1e6
    pages = {file.name: file for file in tmp_path.glob("report_*.html")}
    assert all(file.stat().st_size <= 6e6 for file in pages.values())
    _, page = read(path)
    text = " ".join(" ".join(page.texts).split())
    for answer in (
        r"A temperature fixed at 1 harms the sphere .*? falls from \d+\.\d to \d+\.\d %",
        r"EuCLIP is ahead of CLIP and MERU in retrieval; .*? \d+\.\d ± \d\.\d % in retrieval, CLIP \d\.\d ± \d\.\d and",
        r"Which claims hold by construction\? \w+ C\d+.*?: they follow from a definition or a count",
    ):
        assert re.search(answer, text), answer
    claims = {claims.paper: claims for claims in committed_claims}
    conclusions = [one for paper in claims for one in load_conclusions(ROOT / paper)]
    missing = [part for one in conclusions for part in (one.short, one.rest, one.details) if part not in text]
    assert all("`" in part for part in missing), missing
    squares = [link["href"].split("#") for link in page.find("a") if "#" in link["href"]]
    judged = [one for entry in claims.values() for one in entry.judged]
    refuted = [one.claim.claim for one in judged if one.audit.verdict == FAILS]  # by the paper's numbers
    assert len(squares) == len(judged) + len(refuted)
    assert text.index(f"{len(refuted)} claims fail on the papers' own printed numbers") < text.index("All claims")
    assert all(claim in text for claim in refuted)
    controls = sum(bool(one.claim.control_of) for one in judged)
    assert f"{controls} squares are controls" in text
    assert f"Of {len(judged) - controls} claims" in text
    ours = sum(bool(one.claim.control_of) for one in claims["geomm"].judged)
    geomm = f">{len(claims['geomm'].judged) - ours} claims, and {ours} controls of ours"
    assert geomm in pages["report_geomm.html"].read_text()
    ids = {name: {match[1] for match in re.finditer(r'id="([^"]+)"', file.read_text())} for name, file in pages.items()}
    assert all(anchor in ids[name] for name, anchor in squares)
    assert sum(file.read_text().count("<section") for file in pages.values()) == number + len(claims)
    for file in pages.values():
        headings = re.findall(r"<li><a href=\"#[^>]*>(.*?)</a>", file.read_text())
        assert len(headings) == len(set(headings))  # a changed table is told from the whole one
    assert not any("`" in file.read_text() for file in (path, *pages.values()))  # `code` is shown as such


def test_of_a_broken_file_no_page_is_written(tmp_path):
    folder = tmp_path / "results/no_paper/table0/demo"
    folder.mkdir(parents=True)
    (folder / "table1.json").write_text('{"format": "report table"}')
    with pytest.raises(ValueError, match=rf"^{folder / 'table1'}\.json is broken: "):
        main(["--results", str(tmp_path / "results"), "--output", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["page", "--results", "results", "--output", "file/page.html"], "file"),
        (["seeds", "euclip", "--results", "broken"], "table1.json is broken"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_no_traceback(words, message, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("results", "broken"):
        write_table(made_up_table(), tmp_path / name / "no_paper/table0/demo")
    (tmp_path / "broken/no_paper/table0/demo/table1.json").write_text('{"format": "report table"')
    command, environment = [sys.executable, "-m", f"common.report.{words[0]}", *words[1:]], {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.fullmatch(rf"error: .*{message}.*\n", ended.stderr), ended.stderr


def test_the_home_folder_of_results_and_page_is_expanded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_table(made_up_table(), tmp_path / "results/no_paper/table0/demo")
    main(["--results", "~/results", "--output", "~/page.html"])
    assert ": 1 table," in capsys.readouterr().out
    assert "table0" in (tmp_path / "page_no_paper.html").read_text()
    assert not (tmp_path / "~").exists()


def test_without_tables_the_page_and_one_line_say_so(tmp_path, capsys):
    main(["--results", str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert len(capsys.readouterr().out.splitlines()) == 1
    _, page = read(tmp_path / "page.html")
    assert "No table has been written yet." in page.texts


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are made, not written."""
    made = []
    for module in (drawing, figures):
        monkeypatch.setattr(module, "write_picture", lambda figure, path, colors=256: made.append(figure) or path)
    return made


@pytest.mark.usefixtures("drawn")
def test_constants_no_measurement_and_more_rows_than_can_be_compared_are_no_plot(tmp_path):
    columns = [Column(key, key) for key in ("counted", "set", "measured")]
    ours = {"counted": cell(2.0, 2.0), "set": cell(3.0, 3.0), "measured": cell(1.0, 2.0)}
    path = tmp_path / "table0.png"
    path.write_bytes(b"of an earlier run")
    assert plot_table(made_up_table(columns=columns, rows=[Row("x", {}, ours, "measured")]), path) == []
    many = [Row(f"row {number}", {}, {"x": cell(number, number + 1)}, "measured") for number in range(MOST_ROWS + 1)]
    shown = made_up_table(columns=[Column("x", "x")], rows=many[1:])
    assert plot_table(shown, path) == [path]
    assert plot_table(dataclasses.replace(shown, rows=many), path) == []
    assert plot_table(made_up_table(rows=[Row("x", {"i2t_r1": 91.0}, {}, "not run")]), path) == []
    assert not path.exists()


@pytest.mark.usefixtures("drawn")
def test_a_measurement_whose_seeds_tie_in_each_row_has_its_panel(tmp_path):
    rows = [Row(f"row {place}", {}, {"x": cell(*2 * [3.0 + place], chance=2.0)}, "measured") for place in range(2)]
    table = made_up_table(columns=[Column("x", "x")], rows=rows)
    assert plot_table(table, tmp_path / "table0.png") == [tmp_path / "table0.png"]


def test_no_colour_comes_twice_with_a_marker():
    assert len({(look["color"], look["marker"]) for look in map(drawing.look_of, range(49))}) == 49


def test_distances_start_at_0_and_what_a_row_has_in_common_has_one_scale(tmp_path, drawn):
    values = (("d", 3, 4), ("d", 1, 2), ("e", 7, 9))
    panels = [figures.Distributions(x, x, {"image": [low, high]}) for x, low, high in values]
    plot_distributions(panels, tmp_path / "x.png", across=3)
    assert [axis.get_xlim() for axis in drawn[0].axes] == [(0, 4), (0, 4), (0, 9)]


def test_plot_of_a_table_says_where_lower_is_better_and_shows_long_names_whole(tmp_path, drawn):
    columns = [Column(str(better), "x", "nats", better=better) for better in ("higher", "lower", None)]
    ours = {column.key: cell(1.0, 2.0) for column in columns}
    names = ["short", "CLIP-like, no temperature (Eq. 6-8 as printed)", "word " * 29 + "word"]
    table = made_up_table(columns=columns, rows=[Row(name, {}, ours, "measured") for name in names])
    plot_table(table, tmp_path / "plot.png")
    axes = drawn[0].axes
    assert ["lower is better" in axis.get_xlabel() for axis in axes] == [False, True, False]
    assert [label.get_text().replace("\n", " ") for label in axes[0].get_yticklabels()] == names


def test_a_changed_tables_plot_says_what_was_changed_and_intervals_drawn_alike_share_a_line(tmp_path, drawn):
    rows = [
        Row(name, {}, {"x": cell(*values)}, "measured") for name, values in (("a", (40, 50, 60)), ("b", (0.1, 0.1, 9)))
    ]
    command = 'make reproduce-table0 SEEDS=3 ROWS="a b" SET="method.local=attached"'
    table = made_up_table(columns=[Column("x", "x")], rows=rows, seeds=(0, 1, 2), command=command)
    for folder in ("demo", "demo-8fe9"):
        plot_table(table, tmp_path / folder / "table0.png")
    plain, changed = (" ".join(figure.get_suptitle().split()) for figure in drawn)
    assert plain.endswith("no_paper, table0, scale demo")
    assert changed == f'{plain}, ROWS="a b", SET="method.local=attached"'
    texts = [" ".join(text.get_text().split()) for text in drawn[0].legends[0].get_texts()]
    assert texts == ["ours", "interval: 95 % t over seeds, on the arcsine scale near the ends of the range"]
    drawn[0].draw_without_rendering()
    edges = drawn[0].legends[0].get_window_extent()
    assert 0 <= edges.x0 < edges.x1 <= drawn[0].bbox.x1  # of one narrow panel


def look_of(dot):
    return dot.get_color(), dot.get_marker()


METHOD = {
    "kinds": {"Geo-": "geodesic distance", "as soft": "as soft"},
    "pair": "Geo-| as soft as Geo",
    "without": "cosine",
}


def test_a_row_its_method_and_its_control_stand_at_one_height_each_with_a_look_and_a_name(tmp_path, drawn):
    means = {"A": 1.0, "Geo-A": 2.0, "A as soft as Geo": 3.0, "B": 4.0, "Geo-B": 5.0, "Geo-C": 6.0}
    rows = [Row(name, {}, {"x": cell(mean, mean + 1)}, "measured") for name, mean in means.items()]
    plot_table(made_up_table(columns=[Column("x", "x")], rows=rows), tmp_path / "table0.png", METHOD, "Recall")
    (panel,) = drawn[0].axes
    dots = sorted((line for line in panel.lines if len(line.get_xdata()) == 1), key=lambda dot: dot.get_xdata()[0])
    assert [dot.get_ydata()[0] for dot in dots] == pytest.approx([-0.28, 0, 0.28, 0.86, 1.14, 2])
    assert [text.get_text() for text in panel.get_yticklabels()] == ["A", "B", "Geo-C"]
    looks = [look_of(dot) for dot in dots]
    assert len(set(looks)) == 3
    assert looks[3:] == [looks[0], looks[1], looks[1]]
    (legend,) = drawn[0].legends
    shown = {text.get_text(): look_of(handle) for text, handle in zip(legend.texts, legend.legend_handles)}
    assert [shown[name] for name in ("cosine", "geodesic distance", "as soft")] == looks[:3]
    assert drawn[0].get_suptitle() == "Recall\nno_paper, table0, scale demo"


def test_a_row_looks_the_same_in_a_line_of_panels_that_it_has_for_itself(tmp_path, drawn):
    columns = [Column(f"x{number}", f"x{number}") for number in range(5)]
    rows = [
        Row(name, {}, {column.key: cell(1.0, 2.0) for column in columns[:measured]}, "measured")
        for name, measured in (("A", 3), ("Geo-A", 5))
    ]
    plot_table(made_up_table(columns=columns, rows=rows), tmp_path / "table0.png", METHOD)
    looks = [[look_of(line) for line in panel.lines if len(line.get_xdata()) == 1] for panel in drawn[0].axes]
    assert looks == [looks[0]] * 3 + [looks[0][1:]] * 2
    assert [text.get_text() for text in drawn[0].legends[0].texts][:2] == ["cosine", "geodesic distance"]


def test_many_panels_leave_recall_at_5_and_10_to_the_table_and_a_line_has_the_rows_that_it_measured(tmp_path, drawn):
    columns = [Column(f"{place}{at}", f"R@{at} {place}", stands_in_for=place) for place in "abcd" for at in (1, 5, 10)]
    columns.append(Column("e", "tied", stands_in_for="e"))
    rows = [
        Row("all", {}, {column.key: cell(1.0, 2.0) for column in columns}, "measured"),
        Row("first", {}, {"a1": cell(1.0, 2.0)}, "measured"),
    ]
    plot_table(made_up_table(columns=columns, rows=rows), tmp_path / "table0.png")
    axes = drawn[0].axes
    assert [axis.get_title() for axis in axes] == [*(f"R@1 {place}, on {place}" for place in "abcd"), "tied, on e"]
    assert [len(axis.get_yticklabels()) for axis in (axes[0], axes[3])] == [2, 1]


def test_a_column_of_few_rows_is_left_to_the_table_and_the_title_takes_the_data_of_the_others(tmp_path, drawn):
    columns = [Column(key, key) for key in "abcdefg"]
    rows = [Row(f"row {n}", {}, {key: cell(n, n + 1) for key in "abcdef"}, "measured") for n in range(4)]
    ours = dataclasses.replace(cell(1.0, 2.0), data="other data")
    rows.append(Row("rare", {}, {"g": ours}, "measured"))
    plot_table(made_up_table(columns=columns, rows=rows), tmp_path / "table0.png")
    assert [axis.get_title() for axis in drawn[0].axes] == [*"abcdef"]
    shown = {label.get_text() for axis in drawn[0].axes for label in axis.get_yticklabels()}
    assert shown == {f"row {n}" for n in range(4)}
    assert drawn[0].get_suptitle().split("\n")[0].endswith(f", on {cell(1.0).data}, without columns of few rows")


def test_intervals_of_several_kinds_name_their_columns_and_one_seed_says_that_it_has_none(tmp_path, drawn):
    columns = [Column(key, key, "nats") for key in "xy"]
    crossed = dataclasses.replace(cell(1.0, 2.0), interval_kind=CROSSED_INTERVAL)
    cut = dataclasses.replace(cell(3.0, 4.0), interval_kind=SEEDS_INTERVAL + CUT)
    rows = [Row(name, {}, {"x": crossed, "y": y}, "measured") for name, y in (("a", cell(1.0, 2.0)), ("b", cut))]
    plot_table(made_up_table(columns=columns, rows=rows), tmp_path / "table0.png")
    texts = [" ".join(text.get_text().split()) for text in drawn[0].legends[0].get_texts()]
    assert texts[-1] == f"interval: {CROSSED_INTERVAL} (x); {SEEDS_INTERVAL} (y){CUT}"
    single = made_up_table(columns=columns, rows=[Row("a", {}, {"x": cell(1.0)}, "measured")], seeds=(0,))
    plot_table(single, tmp_path / "table0.png")
    assert drawn[1].get_suptitle().endswith(", one seed, no intervals")


def test_a_long_title_and_a_long_legend_leave_room_for_the_panels_whose_texts_are_as_written(tmp_path, drawn):
    names = ("A", "Geo-A", "A as soft as Geo", "$\\frac{1}$")  # the last is no formula
    rows = [Row(name, {}, {"x": cell(1.0, 2.0, chance=0.5)}, "measured") for name in names]
    command = f'make reproduce-table0 SEEDS=2 ROWS="{" ".join(["a_row_with_a_long_name"] * 6)}"'
    column = Column("x", "$label of the images of the-second-test-set.tar")
    table = made_up_table(columns=[column], rows=rows, command=command)
    plot_table(table, tmp_path / "demo-8fe9" / "table0.png", METHOD)
    drawn[0].draw_without_rendering()
    (panel,), (legend,) = drawn[0].axes, drawn[0].legends
    assert legend.get_window_extent().y1 < panel.get_window_extent().y0
    assert panel.get_window_extent().y1 < drawn[0]._suptitle.get_window_extent().y0
    assert "the-second-test-set.tar" in panel.get_title()  # file names are not wrapped


def test_a_rare_colour_of_a_plot_survives_the_palette(tmp_path):
    columns = [Column(str(place), str(place)) for place in range(8)]
    rows = [Row("Geo-A", {}, {column.key: cell(1.0, 2.0) for column in columns}, "measured") for _ in range(12)]
    rows.append(Row("A", {}, {"0": cell(1.0)}, "measured"))
    named = [dataclasses.replace(row, method=f"{row.method}{n}") for n, row in enumerate(rows)]
    (png,) = plot_table(made_up_table(columns=columns, rows=named), tmp_path / "plot.png", METHOD)
    pixels = np.asarray(Image.open(png).convert("RGB")).reshape(-1, 3).astype(int)
    wanted = [int(drawing.COLORS[0][start : start + 2], 16) for start in (1, 3, 5)]
    assert np.abs(pixels - wanted).sum(axis=1).min() < 30


@pytest.mark.parametrize(
    ("caption", "title"),
    [
        ("Readings of Eq. 3: CLIP after 10 steps, by start.", "Readings of Eq. 3: CLIP after 10 steps, by start"),
        ("Share of the pictures that meet one; root excluded.", "Share of the pictures that meet one"),
        ("Pre-training data: pictures.", "Pre-training data: pictures"),
    ],
)
def test_the_title_of_a_plot_is_the_beginning_of_the_caption(caption, title):
    assert title_in_words(dataclasses.replace(made_up_table(), caption=caption)).partition(", on ")[0] == title


def test_the_model_behind_a_chance_level_is_named(tmp_path, drawn):
    rows = [Row("a", {}, {"x": cell(1.0, 2.0, chance=0.5)}, "measured")]
    table = made_up_table(columns=[Column("x", "x", guess="the largest box")], rows=rows)
    plot_table(table, tmp_path / "table0.png")
    assert "chance level (the largest box)" in [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "*chance level (the largest box)*" in to_markdown(from_json(to_json(table)))


def made_up_log(offset):
    records = [
        {
            "event": "train",
            "step": step,
            "samples_seen": 8 * step,
            "loss": 2 / step + offset,
            "logit_scale": 10.0 + step,
        }
        for step in range(1, 201)
    ]
    records[7]["loss"] = "nan"  # as the log writes it
    metrics = {"test/i2t_recall_at_1": 0.25 + offset, "test/t2i_recall_at_1": 0.125, "test/i2t_recall_at_5": 0.5}
    evaluated = [
        {"event": "evaluate", "step": step, "metrics": values}
        for step in (100, 200)
        for values in (metrics, {"acc1": 0.75, "acc5": 1})
    ]
    return [*records, *evaluated, {"event": "broken", "step": 3}]


@pytest.mark.usefixtures("drawn")
def test_plot_of_training_has_loss_logit_scale_and_recall_of_every_run(tmp_path):
    png, _ = plot_training({"a": made_up_log(0.0), "b": made_up_log(0.125)}, tmp_path / "training.png")
    records = read_plotted(png)
    assert {(record["panel"], record["run"]) for record in records} == {
        (panel, run) for panel in ("loss", "logit_scale", "i2t_recall_at_1", "t2i_recall_at_1", "acc1") for run in "ab"
    }
    assert [float(r["value"]) for r in records if r["panel"] == "acc1"] == [75.0] * 4
    assert [float(r["value"]) for r in records if r["panel"] == "i2t_recall_at_1"] == [25.0, 25.0, 37.5, 37.5]
    # of 200 records, means over windows of 4, as they are drawn
    losses = [float(record["loss"]) for record in made_up_log(0.125) if record["event"] == "train"]
    written = [r for r in records if (r["panel"], r["run"]) == ("loss", "b")]
    means = [sum(losses[k : k + 4]) / 4 for k in range(0, 200, 4)]
    assert np.array([r["value"] for r in written], float) == pytest.approx(means, rel=1e-4, nan_ok=True)
    assert [float(r["step"]) for r in written] == [k + 2.5 for k in range(0, 200, 4)]


def legends(figure):
    return [[text.get_text() for text in part.legends[0].get_texts()] for part in figure.subfigs]


def test_a_row_is_the_mean_of_its_seeds_in_a_band_from_the_lowest_to_the_highest(tmp_path, drawn):
    logs = {
        name: made_up_log(offset) for name, offset in (("a, seed 0", 0), ("a, seed 1", 0.5), ("b, T = 1, seed 0", 0))
    }
    plot_training(logs, tmp_path / "training.png", "a title")
    assert legends(drawn[0]) == [["a (2 seeds)", "b, T = 1"]]
    accuracy = next(axis for axis in drawn[0].axes if axis.get_ylabel().startswith("validation i2t"))
    assert [list(line.get_ydata()) for line in accuracy.get_lines()] == [[50, 50], [25, 25]]
    band = accuracy.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (25, 75)
    assert drawn[0].get_suptitle() == "a title"


def test_stages_and_rows_beyond_the_colours_stand_apart(tmp_path, drawn):
    short = [record for record in made_up_log(0.0) if record["step"] <= 100]
    logs = {f"{row}, seed 0": made_up_log(0.0) for row in "abcdefghij"} | {
        "a, tuned, seed 0": short,
        "k, seed 0": short,
    }
    plot_training(logs, tmp_path / "training.png")
    titles = [part.get_suptitle() for part in drawn[0].subfigs]
    assert titles == ["200 steps, rows 1 to 5 of 10", "200 steps, rows 6 to 10 of 10", "tuned, 100 steps", "100 steps"]
    assert legends(drawn[0]) == [[*"abcde"], [*"fghij"], ["a, tuned"], ["k"]]
    assert len({axis.get_ylim() for axis in drawn[0].axes if axis.get_ylabel().startswith("logit scale")}) == 2


def test_the_chance_level_of_the_loss_is_drawn_where_it_is_a_contrast_only(tmp_path, drawn):
    def chance(*runs):
        steps = made_up_log(0)[:200]
        logs = {str(number): [{**line, **more(line)} for line in steps] for number, more in enumerate(runs)}
        plot_training(logs, tmp_path / "training.png")
        return [text for text in legends(drawn[-1])[0] if text.startswith("chance level")]

    def among(count, added=0.0):
        return lambda line: {"loss_over_chance": (float(line["loss"]) - added) / math.log(count)}

    assert chance(among(256), among(256)) == ["chance level: 5.55"]
    for unlike in (among(128), among(256, added=0.1), lambda line: {}):
        assert chance(among(256), unlike) == []


def test_plot_of_training_without_records_writes_nothing(tmp_path):
    once = [record for record in made_up_log(0.0) if record["step"] == 200]  # a point is no course
    for logs in ({}, {"a": []}, {"a": once}):
        assert plot_training(logs, tmp_path / "x.png") == []
    assert list(tmp_path.iterdir()) == []


def test_the_index_links_the_maps_beside_it_and_in_the_results(tmp_path):
    committed, local = tmp_path / "results", tmp_path / "outputs"
    for folder, title in (
        (committed / "euclip" / "map" / "demo", "Map of the embedding spaces of A &amp; B, C"),
        (local, "Map of the embedding space of mine"),
    ):
        folder.mkdir(parents=True)
        (folder / "map.html").write_text(f"<html><title>{title}</title></html>", encoding="utf-8")
    (local / "map_old.html").write_bytes("<title>Kärtchen</title>".encode("latin-1"))
    (local / "map_notes.html").write_text("<title>Another page</title>", encoding="utf-8")
    roots, index = (committed, local / "results"), local / "report.html"
    collect_page(roots, index, papers=tmp_path)
    page = index.read_text(encoding="utf-8")
    assert '<a href="../results/euclip/map/demo/map.html">Map of the embedding spaces of A &amp; B, C</a>' in page
    assert '<a href="map.html">Map of the embedding space of mine</a>' in page
    assert "Another page" not in page


def test_claims_are_judged_by_the_newest_table_of_some_rows_where_there_is_no_whole_one():
    def entry(name, created, end="", settings=()):
        command = f"make reproduce-{name} PAPER=made_up SCALE=smoke SEEDS=2{end}"
        table = dataclasses.replace(
            made_up_table(), table_id=name, created=created, command=command, settings=list(settings)
        )
        return Entry(table, changed=bool(end))

    rows = ' ROWS="a b"'
    chosen = {
        "whole": [entry("t1", "2026-01-01"), entry("t1", "2026-01-02", rows)],
        "newest": [entry("t2", "2026-01-03", rows), entry("t2", "2026-01-02", rows)],
        "near": [entry("t3", "2026-01-01", " NEAR=1", ["optim.steps=2"])],
        "none": [entry("t4", "2026-01-01", f'{rows} SET="optim.steps=2"')],
    }
    kept = deciding([one for of_kind in chosen.values() for one in of_kind])
    assert [(table.table_id, table.created) for table in kept] == [
        ("t1", "2026-01-01"),
        ("t3", "2026-01-01"),
        ("t2", "2026-01-03"),
    ]
