"""--dry-run: what it prints is what a run then takes, nothing is written, and the run that follows is the same."""

import importlib
import json

import pytest
import torch
from runs import called, row_config
from test_launch import message_of
from torch.utils.flop_counter import FlopCounterMode

from common.data.pairs import open_training_pairs
from common.run.dry_run import parameters_of
from common.run.inputs import open_training_data
from common.run.log import read_log
from oblique_topology.model import build_model

ROWS = {
    "euclip.train": "table4_euclip",
    "oblique_topology.train": "table2_multi",
    "contrastive_basics.train": "negatives_queue",
    "contrastive_basics.pretrain": "vision_simclr",
    "geomm.train": "tcl_geo",
    "geomm.finetune": "nlvr2_albef_geo",
    "geomm.pretrain": "vision_moco_v2_geo",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder of outputs for each test."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)


def call(script, *arguments):
    called(importlib.import_module(script).main, "--scale", "smoke", *arguments)


def figures_of(capsys, script, *arguments):
    capsys.readouterr()
    call(script, "--dry-run", "--json", *arguments)
    return json.loads(capsys.readouterr().out)


QUICK = ("euclip.train", "oblique_topology.train", "contrastive_basics.pretrain", "geomm.train", "geomm.finetune")


@pytest.mark.parametrize(
    "script", [script if script in QUICK else pytest.param(script, marks=pytest.mark.slow) for script in ROWS]
)
def test_a_dry_run_of_a_row_of_every_paper_says_what_it_needs_and_writes_nothing(script, tmp_path, capsys):
    figures = figures_of(capsys, script, "--config", ROWS[script])
    assert not list(tmp_path.iterdir())
    parts, memory = figures["parameters"], figures["memory"]
    trained = sum(part["trained"] for part in parts.values())
    assert trained > 0
    assert memory["gradients"] == 4 * trained
    moments = 1 if script.endswith("pretrain") else 2  # SGD, AdamW
    assert 0 <= memory["optimizer"] - 4 * moments * trained <= 1_000 * len(parts)  # and the count of steps
    assert memory["peak"] > memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert figures["flops_per_step"] > 2 * trained
    assert figures["timed_steps"] == 3
    assert figures["hours"] == pytest.approx(figures["steps"] * figures["seconds_per_step"] / 3600)
    if script in ("geomm.train", "geomm.finetune"):
        assert len(figures["missing_rows"]) == 1
        assert figures["folder"] is None
    else:
        assert figures["folder"].startswith(f"{tmp_path}/outputs/runs/{script.split('.')[0]}/{ROWS[script]}-smoke-")


def test_the_run_after_a_dry_run_is_the_same_and_takes_what_was_said(tmp_path, capsys):
    settings = ("run.log_every=1", "run.save_every=2", "run.keep_checkpoints=5", "optim.ema=0.5", "run.test=false")
    call("euclip.train", *settings, "--output-dir", "before")
    figures = figures_of(capsys, "euclip.train", *settings)
    call("euclip.train", *settings)
    (log,) = tmp_path.glob("outputs/runs/euclip/*/seed0/log.jsonl")
    assert str(log.parent) == figures["folder"]
    before, after = (
        [record["loss"] for record in read_log(path) if record["event"] == "train"]
        for path in (tmp_path / "before" / "log.jsonl", log)
    )
    assert after == before
    checkpoints = sorted(log.parent.glob("checkpoints/step-*"))
    assert len(checkpoints) == figures["checkpoint"]["kept"] == 3
    size = sum(file.stat().st_size for file in checkpoints[-1].iterdir())
    assert figures["checkpoint"]["bytes"] <= size <= figures["checkpoint"]["bytes"] + 50_000  # names and state.json
    assert (figures["steps"], figures["samples_seen"], figures["epochs"]) == (6, 96, 96 / 256)

    # the same folder, seen again
    assert figures_of(capsys, "euclip.train", *settings, "--resume")["steps_to_train"] == 0
    assert figures_of(capsys, "euclip.train", *settings)["steps_to_train"] == 6
    assert sorted(log.parent.glob("checkpoints/step-*")) == checkpoints


def test_random_weights_take_no_step_and_keep_the_checkpoint_of_step_0(tmp_path, capsys):
    row = ("--config", "vision_random_weights")
    figures = figures_of(capsys, "contrastive_basics.pretrain", *row)
    assert (figures["steps"], figures["epochs"], figures["hours"], figures["flops_per_step"]) == (0, 0, 0, 0)
    assert figures["checkpoint"]["kept"] == 1
    call("contrastive_basics.pretrain", *row)
    assert [path.name for path in tmp_path.glob("outputs/runs/*/*/seed0/checkpoints/*")] == ["step-00000000"]


def test_flops_are_about_three_forward_passes_and_parameters_those_of_the_towers(capsys):
    figures = figures_of(capsys, "oblique_topology.train", "--config", "table2_clip")
    config = row_config("oblique_topology", "table2_clip")
    model = build_model(config, open_training_data(config, open_training_pairs(config.data, 0), None).tokenizer)
    assert parameters_of(model) == figures["parameters"]
    for side in ("image_tower", "text_tower"):
        count = sum(parameter.numel() for parameter in getattr(model, side).parameters())
        assert figures["parameters"][side] == {"trained": count, "frozen": 0}

    batch, size, length = config.optim.global_batch_size, config.data.image_size, config.data.context_length
    forward = []
    for tower, inputs in (
        (model.image_tower, torch.zeros(batch, 3, size, size)),
        (model.text_tower, torch.ones(batch, length, dtype=torch.int64)),
    ):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            tower.to("meta")(inputs.to("meta"))
        forward.append(counter.get_total_flops())
    # captions are cut to their lengths; the products with the batch in the loss are small beside the towers
    assert 2.5 * forward[0] < figures["flops_per_step"] < 3.3 * sum(forward)


def test_a_run_too_short_to_be_timed_has_no_speed(capsys):
    figures = figures_of(capsys, "euclip.train", "optim.steps=2", "optim.warmup_steps=0")
    assert (figures["timed_steps"], figures["seconds_per_step"], figures["hours"]) == (0, None, None)
    call("euclip.train", "--dry-run", "optim.steps=2", "optim.warmup_steps=0")
    assert "not measured: too few steps" in capsys.readouterr().out


def test_json_without_a_dry_run_is_refused(capsys):
    assert message_of(importlib.import_module("euclip.train").main, "--json") == 2
    assert "--json without --dry-run" in capsys.readouterr().err
