"""Distances from the origin and the mean: cases made by hand, loops, files; histograms as plots and as numbers."""

import json
import math
from functools import partial

import pytest
import torch
from euclip_encoders import DIM, GEOMETRIES, encoder_of
from euclip_formulas import distance
from matplotlib.image import imread
from plotted import read_plotted
from refusals import refused

from common.data.scenes import SceneDataset
from common.report.figures import Distributions, plot_distributions
from euclip.distributions import (
    DISTANCE,
    Distances,
    DrawnPairs,
    Sample,
    by_level,
    distances_from,
    embed_sample,
    mean_norm,
    overlap,
    panels_of,
    reference_points,
    summarise,
    write_distances,
)
from euclip.geometry import Euclidean


def sample_of(name, num_images=6, chain=3):
    draws = torch.Generator().manual_seed(0)
    images = 2 * torch.randn(num_images, DIM, generator=draws)
    texts = torch.randn(num_images * chain, DIM, generator=draws)
    if name in ("sphere", "elliptic"):
        images, texts = images / images.norm(dim=1, keepdim=True), texts / texts.norm(dim=1, keepdim=True)
    owners = torch.arange(num_images).repeat_interleave(chain)
    chains = [range(chain * i, chain * (i + 1)) for i in range(num_images)]
    return Sample(f"{name}, by hand", images, texts, owners, chains)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_distances_are_those_of_the_formulas(name):
    geometry, sample, is_sphere = GEOMETRIES[name](), sample_of(name), name in ("sphere", "elliptic")
    points = reference_points(geometry, sample)
    mean = (sample.images.mean(dim=0) + sample.texts.mean(dim=0)) / 2  # both modalities weigh alike: 6 and 18
    assert mean_norm(sample) == pytest.approx(mean.norm().item(), rel=1e-5)  # before any normalisation
    # every embedding of a sphere is as far from its centre
    of_points = {"mean": mean / mean.norm()} if is_sphere else {"origin": torch.zeros(DIM), "mean": mean}
    assert list(points) == list(of_points)
    curvature = geometry.curvature().item() if hasattr(geometry, "curvature") else 1.0
    for reference, point in of_points.items():
        actual = distances_from(geometry, sample, points[reference])
        for distances, embeddings in ((actual.images, sample.images), (actual.texts, sample.texts)):
            expected = [distance(name, row, point.tolist(), curvature) for row in embeddings.double().tolist()]
            if name == "sphere":
                expected = [(1 - math.cos(value)) / 2 for value in expected]
            assert distances.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_summary_made_by_hand():
    sample = Sample("", torch.zeros(2, 1), torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]), [[0, 1], [2, 3]])
    distances = Distances(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.25, 4.0, 5.0]))
    summary = summarise(distances, sample)
    assert summary == pytest.approx(
        {
            "image_mean": 3,
            "text_mean": 10.25 / 4,
            "image_std": 1,
            "text_std": torch.tensor([1.0, 0.25, 4.0, 5.0]).std(correction=0).item(),
            "overlap": 1 / 4,  # of the texts one lies in the bin of an image
            "image_farther": (1 + 1 + 0.5) / 4,
            "within_half": 1 / 8,
            "mean_norm": 0,
            "level0_mean": 2.5,
            "level1_mean": 2.625,
            "generic_nearer": 0.5,
        },
        abs=1e-6,
    )
    without = summarise(distances, Sample("", sample.images, sample.texts, sample.text_to_image, None))
    assert set(summary) - set(without) == {"level0_mean", "level1_mean", "generic_nearer"}


def test_overlap_is_one_of_a_set_with_itself_nothing_of_sets_apart_and_half_in_between():
    values = torch.linspace(0, 1, 1000)
    assert overlap(values, values) == pytest.approx(1)
    assert overlap(values, values + 2) == 0
    assert overlap(values, values + 0.5, bins=30) == pytest.approx(0.5, abs=0.02)
    assert overlap(torch.ones(3), torch.ones(2)) == pytest.approx(1)  # a range without width


def test_levels_split_the_texts_and_chains_may_differ_in_length():
    sample = Sample("", torch.zeros(2, 1), torch.zeros(5, 1), torch.tensor([0, 0, 0, 1, 1]), [[0, 1, 2], [3, 4]])
    split = by_level(torch.arange(5.0), sample)
    assert [level.tolist() for level in split] == [[0, 3], [1, 4], [2]]


@pytest.mark.parametrize("name", ["sphere", "hyperbolic"])
def test_there_is_a_panel_per_point_and_a_curve_per_level(name):
    geometry, sample = GEOMETRIES[name](), sample_of(name)
    points = reference_points(geometry, sample)
    panels = panels_of("title", geometry, sample, points)
    assert [panel.x_label for panel in panels] == [f"{DISTANCE[name]} from the {point}" for point in points]
    assert all(list(panel.values) == ["image", "text"] for panel in panels)
    (panel, *_) = panels_of("title", geometry, sample, points, levels=True)
    assert list(panel.values) == ["image", "text, level 0 (specific)", "text, level 1", "text, level 2 (generic)"]
    flat = Sample("", sample.images, sample.texts, sample.text_to_image, None)
    assert panels_of("title", geometry, flat, points, levels=True) == []


def test_a_sample_is_drawn_over_the_whole_set_and_has_all_captions():
    encoder, scenes = encoder_of(Euclidean(True)), SceneDataset("train", size=30, image_size=16)
    drawn = DrawnPairs(scenes, 5)
    assert len(drawn) == len(set(drawn.indices)) == 5
    assert drawn.indices == sorted(drawn.indices) != list(range(5))
    sample = embed_sample(encoder, scenes, 5)
    assert sample.name == drawn.name == "scenes/train, 5 of 30 drawn at random"
    # batches of another size may round otherwise
    torch.testing.assert_close(sample.images, encoder.images(scenes)[0][drawn.indices])
    texts = encoder.texts([caption for i in drawn.indices for caption in scenes.captions(i)])
    torch.testing.assert_close(sample.texts, texts)
    assert sample.text_to_image.tolist() == [i for i in range(5) for _ in range(5)]
    assert [list(chain) for chain in sample.chains] == [list(range(5 * i, 5 * i + 5)) for i in range(5)]


def test_a_draw_of_no_fewer_than_there_are_is_all():
    scenes = SceneDataset("train", size=3, image_size=16)
    everything = DrawnPairs(scenes, 5)
    assert (everything.indices, everything.name) == ([0, 1, 2], "scenes/train, all 3")
    assert DrawnPairs(scenes, 2).fingerprint != everything.fingerprint


def test_the_files_hold_the_summary_and_the_histograms(tmp_path):
    geometry, sample = GEOMETRIES["hyperbolic"](), sample_of("hyperbolic")
    content = write_distances(geometry, sample, tmp_path / "new", step=7)
    assert json.loads((tmp_path / "new" / "distances.json").read_text()) == content
    assert (content["step"], content["geometry"], content["data"]) == (7, "hyperbolic", sample.name)
    for reference, point in reference_points(geometry, sample).items():
        assert content[f"from_{reference}"] == summarise(distances_from(geometry, sample, point), sample)
    assert imread(tmp_path / "new" / "distances.png").shape[0] > 100


def test_plotted_histograms_count_every_value_and_sum_to_100_percent(tmp_path):
    values = {"one": [0, 0.1, 0.9, 1.0], "other": [0.5, 2.0]}
    png, _ = plot_distributions([Distributions("5$ $x_$", "x", values)], tmp_path / "d.png", across=1, bins=4)
    assert imread(png).shape[1] > 400
    rows = read_plotted(png)
    assert {row["panel"] for row in rows} == {"5$ $x_$"}  # a dollar is no formula
    assert [float(row["percent"]) for row in rows if row["curve"] == "one"] == [50, 25, 25, 0]
    assert [float(row["percent"]) for row in rows if row["curve"] == "other"] == [0, 50, 0, 50]
    assert [(float(row["bin_low"]), float(row["bin_high"])) for row in rows[:4]] == [
        (0, 0.5), (0.5, 1), (1, 1.5), (1.5, 2)
    ]  # fmt: skip


def test_every_whole_number_has_its_bin(tmp_path):
    panel = Distributions("panel", "x", {"one": [1, 1, 4], "other": [2]}, whole_numbers=True)
    png, _ = plot_distributions([panel], tmp_path / "d.png", across=1)
    rows = [row for row in read_plotted(png) if row["curve"] == "one"]
    assert [float(row["bin_low"]) for row in rows] == [0.5, 1.5, 2.5, 3.5]
    assert [float(row["percent"]) for row in rows] == pytest.approx([200 / 3, 0, 0, 100 / 3], abs=1e-3)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_a_histogram_of_nothing_or_of_no_number_is_refused(tmp_path, values):
    panel, drawn = (
        Distributions("p", "x", {"a": values}),
        partial(plot_distributions, path=tmp_path / "d.png", across=1),
    )
    refused(
        ("panel 'p', a: finite values are needed", lambda: drawn([panel])),
        ("at least one panel", lambda: drawn([])),
    )
    assert not list(tmp_path.iterdir())
