"""The properties of the topologies, measured (Table 1).

    memory       numbers that a batch of b pairs saves for the backward pass, similarities included, embeddings not;
                 printed as factors of growth for twice the pairs, twice the numbers d, twice the spheres m
    range        smallest and largest distance of pairs that are equal, opposite, near and far; no largest one if the
                 space has no bound
    triangle     share of triples, random and on one arc, with d(x, z) > d(x, y) + d(y, z); inner products become
                 distances that are 0 for equal points (1 - cos, m - tr)
    uniformity   mean distance of free embeddings after 400 steps of pushing all pairs apart over that after 200: 1 in a
                 closed space, over which the points have spread, more where they go to infinity

The paper's entries are words and orders of growth; here they are numbers. Its order b^2 d for l2 is that of a broadcast
difference, which has a separate row; ours takes one matrix product and saves b^2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.geometry import PairSimilarity, Sphere
from common.oblique import Oblique
from common.run.kept_memory import bytes_kept_for_backward
from oblique_topology.geometry import L2, ObliqueGeodesic

DECIDES = "evaluation"

BATCH, DIM, SPHERES = 64, 512, 8  # Ob(64, 8), as the paper's Table 3
NUM_TRIPLES = 4_000
PUSHED = (200, 400)  # steps


@dataclass(frozen=True)
class Topology:
    """One column of the paper's table, a row of ours.

    build: numbers per sphere -> geometry. similarity: geometry -> function of all pairs, for the memory.
    to_distance: paired similarity, number of spheres -> distances that are 0 for equal points, for the triangle.
    spherical: whether the space is a product of spheres. bounded: whether there is a largest distance.
    """

    build: Callable[[int], torch.nn.Module]
    to_distance: Callable[[torch.Tensor, int], torch.Tensor]
    similarity: Callable[[torch.nn.Module], PairSimilarity] = lambda geometry: geometry.similarity
    spherical: bool = False
    bounded: bool = True


def broadcast_similarity(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Minus the Euclidean distance of all pairs by a (num_images, num_texts, dim) difference, as Table 1 counts."""
    return -torch.linalg.vector_norm(images[:, None] - texts[None, :], dim=-1)


TOPOLOGIES = {
    "Sphere, inner product": Topology(lambda dim: Sphere(), lambda s, m: 1 - s),
    "Euclidean, l2": Topology(lambda dim: L2(), lambda s, m: -s, bounded=False),
    "Euclidean, l2, broadcast": Topology(
        lambda dim: L2(), lambda s, m: -s, similarity=lambda geometry: broadcast_similarity, bounded=False
    ),
    "Ob(64, 8), geodesic": Topology(ObliqueGeodesic, lambda s, m: -s, spherical=True),
    "Ob(64, 8), inner product": Topology(Oblique, lambda s, m: m - s, spherical=True),
}


def properties(topology: Topology, seed: int = 0) -> dict[str, float | None]:
    """All measured properties of one topology.

    Returns:
        memory_by_batch, memory_by_dim, memory_by_spheres (factors for twice as much), kept_per_pair (numbers),
        range_low, range_high (None without bound), triangle_violations (percent), spread_growth (factor).
    """
    generator = torch.Generator().manual_seed(seed)
    kept = kept_numbers(topology, BATCH, DIM, SPHERES)
    low, high = distance_range(topology, generator)
    return {
        "memory_by_batch": kept_numbers(topology, 2 * BATCH, DIM, SPHERES) / kept,
        "memory_by_dim": kept_numbers(topology, BATCH, 2 * DIM, SPHERES) / kept,
        "memory_by_spheres": kept_numbers(topology, BATCH, DIM, 2 * SPHERES) / kept,
        "kept_per_pair": kept / BATCH**2,
        "range_low": low,
        "range_high": high if topology.bounded else None,
        "triangle_violations": 100 * triangle_violations(topology, generator),
        "spread_growth": spread_growth(topology, generator),
    }


def kept_numbers(topology: Topology, batch: int, dim: int, num_spheres: int) -> int:
    """Numbers in all tensors saved for the backward pass of a batch's similarities, without the embeddings."""
    geometry = topology.build(dim // num_spheres)
    images = geometry.embed_image(torch.randn(batch, dim)).detach().requires_grad_()
    texts = geometry.embed_text(torch.randn(batch, dim)).detach().requires_grad_()
    similarity = topology.similarity(geometry)

    def scores_kept() -> torch.Tensor:
        scores = similarity(images, texts)
        return scores * scores.detach()  # a product keeps its factors

    return bytes_kept_for_backward(scores_kept, [images, texts]) // images.element_size()


@torch.no_grad()
def distance_range(topology: Topology, generator: torch.Generator) -> tuple[float, float]:
    """Smallest and largest distance, the paper's d with its sign, of equal, opposite and random points.

    Random points have norms from 0.01 to 1e6; only the plain space keeps the norms.
    """
    geometry = topology.build(DIM // SPHERES)
    points = torch.randn(200, DIM, generator=generator, dtype=torch.float64)
    points = points * torch.logspace(-2, 6, 200, dtype=torch.float64)[:, None]
    ours = geometry.embed_image(points)
    distances = torch.cat(
        [-geometry.paired_similarity(ours, geometry.embed_text(other)) for other in (points, -points, points.flip(0))]
    )
    return float(distances.min()), float(distances.max())


@torch.no_grad()
def triangle_violations(topology: Topology, generator: torch.Generator) -> float:
    """Share of triples that violate the triangle inequality: half are random, half lie in order on one arc or line."""
    geometry = topology.build(DIM // SPHERES)
    spheres = SPHERES if topology.spherical else 1
    x, z = torch.randn(2, NUM_TRIPLES, DIM, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_TRIPLES, DIM, generator=generator, dtype=torch.float64)
    half = NUM_TRIPLES // 2
    y[:half] = (geometry.embed_image(x[:half]) + geometry.embed_image(z[:half])).flatten(1)  # between the two
    x, y, z = geometry.embed_image(x), geometry.embed_image(y), geometry.embed_image(z)
    first, second, across = (
        topology.to_distance(geometry.paired_similarity(*pair), spheres) for pair in ((x, y), (y, z), (x, z))
    )
    return float((across > first + second + 1e-9).double().mean())


def spread_growth(topology: Topology, generator: torch.Generator, num_points: int = 64, dim: int = 64) -> float:
    """Mean distance of free points after 400 steps of pushing them apart over that after 200.

    The push is the denominator of InfoNCE at temperature 1, the uniformity term of the contrastive loss.
    """
    geometry = topology.build(dim // SPHERES)
    spheres = SPHERES if topology.spherical else 1
    points = torch.randn(num_points, dim, generator=generator, requires_grad=True)
    optimiser = torch.optim.Adam([points], lr=0.05)
    others = ~torch.eye(num_points, dtype=torch.bool)
    spreads = []
    for step in range(1, PUSHED[1] + 1):
        embeddings = geometry.embed_image(points)
        similarity = geometry.similarity(embeddings, embeddings)[others].view(num_points, -1)
        optimiser.zero_grad()
        similarity.logsumexp(dim=1).mean().backward()
        optimiser.step()
        if step in PUSHED:
            spreads.append(float(topology.to_distance(similarity.detach(), spheres).mean()))
    return spreads[1] / spreads[0]
