"""What defines a classification task: names, prompt templates, and the function that draws a scene of a class."""

from collections.abc import Callable
from typing import NamedTuple

from .hashing import Draws
from .world import Scene


class TaskSpec(NamedTuple):
    """One task; `scene(label, draws, key)` is a pure function of the label and the key behind `draws`."""

    class_names: tuple[str, ...]
    templates: tuple[str, ...]  # each with one {}
    stands_in_for: str
    group: str  # imagenet, natural, specialised or structured
    scene: Callable[[int, Draws, int], Scene]
