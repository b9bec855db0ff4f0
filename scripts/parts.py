"""What can be reproduced: `python3 scripts/parts.py euclip table4` ends with status 0, or with a line of what exists.

`make reproduce-...` asks here before it installs anything: standard library only.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("contrastive_basics", "oblique_topology", "euclip", "geomm")


def parts_of(paper: str) -> list[str]:
    """Keys of PARTS in <paper>/reproduce.py, read without running it; none where there is no such file."""
    source = ROOT / paper / "reproduce.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    return re.findall(r'^    "(\w+)": ', text.partition("\nPARTS = {\n")[2].partition("\n}\n")[0], re.MULTILINE)


def wanted(paper: str, part: str) -> list[tuple[str, str]]:
    """(paper, part) pairs that two names ask for, "all" for every one; ValueError, in one line, with what exists."""
    if paper not in (*PAPERS, "all"):
        raise ValueError(f"PAPER={paper} is unknown; accepted: {', '.join(PAPERS)}")
    papers = PAPERS if paper == "all" else (paper,)
    pairs = [(name, each) for name in papers for each in (parts_of(name) if part == "all" else [part])]
    missing = [f"{name} has no {each}" for name, each in pairs if each not in parts_of(name)]
    if missing or not pairs:
        exist = "; ".join(f"{name}: {', '.join(parts_of(name)) or 'none yet'}" for name in PAPERS)
        raise ValueError(f"{[*missing, f'{paper} has no part'][0]} here yet; what exists: {exist}")
    return pairs


if __name__ == "__main__":
    try:
        wanted(*sys.argv[1:3])
    except ValueError as error:
        sys.exit(f"error: {error}")
