"""Benchmark rows about GeoMM: the loss against a pool by geodesics and by cosines, and what a new graph takes.

At the paper's sizes: 65,536 keys of 256 numbers, 256 clusters, 8 neighbours, a batch of 64, one direction. The cosine
that they are compared with reads the queue in place, as `common/pool.py` does; a copy of it would cost more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path
from sklearn.cluster import KMeans

from common.base.config import load_row
from common.base.provenance import ROOT
from common.data.scenes import scene_words
from common.data.scenes.dataset import SceneDataset
from common.data.tokenizer import CLS_ID, END_ID, WordTokenizer
from common.feature_queue import FeatureQueue
from common.geometry import inner_product_similarity, unit
from common.info_nce import info_nce
from common.methods.self_supervised import Method
from common.pool import QueuePool, pool_info_nce
from contrastive_basics.vision.config import VisionConfig, VisionMethodConfig
from contrastive_basics.vision.methods import build_method
from geomm.config import Config
from geomm.cost import Steps
from geomm.downstream.build import build_task_model
from geomm.downstream.config import TaskConfig
from geomm.downstream.models import ranked
from geomm.geodesic import neighbor_graph, shortest_paths, spherical_kmeans
from geomm.grouping import GroupedOrder, Grouping
from geomm.hierarchy import build_graph
from geomm.pool import GeodesicPool
from geomm.vision import config as geo_vision
from geomm.vision.methods import build_method as geo_method
from scripts.benchmarks.comparison import Comparison, Usage
from scripts.benchmarks.loss import grown, grown_in_new_process, needs

SIZES = {"capacity": 65_536, "dim": 256, "clusters": 256, "batch": 64}
TOY = {"capacity": 512, "dim": 16, "clusters": 16, "batch": 8}
ITERATIONS = STEPS = 5


def keys_in_groups(capacity: int, dim: int) -> torch.Tensor:
    """Unit vectors about 200 directions, (capacity, dim)."""
    means = unit(torch.randn(200, dim)).repeat(capacity // 200 + 1, 1)[:capacity]
    return unit(means + unit(torch.randn(capacity, dim)))


def loss_of_pool(attach: str | None, capacity: int, dim: int, clusters: int, batch: int) -> Callable[[], None]:
    """InfoNCE of a batch against a full pool, with its gradients, again and again; attach None = cosines of a queue."""
    rows = keys_in_groups(capacity, dim)
    keys = rows[:batch].clone()
    queries = unit(keys + 0.5 * unit(torch.randn(batch, dim))).requires_grad_()
    scale = torch.tensor(14.0, requires_grad=True)
    if attach is None:
        pool = QueuePool(FeatureQueue(capacity, dim, "fill_level"), inner_product_similarity)
    else:
        pool = GeodesicPool(capacity, dim, branching=(clusters,), attach=attach)
    pool.insert(rows)
    if attach is not None:
        pool.rebuild(0)

    def step() -> None:
        candidates = pool.open(keys)
        if attach is None:
            loss = info_nce(scale * candidates.similarity(queries), candidates.columns)
        else:
            loss, _ = pool_info_nce(candidates, queries, scale, candidates.columns)
        loss.backward()
        queries.grad = scale.grad = None

    return step


def words(sizes: dict[str, int]) -> str:
    """The sizes of a row, for the table."""
    return "N = {capacity:,}, c = {dim}, K = {clusters}, batch {batch}".format(**sizes)


def geodesic_loss(attach: str, quick: bool, folder: Path) -> Comparison:
    """The loss and its gradients by one reading of the distance, over the cosine's."""
    sizes = TOY if quick else SIZES
    return Comparison(
        f"InfoNCE against a pool and its gradients, {words(sizes)}: geodesic, {attach} / cosine",
        "time",
        1.0,
        sizes["batch"],
        loss_of_pool(attach, **sizes),
        loss_of_pool(None, **sizes),
    )


def memory_of_pool(attach: str | None, sizes: dict[str, int]) -> Usage:
    """What one loss takes beyond the pool."""
    return grown(loss_of_pool(attach, **TOY), loss_of_pool(attach, **sizes))


def geodesic_memory(attach: str, quick: bool, folder: Path) -> Comparison:
    """The same in memory."""
    sizes = TOY if quick else SIZES
    sides = [
        partial(memory_of_pool, graph, sizes) if quick else partial(grown_in_new_process, memory_of_pool, graph, sizes)
        for graph in (attach, None)
    ]
    return Comparison(
        f"extra memory of InfoNCE against a pool and its gradients, {words(sizes)}: geodesic, {attach} / cosine",
        "memory",
        1.0,
        sizes["batch"],
        *sides,
    )


def geodesic_rebuild(quick: bool, folder: Path) -> Comparison:
    """A new graph of a full pool over the clustering alone by scikit-learn, from the same centres."""
    sizes = TOY if quick else SIZES
    rows = keys_in_groups(sizes["capacity"], sizes["dim"])
    start = spherical_kmeans(rows, rows[: sizes["clusters"]], 1)
    points, centers = rows.numpy(), start.numpy()
    return Comparison(
        f"new graph, {words(sizes)}, {ITERATIONS} iterations of k-means / as many of scikit-learn's KMeans",
        "time",
        1.2,
        sizes["capacity"],
        partial(build_graph, rows, (sizes["clusters"],), 8, ITERATIONS, start),
        lambda: KMeans(len(centers), init=centers, n_init=1, max_iter=ITERATIONS, tol=0.0).fit(points),
    )


def geodesic_paths(quick: bool, folder: Path) -> Comparison:
    """All shortest paths on the graph of the centres over scipy's, its edges given as it takes them."""
    sizes = TOY if quick else SIZES
    edges = neighbor_graph(unit(torch.randn(sizes["clusters"], sizes["dim"])), 8)
    sparse = csr_array(torch.where(torch.isinf(edges), 0.0, edges).double().numpy())
    return Comparison(
        f"all shortest paths, K = {sizes['clusters']}, 8 neighbours / scipy's Dijkstra",
        "time",
        1.0,
        sizes["clusters"],
        partial(shortest_paths, edges),
        partial(shortest_path, sparse, method="D"),
    )


def step_geo_albef(
    device: str, scale: str, settings: Sequence[str], goal: float, quick: bool, folder: Path
) -> Comparison:
    """Training steps of ALBEF by the geodesic distance, from one new graph to the next, over those by the cosine."""
    needs(device)
    folder = ROOT / "geomm"
    geodesic, cosine = (
        load_row(Config, folder, folder / "configs" / row, "smoke" if quick else scale, [] if quick else settings)
        for row in ("albef_geo.yaml", "albef.yaml")
    )
    batch, method = geodesic.optim.global_batch_size, geodesic.method
    count, sides = method.graph_update_interval, []
    for config in (geodesic, cosine):
        steps = Steps(config, torch.device(device))
        sides.append(lambda steps=steps: (steps.rebuild(), [steps() for _ in range(count)]))
    return Comparison(
        f"{count} training steps of ALBEF on the {device}, {geodesic.data.image_size} px, batch {batch}, "
        f"N = {method.queue_size:,}: geodesic / cosine",
        "time",
        goal,
        count * batch,
        *sides,
        most_repeats=3 if device == "cpu" else 1,  # at paper scale a repeat took over half a minute on an H200
    )


def steps_of_moco(model: Method, capacity: int, batch: int) -> Callable[[], None]:
    """Training steps of a MoCo v2 whose pool is full; a graph is built once, before."""
    model.contrast.pool.insert(keys_in_groups(capacity, 128))
    model.start_step(0)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3)
    views = torch.randn(2, batch, 3, 32, 32)

    def work() -> None:
        for step in range(1, 1 + STEPS):
            model.update_momentum_encoder(0.999)
            loss, keys = model(*views, shuffle_seed=step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.insert(keys)

    return work


def step_geo_moco(quick: bool, folder: Path) -> Comparison:
    """MoCo v2 with GeoMM's pool over the published one with its queue: narrow ResNet, 32 pixels."""
    capacity, batch = (TOY["capacity"], TOY["batch"]) if quick else (65_536, 256)
    shared = {"name": "moco_v2", "logit_scale": 5.0, "head_dim": 128, "queue_size": capacity, "ema_momentum": 0.999}
    geodesic = geo_method(geo_vision.VisionConfig(method=geo_vision.VisionMethodConfig(**shared)), 10, 0)
    plain = build_method(VisionConfig(method=VisionMethodConfig(**shared)), 10, 0)
    return Comparison(
        f"{STEPS} training steps of MoCo v2, batch {batch}, N = {capacity:,}, c = 128: geodesic / queue",
        "time",
        1.05,
        STEPS * batch,
        steps_of_moco(geodesic, capacity, batch),
        steps_of_moco(plain, capacity, batch),
    )


def vqa_rank(quick: bool, folder: Path) -> Comparison:
    """VQA's answer chosen among the likeliest by their first word over a choice among all of the list."""
    answers, k_test, batch, scale = (24, 4, 2, "smoke") if quick else (512, 64, 16, "demo")
    folder = ROOT / "geomm"
    config = load_row(TaskConfig, folder, folder / "configs" / "vqa_albef.yaml", scale)
    decoder = build_task_model(config, WordTokenizer.from_words(scene_words())).encoders.head.eval()
    ids = torch.randint(4, len(scene_words()), (answers, 5))
    ids[:, 0], ids[:, -1] = CLS_ID, END_ID
    question, mask = torch.randn(batch, 16, config.model.text.width), torch.ones(batch, 16, dtype=torch.bool)
    rank = torch.no_grad()(partial(ranked, decoder, question, mask, ids))
    return Comparison(
        f"answers to {batch} questions: the {k_test} likeliest by their first word / all {answers} of a list",
        "time",
        1.3 * k_test / answers,
        batch,
        partial(rank, k_test),
        partial(rank, answers),
    )


def grouping(quick: bool, folder: Path) -> Comparison:
    """MAFA's order of an epoch over drawing its scenes, one core: 12,800 of 48 pixels."""
    count, batch = (256, 16) if quick else (12_800, 128)
    scenes, order = SceneDataset("train", count, 48), GroupedOrder(count, batch, 0)
    features = [keys_in_groups(count, SIZES["dim"]) for _ in ("images", "texts")]

    def group() -> None:
        collected = Grouping(order, SIZES["dim"])
        for start in range(0, count, batch):
            indices = torch.arange(start, start + batch)
            collected.collect(indices.numpy(), *(side[indices] for side in features))

    def draw() -> None:
        for index in range(count):
            scenes.picture(index)

    return Comparison(
        f"order of an epoch of {count:,} samples in chains of 1,920 / drawing their scenes",
        "time",
        0.5,
        count,
        group,
        draw,
        most_repeats=3,
    )


GEOMM_BENCHMARKS = {
    "geodesic_loss": partial(geodesic_loss, "knn_local"),
    "geodesic_loss_st": partial(geodesic_loss, "knn_local_st"),
    "geodesic_loss_knn": partial(geodesic_loss, "knn"),
    "geodesic_memory": partial(geodesic_memory, "knn_local"),
    "geodesic_memory_st": partial(geodesic_memory, "knn_local_st"),
    "geodesic_rebuild": geodesic_rebuild,
    "geodesic_paths": geodesic_paths,
    "step_geo_albef": partial(step_geo_albef, "cpu", "demo", (), 1.05),
    "step_geo_albef_gpu": partial(step_geo_albef, "cuda", "paper", ("optim.global_batch_size=64",), 1.01),
    "vqa_rank": vqa_rank,
    "step_geo_moco": step_geo_moco,
    "grouping": grouping,
}
