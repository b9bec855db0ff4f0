"""Visual entailment: the image is the premise, a sentence the hypothesis (SNLI-VE).

The image must leave a neutral hypothesis undecided, so in about half of the drawn images one thing lies under a grey
chequered cloth: it counts as a thing and has a place, but could be anything. A hypothesis is entailed if it holds
without the covered thing, neutral if it holds for some thing under the cloth, and contradicted otherwise. It is drawn
independently of any image, so the words do not predict the label.
"""

from dataclasses import replace

from common.base.random_keys import Draws, derive_key
from common.data.scenes.draw import render
from common.data.scenes.sampling import Statistics, draw_scene
from common.data.scenes.statements import Mention, Statement, assignments, fits
from common.data.scenes.wording import say
from common.data.scenes.world import COLOURS, SHAPES, Scene

ENTAILMENT_LABELS = ("contradiction", "neutral", "entailment")
CONTRADICTION, NEUTRAL, ENTAILMENT = range(3)
_STATISTICS = Statistics(count_weights=(5, 35, 35, 25), copy_percent=25)


def _can_hold(statement: Statement, scene: Scene, covered_may_be_anything: bool) -> bool:
    # whether mentions can be matched to different objects; a covered object fits every mention or none
    def may_be(mention: Mention, index: int) -> bool:
        return covered_may_be_anything if index in scene.covered else fits(mention, scene.objects[index])

    return next(assignments(statement, scene, may_be), None) is not None


def entailment_label(statement: Statement, scene: Scene) -> int:
    """Index into `ENTAILMENT_LABELS`; `scene.covered` lists the hidden objects.

    A hypothesis says no place or size, which show through the cloth.
    """
    if statement.background not in (-1, scene.background) or statement.count not in (-1, len(scene.objects)):
        return CONTRADICTION
    if _can_hold(statement, scene, covered_may_be_anything=False):
        return ENTAILMENT
    return NEUTRAL if _can_hold(statement, scene, covered_may_be_anything=True) else CONTRADICTION


def random_hypothesis(draws: Draws) -> Statement:
    """One thing by colour or shape or both, or two things, possibly in a relation."""

    def mention(form: int) -> Mention:
        shape, colour = draws.below(len(SHAPES)), draws.below(len(COLOURS))
        return (Mention(shape), Mention(-1, colour), Mention(shape, colour))[form]

    form = draws.below(4)
    if form < 2:
        return Statement((mention(draws.weighted((45, 35, 20))),))
    two = (mention(draws.below(2)), mention(draws.below(2)))
    return Statement(two, ((0, draws.below(4), 1),)) if form == 3 else Statement(two)


def entailment_item(key: int, turn: int, image_size: int) -> dict:
    """{"image": (H, W, 3) uint8, "hypothesis": str, "label": index into `ENTAILMENT_LABELS`}."""
    draws = Draws(key)
    hypothesis = random_hypothesis(draws)
    while True:
        scene = draw_scene(derive_key(key, draws.below(2**31)), _STATISTICS)
        if draws.chance(50):
            scene = replace(scene, covered=(draws.below(len(scene.objects)),))
        if entailment_label(hypothesis, scene) == turn:
            break
    return {"image": render(scene, image_size), "hypothesis": say(hypothesis, draws), "label": turn}
