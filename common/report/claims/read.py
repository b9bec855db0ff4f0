"""Claims of a paper as data: read from its claims.yaml and checked against its tables.

    claims:
      - id: C6
        claim: "The inner product on the product of spheres beats the sphere in R@1 at every initialisation."
        where: "A and B, Table 3"
        kind: cells
        for: {init: [e^2.64, e^0], column: [zs_i2t_r1, zs_t2i_r1]}
        holds_if: table3["Ob(64, 8), {init}"]["{column}"] > table3["Sphere, {init}"]["{column}"]

The *audit* puts the paper's own printed numbers into the expression, *measured* puts ours (`decide.py`). `holds_if`
serves both, `audit` and `measured` one each where the two must differ, for example because the sentence names a number
that holds at the paper's scale alone; each is an expression or a list of which all must hold. An expression with names
of `for` in braces stands for all their combinations. `kind` says what decides the measured side:

    cells         cells of the paper's tables
    experiment    values of a named experiment, experiment["name"]["value"] (`common/report/experiments.py`)
    test          `test`, one or more pytest node ids; `shows: does not hold` where they prove the opposite

Without an expression for the audit `no_numbers` says why the paper's numbers cannot decide, for example that there is
only a figure. `needs` is what keeps the measured side from being run at all, `not_run_yet` what is still missing here.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.report.claims.expressions import EXPERIMENT, Cell, Condition, ExpressionError, cells, margins, parse

HOLDS, FAILS = "holds", "does not hold"
KINDS = ("cells", "experiment", "test")
_KEYS = {
    "id", "claim", "where", "kind", "for", "holds_if", "audit", "measured", "test", "shows", "no_numbers", "needs",
    "not_run_yet", "note",
}  # fmt: skip
_MAX_COMBINATIONS = 200


class ClaimError(ValueError):
    """A claims.yaml that cannot be used; the message names file, claim, key and what would be accepted."""


@dataclass(frozen=True)
class PaperTables:
    """The numbers that a paper prints, and which of its rows cannot be run, or not yet.

    title: of the paper. numbers: of every cell, None where the paper prints none. rows, columns: names by table, for
    messages. needs: (table, row) -> what keeps the row from being run. units: (table, column) -> unit.
    """

    title: str
    numbers: Mapping[Cell, float | None]
    rows: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    needs: Mapping[tuple[str, str], str]
    units: Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Claim:
    """One claim; the meaning of the fields is that of the keys of claims.yaml, see the module.

    `audit` and `measured` are the conditions of that side, which all must hold; `audit_text` and `measured_text` the
    expressions as they were written.
    """

    id: str
    claim: str
    where: str
    kind: str
    audit: tuple[Condition, ...]
    measured: tuple[Condition, ...]
    audit_text: tuple[str, ...]
    measured_text: tuple[str, ...]
    tests: tuple[str, ...] = ()
    shows: str = HOLDS
    no_numbers: str = ""
    needs: str = ""
    not_run_yet: str = ""
    note: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Tables and experiments, by name, that either side of the claim refers to."""
        used = cells(*self.audit, *self.measured)
        return tuple(dict.fromkeys(cell.row if cell.table == EXPERIMENT else cell.table for cell in used))


def load_paper_tables(path: str | Path) -> PaperTables:
    """The printed numbers of a paper_tables.yaml.

    Raises:
        ClaimError: if the file is not in its form; the message names table and row.
    """
    path = Path(path)
    content = _yaml(path)
    numbers, rows, columns, needs, units = {}, {}, {}, {}, {}
    for name, table in content["tables"].items():
        columns[name] = tuple(column["key"] for column in table["columns"])
        rows[name] = tuple(row["method"] for row in table["rows"])
        units |= {(name, column["key"]): column.get("unit", "percent") for column in table["columns"]}
        if len(set(rows[name])) != len(rows[name]) or len(set(columns[name])) != len(columns[name]):
            raise ClaimError(f"{_shown(path)}, {name}: rows and columns need distinct names")
        for row in table["rows"]:
            if len(row["values"]) != len(columns[name]):
                raise ClaimError(f"{_shown(path)}, {name}, row {row['method']}: one value for each column is needed")
            for key, value in zip(columns[name], row["values"]):
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    raise ClaimError(f"{_shown(path)}, {name}, row {row['method']}: {key} is {value!r}, not a number")
                numbers[Cell(name, row["method"], key)] = None if value is None else float(value)
            if "needs" in row and not row.get("not_run_yet"):
                needs[name, row["method"]] = row["needs"]
    return PaperTables(content["paper"]["title"], numbers, rows, columns, needs, units)


def load_claims(path: str | Path, printed: PaperTables) -> tuple[Claim, ...]:
    """The claims of a claims.yaml, every reference checked against the paper's tables.

    Args:
        path: of the file.
        printed: the paper's tables.
    Raises:
        ClaimError: the first thing that is wrong, with file, claim, key and what would be accepted.
    """
    path = Path(path)
    content = _yaml(path)
    entries = content.get("claims") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ClaimError(f"{_shown(path)}: a list under the key 'claims' is needed")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise ClaimError(f"{_shown(path)}: claim number {number} has no id, a text such as C{number}")
        where = f"{_shown(path)}, claim {entry['id']}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", entry["id"]):
            raise ClaimError(f"{where}: an id consists of letters, digits, '_', '-' and '.'")
        if entry["id"] in claims:
            raise ClaimError(f"{where}: the id stands twice in the file")
        claims[entry["id"]] = _claim(entry, printed, where)
    return tuple(claims.values())


def _claim(entry: Mapping[str, Any], printed: PaperTables, where: str) -> Claim:
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise ClaimError(f"{where}: unknown keys {', '.join(unknown)}; accepted: {', '.join(sorted(_KEYS))}")
    texts = {key: _text(entry, key, where) for key in ("claim", "where", "kind")}
    optional = {
        key: _text(entry, key, where) if key in entry else "" for key in ("no_numbers", "needs", "not_run_yet", "note")
    }
    if entry["kind"] not in KINDS:
        raise ClaimError(f"{where}: kind is {entry['kind']!r}; accepted: {', '.join(KINDS)}")
    conditions = {}
    for side in ("audit", "measured"):
        if "holds_if" in entry and side in entry:
            raise ClaimError(f"{where}: holds_if stands for audit and measured; give either it or the two")
        key = "holds_if" if "holds_if" in entry else side
        texts_of_side = _expanded(entry.get(key, []), entry.get("for", {}), f"{where}, {key}")
        conditions[side] = _parsed(texts_of_side, printed, f"{where}, {key}")
    _check_use_of_for(entry, where)
    if any(cell.table == EXPERIMENT for cell in cells(*conditions["audit"])):
        raise ClaimError(f"{where}: an audit uses the paper's tables alone; give experiments under 'measured'")
    if (not conditions["audit"]) == (not optional["no_numbers"]):
        raise ClaimError(f"{where}: give either an expression for the audit or 'no_numbers', why there is none")
    tests = entry.get("test", [])
    tests = [tests] if isinstance(tests, str) else tests
    claim = Claim(
        id=entry["id"],
        **texts,
        **conditions,
        audit_text=_written(entry, "audit"),
        measured_text=_written(entry, "measured"),
        tests=tuple(tests),
        shows=entry.get("shows", HOLDS),
        **optional,
    )
    _check_measured_side(claim, where)
    return claim


def _check_measured_side(claim: Claim, where: str) -> None:
    if claim.shows not in (HOLDS, FAILS):
        raise ClaimError(f"{where}: shows is {claim.shows!r}; accepted: {HOLDS}, {FAILS}")
    if not all(isinstance(test, str) and re.fullmatch(r"tests/\w+\.py::\w+", test) for test in claim.tests):
        raise ClaimError(f"{where}: test is {list(claim.tests)}; accepted: tests/<file>.py::<function>, one or a list")
    if claim.needs and claim.not_run_yet:
        raise ClaimError(f"{where}: give either 'needs' or 'not_run_yet'")
    excused = claim.needs or claim.not_run_yet
    if claim.kind == "test":
        if claim.measured:
            raise ClaimError(f"{where}: kind test is decided by 'test'; an expression belongs under 'audit'")
        if not claim.tests and not excused:
            raise ClaimError(f"{where}: kind test needs 'test', 'needs' or 'not_run_yet'")
        return
    if claim.tests or claim.shows != HOLDS:
        raise ClaimError(f"{where}: 'test' and 'shows' go with kind test only")
    if not claim.measured and not excused:
        raise ClaimError(f"{where}: give an expression for the measured side, 'needs' or 'not_run_yet'")
    if claim.measured:
        used = any(cell.table == EXPERIMENT for cell in cells(*claim.measured))
        if used != (claim.kind == "experiment"):
            which = "refers to an experiment" if used else "refers to no experiment"
            raise ClaimError(f"{where}: kind is {claim.kind} but the measured side {which}")


def _expanded(written: Any, names: Any, where: str) -> list[str]:
    """All expressions of one side, with the names of `for` put in."""
    written = [written] if isinstance(written, str) else written
    if not isinstance(written, list) or not all(isinstance(text, str) for text in written):
        raise ClaimError(f"{where}: an expression or a list of expressions is needed, got {written!r}")
    if not isinstance(names, dict) or not all(isinstance(v, list) and v for v in names.values()):
        raise ClaimError(f"{where}: 'for' gives lists by name, for example {{column: [a, b]}}, got {names!r}")
    expanded: dict[str, None] = {}
    for text in written:
        used = [name for name in names if f"{{{name}}}" in text]
        for choice in itertools.product(*(names[name] for name in used)):
            full = text
            for name, value in zip(used, choice):
                full = full.replace(f"{{{name}}}", str(value))
            unknown = re.search(r"\{[^}]*\}?", full)
            if unknown:
                raise ClaimError(
                    f"{where}: {unknown.group()} is not a name of 'for'; accepted: {', '.join(names) or 'none'}"
                )
            expanded[full] = None
    if len(expanded) > _MAX_COMBINATIONS:
        raise ClaimError(f"{where}: 'for' makes {len(expanded)} expressions; accepted: at most {_MAX_COMBINATIONS}")
    return list(expanded)


def _check_use_of_for(entry: Mapping[str, Any], where: str) -> None:
    text = " ".join(str(entry.get(key, "")) for key in ("holds_if", "audit", "measured"))
    unused = [name for name in entry.get("for", {}) if f"{{{name}}}" not in text]
    if unused:
        raise ClaimError(f"{where}: 'for' gives {', '.join(map(str, unused))}, which no expression uses")


def _parsed(texts: list[str], printed: PaperTables, where: str) -> tuple[Condition, ...]:
    conditions = []
    for text in texts:
        try:
            condition = parse(text)
        except ExpressionError as error:
            raise ClaimError(f"{where}, {error}") from None
        for cell in cells(condition):
            _check_reference(cell, printed, where)
        conditions.append(condition)
    if not all(margin.cells for condition in conditions for margin in margins(condition)):
        raise ClaimError(f"{where}: a comparison refers to no cell, so no number could change it")
    return tuple(dict.fromkeys(conditions))


def _check_reference(cell: Cell, printed: PaperTables, where: str) -> None:
    if cell.table == EXPERIMENT:
        return
    if cell.table not in printed.rows:
        raise ClaimError(f"{where}: {cell} names no table; accepted: {', '.join(printed.rows)}, {EXPERIMENT}")
    for kind, name, known in (
        ("row", cell.row, printed.rows[cell.table]),
        ("column", cell.column, printed.columns[cell.table]),
    ):
        if name not in known:
            listed = ", ".join(f'"{each}"' for each in known)
            raise ClaimError(f"{where}: {cell} names no {kind} of {cell.table}; accepted: {listed}")


def _written(entry: Mapping[str, Any], side: str) -> tuple[str, ...]:
    """The expressions as they stand in the file, with the lists of `for` behind them."""
    written = entry.get("holds_if", entry.get(side, []))
    texts = [" ".join(text.split()) for text in ([written] if isinstance(written, str) else written)]
    used = {name: values for name, values in entry.get("for", {}).items() if f"{{{name}}}" in " ".join(texts)}
    return (*texts, *(f"for every {name} of: {'; '.join(map(str, values))}" for name, values in used.items()))


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ClaimError(f"{where}: {key} is {value!r}; a text is needed")
    return " ".join(value.split())


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ClaimError(f"{_shown(path)} is no YAML: {' '.join(str(error).split())}") from None


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
