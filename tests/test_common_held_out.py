"""Validation splits: what is held out is never trained on, never tested, and stays when files are added."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from tars import pair, write_tar

from common.base.settings import DataConfig, MixedSet
from common.base.vision_settings import VisionDataConfig
from common.data.broken import BrokenSample, TooManyBroken
from common.data.held_out import is_held_out, split_off
from common.data.labelled import open_labelled_sets, open_labelled_validation
from common.data.pairs import open_evaluation_sets, open_training_pairs, open_validation_pairs, open_validation_sets
from common.data.scenes import annotation_task, classification_task
from common.run import pictures
from geomm.downstream.config import TaskData
from geomm.downstream.data import open_test_sets, open_training_set
from geomm.downstream.data import open_validation_sets as open_task_validation


class Named(list):
    """A set of pictures with ids."""

    name = "named"

    def __init__(self, ids):
        super().__init__({"image_id": one} for one in ids)
        self.fingerprint = str(hash(tuple(ids)))

    def image_id(self, index):
        return self[index]["image_id"]


def ids_of(data_set):
    return {data_set[index]["image_id"] for index in range(len(data_set))}


def pixels_in(data_set):
    return {_pixels_of(data_set[index]) for index in range(len(data_set))}


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_the_share_is_that_of_a_fair_draw(share):
    count, held = 20_000, sum(is_held_out(f"picture {number}.jpg", share) for number in range(20_000))
    assert abs(held - share * count) < 4 * np.sqrt(count * share * (1 - share))  # binomial, 4 standard deviations


def test_a_larger_share_holds_the_pictures_of_a_smaller_one():
    ids = [f"{number}.png" for number in range(2_000)]
    small, large = ({one for one in ids if is_held_out(one, share)} for share in (0.05, 0.2))
    assert small < large
    assert not any(is_held_out(one, 0.0) for one in ids)
    assert all(is_held_out(one, 1.0) for one in ids)


def test_a_picture_stays_on_its_side_when_others_come_and_in_another_order():
    few, many = [f"{number}.jpg" for number in range(50)], [f"{number}.jpg" for number in range(199, -1, -1)]
    before, after = split_off(Named(few), 0.2), split_off(Named(many), 0.2)
    for side in ("training", "validation"):
        assert ids_of(getattr(before, side)) == ids_of(getattr(after, side)) & set(few)
    assert ids_of(after.training) | ids_of(after.validation) == set(many)
    assert not ids_of(after.training) & ids_of(after.validation)
    assert len({before.training.fingerprint, before.validation.fingerprint, after.training.fingerprint}) == 3


def test_a_set_that_cannot_be_split_is_refused():
    stream, mixture = (
        SimpleNamespace(name="a stream", forward_only=True, image_id=str),
        SimpleNamespace(name="a mixture"),
    )
    refused(
        ("a stream has no random access", lambda: split_off(stream, 0.1)),
        ("a mixture has no random access", lambda: split_off(mixture, 0.1)),
        ("at least one on each side", lambda: split_off(Named(["a"]), 0.1)),
    )


def test_scenes_are_drawn_for_validation_and_no_picture_is_of_two_parts():
    for make in (lambda part: classification_task("vtab/shape", 40, 16, part=part),
                 lambda part: annotation_task("nlvr2", size=40, image_size=16, part=part)):  # fmt: skip
        train, val, test = (pixels_in(make(part)) for part in ("train", "val", "test"))
        assert not val & (train | test)


def _pixels_of(item):
    """Of one picture or of all of an item."""
    return tuple(np.asarray(picture).tobytes() for picture in item.get("images", [item.get("image")]))


# ---------------------------------------------------------------- labelled pictures


def class_folders(root, parts):
    for place, part in enumerate(parts):
        for label in ("cat", "dog"):
            for number in range(30):
                path = root / part / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8, 3), 40 * place + number, np.uint8)).save(path)
    return root


def test_zero_shot_accuracy_during_training_is_of_no_picture_that_is_tested(tmp_path):
    root = class_folders(tmp_path / "labelled" / "zoo", ("train", "test"))
    (root / "classnames.txt").write_text("cat\ndog\n")
    (root / "zeroshot_classification_templates.txt").write_text("{}\n")
    validation, test = open_labelled_validation(tmp_path / "labelled"), open_labelled_sets(tmp_path / "labelled")["zoo"]
    assert (validation.name, len(validation), validation.class_names) == ("zoo-train", 60, ["cat", "dog"])
    assert not pixels_in(validation) & pixels_in(test)


def vision_data(root, **values):
    return VisionDataConfig(source="folders", root=str(root), image_size=8, **values)


def vision_config(data, **run):
    evaluation = SimpleNamespace(monitor_bank=40, monitor_queries=15)
    optim, method = SimpleNamespace(global_batch_size=4), SimpleNamespace(name="moco_v2")
    run = SimpleNamespace(**{"seed": 0, "test": True, "evaluate_every": 1, **run})
    return SimpleNamespace(data=data, evaluation=evaluation, optim=optim, method=method, run=run)


def test_class_folders_lose_training_pictures_only_if_the_config_asks_for_it(tmp_path):
    root = class_folders(tmp_path / "animals", ("train", "test", "dev"))
    whole = pictures.open_training_set(vision_data(root))
    assert len(whole) == 60
    share = vision_data(root, val_share=0.25)
    rest, held = pictures.open_training_set(share), pictures.open_validation_set(share)
    assert len(rest) + len(held) == 60
    assert not ids_of(rest) & ids_of(held)
    other = vision_data(root, val="dev")
    assert (len(pictures.open_training_set(other)), pictures.open_validation_set(other).name) == (60, "animals-val")


@pytest.mark.parametrize("values", [{}, {"val_share": 0.25}, {"val": "dev"}])
def test_no_test_picture_is_classified_during_training(tmp_path, values):
    root = class_folders(tmp_path / "animals", ("train", "test", "dev"))
    data = vision_data(root, **values)
    training = pictures.open_vision_training(vision_config(data), pictures.open_training_set(data), None)
    assert len(training.queries)
    assert not pixels_in(training.queries) & pixels_in(training.test_set)
    assert not (ids_of(training.bank) & ids_of(training.queries)) or values == {"val": "dev"}  # other folders


def test_a_search_on_class_folders_opens_no_test_set_and_needs_a_validation_set(tmp_path):
    root = class_folders(tmp_path / "animals", ("train",))  # there is no test folder
    data = vision_data(root, val_share=0.25)
    training = pictures.open_vision_training(vision_config(data, test=False), pictures.open_training_set(data), None)
    assert training.test_set is None
    without = vision_config(vision_data(root), test=False)
    words = r"has no validation set: data\.val is empty and data.val_share is 0"
    refused((words, lambda: pictures.open_vision_training(without, training.pictures, None)))


def test_settings_of_validation_that_exclude_each_other_are_refused():
    mixture = (MixedSet(train="a.tar"), MixedSet(train="b.tar"))
    mixed = "data.val_share = 0.1 with data.mixture; expected data.val"
    refused(
        ("expected", lambda: VisionDataConfig(source="scenes", root="x", val_share=0.1)),
        ("expected", lambda: VisionDataConfig(source="folders", root="x", val="dev", val_share=0.1)),
        ("expected", lambda: VisionDataConfig(source="cifar10", root="x", val="a")),
        (mixed, lambda: DataConfig(source="shards", val_share=0.1, mixture=mixture)),
    )


# ---------------------------------------------------------------- annotated tasks and captioned scenes


def test_validation_of_scenes_is_of_no_other_set():
    data = DataConfig(num_train=50, num_test=30, num_labelled=30, image_size=16, num_val=30)
    pairs, task = open_validation_sets(data)
    sets = open_evaluation_sets(data)
    others = [open_training_pairs(data, 0), *sets.retrieval.values(), *sets.zero_shot.values()]
    for other in others:
        assert not (ids_of(pairs) | ids_of(task)) & ids_of(other)


def nlvr2_files(root):
    (root / "pictures").mkdir()
    for number in range(60):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(root / "pictures" / f"{number}.png")
    for part, first in (("train", 0), ("dev", 40), ("test", 50)):
        rows = [
            {"images": [f"{number}.png", f"{number + 1}.png"], "sentence": f"{word} {number}", "label": "True"}
            for number in range(first, first + (40 if part == "train" else 10) - 1, 2)
            for word in ("one", "two")
        ]
        (root / f"{part}.json").write_text(json.dumps(rows))
    return root


def task_data(root, **values):
    files = {"train": "train.json", "val": "dev.json", "test": "test.json", "images": "pictures"}
    return TaskData(task="nlvr2", source="karpathy", root=str(root), image_size=8, **files, **values)


def test_statements_are_held_out_by_their_pictures_and_dev_is_reported_only(tmp_path):
    root = nlvr2_files(tmp_path)
    whole = open_training_set(task_data(root), 0)
    assert len(whole) == 40
    refused((r"data.val_share = 0 .* data.val is reported as dev", lambda: open_task_validation(task_data(root))))
    data = task_data(root, val_share=0.3)
    rest, (held,) = open_training_set(data, 0), open_task_validation(data)
    assert len(rest) + len(held) == 40
    assert not pixels_in(rest) & pixels_in(held)  # both statements on two pictures lie on one side
    assert [len(set_) for set_ in open_task_validation(replace(data, num_val=5))] == [5]
    assert [len(set_) for set_ in open_task_validation(TaskData(task="nlvr2", image_size=16, num_val=4))] == [4]
    first = {"nlvr2_dev": "one 40", "nlvr2_test": "one 50", "nlvr2_exchanged": "one 50"}
    for role, items in open_test_sets(data).items():
        assert items[0]["statement"] == first[role]
        assert not pixels_in(held) & pixels_in(items)


def test_a_picture_of_pairs_on_both_sides_is_refused(tmp_path):
    rows = json.loads((nlvr2_files(tmp_path) / "train.json").read_text())
    for row in rows:
        row["images"][1] = "0.png"
    (tmp_path / "train.json").write_text(json.dumps(rows))
    data = task_data(tmp_path, val_share=0.3)
    refused((r"nlvr2-train has '0\.png' in several pairs, on both sides; expected data\.val",
             lambda: open_training_set(data, 0)))  # fmt: skip


def test_an_image_without_a_usable_id_stays_in_training():
    class SomeBroken(Named):
        def image_id(self, index):
            if index == 3:
                raise BrokenSample("named", "3", "image_id has the wrong type")
            return super().image_id(index)

    assert 3 in split_off(SomeBroken([str(number) for number in range(40)]), 0.5).training._rows


@pytest.mark.parametrize("layout", ["coco", "karpathy"])
def test_a_file_that_lists_an_image_for_each_caption_is_not_split(tmp_path, layout):
    (tmp_path / "images").mkdir()
    for number in range(20):
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{number}.jpg")
    entries = [{"id": 2 * n + c, "file_name": f"{n}.jpg", "caption": "a"} for n in range(20) for c in range(2)]
    content = {"images": entries, "annotations": [{**entry, "image_id": entry["id"]} for entry in entries]}
    if layout == "karpathy":
        named = [{"filename": entry["file_name"], "sentences": [{"raw": "a"}], "split": "train"} for entry in entries]
        content = {"images": named}
    (tmp_path / "train.json").write_text(json.dumps(content))
    data = DataConfig(source="karpathy", root=str(tmp_path), images="images", train="train.json", val_share=0.3)
    assert len(open_training_pairs(data, 0)) > 20
    refused(("20 x duplicate ", lambda: open_validation_pairs(data)), error=TooManyBroken)


def test_lines_of_a_caption_file_are_captions_of_the_share_that_is_ranked(tmp_path):
    write_tar(
        tmp_path / "train.tar", {f"{number:02}": pair(number, json=None, txt=b"a dog\na cat") for number in range(40)}
    )
    data = DataConfig(source="shards", root=str(tmp_path), train="train.tar", val_share=0.3)
    assert open_training_pairs(data, 0).captions(0) == ["a dog\na cat"]
    assert open_validation_pairs(data).captions(0) == ["a dog", "a cat"]


def test_a_shard_of_another_folder_moves_no_picture(tmp_path):
    data, held_out = DataConfig(source="shards", root=str(tmp_path), train="*/*.tar", val_share=0.3), []
    for place in range(2):
        (tmp_path / f"{place}").mkdir()
        samples = {f"{key:02}": pair(0, json=None, txt=f"{place} {key}".encode()) for key in range(40)}
        write_tar(tmp_path / f"{place}" / f"train-{place}.tar", samples)
        validation = open_validation_pairs(data)
        held_out.append([validation.captions(row)[0] for row in range(len(validation))])
    before, after = held_out
    assert before == [text for text in after if text.startswith("0")] != after
    assert before == [f"0 {key}" for key in range(40) if is_held_out(f"train-0/{key:02}", 0.3)]


def test_an_image_in_several_samples_of_shards_is_not_ranked_against_itself(tmp_path):
    samples = {
        f"{number:02}": pair(number, json=json.dumps({"caption": "a", "image_id": number // 4}).encode())
        for number in range(40)
    }
    write_tar(tmp_path / "train.tar", samples)
    data = DataConfig(source="shards", root=str(tmp_path), train="train.tar", val_share=0.3)
    refused(("occurs twice, in sample", lambda: open_validation_pairs(data)))
