"""What relations and statements mean."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.scenes import describes
from common.data.scenes.statements import Mention, Statement
from common.data.scenes.world import LEFT, RIGHT, Scene, SceneObject, holds, main_relation

coordinate = st.integers(130, 830)
thing = st.builds(
    SceneObject,
    st.integers(0, 9), st.integers(0, 8), st.integers(0, 1), st.integers(0, 3), st.just(0),
    coordinate, coordinate, st.integers(100, 130),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(thing, thing)
def test_relations_are_strict_and_inverse(a, b):
    assert holds(LEFT, a, b) == holds(RIGHT, b, a)
    assert not (holds(LEFT, a, b) and holds(RIGHT, a, b))
    assert [holds(r, a, b) for r in (2, 3)] == [holds(r, b, a) for r in (3, 2)]
    if any(holds(r, a, b) for r in range(4)):
        assert holds(main_relation(a, b), a, b)


def test_mentions_need_different_objects():
    one = Scene((SceneObject(0, 0, 1, 0, 0, 300, 300, 190),), 0, 0, 0, key=1)
    assert describes(Statement((Mention(0),)), one)
    assert not describes(Statement((Mention(0), Mention(0))), one)
    assert not describes(Statement((Mention(), Mention())), one)
    assert describes(Statement((), background=0, count=1), one)
    assert not describes(Statement((), background=1), one)
