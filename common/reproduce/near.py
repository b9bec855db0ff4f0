"""What searches chose: the best settings of rows, and those near the best, at which a claim is decided again."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from common.base.config import ConfigError
from common.base.files import shown

DECIDES = "nothing"


def near_settings(
    paper: str, scale: str, rows: Iterable[str], roots: Iterable[Path]
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Settings -> the rows that have them within one standard error of their best, in a paper's searches at one scale.

    Args:
        rows: stems of config files.
        roots: of results, with <paper>/search/<name>/search.json; of one name the last root counts.
    Raises:
        ConfigError: two searches choose the same setting of a row, or one chose nothing; names the files.
    """
    near: dict[tuple[str, ...], dict[str, None]] = {}
    for row, equivalent, _ in _searched(paper, scale, rows, roots):
        for settings in equivalent:
            near.setdefault(settings, {})[row] = None
    return {settings: tuple(of_settings) for settings, of_settings in near.items()}


def best_settings(
    paper: str, scale: str, rows: Iterable[str] | None, roots: Iterable[Path]
) -> dict[str, tuple[str, ...]]:
    """Row -> the best settings of all its searches, otherwise as `near_settings`.

    Args:
        rows: None = all that can be chosen for.
    """
    if rows is None:
        best = {}
        for row in dict.fromkeys(row for *_, searched in _of_scale(paper, scale, roots) for row in searched):
            with suppress(ConfigError):  # raised again for a command that trains this row
                best |= best_settings(paper, scale, [row], roots)
        return best
    best = {}
    for row, (chosen, *_), _ in _searched(paper, scale, rows, roots):
        best[row] = (*best.get(row, ()), *chosen)
    return best


def searched_on(paper: str, scale: str, rows: Iterable[str], roots: Iterable[Path]) -> list[str]:
    """Training data and name of all searches of rows, otherwise as `best_settings`."""
    return list(dict.fromkeys(search for *_, search in _searched(paper, scale, rows, roots)))


def _of_scale(
    paper: str, scale: str, roots: Iterable[Path]
) -> Iterator[tuple[Path, str, dict[str, list[tuple[str, ...]]]]]:
    # (file, training data, row -> its equivalent settings) of each search; of one name the file of the last root
    files = {
        file.parent.name: file for root in roots for file in sorted((root / paper / "search").glob("*/search.json"))
    }
    for file in files.values():
        of_scale, training_data, searched = _read(file)
        if of_scale == scale:
            yield file, training_data, searched


def _searched(
    paper: str, scale: str, rows: Iterable[str], roots: Iterable[Path]
) -> Iterator[tuple[str, list[tuple[str, ...]], str]]:
    # (row, its equivalent settings, training data and name) of each search
    chosen_in: dict[tuple[str, str], Path] = {}
    for file, training_data, searched in _of_scale(paper, scale, roots):
        for row in [row for row in rows if row in searched]:
            equivalent = searched[row]
            if not equivalent:
                raise ConfigError(f"{shown(file)}: no setting of {row} was trained by all seeds; expected another grid")
            for key in (text.partition("=")[0] for text in equivalent[0]):
                other = chosen_in.setdefault((row, key), file)
                if other is not file:
                    raise ConfigError(
                        f"{row}: two searches choose {key}, {shown(other)} and {shown(file)}; expected one: move the "
                        "folder of the other away"
                    )
            yield row, equivalent, f"{training_data}: {file.parent.name}"


def _read(file: Path) -> tuple[str, str, dict[str, list[tuple[str, ...]]]]:
    # scale, training data, row -> its equivalent settings
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = {row: [tuple(settings) for settings in of["equivalent"]] for row, of in content["rows"].items()}
        return content["scale"], content["training_data"], rows
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{shown(file)} is broken: {error!r}; expected what make search writes: run it again, or move the folder"
        ) from None
