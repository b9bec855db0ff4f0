"""The closed vocabulary: every word that a caption, template, class name, question, answer or statement can contain."""

import re

from common.data.scenes import classification, phrases, wording
from common.data.scenes.world import BACKGROUNDS, COLOURS, ORIENTATIONS, PLACES, RELATIONS, SHAPES, SIZES, TEXTURES


def _collect(value, words: set[str]) -> None:
    if isinstance(value, str):
        words.update(re.sub(r"{\w*}", " ", value).split())
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, words)
    elif isinstance(value, dict):
        _collect([*value, *value.values()], words)


def scene_words() -> list[str]:
    """Sorted list of all words, lower case, without punctuation."""
    words: set[str] = set()
    _collect((SHAPES, COLOURS, SIZES, TEXTURES, ORIENTATIONS, PLACES, RELATIONS, BACKGROUNDS), words)
    for module in (wording, phrases, classification):
        for name, value in vars(module).items():
            if name.isupper() and not name.endswith("_TASKS"):  # a task's name is no word of a caption
                _collect(value, words)
    return sorted(words)
