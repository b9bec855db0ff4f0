"""Drawing: boxes against pixels, sizes, domains, renditions, and that what is said can be seen."""

from dataclasses import replace

import numpy as np
import pytest

from common.data.scenes import CLASSIFICATION_TASKS, SPLITS, SceneDataset, classification_task, render
from common.data.scenes.world import COLOURS, SHAPES, TEXTURES, Scene, SceneObject, holds


def drawn_pixels(scene: Scene, index: int, image_size: int) -> np.ndarray:
    """(image_size, image_size) bool: pixels that the object alone changes."""
    empty = render(replace(scene, objects=()), image_size).astype(int)
    single = render(replace(scene, objects=(scene.objects[index],)), image_size).astype(int)
    return np.abs(single - empty).max(-1) > 0


@pytest.mark.parametrize("image_size", [16, 224])
@pytest.mark.parametrize("split", SPLITS)
def test_pictures_of_every_size_are_drawn(split, image_size):
    dataset = SceneDataset(split, size=3, image_size=image_size)
    for item in dataset:
        assert (item["image"].shape, item["image"].dtype) == ((image_size, image_size, 3), np.uint8)
        assert item["image"].std() > 3


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=SHAPES)
@pytest.mark.parametrize("orientation", range(4))
def test_box_is_the_bounding_box_of_what_is_drawn(shape, orientation):
    for image_size in (48, 240):
        item = SceneObject(shape, 0, 1, 0, orientation, 470, 390, 200)
        rows, columns = np.nonzero(drawn_pixels(Scene((item,), 0, 0, 0, key=1), 0, image_size))
        drawn = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert np.abs(drawn - np.array(item.box) * image_size).max() <= 1.01


def test_objects_of_pairs_never_overlap_and_always_stand_in_a_relation():
    for split in SPLITS:
        dataset = SceneDataset(split, size=150)
        for scene in map(dataset.scene, range(150)):
            for k, a in enumerate(scene.objects):
                assert a.radius <= min(a.x, a.y, 960 - a.x, 960 - a.y)
                assert all(any(holds(r, a, b) for r in range(4)) for b in scene.objects[k + 1 :])


def test_arrows_point_where_they_say():
    """The end named by the orientation is the tip: thinner than the end of the shaft."""
    for orientation, (axis, tip) in enumerate(((0, 0), (1, -1), (0, -1), (1, 0))):
        item = SceneObject(SHAPES.index("arrow"), 0, 1, 0, orientation, 480, 480, 300)
        ink = drawn_pixels(Scene((item,), 0, 0, 0, key=1), 0, 96).sum(1 - axis)
        ink = ink[ink > 0]
        assert ink[tip] < 0.5 * ink[-1 - tip]


def test_shapes_colours_and_textures_can_be_distinguished():
    """The nearest picture among all shapes (colours, textures), shifted by parts of a pixel, is the right one."""
    image_size = 32
    cell = 960 // image_size

    def crop(looks, x, y, key, size):
        shape, colour, texture = looks
        item = SceneObject(shape, colour, size, texture, 0, x, y, (116, 195)[size])
        reach = 200 // cell
        middle = slice(image_size // 2 - reach, image_size // 2 + reach)
        return render(Scene((item,), 0, 0, 0, key), image_size)[middle, middle].astype(float)

    shifts = [480 + k * cell // 3 for k in (-1, 0, 1)]
    for size in (0, 1):
        for field, names in ((0, SHAPES), (1, COLOURS), (2, TEXTURES)):
            looks = [[0, 0, 0] for _ in names]
            for value in range(len(names)):
                looks[value][field] = value
            known = np.array([[crop(look, x, y, 5, size) for x in shifts for y in shifts] for look in looks])
            for value, name in enumerate(names):
                seen = crop(looks[value], 480 + cell // 6, 480 - cell // 6, 3, size)
                distances = np.abs(known - seen).mean((2, 3, 4)).min(1)
                nearest = int(np.argmin(distances))
                assert nearest == value, (size, name, names[nearest], distances)
                assert np.partition(distances, 1)[1] > 1.1 * distances[value], (size, name, distances)


def test_covered_things_look_alike():
    item = SceneObject(0, 0, 1, 0, 0, 480, 480, 200)
    scenes = [Scene((replace(item, shape=s, colour=c),), 0, 0, 0, 7, covered=(0,)) for s, c in ((0, 0), (4, 5))]
    assert np.array_equal(render(scenes[0]), render(scenes[1]))


@pytest.mark.parametrize("name", CLASSIFICATION_TASKS)
def test_the_labelled_object_is_visible(name):
    """The first object in drawing order or the largest one leaves pixels in the final picture."""
    task = classification_task(name, size=12)
    for i in range(12):
        scene = task.scene(i)
        main = max(range(len(scene.objects)), key=lambda k: scene.objects[k].radius)
        without = replace(scene, objects=scene.objects[:main] + scene.objects[main + 1 :])
        changed = np.abs(render(scene).astype(int) - render(without).astype(int)).max(-1) > 10
        assert changed.sum() >= 15
