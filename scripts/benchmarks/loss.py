"""Benchmark rows about InfoNCE itself: tiles against the whole matrix, in memory and time; micro-batches against one.

Embeddings are random, of 512 numbers. What a loss and its backward pass take beyond the embeddings is the growth of the
resident memory of a process that does nothing else, or what CUDA counts.
"""

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import open_clip
import psutil
import torch
from accelerate import Accelerator

from common.accumulation import MicroBatches
from common.base.settings import OptimConfig
from common.feature_queue import FeatureQueue
from common.geometry import Geometry, Sphere, inner_product_similarity, unit
from common.info_nce import contrastive_loss
from common.pool import QueuePool
from common.run.dry_run import forget_peak, peak
from common.run.schedule import build_optimizer
from common.tiled import TILE, geometry_loss, tiled_contrastive_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import ObliqueGeodesic
from scripts.benchmarks.comparison import Comparison, Skipped, Usage
from scripts.benchmarks.training import SMALL, TOY, our_clip

DIM = 512
GEOMETRIES = {
    "sphere": Sphere,
    "oblique_geodesic": partial(ObliqueGeodesic, 64),
    "elliptic": Elliptic,
    "euclidean": partial(Euclidean, squared=False),
    "euclidean_squared": partial(Euclidean, squared=True),
    "hyperbolic": partial(Hyperbolic, DIM, squared=False),
    "hyperbolic_squared": partial(Hyperbolic, DIM, squared=True),
}
# bytes that the whole matrix takes for each pair with its gradients, measured
BYTES_AT_ONCE = {
    "sphere": 20,
    "oblique_geodesic": 67,
    "elliptic": 39,
    "euclidean": 30,
    "euclidean_squared": 25,
    "hyperbolic": 51,
    "hyperbolic_squared": 66,
}
WITH_KERNEL = [name for name in GEOMETRIES if name != "oblique_geodesic"]  # in Triton
BATCH = dict.fromkeys(GEOMETRIES, 16_384) | {"oblique_geodesic": 8_192}
# of a tiled loss; the oblique geodesic distance takes m arc cosines a pair, and goes through autograd
TIMES_THE_PRODUCTS = dict.fromkeys(GEOMETRIES, 1.4) | {"oblique_geodesic": 10.0}
GIGABYTES = 0.6  # that the tiled loss may take at a batch of 65,536: half of it is the gradient of the embeddings
GPU_TILE = 8_192


def random_embeddings(geometry: Geometry, batch: int, device: str = "cpu") -> list[torch.Tensor]:
    """Two sides that ask for their gradient, made a part at a time, so that nothing else is left in memory."""
    sides = []
    with torch.no_grad():
        for embed in (geometry.embed_image, geometry.embed_text):
            parts = embed(torch.randn(2, DIM, device=device))
            side = torch.empty(batch, *parts.shape[1:], device=device)
            for part in side.split(1_024):
                part.copy_(embed(torch.randn(len(part), DIM, device=device)))
            sides.append(side.requires_grad_())
    return sides


def loss_step(name: str, batch: int, tile: int, device: str = "cpu", kernel: str = "torch") -> Callable[[], None]:
    """The loss of a geometry and its gradients, again and again; tile 0 = at once."""
    geometry = GEOMETRIES[name]().to(device)
    sides = random_embeddings(geometry, batch, device)
    scale = torch.tensor(10.0, device=device, requires_grad=True)

    def step() -> None:
        geometry_loss(*sides, geometry, scale, tile=tile, kernel=kernel).backward()
        for leaf in (*sides, scale, *geometry.parameters()):
            leaf.grad = None

    return of_device(step) if device == "cuda" else step


def of_device(step: Callable[[], None]) -> Callable[[], None]:
    """As a CUDA graph: the time of the device alone; in training the host runs ahead."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def usage(name: str, batch: int, tile: int) -> Usage:
    """Memory and time of one loss with its gradients in this process."""
    return grown(loss_step(name, 64, min(tile, 32)), loss_step(name, batch, tile))


def grown(warm_up: Callable[[], None], work: Callable[[], None]) -> Usage:
    """What some work takes, and by how much it lets the memory of this process grow at its peak.

    Args:
        warm_up: the same at toy size: threads and libraries take their memory before it is measured.
        work: with its inputs made already.
    Raises:
        Skipped: where the system does not tell the peak of a process's memory (it is Linux's /proc that does).
    """
    if not Path("/proc/self/clear_refs").exists():
        raise Skipped("no /proc/self/clear_refs: the memory's peak is not known")
    warm_up()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what was freed before must not hide what is taken now
    cpu = torch.device("cpu")
    forget_peak(cpu)
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Usage(seconds, max(peak(cpu) - before, 1))


def grown_in_new_process(usage: Callable[..., Usage], *arguments: object) -> Usage:
    """`usage(*arguments)` in a process of its own, whose memory nothing else has used and freed."""
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        return pool.submit(usage, *arguments).result()


usage_in_new_process = partial(grown_in_new_process, usage)


def check_that_the_matrix_fits(name: str, batch: int) -> None:
    """Raises Skipped if the whole matrix needs more memory than is free."""
    free = psutil.virtual_memory().available
    needed = BYTES_AT_ONCE[name] * batch**2
    if needed > 0.9 * free:
        raise Skipped(f"the whole matrix needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")


def loss_memory(name: str, quick: bool, folder: Path) -> Comparison:
    """What the tiled loss takes over what the whole matrix takes."""
    batch, tile = (512, 64) if quick else (BATCH[name], TILE)
    check_that_the_matrix_fits(name, batch)
    used = usage if quick else usage_in_new_process
    return Comparison(
        f"extra memory of InfoNCE and its gradients, {name}, B = {batch:,}, d = {DIM}: tiles of {tile} / at once",
        "memory",
        1 / 8,
        batch,
        partial(used, name, batch, tile),
        partial(used, name, batch, 0),
    )


def loss_time(name: str, quick: bool, folder: Path) -> Comparison:
    """The same in seconds."""
    batch, tile = (512, 64) if quick else (BATCH[name], TILE)
    check_that_the_matrix_fits(name, batch)
    return Comparison(
        f"InfoNCE and its gradients, {name}, B = {batch:,}, d = {DIM}: tiles of {tile} / at once",
        "time",
        1.6,
        batch,
        loss_step(name, batch, tile),
        loss_step(name, batch, 0),
        most_repeats=2,
    )


def loss_limit(name: str, quick: bool, folder: Path, device: str = "cpu") -> Comparison:
    """The tiled loss over its bare matrix products: one forward, one to form a tile again, two for the gradients."""
    needs(device)
    batch, tile = (512, 64) if quick else (BATCH[name], TILE if device == "cpu" else GPU_TILE)
    x, y, x_gradient, y_gradient = torch.randn(4, batch, DIM, device=device)
    logits = torch.empty(tile, tile, device=device)

    def products() -> None:
        for columns, column_gradient in zip(y.split(tile), y_gradient.split(tile)):
            for rows, row_gradient in zip(x.split(tile), x_gradient.split(tile)):
                torch.mm(rows, columns.T, out=logits)
                torch.mm(rows, columns.T, out=logits)
                torch.mm(logits, columns, out=row_gradient)
                torch.mm(logits.T, rows, out=column_gradient)

    return Comparison(
        f"InfoNCE and its gradients, {name}, B = {batch:,}, d = {DIM}, {device}: tiles of {tile} / bare products, "
        "8 B^2 d operations",
        "time",
        TIMES_THE_PRODUCTS[name],
        batch,
        loss_step(name, batch, tile, device, "auto"),
        of_device(products) if device == "cuda" else products,
        most_repeats=3,
    )


def loss_kernel(name: str, quick: bool, folder: Path) -> Comparison:
    """Tiles with Triton kernels between their products over tiles of torch operations, in float32."""
    needs("cuda")
    batch, tile = (512, 64) if quick else (BATCH[name], GPU_TILE)
    return Comparison(
        f"InfoNCE and its gradients, {name}, B = {batch:,}, d = {DIM}, cuda, tiles of {tile}: Triton kernels / torch "
        "operations between the products",
        "time",
        1.0,
        batch,
        loss_step(name, batch, tile, "cuda", "triton"),
        loss_step(name, batch, tile, "cuda"),
    )


def needs(device: str) -> None:
    """Raises Skipped if the device is CUDA and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise Skipped("no CUDA device")


def loss_memory_in_budget(name: str, batch: int, quick: bool, folder: Path) -> Comparison:
    """What the tiled loss takes where the whole matrix does not fit, over a budget."""
    batch, tile = (512, 64) if quick else (batch, TILE)
    return Comparison(
        f"extra memory of InfoNCE and its gradients, {name}, B = {batch:,}, d = {DIM}: tiles of {tile} / "
        f"{GIGABYTES} GB",
        "memory",
        1.0,
        batch,
        partial(usage if quick else usage_in_new_process, name, batch, tile),
        lambda: Usage(0.0, round(GIGABYTES * 1e9)),
    )


def micro_batches(quick: bool, folder: Path) -> Comparison:
    """A training step in micro-batches with cached embeddings over one with the whole batch; ideal: 4/3."""
    towers = TOY if quick else replace(SMALL, batch=128)
    size = towers.batch // 4
    images = torch.randn(towers.batch, 3, towers.image_size, towers.image_size)
    token_ids = torch.randint(1, towers.vocabulary_size - 1, (towers.batch, towers.context_length))

    token_ids[:, -1] = towers.vocabulary_size - 1  # ends a caption

    def step(micro_batch_size: int | None) -> Callable[[], None]:
        model = our_clip(towers)
        optimizer = build_optimizer(model, OptimConfig())
        parts = MicroBatches(Accelerator(), model, micro_batch_size)

        def work() -> None:
            image_embeddings, text_embeddings, scale = parts.embed(images, token_ids)
            parts.backward(geometry_loss(image_embeddings, text_embeddings, model.geometry, scale))
            optimizer.step()
            optimizer.zero_grad()

        return work

    return Comparison(
        f"training step, ViT {towers.image_width} x {towers.image_layers}, text {towers.text_width} x "
        f"{towers.text_layers}, batch {towers.batch}: micro-batches of {size}, cached embeddings / at once",
        "time",
        1.45,
        towers.batch,
        step(size),
        step(None),
    )


def queue_logits(quick: bool, folder: Path) -> Comparison:
    """Cosine logits of a batch against its keys and a queue, with their gradient, over one bare product."""
    capacity, dim, batch = (256, 16, 8) if quick else (65_536, 256, 64)
    pool = QueuePool(FeatureQueue(capacity, dim), inner_product_similarity)
    queries, keys = unit(torch.randn(batch, dim)).requires_grad_(), unit(torch.randn(batch, dim))
    all_keys = torch.cat([keys, pool.queue.features])
    scale, gradient = torch.tensor(10.0), torch.randn(batch, batch + capacity) / capacity

    def ours() -> None:
        (scale * pool.open(keys).similarity(queries)).backward(gradient)
        queries.grad = None

    def product() -> None:
        (queries @ all_keys.T).backward(gradient)
        queries.grad = None

    return Comparison(
        f"cosine logits against a queue and their gradient, N = {capacity:,}, c = {dim}, batch {batch} / one product",
        "time",
        1.15,
        batch,
        ours,
        product,
    )


def loss_gpu(reference: str, batch: int, quick: bool, folder: Path) -> Comparison:
    """The cosine's tiled loss with the bfloat16 product on a CUDA device.

    Args:
        reference: "matmul": as many operations of bare bfloat16 products with float32 results, the machine's peak for
            this shape; "plain": our loss at once; "open_clip": its ClipLoss, on bfloat16 features; "torch": tiles
            without Triton kernels.
        batch: B.
    """
    needs("cuda")
    batch, tile = (256, 64) if quick else (batch, GPU_TILE)
    images, texts = random_embeddings(Sphere(), batch, "cuda")
    scale = torch.tensor(10.0, device="cuda", requires_grad=True)

    def timed(loss: Callable[[], torch.Tensor], name: str) -> Callable[[], Usage]:
        def work() -> Usage:
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            try:
                loss().backward()
            except torch.OutOfMemoryError as error:
                raise Skipped(f"{name} does not fit: {error}") from error
            torch.cuda.synchronize()
            images.grad = texts.grad = scale.grad = None
            return Usage(time.perf_counter() - start, torch.cuda.max_memory_allocated() - before)

        return work

    def products() -> None:
        x, y = images.detach().bfloat16(), texts.detach().bfloat16()
        for rows in x.split(tile):
            for columns in y.split(tile):
                for _ in range(4):
                    torch.mm(rows, columns.T, out_dtype=torch.float32)

    def tiles(kernel: str = "auto") -> torch.Tensor:
        return tiled_contrastive_loss(images, texts, Sphere(), scale, tile=tile, bf16_product=True, kernel=kernel)

    def step(kernel: str) -> Callable[[], None]:
        def work() -> None:
            tiles(kernel).backward()
            images.grad = texts.grad = scale.grad = None

        return of_device(work)

    what = f"InfoNCE and its gradients, cosine, B = {batch:,}, d = {DIM}, CUDA: tiles of {tile}, bfloat16 product"
    if reference == "matmul":
        name = f"{what} / bare products, 8 B^2 d operations each"
        return Comparison(name, "throughput", 0.55, batch, step("auto"), of_device(products))
    if reference == "torch":
        name = f"{what}: Triton kernels / torch operations between the products"
        return Comparison(name, "time", 1.0, batch, step("triton"), step("torch"))
    losses = {
        "plain": lambda: contrastive_loss(images, texts, Sphere(), scale),
        "open_clip": lambda: open_clip.ClipLoss()(images.bfloat16(), texts.bfloat16(), scale.bfloat16()),
    }
    return Comparison(
        f"{what} / {reference}",
        "memory",
        1 / 8,
        batch,
        timed(tiles, "the tiled loss"),
        timed(losses[reference], reference),
    )


LOSS_BENCHMARKS = {
    **{f"loss_memory_{name}": partial(loss_memory, name) for name in GEOMETRIES},
    **{f"loss_time_{name}": partial(loss_time, name) for name in GEOMETRIES},
    **{f"loss_limit_{name}": partial(loss_limit, name) for name in GEOMETRIES},
    "loss_memory_oblique_geodesic_16384": partial(loss_memory_in_budget, "oblique_geodesic", 16_384),
    "loss_memory_65536": partial(loss_memory_in_budget, "sphere", 65_536),
    "micro_batches": micro_batches,
    "queue_logits": queue_logits,
    "loss_gpu_32768": partial(loss_gpu, "matmul", 32_768),
    "loss_gpu_131072": partial(loss_gpu, "matmul", 131_072),
    "loss_gpu_32768_plain": partial(loss_gpu, "plain", 32_768),
    "loss_gpu_32768_torch": partial(loss_gpu, "torch", 32_768),
    "loss_gpu_32768_open_clip": partial(loss_gpu, "open_clip", 32_768),
    **{f"loss_kernel_gpu_{name}": partial(loss_kernel, name) for name in WITH_KERNEL},
    **{f"loss_limit_gpu_{name}": partial(loss_limit, name, device="cuda") for name in GEOMETRIES},
}
