"""Configuration: nested frozen dataclasses filled from plain YAML files and `section.key=value` overrides.

A row file holds the method of one row of a table, a scale file holds data, sizes, steps and hardware, and under `rows`
what some rows have of their own at that scale:
    defaults of the dataclass  <  scale file  <  row file  <  the scale file's `rows`  <  overrides on the command line
The field's type says how a word is read: 5e-4 and 1e3 are numbers where a number belongs; `no` is a word where words
are accepted, and false where true or false belongs. Every value is checked against type and bounds; an error names
the file, the key, the value and what is accepted. No interpolation, no class paths, no environment variables.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from common.base.arguments import Parser, accepted, did_you_mean, expanded, rows_of
from common.base.settings import NAMES_IN_A_SOURCE, TAKEN_BY, TAKEN_BY_TOKENIZER, DataConfig, located

SCALES = ("smoke", "demo", "photos", "photos_scratch", "paper")


_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is meant for the user as it stands."""


class _Words(yaml.SafeLoader):
    """Leaves every word but null as text. YAML itself takes 5e-4 for text, no for false and 010 for 8."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}


_Words.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def load_config(config_class: type, files: list[Path], overrides: list[str] = ()) -> Any:
    """Fills a config dataclass from its defaults, then YAML files in order, then `section.key=value` overrides.

    Args:
        config_class: frozen dataclass whose fields are scalars or such dataclasses.
        files: YAML files; a later one wins.
        overrides: "section.key=value" strings; the value is read as YAML.
    Returns:
        An instance of config_class.
    Raises:
        ConfigError: missing file, broken YAML, unknown key, a key twice in a file, wrong type, value out of bounds.
    """
    return _filled(config_class, ((str(path), _read_yaml(path)) for path in files), overrides)


def _filled(config_class: type, layers: Iterable[tuple[str, dict[str, Any]]], overrides: list[str]) -> Any:
    """As `load_config`, from the files' content as (where, sections) in order; `where` stands in errors."""
    values: dict[str, tuple[Any, str]] = {}  # dotted key -> (value, where it was set)
    for where, content in layers:
        layer = {key: (value, where) for key, value in _flatten(config_class, content, where)}
        values = _overlaid(config_class, values, layer)
    config = _build(config_class, _overlaid(config_class, values, _parsed(config_class, overrides)), prefix="")
    try:
        return located(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def load_beside_weights(config_class: type, overrides: Sequence[str], fixed: Sequence[str] = ()) -> Any:
    """A config for published weights: where the data lie and how they are read; all else stands in the weights.

    Args:
        config_class: dataclass of the config.
        overrides: the user's, "data.key=value" and "run.key=value".
        fixed: what the caller sets, "section.key=value".
    Raises:
        ConfigError: another section, or data.root for a source that has none.
    """
    for text in overrides:
        if not text.startswith(("data.", "run.")):
            raise ConfigError(f"{text}: published weights bring their own; accepted: data.* and run.*")
    named = {text.partition("=")[0] for text in overrides}
    if "data.root" in named and "data.source" not in named:
        raise ConfigError("data.root without data.source; accepted: data.source=shards data.root=<folder>")
    return load_config(config_class, [], [*overrides, *fixed])


def to_dict(config: Any) -> dict[str, Any]:
    """Config as nested plain values, ready for YAML or JSON (tuples become lists)."""
    plain = dataclasses.asdict(config)

    def listed(value):
        if isinstance(value, dict):
            return {key: listed(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return listed(plain)


def from_dict(config_class: type, plain: dict[str, Any], where: str) -> Any:
    """Inverse of to_dict, with all checks; `where` names the source in errors."""
    values = {key: (value, where) for key, value in _flatten(config_class, plain, where)}
    return _build(config_class, values, prefix="")


def override(config: Any, overrides: list[str]) -> Any:
    """A copy of a config with `section.key=value` overrides."""
    config_class = type(config)
    values = {key: (value, "config") for key, value in _flatten(config_class, to_dict(config), "config")}
    return _build(config_class, _overlaid(config_class, values, _parsed(config_class, overrides)), prefix="")


def entry_arguments(
    description: str, script: Path, config_class: type, default_row: str, scale_files: str = "scale"
) -> tuple[Any, argparse.Namespace]:
    """Command line of a train.py: --config, --scale, --output-dir, --resume [auto], then overrides.

    Args:
        description: first help line.
        script: the train.py itself; rows and scales are looked up in `configs/` beside it.
        config_class: the paper's dataclass.
        default_row: file name of the row that is trained without --config.
        scale_files: a scale's file is `<scale_files>_<scale>.yaml`; for a folder with two kinds of config.
    Returns:
        (config, arguments); arguments.row is the row's name, arguments.resume one of None, "last" and "auto".
    Raises:
        ConfigError: as `load_row`; a row that another script trains, as the comments say that open its file.
    """
    folder = script.resolve().parent
    parser = Parser(description)
    row = Path(default_row).stem
    parser.add_argument("--config", default=row, help="a row of the paper (`make rows`) or a file, default %(default)s")
    parser.add_argument("--scale", default="demo", choices=SCALES, help=f"file configs/{scale_files}_<scale>.yaml")
    parser.add_argument("--output-dir", type=Path, help="default outputs/runs/<paper>/<row>-<scale>-<hash>/seed<n>")
    resume_help = "go on from the last whole checkpoint in the output dir; auto: or start afresh where there is none"
    parser.add_argument("--resume", nargs="?", choices=("last", "auto"), const="last", help=resume_help)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. optim.steps=500 run.seed=1")
    # argparse would take an override behind a bare --resume for its value
    words = itertools.pairwise([*sys.argv[1:], ""])
    given = [f"{word}=last" if word == "--resume" and after not in ("last", "auto") else word for word, after in words]
    arguments = parser.parse_intermixed_args(given)
    arguments.row = Path(arguments.config).stem
    file = row_file(folder, arguments.config)
    told = _run_line(file) if file.is_file() else None
    if told and told[2] != script.name and script.name in _scripts_of_rows(folder):  # one's own script trains any row
        raise ConfigError(f"--config {arguments.config}: {folder.name}/{script.name} does not train it; run: {told[1]}")
    return load_row(config_class, folder, file, arguments.scale, arguments.overrides, scale_files), arguments


def _run_line(file: Path) -> re.Match | None:
    """The comment of a row that says how it is trained; group 1 is the command, 2 the script."""
    return re.search(r"^# Run: (.*?(\w+\.py).*)$", file.read_text("utf-8", "replace"), re.MULTILINE)


def _scripts_of_rows(folder: Path) -> set[str]:
    """Names of the scripts that a paper folder's rows are trained by."""
    return {told[2] for file in (folder / "configs").glob("*.yaml") if (told := _run_line(file))}


def row_file(folder: Path, row: str) -> Path:
    """File of a row: a path, or the bare name of one in the paper folder's configs/.

    Raises:
        ConfigError: there is neither.
    """
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
    """Config of one row of a table at one scale, whose file is `configs/<scale_files>_<scale>.yaml`.

    What a row, or all rows that begin alike, have of their own at a scale stands under `rows` in the scale's file and
    wins over the row: for ablation_ob_64_8.yaml the entries ablation, ablation_ob, ..., ablation_ob_64_8, those that
    exist. An entry may name several beginnings, separated by blanks; entries of one beginning follow the file's order.

    Raises:
        ConfigError: as `load_config`; an unknown scale; `rows` or one of its entries is no mapping.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale {scale!r} is unknown; {accepted(scale, SCALES)}")
    general = folder / "configs" / f"{scale_files}_{scale}.yaml"
    shared = _read_yaml(general)
    own = _own_layers(shared.pop("rows", {}), Path(row).stem, f"{general}: rows")
    return _filled(config_class, [(str(general), shared), (str(row), _read_yaml(Path(row))), *own], overrides)


def _own_layers(rows: Any, row: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    """What a scale file's `rows` hold for a row, as (where, sections), the longest of its beginnings last."""
    if not isinstance(rows, dict):
        raise ConfigError(f"{where} is a section, got {rows!r}; accepted: beginnings of names, each with sections")
    for names, content in rows.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{where}.{names} is a mapping of sections, got {content!r}")
    own = []
    for beginning in itertools.accumulate(row.split("_"), "{}_{}".format):
        own += [(f"{where}.{names}", each) for names, each in rows.items() if beginning in str(names).split()]
    return own


def _overlaid(
    config_class: type, values: dict[str, tuple[Any, str]], layer: dict[str, tuple[Any, str]]
) -> dict[str, tuple[Any, str]]:
    """A later layer over earlier ones.

    What its source or tokenizer does not take, and what another source named, is not carried over.
    """
    if not issubclass(_hints(config_class).get("data", object), DataConfig):
        return values | layer
    others = set()
    for choice, taken_by in (("data.source", TAKEN_BY), ("data.tokenizer", TAKEN_BY_TOKENIZER)):
        if choice in layer:
            others |= {f"data.{name}" for name, takers in taken_by.items() if layer[choice][0] not in takers}
    if {"data.source"} <= layer.keys() & values.keys() and values["data.source"][0] != layer["data.source"][0]:
        others |= {f"data.{name}" for name in NAMES_IN_A_SOURCE}
    return {key: value for key, value in values.items() if key not in others} | layer


def _parsed(config_class: type, overrides: list[str]) -> dict[str, tuple[Any, str]]:
    """`section.key=value` strings as dotted key -> (value, where)."""
    values = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"command line: {text!r} is not of the form section.key=value")
        field_type = _field_type(config_class, key, "command line")
        if field_type is str:  # as typed: a folder may be called 2024
            values[key] = (value, "command line")
            continue
        if dataclasses.is_dataclass(field_type):
            raise ConfigError(f"command line: {key} is a section; set one of its keys, as in {key}.key=value")
        try:
            values[key] = (yaml.load(value, _Words), "command line")
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: {text!r}: the value is no YAML ({error})") from error
    return values


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent
        there = ", ".join(sorted(item.name for item in folder.glob("*.yaml"))) if folder.is_dir() else "no such folder"
        raise ConfigError(f"{path}: no such config file; in {folder}: {there or 'no YAML file'}")
    content = copy.deepcopy(_content(path, path.read_bytes()))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, got {type(content).__name__}")
    return content


@functools.lru_cache  # a table reads the same few files for each of its rows
def _content(path: Path, text: bytes) -> Any:
    try:
        loader = _Words(text)
        root = loader.get_single_node()
        _refuse_twice(root, path)
        return {} if root is None else loader.construct_document(root)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def _refuse_twice(node: yaml.Node | None, path: Path, prefix: str = "") -> None:
    """A later key or section of one name would take the place of an earlier one, whose values would be lost."""
    for place, item in enumerate(node.value if isinstance(node, yaml.SequenceNode) else ()):
        _refuse_twice(item, path, f"{prefix.rstrip('.')}[{place}].")
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        dotted, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if dotted in lines:
            raise ConfigError(f"{path}: {dotted} stands there twice, lines {lines[dotted]} and {line}; accepted: once")
        lines[dotted] = line
        _refuse_twice(value, path, f"{dotted}.")


def _flatten(config_class: type, content: Any, where: str, prefix: str = ""):
    """Yields (dotted key, value) of the leaves, checking that every key exists."""
    for key, value in content.items():
        dotted = f"{prefix}{key}"
        field_type = _field_type(config_class, dotted, where)
        if dataclasses.is_dataclass(field_type):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {dotted} is a section, got {value!r}")
            yield from _flatten(config_class, value, where, f"{dotted}.")
        else:
            yield dotted, value


@functools.cache
def _hints(config_class: type) -> dict[str, Any]:
    """Types of a class's fields by name; found once, as every key of every file asks."""
    return typing.get_type_hints(config_class)


def _field_type(config_class: type, dotted: str, where: str) -> Any:
    """Type of a dotted key, or ConfigError naming the nearest keys."""
    current: Any = config_class
    walked = ""
    for part in dotted.split("."):
        hints = _hints(current) if dataclasses.is_dataclass(current) else {}
        if part not in hints:
            known = sorted(f"{walked}{name}" for name in hints)
            hint = did_you_mean(dotted, known or sorted(_all_keys(config_class)))
            raise ConfigError(f"{where}: unknown key {dotted!r}{hint} (known here: {', '.join(known) or 'none'})")
        current, walked = hints[part], f"{walked}{part}."
    return current


def _all_keys(config_class: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in _hints(config_class).items():
        keys += _all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
    return keys


def _build(config_class: type, values: dict[str, tuple[Any, str]], prefix: str) -> Any:
    hints = _hints(config_class)
    arguments = {}
    for item in dataclasses.fields(config_class):
        dotted = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(hints[item.name]):
            arguments[item.name] = _build(hints[item.name], values, f"{dotted}.")
        elif dotted in values:
            value, where = values[dotted]
            arguments[item.name] = _checked(value, hints[item.name], item.metadata, f"{where}: {dotted}")
        elif item.default is dataclasses.MISSING:
            raise ConfigError(f"missing key {dotted!r}: no file sets it and it has no default")
    try:
        return config_class(**arguments)
    except ValueError as error:  # a check across fields in __post_init__
        sources = sorted({where for key, (_, where) in values.items() if key.startswith(prefix)})
        raise ConfigError(f"{', '.join(sources) or 'defaults'}: {error}") from error


def _checked(value: Any, hint: Any, bounds: Any, where: str) -> Any:
    """The value converted to the field's type, or ConfigError."""
    words = ()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None:
            return None
        words = typing.get_args(options[0]) if len(options) > 1 else ()  # a word, or a value of the last type
        if value in words:
            return value
        hint = options[-1]
    origin = typing.get_origin(hint)
    if bounds.get("is_list") and isinstance(value, list | tuple) and not any("," in str(item) for item in value):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        value = expanded(value) if bounds.get("is_path") else _read_as(hint, value)
    if origin is Literal:
        if value not in typing.get_args(hint) or isinstance(value, bool):
            accepted = ", ".join(str(choice) for choice in typing.get_args(hint))
            raise ConfigError(f"{where} = {value!r}; accepted: {accepted}")
        return value
    if origin is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is ...:
            if not isinstance(value, list | tuple):
                raise ConfigError(f"{where} = {value!r}; accepted: a list")
            return tuple(_checked(item, parts[0], {}, f"{where}[{place}]") for place, item in enumerate(value))
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise ConfigError(f"{where} = {value!r}; accepted: a list of {len(parts)} numbers")
        return tuple(_checked(item, part, bounds, where) for item, part in zip(value, parts))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} = {value!r}; accepted: keys and values, as in {{{', '.join(_all_keys(hint))}}}")
        return _build(hint, {key: (item, where) for key, item in _flatten(hint, value, where)}, prefix="")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
        raise ConfigError(f"{where} = {value!r}; accepted: {', '.join([*words, names[hint]])}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} = {value}; accepted: a finite number")
    if hint in (int, float):
        for name, sign, wrong in (
            ("at_least", ">=", lambda bound: value < bound),
            ("at_most", "<=", lambda bound: value > bound),
            ("above", ">", lambda bound: value <= bound),
            ("below", "<", lambda bound: value >= bound),
        ):
            if bounds.get(name) is not None and wrong(bounds[name]):
                raise ConfigError(f"{where} = {value}; accepted: {sign} {bounds[name]}")
    return value


def _read_as(hint: Any, text: str) -> Any:
    """A word of a file or the command line as what its field holds; the text itself where it cannot be that."""
    if hint is bool:
        return _TRUTH.get(text.lower(), text)
    if hint not in (int, float):
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    if hint is float:
        return number
    try:
        return int(text)
    except ValueError:  # 1e3 is a whole number, 1.5 is none
        return int(number) if number.is_integer() else text
