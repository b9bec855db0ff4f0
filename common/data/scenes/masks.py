"""The shapes as integer tables: how far inside the shape a point of its square lies.

Each shape lives in a square of 257 x 257 cells, (u, v) in [-128, 128], v downwards. A table holds three times the
3-4 chamfer distance to the outside, 0 = outside. All arithmetic is in integers, so the tables are the same everywhere.
"""

from functools import cache

import numpy as np

from common.base.compiled import compiled

# names of the shapes and their indices; apart from the other attributes because the masks need nothing else
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart", "moon", "arrow")
CIRCLE, SQUARE, TRIANGLE, DIAMOND, STAR, CROSS, RING, HEART, MOON, ARROW = range(10)
HALF = 128
SIDE = 2 * HALF + 1
_STAR = ((0, -126), (33, -39), (120, -33), (54, 20), (75, 108), (0, 62), (-75, 108), (-54, 20), (-120, -33), (-33, -39))
_HEART = ((-119, -22), (0, 122), (119, -22), (0, -60))


def _inside_polygon(u, v, vertices):
    # even-odd rule with integer cross products; (SIDE, SIDE) bool
    inside = np.zeros(u.shape, dtype=bool)
    for (u0, v0), (u1, v1) in zip(vertices, vertices[1:] + vertices[:1]):
        crosses = (v0 > v) != (v1 > v)
        cross_product = (u1 - u0) * (v - v0) - (u - u0) * (v1 - v0)
        inside ^= crosses & ((cross_product > 0) == (v1 > v0))
    return inside


def _shape_mask(shape: int) -> np.ndarray:
    # (SIDE, SIDE) bool, rows v, columns u, pointing up
    v, u = np.mgrid[-HALF : HALF + 1, -HALF : HALF + 1].astype(np.int64)
    squared = u * u + v * v
    if shape == CIRCLE:
        return squared <= 122**2
    if shape == SQUARE:
        return (abs(u) <= 106) & (abs(v) <= 106)
    if shape == TRIANGLE:
        return (v <= 106) & (abs(u) * 226 <= (v + 120) * 124)
    if shape == DIAMOND:
        return abs(u) * 126 + abs(v) * 92 <= 92 * 126
    if shape == STAR:
        return _inside_polygon(u, v, _STAR)
    if shape == CROSS:
        return (abs(u) <= 38) & (abs(v) <= 120) | (abs(v) <= 38) & (abs(u) <= 120)
    if shape == RING:
        return (squared <= 126**2) & (squared >= 66**2)
    if shape == HEART:
        lobes = (abs(u) - 58) ** 2 + (v + 48) ** 2 <= 66**2
        return lobes | _inside_polygon(u, v, _HEART)
    if shape == MOON:
        return ((u - 22) ** 2 + v * v <= 124**2) & ((u - 76) ** 2 + v * v >= 102**2) & (u <= HALF)
    if shape == ARROW:
        head = (v <= 4) & (abs(u) * 128 <= (v + 124) * 108)
        return head | (abs(u) <= 40) & (v > 0) & (v <= 120)
    raise AssertionError(f"shape {shape} of {len(SHAPES)} has no mask")


@compiled
def _chamfer(mask):
    # two-pass 3-4 chamfer distance to the outside; the rim of the table counts as outside
    rows, columns = mask.shape
    distance = np.zeros((rows, columns), dtype=np.int16)
    for i in range(rows):
        for j in range(columns):
            if mask[i, j]:
                best = 3
                if i > 0 and 0 < j < columns - 1:
                    best = min(distance[i - 1, j] + 3, distance[i, j - 1] + 3)
                    best = min(best, distance[i - 1, j - 1] + 4, distance[i - 1, j + 1] + 4)
                distance[i, j] = best
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            if mask[i, j]:
                best = 3
                if i < rows - 1 and 0 < j < columns - 1:
                    best = min(distance[i + 1, j] + 3, distance[i, j + 1] + 3)
                    best = min(best, distance[i + 1, j + 1] + 4, distance[i + 1, j - 1] + 4)
                distance[i, j] = min(distance[i, j], best)
    return distance


@cache
def shape_tables() -> np.ndarray:
    """(number of shapes, 257, 257) int16: 3 x depth inside the shape in cells, 0 outside; rows v, columns u."""
    tables = np.stack([_chamfer(_shape_mask(shape)) for shape in range(len(SHAPES))])
    tables.flags.writeable = False
    return tables


@cache
def shape_extent(shape: int, orientation: int) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of the drawn shape in 1/128 of its radius, each in [-128, 128]."""
    mask = np.rot90(shape_tables()[shape] > 0, -orientation)  # quarter turns clockwise
    rows, columns = np.flatnonzero(mask.any(1)) - HALF, np.flatnonzero(mask.any(0)) - HALF
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
