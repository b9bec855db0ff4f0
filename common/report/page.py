"""HTML pages of all tables: no script, no request to anywhere, readable on a phone and on paper.

    python -m common.report.page --results results outputs/results --output outputs/report.html

writes an index with the conclusions and the verdict on every claim, and beside it `report_<paper>.html` for each paper.
The markup is in `index.html.jinja` and `page.html.jinja`; Jinja escapes every text.
"""

import base64
import html
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from common.base.arguments import Parser
from common.base.dependencies import changed_files
from common.base.files import write_atomically
from common.base.provenance import last_change
from common.report.claims.read import FAILS
from common.report.claims.show import (
    READING,
    Judged,
    PaperClaims,
    counts,
    effect,
    evidence,
    headline,
    judge,
    style_of,
    with_q,
)
from common.report.conclusions import Conclusion, load_conclusions
from common.report.formats import (
    glossary,
    heading,
    lay_out,
    line_below,
    named,
    provenance,
    reading,
    remarks,
    seeds_name,
    warning,
)
from common.report.table import Table, is_table, read_table

_PAPERS = Path(__file__).resolve().parents[2]  # where the paper folders are
_TITLE = "Published numbers and ours: contrastive vision-language geometry"
_SHOWN = {
    "": "the numbers above as dots, a panel for each column, with their intervals,",
    "training": "the course of training of the runs",
    "curves": "the curves",
    "distances": "histograms of distances",
    "levels": "distances by level of the caption",
}


@dataclass(frozen=True)
class Picture:
    """A PNG file with its caption, which is also its alternative text."""

    path: Path
    caption: str

    @property
    def data(self) -> str:
        return base64.b64encode(self.path.read_bytes()).decode("ascii")


@dataclass(frozen=True)
class Entry:
    """A table with its pictures, its file, and the root where it was found.

    `changed`: its rows ran with changed settings, or some of its rows ran.
    """

    table: Table
    pictures: tuple[Picture, ...] = ()
    root: str = ""
    changed: bool = False
    path: Path = Path()

    @property
    def is_part(self) -> bool:
        """Whether it has some rows (ROWS) of a table, with its settings."""
        return self.changed and not self.table.settings and not re.search(" (?:SET|NEAR)=", self.table.command)


def write_page(
    entries: Sequence[Entry],
    path: str | Path,
    title: str = _TITLE,
    claims: Sequence[PaperClaims] = (),
    conclusions: Sequence[Conclusion] = (),
    index: str = "",
) -> Path:
    """Write one HTML page of conclusions, claims and tables, atomically; it embeds its pictures.

    Args:
        entries: in the order of the page; the heading of a table that occurs in several roots names its root.
        index: file name of the index page, for a link; empty = no link.
    """
    names = [_name(entry.table, entry.changed) for entry in entries]
    headings = [
        f"{name}, from {_shown(entry.root)}" if entry.root and names.count(name) > 1 else name
        for name, entry in zip(names, entries)
    ]
    return _render(
        "page.html.jinja", path, title=title, entries=list(zip(headings, entries)), conclusions=conclusions,
        index=index, claims=claims, READING=READING,
    )  # fmt: skip


def _render(template: str, path: str | Path, **content: object) -> Path:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"breakable": _breakable, "prose": _prose}
    environment.globals |= {function.__name__: function for function in _FUNCTIONS}
    return write_atomically(path, environment.get_template(template).render(content))


def collect(roots: Sequence[str | Path]) -> list[Entry]:
    """Tables in `<root>/<paper>/<part>/<scale>/*.json`, sorted by paper, part, scale and table, then root.

    A missing root counts as empty; JSON files that are no tables are skipped.

    Raises:
        ValueError: a broken file; the message names it.
    """
    entries = []
    for root in dict.fromkeys(Path(root).resolve() for root in roots):
        tables = {file: table for file in sorted(root.glob("*/*/*/*.json")) if (table := _read(file)) is not None}
        for file, table in tables.items():
            changed = file.parent.name != table.scale
            entries.append(Entry(table, _pictures(file, _name(table, changed), tables), str(root), changed, file))
    return sorted(entries, key=_place)


def deciding(entries: Sequence[Entry]) -> list[Table]:
    """The tables by which claims are judged: whole ones, and those near the best of a search.

    Where there is no whole one, the newest of some rows decides the claims about these rows.
    """
    tables = [entry.table for entry in entries if not entry.changed or entry.table.settings]
    whole = {_of_paper(table) for table in tables if not table.settings}
    parts = sorted((entry.table for entry in entries if entry.is_part), key=lambda table: table.created)
    return [*tables, *{_of_paper(table): table for table in parts if _of_paper(table) not in whole}.values()]


def _of_paper(table: Table) -> tuple[str, str, str]:
    return table.paper, table.table_id, table.scale


def collect_claims(entries: Sequence[Entry], papers: str | Path = _PAPERS) -> list[PaperClaims]:
    """The claims of every paper folder in `papers`, judged by the entries.

    Raises:
        ValueError: a broken claims.yaml; the message names it.
    """
    tables = deciding(entries)
    folders = sorted(path.parent for path in Path(papers).glob("*/claims.yaml"))
    judged = (judge(folder, tables) for folder in folders)
    return [with_q(claims) for claims in judged if claims is not None]


def maps_beside(roots: Sequence[str | Path], page: str | Path) -> list[tuple[str, str]]:
    """(title, link) of `make map`'s pages in `<root>/<paper>/map/<scale>/` and beside a root or the page."""
    page = Path(page).resolve()
    folders = [folder for root in map(Path, roots) for folder in (*sorted(root.glob("*/map/*")), root.resolve().parent)]
    files = (file for folder in (*folders, page.parent) for file in sorted(folder.glob("map*.html")))
    pages = {file.resolve(): file.read_text("utf-8", "replace") for file in files}
    titles = {file: re.search("<title>(Map of .*)</title>", text[:2000]) for file, text in pages.items()}
    return [
        (html.unescape(title[1]), Path(os.path.relpath(file, page.parent)).as_posix())
        for file, title in titles.items()
        if title is not None
    ]


def collect_page(
    roots: Sequence[str | Path], path: str | Path, papers: str | Path = _PAPERS
) -> tuple[int, list[PaperClaims]]:
    """Write the index, and beside it a page for each paper.

    Returns:
        The number of tables, and the claims with their verdicts.
    """
    path = Path(path)
    entries = collect(roots)
    claims = {judged.paper: judged for judged in collect_claims(entries, papers)}
    committed = Path(papers) / "results"
    # conclusions are about these; an installed package has none
    has_committed = committed.is_dir() and committed.resolve() in (Path(root).resolve() for root in roots)
    index, by_construction = [], []
    for paper in dict.fromkeys([*claims, *(entry.table.paper for entry in entries)]):
        of_paper = [entry for entry in entries if entry.table.paper == paper]
        of_claims = [claims[paper]] if paper in claims else []
        conclusions = load_conclusions(Path(papers) / paper, committed) if has_committed else []
        file = f"{path.stem}_{paper}.html"
        title = of_claims[0].title if of_claims else of_paper[0].table.paper_title
        write_page(of_paper, path.with_name(file), title, claims=of_claims, conclusions=conclusions, index=path.name)
        marked = [(mark_of(judged), judged) for paper_claims in of_claims for judged in paper_claims.judged]
        shown = {"tables": len(of_paper), "marked": marked, "conclusions": conclusions}
        index.append({"name": paper, "title": title, "file": file, **shown})
        ids = [judged.claim.id for mark, judged in marked if mark == "construction"]
        by_construction += [f"{paper} {', '.join(ids)}"] if ids else []
    _render(
        "index.html.jinja", path, title=_TITLE, papers=index, tables=len(entries), maps=maps_beside(roots, path),
        refuted=[(paper, judged) for paper in index for _, judged in paper["marked"] if judged.audit.verdict == FAILS],
        counts=Counter(mark for paper in index for mark, judged in paper["marked"] if not judged.claim.control_of),
        controls=sum(judged.controls for judged in claims.values()),
        by_construction="; ".join(by_construction) or "None",
    )  # fmt: skip
    return len(entries), list(claims.values())


def mark_of(judged: Judged) -> str:
    """ "construction" or "test" for what holds without a measurement over seeds, else `style_of` the first verdict."""
    first = judged.measured[0]
    mark = {"by construction": "construction", "by test": "test", "parity check": "test"}.get(first.how)
    return mark if mark and first.verdict != FAILS else style_of(first)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; ValueError for a broken file."""
    parser = Parser("Collect tables of results on one HTML page.")
    parser.add_argument(
        "--results", nargs="+", type=Path, default=[Path("results"), Path("outputs/results")], help="folders to search"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/report.html"), help="the page to write")
    given = parser.parse_args(arguments)
    number, claims = collect_page(given.results, given.output)
    if number == 0:
        print(
            f"no tables below {', '.join(map(str, given.results))}; {given.output} is empty. Try: make reproduce-table2"
        )
    else:
        print(f"{given.output}: {number} table{'s' if number > 1 else ''}, on a page for each paper beside it")
        print("\nVerdicts on claims, measured:", *(f"{paper.paper}: {counts(paper)[1]}" for paper in claims), sep="\n")


def outdated(table: Table) -> list[tuple[str, str]]:
    """(row, text) of rows whose training files have changed since."""
    changed = {key: changed_files(files) for key, files in table.code.items()}
    revisions = {key: last_change(files) for key, files in changed.items() if files}
    return [
        (row.ran or row.method, f"trained before {revisions[row.training.code]}, which changed the code")
        for row in table.rows
        if row.training is not None and row.training.code in revisions
    ]


_FUNCTIONS = (  # that the templates call
    counts, effect, evidence, glossary, headline, lay_out, line_below, outdated, provenance, reading, remarks, style_of,
    warning,
)  # fmt: skip


def _name(table: Table, changed: bool) -> str:
    return heading(table.paper, table.table_id, table.scale, table.command if changed else "", table.settings)


def _read(file: Path) -> Table | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise ValueError(f"{file} is broken: {error}") from error
    return read_table(file) if is_table(content) else None


def _pictures(file: Path, name: str, tables: dict[Path, Table]) -> tuple[Picture, ...]:
    # the longest table id with which the file name begins; others go to the first table
    table = tables[file]
    seeds = f"{seeds_name(table.seeds)} {', '.join(map(str, table.seeds))}"
    here = {path.stem: path for path in tables if path.parent == file.parent}
    pictures = []
    for path in sorted(file.parent.glob("*.png")):
        owners = [stem for stem in here if path.stem == stem or path.stem.startswith(f"{stem}_")]
        if (max(owners, key=len) if owners else min(here)) == file.stem:
            kind = path.stem.removeprefix(file.stem).strip("_").replace("_", " ")
            caption = f"The picture shows {_SHOWN.get(kind, kind)} of {name}, on {named(table.data)}, {seeds}."
            pictures.append(Picture(path, caption))
    return tuple(pictures)


def _shown(root: str) -> str:
    # no path of this machine is printed
    path = Path(root).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _place(entry: Entry) -> tuple:
    # tables, then figures, then the rest; table2 stands before table10
    paper, part, scale = entry.path.parts[-4:-1]
    kind = next((place for place, name in enumerate(("table", "figure")) if part.startswith(name)), 2)
    texts = (re.findall(r"\d+|\D+", text) for text in (part, scale, entry.table.table_id))
    return paper, kind, *([(0, int(piece)) if piece.isdigit() else (1, piece) for piece in text] for text in texts)


def _breakable(text: str) -> Markup:
    # Escaped text that may break after '/' and '_' and before an interval, but not in "1.2 ± 0.3" or "[1, 2]"
    text = re.sub(r"([/_])(?=[A-Za-z0-9])", r"\1<wbr>", html.escape(text, quote=False))
    return Markup(re.sub(r"^-?[\d.]+ ± [\d.]+|\[-?[\d.]+, -?[\d.]+\]", r'<span class="whole">\g<0></span>', text))


def _prose(text: str) -> Markup:
    # Escaped sentences: `code` as such, and no line that begins with a percent sign
    return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text, quote=False)).replace(" %", "&nbsp;%"))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
