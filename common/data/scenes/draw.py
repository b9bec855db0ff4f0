"""Scene -> pixels: supersampled masks, blended in integers, so that a picture is the same on every machine.

Domain A is flat colour on plain paper; domain B has a muted palette, contours, drop shadows, vertical stripes and
scenery behind. The three renditions replace the filled shape by its contour (outline), by a wobbly contour with
hatching (sketch), or by a filled panel out of which the shape is cut (inverted: figure and ground exchanged).
"""

import numpy as np

from .masks import shape_tables
from .raster import paint
from .world import CHECKERED, COLOURS, DARK_BACKGROUNDS, SQUARE, Scene

PALETTES = np.array(
    [
        [  # domain A, in the order of COLOURS, then the cloth that covers things
            (216, 32, 36), (255, 136, 16), (248, 220, 40), (36, 158, 54), (52, 206, 222),
            (30, 70, 214), (136, 48, 178), (252, 128, 192), (138, 84, 38), (128, 128, 128),
        ],
        [  # domain B: muted
            (170, 58, 66), (220, 136, 74), (214, 196, 92), (84, 140, 78), (106, 180, 184),
            (74, 98, 176), (122, 84, 150), (222, 156, 178), (108, 80, 60), (128, 128, 128),
        ],
    ],
    dtype=np.int64,
)  # fmt: skip
PAPERS = np.array(
    [
        (246, 246, 246), (160, 160, 160), (22, 22, 22), (240, 240, 230),
        (206, 182, 138), (112, 146, 78), (150, 196, 236), (26, 30, 66),
    ],
    dtype=np.int64,
)  # base colour, in the order of BACKGROUNDS  # fmt: skip
_CLOTH = len(COLOURS)


def render(scene: Scene, image_size: int = 48) -> np.ndarray:
    """Draw a scene.

    Args:
        scene: what to draw.
        image_size: side of the square picture in pixels, at least 16.
    Returns:
        (image_size, image_size, 3) uint8, red, green, blue.
    Raises:
        ValueError: if the picture is smaller than 16 pixels.
    """
    if image_size < 16:
        raise ValueError(f"image_size must be at least 16 pixels, got {image_size}")
    rows = [(o.shape, o.texture, o.orientation, o.x, o.y, o.radius, o.colour, o.tint) for o in scene.objects]
    for index in scene.covered:
        o = scene.objects[index]
        rows[index] = (SQUARE, CHECKERED, 0, o.x, o.y, o.radius, _CLOTH, 0)
    settings = (
        scene.background,
        scene.background in DARK_BACKGROUNDS,
        scene.domain,
        scene.rendition,
        scene.contrast,
        scene.clutter_behind,
        scene.clutter_front,
    )
    return paint(
        np.array(rows, dtype=np.int64).reshape(-1, 8),
        np.array(settings, dtype=np.int64),
        np.uint64(scene.key),
        shape_tables(),
        PALETTES[scene.domain],
        PAPERS[scene.background],
        image_size,
        4 if image_size < 32 else 3 if image_size <= 64 else 2,
    )
