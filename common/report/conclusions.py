"""Conclusions of a paper: sentences of its conclusions.yaml, with numbers read from the committed results.

    - claims: {C5: does not hold}   # of claims.yaml with the verdict that the text is about; none = no claim. A verdict
                                    # on the mean that is another one belongs to it: "undecided; on the mean: holds"
      scale: demo                   # of these verdicts
      text: >-                      # the first sentence without numbers, then those that show it
        A fixed temperature harms the sphere. R@1 falls from {table3/demo/table3 | Sphere, e^0 | zs_i2t_r1} to ... %.
      details: On scenes ...        # further numbers and controls

A number is {part/scale/table | row | column}, the mean over seeds; with a fourth part, {.. | column | ±}, the table's
cell with its interval; {.. | column | chance} is the chance level. {.. | row minus other row | ..} is a difference,
paired over seeds. `text` opens the paper's README.md; pages of results have the details, too.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from common.base.files import read_repository_yaml
from common.base.provenance import ROOT
from common.report.formats import format_measured, format_value
from common.report.statistics import interval_over_seeds
from common.report.table import SEEDS_INTERVAL, Measured, Table, read_table


@dataclass(frozen=True)
class Conclusion:
    """`claims`: id -> verdict; `scale`: of these verdicts; `text` and `details` with their numbers.

    seeds: of the numbers in `text`, by their scale.
    """

    text: str
    details: str = ""
    claims: Mapping[str, str] = field(default_factory=dict)
    scale: str = ""
    seeds: Mapping[str, Collection[int]] = field(default_factory=dict)

    @property
    def verdicts(self) -> str:
        """ "C5, C6: does not hold; C7: holds; scale demo", empty where the sentence is about no claim."""
        by_verdict: dict[str, list[str]] = {}
        for claim, verdict in self.claims.items():
            whole, _, mean = verdict.partition("; on the mean: ")
            by_verdict.setdefault(f"{whole}, on the mean {mean}" if mean else whole, []).append(claim)
        scale = [f"scale {self.scale}"] if self.claims else []
        return "; ".join([*(f"{', '.join(ids)}: {verdict}" for verdict, ids in by_verdict.items()), *scale])

    @property
    def measured(self) -> str:
        """ "numbers: demo, 3 seeds; photos, 5 to 10 seeds"; empty without numbers."""
        counts = {scale: " to ".join(map(str, sorted({min(of), max(of)}))) for scale, of in sorted(self.seeds.items())}
        shown = "; ".join(f"{scale}, {count} seed{'s' * (count != '1')}" for scale, count in counts.items())
        return f"numbers: {shown}" if shown else ""

    @property
    def short(self) -> str:
        """The first sentence."""
        return re.match(r".*?[.](?= [A-Z]|$)|.*", self.text, re.DOTALL)[0]

    @property
    def rest(self) -> str:
        """The other sentences, without details."""
        return self.text[len(self.short) :].strip()


def load_conclusions(folder: str | Path, results: str | Path = ROOT / "results") -> list[Conclusion]:
    """The conclusions of a paper folder; none without a conclusions.yaml.

    Raises:
        ValueError: a number that does not exist; names the file, the number and the known ones.
    """
    path = Path(folder) / "conclusions.yaml"
    if not path.is_file():
        return []
    of_paper = Path(results) / path.parent.resolve().name
    table = cache(lambda source: read_table(of_paper / f"{source}.json"))  # of which many numbers come

    def number(match: re.Match, seeds: dict[str, set[int]]) -> str:
        try:
            shown, scale, count = _number(table, [part.strip() for part in match[1].split("|")])
            seeds.setdefault(scale, set()).add(count)
            return shown
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(f"{path.parent.name}/conclusions.yaml: {{{match[1]}}}: {error}") from None

    def filled(entry: dict[str, Any]) -> Conclusion:
        seeds = {"text": {}, "details": {}}
        texts = {
            key: re.sub(r"\{(.*?)\}", partial(number, seeds=seeds[key]), entry[key]) for key in seeds.keys() & entry
        }
        return Conclusion(**{**entry, **texts}, seeds=seeds["text"])

    return [filled(entry) for entry in read_repository_yaml(path)]


def _number(read: Callable[[str], Table], parts: list[str]) -> tuple[str, str, int]:
    # The number as it is shown, its scale and its seeds
    source, row, column, *form = parts
    table = read(source)
    rows = {entry.method: {key: cell for key, cell in entry.ours.items() if cell} for entry in table.rows}
    named = {method: cells for method, cells in rows.items() if cells}
    measured, *subtracted = [_named(column, _named(name, named)) for name in row.split(" minus ")]
    for other in subtracted:
        measured = _paired_difference(measured, other)
    unit = next(entry.unit for entry in table.columns if entry.key == column)
    mean = format_value(measured.mean, unit) if unit in ("percent", "fraction") else f"{measured.mean:.3g}"
    forms = {"": mean, "±": format_measured(measured, unit, with_seeds=False)}
    if measured.chance is not None:
        forms["chance"] = format_value(measured.chance, unit)
    shown = _named(" | ".join(form), forms)
    return shown, table.scale, len(measured.values)


def _paired_difference(one: Measured, other: Measured) -> Measured:
    if one.seeds != other.seeds:
        raise ValueError(f"seeds {one.seeds} and {other.seeds} make no pairs; expected the same ones")
    values = tuple(left - right for left, right in zip(one.values, other.values))
    interval = interval_over_seeds(values)
    return replace(one, values=values, interval=interval, interval_kind=SEEDS_INTERVAL, chance=None, hits=None)


def _named(key: str, values: Mapping[str, Any]) -> Any:
    if key not in values:
        raise ValueError(f"no {key!r}; expected one of: {', '.join(values)}")
    return values[key]
