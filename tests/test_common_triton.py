"""The Triton kernels of InfoNCE: interpreted on the CPU, compiled for two GPUs, and what they refuse."""

import copy
import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import TestCase

import numpy as np
import pytest
import torch
from refusals import refused
from test_common_tiled import CLOSED

from common.geometry import Sphere
from common.info_nce import Distillation, contrastive_loss
from common.tiled import KERNEL_TARGETS, geometry_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import ObliqueGeodesic

triton = pytest.importorskip("triton", reason="triton is in torch's wheels for Linux only")

import interpreted_kernels
from interpreted_kernels import GEOMETRIES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.triton_tiles import SIZES, STEPS, formula_source, residuals_kernel, sums_kernel, tile_kernel

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = [10 * major + minor for major, minor in KERNEL_TARGETS]


# interpreted

# oblique products and the L2 distance go down the same paths as the sphere's and the Euclidean distance
INTERPRETED = """
import interpreted_kernels
del interpreted_kernels.GEOMETRIES["oblique"], interpreted_kernels.GEOMETRIES["l2"]
interpreted_kernels.main()
"""


@pytest.fixture(scope="module")
def interpreted():
    """What interpreted_kernels.py prints; NaN and log(0) are among its cases."""
    folders = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": folders},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # an older torch prints of its processes first


def test_value_and_every_gradient_are_those_of_the_plain_loss(interpreted):
    """A curvature's is a sum over all pairs in float32, which loses digits in tiles of torch operations, too."""
    assert len(interpreted["geometries"]) == 6
    for result in interpreted["geometries"].values():
        loss, *gradients = result["float64"]
        assert loss < 1e-6
        assert max(gradients[:3]) < 1e-5
        assert max(gradients[3:], default=0) < 1e-4
        assert result["is_repeated"]  # to the last bit


def test_two_processes_give_the_gradients_of_the_whole_batch(interpreted):
    assert len(interpreted["processes"]) == 4
    for errors in interpreted["processes"]:
        assert errors[0] < 1e-6
        assert max(errors) < 1e-5


def test_a_queue_is_added_in_tiles(interpreted):
    errors = interpreted["with_queue"]
    assert max(errors[:4]) < 1e-5
    assert max(errors[4:]) < 1e-4


# what is frozen changes nothing for the rest; a batch that is almost solved keeps its digits; angles are atan's
@pytest.mark.parametrize(("case", "bound"), [("frozen", 1e-5), ("almost_solved", 2e-5), ("angles", 5e-7)])
def test_errors_stay_below_their_bounds(interpreted, case, bound):
    assert np.max(interpreted[case]) < bound


def test_nan_stays_and_one_pair_has_no_loss(interpreted):
    assert interpreted["not_finite"] == {"nan": "nan", "one pair": [0.0, 0.0, 0.0, 0.0]}


def test_half_precision_rounds_the_factors_and_nothing_else(interpreted):
    assert interpreted["in_half"]["loss"][0] < 1e-6
    assert 1e-5 < max(interpreted["in_half"]["gradients"]) < 1e-2


# formulas


@pytest.mark.parametrize("name", sorted(CLOSED))
def test_a_traced_formula_is_the_torch_formula_on_every_chord(name):
    geometry = CLOSED[name]()
    functions = SimpleNamespace(where=torch.where, sqrt=torch.sqrt, log=torch.log)
    scope = {"tl": functions, "arctangent": torch.atan}
    exec(formula_source(geometry), scope)
    chords = torch.tensor([-1e-7, 0.0, 1e-8, 0.3, 2.0, 50.0, torch.nan])
    expected = geometry.distance_of_chords(chords.clone(), True)
    for actual, wanted in zip(scope["distance_and_inverse_slope"](chords), expected):
        torch.testing.assert_close(actual, wanted, equal_nan=True)


# compiled for a GPU that is not here


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", [sums_kernel, residuals_kernel], ids=["sums", "residuals"])
@pytest.mark.parametrize(
    "geometry",
    [*(pytest.param(g, marks=pytest.mark.slow) for g in (Sphere(), Elliptic())), Hyperbolic(512, squared=True)],
    ids=lambda geometry: geometry.name,
)
def test_kernels_keep_a_block_in_registers(geometry, kernel, capability, tmp_path, monkeypatch):
    """Of inner products and of the two longest formulas. Spilt registers lie on the stack."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    of_geometry, sizes = tile_kernel(geometry), dict(SIZES)
    options = {"num_warps": sizes.pop("num_warps")}
    constants = {"FORMULA": of_geometry.formula, "COUPLING": of_geometry.coupling, **sizes}
    if kernel is sums_kernel:
        constants["STEPS"] = STEPS
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(("n", "m", "first", "last", "shift"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [number for number, name in enumerate(kernel.arg_names) if types[name].startswith("*") or name == "m"]
    source = ASTSource(
        fn=kernel, signature=types, constexprs=constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )  # fmt: skip
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (tmp_path / "kernel.cubin").write_bytes(result.asm["cubin"])
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(reader), "-res-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True)
    (figures,) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage.stdout + usage.stderr)
    registers, stack, local = map(int, figures)
    assert 0 < registers <= 128
    assert (stack, local) == (0, 0)


# on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_gpu_computes_what_tiles_do(name):
    geometry, logit_scale = GEOMETRIES[name]
    embeddings = [side.cuda() for side in interpreted_kernels.embeddings(geometry, 300)]
    geometry = copy.deepcopy(geometry).cuda()
    of, errors = partial(interpreted_kernels.of, geometry=geometry, sides=embeddings), interpreted_kernels.errors
    exact = of(contrastive_loss, logit_scale=logit_scale, dtype=torch.float64)
    for half in {False, geometry.is_inner_product}:
        options = {"logit_scale": logit_scale, "tile": 140, "bf16_product": half}
        tiles, kernels, again = (of(geometry_loss, kernel=name, **options) for name in ("torch", "triton", "triton"))
        assert max(errors(kernels, exact)) < max(1e-5, *errors(tiles, exact))
        assert all(torch.equal(*pair) for pair in zip(kernels, again))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["sphere", "hyperbolic squared"])
def test_the_loss_and_its_gradients_replay_as_a_cuda_graph(name):
    geometry, logit_scale = copy.deepcopy(GEOMETRIES[name])
    leaves = [side.cuda().requires_grad_() for side in interpreted_kernels.embeddings(geometry)]
    geometry, scale = geometry.cuda(), torch.tensor(logit_scale, device="cuda")

    def gradients():
        loss = geometry_loss(*leaves, geometry, scale, tile=140, kernel="triton")
        return torch.autograd.grad(loss, leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gradients()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(leaf.flip(0))
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(replayed, gradients()))


# which runs


def sides(geometry=None, dim=24, dtype=torch.float32):
    geometry = geometry or Sphere()
    torch.manual_seed(0)
    return [geometry.embed_image(torch.randn(6, dim, dtype=dtype)).requires_grad_() for _ in range(2)]


class Sine(Elliptic):
    def distance_of_chords(self, chords, with_slope):
        return chords.sin(), chords


class OneBound(Elliptic):
    def distance_of_chords(self, chords, with_slope):
        return chords.clamp(0), chords


REFUSED = {
    "device": (Sphere(), {}, {}, "embeddings on cpu; the kernel runs on CUDA"),
    "ids": (Sphere(), {}, {"ids": torch.arange(6)}, "ids or distillation; the kernel has one positive a row"),
    "dtype": (Sphere(), {"dtype": torch.float64}, {}, "embeddings in float64; the kernel computes in float32"),
    "no chords": (ObliqueGeodesic(4), {}, {}, "geometry oblique_geodesic, which has no formula for its distance"),
    "bound": (OneBound(), {}, {}, "geometry elliptic, whose distance needs clamp, which the kernel does not compute"),
    "formula": (Sine(), {}, {}, "geometry elliptic, whose distance needs sin, which the kernel does not compute"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_does_not_have_is_named_with_what_to_set(case, monkeypatch):
    geometry, shape, options, reason = REFUSED[case]
    if case != "device":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    message = re.escape(f"kernel = triton (optim.loss_kernel) with {reason}") + ".*; expected: auto or torch"
    refused(
        (
            message,
            lambda: geometry_loss(
                *sides(geometry, **shape), geometry, torch.tensor(2.0), tile=4, kernel="triton", **options
            ),
        )
    )


def test_soft_targets_and_a_missing_package_are_refused_too(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    images, texts = sides()
    loss = partial(geometry_loss, images, texts, Sphere(), torch.tensor(2.0), tile=4)
    keys = Distillation(images, texts, 0.4)
    refused(("ids or distillation", lambda: loss(distillation=keys, kernel="triton")))
    monkeypatch.setitem(sys.modules, "common.triton_tiles", None)
    refused(
        (r"no package triton .*; pip install triton; expected: auto or torch", lambda: loss(kernel="triton")),
        ("kernel = 'cuda'; expected one of: torch, auto, triton", lambda: loss(kernel="cuda")),
    )


def test_auto_takes_tiles_on_a_cpu_and_logs_why():
    images, texts = sides(Euclidean())
    with TestCase().assertLogs("common.tiled", logging.INFO) as logged:
        loss = geometry_loss(images, texts, Euclidean(), torch.tensor(2.0), tile=4, kernel="auto")
    assert torch.equal(loss, geometry_loss(images, texts, Euclidean(), torch.tensor(2.0), tile=4))
    assert "(optim.loss_kernel = auto): embeddings on cpu; the kernel runs on CUDA" in logged.output[0]
