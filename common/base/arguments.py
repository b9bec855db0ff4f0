"""What a user types: names of rows, the nearest word for a mistyped one, arguments of a script.

The standard library suffices: `make` asks here before anything is installed.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

BEYOND_PAPER = ("beyond_", "lit_")  # beginnings of rows that no paper prints: other losses, locked towers


def rows_of(folder: Path) -> list[str]:
    """Names of a paper folder's rows: the files of its configs/, without .yaml and without scales."""
    return sorted(file.stem for file in (folder / "configs").glob("*.yaml") if not file.stem.startswith("scale_"))


def rows_of_paper(folder: Path) -> list[str]:
    """Names of the rows of a paper's tables: `rows_of` without those beyond the paper."""
    return [row for row in rows_of(folder) if not row.startswith(BEYOND_PAPER)]


# settings that other repositories call otherwise, and our word for them
_OURS = {
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "epochs": "steps",
    "temperature": "logit_scale",
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the end of a message that refuses a word; "" where no known word is near."""
    section, dot, name = word.rpartition(".")
    word = f"{section}{dot}{_OURS.get(name, name)}"
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def accepted(word: str, known: Sequence[str]) -> str:
    """ "expected one of: a, b" for a message that refuses a word, with the nearest of the known ones."""
    return f"expected one of: {', '.join(known) or 'none'}{did_you_mean(word, known)}"


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names, and the number of further ones, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def expanded(path: str | os.PathLike[str]) -> str:
    """A path with the home folder for `~`; unchanged where there is no such user, as a file may be called ~draft."""
    return os.path.expanduser(path)  # noqa: PTH111


class Parser(argparse.ArgumentParser):
    """argparse's parser. The description keeps its layout, and errors name the nearest flag or choice.

    In arguments of type Path `~` is expanded: a shell leaves that of --output=~/x to the program.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.register("type", Path, lambda text: Path(expanded(text)))

    def error(self, message: str) -> None:
        wrong = re.search(r"(?:unrecognized arguments|invalid choice): '?([^\s'=]+)", message)
        choices = [str(choice) for action in self._actions for choice in action.choices or ()]
        super().error(message + (did_you_mean(wrong[1], [*self._option_string_actions, *choices]) if wrong else ""))
