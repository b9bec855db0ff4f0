"""One loss, the same numbers: geometry x targets and negatives x scheme x number of processes, for every gradient.

All cases are compared with the plain loss of one process in float64.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from processes import in_processes
from torch import nn

from common.accumulation import MicroBatches
from common.distributed import gather_without_gradient, mean_over_processes, rank, world_size
from common.geometry import Sphere
from common.info_nce import Distillation, QueuedPairs
from common.oblique import Oblique
from common.tiled import geometry_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import ObliqueGeodesic

BATCH, DIM, QUEUED = 12, 16, 9
GEOMETRIES = {
    "sphere": Sphere,
    "oblique": lambda: Oblique(4),
    "oblique geodesic": lambda: ObliqueGeodesic(4),
    "elliptic": Elliptic,
    "euclidean": lambda: Euclidean(squared=False),
    "euclidean squared": lambda: Euclidean(squared=True),
    "hyperbolic": lambda: Hyperbolic(DIM, squared=False),
    "hyperbolic squared": lambda: Hyperbolic(DIM, squared=True),
}
KINDS = {  # ids, queue, distillation
    "partners": (False, False, False),
    "ids": (True, False, False),
    "queue": (False, True, False),
    "distilled": (False, False, True),
    "all of them": (True, True, True),
}
SCHEMES = {"plain": (0, None), "tiled": (4, None), "cached": (0, 2), "tiled, cached": (4, 2)}  # tile, micro-batch
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
ALPHA = 0.4


class Pairs(nn.Module):
    """The features of a whole batch as weights, so that their gradients are those of weights too."""

    def __init__(self, geometry):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        images = 1.5 * torch.randn(BATCH, DIM, generator=generator)
        near = images + torch.randn(BATCH, DIM, generator=generator) * torch.logspace(-1.5, 0.5, BATCH)[:, None]
        self.images, self.texts = (nn.Embedding(BATCH, DIM, _weight=side) for side in (images, near))
        self.log_logit_scale = nn.Parameter(torch.tensor(0.5))
        self.geometry = geometry

    def forward(self, rows):
        images, texts = self.geometry.embed_image(self.images(rows)), self.geometry.embed_text(self.texts(rows))
        return images, texts, self.log_logit_scale.exp()


def share_of(rows):
    return torch.arange(rows).chunk(world_size())[rank()]


def loss_and_gradients(name, kind, scheme, dtype):
    """Averaged over processes, as DDP does it."""
    geometry, generator = GEOMETRIES[name](), torch.Generator().manual_seed(1)
    model = Pairs(geometry).to(dtype)
    with_ids, with_queue, with_keys = KINDS[kind]
    old = [torch.randn(rows, DIM, generator=generator).to(dtype) for rows in (QUEUED, QUEUED, BATCH, BATCH)]
    with torch.no_grad():
        old_images, old_texts, image_keys, text_keys = (
            embed(rows) for embed, rows in zip([geometry.embed_image, geometry.embed_text] * 2, old)
        )
    share = share_of(BATCH)
    ids, old_ids = torch.tensor([0, 1, 2, 0, 4, 5, 6, 1, 8, -1, -1, 11]), torch.tensor([1, 2, -1, -1, 30, 0, 5, 5, 7])
    tile, size = SCHEMES[scheme]
    micro_batches = MicroBatches(Accelerator(cpu=True), model, size)
    image_embeddings, text_embeddings, logit_scale = micro_batches.embed(share)
    loss = geometry_loss(
        image_embeddings,
        text_embeddings,
        geometry,
        logit_scale,
        ids=ids[share] if with_ids else None,
        queue=QueuedPairs(old_images, old_texts, old_ids) if with_queue else None,
        distillation=Distillation(image_keys[share], text_keys[share], ALPHA) if with_keys else None,
        tile=tile,
    )
    micro_batches.backward(loss)
    gradients = {name: mean_over_processes(parameter.grad) for name, parameter in model.named_parameters()}
    return {"loss": mean_over_processes(loss), **gradients}


@functools.cache
def plain_in_float64(name, kind):
    return loss_and_gradients(name, kind, "plain", torch.float64)


def every_case(kinds, names=GEOMETRIES):
    """Every kind in float64; rounding needs only the last, which has everything in it."""
    kinds_of = {torch.float64: [*kinds], torch.float32: [*kinds][-1:]}
    cases = [(name, kind, scheme, dtype) for dtype in TOLERANCE for name in names for kind in kinds_of[dtype]
             for scheme in SCHEMES]  # fmt: skip
    return {case: loss_and_gradients(*case) for case in cases}


def worst_errors(actual):
    """Of each (dtype, geometry, scheme): the largest error, relative to the largest entry of its tensor, and where.

    The scalars are logarithms, of one unit: their errors are relative to the largest gradient among them. That of the
    curvature alone adds up terms of both signs and may be anything near 0.
    """
    worst = {}
    for (name, kind, scheme, dtype), tensors in actual.items():
        expected = plain_in_float64(name, kind)
        assert tensors.keys() == expected.keys()
        largest = max(float(value.abs()) for key, value in expected.items() if value.numel() == 1 and key != "loss")
        for key, value in expected.items():
            assert tensors[key].dtype == dtype
            size = largest if value.numel() == 1 and key != "loss" else float(value.abs().max())
            error = float((tensors[key] - value).abs().max()) / size
            column = dtype, name, scheme
            worst[column] = max(worst.get(column, (0.0, "")), (error, f"{key}, {kind}"))
    return worst


def check(actual, names=GEOMETRIES):
    worst = worst_errors(actual)
    assert len(worst) == len(TOLERANCE) * len(names) * len(SCHEMES)
    for dtype, tolerance in TOLERANCE.items():
        errors = {column: error for column, error in worst.items() if column[0] == dtype}
        column = max(errors, key=errors.get)
        print(f"{str(dtype).removeprefix('torch.')}: worst of {len(errors)} {errors[column]} {column[1:]}")
        assert errors[column][0] <= tolerance, (column, errors[column])


def test_every_scheme_gives_the_plain_loss_and_every_gradient():
    check(every_case(KINDS))


def exchanged():
    """(shape, dtype) of all matrices that a process receives for one tiled loss and its gradients in bfloat16."""
    seen, collectives = [], (dist.all_gather, dist.reduce_scatter)

    def noting(collective, matrices):
        def wrapped(output, given):
            rows = matrices(output, given)
            if rows[0].ndim == 2:
                seen.append((sum(len(part) for part in rows), rows[0].shape[1], rows[0].dtype))
            return collective(output, given)

        return wrapped

    model, share = Pairs(Sphere()), share_of(BATCH)
    leaves = [side(share).detach().bfloat16().requires_grad_() for side in (model.images, model.texts)]
    dist.all_gather = noting(dist.all_gather, lambda gathered, rows: gathered)
    dist.reduce_scatter = noting(dist.reduce_scatter, lambda total, parts: parts)
    loss = geometry_loss(*leaves, Sphere(), torch.tensor(0.2), tile=4)
    loss.backward()
    dist.all_gather, dist.reduce_scatter = collectives
    return seen, mean_over_processes(loss), [gather_without_gradient(leaf.grad) / world_size() for leaf in leaves]


def gradients_of_unequal_weights(tile):
    """Of losses that each process multiplies by another number before its backward pass."""
    model, share = Pairs(Hyperbolic(DIM, squared=True)).double(), share_of(BATCH)
    image_embeddings, text_embeddings, logit_scale = model(share)
    loss = geometry_loss(image_embeddings, text_embeddings, model.geometry, logit_scale, tile=tile)
    (loss * (1 + rank())).backward()
    return [mean_over_processes(parameter.grad) for parameter in model.parameters()]


def work(names):
    cases = every_case(["partners", "all of them"], names)
    return cases, exchanged(), [gradients_of_unequal_weights(tile) for tile in (0, 4)]


# the cosine, points of several axes, a closed form without scalars and one with them; all: the slow test
QUICK = ("sphere", "oblique", "euclidean squared", "hyperbolic")


@pytest.fixture(scope="module")
def two_processes():
    return in_processes(2, work, QUICK)


def test_two_processes_equal_one_in_every_scheme(two_processes):
    for actual, _, (at_once, in_tiles) in two_processes:
        check(actual, QUICK)
        torch.testing.assert_close(in_tiles, at_once, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_four_processes_equal_one_in_every_scheme():
    for actual, *_ in in_processes(4, work, tuple(GEOMETRIES)):
        check(actual)


def test_processes_exchange_one_tile_at_a_time_in_the_dtype_of_the_embeddings(two_processes):
    _, expected_loss, expected = exchanged()
    num_tiles = BATCH // 4  # whole tiles, with rows of both processes
    for _, (seen, loss, gradients), _ in two_processes:
        there, back = (4, DIM, torch.bfloat16), (4, DIM, torch.float32)
        assert seen == num_tiles * [there] + num_tiles * [there, back]
        torch.testing.assert_close(loss, expected_loss)
        for actual, wanted in zip(gradients, expected):
            torch.testing.assert_close(actual, wanted, rtol=0.01, atol=1e-4)
