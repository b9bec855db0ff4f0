"""Checkpoints: exact round trip, damage detected anywhere, another model refused."""

import json

import pytest
import torch
from torch import nn

from common.run.checkpoint import CheckpointError, last_checkpoint, open_checkpoint, save_checkpoint


def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        inputs = torch.full((4, 3), float(step + 1))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))


def test_training_goes_on_to_the_last_bit_after_loading(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, 3, model, optimizer, {"note": "é"})
    unbroken = train(model, optimizer, 4)

    other, other_optimizer = make()
    train(other, other_optimizer, 1)  # state that must be overwritten
    checkpoint = last_checkpoint(tmp_path)
    checkpoint.load_model(other)
    checkpoint.load_optimizer(other, other_optimizer)
    assert checkpoint.state["step"] == 3
    assert checkpoint.state["note"] == "é"
    assert train(other, other_optimizer, 4) == unbroken
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.1, 0.0]


def test_only_the_newest_are_kept_and_no_half_written_folder_stays(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, step, model, optimizer, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    assert last_checkpoint(tmp_path).state["step"] == 10


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut in half", "one bit", "missing", "empty"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, name, damage):
    model, optimizer = make()
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    save_checkpoint(tmp_path, 2, model, optimizer, {})
    file = tmp_path / "step-00000002" / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "one bit" and name != "state.json":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut in half" or name == "state.json" else b"")
    with pytest.warns(UserWarning, match="step-00000002.*trying the checkpoint before it"):
        assert last_checkpoint(tmp_path).state["step"] == 1


def test_checkpoints_that_cannot_be_used_are_an_error_and_no_fresh_start(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, model, optimizer, {})
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        last_checkpoint(tmp_path)


def test_damaged_later_checkpoints_do_not_push_out_a_new_one(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    for step in (100, 500, 600):
        save_checkpoint(tmp_path, step, model, optimizer, {}, keep=3)
    for step in (500, 600):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"damaged")
    save_checkpoint(tmp_path, 200, model, optimizer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000200"]
    assert last_checkpoint(tmp_path).state["step"] == 200


def test_a_checkpoint_of_another_model_is_refused_with_the_parameters_named(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    other = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6))
    with pytest.raises(CheckpointError, match="checkpoint of another model: 6 parameters differ") as error:
        last_checkpoint(tmp_path).load_model(other)
    assert "0.weight is (5, 3), the model has (6, 3)" in str(error.value)


def test_folders_that_are_no_checkpoints_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint: it has no state\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99; accepted: 1"):
        open_checkpoint(tmp_path)
    assert last_checkpoint(tmp_path / "nowhere") is None
