"""Parts of a paper, tables and figures, by name: standard library only, as `make` asks before torch is installed."""

import ast

from common.base.arguments import accepted
from common.base.places import PAPERS, ROOT, papers


def parts_of(paper: str) -> list[str]:
    """Keys of PARTS in <paper>/reproduce.py, read without importing it."""
    module = ast.parse((ROOT / paper / "reproduce.py").read_bytes())
    values = {node.targets[0].id: node.value for node in module.body if isinstance(node, ast.Assign)}
    return [key.value for key in values["PARTS"].keys]


def wanted(paper: str, part: str) -> list[tuple[str, str]]:
    """(paper, part) pairs of two names, each of which may be "all"; ValueError with the nearest parts."""
    check_paper(paper, "all")
    folders = PAPERS if paper == "all" else (paper,)
    pairs = [(name, key) for name in folders for key in (parts_of(name) if part == "all" else [part])]
    for name, key in pairs:
        if key not in parts_of(name):
            others = [other for other in PAPERS if key in parts_of(other)]
            hint = f"expected PAPER={' or PAPER='.join(others)}" if others else accepted(key, parts_of(name))
            raise ValueError(f"{name} has no {key}; {hint}")
    return pairs


def check_paper(paper: str, *others: str) -> None:
    """Refuses a paper that is none of `papers()` and of `others`: ValueError."""
    if paper not in (*papers(), *others):
        raise ValueError(f"PAPER={paper} is unknown; {accepted(paper, papers())}")
