"""Training of the chapter's vision-language rows at smoke scale: losses against a loop by hand, exact resume."""

import math
import os
import signal
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from killed_run import resumed_after
from runs import lines, logged, row_config, trained, weights

from common.base.config import SCALES, ConfigError
from common.base.signals import Stopped
from common.data.pairs import open_training_pairs
from common.logit_scale import LogitScale
from common.run.inputs import as_inputs, batches_from, open_training_data
from common.run.training import Run
from contrastive_basics.model import build_model

PAPER = "contrastive_basics"
SHORT_END = ("run.evaluate_every=0", "data.num_test=4", "data.num_labelled=4")  # where the evaluation is not the point
QUEUE = ("method.queue_size=40", "method.ema_momentum=0.9")
TINY = (
    "data.source=scenes", "data.num_train=64", "data.image_size=32", "data.context_length=32", "data.tokenizer=words",
    "model.image.width=16", "model.image.layers=1", "model.image.heads=2", "model.text.width=16", "model.patch_size=16",
    "model.text.layers=1", "model.text.heads=2", "optim.steps=1", "optim.warmup_steps=0", "optim.global_batch_size=8",
    "run.num_workers=0", "model.image.stem.name=",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:scenes")


def config_of(*overrides, row="table1_ours", scale="smoke"):
    return row_config(PAPER, row, "run.log_every=1", *SHORT_END, *overrides, scale=scale)


def run(folder, *overrides, row="table1_ours", scale="smoke", resume=False):
    return trained(PAPER, config_of(*overrides, row=row, scale=scale), folder, resume)


def cross_entropy_by_hand(scores, targets):
    """Mean over rows of log sum exp - own score."""
    return sum(torch.logsumexp(row, 0) - row[targets[i]] for i, row in enumerate(scores)) / len(scores)


def scores_by_hand(loss, images, texts, queue):
    """Rows of pictures against captions, and of captions against pictures, pair by pair from the formula."""
    if loss == "late_interaction":
        words = [text[text.norm(dim=1) > 0] for text in texts]
        i2t = torch.stack([torch.stack([(u @ w.T).amax(1).mean() for w in words]) for u in images])
        t2i = torch.stack([torch.stack([(u @ w.T).amax(0).mean() for u in images]) for w in words])
        return i2t, t2i
    all_texts, all_images = torch.cat([texts, *queue[1]]), torch.cat([images, *queue[0]])
    return texts.new_tensor(0) + images @ all_texts.T, texts @ all_images.T


def losses_by_hand(config, steps):
    """The first losses of a row: the same samples and first weights, everything else written out."""
    pairs = open_training_pairs(config.data, config.run.seed)
    training = open_training_data(config, pairs, None)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(config.run.seed)
    model = build_model(config, training.tokenizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    spared = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or "class_embedding" in name}
    matrices, vectors = ([p for p in trained if (id(p) in spared) == little] for little in (False, True))
    optim, method = config.optim, config.method
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(optim.beta1, optim.beta2), eps=optim.epsilon,
    )  # fmt: skip
    queued_images, queued_texts, losses = [], [], []
    momentum = {name: tensor.clone() for name, tensor in model.state_dict().items() if "tower" in name}
    for step, batch in zip(range(steps), batches_from(0, config, training, accelerator)):
        images, token_ids = as_inputs(batch, training.transform, accelerator.device)
        ours, theirs = model.encode_image(images), model.encode_text(token_ids)
        i2t, t2i = scores_by_hand(method.loss, ours, theirs, (queued_images, queued_texts))
        scale, targets = model.logit_scale.log_logit_scale.exp(), range(len(images))
        loss = (cross_entropy_by_hand(scale * i2t, targets) + cross_entropy_by_hand(scale * t2i, targets)) / 2
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.max_gradient_norm)
        for group in adam.param_groups:
            if step < optim.warmup_steps:
                group["lr"] = optim.learning_rate * (step + 1) / (optim.warmup_steps + 1)
            else:
                turn = math.pi * (step - optim.warmup_steps) / (optim.steps - optim.warmup_steps)
                group["lr"] = optim.learning_rate * (1 + math.cos(turn)) / 2
        adam.step()
        if method.queue_size:
            online = model.state_dict()
            for name, tensor in momentum.items():
                if not name.startswith("memory"):
                    momentum[name] = method.ema_momentum * tensor + (1 - method.ema_momentum) * online[name]
            with torch.no_grad():
                for side, inputs, keys in (
                    ("image_tower", images, queued_images),
                    ("text_tower", token_ids, queued_texts),
                ):
                    tower = getattr(model, side)
                    state = {k.removeprefix(f"{side}."): v for k, v in momentum.items() if k.startswith(side)}
                    features = torch.func.functional_call(tower, state, inputs)
                    keys.append(features / features.norm(dim=1, keepdim=True))
    return losses


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("method.logit_scale_init=1.0", "method.logit_scale_trainable=false"),
        ("method.loss=late_interaction", "method.prompt_average=scores"),
        ("method.queue_size=64", "method.ema_momentum=0.5"),
    ],
    ids=["in batch", "no temperature", "late interaction", "queue"],
)
def test_three_steps_have_the_losses_of_a_loop_written_by_hand(tmp_path, overrides, not_evaluated):
    files = run(tmp_path, *overrides)
    assert logged(files)[:3] == pytest.approx(
        losses_by_hand(config_of(*overrides), 3), rel=1e-4
    )  # Adam makes steps of gradients that are rounding alone


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "smoke"])
def test_one_step_runs_at_every_scale_with_small_towers(scale, tmp_path, not_evaluated):
    files = run(tmp_path, *TINY, scale=scale)
    assert logged(files) == pytest.approx([math.log(8)], abs=2)


def test_a_fixed_temperature_stays_to_the_last_bit(tmp_path, not_evaluated):
    for row, expected in (("table1_without_temperature", 1.0), ("table1_fixed_temperature", 1 / 0.07)):
        files = run(tmp_path / row, "optim.learning_rate=0.05", row=row)
        (scale,) = set(logged(files, "logit_scale"))
        assert scale == pytest.approx(expected, rel=1e-5)
        first = LogitScale.from_config(config_of(row=row).method).log_logit_scale.detach()
        assert torch.equal(weights(files)["logit_scale.log_logit_scale"], first)


def test_a_run_with_queue_and_momentum_encoder_resumes_to_the_last_bit(tmp_path, not_evaluated):
    unbroken = resumed_after(3, partial(trained, PAPER, config_of(*QUEUE)), tmp_path)
    assert weights(unbroken)["memory.image_pool.queue.fill_level"] == 40  # 96 pairs have passed through


def test_ids_make_a_repeated_picture_of_the_queue_a_positive(tmp_path, not_evaluated):
    again = ("data.num_train=16", "method.queue_size=16")  # every batch holds the same 16 pictures
    by_place = logged(run(tmp_path / "diagonal", *again))
    by_id = logged(run(tmp_path / "ids", *again, "method.targets=ids"))
    assert by_id[0] == pytest.approx(by_place[0], rel=1e-6)
    assert abs(by_id[1] - by_place[1]) > 1e-3


def test_tiles_and_micro_batches_train_as_one_batch_with_ids_and_a_queue(tmp_path, not_evaluated):
    method = (*QUEUE, "method.targets=ids", "data.num_train=40")  # pictures come back while they are in the queue
    whole = run(tmp_path / "whole", *method)
    in_parts = (["optim.loss_tile=64", "optim.loss_kernel=auto"], ["optim.loss_tile=5", "optim.micro_batch_size=6"],
                ["optim.micro_batch_size=5"])  # fmt: skip
    for number, overrides in enumerate(in_parts):
        files = run(tmp_path / str(number), *method, *overrides)
        assert logged(files) == pytest.approx(logged(whole), rel=1e-6 if number == 0 else 1e-5)
        notes = [record["text"] for record in lines(files, "note")]
        assert [note.partition(" (")[0] for note in notes] == ["the loss runs in tiles of torch operations"] * (
            number == 0
        )


def test_late_interaction_in_tiles_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.loss_tile = 8 with method\.loss = late_interaction, .*expected: 0"):
        config_of("optim.loss_tile=8", row="table1_late_interaction")


def test_a_signal_during_the_evaluation_ends_the_table_behind_it(tmp_path, monkeypatch):
    evaluate = Run.evaluate

    def signalled(self, models):
        evaluate(self, models)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "evaluate", signalled)
    with pytest.raises(Stopped, match="received a stop signal: finished and evaluated, results in"):
        run(tmp_path, "optim.steps=2")
    assert (tmp_path / "evaluation.json").is_file()
