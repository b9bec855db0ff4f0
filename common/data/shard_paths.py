"""The files that a pattern names: braces, globs, folders."""

import glob
import itertools
import os
import re
import stat
from pathlib import Path

from common.base.arguments import expanded, some

PICTURE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, and broken links, sorted; also through linked folders, each folder once."""
    files, visited = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders.sort()  # of two ways to one folder the same is taken on every machine
        if os.path.realpath(place) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(place))
        files += [Path(place, name) for name in names]
    return sorted(files)


def visible_below(folder: Path) -> list[Path]:
    """The files below a folder, sorted, without hidden ones, which other programs leave."""
    return [file for file in files_below(folder) if not any(p.startswith(".") for p in file.relative_to(folder).parts)]


_BRACES = re.compile(r"\{([^{}]*)\}")  # innermost pair
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_shards(
    pattern: str | Path | list[str] | list[Path], root: str | Path | None = None, key: str = "pattern"
) -> list[Path]:
    """The files that a pattern names: absolute paths, sorted, each once.

    Braces as in bash (`{00000..01287}`, `{train,val}`, nested), globs (`*`, `?`, `[...]`, `**`), `~` for the home
    folder. A folder means all `*.tar` directly in it.

    Args:
        root: folder that relative patterns start from; None for the working folder.
    Raises:
        FileNotFoundError: a name, also one of a brace range, is missing, or a pattern matches nothing.
        ValueError: an empty list, or a match cannot be opened, see `check_opens`.
    """
    patterns = [os.fspath(item) for item in (pattern if isinstance(pattern, list | tuple) else [pattern])]
    if not patterns:  # of a glob of the caller that matches nothing
        raise ValueError("no shard is named: the list is empty; expected: a path, a pattern, or a list of them")
    folder = Path.cwd() if root is None else Path.cwd() / expanded(root)
    shards: set[str] = set()
    for item in patterns:
        key_and_value, item = f"{key} = {item!r}", expanded(item)
        # a name that exists as it stands may have braces or brackets of its own
        names = [item] if (folder / item).exists() else list(dict.fromkeys(_expand_braces(item)))
        missing = []
        for name in names:
            files = _files_of(folder, name, key_and_value)
            # not resolve(): a link keeps its own name (download caches link to files named by their hash)
            shards.update(os.path.abspath(file) for file in files)  # noqa: PTH100
            if not files:
                missing.append(str(folder / name))
        if missing:
            raise FileNotFoundError(
                f"no shards for pattern {item!r} with root {str(folder)!r}: {len(missing)} of {len(names)} names "
                f"found nothing, looked for {some(missing, 3)}" + _what_is_there(folder)
            )
    return [Path(file) for file in sorted(shards)]


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        return "; the root folder does not exist"
    items = itertools.chain(folder.glob("*"), folder.glob("*/*"))
    if any(path.suffix.lower() in PICTURE_EXTENSIONS for path in items):
        return f"; {folder} holds images: data.source = folder reads them with NAME.txt beside each, tsv with a table"
    return ""


def _files_of(folder: Path, name: str, key: str) -> list[Path]:
    path = folder / name
    if path.is_dir():
        files = list(path.glob("*.tar"))
    elif path.exists():
        files = [path]
    else:
        _check_folders(folder, name, key)
        # root_dir: a bracket in the root folder's own name is no pattern; Path.glob refuses absolute patterns
        files = [folder / match for match in glob.glob(name, root_dir=folder, recursive=True)]  # noqa: PTH207
        if name.endswith("**"):  # all that lies below, folders too
            files = [file for file in files if not file.is_dir()]
    for file in files:
        check_opens(file, key)
    return files


def _check_folders(folder: Path, name: str, key: str) -> None:
    # glob skips a folder that cannot be opened, with all its content
    parts = Path(name).parts
    for depth in range(1, len(parts)):
        if parts[depth - 1] == "**":  # any link below may be of a file that the pattern does not ask for
            return
        if glob.has_magic(parts[depth - 1]):
            for match in glob.glob(str(Path(*parts[:depth])), root_dir=folder):  # noqa: PTH207
                check_opens(folder / match, key, or_folder=True)


def check_opens(path: Path, key: str, or_folder: bool = False) -> None:
    """Refuses a name that cannot be opened: without it the data set would be smaller than named.

    Raises:
        ValueError: a broken link, no permission, or no file.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
        if or_folder and stat.S_ISDIR(mode):
            os.scandir(path).close()
            return
        reason = "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file"
    except OSError as error:
        reason = error.strerror
    link, advice = "", "Name the files without it"
    if path.is_symlink():
        link, advice = f", a link to {path.readlink()},", "Fetch its content (git annex get, dvc pull) or remove it"
    expected = "a file or a folder" if or_folder else "a file"
    raise ValueError(f"{key}: {path}{link} cannot be opened: {reason}; expected {expected}. {advice}")


def _expand_braces(pattern: str) -> list[str]:
    # Bash's brace expansion; braces without comma or range stay as they are
    for match in _BRACES.finditer(pattern):
        span = _RANGE.fullmatch(match[1])
        if span or "," in match[1]:
            options = _range(*span.groups()) if span else match[1].split(",")
            head, tail = pattern[: match.start()], pattern[match.end() :]
            return [text for option in options for text in _expand_braces(head + option + tail)]
    return [pattern]


def _range(first: str, last: str) -> list[str]:
    is_padded = any(number.startswith("0") and number != "0" for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    low, high = sorted(map(int, (first, last)))
    return [f"{number:0{width}d}" for number in range(low, high + 1)]
