"""Draws a map of the embedding space of one or several runs: one HTML page, which opens without network.

    make map RUNS="outputs/runs/euclip/table4_clip-demo-0a1b/seed0 outputs/runs/euclip/table4_meru-demo-2c3d/seed0"
    python scripts/map.py <run> [<run> ...] --min-radius 0.1 0.3
    python scripts/map.py <run> <run> --picture outputs/map.png
    python scripts/map.py <run> --set "data.source=shards data.root=/data/flickr8k" --output flickr.html

A run is its folder or a checkpoint (step-XXXXXXXX). All runs embed the test set of the first one: scenes, or captioned
images, of which those with a hierarchy of captions are preferred. Images appear on the page only if they are scenes.

The page shows images and captions around the root of the space, the walk from an image to the root past captions, the
cones of captions, distances by modality, similarities of matched and unmatched pairs, and the graph of a GeoMM pool.
`--picture` also draws its first layout as a PNG, for a README: a panel for each run, four in a row.
"""

import base64
import io
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from PIL import Image
from torch.utils.data import Subset

from common.base.arguments import Parser, file_to_write, names_in, words_in
from common.base.config import ConfigError
from common.base.files import read_repository_yaml, shown
from common.base.places import ROOT, outputs
from common.data.pairs import open_retrieval_sets
from common.data.scenes import SceneDataset
from common.data.scenes.world import SHAPES
from common.evaluation.embed import Encoder
from common.geometry import RootedGeometry, has_root
from common.report.map import Space, TestSet, Walks, cluster_graph, page_content, write_map
from common.report.map_picture import draw_map
from common.reproduce.tables import ran_as
from common.run.checkpoint import named_checkpoint
from common.run.evaluation import this_device
from common.run.folder import RunName
from common.run.launch import run_or_explain
from common.run.named_models import models_of
from common.vectors import unit
from euclip.distributions import training_sample
from euclip.traversal import nearest_on_walk, root_of
from euclip.traversal_data import Embedded, Task, captions_pool, embed_task, has_hierarchy, pairs_task, scenes_task
from geomm.geodesic import center_graph, shortest_paths
from geomm.pool import GeodesicPool

PICTURES = 150
POINTS = 20  # of a walk, both ends included
MIN_RADIUS = 0.3  # K of cones where a run was trained without entailment; EuCLIP's
LEVELS = ("everything is stated", "almost everything", "in part", "little", "only how many")


def opened(text: str, overrides: Sequence[str]) -> tuple[str, int, Any, Encoder, RootedGeometry]:
    """Name, steps made, config, encoder and rooted geometry of a run, with `data.*` and `run.*` overridden."""
    checkpoint = named_checkpoint(Path(text).expanduser(), "RUNS")
    models, paper = models_of(checkpoint), checkpoint.state["paper"]
    config, encoder = models.load_encoder(checkpoint, this_device(), overrides)
    run = RunName.of(checkpoint.path)
    name = title_of(paper, run.row, config)
    geometry = encoder.model.geometry
    if not has_root(geometry):  # of sets of tokens, for example
        raise ConfigError(f"{checkpoint.path}: geometry {geometry.name!r} has no root, and so no map")
    step = checkpoint.state["step"]
    name += f", seed {run.seed}" if run.seed else ""
    return name + (f", step {step}" if step < config.optim.steps else ""), step, config, encoder, geometry


def title_of(paper: str, row: str, config: Any) -> str:
    """A row's name in the paper's table, with our sizes where they differ; a custom row's name as words."""
    printed = ROOT / paper / "paper_tables.yaml"
    tables = read_repository_yaml(printed)["tables"].values() if printed.is_file() else ()
    for entry in (entry for table in tables for entry in table["rows"] if entry.get("config") == f"{row}.yaml"):
        return ran_as(entry["ours"], config) if "ours" in entry else entry["method"]
    return row.replace("_", " ")


def test_task(config: Any, size: int) -> Task:
    """The first images of a config's test set and all their captions, with what is true of which."""
    if config.data.source == "scenes":
        return scenes_task(config.data.image_size, min(size, config.data.num_test))
    sets = open_retrieval_sets(config.data)
    pairs = next(filter(has_hierarchy, sets.values()), sets["test"])
    return pairs_task(pairs, size, None if has_hierarchy(pairs) else captions_pool(pairs, range(min(size, len(pairs)))))


def test_set_of(task: Task, rows: Sequence[int]) -> TestSet:
    """The task's images that could be read, for the page."""
    known = task.pool.hierarchy.of_pictures(rows)
    levels: Sequence[str] = ()
    classes, pictures = [], []
    is_scenes = isinstance(task.pictures, SceneDataset)
    if is_scenes:
        levels = LEVELS
        for row in rows:
            largest = max(task.pictures.scene(row).objects, key=lambda thing: thing.radius)
            classes.append(SHAPES[largest.shape])
            pictures.append(data_url(task.pictures[row]["image"]))
    elif isinstance(task.pictures, Subset) and has_hierarchy(task.pictures.dataset):
        longest = max(map(len, known.chains))
        levels = [f"level {place + 1} of {longest}" for place in range(longest)]
    name = f"drawn scenes ({task.name})" if is_scenes else task.name
    return TestSet(name, task.pool.tags, known.chains, known.holds, is_scenes, levels, classes, pictures)


def data_url(pixels: Any) -> str:
    """A drawn picture as a PNG of few colours."""
    stream = io.BytesIO()
    Image.fromarray(pixels).quantize(48, dither=Image.Dither.NONE).save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"


def space_of(
    name: str,
    step: int,
    config: Any,
    encoder: Encoder,
    geometry: RootedGeometry,
    embedded: Embedded,
    min_radii: Sequence[float],
    points: int,
) -> Space:
    """A run's embeddings, its root and its walks, without a filter and with every K; moves the model to the CPU."""
    images, texts = embedded.images.cpu(), embedded.captions.cpu()
    if geometry.space in ("euclidean", "hyperbolic"):
        root, root_name = root_of(geometry, texts, texts), "the origin"
    else:
        sample = training_sample(encoder, config)
        root = root_of(geometry, sample.images, sample.texts).cpu()
        root_name = f"mean of images and captions of {sample.name}"  # with --set not those of the training
    filters: list[float | None] = [None]
    if geometry.has_cones:
        trained = getattr(config.method, "min_radius", None)
        filters += min_radii or [MIN_RADIUS if trained is None else trained]
    encoder.model.cpu()  # with the scalars of the geometry
    walks = [
        Walks(radius, [nearest_on_walk(geometry, image, texts, root, points, radius) for image in images])
        for radius in filters
    ]
    facts = {"steps of training": str(step)}
    return Space(name, geometry, images, texts, root, root_name, walks, facts, graph_of(encoder))


def graph_of(encoder: Encoder) -> dict[str, Any] | None:
    """The top layer's graph of the first GeoMM pool of a model that has one.

    A checkpoint has only the bottom centres; a top centre is the mean of those below it, as at the start of a rebuild.
    """
    for pool in encoder.model.modules():
        if isinstance(pool, GeodesicPool) and pool.graph() is not None:
            bottom = pool.cluster_centers.cpu()
            centers = unit(bottom.view(pool.branching[0], -1, bottom.shape[1]).mean(dim=1))
            edges = center_graph(centers, pool.num_neighbors, pool.kind)
            return cluster_graph(centers, shortest_paths(edges), edges)
    return None


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", help="runs or checkpoints; quotes as in a shell")
    parser.add_argument("--set", default="", help="data.key=value run.key=value ...: another test set")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="number of test images, default %(default)s")
    parser.add_argument("--points", type=int, default=POINTS, help="points of a walk, default %(default)s")
    parser.add_argument(
        "--min-radius", type=float, nargs="+", default=[], help="K of the entailment filter; default that of the run"
    )
    parser.add_argument("--output", type=file_to_write, default=outputs() / "map.html", help="default outputs/map.html")
    parser.add_argument("--picture", type=file_to_write, help="PNG to draw, too")
    options = parser.parse_args()
    if options.pictures < 2:
        raise ValueError(f"--pictures {options.pictures}; expected at least 2")
    names = names_in(options.runs)
    if not names:
        raise ConfigError("RUNS names no run; expected: folders of runs, or checkpoints")
    spaces: list[Space] = []
    for text in names:
        name, step, config, encoder, geometry = opened(text, words_in("SET", options.set))
        if not spaces:  # all runs embed the same images and captions
            task = test_task(config, options.pictures)
        embedded = embed_task(encoder, task)
        if not spaces:
            rows, test_set = embedded.rows, test_set_of(task, embedded.rows)
        elif embedded.rows != rows:
            raise ConfigError(f"{text} could read other images of {task.name} than {names[0]}; expected the same ones")
        labels = (f"{name} ({number})" for number in itertools.count(2))
        known = {space.name for space in spaces}
        label = name if name not in known else next(label for label in labels if label not in known)
        spaces.append(space_of(label, step, config, encoder, geometry, embedded, options.min_radius, options.points))
    if options.min_radius and not any(space.geometry.has_cones for space in spaces):
        raise ConfigError("--min-radius: no run has a geometry with entailment cones; expected: no --min-radius")
    content = page_content(spaces, test_set)
    path = write_map(content, test_set.name, options.output)
    print(f"{shown(path)}: {len(rows)} images, {len(test_set.texts)} captions, {path.stat().st_size / 1e6:.1f} MB")
    if options.picture is not None:
        print(shown(draw_map(content, options.picture)))


if __name__ == "__main__":
    run_or_explain(main)
