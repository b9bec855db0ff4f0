"""Checkpoints: exact round trip, damage detected at any byte, a full disk and another model refused."""

import os
import resource
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
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
        loss = model(torch.full((4, 3), float(step + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(kind=torch.optim.AdamW, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    return model, kind(groups, lr=0.05, **options)


SGD = torch.optim.SGD


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "made",
    [partial(make, betas=(0.8, 0.9)), partial(make, SGD), partial(make, SGD, momentum=0.9)],
    ids=["AdamW", "SGD", "momentum"],
)
def test_training_goes_on_to_the_last_bit_also_after_steps_with_a_frozen_layer(tmp_path, made, frozen):
    model, optimizer = made()
    model[2].requires_grad_(not frozen)
    train(model, optimizer, 3)
    model[2].requires_grad_(True)
    save_checkpoint(tmp_path, 3, model, optimizer, {"note": "é"})
    unbroken = train(model, optimizer, 4)

    other, other_optimizer = made()
    train(other, other_optimizer, 1)  # state that must be overwritten
    checkpoint = last_checkpoint(tmp_path)
    checkpoint.load_model(other)
    checkpoint.load_optimizer(other, other_optimizer)
    assert (checkpoint.state["step"], checkpoint.state["note"]) == (3, "é")
    assert train(other, other_optimizer, 4) == unbroken


def test_an_optimisers_state_of_other_names_is_refused_as_it_would_be_lost(tmp_path):
    model, optimizer = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"state of 0.*, which is not in the model"):
        last_checkpoint(tmp_path).load_optimizer(nn.Sequential(model), optimizer)


def saved(folder, *steps, **options):
    """A run's folder with a checkpoint of each step, of slightly different weights."""
    model, optimizer = make()
    for step in steps:
        train(model, optimizer, 1)
        save_checkpoint(folder, step, model, optimizer, {"config": {"a": [1, None]}}, **options)
    return model, optimizer


_, OPTIMIZER, STATE = FILES


def a_folder_instead(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (OPTIMIZER, a_folder_instead),
        (STATE, lambda file: file.write_bytes(file.read_bytes() + b"\n")),
        (SUMS, Path.unlink),
        (SUMS, lambda file: file.write_bytes(file.read_bytes() + b"\n")),
    ],
    ids=["a folder", "longer", "missing", "longer sums"],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, name, damage):
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    with pytest.warns(UserWarning, match="step-00000002.*trying the checkpoint before it"):
        assert last_checkpoint(tmp_path).state["step"] == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_file_cut_or_flipped_at_any_byte_is_detected_and_named(tmp_path, draw):
    path = tmp_path / "step-00000001"
    if not path.exists():
        saved(tmp_path, 1)
    name = draw.draw(st.sampled_from([*FILES, SUMS]))
    whole = (path / name).read_bytes()
    position = draw.draw(st.integers(0, len(whole) - 1))
    bit = draw.draw(st.none() | st.integers(0, 7))
    flipped = b"" if bit is None else bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :]
    try:
        (path / name).write_bytes(whole[:position] + flipped)
        with pytest.raises(CheckpointError, match="step-00000001 is damaged: the sha256 of") as error:
            open_checkpoint(path)
        assert name == SUMS or name in str(error.value)
    finally:
        (path / name).write_bytes(whole)
    assert open_checkpoint(path).state["step"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99}', f"has format 99; expected an object of format {checkpoint_module.FORMAT}"),
        ("[]", f"has no object; expected an object of format {checkpoint_module.FORMAT}"),
        ("{", "is no JSON: "),
    ],
)
def test_a_state_of_another_format_is_refused_though_its_sum_is_right(tmp_path, content, message):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    (path / "state.json").write_text(content)
    (path / SUMS).write_text("".join(checkpoint_module._sum_lines(path)))
    refused((f"{path}.*{message}", lambda: open_checkpoint(path)), error=CheckpointError)


def test_weights_that_are_not_finite_are_refused_when_loaded(tmp_path):
    """A model of NaN ranks too; nothing of ours writes such a file, a tool that averages or converts may."""
    model, _ = saved(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    tensors, name = checkpoint.model_tensors(), next(iter(dict(model.named_parameters())))
    for bad in (float("nan"), float("inf")):
        save_file(tensors | {name: torch.full_like(tensors[name], bad)}, checkpoint.path / "model.safetensors")
        message = rf"model.safetensors holds weights that are not finite: {name}$"
        refused((message, lambda: checkpoint.load_model(model)), error=CheckpointError)


def test_the_sums_are_those_of_the_standard_tool(tmp_path):
    if shutil.which("sha256sum") is None:
        pytest.skip("needs sha256sum")
    saved(tmp_path, 1)
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path / "step-00000001", capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name}: OK" for name in FILES]


@pytest.mark.parametrize("umask", [0o022, 0o077])
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
    assert {file.stat().st_mode for file in files} == {(tmp_path / "plain").stat().st_mode}


def test_a_checkpoint_that_a_run_removes_while_it_is_read_gives_way_to_the_newer_one(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    read = Path.read_bytes

    def gone(path):
        if path.parent.name == "step-00000001":
            shutil.rmtree(path.parent)
            saved(tmp_path, 2)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    last = last_checkpoint(tmp_path)
    assert last.path.name == "step-00000002"
    shutil.rmtree(last.path)
    refused((r"model\.safetensors is gone, as if its run had gone on", last.model_tensors), error=CheckpointError)


def test_half_written_folders_and_copies_with_other_names_are_no_checkpoints_and_copies_stay(tmp_path):
    assert saved_step(tmp_path / "nowhere") is None
    (tmp_path / ".writing-step-00000009").mkdir()
    (tmp_path / ".writing-step-00000009" / "model.safetensors").write_bytes(b"half")
    assert saved_step(tmp_path) is last_checkpoint(tmp_path) is None
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
    message = "(?s)^cannot write .*/step-00000002: .*File too large.*What was saved before stays: step-00000001$"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, model_size // 2, model_size, len(content["optimizer.safetensors"])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # the system refuses to write more, as if full
        try:
            with pytest.raises(CheckpointError, match=message):
                save_checkpoint(tmp_path, 2, model, optimizer, {"filler": "x" * 5000}, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert content == {file.name: file.read_bytes() for file in (tmp_path / "step-00000001").iterdir()}
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=1)
    assert last_checkpoint(tmp_path).state["step"] == 2


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model, optimizer = saved(tmp_path, 1)
    with torch.no_grad():
        model[0].bias[1] = float("inf")
        model[2].weight[0, 0] = float("nan")
    other, other_optimizer = make()
    other.register_buffer("queue", torch.tensor([1.0, float("nan")]))
    train(other, other_optimizer, 1)
    refused(
        (
            r"after step 2 these are not finite: 0\.bias, 2\.weight",
            lambda: save_checkpoint(tmp_path, 2, model, optimizer, {}),
        ),
        (
            "not finite: queue; earlier checkpoints in",
            lambda: save_checkpoint(tmp_path, 2, other, other_optimizer, {}),
        ),
        error=CheckpointError,
    )
    assert last_checkpoint(tmp_path).state["step"] == 1


def test_tied_weights_and_infinite_buffers_are_saved_and_weights_stay_tied(tmp_path):
    def tied(distance):
        model, _ = make()
        model.append(nn.Linear(3, 5, bias=False))
        model[3].weight = model[0].weight
        model.register_buffer("part", model[1].weight.detach()[1:3])
        model.register_buffer("paths", torch.tensor([0.5, distance]))
        model.register_buffer("pointer", torch.tensor(3 if distance else 0))
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = tied(float("inf"))
    model[2](model[1](model[0](torch.ones(2, 3)))).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    other, other_optimizer = tied(0.0)
    checkpoint = last_checkpoint(tmp_path)
    checkpoint.load_model(other)
    checkpoint.load_optimizer(other, other_optimizer)
    assert other[3].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other.part, model[1].weight[1:3])
    assert (other.paths.tolist(), other.pointer.item(), other.pointer.dtype) == ([0.5, float("inf")], 3, torch.int64)


def test_checkpoints_that_cannot_be_used_are_an_error_and_no_fresh_start(tmp_path):
    saved(tmp_path, 1, 2)
    for path in tmp_path.glob("*/model.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        last_checkpoint(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


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
            function(*arguments, **options)
            seen.append(last_checkpoint(tmp_path).state["step"])

        return looking

    for place, name in ((checkpoint_module, "save_file"), (checkpoint_module, "_flush"), (shutil, "rmtree")):
        monkeypatch.setattr(place, name, look(getattr(place, name)))
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=keep)
    assert seen == sorted(seen)
    assert (set(seen), len(seen) >= 16) == ({1, 2}, True)


def test_a_checkpoint_of_another_model_and_a_folder_that_is_none_are_refused(tmp_path):
    saved(tmp_path, 1)
    other = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6))
    differing = (
        r"of another model: .*Unexpected key.*2\.weight.* size mismatch for 0\.weight: .*\(\[5, 3\]\).*\(\[6, 3\]\)"
    )
    refused(
        (differing, lambda: last_checkpoint(tmp_path).load_model(other)),
        (r"no whole checkpoint: model\.safetensors, .*SHA256SUMS missing", lambda: open_checkpoint(tmp_path)),
        error=CheckpointError,
    )
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
    of_seeds = r"seeds: runs of seed3; expected one of them, as in .*seeds/seed3$"
    refused(
        ("start.run = .*nowhere: no such folder", lambda: named_checkpoint(tmp_path / "nowhere", "start.run")),
        ("README.md: a file; expected the folder of a run", lambda: named_checkpoint(tmp_path / "README.md")),
        (of_seeds, lambda: named_checkpoint(tmp_path / "seeds")),
        error=CheckpointError,
    )
