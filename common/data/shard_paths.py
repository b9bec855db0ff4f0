"""From a pattern with braces and globs to the shard files that it names."""

import glob
import os
import re
from pathlib import Path

_BRACES = re.compile(r"\{([^{}]*)\}")  # innermost pair
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


def expand_shards(pattern: str | Path | list[str] | list[Path], root: str | Path | None = None) -> list[Path]:
    """The shard files that a pattern names.

    Braces as in bash (`{00000..01287}`, `{0..9..3}`, `{train,val}`, nested), globs (`*`, `?`, `[...]`, `**`), `~` for
    the home folder. A folder means all `*.tar` directly in it. A name without a glob must exist: a shard that is
    missing from a brace range is an error, not a smaller data set.

    Args:
        pattern: one or several patterns.
        root: folder that relative patterns start from; None for the working folder.
    Returns:
        Absolute paths, sorted, each once.
    Raises:
        FileNotFoundError: if a name is missing or a pattern finds nothing; names pattern, root and what was looked for.
        ValueError: if the pattern is empty.
    """
    patterns = [os.fspath(item) for item in (pattern if isinstance(pattern, list | tuple) else [pattern])]
    if not patterns or not all(patterns):
        raise ValueError(f"the shard pattern is {pattern!r}; a path, a pattern with braces or globs, or a list of them")
    folder = Path.cwd() if root is None else Path.cwd() / Path(root).expanduser()
    found: set[str] = set()
    for item in patterns:
        item = str(Path(item).expanduser())
        # a name that exists as it stands may have braces or brackets of its own
        names = [item] if (folder / item).exists() else list(dict.fromkeys(_expand_braces(item)))
        missing = []
        for name in names:
            files = _files_of(folder, name)
            # not resolve(): a link keeps its own name (download caches link to files named by their hash)
            found.update(os.path.abspath(file) for file in files)  # noqa: PTH100
            if not files:
                missing.append(str(folder / name))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise FileNotFoundError(
                f"no shards for pattern {item!r} with root {str(folder)!r}: {len(missing)} of {len(names)} names "
                f"found nothing, looked for {', '.join(missing[:3])}{more}"
                + ("" if folder.is_dir() else "; the root folder does not exist")
            )
    return [Path(file) for file in sorted(found)]


def _files_of(folder: Path, name: str) -> list[Path]:
    path = folder / name
    if path.is_dir():
        return sorted(path.glob("*.tar"))
    if path.exists():
        return [path]
    # root_dir: a bracket in the root folder's own name is no pattern; Path.glob refuses absolute patterns
    matches = glob.glob(name, root_dir=folder, recursive=True)  # noqa: PTH207
    return [folder / match for match in matches if (folder / match).is_file()]


def _expand_braces(pattern: str) -> list[str]:
    """Bash's brace expansion; braces without comma or range stay as they are."""
    for match in _BRACES.finditer(pattern):
        span = _RANGE.fullmatch(match[1])
        if span:
            options = _range(*span.groups())
        elif "," in match[1]:
            options = match[1].split(",")
        else:
            continue
        if options is not None:
            head, tail = pattern[: match.start()], pattern[match.end() :]
            return [text for option in options for text in _expand_braces(head + option + tail)]
    return [pattern]


def _range(first: str, last: str, step: str | None) -> list[str] | None:
    numeric = [text.lstrip("-").isdigit() for text in (first, last)]
    if not any(numeric):
        low, high = ord(first), ord(last)
    elif all(numeric):
        low, high = int(first), int(last)
    else:
        return None  # {a..3} is no range
    stride = abs(int(step)) if step else 1
    stride = (stride or 1) if low <= high else -(stride or 1)
    values = range(low, high + (1 if stride > 0 else -1), stride)
    if not any(numeric):
        return [chr(value) for value in values]
    padded = any(text.lstrip("-").startswith("0") and len(text.lstrip("-")) > 1 for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{value:0{width}d}" for value in values]
