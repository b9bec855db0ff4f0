"""common/data/karpathy.py and picture_files.py: layouts, splits, counts, ids; what is refused and how it is said."""

import io
import json
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from tars import jpeg

from common.data.decoding import FILE_FORMATS, Unusable, decode_picture
from common.data.karpathy import open_karpathy


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
    (folder / name).write_text(json.dumps(content))
    return folder / name


def test_coco_trains_on_train_and_restval_and_takes_ids_and_folders_from_the_file(tmp_path):
    splits = enumerate(("train", "train", "restval", "test"))
    entries = [image(number, split, filepath="val2014", cocoid=1000 + number) for number, split in splits]
    path = write(tmp_path, {"dataset": "coco", "images": entries})
    (tmp_path / "pictures").rename(tmp_path / "val2014")
    assert [open_karpathy(path).image_id(index) for index in range(3)] == ["1000", "1001", "1002"]
    assert [len(open_karpathy(path, split=split)) for split in ("train", "restval", "test+restval")] == [2, 1, 2]
    test = open_karpathy(path, role="test")
    assert (test.name, test.image_id(0), test.path(0)) == ("coco-test", "1003", tmp_path / "val2014" / "3.jpg")
    assert test.caption_ids(0) == [15, 16, 17, 18, 19]
    known = r"train \(2 images\), restval \(1 images\), test \(1 images\)"
    refused((f"{path} has no split 'val'; expected one of: {known}", lambda: open_karpathy(path, role="val")))


def test_the_folder_of_pictures_is_known_by_any_of_the_file(tmp_path):
    entries = [image(number, "test", cocoid=number) for number in range(60)]
    path = write(tmp_path, {"dataset": "coco", "images": entries[::-1]})  # its last six are there
    assert len(open_karpathy(path, role="test", max_broken_share=1)) == 6


def test_retrieval_lists_put_the_captions_of_a_picture_together(tmp_path):
    rows = [
        {"image": "pictures/1.jpg", "caption": "one", "image_id": "coco_7"},
        {"image": "pictures/0.jpg", "caption": ["zero", "null"], "image_id": 3},
        {"image": "pictures/1.jpg", "caption": "ein", "image_id": "coco_7"},
        {"image": "pictures/2.jpg", "captions": ["two"], "caption_ids": [55]},
    ]
    pairs = open_karpathy(write(tmp_path, rows, "coco_train.json"))
    samples = [(pairs.image_id(index), pairs.captions(index), pairs.caption_ids(index)) for index in range(3)]
    assert samples == [
        ("coco_7", ["one", "ein"], None),
        ("3", ["zero", "null"], None),
        ("pictures/2.jpg", ["two"], [55]),
    ]
    assert pairs.name == "coco_train"
    rows = [{"image": "pictures/1.jpg", "caption": text, "caption_ids": ids} for text, ids in (("a", [5]), ("b", None))]
    part = open_karpathy(write(tmp_path, rows, "part.json"))
    assert (part.captions(0), part.caption_ids(0)) == (["a", "b"], None)
    refused(("has no splits; split is 'test'", lambda: open_karpathy(tmp_path / "coco_train.json", split="test")))


def test_coco_captions_files_are_read(tmp_path):
    content = {
        "images": [{"id": 42, "file_name": "0.jpg"}, {"id": 7, "file_name": "1.jpg"}, {"id": 8, "file_name": "2.jpg"}],
        "annotations": [
            {"id": 9, "image_id": "7", "caption": "c"},
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
        ("annotations of image 99", "missing image: no such image"),
    }


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filename": "./1.jpg"}, "duplicate image_id: '1', first at images[0]"),
        ({"filename": "sub/1.jpg", "cocoid": "1"}, "duplicate image_id: '1', first at images[0]"),
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


# --- pictures --------------------------------------------------------------------------------------------------------


def test_the_folder_of_the_images_is_detected_or_named_in_the_error(tmp_path):
    folder = tmp_path / "annotations"
    folder.mkdir()
    path = write(folder, {"images": [image(0), image(1)], "dataset": "x"}, pictures=2)
    opened = partial(open_karpathy, path, role="test")
    assert opened().images == folder / "pictures"
    (folder / "pictures").rename(tmp_path / "far")
    refused(
        ("no folder has its images, such as '0.jpg'; looked in .*set data.images", opened),
        ("no such folder of images", partial(opened, tmp_path / "nowhere")),
        error=FileNotFoundError,
    )
    assert (opened(root=tmp_path).images, len(opened(tmp_path / "far"))) == (tmp_path / "far", 2)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "1.jpg").write_bytes(jpeg(1))
    refused(
        ("its images lie in .*copy and .*far; set data.images", partial(opened, root=tmp_path)),
        ("no captioned image in x-test; first fault: .*annotations/0.jpg: missing", partial(opened, folder)),
    )


def test_pictures_of_one_name_in_two_folders_are_two(tmp_path):
    entries = [image(0, filepath=folder, filename="1.jpg") for folder in ("a", "b")]
    path = write(tmp_path, {"images": entries, "dataset": "x"})
    for folder in ("a", "b"):
        (tmp_path / "pictures" / folder).mkdir()
        (tmp_path / "pictures" / folder / "1.jpg").write_bytes(jpeg(1))
    pairs = open_karpathy(path, role="test")
    assert [pairs.image_id(index) for index in range(len(pairs))] == ["a/1", "b/1"]


# --- processes, identity ---------------------------------------------------------------------------------------------


def tiff(body, width, height, bits, sample_format=1, black=1):
    """An uncompressed grey TIFF. sample_format: 1 unsigned, 2 signed, 3 floating point. black: 1 where 0 is black."""
    fields = {256: width, 257: height, 258: bits, 259: 1, 262: black, 273: 8, 277: 1, 278: height, 279: len(body)}
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
    # 0 is white: an inverted grey, in 16 bits as Pillow has it in 8
    assert decoded_grey(tiff(bytes([0, 7, 255]), 3, 1, 8, black=0)) == [255, 248, 0]
    assert decoded_grey(tiff(deep.astype("<u2").tobytes(), 4, 2, 16, black=0)) == [255 - grey for grey in expected]


@pytest.mark.parametrize(
    ("kind", "bits", "sample_format"), [("<u4", 32, 1), ("<i4", 32, 2), ("<i2", 16, 2), ("<f4", 32, 3)]
)
def test_pixels_without_a_known_range_are_broken_not_clipped(kind, bits, sample_format):
    content = tiff(np.array([0, 1, 300, 32_000], kind).tobytes(), 4, 1, bits, sample_format)
    refused(
        (
            "its pixels are signed, of 32 bits or floats; expected: 1 to 16 bits",
            lambda: decode_picture(content, formats=FILE_FORMATS),
        ),
        (
            "its pixels are signed, of 32 bits or floats",
            lambda: decode_picture(b"Pf\n1 1\n-1.0\n" + struct.pack("<f", 0.5), formats=FILE_FORMATS),
        ),
        error=Unusable,
    )


# --- real files ------------------------------------------------------------------------------------------------------


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
