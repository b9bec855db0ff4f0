"""What a number of ours and a table of results are: frozen dataclasses, their checks, and JSON.

    cell = measured_over_seeds((31.2, 30.4), (0, 1), scale="demo", data="scenes 9f3a", protocol="1,000 x 5,000")
    row = Row("sphere", paper={"i2t_r1": 64.1}, ours={"i2t_r1": cell}, status="measured")
    table = Table(paper="oblique_topology", ..., columns=(Column("i2t_r1", "i2t R@1"),), rows=(row,), ...)

The paper's numbers and ours have different types, so that neither can take the other's place: `Row.paper` holds bare
numbers, `Row.ours` holds `Measured` records. Every other format is written from these records (`formats.py`); only JSON
is read back.
"""

import functools
import json
import math
import re
import statistics
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pydantic

from common.report.crossed import crossed_half_width, picture_variance
from common.report.hits import Hits, read_hits
from common.report.statistics import (
    RUNS,
    SHARE_OF,
    bounded_interval,
    interval_of_hits,
    interval_of_runs,
    interval_over_seeds,
)

SEEDS_INTERVAL = "95 % t over seeds"
CROSSED_INTERVAL = "95 % over seeds and test pictures"
RUNS_INTERVAL = "95 % exact, of a share of runs"
OF_SHARES = " on the arcsine scale"  # where ± would leave the range of a share
CUT = ", cut at the least possible value"
LEAST = dict.fromkeys(("components", "centres", "directions", "edges"), 1.0)  # of these units
LEAST |= dict.fromkeys(("captions", "multiplier", "norm", "radians"), 0.0)  # a distance may be minus an inner product
MOST = {"cosine": 1.0}
QUERIES_INTERVAL = "95 % bootstrap over queries, one seed"
WILSON_INTERVAL = "95 % Wilson over queries where all or none are hits, one seed"
INTERVALS_OF_TIES = {
    "bootstrap": "95 % bootstrap over queries where all seeds tie",
    "Wilson": "95 % Wilson over queries where all or none are hits, of all seeds",
}
MEASURED = "measured"
PAPER_SCALE = "paper"
ERROR, _FIRST_ERROR, _FINAL_ERROR = 0.05, 0.01, 0.04  # two-sided: all seeds at once; the first, then all planned ones
_LOSS_OF_CHANCE, _ODDS_OF_CHANCE = 0.95, 2  # a row that did not get away from a guess did not train
KNOWN_KEYS_ONLY = pydantic.ConfigDict(extra="forbid")  # of JSON; a dataclass that is made here is not checked by it


@dataclass(frozen=True)
class Column:
    """One column of a table.

    unit: "percent" (one decimal), "fraction" (three decimals) or any other text (four significant digits).
    stands_in_for: our test set where it is not the paper's, for example "scenes/imagenet_a" for ImageNet-A.
    better: "higher", "lower", or None where the number is no quality (a temperature, a reference).
    guess: the model behind the `chance` of its cells; empty = uniform guessing.
    """

    __pydantic_config__ = KNOWN_KEYS_ONLY

    key: str
    label: str
    unit: str = "percent"
    stands_in_for: str | None = None
    better: str | None = "higher"
    guess: str = ""

    def __post_init__(self):
        if self.better not in ("higher", "lower", None):
            raise ValueError(f"column {self.key}: better must be 'higher', 'lower' or None, got {self.better!r}")


@dataclass(frozen=True)
class Measured:
    """One number of ours: a value per seed, in the column's unit, and where it comes from.

    interval: (low, high) in that unit, None = none; `interval_kind` is its rule.
    data: a name with a short fingerprint.
    protocol: short text for readers; `full_protocol` is what claims compare, empty in old tables.
    chance: the chance level, in the column's unit.
    undecided: why the number may decide no claim.
    validation: the same metric on validation data, mean over seeds, where it was logged.
    hits: the results of all queries; they lie in the table's file of hits, not its JSON.
    """

    __pydantic_config__ = KNOWN_KEYS_ONLY

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    interval: tuple[float, float] | None
    interval_kind: str
    scale: str
    data: str
    protocol: str
    chance: float | None = None
    full_protocol: Mapping[str, Any] = field(default_factory=dict)
    undecided: str = ""
    validation: float | None = None
    hits: Annotated[pydantic.InstanceOf[Hits] | None, pydantic.Field(exclude=True)] = field(
        default=None, compare=False, repr=False
    )

    def __post_init__(self):
        _set(self, values=tuple(float(value) for value in self.values), seeds=tuple(int(seed) for seed in self.seeds))
        if not self.values or len(self.values) != len(self.seeds) or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(
                f"one value for each distinct seed is needed, got values {self.values}, seeds {self.seeds}"
            )
        numbers = [*self.values, *(self.interval or ()), *([] if self.chance is None else [self.chance])]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"values, interval and chance must be finite, got {numbers}")

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


def measured_over_seeds(
    values: Sequence[float],
    seeds: Sequence[int],
    *,
    scale: str,
    data: str,
    protocol: str,
    chance: float | None = None,
    query_interval: tuple[float, float] | None = None,
    query_interval_kind: str = QUERIES_INTERVAL,
    full_protocol: Mapping[str, Any] | None = None,
    validation: float | None = None,
    hits: Hits | None = None,
) -> Measured:
    """A `Measured` with the interval that its number of seeds allows.

    Two seeds or more: 95 % over seeds and test pictures if `hits` (in percent) are known, over queries where these show
    no spread, else Student's t over seeds. One seed: `query_interval`, in the column's unit, a bootstrap over queries
    unless its kind names another rule.
    """
    if len(values) >= 2:
        interval, kind = interval_over_seeds(values), SEEDS_INTERVAL
        if hits is not None and len(hits.queries) > 1:
            center, pictures = math.fsum(values) / len(values), picture_variance(hits.by_picture())
            half_width = float(crossed_half_width(interval[1] - center, pictures, 0.05))
            interval, kind = (center - half_width, center + half_width), CROSSED_INTERVAL
            if half_width < 1e-9 and (hits.queries > 0).sum() > 1:  # the seeds tie
                (low, high), name = interval_of_hits(hits.over_seeds())
                interval, kind = (100 * low, 100 * high), INTERVALS_OF_TIES[name]
    else:
        interval, kind = query_interval, "" if query_interval is None else query_interval_kind
    return Measured(
        tuple(values),
        tuple(seeds),
        interval,
        kind,
        scale,
        data,
        protocol,
        chance,
        dict(full_protocol or {}),
        validation=validation,
        hits=hits,
    )


@dataclass(frozen=True)
class Training:
    """How the runs of a row were made, and the signs by which it trained; none of them is a test number.

    revision, evaluated_at: git revisions of the code that trained and that evaluated, several joined by ", ".
    code: key of `Table.code`, of the files that trained it.
    loss_over_chance: final loss over its chance level, by seed; empty = not logged.
    validation, validation_chance: last `validation_metric` by seed, and its chance level, as fractions; empty = not
        logged.
    """

    __pydantic_config__ = KNOWN_KEYS_ONLY

    revision: str
    evaluated_at: str
    code: str = ""
    loss_over_chance: tuple[float, ...] = ()
    validation_metric: str = ""
    validation: tuple[float, ...] = ()
    validation_chance: float | None = None

    @property
    def failure(self) -> str:
        """By which sign the row did not train; empty if it did, or if nothing was logged.

        The median over seeds of the final loss is at least 0.95 of its chance level, or the odds of the mean validation
        figure are below twice those of chance. The rule takes whole rows: one collapsed seed stays.
        """
        loss = statistics.median(self.loss_over_chance) if self.loss_over_chance else 0.0
        if loss >= _LOSS_OF_CHANCE:
            return f"final loss at {loss:.2f} of its chance level"
        if self.validation and self.validation_chance is not None:
            figure, chance = math.fsum(self.validation) / len(self.validation), self.validation_chance
            if figure * (1 - chance) < _ODDS_OF_CHANCE * chance * (1 - figure):
                numbers = f"{100 * figure:.2g} % on validation data, chance level {100 * chance:.2g} %"
                return f"{self.validation_metric} of {numbers}"
        return ""


@dataclass(frozen=True)
class Row:
    """One method: the paper's numbers and ours by column key.

    status: "measured", or why there is no number, for example "not run: needs published weights".
    ran: what ran where the paper's name of the method differs: "Multi(32, 4), ViT 128 x 4, 48 px".
    training: None in old tables.
    key: in claims about our measurements, see `Table.experiment`; empty = none are about this row.
    """

    __pydantic_config__ = KNOWN_KEYS_ONLY

    method: str
    paper: Mapping[str, float | None]
    ours: Mapping[str, Measured | None]
    status: str
    note: str = ""
    ran: str = ""
    training: Training | None = None
    key: str = ""

    def __post_init__(self):
        measured = any(cell is not None for cell in self.ours.values())
        if not self.status:
            raise ValueError(f"row {self.method}: the status is empty")
        if self.status == MEASURED and not measured:
            raise ValueError(f"row {self.method} has status 'measured' but no measured cell")
        if self.status.startswith("not run") and measured:
            raise ValueError(f"row {self.method} has measured cells but status {self.status!r}")


@dataclass(frozen=True)
class Table:
    """A table of one paper with the paper's numbers beside ours, and the provenance of ours.

    paper: the folder.
    table_id: stem of the written files.
    created: ISO date and time.
    errata: what is wrong in the printed table.
    models: what was trained: sizes, pixels, parameters, steps.
    hits_file: name of the file of hits beside the JSON; empty = none.
    chosen_by: the number by which the settings of its scale were chosen; empty = test data.
    code: key that rows name -> file -> hash of what trained them.
    settings: near the best of a search, at which its rows were trained instead of their own.
    plan: how many seeds were to decide, see `deciding`.
    experiment: a claim names our number as experiment["<experiment>"]["<row key>_<column key>"], or ["<row key>"] in a
        column with an empty key; empty = `table_id`.
    protocol: how all numbers were measured, with all settings; of numbers without a full protocol claims compare this.
    rows_are_runs: whether a row is a training run, so that rows of a column lend each other their spread over seeds.
    """

    __pydantic_config__ = KNOWN_KEYS_ONLY

    paper: str
    paper_title: str
    paper_version: str
    table_id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    scale: str
    data: str
    seeds: tuple[int, ...]
    git_revision: str
    command: str
    created: str
    hardware: str
    errata: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    models: str = ""
    hits_file: str = ""
    chosen_by: str = ""
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: tuple[str, ...] = field(default=())
    plan: tuple[int, ...] = field(default=())
    experiment: str = ""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    rows_are_runs: bool = True

    def __post_init__(self):
        for name in ("columns", "rows", "seeds", "errata", "notes", "settings", "plan"):
            _set(self, **{name: tuple(getattr(self, name))})
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.table_id):
            raise ValueError(f"table_id names files: letters, digits, '_', '-' and '.' only, got {self.table_id!r}")
        keys = [column.key for column in self.columns]
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"table {self.table_id} needs columns with distinct keys, got {keys}")
        for row in self.rows:
            unknown = sorted((set(row.paper) | set(row.ours)) - set(keys))
            if unknown:
                raise ValueError(f"row {row.method} has cells in unknown columns {unknown}; the columns are {keys}")
        for column in self.columns:
            self._check_column(column)
        units = {column.key: column.unit for column in self.columns}
        _set(self, rows=tuple(_with_intervals_in_range(row, units) for row in self.rows))

    def _check_column(self, column: Column) -> None:
        cells = self.measured(column.key)
        for name in ("scale", "data", "protocol"):
            values = sorted({getattr(cell, name) for cell in cells})
            if len(values) > 1:
                raise ValueError(f"table {self.table_id}, column {column.key} mixes {name}: {', '.join(values)}")
        if cells and cells[0].scale != self.scale:
            raise ValueError(
                f"table {self.table_id}, column {column.key} mixes scale: cells {cells[0].scale}, table {self.scale}"
            )
        unknown = sorted({seed for cell in cells for seed in cell.seeds} - set(self.seeds))
        if unknown:
            raise ValueError(f"table {self.table_id}, column {column.key}: seeds {unknown} are not in {self.seeds}")

    @property
    def deciding(self) -> tuple[int, float]:
        """How many of the seeds decide claims, and the chance to err that they may spend.

        `plan` is empty where all seeds were trained before a difference was seen: 5 %. (first, final) was written with
        the first seeds: these decide at 1 %, all planned ones at 4 %, together at most 5 % (Bonferroni). (first,) are
        the seeds of a table that was extended without a plan. Other seeds decide nothing.
        """
        first, final = (*self.plan, 0, 0)[:2]
        if not self.plan:
            return len(self.seeds), ERROR
        if len(self.seeds) == final:
            return final, _FINAL_ERROR
        return first, _FIRST_ERROR if final else ERROR

    def measured(self, key: str) -> list[Measured]:
        """Our measured cells of one column, in row order."""
        return [cell for row in self.rows if (cell := row.ours.get(key)) is not None]


def with_columns(table: Table, columns: Sequence[Column]) -> Table:
    """The table with some columns, in the order given, and the rows measured in them."""
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


def to_json(table: Table) -> str:
    """The table as indented JSON text; `from_json` gives it back unchanged."""
    return json_of_format("report table", _adapter(Table).dump_python(table, mode="json"))


def is_table(content: object) -> bool:
    """Whether parsed JSON claims to be a table (perhaps a broken one)."""
    return isinstance(content, dict) and content.get("format") == "report table"


def from_json(text: str) -> Table:
    """Read what `to_json` wrote.

    Raises:
        ValueError: no JSON, another version, missing or unknown keys, or a failed check.
    """
    return build(Table, read_format("report table", text))


def json_of_format(kind: str, content: Mapping[str, Any]) -> str:
    """Indented JSON that names its kind."""
    content = {"format": kind, "format_version": 1, **content}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_format(kind: str, text: str) -> dict[str, Any]:
    """The content of what `json_of_format` made; ValueError for other text."""
    content = json.loads(text)  # JSONDecodeError is a ValueError and gives the position
    if not isinstance(content, dict) or (content.pop("format", None), content.pop("format_version", None)) != (kind, 1):
        raise ValueError(f"its format is not {kind!r}, version 1")
    return content


_adapter = functools.cache(pydantic.TypeAdapter)


def build(kind: type, content: object) -> Any:
    """A dataclass from an object of JSON; ValueError for missing or unknown keys, another type, or a failed check."""
    try:
        return _adapter(kind).validate_python(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or kind.__name__
        raise ValueError(f"{where}: {first['msg']}, got {str(first['input'])[:80]}") from error


def plan_of(table: Table, earlier: Sequence[Table], planned: int = 0) -> tuple[int, ...]:
    """`Table.plan` of a table, by the earlier tables of the same runs.

    Args:
        earlier: tables of any runs; one of the same runs, with two seeds or more, was a look at the result.
        planned: seeds that are to decide in the end; it counts only before the first look.
    """
    looks = [other for other in earlier if _extends(table, other)]
    longer = [other for other in earlier if len(other.seeds) > len(table.seeds) and _extends(other, table)]
    if not looks and longer:  # fewer seeds after a look at more
        return longer[0].plan or (len(table.seeds), len(longer[0].seeds))
    if not looks:
        return (len(table.seeds), planned) if planned > len(table.seeds) else ()
    first = min(looks, key=lambda look: len(look.seeds))
    return first.plan or ((len(first.seeds),) if len(first.seeds) < len(table.seeds) else ())


def _extends(table: Table, other: Table) -> bool:
    # Whether a table has the numbers of the other's runs; one seed or a constant is no sign
    cells = {(row.method, key): cell for row in table.rows for key, cell in row.ours.items() if cell is not None}
    return any(
        then
        and (now := cells.get((row.method, key)))
        and now.values[: len(then.values)] == then.values
        and len(set(then.values)) > 1
        for row in other.rows
        for key, then in row.ours.items()
    )


def read_table(path: str | Path, with_hits: bool = True) -> Table:
    """The table of a JSON file, with the hits beside it.

    Raises:
        ValueError: as `from_json`; a missing or broken file of hits, or of other seeds. The message names the file.
    """
    path = Path(path)
    try:
        table = from_json(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from error
    if not table.hits_file or not with_hits:
        return table
    try:
        hits = read_hits(path.with_name(table.hits_file))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is broken: its hits in {table.hits_file} cannot be read: {error}") from error
    rows = []
    for row in table.rows:
        ours = row.ours.items()
        cells = {key: cell and replace(cell, hits=hits.get(f"{row.method}/{key}")) for key, cell in ours}
        for key, cell in cells.items():
            if cell and cell.hits and not cell.hits.have_means(cell.values):
                where = f"row {row.method}, column {key}: {table.hits_file} has hits of other seeds or of another run"
                raise ValueError(f"{path} is broken: {where}; expected: those of {cell.values}: make the table again")
        rows.append(replace(row, ours=cells))
    return replace(table, rows=rows)


def hits_of(table: Table) -> dict[tuple[str, str], Hits]:
    """The hits of a table's cells."""
    cells = ((row.method, key, cell) for row in table.rows for key, cell in row.ours.items())
    return {(row, key): cell.hits for row, key, cell in cells if cell is not None and cell.hits is not None}


def _with_intervals_in_range(row: Row, units: Mapping[str, str]) -> Row:
    # counts whose ± would leave their range have its end; shares whose ± would leave theirs get an interval of the
    # arcsine, shares of runs an exact one; over the queries of one seed a mean of sets may leave it, and has its end
    ours = dict(row.ours)
    for key, cell in row.ours.items():
        if cell is not None and units[key] == RUNS and cell.interval_kind == SEEDS_INTERVAL:
            ours[key] = replace(cell, interval=interval_of_runs(cell.values), interval_kind=RUNS_INTERVAL)
        whole, least = SHARE_OF.get(units[key]), LEAST.get(units[key])
        if cell is None or cell.interval is None:
            continue
        if least is not None and cell.interval[0] < least <= min(cell.values) and cell.interval_kind == SEEDS_INTERVAL:
            ours[key] = replace(cell, interval=(least, cell.interval[1]), interval_kind=cell.interval_kind + CUT)
        if whole is None:
            continue
        if cell.interval_kind in (QUERIES_INTERVAL, INTERVALS_OF_TIES["bootstrap"]) and 0 <= cell.values[0] <= whole:
            ours[key] = replace(cell, interval=tuple(min(max(end, 0.0), whole) for end in cell.interval))
        if cell.interval_kind not in (SEEDS_INTERVAL, CROSSED_INTERVAL):
            continue
        interval, of_shares = bounded_interval(cell.interval, cell.values, whole)
        if of_shares:
            ours[key] = replace(cell, interval=interval, interval_kind=cell.interval_kind + OF_SHARES)
    return row if ours == row.ours else replace(row, ours=ours)


def _set(instance, **values) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)
