"""What a CPU computes, on a CUDA device: losses of every geometry, GeoMM's pools, rows of all papers.

Run by `make test-gpu`. All else is the same code on tensors that happen to lie there.
"""

import copy
import importlib
import json
import shutil
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from test_geomm_pool import BATCH, DIM, draw, full_pool
from test_info_nce_matrix import GEOMETRIES, Pairs

from common import tiled
from common.geometry import unit
from common.pool import pool_info_nce
from common.reproduce.rows import Job, run_row
from common.run.training import Run
from common.tiled import geometry_loss
from geomm.geodesic import ATTACH, LOCAL, sample_distance
from geomm.train import CODE

DEVICE = "cuda"
fake_cuda = sys.modules.get("fake_cuda")
GRAPH = ["start.row=", "method.queue_size=24"]
ROWS = {  # a row of every method -> settings
    "oblique_topology/configs/table2_multi.yaml": [],
    "euclip/configs/table4_euclip.yaml": [],
    "euclip/configs/table4_meru.yaml": ["optim.loss_tile=4"],
    "contrastive_basics/configs/beyond_sigmoid.yaml": [],
    "contrastive_basics/configs/negatives_queue.yaml": [],
    "contrastive_basics/configs/vision_simclr.yaml": [],
    "contrastive_basics/configs/vision_simsiam.yaml": [],
    "contrastive_basics/configs/vision_moco_v2.yaml": [],
    "contrastive_basics/configs/vision_moco_v3.yaml": [],
    "geomm/configs/clip_geo.yaml": GRAPH,
    "geomm/configs/flip_geo.yaml": GRAPH,
    "geomm/configs/albef_geo.yaml": GRAPH,
    "geomm/configs/tcl_geo.yaml": GRAPH,
    "geomm/configs/mafa_geo.yaml": [
        "method.queue_size=24",
        "data.num_train=160",
        "method.group_queue=96",
    ],  # an epoch is longer than the run
    "geomm/configs/vision_moco_v2_geo.yaml": ["method.queue_size=24"],
    "geomm/configs/vision_swav_geo.yaml": [],
}
# random draws on the device, whose generator is another on a GPU: masked patches, negatives for matching
DRAWS = ("flip", "albef", "tcl", "mafa")
STEPS = 5  # the third one builds a graph, the fourth one is plain
FEW = [f"optim.steps={STEPS}", "run.log_every=1", "run.evaluate_every=0", "run.save_every=0"]


def on_cuda(test):
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needed(test))


def equal_on_both(compute):
    """The tensors of `compute(device)`, in float64, are those of the CPU."""
    for here, there in zip(compute("cpu"), compute(DEVICE), strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=1e-11)


@on_cuda
@pytest.mark.parametrize("tile", [0, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_losses_and_gradients(name, tile):
    def compute(device):
        model = Pairs(GEOMETRIES[name]()).double().to(device)
        ids = torch.tensor([0, 1, 2, 0, 4, 5, 6, 1, 8, -1, -1, 11], device=device)
        images, texts, logit_scale = model(torch.arange(len(ids), device=device))
        loss = geometry_loss(images, texts, model.geometry, logit_scale, ids=ids, tile=tile)
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    equal_on_both(compute)


@on_cuda
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("attach", ATTACH)
def test_pools_with_a_separate_graph(attach, local):
    def compute(device):
        pool = copy.deepcopy(full_pool(attach, local=local)).to(device)
        assert pool.rebuild(0)
        queries, keys = draw(3, BATCH, DIM).to(device).requires_grad_(), draw(2, BATCH, DIM).to(device)
        candidates, scale = pool.open(keys), torch.tensor(7.0, dtype=torch.float64, device=device)
        loss, logits = pool_info_nce(candidates, queries, scale, candidates.columns, keys, alpha=0.4)
        values = loss, logits, candidates.similarity(queries), *torch.autograd.grad(loss, queries)
        pool.insert(keys)
        return *values, pool.paths, pool.offset

    equal_on_both(compute)


@pytest.fixture(scope="module")
def parents_of_mafa(tmp_path_factory):
    """The towers that it starts from, and an ALBEF as its discriminator."""
    runs = tmp_path_factory.mktemp("runs")
    run_row(Job(CODE, "finetuned_crowded_albef.yaml", "smoke", 0, [*FEW, "optim.warmup_steps=2"], runs))
    towers, albef = (next(runs.glob(f"geomm/{row}-smoke-*/seed0")) for row in ("towers", "finetuned_crowded_albef"))
    return [f"start.run={towers}", f"start.discriminator_run={albef}"]


@pytest.fixture
def trained(monkeypatch, request):
    """Trains a row at smoke scale in this process, and gives the logged losses."""

    def train(row, folder, *settings, cpu=False, resume=False):
        paper = row.split("/")[0]
        script = "pretrain" if "/vision_" in row else "train"
        arguments = [f"{paper}/{script}.py", "--config", row, "--scale", "smoke", "--output-dir", str(folder)]
        warmup = "optim.warmup_share=0.5" if script == "pretrain" else "optim.warmup_steps=2"
        parents = request.getfixturevalue("parents_of_mafa") if "mafa" in row else []
        arguments += [*(["--resume"] if resume else []), *FEW, warmup, *ROWS[row], *parents, *settings]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(cpu).lower())
        AcceleratorState._reset_state(reset_partial_state=True)
        importlib.import_module(f"{paper}.{script}").main()
        lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["event"] == "train"]

    return train


@on_cuda
@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_each_method_trains_and_evaluates(row, trained, tmp_path, monkeypatch):
    """In float32 and bfloat16. In a step without a log line the host waits for the device once.

    Steps that build a graph, order an epoch, validate or save are apart. Mined pairs size the batch of MAFA's fusion,
    so there it waits once more. The clusters of a graph change by the last bit of a feature, and with them the loss by
    percents, in host memory as well: rows with one are compared to the digits before it, and their graphs above, in
    float64; behind it to 5 % in host memory, where the kernels are the CPU's.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its convolutions round to 10 bits
    expected = trained(row, tmp_path / "cpu", "run.test=false", cpu=True)
    assert len(expected) == STEPS
    bf16 = trained(row, tmp_path / "bf16", "run.mixed_precision=bf16")
    assert bf16[0] == pytest.approx(expected[0], rel=0.05)
    assert (tmp_path / "bf16" / "evaluation.json").exists()
    compared = slice(2 if "_geo" in row else STEPS)
    float32 = trained(row, tmp_path / "float32")
    draws_elsewhere = not fake_cuda and any(name in row for name in DRAWS)
    assert float32[compared] == pytest.approx(expected[compared], rel=0.05 if draws_elsewhere else 2e-3, abs=1e-5)
    assert not fake_cuda or float32 == pytest.approx(expected, rel=0.05)
    if fake_cuda:
        works = watched_steps(monkeypatch)
        trained(row, tmp_path / "watched", f"run.log_every={STEPS}", "run.test=false")
        plain = works[3]
        assert plain.num_waits <= (2 if "mafa" in row else 1), plain.waits
        assert plain.num_kernels > 100


def watched_steps(monkeypatch):
    """The work of each step of the next runs, from the batch until the loop asks for the next one."""
    works, plain_steps = [], Run.steps

    def counted_steps(run):
        steps = plain_steps(run)
        for _ in range(STEPS):
            with fake_cuda.counted() as work:
                step = next(steps)
                yield step
            works.append(work)
        yield from steps

    monkeypatch.setattr(Run, "steps", counted_steps)
    return works


@on_cuda
def test_a_run_with_workers_and_pinned_memory_resumes(trained, tmp_path):
    row, settings = "geomm/configs/clip_geo.yaml", ("run.num_workers=1", "run.save_every=2")
    expected = trained(row, tmp_path, *settings)
    assert len(expected) == STEPS
    (last,) = tmp_path.glob(f"checkpoints/*{STEPS}")
    shutil.rmtree(last)
    assert trained(row, tmp_path, *settings, resume=True) == expected


@on_cuda
def test_exact_distances_of_samples():
    rows, queries = unit(draw(0, 30, DIM)), unit(draw(1, 4, DIM))
    expected = sample_distance(queries, rows, 3)
    torch.testing.assert_close(sample_distance(queries.to(DEVICE), rows.to(DEVICE), 3), expected)


@on_cuda
def test_what_is_wrong_on_a_device_fails():
    there = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        there + torch.ones(2)
    with pytest.raises(TypeError, match="can't convert cuda"):
        there.numpy()
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.rand(2, device=DEVICE, generator=torch.Generator())


@on_cuda
@pytest.mark.skipif(not fake_cuda, reason="counts on the device in host memory: tests/test_fake_cuda.py")
def test_waits_and_work_are_counted():
    left, right = torch.ones(2, 3, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    with fake_cuda.counted() as work:
        assert (left @ right).sum().item() == 24
    assert work.waits == {("aten::_local_scalar_dense", work.waits.most_common()[0][0][1]): 1}
    assert work.product_flops == 2 * 2 * 3 * 4
    assert work.bytes_moved >= 4 * (2 * 3 + 3 * 4 + 2 * (2 * 4) + 1)
    with fake_cuda.counted() as work:
        left[left > 1]  # its size depends on values
        torch.ones(2).to(DEVICE)
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert work.num_waits == 2


@on_cuda
@pytest.mark.skipif(not fake_cuda, reason="counts on the device in host memory: tests/test_fake_cuda.py")
def test_rows_of_the_benchmark_run_and_their_losses_wait_for_nothing(tmp_path, monkeypatch):
    """As CUDA graphs demand. Without what only a GPU has: Triton's kernels, the graphs, statistics of its memory."""
    pytest.importorskip("triton")
    triton_tiles = importlib.import_module("common.triton_tiles")
    loss = importlib.import_module("scripts.benchmarks.loss")
    monkeypatch.setattr(triton_tiles.TileKernel, "_launch", lambda *arguments, **constants: None)
    monkeypatch.setattr(loss, "of_device", lambda step: step)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 1)

    def kernel_for(kernel, geometry, *_):
        return None if kernel == "torch" or geometry.name == "oblique_geodesic" else triton_tiles.tile_kernel(geometry)

    monkeypatch.setattr(tiled, "_kernel_for", kernel_for)
    rows = {name: row for name, row in loss.LOSS_BENCHMARKS.items() if "gpu" in name}
    assert len(rows) == 18
    for name, row in rows.items():
        compared = row(True, tmp_path)
        compared.reference()
        with fake_cuda.counted() as work:
            compared.ours()
        assert not work.waits, name
