"""Which tables, figures and other parts of which paper can be reproduced so far. Standard library only.

    python3 scripts/parts.py oblique_topology table2     exit status 0, or one line that lists what exists

`make reproduce-...` asks here before it installs anything.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("contrastive_basics", "oblique_topology", "euclip", "geomm")


def parts_of(paper: str) -> list[str]:
    """Keys of PARTS in <paper>/reproduce.py, read without running it; none where there is no such file."""
    source = ROOT / paper / "reproduce.py"
    if not source.is_file():
        return []
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "PARTS" for target in node.targets):
            return [key.value for key in node.value.keys]
    return []


def wanted(paper: str, part: str) -> list[tuple[str, str]]:
    """(paper, part) pairs that two names ask for; "all" stands for every paper or every part.

    Raises:
        ValueError: in one line, with what exists.
    """
    exist = "; ".join(f"{name}: {', '.join(parts_of(name)) or 'none yet'}" for name in PAPERS)
    if paper not in (*PAPERS, "all"):
        raise ValueError(f"PAPER={paper} is unknown; accepted: {', '.join(PAPERS)}")
    papers = PAPERS if paper == "all" else (paper,)
    pairs = [(name, each) for name in papers for each in (parts_of(name) if part == "all" else (part,))]
    for name, each in pairs:
        if each not in parts_of(name):
            raise ValueError(f"{name} has no {each} here yet; what exists: {exist}")
    if not pairs:
        raise ValueError(f"{paper} has no table or figure here yet; what exists: {exist}")
    return pairs


if __name__ == "__main__":
    try:
        wanted(*sys.argv[1:3])
    except ValueError as error:
        sys.exit(f"error: {error}")
