"""common/data/annotated.py: published layouts, what is refused and how it is said, local copies to the last row."""

import json
import pickle
import statistics
import tarfile
from functools import partial

import pytest
from PIL import Image
from refusals import refused

from common.base.settings import DataConfig
from common.data.annotated import (
    READERS,
    check_answer_list,
    open_annotated,
    read_answer_list,
    read_entailment,
    read_nlvr2,
    read_refcoco,
    read_sugarcrepe,
    read_vqa,
)
from common.data.broken import BrokenSample
from common.data.scenes import ANNOTATION_TASKS, annotation_task
from common.evaluation.annotated import best_answers, vqa_metrics, vqa_score
from geomm.lookalikes import SugarCrepeFiles, open_lookalikes

QUESTION = {"question_id": 7, "image_id": 42, "question": "What is it?"}
ANSWERS = {"question_id": 7, "image_id": 42, "answer_type": "other", "answers": [{"answer": "cat"}] * 3}
VQA = {"image": "a.png", "question": "What is it?", "answer": ["a cat", "cat", "cat"], "question_id": 7}
ENTAILMENT = {"gold_label": "neutral", "sentence2": "A man sleeps.", "Flikr30kID": "a"}
NLVR2 = {"identifier": "train-1-2-0", "sentence": "Both are cats.", "label": "True", "directory": 7}
BOX = {"image": "a.png", "sentence": "left cat", "box": [1, 2, 5, 6], "proposals": [[0, 0, 4, 4], [1, 2, 5, 5]]}


def written(folder, content, name="rows.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def picture(path, size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (9, 99, 199)).save(path)


def test_vqa_questions_and_annotations_are_joined_by_their_ids(tmp_path):
    later = {**QUESTION, "question_id": 8}
    questions = written(
        tmp_path,
        {"data_subtype": "val2014", "questions": [later, QUESTION, {**QUESTION, "question_id": [7]}]},
        "q.json",
    )
    again = {**ANSWERS, "answers": [{"answer": "dog"}]}
    as_text = {**ANSWERS, "question_id": "7"}
    answers = written(tmp_path, {"annotations": [as_text, {**ANSWERS, "question_id": 9}, again]}, "a.json")
    annotations = read_vqa(questions, answers)
    assert annotations.rows == [
        (
            ("COCO_val2014_000000000042.jpg",),
            {
                "question": "What is it?", "answers": ["cat"] * 3, "answer": "cat", "answer_type": "other",
                "question_id": 7, "image_id": "42",
            },
        )
    ]  # fmt: skip
    assert [(sample.key, sample.reason.split(":")[0]) for sample in annotations.broken] == [
        ("question 1", "missing answers"), ("question 3", "missing answers"),
        ("annotation of question 9", "missing question"),
        ("annotation of question 7, once more in annotation 3", "missing question"),
    ]  # fmt: skip
    refused(
        (r"q\.json holds only questions; expected: also the file of their annotations", lambda: read_vqa(questions)),
        (r"q\.json: expected an object with a list 'annotations'", lambda: read_vqa(questions, questions)),
        (r"a\.json holds a dict; expected: a list of rows, or one row on each line", lambda: read_vqa(answers)),
    )


def test_items_have_the_keys_of_the_scenes(tmp_path):
    for name in ("a.png", "a.jpg", "7/train-1-2-img0.png", "7/train-1-2-img1.png"):
        picture(tmp_path / name)
    files = {"vqa": VQA, "visual_entailment": ENTAILMENT, "nlvr2": NLVR2, "grounding": BOX}
    assert READERS.keys() == files.keys() <= ANNOTATION_TASKS.keys()
    for task, row in files.items():
        items = open_annotated(task, written(tmp_path, [row, row]), tmp_path)
        # only scenes have an answer list of their own, and with it these keys
        of_scenes = {"label", "answer_type"} if task in ("vqa", "grounding") else set()
        assert items[1].keys() >= annotation_task(task, 1, 16)[0].keys() - of_scenes
        assert items.row(1) == {
            key: value for key, value in items[1].items() if not key.startswith("image") or key == "image_id"
        }
        if task == "nlvr2":
            assert [image.size for image in items[1]["images"]] == [(12, 10)] * 2


def test_published_and_simplified_rows_say_the_same(tmp_path):
    def read(reader, *rows):
        lines = "\n".join(json.dumps(row) for row in rows) + "\n"
        assert reader(written(tmp_path, lines)) == reader(written(tmp_path, list(rows)))
        return reader(written(tmp_path, lines)).rows

    one, other = read(read_entailment, ENTAILMENT, {"image": "a", "sentence": "A man sleeps.", "label": "NEUTRAL"})
    assert one == other == (("a.jpg",), {"hypothesis": "A man sleeps.", "label": 1, "image_id": "a"})
    # "-": no label was agreed on, and nothing is wrong with the row
    unlabelled = read_entailment(written(tmp_path, [ENTAILMENT, {**ENTAILMENT, "gold_label": "-"}]))
    assert (len(unlabelled.rows), unlabelled.broken) == (1, [])
    lists = {"images": ["7/train-1-2-img0.png", "7/train-1-2-img1.png"], "sentence": "Both are cats.", "label": "false"}
    one, other = read(read_nlvr2, NLVR2, lists)
    assert one.pictures == other.pictures
    assert (one.item["label"], other.item["label"]) == (1, 0)
    assert one.item["identifier"] == "train-1-2-0"


@pytest.mark.parametrize(
    ("reader", "good", "changes", "reason"),
    [
        (read_entailment, ENTAILMENT, {"gold_label": "maybe"}, "label: gold_label = 'maybe'; expected one of: contra"),
        (read_entailment, ENTAILMENT, {"sentence2": 3}, "hypothesis is no text: sentence2 = '3'; expected: a string"),
        (read_nlvr2, NLVR2, {"images": ["a.png"]}, "not two images: images = ['a.png']; expected: [left, right]"),
        (read_nlvr2, NLVR2, {"identifier": "dev-1"}, "identifier = 'dev-1'; expected: split-set-pair-sentence"),
        (read_nlvr2, NLVR2, {"images": ["a.png", "b.png"], "identifier": "dev-1"}, "identifier = 'dev-1'; expected"),
        (read_nlvr2, NLVR2, {"label": None}, "unknown label: label = None; expected one of: False, True"),
        (read_vqa, VQA, {"answer": []}, "missing answers: answers = []; expected: a list of at least one"),
        (read_vqa, VQA, {"answer": ["a", "\ud800"]}, "answer has half a surrogate pair"),
        (read_vqa, VQA, {"answer_type": ["other"]}, "answer_type is no text"),
        (read_vqa, {**QUESTION, "answers": ["a"]}, {"image_id": "1" * 5000}, "missing image: image_id = '111"),
        (read_vqa, VQA, {"image": ""}, "missing image: its path is ''"),
        (read_refcoco, BOX, {"proposals": []}, "no proposals: proposals = []; expected: a list of at least one box"),
        (read_refcoco, BOX, {"box": [0.1, 0.2, 0.5, 0.6]}, "box in fractions of the image: box = [0.1, 0.2, 0."),
        (read_refcoco, BOX, {"box": [1, 2, 0, 3]}, "box without area: box = [1, 2, 0, 3]; expected: width"),
        (read_refcoco, BOX, {"proposals": [[1, 2, 3]]}, "not a box: proposals[0] = [1, 2, 3]; expected: [x"),
        (read_refcoco, BOX, {"box": [1, 2, 3, float("nan")]}, "not a box: box = [1, 2, 3, nan]"),
        (read_refcoco, BOX, {"box": [1, 2, 10**400, 3]}, "not a box: box = [1, 2, 1000"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_is_named(tmp_path, reader, good, changes, reason):
    path = written(tmp_path, [good, {**good, **changes}, "text"])
    annotations = reader(path)
    assert len(annotations.rows) == 1
    assert [(sample.path, sample.key) for sample in annotations.broken] == [(str(path), "row 2"), (str(path), "row 3")]
    assert reason in str(annotations.broken[0])
    assert annotations.broken[1].reason == "row is no JSON object: 'text'"


def test_a_cut_line_is_one_broken_row(tmp_path):
    lines = json.dumps(ENTAILMENT) + "\r\n\r\n" + json.dumps(ENTAILMENT)[:20] + "\n" + json.dumps(ENTAILMENT) + "\n\n"
    annotations = read_entailment(written(tmp_path, lines, "rows.jsonl"))
    assert (len(annotations.rows), [sample.key for sample in annotations.broken]) == (2, ["row 2"])
    nothing = r"no annotation that can be used; first fault: .*rows.json \[row 1\]"
    refused(
        (r"rows\.json: not valid JSON", lambda: read_entailment(written(tmp_path, "[1, 2"))),
        (nothing, lambda: read_entailment(written(tmp_path, ["text"]))),
        ("unknown label: gold_label or label = None", lambda: read_entailment(written(tmp_path, [{"image": "b"}]))),
    )


def test_a_pickle_is_not_loaded(tmp_path):
    for name, protocol in (("refs(unc).p", 0), ("refs.json", 2)):
        path = tmp_path / name
        path.write_bytes(pickle.dumps([BOX], protocol))
        refused((r"is a pickle, which can run any .* expected: JSON rows", partial(read_refcoco, path)))


def test_boxes_outside_of_the_picture_are_named_when_it_is_read(tmp_path):
    picture(tmp_path / "a.png")
    good = {**BOX, "box": [7, 3, 5.6, 7]}  # rounded: less than a pixel outside
    rows = [good, {**BOX, "box": [8, 2, 6, 6]}, {**BOX, "proposals": [[0, 0, 3, 3], [-2, 0, 4, 4]]}]
    items = open_annotated("grounding", written(tmp_path, rows), tmp_path)
    assert items[0]["box"] == [7, 3, 5.6, 7]
    named = "rows.json .*'left cat' in a.png.*box outside the image: "
    refused(
        (named + r"box = \[8, 2, 6, 6\], which has 12 x 10 pixels", lambda: items[1]),
        (named + r"proposals = \[-2, 0, 4, 4\]", lambda: items[2]),
        error=BrokenSample,
    )


def test_a_damaged_line_of_json_lines_is_one_row_wherever_it_stands(tmp_path):
    picture(tmp_path / "a.png")
    good = json.dumps({"image": "a.png", "hypothesis": "it is red", "label": "neutral"})
    for lines in (["{", good, good], [good, "{", good]):
        path = tmp_path / "rows.JSONL"
        path.write_text("\n".join(lines))
        (tmp_path / "rows.json").write_text("\n".join(lines))
        for file in (path, tmp_path / "rows.json"):
            items = open_annotated("visual_entailment", file, tmp_path, max_broken_share=1)
            assert (len(items), len(items.broken_at_open)) == (2, 1)
    path.write_text(good)  # one line, whatever the case of the ending
    assert len(open_annotated("visual_entailment", path, tmp_path)) == 1
    (tmp_path / "rows.json").write_text(f"[\n{good},\n{good}\n{good}]")  # a list that lacks a comma
    refused(
        ("rows.json: not valid JSON: .* line 4", lambda: open_annotated("visual_entailment", tmp_path / "rows.json"))
    )


def test_a_box_of_one_pixel_is_no_fraction(tmp_path):
    picture(tmp_path / "a.png")
    rows = [{**BOX, "proposals": [BOX["box"], [0, 0, 1, 1]]}, {**BOX, "box": [0, 0.5, 1, 0.5]}]
    items = open_annotated("grounding", written(tmp_path, rows), tmp_path, max_broken_share=1)
    assert items[0]["proposals"][1] == [0, 0, 1, 1]
    assert "box in fractions of the image" in str(items.broken_at_open)


def test_a_row_without_one_of_its_pictures_is_counted(tmp_path):
    picture(tmp_path / "images" / "left.png")
    picture(tmp_path / "images" / "right.png")
    pairs = [["left.png", "right.png"], ["left.png", "gone.png"]]
    path = written(tmp_path, [{"images": pair, "sentence": "Both.", "label": True} for pair in pairs])
    items = open_annotated("nlvr2", path)  # the folder is found
    assert (len(items), items.images.name) == (1, "images")
    assert [str(sample) for sample in items.broken_at_open] == [
        f"{tmp_path}/images/gone.png: missing image: no such file"
    ]
    rows = [{"images": pairs[number % 50 == 0], "sentence": f"{number}", "label": True} for number in range(200)]
    again = written(tmp_path, rows, "many.json")
    refused(
        ("4 of 200 samples are broken .* missing", lambda: open_annotated("nlvr2", again, max_broken_share=0.001)),
        ("unknown task 'vcr'; known tasks: vqa, visual_entailment, nlvr2", lambda: open_annotated("vcr", path)),
    )
    before = items.fingerprint
    picture(tmp_path / "images" / "right.png", size=(13, 10))
    assert open_annotated("nlvr2", path).fingerprint != before


def test_answer_lists(tmp_path):
    assert read_answer_list(written(tmp_path, ["yes", "no"])) == ["yes", "no"]
    annotated = [["yes", "yes", "no"], ["blue"]]
    check_answer_list(annotated, ["yes", "2"], "a.json")
    none = r"a.json: none of its 1 answers \('2'\) occurs among the 4 annotated ones"
    refused(
        (r"rows\.json: 'yes' occur twice", lambda: read_answer_list(written(tmp_path, ["yes", "no", "yes"]))),
        ("expected a JSON list of answers", lambda: read_answer_list(written(tmp_path, {"yes": 1}))),
        (none, lambda: check_answer_list(annotated, ["2"], "a.json")),
    )


def test_the_best_attainable_answers_equal_trying_all():
    questions = [
        ["cat"] * 10, ["two"] * 10, ["a cat", "cat", "dog", *"abcdefg"], [*"abcdefghij"], ["two"] * 9 + ["3"],
        ["Dog"] * 10,
    ]  # fmt: skip
    closed = ["2", "cat", "two", "dog", "j"]
    for choice, candidates in ((None, [answer for group in questions for answer in group]), (closed, closed)):
        for answers, best in zip(questions, best_answers(questions, choice)):
            assert vqa_score(best, answers) == max(vqa_score(answer, answers) for answer in candidates)
            assert not best or best in candidates
    assert best_answers(questions, closed) == ["cat", "two", "cat", "j", "2", None]


def test_no_answer_is_not_right_where_the_rules_leave_nothing_of_an_answer():
    answers = ["a"] * 9 + ["b"]
    assert best_answers([answers], ["yes"]) == [None]
    assert vqa_score(None, answers) == vqa_score("yes", answers) == 0
    assert vqa_score("the", answers) == 1  # as the official code has it


def test_local_copies_are_read_to_the_last_row_and_oracles_score_what_can_be_attained(data_dir):
    folder = data_dir / "annotations"
    files = [
        read_vqa(folder / "vqa_v2_sample.jsonl.gz"), read_entailment(folder / "snli_ve_relabelled_sample.jsonl.gz"),
        *(read_nlvr2(folder / f"nlvr2_{part}.jsonl.gz") for part in ("dev", "test1")),
    ]  # fmt: skip
    assert [len(annotations.rows) for annotations in files] == [11_970, 338, 6_982, 6_967]
    assert not any(annotations.broken for annotations in files)

    answers = [row.item["answers"] for row in files[0].rows]
    assert {len(group) for group in answers} == {10}
    closed = dict.fromkeys(read_answer_list(folder / "vqa_answer_list.json.gz"))
    assert sum(closed.keys().isdisjoint(group) for group in answers) == 254
    types = dict(enumerate(row.item["answer_type"] for row in files[0].rows))
    oracle = vqa_metrics(dict(enumerate(best_answers(answers))), dict(enumerate(answers)), types)
    assert oracle["accuracy"] == pytest.approx(0.96657, abs=1e-5)  # where no four agree, 1 cannot be attained
    best = best_answers(answers, list(closed))
    assert statistics.fmean(map(vqa_score, best, answers)) == pytest.approx(0.931495, abs=1e-6)


def test_sugarcrepe_groups_are_one_list(tmp_path, data_dir):
    row = {"filename": "000000000042.jpg", "caption": "a cat", "negative_caption": "a dog"}
    bad = {number: {**row, "negative_caption": text} for number, text in (("1", ""), ("2", "a cat"))}
    annotations = read_sugarcrepe(written(tmp_path, {"0": row, **bad}))
    item = {"caption": "a cat", "negative_caption": "a dog", "image_id": "000000000042"}
    assert annotations.rows == [(("000000000042.jpg",), item)]
    assert [(sample.key, sample.reason.split(":")[0]) for sample in annotations.broken] == [
        ("1", "negative_caption is no text"),
        ("2", "negative_caption is the caption"),
    ]
    for groups in ({"swap": [row], "add": [row]}, {"swap": {"0": row}, "add": {"0": row}}):
        assert read_sugarcrepe(written(tmp_path, groups)).rows == 2 * annotations.rows
    data = DataConfig(source="shards", root="x")
    refused(
        (r"rows.json \[swap 0\]: row is no JSON object", lambda: read_sugarcrepe(written(tmp_path, {"swap": None}))),
        ("holds a list; expected: an object of rows or of groups", lambda: read_sugarcrepe(written(tmp_path, [row]))),
        (r"sugarcrepe\.pairs is empty; expected: SugarCrepe's", lambda: open_lookalikes(data, SugarCrepeFiles())),
    )

    path = data_dir / "annotations" / "sugarcrepe.json.gz"
    local = read_sugarcrepe(path)
    assert (len(local.rows), local.broken) == (7_511, [])
    wanted = {row.pictures[0] for row in local.rows}
    for shard in (data_dir / "coco_mini").glob("*.tar"):
        with tarfile.open(shard) as members:
            members.extractall(tmp_path, [member for member in members if member.name in wanted], filter="data")
    pairs = open_lookalikes(data, SugarCrepeFiles(str(path), str(tmp_path)))
    assert (len(pairs.pictures), len(pairs.triples)) == (1_606, 1_606)
    index, true, false = pairs.triples[-1]
    assert (index, pairs.pictures.row(index)["caption"]) == (1_605, true) != (1_605, false)
