"""common/data/shards.py and common/data/broken.py: what is read, what is refused, and how it is said."""

import io
import json
import os
import pickle
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from common.data import shards
from common.data.broken import BrokenSample, BrokenSamples
from common.data.shards import ShardDataset, expand_shards, index_shard


def jpeg(seed: int, size: tuple[int, int] = (24, 20), kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def pair(seed: int, **changes: object) -> dict[str, bytes]:
    """Members of one sample; a change of None leaves a member out."""
    content = {"image_id": f"id{seed}", "captions": [f"picture {seed}", f"a view of {seed}"]}
    members = {"jpg": jpeg(seed), "json": json.dumps(content).encode()}
    members |= changes
    return {extension: body for extension, body in members.items() if body is not None}


def write_tar(path: Path, samples: dict[str, dict[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for key, members in samples.items():
            for extension, body in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    return path


def good_tar(path: Path, num_samples: int, first: int = 0) -> Path:
    return write_tar(path, {f"k{seed:04d}": pair(seed) for seed in range(first, first + num_samples)})


def one_sample(folder: Path, **changes: object) -> ShardDataset:
    """A data set whose sample 0 is changed and whose sample 1 is good."""
    return ShardDataset(str(write_tar(folder / "x.tar", {"odd": pair(0, **changes), "good": pair(1)})))


def as_plain(sample: dict) -> tuple:
    return np.asarray(sample["image"]).tobytes(), sample["captions"], sample["image_id"]


def as_is(batch: list) -> list:
    return [as_plain(sample) for sample in batch]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_random_access_equals_sequential_reading_with_tarfile(tmp_path):
    for shard in range(3):
        good_tar(tmp_path / f"s-{shard}.tar", 4 + shard, first=10 * shard)
    expected = []
    for path in sorted(tmp_path.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        for name in [name for name in members if name.endswith("jpg")]:
            content = json.loads(members[name.replace("jpg", "json")])
            pixels = np.asarray(Image.open(io.BytesIO(members[name])).convert("RGB")).tobytes()
            expected.append((pixels, content["captions"], content["image_id"]))
    pairs = ShardDataset("s-{0..2}.tar", root=tmp_path)
    assert len(pairs) == len(expected) == 15
    for index in np.random.default_rng(0).permutation(15):
        assert as_plain(pairs[index]) == expected[index]
        assert pairs.captions(int(index)) == expected[index][1]
        assert pairs.image_id(int(index)) == expected[index][2]
    assert as_plain(pairs[-1]) == expected[-1]
    for outside in (15, -16):
        with pytest.raises(IndexError, match="which has 15"):
            pairs[outside]
    assert pairs[0]["image"].mode == "RGB"


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_same_samples_as_the_webdataset_library(tmp_path, tar_format):
    webdataset = pytest.importorskip("webdataset")
    samples = {f"folder/k{seed}": pair(seed) for seed in range(5)}
    samples |= {"deeper/" * 17 + "name": pair(5), "übung": pair(6), "odd.name": {"jpg": jpeg(7), "json": b"{}"}}
    samples["upper"] = {"JPG": jpeg(8), "json": pair(8)["json"]}
    path = write_tar(tmp_path / "a.tar", samples, tar_format)
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    theirs = [item for item in theirs if "jpg" in item]  # odd.name.jpg has the extension name.jpg there, too
    ours = ShardDataset(str(path))
    assert len(ours) == len(theirs) == 8
    for index, item in enumerate(theirs):
        assert ours._key(*ours._locate(index)) == item["__key__"]
        assert ours._read(*ours._locate(index), "image") == item["jpg"]
        assert ours.metadata(index) == json.loads(item["json"])
    assert [(broken.key, broken.reason.split(":")[0]) for broken in ours.broken_at_open] == [("odd", "no picture")]


def test_files_that_gnu_tar_and_webdataset_write_are_read(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        for seed in range(3):
            writer.write({"__key__": f"k{seed}", **pair(seed)})
    assert [ShardDataset(str(tmp_path / "w.tar"))[index]["image_id"] for index in range(3)] == ["id0", "id1", "id2"]
    for name, body in pair(4).items():
        (tmp_path / f"k4.{name}").write_bytes(body)
    with tarfile.open(
        tmp_path / "g.tar", "w"
    ) as tar:  # as `tar cf g.tar .`: a folder entry, ./ before names, pax times
        tar.add(tmp_path, arcname=".", filter=lambda info: None if info.name.endswith(".tar") else info)
    pairs = ShardDataset(str(tmp_path / "g.tar"))
    assert len(pairs) == 1
    assert as_plain(pairs[0])[1:] == (["picture 4", "a view of 4"], "id4")


@pytest.mark.parametrize(
    ("members", "captions", "image_id"),
    [
        ({"json": b'{"caption": "one"}'}, ["one"], "odd"),
        ({"json": None, "txt": b" a text\n"}, ["a text"], "odd"),
        ({"json": b'{"image_id": 139}', "txt": b"from txt"}, ["from txt"], "139"),
        ({"json": b'{"captions": ["json wins"]}', "txt": b"from txt"}, ["json wins"], "odd"),
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
    pairs = ShardDataset(str(path), allow_missing_captions=True)
    assert [(pairs[index]["label"], pairs[index]["captions"]) for index in range(2)] == [(7, []), ("cat", [])]
    with pytest.raises(ValueError, match="picture without caption"):
        ShardDataset(str(path))
    assert "label" not in one_sample(tmp_path)[0]


def test_grey_and_palette_pictures_become_rgb(tmp_path):
    buffer = io.BytesIO()
    Image.new("P", (5, 4)).save(buffer, "PNG")
    assert one_sample(tmp_path, jpg=None, png=buffer.getvalue())[0]["image"].mode == "RGB"


def test_decode_size_keeps_both_sides_large_enough(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a": pair(0, jpg=jpeg(0, (640, 480)))})
    assert ShardDataset(str(path))[0]["image"].size == (640, 480)
    assert ShardDataset(str(path), decode_size=200)[0]["image"].size == (320, 240)
    assert ShardDataset(str(path), decode_size=500)[0]["image"].size == (640, 480)


# --- which files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "{00000..00012}.tar",
        "{0..10..3}",
        "{3..1}",
        "{a,b}{1..2}",
        "x{a,{b,c}d}y",
        "{a..d}",
        "plain",
        "{-1..1}",
        "{08..11}",
    ],
)
def test_braces_expand_as_in_the_braceexpand_package(pattern):
    braceexpand = pytest.importorskip("braceexpand")
    # as sets: the files are sorted afterwards, so the order of nested braces does not matter
    assert set(shards._expand_braces(pattern)) == set(braceexpand.braceexpand(pattern))


@pytest.mark.parametrize("pattern", ["{}", "{alone}", "{1..a}", "open{1..2", "}{"])
def test_braces_without_a_list_or_a_range_stay(pattern):
    assert shards._expand_braces(pattern) == [pattern]


def test_patterns_find_files_sorted_and_once(tmp_path, monkeypatch):
    names = ["a-0.tar", "a-1.tar", "a-10.tar", "b-0.tar", "notes.txt"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.tar").touch()

    def found(pattern, root=tmp_path):
        return [str(path.relative_to(tmp_path)) for path in expand_shards(pattern, root)]

    assert found("a-{0..1}.tar") == ["a-0.tar", "a-1.tar"]
    assert found("{b,a}-0.tar") == ["a-0.tar", "b-0.tar"]
    assert found("a-?.tar") == ["a-0.tar", "a-1.tar"]
    assert found("[ab]-0.tar") == ["a-0.tar", "b-0.tar"]
    assert found("{a,b}-*.tar") == names[:4]
    assert found(["a-*.tar", "./a-0.tar", "deep/../a-0.tar"]) == names[:3]
    assert found(".") == names[:4]
    assert found("**/c.tar") == ["deep/c.tar"]
    assert found(str(tmp_path / "a-*.tar"), None) == names[:3]
    assert found(tmp_path / "deep") == ["deep/c.tar"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/a-0.tar", "/") == ["a-0.tar"]
    assert found("a-0.tar", "~") == ["a-0.tar"]
    monkeypatch.chdir(tmp_path)
    assert found("a-0.tar", None) == ["a-0.tar"]


def test_a_folder_or_file_with_brackets_in_its_name_is_found(tmp_path):
    folder = tmp_path / "set [v1] {x}"
    folder.mkdir()
    (folder / "a{1,2}.tar").touch()
    assert [path.name for path in expand_shards("*.tar", folder)] == ["a{1,2}.tar"]
    assert [path.name for path in expand_shards("a{1,2}.tar", folder)] == ["a{1,2}.tar"]
    assert [path.name for path in expand_shards(str(folder))] == ["a{1,2}.tar"]


def test_shards_that_are_not_there_are_named(tmp_path):
    good_tar(tmp_path / "00000.tar", 1)
    with pytest.raises(FileNotFoundError) as error:
        ShardDataset("{00000..00009}.tar", root=tmp_path)
    for part in ("'{00000..00009}.tar'", repr(str(tmp_path)), "9 of 10", str(tmp_path / "00001.tar"), "and 6 more"):
        assert part in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"no shards for pattern '\*val\*\.tar'"):
        expand_shards("*val*.tar", tmp_path)
    with pytest.raises(FileNotFoundError, match="the root folder does not exist"):
        expand_shards("*.tar", tmp_path / "nowhere")
    for empty in ("", [], ["a.tar", ""]):
        with pytest.raises(ValueError, match="shard pattern"):
            expand_shards(empty, tmp_path)


# --- broken shards ---------------------------------------------------------------------------------------------------


def test_a_shard_cut_at_any_byte_gives_its_complete_samples_and_names_the_cut(tmp_path):
    whole = good_tar(tmp_path / "whole.tar", 3)
    full = index_shard(whole)
    ends = [int((full.members[row, :2, 0] + full.members[row, :2, 1]).max()) for row in range(3)]
    first_of = [int(full.members[row, 0, 0]) - 512 for row in range(3)]  # where the header of the picture starts
    content = whole.read_bytes()
    cut = tmp_path / "cut.tar"
    end_of_data = -(-ends[2] // 512) * 512
    kinds = set()
    # every class of position: around headers, bodies, padding and end blocks of the second and third sample
    json_header = int(full.members[2, 1, 0]) - 512
    positions = {first_of[1], first_of[2], json_header, end_of_data, ends[2], ends[1]}
    positions = {place + shift for place in positions for shift in (-513, -512, -511, -1, 0, 1, 300, 511, 512, 513)}
    for position in sorted(positions | set(range(first_of[1] + 7, len(content), 997))):
        if not ends[0] <= position <= len(content):
            continue
        cut.write_bytes(content[:position])
        index = index_shard(cut)
        complete = sum(end <= position for end in ends)
        assert len(index.members) == complete, position
        for row in range(complete):
            assert (index.members[row] == full.members[row]).all()
        if position >= end_of_data + 512:
            assert index.broken == []  # one end block says that the tar ends here
            continue
        assert len(index.broken) == 1, (position, index.broken)
        broken = index.broken[0]
        assert broken.path == str(cut)
        kind = broken.reason.split(":")[0]
        kinds.add(kind)
        if kind == "shard is cut" or (
            kind == "shard is cut in a header" and json_header < position < json_header + 512
        ):
            assert broken.key == f"k{complete:04d}", (position, str(broken))
        pairs = ShardDataset(str(cut))
        assert [pairs[row]["image_id"] for row in range(complete)] == [f"id{row}" for row in range(complete)]
    assert kinds == {"shard is cut", "shard is cut in a header", "shard ends without end-of-archive blocks"}


def test_a_damaged_header_ends_the_shard_and_is_named(tmp_path):
    path = good_tar(tmp_path / "x.tar", 3)
    content = bytearray(path.read_bytes())
    start = int(index_shard(path).members[1, 0, 0]) - 512
    content[start + 3] ^= 0xFF
    path.write_bytes(content)
    index = index_shard(path)
    assert len(index.members) == 1
    assert [broken.reason for broken in index.broken] == [f"unreadable header, the rest is not read: at byte {start}"]


@pytest.mark.parametrize("size", [-512, -(1 << 40), 1 << 40, (1 << 87) - 1])
@pytest.mark.parametrize("name", ["k.jpg", "no extension"])
def test_an_absurd_size_in_a_header_ends_the_shard_and_never_hangs(tmp_path, size, name):
    path = good_tar(tmp_path / "x.tar", 1)
    index = index_shard(path)
    end = int(index.members[0, 1, 0]) + 512
    info = tarfile.TarInfo(name)
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = (size % (1 << 96)).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(path.read_bytes()[:end] + header + b"\0" * 1024)
    again = index_shard(path)
    assert (len(again.members), len(again.broken)) == (1, 1)
    assert again.broken[0].reason.startswith("unreadable header" if size < 0 else "shard is cut")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello, this is no tar at all" * 40, "is not a tar: it starts with b'hello, this is n'"),
        (b"\x1f\x8b" + b"0" * 2000, "a gzip file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"x" * 100, "is not a tar"),
    ],
)
def test_a_file_that_is_no_tar_is_named(tmp_path, content, words):
    path = tmp_path / "bad.tar"
    path.write_bytes(content)
    good_tar(tmp_path / "good.tar", 2)
    with pytest.raises(ValueError) as error:
        ShardDataset("*.tar", root=tmp_path)
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_members_without_partner_and_doubles_are_listed_at_opening(tmp_path):
    path = tmp_path / "x.tar"
    samples = {"a": pair(0), "no_text": pair(1, json=None), "no_picture": pair(2, jpg=None)}
    samples |= {"other": {"npy": b"1"}, "b": pair(3)}
    write_tar(path, samples)
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    pairs = ShardDataset(str(path))
    assert [pairs[index]["image_id"] for index in range(len(pairs))] == ["id0", "id3"]
    reasons = {broken.key: broken.reason for broken in pairs.broken_at_open}
    assert reasons == {
        "a": "second image member: a.jpg is ignored",
        "no_text": "picture without caption: no json or txt member",
        "no_picture": "no picture: it has only json; accepted: jpg, jpeg, png, webp",
        "other": "no picture: unknown members other.npy",
    }


def test_opening_stops_when_too_many_are_broken(tmp_path):
    samples = {f"k{seed}": {"jpg": b"x", "txt": b"t"} if seed % 10 else {"jpg": b"x"} for seed in range(200)}
    write_tar(tmp_path / "x.tar", samples)
    with pytest.raises(ValueError, match=r"20 of 200 samples are broken \(10.00%\); at most 1.00% is accepted"):
        ShardDataset(str(tmp_path / "x.tar"))
    pairs = ShardDataset(str(tmp_path / "x.tar"), max_broken_share=0.1)
    assert (len(pairs), len(pairs.broken_at_open)) == (180, 20)


# --- broken samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jpg": jpeg(0)[:-200]}, "picture cannot be decoded: OSError, image file is truncated"),
        ({"jpg": jpeg(0)[:300]}, "picture cannot be decoded"),
        ({"jpg": b""}, "picture cannot be decoded"),
        ({"jpg": b"<html>404</html>"}, "picture cannot be decoded: UnidentifiedImageError"),
        ({"jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, "picture cannot be decoded"),
        ({"jpg": None, "png": jpeg(0, kind="PNG")[:-300]}, "picture cannot be decoded"),
        ({"json": b"{}"}, "missing caption"),
        ({"json": b'{"captions": []}'}, "missing caption"),
        ({"json": b'{"captions": ["fine", "  "]}'}, "empty caption: '  '"),
        ({"json": b'{"caption": ""}'}, "empty caption: ''"),
        ({"json": None, "txt": b"\n"}, "empty caption: ''"),
        ({"json": None, "txt": b"\xff\xfe"}, "txt cannot be decoded"),
        ({"json": b'["a caption"]'}, "json has the wrong type: list instead of an object"),
        ({"json": b'{"captions": "a caption"}'}, "captions has the wrong type: str instead of a list of strings"),
        ({"json": b'{"captions": null}'}, "captions has the wrong type: NoneType"),
        ({"json": b'{"captions": ["a", 3]}'}, "caption is not a string: int"),
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
    with pytest.raises(BrokenSample) as error:
        pairs[0]
    assert (error.value.path, error.value.key) == (str(tmp_path / "x.tar"), "odd")
    assert error.value.reason.startswith(reason)
    assert str(error.value) == f"{tmp_path / 'x.tar'} [odd]: {error.value.reason}"
    assert pairs[1]["image_id"] == "id1"
    assert pickle.loads(pickle.dumps(error.value)) == error.value
    if "jpg" in changes or "png" in changes:
        assert pairs.captions(0) == ["picture 0", "a view of 0"]
    else:
        assert list(pairs.all_captions())[-2:] == ["picture 1", "a view of 1"]


@pytest.mark.parametrize("kept", [2, 20, 200, 0.5, -2, -1])
def test_a_jpeg_cut_anywhere_is_broken_never_half_grey(tmp_path, kept):
    body = jpeg(0)
    pairs = one_sample(tmp_path, jpg=body[: int(kept * len(body)) if isinstance(kept, float) else kept])
    with pytest.raises(BrokenSample, match="picture cannot be decoded"):
        pairs[0]


def test_an_empty_caption_is_legal_in_evaluation(tmp_path):
    good = write_tar(tmp_path / "x.tar", {"a": pair(0, json=b'{"captions": ["", "b"]}')})
    for options in ({"role": "test"}, {"role": "val"}, {"role": "second_test"}, {"allow_empty_captions": True}):
        assert ShardDataset(str(good), **options)[0]["captions"] == ["", "b"]
    for options in ({}, {"role": "test", "allow_empty_captions": False}):
        with pytest.raises(BrokenSample, match="empty caption"):
            ShardDataset(str(good), **options)[0]
    none = write_tar(tmp_path / "y.tar", {"a": pair(0, json=b"{}")})
    with pytest.raises(BrokenSample, match="missing caption"):
        ShardDataset(str(none), role="test")[0]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # Pillow's own limit warns as well
def test_a_pixel_bomb_is_refused_by_its_header(tmp_path):
    buffer = io.BytesIO()
    Image.new("1", (12_000, 10_000)).save(buffer, "PNG")  # 120 million pixels in a few kilobytes
    with pytest.raises(BrokenSample, match=r"picture is too large: 12000 x 10000 pixels, at most 100000000"):
        one_sample(tmp_path, jpg=None, png=buffer.getvalue())[0]
    pairs = ShardDataset(str(good_tar(tmp_path / "y.tar", 1)), max_pixels=24 * 20 - 1)
    with pytest.raises(BrokenSample, match="24 x 20"):
        pairs[0]


def test_a_huge_member_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_MEMBER_BYTES", 400)
    pairs = ShardDataset(str(good_tar(tmp_path / "y.tar", 1)))
    with pytest.raises(BrokenSample, match="image is too large"):
        pairs[0]


def test_a_shard_that_changes_during_a_run_is_an_error(tmp_path):
    path = good_tar(tmp_path / "x.tar", 3)
    pairs = ShardDataset(str(path))
    good_tar(path, 30)
    with pytest.raises(RuntimeError, match=rf"{path} changed"):
        pairs[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "dev"}, "role is 'dev'; accepted: train, val, test, second_test"),
        ({"decode_size": 0}, "decode_size is 0"),
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"max_broken_share": 1.5}, "max_share is 1.5"),
    ],
)
def test_bad_arguments_are_refused_with_value_and_accepted(tmp_path, options, words):
    with pytest.raises(ValueError) as error:
        ShardDataset(str(good_tar(tmp_path / "x.tar", 1)), **options)
    assert words in str(error.value)


# --- the counter -----------------------------------------------------------------------------------------------------


def test_the_counter_stops_above_the_share_and_only_after_enough_samples(tmp_path):
    counter = BrokenSamples(max_share=0.1, minimum_seen=100)
    for number in range(11):
        counter.record(BrokenSample("a.tar", f"k{number}", "empty caption: ''" if number % 2 else "missing caption"))
    counter.saw(88)
    counter.check()  # 11 of 99, not enough seen
    counter.saw(11)
    counter.check()  # 11 of 110 is exactly the share
    assert (counter.seen, counter.count, counter.share) == (110, 11, 0.1)
    assert counter.by_reason == {"missing caption": 6, "empty caption": 5}
    counter.record(BrokenSample("b.tar", "", "shard is cut"))
    with pytest.raises(ValueError) as error:
        counter.check()
    for part in ("12 of 111", "10.81%", "10.00%", "max_broken_share", "6 x missing caption", "and 7 more"):
        assert part in str(error.value)
    assert "a.tar [k0]: missing caption" in str(error.value)


def test_the_counter_lists_a_sample_once_and_writes_json_lines(tmp_path):
    counter = BrokenSamples(max_share=1.0)
    for _ in range(3):
        counter.record(BrokenSample("a.tar", "k", "missing caption"))
    counter.record(BrokenSample("b.tar", "", "shard is cut: at byte 7"))
    assert (counter.count, len(counter.samples)) == (4, 2)
    counter.write(tmp_path / "broken.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "broken.jsonl").read_text().splitlines()]
    assert lines == [
        {"path": "a.tar", "key": "k", "reason": "missing caption", "times": 3},
        {"path": "b.tar", "key": "", "reason": "shard is cut: at byte 7", "times": 1},
    ]


def test_a_small_set_is_judged_once_all_of_it_was_seen():
    counter = BrokenSamples(max_share=0.1, minimum_seen=100, total=4)
    counter.record(BrokenSample("a.tar", "k", "x"))
    counter.check()
    counter.saw(3)
    with pytest.raises(ValueError, match="1 of 4"):
        counter.check()
    assert BrokenSamples().share == 0.0
    for options in ({"max_share": -0.1}, {"max_share": float("nan")}, {"minimum_seen": 0}, {"total": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            BrokenSamples(**options)


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_what_one_process_reads(tmp_path, context):
    for shard in range(3):
        good_tar(tmp_path / f"{shard}.tar", 5, first=5 * shard)
    pairs = ShardDataset("*.tar", root=tmp_path)
    expected = [as_plain(pairs[index]) for index in range(15)]  # handles are open before the fork
    loader = DataLoader(pairs, batch_size=4, num_workers=2, collate_fn=as_is, multiprocessing_context=context)
    assert [item for batch in loader for item in batch] == expected


def test_a_pickle_has_no_open_file_and_reads_the_same(tmp_path):
    pairs = ShardDataset(str(good_tar(tmp_path / "x.tar", 3)))
    first = as_plain(pairs[2])
    copy = pickle.loads(pickle.dumps(pairs))
    assert len(copy._files._files) == 0
    assert as_plain(copy[2]) == first
    assert (copy.name, copy.fingerprint, len(copy)) == (pairs.name, pairs.fingerprint, 3)


def test_more_shards_than_open_files_and_threads_are_fine(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_OPEN_FILES", 2)
    for shard in range(6):
        good_tar(tmp_path / f"{shard}.tar", 3, first=3 * shard)
    pairs = ShardDataset("*.tar", root=tmp_path)
    wrong = []

    def read(seed):
        for index in np.random.default_rng(seed).integers(0, 18, 60):
            if pairs[index]["image_id"] != f"id{index}":
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(pairs._files._files) == 2


# --- identity --------------------------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_the_data_and_not_with_reopening_or_moving(tmp_path):
    path = good_tar(tmp_path / "x.tar", 3)
    before = ShardDataset(str(path)).fingerprint
    assert len(before) == 64
    assert ShardDataset(str(path)).fingerprint == before
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "x.tar"
    moved.write_bytes(path.read_bytes())
    assert ShardDataset(str(moved)).fingerprint == before
    content = path.read_bytes()
    path.write_bytes(content.replace(b"picture 1", b"picture 7"))  # same length
    assert ShardDataset(str(path)).fingerprint != before
    path.write_bytes(content.replace(b"k0001.j", b"k0009.j"))
    assert index_shard(path).broken  # the header's checksum no longer fits
    good_tar(path, 4)
    assert ShardDataset(str(path)).fingerprint != before
    renamed = moved.rename(moved.with_name("y.tar"))
    assert ShardDataset(str(renamed)).fingerprint != before


def test_hash_images_sees_a_picture_of_equal_length(tmp_path):
    prints = []
    for last in (b"a", b"b"):
        path = write_tar(tmp_path / "x.tar", {"k": pair(0, jpg=jpeg(0) + last)})
        prints.append([ShardDataset(str(path), hash_images=flag).fingerprint for flag in (False, True)])
    assert prints[0][0] == prints[1][0]
    assert prints[0][1] != prints[1][1]


def test_the_split_hash_is_of_ids_and_captions_not_of_packing(tmp_path):
    one = ShardDataset(str(good_tar(tmp_path / "one.tar", 4)))
    good_tar(tmp_path / "p-0.tar", 1)
    good_tar(tmp_path / "p-1.tar", 3, first=1)
    two = ShardDataset("p-*.tar", root=tmp_path)
    assert one.split_hash == two.split_hash
    assert one.fingerprint != two.fingerprint
    other = ShardDataset(str(good_tar(tmp_path / "other.tar", 3)))
    assert other.split_hash != one.split_hash


def test_names_come_from_the_first_shard(tmp_path):
    for name, expected in (
        ("set-train-000003.tar", "set-train"),
        ("00000.tar", tmp_path.name),
        ("photos.tar", "photos"),
    ):
        assert ShardDataset(str(good_tar(tmp_path / name, 1))).name == expected
    assert ShardDataset(str(tmp_path / "photos.tar"), name="mine").name == "mine"


# --- the cache of the index ------------------------------------------------------------------------------------------


def test_a_cached_index_is_used_and_gives_the_same_data_set(tmp_path, monkeypatch):
    path = good_tar(tmp_path / "x.tar", 3)
    path.write_bytes(path.read_bytes()[: int(index_shard(path).members[2, 0, 0]) + 10])
    plain = ShardDataset(str(path))
    assert (len(plain), len(plain.broken_at_open)) == (2, 1)
    first = ShardDataset(str(path), index_dir=tmp_path / "index")
    assert len(list((tmp_path / "index").iterdir())) == 1
    monkeypatch.setattr(shards, "index_shard", lambda *a, **k: pytest.fail("the shard was read again"))
    second = ShardDataset(str(path), index_dir=tmp_path / "index")
    for other in (first, second):
        assert other.fingerprint == plain.fingerprint
        assert other.broken_at_open == plain.broken_at_open
        assert [as_plain(other[i]) for i in range(len(other))] == [as_plain(plain[i]) for i in range(len(plain))]


def test_a_stale_index_is_rebuilt(tmp_path):
    path = good_tar(tmp_path / "x.tar", 3)
    ShardDataset(str(path), index_dir=tmp_path / "index")
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"picture 1", b"picture 7"))  # same size, another time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    again = ShardDataset(str(path), index_dir=tmp_path / "index")
    assert again.fingerprint == ShardDataset(str(path)).fingerprint
    assert again.captions(1)[0] == "picture 7"
    good_tar(path, 5)
    assert len(ShardDataset(str(path), index_dir=tmp_path / "index")) == 5
    assert len(list((tmp_path / "index").iterdir())) == 1  # replaced, not collected


@pytest.mark.parametrize("damage", ["cut", "empty", "list", "digit", "key", "bytes"])
def test_a_corrupt_index_is_rebuilt(tmp_path, damage):
    path = good_tar(tmp_path / "x.tar", 3)
    expected = ShardDataset(str(path), index_dir=tmp_path / "index").fingerprint
    (cache,) = (tmp_path / "index").iterdir()
    text = cache.read_text()
    content = json.loads(text)
    start = content["members"][1][0][0]
    changed = {
        "cut": text[: len(text) // 2],
        "empty": "",
        "list": "[]",
        "digit": text.replace(f"[{start}, ", f"[{start + 1}, "),
        "key": json.dumps({key: value for key, value in content.items() if key != "members"}),
        "bytes": "\x00\x01",
    }[damage]
    assert changed != text
    cache.write_text(changed)
    again = ShardDataset(str(path), index_dir=tmp_path / "index")
    assert (again.fingerprint, [again[row]["image_id"] for row in range(3)]) == (expected, ["id0", "id1", "id2"])
    assert cache.read_text() == text


def test_an_index_folder_that_cannot_be_written_warns_and_reads_on(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the shard index cannot be kept"):
        pairs = ShardDataset(str(good_tar(tmp_path / "x.tar", 2)), index_dir=tmp_path / "file" / "index")
    assert len(pairs) == 2


# --- real photographs ------------------------------------------------------------------------------------------------


def test_flickr8k_has_the_documented_counts():
    folder = os.environ.get("VL_DATA_DIR")
    if not folder or not (Path(folder) / "flickr8k").is_dir():
        pytest.skip("set VL_DATA_DIR to a folder that has flickr8k/flickr8k-{train,val,test}-*.tar")
    root = Path(folder) / "flickr8k"
    train = ShardDataset("flickr8k-train-{000000..000003}.tar", root=root)
    test = ShardDataset("*test*.tar", root=root, role="test")
    assert (len(train), sum(1 for _ in train.all_captions())) == (5_000, 25_000)
    assert (len(test), sum(len(test.captions(index)) for index in range(1_000))) == (1_000, 5_000)
    assert train.broken_at_open == test.broken_at_open == []
    assert {train[index]["image"].size for index in range(0, 5_000, 500)} == {(144, 144)}
    ids = [{pairs.image_id(index) for index in range(len(pairs))} for pairs in (train, test)]
    assert (len(ids[0]), len(ids[1]), ids[0] & ids[1]) == (5_000, 1_000, set())
