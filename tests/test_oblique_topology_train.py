"""The training script at smoke scale: losses compared, resume exact, bad input stopped with a message."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from common.data.pairs import open_training_pairs
from common.geometry import Sphere
from common.run.checkpoint import Checkpoint, CheckpointError, last_checkpoint
from common.run.config import ConfigError, load_row, override
from common.run.log import read_log
from common.run.session import NonFiniteLoss, RunFiles
from oblique_topology.config import Config
from oblique_topology.evaluate import load_encoder
from oblique_topology.model import build_model
from oblique_topology.train import train

SHORT_END = ("run.evaluate_every=0", "data.num_test=4", "data.num_labelled=4")  # where the evaluation is not the point
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
    too_fast = ("optim.learning_rate=1.0e+30", "optim.max_gradient_norm=null", "method.logit_scale_max=null")
    with pytest.raises(NonFiniteLoss, match=r"loss is nan at step \d+ .*logit_scale.*Largest norms"):
        run(tmp_path, *too_fast)
    assert not (tmp_path / "evaluation.json").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_a_gradient_that_is_not_finite_stops_an_unclipped_run_before_the_weights_are_spoilt(tmp_path, monkeypatch):
    similarity, calls = Sphere.similarity, []

    def spoilt_at_the_third_step(self, images, texts):
        calls.append(1)
        if len(calls) == 3:
            images.register_hook(lambda gradient: gradient * float("nan"))
        return similarity(self, images, texts)

    monkeypatch.setattr(Sphere, "similarity", spoilt_at_the_third_step)
    with pytest.raises(NonFiniteLoss, match=r"the gradient norm is nan at step 2, while the loss is finite"):
        run(tmp_path, *SHORT_END, "optim.max_gradient_norm=null", "run.save_every=1")
    assert last_checkpoint(tmp_path / "checkpoints").state["step"] == 2


def test_without_clipping_the_norm_is_measured_and_nothing_is_changed(unbroken, tmp_path):
    norms = [record["gradient_norm"] for record in read_log(unbroken.log) if record["event"] == "train"]
    above_all = run(tmp_path / "loose", *SHORT_END, f"optim.max_gradient_norm={10 * max(norms)}")
    none = run(tmp_path / "none", *SHORT_END, "optim.max_gradient_norm=null")
    assert losses(none) == losses(above_all)
    assert losses(none) != losses(unbroken)
    assert all(record["gradient_norm"] > 0 for record in read_log(none.log) if record["event"] == "train")


def test_micro_batches_train_as_one_batch(unbroken, tmp_path):
    for size in (5, 16):
        files = run(tmp_path / str(size), *SHORT_END, f"optim.micro_batch_size={size}")
        exact = size == 16
        assert losses(files) == (losses(unbroken) if exact else pytest.approx(losses(unbroken), rel=1e-5))


def test_a_run_may_go_on_in_other_micro_batches(unbroken, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(unbroken.folder, half)
    shutil.rmtree(half / "checkpoints" / "step-00000006")
    files = run(half, "optim.micro_batch_size=4", resume=True)
    assert losses(files) == pytest.approx(losses(unbroken), rel=1e-5)


def test_as_many_checkpoints_stay_as_the_config_says(tmp_path):
    files = run(tmp_path, *SHORT_END, "run.save_every=1", "run.keep_checkpoints=3")
    assert sorted(path.name for path in files.checkpoints.iterdir()) == [f"step-0000000{step}" for step in (4, 5, 6)]


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"optim\.warmup_steps = 2 is more than optim\.steps = 1: .*accepted: at most 1"
    ):
        run(tmp_path, "optim.steps=1")


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
    two_layers = build_model(override(config, ["model.image.layers=2"]), encoder.tokenizer)
    with pytest.raises(CheckpointError, match=r"checkpoint of another model: .*image_tower"):
        checkpoint.load_model(two_layers)
    with pytest.raises(ConfigError, match=r"model.image.layers=2 would change a trained model"):
        load_encoder(checkpoint, torch.device("cpu"), ["model.image.layers=2"])

    foreign = Checkpoint(checkpoint.path, {**checkpoint.state, "paper": "euclip"})
    with pytest.raises(CheckpointError, match="belongs to euclip; accepted: oblique_topology"):
        load_encoder(foreign, torch.device("cpu"))
