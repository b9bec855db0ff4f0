"""Fills the result tables of the Markdown pages from the committed results, so that no number is copied by hand.

    python scripts/fill_pages.py            writes README.md, <paper>/README.md and results/<paper>/README.md
    python scripts/fill_pages.py --check    prints which file differs, and ends with status 1
    python scripts/fill_pages.py --plots    also redraws the plots of tables

First come the files beside the committed results: each table in Markdown, from its JSON, and the verdicts on all
claims, results/<paper>/claims.md.

A page holds, above each such table, a comment that names a result and, where not all are wanted, its columns by key:

    <!-- table: results/euclip/table4/demo/table4.json; columns: imagenet, retrieval -->

The table below it is replaced: rows of the paper for methods that were measured, our data, our numbers,
and the chance level. Conclusions, the sentences of a paper folder's conclusions.yaml (common/report/conclusions.py):

    <!-- conclusions: euclip -->

results/<paper>/README.md is made of the results alone: every part with its claims, tables and pictures.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser
from common.base.provenance import ROOT
from common.report.claims.expressions import EXPERIMENT, cells
from common.report.claims.read import Claim, load_claims, load_paper_tables
from common.report.claims.show import to_page
from common.report.conclusions import load_conclusions
from common.report.figures import plot_table
from common.report.formats import DASH, glossary, lay_out, line_below, markdown_text, remarks, to_markdown
from common.report.page import Entry, collect, collect_claims, deciding
from common.report.table import Column, Table, read_table, with_columns
from common.reproduce.command import trained_rows
from common.reproduce.parts import parts_of
from common.reproduce.rows import paper_tables, words_of_plot

PAPERS = ("oblique_topology", "geomm", "euclip", "contrastive_basics")
PAGES = ("README.md", *(f"{paper}/README.md" for paper in PAPERS))
_MARK = re.compile(
    r"<!-- (?P<kind>table|conclusions): (?P<path>\S+?)(?:; columns: (?P<wanted>[^>]*?))? -->\n"
    r"(?:\n?(?:(?:\||\d+\. |Ours: ).*\n)+)*"
)


class PageError(ValueError):
    """A page names a result or a column that does not exist."""


def filled(text: str, page: str) -> str:
    """A page with its tables as the results have them."""

    def fill(match: re.Match) -> str:
        path = ROOT / match["path"]
        mark = match[0].split("\n", 1)[0]
        if match["kind"] == "conclusions":
            return f"{mark}\n\n{conclusion_list(path)}"
        if not path.is_file():
            raise PageError(f"{page}: {match['path']}: no such result")
        wanted = [key.strip() for key in (match["wanted"] or "").split(",") if key.strip()]
        try:
            return f"{mark}\n\n{result_table(path, wanted)}"
        except PageError as error:
            raise PageError(f"{page}: {match['path']} {error}") from None

    return _MARK.sub(fill, text)


def result_table(path: Path, columns: list[str]) -> str:
    """The measured rows of a result in Markdown, each line ended."""
    table = read_table(path)
    by_key = {column.key: column for column in table.columns}
    for key in columns:
        if key not in by_key:
            raise PageError(f"has no column {key!r}; expected one of: {', '.join(by_key)}")
    return page_table(with_columns(table, [by_key[key] for key in columns or by_key]))


def conclusion_list(folder: Path, with_details: bool = False) -> str:
    """The conclusions of a paper folder as a numbered list, each in one line that is ended."""
    claims = "claims.md" if with_details else f"../results/{folder.name}/claims.md"  # as seen from the page

    def linked(match: re.Match) -> str:
        return f"[{match[0]}]({claims}#{match[0].lower()})"

    lines = []
    for number, conclusion in enumerate(load_conclusions(folder, ROOT / "results"), start=1):
        verdicts = re.sub(r"\bC\d[^,:]*", linked, conclusion.verdicts)
        evidence = "; ".join(filter(None, (verdicts, conclusion.measured)))
        details = conclusion.details if with_details else ""
        parts = (f"{number}. **{conclusion.short}**", conclusion.rest, details, evidence and f"*({evidence})*")
        lines.append(" ".join(filter(None, parts)) + "\n")
    return "".join(lines)


def results_page(paper: str) -> str:
    """results/<paper>/README.md: every part of the paper at every scale, from what lies there."""
    entries = [entry for entry in collect([ROOT / "results"]) if entry.table.paper == paper]
    parts = [
        f"# Results: {entries[0].table.paper_title}",
        "Made by `python scripts/fill_pages.py` from the JSON files beside this page. "
        f"[{paper}/README.md](../../{paper}/README.md) introduces the paper. A line of the paper is copied from it. A "
        "line of ours is a mean over seeds with its 95 % interval. Below paper scale ours are measured on other data "
        "than the paper's, named in the table, and reproduce none of its cells. A column keeps the paper's name: "
        "read it as what our data stand for. A scale with a hash is the same scale with other rows or settings, which "
        "its command names. All claims with their verdicts: [claims.md](claims.md).",
        "Models on `tf_efficientnet_lite0` or `all-MiniLM-L6-v2` are not new to some of these data: the former was "
        "trained with the labels of ImageNet, the latter on texts that contain captions of MSCOCO and Flickr30k.",
        f"## What we found\n\n{conclusion_list(ROOT / paper, with_details=True).rstrip()}",
    ]
    claims = load_claims(ROOT / paper / "claims.yaml", load_paper_tables(ROOT / paper / "paper_tables.yaml"))
    measured = defaultdict(set)  # part -> what claims can name of it
    for entry in entries:
        part = entry.path.parts[-3]
        measured[part] |= {part, entry.table.table_id, entry.table.experiment}
    seen = ""
    for folder, group in groupby(entries, lambda entry: entry.path.parent):
        of_folder = list(group)
        part, scale = folder.parts[-2:]
        if part != seen:
            ids = [claim.id for claim in claims if claim.refers_to(measured[part])]
            links = [f"[{name}](claims.md#{name.lower()})" for name in ids]
            parts += [f"## {part}", *([f"Claims: {', '.join(links)}."] if links else [])]
        seen = part
        parts.append(f"### Scale {scale}: `{of_folder[0].table.command}`")
        for entry in of_folder:
            pictures = (f"[{picture.path.stem}]({part}/{scale}/{picture.path.name})" for picture in entry.pictures)
            drawn = f" Drawn: {', '.join(pictures)}." if entry.pictures else ""
            known = with_columns(entry.table, [c for c in entry.table.columns if entry.table.measured(c.key)])
            parts += [f"{markdown_text(entry.table.caption)}{drawn}", page_table(known).rstrip()]
    return "\n\n".join(parts) + "\n"


def sources_of(paper: str, entries: Sequence[Entry]) -> Callable[[Claim, str], list[str]]:
    """(claim, scale of a verdict) -> Markdown: links to the committed results that decided it, and what runs again."""
    printed, parts, files = paper_tables(paper), parts_of(paper), defaultdict(dict)
    tables = deciding(entries)
    for entry in entries:
        table = entry.table
        if table.paper == paper and any(table is one for one in tables):
            file = entry.path.with_suffix(".md").relative_to(ROOT / "results" / paper)
            for name in filter(None, {table.table_id, table.experiment}):
                files[table.scale, name][file.as_posix()] = table.command

    def sources(claim: Claim, scale: str) -> list[str]:
        links, commands = {}, defaultdict(set)
        for cell in cells(*claim.measured, *claim.later):
            name = cell.row if cell.table == EXPERIMENT else cell.table
            committed = files.get((scale, name), {})
            links |= {path: f"[{path}]({path})" for path in committed}
            missing = [f"make reproduce-{name} PAPER={paper} SCALE={scale or 'demo'}"] if name in parts else []
            of_table = printed["tables"].get(cell.table, {})
            rows = [*of_table.get("rows", ()), *of_table.get("beyond", ())]
            (config,) = [row.get("config", "") for row in rows if row["method"] == cell.row] or [""]
            for command in committed.values() or missing:
                commands[command].add(Path(config).stem)
        again = [f"run: `{_of_rows(command, rows, printed)}`" for command, rows in commands.items()]
        return [*([f"results: {', '.join(links.values())}"] if links else []), *again]

    return sources


def _of_rows(command: str, rows: set[str], printed: dict) -> str:
    # the command for these rows only, if its part takes rows
    part, scale = re.search(r"reproduce-(\S+) .*SCALE=(\S+)", command).groups()
    known = trained_rows(printed, part, scale)
    if not rows < set(known) or " NEAR=1" in command:
        return command
    before, setting, after = re.sub(r' ROWS="[^"]*"', "", command).partition(" SET=")
    return f'{before} ROWS="{" ".join(row for row in known if row in rows)}"{setting}{after}'


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
            names = (
                f"`{cell.split(' (')[0]}`{_size(table, column)}" for cell, column in zip(line.cells, table.columns)
            )
            rows.append([f"*{line.method}*", *names])
        else:
            rows.append([f"ours, {method}" if printed and line.kind == "ours" else method, *cells])
    rule = "|" + "---|" * len(rows[0])
    head, *body = (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in rows)
    legend = [pair for pair in glossary(table) if pair[0] in ("±", "[low, high]", "no interval", "units")]
    legend += [pair for pair in remarks(table) if pair[0] == "settings"]
    words = f"{line_below(table)} {'; '.join(f'{term}: {text}' for term, text in legend)}."
    below = f"\n{markdown_text(words)}\n" if line_below(table) else ""
    return "\n".join([head, rule, *body]) + "\n" + below


def _size(table: Table, column: Column) -> str:
    # ", 4,000 pictures of 200 classes", where the protocol has these counts
    protocols = [cell.protocol for cell in table.measured(column.key)][:1]
    counts = {key: int(number) for text in protocols for key, number in re.findall(r"num_(\w+) (\d+)", text)}
    pictures = f", {counts['images']:,} pictures" if "images" in counts else ""
    return pictures + (f" of {counts['classes']:,} classes" if pictures and "classes" in counts else "")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page differs")
    parser.add_argument("--plots", action="store_true", help="also redraw the plots of tables")
    given = parser.parse_args()
    check, differing = given.check, []

    def put(path: Path, new: str) -> None:
        if not path.is_file() or new != path.read_text(encoding="utf-8"):
            differing.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new, encoding="utf-8")

    entries = collect([ROOT / "results"])
    for claims in collect_claims(entries, ROOT):
        page = to_page(claims, sources_of(claims.paper, entries))
        put(ROOT / "results" / claims.paper / "claims.md", page)
    for entry in entries:
        put(entry.path.with_suffix(".md"), to_markdown(entry.table))
        if given.plots and (picture := entry.path.with_suffix(".png")).is_file():
            plot_table(entry.table, picture, **words_of_plot(entry.table.paper, entry.table.table_id))
    try:
        for page in PAGES:
            path = ROOT / page
            if path.is_file():
                put(path, filled(path.read_text(encoding="utf-8"), page))
        for paper in PAPERS:
            if (ROOT / "results" / paper).is_dir():
                put(ROOT / "results" / paper / "README.md", results_page(paper))
    except ValueError as error:  # PageError is one
        sys.exit(f"error: {error}")
    done = "differs from the results" if check else "filled"
    print("\n".join(f"{page}: {done}" for page in differing) or "no change")
    sys.exit(check and bool(differing))


if __name__ == "__main__":
    main()
