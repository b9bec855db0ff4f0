"""Statements about two images, true or false (NLVR2).

The statement is drawn first, then pairs are drawn until it is true (or false): every statement is as often true as
false, and the words do not predict the label.
"""

from typing import NamedTuple

import numpy as np

from common.base.random_keys import Draws, derive_key
from common.data.scenes.draw import render
from common.data.scenes.phrases import PAIR_STATEMENTS
from common.data.scenes.sampling import Statistics, draw_scene
from common.data.scenes.statements import Mention, fits
from common.data.scenes.wording import COLOUR_ADJECTIVES, NUMBERS, SHAPE_PLURALS, noun_phrase, with_article
from common.data.scenes.world import COLOURS, SHAPES, TEXTURES, Scene

PAIR_KINDS = tuple(PAIR_STATEMENTS)
_STATISTICS = Statistics(count_weights=(10, 30, 30, 30), copy_percent=30)


class PairStatement(NamedTuple):
    """`kind` from PAIR_KINDS, one or two mentions, a number where the kind needs one."""

    kind: str
    mention: Mention
    other: Mention
    number: int


def count_fitting(mention: Mention, scene: Scene) -> int:
    """Number of objects that fit the mention."""
    return sum(fits(mention, item) for item in scene.objects)


def pair_holds(statement: PairStatement, left: Scene, right: Scene) -> bool:
    """Whether the statement is true of the pair."""
    in_left, in_right = count_fitting(statement.mention, left), count_fitting(statement.mention, right)
    return {
        "both": in_left > 0 and in_right > 0,
        "neither": in_left == 0 and in_right == 0,
        "one": (in_left > 0) != (in_right > 0),
        "left": in_left > 0 and in_right == 0,
        "total": in_left + in_right == statement.number,
        "more": len(left.objects) > len(right.objects),
        "each": in_left > 0 and count_fitting(statement.other, right) > 0,
        "equal": len(left.objects) == len(right.objects),
    }[statement.kind]


def random_pair_statement(draws: Draws) -> PairStatement:
    """A statement independent of any image."""

    def mention() -> Mention:
        form = draws.below(3)
        values = draws.below(len(SHAPES)), draws.below(len(COLOURS)), draws.between(1, len(TEXTURES) - 1)
        return (Mention(values[0]), Mention(-1, values[1]), Mention(-1, -1, -1, values[2]))[form]

    kind = draws.pick(PAIR_KINDS)
    first, second = mention(), mention()
    if kind == "total" and first.texture >= 0:
        first = Mention(draws.below(len(SHAPES)))
    return PairStatement(kind, first, second, draws.between(1, 3))


def say_pair_statement(statement: PairStatement, draws: Draws) -> str:
    """The statement as text."""
    mention = statement.mention
    colour = f"{COLOUR_ADJECTIVES[mention.colour][0]} " if mention.colour >= 0 else ""
    if statement.number == 1:
        counted = f"there is exactly one {noun_phrase(mention)}"
    else:
        plural = SHAPE_PLURALS[mention.shape] if mention.shape >= 0 else "shapes"
        counted = f"there are exactly {NUMBERS[statement.number]} {colour}{plural}"
    return draws.pick(PAIR_STATEMENTS[statement.kind]).format(
        thing=with_article(noun_phrase(mention, draws)),
        other=with_article(noun_phrase(statement.other, draws)),
        counted=counted,
    )


def pair_item(key: int, turn: int, image_size: int) -> dict:
    """{"images": (2, H, W, 3) uint8, left then right, "statement": str, "label": 1 if true, else 0}."""
    draws = Draws(key)
    statement = random_pair_statement(draws)
    while True:
        left, right = (draw_scene(derive_key(key, draws.below(2**31)), _STATISTICS) for _ in range(2))
        if pair_holds(statement, left, right) == bool(turn):
            break
    return {
        "images": np.stack([render(left, image_size), render(right, image_size)]),
        "statement": say_pair_statement(statement, draws),
        "label": turn,
    }
