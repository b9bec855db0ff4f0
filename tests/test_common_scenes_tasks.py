"""Labelled sets and annotations: labels, balance, boxes, and answers against evaluations written apart."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from common.base.random_keys import Draws
from common.data.scenes import (
    ANNOTATION_TASKS,
    CLASSIFICATION_TASKS,
    SceneDataset,
    annotation_task,
    classification_task,
    describes,
    scene_words,
)
from common.data.scenes.phrases import ANSWERS
from common.data.scenes.statements import Mention, fits
from common.data.scenes.tasks import entailment, grounding, image_pairs, questions
from common.data.scenes.wording import ORIENTATION_PHRASES, PLACE_PHRASES
from common.data.scenes.world import BACKGROUNDS, COLOURS, SHAPES, SIZES, TEXTURES, Scene, SceneObject


def largest(scene: Scene) -> SceneObject:
    return max(scene.objects, key=lambda item: item.radius)


def items_of(name: str, size: int) -> list[dict]:
    task = annotation_task(name, size=size, image_size=16)
    return [task[index] for index in range(size)]


def shown(mention: Mention, scene: Scene) -> list[SceneObject]:
    """The objects that have all that is said of one."""
    stated = [(field, value) for field, value in zip(Mention._fields, mention) if value != -1]
    return [item for item in scene.objects if all(getattr(item, field) == value for field, value in stated)]


def named_class(name: str, scene: Scene) -> str:
    """The class name that a reader of the scene would give, by the task's name; written apart from the code."""
    main = largest(scene)
    kind = name.removeprefix("vtab/")
    if kind.startswith("imagenet"):
        return f"{COLOURS[main.colour]} {SHAPES[main.shape]}"
    if kind.endswith("shape"):
        return SHAPES[main.shape]
    if kind.endswith("colour"):
        return COLOURS[main.colour]
    if kind == "count":
        number = len(scene.objects)
        return f"{('one', 'two', 'three', 'four')[number - 1]} shape{'s' * (number > 1)}"
    if kind == "distance":
        a, b = scene.objects
        gap = max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius
        return "close together" if gap < 185 else "far apart"
    if kind == "relation":
        circle, square = (next(o for o in scene.objects if SHAPES[o.shape] == s) for s in ("circle", "square"))
        if abs(circle.x - square.x) > abs(circle.y - square.y):
            return "to the left of" if circle.x < square.x else "to the right of"
        return "above" if circle.y < square.y else "below"
    return {
        "texture": TEXTURES[main.texture],
        "background": BACKGROUNDS[scene.background],
        "scenery": {"sand": "on sand", "grass": "on grass", "sky": "in the sky", "night": "at night"}.get(
            BACKGROUNDS[scene.background]
        ),
        "position": PLACE_PHRASES[main.place][0],
        "size": SIZES[main.size],
        "orientation": ORIENTATION_PHRASES[main.orientation],
    }[kind]


@pytest.mark.parametrize("name", CLASSIFICATION_TASKS)
def test_labels_are_what_the_scene_shows_and_balanced(name):
    number = len(classification_task(name, size=1).class_names)
    task = classification_task(name, size=2 * number)
    assert all(task.class_names[task.label(i)] == named_class(name, task.scene(i)) for i in range(len(task)))
    assert set(Counter(task.label(i) for i in range(len(task))).values()) == {2}


@pytest.mark.parametrize("name", CLASSIFICATION_TASKS)
def test_classification_tasks_have_the_promised_form(name):
    task = classification_task(name, size=6, image_size=32, seed=5)
    known = set(scene_words())
    assert len(set(task.class_names)) == len(task.class_names) >= 2
    assert len(task.templates) >= 3
    assert all(template.count("{}") == 1 for template in task.templates)
    for text in (t.replace("{}", c) for t in task.templates for c in task.class_names):
        assert set(text.split()) <= known
    item = task[3]
    assert (item.keys(), item["label"]) == ({"image", "label", "image_id"}, task.label(3))
    assert item["image"].shape == (32, 32, 3)
    assert task.fingerprint != classification_task(name, size=6, image_size=32, seed=6).fingerprint


@pytest.mark.parametrize("name", ["imagenet", "imagenet_v2", "imagenet_a", "imagenet_r"])
def test_no_distractor_has_the_class_of_the_main_object(name):
    task = classification_task(name, size=150)
    for scene in map(task.scene, range(150)):
        main = largest(scene)
        for other in scene.objects:
            apart = other.radius < main.radius - 20 and other.shape != main.shape and other.colour != main.colour
            assert other is main or apart


@pytest.mark.parametrize("name", ANNOTATION_TASKS)
def test_annotation_tasks_repeat_themselves_and_stay_in_the_vocabulary(name):
    task = annotation_task(name, size=60, image_size=24)
    known = set(scene_words())
    for i in reversed(range(60)):
        first, again = task[i], task[i]
        assert all(np.array_equal(first[key], again[key]) for key in first)
        texts = [first[key] for key in ("text", "question", "answer", "statement", "hypothesis", "cue") if key in first]
        assert texts
        assert set(" ".join(texts).split()) <= known
    assert task.fingerprint != annotation_task(name, size=60, image_size=24, part="train").fingerprint


def test_referring_expressions_fit_exactly_one_object():
    """By definition: as a statement about the object and, where it names one, some other object."""
    dataset = SceneDataset("test_crowded", size=300)
    kinds = Counter()
    for i in range(300):
        scene = dataset.scene(i)
        for index in range(len(scene.objects)):
            statement = grounding.referring_statement(scene, index, Draws(i), with_relation=i % 2 == 0)
            kinds[statement and len(statement.mentions)] += 1
            if statement is None:
                continue
            fitting = [
                k
                for k, item in enumerate(scene.objects)
                if any(
                    describes(statement._replace(count=-1), replace(scene, objects=chosen))
                    for chosen in itertools.permutations(scene.objects, len(statement.mentions))
                    if chosen[0] is item
                    and all(map(fits, statement.mentions, chosen))
                    and (len(chosen) == 1 or all(_stands(r, *chosen) for _, r, _ in statement.relations))
                )
            ]
            assert fitting == [index]
    assert kinds[None] < 0.01 * sum(kinds.values())
    assert min(kinds[1], kinds[2]) > 100


def _stands(relation, a, b) -> bool:
    """Entirely to the left, to the right, above, below."""
    return (
        a.x + a.radius <= b.x - b.radius,
        b.x + b.radius <= a.x - a.radius,
        a.y + a.radius <= b.y - b.radius,
        b.y + b.radius <= a.y - a.radius,
    )[relation]


def test_grounding_items_hold_the_right_box_once():
    task = annotation_task("grounding", size=150)
    labels = Counter()
    for item in task:
        proposals = item["proposals"]
        assert (proposals.shape, proposals.dtype) == ((8, 4), np.float32)
        assert ((proposals >= 0) & (proposals <= 1)).all()
        assert (proposals[:, :2] < proposals[:, 2:]).all()
        assert np.array_equal(proposals[item["label"]], item["box"])
        overlaps = [grounding.overlap(box, item["box"]) for box in proposals]
        assert sum(value >= 0.5 for value in overlaps) == 1
        labels[item["label"]] += 1
    assert len(labels) == 8
    assert grounding.overlap((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert grounding.overlap((0, 0, 1, 1), (1, 1, 2, 2)) == 0


def test_answers_match_an_evaluation_written_apart():
    dataset = SceneDataset("test_crowded", size=150)
    given = Counter()
    for i in range(150):
        scene, draws = dataset.scene(i), Draws(i)
        for kind in questions.KINDS:
            question = questions.random_question(draws, kind)
            fitting = shown(question.about, scene)
            if kind == "exists":
                expected = "yes" if len(fitting) else "no"
            elif kind == "count":
                expected = ["zero", "one", "two", "three", "four"][len(fitting)]
            elif kind == "related":
                pairs = [(a, b) for a in fitting for b in shown(question.other, scene) if a is not b]
                expected = "yes" if any(_stands(question.relation, a, b) for a, b in pairs) else "no"
            elif len(fitting) != 1:
                expected = None
            elif kind == "place":
                row, column = 3 * fitting[0].y // 960, 3 * fitting[0].x // 960
                words = [("top", "", "bottom")[row], ("left", "", "right")[column]]
                expected = " ".join(word for word in words if word) or "middle"
            else:
                names = {"colour": COLOURS, "shape": SHAPES, "texture": TEXTURES, "size": SIZES}[kind]
                expected = names[getattr(fitting[0], kind)]
            assert questions.answer(question, scene) == expected
            given[expected] += 1
    assert len(given) > 25


def test_questions_are_of_all_types_and_yes_is_as_frequent_as_no():
    items = items_of("vqa", 400)
    assert Counter(item["answer_type"] for item in items) == {"yes/no": 200, "number": 100, "other": 100}
    answers = Counter(item["answer"] for item in items)
    assert answers["yes"] == answers["no"] == 100
    assert all(item["answers"] == [item["answer"]] * 10 for item in items)
    assert all(ANSWERS[item["label"]] == item["answer"] for item in items)
    assert max(Counter(i["answer"] for i in items if i["answer_type"] == "number").values()) < 60
    relations = [i["answer"] for i in items if i["answer_type"] == "yes/no" and "of" in i["question"].split()]
    assert 0.3 < np.mean([a == "yes" for a in relations]) < 0.7


def test_pair_statements_are_balanced_and_true_by_an_evaluation_written_apart():
    items = items_of("nlvr2", 200)
    assert Counter(item["label"] for item in items) == {0: 100, 1: 100}
    assert items[0]["images"].shape == (2, 16, 16, 3)
    dataset = SceneDataset("test_crowded", size=120)
    seen = Counter()
    for i in range(0, 120, 2):
        left, right = dataset.scene(i), dataset.scene(i + 1)
        for k in range(8):
            s = image_pairs.random_pair_statement(Draws(8 * i + k))
            a, b = ([o for o in scene.objects if fits(s.mention, o)] for scene in (left, right))
            expected = {
                "both": bool(a and b),
                "neither": not a and not b,
                "one": bool(a) is not bool(b),
                "left": bool(a) and not b,
                "total": len(a + b) == s.number,
                "more": len(left.objects) > len(right.objects),
                "each": bool(a) and any(fits(s.other, o) for o in right.objects),
                "equal": len(left.objects) == len(right.objects),
            }[s.kind]
            assert image_pairs.pair_holds(s, left, right) == expected
            seen[s.kind] += 1
    assert set(seen) == set(image_pairs.PAIR_KINDS)


def test_entailment_labels_match_trying_every_thing_under_the_cloth():
    """Entailed: true whatever is covered; neutral: true for some; contradiction: true for none."""
    dataset = SceneDataset("test", size=60)
    seen = Counter()
    for i in range(60):
        scene = dataset.scene(i)
        for k in range(6):
            hypothesis = entailment.random_hypothesis(Draws(10 * i + k))
            if len(hypothesis.mentions) > 1 and k % 2:
                continue
            covered = i % len(scene.objects)
            hidden = replace(scene, covered=(covered,))
            truths = []
            for shape, colour in itertools.product(range(len(SHAPES)), range(len(COLOURS))):
                objects = list(scene.objects)
                objects[covered] = replace(objects[covered], shape=shape, colour=colour)
                truths.append(describes(hypothesis, replace(scene, objects=tuple(objects))))
            expected = entailment.ENTAILMENT if all(truths) else entailment.NEUTRAL if any(truths) else 0
            assert entailment.entailment_label(hypothesis, hidden) == expected
            seen[expected] += 1
            plain = entailment.entailment_label(hypothesis, scene)
            assert plain == (entailment.ENTAILMENT if describes(hypothesis, scene) else entailment.CONTRADICTION)
    assert min(seen[label] for label in range(3)) > 5


def test_entailment_labels_are_balanced_and_words_do_not_predict_them():
    items = items_of("visual_entailment", 600)
    assert Counter(item["label"] for item in items) == {0: 200, 1: 200, 2: 200}
    for word in ("circle", "red", "left", "and", "a"):
        labels = [item["label"] for item in items if word in item["hypothesis"].split()]
        shares = np.bincount(labels, minlength=3) / len(labels)
        assert np.abs(shares - 1 / 3).max() < 4 * np.sqrt(2 / 9 / len(labels)), word


def test_associations_have_the_gold_set_they_claim():
    task = annotation_task("winogavil", size=48, image_size=16)
    for item in task:
        number = len(item["images"])
        assert item["images"].shape == (number, 16, 16, 3)
        assert 2 <= item["k"] == len(item["gold"]) <= number // 2
        assert item["gold"] == sorted(set(item["gold"]) & set(range(number)))
        assert len(item["cue"].split()) == 1
    assert Counter(len(item["images"]) for item in task) == dict.fromkeys((5, 6, 10, 12), 12)
