"""The training script at smoke scale: losses compared, resume exact, bad input stopped with a message."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from common.data.pairs import open_training_pairs
from common.run.checkpoint import CheckpointError, last_checkpoint, open_checkpoint
from common.run.config import ConfigError, load_row, override
from common.run.log import read_log
from common.run.session import NonFiniteLoss, RunFiles
from oblique_topology.config import Config
from oblique_topology.evaluate import load_encoder
from oblique_topology.model import build_model
from oblique_topology.train import train

FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"


def run(folder, *overrides, resume=False):
    config = load_row(Config, FOLDER, FOLDER / "configs" / "table2_clip.yaml", "smoke", ["run.log_every=1", *overrides])
    files = RunFiles(folder)
    train(config, open_training_pairs(config.data, config.run.seed), files, resume, Accelerator(cpu=True), "test")
    return files


def losses(files):
    return [record["loss"] for record in read_log(files.log) if record["event"] == "train"]


def weights(files):
    return last_checkpoint(files.checkpoints).model_tensors()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unbroken"))


def test_training_lowers_the_loss_and_writes_everything(tmp_path):
    files = run(tmp_path, "optim.steps=40", "optim.learning_rate=3.0e-3", "run.evaluate_every=0", "run.save_every=0")
    curve = losses(files)
    assert sum(curve[-5:]) / 5 < sum(curve[:5]) / 5 - 0.3
    evaluation = json.loads(files.evaluation.read_text())
    assert set(evaluation["evaluations"]) == {
        "imagenet", "imagenet_v2", "imagenet_a", "imagenet_r", "test", "second_test"
    }  # fmt: skip
    for result in evaluation["evaluations"].values():
        assert all(0 <= value <= 1 for value in result["metrics"].values())
        assert result["protocol"]["fingerprint"]
    hits = json.loads(files.hits.read_text())
    recall = evaluation["evaluations"]["test"]["metrics"]["t2i_recall_at_5"]
    flat = [hit for image in hits["test"]["t2i_recall_at_5"] for hit in image]
    assert sum(flat) / len(flat) == pytest.approx(recall)


def test_the_first_loss_is_that_of_the_model_before_training(unbroken):
    # six steps of 16 pairs at a scale of 14: between ln 16 and the worst that unit vectors allow
    curve = losses(unbroken)
    assert len(curve) == 6
    assert 2.0 < curve[0] < 10.0


def test_the_same_seed_gives_the_same_losses_and_another_seed_does_not(unbroken, tmp_path):
    assert losses(run(tmp_path / "same")) == losses(unbroken)
    assert losses(run(tmp_path / "other", "run.seed=1")) != losses(unbroken)


def test_loader_workers_do_not_change_the_losses(unbroken, tmp_path):
    assert losses(run(tmp_path, "run.num_workers=2")) == losses(unbroken)


def test_resume_equals_unbroken_run(unbroken, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(unbroken.folder, half)
    shutil.rmtree(half / "checkpoints" / "step-00000006")  # as if killed between step 3 and the end
    (half / "evaluation.json").unlink()
    files = run(half, resume=True)
    assert losses(files) == losses(unbroken)
    before, after = weights(unbroken), weights(files)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert files.evaluation.is_file()


def test_resume_passes_over_a_torn_checkpoint(unbroken, tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(unbroken.folder, torn)
    model = torn / "checkpoints" / "step-00000006" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="damaged"):
        files = run(torn, resume=True)
    assert losses(files) == losses(unbroken)


def test_the_logit_scale_stays_within_its_bounds_and_frozen_stays_put(tmp_path):
    # whichever way it is pushed, a step of 0.05 leaves these bounds
    bounds = ("method.logit_scale_min=14.28", "method.logit_scale_max=14.29")
    files = run(tmp_path / "bound", *bounds, "optim.learning_rate=0.05")
    scales = [record["logit_scale"] for record in read_log(files.log) if record["event"] == "train"]
    assert min(scales) >= 14.28 * (1 - 1e-6)
    assert max(scales) <= 14.29 * (1 + 1e-6)
    assert len(set(scales)) > 1  # bounded, not frozen
    final = weights(files)["logit_scale.log_logit_scale"].exp().item()
    assert 14.28 * (1 - 1e-6) <= final <= 14.29 * (1 + 1e-6)
    files = run(tmp_path / "frozen", "method.logit_scale_trainable=false", "method.logit_scale_init=1.0")
    scales = [record["logit_scale"] for record in read_log(files.log) if record["event"] == "train"]
    assert scales == [1.0] * 6


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_norms(tmp_path):
    with pytest.raises(NonFiniteLoss, match=r"loss is nan at step \d+ .*logit_scale.*Largest norms"):
        run(tmp_path, "optim.learning_rate=1.0e+30", "optim.max_gradient_norm=null", "method.logit_scale_max=null")
    assert not (tmp_path / "evaluation.json").exists()


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"optim\.global_batch_size = 512 is larger than the training set of 256"):
        run(tmp_path, "optim.global_batch_size=512")


def test_a_checkpoint_rebuilds_its_model_and_refuses_another(unbroken, tmp_path):
    checkpoint = last_checkpoint(unbroken.checkpoints)
    config, encoder = load_encoder(checkpoint, torch.device("cpu"))
    assert config.optim.steps == 6
    assert encoder.transform.size == config.data.image_size
    tensors = checkpoint.model_tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in encoder.model.state_dict().items())

    run_into = tmp_path / "other"
    shutil.copytree(unbroken.folder, run_into)
    with pytest.raises(ConfigError, match=r"holds a run of another config: model.image.layers 1 -> 2"):
        run(run_into, "model.image.layers=2", resume=True)
    two_layers = build_model(override(config, ["model.image.layers=2"]), encoder.tokenizer.vocabulary_size)
    with pytest.raises(CheckpointError, match=r"checkpoint of another model: .*image_tower"):
        checkpoint.load_model(two_layers)
    with pytest.raises(ConfigError, match=r"model.image.layers=2 would change a trained model"):
        load_encoder(checkpoint, torch.device("cpu"), ["model.image.layers=2"])

    foreign = tmp_path / "foreign"
    shutil.copytree(checkpoint.path, foreign)
    state = json.loads((foreign / "state.json").read_text())
    (foreign / "state.json").write_text(json.dumps({**state, "paper": "euclip"}))
    with pytest.raises(CheckpointError, match="belongs to euclip; accepted: oblique_topology"):
        load_encoder(open_checkpoint(foreign), torch.device("cpu"))
