"""The map of an embedding space: its numbers against laws, formulas and loops, the page as a file and in a browser."""

import functools
import html
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import networkx
import numpy as np
import pytest
import torch
from euclip_encoders import DIM, GEOMETRIES, encoder_of
from euclip_formulas import distance, half_aperture
from PIL import Image
from runs import called

from common.base.config import ConfigError, override
from common.geometry import unit
from common.late_interaction import LateInteraction
from common.oblique import Oblique
from common.report import map as maps
from common.report import map_picture
from common.report.map import (
    Space,
    TestSet,
    Walks,
    cluster_graph,
    describe,
    half_apertures,
    layouts,
    neighbors_kept,
    page_content,
    write_map,
)
from common.report.map_picture import draw_map
from common.run.checkpoint import Checkpoint, CheckpointError
from euclip.config import Config
from euclip.geometry import Euclidean
from euclip.traversal import entailed, nearest_on_walk, root_of
from euclip.traversal_data import captions_pool
from geomm.hierarchy import build_graph
from geomm.pool import GeodesicPool
from oblique_topology.geometry import L2, ObliqueGeodesic
from scripts import map as script

NUM_IMAGES, NUM_TEXTS, NUM_POINTS = 12, 40, 6
MIN_RADII = (0.1, 0.7)
PROBE = Path(__file__).with_name("map_probe.js")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ALL = {
    **GEOMETRIES,
    "oblique": lambda: Oblique(2),
    "oblique_geodesic": lambda: ObliqueGeodesic(2),
    "l2": L2,
}
HOSTILE = 'a "red" </script><script>document.title = 1</script> <b>circle</b> & {{ 7 * 7 }}'


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made_up_test_set(**changes):
    texts = [f"caption {k}, {'red' if k % 3 else 'blue'} circle" for k in range(NUM_TEXTS)]
    chains = [[row, NUM_IMAGES + row, NUM_TEXTS - 1 - row % 2] for row in range(NUM_IMAGES)]
    holds = torch.rand(NUM_IMAGES, NUM_TEXTS, generator=torch.Generator().manual_seed(9)) < 0.2
    for row, chain in zip(holds, chains):
        row[chain] = True
    content = {"levels": ("all", "some", "little"), "classes": ["square", "circle"] * (NUM_IMAGES // 2)}
    return TestSet("made-up", **{"texts": texts, "chains": chains, "holds": holds, **content, **changes})


def made_up_space(name, **changes):
    geometry = ALL[name]()
    images, texts = (
        embed(draws(num, DIM, seed=seed) * 1.5)
        for num, seed, embed in ((NUM_IMAGES, 1, geometry.embed_image), (NUM_TEXTS, 2, geometry.embed_text))
    )
    root = root_of(geometry, images, texts).detach()
    filters = [None, *(MIN_RADII if geometry.has_cones else ())]
    walks = [
        Walks(radius, [nearest_on_walk(geometry, image, texts, root, NUM_POINTS, radius) for image in images.detach()])
        for radius in filters
    ]
    return Space(name, geometry, images.detach(), texts.detach(), root, "a root", walks, **changes)


@functools.cache
def described(name):
    """A made-up space, and what the page shows of it."""
    space = made_up_space(name)
    return space, describe(space, made_up_test_set())


def by_formula(name, x, y, c):
    if name.startswith("oblique"):
        return math.sqrt(sum(distance("sphere", a, b) ** 2 for a, b in zip(x.tolist(), y.tolist())))
    return distance("euclidean" if name == "l2" else name, x.tolist(), y.tolist(), c)


@pytest.mark.parametrize("name", ALL)
def test_radii_are_distances_by_formula_and_the_way_to_the_root_is_a_spoke(name):
    space, content = described(name)
    c = content["curvature"] or 1.0
    for rows, radii in zip((space.images, space.texts), content["distances"]):
        assert radii == pytest.approx([by_formula(name, row, space.root, c) for row in rows], abs=1e-4)
        tangents = maps.tangents(space.geometry, rows, space.root)
        assert tangents.norm(dim=1).tolist() == pytest.approx(radii, abs=1e-4)
    for row, image in enumerate(space.images):
        way = space.geometry.interpolate(image, space.root, NUM_POINTS)
        assert content["radii"][row] == pytest.approx(
            [by_formula(name, point, space.root, c) for point in way], abs=1e-4
        )
        assert content["radii"][row] == sorted(content["radii"][row], reverse=True)
        # one direction from the root, as a spoke has
        directions = unit(maps.tangents(space.geometry, way[:-1], space.root))
        assert (directions @ directions[0]).tolist() == pytest.approx([1] * (NUM_POINTS - 1), abs=1e-6)
    if name.startswith("oblique"):  # a geodesic at constant speed
        gaps = np.diff(content["radii"][0])
        assert gaps == pytest.approx([gaps.mean()] * (NUM_POINTS - 1), abs=1e-3)


def test_kept_neighbours_are_counted_as_by_loops():
    space, layout = draws(25, 5).numpy(), draws(25, 2, seed=1).numpy()

    def nearest(points, k):
        return [
            set(sorted(set(range(25)) - {i}, key=lambda j: np.linalg.norm(points[i] - points[j]))[:k])
            for i in range(25)
        ]

    for k in (3, 10):
        shares = [len(a & b) / k for a, b in zip(nearest(space, k), nearest(layout, k))]
        assert neighbors_kept(space, layout, k) == pytest.approx(np.mean(shares))
    assert neighbors_kept(layout, 3 * layout + 1) == 1
    assert neighbors_kept(layout[:4], layout[:4]) == 1  # fewer than ten others


def test_a_layout_keeps_a_circle_and_states_the_share_that_it_keeps():
    angles = torch.linspace(0, 2 * math.pi, 61, dtype=torch.float64)[:-1]
    circle = torch.stack([angles.cos(), angles.sin(), 0 * angles], dim=1)
    places = layouts(circle[::2], 2 * circle[1::2])
    assert places["polar"]["by"] == "PCA"
    assert places["polar"]["kept"] > 0.95
    turned = np.unwrap(np.array(places["polar"]["angle"])[:30])  # of the images, in order
    assert np.abs(np.diff(turned)) == pytest.approx(2 * math.pi / 30, abs=0.02)
    for name in ("plane", "gap"):
        assert np.linalg.norm(np.array(places[name]["xy"]), axis=1).max() == pytest.approx(1, abs=1e-3)
    assert places["gap"]["kept"] == 1  # two dimensions are all there are


@pytest.mark.parametrize("name", ["sphere", "euclidean_squared"])
def test_histograms_count_matched_and_unmatched_pairs_and_both_modalities(name):
    (space, content), test_set = described(name), made_up_test_set()
    similarity = space.geometry.similarity(space.images, space.texts)
    pairs = list(itertools.product(range(NUM_IMAGES), range(NUM_TEXTS)))
    matched = [similarity[i, j].item() for i, j in pairs if j in test_set.chains[i]]
    unmatched = [similarity[i, j].item() for i, j in pairs if not test_set.holds[i, j]]
    assert len(matched) == 3 * NUM_IMAGES
    for part, groups in (("similarities", (matched, unmatched)), ("norms", content["distances"])):
        plotted = content[part]
        assert [sum(counts) for counts in plotted["counts"]] == [len(values) for values in groups]
        assert (plotted["low"], plotted["high"]) == pytest.approx(
            (min(map(min, groups)), max(map(max, groups))), abs=1e-4
        )
        middle = (plotted["low"] + plotted["high"]) / 2
        below = [sum(value < middle for value in values) for values in groups]
        assert [sum(counts[: len(counts) // 2]) for counts in plotted["counts"]] == pytest.approx(below, abs=1)
    above = [(one > other) + (one == other) / 2 for one, other in itertools.product(matched, unmatched)]
    assert content["facts"]["matched above unmatched (AUC)"] == f"{np.mean(above):.3f}"


@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name not in ("sphere", "elliptic")])
def test_cones_have_the_printed_aperture_and_hold_the_images_of_the_filter(name):
    space, content = described(name)
    c = content["curvature"] or 1.0
    assert [cone["min_radius"] for cone in content["cones"]] == [*MIN_RADII]
    for cone in content["cones"]:
        halves = [half_aperture(name, text.tolist(), cone["min_radius"], c) for text in space.texts]
        assert cone["half"] == pytest.approx(halves, abs=1e-4)
        holds = entailed(space.geometry, space.images, space.texts, cone["min_radius"])
        assert cone["inside"] == [column.nonzero().flatten().tolist() for column in holds.T]
    assert any(content["cones"][-1]["inside"])
    assert described("sphere")[1]["cones"] == []


@pytest.mark.parametrize("name", ["sphere", "oblique_geodesic", "euclidean", "hyperbolic_squared"])
def test_a_walk_shows_the_nearest_caption_of_the_filter_also_where_the_root_is_nearer(name):
    space, content = described(name)
    shown = content["walks"]
    assert [walks["min_radius"] for walks in shown] == [walks.min_radius for walks in space.walks]
    for walks, expected in zip(shown, space.walks):
        for row, image in enumerate(space.images):
            for k, point in enumerate(space.geometry.interpolate(image, space.root, NUM_POINTS)):
                allowed = range(NUM_TEXTS)
                if walks["min_radius"] is not None:
                    in_cone = entailed(space.geometry, point[None], space.texts, walks["min_radius"])[0]
                    allowed = in_cone.nonzero().flatten().tolist()
                scores = space.geometry.similarity(point[None], space.texts)[0].tolist()
                assert walks["captions"][row][k] == max(allowed, key=scores.__getitem__, default=None)
                place = expected.places[row][k]
                assert walks["is_root"][row][k] == (place == NUM_TEXTS)
                assert place in (NUM_TEXTS, walks["captions"][row][k])


@pytest.mark.parametrize("branching", [(24,), (24, 2)])
def test_the_graph_is_that_of_the_top_layer_and_a_path_as_long_as_its_edges(branching):
    keys = unit(draws(300, 6).float())
    pool = GeodesicPool(300, 6, branching=branching, num_neighbors=2)
    pool.queue.enqueue(keys)
    assert pool.rebuild(0)
    content = script.graph_of(SimpleNamespace(model=torch.nn.ModuleList([pool])))
    assert len(content["xy"]) == 24
    bottom = build_graph(keys, branching, 2, 5, None).cluster_centers
    centers = bottom if len(branching) == 1 else unit(bottom[::2] + bottom[1::2])
    angles = (centers @ centers.T).clamp(-1, 1).arccos().fill_diagonal_(9)
    nearest = angles.argsort(dim=1)[:, :2].tolist()
    edges = {tuple(sorted((node, other))) for node, others in enumerate(nearest) for other in others}
    assert {tuple(edge) for edge in content["edges"]} == edges
    graph = networkx.Graph()
    graph.add_weighted_edges_from((a, b, angles[a, b].item()) for a, b in edges)
    shortest = dict(networkx.all_pairs_dijkstra_path_length(graph))
    assert sum(map(len, shortest.values())) > 124
    for first, last in itertools.permutations(range(24), 2):
        length = pytest.approx(shortest[first][last], abs=2e-3) if last in shortest[first] else None
        assert content["length"][first][last] == length
        if length is not None:
            chain = [last]
            while chain[0] != first:
                chain.insert(0, content["before"][first][chain[0]])
            assert networkx.path_weight(graph, chain, "weight") == length
    first, last = content["start"]
    assert content["before"][first][last] not in (-1, first)  # the first path shown has several edges


def test_centres_that_coincide_are_joined_by_an_edge_of_length_zero():
    centers = unit(draws(3, 8))
    centers[1] = centers[0]
    edges = torch.tensor([[0, 0, torch.inf], [0, 0, 1], [torch.inf, 1, 0]])
    content = cluster_graph(centers, edges.clamp(max=1), edges)
    assert content["edges"] == [[0, 1], [1, 2]]
    assert content["before"] == [[-1, 0, 1], [1, -1, 1], [1, 2, -1]]
    assert content["start"] == [0, 2]


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-5, 2e-4])
def test_a_text_near_the_root_has_at_most_a_half_space_for_its_cone(size):
    texts = torch.full((1, 4), size / 2)
    assert half_apertures(Euclidean(), texts, 0.1).item() == pytest.approx(math.pi / 2)


def test_a_graph_without_edges_has_no_path():
    apart = torch.full((4, 4), torch.inf)
    content = cluster_graph(unit(draws(4, 3)), apart, apart)
    assert content["edges"] == []
    assert content["length"][0][1] is None


# ---------------------------------------------------------------- the page


def page_data(page):
    return json.loads(re.search(r"const DATA = (.*);\n", page)[1])


def write_made_up_map(path, names=("hyperbolic", "sphere"), **changes):
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    pictures = [script.data_url(pixels + 20 * row) for row in range(NUM_IMAGES)]
    test_set = made_up_test_set(pictures=pictures, **changes)
    graph = cluster_graph(unit(draws(6, 3)), torch.rand(6, 6), torch.rand(6, 6).fill_diagonal_(0))
    spaces = [made_up_space(name, graph=graph if name == "sphere" else None) for name in names]
    return write_map(page_content(spaces, test_set), test_set.name, path)


def test_the_page_is_one_file_without_network_and_shows_every_text_as_text(tmp_path):
    texts = [HOSTILE, *made_up_test_set().texts[1:]]
    path = write_made_up_map(tmp_path / "map.html", texts=texts)
    page = path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["map.html"]
    assert path.stat().st_size < 3_000_000
    assert not re.search(r"https?:|//www|url\(|@import|<link|src=\"(?!data:)", page)
    # the only script ends where the page's own ends, and the text arrives whole
    assert page.count("<script") == page.count("</script") == 1
    data = page_data(page)
    assert data["texts"] == texts
    assert [model["name"] for model in data["models"]] == ["hyperbolic", "sphere"]
    assert data["owners"][NUM_TEXTS - 1] == list(range(0, NUM_IMAGES, 2))
    assert data["level"][: NUM_IMAGES + 1] == [0] * NUM_IMAGES + [1]


def test_a_page_that_is_too_large_is_refused_and_says_what_to_change(tmp_path):
    content = {"models": [], "chains": [], "texts": ["long " * 700_000]}
    with pytest.raises(ValueError, match=r"3\.\d MB; expected at most 3 MB: choose fewer --pictures"):
        write_map(content, "made-up", tmp_path / "map.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 5])
def test_the_picture_has_the_coordinates_of_the_page_and_no_text_over_another(count, tmp_path, monkeypatch):
    names = ("hyperbolic", "euclidean_squared", "oblique", "sphere", "elliptic")[:count]
    content = page_content([made_up_space(name) for name in names], made_up_test_set())
    content["models"][-1]["name"] = "Multi(32, 4), ViT 128 x 4, 48 px"  # the longest of a paper's row
    figures = []
    monkeypatch.setattr(map_picture, "write_picture", lambda figure, path: figures.append(figure) or path)
    draw_map(content, tmp_path / "map.png")
    (figure,) = figures
    figure.draw_without_rendering()
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title().replace("\n", " ") for axis in panels] == [model["name"] for model in content["models"]]
    for axis, model in zip(panels, content["models"]):
        radii = np.concatenate(model["distances"])
        if model["curvature"]:
            radii = np.tanh(math.sqrt(model["curvature"]) * radii / 2)
        angles = np.array(model["layouts"]["polar"]["angle"])
        expected = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)
        captions, images, *_ = (np.asarray(dots.get_offsets()) for dots in axis.collections)
        assert images == pytest.approx(expected[:NUM_IMAGES])
        assert np.array(sorted(captions.tolist())) == pytest.approx(np.array(sorted(expected[NUM_IMAGES:].tolist())))
    texts = [text for axis in figure.axes for text in (axis.title, axis.xaxis.label)[: 1 + axis.axison]]
    texts += figure.subfigs[1].legends[0].get_texts()
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) == 6 + 2 * count
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 - 1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].shrunk(0.98, 0.8).overlaps(pair[1])]


def test_the_command_maps_runs_on_the_test_set_of_the_first(tmp_path, monkeypatch, capsys):
    config = override(Config(), ["data.num_train=6", "data.num_test=30", "data.image_size=16", "model.patch_size=16"])
    named = {"a": "sphere", "b": "euclidean_squared", "c": "euclidean_squared"}
    encoders = {text: encoder_of(GEOMETRIES[name]()) for text, name in named.items()}
    opened = {text: ("row", 7, config, encoder, encoder.model.geometry) for text, encoder in encoders.items()}
    monkeypatch.setattr(script, "opened", lambda text, _: opened[text])
    output = tmp_path / "map.html"
    few = ["--pictures", "8", "--points", "5", "--min-radius", "0.2"]
    files = ["--output", str(output), "--picture", str(tmp_path / "map.png")]
    called(script.main, "a b", "c", *few, *files)
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").quantize(64).getcolors()) > 20
    data = page_data(output.read_text())
    assert [model["name"] for model in data["models"]] == ["row", "row (2)", "row (3)"]
    facts = data["models"][0]["facts"]
    assert facts["steps of training"] == "7"  # made, not planned
    assert facts["root"] == "mean of images and captions of scenes/train, all 6"
    assert [walks["min_radius"] for walks in data["models"][1]["walks"]] == [None, 0.2]
    assert {len(walk) for walk in data["models"][0]["walks"][0]["captions"]} == {5}
    assert len(data["chains"]) == len(data["pictures"]) == len(data["class"]) == 8
    assert all(set(chain) <= set(true) for chain, true in zip(data["chains"], data["holds"]))
    assert f"map.html: 8 images, {len(data['texts'])} captions" in capsys.readouterr().out
    assert len(script.test_task(override(config, ["data.num_test=3"]), 8).pictures) == 3
    with pytest.raises(ConfigError, match="--min-radius: no run has a geometry with entailment cones"):
        called(script.main, "a", *few, *files)


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"RUNS = .*nowhere: no such folder"):
        script.opened(str(tmp_path / "nowhere"), [])


@pytest.mark.parametrize(
    ("paper", "folder", "geometry", "name"),
    [
        ("oblique_topology", "ablation_ob_16_32-demo-0a1b/seed0", Oblique(2), "Ob(16, 32)"),
        ("oblique_topology", "my_row-demo-0a1b/seed3/checkpoints/step-00000009", L2(), "my row, seed 3, step 9"),
        ("euclip", "table4_euclip-demo-0a1b", GEOMETRIES["euclidean"](), "EuCLIP"),
    ],
)
def test_a_run_takes_the_name_of_its_row_in_the_papers_table(paper, folder, geometry, name, tmp_path, monkeypatch):
    step = 9 if folder.endswith("9") else 600
    checkpoint, encoder = Checkpoint(tmp_path / folder, {"paper": paper, "step": step}), encoder_of(geometry)
    config = SimpleNamespace(optim=SimpleNamespace(steps=600))
    models = SimpleNamespace(load_encoder=lambda opened, _, overrides: (config, encoder))
    monkeypatch.setattr(script, "named_checkpoint", lambda path, _: checkpoint)
    monkeypatch.setattr(f"{paper}.evaluate.MODELS", models)
    assert script.opened(folder, []) == (name, step, config, encoder, geometry)
    encoder.model.geometry = LateInteraction("filip", unit, padded=True)
    with pytest.raises(ConfigError, match="geometry 'filip' has no root, and so no map"):
        script.opened(folder, [])
    monkeypatch.setitem(checkpoint.state, "paper", "elsewhere")
    with pytest.raises(ConfigError, match=r"belongs to 'elsewhere'; expected one of: .*euclip"):
        script.opened(folder, [])


def test_images_without_a_hierarchy_bring_their_captions():
    pairs = type("Pairs", (), {"name": "photos", "captions": lambda self, index: [f"caption {index}", "a photo"]})()
    pool = captions_pool(pairs, range(3))
    assert pool.tags == ("caption 0", "a photo", "caption 1", "caption 2")
    assert [list(chain) for chain in pool.hierarchy.chains] == [[0, 1], [2, 1], [3, 1]]
    assert pool.hierarchy.holds.sum(dim=0).tolist() == [1, 3, 1, 1]


WIDTHS = (390, 1280)
ANSWER = re.compile(r'data-at(\d+)="([^"]*)"')
# a window of a browser is at least 500 pixels wide, a frame is as wide as it should be
FRAMES = """<!DOCTYPE html><body style="margin: 0; display: flex"><script>
addEventListener("message", ({ data: { width, problems } }) => {
  document.body.dataset[`at${width}`] = JSON.stringify(problems);
});
</script>"""


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason=f"none of {', '.join(BROWSERS)} is installed")
def test_in_a_browser_every_control_works_and_nothing_overflows(tmp_path):
    long = "a caption with one very " + "long" * 40 + " word"
    texts = [HOSTILE, long, *made_up_test_set().texts[2:]]
    names = ("hyperbolic", "euclidean_squared", "oblique", "sphere")
    page = write_made_up_map(tmp_path / "map.html", names, texts=texts)
    probe = f"<script>{PROBE.read_text()}</script>\n<style>"
    page.write_text(page.read_text().replace("<style>", probe, 1))
    frames, picture = tmp_path / "frames.html", tmp_path / "map.png"
    sizes = [f'<iframe src="map.html" style="border: 0" width="{width}" height="800"></iframe>' for width in WIDTHS]
    frames.write_text(FRAMES + "".join(sizes))
    command = next(filter(None, map(shutil.which, BROWSERS)))
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
    options += (f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={sum(WIDTHS)},800")
    options += ("--virtual-time-budget=3000", "--dump-dom", f"--screenshot={picture}")
    answer = subprocess.run([command, *options, frames.as_uri()], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[-2000:]
    problems = {int(width): json.loads(html.unescape(text)) for width, text in ANSWER.findall(answer.stdout)}
    assert problems == {width: [] for width in WIDTHS}
    with Image.open(picture) as screenshot:
        parts = [screenshot.crop((0, 0, WIDTHS[0], 800)), screenshot.crop((WIDTHS[0], 0, sum(WIDTHS), 800))]
    for part in parts:  # without its script a page is paper and ink
        assert len(part.convert("RGB").quantize(64).getcolors()) > 20
