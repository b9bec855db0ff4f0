"""The shapes as integer tables: how far inside the shape a point of its square lies.

Each shape lives in a square of 257 x 257 cells, (u, v) in [-128, 128], v downwards. A table holds three times the
3-4 chamfer distance to the outside, 0 = outside. All arithmetic is in integers, so the tables are the same everywhere.
"""

import itertools
from functools import cache

import numpy as np

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


def _shape_masks() -> np.ndarray:
    # (number of shapes, SIDE, SIDE) bool in the order of SHAPES, rows v, columns u, pointing up
    v, u = np.mgrid[-HALF : HALF + 1, -HALF : HALF + 1].astype(np.int64)
    squared = u * u + v * v
    return np.stack(
        [
            squared <= 122**2,
            (abs(u) <= 106) & (abs(v) <= 106),
            (v <= 106) & (abs(u) * 226 <= (v + 120) * 124),  # triangle
            abs(u) * 126 + abs(v) * 92 <= 92 * 126,  # diamond
            _inside_polygon(u, v, _STAR),
            (abs(u) <= 38) & (abs(v) <= 120) | (abs(v) <= 38) & (abs(u) <= 120),  # cross
            (squared <= 126**2) & (squared >= 66**2),  # ring
            ((abs(u) - 58) ** 2 + (v + 48) ** 2 <= 66**2) | _inside_polygon(u, v, _HEART),  # two lobes above a tip
            ((u - 22) ** 2 + v * v <= 124**2) & ((u - 76) ** 2 + v * v >= 102**2) & (u <= HALF),  # moon
            (v <= 4) & (abs(u) * 128 <= (v + 124) * 108) | (abs(u) <= 40) & (v > 0) & (v <= 120),  # arrow: head, shaft
        ]
    )


def _chamfer(mask: np.ndarray) -> np.ndarray:
    # two-pass 3-4 chamfer distance to the outside, down the rows, then up; the rim of the table has outside around it
    distance = np.pad(np.where(mask, 9999, 0), 1)
    steps = 3 * np.arange(distance.shape[1])
    for _ in range(2):
        for above, row in itertools.pairwise(distance):
            row[1:-1] = np.minimum.reduce([row[1:-1], above[1:-1] + 3, above[:-2] + 4, above[2:] + 4])
            row[:] = np.minimum.accumulate(row - steps) + steps  # 3 more than the left neighbour, at most
        distance = distance[::-1, ::-1]
    return distance[1:-1, 1:-1]


@cache
def shape_tables() -> np.ndarray:
    """(number of shapes, 257, 257) int16: 3 x depth inside the shape in cells, 0 outside; rows v, columns u."""
    tables = np.stack([_chamfer(mask) for mask in _shape_masks()]).astype(np.int16)
    tables.flags.writeable = False
    return tables


@cache
def shape_extent(shape: int, orientation: int) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of the drawn shape in 1/128 of its radius, each in [-128, 128]."""
    mask = np.rot90(shape_tables()[shape] > 0, -orientation)  # quarter turns clockwise
    rows, columns = np.flatnonzero(mask.any(1)) - HALF, np.flatnonzero(mask.any(0)) - HALF
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
