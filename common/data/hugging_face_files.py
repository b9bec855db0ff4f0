"""From a Hugging Face data set's name to its rows: folders, files, hub names, splits."""

import gzip
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq

from common.base.arguments import expanded
from common.base.files import printable
from common.data.decoding import refuse_split
from common.data.shard_paths import PICTURE_EXTENSIONS, check_opens, expand_shards, files_below

FILE_KINDS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json"}

_SPLITS_OF_ROLE = {
    "train": ("train",),
    "val": ("validation", "val", "valid", "dev"),
    "test": ("test",),
    "second_test": ("test",),
}


def place_of(source: str, root: Path | None, key: str) -> list[Path]:
    """The folder or files that a source names, which the library can read; [] for a hub name."""
    place = _existing(source, root, key)
    for path in place:
        if str(path) != printable(str(path)):
            raise ValueError(
                f"{key} = {source!r}: {path} is no UTF-8, and the datasets library cannot open it; expected a path in "
                "UTF-8: rename the folder, or name a link to it"
            )
        if path.is_dir():
            _check_folder(path, f"{key} = {source!r}")
        else:
            _check_encoding(path)
    return place


def _existing(source: str, root: Path | None, key: str) -> list[Path]:
    base = Path(expanded(source)) if root is None else Path(expanded(root), expanded(source))
    if base.exists() or base.is_symlink():
        check_opens(base, f"{key} = {source!r}", or_folder=True)
        return [base.absolute()]
    kind = _suffix(base.name)
    if kind in FILE_KINDS or any(sign in source for sign in "*?[{"):
        return expand_shards(source, root, key)
    if source.startswith((".", "~", "/")) or source.count("/") > 1:
        raise FileNotFoundError(f"{base}: no such file or folder; expected: one, or the name of a set on the hub")
    return []


def _check_folder(folder: Path, key: str) -> None:
    # the library skips broken links silently; a missing image shows when a row names it
    for path in files_below(folder):
        is_hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if not is_hidden and path.suffix.lower() not in PICTURE_EXTENSIONS:
            if path.is_symlink():
                check_opens(path, key)
            _check_encoding(path)


def _check_encoding(path: Path) -> None:
    # in a JSON file of another encoding some rows would fail when they are read, and others not
    if FILE_KINDS.get(_suffix(path.name)) != "json" or path.suffix == ".zst":
        return
    read = gzip.open if path.suffix == ".gz" else open
    with suppress(OSError, EOFError, zlib.error), read(path, "rb") as file:  # what is damaged, the library will say
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is no text in UTF-8: byte 0x{line[error.start]:02x}, line {number}; expected UTF-8. To "
                    "convert it: iconv -f CP1252 -t UTF-8, or -f UTF-16"
                ) from None


def label_of(source: str, place: list[Path], split: str) -> str:
    """Name of a set for logs and tables."""
    if not place:
        base = source.partition(":")[0].rpartition("/")[2]
    elif len(place) > 1:
        base = place[0].parent.name
    else:
        base = place[0].name if place[0].is_dir() else place[0].name.partition(".")[0]
    return printable(f"{base}-{split}" if split else base)


def _suffix(name: str) -> str:
    return Path(name.removesuffix(".gz").removesuffix(".zst")).suffix.lower()


def _load(source: str, place: list[Path], load: Callable[..., Any], **options: Any) -> Any:
    try:
        if not place:
            hub_name, _, configuration = source.partition(":")
            return load(hub_name, configuration or None, **options)
        if place[0].is_dir():
            return load(str(place[0]), **options)
        return load(_kind_of(place), data_files=[str(path) for path in place], **options)
    except Exception as error:  # a dozen kinds: connections, Arrow, casts, missing files
        tried = str(place[0]) if place else f"{source!r}: no such file or folder below data.root; from the hub it"
        lines = [line for line in (str(error), str(error.__cause__ or "")) if line]
        raise ValueError(f"{tried} cannot be loaded: {type(error).__name__}, {'; '.join(lines)[:500]}") from error


def _kind_of(files: list[Path]) -> str:
    kinds = {FILE_KINDS.get(_suffix(file.name)) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"{files[0]} ...: files of kinds {', '.join(FILE_KINDS)} are read, one kind at a time")
    return kinds.pop()


def _is_saved(place: list[Path]) -> bool:
    return bool(place) and any((place[0] / name).is_file() for name in ("state.json", "dataset_dict.json"))


def table_of(source: str, place: list[Path], split: str | None, role: str) -> tuple[datasets.Dataset, str]:
    """Rows with random access, and their split; "" if the set has none."""
    if _is_saved(place):
        content = _load(source, place, datasets.load_from_disk)
        if isinstance(content, datasets.Dataset):
            refuse_split(place[0], split)
            return content, ""
    elif place and place[0].is_file():
        refuse_split(place[0], split)
        if _kind_of(place) == "arrow":  # mapped where it lies, not copied into the library's cache
            return _load(source, place, _from_arrow_files), ""
        return next(iter(_load(source, place, datasets.load_dataset).values())), ""
    else:
        content = _load(source, place, datasets.load_dataset)
    split, shown = _chosen_split(str(place[0]) if place else source, list(content), split, role)
    return content[split], shown


def _from_arrow_files(kind: str, data_files: list[str]) -> datasets.Dataset:
    return datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in data_files])


def stream_of(
    source: str, place: list[Path], split: str | None, role: str
) -> tuple[datasets.IterableDataset, str, int | None, list[str]]:
    """Rows, split, number of rows (None if it must be counted), data files."""
    where = str(place[0]) if place else source
    if _is_saved(place):
        raise ValueError(f"{where} was saved with random access; read it so: data.stream_buffer=0")
    builder = _load(source, place, datasets.load_dataset_builder)
    files = builder.config.data_files or {}
    if place and place[0].is_file():
        refuse_split(place[0], split)
        split, shown = next(iter(files)), ""
    else:
        split, shown = _chosen_split(where, [str(item) for item in files], split, role)
    try:
        rows = builder.as_streaming_dataset(split=split)
    except Exception as error:
        raise ValueError(f"{where} cannot be streamed: {type(error).__name__}, {str(error)[:500]}") from error
    paths = [str(path) for path in files.get(split, [])]
    known = (builder.info.splits or {}).get(split)
    num_rows = known.num_examples if known is not None and known.num_examples else None
    if num_rows is None and paths and all(path.endswith(".parquet") and Path(path).is_file() for path in paths):
        num_rows = sum(pq.read_metadata(path).num_rows for path in paths)
    named = [f"{Path(path).name} {Path(path).stat().st_size}" if Path(path).is_file() else path for path in paths]
    return rows, shown, num_rows, named


def _chosen_split(where: str, splits: list[str], split: str | None, role: str) -> tuple[str, str]:
    # The split, and what is shown of it.
    names = _SPLITS_OF_ROLE[role] if split is None else (split,)
    chosen = next((name for name in names if name in splits), None)
    if chosen is None:
        raise ValueError(
            f"{where} has no split {' or '.join(map(repr, names))}; expected one of: "
            f"{', '.join(splits) or 'it has none'} (written as source#split)"
        )
    return chosen, chosen
