"""Checkpoints: exact round trip, damage detected at any byte, a full disk and another model refused."""

import json
import os
import resource
import shutil
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import common.run.checkpoint as checkpoint_module
from common.run.checkpoint import (
    FILES,
    SUMS,
    CheckpointError,
    last_checkpoint,
    named_checkpoint,
    open_checkpoint,
    save_checkpoint,
    saved_step,
    set_aside_later,
    write_published,
)
from common.run.sources import run_checkpoint


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


def saved(folder, *steps, **options):
    """A run's folder with a checkpoint of each step, of slightly different weights."""
    model, optimizer = make()
    for step in steps:
        train(model, optimizer, 1)
        save_checkpoint(folder, step, model, optimizer, {"config": {"a": [1, None]}}, **options)
    return model, optimizer


MODEL, OPTIMIZER, STATE = FILES


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (MODEL, "missing"), (OPTIMIZER, "a folder"), (STATE, "longer"),
        (SUMS, "missing"), (SUMS, "a folder"), (SUMS, "longer"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, name, damage):
    saved(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(content + b"\n")
    with pytest.warns(UserWarning, match="step-00000002.*trying the checkpoint before it"):
        assert last_checkpoint(tmp_path).state["step"] == 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_file_cut_or_flipped_at_any_byte_is_detected_and_named(tmp_path, draw):
    path = tmp_path / "step-00000001"
    if not path.exists():
        saved(tmp_path, 1)
    name = draw.draw(st.sampled_from([*FILES, SUMS]))
    whole = (path / name).read_bytes()
    position = draw.draw(st.integers(0, len(whole) - 1))
    bit = draw.draw(st.none() | st.integers(0, 7))
    if bit is None:
        torn = whole[:position]
    else:
        torn = whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :]
    try:
        (path / name).write_bytes(torn)
        with pytest.raises(CheckpointError, match="step-00000001 is damaged: the sha256 of") as error:
            open_checkpoint(path)
        assert name == SUMS or name in str(error.value)
    finally:
        (path / name).write_bytes(whole)
    assert open_checkpoint(path).state["step"] == 1


@pytest.mark.parametrize("key", ["format", "step", "optimizer_groups", None])
def test_a_state_of_another_type_is_refused_though_its_sum_is_right(tmp_path, key):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    state = json.loads((path / "state.json").read_text())
    for wrong in ([1], {"a": 1}, "1", None, True, 1.5) if key != "optimizer_groups" else (None,):
        (path / "state.json").write_text(json.dumps(wrong if key is None else {**state, key: wrong}))
        (path / SUMS).write_text("".join(checkpoint_module._sum_lines(path)))
        with pytest.raises(CheckpointError, match=str(path)):
            open_checkpoint(path)


def test_a_file_of_another_checkpoint_is_refused_though_it_is_whole(tmp_path):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002"
    shutil.copy(tmp_path / "step-00000001" / MODEL, path / MODEL)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged: the sha256 of {MODEL}"):
        open_checkpoint(path)


def test_weights_that_are_not_finite_are_refused_when_loaded(tmp_path):
    """A model of NaN ranks too; nothing of ours writes such a file, a tool that averages or converts may."""
    model, _ = saved(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    tensors, name = checkpoint.model_tensors(), next(iter(dict(model.named_parameters())))
    for bad in (float("nan"), float("inf")):
        save_file(tensors | {name: torch.full_like(tensors[name], bad)}, checkpoint.path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"model.safetensors holds weights that are not finite: {name}$"):
            checkpoint.load_model(model)


def test_the_sums_are_those_of_the_standard_tool(tmp_path):
    if shutil.which("sha256sum") is None:
        pytest.skip("needs sha256sum")
    saved(tmp_path, 1)
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path / "step-00000001", capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name}: OK" for name in FILES]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_rights_of_any_new_file(tmp_path, umask):
    """safetensors alone makes them private, whatever the umask."""
    before = os.umask(umask)
    try:
        saved(tmp_path, 1)
        checkpoint = last_checkpoint(tmp_path)
        write_published(checkpoint, tmp_path / "published")
        (tmp_path / "plain").write_bytes(b"")
    finally:
        os.umask(before)
    files = [file for folder in (checkpoint.path, tmp_path / "published") for file in folder.iterdir()]
    assert {file.suffix for file in files} >= {".safetensors", ".json"}
    assert {file.stat().st_mode for file in files} == {(tmp_path / "plain").stat().st_mode}


def test_half_written_folders_and_copies_with_other_names_are_no_checkpoints_and_copies_stay(tmp_path):
    assert saved_step(tmp_path / "nowhere") is None
    (tmp_path / ".writing-step-00000009").mkdir()
    (tmp_path / ".writing-step-00000009" / "model.safetensors").write_bytes(b"half")
    assert saved_step(tmp_path) is None
    assert last_checkpoint(tmp_path) is None
    model, optimizer = saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001-mine")
    for step in (2, 3, 100_000_000):  # also past eight digits
        save_checkpoint(tmp_path, step, model, optimizer, {}, keep=2)
    left = ["step-00000001-mine", "step-00000003", "step-100000000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert last_checkpoint(tmp_path).state["step"] == 100_000_000


def test_a_full_disk_is_a_clear_error_and_leaves_what_was_there(tmp_path):
    model, optimizer = saved(tmp_path, 1)
    content = {file.name: file.read_bytes() for file in (tmp_path / "step-00000001").iterdir()}
    model_size = len(content["model.safetensors"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, model_size // 2, model_size, len(content["optimizer.safetensors"])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # the system refuses to write more, as if full
        try:
            with pytest.raises(CheckpointError) as error:
                save_checkpoint(tmp_path, 2, model, optimizer, {"filler": "x" * 5000}, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(error.value).startswith(f"cannot write {tmp_path / 'step-00000002'}: ")
        assert "File too large" in str(error.value)
        assert str(error.value).endswith("What was saved before stays: step-00000001")
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert content == {file.name: file.read_bytes() for file in (tmp_path / "step-00000001").iterdir()}
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=1)
    assert last_checkpoint(tmp_path).state["step"] == 2


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model, optimizer = saved(tmp_path, 1)
    with torch.no_grad():
        model[0].bias[1] = float("inf")
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"after step 2 these are not finite: 0\.bias, 2\.weight"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    model, optimizer = make()
    model.register_buffer("queue", torch.tensor([1.0, float("nan")]))
    train(model, optimizer, 1)
    with pytest.raises(CheckpointError, match="not finite: queue; earlier checkpoints in"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    assert last_checkpoint(tmp_path).state["step"] == 1


def test_buffers_travel_with_the_weights_and_may_be_infinite(tmp_path):
    model, optimizer = make()
    model.register_buffer("paths", torch.tensor([0.5, float("inf")]))
    model.register_buffer("pointer", torch.tensor(3))
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    tensors = last_checkpoint(tmp_path).model_tensors()
    assert tensors["paths"].tolist() == [0.5, float("inf")]
    assert (tensors["pointer"].dtype, tensors["pointer"].item()) == (torch.int64, 3)


def test_tied_weights_are_saved_and_stay_tied(tmp_path):
    def tied():
        model, _ = make()
        model.append(nn.Linear(3, 5, bias=False))
        model[3].weight = model[0].weight
        model.register_buffer("part", model[1].weight.detach()[1:3])
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = tied()
    model[2](model[1](model[0](torch.ones(2, 3)))).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    other, other_optimizer = tied()
    checkpoint = last_checkpoint(tmp_path)
    checkpoint.load_model(other)
    checkpoint.load_optimizer(other, other_optimizer)
    assert other[3].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other.part, model[1].weight[1:3])


def test_checkpoints_that_cannot_be_used_are_an_error_and_no_fresh_start(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, model, optimizer, {})
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        last_checkpoint(tmp_path)


def test_damaged_later_checkpoints_are_set_aside_and_do_not_push_out_a_new_one(tmp_path):
    model, optimizer = saved(tmp_path, 100, 500, 600, keep=3)
    for step in (500, 600):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"damaged")
    for _ in range(2):  # the same ones once more, as after a second accident
        set_aside_later(tmp_path, 100)
        shutil.copytree(tmp_path / "damaged-step-00000500", tmp_path / "step-00000500")
    set_aside_later(tmp_path, 100)
    save_checkpoint(tmp_path, 200, model, optimizer, {})
    save_checkpoint(tmp_path, 500, model, optimizer, {})
    left = ["damaged-step-00000500", "damaged-step-00000600", "step-00000200", "step-00000500"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert last_checkpoint(tmp_path).state["step"] == 500


@pytest.mark.parametrize("keep", [1, 2])
def test_there_is_a_whole_checkpoint_at_every_moment_of_a_save(tmp_path, monkeypatch, keep):
    model, optimizer = saved(tmp_path, 1, keep=keep)
    seen = []

    def look(function):
        def looking(*arguments, **options):
            seen.append(last_checkpoint(tmp_path).state["step"])
            result = function(*arguments, **options)
            seen.append(last_checkpoint(tmp_path).state["step"])
            return result

        return looking

    for name in ("save_file", "_flush"):
        monkeypatch.setattr(checkpoint_module, name, look(getattr(checkpoint_module, name)))
    monkeypatch.setattr(shutil, "rmtree", look(shutil.rmtree))
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=keep)
    assert set(seen) == {1, 2}
    assert seen == sorted(seen)
    assert len(seen) >= 16


def test_a_checkpoint_of_another_model_is_refused_with_the_parameters_named(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    other = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6))
    with pytest.raises(CheckpointError, match="checkpoint of another model: 6 parameters differ") as error:
        last_checkpoint(tmp_path).load_model(other)
    assert "0.weight is (5, 3), the model has (6, 3)" in str(error.value)


def test_folders_that_are_no_checkpoints_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no whole checkpoint: model\.safetensors, .*SHA256SUMS missing"):
        open_checkpoint(tmp_path)
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    (path / SUMS).write_text("".join(checkpoint_module._sum_lines(path)))
    with pytest.raises(CheckpointError, match=f"format 99; expected {checkpoint_module.FORMAT}"):
        open_checkpoint(path)
    assert last_checkpoint(tmp_path / "nowhere") is None


def test_a_user_may_name_a_checkpoint_its_folder_or_the_run(tmp_path):
    saved(tmp_path / "run/checkpoints", 1, 2)
    one = "run/checkpoints/step-00000001"
    for path, step in (("run", 2), ("run/checkpoints", 2), (one, 1), (f"{one}/model.safetensors", 1)):
        assert named_checkpoint(tmp_path / path).state["step"] == step
        assert run_checkpoint(str(tmp_path / path)).state["step"] == step
    (tmp_path / "model.safetensors").write_bytes((tmp_path / one / "model.safetensors").read_bytes())
    assert run_checkpoint(str(tmp_path / "model.safetensors")) is None  # nothing beside it says what it is
    saved(tmp_path / "seeds/seed3/checkpoints", 1)
    (tmp_path / "README.md").touch()
    for name, message in (
        ("nowhere", "start.run = .*nowhere: no such folder; expected the folder of a run or of a checkpoint"),
        ("README.md", r"README.md: a file; expected the folder of a run"),
        ("seeds", r"seeds: runs of seed3; expected one of them, as in .*seeds/seed3$"),
    ):
        with pytest.raises(CheckpointError, match=message):
            named_checkpoint(tmp_path / name, "start.run")
