"""Fields of a config's dataclasses: a default, and what the engine (config.py) checks or does with a value."""

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
):
    """A dataclass field with a default and bounds (`above` and `below` are exclusive)."""
    return field(default=default, metadata={"at_least": at_least, "at_most": at_most, "above": above, "below": below})


def path_setting(default: Any = ""):
    """A dataclass field of a file, a folder, or a name that may be one; the config engine expands `~` in it."""
    return field(default=default, metadata={"is_path": True})


def columns_setting(default: Any = ""):
    """A dataclass field of names of columns, separated by commas; a YAML file may also list them."""
    return field(default=default, metadata={"is_list": True})
