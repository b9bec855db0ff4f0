"""Which captions describe which images: all scenes at once against one by one, ceilings by hand and simulation."""

import numpy as np
import pytest

from common.base.random_keys import Draws
from common.data.scenes import SceneDataset, describes, matches
from common.data.scenes.negatives import replaced_statements, swapped_statements
from common.data.scenes.statements import Mention, Statement
from common.data.scenes.world import ABOVE, LEFT, Scene, SceneObject
from scripts.draw_scenes import text_to_image_ceilings


def thing(shape, colour, x=480, y=480, radius=110) -> SceneObject:
    return SceneObject(shape, colour, 0, 0, 0, x, y, radius)


class HandMade:
    """Four pictures: two red circles alone, a blue square alone, a red circle above a blue square.

    The generic caption comes three times, as captions count in fives.
    """

    def __init__(self):
        circle, square = thing(0, 0, y=200), thing(1, 5, y=700)
        self.scenes = [
            Scene((circle,), 0, 0, 0, 1),
            Scene((circle,), 0, 0, 1, 2),
            Scene((square,), 0, 0, 0, 3),
            Scene((circle, square), 0, 0, 0, 4),
        ]
        red, blue, any_thing = Mention(0, 0), Mention(1, 5), Mention()
        self.captions_of = [
            [Statement((red,), background=0, count=1), Statement((red,), count=1), Statement((any_thing,))],
            [Statement((red,), background=1), Statement((red,)), Statement((any_thing,))],
            [Statement((blue,), count=1), Statement((blue,)), Statement((any_thing,))],
            [Statement((red, blue), ((0, ABOVE, 1),)), Statement((red, blue)), Statement((any_thing,))],
        ]

    def __len__(self):
        return 4

    def scene(self, index):
        return self.scenes[index]

    def statements(self, index):
        first, second, generic = self.captions_of[index]
        return first, second, generic, generic, generic


def test_ceilings_of_the_hand_made_set():
    levels = text_to_image_ceilings(HandMade())
    assert levels == pytest.approx([1.0, (1 / 2 + 1 / 3 + 1 / 2 + 1) / 4, 0.25, 0.25, 0.25])


@pytest.mark.parametrize("split", ["test", "test_crowded", "test_other_domain"])
def test_fast_evaluation_equals_the_definition(split):
    """Captions, their swapped and replaced variants, and bare conjunctions, on every scene."""
    dataset = SceneDataset(split, size=35)
    scenes = [dataset.scene(i) for i in range(35)]
    statements = [s for i in range(35) for s in dataset.statements(i)]
    for i in range(35):
        statements += swapped_statements(dataset.statements(i)[2])
        statements += replaced_statements(dataset.statements(i)[3], Draws(i))
    statements += [Statement(()), Statement((), count=2), Statement((Mention(),) * 4)]
    statements += [Statement((Mention(0), Mention(), Mention(1)), ((2, LEFT, 0), (1, ABOVE, 2)))]
    for statement, indices in zip(statements, matches(statements, scenes)):
        assert indices.tolist() == [k for k, scene in enumerate(scenes) if describes(statement, scene)]


@pytest.mark.parametrize("split", ["test", "test_crowded"])
def test_ceilings_leave_room_and_fall_from_specific_to_generic(split):
    levels = text_to_image_ceilings(SceneDataset(split, size=500)).tolist()
    assert 0.65 < np.mean(levels) < 0.85
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > 0.98
    assert levels[4] < 0.02
