"""Five hundred damaged shards: nothing hangs, nothing raises from the depths, and no sample is lost in silence.

Every case damages one of three shards, reads all three in full and closes the books over the samples:

    read with the bytes that were written + named as broken + inside a range of bytes that is reported = all of them.

A sample whose own bytes were changed may also come out changed where its format has no checksum (a flipped bit in the
pixels of a JPEG); no other sample may. The cases are drawn from a fixed seed.
"""

import contextlib
import functools
import gzip
import io
import itertools
import json
import operator
import re
import signal
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from readable import pixels_of, read_all
from tars import good_tar, jpeg, pair, write_tar

from common.data.broken import BrokenSample
from common.data.karpathy import open_karpathy
from common.data.pictures import Pictures
from common.data.shards import open_shards
from common.data.tar_index import index_shard

BLOCK = 512
SECONDS = 60.0  # for the cases of a test, each of which takes milliseconds
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


class Hang(BaseException):
    """Not an Exception: no reader may catch it."""


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A test that does not end fails instead of stopping all tests."""

    def stop(*_: object) -> None:
        raise Hang(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


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


def read_by_key(pairs: Pictures) -> tuple[dict[str, tuple], list[BrokenSample]]:
    good, broken = read_all(pairs)
    assert len({pairs.key(row) for row in good}) == len(good), "a sample is read twice"
    return {pairs.key(row): sample for row, sample in good.items()}, broken


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
        made[dialect] = Shard(path.read_bytes(), read_by_key(open_shards(path))[0], spans)
        assert set(made[dialect].samples) == set(samples)
    return made


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory) -> Path:
    """Folder with a good shard before and one behind the damaged one."""
    folder = tmp_path_factory.mktemp("shards")
    good_tar(folder / "a.tar", 2, first=100)
    good_tar(folder / "c.tar", 2, first=200)
    return folder


def opened_or_refused(path: Path, opened: Callable[[], Pictures]) -> Pictures | None:
    """The set, None where it is refused; the message names the file."""
    message = ""
    try:
        return opened()
    except ValueError as error:
        message = str(error)
    assert str(path) in message
    return None


def settle(case: Case, shard: Shard, folder: Path) -> str:
    """Reads the damaged shard between its neighbours and checks that every sample is accounted for; how it ended."""
    path = folder / "b.tar"
    path.write_bytes(case.content)
    pairs = opened_or_refused(path, lambda: open_shards("*.tar", root=folder))
    if pairs is None:
        assert case.content[:BLOCK] != shard.content[:BLOCK], case.what  # then it is no tar
        return "refused"
    good, broken = read_by_key(pairs)
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
    shard = Shard(content, {"k0": as_written(0), "k1": (), "k2": as_written(2)}, {"k0": [], "k1": [], "k2": []})
    if settle(Case(what, content, {"k1"}), shard, folder) == "broken":
        return None
    return read_by_key(open_shards(folder / "b.tar"))[0]["k1"]


def as_written(seed: int) -> tuple:
    return pixels_of(jpeg(seed)), [f"picture {seed}", f"a view of {seed}"], f"id{seed}"


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


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


PICTURE = Image.open(io.BytesIO(jpeg(1, (240, 200), kind="PNG"))).resize((24, 20))
ENCODINGS = {
    "baseline": ("jpg", encoded(PICTURE, "JPEG")),
    "progressive": ("jpg", encoded(PICTURE, "JPEG", progressive=True)),
    "png": ("png", encoded(PICTURE, "PNG")),
    "webp": ("webp", encoded(PICTURE, "WEBP", quality=80)),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_picture_cut_anywhere_is_broken_or_whole_never_half(encoding, neighbours):
    extension, body = ENCODINGS[encoding]
    for end in sorted({*range(0, len(body), 120), *range(24), *range(len(body) - 20, len(body))}):
        members = {extension: body[:end], "txt": b"a"}
        sample = read_odd(neighbours, members, f"{encoding} cut at byte {end} of {len(body)}")
        # a PNG may lack its end mark, which holds nothing
        assert sample is None or (sample[0] == pixels_of(body) and encoding == "png" and end >= len(body) - 20), end


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_pictures_of_every_mode_are_read_in_rgb_whatever_they_are_called(kind, neighbours):
    modes = [PICTURE.convert(mode) for mode in ("RGB", "L", *{"PNG": "1P", "JPEG": ("CMYK", "YCbCr")}.get(kind, ()))]
    if kind != "JPEG":
        modes.append(Image.merge("RGBA", (*PICTURE.split(), Image.new("L", PICTURE.size, 7))))
    for image in modes:
        options = (
            {"transparency": 0} if image.mode == "P" else {"lossless": True} if kind == "WEBP" else {"quality": 98}
        )
        sample = read_odd(neighbours, {"jpg": encoded(image, kind, **options), "txt": b"a"}, f"{kind} {image.mode}")
        expected = np.asarray(image.convert("RGB"))
        difference = np.frombuffer(sample[0], np.uint8).reshape(expected.shape).astype(int) - expected
        assert np.abs(difference).mean() <= (8 if kind == "JPEG" else 0), image.mode  # lossy, but no negative


def npy(header: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + body


def test_an_array_that_is_cut_or_claims_too_much_breaks_its_sample_only(tmp_path):
    good, objects = io.BytesIO(), io.BytesIO()
    np.save(good, np.arange(6.0))
    np.save(objects, np.array([{}]))
    form = b"{'descr': '%s', 'fortran_order': False, 'shape': %s}\n"
    claims = [(b"<f8", b"(10**15,)"), (b"<f8", b"(-5,)"), (b"<f8", b"(1000000000000000,)")]
    bodies = [
        *(good.getvalue()[:end] for end in range(0, len(good.getvalue()), 3)),
        *(npy(form % claim, bytes(64)) for claim in claims),
        *(npy(b"{'descr': ((("), npy(b"(" * 5000), b"PK\x03\x04" + bytes(60), b"\x80\x04N.", objects.getvalue()),
    ]
    for body in bodies:
        path = write_tar(tmp_path / "x.tar", {"odd": pair(0, npy=body), "good": pair(1, npy=good.getvalue())})
        pairs = open_shards(path)
        with pytest.raises(BrokenSample, match=r"\[odd\]: npy cannot be decoded: ."):
            pairs.array(0)
        assert (pairs.array(1) == np.arange(6.0)).all()
        assert read_by_key(pairs) == ({"odd": as_written(0), "good": as_written(1)}, [])


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
    with tarfile.open(first) as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + -(-last.size // BLOCK) * BLOCK
    both = tmp_path / "both.tar"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    good, (broken,) = read_by_key(open_shards(both))
    assert good == {"k0000": as_written(0), "k0001": as_written(1)}
    assert str(broken) == (
        f"{both}: zeros in the place of a header: at byte {end}, other bytes follow; samples read before it: 2"
    )


def indexed(folder: Path, content: bytes, **options: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """Keys of the samples, and (key, kind of fault) of what is broken."""
    path = folder / "x.tar"
    path.write_bytes(content)
    index = index_shard(path, **options)
    keys = [key.decode() for key in index.rows["name"].to_pylist()]
    return keys, [(item.key, item.reason.split(":")[0]) for item in index.broken]


def with_member(path: Path, info: tarfile.TarInfo, tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    """The tar with one more member, whose bytes are x."""
    with tarfile.open(path, "a", format=tar_format) as tar:
        tar.addfile(info, io.BytesIO(b"x" * info.size))
    return path.read_bytes()


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_in_the_place_of_a_picture_is_named(tmp_path, kind):
    path = write_tar(tmp_path / "x.tar", {"a": pair(0), "b": {"json": pair(1)["json"]}})
    for name in ("b.jpg", "a.orig"):  # the second one is of no use, and none was expected
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "a.jpg"
        content = with_member(path, info)
    assert indexed(tmp_path, content) == (["a"], [("b", "link")])


def test_sparse_members_of_both_dialects_are_named(tmp_path):
    in_pax, in_gnu = tarfile.TarInfo("GNUSparseFile.0/b.jpg"), tarfile.TarInfo("b.jpg")
    in_gnu.type = tarfile.GNUTYPE_SPARSE
    in_pax.pax_headers = {"GNU.sparse.name": "b.jpg", "GNU.sparse.realsize": "4096"}
    for info, tar_format in ((in_pax, tarfile.PAX_FORMAT), (in_gnu, tarfile.GNU_FORMAT)):
        info.size = BLOCK
        content = with_member(write_tar(tmp_path / "x.tar", {"a": pair(0)}), info, tar_format)
        assert indexed(tmp_path, content) == (["a"], [("b", "sparse file")])


# --- where reading stops, case by case --------------------------------------------------------------------------------


def test_a_caption_with_missing_bytes_is_not_read_with_the_next_header_in_their_place(tmp_path):
    samples = {f"k{seed}": {"jpg": jpeg(seed), "txt": b"a red square on the left"} for seed in range(3)}
    content = write_tar(tmp_path / "x.tar", samples).read_bytes()
    place = content.index(b"red", content.index(b"k1.txt"))
    assert indexed(tmp_path, content[:place] + content[place + 4 :]) == (["k0"], [("k1", "unreadable header")])


def test_a_name_that_cannot_be_read_is_not_replaced_by_a_part_of_it(tmp_path):
    samples = {"k0": pair(0), "übung": pair(1)}
    content = write_tar(tmp_path / "x.tar", samples, tarfile.PAX_FORMAT).read_bytes()
    record = content.index(b" path=")
    for damaged in (b"7", b"x"):  # the length of the record was 19
        changed = content[: record - 1] + damaged + content[record:]
        assert indexed(tmp_path, changed, allow_missing_captions=True) == (["k0"], [("", "unreadable header")])


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
    texts = [(number, 2 * number + i, text) for number in range(1, 5) for i, text in enumerate(as_written(number)[1])]
    ids = {number: [text_id for of, text_id, _ in texts if of == number] for number in range(1, 5)}
    sentences = {
        number: [{"raw": text, "sentid": text_id} for of, text_id, text in texts if of == number] for number in ids
    }
    return {
        "karpathy": {
            "dataset": "mine",
            "images": [
                {"filename": f"{number}.jpg", "split": "train", "sentids": ids[number], "sentences": sentences[number]}
                for number in ids
            ],
        },
        "coco": {
            "images": [{"id": number, "file_name": f"{number}.jpg"} for number in ids],
            "annotations": [{"id": text_id, "image_id": number, "caption": text} for number, text_id, text in texts],
        },
        "list": [{"image": f"{number}.jpg", "caption": text, "image_id": number} for number, _, text in texts],
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
    pairs = opened_or_refused(path, lambda: open_karpathy(path, folder, max_broken_share=1.0))
    if pairs is None:
        return None
    good, broken = read_all(pairs)
    assert all(item.reason for item in broken)
    contents = {int(pairs.path(row).stem): sample[:2] for row, sample in good.items()}
    assert len(contents) == len(good), "a picture is read twice"
    return contents, len(broken)


@pytest.mark.parametrize("layout", ["karpathy", "coco", "list"])
def test_a_wrong_value_in_an_annotation_file_costs_its_picture_only(layout, pictures):
    whole, written = annotation_files()[layout], {number: as_written(number)[:2] for number in range(1, 5)}
    assert read_annotations(json.dumps(whole).encode(), pictures) == (written, 0)
    places = [place for place in nodes(whole) if picture_of(layout, place) <= 2]  # the others are alike
    wrong_values = (None, True, 7777, 2.5, "", [[1]], {"a": 1}, "removed")
    refused = 0
    for place, wrong in itertools.product(places, wrong_values):
        content = annotation_files()[layout]
        parent = functools.reduce(operator.getitem, place[:-1], content)
        parent[place[-1]] = wrong
        if wrong == "removed":
            del parent[place[-1]]
        hurt, what = picture_of(layout, place), f"{layout}{place} = {wrong!r}"
        outcome = read_annotations(json.dumps(content).encode(), pictures)
        if outcome is None:
            refused += 1
            assert hurt == 0 or place[-1] == "split", what
            continue
        samples, broken = outcome
        others = written.keys() - {hurt} if hurt else set()
        assert {number: samples.get(number) for number in others} == {number: written[number] for number in others}, (
            what
        )
        # a picture that is gone as a whole was never in the file; one of another split was not asked for
        gone = place[-1] == "split" or (wrong == "removed" and isinstance(place[-1], int))
        assert broken or gone or samples.keys() == written.keys(), f"{what}: lost in silence"
    assert refused < len(places) * len(wrong_values) / 5


def test_an_annotation_file_that_is_cut_is_refused_by_name(pictures):
    whole = json.dumps(annotation_files()["coco"]).encode()
    packed = gzip.compress(whole)
    for content in (whole, packed):
        for end in {*range(0, len(content), 13), *range(len(content) - 9, len(content))}:
            assert read_annotations(content[:end], pictures) is None, end
    for content in (b"<html>", b"\xff\xfe", b"\0" * 100, b"[" * 200_000, b"null", b'"text"', b"{}", b"[]", b"3"):
        assert read_annotations(content, pictures) is None, content[:20]
