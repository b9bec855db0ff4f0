"""Fields of a config's dataclasses: a default, what the engine (config.py) checks in a value, and what it decides."""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

# weights: a run with another value is another run. evaluation: it is the same run, evaluated again. nothing: a run may
# resume with another value; data and weights that it names are known by their fingerprints
Decides = Literal["weights", "evaluation", "nothing"]


def setting(
    default: Any,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    decides: Decides | None = None,
    from_weights: bool = False,
    **marks: bool,
):
    """A dataclass field with a default and bounds (`above` and `below` are exclusive).

    Args:
        decides: what another value changes; None = what the section's attribute `decides` says, else weights.
        from_weights: null takes the value of the weights that a run starts from; a checkpoint holds it.
        marks: of the two functions below.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    metadata = {**bounds, "decides": decides, "from_weights": from_weights, **marks}
    return dataclasses.field(default=default, metadata=metadata)


def path_setting(default: Any = "", decides: Decides | None = None):
    """A dataclass field of a file, a folder, or a name that may be one; the config engine expands `~` in it."""
    return setting(default, decides=decides, is_path=True)


def columns_setting(default: Any = "", decides: Decides | None = None):
    """A dataclass field of names of columns, separated by commas; a YAML file may also list them."""
    return setting(default, decides=decides, is_list=True)


class Setting(NamedTuple):
    """A leaf of a config: its type, the marks above, and what it decides."""

    hint: Any
    marks: Mapping[str, Any]
    decides: Decides


@functools.cache
def settings_of(config_class: type, decides: Decides = "weights") -> dict[str, Setting]:
    """Dotted key -> setting, of a config or one section, in order; `decides` holds where a section has no own."""
    hints = typing.get_type_hints(config_class)
    decides = getattr(config_class, "decides", decides)
    settings = {}
    for item in dataclasses.fields(config_class):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            settings |= {f"{item.name}.{key}": value for key, value in settings_of(hint, decides).items()}
        else:
            settings[item.name] = Setting(hint, item.metadata, item.metadata.get("decides") or decides)
    return settings


def deciding(config_class: type) -> dict[str, Decides]:
    """Dotted key -> what a config's setting decides."""
    return {key: item.decides for key, item in settings_of(config_class).items()}


def stated_by_weights(config_class: type) -> set[str]:
    """Dotted keys whose null stands for the value of the weights that a run starts from."""
    return {key for key, item in settings_of(config_class).items() if item.marks.get("from_weights")}
