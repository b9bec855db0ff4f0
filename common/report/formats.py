"""A table as Markdown, CSV, LaTeX and terminal text. HTML is in `page.py`, JSON in `schema.py`."""

import csv
import io
import re
import textwrap
from collections.abc import Sequence

from common.report.layout import (
    DASH,
    Line,
    glossary,
    lay_out,
    provenance,
    reading,
    remarks,
    split_columns,
    stand_in,
    warning,
)
from common.report.schema import Table

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


def to_markdown(table: Table) -> str:
    """GitHub Markdown, readable as plain text too: columns are padded, a method has one line per source."""
    facts = dict(provenance(table))
    code = ("git revision", "command")
    run = [f"{label}: {_code(text) if label in code else markdown_text(text)}" for label, text in facts.items()]
    header = ["method", "source", *(markdown_text(column.label) for column in table.columns), "status"]
    grid = []
    for group in lay_out(table):
        for place, line in enumerate(group):
            method = f"*{line.method}*" if line.kind in ("stand_in", "chance") else markdown_text(line.method)
            grid.append(
                [method if place == 0 else "", line.source, *map(markdown_text, line.cells), markdown_text(line.status)]
            )
    widths = [max(3, *(len(cells[index]) for cells in [header, *grid])) for index in range(len(header))]
    left = (0, 1, len(header) - 1)
    rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    body = [_padded(cells, widths, left) for cells in (header, rule, *grid)]
    parts = [f"## {markdown_text(table.table_id)}: {markdown_text(table.caption)}", "; ".join(run) + "."]
    parts += [f"**{markdown_text(warning(table))}**"] if warning(table) else []
    parts.append("\n".join(body))
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
            low, high = (None, None) if cell is None or cell.interval is None else cell.interval
            ours = ("", "", "", "", "", "", "", "", "")
            if cell is not None:
                values, seeds = (";".join(map(str, numbers)) for numbers in (cell.values, cell.seeds))
                ours = (cell.mean, low, high, cell.interval_kind, values, seeds, cell.chance, cell.data, cell.protocol)
            writer.writerow([
                table.paper, table.paper_version, table.table_id, table.scale, column.key, column.label, column.unit,
                column.better, row.method, row.status, paper, *ours[:7], stand_in(table, column), *ours[7:],
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
        lines += [r"\begin{tabular}{p{0.2\textwidth}l" + "r" * len(columns) + "}", _LATEX_RULE]
        lines += [
            " & ".join(["method", "source", *(_latex_stacked(column.label) for column in columns)]) + r" \\",
            _LATEX_RULE,
        ]
        for group in split_columns(groups, start, start + len(columns)):
            lines += [*_latex_group(group), _LATEX_RULE]
        lines += [r"\end{tabular}", r"\par\smallskip"]
    facts = "; ".join(f"{label}: {text}" for label, text in provenance(table))
    terms = "; ".join(f"{term}: {text}" for term, text in glossary(table))
    caption = " ".join(
        part for part in (table.caption, warning(table), reading(table), f"{facts}.", f"{terms}.") if part
    )
    lines += [f"\\caption{{{_latex(caption)}}}", f"\\label{{tab:{re.sub('[^A-Za-z0-9-]', '-', table.table_id)}}}"]
    lines += [r"\end{table*}"]
    lines += [f"% {_one_line(label)}: {_one_line(text)}" for label, text in remarks(table, with_status=True)]
    return "\n".join(lines) + "\n"


def to_text(table: Table, width: int = 100) -> str:
    """For a terminal of `width` characters; a table that is too wide continues in further blocks of columns."""
    facts = dict(provenance(table))
    run = [f"{name} {facts[name]}" for name in ("scale", "data", "seeds", "git revision", "created", "hardware")]
    head = [f"{table.table_id} of {facts['paper']}", table.caption, " | ".join(run), f"command: {facts['command']}"]
    out = [_filled(text, width) for text in [*head, warning(table), reading(table)] if text]
    groups = lay_out(table, compact=True)
    names = [line.method for group in groups for line in group] + ["method"]
    method_width = min(_TEXT_METHOD, max(map(len, names)))
    source_width = max(len(line.source) for group in groups for line in group) if groups else 0
    room = width - method_width - source_width - 2
    widths = [_text_column_width(table.columns[i].label, i, groups) for i in range(len(table.columns))]
    for start, stop in _blocks(widths, room):
        labels = Line("label", "method", "", tuple(column.label for column in table.columns[start:stop]))
        rows = [[labels], *split_columns(groups, start, stop)]
        out += ["", *_text_block(rows, method_width, source_width, widths[start:stop], width)]
    remarked = [_filled(f"{label}: {text}", width) for label, text in remarks(table, with_status=True)]
    return "\n".join([*out, "", *remarked, _filled("; ".join(f"{t}: {m}" for t, m in glossary(table)), width)]) + "\n"


def _padded(cells: Sequence[str], widths: Sequence[int], left: Sequence[int]) -> str:
    padded = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
    return "| " + " | ".join(padded) + " |"


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


def _latex(text: str) -> str:
    return "".join(_LATEX_SIGNS.get(sign, sign) for sign in text)


def _latex_group(group: Sequence[Line]) -> list[str]:
    rows = []
    for place, line in enumerate(group):
        start = [_latex(line.method) if place == 0 else "", _latex(line.source)]
        if line.kind == "ours" and all(cell == DASH for cell in line.cells):
            cells = [f"\\multicolumn{{{len(line.cells)}}}{{l}}{{{_latex(f'{DASH} {line.status}')}}}"]
        else:
            cells = [_latex_stacked(cell) if line.kind == "stand_in" else _latex(cell) for cell in line.cells]
        rows.append(" & ".join([*start, *cells]) + r" \\")
    return rows


def _latex_stacked(text: str) -> str:
    # After a line break LaTeX takes a leading "[" or "*" for an argument of the break; an empty group prevents that.
    lines = [_latex(line) for line in _wrapped(text, _TEXT_COLUMN)]
    lines = ["{}" + line if line[:1] in ("[", "*") else line for line in lines]
    return lines[0] if len(lines) == 1 else r"\shortstack[r]{" + r" \\ ".join(lines) + "}"


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


def _text_column_width(label: str, index: int, groups: Sequence[Sequence[Line]]) -> int:
    lines = [line for group in groups for line in group]
    parts = (part for line in lines if line.kind != "stand_in" for part in _stacked_interval(line.cells[index]))
    numbers = max(map(len, parts), default=1)
    words = [label, *(line.cells[index] for line in lines if line.kind == "stand_in")]
    return max(numbers, min(_TEXT_COLUMN, max(map(len, words))))


def _stacked_interval(cell: str) -> list[str]:
    """The mean above its [low, high], which would make columns too wide for a terminal side by side."""
    mean, bracket, interval = cell.partition(" [")
    return [mean, f"[{interval}"] if bracket else [cell]


def _blocks(widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Ranges of columns that fit into `room`, as few as possible and of even size; one column at least."""
    for number in range(1, len(widths) + 1):
        size = -(-len(widths) // number)
        ranges = [(start, min(start + size, len(widths))) for start in range(0, len(widths), size)]
        if all(sum(widths[a:b]) + 2 * (b - a) <= room for a, b in ranges):
            return ranges
    return [(index, index + 1) for index in range(len(widths))]


def _text_block(rows, method_width: int, source_width: int, widths: Sequence[int], width: int) -> list[str]:
    total = min(width, method_width + source_width + 2 + sum(widths) + 2 * len(widths))
    out = []
    for number, group in enumerate(rows):
        methods = _wrapped(group[0].method, method_width)
        printed = []
        for line in group:
            if line.kind == "ours" and all(cell == DASH for cell in line.cells):
                room = max(10, width - method_width - source_width - 6)
                printed += [(line.source if i == 0 else "", f"    {part}")
                            for i, part in enumerate(_wrapped(f"{DASH} {line.status}", room))]  # fmt: skip
                continue
            texts = zip(line.cells, widths)
            cells = [_stacked_interval(cell) if line.kind == "ours" else _wrapped(cell, size) for cell, size in texts]
            for level in range(max(map(len, cells))):
                texts = [c[level] if level < len(c) else "" for c in cells]
                joined = "".join(f"  {text:>{size}}" for text, size in zip(texts, widths))
                printed.append((line.source if level == 0 else "", joined))
        for level in range(max(len(methods), len(printed))):
            method = methods[level] if level < len(methods) else ""
            source, cells = printed[level] if level < len(printed) else ("", "")
            out.append(f"{method:<{method_width}}  {source:<{source_width}}{cells}".rstrip())
        out.append("-" * total if number in (0, len(rows) - 1) or len(group) > 1 else "")
    return out
