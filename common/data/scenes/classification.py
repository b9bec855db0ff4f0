"""Labelled images with class names and prompt templates; item i is a pure function of (task, part, seed, i)."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from common.base.random_keys import Draws, derive_key
from common.data.decoding import row_of
from common.data.scenes.dataset import DrawnSet, check_drawn
from common.data.scenes.draw import render
from common.data.scenes.masks import ARROW, CIRCLE, CROSS, HEART, MOON, RING, SHAPES, SQUARE, STAR, TRIANGLE
from common.data.scenes.sampling import TEXTURE_WEIGHTS
from common.data.scenes.wording import NUMBERS, ORIENTATION_PHRASES, PLACE_PHRASES, RELATION_PHRASES
from common.data.scenes.world import (
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
    SceneObject,
    holds,
)


class TaskSpec(NamedTuple):
    """One task; `scene(label, draws, key)` is a pure function of the label and the key behind `draws`."""

    class_names: tuple[str, ...]
    templates: tuple[str, ...]  # each with one {}
    stands_in_for: str
    scene: Callable[[int, Draws, int], Scene]


# Scenes made around one main object: the object, distractors where they fit.

_TRIES = 20
_MARGIN = 10


def random_object(draws: Draws, radius: int, **fixed: int) -> SceneObject:
    """An object of that radius at the image's centre; attributes outside `fixed` are drawn."""
    shape = draws.below(len(SHAPES))
    colour = draws.below(len(COLOURS))
    texture = draws.weighted(TEXTURE_WEIGHTS)
    turn, tint = draws.below(4), draws.below(1 << 24)
    shape = fixed.get("shape", shape)
    size, turn = LARGE if radius > 150 else SMALL, turn if shape == ARROW else 0
    drawn = SceneObject(shape, colour, size, texture, turn, CANVAS // 2, CANVAS // 2, radius, tint)
    return replace(drawn, **fixed)


def moved(item: SceneObject, x: int, y: int) -> SceneObject:
    """The object centred at (x, y), in units."""
    return replace(item, x=x, y=y)


def random_centre(draws: Draws, radius: int) -> tuple[int, int]:
    """A centre with the object inside the image."""
    span = CANVAS - 2 * (radius + _MARGIN) + 1
    return radius + _MARGIN + draws.below(span), radius + _MARGIN + draws.below(span)


def gap_between(a: SceneObject, b: SceneObject) -> int:
    """Units between the objects' squares along the axis on which they are further apart; negative: they overlap."""
    return max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius


def scatter(items: list[SceneObject], draws: Draws, least_gap: int = 0) -> tuple[SceneObject, ...]:
    """Places objects one by one at random; one that does not fit is left out, the first never is.

    Args:
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


# Stand-ins for ImageNet and its shifts: colour and shape of the largest object, 64 classes.
#
# `imagenet` is one main object with mild clutter. `imagenet_v2` is a fresh sample with slightly other statistics,
# `imagenet_a` is hard (small, faded, half covered, among distractors), `imagenet_r` shows renditions (outline, sketch,
# inverted), on the 48 classes whose shapes stay apart when only the contour is left (ring and circle do not).


CLASS_COLOURS = tuple(range(8))  # all but brown
CLASS_SHAPES = (CIRCLE, SQUARE, TRIANGLE, STAR, CROSS, RING, HEART, MOON)
RENDITION_SHAPES = (SQUARE, TRIANGLE, STAR, CROSS, HEART, MOON)
CLASSES = tuple((colour, shape) for colour in CLASS_COLOURS for shape in CLASS_SHAPES)
RENDITION_CLASSES = tuple((colour, shape) for colour in CLASS_COLOURS for shape in RENDITION_SHAPES)
TEMPLATES = (
    "a {}",
    "a picture of a {}",
    "a drawing of a {}",
    "an image of a {}",
    "a photo of a {}",
    "there is a {}",
    "a large {}",
    "a {} and some shapes",
)


def _distractors(main: SceneObject, number: int, low: int, high: int, draws: Draws) -> list[SceneObject]:
    # smaller objects that differ from the main one in colour and in shape
    objects = []
    for _ in range(number):
        shape = (main.shape + 1 + draws.below(len(SHAPES) - 1)) % len(SHAPES)
        colour = (main.colour + 1 + draws.below(len(COLOURS) - 1)) % len(COLOURS)
        objects.append(random_object(draws, draws.between(low, high), shape=shape, colour=colour))
    return objects


def _imagenet(label: int, draws: Draws, key: int) -> Scene:
    colour, shape = CLASSES[label]
    main = random_object(draws, draws.between(190, 260), colour=colour, shape=shape)
    others = _distractors(main, draws.weighted((45, 35, 20)), 80, 112, draws)
    return Scene(scatter([main, *others], draws), 0, 0, draws.pick(DOMAIN_BACKGROUNDS[0]), key)


def _imagenet_v2(label: int, draws: Draws, key: int) -> Scene:
    colour, shape = CLASSES[label]
    main = random_object(draws, draws.between(165, 240), colour=colour, shape=shape)
    others = _distractors(main, draws.weighted((25, 40, 35)), 80, 112, draws)
    background = DOMAIN_BACKGROUNDS[0][draws.weighted((15, 30, 20, 35))]
    return Scene(scatter([main, *others], draws), 0, 0, background, key, draws.between(205, 256), draws.below(2))


def _imagenet_a(label: int, draws: Draws, key: int) -> Scene:
    colour, shape = CLASSES[label]
    main = random_object(draws, draws.between(150, 200), colour=colour, shape=shape)
    others = _distractors(main, draws.between(2, 4), 84, 116, draws)
    placed = scatter([main, *others], draws, least_gap=-50)
    # distractors lie over the main object or under it
    first_or_last = (*placed[1:], placed[0]) if draws.chance(40) else placed
    behind, front = draws.between(2, 5), draws.between(2, 4)
    contrast = draws.between(110, 180)
    return Scene(first_or_last, 0, 0, draws.pick(DOMAIN_BACKGROUNDS[0]), key, contrast, behind, front)


def _imagenet_r(label: int, draws: Draws, key: int) -> Scene:
    colour, shape = RENDITION_CLASSES[label]
    main = random_object(draws, draws.between(190, 260), colour=colour, shape=shape)
    others = _distractors(main, draws.weighted((60, 40)), 80, 112, draws)
    rendition = draws.between(1, 3)
    gap = 40 if rendition == 3 else 0  # panels are larger than the shapes
    return Scene(scatter([main, *others], draws, gap), 0, rendition, draws.pick(DOMAIN_BACKGROUNDS[0]), key)


_NAMES = tuple(f"{COLOURS[colour]} {SHAPES[shape]}" for colour, shape in CLASSES)
_RENDITION_NAMES = tuple(f"{COLOURS[colour]} {SHAPES[shape]}" for colour, shape in RENDITION_CLASSES)
IMAGENET_TASKS = {
    "imagenet": TaskSpec(_NAMES, TEMPLATES, "ImageNet", _imagenet),
    "imagenet_v2": TaskSpec(_NAMES, TEMPLATES, "ImageNet-V2", _imagenet_v2),
    "imagenet_a": TaskSpec(_NAMES, TEMPLATES, "ImageNet-A", _imagenet_a),
    "imagenet_r": TaskSpec(_RENDITION_NAMES, TEMPLATES, "ImageNet-R", _imagenet_r),
}


# Stand-in for VTAB: small tasks in its three groups, natural, specialised and structured.
#
# Natural tasks ask for one attribute of one object, or for the background, in the training domain; specialised ones
# move to other images (domain B, sketches, faded); structured ones ask where, how many, how far, which way.


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
    # one object anywhere, large in two cases of three unless its size is fixed
    background = fixed.pop("background", draws.pick(DOMAIN_BACKGROUNDS[domain]))
    size = fixed.get("size", LARGE if draws.chance(67) or rendition else SMALL)
    item = random_object(draws, _radius(draws, size), **fixed)
    return Scene((moved(item, *random_centre(draws, item.radius)),), domain, rendition, background, key, contrast)


def _one_of(label, draws, key, attribute, values=range(99), **settings):
    return _one(draws, key, **{attribute: values[label]}, **settings)


def _background(label, draws, key, domain=0):
    return _crowd(draws, key, draws.between(1, 3), DOMAIN_BACKGROUNDS[domain][label], domain)


def _faded_colour(label, draws, key):
    return _one(draws, key, contrast=draws.between(80, 150), colour=label)


def _position(label, draws, key):
    # the centre lies in the label's cell of the 3 x 3 grid, at least 30 units from the cell's rim
    cell = CANVAS // 3
    item = random_object(draws, _radius(draws, SMALL))
    x, y = (
        min(max(k * cell + draws.between(30, cell - 30), item.radius + 8), CANVAS - item.radius - 8)
        for k in (label % 3, label // 3)
    )
    return Scene((moved(item, x, y),), 0, 0, draws.pick(DOMAIN_BACKGROUNDS[0]), key)


def _crowd(draws, key, number, background=None, domain=0):
    chosen = draws.pick(DOMAIN_BACKGROUNDS[domain]) if background is None else background
    while True:
        sizes = [LARGE if number <= 2 and draws.chance(50) else SMALL for _ in range(number)]
        objects = scatter([random_object(draws, _radius(draws, size)) for size in sizes], draws)
        if len(objects) == number:
            return Scene(objects, domain, 0, chosen, key)


def _count(label, draws, key):
    return _crowd(draws, key, label + 1)


def _distance(label, draws, key):
    # two objects whose squares are at most 70 (close) or at least 300 (far) units apart
    while True:
        scene = _crowd(draws, key, 2)
        gap = gap_between(*scene.objects)
        if gap <= 70 if label == CLOSE else gap >= 300:
            return scene


def _relation(label, draws, key):
    # a circle in exactly one relation to a square
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
    f"vtab/{name}": TaskSpec(names, templates, f"VTAB {group}: {stands_in_for}", scene)
    for name, names, templates, group, stands_in_for, scene in (
        ("shape", SHAPES, NOUN_TEMPLATES, "natural", "Caltech101", partial(_one_of, attribute="shape")),
        ("colour", COLOURS, ADJECTIVE_TEMPLATES, "natural", "Flowers102", partial(_one_of, attribute="colour")),
        ("texture", TEXTURES, ADJECTIVE_TEMPLATES, "natural", "DTD", partial(_one_of, attribute="texture")),
        ("background", _A_BACKGROUNDS, BACKGROUND_TEMPLATES, "natural", "SUN397", _background),
        ("scenery", SCENERY_NAMES, PHRASE_TEMPLATES, "specialised", "EuroSAT", partial(_background, domain=1)),
        (
            "other_domain_shape", SHAPES, NOUN_TEMPLATES, "specialised", "RESISC45",
            partial(_one_of, attribute="shape", domain=1),
        ),
        (
            "sketch_shape", _SKETCHES, NOUN_TEMPLATES, "specialised", "Patch Camelyon",
            partial(_one_of, attribute="shape", values=SKETCH_SHAPES, rendition=2),
        ),
        ("faded_colour", COLOURS, ADJECTIVE_TEMPLATES, "specialised", "Diabetic Retinopathy", _faded_colour),
        ("count", COUNT_NAMES, COUNT_TEMPLATES, "structured", "Clevr-Count", _count),
        ("distance", DISTANCE_NAMES, DISTANCE_TEMPLATES, "structured", "KITTI-Dist", _distance),
        ("position", _PLACES, PHRASE_TEMPLATES, "structured", "dSpr-Loc", _position),
        ("size", SIZES, ADJECTIVE_TEMPLATES, "structured", "sNORB-Elev", partial(_one_of, attribute="size")),
        (
            "orientation", ORIENTATION_PHRASES, ARROW_TEMPLATES, "structured", "dSpr-Ori",
            partial(_one_of, attribute="orientation", shape=ARROW),
        ),
        ("relation", _RELATIONS, RELATION_TEMPLATES, "structured", "Clevr-Dist", _relation),
    )
}  # fmt: skip
assert len(PLACES) == len(_PLACES)


CLASSIFICATION_TASKS: dict[str, TaskSpec] = {**IMAGENET_TASKS, **VTAB_TASKS}


@lru_cache(maxsize=256)  # each is asked for by every image of its run, and by each again for its label
def _order_of_classes(key: int, count: int) -> list[int]:
    return Draws(key).shuffled(range(count))


class ClassificationTask(DrawnSet):
    """A balanced classification set: every run of `len(class_names)` images holds each class once.

    Args:
        part: "test", or "train" and "val" for disjoint sets of the same distribution.
    """

    def __init__(self, name: str, size: int = 1_000, image_size: int = 48, seed: int = 0, part: str = "test"):
        check_drawn("task", name, CLASSIFICATION_TASKS, size, image_size, part)
        spec = CLASSIFICATION_TASKS[name]
        self.task, self.size, self.image_size, self.seed, self.part = name, size, image_size, seed, part
        self.name = f"scenes/{name}"
        self.class_names, self.templates = list(spec.class_names), list(spec.templates)
        self.stands_in_for = spec.stands_in_for
        self._make = spec.scene
        self._task_key = derive_key("classification", seed, name, part)

    def label(self, index: int) -> int:
        """In [0, len(class_names))."""
        block, place = divmod(row_of(index, self), len(self.class_names))
        return _order_of_classes(derive_key("labels", self._task_key, block), len(self.class_names))[place]

    def scene(self, index: int) -> Scene:
        key = derive_key(self._task_key, row_of(index, self))
        return self._make(self.label(index), Draws(key), key)

    def __getitem__(self, index: int) -> dict:
        """{"image": (H, W, 3) uint8, "label": int, "image_id": str}."""
        index = row_of(index, self)
        return {
            "image": render(self.scene(index), self.image_size),
            "label": self.label(index),
            "image_id": f"{self.task}-{self.part}-{self.seed}-{index}",
        }

    @property
    def parameters(self) -> dict:
        of_images = {name: getattr(self, name) for name in ("size", "image_size", "seed", "part")}
        return of_images | {"name": self.task, "class_names": self.class_names, "templates": self.templates}


classification_task = ClassificationTask
