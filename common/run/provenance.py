"""Where a result comes from: git revision, the code and the machine that produced it."""

import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def git_revision() -> str:
    """Short revision of the checkout, "+changes" behind it if tracked files differ; "unknown" without git."""
    try:
        revision = _git("rev-parse", "--short=12", "HEAD")
        return f"{revision}+changes" if _git("status", "--porcelain", "--untracked-files=no") else revision
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def code_fingerprint(folders: list[str], leave_out: tuple[str, ...] = ()) -> str:
    """Hash of the Python files that a result depends on.

    Args:
        folders: relative to the repository root, searched recursively.
        leave_out: path prefixes that cannot change the result, e.g. "common/report".
    """
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(leave_out):
                digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


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


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
