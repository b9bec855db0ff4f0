"""From a table to lines of short texts, once for all formats.

A method takes up to three lines: "paper", "ours", and "ours - paper" where the two may be compared. A line belongs to
one source, so a number of the paper cannot stand in a line of ours whatever the format. Above the methods a line says
what each of our columns is measured on, below them a line gives the level of a guess.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.report.schema import MEASURED, PAPER_SCALE, SEEDS_INTERVAL, Column, Measured, Row, Table

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
        groups.append([Line("chance", "a guess would reach", "", chances)])
    return groups


def stand_in(table: Table, column: Column) -> str | None:
    """What our numbers in a column are measured on; None when it is what the paper's column says."""
    if column.stands_in_for is not None or table.scale == PAPER_SCALE:
        return column.stands_in_for
    cells = table.measured(column.key)
    return cells[0].data if cells else None


def warning(table: Table) -> str:
    """The sentence above a table whose two kinds of numbers must not be compared; empty at scale paper."""
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
        ("seeds", ", ".join(map(str, table.seeds))),
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
    pairs += [(row.method, row.note) for row in table.rows if row.note]
    pairs += [("note", note) for note in table.notes]
    return pairs + [("erratum of the printed table", erratum) for erratum in table.errata]


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
    return f"{number} seed" if number == 1 else f"{number} seeds"


def split_columns(lines: Sequence[Sequence[Line]], start: int, stop: int) -> list[list[Line]]:
    """The same groups of lines with the columns start..stop only."""
    return [[Line(x.kind, x.method, x.source, x.cells[start:stop], x.status) for x in group] for group in lines]


def _method_lines(table: Table, row: Row, with_seeds: bool) -> list[Line]:
    paper = tuple(format_paper(row.paper.get(column.key), column.unit) for column in table.columns)
    ours = [row.ours.get(column.key) for column in table.columns]
    named = table.scale != PAPER_SCALE and any(cell is not None for cell in ours)  # "ours, paper" would mislead
    source = f"ours, {table.scale}" if named else "ours"
    texts = tuple(format_measured(cell, column.unit, with_seeds) for cell, column in zip(ours, table.columns))
    has_paper = any(value is not None for other in table.rows for value in other.paper.values())
    lines = [Line("paper", row.method, "paper", paper)] if has_paper else []
    lines.append(Line("ours", row.method, source, texts, full_status(table, row)))
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
