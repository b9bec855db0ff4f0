"""common/data/tar_index.py: whole, cut and foreign shards, and the index kept between runs."""

import io
import os
import struct
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from readable import read_all
from tars import good_tar, pair, write_tar

from common.data import tar_index
from common.data.shards import open_shards
from common.data.tar_index import index_shard


def spans(index):
    """(samples, picture and json, first byte and size)."""
    return np.array([[row["image"], row["json"]] for row in index.rows.to_pylist()])


@pytest.mark.parametrize("size", [-512, -(1 << 40), 1 << 40, (1 << 87) - 1])
@pytest.mark.parametrize("name", ["k.jpg", "no extension"])
def test_an_absurd_size_in_a_header_ends_the_shard_and_never_hangs(tmp_path, size, name):
    path = good_tar(tmp_path / "x.tar", 1)
    index = index_shard(path)
    end = int(spans(index)[0, 1, 0]) + 512
    info = tarfile.TarInfo(name)
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = (size % (1 << 96)).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(path.read_bytes()[:end] + header + b"\0" * 1024)
    again = index_shard(path)
    assert (len(again.rows), len(again.broken)) == (1, 1)
    assert again.broken[0].reason.startswith("unreadable header" if size < 0 else "shard is cut")


def test_times_in_the_headers_of_an_incremental_gnu_tar_are_no_part_of_its_keys(tmp_path):
    """`tar --format=gnu --listed-incremental` writes them where ustar has the first part of a long name."""
    path = write_tar(tmp_path / "x.tar", {"folder/k": pair(0)}, tarfile.GNU_FORMAT)
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    content = bytearray(path.read_bytes())
    for number, member in enumerate(members):
        header = content[member.offset : member.offset + 512]
        header[345:357] = b"%011o\0" % (10**9 + number)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        content[member.offset : member.offset + 512] = header
    path.write_bytes(content)
    index = index_shard(path)
    assert (index.rows["name"].to_pylist(), index.broken) == ([b"folder/k"], [])


def test_members_without_partner_and_doubles_are_listed_at_opening(tmp_path):
    path = tmp_path / "x.tar"
    samples = {"a": pair(0), "no_text": pair(1, json=None), "no_picture": pair(2, jpg=None)}
    samples |= {"other": {"xyz": b"1"}, "b": pair(3)}
    write_tar(path, samples)
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    good, broken = read_all(open_shards(path))
    assert [sample[2] for sample in good.values()] == ["id0", "id3"]
    assert {fault.key: fault.reason for fault in broken} == {
        "a": "second image member: a.jpg is ignored",
        "no_text": "image without caption: no json or txt member",
        "no_picture": "no image: it has only json; expected one of: jpg, jpeg, png, webp",
        "other": "no image: unknown members other.xyz",
    }


# --- the cache of the index ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tar", os.fsdecode(b"\xe9t\xe9.tar")])
def test_a_cached_index_is_used_and_gives_the_same_data_set(tmp_path, monkeypatch, name):
    path = good_tar(tmp_path / name, 3)
    path.write_bytes(path.read_bytes()[: int(spans(index_shard(path))[2, 0, 0]) + 10])
    plain = open_shards(str(path))
    assert (len(plain), len(plain.broken_at_open)) == (2, 1)
    first = open_shards(str(path), index_dir=tmp_path / "index")
    assert len(list((tmp_path / "index").iterdir())) == 1
    monkeypatch.setattr(tar_index, "index_shard", lambda *a, **k: pytest.fail("the shard was read again"))
    second = open_shards(str(path), index_dir=tmp_path / "index")
    for other in (first, second):
        assert (other.fingerprint, read_all(other)) == (plain.fingerprint, read_all(plain))


def test_the_rows_of_a_kept_index_stay_in_its_file(tmp_path):
    """So that it opens at once, and processes share its memory."""
    path = good_tar(tmp_path / "x.tar", 300)
    rows = index_shard(path).rows.nbytes
    open_shards(path, index_dir=tmp_path / "index")
    before = pa.total_allocated_bytes()
    pairs = open_shards(path, index_dir=tmp_path / "index")
    assert pa.total_allocated_bytes() - before < rows / 20
    assert pairs.captions(299) == ["picture 299", "a view of 299"]


def test_a_stale_index_is_rebuilt(tmp_path):
    path = good_tar(tmp_path / "x.tar", 3)
    open_shards(str(path), index_dir=tmp_path / "index")
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"picture 1", b"picture 7"))  # same size, another time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    again = open_shards(str(path), index_dir=tmp_path / "index")
    assert (again.fingerprint, again.captions(1)[0]) == (open_shards(str(path)).fingerprint, "picture 7")
    good_tar(path, 5)
    assert len(open_shards(str(path), index_dir=tmp_path / "index")) == 5
    assert len(list((tmp_path / "index").iterdir())) == 1  # replaced, not collected


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "bytes"])
def test_a_corrupt_index_is_rebuilt(tmp_path, damage):
    path = good_tar(tmp_path / "x.tar", 3)
    expected = open_shards(str(path), index_dir=tmp_path / "index").fingerprint
    (cache,) = (tmp_path / "index").iterdir()
    content = cache.read_bytes()
    start = struct.pack("<q", spans(index_shard(path))[1, 0, 0])
    assert content.count(start) == 1
    flipped = content.replace(start, bytes([start[0] ^ 1]) + start[1:])
    cache.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "bit": flipped, "bytes": b"\0\1"}[damage])
    again = open_shards(path, index_dir=tmp_path / "index")
    assert (again.fingerprint, [again[row]["image_id"] for row in range(3)]) == (expected, ["id0", "id1", "id2"])
    assert cache.read_bytes() == content


def test_an_index_folder_that_cannot_be_written_warns_and_reads_on(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the shard index cannot be cached"):
        pairs = open_shards(str(good_tar(tmp_path / "x.tar", 2)), index_dir=tmp_path / "file" / "index")
    assert len(pairs) == 2
