"""EuCLIP's training script at smoke scale: every row's loss against loops, processes, bounds, the log."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from euclip_formulas import excess, similarity
from euclip_step import share_of_a_step
from processes import as_launched, in_processes
from runs import lines, row_config, rows_of_paper, trained

from common.data.pairs import open_training_pairs
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles
from common.run.inputs import as_inputs, batches_from, open_training_data
from common.run.launch import launched_accelerator
from euclip.model import build_model
from euclip.train import train

FOLDER = Path(__file__).resolve().parents[1] / "euclip"
ROWS = rows_of_paper(FOLDER)
SHORT = ("optim.steps=3", "run.evaluate_every=0", "run.save_every=0")
SMALL_END = ("run.evaluate_every=0", "data.num_test=4", "data.num_labelled=4")  # the evaluation is not the point


def config_of(row, *overrides):
    return row_config("euclip", row, "run.log_every=1", *overrides)


def run(folder, row, *overrides, resume=False):
    return trained("euclip", config_of(row, *overrides), folder, resume)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unbroken"), "table4_meru", *SMALL_END)


# losses


def loop_loss(config, images, texts):
    """Contrastive and weighted entailment loss of a batch with the scalars at their start."""
    method, size = config.method, len(images)
    logits = [
        [method.logit_scale_init * similarity(method.geometry, x, y, method.curvature_init) for y in texts]
        for x in images
    ]
    columns = [list(column) for column in zip(*logits)]
    contrastive = sum(
        math.log(sum(math.exp(value - row[i]) for value in row)) / (2 * size)
        for matrix in (logits, columns)
        for i, row in enumerate(matrix)
    )
    if not method.entailment_weight:
        return contrastive, 0.0
    entailment = [
        max(0.0, excess(method.geometry, text, image, method.min_radius, method.curvature_init))
        for text, image in zip(texts, images)
    ]
    return contrastive, method.entailment_weight * sum(entailment) / size


def first_batch(config):
    training = open_training_data(config, open_training_pairs(config.data, config.run.seed), None)
    batch = next(iter(batches_from(0, config, training, Accelerator(cpu=True))))
    torch.manual_seed(config.run.seed)
    model = build_model(config, training.tokenizer)
    return model, *as_inputs(batch, training.transform, torch.device("cpu"))


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("table4_")])  # every geometry, norm and loss
def test_three_steps_of_every_method_begin_with_the_loss_of_loops(row, tmp_path, not_evaluated):
    records = lines(run(tmp_path, row, *SHORT))
    assert len(records) == 3
    assert all(math.isfinite(record["loss"]) for record in records)
    config = config_of(row, *SHORT)
    model, images, token_ids = first_batch(config)
    with torch.no_grad():
        images, texts, _ = model(images, token_ids)
    contrastive, entailment = loop_loss(config, images.double().tolist(), texts.double().tolist())
    assert records[0]["contrastive_loss"] == pytest.approx(contrastive, rel=1e-5)
    assert records[0]["loss"] == pytest.approx(contrastive + entailment, rel=1e-5)
    assert ("entailment_loss" in records[0]) == bool(config.method.entailment_weight)
    norms = [embeddings.norm(dim=1).mean().item() for embeddings in (images, texts)]
    assert [records[0]["image_norm"], records[0]["text_norm"]] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
def test_training_lowers_both_losses(tmp_path, not_evaluated):
    settings = ("data.num_train=32", "optim.steps=90", "optim.learning_rate=3.0e-3", "optim.warmup_steps=20")
    records = lines(run(tmp_path, "table4_euclip", *settings, "run.evaluate_every=0", "run.save_every=0"))
    for name, drop in (("contrastive_loss", 0.4), ("entailment_loss", 1.0)):
        first, last = (sum(record[name] for record in part) / 5 for part in (records[:5], records[-5:]))
        assert last < first - drop, name
    assert records[-1]["image_norm"] > 1.5 * records[-1]["text_norm"]  # the entailment moves texts inwards


# the log


def test_the_log_shows_scalars_losses_norms_and_bounds(unbroken):
    records = lines(unbroken)
    assert len(records) == 6
    for record in records:
        assert record["loss"] == pytest.approx(record["contrastive_loss"] + 0.2 * record["entailment_loss"], rel=1e-6)
        assert {"logit_scale", "curvature", "image_scale", "text_scale", "image_norm", "text_norm"} <= set(record)
        assert record["bound_hits"] == 0
    assert records[0]["logit_scale"] == pytest.approx(1 / 0.07)
    assert records[0]["curvature"] == 1.0
    assert records[0]["image_scale"] == pytest.approx(32**-0.5)
    assert records[-1]["curvature"] != 1.0


def test_scalars_stay_within_their_bounds_and_hits_are_counted(tmp_path, not_evaluated):
    bounds = ("method.logit_scale_max=14.29", "method.curvature_min=0.99", "method.curvature_max=1.01")
    records = lines(run(tmp_path, "table4_meru", *SHORT, *bounds, "optim.learning_rate=0.1"))
    assert max(record["logit_scale"] for record in records) <= 14.29 * (1 + 1e-6)
    assert all(0.99 * (1 - 1e-6) <= record["curvature"] <= 1.01 * (1 + 1e-6) for record in records)
    assert sum(record["bound_hits"] for record in records) > 0
    assert len({record["curvature"] for record in records}) > 1


def test_the_published_factor_of_scalar_gradients_changes_the_course_of_a_run(tmp_path, not_evaluated):
    # a large eps lets the factor show; with a small one Adam hides it
    loud = (*SHORT, "optim.epsilon=1000", "optim.learning_rate=1.0")
    once = lines(run(tmp_path / "once", "table4_meru", *loud))
    twice = lines(run(tmp_path / "twice", "table4_meru", *loud, "method.scalar_gradient_factor=2"))
    moved = [math.log(records[1]["logit_scale"] / records[0]["logit_scale"]) for records in (once, twice)]
    assert moved[1] == pytest.approx(2 * moved[0], rel=0.05)
    assert abs(moved[0]) > 1e-6


# micro-batches, processes


def test_micro_batches_train_as_one_batch(unbroken, tmp_path, not_evaluated):
    parts = lines(run(tmp_path, "table4_meru", *SMALL_END, "optim.micro_batch_size=5"))
    for name in ("loss", "entailment_loss", "curvature", "text_scale", "gradient_norm"):
        expected = [record[name] for record in lines(unbroken)]
        assert [record[name] for record in parts] == pytest.approx(expected, rel=1e-4), name


def test_two_processes_equal_one():
    rows = ("table4_euclip", "table4_meru", "table4_hyperbolic_squared_entailment")
    methods = [config_of(row).method for row in rows]
    single, pair = share_of_a_step(methods), in_processes(2, share_of_a_step, methods)
    for one, *halves in zip(single, *pair):
        assert sum(half["loss"] for half in halves) / 2 == pytest.approx(float(one["loss"]), rel=1e-12)
        for name, gradient in one["scalars"].items():
            mean = sum(half["scalars"][name] for half in halves) / 2  # as DDP averages
            torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-14)
        for side in (0, 1):
            joined = torch.cat([half["features"][side] for half in halves]) / 2
            torch.testing.assert_close(joined, one["features"][side], rtol=1e-10, atol=1e-14)


def run_from_weights(folder, source):
    """Three steps of a run's text tower and scalars on its locked image tower; on as many processes as there are."""
    if dist.is_initialized():
        as_launched()
    config = config_of("table4_meru", *SHORT, f"model.init={source}", "model.image.lock=all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.run.training.evaluate_and_save", lambda *arguments: None)
        files, pairs = RunFiles(Path(folder)), open_training_pairs(config.data, 0)
        train(config, pairs, files, False, launched_accelerator(), "test")


def test_two_processes_start_from_the_same_weights_as_one(unbroken, tmp_path):
    run_from_weights(tmp_path / "one", unbroken.folder)
    in_processes(2, run_from_weights, str(tmp_path / "two"), str(unbroken.folder))
    one, two = (lines(RunFiles(tmp_path / name)) for name in ("one", "two"))
    for name in ("loss", "entailment_loss", "curvature", "text_scale", "text_norm", "gradient_norm"):
        assert [record[name] for record in two] == pytest.approx([record[name] for record in one], rel=1e-4)
    trained, before = (
        last_checkpoint(folder / "checkpoints").model_tensors() for folder in (tmp_path / "two", unbroken.folder)
    )
    still = {name for name, value in before.items() if name in trained and torch.equal(trained[name], value)}
    assert still == {name for name in before if name.startswith("image_tower.")}
