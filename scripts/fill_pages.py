"""Fills the result tables of the Markdown pages from the committed results, so that no number is copied by hand.

    python scripts/fill_pages.py            writes README.md and <paper>/README.md
    python scripts/fill_pages.py --check    says which file differs, and ends with status 1

First the verdicts beside the committed results are judged anew, results/<paper>/<part>/<scale>/<part>_claims.md, as
later results and changed claims can change them.

A page holds, above each such table, a comment that names a result and, where not all are wanted, its columns by key:

    <!-- table: results/euclip/table4/demo/table4.json; columns: imagenet, retrieval -->

The table below it is replaced: rows of the paper for methods that were measured, what ours is measured on, our numbers,
and the level of a guess. Verdicts on claims, all of a file or some by id:

    <!-- claims: results/euclip/table4/demo/table4_claims.md; ids: C5, C6 -->
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser
from common.base.provenance import ROOT
from common.report.formats import DASH, lay_out, markdown_text
from common.report.page import refreshed_claims
from common.report.table import Column, Table, read_table

PAPERS = ("oblique_topology", "geomm", "euclip", "contrastive_basics")
PAGES = ("README.md", *(f"{paper}/README.md" for paper in PAPERS))
_MARK = re.compile(
    r"<!-- (?P<kind>table|claims): (?P<path>\S+?)(?:; (?:columns|ids): (?P<wanted>[^>]*?))? -->\n(?:\n?(?:\|.*\n)+)?"
)


class PageError(ValueError):
    """A page asks for a result or a column that is not there."""


def filled(text: str, page: str) -> str:
    """A page with its tables as the results have them.

    Args:
        text: of the page.
        page: its name, for messages.
    Raises:
        PageError: a result, a column or a claim that is not there; names page, file and what is there.
    """

    def fill(found: re.Match) -> str:
        path = ROOT / found["path"]
        if not path.is_file():
            raise PageError(f"{page}: {found['path']}: no such result")
        wanted = [key.strip() for key in (found["wanted"] or "").split(",") if key.strip()]
        make = result_table if found["kind"] == "table" else verdict_table
        mark = found[0].split("\n", 1)[0]
        try:
            return f"{mark}\n\n{make(path, wanted)}"
        except PageError as error:
            raise PageError(f"{page}: {found['path']} {error}") from None

    return _MARK.sub(fill, text)


def result_table(path: Path, columns: list[str]) -> str:
    """The measured rows of a result in Markdown, each line ended.

    Args:
        path: of its JSON.
        columns: their keys; none = all.
    Raises:
        PageError: a column that it does not have.
    """
    table = read_table(path)
    by_key = {column.key: column for column in table.columns}
    for key in columns:
        if key not in by_key:
            raise PageError(f"has no column {key!r}; accepted: {', '.join(by_key)}")
    return page_table(with_columns(table, [by_key[key] for key in columns or by_key]))


def verdict_table(path: Path, ids: list[str]) -> str:
    """Claims and what we measured of them, from a file that the reports write.

    Args:
        path: of the file.
        ids: of the claims; none = all.
    Raises:
        PageError: a claim that it does not have.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| C")]
    rows = {line[2:].split(". ", 1)[0]: line.strip("| ").split(" | ") for line in lines}
    for key in ids:
        if key not in rows:
            raise PageError(f"has no claim {key!r}; accepted: {', '.join(rows)}")
    chosen = (rows[key] for key in ids or rows)
    return (
        "\n".join(["| claim | measured |", "|---|---|", *(f"| {claim} | {told} |" for claim, _, told in chosen)]) + "\n"
    )


def with_columns(table: Table, columns: list[Column]) -> Table:
    """The table with some of its columns, in the order given, and the rows that were measured in them."""
    keys = {column.key for column in columns}
    rows = [
        replace(
            row,
            paper={key: value for key, value in row.paper.items() if key in keys},
            ours={key: cell for key, cell in row.ours.items() if key in keys},
        )
        for row in table.rows
        if any(row.ours.get(key) for key in keys)
    ]
    return replace(table, columns=tuple(columns), rows=tuple(rows))


def page_table(table: Table) -> str:
    """A table in Markdown, each line ended."""
    lines = [line for group in lay_out(table, compact=True) for line in group]
    ordered = [line for kind in ("paper", "stand_in", "ours", "chance") for line in lines if line.kind == kind]
    printed = any(line.kind == "paper" for line in ordered)
    rows = [["", *(markdown_text(column.label) for column in table.columns)]]
    for line in ordered:
        if all(cell == DASH for cell in line.cells):
            continue
        cells = [markdown_text(cell) for cell in line.cells]
        method = markdown_text(line.method)
        if line.kind == "paper":
            rows.append([f"*paper, {method}*", *(f"*{cell}*" for cell in cells)])
        elif line.kind == "stand_in":
            rows.append(["*ours is measured on*", *(f"`{cell.split(' (')[0]}`" for cell in line.cells)])
        else:
            rows.append([f"ours, {method}" if printed and line.kind == "ours" else method, *cells])
    rule = "|" + "---|" * len(rows[0])
    head, *body = (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in rows)
    return "\n".join([head, rule, *body]) + "\n"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page differs")
    check = parser.parse_args().check
    differing = []

    def put(path: Path, new: str) -> None:
        if new != path.read_text(encoding="utf-8"):
            differing.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new, encoding="utf-8")

    for path, text in refreshed_claims(ROOT / "results").items():
        put(path, text)
    for page in PAGES:
        path = ROOT / page
        if path.is_file():
            try:
                put(path, filled(path.read_text(encoding="utf-8"), page))
            except PageError as error:
                sys.exit(f"error: {error}")
    done = "differs from the results" if check else "filled"
    print("\n".join(f"{page}: {done}" for page in differing) or "no change")
    sys.exit(check and bool(differing))


if __name__ == "__main__":
    main()
