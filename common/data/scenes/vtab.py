"""Stand-in for VTAB: small tasks in its three groups, natural, specialised and structured.

Natural tasks ask for one attribute of one object in the training domain; specialised ones move to other pictures
(domain B, sketches, faded); structured ones ask where, how many, how far, which way.
"""

from .hashing import Draws
from .shapes import ARROW, CIRCLE, SHAPES, SQUARE
from .single import gap_between, moved, random_centre, random_object, scatter
from .task_spec import TaskSpec
from .words import NUMBERS, ORIENTATION_PHRASES, PLACE_PHRASES, RELATION_PHRASES
from .world import (
    BACKGROUNDS,
    CANVAS,
    COLOURS,
    DOMAIN_BACKGROUNDS,
    LARGE,
    PLACES,
    SIZE_RADII,
    SIZES,
    SMALL,
    TEXTURES,
    Scene,
    holds,
)

SKETCH_SHAPES = tuple(shape for shape in range(len(SHAPES)) if SHAPES[shape] not in ("ring", "moon"))
CLOSE, FAR = 0, 1
DISTANCE_NAMES = ("close together", "far apart")
SCENERY_NAMES = ("on sand", "on grass", "in the sky", "at night")
COUNT_NAMES = ("one shape", *(f"{number} shapes" for number in NUMBERS[2:5]))
NOUN_TEMPLATES = ("a {}", "a picture of a {}", "a drawing of a {}", "an image of a {}", "there is a {}")
ADJECTIVE_TEMPLATES = ("a {} shape", "a {} thing", "a picture of a {} object", "there is a {} shape")
BACKGROUND_TEMPLATES = ("a shape on a {} background", "some shapes on a {} background", "something on {} paper")
PHRASE_TEMPLATES = ("a shape {}", "a thing {}", "a picture of a shape {}", "there is something {}")
COUNT_TEMPLATES = ("{}", "a picture of {}", "exactly {}", "this picture shows {}")
DISTANCE_TEMPLATES = ("two shapes {}", "two things {}", "a picture of two objects {}")
ARROW_TEMPLATES = ("an arrow {}", "a picture of an arrow {}", "there is an arrow {}")
RELATION_TEMPLATES = ("a circle {} a square", "a picture of a circle {} a square", "a circle is {} a square")


def _radius(draws: Draws, size: int) -> int:
    return draws.between(*SIZE_RADII[size])


def _one(draws: Draws, key: int, domain: int = 0, rendition: int = 0, contrast: int = 256, **fixed: int) -> Scene:
    """One object anywhere, large in two cases of three unless its size is fixed; `background` may be fixed too."""
    background = fixed.pop("background", draws.pick(DOMAIN_BACKGROUNDS[domain]))
    size = fixed.get("size", LARGE if draws.chance(67) or rendition else SMALL)
    item = random_object(draws, _radius(draws, size), **fixed)
    return Scene((moved(item, *random_centre(draws, item.radius)),), domain, rendition, background, key, contrast)


def _shape(label, draws, key):
    return _one(draws, key, shape=label)


def _colour(label, draws, key):
    return _one(draws, key, colour=label)


def _texture(label, draws, key):
    return _one(draws, key, texture=label)


def _background(label, draws, key):
    return _crowd(draws, key, draws.between(1, 3), DOMAIN_BACKGROUNDS[0][label])


def _other_domain_shape(label, draws, key):
    return _one(draws, key, domain=1, shape=label)


def _sketch_shape(label, draws, key):
    return _one(draws, key, rendition=2, shape=SKETCH_SHAPES[label])


def _faded_colour(label, draws, key):
    return _one(draws, key, contrast=draws.between(80, 150), colour=label)


def _scenery(label, draws, key):
    return _crowd(draws, key, draws.between(1, 3), DOMAIN_BACKGROUNDS[1][label], domain=1)


def _size(label, draws, key):
    return _one(draws, key, size=label)


def _orientation(label, draws, key):
    return _one(draws, key, shape=ARROW, orientation=label)


def _position(label, draws, key):
    """The centre lies in the label's cell of the 3 x 3 grid, at least 30 units from the cell's rim."""
    cell = CANVAS // 3
    item = random_object(draws, _radius(draws, SMALL))
    x, y = (
        min(max(k * cell + draws.between(30, cell - 30), item.radius + 8), CANVAS - item.radius - 8)
        for k in (label % 3, label // 3)
    )
    return Scene((moved(item, x, y),), 0, 0, draws.pick(DOMAIN_BACKGROUNDS[0]), key)


def _crowd(draws, key, number, background=None, domain=0):
    """Exactly that many objects, small ones if there are more than two."""
    chosen = draws.pick(DOMAIN_BACKGROUNDS[domain]) if background is None else background
    while True:
        sizes = [LARGE if number <= 2 and draws.chance(50) else SMALL for _ in range(number)]
        objects = scatter([random_object(draws, _radius(draws, size)) for size in sizes], draws)
        if len(objects) == number:
            return Scene(objects, domain, 0, chosen, key)


def _count(label, draws, key):
    return _crowd(draws, key, label + 1)


def _distance(label, draws, key):
    """Two objects whose squares are at most 70 (close) or at least 300 (far) units apart."""
    while True:
        scene = _crowd(draws, key, 2)
        gap = gap_between(*scene.objects)
        if gap <= 70 if label == CLOSE else gap >= 300:
            return scene


def _relation(label, draws, key):
    """A circle in one relation only to a square."""
    while True:
        first = random_object(draws, _radius(draws, SMALL), shape=CIRCLE)
        second = random_object(draws, _radius(draws, SMALL), shape=SQUARE)
        objects = scatter([first, second], draws)
        if len(objects) == 2 and [r for r in range(4) if holds(r, *objects)] == [label]:
            return Scene(objects, 0, 0, draws.pick(DOMAIN_BACKGROUNDS[0]), key)


_A_BACKGROUNDS = tuple(BACKGROUNDS[b] for b in DOMAIN_BACKGROUNDS[0])
_PLACES = tuple(phrases[0] for phrases in PLACE_PHRASES)
_RELATIONS = tuple(phrases[0] for phrases in RELATION_PHRASES)
_SKETCHES = tuple(SHAPES[shape] for shape in SKETCH_SHAPES)

VTAB_TASKS = {
    "vtab/shape": TaskSpec(SHAPES, NOUN_TEMPLATES, "VTAB natural: Caltech101", "natural", _shape),
    "vtab/colour": TaskSpec(COLOURS, ADJECTIVE_TEMPLATES, "VTAB natural: Flowers102", "natural", _colour),
    "vtab/texture": TaskSpec(TEXTURES, ADJECTIVE_TEMPLATES, "VTAB natural: DTD", "natural", _texture),
    "vtab/background": TaskSpec(_A_BACKGROUNDS, BACKGROUND_TEMPLATES, "VTAB natural: SUN397", "natural", _background),
    "vtab/scenery": TaskSpec(SCENERY_NAMES, PHRASE_TEMPLATES, "VTAB specialised: EuroSAT", "specialised", _scenery),
    "vtab/other_domain_shape": TaskSpec(
        SHAPES, NOUN_TEMPLATES, "VTAB specialised: RESISC45", "specialised", _other_domain_shape
    ),
    "vtab/sketch_shape": TaskSpec(
        _SKETCHES, NOUN_TEMPLATES, "VTAB specialised: Patch Camelyon", "specialised", _sketch_shape
    ),
    "vtab/faded_colour": TaskSpec(
        COLOURS, ADJECTIVE_TEMPLATES, "VTAB specialised: Diabetic Retinopathy", "specialised", _faded_colour
    ),
    "vtab/count": TaskSpec(COUNT_NAMES, COUNT_TEMPLATES, "VTAB structured: Clevr-Count", "structured", _count),
    "vtab/distance": TaskSpec(
        DISTANCE_NAMES, DISTANCE_TEMPLATES, "VTAB structured: KITTI-Dist", "structured", _distance
    ),
    "vtab/position": TaskSpec(_PLACES, PHRASE_TEMPLATES, "VTAB structured: dSpr-Loc", "structured", _position),
    "vtab/size": TaskSpec(SIZES, ADJECTIVE_TEMPLATES, "VTAB structured: sNORB-Elev", "structured", _size),
    "vtab/orientation": TaskSpec(
        ORIENTATION_PHRASES, ARROW_TEMPLATES, "VTAB structured: dSpr-Ori", "structured", _orientation
    ),
    "vtab/relation": TaskSpec(_RELATIONS, RELATION_TEMPLATES, "VTAB structured: Clevr-Dist", "structured", _relation),
}
assert len(PLACES) == len(_PLACES)
