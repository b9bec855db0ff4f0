"""Scene -> pixels: supersampled masks, blended in integers, so that an image is the same on every machine.

Domain A is flat colour on plain paper; domain B has a muted palette, contours, drop shadows, vertical stripes and
scenery behind. The three renditions replace the filled shape by its contour (outline), by a wobbly contour with
hatching (sketch), or by a panel out of which the shape is cut (inverted).
"""

import numpy as np

from common.base.compiled import compiled
from common.data.scenes import world
from common.data.scenes.masks import SQUARE, shape_tables
from common.data.scenes.world import CHECKERED, COLOURS, DARK_BACKGROUNDS, Scene

# The compiled kernels behind `render`: supersampled masks blended with integer arithmetic only.
CANVAS = 960  # written out: the cache of compiled kernels does not notice a change in another file


assert CANVAS == world.CANVAS
LINED, SAND, GRASS, SKY, NIGHT = 3, 4, 5, 6, 7  # indices into BACKGROUNDS
OUTLINE, SKETCH, INVERTED = 1, 2, 3  # indices into RENDITIONS
PANEL = 150  # half side of the inverted rendition's panel, in 1/128 of the radius
SHADOW = 26  # offset of domain B's drop shadow, in units


@compiled
def _mix(value):
    z = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def _paint_background(image, key, background, paper, supersampling):
    size = image.shape[0]
    for row in range(size):
        y = (2 * row + 1) * CANVAS // (2 * size)
        lined = 0
        if background == LINED:
            for s in range(supersampling):
                lined += (2 * (row * supersampling + s) + 1) * CANVAS // (2 * supersampling * size) % 120 < 20
        for column in range(size):
            x = (2 * column + 1) * CANVAS // (2 * size)
            red, green, blue = paper
            if background == LINED:
                red -= 86 * lined // supersampling
                green -= 66 * lined // supersampling
                blue -= 24 * lined // supersampling
            elif background == SAND:
                grain = np.int64(_mix(key ^ np.uint64((y // 20) * 64 + x // 20)) & np.uint64(63)) - 32
                red, green, blue = red + grain, green + grain, blue + grain
            elif background == GRASS:
                blade = np.int64(_mix(key ^ np.uint64((y // 80 + x // 20 % 3) * 64 + x // 20)) & np.uint64(63)) - 32
                red, green, blue = red + blade // 2, green + blade, blue + blade // 2
            elif background == SKY:
                haze = 90 * y // CANVAS
                red, green, blue = red + haze, green + haze // 2, blue + haze // 6
            elif background == NIGHT:
                star = 120 * ((_mix(key ^ np.uint64((y // 40) * 64 + x // 40)) & np.uint64(31)) == np.uint64(0))
                red, green, blue = red + star, green + star, blue + star * 11 // 12
            image[row, column, 0] = red
            image[row, column, 1] = green
            image[row, column, 2] = blue


@compiled
def _paint_stroke(image, key, supersampling):
    # a grey capsule from one random point towards another
    size = image.shape[0]
    a, b = np.int64(_mix(key) >> np.uint64(4)), np.int64(_mix(key ^ np.uint64(0x51)) >> np.uint64(4))
    x0, y0 = a % CANVAS, a // CANVAS % CANVAS
    dx, dy = b % 480 - 240, b // 480 % 480 - 240
    width, grey = 12 + b // 230400 % 22, 50 + a // 921600 % 160
    length = max(dx * dx + dy * dy, 1)
    samples = supersampling * supersampling
    first_row = max((y0 + min(dy, 0) - width) * size // CANVAS, 0)
    last_row = min((y0 + max(dy, 0) + width) * size // CANVAS + 1, size)
    first_column = max((x0 + min(dx, 0) - width) * size // CANVAS, 0)
    last_column = min((x0 + max(dx, 0) + width) * size // CANVAS + 1, size)
    for row in range(first_row, last_row):
        for column in range(first_column, last_column):
            count = 0
            for s in range(samples):
                step_y, step_x = s // supersampling, s % supersampling
                y = (2 * (row * supersampling + step_y) + 1) * CANVAS // (2 * supersampling * size) - y0
                x = (2 * (column * supersampling + step_x) + 1) * CANVAS // (2 * supersampling * size) - x0
                along = min(max(x * dx + y * dy, 0), length)
                off_x, off_y = x - dx * along // length, y - dy * along // length
                count += off_x * off_x + off_y * off_y <= width * width
            if count:
                for c in range(3):
                    image[row, column, c] += (grey - image[row, column, c]) * count // samples


@compiled
def _axis(centre, radius, first, last, supersampling, size):
    # Samples along one axis, for textures and masks.
    #
    # Returns:
    #     (5, number of samples) int64: position from the centre in units; index into the mask's table, or -1; squared
    #     distance to the nearest dot's centre; whether in a second-tone stripe; parity of the checker's cell.
    table = np.empty((5, (last - first) * supersampling), dtype=np.int64)
    fine = size * supersampling
    for k in range(table.shape[1]):
        position = (2 * (first * supersampling + k) + 1) * CANVAS // (2 * fine) - centre
        index = position * 128 // radius + 128
        dot = (position + 44) % 88 - 44
        table[0, k] = position
        table[1, k] = index if 0 <= index <= 256 else -1
        table[2, k] = dot * dot
        table[3, k] = (position + 24) % 96 < 48
        table[4, k] = position // 78 % 2
    return table


@compiled
def _depth(tables, shape, orientation, iu, iv):
    # table value at (column iu, row iv) of the shape turned clockwise by `orientation` quarters; 0 outside
    if iu < 0 or iv < 0 or iu > 256 or iv > 256:
        return 0
    if orientation == 1:
        return tables[shape, 256 - iu, iv]
    if orientation == 2:
        return tables[shape, 256 - iv, 256 - iu]
    if orientation == 3:
        return tables[shape, iu, 256 - iv]
    return tables[shape, iv, iu]


@compiled
def _blend(image, row, column, tones, n_fill, n_second, n_contour, samples):
    rest = samples - n_fill - n_second - n_contour
    for c in range(3):
        total = tones[0, c] * n_fill + tones[1, c] * n_second + tones[2, c] * n_contour
        image[row, column, c] = (image[row, column, c] * rest + total) // samples


@compiled
def _paint_shadow(image, item, tables, supersampling):
    size, radius, samples = image.shape[0], item[5], supersampling * supersampling
    x, y = item[3] + SHADOW, item[4] + SHADOW
    first_row, last_row = max((y - radius) * size // CANVAS, 0), min((y + radius) * size // CANVAS + 1, size)
    first_column, last_column = max((x - radius) * size // CANVAS, 0), min((x + radius) * size // CANVAS + 1, size)
    across = _axis(x, radius, first_column, last_column, supersampling, size)
    along = _axis(y, radius, first_row, last_row, supersampling, size)
    for row in range(first_row, last_row):
        for column in range(first_column, last_column):
            count = 0
            for i in range((row - first_row) * supersampling, (row - first_row + 1) * supersampling):
                for j in range((column - first_column) * supersampling, (column - first_column + 1) * supersampling):
                    count += _depth(tables, item[0], item[2], across[1, j], along[1, i]) > 0
            for c in range(3):
                image[row, column, c] -= image[row, column, c] * 7 * count // (16 * samples)


@compiled
def _paint_object(image, item, tables, tones, rendition, domain, supersampling):
    # blend one object; `item` = shape, texture, orientation, x, y, radius; `tones` (3, 3): fill, second, contour
    shape, texture, orientation, x, y, radius = item[0], item[1], item[2], item[3], item[4], item[5]
    size, samples = image.shape[0], supersampling * supersampling
    reach = radius * PANEL // 128 if rendition == INVERTED else radius
    first_row, last_row = max((y - reach) * size // CANVAS, 0), min((y + reach) * size // CANVAS + 1, size)
    first_column, last_column = max((x - reach) * size // CANVAS, 0), min((x + reach) * size // CANVAS + 1, size)
    across = _axis(x, radius, first_column, last_column, supersampling, size)
    along = _axis(y, radius, first_row, last_row, supersampling, size)
    contour = 34 if rendition == OUTLINE else 30 if rendition == SKETCH else 20 if domain == 1 else 0
    contour_depth = 3 * 128 * contour // radius  # table value up to which a point counts as contour
    stripes = across if domain == 1 else along
    for row in range(first_row, last_row):
        for column in range(first_column, last_column):
            n_fill = n_second = n_contour = 0
            for i in range((row - first_row) * supersampling, (row - first_row + 1) * supersampling):
                for j in range((column - first_column) * supersampling, (column - first_column + 1) * supersampling):
                    wobble = 0
                    if rendition == SKETCH:
                        cell = (along[0, i] + 960) // 60 * 64 + (across[0, j] + 960) // 60 + 7 * x
                        wobble = np.int64(_mix(np.uint64(cell)) % np.uint64(13)) - 6
                    depth = _depth(tables, shape, orientation, across[1, j] + wobble, along[1, i] - wobble)
                    if rendition == INVERTED:
                        n_fill += depth == 0 and abs(across[0, j]) <= reach and abs(along[0, i]) <= reach
                    elif depth == 0:
                        continue
                    elif depth <= contour_depth:
                        n_contour += 1
                    elif rendition == OUTLINE:
                        continue
                    elif rendition == SKETCH:
                        n_fill += (across[0, j] + along[0, i] + 4 * wobble) % 72 < 26
                    else:
                        second = False
                        if texture == 1:
                            second = (stripes[3, j] if domain == 1 else stripes[3, i]) == 1
                        elif texture == 2:
                            second = across[2, j] + along[2, i] < 28 * 28
                        elif texture == 3:
                            second = across[4, j] == along[4, i]
                        n_second += second
                        n_fill += not second
            if n_fill + n_second + n_contour:
                _blend(image, row, column, tones, n_fill, n_second, n_contour, samples)


@compiled
def paint(items, settings, key, tables, palette, paper, size, supersampling):
    """Whole image, (size, size, 3) uint8; `items` (number of objects, 8): as in `_paint_object`, then colour, tint.

    `settings` = background, dark, domain, rendition, contrast, clutter behind, clutter in front.
    """
    background, dark, domain, rendition, contrast = settings[0], settings[1], settings[2], settings[3], settings[4]
    image = np.empty((size, size, 3), dtype=np.int64)
    tint = _mix(key ^ np.uint64(0xBACC))
    base = (
        paper[0] + np.int64(tint & np.uint64(15)) - 8,
        paper[1] + np.int64((tint >> np.uint64(4)) & np.uint64(15)) - 8,
        paper[2] + np.int64((tint >> np.uint64(8)) & np.uint64(15)) - 8,
    )
    _paint_background(image, key, background, base, supersampling)
    for stroke in range(settings[5]):
        _paint_stroke(image, key ^ np.uint64(0xA000 + stroke), supersampling)
    tones = np.empty((3, 3), dtype=np.int64)
    for i in range(items.shape[0]):
        for c in range(3):
            jitter = (items[i, 7] >> (8 * c)) % 25 - 12
            fill = min(max(palette[items[i, 6], c] + jitter, 0), 255)
            second = (fill + 3 * 255) // 4 if dark else fill * 5 // 16
            edge = fill if domain == 0 or rendition != 0 else (fill + 3 * 210) // 4 if dark else fill // 5 + 10
            tones[0, c] = base[c] + (fill - base[c]) * contrast // 256
            tones[1, c] = base[c] + (second - base[c]) * contrast // 256
            tones[2, c] = base[c] + (edge - base[c]) * contrast // 256
        if domain == 1 and rendition == 0:
            _paint_shadow(image, items[i], tables, supersampling)
        _paint_object(image, items[i], tables, tones, rendition, domain, supersampling)
    for stroke in range(settings[6]):
        _paint_stroke(image, key ^ np.uint64(0xF000 + stroke), supersampling)
    picture = np.empty((size, size, 3), dtype=np.uint8)
    span = 15 if domain == 1 else 9
    for row in range(size):
        for column in range(size):
            grain = _mix(key ^ np.uint64(0xC0FFEE0000 + row * size + column))
            for c in range(3):
                noise = (np.int64((grain >> np.uint64(16 * c)) & np.uint64(0xFFFF)) * span >> 16) - (span >> 1)
                picture[row, column, c] = min(max(image[row, column, c] + noise, 0), 255)
    return picture


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
    """Draws a scene: (image_size, image_size, 3) uint8, red, green, blue; image_size is at least 16 pixels."""
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
