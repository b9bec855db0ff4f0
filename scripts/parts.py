"""What can be reproduced; `make` asks here before it installs anything: standard library only.

python3 scripts/parts.py part euclip table4        status 0, or a line of what exists
python3 scripts/parts.py rows euclip outputs       rows: what each is, and whether it was run
python3 scripts/parts.py target reprodcue          the nearest target of the Makefile
"""

import re
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import did_you_mean, expanded, rows_of
from common.base.places import PAPERS, ROOT, papers
from common.reproduce.parts import check_paper, parts_of, wanted


def described_rows(paper: str, output: Path) -> list[str]:
    """A line for each row of a paper: its name, what it is, its committed results, and finished runs in outputs.

    Args:
        paper: the folder; the comments that open its configs say what a row is and where its results are.
    """
    check_paper(paper, papers())
    rows, lines = rows_of(ROOT / paper), []
    for row in rows:
        text = (ROOT / paper / "configs" / f"{row}.yaml").read_text(encoding="utf-8")
        what = re.match(r"#.*?: (.*)|", text)[1]  # a custom row may have no header
        ours = re.search(r"^#.*\bOurs: (.+?)(?:[.;] .*|\.?)$", text, re.MULTILINE)
        runs = sorted((output / "runs" / paper).glob(f"{row}-*/seed*/evaluation.json"))
        scales = {run: re.fullmatch(rf"{re.escape(row)}-(\w+)-[0-9a-f]+", run.parts[-3]) for run in runs}
        here = sorted({f"{scale[1]} {run.parts[-2]}" for run, scale in scales.items() if scale})
        committed = ours[1].replace("results/", "committed: results/", 1) if ours else "a custom row"
        mine = [f"in {output}: {', '.join(here)}"] if here else []
        lines.append(f"{row:{max(map(len, rows))}}  {'; '.join(filter(None, [what, committed, *mine]))}")
    return lines


def targets() -> list[str]:
    """Targets of the Makefile."""
    names = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return names + [f"reproduce-{part}" for part in dict.fromkeys(key for name in PAPERS for key in parts_of(name))]


def main(asked: str, name: str, more: str = "") -> None:
    if asked == "part":
        wanted(name, more)
    elif asked == "rows":
        print("\n".join(described_rows(name, Path(expanded(more)))))
        print(f"\nthe file of a row, {name}/configs/<row>.yaml, opens with the command that trains it")
    else:
        raise ValueError(f"make has no target {name}{did_you_mean(name, targets())} (make help lists them)")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
