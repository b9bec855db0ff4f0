"""What a CPU computes, on a CUDA device: losses of every geometry, GeoMM's pools, rows of all papers.

Run by `make test-gpu`. All else is the same code on tensors that happen to lie there.
"""

import copy
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from test_geomm_pool import BATCH, DIM, draw, full_pool
from test_info_nce_matrix import GEOMETRIES, Pairs

from common.base.config import load_row
from common.base.provenance import ROOT
from common.pool import pool_info_nce
from common.tiled import geometry_loss
from geomm.geodesic import ATTACH, LOCAL

DEVICE = "cuda"
ROWS = {  # config -> settings
    "oblique_topology/configs/table2_multi.yaml": [],
    "euclip/configs/table4_euclip.yaml": [],
    "euclip/configs/table4_meru.yaml": ["optim.loss_tile=4"],
    "geomm/configs/albef_geo.yaml": ["start.row=", "method.queue_size=24"],  # a graph from the third step on
    "geomm/configs/tcl_geo.yaml": ["start.row=", "method.queue_size=24"],
    "contrastive_basics/configs/negatives_queue.yaml": [],
}
FEW = ["optim.steps=3", "optim.warmup_steps=2", "run.log_every=1", "run.evaluate_every=0", "run.save_every=0"]


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


def losses(row, folder, precision, **variables):
    few = [*FEW, f"run.mixed_precision={precision}", *ROWS[row]]
    command = [sys.executable, f"{row.split('/')[0]}/train.py", "--config", row, "--scale", "smoke", *few]
    done = subprocess.run(
        [*command, "--output-dir", folder], cwd=ROOT, capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "train"]


@pytest.mark.parametrize("row", ROWS)
def test_the_settings_of_the_runs_are_accepted(row):
    paper = row.split("/")[0]
    config_class = importlib.import_module(f"{paper}.config").Config
    config = load_row(config_class, ROOT / paper, ROOT / row, "smoke", [*FEW, *ROWS[row]])
    assert config.optim.steps == 3


@on_cuda
@pytest.mark.parametrize("row", ROWS)
def test_runs(row, tmp_path):
    expected = losses(row, tmp_path / "cpu", "no", ACCELERATE_USE_CPU="true")
    assert len(expected) == 3
    assert losses(row, tmp_path / "float32", "no") == pytest.approx(expected, rel=2e-3)
    assert losses(row, tmp_path / "bf16", "bf16")[0] == pytest.approx(expected[0], rel=0.05)
