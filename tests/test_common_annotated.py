"""VQA, SNLI-VE and NLVR2 scores: golden cases of the official rules, and leave-one-out loops."""

import random

import pytest
import torch
from refusals import refused

from common.evaluation.annotated import entailment_metrics, nlvr2_metrics, normalize_answer, vqa_metrics, vqa_score


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1,000 dollars", "1000 dollars"),
        ("black-white", "black white"),
        ("3.5", "3.5"),
        ("mr. smith", "mr smith"),
        ("end 3.", "end 3"),
        ("a.b.c", "abc"),
        ("Mr. Smith", "mr smith"),
        ("Two", "2"),
        ("none", "0"),
        ("ten apples", "10 apples"),
        ("a cat and the dog", "cat and dog"),
        ("dont know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("twas", "'twas"),
        ("somebody'd", "somebodyd"),
        ("let's", "let's"),
        ("red , blue", "red blue"),
        ("red,blue", "red blue"),
        ("red- blue-green", "red bluegreen"),  # a sign beside a blank anywhere goes everywhere
        ("1,000 or black-white", "1000 or blackwhite"),  # a number with a comma makes every sign go
        ("yes!", "yes"),
        ("what\tis\nit", "what is it"),
        ("  on   top ", "on top"),
        ("'", "'"),
        (":", ":"),
        ("the", ""),
        ("", ""),
        ("x." * 40, "x" * 33 + ".x" * 7 + "."),  # at most 32 periods go
    ],
)
def test_normalised_answers(answer, expected):
    assert normalize_answer(answer) == expected


def test_score_equals_the_leave_one_out_loop():
    drawn = random.Random(0)
    for _ in range(300):
        answers = [drawn.choice(["cat", "The cat", "dog", "two", "2"]) for _ in range(10)]
        predicted = drawn.choice(["cat", "2", "dog", "owl"])
        plain, expected = list(answers), predicted
        if len(set(answers)) > 1:
            plain, expected = [normalize_answer(answer) for answer in answers], normalize_answer(predicted)
        terms = [min(1, sum(plain[j] == expected for j in range(10) if j != left) / 3) for left in range(10)]
        assert vqa_score(predicted, answers) == pytest.approx(sum(terms) / 10, abs=1e-12)


def test_unanimous_annotators_are_taken_to_the_letter():
    assert vqa_score("2", ["two"] * 10) == 0
    assert vqa_score("two", ["two"] * 10) == 1
    assert vqa_score("2", ["two"] * 9 + ["3"]) == 1
    assert vqa_score(" two\n", ["two"] * 10) == 1  # blanks around never count
    assert vqa_score("the cat", ["cat"] * 10) == 0


def test_vqa_metrics_per_answer_type():
    answers = {1: ["yes"] * 10, 2: ["no"] * 2 + ["yes"] * 8, 3: ["2"] * 10}
    types = {1: "yes/no", 2: "yes/no", 3: "number"}
    metrics = vqa_metrics({1: "yes", 2: "no", 3: "3"}, answers, types)
    assert metrics == pytest.approx({"accuracy": 1.6 / 3, "accuracy (number)": 0, "accuracy (yes/no)": 0.8})
    refused(
        (
            r"predictions: 1 questions are missing \(first \[3\]\), 1 are unknown",
            lambda: vqa_metrics({1: "yes", 2: "no", 4: "3"}, answers, types),
        ),
        ("no questions", lambda: vqa_metrics({}, {}, {})),
        ("1 annotated answers; expected: at least two", lambda: vqa_score("yes", ["yes"])),
    )


def test_entailment_accuracy_is_micro():
    metrics = entailment_metrics([0, 0, 1, 2, 2], [0, 0, 0, 2, 1])
    of_classes = {"accuracy (contradiction)": 2 / 3, "accuracy (neutral)": 0, "accuracy (entailment)": 1}
    assert metrics == pytest.approx({"accuracy": 3 / 5} | of_classes)
    assert entailment_metrics(torch.tensor([2]), torch.tensor([2])) == {"accuracy": 1, "accuracy (entailment)": 1}
    refused(
        (r"labels \[-1, 3\]; expected: 0, 1, 2 for contradiction", lambda: entailment_metrics([0, 3], [-1, 1])),
        ("2 and 1 items", lambda: entailment_metrics([0, 1], [1])),
    )


def test_nlvr2_consistency_asks_for_all_pairs_of_a_sentence():
    identifiers = ["dev-1-0-0", "dev-1-1-0", "dev-1-2-0", "dev-2-0-0", "dev-1-0-1"]
    metrics = nlvr2_metrics(["True", "false", True, 0, 1], ["true", "True", "TRUE", "False", "True"], identifiers)
    # the first sentence has one of three pairs wrong, two others their only one right, one of them about the same pair
    assert metrics == {"accuracy": 0.8, "consistency": 2 / 3}
    assert nlvr2_metrics(torch.tensor([1, 0]), torch.tensor([1, 1])) == {"accuracy": 0.5}
    refused(
        ("NLVR2 label 'maybe'; expected: True or False", lambda: nlvr2_metrics(["maybe"], ["True"])),
        (
            "NLVR2 identifier 'dev-1'; expected: split-set-pair-sentence",
            lambda: nlvr2_metrics(["True"], ["True"], ["dev-1"]),
        ),
        ("0 and 0 items", lambda: nlvr2_metrics([], [])),
    )
