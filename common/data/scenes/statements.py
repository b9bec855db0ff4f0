"""Captions as logic: a statement says which objects there are and how they stand, and can be evaluated on a scene.

A statement holds of a scene if its mentions can be matched to *different* objects such that every named attribute
agrees and every relation holds; a background or an exact number of things, if named, must agree too. "A red circle"
therefore also holds of a scene with a red circle and more. Dropping any part of a statement weakens it: whatever the
longer one describes, the shorter one describes.
"""

from typing import NamedTuple

from common.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    ORIENTATIONS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    holds,
)

MAX_MENTIONS = 4


class Mention(NamedTuple):
    """One object as far as it is described; -1 = not said, otherwise an index into the names in `world`."""

    shape: int = -1
    colour: int = -1
    size: int = -1
    texture: int = -1
    orientation: int = -1
    place: int = -1


class Statement(NamedTuple):
    """A conjunction: mentions of different objects, relations between them, background, exact number of things."""

    mentions: tuple[Mention, ...]
    relations: tuple[tuple[int, int, int], ...] = ()  # (mention, relation, other mention)
    background: int = -1
    count: int = -1  # exact number of objects in the picture


ATTRIBUTE_NAMES = (SHAPES, COLOURS, SIZES, TEXTURES, ORIENTATIONS, PLACES)  # in the order of Mention's fields
NOTHING = Mention()


def attributes(item) -> Mention:
    """Everything that can be said of an object."""
    return Mention(item.shape, item.colour, item.size, item.texture, item.orientation, item.place)


def fits(mention: Mention, item) -> bool:
    """Whether every named attribute of the mention agrees with the object."""
    return (
        (mention[0] < 0 or mention[0] == item.shape)
        and (mention[1] < 0 or mention[1] == item.colour)
        and (mention[2] < 0 or mention[2] == item.size)
        and (mention[3] < 0 or mention[3] == item.texture)
        and (mention[4] < 0 or mention[4] == item.orientation)
        and (mention[5] < 0 or mention[5] == item.place)
    )


def describes(statement: Statement, scene: Scene) -> bool:
    """Whether the statement is true of the scene; see the module's first paragraph for what that means."""
    objects = scene.objects
    if statement.background >= 0 and statement.background != scene.background:
        return False
    if statement.count >= 0 and statement.count != len(objects):
        return False
    mentions, relations = statement.mentions, statement.relations

    def match(chosen: tuple[int, ...]) -> bool:
        position = len(chosen)
        if position == len(mentions):
            return True
        for index, item in enumerate(objects):
            if index in chosen or not fits(mentions[position], item):
                continue
            extended = (*chosen, index)
            if all(
                holds(relation, objects[extended[a]], objects[extended[b]])
                for a, relation, b in relations
                if max(a, b) == position
            ) and match(extended):
                return True
        return False

    return match(())


def entails(stronger: Statement, weaker: Statement) -> bool:
    """Whether every scene of which `stronger` holds is one of which `weaker` holds, by the form of the two alone.

    Sound, not complete: it looks for the weaker one's mentions, relations, background and count inside the stronger
    one. True is always right.
    """
    if weaker.background not in (-1, stronger.background) or weaker.count not in (-1, stronger.count):
        return False
    known = set(stronger.relations) | {(b, relation ^ 1, a) for a, relation, b in stronger.relations}

    def match(chosen: tuple[int, ...]) -> bool:
        position = len(chosen)
        if position == len(weaker.mentions):
            return True
        for index, mention in enumerate(stronger.mentions):
            if index in chosen or any(w not in (-1, s) for w, s in zip(weaker.mentions[position], mention)):
                continue
            extended = (*chosen, index)
            if all(
                (extended[a], relation, extended[b]) in known
                for a, relation, b in weaker.relations
                if max(a, b) == position
            ) and match(extended):
                return True
        return False

    return match(())


def explain(statement: Statement) -> str:
    """The statement in a fixed notation for logs and error messages; not a caption."""
    parts = [
        " ".join(names[value] for names, value in zip(ATTRIBUTE_NAMES, mention) if value >= 0) or "something"
        for mention in statement.mentions
    ]
    parts += [f"{a} {RELATIONS[relation]} {b}" for a, relation, b in statement.relations]
    if statement.background >= 0:
        parts.append(f"on {BACKGROUNDS[statement.background]}")
    if statement.count >= 0:
        parts.append(f"exactly {statement.count}")
    return "; ".join(parts)
