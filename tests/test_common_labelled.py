"""common/data/labelled.py: image folders, tar shards; classes, subsets, faults."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from readable import pixels_of
from refusals import refused
from tars import jpeg, write_tar

from common.data.broken import BrokenSample
from common.data.labelled import (
    open_image_folder,
    open_labelled_sets,
    open_labelled_validation,
    open_webdataset,
)

TEMPLATES = ["a photo of a {}.", "a {}."]


def put(path: Path, number: int = 0, kind: str = "JPEG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(number, kind=kind))
    return path


def pixels(number: int, kind: str = "JPEG") -> bytes:
    return pixels_of(jpeg(number, kind=kind))


def as_plain(sample):
    return np.asarray(sample["image"]).tobytes(), sample["label"]


def content_of(pictures):
    return [as_plain(pictures[index]) for index in range(len(pictures))]


# --- names that cannot be opened, names that are no UTF-8 -------------------------------------------------------------


def with_names(folder, *names, templates=("a {}",)):
    """The two files of names that make a folder a labelled set."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{text}\n" for text in templates))
    return folder


def labelled(root, name="imagenet"):
    for number, label in enumerate(("a", "b")):
        put(root / name / label / "0.jpg", number)
    return with_names(root / name, "a", "b").parent


@pytest.mark.parametrize("name", ["imagenet_v2", "imagenet/c", "imagenet_v2/classnames.txt"])
def test_a_set_or_a_class_that_is_a_link_to_nothing_is_refused(tmp_path, name):
    place = labelled(tmp_path) / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to("/annex/gone")
    refused((rf"{name}, a link to /annex/gone, cannot be opened: No such file", lambda: open_labelled_sets(tmp_path)))


def test_pictures_in_a_linked_folder_belong_to_the_class(tmp_path):
    put(tmp_path / "disk" / "2.jpg", 2)
    (labelled(tmp_path / "sets") / "imagenet" / "a" / "more").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "around").symlink_to(tmp_path / "disk")
    pictures = open_labelled_sets(tmp_path / "sets")["imagenet"]
    assert content_of(pictures) == [(pixels(0), 0), (pixels(2), 0), (pixels(1), 1)]
    assert pictures.broken_at_open == []


def test_folders_and_pictures_whose_names_are_no_utf8_are_read(tmp_path):
    latin = os.fsdecode("é".encode("latin-1"))
    (pictures,) = open_labelled_sets(labelled(tmp_path / latin, latin)).values()
    assert pictures.name == r"\udce9"
    (tmp_path / latin / latin / "a" / "0.jpg").rename(tmp_path / latin / latin / "a" / f"{latin}.jpg")
    (pictures,) = open_labelled_sets(tmp_path / latin).values()
    assert content_of(pictures) == [(pixels(0), 0), (pixels(1), 1)]
    assert pickle.loads(pickle.dumps(pictures))[0]["image_id"] == f"a/{latin}.jpg"
    assert len(pictures.fingerprint) == 64


# --- image folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Three classes; their sorted folder names are the label order."""
    for name, numbers in (("n02", [2, 3]), ("n01", [0, 1]), ("n10", [4])):
        for number in numbers:
            put(tmp_path / "set" / name / f"{number}.JPEG", number)
    put(tmp_path / "set" / "n01" / "deeper" / "5.png", 5, "PNG")
    (tmp_path / "set" / "n01" / ".hidden").write_bytes(b"x")
    put(tmp_path / "set" / "n02" / ".ipynb_checkpoints" / "2-checkpoint.JPEG", 2)
    (tmp_path / "set" / "n01" / "Thumbs.db").write_bytes(b"x")
    return tmp_path / "set"


def test_sorted_folder_names_are_the_label_order(folder):
    pictures = open_image_folder(folder, ["cat", "dog", "emu"], TEMPLATES)
    assert content_of(pictures) == [
        (pixels(0), 0),
        (pixels(1), 0),
        (pixels(5, "PNG"), 0),
        (pixels(2), 1),
        (pixels(3), 1),
        (pixels(4), 2),
    ]
    assert pictures[2]["image_id"] == "n01/deeper/5.png"
    assert (pictures.name, pictures.class_names, pictures.templates) == ("set", ["cat", "dog", "emu"], TEMPLATES)
    assert pictures.broken_at_open == []
    refused(("which has 6", lambda: pictures.label(6)), error=IndexError)


def test_names_of_the_folders_in_another_order_are_put_right_and_those_of_others_refused(tmp_path):
    for number, name in enumerate(("Apple_pie", "baklava", "हिन्दी")):
        put(tmp_path / name / "0.jpg", number)
    pictures = open_image_folder(tmp_path, ["हिन्दी", "apple pie", "Baklava"], TEMPLATES)
    assert pictures.class_names == ["apple pie", "Baklava", "हिन्दी"]
    assert open_image_folder(tmp_path, ["pie", "cake", "word"], TEMPLATES).class_names == ["pie", "cake", "word"]
    refused(("class name 0 is 'baklava', but class 0 is 'Apple_pie' and class 1 is 'bakl",
             lambda: open_image_folder(tmp_path, ["baklava", "cake", "word"], TEMPLATES)))  # fmt: skip
    numbered = tmp_path / "numbered"  # sorted as text: 10, 1, 2
    for number, name in enumerate(("1_dog", "2_cat", "10_emu")):
        put(numbered / name / "0.jpg", number)
    for names in (["dog", "cat", "emu"], ["Cat", "dog", "emu"]):
        pictures = open_image_folder(numbered, names, TEMPLATES)
        assert [name.lower() for name in pictures.class_names] == ["emu", "dog", "cat"]
        assert pictures[0]["image_id"] == "10_emu/0.jpg"
    refused(("class name 0 is 'dog', but class 0 is '10_emu' and class 1 is '1_dog'",
             lambda: open_image_folder(numbered, ["dog", "cat", "bird"], TEMPLATES)))  # fmt: skip


def test_labels_follow_the_order_of_the_folders_that_a_caller_names(folder):
    turned = open_image_folder(folder, ["emu", "cat", "dog"], TEMPLATES, folders=["n10", "n01", "n02"])
    assert (turned.class_names, turned.label(0)) == (["emu", "cat", "dog"], 0)
    assert as_plain(turned[0]) == (pixels(4), 0)


def test_classes_that_do_not_fit_the_folders_are_refused(folder):
    other = ["n01", "n02", "n11"]
    refused(
        (rf"^{folder}: 2 class names for 3 class folders \(n01, n02, n10 ...\)",
         lambda: open_image_folder(folder, ["a", "b"], TEMPLATES)),
        (rf"^{folder}: .*without a folder: n11; without a class: n10",
         lambda: open_image_folder(folder, list("abc"), TEMPLATES, folders=other)),
    )  # fmt: skip


def test_files_that_are_no_pictures_are_listed(folder):
    (folder / "n01" / "notes.txt").write_text("x")
    (folder / "n01" / "gone.jpg").symlink_to("/annex/gone")
    (folder / "n02" / "empty.jpg").write_bytes(b"")
    (folder / "n02" / "3.JPEG").write_bytes(b"<html>404</html>")
    (folder / "n11").mkdir()
    pictures = open_image_folder(folder, list("abcd"), TEMPLATES)
    assert {(Path(broken.path).name, broken.reason.split(":")[0]) for broken in pictures.broken_at_open} == {
        ("notes.txt", "no image"),
        ("gone.jpg", "missing image"),
        ("empty.jpg", "image cannot be decoded"),
        ("n11", "class without images"),
    }
    assert len(pictures) == 6
    refused(
        (r"n02/3.JPEG: image cannot be decoded: .* it starts with b'<html>404", lambda: pictures[4]), error=BrokenSample
    )
    assert pictures.label(4) == 1


def test_folders_that_are_missing_or_empty_are_named(tmp_path):
    (tmp_path / "set" / "n01").mkdir(parents=True)
    refused(
        ("nowhere: no such folder", lambda: open_image_folder(tmp_path / "nowhere", ["a"], TEMPLATES)),
        error=FileNotFoundError,
    )
    refused(
        ("has no folders; expected: one folder of images per class",
         lambda: open_image_folder(tmp_path / "set" / "n01", ["a"], TEMPLATES)),
        ("no image in 1 class folders", lambda: open_image_folder(tmp_path / "set", ["a"], TEMPLATES)),
    )  # fmt: skip


def test_too_many_broken_files_stop(folder):
    for number in range(200):
        (folder / "n01" / f"x{number}.jpg").write_bytes(b"opened when it is read")
    for number in range(20):
        (folder / "n02" / f"{number}.txt").write_text("x")
    refused(("20 of 226 samples are broken", lambda: open_image_folder(folder, list("abc"), TEMPLATES)))
    assert len(open_image_folder(folder, list("abc"), TEMPLATES, max_broken_share=0.1)) == 206


def test_the_fingerprint_changes_with_files_labels_names_and_templates(folder):
    def fingerprint(names=("a", "b", "c"), templates=TEMPLATES, **options):
        return open_image_folder(folder, list(names), templates, **options).fingerprint

    first = fingerprint()
    assert first == fingerprint()
    others = [fingerprint("abd"), fingerprint(templates=TEMPLATES[:1]), fingerprint(folders=["n02", "n01", "n10"])]
    for other in (jpeg(4)[:-1] + b"x", jpeg(4) + b"x"):  # as many bytes, one more
        (folder / "n10" / "4.JPEG").write_bytes(other)
        others.append(fingerprint())
    put(folder / "n10" / "6.JPEG", 6)
    others.append(fingerprint())
    assert len({first, *others}) == 7


# --- tar shards ------------------------------------------------------------------------------------------------------


def array(*values):
    stream = io.BytesIO()
    np.save(stream, np.array(values))
    return stream.getvalue()


def write_task(folder, classes=("cat", "dog"), shards=2, per_shard=3, **changes):
    """A task as DataComp lays them out; changes replace members of the second sample of the first shard."""
    with_names(folder, *classes, templates=("a photo of a {c}.", "a {c}."))
    (folder / "test").mkdir()
    (folder / "test" / "nshards.txt").write_text(str(shards))
    for shard in range(shards):
        samples = {}
        for row in range(per_shard):
            number = shard * per_shard + row
            members = {"jpg": jpeg(number), "cls": str(number % len(classes)).encode(), "npy": array(number, 7)}
            members |= changes if number == 1 else {}
            samples[f"s{number:07d}"] = {name: body for name, body in members.items() if body is not None}
        write_tar(folder / "test" / f"{shard}.tar", samples)
    return folder


def test_a_datacomp_task_is_read_with_its_names_templates_and_metadata(tmp_path):
    folder = write_task(tmp_path / "wds_vtab-cifar100_test", shards=11, per_shard=1)
    task = open_webdataset(folder)
    assert (task.name, len(task)) == ("vtab-cifar100", 11)
    assert (task.class_names, task.templates) == (["cat", "dog"], ["a photo of a {}.", "a {}."])
    for index in range(11):
        number = int(task[index]["image_id"].partition("/s")[2])
        assert as_plain(task[index]) == (pixels(number), number % 2)
        assert task.metadata(index).tolist() == [number, 7]
    assert {task[index]["image_id"] for index in range(11)} == {f"{number}/s{number:07d}" for number in range(11)}
    with_names(folder, "a", "b", templates=task.templates)
    assert open_webdataset(folder).fingerprint != task.fingerprint


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cls": b"2"}, "label out of range: 2 for 2 classes"),
        ({"cls": b"-1"}, "label out of range: -1 for 2 classes"),
        ({"cls": b"dog"}, "label out of range: 'dog' for 2 classes"),
        ({"cls": None}, "missing label: no cls member"),
        ({"jpg": jpeg(0)[:-200]}, "image cannot be decoded"),
    ],
)
def test_a_sample_of_a_task_that_cannot_be_used_is_named(tmp_path, changes, reason):
    task = open_webdataset(write_task(tmp_path / "wds_x_test", **changes))
    refused((rf"{tmp_path}/wds_x_test/test/0.tar \[s0000001\]: {reason}", lambda: task[1]), error=BrokenSample)
    assert as_plain(task[2]) == (pixels(2), 0)
    if "cls" in changes:
        refused((reason, lambda: task.label(1)), error=BrokenSample)


def test_files_that_a_task_lacks_are_named(tmp_path):
    shard, count, names, prompts = (write_task(tmp_path / name) for name in ("shard", "count", "names", "prompts"))
    (shard / "test" / "1.tar").unlink()
    (count / "test" / "nshards.txt").write_text("many")
    (names / "classnames.txt").unlink()
    (prompts / "zeroshot_classification_templates.txt").unlink()
    refused(("nshards.txt holds 'many'; expected: the number of shards", lambda: open_webdataset(count)))
    expected = "nshards.txt: no such file; expected: a task folder with classnames"
    refused(
        (r"nshards\.txt names 2 shards, of which 1\.tar is not there", lambda: open_webdataset(shard)),
        (r"classnames\.txt: no such file; expected: as scripts/label_files\.py", lambda: open_webdataset(names)),
        (r"templates\.txt: no such file; expected: as scripts/label_files\.py", lambda: open_webdataset(prompts)),
        (expected, lambda: open_webdataset(tmp_path)),
        error=FileNotFoundError,
    )


def test_all_sets_below_one_folder_are_opened_and_others_named(tmp_path):
    write_task(tmp_path / "wds_vtab-x_test")
    labelled(tmp_path, "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "imagenet").symlink_to(tmp_path / "mine")
    with pytest.warns(UserWarning, match=r"no classnames.txt in other; not evaluated"):
        sets = open_labelled_sets(tmp_path)
    assert {name: len(pictures) for name, pictures in sets.items()} == {
        "imagenet": 2, "mine": 2, "vtab-x": 6
    }  # fmt: skip
    assert sets["imagenet"].name == "mine"
    refused(("has no labelled set", lambda: open_labelled_sets(tmp_path / "other")))
    nowhere = tmp_path / "nowhere"
    refused(("no such folder of labelled sets", lambda: open_labelled_sets(nowhere)), error=FileNotFoundError)


@pytest.mark.parametrize(
    ("part", "others"), [("", ()), ("test", ()), ("test", ("train", "extra")), ("val", ("train",))]
)
def test_class_folders_lie_in_test_in_val_or_in_the_folder_itself(tmp_path, part, others):
    """With two classes, test and train look like two class folders."""
    task = with_names(tmp_path / "mine", "cat", "dog")
    for place, name in enumerate(("a", "b")):
        put(task / part / name / f"{place}.jpg", place)
        for other in others:
            put(task / other / name / "9.jpg", 9)
    (opened,) = open_labelled_sets(tmp_path).values()
    assert opened.name == "mine"
    assert content_of(opened) == [(pixels(0), 0), (pixels(1), 1)]


def test_class_folders_that_do_not_fit_the_names_say_what_is_accepted(tmp_path):
    mine = with_names(tmp_path / "mine", "cat", "dog", "emu")
    refused(("mine: 3 class names in classnames.txt; .*; there is no folder$", lambda: open_labelled_sets(tmp_path)))
    for name in ("test/a", "test/b", "test/.hidden", "train/a", "val/a"):  # as many folders as there are classes
        put(mine / name / "0.jpg")
    counts = r"nshards.txt; test has 2 \(a, b\); val has 1 \(a\); mine has 3 \(test, train, val\)$"
    refused((counts, lambda: open_labelled_sets(tmp_path)))


def test_the_shards_of_a_training_part_are_validation_images(tmp_path):
    folder = write_task(tmp_path / "wds_zoo_test")
    assert open_labelled_validation(tmp_path) is None
    put(with_names(tmp_path / ".ipynb_checkpoints", "cat") / "train" / "cat" / "0.jpg")  # hidden
    assert open_labelled_validation(tmp_path) is None
    (folder / "train").mkdir()
    (folder / "train" / "nshards.txt").write_text("1")
    write_tar(folder / "train" / "0.tar", {"a": {"jpg": jpeg(9), "cls": b"1"}})
    validation = open_labelled_validation(tmp_path)
    assert (validation.name, len(validation), as_plain(validation[0])) == ("zoo-train", 1, (pixels(9), 1))
