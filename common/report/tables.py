"""Tables that print the paper's number beside ours and never mix the two: the public face of this folder.

    cell = measured_over_seeds((31.2, 30.4), (0, 1), scale="demo", data="scenes 9f3a", protocol="1,000 x 5,000")
    row = Row("sphere", paper={"i2t_r1": 64.1}, ours={"i2t_r1": cell}, status="measured")
    table = Table(paper="oblique_topology", ..., columns=(Column("i2t_r1", "i2t R@1"),), rows=(row,), ...)
    print(to_text(table, width=110)); write_table(table, "outputs/oblique_topology/table2/demo")

The records live in `schema.py`, the printed lines in `layout.py`, the formats in `formats.py`.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.report.formats import to_csv, to_latex, to_markdown, to_text
from common.report.schema import (
    MEASURED,
    PAPER_SCALE,
    QUERIES_INTERVAL,
    SEEDS_INTERVAL,
    Column,
    Measured,
    Row,
    Table,
    from_json,
    is_table,
    to_json,
)
from common.report.statistics import interval_over_seeds

__all__ = [
    "MEASURED",
    "PAPER_SCALE",
    "QUERIES_INTERVAL",
    "SEEDS_INTERVAL",
    "Column",
    "Measured",
    "Row",
    "Table",
    "from_json",
    "is_table",
    "measured_over_seeds",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_text",
    "write_atomically",
    "write_table",
]


def measured_over_seeds(
    values: Sequence[float],
    seeds: Sequence[int],
    *,
    scale: str,
    data: str,
    protocol: str,
    chance: float | None = None,
    query_interval: tuple[float, float] | None = None,
) -> Measured:
    """A `Measured` with the interval that its number of seeds allows.

    Two seeds or more: 95 % Student t over seeds, and `query_interval` is ignored. One seed: `query_interval`, a
    95 % bootstrap over queries in the column's unit, or no interval when it is None.
    """
    if len(values) >= 2:
        interval, kind = interval_over_seeds(values), SEEDS_INTERVAL
    else:
        interval, kind = query_interval, "" if query_interval is None else QUERIES_INTERVAL
    return Measured(tuple(values), tuple(seeds), interval, kind, scale, data, protocol, chance)


def write_table(table: Table, folder: str | Path) -> list[Path]:
    """Write `<table_id>.md`, `.csv`, `.json` and `.tex` into `folder` (made if missing), each atomically."""
    folder = Path(folder)
    writers = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex}
    contents = {folder / f"{table.table_id}.{ending}": write(table) for ending, write in writers.items()}
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def write_atomically(path: str | Path, content: str | bytes) -> Path:
    """Write through a temporary file in the same folder and a rename: a reader sees the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes private files; results are for everybody
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
