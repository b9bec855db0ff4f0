"""common/data/shard_paths.py: braces, globs, and names that are not there."""

import os
import re
from pathlib import Path

import pytest
from refusals import refused

from common.data import shard_paths
from common.data.shard_paths import expand_shards


@pytest.mark.parametrize(
    "pattern",
    [
        "{00000..00012}.tar",
        "{3..1}",
        "{a,b}{1..2}",
        "x{a,{b,c}d}y",
        "plain",
        "{08..11}",
    ],
)
def test_braces_expand_as_in_the_braceexpand_package(pattern):
    braceexpand = pytest.importorskip("braceexpand")
    # as sets: the files are sorted afterwards, so the order of nested braces does not matter
    assert set(shard_paths._expand_braces(pattern)) == set(braceexpand.braceexpand(pattern))


@pytest.mark.parametrize("pattern", ["{}", "{alone}", "{1..a}", "{a..d}", "{0..10..3}", "open{1..2", "}{"])
def test_braces_without_a_list_or_a_range_stay(pattern):
    assert shard_paths._expand_braces(pattern) == [pattern]


def test_patterns_find_files_sorted_and_once(tmp_path, monkeypatch):
    names = ["a-0.tar", "a-1.tar", "a-10.tar", "b-0.tar", "notes.txt"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.tar").touch()

    def names_of(pattern, root=tmp_path):
        return [str(path.relative_to(tmp_path)) for path in expand_shards(pattern, root)]

    assert names_of("a-{0..1}.tar") == ["a-0.tar", "a-1.tar"]
    assert names_of("{a,b}-*.tar") == names[:4]
    assert names_of(["a-*.tar", "./a-0.tar", "deep/../a-0.tar"]) == names[:3]
    assert names_of(".") == names[:4]
    assert names_of("**/c.tar") == names_of(tmp_path / "deep") == ["deep/c.tar"]
    assert names_of(str(tmp_path / "a-*.tar"), None) == names[:3]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names_of("~/a-0.tar", "/") == names_of("a-0.tar", "~") == ["a-0.tar"]
    monkeypatch.chdir(tmp_path)
    assert names_of("a-0.tar", None) == ["a-0.tar"]


def test_a_folder_or_file_may_have_brackets_in_its_name(tmp_path):
    folder = tmp_path / "set [v1] {x}"
    folder.mkdir()
    (folder / "a{1,2}.tar").touch()
    for pattern, root in (("*.tar", folder), ("a{1,2}.tar", folder), (str(folder), None)):
        assert [path.name for path in expand_shards(pattern, root)] == ["a{1,2}.tar"]


def test_shards_that_are_not_there_are_named(tmp_path):
    (tmp_path / "00000.tar").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.JPG").touch()
    missing = (
        re.escape("'{00000..00009}.tar'") + rf" with root '{tmp_path}': 9 of 10 .*{tmp_path}/00001.tar.* and 6 more"
    )
    refused(
        (missing, lambda: expand_shards("{00000..00009}.tar", tmp_path)),
        ("holds images: data.source = folder reads them", lambda: expand_shards("*val*.tar", tmp_path)),
        (r"no shards for pattern '\*val\*\.tar'", lambda: expand_shards("*val*.tar", tmp_path)),
        ("the root folder does not exist", lambda: expand_shards("*.tar", tmp_path / "nowhere")),
        error=FileNotFoundError,
    )
    refused(("no shard is named: the list is empty", lambda: expand_shards([], tmp_path)))


GONE = "/annex/gone"
FAULTS = [  # what a name is, what is said of it
    (lambda path: path.symlink_to(GONE), f", a link to {GONE}, cannot be opened: No such file or directory; expected"),
    (lambda path: path.symlink_to(path.name), "cannot be opened: Too many levels of symbolic links; expected a file"),
    (Path.mkdir, " cannot be opened: it is a folder; expected a file"),
    (os.mkfifo, " cannot be opened: it is no regular file; expected a file"),
]


PATTERNS = ["*.tar", "{0..1}.tar", "[01].tar", "**/?.tar", "."]


@pytest.mark.parametrize(
    ("make", "words", "pattern"),
    [*((*FAULTS[0], pattern) for pattern in PATTERNS), *((*fault, "*.tar") for fault in FAULTS[1:])],
)
def test_a_match_that_cannot_be_opened_is_refused_and_not_left_out(tmp_path, make, words, pattern):
    (tmp_path / "0.tar").touch()
    make(tmp_path / "1.tar")
    message = f"^{re.escape(f'data.train = {pattern!r}: {tmp_path}/1.tar')}.*{re.escape(words)}"
    refused((message, lambda: expand_shards(pattern, tmp_path, "data.train")))


def test_a_folder_that_a_pattern_goes_through_is_not_left_out(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.tar").touch()
    (tmp_path / "notes").touch()
    assert len(expand_shards("*/*.tar", tmp_path)) == len(expand_shards("**", tmp_path)) - 1 == 1
    (tmp_path / "b").symlink_to("/mnt/gone")
    words = r"pattern = '\*/\*.tar': .*/b, a link to /mnt/gone, cannot be opened: No"
    refused((words, lambda: expand_shards("*/*.tar", tmp_path)))
    assert len(expand_shards("a/*.tar", tmp_path)) == 1
