"""Stand-ins for ImageNet and its shifts: colour and shape of the largest object, 64 classes.

`imagenet` is one main object with mild clutter. `imagenet_v2` is a fresh sample with slightly other statistics,
`imagenet_a` is hard (small, faded, half covered, among distractors), `imagenet_r` shows renditions (outline, sketch,
inverted), on the 48 classes whose shapes stay apart when only the contour is left (ring and circle do not).
"""

from .hashing import Draws
from .shapes import CIRCLE, CROSS, HEART, MOON, RING, SHAPES, SQUARE, STAR, TRIANGLE
from .single import random_object, scatter
from .task_spec import TaskSpec
from .world import COLOURS, DOMAIN_BACKGROUNDS, Scene, SceneObject

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


def class_name(colour: int, shape: int) -> str:
    """For example "red circle"."""
    return f"{COLOURS[colour]} {SHAPES[shape]}"


def _distractors(main: SceneObject, number: int, low: int, high: int, draws: Draws) -> list[SceneObject]:
    """Smaller objects that differ from the main one in colour and in shape."""
    found = []
    for _ in range(number):
        shape = (main.shape + 1 + draws.below(len(SHAPES) - 1)) % len(SHAPES)
        colour = (main.colour + 1 + draws.below(len(COLOURS) - 1)) % len(COLOURS)
        found.append(random_object(draws, draws.between(low, high), shape=shape, colour=colour))
    return found


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
    first_or_last = (
        (*placed[1:], placed[0]) if draws.chance(40) else placed
    )  # distractors over the main object or under
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


_NAMES = tuple(class_name(colour, shape) for colour, shape in CLASSES)
_RENDITION_NAMES = tuple(class_name(colour, shape) for colour, shape in RENDITION_CLASSES)

IMAGENET_TASKS = {
    "imagenet": TaskSpec(_NAMES, TEMPLATES, "ImageNet", "imagenet", _imagenet),
    "imagenet_v2": TaskSpec(_NAMES, TEMPLATES, "ImageNet-V2", "imagenet", _imagenet_v2),
    "imagenet_a": TaskSpec(_NAMES, TEMPLATES, "ImageNet-A", "imagenet", _imagenet_a),
    "imagenet_r": TaskSpec(_RENDITION_NAMES, TEMPLATES, "ImageNet-R", "imagenet", _imagenet_r),
}
