"""Contours, heat on pictures and on words, curves with a logarithmic axis: files, numbers, what the eye must see."""

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from plotted import read_plotted

from common.base.drawing import draw_curve
from common.report.figures import Curves, HeatOnPicture, _faded, plot_curves, plot_heat_on_pictures
from oblique_topology.figures import Contours, HeatOnWords, plot_contours, plot_heat_on_words


def grey(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("L")).astype(float)


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are made; only their numbers are written."""
    made = []
    monkeypatch.setattr("common.base.drawing.write_picture", lambda figure, path, **_: made.append(figure) or path)
    return made


def test_contours_write_every_value_at_its_place(tmp_path):
    x, y = [-1.0, 0.0, 1.0], [-1.0, 1.0]
    values = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    panel = Contours("loss $x$", "nats", x, y, values)
    picture, _ = plot_contours([panel, panel], tmp_path / "c.png", "a", "b")
    values_by_place = {(float(row["x"]), float(row["y"])): float(row["value"]) for row in read_plotted(picture)}
    assert values_by_place == {(a, b): values[k, i] for k, b in enumerate(y) for i, a in enumerate(x)}
    dark = grey(picture) < 200  # text and contours, on white, in both panels
    assert dark[:, : dark.shape[1] // 2].mean() > 0.01
    assert dark[:, dark.shape[1] // 2 :].mean() > 0.01


def test_heat_on_pictures_and_words_writes_all_maps(tmp_path):
    picture = np.full((8, 8, 3), 200, dtype=np.uint8)
    maps = {"whole": np.eye(2), "pair 1": np.zeros((2, 2))}
    lines = [HeatOnPicture("costs $5", picture, maps), HeatOnPicture("one map", picture, {"whole": np.eye(2)})]
    drawn, _ = plot_heat_on_pictures(lines, tmp_path / "p.png")
    cold = 255 * _faded(picture, np.zeros((2, 2))).mean()
    assert 110 < cold < 160  # near mid-grey
    hot, faded = ((np.abs(grey(drawn) - shade) < 2).mean() for shade in (200, cold))
    # two pictures and two maps of half heat against these maps' other halves and one map without heat
    assert hot / faded == pytest.approx(3 / 2, rel=0.1)
    records = read_plotted(drawn)
    assert len(records) == 3 * 4
    first = [row["heat"] for row in records if (row["caption"], row["map"]) == ("costs $5", "whole")]
    assert first == [1.0, 0.0, 0.0, 1.0]
    boxed, _ = plot_heat_on_pictures([replace(lines[0], boxes={"": (1, 1, 4, 4), "pair 1": (2, 3, 4, 4)})], drawn)
    pixels = np.asarray(Image.open(boxed).convert("RGB")).astype(int)

    def thirds(color):
        """Which of picture, first and second map have the colour."""
        places = (np.abs(pixels - color) < 40).all(axis=2).sum(axis=0).nonzero()[0] / pixels.shape[1]
        ends = ((0, 1 / 3), (0.36, 0.64), (2 / 3, 1))
        return [bool(((low < places) & (places < high)).any()) for low, high in ends]

    assert thirds((213, 94, 0)) == [False, False, True]  # what a model chose, on its map
    assert thirds((0, 114, 178)) == [True, False, True]  # what is meant, on the picture and beside the choice
    beside, _ = plot_heat_on_pictures(lines, tmp_path / "beside.png", beside=2)
    assert read_plotted(beside) == records
    assert grey(beside).shape[1] > 1.9 * grey(drawn).shape[1]
    drawn, _ = plot_heat_on_words([HeatOnWords(["a", "$red"], {"whole": [0.0, 3.0]})], tmp_path / "w.png")
    assert [(row["word"], float(row["heat"])) for row in read_plotted(drawn)] == [("a", 0.0), ("$red", 3.0)]
    middle = grey(drawn)[10:20]
    assert middle.min() < 20  # the hot word is black
    assert middle.max() > 235


def test_curves_may_have_a_logarithmic_axis(tmp_path, drawn):
    curves = {"a": [(1.0, [1.0, 2.0]), (64.0, [1000.0, 2000.0])], "b": [(8.0, [10.0, 20.0])]}
    plain = Curves("t", "x", "y", curves)
    logarithmic = Curves("t", "x", "y", curves, log_x=True, log_y=True)
    pictures = [plot_curves([panel], tmp_path / f"{panel.log_x}.png", across=1)[0] for panel in (plain, logarithmic)]
    assert [float(row["mean"]) for row in read_plotted(pictures[0])] == [1.5, 1500, 15]
    for linear, row in zip(*map(read_plotted, pictures), strict=True):
        mean, low, high = (float(row[name]) for name in ("mean", "low", "high"))
        assert mean == float(linear["mean"])
        assert float(linear["low"]) < 0 < low  # such a band would reach below every axis
        assert low * high == pytest.approx(mean**2, rel=1e-3)
        assert math.log(high / mean) == pytest.approx((float(linear["high"]) - mean) / mean, rel=1e-3)
    picture, _ = plot_curves(
        [replace(plain, curves={"a": [(1.0, [0.0, 0.0])]}, log_y=True)], tmp_path / "0.png", across=1
    )
    (point,) = read_plotted(picture)
    assert [float(point[name]) for name in ("mean", "low", "high")] == [0, 0, 0]  # no such axis shows it
    axis = drawn[1].axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert list(axis.get_xticks()) == [1, 8, 64]  # of all curves
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "8", "64"]


@pytest.mark.usefixtures("drawn")
def test_a_curve_of_one_point_shows_its_interval():
    (axis,) = Figure().subplots(1, 1, squeeze=False)[0]
    draw_curve(axis, [(3.0, 2.0, 1.5, 2.5)], 0, behind=False)
    (interval,) = axis.collections
    assert interval.get_segments()[0].tolist() == [[3.0, 1.5], [3.0, 2.5]]


def test_a_band_of_shares_stays_in_their_range_and_another_one_need_not(tmp_path):
    points = [(1.0, [0.1, 0.1, 9.0]), (2.0, [99.9, 99.9, 91.0])]
    below = [(1.0, [-1.0, 0.1, 9.0])]  # a difference of shares is no share
    for unit, curve, inside in (("percent", points, True), ("nats", points, False), ("percent", below, False)):
        picture, _ = plot_curves([Curves("t", "x", unit, {"a": curve})], tmp_path / "band.png", across=1)
        ends = [float(row[end]) for row in read_plotted(picture) for end in ("low", "high")]
        assert (min(ends) >= 0 and max(ends) <= 100) is inside
    # counts have a least value, cosines a greatest
    for unit, end, values in (("directions", "low", [1.0, 1.1, 9.0]), ("cosine", "high", [1.0, 0.9, 0.1])):
        picture, _ = plot_curves([Curves("t", "x", unit, {"a": [(1.0, values)]})], tmp_path / "band.png", across=1)
        assert [float(row[end]) for row in read_plotted(picture)] == [1.0]


def test_curves_that_lie_upon_each_other_are_all_seen_and_long_names_are_wrapped(tmp_path, drawn):
    names, points = [*"abcd", "word " * 12, "under"], [(float(x), [1.0]) for x in range(40)]
    plot_curves([Curves("t", "x", "y", dict.fromkeys(names, points), behind=("under",))], tmp_path / "c.png", across=1)
    *dotted, whole, under = drawn[0].axes[0].get_lines()
    assert len({line.get_markevery() for line in dotted}) == 4
    assert dotted[-1].get_zorder() > whole.get_zorder() > under.get_zorder()
    assert under.get_linewidth() > 2 * whole.get_linewidth()
    assert under.get_alpha() < 0.5
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "\n" in texts[4]
    assert [texts[0], texts[-1]] == ["a", "under"]


def test_titles_over_pictures_with_long_captions_are_whole(tmp_path, drawn):
    picture = np.full((8, 8, 3), 200, dtype=np.uint8)
    maps = {f"pair {number}": np.eye(2) for number in range(5)}
    lines = [HeatOnPicture("word " * 16, picture, maps) for _ in range(4)]
    plot_heat_on_pictures(lines, tmp_path / "p.png")
    drawn[0].draw_without_rendering()
    assert drawn[0].axes[1].title.get_window_extent().y1 <= drawn[0].bbox.y1


def test_a_level_is_a_line_at_its_height_with_a_name_below(tmp_path, drawn):
    panels = [Curves("t", "x", "y", {"a": [(0, [1.0]), (1, [3.0])]}, level=level) for level in (("even", 2.0), None)]
    picture, _ = plot_curves(panels, tmp_path / "level.png", across=2)
    assert [len(axis.lines) for axis in drawn[0].axes] == [2, 1]
    assert list(drawn[0].axes[0].lines[1].get_ydata()) == [2.0, 2.0]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["a", "even"]
    assert {row["curve"] for row in read_plotted(picture)} == {"a"}


def test_a_long_curve_keeps_its_ends_and_equal_distances_between(tmp_path, drawn):
    points = [(float(step), [step**2 / 2]) for step in range(1, 1_201)]
    picture, _ = plot_curves([Curves("t", "x", "y", {"a": points})], tmp_path / "c.png", across=1)
    steps = [row["x"] for row in read_plotted(picture)]
    assert steps == [*range(1, 1_200, 6), 1_200]
    assert [row["mean"] for row in read_plotted(picture)] == pytest.approx([step**2 / 2 for step in steps], rel=1e-4)


def test_panels_of_one_scale_have_the_same_axes_with_their_numbers(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("common.report.figures.write_figure", lambda figure, *arguments, **options: made.append(figure))
    panels = [Curves(title, "x", "y", {title: [(0, [0.0]), (1, [top])]}) for title, top in (("a", 1.0), ("b", 9.0))]
    for one_scale in (False, True):
        plot_curves(panels, tmp_path / "c.png", across=2, one_scale=one_scale)
    limits = [[axis.get_ylim() for axis in figure.axes] for figure in made]
    assert limits[0][0] != limits[0][1] == limits[1][0] == limits[1][1]
    assert all(axis.yaxis.get_tick_params()["labelleft"] for axis in made[1].axes)


def test_the_legend_does_not_repeat_titles(tmp_path, drawn):
    points = [(1.0, [1.0]), (2.0, [2.0])]
    titled = [Curves(title, "x", "y", {title: points}) for title in ("loss", "error")]
    picture, _ = plot_curves(titled, tmp_path / "titled.png", across=2)
    assert drawn[0].legends == []
    assert [row["curve"] for row in read_plotted(picture)] == ["loss", "loss", "error", "error"]
    assert len({axis.get_lines()[0].get_color() for axis in drawn[0].axes}) == 1
    plot_curves([*titled, Curves("both", "x", "y", {"a": points, "b": points})], tmp_path / "both.png", across=3)
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["a", "b"]
