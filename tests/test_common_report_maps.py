"""Contours, heat on pictures and on words, curves with a logarithmic axis: files, numbers, what the eye must see."""

import csv

import numpy as np
import pytest
from PIL import Image

from common.report.curves import Curves, plot_curves
from common.report.maps import (
    Contours,
    HeatOnPicture,
    HeatOnWords,
    _faded,
    plot_contours,
    plot_heat_on_pictures,
    plot_heat_on_words,
)


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def grey(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("L")).astype(float)


def test_contours_write_every_value_at_its_place(tmp_path):
    x, y = [-1.0, 0.0, 1.0], [-1.0, 1.0]
    values = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    panel = Contours("loss $x$", "nats", x, y, values)
    picture, numbers = plot_contours([panel, panel], tmp_path / "c.png", "a", "b")
    found = {(float(row["x"]), float(row["y"])): float(row["value"]) for row in rows(numbers)}
    assert found == {(a, b): values[k, i] for k, b in enumerate(y) for i, a in enumerate(x)}
    assert grey(picture).std() > 10


def test_a_picture_is_clear_where_it_is_hot_and_grey_elsewhere():
    picture = np.zeros((4, 4, 3), dtype=np.uint8)
    picture[:, 2:] = 255
    faded = _faded(picture, np.array([[2.0, 0.0], [0.0, 2.0]]))
    assert faded[:2, :2] == pytest.approx(0)  # hot and black
    assert faded[2:, 2:] == pytest.approx(1)  # hot and white
    assert 0.3 < faded[2:, :2].min() < 0.5 < faded[:2, 2:].max() < 0.7  # cold: both near mid-grey, still told apart
    cold = _faded(picture, np.zeros((2, 2)))  # nothing to divide by
    assert np.abs(cold - 0.5).max() < 0.2


def test_heat_on_pictures_and_words_writes_all_maps(tmp_path):
    picture = np.full((8, 8, 3), 200, dtype=np.uint8)
    maps = {"whole": np.eye(2), "pair 1": np.zeros((2, 2))}
    lines = [HeatOnPicture("costs $5", picture, maps), HeatOnPicture("one map", picture, {"whole": np.eye(2)})]
    drawn, numbers = plot_heat_on_pictures(lines, tmp_path / "p.png")
    assert grey(drawn).std() > 5
    found = rows(numbers)
    assert len(found) == 3 * 4
    first = [row["heat"] for row in found if (row["caption"], row["map"]) == ("costs $5", "whole")]
    assert first == ["1.0", "0.0", "0.0", "1.0"]
    drawn, numbers = plot_heat_on_words([HeatOnWords(["a", "$red"], {"whole": [0.0, 3.0]})], tmp_path / "w.png")
    assert [(row["word"], float(row["heat"])) for row in rows(numbers)] == [("a", 0.0), ("$red", 3.0)]
    middle = grey(drawn)[10:20]
    assert middle.min() < 20  # the hot word is black
    assert middle.max() > 235


def test_curves_may_have_a_logarithmic_axis(tmp_path):
    points = [(1.0, [1.0, 2.0]), (100.0, [1000.0, 2000.0])]
    plain = Curves("t", "x", "y", {"a": points})
    logarithmic = Curves("t", "x", "y", {"a": points}, log_x=True, log_y=True)
    first, numbers = plot_curves([plain], tmp_path / "one.png", across=1)
    second, same_numbers = plot_curves([logarithmic], tmp_path / "two.png", across=1)
    assert rows(numbers) == rows(same_numbers)
    assert not np.array_equal(grey(first), grey(second))
