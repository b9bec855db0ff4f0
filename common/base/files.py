"""Files that are written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


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


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is no such file, or one that is torn."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def write_json(path: str | Path, content: Any) -> Path:
    """Write plain values as JSON on one line, whole or not at all."""
    return write_atomically(path, json.dumps(content, ensure_ascii=False))


def shown(path: Path) -> str:
    """A path relative to the working directory where it lies below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
