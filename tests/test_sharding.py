"""Every paper under FSDP2 through Accelerate: trained on two gloo processes, evaluated, resumed."""

import shutil

import pytest
from processes import in_processes, once_more_after_a_crash
from sharded_runs import train
from test_launch import losses
from torch.multiprocessing import ProcessRaisedException

ROWS = {
    "euclip/configs/table4_euclip.yaml": [],
    "oblique_topology/configs/table2_multi.yaml": [],
    "contrastive_basics/configs/negatives_queue.yaml": [],
    "contrastive_basics/configs/vision_moco_v2.yaml": [],
    "geomm/configs/albef_geo.yaml": ["method.queue_size=24"],
    "geomm/configs/vision_swav_geo.yaml": ["method.graph_update_interval=1", "method.geodesic_from_step=0"],
}
STARTS = {"geomm/configs/albef_geo.yaml": "geomm/configs/towers.yaml"}  # row -> the one whose weights it starts from
QUICK = ("euclip/configs/table4_euclip.yaml", "geomm/configs/albef_geo.yaml")
STEPS = 4  # the queue of albef_geo is full after two
FEW = [f"optim.steps={STEPS}", "run.log_every=1", f"run.evaluate_every={STEPS}", "run.save_every=2", "data.num_test=16"]
START = ["optim.steps=2", "run.evaluate_every=0", "run.save_every=0"]
HALF = ["run.mixed_precision=bf16", "optim.steps=3", "run.evaluate_every=0"]


def command(row, folder, *more):
    """The module that trains a row, and its arguments."""
    vision = "/vision_" in row
    module = f"{row.split('/')[0]}.{'pretrain' if vision else 'train'}"
    few = ["optim.warmup_share=0.25"] if vision else ["optim.warmup_steps=1", "data.num_val=8", "data.num_labelled=8"]
    few += [*ROWS.get(row, []), *([f"start.run={folder.parent / 'start'}"] if row in STARTS else [])]
    return module, "--config", row, "--scale", "smoke", *FEW, *few, "--output-dir", str(folder), *more


@once_more_after_a_crash
@pytest.mark.parametrize("rows", [QUICK, pytest.param(ROWS.keys() - set(QUICK), marks=pytest.mark.slow)])
def test_sharded_runs_train_evaluate_and_resume(rows, tmp_path):
    """All rows share two starts of two processes."""
    folders = {row: tmp_path / row.replace("/", "-") for row in sorted(rows)}
    whole = [command(row, folder / "sharded") for row, folder in folders.items()]
    half = [command(row, folder / "bf16", *HALF) for row, folder in folders.items() if "/vision_" not in row]
    starts = [command(STARTS[row], folder / "start", *START) for row, folder in folders.items() if row in STARTS]
    in_processes(2, train, *((*run, "run.test=false") for run in (*starts, *whole)))
    unbroken = {row: losses(folder / "sharded") for row, folder in folders.items()}
    for folder in folders.values():
        shutil.rmtree(folder / "sharded" / "checkpoints" / f"step-{STEPS:08}")
    in_processes(2, train, *((*run, "--resume") for run in whole), *half)
    for row, folder in folders.items():
        assert len(unbroken[row]) == STEPS
        assert losses(folder / "sharded") == unbroken[row]
        assert (folder / "sharded" / "evaluation.json").exists()
        if "/vision_" not in row:
            assert losses(folder / "bf16")[0] == pytest.approx(unbroken[row][0], rel=0.05)
            assert (folder / "bf16" / "evaluation.json").exists()


def test_statistics_of_a_batch_are_refused_in_half_precision(tmp_path):
    row = "contrastive_basics/configs/vision_moco_v2.yaml"
    with pytest.raises(ProcessRaisedException, match="half-precision weights do not go with the statistics"):
        in_processes(2, train, command(row, tmp_path, HALF[0]))
