"""How a table is written: Markdown, CSV, LaTeX, terminal text; the HTML page and the READMEs take the same lines.

`lay_out` turns a table into lines of short texts, once for all formats. A method takes up to three lines: "paper",
"ours", and "ours - paper" where the two may be compared. A line belongs to one source, so no format can print a number
of the paper in a line of ours.
"""

import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile, zip_longest
from pathlib import Path

from common.base.files import write_atomically
from common.report.hits import packed
from common.report.table import (
    CROSSED_INTERVAL,
    MEASURED,
    PAPER_SCALE,
    SEEDS_INTERVAL,
    Column,
    Measured,
    Row,
    Table,
    hits_of,
    to_json,
)

DASH = "—"
OUR_DATA, CHANCE = "data (ours)", "chance level"  # the lines above and below the methods
_GLOSSARY = (
    (r"R@\d|_r\d|recall_at", "R@K", "share of queries with a correct match among the K best candidates"),
    (r"i2t", "i2t", "image query, captions ranked (any caption of the image counts)"),
    (r"t2i", "t2i", "caption query, images ranked"),
    (r"R@.*mean|mean.*R@", "mean", "mean of R@1, R@5 and R@10 over both directions (six values)"),
    (r"\bacc\b|acc1|top-?1", "acc", "share of images whose most similar class is the right one (top 1)"),
    (r"probe", "linear probe", "accuracy of a linear classifier on frozen image features"),
)


@dataclass(frozen=True)
class Line:
    """`kind` is "stand_in", "paper", "ours", "difference" or "chance"; `cells` follow the columns."""

    kind: str
    method: str
    source: str
    cells: tuple[str, ...]
    status: str = ""


def lay_out(table: Table, compact: bool = False) -> list[list[Line]]:
    """Groups of lines: our data (where needed), one group per method, the chance level (where known).

    `compact` leaves the number of seeds out of the cells where all share it; `reading` gives it.
    """
    with_seeds = not compact or _shared_seeds(table) is None
    groups = []
    stand_ins = tuple(stand_in(table, column) or DASH for column in table.columns)
    if any(cell != DASH for cell in stand_ins):
        groups.append([Line("stand_in", OUR_DATA, "", stand_ins)])
    groups += [_method_lines(table, row, with_seeds) for row in table.rows]
    chances = tuple(_chance(table, column) for column in table.columns)
    if any(cell != DASH for cell in chances):
        groups.append([Line("chance", chance_level(table.columns), "", chances)])
    return groups


def chance_level(columns: Sequence[Column]) -> str:
    """`CHANCE`, with the models behind it where they are not uniform guesses."""
    models = " or ".join(dict.fromkeys(column.guess for column in columns if column.guess))
    return f"{CHANCE} ({models})" if models else CHANCE


def stand_in(table: Table, column: Column) -> str | None:
    """The data of our numbers in a column; None when they are the paper's."""
    if column.stands_in_for is not None or table.scale == PAPER_SCALE:
        return column.stands_in_for
    cells = table.measured(column.key)
    return cells[0].data if cells else None


def panel_label(table: Table, column: Column) -> str:
    """A column's label, with our data where they stand in for the paper's, or are not those of all columns."""
    source = named(stand_in(table, column) or "")
    if column.stands_in_for is not None and any(row.paper.get(column.key) is not None for row in table.rows):
        return f"{column.label}: ours on {source}"
    return f"{column.label}, on {source}" if source and not _shared_data(table) else column.label


def title_in_words(table: Table, title: str = "") -> str:
    """The title, else the beginning of the caption; and the data if all columns share them."""
    parts = re.split(r"(?<=\w[^q][.;:)]) ", f"{table.caption} ")  # not after Eq.
    text = title or (parts[0] if len(parts[0]) >= 25 or len(parts) == 1 else f"{parts[0]} {parts[1]}")
    text, data = text.strip().rstrip(".;:"), _shared_data(table)
    return f"{text}, on {data}" if data and data not in text else text


def _shared_data(table: Table) -> str:
    columns = [column for column in table.columns if table.measured(column.key)]
    sources = {named(stand_in(table, column) or "") for column in columns}
    return sources.pop() if len(columns) > 1 and len(sources) == 1 else ""


def heading(paper: str, table_id: str, scale: str, command: str = "", settings: Sequence[str] = ()) -> str:
    """Paper, table, scale, rows and settings that a command names, as without a shell, and settings near the best."""
    end = re.split(r" (?=(?:ROWS|SET)=)", command, maxsplit=1)[1:]  # RUNS of `make compare` may hold any sign
    options = (word.partition("=") for text in end for word in shlex.split(text))
    changes = [f'{name}="{" ".join(shlex.split(value))}"' for name, _, value in options if name in ("ROWS", "SET")]
    return ", ".join([paper, table_id, f"scale {scale}", *changes, *settings])


def line_below(table: Table) -> str:
    """The line under every table of ours: models, data and seeds; empty where nothing was measured."""
    if not any(table.measured(column.key) for column in table.columns):
        return ""
    seeds = f"{seeds_name(table.seeds)} {', '.join(map(str, table.seeds))}"
    parts = [table.models, *table.settings, f"on {named(table.data)}" if table.data else "", seeds, _plan(table)]
    return f"Ours: {'; '.join(filter(None, parts))}."


def _plan(table: Table) -> str:
    if not table.plan:
        return ""
    count, error = table.deciding
    planned = f"{table.plan[1]} planned" if len(table.plan) > 1 else "extended without a plan"
    return (
        f"{planned}, the first {count} decide, at {1 - error:.0%}"
        if count < len(table.seeds)
        else (f"{planned}, they decide at {1 - error:.0%}")
    )


def named(data: str) -> str:
    """Names of data without their fingerprints."""
    return re.sub(r" \([0-9a-f]{8}(, [0-9a-f]{8})*\)", "", data)


def warning(table: Table) -> str:
    """The sentence above a table whose two kinds of numbers must not be compared; else empty."""
    if all(value is None for row in table.rows for value in row.paper.values()):
        return ""
    if table.scale != PAPER_SCALE:
        return (
            f"Scale {table.scale}: our numbers are measured on other data than the paper's (line “{OUR_DATA}”). "
            "They reproduce no cell of the paper, and no difference is printed."
        )
    if any(column.stands_in_for is not None for column in table.columns):
        return f"Columns with a stand-in (line “{OUR_DATA}”) do not reproduce the paper's column: no difference."
    return ""


def provenance(table: Table) -> list[tuple[str, str]]:
    """(label, text): paper and table, and what was run."""
    pairs = [
        ("paper", f"{table.paper_title} ({table.paper}, {table.paper_version})"),
        ("table", table.table_id),
        ("scale", table.scale),
        ("data", table.data),
        (seeds_name(table.seeds), ", ".join(map(str, table.seeds))),
        ("git revision", table.git_revision),
        ("command", table.command),
        ("created", table.created[:10]),
        ("hardware", table.hardware),
    ]
    return [(label, text or DASH) for label, text in pairs]


def full_status(table: Table, row: Row) -> str:
    """The status of a row, and how many columns it holds for if some are missing."""
    count = sum(row.ours.get(column.key) is not None for column in table.columns)
    partly = row.status == MEASURED and count < len(table.columns)
    return f"measured in {count} of {len(table.columns)} columns" if partly else row.status


def remarks(table: Table, with_status: bool = False) -> list[tuple[str, str]]:
    """(label, text) below a table: notes on rows, on the table, and errata of the printed one.

    `with_status` adds the status of rows that are measured in part.
    """
    statuses = [(row.method, full_status(table, row)) for row in table.rows if any(row.ours.values())]
    pairs = [(method, status) for method, status in statuses if with_status and status != MEASURED]
    pairs += _untrained(table)
    pairs += _notes_on_rows(table)
    pairs += _provenance_of_rows(table)
    pairs += [("note", note) for note in table.notes]
    return pairs + [("erratum of the printed table", erratum) for erratum in table.errata]


def _untrained(table: Table) -> list[tuple[str, str]]:
    return _joined_labels(
        (row.ran or row.method, f"not trained: {row.training.failure}; it decides no claim but those about training")
        for row in table.rows
        if row.training is not None and row.training.failure
    )


def _provenance_of_rows(table: Table) -> list[tuple[str, str]]:
    has_runs = table.models or any(
        row.note.startswith("ours: ") for row in table.rows
    )  # those of images have notes only
    if not has_runs or table.scale in (PAPER_SCALE, "smoke"):  # no run of ours, or none that decides anything
        return []
    pairs = [("settings", f"chosen by {table.chosen_by or 'test data'}")]
    made = _joined_labels(
        (row.method, f"trained at revision {row.training.revision}, evaluated at {row.training.evaluated_at}")
        for row in table.rows
        if row.training is not None
    )
    pairs += [("all rows", text) for _, text in made] if len(made) == 1 else made
    return pairs if made else [*pairs, ("rows", "which of them trained, and at which revision, was not kept")]


def _notes_on_rows(table: Table) -> list[tuple[str, str]]:
    # a beginning that all measured rows share stands once, before them
    rows = [row for row in table.rows if any(row.ours.values()) or row.note]
    notes = [re.split(r"; (?![^(]*\))", row.note) for row in rows]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*notes))
    shared = [parts[0] for parts in alike] if len(rows) > 1 else []
    labels = ["all measured rows", *(row.method for row in rows)]
    texts = ["; ".join(shared).removeprefix("ours: "), *("; ".join(note[len(shared) :]) for note in notes)]
    return [(label, text) for label, text in _joined_labels(zip(labels, texts)) if text]


def _joined_labels(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    # one pair of all labels with the same text
    labels: dict[str, list[str]] = {}
    for label, text in pairs:
        labels.setdefault(text, []).append(label)
    return [("; ".join(names), text) for text, names in labels.items()]


def glossary(table: Table) -> list[tuple[str, str]]:
    """(term, meaning), only for what the table shows."""
    labels = " ".join(f"{column.key} {column.label}" for column in table.columns)
    pairs = [(term, meaning) for pattern, term, meaning in _GLOSSARY if re.search(pattern, labels)]
    pairs += _interval_kinds(table)
    lower = [column.label for column in table.columns if column.better == "lower"]
    if lower:
        pairs.append(("lower is better", ", ".join(lower)))
    units = dict.fromkeys(column.unit for column in table.columns)
    by_column = "; ".join(f"{column.label}: {column.unit}" for column in table.columns)
    pairs.append(("units", by_column if len(units) > 1 else "".join(units)))
    return [*pairs, (DASH, "no number; see the status")]


def reading(table: Table) -> str:
    """How to read a line of ours in the compact layout; empty when nothing was measured."""
    shared = _shared_seeds(table)
    if not any(table.measured(column.key) for column in table.columns):
        return ""
    parts = [f"{sign} is the {meaning}" for sign, meaning in _interval_kinds(table)]
    start = "mean over seeds" if shared is None else f"mean of {shared} seeds" if shared > 1 else "1 seed"
    text = "; ".join([f"Ours: {start}", *parts]) + "."
    crossed = any("test pictures" in meaning for _, meaning in _interval_kinds(table))
    # narrower where pictures are hard for all rows, wider where seeds move them apart
    compared = " Rows are compared by the interval of their difference, which may be narrower or wider."
    return text + compared * crossed


def format_value(value: float, unit: str) -> str:
    """A number of ours: one decimal for percent, three for a fraction, else four significant digits."""
    return f"{value:z.1f}" if unit == "percent" else f"{value:z.3f}" if unit == "fraction" else f"{value:.4g}"


def format_paper(value: float | None, unit: str) -> str:
    """A number of the paper with its printed digits, and at least one decimal for percent."""
    if value is None:
        return DASH
    digits = f"{value:.6g}"
    return f"{value:.1f}" if unit == "percent" and "." not in digits and "e" not in digits else digits


def format_measured(cell: Measured | None, unit: str, with_seeds: bool = True) -> str:
    """Mean +- half-width, or mean [low, high] where the interval is not symmetric; a dash without a number.

    A mean that is neither percent nor fraction has the decimals that its half-width allows. Percent that would read 0.0
    has two digits. Equal numbers of all seeds have no half-width.
    """
    if cell is None:
        return DASH
    if unit == "percent" and 0 < abs(cell.mean) < 0.05:
        shown = "{:.2g}".format
    else:
        shown = partial(format_value, unit=unit)
    text, seeds = shown(cell.mean), count_seeds(len(cell.seeds))
    if _all_equal(cell):
        seeds += ", all equal"
    elif cell.interval is not None and _symmetric(cell):
        half = (cell.interval[1] - cell.interval[0]) / 2
        decimals = None if unit in ("percent", "fraction") else _decimals(cell.mean, half)
        if decimals is None:
            text += f" ± {shown(half)}"
        else:
            text = f"{cell.mean:z.{decimals}f} ± {half:.{decimals}f}"
    elif cell.interval is not None:
        text += f" [{shown(cell.interval[0])}, {shown(cell.interval[1])}]"
    return f"{text} ({seeds})" if with_seeds and not _over_queries(cell) else text


def _decimals(mean: float, half: float) -> int | None:
    # Two digits of the half-width, at most four of the mean; None outside [1e-4, 1e4)
    if not 1e-4 <= abs(mean) < 1e4:
        return None
    of_mean = 3 - math.floor(math.log10(abs(mean)) + 1e-6)  # 0.09999999 is 0.1
    of_half = 1 - math.floor(math.log10(max(half, 1e-12)))
    return max(0, min(of_mean, of_half))


def count_seeds(number: int) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{number} {seeds_name(range(number))}"


def seeds_name(seeds: Sequence[int]) -> str:
    """ "seed" or "seeds"."""
    return "seed" if len(seeds) == 1 else "seeds"


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
    kinds: dict[str, dict[str, None]] = {}
    for cell in cells:
        if not _all_equal(cell):
            kinds.setdefault("±" if _symmetric(cell) else "[low, high]", {})[cell.interval_kind] = None
    words = {"±": "half-width", "[low, high]": "interval"}
    pairs = [(sign, f"{words[sign]}, {' or '.join(of_sign)}") for sign, of_sign in kinds.items()]
    return [*pairs, ("no interval", "sign of equal numbers of all seeds")] if any(map(_all_equal, cells)) else pairs


def _all_equal(cell: Measured) -> bool:
    return cell.interval is not None and cell.interval[1] - cell.interval[0] <= 1e-12 * abs(cell.mean)


def _over_queries(cell: Measured) -> bool:
    return cell.interval is not None and "queries" in cell.interval_kind and len(cell.seeds) == 1


def _symmetric(cell: Measured) -> bool:
    return cell.interval_kind in (SEEDS_INTERVAL, CROSSED_INTERVAL)


def _shared_seeds(table: Table) -> int | None:
    numbers = {len(cell.seeds) for row in table.rows for cell in row.ours.values() if cell is not None}
    return numbers.pop() if len(numbers) == 1 else None


_LATEX_SIGNS = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "−": "$-$", "—": "---", "²": "$^2$", "³": "$^3$", "°": r"$^\circ$",
    "×": r"$\times$", "·": r"$\cdot$", "→": r"$\to$", "≤": r"$\leq$", "≥": r"$\geq$", "√": r"$\surd$",
    "β": r"$\beta$", "λ": r"$\lambda$", "τ": r"$\tau$", "π": r"$\pi$", "\n": " ", "\r": " ",
    "_": r"\_\allowbreak{}", "/": r"/\allowbreak{}",
    "[": "{[}", "*": "{*}",  # after a line break LaTeX takes them for an argument of the break
})  # fmt: skip
_LATEX_COLUMNS = 5  # per block
_TEXT_COLUMN, _TEXT_METHOD = 11, 22  # preferred widths in the terminal


FORMATS = {"csv": "csv", "latex": "tex"}  # on request -> ending


def write_table(table: Table, folder: str | Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write `<table_id>.md`, `.json`, the named `FORMATS`, and `<table_id>_hits.npz` where cells have hits.

    Each file is written atomically; earlier ones of other formats are deleted.
    """
    folder, hits = Path(folder), hits_of(table)
    table = replace(table, hits_file=f"{table.table_id}_hits.npz" if hits else "")
    writers = {"json": to_json, "md": to_markdown, "csv": to_csv, "tex": to_latex}
    unasked = {f"{table.table_id}.{ending}" for name, ending in FORMATS.items() if name not in formats}
    # before the first file is touched; the hits come first, since the JSON names them, and the JSON next
    contents = {table.hits_file: packed(hits)} if hits else {}
    tables = {f"{table.table_id}.{ending}": write for ending, write in writers.items()}
    contents |= {name: write(table) for name, write in tables.items() if name not in unasked}
    for name in {*unasked, f"{table.table_id}_hits.npz"} - {*contents}:
        (folder / name).unlink(missing_ok=True)  # of an earlier run
    return [write_atomically(folder / name, content) for name, content in contents.items()]


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
    """Tidy CSV, one line per method and column; numbers are written in full, empty if unknown.

    `ours_values` and `seeds` hold one entry per seed, separated by semicolons. `ran` is the model of our numbers,
    `not_trained` why they decide no claim; `command` and `settings` tell apart the tables of one scale.
    """
    import pandas  # takes half a second, and most commands write neither CSV nor LaTeX

    records = []
    for row in table.rows:
        for column in table.columns:
            cell = row.ours.get(column.key)
            low, high = cell.interval if cell and cell.interval else (None, None)
            records.append({
                "paper": table.paper, "paper_version": table.paper_version, "table": table.table_id,
                "scale": table.scale, "column": column.key, "label": column.label, "unit": column.unit,
                "better": column.better, "method": row.method, "ran": row.ran or row.method, "status": row.status,
                "not_trained": row.training and row.training.failure,
                "paper_number": row.paper.get(column.key), "ours_mean": cell and cell.mean, "ours_low": low,
                "ours_high": high, "interval_kind": cell and cell.interval_kind,
                "ours_values": cell and ";".join(map(str, cell.values)),
                "seeds": cell and ";".join(map(str, cell.seeds)), "chance": cell and cell.chance,
                "stands_in_for": stand_in(table, column), "data": cell and cell.data,
                "protocol": cell and cell.protocol, "git_revision": table.git_revision, "created": table.created,
                "command": table.command, "settings": "; ".join(table.settings),
            })  # fmt: skip
    return pandas.DataFrame(records).to_csv(index=False, lineterminator="\n")


def to_latex(table: Table) -> str:
    """A `table*` float that needs no package; wide tables are stacked in blocks of five columns."""
    import pandas

    lines = [line for group in lay_out(table, compact=True) for line in group]
    sources = [f"{line.source}: {line.status}" if _nothing(line) else line.source for line in lines]
    index = [(_latex(line.method), _latex(source)) for line, source in zip(lines, sources)]
    frame = pandas.DataFrame(
        [list(map(_latex, line.cells)) for line in lines],
        pandas.MultiIndex.from_tuples(index),
        [_latex(column.label) for column in table.columns],
    )
    blocks = [frame.iloc[:, start : start + _LATEX_COLUMNS] for start in range(0, len(table.columns), _LATEX_COLUMNS)]
    tabulars = [
        block.style.to_latex(
            column_format=r"p{0.18\textwidth}p{0.12\textwidth}" + r"p{0.11\textwidth}" * len(block.columns),
            clines="skip-last;data",
            multirow_align="naive",
        )
        for block in blocks
    ]
    facts, terms = ("; ".join(f"{a}: {b}" for a, b in pairs) + "." for pairs in (provenance(table), glossary(table)))
    untrained = [f"{a}: {b}." for a, b in _untrained(table)]
    parts = [table.caption, warning(table), reading(table), line_below(table), *untrained, facts, terms]
    caption = " ".join(filter(None, parts))
    parts = [r"\begin{table*}", r"\centering\scriptsize\setlength{\tabcolsep}{3pt}"]
    parts += ["\\par\\smallskip\n".join(tabulars) + f"\\caption{{{_latex(caption)}}}"]
    name = re.sub("[^A-Za-z0-9-]", "-", f"{table.paper}-{table.table_id}")
    parts += [f"\\label{{tab:{name}}}", r"\end{table*}"]
    parts += [f"% {_one_line(label)}: {_one_line(text)}" for label, text in remarks(table, with_status=True)]
    return "\n".join(parts) + "\n"


def to_text(table: Table, width: int = 100) -> str:
    """For a terminal of `width` characters; a table that is too wide continues in further blocks of columns."""
    facts = dict(provenance(table))
    run = [f"{name} {text}" for name, text in facts.items() if name not in ("paper", "table", "command")]
    head = [f"{table.table_id} of {facts['paper']}", table.caption, " | ".join(run), f"command: {facts['command']}"]
    sources: dict[str, list[str]] = {}
    for column in table.columns:
        if source := stand_in(table, column):
            sources.setdefault(source, []).append(column.label)
    measured_on = "; ".join(f"{', '.join(labels)}: {source}" for source, labels in sources.items())
    measured_on = f"{OUR_DATA}: {measured_on}" if measured_on else ""
    above = [_filled(text, width) for text in [*head, warning(table), reading(table), measured_on] if text]
    below = [_filled(line_below(table), width)] if line_below(table) else []
    below += [_filled(f"{label}: {text}", width) for label, text in remarks(table, with_status=True)]
    below += [_filled("; ".join(f"{term}: {text}" for term, text in glossary(table)), width)]
    return "\n".join([*above, *_text_blocks(table, width), "", *below]) + "\n"


def _text_blocks(table: Table, width: int) -> Iterator[str]:
    groups = [group for group in lay_out(table, compact=True) if group[0].kind != "stand_in"]
    lines = [line for group in groups for line in group]
    alike = Counter(column.label for column in table.columns)  # columns that their data alone tell apart
    data = [[named(stand_in(table, column) or "")] if alike[column.label] > 1 else [] for column in table.columns]
    labels = [textwrap.wrap(column.label, _TEXT_COLUMN) + below for column, below in zip(table.columns, data)]
    method_width = min(_TEXT_METHOD, max(len(line.method) for line in lines))
    source_width = max(len(line.source) for line in lines)
    cell_width = 2 + max(len(text) for texts in (*labels, *(line.cells for line in lines)) for text in texts)
    room = width - method_width - source_width - 2
    count = len(table.columns)
    number = -(-count // max(1, room // cell_width))
    size = -(-count // number)
    for start in range(0, count, size):
        columns = slice(start, start + size)
        levels = zip_longest(*labels[columns], fillvalue="")
        rule = "-" * (width - room + cell_width * len(labels[columns]))
        yield ""
        yield from _paired_lines(
            ["method"], ("".join(text.rjust(cell_width) for text in level) for level in levels), width - room
        )
        yield rule
        for group in groups:
            texts = []
            for line in group:
                row = ["".join(cell.rjust(cell_width) for cell in line.cells[columns])]
                row = (
                    [f"  {part}" for part in textwrap.wrap(f"{DASH} {line.status}", room - 2)]
                    if _nothing(line)
                    else row
                )
                texts += _paired_lines([line.source], row, source_width)
            names = dict.fromkeys(line.method for line in group)
            methods = [part for name in names for part in textwrap.wrap(name, method_width)]
            yield from _paired_lines(methods, texts, method_width + 2)
            yield rule


def _paired_lines(left: Iterable[str], right: Iterable[str], left_width: int) -> Iterator[str]:
    for texts in zip_longest(left, right, fillvalue=""):
        yield f"{texts[0]:<{left_width}}{texts[1]}".rstrip()


def _nothing(line: Line) -> bool:
    return line.kind == "ours" and all(cell == DASH for cell in line.cells)


def _latex(text: str) -> str:
    return text.translate(_LATEX_SIGNS)


def markdown_text(text: str) -> str:
    """One line of plain text that GitHub Markdown shows as it is, also in a table."""
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
