"""Annotated images: questions (VQA v2), hypotheses (SNLI-VE), statements on two (NLVR2), boxes (RefCOCO+).

Items resemble those of the scenes' task of the same name, but boxes are (x, y, width, height) in pixels. Files are JSON
or JSON lines, plain or gzip; each reader also takes ALBEF's published lists. Unusable rows are listed with place and
reason.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from PIL import Image

from common.base.arguments import some
from common.base.files import printable
from common.data.broken import BrokenSample, Unusable, check_opened, named
from common.data.decoding import content_hash, id_text, read_picture, row_of, sampled_places
from common.data.picture_files import find_images, missing_picture, sizes_of_files
from common.data.pictures import packed, unpacked
from common.data.rows import picture_path
from common.data.scenes.tasks.entailment import ENTAILMENT_LABELS
from common.data.text_files import parsed_json, read_json, read_text

UNLABELLED = "-"  # of a SNLI-VE row on which no label was agreed: no item, and nothing is wrong with it
_TRUTH = ("False", "True")  # label = place
_RIM = 1.0  # pixels by which a box may lie outside: annotators' boxes are rounded
_PICKLE = (".p", ".pkl", ".pickle")


class Annotation(NamedTuple):
    """One checked row. pictures: one path, or (left, right). item: all else."""

    pictures: tuple[str, ...]
    item: dict[str, Any]


class Annotations(NamedTuple):
    """The usable rows of a file, in order, and the others."""

    rows: list[Annotation]
    broken: list[BrokenSample]


Raw = Iterator[tuple[str, Any]]  # place (rows count from 1, as lines do), row as the file has it


def read_vqa(path: str | Path, answers: str | Path | None = None) -> Annotations:
    """Questions with their annotators' answers.

    Args:
        path: the official questions, or rows {"question", "answers" or "answer", "image" or "image_id"}.
        answers: the official annotations; None for rows, which have their own.
    Returns:
        Items {"question", "answers": list of str, "answer": the most frequent one, "answer_type", "question_id",
        "image_id"}. An image without a path is COCO's of that number.
    """
    content = _content(path)
    if isinstance(content, dict) and isinstance(content.get("questions"), list):
        if answers is None:
            raise ValueError(f"{path} holds only questions; expected: also the file of their annotations")
        annotated = _content(answers)
        if not isinstance(annotated, dict) or not isinstance(annotated.get("annotations"), list):
            raise ValueError(f"{answers}: expected an object with a list 'annotations', VQA v2's own file")
        subset = content.get("data_subtype", annotated.get("data_subtype"))
        folder = f"COCO_{subset}_" if isinstance(subset, str) and not subset.endswith("2017") else ""
        rows = _joined(content["questions"], annotated["annotations"])
        return _checked(path, rows, lambda row: _vqa(row, folder))
    if answers is not None:
        raise ValueError(f"{path} holds no list 'questions', which {answers} could answer; expected: VQA v2's own file")
    return _checked(path, _listed(path, content), _vqa)


def read_entailment(path: str | Path) -> Annotations:
    """Hypotheses about images: SNLI-VE's lines, or rows {"image", "hypothesis" or "sentence", "label"}.

    Returns:
        Items {"hypothesis", "label": place in `ENTAILMENT_LABELS`, "image_id"}; rows labelled "-" are left out.
    """
    labelled = (
        (place, row)
        for place, row in _listed(path, _content(path))
        if not (isinstance(row, dict) and row.get("gold_label", row.get("label")) == UNLABELLED)
    )
    return _checked(path, labelled, _entailment)


def read_nlvr2(path: str | Path) -> Annotations:
    """Statements on two images: NLVR2's lines, or rows {"images": [left, right], "sentence", "label"}.

    Returns:
        Items {"statement", "label": 1 if true, else 0, "identifier" where the file gives it, "image_id"}.
    """
    return _checked(path, _listed(path, _content(path)), _nlvr2)


def read_refcoco(path: str | Path) -> Annotations:
    """Expressions, each with its box and the boxes to choose from.

    Args:
        path: JSON rows {"image", "sentence" or "text", "box", "proposals"}; `docs/annotations.md` makes them from
            REFER's pickle. Boxes are in pixels of the original image.
    Returns:
        Items {"text", "box": 4 numbers, "proposals": at least one such box, "image_id"}.
    """
    return _checked(path, _listed(path, _content(path)), _refcoco)


def read_sugarcrepe(path: str | Path) -> Annotations:
    """Captions, each with a false one: one thing added, replaced or swapped (SugarCrepe).

    Args:
        path: {"<number>": {"filename", "caption", "negative_caption"}}, or {group: such an object or a list of such
            rows}.
    Returns:
        Items {"caption", "negative_caption", "image_id"}.
    """
    content = _content(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected: an object of rows or of groups of rows")
    of_rows = any(isinstance(row, dict) and "filename" in row for row in content.values())
    groups = {"": content} if of_rows else content
    listed = (
        (group, group_rows if isinstance(group_rows, dict | list) else [group_rows])
        for group, group_rows in groups.items()
    )
    rows = (
        (f"{group} {number}".strip(), row)
        for group, group_rows in listed
        for number, row in (group_rows.items() if isinstance(group_rows, dict) else enumerate(group_rows))
    )
    return _checked(path, rows, _sugarcrepe)


READERS: dict[str, Callable[..., Annotations]] = {
    "vqa": read_vqa,
    "visual_entailment": read_entailment,
    "nlvr2": read_nlvr2,
    "grounding": read_refcoco,
}


def read_answer_list(path: str | Path) -> list[str]:
    """A model's closed list of answers: a JSON list of distinct strings (the paper's has 3,192)."""
    content = _content(path)
    if not isinstance(content, list) or not content or not all(isinstance(answer, str) for answer in content):
        raise ValueError(f"{path}: expected a JSON list of answers, strings, at least one")
    twice = [answer for answer, times in Counter(content).items() if times > 1]
    if twice:
        raise ValueError(f"{path}: {some([*map(repr, twice)], 3)} occur twice; expected: each answer once")
    return content


def check_answer_list(answer_lists: Iterable[Sequence[str]], answers: Sequence[str], name: str) -> None:
    """Refuses a closed list without an answer to any training question; `name` is that of the list."""
    annotated = [answer for group in answer_lists for answer in group]
    if set(answers).isdisjoint(annotated):
        raise ValueError(
            f"{name}: none of its {len(answers)} answers ({some([*map(repr, answers)], 3)}) occurs among the "
            f"{len(annotated)} annotated ones ({some([*map(repr, annotated)], 3)}); expected: a list with some of them"
        )


class AnnotatedPictures:
    """Annotated images by position, decoded when read; `broken_at_open` lists rows with a missing image file.

    Args:
        images: see `find_images`.
    """

    def __init__(
        self,
        annotations: Annotations,
        path: str | Path,
        images: str | Path | None = None,
        *,
        name: str = "",
        root: Path | None = None,
        max_broken_share: float = 0.01,
    ) -> None:
        self.file = Path(path)
        self.name = printable(name or self.file.name.partition(".")[0])
        self.broken_at_open = list(annotations.broken)
        paths = [picture for row in annotations.rows for picture in row.pictures]
        self.images = find_images(paths, self.file, images, root)
        sizes = dict(sizes_of_files(self.images / path for path in dict.fromkeys(paths)))
        kept = []
        for row in annotations.rows:
            missing = [self.images / path for path in row.pictures if not sizes[self.images / path]]
            if missing:
                self.broken_at_open.append(missing_picture(missing[0], sizes[missing[0]]))
            else:
                kept.append(row)
        check_opened(f"{path}: no annotated image", len(kept), self.broken_at_open, max_broken_share)
        self._rows = packed(json.dumps(row, ensure_ascii=False) for row in kept)
        self._sizes = [sizes[self.images / path] for row in kept for path in row.pictures]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item with "image", a Pillow image in RGB, or "images", the left and the right one.

        Raises:
            BrokenSample: an image cannot be read, or a box lies outside of it.
        """
        pictures, item = json.loads(unpacked(self._rows, row_of(index, self)))
        decoded = [read_picture(self.images / path) for path in pictures]
        if "box" in item:
            with named(self.file, f"{item['text']!r} in {pictures[0]}"):
                for key, boxes in (("box", [item["box"]]), ("proposals", item["proposals"])):
                    _check_inside(key, boxes, decoded[0])
        return ({"image": decoded[0]} if len(decoded) == 1 else {"images": decoded}) | item

    def row(self, index: int) -> dict[str, Any]:
        return json.loads(unpacked(self._rows, row_of(index, self)))[1]

    def pictures(self, index: int) -> list[str]:
        return json.loads(unpacked(self._rows, row_of(index, self)))[0]

    def image_id(self, index: int) -> str:
        return " ".join(self.pictures(index))

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self._sizes).encode())
        digest.update(repr(self._rows.to_pylist()).encode())
        for place in sampled_places(len(self)):
            for picture in self.pictures(place):
                digest.update(content_hash(self.images / picture))
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"AnnotatedPictures({self.name!r}, {len(self)} items)"


def open_annotated(
    task: str, path: str | Path, images: str | Path | None = None, answers: str | Path | None = None, **options: Any
) -> AnnotatedPictures:
    """The items of an annotation file with their images.

    Args:
        task: one of `READERS`.
        answers: VQA's annotations, if in a separate file.
        images, options: see `AnnotatedPictures`.
    """
    if task not in READERS:
        raise ValueError(f"unknown task {task!r}; known tasks: {', '.join(READERS)}")
    annotations = READERS[task](path) if answers is None else READERS[task](path, answers)
    return AnnotatedPictures(annotations, path, images, **options)


def _content(path: str | Path) -> Any:
    # of JSON lines a list, with a line that cannot be read as its text
    path = Path(path).expanduser()
    if path.suffix in _PICKLE or (path.is_file() and _first_byte(path) == b"\x80"):
        raise ValueError(
            f"{path} is a pickle, which can run any program when it is loaded, so it is not; expected: JSON rows "
            "{image, sentence, box, proposals}. docs/annotations.md says how to make them of REFER's file"
        )
    if not path.is_file():
        return read_json(path)  # says so
    text = read_text(path)
    lines = [line for line in text.split("\n") if line.strip()]
    if ".jsonl" not in path.name.lower():
        try:
            return parsed_json(text, path)
        except ValueError:
            first = [isinstance(_of_line(line), dict) for line in lines[:10]]
            if len(first) < 2 or 2 * sum(first) < len(first):  # no lines of JSON of which one may be damaged
                raise
    return [_of_line(line) for line in lines]


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1)


def _of_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return line


def _listed(path: str | Path, content: Any) -> Raw:
    if not isinstance(content, list):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected: a list of rows, or one row on each line")
    return ((f"row {number}", row) for number, row in enumerate(content, 1))


def _joined(questions: list[Any], annotations: list[Any]) -> Raw:
    # the questions with the first answers of the same question_id; answers without a question come last
    def question_of(row: Any, otherwise: str) -> str:
        question = row.get("question_id") if isinstance(row, dict) else None
        return str(question) if isinstance(question, int | str) else otherwise  # 7 and "7" are one question

    answers: dict[str, Any] = {}
    for number, row in enumerate(annotations, 1):
        question = question_of(row, f"annotation {number}")
        answers[f"{question}, once more in annotation {number}" if question in answers else question] = row
    for number, row in enumerate(questions, 1):
        answer = answers.pop(question_of(row, ""), {})
        yield f"question {number}", {**answer, **row} if isinstance(row, dict) and isinstance(answer, dict) else row
    for question, row in answers.items():
        yield f"annotation of question {question}", row


def _checked(path: str | Path, rows: Raw, check: Callable[[dict[str, Any]], Annotation]) -> Annotations:
    annotations = Annotations([], [])
    for place, row in rows:
        try:
            if not isinstance(row, dict):  # also a line that cannot be read, of which its text is here
                raise Unusable(f"row is no JSON object: {str(row)[:40]!r}")
            annotations.rows.append(check(row))
        except Unusable as error:
            annotations.broken.append(BrokenSample(path, place, str(error)))
    check_opened(f"{path}: no annotation that can be used", len(annotations.rows), annotations.broken, max_share=1.0)
    return annotations


def _vqa(row: dict[str, Any], prefix: str = "") -> Annotation:
    question, answers = _text(row, "question"), row.get("answers", row.get("answer"))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers:
        raise Unusable(f"missing answers: answers = {str(answers)[:60]}; expected: a list of at least one")
    answers = [answer.get("answer") if isinstance(answer, dict) else answer for answer in answers]
    if not all(isinstance(answer, str) for answer in answers):
        raise Unusable(f"answer is no text: answers = {str(answers)[:60]}; expected: strings")
    answers = [id_text(answer, "answer") for answer in answers]
    path = row["image"] if "image" in row else f"{prefix}{_number(row, 'image_id'):012}.jpg"
    item = {"question": question, "answers": answers, "answer": Counter(answers).most_common(1)[0][0]}
    answer_type = _text(row, "answer_type") if row.get("answer_type") else "other"
    item |= {"answer_type": answer_type, "question_id": row.get("question_id")}
    return _annotation([path], item, row.get("image_id"))


def _entailment(row: dict[str, Any]) -> Annotation:
    label = _choice(row, ENTAILMENT_LABELS, "gold_label", "label")
    image = _text(row, "Flikr30kID", "Flickr30K_ID", "Flickr30kID", "image")
    path = image if PurePosixPath(image).suffix else f"{image}.jpg"
    return _annotation([path], {"hypothesis": _text(row, "hypothesis", "sentence2", "sentence"), "label": label})


def _nlvr2(row: dict[str, Any]) -> Annotation:
    item = {"statement": _text(row, "statement", "sentence"), "label": _choice(row, _TRUTH, "label")}
    paths, identifier = row.get("images"), row.get("identifier")
    if paths is None or identifier is not None:
        identifier = item["identifier"] = _text(row, "identifier")
        parts = identifier.split("-")
        if len(parts) != 4:
            raise Unusable(
                f"identifier of another form: identifier = {identifier!r}; expected: split-set-pair-sentence"
            )
    if paths is None:
        folder = f"{id_text(row['directory'], 'directory')}/" if "directory" in row else ""  # of the training images
        paths = [f"{folder}{'-'.join(parts[:3])}-img{side}.png" for side in range(2)]
    if not isinstance(paths, list) or len(paths) != 2:
        raise Unusable(f"not two images: images = {str(paths)[:80]}; expected: [left, right]")
    return _annotation(paths, item, identifier)


def _refcoco(row: dict[str, Any]) -> Annotation:
    boxes = row.get("proposals")
    if not isinstance(boxes, list) or not boxes:
        raise Unusable(f"no proposals: proposals = {str(boxes)[:60]}; expected: a list of at least one box")
    item = {"text": _text(row, "sentence", "text"), "box": _box("box", row.get("box"))}
    item["proposals"] = [_box(f"proposals[{number}]", box) for number, box in enumerate(boxes)]
    return _annotation([row.get("image")], item, row.get("image_id"))


def _sugarcrepe(row: dict[str, Any]) -> Annotation:
    item = {key: _text(row, key) for key in ("caption", "negative_caption")}
    if item["caption"] == item["negative_caption"]:
        raise Unusable(f"negative_caption is the caption: {item['caption'][:60]!r}; expected: another text")
    return _annotation([row.get("filename")], item)


def _annotation(paths: Sequence[Any], item: dict[str, Any], image_id: Any = None) -> Annotation:
    pictures = tuple(picture_path(path) for path in paths)
    item["image_id"] = PurePosixPath(pictures[0]).stem if image_id is None else id_text(image_id)
    return Annotation(pictures, item)


def _text(row: dict[str, Any], *keys: str) -> str:
    key = next((key for key in keys if key in row), None)
    if key is None:
        raise Unusable(f"missing {keys[0]}: keys {some([*map(str, row)], 6)}; expected: {' or '.join(keys)}")
    if not isinstance(row[key], str) or not row[key].strip():
        raise Unusable(f"{keys[0]} is no text: {key} = {str(row[key])[:60]!r}; expected: a string with a visible sign")
    return id_text(row[key], key)


def _choice(row: dict[str, Any], labels: Sequence[str], *keys: str) -> int:
    key = next((key for key in keys if key in row), " or ".join(keys))
    small = [label.lower() for label in labels]
    if str(row.get(key)).lower() not in small:
        raise Unusable(f"unknown label: {key} = {row.get(key)!r}; expected one of: {', '.join(labels)}")
    return small.index(str(row[key]).lower())


def _number(row: dict[str, Any], key: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", str(row.get(key))):
        raise Unusable(f"missing image: {key} = {row.get(key)!r}; expected: COCO's number of it, or its path as image")
    return int(row[key])


def _box(key: str, box: Any) -> list[float]:
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
        raise Unusable(f"not a box: {key} = {str(box)[:60]}; expected: [x, y, width, height] in pixels")
    if min(box[2:]) <= 0:
        raise Unusable(f"box without area: {key} = {box}; expected: width and height above 0")
    if max(map(abs, box)) <= 1 and any(value % 1 for value in box):
        raise Unusable(
            f"box in fractions of the image: {key} = {box}; expected [x, y, width, height] in pixels: multiply x and "
            "width by the image's width, y and height by its height"
        )
    return box


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1.0e9  # nor nan


def _check_inside(key: str, boxes: Sequence[Sequence[float]], picture: Image.Image) -> None:
    for box in boxes:
        x, y, width, height = box
        if min(x, y) < -_RIM or x + width > picture.width + _RIM or y + height > picture.height + _RIM:
            raise Unusable(
                f"box outside the image: {key} = {box}, which has {picture.width} x {picture.height} pixels; "
                "expected: boxes in pixels of the upright image"
            )
