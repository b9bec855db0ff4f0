"""Five statements per scene, from specific to generic; each entails the next, which drops parts of it.

Level 0 names every object with every attribute; 1 drops an attribute here and there; 2 keeps colour and shape; 3 says
less of one object; 4 gives only the number of things, or that there are some.
"""

from collections.abc import Sequence

from common.base.random_keys import Draws, derive_key
from common.data.scenes.masks import ARROW
from common.data.scenes.statements import NOTHING, Mention, Statement
from common.data.scenes.wording import say
from common.data.scenes.world import Scene, SceneObject, main_relation

NUM_CAPTIONS = 5
COUNTED_PERCENT = 50  # share of scenes whose captions name the exact number of things, at every level


def _full(item: SceneObject, say_solid: bool, say_place: bool) -> Mention:
    # all attributes of an object; the direction only of arrows
    return Mention(
        item.shape,
        item.colour,
        item.size,
        item.texture if item.texture or say_solid else -1,
        item.orientation if item.shape == ARROW else -1,
        item.place if say_place else -1,
    )


def _fewer_attributes(mention: Mention, choice: int) -> Mention:
    # drops size (0), texture and direction (1), or nothing (2)
    return (mention._replace(size=-1), mention._replace(texture=-1, orientation=-1), mention)[choice]


def caption_statements(scene: Scene, detail: int = 0) -> tuple[Statement, ...]:
    """The five statements of a scene with one to four objects.

    Args:
        detail: 0 as in the training split; 1 gives longer specific captions.
    """
    draws = Draws(derive_key("statements", scene.key))
    objects = draws.shuffled(scene.objects)
    number = len(objects)
    count = number if draws.chance(COUNTED_PERCENT) else -1
    background = scene.background if draws.chance(35 + 30 * detail) else -1
    if number == 1:
        return _single_object_statements(objects[0], count, scene.background, draws)
    # level 0: every object with all attributes, and their relations; an attribute may be left out
    relations = [(0, main_relation(objects[0], objects[1]), 1)]
    for k in range(2, number):
        if draws.chance(45 + 25 * detail):
            other = draws.below(k)
            relations.append((k, main_relation(objects[k], objects[other]), other))
    full = [_full(item, draws.chance(25), False) for item in objects]
    level0 = Statement(tuple(full), tuple(relations), background, count)

    # level 1: an attribute less here and there, sometimes an object less
    kept1 = number if number < 4 or detail or draws.chance(50) else number - 1
    some = [_fewer_attributes(mention, draws.below(3)) for mention in full[:kept1]]
    level1 = Statement(tuple(some), tuple(r for r in relations if r[0] < kept1), -1, count)

    # level 2: colours and shapes of two or three objects
    kept2 = min(kept1, 3) if draws.chance(25 + 50 * detail) else 2
    extra = draws.below(3)  # one of the first two mentions keeps its attributes of level 1
    fewer = [m if k == extra else Mention(m.shape, m.colour) for k, m in enumerate(some[:kept2])]
    level2 = Statement(tuple(fewer), tuple(r for r in level1.relations if r[0] < kept2), -1, count)

    # level 3: two objects, one of them by shape or colour only; level 4: only that there are some
    less = list(fewer[:2])
    target = draws.below(2)
    less[target] = Mention(less[target].shape) if draws.chance(60) else Mention(-1, less[target].colour)
    level3 = Statement(tuple(less), level2.relations[:1] if draws.chance(85) else (), -1, count)
    return level0, level1, level2, level3, Statement((NOTHING, NOTHING), (), -1, count)


def _single_object_statements(item: SceneObject, count: int, background: int, draws: Draws) -> tuple[Statement, ...]:
    # one object: place and background stand in for the relations
    full = _full(item, draws.chance(25), True)
    shape, colour, size, texture, _, place = full
    fewer = Mention(shape, colour, size if draws.chance(50) else -1, texture, -1, place)
    less = Mention(shape, colour, -1, -1, -1, place) if draws.chance(70) else Mention(shape, -1, -1, texture, -1, place)
    return (
        Statement((full,), (), background, count),
        Statement((full,), (), -1, count),
        Statement((fewer,), (), -1, count),
        Statement((less,), (), -1, count),
        Statement((NOTHING,), (), -1, count),
    )


def vague_statements(scene: Scene) -> tuple[Statement, ...]:
    """Five statements that hold of many scenes: shapes without colours, then fewer of them."""
    draws = Draws(derive_key("vague", scene.key))
    shapes = [Mention(item.shape) for item in draws.shuffled(scene.objects)[:2]]
    if len(shapes) == 1:
        only = Statement((shapes[0],))
        return only, only, only, only, Statement((NOTHING,))
    both = Statement(tuple(shapes))
    return both, both, Statement((shapes[0], NOTHING)), Statement((shapes[0],)), Statement((NOTHING,))


def say_plainly(statement: Statement) -> str:
    """The statement in one fixed wording, so that equal statements give equal captions."""
    return say(statement, Draws(derive_key("plain")))


class Captions(Sequence[str]):
    """One sentence per statement, worded when read, by the scene's key and the level or plainly."""

    def __init__(self, scene: Scene, statements: Sequence[Statement], plainly: bool) -> None:
        self._scene, self._statements, self._plainly = scene, statements, plainly

    def __len__(self) -> int:
        return len(self._statements)

    def __getitem__(self, level: int) -> str:
        statement = self._statements[level]
        return say_plainly(statement) if self._plainly else say(statement, wording_draws(self._scene, level))


def wording_draws(scene: Scene, level: int) -> Draws:
    """The draws that word a level."""
    return Draws(derive_key("wording", scene.key, level))
