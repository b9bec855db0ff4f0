"""What can be reproduced; `make` asks here before it installs anything: standard library only.

python3 scripts/parts.py part euclip table4        status 0, or a line of what exists
python3 scripts/parts.py rows euclip outputs       rows: what each is, and whether it was run
python3 scripts/parts.py target reprodcue          the nearest target of the Makefile
"""

import ast
import re
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import accepted, did_you_mean, rows_of

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("contrastive_basics", "oblique_topology", "euclip", "geomm")


def parts_of(paper: str) -> list[str]:
    """Keys of PARTS in <paper>/reproduce.py, read without importing it: torch may not be installed yet."""
    module = ast.parse((ROOT / paper / "reproduce.py").read_bytes())
    values = {node.targets[0].id: node.value for node in module.body if isinstance(node, ast.Assign)}
    return [key.value for key in values["PARTS"].keys]


def wanted(paper: str, part: str) -> list[tuple[str, str]]:
    """(paper, part) pairs that two names ask for, "all" for every one; ValueError, in one line, with what exists."""
    _check_paper(paper, "all")
    papers = PAPERS if paper == "all" else (paper,)
    pairs = [(name, key) for name in papers for key in (parts_of(name) if part == "all" else [part])]
    missing = [f"{name} has no {key}" for name, key in pairs if key not in parts_of(name)]
    if missing:
        exist = "; ".join(f"{name}: {', '.join(parts_of(name))}" for name in PAPERS)
        hint = did_you_mean(part, parts_of(paper))
        raise ValueError(f"{missing[0]} here yet; what exists: {exist}{hint}")
    return pairs


def described_rows(paper: str, output: Path) -> list[str]:
    """A line for each row of a paper: its name, what it is, its committed results, and finished runs in outputs.

    Args:
        paper: the folder; the comments that open its configs say what a row is and where its results are.
        output: folder with runs/.
    Raises:
        ValueError: no such paper.
    """
    _check_paper(paper)
    rows, lines = rows_of(ROOT / paper), []
    for row in rows:
        text = (ROOT / paper / "configs" / f"{row}.yaml").read_text(encoding="utf-8")
        what = re.match(r"#.*?: (.*)|", text)[1]  # a custom row may have no header
        ours = re.search(r"^#.*\bOurs: (.+?)(?:[.;] .*|\.?)$", text, re.MULTILINE)
        evaluations = sorted((output / "runs" / paper).glob(f"{row}-*/seed*/evaluation.json"))
        here = sorted({f"{run.parts[-3].removeprefix(f'{row}-').split('-')[0]} {run.parts[-2]}" for run in evaluations})
        committed = ours[1].replace("results/", "committed: results/", 1) if ours else "a custom row"
        mine = [f"in {output}: {', '.join(here)}"] if here else []
        lines.append(f"{row:{max(map(len, rows))}}  {'; '.join(filter(None, [what, committed, *mine]))}")
    return lines


def targets() -> list[str]:
    """Targets of the Makefile."""
    names = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return names + [f"reproduce-{part}" for part in dict.fromkeys(key for name in PAPERS for key in parts_of(name))]


def _check_paper(paper: str, *others: str) -> None:
    if paper not in (*PAPERS, *others):
        raise ValueError(f"PAPER={paper} is unknown; {accepted(paper, PAPERS)}")


def main(asked: str, name: str, more: str = "") -> None:
    if asked == "part":
        wanted(name, more)
    elif asked == "rows":
        print("\n".join(described_rows(name, Path(more))))
        print(f"\nthe file of a row, {name}/configs/<row>.yaml, opens with the command that trains it")
    else:
        raise ValueError(f"make has no target {name}{did_you_mean(name, targets())} (make help lists them)")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
