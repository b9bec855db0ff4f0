"""Where a result comes from: git revision, the code and the machine that produced it."""

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL
import torch

from common.base.places import DISTRIBUTION, ROOT, is_installed

CHANGED = "+changes"  # behind the revision of a checkout whose tracked files differ from it
UNKNOWN = "unknown"  # git is missing, or refuses: the folder is no checkout, or belongs to another user


def now() -> str:
    """Local date and time to the second."""
    return datetime.datetime.now().isoformat(sep=" ", timespec="seconds")


def git_revision() -> str:
    """Short revision of the checkout, with "+changes" if tracked files differ; "unknown" without git.

    Installed by pip: "version 0.1.0". Changes below results/ do not count.
    """
    if is_installed():
        return f"version {importlib.metadata.version(DISTRIBUTION)}"
    try:
        _git("ls-files", "--error-unmatch", "common/base/provenance.py")  # else a copy inside another repository
        revision = _git("rev-parse", "--short=12", "HEAD")
        # the commands that write results should not change it
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        return f"{revision}{CHANGED}" if changed else revision
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def last_change(files: Sequence[str]) -> str:
    """Short revision that last changed one of these files, below the root, or "uncommitted changes".

    "unknown" without git.
    """
    try:
        if _git("status", "--porcelain", "--", *files):
            return "uncommitted changes"
        return _git("log", "-1", "--format=%h", "--", *files) or UNKNOWN
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


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
    """Whether this machine has instructions for products in bfloat16; without them they are slower than float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return not torch.accelerator.is_available() and cpu_computes_bfloat16()


def cpu_computes_bfloat16() -> bool:
    """Likewise, of the CPU beside any accelerator."""
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
