"""Scenes made around one main object, for class labels: the object, distractors where they fit, picture settings."""

from common.base.random_keys import Draws
from common.data.scenes.masks import ARROW
from common.data.scenes.sampling import TEXTURE_WEIGHTS
from common.data.scenes.world import CANVAS, COLOURS, LARGE, SHAPES, SMALL, SceneObject

_TRIES = 20
_MARGIN = 10


def random_object(draws: Draws, radius: int, **fixed: int) -> SceneObject:
    """An object of that radius at the picture's centre; what `fixed` does not name is drawn."""
    shape = draws.below(len(SHAPES))
    colour = draws.below(len(COLOURS))
    texture = draws.weighted(TEXTURE_WEIGHTS)
    turn, tint = draws.below(4), draws.below(1 << 24)
    shape = fixed.get("shape", shape)
    values = {
        "shape": shape,
        "colour": colour,
        "size": LARGE if radius > 150 else SMALL,
        "texture": texture,
        "orientation": turn if shape == ARROW else 0,
        "x": CANVAS // 2,
        "y": CANVAS // 2,
        "radius": radius,
        "tint": tint,
    }
    values.update(fixed)
    return SceneObject(**values)


def moved(item: SceneObject, x: int, y: int) -> SceneObject:
    """The same object with its centre at (x, y), in units."""
    return SceneObject(item.shape, item.colour, item.size, item.texture, item.orientation, x, y, item.radius, item.tint)


def random_centre(draws: Draws, radius: int) -> tuple[int, int]:
    """A centre such that the object lies inside the picture."""
    span = CANVAS - 2 * (radius + _MARGIN) + 1
    return radius + _MARGIN + draws.below(span), radius + _MARGIN + draws.below(span)


def gap_between(a: SceneObject, b: SceneObject) -> int:
    """Units between the objects' squares along the axis on which they are further apart; negative: they overlap."""
    return max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius


def scatter(items: list[SceneObject], draws: Draws, least_gap: int = 0) -> tuple[SceneObject, ...]:
    """Place objects one by one at random; one that finds no room is left out, the first never is.

    Args:
        items: objects; where they lie is ignored.
        draws: source of the places.
        least_gap: units to keep between objects' squares; negative allows overlap.
    """
    placed: list[SceneObject] = []
    for item in items:
        for _ in range(_TRIES):
            candidate = moved(item, *random_centre(draws, item.radius))
            if all(gap_between(candidate, other) >= least_gap for other in placed):
                placed.append(candidate)
                break
    return tuple(placed)
