"""The training script at smoke scale: losses compared, resume exact, bad input stopped with a message."""

import json
import math
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from killed_run import assert_same_to_the_last_bit, killed_after
from refusals import refused
from runs import lines, logged, row_config, trained

from common.base.config import ConfigError
from common.data.pairs import open_evaluation_sets, open_training_pairs
from common.data.scenes import classification_task
from common.evaluation.embed import evaluate_zero_shot
from common.geometry import Sphere
from common.run.checkpoint import Checkpoint, CheckpointError, last_checkpoint
from common.run.guards import NonFiniteLoss
from common.run.inputs import as_inputs, batches_from, open_training_data
from oblique_topology.evaluate import MODELS, load_encoder, reevaluate
from oblique_topology.model import build_model

QUIET = ("run.log_every=1", "run.evaluate_every=0")
FOLLOWED = ("run.evaluate_every=3", "run.save_every=1", "run.keep_checkpoints=4")
PAPER = "oblique_topology"


def run(folder, *overrides, resume=False, row="table2_clip"):
    return trained(PAPER, row_config(PAPER, row, *QUIET, *overrides), folder, resume)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unbroken"), *FOLLOWED)


def test_training_lowers_the_loss_and_writes_everything(tmp_path):
    files = run(tmp_path, "optim.steps=40", "optim.learning_rate=3.0e-3", "run.save_every=0")
    curve = logged(files)
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
    files = run(killed_after(3, unbroken, tmp_path / "half"), *FOLLOWED, resume=True)
    config, encoder = load_encoder(last_checkpoint(files.checkpoints), torch.device("cpu"))
    size = config.data.num_val
    others = classification_task("imagenet", size=size, image_size=config.data.image_size, part="val")
    assert not {others[k]["image_id"] for k in range(size)} & {
        task["image_id"] for task in map(open_evaluation_sets(config.data).zero_shot["imagenet"].__getitem__, range(8))
    }
    accuracy = evaluate_zero_shot(encoder, others, config.method.prompt_average).metrics["acc1"]
    metrics = {line["data"]: line["metrics"] for line in lines(files, "evaluate")}  # the last
    assert metrics["scenes/imagenet"]["acc1"] == accuracy
    assert tracked[6]["scenes/imagenet/acc1"] == accuracy
    assert tracked[6]["scenes/val/i2t_recall_at_1"] == metrics["scenes/val"]["i2t_recall_at_1"]
    screen = capsys.readouterr().err
    assert f"; scenes/imagenet zero-shot {100 * accuracy:.1f} %" in screen
    assert f"zero-shot={100 * accuracy:.1f}" in screen


def test_the_first_loss_is_that_of_the_model_before_training(unbroken):
    config = row_config(PAPER, "table2_clip")
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
        matched = math.exp(logits[k][k])
        total -= math.log(matched / sum(math.exp(logits[k][j]) for j in range(16))) / 32
        total -= math.log(matched / sum(math.exp(logits[j][k]) for j in range(16))) / 32
    curve = logged(unbroken)
    assert len(curve) == 6
    assert curve[0] == pytest.approx(total, rel=1e-5)


def test_another_seed_gives_other_losses(unbroken, tmp_path, not_evaluated):
    assert logged(run(tmp_path, "run.seed=1", "optim.steps=2"))[0] != logged(unbroken)[0]


def test_resume_equals_unbroken_run(unbroken, tmp_path):
    files = run(killed_after(3, unbroken, tmp_path / "half"), *FOLLOWED, resume=True)
    assert_same_to_the_last_bit(unbroken, files)
    assert files.evaluation.is_file()


def test_the_log_tells_how_far_logits_can_reach(tmp_path, not_evaluated):
    files = run(tmp_path, "method.geometry=oblique", "method.num_spheres=4", "optim.steps=2")
    assert logged(files, "largest_logit") == pytest.approx([4 * scale for scale in logged(files, "logit_scale")])
    for geometry, largest in (("sphere", 1), ("oblique_geodesic", None)):
        assert row_config(PAPER, "table2_clip", f"method.geometry={geometry}").largest_similarity == largest


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
    with pytest.raises(NonFiniteLoss, match=r"the gradient norm is nan at step 3, while the loss is finite"):
        run(tmp_path, "optim.max_gradient_norm=null", "run.save_every=1", "run.log_every=100")
    assert last_checkpoint(tmp_path / "checkpoints").state["step"] == 2


def test_without_clipping_the_norm_is_measured_and_nothing_is_changed(unbroken, tmp_path, not_evaluated):
    norms = logged(unbroken, "gradient_norm")
    above_all = run(tmp_path / "loose", f"optim.max_gradient_norm={10 * max(norms)}")
    none = run(tmp_path / "none", "optim.max_gradient_norm=null")
    assert logged(none) == logged(above_all)
    assert logged(none) != logged(unbroken)
    assert min(logged(none, "gradient_norm")) > 0


def test_a_checkpoint_rebuilds_its_model_and_no_other(unbroken):
    checkpoint = last_checkpoint(unbroken.checkpoints)
    config, encoder = load_encoder(checkpoint, torch.device("cpu"))
    assert config.optim.steps == 6
    assert encoder.transform.size == config.data.image_size
    tensors = checkpoint.model_tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in encoder.model.state_dict().items())

    for settings, message in (
        (["model.image.layers=2"], "model.image.layers=2 would change a trained model"),
        (["data.resize=squeeze"], "data.resize would change what a trained model reads"),
        (["data.source=tsv", "data.root=/data", "data.image_size=64"], "data.image_size would change what a trained"),
    ):
        refused((message, partial(load_encoder, checkpoint, torch.device("cpu"), settings)), error=ConfigError)
    foreign = Checkpoint(checkpoint.path, {**checkpoint.state, "paper": "euclip"})
    message = r"by euclip/train.py, .*; run: python euclip/evaluate.py --check"
    refused((message, lambda: load_encoder(foreign, torch.device("cpu"))), error=CheckpointError)


def test_a_finished_run_is_measured_by_the_settings_of_the_command(unbroken, monkeypatch):
    settings = {
        "run.evaluation_batch_size": 3, "run.num_workers": 1, "run.ranking_gb": 0.5, "data.max_broken_share": 0.25,
    }  # fmt: skip
    config = row_config(PAPER, "table2_clip", *(f"{key}={value}" for key, value in settings.items()))
    encoders = [MODELS.encoder_of(unbroken, config)]
    monkeypatch.setattr("common.run.evaluation.evaluate_and_save", lambda *values: encoders.append(values[2]))
    reevaluate(last_checkpoint(unbroken.checkpoints), config, unbroken, Accelerator(cpu=True))
    for encoder in encoders:
        names = [key.partition(".")[2].removeprefix("evaluation_") for key in settings]
        assert [getattr(encoder, name) for name in names] == list(settings.values())
    assert len(encoders) == 2


# several class tokens, other geometries


def test_a_faster_temperature_moves_faster_and_changes_nothing_else_in_the_first_step(
    unbroken, tmp_path, not_evaluated
):
    runs = (unbroken, run(tmp_path, "optim.logit_scale_rate=20"))  # 1 where nothing is said
    scales, curves = ([logged(files, name) for files in runs] for name in ("logit_scale", "loss"))
    moved = [abs(math.log(values[1] / values[0])) for values in scales]
    assert moved[1] == pytest.approx(20 * moved[0], rel=1e-3)  # Adam's first step is the rate
    assert curves[0][0] == curves[1][0]
    assert curves[0] != curves[1]


def test_the_max_average_trains_and_ranks_by_its_two_matrices(tmp_path, not_evaluated):
    settings = ("method.num_spheres=4", "method.geometry=max_average", "method.logit_scale_max=100", "optim.steps=40")
    files = run(tmp_path, *settings, "optim.learning_rate=3.0e-3", "run.save_every=0", row="table2_multi")
    curve = logged(files)
    assert sum(curve[-5:]) / 5 < sum(curve[:5]) / 5 - 0.15
    _, encoder = load_encoder(last_checkpoint(files.checkpoints), torch.device("cpu"))
    assert encoder.model.geometry.name == "max_average"
