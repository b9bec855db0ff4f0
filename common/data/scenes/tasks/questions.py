"""Questions about one image, with answers of three types: yes/no, number, other (VQA v2).

Yes and no are equally frequent for every kind, because the question is drawn first and images are drawn until the
chosen answer comes up.
"""

from typing import NamedTuple

from common.base.random_keys import Draws, derive_key
from common.data.scenes.draw import render
from common.data.scenes.phrases import ANSWERS, DIGIT_WORDS, QUESTIONS
from common.data.scenes.sampling import Statistics, draw_scene
from common.data.scenes.statements import Mention, Statement, describes, fits
from common.data.scenes.wording import (
    COLOUR_ADJECTIVES,
    RELATION_PHRASES,
    SHAPE_NOUNS,
    SHAPE_PLURALS,
    noun_phrase,
    with_article,
)
from common.data.scenes.world import COLOURS, PLACES, RELATIONS, SHAPES, SIZES, TEXTURES, Scene

KINDS = ("exists", "related", "count", "colour", "shape", "texture", "size", "place")
QUESTION_TURNS = 8  # yes or no in half of them: 4 yes/no, 2 number, 2 other
NUM_ANNOTATORS = 10  # answers listed per question, as in VQA v2
_STATISTICS = Statistics(count_weights=(10, 30, 30, 30), copy_percent=35)


class Question(NamedTuple):
    """`kind` from KINDS, about things that fit `about`; `other` and `relation` for "related" only."""

    kind: str
    about: Mention
    relation: int = -1
    other: Mention = Mention()


def answer(question: Question, scene: Scene) -> str | None:
    """A word of `ANSWERS`; None if the question does not apply (not exactly one thing fits)."""
    fitting = [item for item in scene.objects if fits(question.about, item)]
    if question.kind == "exists":
        return "yes" if fitting else "no"
    if question.kind == "related":
        statement = Statement((question.about, question.other), ((0, question.relation, 1),))
        return "yes" if describes(statement, scene) else "no"
    if question.kind == "count":
        return DIGIT_WORDS[len(fitting)]
    if len(fitting) != 1:
        return None
    item = fitting[0]
    names = {"colour": COLOURS, "shape": SHAPES, "texture": TEXTURES, "size": SIZES, "place": PLACES}[question.kind]
    return names[getattr(item, question.kind)]


def _random_mention(draws: Draws, kind: str) -> Mention:
    # one or two attributes, never the one in question
    shape, colour, texture = draws.below(len(SHAPES)), draws.below(len(COLOURS)), draws.below(len(TEXTURES))
    form = draws.below(4)
    if kind == "shape":
        return Mention(-1, colour, -1, texture if form == 0 else -1)
    if kind == "colour":
        return Mention(shape, -1, -1, texture if form == 0 else -1)
    if kind == "exists" and form == 0:
        return Mention(shape, colour)
    return Mention(shape) if form < 3 else Mention(-1, colour)


def random_question(draws: Draws, kind: str) -> Question:
    """A question of the kind, independent of any image."""
    about = _random_mention(draws, kind)
    if kind != "related":
        return Question(kind, about)
    return Question(kind, about, draws.below(len(RELATIONS)), _random_mention(draws, "texture"))


def say_question(question: Question, draws: Draws) -> str:
    """The question as text."""
    about = question.about
    template = draws.pick(QUESTIONS[question.kind])
    if question.kind == "count":
        colour = f"{COLOUR_ADJECTIVES[about.colour][0]} " if about.colour >= 0 else ""
        return template.format(f"{colour}{SHAPE_PLURALS[about.shape] if about.shape >= 0 else 'things'}")
    if question.kind == "related":
        second = with_article(noun_phrase(question.other, draws))
        first = with_article(noun_phrase(about, draws))
        return template.format(f"{first} {RELATION_PHRASES[question.relation][0]} {second}")
    phrase = noun_phrase(about, draws)
    return template.format(with_article(phrase) if question.kind == "exists" else f"the {phrase}")


def question_item(key: int, turn: int, image_size: int) -> dict:
    """One image, one question.

    Returns:
        {"image": (H, W, 3) uint8, "question": str, "answer": str, "answers": it ten times (the form of VQA v2),
        "answer_type": "yes/no", "number" or "other", "label": index in `ANSWERS`}.
    """
    draws = Draws(key)
    if turn < 4:
        kind, target = KINDS[turn % 2], ("yes", "no")[turn // 2]
    elif turn < 6:
        kind, target = "count", DIGIT_WORDS[draws.weighted((20, 40, 30, 10))]
    else:
        kind, target = draws.pick(KINDS[3:]), None
    question = random_question(draws, kind)
    while True:
        scene = draw_scene(derive_key(key, draws.below(2**31)), _STATISTICS)
        word = answer(question, scene)
        if word is not None and (target is None or word == target):
            break
    return {
        "image": render(scene, image_size),
        "question": say_question(question, draws),
        "answer": word,
        "answers": [word] * NUM_ANNOTATORS,
        "answer_type": "yes/no" if turn < 4 else "number" if turn < 6 else "other",
        "label": ANSWERS.index(word),
    }


assert all(nouns[0] == name for nouns, name in zip(SHAPE_NOUNS, SHAPES))
