"""Every paper under FSDP2 through Accelerate: trained on two gloo processes, evaluated, resumed."""

import json
import shutil

import pytest
from processes import in_processes
from sharded_runs import train
from torch.multiprocessing import ProcessRaisedException

ROWS = {
    "euclip/configs/table4_euclip.yaml": [],
    "oblique_topology/configs/table2_multi.yaml": [],
    "contrastive_basics/configs/negatives_queue.yaml": [],
    "contrastive_basics/configs/vision_moco_v2.yaml": [],
    "geomm/configs/albef_geo.yaml": ["start.row=", "method.queue_size=24"],
}
FEW = ["optim.steps=4", "run.log_every=1", "run.evaluate_every=4", "run.save_every=2"]


def losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "train"]


@pytest.mark.parametrize("row", ROWS)
def test_a_sharded_run_trains_evaluates_and_resumes(row, tmp_path):
    module = f"{row.split('/')[0]}.{'pretrain' if '/vision_' in row else 'train'}"
    warmup = "optim.warmup_share=0.25" if "/vision_" in row else "optim.warmup_steps=1"
    command = ["--config", row, "--scale", "smoke", *FEW, warmup, *ROWS[row]]

    def run(name, *more):
        return [*command, "--output-dir", str(tmp_path / name), *more]

    half = run("bf16", "run.mixed_precision=bf16")
    has_statistics = "/vision_" in row
    in_processes(2, train, module, run("sharded"), *([] if has_statistics else [half]))
    expected = losses(tmp_path / "sharded")
    assert len(expected) == 4
    assert (tmp_path / "sharded" / "evaluation.json").exists()
    if has_statistics:
        with pytest.raises(ProcessRaisedException, match="half-precision weights do not go with the statistics"):
            in_processes(2, train, module, half)
    else:
        assert losses(tmp_path / "bf16")[0] == pytest.approx(expected[0], rel=0.05)
        assert (tmp_path / "bf16" / "evaluation.json").exists()
    shutil.rmtree(tmp_path / "sharded" / "checkpoints" / "step-00000004")
    in_processes(2, train, module, run("sharded", "--resume"))
    assert losses(tmp_path / "sharded") == expected
