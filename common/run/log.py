"""JSON-lines log of a run, written by the main process; curves and tables read it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.base.files import naming, utf8

DECIDES = "nothing"


class RunLog:
    """Appends one JSON object per line.

    Args:
        resume_step: later records are dropped, so that a resumed log equals an unbroken one; None = a new file.
        enabled: False on all but the main process.
    """

    def __init__(self, path: Path, resume_step: int | None = None, enabled: bool = True) -> None:
        self.path, self.enabled = path, enabled
        if not enabled:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_step is not None and path.is_file():
            kept = [record for record in read_log(path) if record.get("step", 0) <= resume_step]
        temporary = path.with_suffix(".tmp")
        with naming(temporary):
            temporary.write_bytes(b"".join(_line(record) for record in kept))
        temporary.replace(path)

    def write(self, event: str, **values: Any) -> None:
        """Appends {"event": event, **values}. Non-finite numbers become strings: JSON has none."""
        if self.enabled:
            with naming(self.path), self.path.open("ab") as file:
                file.write(_line({"event": event, **values}))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Records of a log; a last line cut off by a crash is left out."""
    # a crash may cut inside a character; splitlines() would also split inside a text
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
                    raise ValueError("expected an object whose step is a whole number")
                records.append(record)
        except ValueError as error:
            if any(lines[number:]):
                raise ValueError(
                    f"{path}, line {number} is no record of a log: {error}; without this line the file can be read"
                ) from error
    return records


def recall_at_1(metrics: Mapping[str, float]) -> float:
    """R@1 in percent, mean of both directions."""
    return 50 * (metrics["i2t_recall_at_1"] + metrics["t2i_recall_at_1"])


def validated_recall(path: Path) -> list[tuple[int, float]]:
    """(step, `recall_at_1` on validation pairs) of each validation in a log."""
    return [
        (record["step"], recall_at_1(record["metrics"]))
        for record in read_log(path)
        if record["event"] == "evaluate" and "i2t_recall_at_1" in record["metrics"]
    ]


def _line(record: dict[str, Any]) -> bytes:
    return utf8(json.dumps(_finite(record), ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
