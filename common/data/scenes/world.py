"""A scene: names of every attribute, the objects, the image's own settings. Integers only.

Coordinates lie in [0, 960): 20 units to a pixel at 48 px. x grows to the right, y downwards. An attribute is an index
into the tuple of names below; -1 means "unspecified" in statements and never occurs in a scene.
"""

from dataclasses import dataclass

from common.data.scenes.masks import SHAPES as SHAPES  # the masks need it; others read it from here
from common.data.scenes.masks import shape_extent

WORLD_VERSION = 1  # raise when the meaning of a seed changes
CANVAS = 960  # side of the square world, in units

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown")
SIZES = ("small", "large")
TEXTURES = ("solid", "striped", "dotted", "checkered")
ORIENTATIONS = ("up", "right", "down", "left")  # quarter turns clockwise
PLACES = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")
RELATIONS = ("left", "right", "above", "below")
DOMAINS = ("A", "B")
RENDITIONS = ("normal", "outline", "sketch", "inverted")
BACKGROUNDS = ("white", "gray", "black", "lined", "sand", "grass", "sky", "night")
DOMAIN_BACKGROUNDS = ((0, 1, 2, 3), (4, 5, 6, 7))  # by domain
DARK_BACKGROUNDS = (2, 7)

LEFT, RIGHT, ABOVE, BELOW = range(4)
SMALL, LARGE = range(2)
SOLID, STRIPED, DOTTED, CHECKERED = range(4)
INVERSE_RELATION = (RIGHT, LEFT, BELOW, ABOVE)
SIZE_RADII = ((122, 140), (190, 214))  # smallest and largest radius of a small and of a large object, in units


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One object; `shape` ... `orientation` index the tuples of names above."""

    shape: int
    colour: int
    size: int
    texture: int
    orientation: int  # 0 (up) for everything but arrows, apart from the orientation task
    x: int  # centre, in units
    y: int
    radius: int  # half the side of the square that contains the object, in units
    tint: int = 0  # 24 bits of colour jitter, for drawing only

    @property
    def place(self) -> int:
        """Cell of the 3 x 3 grid that holds the centre, row by row: an index into `PLACES`."""
        return 3 * (3 * self.y // CANVAS) + 3 * self.x // CANVAS

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of what is drawn, as fractions of the image, in [0, 1]."""
        left, top, right, bottom = shape_extent(self.shape, self.orientation)

        def share(centre: int, reach: int) -> float:
            return min(max((centre + reach * self.radius / 128) / CANVAS, 0.0), 1.0)

        return share(self.x, left), share(self.y, top), share(self.x, right), share(self.y, bottom)


@dataclass(frozen=True, slots=True)
class Scene:
    """An image's content, and the key of its drawing jitter and wording."""

    objects: tuple[SceneObject, ...]
    domain: int  # 0 (A, the training domain) or 1 (B, out of domain)
    rendition: int  # index into RENDITIONS
    background: int  # index into BACKGROUNDS
    key: int  # 64 bits
    contrast: int = 256  # 256 = full; lower values fade the objects into the background
    clutter_behind: int = 0  # number of random grey strokes under the objects
    clutter_front: int = 0  # number of random grey strokes over the objects
    covered: tuple[int, ...] = ()  # indices of objects hidden under a grey chequered cloth (visual entailment)


def holds(relation: int, a: SceneObject, b: SceneObject) -> bool:
    """Whether `a` stands in the relation to `b`; the objects' squares must not overlap along that axis.

    At most one of left/right holds, and each is the inverse of the other. Objects whose squares do not overlap satisfy
    at least one of the four.
    """
    distance = b.x - a.x if relation in (LEFT, RIGHT) else b.y - a.y
    return (distance if relation in (LEFT, ABOVE) else -distance) >= a.radius + b.radius


def main_relation(a: SceneObject, b: SceneObject) -> int:
    """The relation of `a` to `b` along the axis on which they are further apart; it holds whenever any does."""
    dx, dy = b.x - a.x, b.y - a.y
    if abs(dx) >= abs(dy):
        return LEFT if dx > 0 else RIGHT
    return ABOVE if dy > 0 else BELOW
