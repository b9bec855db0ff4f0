"""Captions as logic: a statement lists objects and their relations, and can be evaluated on a scene.

A statement holds of a scene if its mentions can be matched to *different* objects such that every named attribute
agrees and every relation holds; a named background or exact number of things must agree too. "A red circle" also holds
of a scene with more things. Dropping a part weakens a statement: the shorter one describes whatever the longer one
describes.
"""

from collections.abc import Callable
from typing import NamedTuple

from common.data.scenes.world import (
    COLOURS,
    ORIENTATIONS,
    PLACES,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    holds,
)


class Mention(NamedTuple):
    """One object as far as it is described; -1 = unspecified, otherwise an index into the names in `world`."""

    shape: int = -1
    colour: int = -1
    size: int = -1
    texture: int = -1
    orientation: int = -1
    place: int = -1


class Statement(NamedTuple):
    """A conjunction of all its fields; the mentions are different objects."""

    mentions: tuple[Mention, ...]
    relations: tuple[tuple[int, int, int], ...] = ()  # (mention, relation, other mention)
    background: int = -1
    count: int = -1  # exact number of objects in the image


ATTRIBUTE_NAMES = (SHAPES, COLOURS, SIZES, TEXTURES, ORIENTATIONS, PLACES)  # in the order of Mention's fields
NOTHING = Mention()


def attributes(item) -> Mention:
    """All attributes of an object."""
    return Mention(item.shape, item.colour, item.size, item.texture, item.orientation, item.place)


def fits(mention: Mention, item) -> bool:
    """Whether every named attribute of the mention agrees with the object."""
    return all(value in (-1, attribute) for value, attribute in zip(mention, attributes(item)))


def matching(
    statement: Statement,
    count: int,
    may_be: Callable[[Mention, int], bool],
    related: Callable[[int, int, int], bool],
) -> bool:
    """Whether a statement's mentions can be different ones of `count` things such that all its relations hold.

    Its background and number of things do not count here.

    Args:
        may_be: whether a mention can be the thing of that index.
        related: (relation, thing, other thing) -> whether the first stands so to the other.
    """

    def extend(chosen: tuple[int, ...]) -> bool:
        position = len(chosen)
        if position == len(statement.mentions):
            return True
        mention = statement.mentions[position]
        for thing in range(count):
            if thing not in chosen and may_be(mention, thing):
                longer = (*chosen, thing)
                # relations are checked as soon as both of their things are chosen
                due = ((r, longer[a], longer[b]) for a, r, b in statement.relations if max(a, b) == position)
                if all(related(*relation) for relation in due) and extend(longer):
                    return True
        return False

    return extend(())


def describes(statement: Statement, scene: Scene) -> bool:
    """Whether the statement holds of the scene, as the module defines it."""
    objects = scene.objects
    if statement.background not in (-1, scene.background) or statement.count not in (-1, len(objects)):
        return False
    return matching(
        statement,
        len(objects),
        lambda mention, thing: fits(mention, objects[thing]),
        lambda relation, thing, other: holds(relation, objects[thing], objects[other]),
    )
