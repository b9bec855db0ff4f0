"""Captions as logic: a statement lists objects and their relations, and can be evaluated on a scene.

A statement holds of a scene if its mentions can be matched to *different* objects such that every named attribute
agrees and every relation holds; a named background or exact number of things must agree too. "A red circle" also holds
of a scene with more things. Dropping a part weakens a statement: the shorter one describes whatever the longer one
describes.
"""

from collections.abc import Callable, Iterator
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


def assignments(
    statement: Statement, scene: Scene, may_be: Callable[[Mention, int], bool] | None = None
) -> Iterator[tuple[int, ...]]:
    """The ways in which a statement's mentions are different objects such that all its relations hold, as indices.

    Its background and number of things do not count here.

    Args:
        may_be: whether a mention can be the object of that index; None = where it `fits`.
    """
    objects = scene.objects

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        position = len(chosen)
        if position == len(statement.mentions):
            yield chosen
            return
        mention = statement.mentions[position]
        for index, item in enumerate(objects):
            if index not in chosen and (fits(mention, item) if may_be is None else may_be(mention, index)):
                longer = (*chosen, index)
                # relations are checked as soon as both of their things are chosen
                due = ((r, longer[a], longer[b]) for a, r, b in statement.relations if max(a, b) == position)
                if all(holds(relation, objects[one], objects[other]) for relation, one, other in due):
                    yield from extend(longer)

    return extend(())


def describes(statement: Statement, scene: Scene) -> bool:
    """Whether the statement holds of the scene, as the module defines it."""
    if statement.background not in (-1, scene.background) or statement.count not in (-1, len(scene.objects)):
        return False
    return next(assignments(statement, scene), None) is not None
