"""common/data/shards.py: what is read, what is refused, and how it is said."""

import io
import json
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from little_memory import at_most
from PIL import Image
from refusals import refused
from tars import as_plain, good_tar, jpeg, pair, write_tar

from common.data import pictures
from common.data.broken import BrokenSample
from common.data.shards import open_shards


def one_sample(folder: Path, **changes: object) -> pictures.Pictures:
    """A data set whose sample 0 is changed and whose sample 1 is good."""
    return open_shards(str(write_tar(folder / "x.tar", {"odd": pair(0, **changes), "good": pair(1)})))


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_a_shard_that_takes_the_place_of_another_is_read(tmp_path, kept):
    index_dir = tmp_path / "index" if kept else None
    for colour in (b"a", b"b"):  # as long, with equal names and captions
        path = write_tar(tmp_path / "a.tar", {"k": {"jpg": 9 * colour, "txt": b"a dog"}})
        for _ in range(2):  # then by the index that was kept
            assert open_shards(str(path), index_dir=index_dir).read(0, "image") == 9 * colour
        path.unlink()


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_same_samples_as_the_webdataset_library(tmp_path, tar_format):
    webdataset = pytest.importorskip("webdataset")
    samples = {f"folder/k{seed}": pair(seed) for seed in range(5)}
    samples |= {"deeper/" * 17 + "name": pair(5), "übung": pair(6), "odd.name": {"jpg": jpeg(7), "json": b"{}"}}
    samples["upper"] = {"JPG": jpeg(8), "json": pair(8)["json"]}
    samples |= {"__pN3Hq2aK8": pair(9), "__notes__/k": pair(10)}  # a key, and webdataset's own folder
    path = write_tar(tmp_path / "a.tar", samples, tar_format)
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    theirs = [item for item in theirs if "jpg" in item]  # odd.name.jpg has the extension name.jpg there, too
    ours = open_shards(str(path))
    assert len(ours) == len(theirs) == 9
    for index, item in enumerate(theirs):
        assert ours.key(index) == item["__key__"]
        assert ours.read(index, "image") == item["jpg"]
        assert ours.metadata(index) == json.loads(item["json"])
    assert [(broken.key, broken.reason.split(":")[0]) for broken in ours.broken_at_open] == [("odd", "no image")]


def test_a_file_that_gnu_tar_writes_is_read(tmp_path):
    for name, body in pair(4).items():
        (tmp_path / f"k4.{name}").write_bytes(body)
    with tarfile.open(
        tmp_path / "g.tar", "w"
    ) as tar:  # as `tar cf g.tar .`: a folder entry, ./ before names, pax times
        tar.add(tmp_path, arcname=".", filter=lambda info: None if info.name.endswith(".tar") else info)
    pairs = open_shards(str(tmp_path / "g.tar"))
    assert len(pairs) == 1
    assert as_plain(pairs[0])[1:] == (["picture 4", "a view of 4"], "id4")


@pytest.mark.parametrize(
    ("members", "captions", "image_id"),
    [
        ({"json": b'{"caption": "one"}'}, ["one"], "x/odd"),
        ({"json": None, "txt": b" a text\n"}, ["a text"], "x/odd"),
        ({"json": b'{"image_id": 139}', "txt": b"from txt"}, ["from txt"], "139"),
        ({"json": b'{"captions": ["json wins"]}', "txt": b"from txt"}, ["json wins"], "x/odd"),
        ({"jpg": None, "png": jpeg(3, kind="PNG")}, ["picture 0", "a view of 0"], "id0"),
        ({"jpg": None, "webp": jpeg(3, kind="WEBP")}, ["picture 0", "a view of 0"], "id0"),
        ({"jpg": None, "jpeg": jpeg(3)}, ["picture 0", "a view of 0"], "id0"),
    ],
)
def test_all_documented_members_are_read(tmp_path, members, captions, image_id):
    sample = one_sample(tmp_path, **members)[0]
    assert (sample["captions"], sample["image_id"]) == (captions, image_id)
    assert sample["image"].size == (24, 20)


def test_labels_are_numbers_or_names_and_may_stand_without_captions(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a": {"jpg": jpeg(0), "cls": b"7"}, "b": {"jpg": jpeg(1), "cls": b"cat\n"}})
    pairs = open_shards(str(path), allow_missing_captions=True)
    assert [(pairs[index]["label"], pairs[index]["captions"]) for index in range(2)] == [(7, []), ("cat", [])]
    with pytest.raises(ValueError, match="image without caption"):
        open_shards(str(path))
    assert "label" not in one_sample(tmp_path)[0]


# --- broken samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jpg": jpeg(0)[:300]}, "image cannot be decoded"),
        ({"jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, "image cannot be decoded"),
        ({"jpg": None, "png": jpeg(0, kind="PNG")[:-300]}, "image cannot be decoded"),
        ({"json": b"{}"}, "missing caption"),
        ({"json": b'{"caption": ""}'}, "empty caption: ''"),
        ({"json": None, "txt": b"\n"}, "empty caption: ''"),
        ({"json": None, "txt": b"caf\xe9"}, "txt cannot be decoded"),
        ({"json": b'["a caption"]'}, "json has the wrong type: list instead of an object"),
        ({"json": b'{"captions": "a caption"}'}, "captions has the wrong type: str instead of a list of strings"),
        ({"json": b'{"captions": null}'}, "captions has the wrong type: NoneType"),
        ({"json": b'{"caption": ["a"]}'}, "caption is not a string: list"),
        ({"json": b'{"caption": "a", "image_id": [1]}'}, "image_id has the wrong type: list"),
        ({"json": b'{"caption": "cut'}, "json cannot be decoded"),
        ({"json": b'{"caption": "\xff"}'}, "json cannot be decoded"),
        ({"json": b'{"caption": ' + b"[" * 200_000 + b"}"}, "json cannot be decoded"),
        ({"json": b""}, "json cannot be decoded"),
        ({"cls": b"\xff"}, "cls cannot be decoded"),
    ],
)
def test_a_sample_that_cannot_be_used_says_which_and_why(tmp_path, changes, reason):
    pairs = one_sample(tmp_path, **changes)
    refused((f"^{tmp_path}/x.tar \\[odd\\]: {re.escape(reason)}", lambda: pairs[0]), error=BrokenSample)
    assert pairs[1]["image_id"] == "id1"
    readable = ["picture 0", "a view of 0"] if "jpg" in changes or "png" in changes else []
    assert list(pairs.all_captions()) == [*readable, "picture 1", "a view of 1"]


def black(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")  # millions of pixels in a few kilobytes
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # Pillow's own limit warns as well
@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((12_000, 10_000), "image is too large: 12000 x 10000 pixels, at most 100000000"),
        ((65_536, 1), "65536 x 1 pixels, at most 100000000 in all and 65535 a side"),  # a JPEG is no longer
    ],
)
def test_a_pixel_bomb_is_refused_by_its_header(tmp_path, size, words):
    with pytest.raises(BrokenSample, match=words):
        one_sample(tmp_path, jpg=None, png=black(*size))[0]


def test_a_picture_that_memory_cannot_hold_is_a_broken_sample(tmp_path):
    pairs = one_sample(tmp_path, jpg=None, png=black(9_000, 9_500))
    with at_most(megabytes=100), pytest.raises(BrokenSample, match=r"\[odd\]: sample is too large: there is not eno"):
        pairs[0]
    assert pairs[1]["image_id"] == "id1"


@pytest.mark.parametrize(("limit", "column"), [("MAX_MEMBER_BYTES", "image"), ("MAX_TEXT_BYTES", "json")])
def test_a_huge_member_is_refused_before_it_is_read(tmp_path, monkeypatch, limit, column):
    monkeypatch.setattr(pictures, limit, 40)
    pairs = open_shards(str(good_tar(tmp_path / "y.tar", 1)))
    with pytest.raises(BrokenSample, match=rf"{column} is too large: \d+ bytes, at most 40 are read"):
        pairs[0]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: good_tar(path, 30), "shard has changed: it had"),
        (lambda path: path.unlink(), "shard cannot be read: No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "shard cannot be read: Is a directory"),
    ],
)
def test_samples_of_a_shard_that_changes_or_vanishes_during_a_run_are_broken(tmp_path, spoil, reason):
    path = good_tar(tmp_path / "x.tar", 3)
    pairs = open_shards(str(path))
    spoil(path)
    with pytest.raises(BrokenSample, match=rf"x\.tar \[.*\]: {reason}"):
        pairs[0]


def test_a_picture_that_is_ranked_twice_is_an_error_that_names_both_places(tmp_path):
    one = write_tar(tmp_path / "a.tar", {"k0": pair(0), "k1": pair(1)})
    write_tar(tmp_path / "b.tar", {"k2": pair(2), "k3": pair(1)})
    words = rf"^image 'id1' occurs twice, in {one} \[k1\] and in {tmp_path}/b.tar \[k3\]; expected"
    refused((words, lambda: open_shards("*.tar", root=tmp_path, role="val")))
    assert len(open_shards("*.tar", root=tmp_path)) == 4  # training sees it twice


def test_a_line_of_a_text_is_a_caption_where_pictures_are_ranked(tmp_path):
    """CLIP_benchmark's converter joins the captions of a picture by line feeds; open_clip trains on the text as one."""
    metadata = {"captions": ["two\nlines", "one"], "image_id": 139}
    samples = {
        "k0": {"jpg": jpeg(0), "txt": b"a dog\n on grass \n\nbrown\n"},
        "k1": {"jpg": jpeg(1), "txt": b"ein Hund"},
        "k2": {"jpg": jpeg(2), "json": json.dumps(metadata).encode()},
        "k3": {"jpg": jpeg(3), "txt": b"\n"},  # an empty text is one more to rank
    }
    write_tar(tmp_path / "a.tar", samples)
    index = tmp_path / "index"
    training = open_shards("a.tar", root=tmp_path, index_dir=index)
    assert [len(training.captions(place)) for place in range(3)] == [1, 1, 2]
    for _ in range(2):  # the second time from the kept index
        ranked = open_shards("a.tar", root=tmp_path, role="test", index_dir=index)
        assert ranked.captions(0) == ["a dog", "on grass", "brown"]
        assert ranked.captions(1) == training.captions(1) == ["ein Hund"]
        assert ranked.captions(2) == training.captions(2)
        assert ranked.captions(3) == [""]
        assert [ranked.image_id(place) for place in (0, 2)] == ["a/k0", "139"]
    assert ranked.fingerprint != training.fingerprint


def test_without_an_image_id_shard_and_key_name_a_picture(tmp_path):
    """Shards may begin their keys anew, and lie in several folders."""
    samples = {"k0": {"jpg": jpeg(0), "txt": b"a dog"}, "k1": pair(1, json=b'{"caption": "a", "image_id": ""}')}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("a.tar", "b.tar"):
            write_tar(tmp_path / folder / name, samples)
    pairs = open_shards("one/*.tar", root=tmp_path, role="test")
    assert [pairs.image_id(index) for index in range(4)] == ["a/k0", "a/k1", "b/k0", "b/k1"]
    assert pairs[2]["image_id"] == "b/k0"
    pairs = open_shards("*/*.tar", root=tmp_path, role="test")
    assert [pairs.image_id(index) for index in range(0, 8, 2)] == ["one/a/k0", "one/b/k0", "two/a/k0", "two/b/k0"]


# --- processes -------------------------------------------------------------------------------------------------------


def test_more_shards_than_open_files_and_threads_are_fine(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "_opened", lru_cache(2)(pictures._opened.__wrapped__))
    for shard in range(6):
        good_tar(tmp_path / f"{shard}.tar", 3, first=3 * shard)
    pairs = open_shards("*.tar", root=tmp_path)
    indices = np.random.default_rng(0).integers(0, 18, 240)
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda index: pairs[index]["image_id"], indices))
    assert ids == [f"id{index}" for index in indices]
    assert pictures._opened.cache_info().currsize == 2
