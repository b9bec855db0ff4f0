"""Key -> scene: number, looks and places of its objects. The statistics of the image-caption splits."""

import functools
from dataclasses import dataclass

from common.base.random_keys import Draws
from common.data.scenes.masks import ARROW
from common.data.scenes.world import (
    CANVAS,
    COLOURS,
    DOMAIN_BACKGROUNDS,
    LARGE,
    SHAPES,
    SIZE_RADII,
    SMALL,
    Scene,
    SceneObject,
)

_MARGIN = 12  # units kept free at the image's rim
_LATTICE = 40  # centres lie at odd multiples of half of this, so never on the border between two places
_TRIES = 24  # random placements before falling back to one object per quadrant
TEXTURE_WEIGHTS = (52, 16, 16, 16)


@dataclass(frozen=True)
class Statistics:
    """How the scenes of a split are drawn; percentages are integers."""

    count_weights: tuple[int, ...] = (12, 52, 26, 10)  # for 1, 2, 3, 4 objects
    large_percent: int = 50
    copy_percent: int = 14  # chance that an object takes the shape or the colour of an earlier one
    domain: int = 0
    detail: int = 0  # 1: longer captions


def place_objects(radii: list[int], draws: Draws) -> list[tuple[int, int]]:
    """One (x, y) per radius, in units; the squares of at most four objects lie inside the image, without overlap."""
    below, middle = draws.below, _LATTICE // 2
    for _ in range(_TRIES):
        centres = []
        for radius in radii:
            first = (radius + _MARGIN + middle - 1) // _LATTICE  # first cell whose centre keeps the margin
            cells = CANVAS // _LATTICE - 2 * first
            x, y = _LATTICE * (first + below(cells)) + middle, _LATTICE * (first + below(cells)) + middle
            gaps = [max(abs(x - at[0]), abs(y - at[1])) - radius - other for at, other in zip(centres, radii)]
            if min(gaps, default=0) < 0:
                break
            centres.append((x, y))
        else:
            return centres
    half = CANVAS // 2
    centres = []
    for radius, quadrant in zip(radii, draws.shuffled(range(4))):
        slack = half - 2 * (radius + _MARGIN)
        corner_x, corner_y = quadrant % 2 * half, quadrant // 2 * half
        x, y = draws.below(slack + 1), draws.below(slack + 1)
        centres.append((corner_x + radius + _MARGIN + x, corner_y + radius + _MARGIN + y))
    return centres


@functools.lru_cache(maxsize=1)  # an item asks for its picture and for its captions
def draw_scene(key: int, statistics: Statistics) -> Scene:
    """The scene of a key, a pure function."""
    draws = Draws(key)
    below = draws.below
    count = 1 + draws.weighted(statistics.count_weights)
    background = draws.pick(DOMAIN_BACKGROUNDS[statistics.domain])
    looks = []
    for i in range(count):
        shape, colour = below(len(SHAPES)), below(len(COLOURS))
        if i and draws.chance(statistics.copy_percent):
            other = looks[below(i)]
            if draws.chance(50):
                shape = other[0]
            else:
                colour = other[1]
        large = below(100) < (statistics.large_percent if count < 4 else statistics.large_percent - 15)
        size = LARGE if large else SMALL
        texture = draws.weighted(TEXTURE_WEIGHTS)
        orientation = below(4) if shape == ARROW else 0
        low, high = SIZE_RADII[size]
        looks.append((shape, colour, size, texture, orientation, low + below(high - low + 1), below(1 << 24)))
    centres = place_objects([look[5] for look in looks], draws)
    objects = tuple(
        SceneObject(shape, colour, size, texture, orientation, x, y, radius, tint)
        for (shape, colour, size, texture, orientation, radius, tint), (x, y) in zip(looks, centres)
    )
    return Scene(objects, statistics.domain, 0, background, key)


_CROWDED = Statistics(count_weights=(0, 16, 42, 42), large_percent=45, detail=1)
# Splits of images with captions. Name and seed enter every image's key, so no two splits share an image.
SPLITS: dict[str, Statistics] = {
    "train": Statistics(),
    "val": Statistics(),
    "test": Statistics(),  # stands for Flickr30k's test set of 1,000
    "train_crowded": _CROWDED,  # COCO's training pairs
    "test_crowded": _CROWDED,  # COCO's test set of 1,000 or 5,000
    "test_other_domain": Statistics(domain=1),  # an out-of-domain set of pairs
}
