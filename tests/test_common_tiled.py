"""Tiled InfoNCE against the plain one: every geometry, ids, queue, ragged tiles, one and several processes."""

import pytest
import torch
from processes import in_processes

from common.distributed import mean_over_processes, rank, world_size
from common.geometry import Sphere
from common.info_nce import QueuedPairs, contrastive_loss
from common.tiled import tiled_contrastive_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import Oblique

BATCH, DIM, QUEUED = 12, 16, 9
GEOMETRIES = {
    "sphere": Sphere,
    "oblique": lambda: Oblique(4),
    "oblique geodesic": lambda: Oblique(4, geodesic=True),
    "elliptic": Elliptic,
    "euclidean": lambda: Euclidean(squared=False),
    "euclidean squared": lambda: Euclidean(squared=True),
    "hyperbolic": lambda: Hyperbolic(DIM, squared=False),
    "hyperbolic squared": lambda: Hyperbolic(DIM, squared=True),
}
KINDS = {"partners": (False, False), "ids": (True, False), "queue": (False, True), "ids and queue": (True, True)}


def world(name, dtype):
    """Features of a batch, ids of which some repeat or are unknown, and a queue, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    geometry = GEOMETRIES[name]().to(dtype)
    images, texts = 2 * torch.randn(2, BATCH, DIM, generator=generator).to(dtype)
    ids = torch.tensor([0, 1, 2, 0, 4, 5, 6, 1, 8, -1, -1, 11])
    old_images, old_texts = torch.randn(2, QUEUED, DIM, generator=generator).to(dtype)
    with torch.no_grad():
        queue = QueuedPairs(
            geometry.embed_image(old_images),
            geometry.embed_text(old_texts),
            torch.tensor([1, 2, -1, -1, 30, 0, 5, 5, 7]),
        )
    return geometry, images, texts, ids, queue


def loss_and_gradients(name, kind, tile, dtype):
    """Loss and gradients of this process's share, averaged over processes as DDP does; tile None = the plain form."""
    geometry, images, texts, ids, queue = world(name, dtype)
    share = slice(rank() * BATCH // world_size(), (rank() + 1) * BATCH // world_size())
    with_ids, with_queue = KINDS[kind]
    images, texts = images[share].clone().requires_grad_(), texts[share].clone().requires_grad_()
    scale = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    options = {"ids": ids[share] if with_ids else None, "queue": queue if with_queue else None}
    embeddings = geometry.embed_image(images), geometry.embed_text(texts)
    if tile is None:
        loss = contrastive_loss(*embeddings, geometry.similarity, scale, **options)
    else:
        loss = tiled_contrastive_loss(*embeddings, geometry, scale, tile=tile, **options)
    scalars = {"scale": scale, **dict(geometry.named_parameters())}
    of_images, of_texts, *of_scalars = torch.autograd.grad(loss, [images, texts, *scalars.values()])
    averaged = {key: mean_over_processes(value) for key, value in zip(scalars, of_scalars)}
    return mean_over_processes(loss), {"images": of_images / world_size(), "texts": of_texts / world_size(), **averaged}


def worst_error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_tiles_of_any_size_give_the_plain_loss_and_every_gradient(name, kind, dtype, tolerance):
    loss, gradients = loss_and_gradients(name, kind, None, dtype)
    for tile in (5, 7, 100):
        tiled_loss, tiled_gradients = loss_and_gradients(name, kind, tile, dtype)
        assert tiled_loss.dtype == dtype
        assert worst_error(tiled_loss, loss) < tolerance
        assert tiled_gradients.keys() == gradients.keys()
        for key, value in gradients.items():
            # a scalar's gradient sums batch^2 terms of both signs; in float32 both forms round their sum
            bound = 1e-4 if dtype == torch.float32 and value.numel() == 1 else tolerance
            assert worst_error(tiled_gradients[key], value) < bound, key


def every_case():
    names = [*GEOMETRIES]
    return {
        (name, kind): [loss_and_gradients(name, kind, tile, torch.float64) for tile in (None, 5)]
        for name in names
        for kind in KINDS
    }


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_equal_one_in_loss_and_every_gradient(processes):
    shares = in_processes(processes, every_case)
    for (name, kind), _ in every_case().items():
        loss, gradients = loss_and_gradients(name, kind, None, torch.float64)
        for form in (0, 1):  # plain, tiled
            found = [share[name, kind][form] for share in shares]
            together = {key: torch.cat([part[1][key] for part in found]) for key in ("images", "texts")}
            for part_loss, part_gradients in found:
                assert worst_error(part_loss, loss) < 1e-12
                together |= {key: value for key, value in part_gradients.items() if key not in ("images", "texts")}
                for key, value in gradients.items():
                    assert worst_error(together[key], value) < 1e-12, (name, kind, form, key)


def test_the_whole_matrix_is_never_there():
    batch, tile, seen = 64, 8, []

    class Watching(Sphere):
        def similarity(self, image_embeddings, text_embeddings):
            seen.append((len(image_embeddings), len(text_embeddings)))
            return super().similarity(image_embeddings, text_embeddings)

    geometry, images = Watching(), torch.randn(batch, DIM, requires_grad=True)
    tiled_contrastive_loss(
        geometry.embed_image(images), images.detach(), geometry, torch.tensor(2.0), tile=tile
    ).backward()
    assert set(seen) == {(tile, tile)}
    assert len(seen) == 2 * (batch // tile) ** 2  # once forward, once backward: both directions from one walk


def test_bf16_embeddings_are_compared_in_float32_and_get_their_own_dtype_back():
    geometry, images, texts, _, _ = world("sphere", torch.float32)
    images, texts = (geometry.embed_image(x).bfloat16().requires_grad_() for x in (images, texts))
    loss = tiled_contrastive_loss(images, texts, geometry, torch.tensor(3.0), tile=5)
    loss.backward()
    plain = contrastive_loss(images.detach().float(), texts.detach().float(), geometry.similarity, torch.tensor(3.0))
    torch.testing.assert_close(loss, plain)
    assert images.grad.dtype == torch.bfloat16


def test_a_tile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="tile = 0; accepted: at least 1"):
        tiled_contrastive_loss(torch.ones(2, 3), torch.ones(2, 3), Sphere(), torch.tensor(1.0), tile=0)
