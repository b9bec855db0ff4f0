"""Claims of a paper as data: read from its claims.yaml and checked against its tables.

    claims:
      - id: C6
        claim: "The inner product on the product of spheres beats the sphere in R@1 at every initialisation."
        where: "A and B, Table 3"
        for: {init: [e^2.64, e^0], column: [zs_i2t_r1, zs_t2i_r1]}
        holds_if: table3["Ob(64, 8), {init}"]["{column}"] > table3["Sphere, {init}"]["{column}"]

The *audit* puts the paper's printed numbers into the expression, *measured* puts ours (`decide.py`). `holds_if` serves
both; `audit` and `measured` serve one each where they must differ. Each is an expression, or a list of which all must
hold. Names of `for` in braces stand for all their combinations. The measured side may also use values of experiments
(`Table.experiment`). Further keys:

    test              instead of a measured expression: one or more pytest node ids that decide the claim
    shows             "does not hold" where these prove the opposite

    no_numbers        why the paper's numbers cannot decide, for example only a figure; instead of an audit
    needs             what prevents any run of the measured side
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from common.base.files import read_repository_yaml
from common.report.claims.equivalence import Rule
from common.report.claims.expressions import EXPERIMENT, Cell, Condition, cells, margins, parse
from common.report.table import KNOWN_KEYS_ONLY, build

HOLDS, FAILS = "holds", "does not hold"


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


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


_Text = Annotated[str, pydantic.Field(pattern=r"\S"), pydantic.AfterValidator(_on_one_line)]
_Texts = Annotated[tuple[_Text, ...], pydantic.BeforeValidator(_listed)]
_Test = Annotated[str, pydantic.Field(pattern=r"^tests/\w+\.py::\w+$")]
_Choices = Annotated[list[Any], pydantic.Field(min_length=1)]


class _File(pydantic.BaseModel):
    # A claims.yaml.

    claims: list[dict[str, Any]]
    equal_within: Rule | None = None


@dataclass(frozen=True, kw_only=True)
class _Stated:
    # Keys of claims.yaml that a claim has as they stand there, see the module.

    id: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    claim: _Text
    where: _Text
    tests: Annotated[tuple[_Test, ...], pydantic.BeforeValidator(_listed), pydantic.Field(alias="test")] = ()
    shows: Literal["holds", "does not hold"] = HOLDS
    no_numbers: _Text = ""
    needs: _Text = ""
    note: _Text = ""
    exact: Literal["", "by construction", "parity check"] = ""
    threshold: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{7,40}$")] = ""
    about: Literal["", "training"] = ""
    control_of: _Text = ""
    departure: _Text = ""


@dataclass(frozen=True, kw_only=True)
class _Entry(_Stated):
    # A claim as it stands in the file.

    __pydantic_config__ = KNOWN_KEYS_ONLY

    names: Annotated[dict[str, _Choices], pydantic.Field(alias="for")] = field(default_factory=dict)
    holds_if: _Texts = ()
    audit: _Texts = ()
    measured: _Texts = ()
    after_the_data: _Texts = ()
    regime: _Texts = ()


@dataclass(frozen=True, kw_only=True)
class Claim(_Stated):
    """One claim; the fields are the keys of claims.yaml, see the module.

    `audit`, `measured`, `later` (of `after_the_data`) and `regime` are conditions that all must hold; `audit_text` and
    the like are their expressions as written.
    """

    audit: tuple[Condition, ...]
    measured: tuple[Condition, ...]
    later: tuple[Condition, ...]
    regime: tuple[Condition, ...]
    audit_text: tuple[str, ...]
    measured_text: tuple[str, ...]
    later_text: tuple[str, ...]
    regime_text: tuple[str, ...]
    equal_within: Rule | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tables and experiments that the claim refers to."""
        used = cells(*self.audit, *self.measured, *self.later, *self.regime)
        return tuple(dict.fromkeys(cell.row if cell.table == EXPERIMENT else cell.table for cell in used))

    def refers_to(self, sources: Sequence[str]) -> bool:
        """Whether any of these tables and experiments is among its `sources`."""
        return not set(self.sources).isdisjoint(sources)


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
    try:
        file = build(_File, content)
    except ValueError as error:
        raise ClaimError(f"{_shown(path)}: {error}") from None
    claims: dict[str, Claim] = {}
    for number, content in enumerate(file.claims, start=1):
        try:
            claim = _claim(build(_Entry, content), printed)
            _need(claim.id not in claims, "the id stands twice in the file")
            beside = [one.id for one in claims.values() if not one.control_of]
            known = f"control_of is {claim.control_of!r}; expected an earlier claim: {', '.join(beside) or 'none'}"
            _need(not claim.control_of or claim.control_of in beside, known)
        except ValueError as error:
            raise ClaimError(f"{_shown(path)}, claim {content.get('id', f'number {number}')}: {error}") from None
        claims[claim.id] = replace(claim, equal_within=file.equal_within)
    return tuple(claims.values())


def _claim(entry: _Entry, printed: PaperTables) -> Claim:
    both = entry.holds_if and (entry.audit or entry.measured)
    _need(not both, "holds_if stands for audit and measured; give either it or the two")
    sides, written = {}, {}
    for side in ("audit", "measured", "after_the_data", "regime"):
        key = "holds_if" if entry.holds_if and side in ("audit", "measured") else side
        texts = getattr(entry, key)
        try:
            sides[side] = _conditions(texts, entry.names, printed)
        except ValueError as error:
            raise ClaimError(f"{key}, {error}") from None
        # as they stand in the file, with the lists of `for` behind them
        used = {name: values for name, values in entry.names.items() if f"{{{name}}}" in " ".join(texts)}
        shown = (f"for every {name} of: {'; '.join(map(str, values))}" for name, values in used.items())
        written[side] = (*texts, *shown)
    every = " ".join(itertools.chain(*written.values()))
    unused = [name for name in entry.names if f"{{{name}}}" not in every]
    _need(not unused, f"'for' gives {', '.join(unused)}, which no expression uses")
    claim = Claim(
        **{stated.name: getattr(entry, stated.name) for stated in fields(_Stated)},
        audit=sides["audit"],
        measured=sides["measured"],
        later=sides["after_the_data"],
        regime=sides["regime"],
        audit_text=written["audit"],
        measured_text=written["measured"],
        later_text=written["after_the_data"],
        regime_text=written["regime"],
    )
    _check_sides(claim)
    return claim


def _check_sides(claim: Claim) -> None:
    of_experiments = any(cell.table == EXPERIMENT for cell in cells(*claim.audit))
    _need(not of_experiments, "an audit uses only the paper's tables; give experiments under 'measured'")
    reason = "give either an expression for the audit or 'no_numbers', why there is none"
    _need(bool(claim.audit) != bool(claim.no_numbers), reason)
    _need(claim.measured or not claim.later, "'after_the_data' needs the earlier threshold under 'measured'")
    _need(not (claim.measured and claim.tests), "'test' decides the measured side; give an expression under 'audit'")
    decided = claim.measured or claim.tests or claim.needs
    _need(decided, "give an expression for the measured side, 'test' or 'needs'")
    _need(claim.tests or claim.shows == HOLDS, "'shows' goes with 'test' only")


def _conditions(texts: Sequence[str], names: Mapping[str, list], printed: PaperTables) -> tuple[Condition, ...]:
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


def _yaml(path: Path) -> Any:
    try:
        return read_repository_yaml(path)
    except yaml.YAMLError as error:
        raise ClaimError(f"{_shown(path)} is no YAML: {' '.join(str(error).split())}") from None


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
