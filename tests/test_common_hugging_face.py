"""common/data/hugging_face.py and streamed.py: sources, columns, broken rows; the order of a stream."""

import hashlib
import itertools
import json
import pickle
import re
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from readable import pixels_of
from refusals import refused
from tars import as_plain, jpeg

from common.data.broken import BrokenSample
from common.data.hugging_face import HuggingFacePairs, open_hugging_face
from common.data.streamed import KEPT_ROWS

FEATURES = datasets.Features(
    {"image": datasets.Image(), "caption": datasets.Value("string"), "image_id": datasets.Value("int64")}
)


@pytest.fixture(autouse=True)
def cache_below_the_test(tmp_path, monkeypatch):
    """The library's copies of parquet and JSON files go where the test's files are."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def rows(numbers, **changes):
    """A data set of pictures with one caption each; changes are columns."""
    columns = {
        "image": [{"bytes": jpeg(number), "path": None} for number in numbers],
        "caption": [f"picture {number}" for number in numbers],
        "image_id": [100 + number for number in numbers],
    }
    return datasets.Dataset.from_dict({**columns, **changes}, features=FEATURES if not changes else None)


def write_parquet(folder, num_rows=20, files=4, split="train"):
    folder.mkdir(exist_ok=True)
    for number in range(files):
        part = rows(range(number * num_rows // files, (number + 1) * num_rows // files))
        part.to_parquet(folder / f"{split}-{number:05d}-of-{files:05d}.parquet")
    return folder


def content_of(pairs):
    return [as_plain(pairs[index]) for index in range(len(pairs))]


def captions_of(pairs):
    return [pairs.captions(index) for index in range(len(pairs))]


def expected(numbers):
    return [(pixels_of(jpeg(number)), [f"picture {number}"], str(100 + number)) for number in numbers]


# --- sources ---------------------------------------------------------------------------------------------------------


def test_every_local_form_gives_the_same_samples(tmp_path):
    rows(range(20)).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows(range(20)), "test": rows(range(20, 23))}).save_to_disk(tmp_path / "splits")
    write_parquet(tmp_path / "parquet")
    sources = {
        "saved": "saved",
        "splits": "splits-train",
        "saved/*.arrow": "data-00000-of-00001",
        "parquet": "parquet-train",
        "parquet/train-{00000..00003}-of-00004.parquet": "parquet",
    }
    prints = set()
    for source, name in sources.items():
        pairs = open_hugging_face(source, root=tmp_path)
        assert (pairs.name, len(pairs), pairs.broken_at_open, content_of(pairs)) == (name, 20, [], expected(range(20)))
        assert list(pairs.all_captions()) == [pairs.captions(index)[0] for index in range(20)]
        assert (pairs.image_id(-1), pairs.caption_ids(0)) == ("119", None)
        prints.add(pairs.fingerprint)
    assert len(prints) == 1
    assert content_of(open_hugging_face(str(tmp_path / "splits"), role="test")) == expected(range(20, 23))
    assert content_of(open_hugging_face(str(tmp_path / "splits"), split="test")) == expected(range(20, 23))


def write_images(folder, lines):
    """A line of metadata and a picture for each number."""
    folder.mkdir(parents=True)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines.values())))
    for number in lines:
        (folder / f"{number}.jpg").write_bytes(jpeg(number))


def line_of(number, key="file_name", **more):
    return {key: f"{number}.jpg", "text": f"picture {number}", **more}


def test_an_imagefolder_with_metadata_is_read_by_split(tmp_path):
    for split, numbers in (("train", range(3)), ("validation", range(3, 5))):
        write_images(tmp_path / "set" / split, {number: line_of(number, image_id=100 + number) for number in numbers})
    assert content_of(open_hugging_face("set", root=tmp_path)) == expected(range(3))
    assert content_of(open_hugging_face("set", root=tmp_path, role="val")) == expected(range(3, 5))
    # a split's own folder, which the library calls train
    named = open_hugging_face("set/validation", root=tmp_path, split="train", role="val")
    assert content_of(named) == expected(range(3, 5))
    refused(
        *(
            (
                f"{name} has no split '{split}'.* expected one of: {kinds}",
                partial(open_hugging_face, name, root=tmp_path, role=role),
            )
            for name, role, split, kinds in (
                ("set/train", "test", "test", "train "),
                ("set/validation", "val", "validation", "train "),
                ("set", "test", "test", r"train, validation \(written as source#split\)"),
            )
        )
    )


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_size_list"])
def test_captions_are_read_from_lists_of_every_kind(tmp_path, kind):
    captions = [["a", "b"], ["c", "d"]]
    of_kind = {"list": pa.list_(pa.string()), "large_list": pa.large_list(pa.string())}
    column = pa.array(captions, of_kind.get(kind, pa.list_(pa.string(), 2)))
    pq.write_table(pa.table({"image": [jpeg(0), jpeg(1)], "caption": column}), tmp_path / "x.parquet")
    for role in ("train", "test"):
        pairs = open_hugging_face("x.parquet", root=tmp_path, role=role)
        assert [pairs[row]["captions"] for row in range(2)] == captions
        assert list(pairs.all_captions()) == ["a", "b", "c", "d"]
    assert open_hugging_face("x.parquet", root=tmp_path, stream_buffer=1)[0]["captions"] == captions[0]


def test_a_file_that_is_a_link_to_nothing_is_refused(tmp_path):
    write_parquet(tmp_path / "set", 1, 1)
    for place in (tmp_path / "set" / "train-1.parquet", tmp_path / "link"):
        place.symlink_to("/annex/gone")
    cases = (("set", "set/train-1.parquet"), ("set/*.parquet", "set/train-1.parquet"), ("link", "link"))
    refused(
        *(
            ("^" + re.escape(f"data.train = {source!r}: {tmp_path / place}, a link to /annex/gone, cannot be opened"),
             partial(open_hugging_face, source, root=tmp_path))
            for source, place in cases
        )
    )  # fmt: skip


def test_json_lines_name_picture_files_and_lists_of_captions(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "0.jpg").write_bytes(jpeg(0))
    lines = [
        {"image": "0.jpg", "caption": ["a", "b"], "sentids": [4, 5]},
        {"image": "1.jpg", "caption": ["c"], "sentids": [6]},
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pairs = open_hugging_face("set.jsonl", root=tmp_path, images=tmp_path / "pictures")
    before = pairs.fingerprint
    assert as_plain(pairs[0])[1:] == (["a", "b"], "0.jpg")  # without a column image_id it is the path
    assert (pairs.caption_ids(0), pairs.name) == ([4, 5], "set")
    refused((r"pictures/1.jpg: image cannot be read: No such file", lambda: pairs[1]), error=BrokenSample)
    (tmp_path / "pictures" / "1.jpg").write_bytes(jpeg(1))
    again = open_hugging_face("set.jsonl", root=tmp_path, images=tmp_path / "pictures")
    assert again[1]["captions"] == ["c"]
    assert again.fingerprint != before


def test_columns_are_recognised_by_name_or_chosen(tmp_path):
    both = rows(range(2)).add_column("alt", ["x", "y"]).rename_column("image", "picture")
    both.save_to_disk(tmp_path / "set")
    assert open_hugging_face("set", root=tmp_path).captions(0) == ["picture 0"]
    assert open_hugging_face("set", root=tmp_path, caption_column="alt").captions(1) == ["y"]
    both.remove_columns(["caption", "alt"]).save_to_disk(tmp_path / "bare")
    refused(
        (
            r"set: column data\.caption_column 'title' is missing; expected one of: picture, caption, image_id, alt$",
            lambda: open_hugging_face("set", root=tmp_path, caption_column="title"),
        ),
        (
            "'image_id' is of type int64; expected one of: images, bytes, paths",
            lambda: open_hugging_face("set", root=tmp_path, image_column="image_id"),
        ),
        (
            "'image_id' is of type int64; expected: strings, or lists",
            lambda: open_hugging_face("set", root=tmp_path, caption_column="image_id"),
        ),
        (
            "data.caption_column is unknown; expected one of: picture, image_id",
            lambda: open_hugging_face("bare", root=tmp_path),
        ),
    )


def test_rows_of_one_image_id_are_ranked_as_one_picture_with_all_captions(tmp_path):
    numbers = [3, 1, 3, 2, 1, 3]
    texts = [f"text {row}" for row in range(6)]
    rows(numbers, caption=texts, sentids=list(range(6))).cast_column("image", datasets.Image()).save_to_disk(
        tmp_path / "set"
    )
    ranked = open_hugging_face("set", root=tmp_path, role="test")
    expected_captions = {"103": [0, 2, 5], "101": [1, 4], "102": [3]}  # in the order of their first rows
    assert len(ranked) == 3
    for index, (image_id, members) in enumerate(expected_captions.items()):
        captions = [texts[row] for row in members]
        pixels = expected([int(image_id) - 100])[0][0]
        assert as_plain(ranked[index]) == (pixels, captions, image_id)
        assert (ranked.captions(index), ranked.image_id(index)) == (captions, image_id)
        assert ranked.caption_ids(index) == members
    assert as_plain(ranked[-1]) == as_plain(ranked[2])
    assert sorted(ranked.all_captions()) == texts
    trained = open_hugging_face("set", root=tmp_path)
    assert (len(trained), trained.captions(2), trained.caption_ids(2)) == (6, ["text 2"], [2])
    assert trained.fingerprint == ranked.fingerprint


def test_an_image_folder_without_ids_names_pictures_by_their_path_in_it(tmp_path):
    write_images(tmp_path / "set" / "train", {number: line_of(number) for number in range(2)})
    for role in ("train", "test"):
        pairs = open_hugging_face("set", root=tmp_path, split="train", role=role)
        assert [pairs.image_id(index) for index in range(2)] == ["train/0.jpg", "train/1.jpg"]
        assert pairs[1]["image_id"] == "train/1.jpg"


def test_paths_are_read_as_in_tables_and_json_files(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations").mkdir()
    (tmp_path / "images" / "0.jpg").write_bytes(jpeg(0))
    paths = ["../images/0.jpg", "../images/./0.jpg", str(tmp_path / "images" / "0.jpg"), "a\0b"]
    lines = [json.dumps({"image": path, "caption": f"text {row}"}) for row, path in enumerate(paths)]
    (tmp_path / "annotations" / "set.jsonl").write_text("\n".join(lines))
    ranked = open_hugging_face("annotations/set.jsonl", root=tmp_path, role="test", max_broken_share=1.0)
    assert [(ranked[index]["image_id"], ranked.captions(index)) for index in range(2)] == [
        ("../images/0.jpg", ["text 0", "text 1"]),
        (paths[2], ["text 2"]),
    ]
    (broken,) = ranked.broken_at_open
    assert (broken.key, broken.reason) == ("row 3", r"missing image: no file has the path 'a\x00b'")
    refused((r"\[row 3\]: missing image: no file has the path",
             lambda: open_hugging_face("annotations/set.jsonl", root=tmp_path)[3]), error=BrokenSample)  # fmt: skip


def test_one_path_with_two_ids_is_refused_as_in_json_files(tmp_path):
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    path, lines = str(tmp_path / "0.jpg"), {"caption": ["a", "b", "c"], "image_id": ["7", "8", "7"]}
    (tmp_path / "x.jsonl").write_text(
        "".join(
            json.dumps({"image": path, "caption": caption, "image_id": key}) + "\n"
            for caption, key in zip(*lines.values())
        )
    )
    of_structs = datasets.Dataset.from_dict({"image": [{"path": path, "bytes": None}] * 3, **lines})
    of_structs.to_parquet(tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        ranked = open_hugging_face(name, root=tmp_path, role="test")
        (broken,) = ranked.broken_at_open
        assert (broken.key, broken.reason) == ("row 1", f"duplicate path: {path!r}, first at row 0")
        assert captions_of(ranked) == [["a", "c"]]
        assert len(ranked.fingerprint) == 64


def test_one_id_of_two_pictures_is_no_picture(tmp_path):
    # else the captions of one would be ranked as those of the other
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    names, lines = ["0.jpg", "./0.jpg", "1.jpg"], {"caption": ["a", "b", "c"], "image_id": ["7"] * 3}
    datasets.Dataset.from_dict({"image": names, **lines}).to_parquet(tmp_path / "paths.parquet")
    contents = [(tmp_path / name).read_bytes() for name in names]
    datasets.Dataset.from_dict({"image": contents, **lines}).to_parquet(tmp_path / "bytes.parquet")
    sizes = len(jpeg(1)), len(jpeg(0))
    for name, reason in (
        ("paths", "path differs: '1.jpg', the same image has '0.jpg' at row 0"),
        ("bytes", "size differs: {}, the same image has {} at row 0".format(*sizes)),
    ):
        ranked = open_hugging_face(f"{name}.parquet", root=tmp_path, role="test")
        assert captions_of(ranked) == [["a", "b"]]
        assert [(broken.key, broken.reason) for broken in ranked.broken_at_open] == [("row 2", reason)]
    assert sizes[0] != sizes[1]


def test_rows_without_an_id_are_known_by_their_bytes(tmp_path):
    ids = [hashlib.blake2b(jpeg(number), digest_size=16).hexdigest() for number in range(3)]
    rows([0, 1, 0, 1, 0, 2], image_id=[None, "7", "", "7", "8", ""]).save_to_disk(tmp_path / "some")
    rows([0, 1, 0, 2]).remove_columns("image_id").save_to_disk(tmp_path / "none")
    for name, of_rows, groups in (
        ("some", [ids[0], "7", ids[0], "7", "8", ids[2]], [[0, 0], [1, 1], [0], [2]]),
        ("none", [ids[0], ids[1], ids[0], ids[2]], [[0, 0], [1], [2]]),
    ):
        ranked, trained = (open_hugging_face(name, root=tmp_path, role=role) for role in ("test", "train"))
        assert captions_of(ranked) == [[f"picture {number}" for number in group] for group in groups]
        assert [ranked.image_id(index) for index in range(len(ranked))] == list(dict.fromkeys(of_rows))
        assert [trained.image_id(index) for index in range(len(trained))] == of_rows
    of_splits = rows([0, 1]).add_column("split", ["train", "test"])
    of_splits.to_parquet(tmp_path / "splits.parquet")
    with pytest.warns(UserWarning, match="has a column 'split', which a stream does not read"):
        open_hugging_face(str(tmp_path / "splits.parquet"), stream_buffer=1)
    rows([0, 1]).remove_columns("image_id").to_parquet(tmp_path / "x.parquet")
    stream = open_hugging_face(str(tmp_path / "x.parquet"), stream_buffer=1)
    assert {stream[position]["image_id"] for position in range(2)} == set(ids[:2])


def test_one_unusable_row_of_a_picture_is_left_out_and_listed(tmp_path):
    rows([0, 1, 0, 2], caption=["a", "b", None, None]).cast_column("image", datasets.Image()).save_to_disk(
        tmp_path / "set"
    )
    ranked = open_hugging_face("set", root=tmp_path, role="test")
    assert captions_of(ranked) == [["a"], ["b"]]
    assert as_plain(ranked[1]) == (expected([1])[0][0], ["b"], "101")
    assert [(broken.key, broken.reason.split(":")[0]) for broken in ranked.broken_at_open] == [
        ("row 2", "captions has the wrong type"),
        ("row 3", "captions has the wrong type"),
    ]
    trained = open_hugging_face("set", root=tmp_path)  # what is trained on is checked when it is read
    assert (len(trained), trained.broken_at_open) == (4, [])


def test_the_share_of_unusable_rows_of_a_ranked_set_is_the_caller_s(tmp_path):
    rows([0] * 100, caption=[*[None] * 10, *["a"] * 90], image_id=list(range(100))).save_to_disk(tmp_path / "set")
    assert len(open_hugging_face("set", root=tmp_path, role="test", max_broken_share=0.1)) == 90
    rows(range(2), caption=pa.array([None, None], pa.string())).save_to_disk(tmp_path / "none")
    words = r"no captioned image in none; first fault: .*\[row 0\]: captions has"
    refused((words, lambda: open_hugging_face("none", root=tmp_path, role="test")))


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("nobody/nothing", ValueError, "no such file or folder below data.root; from the hub it cannot be loaded"),
        ("/no/such/folder", FileNotFoundError, "/no/such/folder: no such file or folder"),
        ("x*.parquet", FileNotFoundError, "no shards for pattern"),
        ("gone.parquet", FileNotFoundError, "gone.parquet"),
        ("cut.parquet", ValueError, "cut.parquet cannot be loaded"),
        ("cut.arrow", ValueError, "cut.arrow cannot be loaded"),
        ("cut.*", ValueError, "one kind at a time"),
        ("void", ValueError, "cannot be loaded"),
        ("none.parquet", ValueError, "none.parquet cannot be loaded"),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path, monkeypatch, source, kind, words):
    for name in ("cut.parquet", "cut.arrow"):
        (tmp_path / name).write_bytes(b'PAR1 {"image": ')
    monkeypatch.chdir(tmp_path)
    Path("void").mkdir()
    pq.write_table(pa.table({"image": pa.array([], pa.binary()), "caption": pa.array([], pa.string())}), "none.parquet")
    refused((re.escape(words), lambda: open_hugging_face(source, root=tmp_path)), error=kind)


def test_no_rows_and_a_split_of_something_without_splits_are_refused(tmp_path):
    rows(range(2)).save_to_disk(tmp_path / "saved")
    reader, no_splits = (
        open_hugging_face("saved", root=tmp_path).reader,
        "has no splits; split is 'test'; expected: none",
    )
    refused(
        ("saved: no rows in mine", lambda: HuggingFacePairs(rows(range(2)).select([]), reader, "mine")),
        (no_splits, lambda: open_hugging_face("saved", root=tmp_path, split="test")),
        (no_splits, lambda: open_hugging_face("saved/*.arrow", root=tmp_path, split="test")),
    )


# --- streams ---------------------------------------------------------------------------------------------------------


def stream_of(tmp_path, num_rows=20, files=4, buffer=5, seed=0):
    folder = tmp_path / f"stream{num_rows}-{files}"
    if not folder.is_dir():
        write_parquet(folder, num_rows, files)
    return open_hugging_face(str(folder), stream_buffer=buffer, seed=seed)


def ids_of(pairs, positions):
    return [int(pairs[position]["image_id"]) - 100 for position in positions]


def test_a_stream_meets_every_row_once_an_epoch_in_another_order_each(tmp_path):
    pairs = stream_of(tmp_path)
    assert len(pairs) == 20
    epochs = [ids_of(pairs, range(20 * epoch, 20 * epoch + 20)) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len({tuple(epoch) for epoch in [*epochs, list(range(20))]}) == 4
    assert ids_of(stream_of(tmp_path), range(20)) == epochs[0]
    assert ids_of(stream_of(tmp_path, seed=1), range(20)) != epochs[0]
    assert sorted(pairs.all_captions()) == sorted(f"picture {number}" for number in range(20))
    assert as_plain(stream_of(tmp_path)[0]) == expected(epochs[0][:1])[0]


def test_the_buffer_of_a_stream_mixes_its_rows(tmp_path):
    order = ids_of(stream_of(tmp_path, num_rows=200, files=1, buffer=50), range(200))
    assert sorted(order) == list(range(200))
    assert sum(after == before + 1 for before, after in itertools.pairwise(order)) < 20  # neighbours are parted
    assert all(number < position + 50 for position, number in enumerate(order))  # nothing comes before it was read
    assert ids_of(stream_of(tmp_path, num_rows=200, files=1, buffer=1), range(200)) == list(range(200))


def test_a_stream_steps_back_a_little_and_no_further(tmp_path):
    pairs = stream_of(tmp_path, num_rows=200)
    whole = ids_of(stream_of(tmp_path, num_rows=200), range(210))
    for positions in ([150, 151, 149 - KEPT_ROWS + 3, 151, 152], [199, 205, 198, 206]):  # across an epoch
        assert ids_of(pairs, positions) == [whole[position] for position in positions]
    refused(("position 10 follows position 206, but a stream goes forward only", lambda: pairs[10]))
    for stream in (pairs, stream_of(tmp_path, num_rows=200)):  # begun and new
        refused(("position -1 of .* expected: from 0", partial(stream.__getitem__, -1)), error=IndexError)
    assert ids_of(pickle.loads(pickle.dumps(pairs)), [10]) == [whole[10]]  # a copy starts anew


def test_a_stream_of_json_is_counted_by_reading_it(tmp_path):
    write_images(tmp_path / "set", {number: line_of(number, "image", image_id=100 + number) for number in range(3)})
    pairs = open_hugging_face("set/metadata.jsonl", root=tmp_path, stream_buffer=2)
    assert len(pairs) == 3
    assert sorted(as_plain(pairs[position]) for position in range(3)) == sorted(expected(range(3)))


@pytest.mark.parametrize(("stated", "count_in_message"), [(21, "has 20 rows"), (19, "has more rows")])
def test_a_stream_of_another_length_than_stated_is_an_error(tmp_path, stated, count_in_message):
    pairs = stream_of(tmp_path)
    pairs._num_rows = stated
    refused((f"epoch 0 of the stream {count_in_message}, {stated} were stated", lambda: ids_of(pairs, range(25))))


def test_the_fingerprint_of_a_stream_changes_with_its_files(tmp_path):
    prints = [stream_of(tmp_path, **options).fingerprint for options in ({}, {"num_rows": 24}, {"files": 2})]
    assert len(set(prints)) == 3
    assert stream_of(tmp_path, buffer=9, seed=3).fingerprint == prints[0]


def test_a_column_that_names_several_splits_is_refused(tmp_path):
    rows(range(4), split=["train", "train", "test", "test"]).save_to_disk(tmp_path / "mixed")
    rows(range(4), split=["train"] * 4).save_to_disk(tmp_path / "one")
    assert len(open_hugging_face("one", root=tmp_path)) == 4
    refused(("names several splits, train, test", lambda: open_hugging_face("mixed", root=tmp_path)))
