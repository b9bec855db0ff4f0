"""Five hundred damaged shards: nothing hangs, nothing raises from the depths, and no sample is lost in silence.

Every case damages one of three shards, reads all three in full and closes the books over the samples:

    read with the bytes that were written + named as broken + inside a range of bytes that is reported = all of them.

A sample whose own bytes were changed may also come out changed where its format has no checksum (a flipped bit in the
pixels of a JPEG); no other sample may. The cases are drawn from a fixed seed.
"""

import contextlib
import gzip
import io
import itertools
import json
import re
import signal
import struct
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tars import as_plain, good_tar, jpeg, pair, write_tar

from common.data.broken import BrokenSample
from common.data.karpathy import open_karpathy
from common.data.shards import open_shards
from common.data.tar_index import index_shard

BLOCK = 512
SECONDS = 20.0  # a case takes milliseconds; a busy machine may stop for a while
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


class Hang(BaseException):
    """Not an Exception: no reader may catch it."""


@dataclass(frozen=True)
class Shard:
    """A shard as it was written.

    samples: key -> (pixels, captions, image_id), in order. spans: key -> [first, last) byte of each member, its headers
    and padding included.
    """

    content: bytes
    samples: dict[str, tuple]
    spans: dict[str, list[tuple[int, int]]]

    def keys_in(self, first: int, last: int) -> set[str]:
        """Samples that have a byte in [first, last)."""
        return {key for key, spans in self.spans.items() if any(start < last and first < end for start, end in spans)}


@dataclass(frozen=True)
class Case:
    """A damaged shard.

    `changed`: samples whose own bytes are not what was written. `removed`: (position, bytes that were taken out there,
    negative for bytes put in).
    """

    what: str
    content: bytes
    changed: set[str] = field(default_factory=set)
    removed: tuple[int, int] = (0, 0)


def read_shard(path: Path) -> dict[str, tuple]:
    pairs = open_shards(str(path))
    return {pairs.key(row): as_plain(pairs[row]) for row in range(len(pairs))}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> dict[str, Shard]:
    """One shard of six samples for each dialect of tar, with long and accented names where it has headers for them."""
    folder = tmp_path_factory.mktemp("whole")
    made = {}
    for dialect, tar_format in FORMATS.items():
        samples = {f"k{seed}": pair(seed) for seed in range(6)}
        samples["k1"] = {"png": jpeg(1, kind="PNG"), "txt": b"a caption in a text member"}
        samples["k2"] = pair(2, jpg=None, webp=jpeg(2, kind="WEBP"), cls=b"7")
        if dialect != "ustar":
            samples["long" * 40] = samples.pop("k3")
            samples["übung/k4"] = samples.pop("k4")
        (folder / dialect).mkdir()
        path = write_tar(folder / dialect / "b.tar", samples, tar_format)  # a shard's name is a part of ids
        spans: dict[str, list[tuple[int, int]]] = {key: [] for key in samples}
        with tarfile.open(path) as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                spans[member.name.rpartition(".")[0]].append((member.offset, end))
        made[dialect] = Shard(path.read_bytes(), read_shard(path), spans)
        assert set(made[dialect].samples) == set(samples)
    return made


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory) -> Path:
    """Folder with a good shard before and one behind the damaged one."""
    folder = tmp_path_factory.mktemp("shards")
    good_tar(folder / "a.tar", 2, first=100)
    good_tar(folder / "c.tar", 2, first=200)
    return folder


@contextlib.contextmanager
def time_limit(what: str) -> Iterator[None]:
    """A case that does not end fails instead of stopping all tests."""

    def stop(*_: object) -> None:
        raise Hang(f"{what}: not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settle(case: Case, shard: Shard, folder: Path) -> str:
    """Reads the damaged shard between its neighbours and checks that every sample is accounted for; how it ended."""
    path = folder / "b.tar"
    path.write_bytes(case.content)
    with time_limit(case.what):
        return _settle(case, shard, folder, path)


def _settle(case: Case, shard: Shard, folder: Path, path: Path) -> str:
    refusal = ""
    try:
        pairs = open_shards("*.tar", root=folder)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert case.content[:BLOCK] != shard.content[:BLOCK], f"{case.what}: {refusal}"  # then it is no tar
        assert str(path) in refusal, case.what
        return "refused"
    good: dict[str, tuple] = {}
    broken = list(pairs.broken_at_open)
    for index in range(len(pairs)):
        key = pairs.key(index)
        assert key not in good, f"{case.what}: {key} is read twice"
        try:
            good[key] = as_plain(pairs[index])
        except BrokenSample as error:
            broken.append(error)
    story = f"{case.what}: {[str(item) for item in broken]}"

    for seed in (100, 101, 200, 201):
        assert good.pop(f"k{seed:04d}")[2] == f"id{seed}", f"a neighbour is hurt; {story}"
    assert all(item.path == str(path) and item.reason for item in broken), story
    named = {item.key for item in broken if not item.reason.startswith("second ")}
    assert not named & set(good), f"both read and broken; {story}"
    assert set(good) <= set(shard.samples), f"{set(good) - set(shard.samples)} was never written; {story}"
    for key in good:
        assert good[key] == shard.samples[key] or key in case.changed, f"{key} is not what was written; {story}"

    gaps = [gap for item in broken for gap in _gaps(item.reason, case)]
    for key in set(shard.samples) - set(good) - named:
        reported = any(start < last and first < end for start, end in shard.spans[key] for first, last in gaps)
        assert reported, f"{key} is lost in silence; {story}"
    return "broken" if broken else "unseen"


def _gaps(reason: str, case: Case) -> Iterator[tuple[float, float]]:
    """Bytes of the shard as it was written that a reason reports as not read."""
    position, count = case.removed

    def written(byte: int) -> int:
        return byte if byte <= position else max(position, byte + count)

    if place := re.search(r"at byte (\d+)", reason):
        yield written(int(place[1])), float("inf")


# --- cases -----------------------------------------------------------------------------------------------------------


def headers_of(shard: Shard) -> list[int]:
    """First byte of every header: of members, and of the long names in front of them."""
    starts = []
    for start in range(0, len(shard.content), BLOCK):
        with contextlib.suppress(tarfile.HeaderError):
            tarfile.TarInfo.frombuf(shard.content[start : start + BLOCK], "utf-8", "surrogateescape")
            starts.append(start)
    return starts


def cut(shard: Shard, rng: np.random.Generator) -> Case:
    """The shard ends early: around headers, inside content, inside padding, inside the end blocks."""
    edges = sorted({edge for spans in shard.spans.values() for span in spans for edge in span})
    near = [edge + shift for edge in edges for shift in (-BLOCK - 1, -BLOCK, -1, 0, 1, 156, 257, 400, BLOCK - 1, BLOCK)]
    position = int(rng.choice(near)) if rng.random() < 0.7 else int(rng.integers(0, edges[-1] + 2 * BLOCK))
    position = max(0, position)
    return Case(f"cut at byte {position}", shard.content[:position], shard.keys_in(position, 1 << 40))


def flipped(shard: Shard, first: int, last: int, rng: np.random.Generator) -> Case:
    position, bit = int(rng.integers(first, last)), int(rng.integers(8))
    content = bytearray(shard.content)
    content[position] ^= 1 << bit
    return Case(f"bit {bit} of byte {position}", bytes(content), shard.keys_in(position, position + 1))


def flipped_header(shard: Shard, rng: np.random.Generator) -> Case:
    """One bit of a header, or of a long name in front of it."""
    start = int(rng.choice(headers_of(shard)))
    return flipped(shard, start, start + BLOCK, rng)


def flipped_anywhere(shard: Shard, rng: np.random.Generator) -> Case:
    """One bit of the shard: names, pictures, captions, padding."""
    return flipped(shard, 0, len(shard.content), rng)


def burst(shard: Shard, rng: np.random.Generator) -> Case:
    """Up to three blocks of zeros, of noise, or of the shard's own bytes from elsewhere."""
    kind = rng.choice(["zeros", "noise", "copy"])
    first = int(rng.integers(0, len(shard.content) - BLOCK))
    if kind != "noise":  # disks lose whole blocks
        first -= first % BLOCK
    count = int(rng.integers(1, 4)) * BLOCK if kind != "noise" else int(rng.integers(1, 1500))
    count = min(count, len(shard.content) - first)
    source = int(rng.integers(0, (len(shard.content) - count) // BLOCK)) * BLOCK
    if kind == "copy" and any(source <= head < source + count for head in headers_of(shard)):
        return burst(shard, rng)  # a whole header in another place is a forgery, not damage
    filling = {"zeros": bytes(count), "noise": rng.bytes(count), "copy": shard.content[source : source + count]}
    content = shard.content[:first] + filling[kind] + shard.content[first + count :]
    return Case(f"{kind} of {count} bytes at {first}", content, shard.keys_in(first, first + count))


def shifted(shard: Shard, rng: np.random.Generator) -> Case:
    """Bytes are missing in the middle, or too many."""
    position = int(rng.integers(0, max(headers_of(shard))))
    count = int(rng.choice([1, 7, 100, 300, 512, 700, 1024]))
    if rng.random() < 0.5:
        content = shard.content[:position] + shard.content[position + count :]
        changed = shard.keys_in(position, position + count)
        return Case(f"{count} bytes taken out at {position}", content, changed, (position, count))
    content = shard.content[:position] + rng.bytes(count) + shard.content[position:]
    changed = shard.keys_in(position, position + 1)
    return Case(f"{count} bytes put in at {position}", content, changed, (position, -count))


def unfinished(shard: Shard, rng: np.random.Generator) -> Case:
    """A download that was given its full length at the start and stopped: the rest is zeros."""
    position = int(rng.integers(BLOCK, len(shard.content)))
    content = shard.content[:position] + bytes((1 << 20) + 20_000)
    return Case(f"zeros from byte {position} on", content, shard.keys_in(position, 1 << 40))


# how many cases for each of three dialects: 549 in all
DAMAGE = {cut: 40, flipped_header: 40, flipped_anywhere: 40, burst: 35, shifted: 25, unfinished: 3}


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize("damaged", DAMAGE)
def test_no_sample_of_a_damaged_shard_is_lost_in_silence(damaged, dialect, shards, neighbours):
    shard, count = shards[dialect], DAMAGE[damaged]
    rng = np.random.default_rng([list(DAMAGE).index(damaged), list(FORMATS).index(dialect)])
    outcomes = [settle(damaged(shard, rng), shard, neighbours) for _ in range(count)]
    assert outcomes.count("broken") >= 0.15 * count, outcomes  # cases that nobody notices test nothing


# --- one member of one sample ----------------------------------------------------------------------------------------


def read_odd(folder: Path, members: dict[str, bytes], what: str) -> tuple | None:
    """The sample "k1" that stands between two good ones, None where it is broken; its neighbours must be as written."""
    samples = {"k0": pair(0), "k1": members, "k2": pair(2)}
    content = write_tar(folder / "written.tar", samples).read_bytes()
    (folder / "written.tar").unlink()
    shard = Shard(content, {"k0": as_plain_of(0), "k1": (), "k2": as_plain_of(2)}, {"k0": [], "k1": [], "k2": []})
    outcome = settle(Case(what, content, {"k1"}), shard, folder)
    if outcome == "broken":
        return None
    pairs = open_shards(str(folder / "b.tar"))
    return as_plain(pairs[1])


def as_plain_of(seed: int) -> tuple:
    pixels = np.asarray(Image.open(io.BytesIO(jpeg(seed)))).tobytes()
    return pixels, [f"picture {seed}", f"a view of {seed}"], f"id{seed}"


WRONG = [None, True, 3, 2.5, float("nan"), {}, {"raw": "a"}, [], [[]], ["a", None], ["a", 1], ["a", {}], ["a", ["b"]]]
WRONG_JSON = (
    [{"captions": value} for value in [*WRONG, "a", "", [""], [" \t"], ["\ud83d"]]]
    + [{"caption": value} for value in [*WRONG, "", "  ", ["a"], "\udfff"]]
    + [{"caption": "a", "image_id": value} for value in (True, 2.5, [], {}, ["a"])]
    + [None, True, 3, "text", [], ["a"], [{"caption": "a"}], {}, {"Caption": "a"}]
)


def test_json_of_a_wrong_type_breaks_its_sample_only(neighbours):
    for content in WRONG_JSON:
        text = json.dumps(content)
        assert read_odd(neighbours, pair(1, json=text.encode()), f"json is {text}") is None, text


def test_json_cut_anywhere_or_in_another_encoding_breaks_its_sample_only(neighbours):
    body = json.dumps({"captions": ["Übung", "two"], "image_id": "id1"}, ensure_ascii=False).encode()
    cuts = [body[:end] for end in range(len(body))]
    others = [
        b"\0" * 40,
        b"<html><body>404</body></html>",
        b"[" * 100_000,
        b'{"caption": ' + b"9" * 5000 + b"}",
        b"\x80" + body,
    ]
    for content in cuts + others + [body + b"}", body.decode().encode("latin-1")]:
        assert read_odd(neighbours, pair(1, json=content), f"json is {content[:60]!r}") is None, content[:60]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):  # what the JSON standards of the years allow
        content = body.decode().encode(encoding)
        assert read_odd(neighbours, pair(1, json=content), encoding)[1:] == (["Übung", "two"], "id1"), encoding


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG of any depth and colour type."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


PICTURE = Image.open(io.BytesIO(jpeg(1, kind="PNG"))).convert("RGB")
ENCODINGS = {
    "baseline": ("jpg", encoded(PICTURE, "JPEG")),
    "progressive": ("jpg", encoded(PICTURE, "JPEG", progressive=True)),
    "png": ("png", encoded(PICTURE, "PNG")),
    "webp": ("webp", encoded(PICTURE, "WEBP", quality=80)),
    "lossless": ("webp", encoded(PICTURE, "WEBP", lossless=True)),
}


@pytest.mark.parametrize("encoding", ["baseline", "progressive", "png", "webp"])
def test_a_picture_cut_anywhere_is_broken_or_whole_never_half(encoding, neighbours):
    extension, body = ENCODINGS[encoding]
    whole = np.asarray(Image.open(io.BytesIO(body)).convert("RGB")).tobytes()
    for end in sorted({*range(0, len(body), 120), *range(24), *range(len(body) - 20, len(body))}):
        members = {extension: body[:end], "txt": b"a"}
        sample = read_odd(neighbours, members, f"{encoding} cut at byte {end} of {len(body)}")
        # a PNG may lack its end mark, which holds nothing
        assert sample is None or (sample[0] == whole and encoding == "png" and end >= len(body) - 20), end


def test_unusual_pictures_that_are_fine_are_read(neighbours):
    rng = np.random.default_rng(3)
    deep_rgb = rng.integers(0, 1 << 16, (4, 5, 3)).astype(">u2")
    with_alpha = PICTURE.copy()
    with_alpha.putalpha(7)
    palette = PICTURE.quantize(16)
    half = np.asarray(PICTURE.convert("L"))
    one_bit = PICTURE.convert("1")
    cases = {
        "16-bit rgb": ("png", png(5, 4, 16, 2, b"".join(b"\0" + row.tobytes() for row in deep_rgb)), deep_rgb >> 8),
        "grey": ("png", encoded(PICTURE.convert("L"), "PNG"), np.stack([half] * 3, -1)),
        "one bit": ("png", encoded(one_bit, "PNG"), np.asarray(one_bit.convert("RGB"))),
        "alpha": ("png", encoded(with_alpha, "PNG"), np.asarray(PICTURE)),
        "palette": ("png", encoded(palette, "PNG"), np.asarray(palette.convert("RGB"))),
        "see-through palette": ("png", encoded(palette, "PNG", transparency=0), np.asarray(palette.convert("RGB"))),
        "lossless webp": ("webp", ENCODINGS["lossless"][1], np.asarray(PICTURE)),
        "a png called jpg": ("jpg", ENCODINGS["png"][1], np.asarray(PICTURE)),
    }
    for what, (extension, body, pixels) in cases.items():
        sample = read_odd(neighbours, {extension: body, "txt": b"a"}, what)
        assert sample is not None, what
        assert sample[0] == np.asarray(pixels).astype(np.uint8).tobytes(), what
    for mode in ("CMYK", "L", "YCbCr"):
        body = encoded(PICTURE.resize((240, 200)).convert(mode), "JPEG", quality=98)
        sample = np.frombuffer(read_odd(neighbours, {"jpg": body, "txt": b"a"}, mode)[0], np.uint8).reshape(200, 240, 3)
        expected = np.asarray(PICTURE.resize((240, 200)).convert("L" if mode == "L" else "RGB").convert("RGB"))
        assert np.abs(sample.astype(int) - expected).mean() < 8, mode  # lossy, but no negative


def npy(header: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + body


def test_an_array_that_is_cut_or_claims_too_much_breaks_its_sample_only(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6.0))
    good = buffer.getvalue()
    form = b"{'descr': '%s', 'fortran_order': False, 'shape': %s}\n"
    bodies = [good[:end] for end in range(0, len(good), 3)] + [
        b"PK\x03\x04" + bytes(60),
        b"\x80\x04N.",
        npy(b"{'descr': ((("),
    ]
    bodies += [npy(form % claim, bytes(64)) for claim in ((b"<f8", b"(10**15,)"), (b"<f8", b"(-5,)"), (b"|O", b"(1,)"))]
    bodies += [npy(form % (b"<f8", b"(1000000000000000,)")), npy(b"(" * 5000)]
    for body in bodies:
        path = write_tar(tmp_path / "x.tar", {"odd": pair(0, npy=body), "good": pair(1, npy=good)})
        pairs = open_shards(str(path))
        with time_limit(repr(body[:60])), pytest.raises(BrokenSample, match=r"\[odd\]: npy cannot be decoded: ."):
            pairs.array(0)
        assert (pairs.array(1) == np.arange(6.0)).all()
        assert as_plain(pairs[0]) == as_plain_of(0)


# --- members ---------------------------------------------------------------------------------------------------------


def test_every_set_of_missing_and_empty_members_is_a_sample_or_named(neighbours):
    full = {"jpg": jpeg(1), "json": pair(1)["json"], "txt": b"a", "cls": b"7"}
    for choice in itertools.product((0, 1, 2), repeat=len(full)):  # missing, there, there without a byte
        members = {name: body if take == 1 else b"" for (name, body), take in zip(full.items(), choice) if take}
        if not members:
            continue
        sample = read_odd(neighbours, members, f"members {members.keys()}")
        usable = members.get("jpg") and (members.get("json") or ("json" not in members and members.get("txt")))
        assert (sample is not None) == bool(usable), members.keys()


def test_of_two_shards_in_one_file_the_first_is_read_and_the_seam_is_named(tmp_path):
    first, second = good_tar(tmp_path / "1.tar", 2), good_tar(tmp_path / "2.tar", 2, first=7)
    both = tmp_path / "both.tar"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    pairs = open_shards(str(both))
    assert [pairs[row]["image_id"] for row in range(len(pairs))] == ["id0", "id1"]
    with tarfile.open(first) as tar:
        members = tar.getmembers()
    end = members[-1].offset_data + -(-members[-1].size // BLOCK) * BLOCK
    (broken,) = pairs.broken_at_open
    assert str(broken) == (
        f"{both}: zeros in the place of a header: at byte {end}, other bytes follow; samples read before it: 2"
    )


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_in_the_place_of_a_picture_is_named(tmp_path, kind):
    path = write_tar(tmp_path / "x.tar", {"a": pair(0), "b": {"json": pair(1)["json"]}})
    with tarfile.open(path, "a") as tar:
        for name in ("b.jpg", "a.orig"):  # the second one is of no use, and none was expected
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            tar.addfile(info)
    index = index_shard(path)
    assert index.rows["name"].to_pylist() == [b"a"]
    (broken,) = index.broken
    assert (broken.key, broken.reason.split(":")[0]) == ("b", "link")


def test_sparse_members_of_both_dialects_are_named(tmp_path):
    body = b"x" * BLOCK
    in_pax, in_gnu = tarfile.TarInfo("GNUSparseFile.0/b.jpg"), tarfile.TarInfo("b.jpg")
    in_gnu.type = tarfile.GNUTYPE_SPARSE
    in_pax.pax_headers = {"GNU.sparse.name": "b.jpg", "GNU.sparse.realsize": "4096"}
    for info, tar_format in ((in_pax, tarfile.PAX_FORMAT), (in_gnu, tarfile.GNU_FORMAT)):
        path = write_tar(tmp_path / "x.tar", {"a": pair(0)})
        info.size = len(body)
        with tarfile.open(path, "a", format=tar_format) as tar:
            tar.addfile(info, io.BytesIO(body))
        index = index_shard(path)
        assert index.rows["name"].to_pylist() == [b"a"]
        assert [(item.key, item.reason.split(":")[0]) for item in index.broken] == [("b", "sparse file")]


# --- where reading stops, case by case --------------------------------------------------------------------------------


def indexed(folder: Path, content: bytes, **options: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """Keys of the samples, and (key, kind of fault) of what is broken."""
    path = folder / "x.tar"
    path.write_bytes(content)
    with time_limit("a case by hand"):
        index = index_shard(path, **options)
    keys = [key.decode() for key in index.rows["name"].to_pylist()]
    return keys, [(item.key, item.reason.split(":")[0]) for item in index.broken]


def test_a_caption_with_missing_bytes_is_not_read_with_the_next_header_in_their_place(tmp_path):
    samples = {f"k{seed}": {"jpg": jpeg(seed), "txt": b"a red square on the left"} for seed in range(3)}
    content = write_tar(tmp_path / "x.tar", samples).read_bytes()
    place = content.index(b"red", content.index(b"k1.txt"))
    keys, broken = indexed(tmp_path, content[:place] + content[place + 4 :])
    assert (keys, broken) == (["k0"], [("k1", "unreadable header")])


def test_a_name_that_cannot_be_read_is_not_replaced_by_a_part_of_it(tmp_path):
    samples = {"k0": pair(0), "übung": pair(1)}
    content = write_tar(tmp_path / "x.tar", samples, tarfile.PAX_FORMAT).read_bytes()
    record = content.index(b" path=")
    for damaged in (b"7", b"x"):  # the length of the record was 19
        changed = content[: record - 1] + damaged + content[record:]
        keys, broken = indexed(tmp_path, changed, allow_missing_captions=True)
        assert (keys, broken) == (["k0"], [("", "unreadable header")])


def test_long_names_of_gnu_tar_end_at_their_first_zero_and_are_never_empty(tmp_path):
    content = write_tar(tmp_path / "x.tar", {"long" * 40: pair(0), "k1": pair(1)}, tarfile.GNU_FORMAT).read_bytes()
    long_name = b"long" * 40 + b".jpg\0"
    padded = content.replace(long_name + bytes(6), long_name + b"behind")
    assert padded != content
    longer = bytearray(padded)  # the header of the name says six bytes more
    header = tarfile.TarInfo.frombuf(bytes(longer[:BLOCK]), "utf-8", "strict")
    header.size += 6
    longer[:BLOCK] = header.tobuf(tarfile.GNU_FORMAT)
    assert indexed(tmp_path, bytes(longer)) == (["long" * 40, "k1"], [])
    content = write_tar(tmp_path / "x.tar", {"k0": pair(0), "long" * 40: pair(1)}, tarfile.GNU_FORMAT).read_bytes()
    empty = content.replace(b"long" * 40, bytes(160))
    assert indexed(tmp_path, empty) == (["k0"], [("", "unreadable header")])


def test_zeros_at_the_end_that_tar_writes_are_no_fault(tmp_path):
    content = good_tar(tmp_path / "good.tar", 1).read_bytes()
    assert indexed(tmp_path, content + bytes(500_000)) == (["k0000"], [])
    assert indexed(tmp_path, content + bytes(1_100_000)) == (["k0000"], [("", "shard ends in zeros")])


# --- annotation files ------------------------------------------------------------------------------------------------


def annotation_files() -> dict[str, object]:
    """Four pictures with two captions each, in every layout."""
    texts = {number: [f"picture {number}", f"a view of {number}"] for number in range(1, 5)}
    return {
        "karpathy": {
            "dataset": "mine",
            "images": [
                {
                    "filename": f"{number}.jpg",
                    "split": "train",
                    "sentids": [2 * number, 2 * number + 1],
                    "sentences": [{"raw": text, "sentid": 2 * number + i} for i, text in enumerate(texts[number])],
                }
                for number in texts
            ],
        },
        "coco": {
            "images": [{"id": number, "file_name": f"{number}.jpg"} for number in texts],
            "annotations": [
                {"id": 2 * number + i, "image_id": number, "caption": text}
                for number in texts
                for i, text in enumerate(texts[number])
            ],
        },
        "list": [
            {"image": f"{number}.jpg", "caption": text, "image_id": number}
            for number in texts
            for text in texts[number]
        ],
    }


def nodes(content: object, place: tuple = ()) -> Iterator[tuple]:
    """The place of every value in a JSON tree."""
    if place:
        yield place
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield from nodes(value, (*place, key))


def picture_of(layout: str, place: tuple) -> int:
    """The number, from 1, of the picture that a value belongs to; 0 where it belongs to all."""
    entry = next((part for part in place if isinstance(part, int)), None)
    if entry is None:
        return 0
    return entry // 2 + 1 if layout == "list" or place[0] == "annotations" else entry + 1


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(1, 5):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    return folder


def read_annotations(content: bytes, folder: Path) -> tuple[dict[int, tuple], int] | None:
    """(number of a picture -> pixels and captions, how many are named as broken), None where the file is refused."""
    path = folder / "annotations.json"
    path.write_bytes(content)
    refusal = ""
    with time_limit(repr(content[:200])):
        try:
            pairs = open_karpathy(path, folder, max_broken_share=1.0)
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert str(path) in refusal
            return None
        samples, broken = [], list(pairs.broken_at_open)
        for index in range(len(pairs)):
            try:
                samples.append((pairs.path(index).name, pairs[index]))
            except BrokenSample as error:
                broken.append(error)
    assert all(item.reason for item in broken)
    contents = {}
    for name, sample in samples:
        number = int(name.partition(".")[0])
        assert number not in contents, f"{name} twice"
        contents[number] = as_plain(sample)[:2]
    return contents, len(broken)


def written(number: int) -> tuple:
    return as_plain_of(number)[:2]


@pytest.mark.parametrize("layout", ["karpathy", "coco", "list"])
def test_a_wrong_value_in_an_annotation_file_costs_its_picture_only(layout, pictures):
    whole = annotation_files()[layout]
    assert read_annotations(json.dumps(whole).encode(), pictures) == (
        {number: written(number) for number in (1, 2, 3, 4)},
        0,
    )
    refused = cases = 0
    for place in (place for place in nodes(whole) if picture_of(layout, place) <= 2):  # the others are alike
        for wrong in (None, True, 7777, 2.5, "", [[1]], {"a": 1}, "removed"):
            content = annotation_files()[layout]
            parent = content
            for part in place[:-1]:
                parent = parent[part]
            if wrong == "removed":
                del parent[place[-1]]
            else:
                parent[place[-1]] = wrong
            hurt = picture_of(layout, place)
            what = f"{layout}{place} = {wrong!r}"
            outcome = read_annotations(json.dumps(content).encode(), pictures)
            cases += 1
            if outcome is None:
                refused += 1
                assert hurt == 0 or place[-1] == "split", what
                continue
            samples, broken = outcome
            for number in range(1, 5):
                if number != hurt and hurt:
                    assert samples.get(number) == written(number), f"{what}: picture {number} is hurt"
            # a picture that is gone as a whole was never in the file; one of another split was not asked for
            gone = wrong == "removed" and isinstance(place[-1], int)
            if hurt and hurt not in samples and not gone and place[-1] != "split":
                assert broken >= 1, f"{what}: lost in silence"
            if not hurt:
                assert set(samples) == {1, 2, 3, 4} or broken, what
    assert refused < cases / 5


def test_an_annotation_file_that_is_cut_is_refused_by_name(pictures):
    whole = json.dumps(annotation_files()["coco"]).encode()
    packed = gzip.compress(whole)
    for content in (whole, packed):
        for end in {*range(0, len(content), 13), *range(len(content) - 9, len(content))}:
            assert read_annotations(content[:end], pictures) is None, end
    for content in (b"<html>", b"\xff\xfe", b"\0" * 100, b"[" * 200_000, b"null", b'"text"', b"{}", b"[]", b"3"):
        assert read_annotations(content, pictures) is None, content[:20]
