"""The Triton kernels of InfoNCE: interpreted on the CPU, compiled for two GPUs, and what they refuse."""

import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
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

from common import triton_info_nce
from common.triton_chords import BLOCKS, chord_kernel, chords_kernel, formula_source
from common.triton_info_nce import blocks, padded

ROOT = Path(__file__).resolve().parents[1]
SHARED_MEMORY = {80: 166_912, 90: 232_448}  # bytes that a block may have


# interpreted


@pytest.fixture(scope="module")
def interpreted():
    """What interpreted_kernels.py prints; NaN and log(0) are among its cases."""
    folders = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import interpreted_kernels; interpreted_kernels.main()"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": folders},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_value_and_every_gradient_are_those_of_the_plain_loss(interpreted):
    """The curvature's gradient by squared Lorentz distances is off by 2e-5 in tiles of torch operations, too."""
    assert len(interpreted["geometries"]) == 7
    for result in interpreted["geometries"].values():
        assert result["float64"][0] < 1e-6
        assert max(result["float64"]) < max(1e-5, *result["tiles"])
        assert result["is_repeated"]  # to the last bit


def test_two_processes_give_the_gradients_of_the_whole_batch(interpreted):
    assert len(interpreted["processes"]) == 4
    for errors in interpreted["processes"]:
        assert errors[0] < 1e-6
        assert max(errors) < 1e-5


def test_a_queue_is_added_in_tiles(interpreted):
    result = interpreted["with_queue"]
    assert max(result["float64"]) < max(1e-5, *result["tiles"])


def test_what_is_frozen_changes_nothing_for_the_rest(interpreted):
    assert max(interpreted["frozen"]) < 1e-5


def test_a_batch_that_is_almost_solved_keeps_its_digits(interpreted):
    assert max(interpreted["almost_solved"]) < 2e-5


def test_nan_stays_and_one_pair_has_no_loss(interpreted):
    assert interpreted["not_finite"] == {"nan": "nan", "one pair": [0.0, 0.0, 0.0, 0.0]}


def test_half_precision_rounds_the_factors_and_nothing_else(interpreted):
    assert interpreted["in_half"]["loss"][0] < 1e-6
    assert 1e-5 < max(interpreted["in_half"]["gradients"]) < 1e-3


# formulas


@pytest.mark.parametrize("name", sorted(CLOSED.keys() - {"elliptic"}))
def test_a_traced_formula_is_the_torch_formula_on_every_chord(name):
    geometry = CLOSED[name]()
    scope = {"tl": SimpleNamespace(where=torch.where, sqrt=torch.sqrt, log=torch.log)}
    exec(formula_source(geometry), scope)
    chords = torch.tensor([-1e-7, 0.0, 1e-8, 0.3, 2.0, 50.0, torch.nan])
    expected = geometry.distance_of_chords(chords.clone(), True)
    for actual, wanted in zip(scope["distance_and_inverse_slope"](chords), expected):
        torch.testing.assert_close(actual, wanted, equal_nan=True)


# compiled for a GPU that is not here


def compiled(kernel, capability, types, constants, options, folder):
    """The kernel for a target, and what its code takes: (registers, stack, local bytes)."""
    types = dict.fromkeys(kernel.arg_names, "*fp32") | types | dict.fromkeys(constants, "constexpr")
    aligned = [number for number, name in enumerate(kernel.arg_names) if types[name].startswith("*")]
    source = ASTSource(
        fn=kernel, signature=types, constexprs=constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )  # fmt: skip
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (folder / "kernel.cubin").write_bytes(result.asm["cubin"])
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(reader), "-res-usage", str(folder / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True)
    (figures,) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage.stdout + usage.stderr)
    return result, tuple(map(int, figures))


@pytest.mark.parametrize("width", [512, 256])
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("name", ["sums_kernel", "gradients_kernel"])
def test_pair_kernels_fit_the_device(name, capability, width, tmp_path, monkeypatch):
    """Spilt registers lie on the stack."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_info_nce, name)
    sizes = blocks(kernel, width, capability)
    options = {key: sizes.pop(key) for key in ("num_warps", "num_stages")}
    types = dict.fromkeys(("n", "m", "shift"), "i32") | dict.fromkeys(("x", "y"), "*bf16")
    result, (registers, stack, local) = compiled(kernel, capability, types, {"D": width, **sizes}, options, tmp_path)
    assert result.metadata.shared <= SHARED_MEMORY[capability]
    assert 0 < registers <= 255
    assert (stack, local) == (0, 0)
    warp_group, warp = (instruction in result.asm["ptx"] for instruction in ("wgmma.mma_async", "mma.sync"))
    assert (warp_group, warp) == (capability == 90, capability == 80)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_kernel_of_the_longest_formula_keeps_a_pair_in_registers(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    of_geometry = chord_kernel(Hyperbolic(512, squared=True))
    constants = {
        "FORMULA": of_geometry.formula,
        "COUPLING": of_geometry.coupling,
        "BM": BLOCKS["BM"],
        "BN": BLOCKS["BN"],
    }
    options, types = {"num_warps": BLOCKS["num_warps"]}, dict.fromkeys(("n", "m"), "i32")
    _, (registers, stack, local) = compiled(chords_kernel, capability, types, constants, options, tmp_path)
    assert 0 < registers <= 128
    assert (stack, local) == (0, 0)


def test_the_compiled_targets_are_those_that_may_run():
    assert [10 * major + minor for major, minor in KERNEL_TARGETS] == list(SHARED_MEMORY)


@pytest.mark.parametrize(("dim", "width"), [(3, 16), (16, 16), (264, 512), (512, 512)])
def test_vectors_get_a_width_that_the_kernels_have(dim, width):
    assert padded(dim) == width


# on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_gpu_computes_what_tiles_do(name):
    geometry, logit_scale = GEOMETRIES[name]
    embeddings = [side.cuda() for side in interpreted_kernels.embeddings(geometry, 300)]
    of, errors = partial(interpreted_kernels.of, geometry=geometry.cuda(), sides=embeddings), interpreted_kernels.errors
    options = {"logit_scale": logit_scale, "tile": 128, "bf16_product": geometry.is_inner_product}
    tiles, kernels, again = (of(geometry_loss, kernel=kernel, **options) for kernel in ("torch", "triton", "triton"))
    if geometry.is_inner_product:
        assert max(errors(kernels, tiles)) < 0.02
    else:
        exact = of(contrastive_loss, logit_scale=logit_scale, dtype=torch.float64)
        assert max(errors(kernels, exact)) < max(1e-5, *errors(tiles, exact))
    assert all(torch.equal(*pair) for pair in zip(kernels, again))


# which runs


def sides(geometry=None, dim=24, dtype=torch.float32):
    geometry = geometry or Sphere()
    torch.manual_seed(0)
    return [geometry.embed_image(torch.randn(6, dim, dtype=dtype)).requires_grad_() for _ in range(2)]


HALF = {"bf16_product": True}
REFUSED = {
    "device": (Sphere(), {}, HALF, "embeddings on cpu; the kernel runs on CUDA"),
    "ids": (Sphere(), {}, {"ids": torch.arange(6), **HALF}, "ids or distillation; the kernel has one positive a row"),
    "dtype": (Sphere(), {"dtype": torch.float64}, {}, "embeddings in float64; the kernel computes in float32"),
    "float32": (Sphere(), {}, {}, "products in float32, which tiles multiply faster; optim.loss_bf16_product = true"),
    "dim": (Sphere(), {"dim": 513}, HALF, "embeddings of 513 numbers; the kernel has at most 512"),
    "no chords": (ObliqueGeodesic(4), {}, {}, "geometry oblique_geodesic, which has no formula for its distance"),
    "formula": (
        Elliptic(),
        {},
        {},
        "geometry elliptic, whose distance needs clamp_, which the kernel does not compute",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_does_not_have_is_named_with_what_to_set(case, monkeypatch):
    geometry, shape, options, reason = REFUSED[case]
    if case != "device":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    message = re.escape(f"kernel = triton (optim.loss_kernel) with {reason}") + ".*; expected: auto or torch"
    with pytest.raises(ValueError, match=message):
        geometry_loss(*sides(geometry, **shape), geometry, torch.tensor(2.0), tile=4, kernel="triton", **options)


def test_soft_targets_and_a_missing_package_are_refused_too(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    images, texts = sides()
    keys = Distillation(images, texts, 0.4)
    with pytest.raises(ValueError, match="ids or distillation"):
        geometry_loss(images, texts, Sphere(), torch.tensor(2.0), distillation=keys, tile=4, kernel="triton", **HALF)
    monkeypatch.setitem(sys.modules, "common.triton_chords", None)
    monkeypatch.delattr("common.triton_chords")
    with pytest.raises(ValueError, match=r"no package triton .*; pip install triton; expected: auto or torch"):
        geometry_loss(images, texts, Sphere(), torch.tensor(2.0), tile=4, kernel="triton")
    with pytest.raises(ValueError, match="kernel = 'cuda'; expected one of: torch, auto, triton"):
        geometry_loss(images, texts, Sphere(), torch.tensor(2.0), tile=4, kernel="cuda")


def test_auto_takes_tiles_on_a_cpu_and_logs_why(caplog):
    images, texts = sides(Euclidean())
    with caplog.at_level(logging.INFO, logger="common.tiled"):
        loss = geometry_loss(images, texts, Euclidean(), torch.tensor(2.0), tile=4, kernel="auto")
    assert torch.equal(loss, geometry_loss(images, texts, Euclidean(), torch.tensor(2.0), tile=4))
    (record,) = caplog.records
    assert record.getMessage() == (
        "the loss runs in tiles of torch operations (optim.loss_kernel = auto): embeddings on cpu; the kernel runs on "
        "CUDA"
    )
