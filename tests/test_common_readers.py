"""All readers of captioned pictures: what is the same whatever they lie in; what each refuses, in which words."""

import gzip
import hashlib
import json
import os
import pickle
import re
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
import torch
from readable import pixels_of, read_all
from refusals import refused
from tars import as_plain, jpeg, write_tar
from test_common_hugging_face import cache_below_the_test  # noqa: F401
from torch.utils.data import ConcatDataset, DataLoader

from common.data.broken import TooManyBroken
from common.data.folder import open_folder
from common.data.hugging_face import open_hugging_face
from common.data.karpathy import open_karpathy
from common.data.loader import Loader, default_processes
from common.data.shards import open_shards
from common.data.tsv import open_tsv
from common.run import inputs

# --- the same pairs in every layout ----------------------------------------------------------------------------------


def items(count=5):
    """(bytes of a picture, captions) of good samples: two captions, three, ... six."""
    return [
        (jpeg(number), [f"picture {number}", *[f'a "view", of {number}'] * (1 + number)]) for number in range(count)
    ]


def files(root, content):
    """Pictures 0.jpg ... in the folder; None leaves one out."""
    for number, (body, _) in enumerate(content):
        if body is not None:
            write(root / f"{number}.jpg", body)


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def beside_pictures(root, content, name, text):
    files(root, content)
    return write(root / name, text)


def shards(root, content, role, **options):
    samples = {}
    for number, (body, captions) in enumerate(content):
        metadata = json.dumps({"image_id": f"{number}", "captions": captions}).encode()
        samples[f"k{number:03d}"] = {"json": metadata} | ({} if body is None else {"jpg": body})
    write_tar(root / "x-000.tar", samples)
    return open_shards("x-*.tar", root=root, role=role, **options)


def karpathy(root, content, role, **options):
    images = [
        {"filename": f"{number}.jpg", "split": role, "sentences": [{"raw": text} for text in captions]}
        for number, (_, captions) in enumerate(content)
    ]
    path = beside_pictures(root, content, "x.json", json.dumps({"images": images, "dataset": "x"}))
    return open_karpathy(path, role=role, **options)


def coco(root, content, role, **options):
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in range(len(content))]
    texts = [{"image_id": number, "caption": text} for number, (_, captions) in enumerate(content) for text in captions]
    path = beside_pictures(root, content, "x.json", json.dumps({"images": images, "annotations": texts}))
    return open_karpathy(path, role=role, **options)


def listed(root, content, role, **options):
    rows = [{"image": f"{number}.jpg", "caption": captions} for number, (_, captions) in enumerate(content)]
    path = beside_pictures(root, content, "x.json.gz", gzip.compress(json.dumps(rows).encode()))
    return open_karpathy(path, role=role, **options)


def by_caption(content):
    return [(f"{number}.jpg", text) for number, (_, captions) in enumerate(content) for text in captions]


def rows_of_a_list(root, content, role, **options):
    rows = [{"image": f"./{path}", "caption": text} for path, text in by_caption(content)]
    return open_karpathy(beside_pictures(root, content, "x.json", json.dumps(rows)), role=role, **options)


def table_of_tabs(root, content, role, **options):
    text = "".join(f"{path}\t{text}\n" for path, text in by_caption(content))
    return open_tsv(beside_pictures(root, content, "x.tsv", text), role=role, **options)


def table_of_commas(root, content, role, **options):
    rows = [{"caption": text, "number": 1, "path": path} for path, text in by_caption(content)]
    path = beside_pictures(root, content, "x.csv", pandas.DataFrame(rows).to_csv(index=False))
    return open_tsv(path, role=role, **options)


def arrow(root, content, role, **options):
    columns = {"image": [body for body, _ in content], "captions": [captions for _, captions in content]}
    datasets.Dataset.from_dict(columns).save_to_disk(root / "x")
    return open_hugging_face("x", root=root, role=role, **options)


def json_lines(root, content, role, **options):
    rows = [{"image": f"{number}.jpg", "captions": captions} for number, (_, captions) in enumerate(content)]
    beside_pictures(root, content, "x.jsonl", "\n".join(map(json.dumps, rows)))
    return open_hugging_face("x.jsonl", root=root, role=role, **options)


def texts_beside(root, content, role, **options):
    files(root / "x", content)
    for number, (_, captions) in enumerate(content):
        write(root / "x" / f"{number}.txt", "\n".join(captions))
    return open_folder(root / "x", role=role, **options)


LAYOUTS = [
    shards, karpathy, coco, listed, rows_of_a_list, table_of_tabs, table_of_commas, texts_beside, arrow, json_lines
]  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def plain(sample):
    return as_plain(sample)[:2]


def read(pairs):
    """(pixels and captions of the good samples, what is broken)."""
    good, broken = read_all(pairs)
    return [sample[:2] for sample in good.values()], broken


def expected(content):
    return [(pixels_of(body), captions) for body, captions in content]


@pytest.mark.parametrize("role", ["train", "test"])
@every_layout
def test_every_layout_of_the_same_pairs_gives_the_same_samples(tmp_path, layout, role):
    content = items()
    if role == "test" and layout is not texts_beside:
        content[1][1].append("")  # one more text where pictures are ranked
    pairs = layout(tmp_path, content, role)
    assert read(pairs) == (expected(content), [])
    assert [pairs.captions(index) for index in range(5)] == [captions for _, captions in content]
    assert list(pairs.all_captions()) == [text for _, captions in content for text in captions]
    assert len({pairs.image_id(index) for index in range(5)}) == 5
    assert [pairs[index]["image_id"] for index in range(5)] == [pairs.image_id(index) for index in range(5)]
    assert plain(pairs[-1]) == plain(pairs[np.int64(4)])
    for outside in (5, -6):
        with pytest.raises(IndexError, match=f"sample {outside} of '.*', which has 5"):
            pairs[outside]
    copy = pickle.loads(pickle.dumps(pairs))
    assert (copy.name, copy.fingerprint, plain(copy[3])) == (pairs.name, pairs.fingerprint, plain(pairs[3]))


@every_layout
def test_a_fingerprint_changes_with_the_content_and_not_with_the_place(tmp_path, layout):
    content, prints = items(), []
    others = [content[:4], content[::-1], [(content[0][0], ["else"]), *content[1:]]]
    others += [[*content[:4], (body + b"x", content[4][1])] for body in (content[4][0], content[4][0][:-1])]
    for number, one in enumerate([content, content, *others]):
        (tmp_path / str(number)).mkdir()
        prints.append(layout(tmp_path / str(number), one, "test").fingerprint)
    assert (prints[0], len(prints[0]), len(set(prints))) == (prints[1], 64, 6)


def test_forked_workers_read_what_one_process_reads(tmp_path):
    sets = []
    for layout in LAYOUTS:
        (tmp_path / layout.__name__).mkdir()
        sets.append(layout(tmp_path / layout.__name__, items(), "test"))
        assert plain(sets[-1][0]) == expected(items(1))[0]  # files are open before the fork
    options = {"multiprocessing_context": "fork", "collate_fn": lambda batch: list(map(plain, batch))}
    loader = DataLoader(ConcatDataset(sets), 4, num_workers=2, **options)
    assert [item for batch in loader for item in batch] == expected(items()) * len(sets)


# --- names and encodings of other machines ----------------------------------------------------------------------------


def test_a_folder_whose_name_is_no_utf8_is_refused_where_the_library_cannot_open_it(tmp_path):
    folder = tmp_path / os.fsdecode("Übung".encode("latin-1"))
    arrow(tmp_path, items(), "test")
    folder.mkdir()
    (tmp_path / "x").rename(folder / "x")
    words = r"data.test = 'x': .*bung/x is no UTF-8, and the datasets library cannot open"
    refused((words, lambda: open_hugging_face("x", root=folder, role="test")))
    (tmp_path / "link").symlink_to(folder)
    assert len(open_hugging_face("x", root=tmp_path / "link", role="test")) == 5


TEXT = "0.jpg\tun café\n1.jpg\tein Übermaß\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_of_windows_are_read(tmp_path, encoding):
    beside_pictures(tmp_path, items(2), "x.tsv", TEXT.replace("\n", "\r\n").encode(encoding))
    rows = [dict(zip(("image", "caption"), line.split("\t"))) for line in TEXT.splitlines()]
    write(tmp_path / "x.json", json.dumps(rows, ensure_ascii=False).encode(encoding))
    samples = [{"jpg": jpeg(number), "txt": row["caption"].encode(encoding)} for number, row in enumerate(rows)]
    write_tar(tmp_path / "x.tar", {f"k{number}": sample for number, sample in enumerate(samples)})
    for pairs in (open_tsv(tmp_path / "x.tsv"), open_karpathy(tmp_path / "x.json"), open_shards("x.tar", tmp_path)):
        assert list(pairs.all_captions()) == ["un café", "ein Übermaß"]


def test_another_encoding_is_refused_at_its_first_byte_and_one_row_of_many_is_broken(tmp_path):
    content = "".join(f"0.jpg\tcaption {number}\n" for number in range(200)) + "0.jpg\tun café\n"
    table = beside_pictures(tmp_path, items(1), "x.tsv", content.encode("cp1252"))
    (broken,) = open_tsv(table).broken_at_open
    assert (broken.key, broken.reason) == ("line 201", "row cannot be decoded: it is no UTF-8")
    words = r"x\.tsv is no text in UTF-8: byte 0xe9 at position \d+, line 201; expected"
    refused((words, lambda: open_tsv(table, max_broken_share=0.004)))
    bad = {"x.jsonl": b'{"image": "0.jpg",\n "caption": "caf\xe9"}', "y.json": b"\xff\xfe[\0]\0"}
    for name, content in bad.items():
        write(tmp_path / name, content)
        words = rf"{name} is no text in UTF-8: byte 0x.., line \d; expected UTF-8. To"
        refused((words, partial(open_hugging_face, name, root=tmp_path)))


# --- captions in several columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["train", "test"])
def test_captions_in_several_columns_are_those_of_one_picture(tmp_path, role):
    columns = [f"caption_{number}" for number in range(5)]
    cells = [[f"{row} {number}" for number in range(5)] for row in range(2)]
    cells[1][2:4] = "", None
    expected = [cells[0], ["1 0", "1 1", "1 4"]]
    frame = pandas.DataFrame(cells, columns=columns)
    frame.insert(0, "image", ["0.jpg", "1.jpg"])
    table = beside_pictures(tmp_path, items(2), "x.csv", frame.to_csv(index=False))
    frame.to_parquet(tmp_path / "x.parquet")
    for opened, path in ((open_tsv, str(table)), (open_hugging_face, str(tmp_path / "x.parquet"))):
        pairs = opened(path, caption_column=", ".join(columns), role=role)
        assert [pairs[row]["captions"] for row in range(2)] == expected
        assert list(pairs.all_captions()) == [*expected[0], *expected[1]]
        assert opened(path, caption_column="caption_4", role=role).captions(0) == ["0 4"]
        refused(("'caption_5'", partial(opened, path, caption_column="caption_0,caption_5", role=role)))


def test_a_cell_may_hold_a_list_of_captions_as_pandas_numpy_and_json_write_it(tmp_path):
    """Parquet's lists come to pandas as arrays, which it writes without commas; to Python 'a' 'b' is one text."""
    texts = ["it's a dog", 'a "red" dog, runs', "in a\nline ' ' \\", "a dog " * 20]
    arrays = [np.array(texts, object), np.array(texts[:2], object), np.array(texts[3:], object)]
    cells = [*arrays, str(texts), str(texts[3:]), json.dumps(texts), "[unclear] [1]"]
    frame = pandas.DataFrame({"image": [f"{row}.jpg" for row in range(7)], "captions": cells})
    pairs = open_tsv(beside_pictures(tmp_path, items(7), "x.csv", frame.to_csv(index=False)))
    assert [pairs.captions(row) for row in range(7)] == [
        texts, texts[:2], texts[3:], texts, texts[3:], texts, ["[unclear] [1]"]
    ]  # fmt: skip
    # lists without a caption, of which the text "[]" is none either
    table = write(tmp_path / "y.csv", "image,captions\n0.jpg,[]\n1.jpg,\"['one', None]\"\n2.jpg,a\n")
    for role in ("train", "test"):
        good, broken = read(open_tsv(table, role=role, max_broken_share=1.0))
        assert good == [(pixels_of(jpeg(2)), ["a"])]
        reasons = ["missing caption: the list is empty", "caption is not a string: NoneType"]
        assert [fault.reason for fault in broken] == reasons


# --- what is broken --------------------------------------------------------------------------------------------------

TYPED = (arrow, json_lines)  # Arrow itself refuses a column of several types
TABLES = (table_of_tabs, table_of_commas, texts_beside)  # which hold nothing but text
ROWS = (*TABLES, rows_of_a_list)
FAULTS = [  # picture (None leaves it out, ... leaves it as it is), captions, reason, layouts that cannot have it
    (jpeg(2)[:-200], ..., "image cannot be decoded: OSError, image file is truncated", ()),
    (b"<html>404</html>", ..., "it starts with b'<html>404</html>'", ()),
    (b"", ..., "it has no bytes", ()),
    (None, ..., "", (texts_beside,)),  # no picture
    (..., ["  "], "empty caption: '  '", (texts_beside,)),
    (..., [], "missing caption", ROWS),
    (..., [None], "caption is not a string: NoneType", ROWS),
    (..., [7], "caption is not a string: int", (*TYPED, *ROWS)),
    (..., [["a"]], "caption is not a string: list", (*TYPED, *ROWS)),
    (..., ["lost \ud83d"], "caption has half a surrogate pair", (*TYPED, *TABLES)),
]


@pytest.mark.parametrize(
    ("layout", "fault"),
    [(layout, fault) for layout in LAYOUTS for fault in FAULTS if layout not in fault[-1]],
    ids=lambda parameter: getattr(parameter, "__name__", ""),
)
def test_what_cannot_be_used_costs_its_sample_only_and_says_why(tmp_path, layout, fault):
    body, captions, reason, _ = fault
    content = items()
    content[2] = (content[2][0] if body is ... else body, content[2][1] if captions is ... else captions)
    good, (fault,) = read(layout(tmp_path, content, "train"))
    assert good == expected([*content[:2], *content[3:]])
    assert reason in fault.reason
    assert fault.path.startswith(str(tmp_path))
    assert pickle.loads(pickle.dumps(fault)) == fault


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout is not arrow], ids=lambda one: one.__name__)
def test_opening_stops_when_too_many_are_broken(tmp_path, layout):
    content = [(body if number % 10 else b"", captions) for number, (body, captions) in enumerate(items(1) * 100)]
    if layout in (shards, json_lines):  # which look at a picture when it is read
        content = [(body or None, captions if body else []) for body, captions in content]
    words = r"10 of 100 samples are broken \(10.00%\); at most 1.00% is accepted"
    refused((words, lambda: layout(tmp_path, content, "test")), error=TooManyBroken)
    pairs = layout(tmp_path, content, "test", max_broken_share=0.1) if layout is not json_lines else None
    assert pairs is None or (len(pairs), len(pairs.broken_at_open)) == (90, 10)


def karpathy_image(**changes):
    entry = {"filename": "1.jpg", "split": "test", "sentences": [{"raw": "a"}]}
    return json.dumps({"images": [{**entry, "filename": "0.jpg"}, {**entry, **changes}], "dataset": "x"})


def list_row(row):
    return json.dumps([{"image": "0.jpg", "caption": "zero", "image_id": "0"}, row])


ODD_ROWS = [  # of a file beside 0.jpg and 1.jpg: name, content, where the fault is, what is wrong
    ("x.json", karpathy_image(sentences=None), "images[1]", "sentences has the wrong type"),
    ("x.json", karpathy_image(sentences=["a"]), "images[1]", "sentences has the wrong type"),
    ("x.json", karpathy_image(sentences=[{"tokens": ["a"]}]), "images[1]", "caption is not a string: NoneType"),
    ("x.json", karpathy_image(sentences=[{"raw": "a", "sentid": "12"}]), "images[1]", "caption id has the wrong type"),
    ("x.json", karpathy_image(sentences=[{"raw": "a", "sentid": -1}]), "images[1]", "caption id has the wrong type"),
    ("x.json", karpathy_image(sentids=[1, 2]), "images[1]", "caption ids do not fit: [1, 2] for 1 captions"),
    ("x.json", karpathy_image(filename=None), "images[1]", "missing image: its path is None"),
    ("x.json", karpathy_image(filename="\ud83d.jpg"), "images[1]", "path of the image has half a surrogate pair"),
    ("x.json", karpathy_image(cocoid=[1]), "images[1]", "image_id has the wrong type: list"),
    ("x.json", karpathy_image(cocoid=True), "images[1]", "image_id has the wrong type: bool"),
    ("x.json", karpathy_image(split=None), "images[1]", "split has the wrong type: NoneType"),
    ("x.json", json.dumps({**json.loads(karpathy_image()), "images": [json.loads(karpathy_image())["images"][0], 3]}),
     "images[1]", "entry has the wrong type: int instead of an object"),
    ("x.json", list_row({"image": "1.jpg", "caption": 7}), "[1]", "captions has the wrong type: int instead"),
    ("x.json", list_row({"caption": "a"}), "[1]", "missing image: its path is None"),
    ("x.json", list_row({"image": "", "caption": "a"}), "[1]", "missing image: its path is ''"),
    ("x.json", list_row({"image": "1.jpg", "caption": "a", "image_id": 1.5}), "[1]", "image_id has the wrong type"),
    ("x.json", list_row({"image": "0.jpg", "caption": "a", "image_id": "1"}), "[1]",
     "image_id differs: '1', the same image has '0' at [0]"),
    ("x.json", list_row({"image": "a\0/1.jpg", "caption": "a"}), "[1]", "missing image: no file has the path"),
    ("x.json", list_row({"image": "é" * 128, "caption": "a"}), "[1]", "missing image: no file has the path 'ééé"),
    ("x.json", list_row(["1.jpg", "a"]), "[1]", "entry has the wrong type: list"),
    ("x.tsv", "0.jpg\tfine\n1.jpg", "line 2", "row has another number of columns: 1 instead of 2"),
    ("x.tsv", "0.jpg\tfine\n1.jpg\ta\tb", "line 2", "row has another number of columns: 3 instead of 2"),
    ("x.tsv", "0.jpg\tfine\n\ta dog", "line 2", "missing image: its path is ''"),
    ("x.csv", 'path,caption\n0.jpg,"a\nb\nc"\n1.jpg\n', "line 5", "row has another number of columns: 1 instead of 2"),
]  # fmt: skip


def open_any(path, role):
    files(path.parent, items(2))
    readers = {".tar": open_shards, ".json": open_karpathy}
    return readers.get(path.suffixes[0], open_tsv)(path, role=role)


@pytest.mark.parametrize(("name", "content", "key", "reason"), ODD_ROWS)
def test_a_row_that_cannot_be_used_is_named_with_its_place(tmp_path, name, content, key, reason):
    path = write(tmp_path / name, content)
    pairs = open_any(path, "test")
    assert (len(pairs), pairs[0]["image"].size) == (1, (24, 20))
    (broken,) = pairs.broken_at_open
    assert (broken.path, broken.key) == (str(path), key)
    assert broken.reason.startswith(reason)


GOOD = karpathy_image().encode()
NO_FILE = [  # name, content, what is said of the whole file
    ("x.json", GOOD[:-20], "not valid JSON"),
    ("x.json", b"", "not valid JSON"),
    ("x.json", b"[" * 100_000, "not valid JSON"),
    ("x.json", b'{"images": "\xff"}', "is no text in UTF-8: byte 0xff at position 12, line 1; expected UTF-8, or"),
    ("x.tsv", b"0.jpg\tfine\n1.jpg\tcaf\xe9", "is no text in UTF-8: byte 0xe9 at position 20, line 2; expected UTF-8"),
    ("x.tsv", "0.jpg\tfine\n".encode("utf-16")[:-1], "is no text in UTF-16-LE: byte 0x0a at position 22"),
    ("x.json", b"3", "the top level is of type int; expected: an object with a list 'images'"),
    ("x.json", b'{"images": {}}', "the top level is an object with the keys images; expected"),
    ("x.json", b"[]", "the list is empty"),
    ("x.json", b'{"images": []}', "has no split 'test'; expected one of: it has none"),
    ("x.json", b'{"images": [{"split": "test"}]}', "no captioned image in x-test; first fault"),
    ("x.json.gz", gzip.compress(GOOD, mtime=0)[:-12], "cannot be read"),
    ("x.tsv", b"", "is empty; expected: rows of path and caption"),
    ("x.tsv", b"\n \n", "is empty"),
    ("x.tsv", b"\x00\x01binary\t", "holds zero bytes"),
    ("x.tsv", b"path\tcaption\n", "no captioned image in x"),
    ("x.tsv", b"path\tcaption\n\tb\n", "no captioned image in x; first fault"),
    ("x.tsv.gz", gzip.compress(b"0.jpg\ta dog\n", mtime=0)[:-9], "cannot be read"),
    ("x.tsv", b"a\tb\tc\n0.jpg\ta dog\tx\n", "line 1: which columns hold paths and captions?"),  # no known name
    ("x.tsv", b"path\tb\n0.jpg\ta dog\n", "line 1: which columns hold paths and captions?"),  # one known name only
    ("x.csv", b"image;caption\n0.jpg;a dog\n", "line 1: a single column, 'image;caption'; expected: columns separated"),
    ("x.csv", b'0.jpg,a dog, a cat\n1.jpg,"a"\n', "data.image_column"),  # no header, a comma in the first caption
    ("x.csv", b'path,caption\n0.jpg,fine\n1.jpg,"open\n2.jpg,b\n', "line 3: the row has malformed quotes"),
    ("x.csv", b'path,caption\n0.jpg,"a\nb"\n1.jpg,"a" dog\n', "line 4: the row has malformed quotes"),
    ("x.tar", b"", "is empty; expected: an uncompressed tar"),
    ("x.tar", b"<html>" * 200, "is not a tar: it starts with b'<html>"),
    ("x.tar", b"\x1f\x8b" + b"0" * 3000, "is not a tar: a gzip file, unpack it first (gunzip)"),
    ("x.tar", b"PK\x03\x04" + b"0" * 600, "is not a tar: a zip file"),
    ("x.tar", bytes(30_000), "is not a tar: it starts with b'\\x00"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), NO_FILE)
def test_a_file_that_cannot_be_read_as_a_whole_is_refused_by_its_name(tmp_path, name, content, words):
    path = write(tmp_path / name, content)
    refused((f"^{path}.*{re.escape(words)}", lambda: open_any(path, "test")))
    path.unlink()
    refused((r"no such file|no shards for pattern", lambda: open_any(path, "test")), error=FileNotFoundError)


# --- fingerprints do not move between versions -----------------------------------------------------------------------


def test_the_fingerprint_of_a_table_is_the_hash_of_its_paths_captions_and_files(tmp_path):
    names, bodies = [b"a.jpg", b"\xe9t\xe9.jpg"], [jpeg(0), jpeg(1)]  # a name that is not UTF-8
    for name, body in zip(names, bodies):
        write(tmp_path / os.fsdecode(name), body)
    write(tmp_path / "x.tsv", b"a.jpg\tone\n\xe9t\xe9.jpg\tsummer\na.jpg\ttwo\n")
    spans, captions = [[0, len(body)] for body in bodies], [["one", "two"], ["summer"]]
    content = f"name{names}image{spans}image_id{names}captions{captions}".encode()  # names are ids, too
    content += b"".join(hashlib.sha256(body).digest() for body in bodies)
    assert open_tsv(tmp_path / "x.tsv").fingerprint == hashlib.sha256(content).hexdigest()


def test_the_fingerprint_of_shards_is_the_hash_of_their_members_in_order(tmp_path):
    samples = {"k0": {"jpg": jpeg(0), "txt": b"one"}, "k1": {"json": b'{"caption": "two"}', "png": jpeg(1, kind="PNG")}}
    path = write_tar(tmp_path / "x.tar", samples)
    members = hashlib.sha256()
    for key, files in samples.items():
        for extension, body in files.items():
            members.update(f"{key}\0{extension}\0{len(body)}\0".encode())
            members.update(b"" if extension in ("jpg", "png") else body)
    digest = hashlib.sha256(f"x.tar\0{path.stat().st_size}\0{members.hexdigest()}\0".encode())
    for body in (samples["k0"]["jpg"], samples["k1"]["png"]):
        digest.update(hashlib.sha256(body).digest())
    for index_dir in (None, tmp_path / "index", tmp_path / "index"):
        assert open_shards(path, index_dir=index_dir).fingerprint == digest.hexdigest()


def test_loader_processes_follow_the_cores_where_no_number_is_set(monkeypatch):
    def chosen(cores, num_samples=10_000, trainers=1, gpu=False):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
        return default_processes(num_samples)

    assert [chosen(cores) for cores in (1, 2, 16)] == [0, 1, 1]
    assert [chosen(cores, gpu=True) for cores in (1, 2, 6, 64)] == [0, 1, 5, 8]
    assert [chosen(16, trainers=trainers, gpu=True) for trainers in (4, 8, 16, 32)] == [3, 1, 0, 0]
    assert chosen(16, num_samples=100, gpu=True) == 0
    chosen(2)
    for size, processes in ((1_000, 0), (4_000, 1)):
        loader = Loader(range(size), "numbers", None, list, batch_size=500)
        assert loader.loader.num_workers == processes
        assert [number for batch in loader for number in batch] == list(range(size))


@pytest.mark.parametrize(("source", "on_cpu"), [("scenes", 0), ("shards", None)])
def test_scenes_are_drawn_by_the_trainer_on_a_cpu_and_by_other_processes_beside_a_gpu(source, on_cpu, monkeypatch):
    made = []  # the processes that were asked for, None = by the cores; whether memory is pinned
    monkeypatch.setattr(
        inputs, "training_batches", lambda view, at, workers, pinned, *_: made.append((workers, pinned))
    )
    order = SimpleNamespace(by_epoch=False, global_batch_size=4)
    training = SimpleNamespace(order=order, view=None, description="", cache=None)
    run, optim = SimpleNamespace(num_workers=None, data_timeout=1), SimpleNamespace(steps=2)
    config = SimpleNamespace(data=SimpleNamespace(source=source), run=run, optim=optim)
    for device in ("cpu", "cuda"):
        trainer = SimpleNamespace(device=torch.device(device), process_index=0, num_processes=1)
        inputs.batches_from(0, config, training, trainer)
    assert made == [(on_cpu, False), (None, True)]


@pytest.mark.parametrize("role", ["train", "test"])
def test_the_texts_of_a_folder_of_pictures_lie_beside_them_whatever_their_encoding_and_line_ends(tmp_path, role):
    texts = [
        b"one\n",
        b"two\r\nand\rmore\r\n\r\n",
        "drei \u00fc".encode("utf-16"),
        b" \n",
        "caf\u00e9".encode("latin-1"),
        None,
    ]
    (tmp_path / "a").mkdir()
    for number, text in enumerate(texts):
        image = write(tmp_path / ("a/b" if number % 2 else "") / f"{number}.JPG", jpeg(number))
        if text is not None:
            write(image.with_suffix((".txt", ".TXT", ".Txt")[number % 3]), text)
    # no picture's, and in another format; beside an image, and in place of one
    for name in ("notes.txt", "notes.JSON", "notes.md", "a/phone.TXT", "0.json", "a/phone.HEIC", "a/phone.mov"):
        write(tmp_path / name, "other bytes")
    for name in ("0.png", "._2.JPG", ".thumbnails/2.JPG"):  # of one name with 0.JPG, and of the system
        write(tmp_path / name, jpeg(0))
    pairs = open_folder(tmp_path, role=role, max_broken_share=1.0)
    expected = {"0.JPG": ["one"], "2.JPG": ["drei \u00fc"], "a/b/1.JPG": ["two", "and", "more"], "a/b/3.JPG": [""]}
    faults = {
        "0.png": "caption is that of another image: 0.JPG",
        "4.JPG": "caption cannot be decoded: .* is no text in UTF-8",
        "a/b/5.JPG": "missing caption: no file 5.txt beside it",
        "a/phone.HEIC": "no image: unknown extension .HEIC",
    }
    if role == "train":  # elsewhere an empty caption is a text to rank
        del expected["a/b/3.JPG"]
        faults["a/b/3.JPG"] = "empty caption"
    assert {pairs.image_id(index): pairs.captions(index) for index in range(len(pairs))} == expected
    assert [fault.key for fault in pairs.broken_at_open] == sorted(faults)
    assert all(re.search(faults[fault.key], fault.reason) for fault in pairs.broken_at_open)
