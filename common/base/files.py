"""Files that are written whole or not at all, and locks that end with their process."""

import errno
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import yaml


def utf8(text: str) -> bytes:
    r"""UTF-8; other bytes of a file name become \udcfc or similar, which JSON and YAML read back unchanged."""
    return text.encode("utf-8", "backslashreplace")


def printable(text: str) -> str:
    """A name as screens, logs and tables can hold it, see `utf8`."""
    return utf8(text).decode()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to the error of a failed write, which lacks it: a full disk, a quota."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: str | Path, content: str | bytes) -> Path:
    """Writes through a temporary file in the same folder and a rename: a reader sees the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with naming(path), os.fdopen(handle, "wb") as stream:
            stream.write(utf8(content) if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        as_any_new_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def as_any_new_file(path: Path) -> None:
    """Gives a file the rights that the process's umask gives new ones."""
    # mkstemp and safetensors make private files
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


_LOCKLESS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}  # NFS without lockd, Lustre without -o flock
_QUIET = 5.0  # seconds of waiting of which nothing is printed


class NoLocks(OSError):
    """A disk without locks; the message is for the user."""


@contextmanager
def locked(path: Path, way_on: str, wait: float = math.inf) -> Iterator[None]:
    """Holds a lock file, which never blocks after its process has ended.

    Args:
        way_on: what to do where the disk has no locks, for the message.
        wait: seconds, while another process holds it.
    Raises:
        filelock.Timeout: another process still holds it.
        NoLocks.
    """
    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=min(wait, _QUIET))
        except filelock.Timeout:
            if wait <= _QUIET:
                raise
            print(f"waits for the process that holds {path}", file=sys.stderr, flush=True)
            lock.acquire(timeout=wait)
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        raise NoLocks(f"{path}: this disk has no locks ({error.strerror}); expected: {way_on}") from error
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> Any:
    """Content of a JSON file; None where it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def write_json(path: str | Path, content: Any) -> Path:
    """Writes plain values as JSON on one line, atomically."""
    return write_atomically(path, json.dumps(content, ensure_ascii=False))


def read_repository_yaml(path: Path) -> Any:
    """A YAML file of this repository, not of a user."""
    # by libyaml, in a twentieth of the time; on deep nesting it ends the process, where Python's raises an error
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def check_room(folder: Path, what: str, size: float, most: float, setting: str, present: float = 0.0) -> None:
    """Refuses to write more than is allowed or than the disk holds; prints sizes above 10 MB.

    Args:
        size, most, present: bytes to write, bytes allowed in the folder, bytes in it now.
    """
    free, summary = shutil.disk_usage(folder).free, f"{what} take {size / 1e9:.2f} GB in {folder}"
    if present + size > most or size > free:
        taken = f", which holds {present / 1e9:.2f} GB" if present else ""
        raise ValueError(f"{summary}{taken}; {most / 1e9:.2f} GB are allowed ({setting}), {free / 1e9:.2f} GB are free")
    if size > 10e6:
        print(summary, file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """A path relative to the working directory where it lies below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
