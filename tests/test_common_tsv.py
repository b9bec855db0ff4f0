"""common/data/tsv.py: separators, headers, quotes, grouping, and faults named with their line."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tars import as_plain, jpeg

from common.data.karpathy import open_karpathy
from common.data.tsv import _lines, _records, open_tsv


@pytest.fixture
def table(tmp_path):
    """Writes a table beside pictures 0.jpg ... 4.jpg."""
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))

    def write(content, name="captions.tsv"):
        path = tmp_path / name
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return path

    return write


def content_of(pairs):
    return [(pairs.image_id(index), pairs.captions(index)) for index in range(len(pairs))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.tsv", "0.jpg\ta dog\n1.jpg\ta cat, two cats\n"),
        ("x.csv", '0.jpg,a dog\n1.jpg,"a cat, two cats"\n'),
        ("x.tsv", "filepath\ttitle\n0.jpg\ta dog\n1.jpg\ta cat, two cats"),
        ("x.csv", 'image,caption\r\n0.jpg,a dog\r\n1.jpg,"a cat, two cats"\r\n'),
        ("x.txt", "Image,Caption\n0.jpg,a dog\n1.jpg,a cat, two cats\n"),  # Flickr's own, without quotes
        ("x.tsv", "caption\turl\tpath\na dog\th\t0.jpg\na cat, two cats\th\t1.jpg\n"),
        ("x.csv", '\ufeffpath,text\n0.jpg,a dog\n\n1.jpg,"a cat, two cats"\n'),
        ("x.tsv", '0.jpg\t"a dog"\n1.jpg\ta cat, two cats\n'),
        ("x.csv", 'path,text\n0.jpg, "a dog"\n1.jpg, "a cat, two cats"\n'),
        ("x.csv", '0.jpg, "a dog" \n1.jpg, "a cat, two cats"\n'),
        ("x.tsv", '0.jpg\t "a dog"\n1.jpg\ta cat, two cats\n'),
    ],
)
def test_the_same_pairs_in_every_form(table, name, content):
    pairs = open_tsv(table(content, name))
    assert content_of(pairs) == [("0.jpg", ["a dog"]), ("1.jpg", ["a cat, two cats"])]
    assert as_plain(pairs[1])[1:] == (["a cat, two cats"], "1.jpg")
    assert (pairs.broken_at_open, pairs.name) == ([], "x")


def test_one_picture_may_be_written_in_several_ways(table):
    pairs = open_tsv(table("1.jpg\ta\n./1.jpg\tb\n.//0.jpg\tc\nx/../1.jpg\td\n"), role="test")
    assert content_of(pairs) == [("1.jpg", ["a", "b", "d"]), ("0.jpg", ["c"])]
    assert as_plain(pairs[0]) == as_plain(open_tsv(table("1.jpg\ta\n1.jpg\tb\n1.jpg\td\n", "y.tsv"))[0])
    path = table(f"{pairs.images}/1.jpg\ta\n{pairs.images}/x/../1.jpg\tb\n")
    assert content_of(open_tsv(path)) == [(f"{pairs.images}/1.jpg", ["a", "b"])]


def test_pictures_may_lie_beside_the_folder_of_the_table(table, tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "0.jpg").rename(tmp_path / "images" / "0.jpg")
    text = "../images/0.jpg\ta\n../images/./0.jpg\tb\n"
    for root in (None, tmp_path):  # below the root, any folder leads to the same file
        pairs = open_tsv(table(text, "annotations/x.tsv"), root=root)
        assert content_of(pairs) == [("../images/0.jpg", ["a", "b"])]
        assert pairs[0]["image"].mode == "RGB"
    path = table(text + "../images/9.jpg\tc\n..\td\n", "annotations/x.tsv")
    faults = [broken.reason for broken in open_tsv(path, max_broken_share=1.0).broken_at_open]
    assert faults == ["missing image: no such file"] * 2


def test_a_header_of_unknown_names_is_named_as_one(table):
    path = table("img_name,description\n0.jpg,a dog\n1.jpg,a cat\n", "x.csv")
    fault = "missing image: the line looks like a header; name its columns with "
    fault += "data.image_column=img_name and data.caption_column=description"
    (broken,) = open_tsv(path).broken_at_open
    assert (broken.key, broken.reason) == ("line 1", fault)
    columns = {"image_column": "img_name", "caption_column": "description"}
    assert content_of(open_tsv(path, **columns)) == content_of(open_tsv(path))
    path = table("9.jpg,a dog\n1.jpg,a pet\n", "y.csv")
    assert [broken.reason for broken in open_tsv(path).broken_at_open] == ["missing image: no such file"]


def test_columns_are_chosen_by_name(table):
    path = table("alt\ttitle\tfile\npicture\ta dog\t0.jpg\n")
    assert content_of(open_tsv(path)) == [("0.jpg", ["a dog"])]
    assert content_of(open_tsv(path, image_column="file", caption_column="alt")) == [("0.jpg", ["picture"])]
    message = rf"{path}, line 1: no column 'caption' \(data.caption_column\).*alt, title, file"
    refused((message, lambda: open_tsv(path, caption_column="caption")))
    path = table("file\tTitle\tother\tTitle\n0.jpg\ta dog\tx\ta pet\n", "y.tsv")  # all columns of a name
    for named in (None, "Title"):
        assert content_of(open_tsv(path, image_column="file", caption_column=named)) == [("0.jpg", ["a dog", "a pet"])]


def test_a_stray_quote_between_tabs_swallows_nothing(table):
    pairs = open_tsv(table('0.jpg\t"hello" he said\n1.jpg\t6" nails\n2.jpg\t"open\n3.jpg\t"a ""b"""\n'))
    assert [captions for _, captions in content_of(pairs)] == [['"hello" he said'], ['6" nails'], ['"open'], ['a "b"']]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(texts, texts), min_size=1, max_size=8))
def test_what_the_csv_module_writes_is_read_back(rows):
    stream = io.StringIO(newline="")
    csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(rows)
    assert [tuple(row) for _, row in _records(stream.getvalue(), "x.csv")] == rows


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(texts, min_size=2, max_size=3), min_size=1, max_size=8))
def test_every_line_of_a_table_of_tabs_is_one_row(rows):
    safe = [["".join(sign for sign in text if sign not in "\t\n\r") for text in row] for row in rows]
    content = "".join("\t".join(row) + "\n" for row in safe)
    read = list(_lines(content))
    assert [number for number, _ in read] == list(range(1, len(rows) + 1))
    for (_, fields), row in zip(read, safe):
        assert len(fields) == len(row)
        assert [field for field, raw in zip(fields, row) if '"' not in raw] == [raw for raw in row if '"' not in raw]


def test_several_splits_in_one_file_are_refused(table, tmp_path):
    path = table("filepath\ttitle\tsplit\n0.jpg\ta dog\ttrain\n1.jpg\ta cat\ttest\n")
    listed = tmp_path / "list.json"
    listed.write_text(
        '[{"image": "0.jpg", "caption": "a", "split": "train"}, {"image": "1.jpg", "caption": "b", "split": "val"}]'
    )
    refused(
        ("names several splits, train, test", lambda: open_tsv(path)),
        ("names several splits, train, val", lambda: open_karpathy(listed)),
    )
