"""Tables that print the paper's number beside ours and never mix the two: the public face of this folder.

    cell = measured_over_seeds((31.2, 30.4), (0, 1), scale="demo", data="scenes 9f3a", protocol="1,000 x 5,000")
    row = Row("sphere", paper={"i2t_r1": 64.1}, ours={"i2t_r1": cell}, status="measured")
    table = Table(paper="oblique_topology", ..., columns=(Column("i2t_r1", "i2t R@1"),), rows=(row,), ...)
    print(to_text(table, width=110)); write_table(table, "outputs/oblique_topology/table2/demo")

The records live in `schema.py`, the printed lines in `layout.py`, the formats in `formats.py`.
"""

import io
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.report.formats import to_csv, to_latex, to_markdown, to_text
from common.report.schema import (
    MEASURED,
    PAPER_SCALE,
    QUERIES_INTERVAL,
    SEEDS_INTERVAL,
    Column,
    Measured,
    PerImage,
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
    "read_table",
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
    full_protocol: Mapping[str, Any] | None = None,
    per_image: PerImage | None = None,
) -> Measured:
    """A `Measured` with the interval that its number of seeds allows.

    Two seeds or more: 95 % Student t over seeds, and `query_interval` is ignored. One seed: `query_interval`, a
    95 % bootstrap over queries in the column's unit, or no interval when it is None. `full_protocol` and `per_image`
    (of a single seed) are what claims are decided with.
    """
    if len(values) >= 2:
        interval, kind = interval_over_seeds(values), SEEDS_INTERVAL
    else:
        interval, kind = query_interval, "" if query_interval is None else QUERIES_INTERVAL
    return Measured(
        tuple(values), tuple(seeds), interval, kind, scale, data, protocol, chance, dict(full_protocol or {}), per_image
    )


def write_table(table: Table, folder: str | Path) -> list[Path]:
    """Write `<table_id>.md`, `.csv`, `.json` and `.tex` into `folder` (made if missing), each atomically.

    What the test images add to the numbers of single seeds goes to `<table_id>_images.npz`, where there are such.
    """
    folder = Path(folder)
    writers = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex}
    contents = {folder / f"{table.table_id}.{ending}": write(table) for ending, write in writers.items()}
    for path, content in contents.items():
        write_atomically(path, content)
    images = _images_file(folder / f"{table.table_id}.json")
    images.unlink(missing_ok=True)  # of an earlier run
    arrays = {
        f"{number}/{key}/{name}": getattr(cell.per_image, name)
        for number, row in enumerate(table.rows)
        for key, cell in row.ours.items()
        if cell is not None and cell.per_image is not None
        for name in ("sums", "counts")
    }
    if not arrays:
        return list(contents)
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return [*contents, write_atomically(images, stream.getvalue())]


def read_table(path: str | Path) -> Table:
    """The table of a JSON file, with what its test images add where that lies beside it and fits the numbers.

    Raises:
        ValueError: as `from_json`, without the file's name.
    """
    path = Path(path)
    table = from_json(path.read_text(encoding="utf-8", errors="replace"))
    images = _images_file(path)
    if not images.is_file():
        return table
    try:
        with np.load(images, allow_pickle=False) as arrays:
            rows = [_with_images(row, number, arrays) for number, row in enumerate(table.rows)]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{images.name} beside it cannot be read ({error}); delete it or run the table again"
        ) from None
    return replace(table, rows=tuple(rows))


def _with_images(row: Row, number: int, arrays: Mapping[str, np.ndarray]) -> Row:
    ours = dict(row.ours)
    for key, cell in row.ours.items():
        if cell is not None and len(cell.seeds) == 1 and f"{number}/{key}/sums" in arrays:
            per_image = PerImage(arrays[f"{number}/{key}/sums"], arrays[f"{number}/{key}/counts"])
            if abs(per_image.mean - cell.mean) < 1.0e-6 * max(1.0, abs(cell.mean)):  # else of another run
                ours[key] = replace(cell, per_image=per_image)
    return replace(row, ours=ours)


def _images_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_images.npz")


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
