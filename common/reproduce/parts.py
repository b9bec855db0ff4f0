"""Parts of a paper, tables and figures, by name: standard library only, as `make` asks before torch is installed."""

import ast
from collections.abc import Collection

from common.base.arguments import accepted
from common.base.places import PAPERS, ROOT


def parts_of(paper: str) -> list[str]:
    """Keys of PARTS in <paper>/reproduce.py, read without importing it."""
    module = ast.parse((ROOT / paper / "reproduce.py").read_bytes())
    values = {node.targets[0].id: node.value for node in module.body if isinstance(node, ast.Assign)}
    return [key.value for key in values["PARTS"].keys]


def wanted(paper: str, part: str) -> list[tuple[str, str]]:
    """(paper, part) pairs of two names, each of which may be "all"; ValueError with the nearest parts."""
    folders = PAPERS if paper == "all" else (paper,)
    if paper != "all":
        check_paper(paper, PAPERS)
    pairs = [(name, key) for name in folders for key in (parts_of(name) if part == "all" else [part])]
    for name, key in pairs:
        if key not in parts_of(name):
            others = [other for other in PAPERS if key in parts_of(other)]
            hint = f"expected PAPER={' or PAPER='.join(others)}" if others else accepted(key, parts_of(name))
            raise ValueError(f"{name} has no {key}; {hint}")
    return pairs


def check_paper(paper: str, known: Collection[str]) -> None:
    """Refuses an unknown paper: ValueError."""
    if paper not in known:
        raise ValueError(f"PAPER={paper} is unknown; {accepted(paper, known)}")
