"""Claims of a paper as data: read from its claims.yaml and checked against its tables.

    claims:
      - id: C6
        claim: "The inner product on the product of spheres beats the sphere in R@1 at every initialisation."
        where: "A and B, Table 3"
        kind: cells
        for: {init: [e^2.64, e^0], column: [zs_i2t_r1, zs_t2i_r1]}
        holds_if: table3["Ob(64, 8), {init}"]["{column}"] > table3["Sphere, {init}"]["{column}"]

The *audit* puts the paper's printed numbers into the expression, *measured* puts ours (`decide.py`). `holds_if` serves
both; `audit` and `measured` serve one each where they must differ, for example because the sentence names a number of
the paper's scale. Each is an expression, or a list of which all must hold. Names of `for` in braces stand for all their
combinations. `kind` names what decides the measured side:

    cells         cells of the paper's tables
    experiment    values of a named experiment, experiment["name"]["value"] (`common/report/experiments.py`)
    test          `test`, one or more pytest node ids; `shows: does not hold` where they prove the opposite

Further keys:

    no_numbers        why the paper's numbers cannot decide, for example only a figure; instead of an audit
    needs             what prevents any run of the measured side
    not_run_yet       what is still missing here
    about             "training": a claim about collapse or stability, which rows that did not train may decide
    regime            expression or list, over our values: runs that do not satisfy it leave the claim open
    departure         what differs from the paper in runs below its scale; stands beside their verdict
    exact             "by construction" (a definition or a count) or "parity check" (weights not trained here): judged
                      by the value, without seeds
    threshold         revision that last changed the measured expression
    after_the_data    expression chosen when the results were known; `measured` keeps the earlier one
    control_of        claim beside which this is our question, with a row that the paper does not print; not counted
                      among the paper's

Above the claims `equal_within` gives the rule for margins of equivalence, see `equivalence.py`.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from common.base.files import read_repository_yaml
from common.report.claims.equivalence import Rule
from common.report.claims.expressions import EXPERIMENT, Cell, Condition, ExpressionError, cells, margins, parse

HOLDS, FAILS = "holds", "does not hold"
KINDS = ("cells", "experiment", "test")
EXACT = ("by construction", "parity check")
_KEYS = {
    "id", "claim", "where", "kind", "for", "holds_if", "audit", "measured", "after_the_data", "test", "shows",
    "no_numbers", "needs", "not_run_yet", "note", "exact", "threshold", "about", "control_of",
    "regime", "departure",
}  # fmt: skip
_MAX_COMBINATIONS = 200


class ClaimError(ValueError):
    """A claims.yaml that cannot be used; the message names file, claim, key and what is expected."""


@dataclass(frozen=True)
class PaperTables:
    """The numbers that a paper prints, and which of its rows cannot be run.

    numbers: of every cell, None where the paper prints none.
    rows, columns: names by table.
    needs: (table, row) -> what keeps the row from being run.
    units: (table, column) -> unit.
    """

    title: str
    numbers: Mapping[Cell, float | None]
    rows: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    needs: Mapping[tuple[str, str], str]
    units: Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Claim:
    """One claim; the fields are the keys of claims.yaml, see the module.

    `audit`, `measured`, `later` (of `after_the_data`) and `regime` are conditions that all must hold; `audit_text` and
    the like are their expressions as written.
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
    exact: str = ""
    threshold: str = ""
    later: tuple[Condition, ...] = ()
    later_text: tuple[str, ...] = ()
    about: str = ""
    control_of: str = ""
    regime: tuple[Condition, ...] = ()
    regime_text: tuple[str, ...] = ()
    departure: str = ""
    equal_within: Rule | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tables and experiments that the claim refers to."""
        used = cells(*self.audit, *self.measured, *self.later, *self.regime)
        return tuple(dict.fromkeys(cell.row if cell.table == EXPERIMENT else cell.table for cell in used))


def load_paper_tables(path: str | Path) -> PaperTables:
    """The printed numbers of a paper_tables.yaml.

    Raises:
        ClaimError: the file is not in its form; the message names table and row.
    """
    path = Path(path)
    content = _yaml(path)
    numbers, rows, columns, needs, units = {}, {}, {}, {}, {}
    for name, table in content["tables"].items():
        columns[name] = tuple(column["key"] for column in table["columns"])
        beyond = [row["method"] for row in table.get("beyond", ())]  # trained here, not printed
        rows[name] = (*(row["method"] for row in table["rows"]), *beyond)
        numbers |= {Cell(name, row, key): None for row in beyond for key in columns[name]}
        units |= {(name, column["key"]): column.get("unit", "percent") for column in table["columns"]}
        distinct = all(len(set(names)) == len(names) for names in (rows[name], columns[name]))
        _need(distinct, f"{_shown(path)}, {name}: rows and columns need distinct names")
        for row in table["rows"]:
            where = f"{_shown(path)}, {name}, row {row['method']}"
            _need(len(row["values"]) == len(columns[name]), f"{where}: one value for each column is needed")
            for key, value in zip(columns[name], row["values"]):
                _need(value is None or type(value) in (int, float), f"{where}: {key} is {value!r}, not a number")
                numbers[Cell(name, row["method"], key)] = None if value is None else float(value)
            if "needs" in row and not row.get("not_run_yet"):
                needs[name, row["method"]] = row["needs"]
    return PaperTables(content["paper"]["title"], numbers, rows, columns, needs, units)


def load_claims(path: str | Path, printed: PaperTables) -> tuple[Claim, ...]:
    """The claims of a claims.yaml, every reference checked against the paper's tables.

    Raises:
        ClaimError: the first error, with file, claim, key and what is expected.
    """
    path = Path(path)
    content = _yaml(path)
    entries = content.get("claims") if isinstance(content, dict) else None
    _need(isinstance(entries, list), f"{_shown(path)}: a list under the key 'claims' is needed")
    claims: dict[str, Claim] = {}
    rule = _rule(content.get("equal_within"), _shown(path))
    for number, entry in enumerate(entries, start=1):
        named = isinstance(entry, dict) and isinstance(entry.get("id"), str)
        _need(named, f"{_shown(path)}: claim number {number} has no id, a text such as C{number}")
        try:
            _need(entry["id"] not in claims, "the id stands twice in the file")
            claim = _claim(entry, printed)
            beside = [one.id for one in claims.values() if not one.control_of]
            known = f"control_of is {claim.control_of!r}; expected an earlier claim: {', '.join(beside) or 'none'}"
            _need(not claim.control_of or claim.control_of in beside, known)
            claims[entry["id"]] = replace(claim, equal_within=rule)
        except ClaimError as error:
            raise ClaimError(f"{_shown(path)}, claim {entry['id']}: {error}") from None
    return tuple(claims.values())


def _claim(entry: Mapping[str, Any], printed: PaperTables) -> Claim:
    identifier = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", entry["id"])
    _need(identifier, "an id consists of letters, digits, '_', '-' and '.'")
    unknown = sorted(set(entry) - _KEYS)
    _need(not unknown, f"unknown keys {', '.join(unknown)}; expected: {', '.join(sorted(_KEYS))}")
    optional = (
        "no_numbers", "needs", "not_run_yet", "note", "exact", "threshold", "about", "control_of",
        "departure",
    )  # fmt: skip
    texts = {
        key: _text(entry, key) for key in ("claim", "where", "kind", *optional) if key in entry or key not in optional
    }
    _need(entry["kind"] in KINDS, f"kind is {entry['kind']!r}; expected: {', '.join(KINDS)}")
    both = "holds_if" in entry and ("audit" in entry or "measured" in entry)
    _need(not both, "holds_if stands for audit and measured; give either it or the two")
    names = entry.get("for", {})
    lists = isinstance(names, dict) and all(isinstance(values, list) and values for values in names.values())
    _need(lists, f"'for' gives lists by name, for example {{column: [a, b]}}, got {names!r}")
    sides, written = {}, {}
    for side in ("audit", "measured", "after_the_data", "regime"):
        key = "holds_if" if "holds_if" in entry and side in ("audit", "measured") else side
        listed = [entry[key]] if isinstance(entry.get(key), str) else entry.get(key, [])
        strings = isinstance(listed, list) and all(isinstance(text, str) for text in listed)
        _need(strings, f"{key}: an expression or a list of expressions is needed, got {listed!r}")
        try:
            sides[side] = _conditions(listed, names, printed)
        except (ClaimError, ExpressionError) as error:
            raise ClaimError(f"{key}, {error}") from None
        # as they stand in the file, with the lists of `for` behind them
        used = {name: values for name, values in names.items() if f"{{{name}}}" in " ".join(listed)}
        shown = (f"for every {name} of: {'; '.join(map(str, values))}" for name, values in used.items())
        written[side] = (*(" ".join(text.split()) for text in listed), *shown)
    every = " ".join(map(str, itertools.chain(*written.values())))
    unused = [name for name in names if f"{{{name}}}" not in every]
    _need(not unused, f"'for' gives {', '.join(unused)}, which no expression uses")
    tests = entry.get("test", [])
    claim = Claim(
        id=entry["id"],
        **texts,
        audit=sides["audit"],
        measured=sides["measured"],
        later=sides["after_the_data"],
        audit_text=written["audit"],
        measured_text=written["measured"],
        later_text=written["after_the_data"],
        regime=sides["regime"],
        regime_text=written["regime"],
        tests=(tests,) if isinstance(tests, str) else tuple(tests),
        shows=entry.get("shows", HOLDS),
    )
    _check_sides(claim)
    return claim


def _rule(entry: Any, where: str) -> Rule | None:
    if entry is None:
        return None
    fits = (
        isinstance(entry, dict)
        and set(entry) == {"share", "least"}
        and all(type(number) in (int, float) and number > 0 for number in entry.values())
    )
    _need(fits, f"{where}: equal_within is {entry!r}; expected {{share: 0.5, least: 1.0}}, both above 0")
    return Rule(**entry)


def _check_sides(claim: Claim) -> None:
    of_experiments = {
        side: any(cell.table == EXPERIMENT for cell in cells(*getattr(claim, side))) for side in ("audit", "measured")
    }
    _need(not of_experiments["audit"], "an audit uses only the paper's tables; give experiments under 'measured'")
    reason = "give either an expression for the audit or 'no_numbers', why there is none"
    _need(bool(claim.audit) != bool(claim.no_numbers), reason)
    _need(claim.shows in (HOLDS, FAILS), f"shows is {claim.shows!r}; expected: {HOLDS}, {FAILS}")
    named = all(isinstance(test, str) and re.fullmatch(r"tests/\w+\.py::\w+", test) for test in claim.tests)
    _need(named, f"test is {list(claim.tests)}; expected: tests/<file>.py::<function>, one or a list")
    _need(not (claim.needs and claim.not_run_yet), "give either 'needs' or 'not_run_yet'")
    _need(claim.exact in ("", *EXACT), f"exact is {claim.exact!r}; expected: {', '.join(EXACT)}")
    _need(
        re.fullmatch("[0-9a-f]{7,40}|", claim.threshold), f"threshold is {claim.threshold!r}; expected: a git revision"
    )
    _need(claim.about in ("", "training"), f"about is {claim.about!r}; expected: training")
    _need(claim.measured or not claim.later, "'after_the_data' needs the earlier threshold under 'measured'")
    excused = claim.needs or claim.not_run_yet
    if claim.kind == "test":
        _need(not claim.measured, "kind test is decided by 'test'; an expression belongs under 'audit'")
        _need(claim.tests or excused, "kind test needs 'test', 'needs' or 'not_run_yet'")
        return
    _need(not claim.tests and claim.shows == HOLDS, "'test' and 'shows' go with kind test only")
    _need(claim.measured or excused, "give an expression for the measured side, 'needs' or 'not_run_yet'")
    which = f"refers to {'an' if of_experiments['measured'] else 'no'} experiment"
    fits = not claim.measured or of_experiments["measured"] == (claim.kind == "experiment")
    _need(fits, f"kind is {claim.kind} but the measured side {which}")


def _conditions(texts: list[str], names: Mapping[str, list], printed: PaperTables) -> tuple[Condition, ...]:
    expanded: dict[str, None] = {}
    for text in texts:
        used = [name for name in names if f"{{{name}}}" in text]
        for choice in itertools.product(*(names[name] for name in used)):
            full = text
            for name, value in zip(used, choice):
                full = full.replace(f"{{{name}}}", str(value))
            unknown = re.findall(r"\{[^}]*\}?", full)
            known = ", ".join(names) or "none"
            _need(not unknown, f"{''.join(unknown[:1])} is not a name of 'for'; expected: {known}")
            expanded[full] = None
    number = f"'for' makes {len(expanded)} expressions; expected: at most {_MAX_COMBINATIONS}"
    _need(len(expanded) <= _MAX_COMBINATIONS, number)
    conditions = tuple(dict.fromkeys(map(parse, expanded)))
    for cell in cells(*conditions):
        if cell.table == EXPERIMENT:
            continue
        tables = f"{cell} names no table; expected: {', '.join(printed.rows)}, {EXPERIMENT}"
        _need(cell.table in printed.rows, tables)
        for kind, name, of in (("row", cell.row, printed.rows), ("column", cell.column, printed.columns)):
            known = ", ".join(f'"{choice}"' for choice in of[cell.table])
            _need(name in of[cell.table], f"{cell} names no {kind} of {cell.table}; expected: {known}")
    changing = all(margin.cells for condition in conditions for margin in margins(condition))
    _need(changing, "a comparison refers to no cell, so no number could change it")
    return conditions


def _need(holds: Any, message: str) -> None:
    if not holds:
        raise ClaimError(message)


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    _need(isinstance(value, str) and value.strip(), f"{key} is {value!r}; a text is needed")
    return " ".join(value.split())


def _yaml(path: Path) -> Any:
    try:
        return read_repository_yaml(path)
    except yaml.YAMLError as error:
        raise ClaimError(f"{_shown(path)} is no YAML: {' '.join(str(error).split())}") from None


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
