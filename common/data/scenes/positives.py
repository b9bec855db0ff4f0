"""Which captions describe which images, for all pairs at once, as `statements.describes` defines it."""

from itertools import permutations

import numpy as np

from common.data.scenes.statements import Statement, attributes
from common.data.scenes.world import LEFT, RIGHT, Scene

_X, _Y, _RADIUS = 6, 7, 8  # behind the six attributes of an object


def matches(statements: list[Statement], scenes: list[Scene]) -> list[np.ndarray]:
    """For each statement the ascending indices of the scenes that it describes (int64)."""
    counts = np.array([len(scene.objects) for scene in scenes])
    backgrounds = np.array([scene.background for scene in scenes])
    most = counts.max(initial=0)
    objects = np.full((len(scenes), most, 9), -2)  # -2: no object, which fits nothing
    for row, scene in zip(objects, scenes):
        for place, item in enumerate(scene.objects):
            row[place] = (*attributes(item), item.x, item.y, item.radius)
    indices = []
    for statement in statements:
        good = np.isin(counts, counts if statement.count < 0 else statement.count)
        good &= np.isin(backgrounds, backgrounds if statement.background < 0 else statement.background)
        rows = np.flatnonzero(good)
        true = _holds(statement, objects[rows])
        indices.append(rows[true])
    return indices


def _holds(statement: Statement, objects: np.ndarray) -> np.ndarray:
    # (scenes,) bool: whether some choice of different objects fits the mentions and their relations
    mentions = np.array(statement.mentions, dtype=np.int64).reshape(-1, 1, 1, 6)
    # (mentions, scenes, objects): -1 says nothing about an attribute, but the object must exist
    fits = ((mentions < 0) & (objects[..., :6] >= 0) | (mentions == objects[..., :6])).all(axis=-1)
    true = np.zeros(len(objects), dtype=bool)
    for chosen in permutations(range(objects.shape[1]), len(mentions)):
        good = np.ones(len(objects), dtype=bool)
        for mention, place in enumerate(chosen):
            good &= fits[mention, :, place]
        for a, relation, b in statement.relations:
            first, second = objects[:, chosen[a]], objects[:, chosen[b]]
            axis = _X if relation in (LEFT, RIGHT) else _Y
            distance = second[:, axis] - first[:, axis]
            # LEFT and ABOVE are even: the first has the smaller coordinate; squares must not overlap
            good &= (-distance if relation % 2 else distance) >= first[:, _RADIUS] + second[:, _RADIUS]
        true |= good
    return true


def caption_positives(dataset) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Many-to-many truth for CxC- and ECCV-style metrics: every caption that is true of every image.

    Caption k of image i has the id num_captions * i + k. With `caption_noise` the truth counts, not the pairing.

    Returns:
        {image index: ascending caption ids}, {caption id: ascending image indices}.
    """
    scenes = [dataset.scene(index) for index in range(len(dataset))]
    statements = [statement for index in range(len(dataset)) for statement in dataset.statements(index)]
    images_of = {caption: indices.tolist() for caption, indices in enumerate(matches(statements, scenes))}
    captions_of: dict[int, list[int]] = {image: [] for image in range(len(scenes))}
    for caption, images in images_of.items():
        for image in images:
            captions_of[image].append(caption)
    return captions_of, images_of
