"""Hits of a table: packed and read back, and what a picture gives to a number. All numbers are made up."""

import dataclasses
import json

import numpy as np
import pytest

from common.base.files import write_atomically
from common.report.formats import write_table
from common.report.hits import Hits, packed, read_hits
from common.report.table import Column, Row, Table, from_json, measured_over_seeds, read_table, to_json


def runs_of(generator, seeds, queries, levels=(0.0, 1.0)):
    return [[list(generator.choice(levels, size=count)) for count in queries] for _ in range(seeds)]


def table_with(hits, seeds=(3, 1), column="x"):
    values = hits.by_picture().mean(axis=1)
    cell = measured_over_seeds(values, seeds, scale="demo", data="d (00)", protocol="p", hits=hits)
    return Table(
        "no_paper", "Made up", "0", "t", "", (Column(column, "X"),),
        (Row("a, ViT-B/16", {}, {column: cell}, "measured"),), "demo", "d", seeds, "", "", "2000-01-01", "",
    )  # fmt: skip


@pytest.mark.parametrize("levels", [(0.0, 1.0), (1.0,), (0.0, 1 / 3, 2 / 3, 1.0), tuple(np.arange(300) / 299)])
def test_hits_come_back_from_their_file_to_the_last_bit(levels, tmp_path):
    queries = [5, 0, 1, 2, 5, 300]
    runs = runs_of(np.random.default_rng(0), 3, queries, levels)
    (tmp_path / "h.npz").write_bytes(packed({("a/b", "x"): Hits.of(runs)}))
    ((key, back),) = read_hits(tmp_path / "h.npz").items()
    assert key == "a/b/x"
    assert back.queries.tolist() == queries
    flat = [[100 * result for results in run for result in results] for run in runs]
    assert np.array_equal(back.levels[back.codes], flat)


def test_a_column_with_a_slash_as_in_comparisons_keeps_its_hits(tmp_path):
    hits = Hits.of(runs_of(np.random.default_rng(4), 2, [1, 2]))
    write_table(table_with(hits, column="test/i2t_recall_at_1"), tmp_path)
    (cell,) = read_table(tmp_path / "t.json").measured("test/i2t_recall_at_1")
    assert np.array_equal(cell.hits.by_picture(), hits.by_picture())


def test_the_same_hits_make_the_same_file_of_some_kilobytes():
    runs = runs_of(np.random.default_rng(0), 5, [5] * 1000)
    file = packed({("a", "x"): Hits.of(runs)})
    assert len(file) < 5 * 800  # 5,000 bits are 625 bytes
    assert packed({("a", "x"): Hits.of(runs)}) == file


def test_what_pictures_give_adds_up_to_the_mean_over_queries():
    runs = runs_of(np.random.default_rng(1), 3, [5, 1, 0, 7, 2])
    z = Hits.of(runs).by_picture()
    assert z.mean(axis=1) == pytest.approx([100 * np.concatenate(run).mean() for run in runs])
    equal = runs_of(np.random.default_rng(2), 2, [5] * 9)
    assert np.allclose(Hits.of(equal).by_picture(), 100 * np.mean(equal, axis=2))  # the mean of its captions


def test_the_spread_of_z_is_that_of_a_jackknife_over_pictures_with_unlike_numbers_of_queries():
    generator = np.random.default_rng(3)
    queries = generator.integers(1, 8, size=400)
    (run,) = runs_of(generator, 1, queries)
    z = Hits.of([run]).by_picture()[0]
    sums = np.array([sum(results) for results in run])
    without = 100 * (sums.sum() - sums) / (queries.sum() - queries)
    assert z.var(ddof=1) / len(z) == pytest.approx((len(sums) - 1) * without.var(), rel=0.02)


def test_seeds_that_read_other_pictures_have_no_hits_in_common():
    assert Hits.of([[[1.0], [0.0]], [[1.0]]]) is None
    assert Hits.of([[], []]) is None
    assert Hits.of([]) is None


def test_a_table_names_its_file_of_hits_and_reads_them_back(tmp_path):
    hits = Hits.of(runs_of(np.random.default_rng(4), 2, [5] * 8))
    table = table_with(hits)
    assert [path.name for path in write_table(table, tmp_path)] == ["t_hits.npz", "t.json", "t.md"]
    assert json.loads((tmp_path / "t.json").read_text())["hits_file"] == "t_hits.npz"
    assert np.array_equal(read_table(tmp_path / "t.json").rows[0].ours["x"].hits.by_picture(), hits.by_picture())
    bare = dataclasses.replace(table.rows[0].ours["x"], hits=None)
    without = dataclasses.replace(table, rows=[dataclasses.replace(table.rows[0], ours={"x": bare})])
    write_table(without, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.md"]
    assert json.loads(to_json(without))["hits_file"] == ""
    assert from_json(to_json(table)) == without


def test_a_missing_file_of_hits_and_a_torn_table_are_named(tmp_path):
    write_table(table_with(Hits.of(runs_of(np.random.default_rng(5), 2, [1] * 4))), tmp_path)
    for spoil in (lambda path: path.write_bytes(b"no archive"), lambda path: path.unlink()):
        spoil(tmp_path / "t_hits.npz")
        with pytest.raises(ValueError, match=r"t\.json is broken: its hits in t_hits\.npz cannot be read"):
            read_table(tmp_path / "t.json")
    other = table_with(Hits.of(runs_of(np.random.default_rng(8), 2, [1] * 4)))  # as many seeds
    write_table(other, tmp_path / "other")
    write_table(table_with(Hits.of(runs_of(np.random.default_rng(5), 2, [1] * 4))), tmp_path)
    (tmp_path / "other/t_hits.npz").replace(tmp_path / "t_hits.npz")
    with pytest.raises(ValueError, match=r"column x: t_hits\.npz has hits of other seeds or of another run"):
        read_table(tmp_path / "t.json")
    (tmp_path / "t.json").write_text('{"format": "report')
    with pytest.raises(ValueError, match=r"t\.json is broken"):
        read_table(tmp_path / "t.json")


@pytest.mark.parametrize("files", [1, 2])
def test_a_kill_between_two_files_leaves_a_table_that_is_whole_or_named_as_broken(files, tmp_path, monkeypatch):
    two, three = (table_with(Hits.of(runs_of(np.random.default_rng(6), n, [1] * 9)), range(n)) for n in (2, 3))
    write_table(two, tmp_path)
    written = iter(range(files))

    def killed(path, content):
        next(written)  # StopIteration: killed
        return write_atomically(path, content)

    monkeypatch.setattr("common.report.formats.write_atomically", killed)
    with pytest.raises((StopIteration, RuntimeError)):
        write_table(three, tmp_path)
    if files == 1:
        says = r"t\.json is broken: row a, ViT-B/16, column x: t_hits\.npz has hits of other seeds or of another run"
        with pytest.raises(ValueError, match=says):
            read_table(tmp_path / "t.json")
    else:
        assert len(read_table(tmp_path / "t.json").measured("x")[0].values) == 3
