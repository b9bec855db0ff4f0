"""Results of named experiments that are no table: a few values per seed, with where they come from.

    write_experiment(Experiment("geomm", "memory", "demo", (0, 1), {"sphere_gb": (0.1, 0.1)}, ...), "outputs/results")

writes `<root>/<paper>/experiments/<scale>/<name>.json`. Claims refer to a value as experiment["memory"]["sphere_gb"].
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.base.files import write_atomically
from common.report.table import KNOWN_KEYS_ONLY, Measured, Table, build, json_of_format, read_format


@dataclass(frozen=True)
class Experiment:
    """Values of one experiment at one scale.

    paper: the folder.
    name: as claims refer to it.
    values: name -> one value per seed, in the order of `seeds`.
    data: what it was measured on.
    protocol: how; values are compared only under the same one.
    columns: of values <row>_<column> where each row is a training run; rows of a column lend each other their spread
        over seeds.
    """

    __pydantic_config__ = KNOWN_KEYS_ONLY

    paper: str
    name: str
    scale: str
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]
    data: str
    git_revision: str
    command: str
    created: str
    hardware: str
    caption: str
    units: Mapping[str, str] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "seeds", tuple(int(seed) for seed in self.seeds))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"an experiment's name names a file: letters, digits, '_', '-', '.', got {self.name!r}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"experiment {self.name}: distinct seeds are needed, got {self.seeds}")
        values = {}
        for key, numbers in self.values.items():
            values[key] = tuple(float(number) for number in numbers)
            if len(values[key]) != len(self.seeds) or not all(map(math.isfinite, values[key])):
                raise ValueError(
                    f"experiment {self.name}, {key}: one finite value for each of the seeds {self.seeds} is needed, "
                    f"got {numbers}"
                )
        unknown = sorted(set(self.units) - set(values))
        if not values or unknown:
            raise ValueError(f"experiment {self.name}: values {sorted(values)}, units of unknown values {unknown}")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "columns", tuple(self.columns))

    @classmethod
    def beside(
        cls, table: Table, name: str, caption: str, values: Mapping[str, Sequence[float]], **more
    ) -> "Experiment":
        """Values measured together with a table, under its provenance; `more`: units, protocol, columns."""
        shared = ("paper", "scale", "seeds", "data", "git_revision", "command", "created", "hardware")
        provenance = {key: getattr(table, key) for key in shared}
        return cls(name=name, caption=caption, values=values, **provenance, **more)

    def row_of(self, key: str) -> tuple[str, str]:
        """Row and column of a value; its name and "" where the experiment has no columns."""
        matching = max((column for column in self.columns if key.endswith(f"_{column}")), key=len, default="")
        return (key.removesuffix(f"_{matching}") if matching else key), matching

    def measured(self, key: str) -> Measured:
        """One value as a cell of a table."""
        protocol = {"data": self.data, **self.protocol}
        return Measured(self.values[key], self.seeds, None, "", self.scale, self.data, "", full_protocol=protocol)


def write_experiment(experiment: Experiment, root: str | Path) -> Path:
    """Write the file of an experiment, atomically."""
    path = Path(root) / experiment.paper / "experiments" / experiment.scale / f"{experiment.name}.json"
    return write_atomically(path, json_of_format("experiment", asdict(experiment)))


def read_experiment(path: str | Path) -> Experiment:
    """Read what `write_experiment` wrote.

    Raises:
        ValueError: not such a file, missing or unknown keys, or a failed check; the message names the file.
    """
    try:
        return build(Experiment, read_format("experiment", Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from None


def collect_experiments(roots: Sequence[str | Path]) -> list[Experiment]:
    """All experiments below `<root>/<paper>/experiments/`, later roots last.

    Raises:
        ValueError: a broken file; the message names it.
    """
    folders = dict.fromkeys(Path(root).resolve() for root in roots)
    return [read_experiment(path) for root in folders for path in sorted(root.glob("*/experiments/**/*.json"))]
