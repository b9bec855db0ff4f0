"""How a table is written: Markdown, CSV, LaTeX, terminal text; the HTML page and the READMEs take the same lines.

`lay_out` turns a table into lines of short texts, once for all formats. A method takes up to three lines: "paper",
"ours", and "ours - paper" where the two may be compared. A line belongs to one source, so a number of the paper cannot
stand in a line of ours whatever the format. Above the methods a line says what each of our columns is measured on,
below them a line gives the level of a guess.
"""

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from pathlib import Path

from common.base.files import write_atomically
from common.report.table import (
    MEASURED,
    PAPER_SCALE,
    SEEDS_INTERVAL,
    Column,
    Measured,
    Row,
    Table,
    to_json,
)

DASH = "—"
_GLOSSARY = (
    (r"R@\d|_r\d|recall_at", "R@K", "share of queries with a correct match among the K best candidates"),
    (r"i2t", "i2t", "image query, captions ranked (any caption of the image counts)"),
    (r"t2i", "t2i", "caption query, images ranked"),
    (r"R@.*mean|mean.*R@", "mean", "mean of R@1, R@5 and R@10 over both directions (six values)"),
    (r"acc|top-?1", "acc", "share of pictures whose most similar class is the right one (top 1)"),
    (r"probe", "linear probe", "accuracy of a linear classifier on frozen image features"),
)


@dataclass(frozen=True)
class Line:
    """One printed line: `kind` is "stand_in", "paper", "ours", "difference" or "chance"; `cells` follow the columns."""

    kind: str
    method: str
    source: str
    cells: tuple[str, ...]
    status: str = ""


def lay_out(table: Table, compact: bool = False) -> list[list[Line]]:
    """Groups of lines: what ours is measured on (where needed), one group per method, chance (where known).

    `compact` leaves the number of seeds out of the cells where all share it; `reading` says it once instead.
    """
    with_seeds = not compact or _shared_seeds(table) is None
    groups = []
    stand_ins = tuple(stand_in(table, column) or DASH for column in table.columns)
    if any(cell != DASH for cell in stand_ins):
        groups.append([Line("stand_in", "ours is measured on", "", stand_ins)])
    groups += [_method_lines(table, row, with_seeds) for row in table.rows]
    chances = tuple(_chance(table, column) for column in table.columns)
    if any(cell != DASH for cell in chances):
        guess = " or ".join(dict.fromkeys(column.guess for column in table.columns))
        groups.append([Line("chance", f"{guess} would reach", "", chances)])
    return groups


def stand_in(table: Table, column: Column) -> str | None:
    """What our numbers in a column are measured on; None when it is what the paper's column says."""
    if column.stands_in_for is not None or table.scale == PAPER_SCALE:
        return column.stands_in_for
    cells = table.measured(column.key)
    return cells[0].data if cells else None


def panel_label(table: Table, column: Column) -> str:
    """What a column was measured on, before the data of the paper that these stand in for; its label where none do."""
    source = named(stand_in(table, column) or "")
    if column.stands_in_for is not None and any(row.paper.get(column.key) is not None for row in table.rows):
        return f"{source}, standing in for {column.label}"
    return f"{column.label}, on {source}" if source else column.label


def heading(paper: str, table_id: str, scale: str, command: str = "") -> str:
    """Paper, table and scale, and of a changed one the rows and settings that its command names."""
    said = re.findall(r'\b(?:ROWS|SET)=(?:"[^"]*"|\S+)', command)
    return ", ".join([paper, table_id, f"scale {scale}", *said])


def line_below(table: Table) -> str:
    """What stands under every table of ours: models, data and seeds in one line; empty where nothing was measured."""
    if not any(table.measured(column.key) for column in table.columns):
        return ""
    seeds = f"{seeds_name(table.seeds)} {', '.join(map(str, table.seeds))}"
    parts = [table.models, f"on {named(table.data)}" if table.data else "", seeds]
    return f"Ours: {'; '.join(filter(None, parts))}."


def named(data: str) -> str:
    """Names of data without their fingerprints."""
    return re.sub(r" \([0-9a-f]{8}(, [0-9a-f]{8})*\)", "", data)


def warning(table: Table) -> str:
    """The sentence above a table whose two kinds of numbers must not be compared; else empty."""
    if all(value is None for row in table.rows for value in row.paper.values()):
        return ""
    if table.scale != PAPER_SCALE:
        return (
            f"Scale {table.scale}: our numbers are measured on other data than the paper's (named in the first line of "
            "the table). They reproduce no cell of the paper, and no difference is printed."
        )
    if any(column.stands_in_for is not None for column in table.columns):
        return "Columns with a stand-in (first line of the table) do not reproduce the paper's column: no difference."
    return ""


def provenance(table: Table) -> list[tuple[str, str]]:
    """Pairs of label and text: which paper and table, and what was run."""
    pairs = [
        ("paper", f"{table.paper_title} ({table.paper}, {table.paper_version})"),
        ("table", table.table_id),
        ("scale", table.scale),
        ("data", table.data),
        (seeds_name(table.seeds), ", ".join(map(str, table.seeds))),
        ("git revision", table.git_revision),
        ("command", table.command),
        ("created", table.created),
        ("hardware", table.hardware),
    ]
    return [(label, text or DASH) for label, text in pairs]


def full_status(table: Table, row: Row) -> str:
    """The status of a row, and how many of the columns it holds for when some are missing."""
    count = sum(row.ours.get(column.key) is not None for column in table.columns)
    partly = row.status == MEASURED and count < len(table.columns)
    return f"measured in {count} of {len(table.columns)} columns" if partly else row.status


def remarks(table: Table, with_status: bool = False) -> list[tuple[str, str]]:
    """Pairs of label and text that stand below a table: notes on rows, on the table, and errata of the printed one.

    `with_status` adds the status of rows that are measured in part, for formats that print no status beside numbers.
    """
    statuses = [(row.method, full_status(table, row)) for row in table.rows if any(row.ours.values())]
    pairs = [(method, status) for method, status in statuses if with_status and status != MEASURED]
    pairs += _notes_on_rows(table)
    pairs += [("note", note) for note in table.notes]
    return pairs + [("erratum of the printed table", erratum) for erratum in table.errata]


def _notes_on_rows(table: Table) -> list[tuple[str, str]]:
    """Pairs of row and its note; what the notes of all measured rows begin with is told once, before them."""
    rows = [row for row in table.rows if any(row.ours.values()) or row.note]
    notes = [re.split(r"; (?![^(]*\))", row.note) for row in rows]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*notes))
    shared = [parts[0] for parts in alike] if len(rows) > 1 else []
    labels = ["all measured rows", *(row.method for row in rows)]
    texts = ["; ".join(shared).removeprefix("ours: "), *("; ".join(note[len(shared) :]) for note in notes)]
    return [(label, text) for label, text in zip(labels, texts) if text]


def glossary(table: Table) -> list[tuple[str, str]]:
    """Pairs of term and meaning, only for what the table shows."""
    labels = " ".join(f"{column.key} {column.label}" for column in table.columns)
    pairs = [(term, meaning) for pattern, term, meaning in _GLOSSARY if re.search(pattern, labels)]
    pairs += _interval_kinds(table)
    lower = [column.label for column in table.columns if column.better == "lower"]
    if lower:
        pairs.append(("lower is better", ", ".join(lower)))
    units = {column.unit for column in table.columns}
    if units & {"percent", "fraction"}:
        pairs.append(
            ("units", "; ".join(f"{c.label}: {c.unit}" for c in table.columns) if len(units) > 1 else "percent")
        )
    return [*pairs, (DASH, "no number; the status says why")]


def reading(table: Table) -> str:
    """How to read a line of ours in the compact layout, in one sentence; empty when nothing was measured."""
    shared = _shared_seeds(table)
    if not any(table.measured(column.key) for column in table.columns):
        return ""
    parts = [f"{sign} is the {meaning}" for sign, meaning in _interval_kinds(table)]
    start = "mean over seeds" if shared is None else f"mean of {shared} seeds" if shared > 1 else "1 seed"
    return "; ".join([f"Ours: {start}", *parts]) + "."


def format_value(value: float, unit: str) -> str:
    """A number of ours: one decimal for percent, three for a fraction, else four significant digits."""
    return f"{value:.1f}" if unit == "percent" else f"{value:.3f}" if unit == "fraction" else f"{value:.4g}"


def format_paper(value: float | None, unit: str) -> str:
    """A number of the paper with the digits that the paper printed, and at least one decimal for percent."""
    if value is None:
        return DASH
    digits = f"{value:.6g}"
    return f"{value:.1f}" if unit == "percent" and "." not in digits and "e" not in digits else digits


def format_measured(cell: Measured | None, unit: str, with_seeds: bool = True) -> str:
    """Mean +- half-width over seeds, or mean [low, high] over queries; a dash when there is no number.

    A mean that is neither percent nor fraction has the decimals that its half-width allows.
    """
    if cell is None:
        return DASH
    text = format_value(cell.mean, unit)
    if cell.interval is not None and _symmetric(cell):
        half = (cell.interval[1] - cell.interval[0]) / 2
        decimals = None if unit in ("percent", "fraction") else _decimals(cell.mean, half)
        if decimals is None:
            text += f" ± {format_value(half, unit)}"
        else:
            text = f"{cell.mean:.{decimals}f} ± {half:.{decimals}f}"
    elif cell.interval is not None:
        text += f" [{format_value(cell.interval[0], unit)}, {format_value(cell.interval[1], unit)}]"
    return f"{text} ({count_seeds(len(cell.seeds))})" if with_seeds and not _over_queries(cell) else text


def _decimals(mean: float, half: float) -> int | None:
    """Decimals of a mean and its half-width: two digits of the latter, four of the former at most; None = neither."""
    if not 1e-4 <= abs(mean) < 1e4:
        return None
    of_mean = 3 - math.floor(math.log10(abs(mean)) + 1e-6)  # 0.09999999 is 0.1
    of_half = 1 - math.floor(math.log10(max(half, 1e-12)))
    return max(0, min(of_mean, of_half))


def count_seeds(number: int) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{number} {seeds_name(range(number))}"


def seeds_name(seeds: Sequence[int]) -> str:
    """What stands before so many seeds."""
    return "seed" if len(seeds) == 1 else "seeds"


def _split_columns(groups: Sequence[Sequence[Line]], start: int, stop: int) -> list[list[Line]]:
    """The same groups of lines with the columns start..stop only."""
    return [[replace(line, cells=line.cells[start:stop]) for line in group] for group in groups]


def _method_lines(table: Table, row: Row, with_seeds: bool) -> list[Line]:
    paper = tuple(format_paper(row.paper.get(column.key), column.unit) for column in table.columns)
    ours = [row.ours.get(column.key) for column in table.columns]
    named = table.scale != PAPER_SCALE and any(cell is not None for cell in ours)  # "ours, paper" would mislead
    source = f"ours, {table.scale}" if named else "ours"
    texts = tuple(format_measured(cell, column.unit, with_seeds) for cell, column in zip(ours, table.columns))
    has_paper = any(value is not None for other in table.rows for value in other.paper.values())
    lines = [Line("paper", row.method, "paper", paper)] if has_paper else []
    lines.append(Line("ours", row.ran or row.method, source, texts, full_status(table, row)))
    differences = tuple(_difference(table, row, column) for column in table.columns)
    if any(cell != DASH for cell in differences):
        lines.append(Line("difference", row.method, "ours − paper", differences))
    return lines


def _difference(table: Table, row: Row, column: Column) -> str:
    ours, paper = row.ours.get(column.key), row.paper.get(column.key)
    comparable = table.scale == PAPER_SCALE and column.stands_in_for is None
    if ours is None or paper is None or not comparable:
        return DASH
    text = format_value(ours.mean - paper, column.unit)
    return text if text.startswith("-") else f"+{text}"


def _chance(table: Table, column: Column) -> str:
    levels = [cell.chance for cell in table.measured(column.key) if cell.chance is not None]
    if not levels:
        return DASH
    low, high = format_value(min(levels), column.unit), format_value(max(levels), column.unit)
    return low if low == high else f"{low} to {high}"


def _interval_kinds(table: Table) -> list[tuple[str, str]]:
    cells = [cell for column in table.columns for cell in table.measured(column.key) if cell.interval is not None]
    signs = dict.fromkeys(("±" if _symmetric(cell) else "[low, high]", cell.interval_kind) for cell in cells)
    return [(sign, f"half-width, {kind}" if sign == "±" else f"interval, {kind}") for sign, kind in signs]


def _over_queries(cell: Measured) -> bool:
    return cell.interval is not None and "queries" in cell.interval_kind and len(cell.seeds) == 1


def _symmetric(cell: Measured) -> bool:
    return cell.interval_kind == SEEDS_INTERVAL


def _shared_seeds(table: Table) -> int | None:
    numbers = {len(cell.seeds) for row in table.rows for cell in row.ours.values() if cell is not None}
    return numbers.pop() if len(numbers) == 1 else None


_LATEX_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "−": "$-$", "—": "---", "²": "$^2$", "³": "$^3$", "°": r"$^\circ$",
    "×": r"$\times$", "·": r"$\cdot$", "→": r"$\to$", "≤": r"$\leq$", "≥": r"$\geq$", "√": r"$\surd$",
    "β": r"$\beta$", "λ": r"$\lambda$", "τ": r"$\tau$", "π": r"$\pi$", "\n": " ", "\r": " ",
}  # fmt: skip
_CSV_HEADER = [
    "paper", "paper_version", "table", "scale", "column", "label", "unit", "better", "method", "status", "paper_number",
    "ours_mean", "ours_low", "ours_high", "interval_kind", "ours_values", "seeds", "chance", "stands_in_for", "data",
    "protocol", "git_revision", "created",
]  # fmt: skip
_LATEX_COLUMNS = 5  # per block; one less with "[low, high]" in the cells
_LATEX_RULE = r"\hline\noalign{\smallskip}"
_TEXT_COLUMN, _TEXT_METHOD = 11, 22  # preferred widths in the terminal


FORMATS = {"csv": "csv", "latex": "tex"}  # on request -> ending


def write_table(table: Table, folder: str | Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write `<table_id>.md` and `.json`, and the `FORMATS` asked for, into `folder` (made if missing), atomically."""
    folder = Path(folder)
    writers = {"md": to_markdown, "json": to_json, "csv": to_csv, "tex": to_latex}
    for name, ending in FORMATS.items():
        if name not in formats:
            del writers[ending]
            (folder / f"{table.table_id}.{ending}").unlink(missing_ok=True)  # of an earlier run
    contents = {ending: write(table) for ending, write in writers.items()}  # before the first file is touched
    return [write_atomically(folder / f"{table.table_id}.{ending}", text) for ending, text in contents.items()]


def to_markdown(table: Table) -> str:
    """GitHub Markdown, readable as plain text too: columns are padded, a method has one line per source."""
    code = ("git revision", "command")
    run = [f"{label}: {_code(text) if label in code else markdown_text(text)}" for label, text in provenance(table)]
    grid = [["method", "source", *(markdown_text(column.label) for column in table.columns), "status"]]
    for group in lay_out(table):
        for place, line in enumerate(group):
            method = f"*{line.method}*" if line.kind in ("stand_in", "chance") else markdown_text(line.method)
            cells = [line.source, *map(markdown_text, line.cells), markdown_text(line.status)]
            grid.append(["" if place and line.method == group[0].method else method, *cells])
    widths = [max(3, *map(len, column)) for column in zip(*grid)]
    left = [index in (0, 1, len(widths) - 1) for index in range(len(widths))]
    grid.insert(1, ["-" * width if at_left else "-" * (width - 1) + ":" for width, at_left in zip(widths, left)])
    padded = ([c.ljust(w) if at_left else c.rjust(w) for c, w, at_left in zip(row, widths, left)] for row in grid)
    parts = [f"## {markdown_text(table.table_id)}: {markdown_text(table.caption)}", "; ".join(run) + "."]
    parts += [f"**{markdown_text(warning(table))}**"] if warning(table) else []
    parts += ["\n".join(f"| {' | '.join(row)} |" for row in padded), markdown_text(line_below(table))]
    parts += ["\n".join(f"- {markdown_text(label)}: {markdown_text(text)}" for label, text in remarks(table))]
    parts += ["; ".join(f"{markdown_text(term)}: {markdown_text(text)}" for term, text in glossary(table)) + "."]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_csv(table: Table) -> str:
    """Tidy CSV, one line per method and column; `paper_number` and `ours_mean` are separate fields, empty if unknown.

    Numbers are written in full; `ours_values` and `seeds` hold one entry per seed, separated by semicolons.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    for row in table.rows:
        for column in table.columns:
            cell, paper = row.ours.get(column.key), row.paper.get(column.key)
            ours, measured_on = ("",) * 7, ("", "")
            if cell is not None:
                values, seeds = (";".join(map(str, numbers)) for numbers in (cell.values, cell.seeds))
                ours = (cell.mean, *(cell.interval or (None, None)), cell.interval_kind, values, seeds, cell.chance)
                measured_on = (cell.data, cell.protocol)
            writer.writerow([
                table.paper, table.paper_version, table.table_id, table.scale, column.key, column.label, column.unit,
                column.better, row.method, row.status, paper, *ours, stand_in(table, column), *measured_on,
                table.git_revision, table.created,
            ])  # fmt: skip
    return stream.getvalue()


def to_latex(table: Table) -> str:
    """A `table*` float that needs no package; wide tables are stacked in blocks of four or five columns."""
    groups = lay_out(table, compact=True)
    brackets = any("[" in cell for group in groups for line in group if line.kind == "ours" for cell in line.cells)
    per_block = _LATEX_COLUMNS - 1 if brackets else _LATEX_COLUMNS
    lines = [r"\begin{table*}", r"\centering\scriptsize\setlength{\tabcolsep}{3pt}"]
    for start in range(0, len(table.columns), per_block):
        columns = table.columns[start : start + per_block]
        head = ["method", "source", *(_latex_stacked(column.label) for column in columns)]
        lines += [r"\begin{tabular}{p{0.2\textwidth}l" + "r" * len(columns) + "}", _LATEX_RULE]
        lines += [" & ".join(head) + r" \\", _LATEX_RULE]
        for group in _split_columns(groups, start, start + len(columns)):
            lines += [*_latex_group(group), _LATEX_RULE]
        lines += [r"\end{tabular}", r"\par\smallskip"]
    facts, terms = ("; ".join(f"{a}: {b}" for a, b in pairs) + "." for pairs in (provenance(table), glossary(table)))
    told = (table.caption, warning(table), reading(table), line_below(table), facts, terms)
    caption = " ".join(part for part in told if part)
    lines += [f"\\caption{{{_latex(caption)}}}", f"\\label{{tab:{re.sub('[^A-Za-z0-9-]', '-', table.table_id)}}}"]
    lines += [r"\end{table*}"]
    lines += [f"% {_one_line(label)}: {_one_line(text)}" for label, text in remarks(table, with_status=True)]
    return "\n".join(lines) + "\n"


def to_text(table: Table, width: int = 100) -> str:
    """For a terminal of `width` characters; a table that is too wide continues in further blocks of columns."""
    facts = dict(provenance(table))
    run = [f"{name} {text}" for name, text in facts.items() if name not in ("paper", "table", "command")]
    head = [f"{table.table_id} of {facts['paper']}", table.caption, " | ".join(run), f"command: {facts['command']}"]
    out = [_filled(text, width) for text in [*head, warning(table), reading(table)] if text]
    # the labels are a line like others
    labels = Line("label", "method", "", tuple(column.label for column in table.columns))
    groups = [[labels], *lay_out(table, compact=True)]
    lines = [line for group in groups for line in group]
    method_width = min(_TEXT_METHOD, max(len(line.method) for line in lines))
    source_width = max(len(line.source) for line in lines)
    widths = [max(len(text) for stack in column for text in stack) for column in zip(*map(_stacked, lines))]
    for start, stop in _blocks(widths, width - method_width - source_width - 2):
        block = _split_columns(groups, start, stop)
        out += ["", *_text_block(block, method_width, source_width, widths[start:stop], width)]
    out += ["", *([_filled(line_below(table), width)] if line_below(table) else [])]
    out += [_filled(f"{label}: {text}", width) for label, text in remarks(table, with_status=True)]
    return "\n".join([*out, _filled("; ".join(f"{t}: {m}" for t, m in glossary(table)), width)]) + "\n"


def _stacked(line: Line) -> list[list[str]]:
    """Each cell as a stack of short texts: [low, high] below its mean, words in a narrow column."""
    if line.kind in ("label", "stand_in"):
        return [_wrapped(cell, _TEXT_COLUMN) for cell in line.cells]
    return [cell.replace(" [", "\n[").split("\n") for cell in line.cells]


def _blocks(widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Ranges of columns that fit into `room`, as few as possible and of even size; one column at least."""
    for number in range(1, len(widths) + 1):
        size = -(-len(widths) // number)
        ranges = [(start, min(start + size, len(widths))) for start in range(0, len(widths), size)]
        if size == 1 or all(sum(widths[a:b]) + 2 * (b - a) <= room for a, b in ranges):
            break
    return ranges


def _text_block(
    groups: Sequence[Sequence[Line]], method_width: int, source_width: int, widths: Sequence[int], width: int
) -> Iterator[str]:
    total = min(width, method_width + source_width + 2 + sum(widths) + 2 * len(widths))
    for number, group in enumerate(groups):
        printed = []
        for line in group:
            if _nothing(line):
                room = max(10, width - method_width - source_width - 6)
                texts = [f"    {part}" for part in _wrapped(f"{DASH} {line.status}", room)]
            else:
                levels = zip_longest(*_stacked(line), fillvalue="")
                texts = ["".join(f"  {text:>{size}}" for text, size in zip(level, widths)) for level in levels]
            sources = zip_longest([line.source], texts, fillvalue="")
            printed += [f"{source:<{source_width}}{text}" for source, text in sources]
        methods = [
            part for method in dict.fromkeys(line.method for line in group) for part in _wrapped(method, method_width)
        ]
        for method, text in zip_longest(methods, printed, fillvalue=""):
            yield f"{method:<{method_width}}  {text}".rstrip()
        yield "-" * total if number in (0, len(groups) - 1) or len(group) > 1 else ""


def _nothing(line: Line) -> bool:
    """Whether a line of ours has no number; its status says why."""
    return line.kind == "ours" and all(cell == DASH for cell in line.cells)


def _latex_group(group: Sequence[Line]) -> list[str]:
    rows = []
    for place, line in enumerate(group):
        if _nothing(line):
            cells = [f"\\multicolumn{{{len(line.cells)}}}{{l}}{{{_latex(f'{DASH} {line.status}')}}}"]
        else:
            cells = [_latex_stacked(cell) if line.kind == "stand_in" else _latex(cell) for cell in line.cells]
        method = "" if place and line.method == group[0].method else _latex(line.method)
        rows.append(" & ".join([method, _latex(line.source), *cells]) + r" \\")
    return rows


def _latex_stacked(text: str) -> str:
    # After a line break LaTeX takes a leading "[" or "*" for an argument of the break; an empty group prevents that.
    lines = [_latex(line) for line in _wrapped(text, _TEXT_COLUMN)]
    lines = ["{}" + line if line[:1] in ("[", "*") else line for line in lines]
    return lines[0] if len(lines) == 1 else r"\shortstack[r]{" + r" \\ ".join(lines) + "}"


def _latex(text: str) -> str:
    return "".join(_LATEX_SIGNS.get(sign, sign) for sign in text)


def markdown_text(text: str) -> str:
    """One line of plain text that GitHub Markdown shows as it is, also within a table."""
    text = _one_line(text).replace("\\", "\\\\").replace("<", "&lt;")
    text = re.sub(r"&(?!lt;)(?=#?\w+;)", "&amp;", text)
    text = re.sub(r"([|*`$]|~~|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return text.replace("](", "]\\(")


def _code(text: str) -> str:
    text = _one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _filled(text: str, width: int) -> str:
    return textwrap.fill(_one_line(text), width, subsequent_indent="  ")


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken at blanks and after '/', ',' and '_' where possible."""
    lines, line = [], ""
    for piece in re.findall(r"[^\s/,_]+[/,_]*\s*|[/,_]+\s*|\s+", text):
        while len(line) + len(piece.rstrip()) > width:
            if line.strip():
                lines.append(line.rstrip())
                line = ""
            else:
                lines.append(piece[:width])
                piece = piece[width:]
        line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines
