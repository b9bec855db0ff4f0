"""Grounding: an expression that fits exactly one object, and several boxes to choose from (RefCOCO+)."""

import numpy as np

from common.base.random_keys import Draws, derive_key
from common.data.scenes.draw import render
from common.data.scenes.masks import ARROW
from common.data.scenes.sampling import Statistics, draw_scene
from common.data.scenes.statements import Mention, Statement, assignments, attributes
from common.data.scenes.wording import say_reference
from common.data.scenes.world import Scene, SceneObject, holds, main_relation

NUM_PROPOSALS = 8
STATISTICS = Statistics(count_weights=(0, 20, 40, 40), copy_percent=45)
_FIELDS = ((0,), (1,), (0, 1), (1, 2), (0, 2), (0, 3), (1, 3), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4))
_FIELDS_OF_APPEARANCE = ((0, 1, 2, 3), (0, 1, 2, 3, 4))
_FIELDS_WITH_RELATION = ((0,), (1,), (0, 1), (0, 1, 2, 3))


def referents(statement: Statement, scene: Scene) -> list[int]:
    """Indices of the objects that can be the statement's first mention while the whole statement holds."""
    return list(dict.fromkeys(chosen[0] for chosen in assignments(statement, scene)))


def _keep(mention: Mention, fields: tuple[int, ...]) -> Mention:
    return Mention(*(value if field in fields else -1 for field, value in enumerate(mention)))


def referring_statement(scene: Scene, index: int, draws: Draws, with_relation: bool = False) -> Statement | None:
    """A short statement whose first mention can only be the given object; None if none is unique.

    Args:
        with_relation: relations to another object are tried first.
    """
    item = scene.objects[index]
    known = _appearance(item)
    choices = draws.shuffled(_FIELDS[:2]) + draws.shuffled(_FIELDS[2:7]) + draws.shuffled(_FIELDS[7:9])
    choices += list(_FIELDS[9:])
    plain = [Statement((_keep(known, fields),)) for fields in choices]
    related = []
    for other in draws.shuffled([k for k in range(len(scene.objects)) if k != index]):
        relation = ((0, main_relation(item, scene.objects[other]), 1),)
        if holds(relation[0][1], item, scene.objects[other]):
            second = _keep(attributes(scene.objects[other]), (0, 1))
            related += [Statement((_keep(known, fields), second), relation) for fields in _FIELDS_WITH_RELATION]
    for statement in [*related, *plain] if with_relation else [*plain, *related]:
        if referents(statement, scene) == [index]:
            return statement
    return None


def _appearance(item: SceneObject) -> Mention:
    return attributes(item) if item.shape == ARROW else attributes(item)._replace(orientation=-1)


def appearance_statement(scene: Scene, index: int, draws: Draws) -> Statement | None:
    """Shape, colour, size and texture of an object, which also distinguish it from those of other images.

    If they fit another object of the scene too: `referring_statement`.
    """
    known = _appearance(scene.objects[index])
    for fields in _FIELDS_OF_APPEARANCE:
        statement = Statement((_keep(known, fields),))
        if referents(statement, scene) == [index]:
            return statement
    return referring_statement(scene, index, draws, with_relation=True)


def overlap(a, b) -> float:
    """Intersection over union of two boxes (left, top, right, bottom), in [0, 1]."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (area - width * height)


def proposals(scene: Scene, draws: Draws) -> list[tuple[float, float, float, float]]:
    """Boxes to choose from: those of all objects, then distractors that overlap each of them by less than a half."""
    object_boxes = [item.box for item in scene.objects]
    boxes = list(object_boxes)
    while len(boxes) < NUM_PROPOSALS:
        left, top = draws.below(700) / 960, draws.below(700) / 960
        box = (left, top, left + draws.between(160, 420) / 960, top + draws.between(160, 420) / 960)
        if box[2] <= 1 and box[3] <= 1 and all(overlap(box, other) < 0.5 for other in object_boxes):
            boxes.append(box)
    return boxes


def grounding_item(key: int, turn: int, image_size: int) -> dict:
    """One image, one expression, eight boxes (left, top, right, bottom) as fractions.

    Returns:
        {"image": (H, W, 3) uint8, "text": str, "proposals": (8, 4) float32, "label": index of the right one, "box": the
        right one}.
    """
    draws = Draws(key)
    while True:
        scene = draw_scene(derive_key(key, draws.below(2**31)), STATISTICS)
        target = draws.below(len(scene.objects))
        statement = referring_statement(scene, target, draws, with_relation=draws.chance(35))
        if statement is not None:
            break
    boxes = proposals(scene, draws)
    order = draws.shuffled(range(len(boxes)))
    arranged = np.array([boxes[k] for k in order], dtype=np.float32)
    label = order.index(target)
    return {
        "image": render(scene, image_size),
        "text": say_reference(statement, draws),
        "proposals": arranged,
        "label": label,
        "box": arranged[label],
    }
