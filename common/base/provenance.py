"""Where a result comes from: git revision, the code and the machine that produced it."""

import ast
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import PIL
import torch

ROOT = Path(__file__).resolve().parents[2]


def git_revision() -> str:
    """Short revision of the checkout, "+changes" behind it if tracked files differ; "unknown" without git.

    Committed results may differ: a command that writes them anew is not what makes the next one another revision's.
    """
    try:
        revision = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        return f"{revision}+changes" if changed else revision
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def code_fingerprint(paths: Iterable[Path | str]) -> str:
    """Hash of the names and contents of the Python files that a result depends on.

    Args:
        paths: files, and folders that are searched; absolute or relative to the repository root.
    """
    places = [ROOT / path for path in paths]
    files = {file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def imported_files(script: Path, leave_out: tuple[str, ...] = ()) -> list[Path]:
    """Files of this repository that a script imports, directly or through one another; the script is among them.

    Read from the source text: a function of the files, not of what happens to be loaded. Imports inside functions and
    branches count, and so do the packages on the way to a module.

    Args:
        script: within the repository.
        leave_out: path prefixes; a file that is left out is not looked into either.
    """
    found: set[str] = set()
    ours: dict[str, frozenset[str]] = {}
    waiting = {script.resolve().relative_to(ROOT).as_posix()}
    while waiting:
        name = waiting.pop()
        if name.startswith(leave_out):
            continue
        found.add(name)
        for first, files in _may_import(name, (ROOT / name).read_bytes()).items():
            if first not in ours:
                places = (*ROOT.glob(f"{first}.py"), *(ROOT / first).rglob("*.py"))
                ours[first] = frozenset(place.relative_to(ROOT).as_posix() for place in places)
            waiting |= (files & ours[first]) - found
    return sorted(ROOT / name for name in found)


@cache
def _may_import(name: str, source: bytes) -> dict[str, frozenset[str]]:
    """Files that a file's imports may mean, by the first part of their names; read once for all rows of a table.

    Of `from a import b` they are those of a and of a.b; importing either runs the packages on the way to it.
    """
    package, modules = name.split("/"), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: -node.level] if node.level else []
            start += node.module.split(".") if node.module else []
            modules += [[*start, alias.name] for alias in node.names]
    files: dict[str, set[str]] = {}
    for parts in modules:
        places = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
        files.setdefault(parts[0], set()).update(f"{place}{end}" for place in places for end in (".py", "/__init__.py"))
    return {first: frozenset(each) for first, each in files.items()}


def hash_of(content: Any) -> str:
    """12 hex digits of the canonical JSON of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def hardware() -> str:
    """One line: processor or GPUs, processes' threads, torch version."""
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    elif torch.accelerator.is_available():
        device = f"{torch.accelerator.current_accelerator()}, {_processor()}"
    else:
        device = f"CPU, {torch.get_num_threads()} threads, {_processor()}"
    return f"{device}, torch {torch.__version__}"


def computes_bfloat16() -> bool:
    """Whether products in bfloat16 have instructions of their own here: elsewhere they cost more than in float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return False
    known = getattr(torch.cpu, "get_capabilities", dict)()  # a torch that does not tell counts as one without
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def versions() -> str:
    """Of the libraries that numbers and pixels come from."""
    return f"torch {torch.__version__}, Pillow {PIL.__version__}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
