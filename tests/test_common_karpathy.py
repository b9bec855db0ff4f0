"""common/data/karpathy.py and picture_files.py: layouts, splits, counts, ids; what is refused and how it is said."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tars import as_plain, jpeg
from torch.utils.data import DataLoader

from common.data.broken import BrokenSample
from common.data.karpathy import EXPECTED, open_karpathy
from common.data.decoding import FILE_FORMATS, Unusable, decode_picture
from common.data.shards import ShardDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*usual are:UserWarning")


def image(number, split="test", **changes):
    """An entry of a Flickr-like Karpathy file; a change of None leaves a key out."""
    sentences = [{"raw": f"picture {number}, {k}", "sentid": 5 * number + k} for k in range(5)]
    entry = {"filename": f"{number}.jpg", "imgid": number, "split": split, "sentences": sentences}
    return {key: value for key, value in {**entry, **changes}.items() if value is not None}


def write(folder: Path, content: object, name: str = "dataset.json", pictures: int = 6) -> Path:
    """A JSON file with pictures 0.jpg ... in a folder beside it."""
    (folder / "pictures").mkdir(exist_ok=True)
    for number in range(pictures):
        (folder / "pictures" / f"{number}.jpg").write_bytes(jpeg(number))
    path = folder / name
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def test_every_entry_of_the_split_comes_once_in_file_order(tmp_path):
    entries = [image(number, split) for number, split in enumerate(["test", "train", "test", "val", "test"])]
    pairs = open_karpathy(write(tmp_path, {"images": entries, "dataset": "mine"}), role="test")
    assert [pairs.image_id(index) for index in range(len(pairs))] == ["0", "2", "4"]
    for index, number in enumerate((0, 2, 4)):
        sample = pairs[index]
        assert np.asarray(sample["image"]).tobytes() == as_plain_pixels(number)
        assert sample["captions"] == pairs.captions(index) == [f"picture {number}, {k}" for k in range(5)]
        assert sample["image_id"] == str(number)
        assert pairs.caption_ids(index) == [5 * number + k for k in range(5)]
    assert as_plain(pairs[-1]) == as_plain(pairs[2])
    assert (pairs.name, pairs.broken_at_open) == ("mine-test", [])
    assert len(list(pairs.all_captions())) == 15
    with pytest.raises(IndexError, match="which has 3"):
        pairs[3]


def as_plain_pixels(number):
    return np.asarray(Image.open(io.BytesIO(jpeg(number))).convert("RGB")).tobytes()


def coco_like(**splits):
    """An entry per split and number, with COCO's keys."""
    return {
        "dataset": "coco",
        "images": [
            image(number, split, filepath="val2014", cocoid=1000 + number)
            for split, numbers in splits.items()
            for number in numbers
        ],
    }


def test_coco_trains_on_train_and_restval_and_takes_ids_and_folders_from_the_file(tmp_path):
    path = write(tmp_path, coco_like(train=[0, 1], restval=[2], test=[3]))
    (tmp_path / "pictures").rename(tmp_path / "val2014")
    assert [open_karpathy(path).image_id(index) for index in range(3)] == ["1000", "1001", "1002"]
    assert [len(open_karpathy(path, split=split)) for split in ("train", "restval", "test+restval")] == [2, 1, 2]
    test = open_karpathy(path, role="test")
    assert (test.name, test.image_id(0), test.path(0)) == ("coco-test", "1003", tmp_path / "val2014" / "3.jpg")
    with pytest.raises(ValueError) as error:
        open_karpathy(path, role="val")
    assert "has no split 'val'; accepted: train (2 pictures), restval (1 pictures), test (1 pictures)" in str(
        error.value
    )
    assert str(path) in str(error.value)


def test_a_file_without_restval_trains_on_train(tmp_path):
    path = write(tmp_path, {"images": [image(0, "train"), image(1, "test")], "dataset": "flickr8k"})
    assert len(open_karpathy(path)) == 1


def test_unexpected_counts_are_said_and_expected_ones_are_not(tmp_path, monkeypatch):
    path = write(tmp_path, coco_like(test=[0, 1]))
    (tmp_path / "pictures").rename(tmp_path / "val2014")
    usual = "split test of coco has 2 pictures and 10 captions; usual are 5,000 pictures and 25,010 captions"
    with pytest.warns(UserWarning, match=usual):
        open_karpathy(path, role="test")
    monkeypatch.setitem(EXPECTED, ("coco", "test"), (2, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_karpathy(path, role="test")
    monkeypatch.setitem(EXPECTED, ("coco", "test"), (2, 11))
    with pytest.warns(UserWarning, match="10 captions; usual are 2 pictures and 11"):
        open_karpathy(path, role="test")


def test_retrieval_lists_put_the_captions_of_a_picture_together(tmp_path):
    rows = [
        {"image": "pictures/1.jpg", "caption": "one", "image_id": "coco_7"},
        {"image": "pictures/0.jpg", "caption": ["zero", "null"], "image_id": 3},
        {"image": "pictures/1.jpg", "caption": "ein", "image_id": "coco_7"},
        {"image": "pictures/2.jpg", "captions": ["two"], "caption_ids": [55]},
    ]
    pairs = open_karpathy(write(tmp_path, rows, "coco_train.json"))
    found = [(pairs.image_id(index), pairs.captions(index), pairs.caption_ids(index)) for index in range(3)]
    assert found == [("coco_7", ["one", "ein"], None), ("3", ["zero", "null"], None), ("pictures/2.jpg", ["two"], [55])]
    assert pairs.name == "coco_train"
    rows = [{"image": "pictures/1.jpg", "caption": text, "caption_ids": ids} for text, ids in (("a", [5]), ("b", None))]
    part = open_karpathy(write(tmp_path, rows, "part.json"))
    assert (part.captions(0), part.caption_ids(0)) == (["a", "b"], None)
    with pytest.raises(ValueError, match="has no splits; split is 'test'"):
        open_karpathy(tmp_path / "coco_train.json", split="test")


def test_coco_captions_files_are_read(tmp_path):
    content = {
        "images": [{"id": 42, "file_name": "0.jpg"}, {"id": 7, "file_name": "1.jpg"}, {"id": 8, "file_name": "2.jpg"}],
        "annotations": [
            {"id": 9, "image_id": 7, "caption": "c"},
            {"id": 5, "image_id": 42, "caption": "a"},
            {"id": 6, "image_id": 42, "caption": "b"},
            {"id": 7, "image_id": 99, "caption": "nobody"},
        ],
    }
    pairs = open_karpathy(write(tmp_path, content), role="test", max_broken_share=1.0)
    assert [(pairs.image_id(i), pairs.captions(i), pairs.caption_ids(i)) for i in range(2)] == [
        ("42", ["a", "b"], [5, 6]),
        ("7", ["c"], [9]),
    ]
    assert {(broken.key, broken.reason) for broken in pairs.broken_at_open} == {
        ("images[2]", "missing caption: the list is empty"),
        ("annotations of image 99", "missing picture: no such image"),
    }


# --- faults ----------------------------------------------------------------------------------------------------------

FAULTS = [
    ({"sentences": [{"raw": 7}]}, "caption is not a string: int"),
    ({"sentences": [{"raw": "fine"}, {"raw": None}]}, "caption is not a string: NoneType"),
    ({"sentences": [{"tokens": ["a"]}]}, "caption is not a string: NoneType"),
    ({"sentences": []}, "missing caption: the list is empty"),
    ({"sentences": None}, "sentences has the wrong type"),
    ({"sentences": "a caption"}, "sentences has the wrong type"),
    ({"sentences": ["a caption"]}, "sentences has the wrong type"),
    ({"sentences": [{"raw": "lost \ud83d"}]}, "caption has half a surrogate pair"),
    ({"sentences": [{"raw": "a", "sentid": "12"}]}, "caption id has the wrong type: '12'"),
    ({"sentences": [{"raw": "a", "sentid": -1}]}, "caption id has the wrong type: -1"),
    ({"sentences": [{"raw": "a"}], "sentids": [1, 2]}, "caption ids do not fit: [1, 2] for 1 captions"),
    ({"filename": None}, "missing picture: its path is None"),
    ({"filename": 3}, "missing picture: its path is 3"),
    ({"filename": "lost\ud83d.jpg"}, "path of the picture has half a surrogate pair"),
    ({"cocoid": [1]}, "image_id has the wrong type: list"),
    ({"cocoid": True}, "image_id has the wrong type: bool"),
    ({"filename": "1.jpg"}, "duplicate image_id: '1', first at images[0]"),
    ({"split": None}, "split has the wrong type: NoneType"),
    ({"split": 3}, "split has the wrong type: int"),
]


@pytest.mark.parametrize(("changes", "reason"), FAULTS)
def test_an_entry_that_cannot_be_used_is_listed_and_the_others_stay(tmp_path, changes, reason):
    content = {"images": [image(1), image(2, **changes), image(3)], "dataset": "x"}
    path = write(tmp_path, json.dumps(content).encode("ascii"))
    pairs = open_karpathy(path, role="test")
    assert [pairs.image_id(index) for index in range(len(pairs))] == ["1", "3"]
    (broken,) = pairs.broken_at_open
    assert (broken.path, broken.key) == (str(path), "images[1]")
    assert broken.reason.startswith(reason)


def test_an_entry_of_another_type_is_listed(tmp_path):
    pairs = open_karpathy(write(tmp_path, {"images": [image(1), None, "x", image(3)], "dataset": "x"}), role="test")
    assert [(broken.key, broken.reason) for broken in pairs.broken_at_open] == [
        ("images[1]", "entry has the wrong type: NoneType instead of an object"),
        ("images[2]", "entry has the wrong type: str instead of an object"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "1.jpg", "caption": 7}, "captions has the wrong type: int instead of a string or a list"),
        ({"image": "1.jpg", "caption": None}, "captions has the wrong type: NoneType"),
        ({"image": "1.jpg", "caption": ["a", 3]}, "caption is not a string: int"),
        ({"image": "1.jpg", "caption": []}, "missing caption"),
        ({"image": "1.jpg", "caption": " "}, "empty caption: ' '"),
        ({"image": "1.jpg"}, "captions has the wrong type: NoneType"),
        ({"caption": "a"}, "missing picture: its path is None"),
        ({"image": "", "caption": "a"}, "missing picture: its path is ''"),
        ({"image": "1.jpg", "caption": "a", "image_id": 1.5}, "image_id has the wrong type: float"),
        ({"image": "0.jpg", "caption": "a", "image_id": "1"}, "image_id differs: '1', the same picture has '0' at [0]"),
        ({"image": "a\0/1.jpg", "caption": "a"}, "missing picture: no file has the path 'a\\x00/1.jpg'"),
        ({"image": "é" * 128, "caption": "a"}, "missing picture: no file has the path 'ééé"),
        ({"image": "a/" * 600, "caption": "a"}, "missing picture: no file has the path 'a/a/"),
        (["1.jpg", "a"], "entry has the wrong type: list"),
    ],
)
def test_a_row_of_a_list_that_cannot_be_used_is_listed(tmp_path, row, reason):
    rows = [{"image": "0.jpg", "caption": "zero", "image_id": "0"}, row, {"image": "2.jpg", "caption": "two"}]
    pairs = open_karpathy(write(tmp_path, rows))
    assert [pairs.captions(index) for index in range(len(pairs))] == [["zero"], ["two"]]
    (broken,) = pairs.broken_at_open
    assert broken.key == "[1]"
    assert broken.reason.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filename": "./1.jpg"}, "duplicate image_id: '1', first at images[0]"),
        ({"filename": "sub/1.jpg", "cocoid": "1"}, "duplicate image_id: '1', first at images[0]"),
        ({"filename": "1.jpg", "cocoid": 7}, "duplicate path: '1.jpg', first at images[0]"),
        ({"filename": "./1.jpg", "cocoid": 7}, "duplicate path: '1.jpg', first at images[0]"),
        ({"filename": "sub/../1.jpg", "cocoid": 7}, "duplicate path: '1.jpg', first at images[0]"),
    ],
)
def test_a_picture_is_ranked_once_and_trained_on_as_often_as_it_is_listed(tmp_path, changes, reason):
    path = write(tmp_path, {"images": [image(1), image(2, **changes), image(3)], "dataset": "x"})
    (tmp_path / "pictures" / "sub").mkdir()
    (tmp_path / "pictures" / "sub" / "1.jpg").write_bytes(jpeg(1))
    ranked = open_karpathy(path, role="test")
    assert [ranked.captions(index)[0] for index in range(len(ranked))] == ["picture 1, 0", "picture 3, 0"]
    assert [(broken.key, broken.reason) for broken in ranked.broken_at_open] == [("images[1]", reason)]
    trained = open_karpathy(path, split="test")
    assert (len(trained), trained.broken_at_open) == (3, [])


def test_rows_of_a_list_belong_together_however_their_path_is_written(tmp_path):
    rows = [{"image": path, "caption": path} for path in ("pictures/1.jpg", "./pictures/1.jpg", "pictures//1.jpg")]
    pairs = open_karpathy(write(tmp_path, rows), role="test")
    assert (len(pairs), pairs.image_id(0), pairs.broken_at_open) == (1, "pictures/1.jpg", [])
    assert pairs.captions(0) == ["pictures/1.jpg", "./pictures/1.jpg", "pictures//1.jpg"]


def test_empty_captions_are_refused_in_training_only(tmp_path):
    content = {"images": [image(0, "train", sentences=[{"raw": ""}]), image(1, "train")], "dataset": "x"}
    path = write(tmp_path, content)
    assert len(open_karpathy(path)) == 1
    assert open_karpathy(path, split="train", role="test").captions(0) == [""]


GOOD = json.dumps({"images": [image(0)], "dataset": "x"}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD[:-20], "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"images": "\xff"}', "is no text in UTF-8"),
        (b"3", "the top level is of type int; accepted: an object with a list 'images'"),
        (b"null", "the top level is of type NoneType"),
        (b'{"images": {}}', "the top level is an object with the keys images; accepted"),
        (b'{"questions": [], "info": 1}', "the top level is an object with the keys questions, info"),
        (b"[]", "the list is empty"),
        (b'{"images": []}', "has no split 'test'; accepted: it has none"),
        (b'{"images": [{"split": "test"}]}', "no captioned picture in dataset-test; first fault"),
    ],
)
def test_a_file_that_is_no_such_file_is_refused_with_its_name(tmp_path, content, words):
    path = write(tmp_path, content)
    with pytest.raises(ValueError) as error:
        open_karpathy(path, role="test")
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_gzip_files_are_read_and_damaged_ones_are_named(tmp_path):
    path = write(tmp_path, {"images": [image(0)], "dataset": "x"}, "dataset.json.gz")
    assert len(open_karpathy(path, role="test")) == 1
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=f"{path} cannot be read"):
        open_karpathy(path, role="test")
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_karpathy(tmp_path / "nothing.json")


# --- pictures --------------------------------------------------------------------------------------------------------


def test_missing_and_empty_files_are_known_at_opening_and_damaged_ones_when_read(tmp_path):
    path = write(tmp_path, {"images": [image(number) for number in range(6)], "dataset": "x"}, pictures=5)
    folder = tmp_path / "pictures"
    (folder / "1.jpg").unlink()
    (folder / "1.jpg").mkdir()
    (folder / "2.jpg").write_bytes(b"")
    (folder / "3.jpg").write_bytes(jpeg(3)[:-200])
    (folder / "4.jpg").write_bytes(b"<html>404</html>")
    pairs = open_karpathy(path, role="test")
    assert {(broken.path, broken.reason) for broken in pairs.broken_at_open} == {
        (str(folder / "1.jpg"), "missing picture: no such file"),
        (str(folder / "5.jpg"), "missing picture: no such file"),
        (str(folder / "2.jpg"), "picture cannot be decoded: it has no bytes"),
    }
    assert [pairs.image_id(index) for index in range(len(pairs))] == ["0", "3", "4"]
    assert pairs[0]["image_id"] == "0"
    for index, reason in ((1, "image file is truncated"), (2, "it starts with b'<html>404</html>'")):
        with pytest.raises(BrokenSample) as error:
            pairs[index]
        assert error.value.path == str(folder / f"{index + 2}.jpg")
        assert reason in error.value.reason
        assert pairs.captions(index)
    (folder / "0.jpg").unlink()
    with pytest.raises(BrokenSample, match="picture cannot be read: No such file"):
        pairs[0]


def test_opening_stops_when_too_many_are_broken(tmp_path):
    entries = [image(number) for number in range(150)]
    for number in range(10):
        entries[number]["filename"] = f"gone{number}.jpg"
    path = write(tmp_path, {"images": entries, "dataset": "x"}, pictures=150)
    with pytest.raises(ValueError, match=r"10 of 150 samples are broken \(6.67%\); at most 1.00%"):
        open_karpathy(path, role="test")
    pairs = open_karpathy(path, role="test", max_broken_share=0.1)
    assert (len(pairs), len(pairs.broken_at_open)) == (140, 10)


def test_the_folder_of_the_pictures_is_found_or_asked_for(tmp_path):
    folder = tmp_path / "annotations"
    folder.mkdir()
    path = write(folder, {"images": [image(0), image(1)], "dataset": "x"}, pictures=2)
    assert open_karpathy(path, role="test").images == folder / "pictures"
    (folder / "pictures").rename(tmp_path / "far")
    with pytest.raises(FileNotFoundError) as error:
        open_karpathy(path, role="test")
    assert "no folder has its pictures, such as '0.jpg'; looked in" in str(error.value)
    assert "set data.images" in str(error.value)
    assert open_karpathy(path, role="test", root=tmp_path).images == tmp_path / "far"
    assert len(open_karpathy(path, tmp_path / "far", role="test")) == 2
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "1.jpg").write_bytes(jpeg(1))
    with pytest.raises(ValueError, match=r"its pictures lie in .*copy and .*far; set data.images"):
        open_karpathy(path, role="test", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder of pictures"):
        open_karpathy(path, tmp_path / "nowhere", role="test")
    with pytest.raises(ValueError, match=r"no captioned picture in x-test; first fault: .*annotations/0.jpg: missing"):
        open_karpathy(path, folder, role="test")


def test_pictures_may_lie_beside_the_folder_of_the_file(tmp_path):
    write(tmp_path, [])
    (tmp_path / "annotations").mkdir()
    path = tmp_path / "annotations" / "set.json"
    path.write_text(json.dumps([{"image": "../pictures/1.jpg", "caption": "a"}]))
    pairs = open_karpathy(path, role="test")
    assert as_plain(pairs[0])[1:] == (["a"], "../pictures/1.jpg")
    assert pairs.path(0).read_bytes() == jpeg(1)


def test_pictures_of_one_name_in_two_folders_are_two(tmp_path):
    entries = [image(0, filepath=folder, filename="1.jpg") for folder in ("a", "b")]
    path = write(tmp_path, {"images": entries, "dataset": "x"})
    for folder in ("a", "b"):
        (tmp_path / "pictures" / folder).mkdir()
        (tmp_path / "pictures" / folder / "1.jpg").write_bytes(jpeg(1))
    pairs = open_karpathy(path, role="test")
    assert [pairs.image_id(index) for index in range(len(pairs))] == ["a/1", "b/1"]


def test_absolute_paths_need_no_folder(tmp_path):
    path = write(tmp_path, [{"image": str(tmp_path / "pictures" / "0.jpg"), "caption": "a"}])
    assert as_plain(open_karpathy(path)[0])[1:] == (["a"], str(tmp_path / "pictures" / "0.jpg"))


# --- processes, identity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_what_one_process_reads(tmp_path, context):
    pairs = open_karpathy(
        write(tmp_path, {"images": [image(number) for number in range(6)], "dataset": "x"}), role="test"
    )
    loader = DataLoader(pairs, batch_size=2, num_workers=2, collate_fn=as_plain_batch, multiprocessing_context=context)
    assert [item for batch in loader for item in batch] == [as_plain(pairs[index]) for index in range(6)]
    assert as_plain(pickle.loads(pickle.dumps(pairs))[3]) == as_plain(pairs[3])


def as_plain_batch(batch):
    return [as_plain(sample) for sample in batch]


def test_the_fingerprint_changes_with_content_and_not_with_place(tmp_path):
    def fingerprint(folder, number=0, **changes):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = write(tmp_path / folder, {"images": [image(0), image(1, **changes)], "dataset": "x"}, f"{number}.json")
        return open_karpathy(path, role="test").fingerprint

    first = fingerprint("a")
    assert len(first) == 64
    assert fingerprint("a") == fingerprint("b") == first
    other = [
        fingerprint("a", sentences=[{"raw": "else"}]),
        fingerprint("a", cocoid=9),
        fingerprint("a", sentences=[{"raw": f"picture 1, {k}", "sentid": 7 + k} for k in range(5)]),
        fingerprint("a", filename="2.jpg", cocoid="1"),
    ]
    (tmp_path / "a" / "pictures" / "1.jpg").write_bytes(jpeg(1) + b"x")
    path = tmp_path / "a" / "0.json"
    path.write_text(json.dumps({"images": [image(0), image(1)], "dataset": "x"}))
    other.append(open_karpathy(path, role="test").fingerprint)
    assert len({first, *other}) == 6


def test_palette_and_16_bit_pictures_become_rgb(tmp_path):
    path = write(tmp_path, [{"image": f"pictures/{name}", "caption": "a"} for name in ("p.png", "deep.png", "b.bmp")])
    Image.new("P", (5, 4)).save(tmp_path / "pictures" / "p.png")
    Image.fromarray(np.full((4, 5), 0x1234, np.uint16)).save(tmp_path / "pictures" / "deep.png")
    Image.new("RGB", (5, 4)).save(tmp_path / "pictures" / "b.bmp")
    pairs = open_karpathy(path)
    assert [pairs[index]["image"].mode for index in range(3)] == ["RGB"] * 3
    assert np.asarray(pairs[1]["image"])[0, 0].tolist() == [0x12] * 3


def tiff(body, width, height, bits, sample_format=1):
    """An uncompressed grey TIFF. sample_format: 1 unsigned, 2 signed, 3 floating point."""
    fields = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(body)}
    fields[339] = sample_format
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(fields.items()))
    return struct.pack("<2sHI", b"II", 42, 8 + len(body)) + body + struct.pack("<H", len(fields)) + entries + bytes(4)


def decoded_grey(content):
    pixels = np.asarray(decode_picture(content, formats=FILE_FORMATS))
    assert (pixels == pixels[..., :1]).all()
    return pixels[..., 0].ravel().tolist()


def test_deep_pictures_come_out_as_their_upper_eight_bits():
    deep = np.array([[0, 255, 256, 0x1234], [0x7FFF, 0x8000, 0xFEFF, 0xFFFF]], np.uint16)
    expected = [0, 0, 1, 0x12, 0x7F, 0x80, 0xFE, 0xFF]
    for kind in ("PNG", "TIFF", "PPM"):
        stream = io.BytesIO()
        Image.fromarray(deep).save(stream, kind)
        assert decoded_grey(stream.getvalue()) == expected, kind
    assert decoded_grey(tiff(deep.astype("<u2").tobytes(), 4, 2, 16)) == expected
    big_endian = io.BytesIO()
    Image.frombytes("I;16B", (4, 2), deep.astype(">u2").tobytes()).save(big_endian, "TIFF")
    assert decoded_grey(big_endian.getvalue()) == expected
    assert decoded_grey(b"P2 3 1 1000 0 500 1000") == [0, 128, 255]  # the range is in the header
    twelve = bytes([0x00, 0x0F, 0xFF, 0x80, 0x0A, 0xBC])  # 0x000 0xFFF | 0x800 0xABC
    assert decoded_grey(tiff(twelve, 2, 2, 12)) == [0, 255, 0x80, 0xAB]
    assert decoded_grey(tiff(bytes([0, 7, 255]), 3, 1, 8)) == [0, 7, 255]


@pytest.mark.parametrize(
    ("kind", "bits", "sample_format"), [("<u4", 32, 1), ("<i4", 32, 2), ("<i2", 16, 2), ("<f4", 32, 3)]
)
def test_pixels_without_a_known_range_are_broken_not_clipped(kind, bits, sample_format):
    content = tiff(np.array([0, 1, 300, 32_000], kind).tobytes(), 4, 1, bits, sample_format)
    with pytest.raises(Unusable, match="its pixels are signed, of 32 bits or floats; accepted: 1 to 16 bits"):
        decode_picture(content, formats=FILE_FORMATS)
    with pytest.raises(Unusable, match="its pixels are signed, of 32 bits or floats"):
        decode_picture(b"Pf\n1 1\n-1.0\n" + struct.pack("<f", 0.5), formats=FILE_FORMATS)


# --- real files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def flickr8k(data_dir, tmp_path):
    """The first 40 pictures of the test split as files, and the whole JSON."""
    keys = []
    with tarfile.open(data_dir / "flickr8k" / "flickr8k-test-000000.tar") as tar:
        for member in tar:
            if member.name.endswith(".jpg"):
                (tmp_path / Path(member.name).name).write_bytes(tar.extractfile(member).read())
                keys.append(member.name)
            if len(keys) == 40:
                break
    return data_dir / "flickr8k", tmp_path


def test_flickr8k_files_and_shards_hold_the_same_samples(flickr8k):
    source, pictures = flickr8k
    path = source / "flickr8k_captions_karpathy_format.json.gz"
    with pytest.raises(ValueError, match="960 of 1000 samples are broken"):
        open_karpathy(path, pictures, role="test")
    files = open_karpathy(path, pictures, role="test", max_broken_share=1.0)
    assert (len(files), len(files.broken_at_open), files.name) == (40, 960, "flickr8k-test")
    shards = ShardDataset("flickr8k-test-*.tar", root=source, role="test")
    by_id = {shards.image_id(index).removesuffix(".jpg"): index for index in range(len(shards))}
    for index in range(40):
        theirs = shards[by_id[files.image_id(index)]]
        assert as_plain(files[index])[:2] == (np.asarray(theirs["image"]).tobytes(), theirs["captions"])


def test_real_annotation_files_have_the_documented_counts(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.picture_files._sizes_of", lambda folder, names: dict.fromkeys(names, 1))
    folder = data_dir / "annotations"
    coco = open_karpathy(folder / "coco_karpathy_test5k.json.gz", tmp_path, role="test")
    assert (len(coco), len(list(coco.all_captions()))) == (5_000, 25_009)
    ids = [coco.caption_ids(index) for index in range(5_000)]
    assert sum(None in group for group in ids if group is not None) == 1
    assert ids.count(None) == 8
    assert (coco.image_id(0), coco.caption_ids(0)[0]) == ("391895", 770337)
    val2017 = open_karpathy(folder / "coco_captions_val2017.json.gz", tmp_path, role="test")
    assert (len(val2017), len(list(val2017.all_captions()))) == (5_000, 25_014)
    with pytest.warns(
        UserWarning, match=r"28,071 pictures and 140,355 captions; usual are 29,000 pictures and 145,000"
    ):
        train = open_karpathy(folder / "flickr30k_captions_karpathy_format.json.gz", tmp_path)
    assert (len(train), train.broken_at_open) == (28_071, [])
