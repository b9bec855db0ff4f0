"""Associations: a cue word and candidate images, k of which go with it (WinoGAViL)."""

import numpy as np

from common.base.random_keys import Draws, derive_key
from common.data.scenes.draw import render
from common.data.scenes.phrases import CUES
from common.data.scenes.sampling import Statistics, draw_scene
from common.data.scenes.statements import Mention, Statement, describes
from common.data.scenes.wording import COLOUR_ADJECTIVES, SHAPE_NOUNS, TEXTURE_ADJECTIVES

CANDIDATES = (5, 6, 10, 12)
_STATISTICS = Statistics()
_WORDINGS = {"shape": SHAPE_NOUNS, "colour": COLOUR_ADJECTIVES, "texture": TEXTURE_ADJECTIVES}


def cue_statement(cue: tuple[str, int]) -> Statement:
    """The statement behind a cue (field, value)."""
    field, value = cue
    if field in ("count", "background"):
        return Statement((), **{field: value})
    return Statement((Mention(**{field: value}),))


def say_cue(cue: tuple[str, int], draws: Draws) -> str:
    """One word; for shapes, colours and textures any of their synonyms."""
    field, value = cue
    return draws.pick(_WORDINGS[field][value] if field in _WORDINGS else CUES[field][value])


def association_item(key: int, turn: int, image_size: int) -> dict:
    """A cue and 5, 6, 10 or 12 images.

    Returns:
        {"cue": one word, "images": (n, H, W, 3) uint8, "gold": ascending indices of the 2 to n // 2 images that the cue
        describes, "k": their number}.
    """
    draws = Draws(key)
    number = CANDIDATES[turn]
    field = draws.pick(("shape", "shape", "colour", "colour", "texture", "count", "background"))
    values = _WORDINGS.get(field, CUES.get(field))
    cue = (field, draws.pick(sorted(values)) if isinstance(values, dict) else draws.below(len(values)))
    statement = cue_statement(cue)
    gold = set(draws.shuffled(range(number))[: draws.between(2, number // 2)])
    scenes = []
    while len(scenes) < number:
        scene = draw_scene(derive_key(key, draws.below(2**31)), _STATISTICS)
        if describes(statement, scene) == (len(scenes) in gold):
            scenes.append(scene)
    return {
        "cue": say_cue(cue, draws),
        "images": np.stack([render(scene, image_size) for scene in scenes]),
        "gold": sorted(gold),
        "k": len(gold),
    }
