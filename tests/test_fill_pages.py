"""scripts/fill_pages.py: tables of the pages are those of the committed results."""

import importlib
import re

import pytest
from runs import called

from common.base.provenance import ROOT
from common.report.claims.show import to_page
from common.report.formats import write_table
from common.report.table import MEASURED, Column, Measured, Row, Table
from common.reproduce.command import trained_rows
from common.reproduce.rows import paper_tables
from scripts import fill_pages
from scripts.fill_pages import PAGES, PageError, filled, sources_of

RESULTS = ROOT / "results"
MARK = "<!-- table: results/p/table1/demo/table1.json{} -->"
FILLED = """| | acc | mean |
|---|---|---|
| *paper, ours* | *76.4* | *—* |
| *data (ours)* | `scenes/test`, 10 pictures | `scenes/test`, 10 pictures |
| ours, ours | 50.0 ± 12.4 | 0.500 ± 0.124 |
| chance level | 1.6 | — |

Ours: on scenes; seeds 0, 1. ±: half-width, 95 % t over seeds; units: acc: percent; mean: fraction.
"""


def cell(unit):
    scale = 1 if unit == "percent" else 0.01
    return Measured(
        values=(49.0 * scale, 51.0 * scale),
        seeds=(0, 1),
        interval=((50 - 12.4) * scale, (50 + 12.4) * scale),
        interval_kind="95 % t over seeds",
        scale="demo",
        data="scenes/test (842741d6)",
        protocol="num_images 10",
        chance=1.6 if unit == "percent" else None,
    )


@pytest.fixture
def root(tmp_path, monkeypatch):
    table = Table(
        paper="p",
        paper_title="Paper",
        paper_version="v1",
        table_id="table1",
        caption="A table.",
        columns=(Column("acc", "acc"), Column("mean", "mean", "fraction"), Column("other", "other")),
        rows=(
            Row("ours", {"acc": 76.4}, {"acc": cell("percent"), "mean": cell("fraction")}, MEASURED),
            Row("not run", {"acc": 80.0}, {}, "not run: needs a GPU"),
        ),
        scale="demo",
        data="scenes",
        seeds=(0, 1),
        git_revision="abc",
        command="make",
        created="2026-01-01",
        hardware="CPU",
    )
    write_table(table, tmp_path / "results" / "p" / "table1" / "demo")
    monkeypatch.setattr(fill_pages, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def read_once(monkeypatch, committed_tables):
    """Every page and every verdict is made from all of them."""
    for module in (fill_pages, importlib.import_module("common.report.page")):
        monkeypatch.setattr(module, "collect", lambda roots: committed_tables)


def test_no_page_differs_from_the_committed_results():
    for page in PAGES:
        path = fill_pages.ROOT / page
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert filled(text, page) == text, f"{page} differs: python scripts/fill_pages.py"


@pytest.mark.parametrize("paper", fill_pages.PAPERS)
@pytest.mark.usefixtures("read_once")
def test_no_page_of_results_differs_from_what_lies_beside_it(paper):
    path = fill_pages.ROOT / "results" / paper / "README.md"
    assert fill_pages.results_page(paper) == path.read_text(encoding="utf-8"), f"{path}: python scripts/fill_pages.py"


def test_no_table_differs_from_its_json(committed_tables):
    for entry in committed_tables:
        written = entry.path.with_suffix(".md").read_text(encoding="utf-8")
        assert fill_pages.to_markdown(entry.table) == written, f"{entry.path}: python scripts/fill_pages.py"


def test_no_page_of_claims_differs_from_the_committed_results_and_claims(committed_claims, committed_tables):
    pages = {claims.paper: to_page(claims, sources_of(claims.paper, committed_tables)) for claims in committed_claims}
    assert pages.keys() == set(fill_pages.PAPERS)
    for paper, text in pages.items():
        assert all((RESULTS / paper / link).is_file() for link in re.findall(r"\]\(([^#)]+)\)", text))
        commands = re.findall(r"^  - run: `make reproduce-(\S+) .*?ROWS=\"([^\"]+)\"", text, re.MULTILINE)
        assert all({*rows.split()} <= {*trained_rows(paper_tables(paper), part)} for part, rows in commands)
        path = RESULTS / paper / "claims.md"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: python scripts/fill_pages.py"


@pytest.mark.parametrize("old", ["", "\n| stale | 1.0 |\n|---|---|\n| row | 2.0 |\n", "| stale | 1.0 |\n"])
def test_measured_rows_replace_the_table_and_nothing_else(root, old):
    mark = MARK.format("; columns: acc, mean")
    now = f"before\n\n{mark}\n\n{FILLED}\nafter | not a table\n"
    assert filled(f"before\n\n{mark}\n{old}\nafter | not a table\n", "page") == now
    assert filled(now, "page") == now


def test_sentences_take_their_numbers_and_their_verdicts_from_the_results(root):
    conclusions = root / "p" / "conclusions.yaml"
    conclusions.parent.mkdir()
    conclusions.write_text(
        "- {text: 'It is {table1/demo/table1 | ours | acc} %.', claims: {C1: undecided}, scale: demo}\n"
        "- {text: B., details: C.}\n"
    )
    page = "<!-- conclusions: p -->\n\n1. stale\n2. stale\n3. stale\n\nafter\n"
    verdict = "*([C1](../results/p/claims.md#c1): undecided; scale demo; numbers: demo, 2 seeds)*"
    now = f"1. **It is 50.0 %.** {verdict}\n2. **B.**\n"
    assert filled(page, "page") == f"<!-- conclusions: p -->\n\n{now}\nafter\n"
    of_results = now.replace("../results/p/", "").replace("**B.**", "**B.** C.")
    assert fill_pages.conclusion_list(conclusions.parent, with_details=True) == of_results
    for cell_named, message in (
        ("our | acc", r"p/conclusions.yaml: \{table1/demo/table1 \| our \| acc\}: no 'our'; expected one of: ours"),
        ("ours | other", r"no 'other'; expected one of: acc, mean"),
    ):
        conclusions.write_text(f"- text: '{{table1/demo/table1 | {cell_named}}}'\n")
        with pytest.raises(ValueError, match=message):
            filled(page, "page")


def test_without_columns_all_are_shown(root):
    assert "| | acc | mean | other |\n" in filled(MARK.format("") + "\n", "page")


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (
            MARK.format("; columns: acc, top1"),
            "page: .*table1.json has no column 'top1'; expected one of: acc, mean, other",
        ),
        (MARK.format("").replace("table1.json", "table9.json"), "page: results/p/table1/demo/table9.json: no such"),
    ],
)
def test_what_is_not_there_is_named(root, mark, words):
    with pytest.raises(PageError, match=words):
        filled(mark + "\n", "page")


def test_check_writes_nothing_and_fails_where_a_page_differs(root, capsys):
    page = root / "README.md"
    page.write_text(MARK.format("; columns: acc, mean") + "\n", encoding="utf-8")
    for arguments, status, message in ((["--check"], 1, "differs"), ([], 0, "filled"), (["--check"], 0, "no change")):
        with pytest.raises(SystemExit) as stopped:
            called(fill_pages.main, *arguments)
        assert bool(stopped.value.code) == bool(status)
        assert message in capsys.readouterr().out
    assert FILLED in page.read_text(encoding="utf-8")


def test_plots_that_were_left_out_stay_so(root, monkeypatch):
    drawn = []
    monkeypatch.setattr(fill_pages, "plot_table", lambda table, path, **words: drawn.append(path))
    monkeypatch.setattr(fill_pages, "words_of_plot", lambda *names: {})
    picture = root / "results/p/table1/demo/table1.png"
    for _ in range(2):
        with pytest.raises(SystemExit):
            called(fill_pages.main, "--plots")
        picture.touch()
    assert drawn == [picture]
