"""What a user types: names of rows, the nearest word for a mistyped one, arguments of a script.

Only the standard library: `make` asks here before anything is installed.
"""

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path


def rows_of(folder: Path) -> list[str]:
    """Names of a paper folder's rows: the files of its configs/, without scales."""
    return sorted(file.stem for file in (folder / "configs").glob("*.yaml") if not file.stem.startswith("scale_"))


def names_in(texts: Iterable[str]) -> list[str]:
    """Names of runs or files; a text may hold several, as a shell splits them, but an existing path stays whole."""
    split = ([text] if text and Path(text).expanduser().exists() else words_in("RUNS", text) for text in texts)
    return [name for names in split for name in names]


def words_in(option: str, text: str) -> list[str]:
    """The value of an option as a shell splits it; ValueError with both where a quote is left open."""
    try:
        return shlex.split(text)
    except ValueError as error:
        example = f"""{option}='"a b" c'"""
        raise ValueError(f"{option}={text}: {error}; expected quotes as in a shell, as in {example}") from None


_LEAST_LIKENESS = 0.6  # difflib's default
_MOST_LISTED = 8  # names that a message may list where a near one exists

# settings that other repositories call otherwise, and our word for them
_OURS = {
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "epochs": "steps",
    "temperature": "logit_scale",
}


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known words that are most like a word, at most three; none if no word is near."""
    section, dot, name = word.rpartition(".")
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(f"{section}{dot}{_OURS.get(name, name)}")
    likeness = {}
    for candidate in known:
        matcher.set_seq1(candidate)
        likeness[candidate] = matcher.ratio()
    least = max(_LEAST_LIKENESS, max(likeness.values(), default=0.0) - 0.02)
    return [candidate for candidate in likeness if likeness[candidate] >= least][:3]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that refuses a word, "; did you mean X?"; "" where no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))}?" if near else ""


def accepted(word: str, known: Sequence[str]) -> str:
    """The end of a message that refuses a word: the words that are expected, or, of many, only the nearest."""
    near = did_you_mean(word, known)
    if near and len(known) > _MOST_LISTED:
        return near.removeprefix("; ")
    return f"expected one of: {', '.join(known) or 'none'}{near}"


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def multiples_beside(number: int, of: int) -> str:
    """The multiples next to a number that is none, for a message: "48 or 56"."""
    below = number - number % of
    return f"{below} or {below + of}" if below else str(of)


def expanded(path: str | os.PathLike[str]) -> str:
    """A path with the home folder for `~`; unchanged without such a user, as a file may be called ~draft."""
    return os.path.expanduser(path)  # noqa: PTH111


def file_to_write(text: str) -> Path:
    """The value of an option that names a file: a folder is refused now, not when the result is written."""
    path = Path(expanded(text))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; expected a file")
    return path


class Parser(argparse.ArgumentParser):
    """argparse's parser, with the description's layout, and the nearest flag or choice in errors.

    `~` is expanded in arguments of type Path: a shell leaves that of --output=~/x to the program.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.register("type", Path, lambda text: Path(expanded(text)))

    def error(self, message: str) -> None:
        wrong = re.search(r"(?:unrecognized arguments|invalid choice): '?([^\s'=]+)", message)
        choices = [str(choice) for action in self._actions for choice in action.choices or ()]
        super().error(message + (did_you_mean(wrong[1], [*self._option_string_actions, *choices]) if wrong else ""))
