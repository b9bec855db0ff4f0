"""Which captions describe which pictures, for all pairs at once.

Statements and scenes become rows of small integers, and a compiled kernel evaluates every statement on every scene
(some 100 million pairs a second), with the meaning of `statements.describes`; a test compares the two.
"""

import numpy as np

from common.base.compiled import compiled
from common.data.scenes.statements import MAX_MENTIONS, Statement
from common.data.scenes.world import Scene

MAX_OBJECTS = 8
_ITEM = 9  # shape, colour, size, texture, orientation, place, x, y, radius
_SCENE = 2 + _ITEM * MAX_OBJECTS  # background, number of objects, objects
_MAX_RELATIONS = 6
_STATEMENT = 4 + 6 * MAX_MENTIONS + 3 * _MAX_RELATIONS  # background, count, mentions, relations, then their fields


def encode_scenes(scenes) -> np.ndarray:
    """(number of scenes, 74) int16 rows for `matches`.

    Raises:
        ValueError: if a scene has more than 8 objects.
    """
    rows = np.full((len(scenes), _SCENE), -1, dtype=np.int16)
    for row, scene in zip(rows, scenes):
        if len(scene.objects) > MAX_OBJECTS:
            raise ValueError(f"at most {MAX_OBJECTS} objects can be encoded, got {len(scene.objects)}")
        values = [scene.background, len(scene.objects)]
        for o in scene.objects:
            values += (o.shape, o.colour, o.size, o.texture, o.orientation, o.place, o.x, o.y, o.radius)
        row[: len(values)] = values
    return rows


def encode_statements(statements) -> np.ndarray:
    """(number of statements, 46) int16 rows for `matches`.

    Raises:
        ValueError: if a statement has more than 4 mentions or 6 relations.
    """
    rows = np.full((len(statements), _STATEMENT), -1, dtype=np.int16)
    for row, statement in zip(rows, statements):
        mentions, relations = statement.mentions, statement.relations
        if len(mentions) > MAX_MENTIONS or len(relations) > _MAX_RELATIONS:
            raise ValueError(
                f"at most {MAX_MENTIONS} mentions and {_MAX_RELATIONS} relations can be encoded, "
                f"got {len(mentions)} and {len(relations)}"
            )
        row[:4] = statement.background, statement.count, len(mentions), len(relations)
        for k, mention in enumerate(mentions):
            row[4 + 6 * k : 10 + 6 * k] = mention
        start = 4 + 6 * MAX_MENTIONS
        for k, relation in enumerate(relations):
            row[start + 3 * k : start + 3 * k + 3] = relation
    return rows


@compiled
def _holds(statement, scene, chosen):
    """Depth-first search over assignments of mentions to different objects; `chosen` is scratch space."""
    count = scene[1]
    # what needs no search: -1 says nothing about background or number
    if statement[0] >= 0 and statement[0] != scene[0]:
        return False
    if statement[1] >= 0 and statement[1] != count:
        return False
    mentions, relations = statement[2], statement[3]
    if mentions == 0:
        return True
    if mentions > count:
        return False
    position = 0
    chosen[0] = -1
    while position >= 0:
        chosen[position] += 1
        candidate = chosen[position]
        if candidate == count:  # no object is left for this mention: another one for the mention before
            position -= 1
            continue
        good = True
        for earlier in range(position):
            if chosen[earlier] == candidate:
                good = False
        for field in range(6):
            value = statement[4 + 6 * position + field]
            if value >= 0 and value != scene[2 + 9 * candidate + field]:
                good = False
                break
        if not good:
            continue
        for k in range(relations):
            base = 28 + 3 * k
            a, relation, b = statement[base], statement[base + 1], statement[base + 2]
            if max(a, b) != position:  # judged as soon as both its mentions have an object, and once
                continue
            at_a, at_b = 2 + 9 * chosen[a], 2 + 9 * chosen[b]
            gap = scene[at_a + 8] + scene[at_b + 8]  # radii: clearly left of, not overlapping
            axis = 6 if relation < 2 else 7
            forward = scene[at_b + axis] - scene[at_a + axis]
            if (forward if relation % 2 == 0 else -forward) < gap:
                good = False
                break
        if not good:
            continue
        if position == mentions - 1:
            return True
        position += 1
        chosen[position] = -1
    return False


@compiled
def _count_and_fill(statements, scenes, starts, indices):
    """First pass (empty `found`): number of scenes per statement into `starts[1:]`; second: their indices."""
    chosen = np.zeros(8, dtype=np.int64)
    for s in range(statements.shape[0]):
        place = starts[s]
        number = 0
        for i in range(scenes.shape[0]):
            if _holds(statements[s], scenes[i], chosen):
                if indices.shape[0]:
                    indices[place + number] = i
                number += 1
        if not indices.shape[0]:
            starts[s + 1] = number


def matches(statements: list[Statement], scenes: list[Scene]) -> list[np.ndarray]:
    """For each statement the ascending indices of the scenes that it describes (int64 arrays)."""
    rows, columns = encode_statements(statements), encode_scenes(scenes)
    starts = np.zeros(len(statements) + 1, dtype=np.int64)
    _count_and_fill(rows, columns, starts, np.empty(0, dtype=np.int64))
    starts = np.cumsum(starts)
    indices = np.empty(starts[-1], dtype=np.int64)
    if len(indices):
        _count_and_fill(rows, columns, starts, indices)
    return np.split(indices, starts[1:-1])


def _statements_and_scenes(dataset) -> tuple[list[Statement], list[Scene]]:
    indices = range(len(dataset))
    return [s for i in indices for s in dataset.statements(i)], [dataset.scene(i) for i in indices]


def caption_positives(dataset) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Many-to-many truth for CxC- and ECCV-style metrics: every caption that is true of every picture.

    Caption k of picture i has the id 5 * i + k. With `caption_noise` a picture's own captions need not be among its
    positives: the truth counts, not the pairing.

    Returns:
        {image index: ascending caption ids}, {caption id: ascending image indices}.
    """
    statements, scenes = _statements_and_scenes(dataset)
    images_of = {caption: indices.tolist() for caption, indices in enumerate(matches(statements, scenes))}
    captions_of: dict[int, list[int]] = {image: [] for image in range(len(scenes))}
    for caption, images in images_of.items():
        for image in images:
            captions_of[image].append(caption)
    return captions_of, images_of
