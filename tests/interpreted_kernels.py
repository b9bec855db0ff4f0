"""The Triton kernels on CPU tensors: run in a process with TRITON_INTERPRET=1, prints the results as JSON.

Errors are those of [loss, images, texts, logit scale, parameters of the geometry], each relative to its largest entry.
"""

import copy
import json

import torch
import triton
import triton.language as tl
from comparison import Comparison
from processes import in_processes

from common import triton_tiles
from common.distributed import mean_over_processes, rank, world_size
from common.geometry import Sphere, unit
from common.info_nce import QueuedPairs, contrastive_loss
from common.oblique import Oblique
from common.tiled import geometry_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import L2

BATCH, DIM = 44, 24  # no multiple of a block; tiles of 34 rows and columns have whole and partial ones
GEOMETRIES = {  # with a logit scale that spreads the logits
    "sphere": (Sphere(), 14.0),
    "oblique": (Oblique(4), 2.0),
    "elliptic": (Elliptic(), 8.0),
    "euclidean": (Euclidean(squared=False), 14.0),
    "euclidean squared": (Euclidean(squared=True), 14.0),
    "l2": (L2(), 1.5),
    "hyperbolic": (Hyperbolic(DIM, squared=False), 14.0),
    "hyperbolic squared": (Hyperbolic(DIM, squared=True), 14.0),
}
KERNEL = {"tile": 34, "kernel": "triton"}


def embeddings(geometry, batch=BATCH):
    torch.manual_seed(0)
    features = torch.randn(batch, DIM)
    with torch.no_grad():
        return geometry.embed_image(features), geometry.embed_text(features + 0.7 * torch.randn(batch, DIM))


def of(loss, geometry, sides, logit_scale, dtype=torch.float32, **options):
    """Loss and all gradients of this process's rows, averaged over processes as DDP does it."""
    share = torch.arange(len(sides[0])).chunk(world_size())[rank()]
    converted = copy.deepcopy(geometry).to(dtype)
    leaves = [side.detach().to(dtype, copy=True).requires_grad_() for side in sides]
    leaves += [
        torch.tensor(logit_scale, dtype=dtype, device=leaves[0].device, requires_grad=True),
        *converted.parameters(),
    ]
    value = loss(leaves[0][share], leaves[1][share], converted, leaves[2], **options)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return [mean_over_processes(part.detach()) for part in (value, *gradients)]


def errors(actual, expected):
    return [
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in zip(actual, expected)
    ]


def of_geometry(name):
    geometry, logit_scale = GEOMETRIES[name]
    sides = embeddings(geometry)
    exact = of(contrastive_loss, geometry, sides, logit_scale, torch.float64)
    by_kernel, again = (of(geometry_loss, geometry, sides, logit_scale, **KERNEL) for _ in range(2))
    return {
        "is_repeated": all(torch.equal(*pair) for pair in zip(by_kernel, again)),
        "float64": errors(by_kernel, exact),
    }


def of_a_process(names):
    """Its rows against the columns of all processes."""
    results = []
    for name in names:
        geometry, logit_scale = GEOMETRIES[name]
        results.append(of(geometry_loss, geometry, embeddings(geometry), logit_scale, **KERNEL))
    return results


def in_half():
    sides, scale = embeddings(Sphere()), torch.tensor(14.0)

    def rounded(x, y):  # the scale multiplies the texts before they are rounded
        return Sphere().similarity(x.bfloat16(), (scale * y).bfloat16()) / scale

    same = Comparison(rounded, Sphere().paired_similarity)
    by_kernel = of(geometry_loss, Sphere(), sides, 14.0, bf16_product=True, **KERNEL)
    return {
        "loss": errors(by_kernel[:1], [contrastive_loss(*sides, same, scale)]),
        "gradients": errors(by_kernel, of(contrastive_loss, Sphere(), sides, 14.0))[1:],
    }


def with_queue():
    geometry, logit_scale = GEOMETRIES["hyperbolic squared"]
    sides, old = embeddings(geometry), embeddings(geometry, 9)
    queue = QueuedPairs(old[0], old[1].flip(0), torch.arange(9))
    exact = of(contrastive_loss, geometry, sides, logit_scale, torch.float64, queue=QueuedPairs(*map(_double, queue)))
    by_kernel = of(geometry_loss, geometry, sides, logit_scale, queue=queue, **KERNEL | {"tile": 32})
    return errors(by_kernel, exact)


def _double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def frozen():
    """Only the logit scale trains, or only the texts."""
    results = []
    for name in ("sphere", "euclidean"):
        geometry, logit_scale = GEOMETRIES[name]
        images, texts = embeddings(geometry)
        expected = of(geometry_loss, geometry, (images, texts), logit_scale, tile=KERNEL["tile"])
        scale = torch.tensor(logit_scale, requires_grad=True)
        geometry_loss(images, texts, geometry, scale, **KERNEL).backward()
        texts.requires_grad_()
        geometry_loss(images, texts, geometry, scale.detach(), **KERNEL).backward()
        results += errors([scale.grad, texts.grad], [expected[3], expected[2]])
    return results


def almost_solved():
    """Rows whose partner dominates: 1 - p and log sum exp - l."""
    images = unit(torch.randn(70, 256))
    sides = images, unit(images + 0.02 * torch.randn(70, 256))
    by_kernel = of(geometry_loss, Sphere(), sides, 20.0, **KERNEL)
    return errors(by_kernel, of(contrastive_loss, Sphere(), sides, 20.0, torch.float64))


def not_finite():
    """Of a batch with a NaN, and of one pair, which has no other candidates."""
    images, texts = embeddings(Sphere())
    images[3, 2] = torch.nan
    one = of(geometry_loss, Sphere(), (images[:1], texts[:1]), 14.0, **KERNEL)
    loss = geometry_loss(images, texts, Sphere(), torch.tensor(14.0), **KERNEL)
    return {"nan": str(float(loss)), "one pair": [float(part.abs().max()) for part in one]}


@triton.jit
def angles_kernel(tangents, angles, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(angles + places, triton_tiles.arctangent(tl.load(tangents + places)))


def angles():
    """Largest error of the arc tangents of 1,024 numbers, also of 0, of infinite ones and of NaN."""
    tangents = torch.randn(1024) / torch.randn(1024)
    tangents[:6] = torch.tensor([0, 1, -1, torch.inf, -torch.inf, torch.nan])
    result = torch.empty(1024)
    angles_kernel[1,](tangents, result, N=1024)
    torch.testing.assert_close(result.isnan(), tangents.isnan())
    return float((result.double() - tangents.double().atan()).abs().nan_to_num().max())


def main():
    torch.set_num_threads(1)
    # fewer programs: the interpreter takes its time for each
    triton_tiles.SIZES, triton_tiles.STEPS = {"BM": 16, "BN": 32, "num_warps": 4}, 2
    results = {"geometries": {name: of_geometry(name) for name in GEOMETRIES}}
    names = ["sphere", "hyperbolic"]
    whole = []
    for geometry, logit_scale in (GEOMETRIES[name] for name in names):
        whole.append(of(contrastive_loss, geometry, embeddings(geometry), logit_scale, torch.float64))
    shares = in_processes(2, of_a_process, names, method="fork")
    results["processes"] = [errors(*pair) for share in shares for pair in zip(share, whole)]
    for function in (with_queue, frozen, almost_solved, not_finite, in_half, angles):
        results[function.__name__] = function()
    print(json.dumps(results))
