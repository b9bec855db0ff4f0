"""Scores of GeoMM's downstream tasks: VQA accuracy, SNLI-VE, NLVR2.

Pure functions of answers and labels; fractions in [0, 1].
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

NUM_ANNOTATORS = 10
ENTAILMENT_LABELS = ("contradiction", "neutral", "entailment")  # label = place, ALBEF's map

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
# a period that no digit follows; that one before it does not protect is a slip of the official pattern, kept
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = 32  # the official call passes a flag where the count goes
_ARTICLES = ("a", "an", "the")
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())}
_APOSTROPHES = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# each word without one of its apostrophes -> the word; the official list has one more, the other way round
_CONTRACTIONS = {"somebody'd": "somebodyd"} | {
    word[:place] + word[place + 1 :]: word
    for word in _APOSTROPHES.split()
    for place, sign in enumerate(word)
    if sign == "'"
}


@lru_cache(maxsize=1 << 16)
def normalize_answer(answer: str) -> str:
    """Punctuation, digits, articles and contractions of an answer, by the official rules in their order.

    "1,000 dollars" -> "1000 dollars", "black-white" -> "black white", "Mr. Smith" -> "mr smith", "two" -> "2".
    """
    return _digits_and_articles(_punctuation(_one_line(answer)))


def vqa_score(predicted: str | None, answers: Sequence[str]) -> float:
    """Accuracy of one answer: the mean over annotators left out of min(1, matches among the others / 3).

    With n of ten annotators in agreement 0, 0.3, 0.6, 0.9, then 1; not the simplified min(1, n / 3). If all annotators
    agree to the letter, nothing is normalised, on either side.

    Args:
        predicted: None = no answer, which no annotator gave; the rules leave nothing of "a", so "" is one.
        answers: one per annotator, ten in VQA v2, at least two.
    """
    if len(answers) < 2:
        raise ValueError(f"{len(answers)} annotated answers; expected: at least two (VQA v2 has {NUM_ANNOTATORS})")
    if predicted is None:
        return 0.0
    predicted, answers = _one_line(predicted), [_one_line(answer) for answer in answers]
    if len(set(answers)) > 1:
        predicted, answers = normalize_answer(predicted), [normalize_answer(answer) for answer in answers]
    matches = sum(answer == predicted for answer in answers)
    # left out: one of the matching annotators, or one of the others
    return (matches * min(1.0, (matches - 1) / 3) + (len(answers) - matches) * min(1.0, matches / 3)) / len(answers)


def best_answers(questions: Sequence[Sequence[str]], closed: Sequence[str] | None = None) -> list[str | None]:
    """The best answer to each question; of equals the one whose last occurrence comes first.

    `vqa_metrics` of them is the upper bound, below 1 where no four annotators agree.

    Args:
        questions: the annotated answers of each.
        closed: the answers that a model chooses from; None = any.
    Returns:
        One per question; None where the closed list has none of its answers.
    """
    spelled = {} if closed is None else {normalize_answer(answer): answer for answer in reversed(closed)}
    known, best = set(closed or ()), []
    for answers in questions:
        forms = {normalize_answer(answer): answer for answer in reversed(answers)}
        if closed is not None:
            alike = len(set(answers)) == 1  # which is taken to the letter
            letters = {answer: answer for answer in answers if answer in known}
            forms = letters if alike else {form: spelled[form] for form in forms if form in spelled}
        best.append(max(reversed(forms.values()), key=lambda answer: vqa_score(answer, answers), default=None))
    return best


def vqa_metrics(
    predictions: Mapping[int, str | None], answers: Mapping[int, Sequence[str]], answer_types: Mapping[int, str]
) -> dict[str, float]:
    """VQA accuracy over questions and per answer type.

    Args:
        predictions, answers, answer_types: by question id; a type is "yes/no", "number" or "other".
    Returns:
        "accuracy" and "accuracy (<type>)" for each type that occurs.
    Raises:
        ValueError: unless all three hold the same questions, at least one.
    """
    for name, other in (("predictions", predictions), ("answer types", answer_types)):
        missing, unknown = sorted(set(answers) - set(other)), sorted(set(other) - set(answers))
        if missing or unknown:
            raise ValueError(
                f"{name}: {len(missing)} questions are missing (first {missing[:3]}), {len(unknown)} are unknown "
                f"(first {unknown[:3]}); expected: the {len(answers)} annotated ones"
            )
    if not answers:
        raise ValueError("no questions to average over")
    scores = {question: vqa_score(predictions[question], annotated) for question, annotated in answers.items()}
    by_type: dict[str, list[float]] = {}
    for question, score in scores.items():
        by_type.setdefault(answer_types[question], []).append(score)
    metrics = {"accuracy": sum(scores.values()) / len(scores)}
    return metrics | {
        f"accuracy ({name})": sum(type_scores) / len(type_scores) for name, type_scores in sorted(by_type.items())
    }


def entailment_metrics(predictions: Sequence[int], labels: Sequence[int]) -> dict[str, float]:
    """SNLI-VE: micro accuracy over three classes, and the recall of each that occurs.

    Args:
        predictions, labels: places in `ENTAILMENT_LABELS`; unlabelled items ("-") are left out.
    """
    _check_counts(predictions, labels)
    predictions, labels = ([getattr(v, "item", lambda v=v: v)() for v in values] for values in (predictions, labels))
    strange = {*predictions, *labels} - set(range(len(ENTAILMENT_LABELS)))
    if strange:
        raise ValueError(f"labels {sorted(strange)}; expected: 0, 1, 2 for {', '.join(ENTAILMENT_LABELS)}")
    hits = [predicted == label for predicted, label in zip(predictions, labels)]
    metrics = {"accuracy": sum(hits) / len(hits)}
    for place, name in enumerate(ENTAILMENT_LABELS):
        class_hits = [hit for hit, label in zip(hits, labels) if label == place]
        if class_hits:
            metrics[f"accuracy ({name})"] = sum(class_hits) / len(class_hits)
    return metrics


def nlvr2_metrics(
    predictions: Sequence[bool | str], labels: Sequence[bool | str], identifiers: Sequence[str] | None = None
) -> dict[str, float]:
    """NLVR2: accuracy over examples; consistency: share of sentences that are judged right on all their pairs.

    Args:
        predictions, labels: bool, 0 or 1, or "True" or "False" in any case.
        identifiers: "split-set-pair-sentence" of each example, as in the files; None leaves consistency out.
    """
    _check_counts(predictions, labels)
    hits = [_truth(predicted) == _truth(label) for predicted, label in zip(predictions, labels)]
    metrics = {"accuracy": sum(hits) / len(hits)}
    if identifiers is not None:
        _check_counts(identifiers, labels)
        sentences: dict[tuple[str, ...], bool] = {}
        for identifier, hit in zip(identifiers, hits):
            parts = identifier.split("-")
            if len(parts) != 4:
                raise ValueError(
                    f"NLVR2 identifier {identifier!r}; expected: split-set-pair-sentence, e.g. dev-850-0-1"
                )
            sentence = (parts[0], parts[1], parts[3])  # the same words about another pair
            sentences[sentence] = sentences.get(sentence, True) and hit
        metrics["consistency"] = sum(sentences.values()) / len(sentences)
    return metrics


def _one_line(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def _punctuation(text: str) -> str:
    # Each sign is judged by the text as it came: gone next to a blank or beside a number like 1,000, else a blank.
    has_number = _COMMA_IN_NUMBER.search(text) is not None
    result = text
    for sign in _PUNCTUATION:
        gone = has_number or f"{sign} " in text or f" {sign}" in text
        result = result.replace(sign, "" if gone else " ")
    return _PERIOD.sub("", result, count=_MOST_PERIODS)


def _digits_and_articles(text: str) -> str:
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def _truth(value: bool | int | str) -> bool:
    text = str(value.item() if hasattr(value, "item") else value).lower()
    if text not in ("true", "false", "1", "0"):
        raise ValueError(f"NLVR2 label {value!r}; expected: True or False, as a truth value or as text")
    return text in ("true", "1")


def _check_counts(one: Sequence, other: Sequence) -> None:
    if len(one) != len(other) or not len(one):
        raise ValueError(f"{len(one)} and {len(other)} items; expected: equal counts, at least one")
