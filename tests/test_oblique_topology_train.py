"""The training script at smoke scale: losses compared, resume exact, bad input stopped with a message."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from processes import in_processes

from common.base.config import ConfigError, load_row, override
from common.data.pairs import open_evaluation_sets, open_training_pairs
from common.data.scenes import classification_task
from common.distributed import rank
from common.evaluation.embed import evaluate_zero_shot
from common.geometry import Sphere
from common.info_nce import contrastive_loss
from common.run.checkpoint import Checkpoint, CheckpointError, last_checkpoint
from common.run.folder import RunFiles
from common.run.guards import NonFiniteLoss
from common.run.inputs import as_inputs, batches_from, open_training_data
from common.run.log import read_log
from oblique_topology.config import Config
from oblique_topology.evaluate import load_encoder
from oblique_topology.model import build_geometry, build_model
from oblique_topology.train import train

QUIET = ("run.log_every=1", "run.evaluate_every=0")
FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"


def run(folder, *overrides, resume=False, row="table2_clip"):
    config = load_row(Config, FOLDER, FOLDER / "configs" / f"{row}.yaml", "smoke", [*QUIET, *overrides])
    files = RunFiles(folder)
    train(config, open_training_pairs(config.data, config.run.seed), files, resume, Accelerator(cpu=True), "test")
    return files


def losses(files):
    return [record["loss"] for record in read_log(files.log) if record["event"] == "train"]


def weights(files):
    return last_checkpoint(files.checkpoints).model_tensors()


@pytest.fixture
def not_evaluated(monkeypatch):
    """Leaves out the final evaluation, most of a run of a few steps, where it is not the point."""
    monkeypatch.setattr("oblique_topology.train.evaluate_and_save", lambda *arguments: None)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    settings = ("run.evaluate_every=3", "run.save_every=1", "run.keep_checkpoints=4")
    return run(tmp_path_factory.mktemp("unbroken"), *settings)


def half_of(unbroken, folder):
    """A copy of the run as if it had been killed between step 3 and 4."""
    shutil.copytree(unbroken.folder, folder)
    for step in (4, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step-0000000{step}", ignore_errors=True)
    (folder / "evaluation.json").unlink(missing_ok=True)
    return folder


def test_training_lowers_the_loss_and_writes_everything(tmp_path):
    files = run(tmp_path, "optim.steps=40", "optim.learning_rate=3.0e-3", "run.save_every=0")
    curve = losses(files)
    assert sum(curve[-5:]) / 5 < sum(curve[:5]) / 5 - 0.3
    evaluation = json.loads(files.evaluation.read_text())
    assert set(evaluation["evaluations"]) == {
        "imagenet", "imagenet_v2", "imagenet_a", "imagenet_r", "test", "second_test", "linear_probe"
    }  # fmt: skip
    for result in evaluation["evaluations"].values():
        assert all(0 <= value <= 1 for value in result["metrics"].values())
        assert result["protocol"]["fingerprint"]
    hits = json.loads(files.hits.read_text())
    recall = evaluation["evaluations"]["test"]["metrics"]["t2i_recall_at_5"]
    flat = [hit for image in hits["test"]["t2i_recall_at_5"] for hit in image]
    assert sum(flat) / len(flat) == pytest.approx(recall)


def test_recall_and_zero_shot_accuracy_are_followed_in_log_tracker_and_on_the_screen(
    unbroken, tmp_path, monkeypatch, capsys, not_evaluated
):
    tracked = {}
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: tracked.setdefault(step, {}).update(values))
    half = half_of(unbroken, tmp_path / "half")
    files = run(half, "run.evaluate_every=3", "run.save_every=1", "run.keep_checkpoints=4", resume=True)
    config, encoder = load_encoder(last_checkpoint(files.checkpoints), torch.device("cpu"))
    size = config.data.num_val
    others = classification_task("imagenet", size=size, image_size=config.data.image_size, part="train")
    assert not {others[k]["image_id"] for k in range(size)} & {
        task["image_id"] for task in map(open_evaluation_sets(config.data).zero_shot["imagenet"].__getitem__, range(8))
    }
    accuracy = evaluate_zero_shot(encoder, others, config.method.prompt_average).metrics["acc1"]
    found = {line["data"]: line["metrics"] for line in read_log(files.log) if line["event"] == "evaluate"}  # the last
    assert found["scenes/imagenet"]["acc1"] == accuracy
    assert tracked[6]["scenes/imagenet/acc1"] == accuracy
    assert tracked[6]["scenes/val/i2t_recall_at_1"] == found["scenes/val"]["i2t_recall_at_1"]
    said = capsys.readouterr().err
    assert f"; scenes/imagenet zero-shot {100 * accuracy:.1f} %" in said
    assert f"zero-shot={100 * accuracy:.1f}" in said


def test_the_first_loss_is_that_of_the_model_before_training(unbroken):
    row = FOLDER / "configs" / "table2_clip.yaml"
    config = load_row(Config, FOLDER, row, "smoke")
    training = open_training_data(config, open_training_pairs(config.data, config.run.seed), None)
    torch.manual_seed(config.run.seed)
    model = build_model(config, training.tokenizer)
    batch = next(iter(batches_from(0, config, training, Accelerator(cpu=True))))
    images, token_ids = as_inputs(batch, training.transform, torch.device("cpu"))
    with torch.no_grad():
        image_features, text_features = model.image_tower(images), model.text_tower(token_ids)
    cosine = [[float(torch.cosine_similarity(i, t, dim=0)) for t in text_features] for i in image_features]
    logits = [[value / 0.07 for value in line] for line in cosine]
    total = 0.0
    for k in range(16):
        own = math.exp(logits[k][k])
        total -= math.log(own / sum(math.exp(logits[k][j]) for j in range(16))) / 32
        total -= math.log(own / sum(math.exp(logits[j][k]) for j in range(16))) / 32
    curve = losses(unbroken)
    assert len(curve) == 6
    assert curve[0] == pytest.approx(total, rel=1e-5)


def test_the_same_seed_gives_the_same_losses_and_another_seed_does_not(unbroken, tmp_path, not_evaluated):
    assert losses(run(tmp_path / "same")) == losses(unbroken)
    assert losses(run(tmp_path / "other", "run.seed=1")) != losses(unbroken)


def test_resume_equals_unbroken_run(unbroken, tmp_path):
    files = run(half_of(unbroken, tmp_path / "half"), resume=True)
    assert losses(files) == losses(unbroken)
    before, after = weights(unbroken), weights(files)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert files.evaluation.is_file()


def test_the_logit_scale_stays_within_its_bounds_and_frozen_stays_put(tmp_path, not_evaluated):
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


def test_a_gradient_that_is_not_finite_stops_an_unclipped_run_before_the_weights_are_spoilt(
    tmp_path, monkeypatch, not_evaluated
):
    similarity, calls = Sphere.similarity, []

    def spoilt_at_the_third_step(self, images, texts):
        calls.append(1)
        if len(calls) == 3:
            images.register_hook(lambda gradient: gradient * float("nan"))
        return similarity(self, images, texts)

    monkeypatch.setattr(Sphere, "similarity", spoilt_at_the_third_step)
    with pytest.raises(NonFiniteLoss, match=r"the gradient norm is nan at step 2, while the loss is finite"):
        run(tmp_path, "optim.max_gradient_norm=null", "run.save_every=1", "run.log_every=100")
    assert last_checkpoint(tmp_path / "checkpoints").state["step"] == 2


def test_without_clipping_the_norm_is_measured_and_nothing_is_changed(unbroken, tmp_path, not_evaluated):
    norms = [record["gradient_norm"] for record in read_log(unbroken.log) if record["event"] == "train"]
    above_all = run(tmp_path / "loose", f"optim.max_gradient_norm={10 * max(norms)}")
    none = run(tmp_path / "none", "optim.max_gradient_norm=null")
    assert losses(none) == losses(above_all)
    assert losses(none) != losses(unbroken)
    assert all(record["gradient_norm"] > 0 for record in read_log(none.log) if record["event"] == "train")


def test_micro_batches_train_as_one_batch(unbroken, tmp_path, not_evaluated):
    for size in (5, 16):
        files = run(tmp_path / str(size), f"optim.micro_batch_size={size}")
        exact = size == 16
        assert losses(files) == (losses(unbroken) if exact else pytest.approx(losses(unbroken), rel=1e-5))


def test_the_loss_in_tiles_trains_as_the_loss_at_once(unbroken, tmp_path, not_evaluated):
    for number, overrides in enumerate((["optim.loss_tile=64"], ["optim.loss_tile=5", "optim.micro_batch_size=6"])):
        files = run(tmp_path / str(number), *overrides)
        assert losses(files) == pytest.approx(losses(unbroken), rel=1e-6 if number == 0 else 1e-5)


def test_late_interaction_in_tiles_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.loss_tile = 8 with method\.geometry = max_average, .*accepted: 0"):
        override(Config(), ["method.geometry=max_average", "optim.loss_tile=8"])


def test_as_many_checkpoints_stay_as_the_config_says(unbroken):
    assert sorted(path.name for path in unbroken.checkpoints.iterdir()) == [
        f"step-0000000{step}" for step in range(3, 7)
    ]


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"optim\.warmup_steps = 2 is more than optim\.steps = 1: .*accepted: at most 1"
    ):
        run(tmp_path, "optim.steps=1")


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


# several class tokens, other geometries

MULTI = ("method.num_spheres=4",)


def test_multi_with_one_token_trains_as_the_baseline_to_the_last_bit(tmp_path, not_evaluated):
    one = run(tmp_path / "one", "method.num_spheres=1", "method.logit_scale_max=100", row="table2_multi")
    clip = run(tmp_path / "clip")
    assert losses(one) == losses(clip)
    assert all(torch.equal(tensor, weights(clip)[name]) for name, tensor in weights(one).items())


def test_a_faster_temperature_moves_faster_and_changes_nothing_else_in_the_first_step(tmp_path, not_evaluated):
    scales, curves = [], []
    for rate in (1.0, 20.0):
        files = run(tmp_path / str(rate), f"optim.logit_scale_rate={rate}")
        records = [record for record in read_log(files.log) if record["event"] == "train"]
        scales.append([math.log(record["logit_scale"]) for record in records])
        curves.append(losses(files))
    moved = [abs(each[1] - each[0]) for each in scales]
    assert moved[1] == pytest.approx(20 * moved[0], rel=1e-3)  # Adam's first step is the rate
    assert curves[0][0] == curves[1][0]
    assert curves[0] != curves[1]


def test_a_bounded_temperature_leaves_its_bound(tmp_path, not_evaluated):
    settings = (*MULTI, "method.logit_scale_max=3.95", "optim.logit_scale_rate=20", "optim.steps=20")
    files = run(tmp_path, *settings, row="table2_multi")
    scales = [record["logit_scale"] for record in read_log(files.log) if record["event"] == "train"]
    assert scales[0] == pytest.approx(3.95, rel=1e-6)
    assert max(scales) <= 3.95 * (1 + 1e-6)
    assert min(scales) < 3.8


@pytest.mark.parametrize(("geometry", "times"), [("sphere", 1), ("oblique", 4), ("oblique_geodesic", None)])
def test_the_log_tells_how_far_logits_can_reach(tmp_path, geometry, times, not_evaluated):
    spheres = 1 if geometry == "sphere" else 4
    settings = (f"method.geometry={geometry}", f"method.num_spheres={spheres}", "optim.steps=2")
    files = run(tmp_path, *settings)
    for record in read_log(files.log):
        if record["event"] == "train":
            expected = None if times is None else pytest.approx(times * record["logit_scale"])
            assert record.get("largest_logit") == expected


def test_the_max_average_trains_and_ranks_by_its_two_matrices(tmp_path, not_evaluated):
    settings = (*MULTI, "method.geometry=max_average", "method.logit_scale_max=100", "optim.steps=40")
    files = run(tmp_path, *settings, "optim.learning_rate=3.0e-3", "run.save_every=0", row="table2_multi")
    curve = losses(files)
    assert sum(curve[-5:]) / 5 < sum(curve[:5]) / 5 - 0.15
    _, encoder = load_encoder(last_checkpoint(files.checkpoints), torch.device("cpu"))
    assert encoder.model.geometry.name == "max_average"


def loss_and_gradients(name, share=None):
    """Of the same 12 pairs of features, whole or one process's share."""
    config = load_row(Config, FOLDER, FOLDER / "configs" / "table2_multi.yaml", "smoke", ["method.num_spheres=4"])
    spheres = 1 if name in ("sphere", "euclidean") else 4
    method = replace(config.method, geometry=name, num_spheres=spheres, multi_token=spheres > 1)
    geometry = build_geometry(replace(config, method=method))
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(12, 32, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    part = slice(None) if share is None else share
    images, texts = geometry.embed_image(features[0][part]), geometry.embed_text(features[1][part])
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    loss = contrastive_loss(images, texts, geometry, scale)
    loss.backward()
    return loss.detach(), scale.grad, *(each.grad[part] for each in features)


GEOMETRIES = ("sphere", "euclidean", "oblique", "oblique_geodesic", "max_average")


def in_one_of_two():
    share = slice(6 * rank(), 6 * rank() + 6)
    return {name: loss_and_gradients(name, share) for name in GEOMETRIES}


def test_two_processes_give_the_loss_and_gradients_of_one_for_every_geometry():
    first, second = in_processes(2, in_one_of_two)
    for name in GEOMETRIES:
        loss, scale, images, texts = loss_and_gradients(name)
        ones, twos = first[name], second[name]
        torch.testing.assert_close((ones[0] + twos[0]) / 2, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((ones[1] + twos[1]) / 2, scale, rtol=1e-12, atol=1e-12)
        for place, whole in ((2, images), (3, texts)):  # each process's loss is the mean over its own rows
            found = torch.cat([ones[place], twos[place]]) / 2
            torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)
