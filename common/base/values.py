"""Values of a config: a word is read as its setting means it, pydantic checks it, an error is one line."""

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Union

import pydantic

from common.base.arguments import accepted
from common.base.fields import Setting, hints_of, settings_of

Values = dict[str, tuple[Any, str]]  # dotted key -> (value, where it was set)

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_EXPECTED = {  # by pydantic's names of errors
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "too_short": "a list of {min_length} numbers",
    "too_long": "a list of {max_length} numbers",
    "greater_than_equal": ">= {ge}",
    "greater_than": "> {gt}",
    "less_than_equal": "<= {le}",
    "less_than": "< {lt}",
    "literal_error": "{expected}",
}
_STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is for the user."""


def flat(config_class: type, content: Any, where: str, prefix: str = "") -> Iterator[tuple[str, tuple[Any, str]]]:
    """Items of `Values` from nested mappings; a key may also be dotted."""
    hints = hints_of(config_class)
    known = sorted(f"{prefix}{name}" for name in hints)
    if not isinstance(content, dict):
        place = f"{where}: {prefix}".rstrip(":. ")
        raise ConfigError(
            f"{place} is a section, got {content!r}; expected: keys and values, as in {{{', '.join(hints)}}}"
        )
    for key, value in content.items():
        name, _, rest = str(key).partition(".")
        if name not in hints or (rest and not dataclasses.is_dataclass(hints[name])):
            raise ConfigError(f"{where}: unknown key '{prefix}{key}'; {accepted(f'{prefix}{key}', known)}")
        if dataclasses.is_dataclass(hints[name]):
            yield from flat(hints[name], {rest: value} if rest else value, where, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (value, where)


def checked(config_class: type, values: Values, prefix: str = "") -> Any:
    """A config, or a section of one, from these values and its defaults."""
    arguments = {}
    for name, hint in hints_of(config_class).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            arguments[name] = checked(hint, values, f"{key}.")
        elif key in values:
            arguments[name] = _checked_value(settings_of(config_class)[name], key, *values[key])
        elif not hasattr(config_class, name):
            raise ConfigError(f"missing key {key!r}: no file sets it and it has no default")
    try:
        return config_class(**arguments)
    except ValueError as error:  # a check across fields in __post_init__
        sources = sorted({where for key, (_, where) in values.items() if key.startswith(prefix)})
        raise ConfigError(f"{', '.join(sources) or 'defaults'}: {error}") from error


def _checked_value(setting: Setting, key: str, value: Any, where: str) -> Any:
    part = next(iter(typing.get_args(setting.hint)), None)
    if dataclasses.is_dataclass(part) and isinstance(value, list):
        places = [f"{where}: {key}[{index}]" for index in range(len(value))]
        return tuple(checked(part, dict(flat(part, content, place))) for content, place in zip(value, places))
    try:
        return _adapter(setting.hint, setting.bounds).validate_python(setting.read(value) if setting.read else value)
    except pydantic.ValidationError as error:
        problems = error.errors()  # of a union, one for each of its types
        place = "".join(f"[{index}]" for index in problems[0]["loc"] if isinstance(index, int))
        texts = [_EXPECTED.get(item["type"], item["msg"]).format(**item.get("ctx", {})) for item in problems]
        choices = ", ".join(dict.fromkeys(texts)).replace("' or '", ", ").replace("'", "")
        expected = f"expected one of: {choices}" if ", " in choices else f"expected: {choices}"
        raise ConfigError(f"{where}: {key}{place} = {problems[0]['input']!r}; {expected}") from None


@functools.cache
def _adapter(hint: Any, bounds: tuple[tuple[str, float], ...]) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(_type(hint, bounds), config=_STRICT)


def _type(hint: Any, bounds: tuple[tuple[str, float], ...]) -> Any:
    # a type for pydantic: numbers with bounds, words as what they stand for, lists as tuples
    if hint in (bool, int, float):
        return Annotated[hint, pydantic.Field(**dict(bounds)), pydantic.BeforeValidator(functools.partial(_read, hint))]
    parts = tuple(_type(part, bounds) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        length = {} if parts[-1] is ... else {"min_length": len(parts), "max_length": len(parts)}
        return Annotated[list[parts[0]], pydantic.Field(**length), pydantic.AfterValidator(tuple)]
    return Union[parts] if typing.get_origin(hint) in (types.UnionType, Union) else hint  # noqa: UP007


def _read(hint: type, value: Any) -> Any:
    if hint is bool and isinstance(value, str):
        return _TRUTH.get(value.lower(), value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return hint(value)
        with contextlib.suppress(ValueError):  # 1e3 is a whole number, 1.5 is none
            return int(float(value)) if float(value).is_integer() else value
    return value
