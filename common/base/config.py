"""Configuration: nested frozen dataclasses filled from plain YAML files and `section.key=value` overrides.

A row file holds the method of one row of a table. A scale file holds data, sizes, steps and hardware, and under `rows`
what some rows need at that scale. Later sources win:
    defaults of the dataclass  <  scale file  <  row file  <  the scale file's `rows`  <  overrides on the command line
The field's type decides how a word is read: 5e-4 and 1e3 are numbers where a number belongs; `no` is a word or false.
An error names the file, the key, the value and what is expected (values.py). No interpolation, no class paths, no
environment variables.
"""

import argparse
import dataclasses
import functools
import itertools
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from common.base.arguments import Parser, accepted, rows_of
from common.base.fields import hints_of, settings_of
from common.base.settings import NAMES_IN_A_SOURCE, located
from common.base.values import ConfigError, Values, checked, flat

SCALES = ("smoke", "demo", "photos", "photos_scratch", "paper")


class _Words(yaml.SafeLoader):
    # Leaves every word but null as text (YAML reads 5e-4 as text, no as false, 010 as 8); refuses a repeated key.

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"{name} occurs twice, in lines {lines[name]} and {line}; expected once")
            lines[name] = line
        return super().construct_mapping(node, deep)


_Words.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def load_config(config_class: type, files: list[Path], overrides: Sequence[str] = ()) -> Any:
    """Fills a config dataclass from its defaults, then YAML files in order, then overrides."""
    return located(_filled(config_class, [(str(path), _content(path, _bytes(path))) for path in files], overrides))


def _filled(config_class: type, layers: Iterable[tuple[str, dict[str, Any]]], overrides: Sequence[str] = ()) -> Any:
    values: Values = {}
    for where, content in [*layers, ("command line", _parsed(config_class, overrides))]:
        values = _overlaid(config_class, values, dict(flat(config_class, content, where)))
    config = checked(config_class, values)
    data, root = getattr(config, "data", None), any(re.match("data.root=.", text) for text in overrides)
    if root and data.source == "scenes" and not (getattr(data, "labelled", "") or getattr(data, "mixture", ())):
        raise ConfigError(
            f"command line: data.root = {data.root!r} with data.source = scenes, which are drawn; expected: another "
            "source (as with --scale photos), or no folder"
        )
    return config


def load_beside_weights(config_class: type, overrides: Sequence[str], fixed: Sequence[str] = ()) -> Any:
    """A config for published weights, which state everything but the data and how they are read.

    Args:
        overrides: the user's, "data.key=value" and "run.key=value".
        fixed: the caller's, of any section.
    Raises:
        ConfigError: another section, data.root without a source, or a setting that the weights' own files state.
    """
    for text in overrides:
        if not text.startswith(("data.", "run.")):
            raise ConfigError(f"{text}: published weights bring their own; expected: data.* and run.*")
    named = {text.partition("=")[0] for text in overrides}
    if "data.root" in named and "data.source" not in named:
        raise ConfigError("data.root without data.source; expected: data.source=shards data.root=<folder>")
    config = load_config(config_class, [], [*overrides, *fixed])
    read = ("resize", "crop_scale", "augmentation", "context_length", "tokenizer")
    stated = [f"data.{name}" for name in read if f"data.{name}" in named]
    stated += ["data.image_size"] if "data.image_size" in named and config.data.source != "scenes" else []
    stated += ["data.resize_with"] if config.data.resize_with != "pillow" else []
    if stated:
        raise ConfigError(
            f"{stated[0]}: published weights state how pictures and captions become their inputs, in the files beside "
            "them; without such files CLIP's way is used; expected: where the data lie"
        )
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Config as nested plain values (tuples become lists)."""

    def listed(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

    return dataclasses.asdict(config, dict_factory=listed)


def from_dict(config_class: type, plain: dict[str, Any], where: str) -> Any:
    """Inverse of to_dict, with all checks; `where` names the source in errors."""
    return _filled(config_class, [(where, plain)])


def override(config: Any, overrides: list[str]) -> Any:
    """A copy of a config with `section.key=value` overrides."""
    return _filled(type(config), [("config", to_dict(config))], overrides)


def entry_arguments(
    description: str, script: Path, config_class: type, default_row: str, scale_files: str = "scale"
) -> tuple[Any, argparse.Namespace]:
    """Command line of a train.py.

    Args:
        script: the train.py; rows and scales are read from `configs/` beside it.
        scale_files: a scale's file is `<scale_files>_<scale>.yaml`.
    Returns:
        (config, arguments); arguments.row is the row's name, arguments.notes its `notes_of_row`, arguments.resume one
        of None, "last" and "auto", arguments.missing_rows empty.
    """
    folder = script.resolve().parent
    parser = Parser(description)
    row = Path(default_row).stem
    parser.add_argument("--config", default=row, help="a row of the paper (`make rows`) or a file, default %(default)s")
    parser.add_argument("--scale", default="demo", choices=SCALES, help=f"file configs/{scale_files}_<scale>.yaml")
    parser.add_argument("--output-dir", type=Path, help="default outputs/runs/<paper>/<row>-<scale>-<hash>/seed<n>")
    resume_help = (
        "continue from the last whole checkpoint in the output dir; auto: start from the beginning if none exists"
    )
    parser.add_argument("--resume", nargs="?", choices=("last", "auto"), const="last", help=resume_help)
    dry_run_help = "build model and data, measure a few steps, print what the run would need; nothing is trained"
    parser.add_argument("--dry-run", action="store_true", help=dry_run_help)
    parser.add_argument("--json", action="store_true", help="with --dry-run: print only JSON")
    # behind the flags: overrides, which `make SET=` passes on too
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. optim.steps=500 run.seed=1")
    # argparse would take an override behind a bare --resume for its value
    words = itertools.pairwise([*sys.argv[1:], ""])
    words_to_parse = [
        f"{word}=last" if word == "--resume" and after not in ("last", "auto") else word for word, after in words
    ]
    arguments = parser.parse_intermixed_args(words_to_parse)
    if arguments.json and not arguments.dry_run:
        parser.error("--json without --dry-run")
    file = row_file(folder, arguments.config)
    # of the file: the stem of a bare name such as tau_0.07 would end at its dot
    arguments.row, arguments.missing_rows = file.stem, []
    _check_script(f"--config {arguments.config}", file, script)
    arguments.notes = notes_of_row(config_class, folder, file, arguments.scale, scale_files)
    return load_row(config_class, folder, file, arguments.scale, arguments.overrides, scale_files), arguments


def _check_script(where: str, file: Path, script: Path) -> None:
    # Refuses a row of another script or paper; `where` is the option and its value for the message.
    folder, place = script.resolve().parent, file.resolve().parent
    this, right = f"{folder.name}/{script.name}", _run_line(file)
    if right is None and place.name == "configs" and place.parent != folder and place.parent.parent == folder.parent:
        other = f"{place.parent.name}/train.py"  # a custom row of another paper
        right = f"accelerate launch {other} --config {file}", other
    # a script that no row names is the user's and trains any row
    rows = map(_run_line, (folder / "configs").glob("*.yaml"))
    if right and right[1] != this and this in {line[1] for line in rows if line}:
        raise ConfigError(f"{where}: {this} does not train it; run: {right[0]}")


def _run_line(file: Path) -> tuple[str, str] | None:
    # the comment that states how a row is trained: command and script, "<paper>/<name>.py"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    match = re.search(r"^# Run: (.*?(\w+/\w+\.py).*)$", text, re.MULTILINE)
    return match and (match[1], match[2])


def row_file(folder: Path, row: str) -> Path:
    """File of a row: a path, or a bare name in the paper folder's configs/."""
    path = Path(row)
    named = folder / "configs" / f"{row.removesuffix('.yaml')}.yaml"
    if path.is_file() or path.name != row:
        return path
    if not named.is_file():
        known = accepted(named.stem, rows_of(folder))
        raise ConfigError(f"--config {row}: no such file, and no row of {folder.name}; {known}")
    return named


def load_row(
    config_class: type,
    folder: Path,
    row: str | Path,
    scale: str,
    overrides: list[str] = (),
    scale_files: str = "scale",
) -> Any:
    """Config of one row at one scale, whose file is `configs/<scale_files>_<scale>.yaml`.

    Entries under `rows` in the scale's file win over the row: for ablation_ob_64_8.yaml those of ablation, ablation_ob,
    ..., ablation_ob_64_8. An entry may name several beginnings, separated by blanks; among equals the later entry wins.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale {scale!r} is unknown; {accepted(scale, SCALES)}")
    files = [folder / "configs" / f"{scale_files}_{scale}.yaml", Path(row)]
    return located(_row(config_class, tuple((file, _bytes(file)) for file in files), tuple(overrides)))


@functools.lru_cache(maxsize=1024)  # a table asks seven times for the config of each of its runs
def _row(config_class: type, files: tuple[tuple[Path, bytes], ...], overrides: tuple[str, ...]) -> Any:
    # by what the files say, a row's behind its scale's
    (general, shared), (row, settings) = ((file, _content(file, text)) for file, text in files)
    rows = _layers_of_row(shared.get("rows", {}), row.stem, f"{general}: rows")
    everywhere = {key: value for key, value in shared.items() if key != "rows"}
    return _filled(config_class, [(str(general), everywhere), (str(row), settings), *rows], overrides)


def notes_of_row(config_class: type, folder: Path, row: Path, scale: str, scale_files: str = "scale") -> list[str]:
    """Sentences on what a scale's `rows` change in a row's file, and what they set only for the row it was copied from.

    Arguments and errors as `load_row`. A copy still has the "# Run:" line of the row it was copied from.
    """
    general = folder / "configs" / f"{scale_files}_{scale}.yaml"
    rows = _content(general, _bytes(general)).get("rows", {})

    def of(name: str) -> dict[str, Any]:
        layers = _layers_of_row(rows, name, f"{general}: rows")
        return {key: value for where, layer in layers for key, (value, _) in flat(config_class, layer, where)}

    typed = {key: value for key, (value, _) in flat(config_class, _content(row, _bytes(row)), str(row))}
    here = of(row.stem)
    notes = [
        f"{general.name} sets {key}={value} for {row.stem}; its own file has {typed[key]}"
        for key, value in here.items()
        if typed.get(key, value) != value
    ]
    line = _run_line(row)
    copied = re.search(r"--config (\S+)", line[0]) if line else None
    original = Path(copied[1]).stem if copied else row.stem
    others = [f"{key}={value}" for key, value in of(original).items() if here.get(key) != value]
    if original != row.stem and others:
        notes.append(
            f"{row.stem} was copied from {original}, for which {general.name} also sets {', '.join(others)}; add "
            "this to the command or to the file if it is to train as that row does"
        )
    return notes


def _layers_of_row(rows: Any, row: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    # the entries of `rows` for a row, as (where, sections), the longest beginning last
    if not isinstance(rows, dict):
        raise ConfigError(f"{where} is a section, got {rows!r}; expected: beginnings of names, each with sections")
    for names, content in rows.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{where}.{names} is a mapping of sections, got {content!r}")
    layers = []
    for beginning in itertools.accumulate(row.split("_"), "{}_{}".format):
        layers += [(f"{where}.{names}", rows[names]) for names in rows if beginning in str(names).split()]
    return layers


def _overlaid(config_class: type, values: Values, layer: Values) -> Values:
    # a later layer over earlier ones, without what its source or tokenizer does not take or another source named
    others = set()
    for choice, taken_by in getattr(hints_of(config_class).get("data"), "taken_by", {}).items():
        if chosen := layer.get(f"data.{choice}"):
            others |= {f"data.{name}" for name, takers in taken_by.items() if chosen[0] not in takers}
    if {"data.source"} <= layer.keys() & values.keys() and values["data.source"][0] != layer["data.source"][0]:
        others |= {f"data.{name}" for name in (*NAMES_IN_A_SOURCE, "mixture")}
    return {key: value for key, value in values.items() if key not in others} | layer


def _parsed(config_class: type, overrides: Sequence[str]) -> dict[str, Any]:
    content = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"command line: {text!r} is not of the form section.key=value")
        setting = settings_of(config_class).get(key)
        try:  # a text is as typed: a folder may be called 2024
            content[key] = yaml.load(value, _Words) if setting and setting.hint is not str else value
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: {text!r}: the value is no YAML ({error})") from error
    return content


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        folder = path.parent
        there = ", ".join(sorted(item.name for item in folder.glob("*.yaml"))) if folder.is_dir() else "no such folder"
        raise ConfigError(f"{path}: no such config file; in {folder}: {there or 'no YAML file'}")
    return path.read_bytes()


@functools.lru_cache  # a table reads the same few files for each of its rows
def _content(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = yaml.load(text, _Words)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if content is None:
        raise ConfigError(f"{path}: nothing in it sets a value; expected: sections, or {{}} for the defaults")
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, got {type(content).__name__}")
    return content
