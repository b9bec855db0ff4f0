"""The command `vlgeometry` of an installed package: `vlgeometry train euclip --scale demo` from any folder.

A subcommand calls the main that `python -m` and `accelerate launch` call, too, and passes the arguments on.
"""

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import accepted
from common.base.places import PAPERS, ROOT

SCRIPTS = __package__ or "scripts"  # "vlgeometry" where it is installed
HELP = ("-h", "--help")


class Subcommand(NamedTuple):
    """module: with the main; PAPER in it is the next word. example: arguments."""

    module: str
    what: str
    example: str

    @property
    def papers(self) -> list[str]:
        """The papers that have it; none if it does not take a paper."""
        name, paper = self.module.removeprefix("PAPER."), self.module.startswith("PAPER.")
        return [folder for folder in PAPERS if paper and (ROOT / folder / f"{name}.py").is_file()]


SUBCOMMANDS = {
    "train": Subcommand("PAPER.train", "trains a row of a paper", "euclip --scale demo run.seed=1"),
    "pretrain": Subcommand("PAPER.pretrain", "trains an image tower", "geomm --config vision_moco_v2 --scale smoke"),
    "finetune": Subcommand("PAPER.finetune", "fine-tunes on a task", "geomm --config vqa_albef --scale smoke"),
    "evaluate": Subcommand(
        f"{SCRIPTS}.evaluate", "evaluates runs, model folders and hub names", "RUN FOLDER --tasks retrieval,zero_shot"
    ),
    "files": Subcommand(f"{SCRIPTS}.files", "lists or copies the files of a method", "geomm.pool --copy FOLDER"),
    "compare": Subcommand(f"{SCRIPTS}.compare", "compares models on the same test images", "RUN RUN evaluation.json"),
    "export": Subcommand(
        f"{SCRIPTS}.export_weights",
        "writes a CLIP in the layout of transformers or open_clip",
        "--model RUN --to open_clip --output exported",
    ),
    "publish": Subcommand(
        f"{SCRIPTS}.publish", "makes a model folder of a run", "--run RUN --licence cc-by-4.0 --output my-euclip"
    ),
    "reproduce": Subcommand(
        f"{SCRIPTS}.reproduce", "reproduces a table or figure of a paper", "euclip table4 --scale smoke"
    ),
    "search": Subcommand(
        f"{SCRIPTS}.search",
        "searches settings of rows by validation numbers",
        'euclip --rows table4_euclip --set "optim.learning_rate=3e-4,1e-3"',
    ),
    "map": Subcommand(f"{SCRIPTS}.map", "draws embedding spaces as one HTML page", "RUN RUN --output map.html"),
    "report": Subcommand("common.report.page", "collects tables on a page", "--results outputs/results"),
    "label-files": Subcommand(
        f"{SCRIPTS}.label_files", "writes class names and prompts of a labelled set", "/data/labelled/imagenet"
    ),
}


def usage() -> str:
    """The text of `vlgeometry --help`."""
    width = max(map(len, SUBCOMMANDS))
    lines = []
    for name, subcommand in SUBCOMMANDS.items():
        papers = f" ({', '.join(subcommand.papers)})" if subcommand.papers else ""
        lines += [
            f"  {name:{width}}  {subcommand.what}{papers}",
            f"  {'':{width}}  vlgeometry {name} {subcommand.example}",
        ]
    return (
        "usage: vlgeometry SUBCOMMAND [PAPER] [arguments]; vlgeometry SUBCOMMAND [PAPER] --help lists the arguments\n\n"
        + "\n".join(lines)
        + "\n\nRuns, tables and caches go to outputs/ in the current folder."
    )


def module_of(words: list[str]) -> tuple[str, list[str]]:
    """The module whose main does what the words say, and the arguments for it."""
    name, *rest = words
    if name not in SUBCOMMANDS:
        raise ValueError(f"vlgeometry has no subcommand {name}; {accepted(name, list(SUBCOMMANDS))}")
    subcommand = SUBCOMMANDS[name]
    if not subcommand.papers:
        return subcommand.module, rest
    if rest and rest[0] in HELP:  # the arguments are much the same for all papers
        rest = [subcommand.papers[0], *rest]
    paper = rest[0] if rest else ""
    if paper not in subcommand.papers:
        problem = f"vlgeometry {name} {paper}: no such paper" if paper else f"vlgeometry {name} needs a paper"
        example = f"for example: vlgeometry {name} {subcommand.example}"
        raise ValueError(f"{problem}; {accepted(paper, subcommand.papers)}; {example}")
    return subcommand.module.replace("PAPER", paper), rest[1:]


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in (*HELP, "help"):
        print(usage())
        return
    try:
        module, arguments = module_of(words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    taken = len(words) - len(arguments)
    sys.argv = [" ".join(["vlgeometry", *words[:taken]]), *arguments]  # the name in usage and errors

    from common.run.launch import run_or_explain  # imports torch, which --help does without

    run_or_explain(importlib.import_module(module).main)


if __name__ == "__main__":
    main()
