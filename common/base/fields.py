"""Fields of a config's dataclasses: a default, what values.py checks in a value, and what it decides."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from common.base.arguments import expanded

# weights: a run with another value is another run. evaluation: it is the same run, evaluated again. nothing: a run may
# resume with another value; data and weights that it names are known by their fingerprints
Decides = Literal["weights", "evaluation", "nothing"]
# field of a section -> the values of another one that take it, () = every network that it names
TakenBy = dict[str, tuple[str, ...]]


def setting(
    default: Any,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    decides: Decides | None = None,
    from_weights: bool = False,
    read: Callable[[Any], Any] | None = None,
):
    """A dataclass field with a default and bounds (`above` and `below` are exclusive).

    Args:
        decides: what another value changes; None = the section's attribute `decides`, else weights.
        from_weights: null takes the value of the weights that a run starts from; a checkpoint holds it.
        read: applied to a text before its type is checked.
    """
    limits = {"ge": at_least, "le": at_most, "gt": above, "lt": below}  # as pydantic names them
    bounds = tuple((name, limit) for name, limit in limits.items() if limit is not None)
    marks = {"bounds": bounds, "decides": decides, "from_weights": from_weights, "read": read}
    return dataclasses.field(default=default, metadata=marks)


def path_setting(default: Any = "", decides: Decides | None = None):
    """A `setting` of a file, a folder, or a name that may be one; `~` is expanded."""
    return setting(default, decides=decides, read=home_expanded)


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; an empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        is_section = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def home_expanded(value: Any) -> Any:
    """A path with `~` expanded."""
    return expanded(value) if isinstance(value, str) else value


def refuse_not_taken(values: Any, section: str, taken_by: Mapping[str, TakenBy]) -> None:
    """Raises ValueError for a field that is set although another one, its choice, has a value that does not take it.

    Args:
        taken_by: choice -> its fields.
    """
    for item in dataclasses.fields(values):
        value = getattr(values, item.name)
        for choice, fields in taken_by.items():
            chosen, takers = getattr(values, choice), fields.get(item.name)
            if takers is not None and value != item.default and (chosen not in takers if takers else not chosen):
                raise ValueError(
                    f"{section}.{item.name} = {value!r} has no effect with {section}.{choice} = {chosen or 'none'}; "
                    f"expected: {section}.{choice} = {' or '.join(takers) or 'a network'}, or the default, "
                    f"{item.default!r}"
                )


class Setting(NamedTuple):
    """A leaf of a config: its type, and what `setting` says of it."""

    hint: Any
    decides: Decides
    bounds: tuple[tuple[str, float], ...] = ()
    from_weights: bool = False
    read: Callable[[Any], Any] | None = None


@functools.cache
def hints_of(config_class: type) -> dict[str, Any]:
    """Types of a class's fields by name."""
    hints = typing.get_type_hints(config_class)
    return {item.name: hints[item.name] for item in dataclasses.fields(config_class)}


@functools.cache
def settings_of(config_class: type, decides: Decides = "weights") -> dict[str, Setting]:
    """Dotted key -> setting, of a config or one section, in order; `decides` holds for sections without their own."""
    decides = getattr(config_class, "decides", decides)
    settings = {}
    for item in dataclasses.fields(config_class):
        hint = hints_of(config_class)[item.name]
        if dataclasses.is_dataclass(hint):
            settings |= {f"{item.name}.{key}": value for key, value in settings_of(hint, decides).items()}
        else:
            settings[item.name] = Setting(hint, **item.metadata | {"decides": item.metadata.get("decides") or decides})
    return settings


def deciding(config_class: type) -> dict[str, Decides]:
    """Dotted key -> what a config's setting decides."""
    return {key: item.decides for key, item in settings_of(config_class).items()}


def stated_by_weights(config_class: type) -> set[str]:
    """Dotted keys with `from_weights`."""
    return {key for key, item in settings_of(config_class).items() if item.from_weights}
