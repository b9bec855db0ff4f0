"""Killed at any point and resumed, a run gives the losses, weights and optimiser state of an unbroken one, bit for bit.

Every run is a process of its own (tests/resume_run.py), forked from one that has the imports behind it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import FORKS
from resume_run import IN_A_SAVE, IN_A_STEP, Trigger, in_child

from common.base.signals import STOPPED_EXIT_STATUS
from common.run.checkpoint import last_checkpoint
from common.run.log import read_log

ROOT = Path(__file__).resolve().parents[1]
STEPS, EPOCH, SAVE_EVERY = 18, 8, 3  # as in resume_run.py
KILLED = -signal.SIGKILL


def started(folder, *overrides, trigger=None, everywhere=False, processes=1, script="resume_run"):
    """Processes of one run, going on from the last checkpoint in the folder. trigger: for process 0, or everywhere."""
    variables = [{}]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        group |= {"LOCAL_WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true"}
        variables = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    triggers = [trigger if rank == 0 or everywhere else None for rank in range(processes)]
    children = [
        FORKS.Process(target=in_child, args=(str(folder), list(overrides), rank_trigger, rank_variables, script))
        for rank_trigger, rank_variables in zip(triggers, variables)
    ]
    for child in children:
        child.start()
    return children


def ended(children, seconds=60):
    """Exit status of each process; where one is killed the others are too, as by a launcher or a power cut."""
    deadline = time.monotonic() + seconds
    while any(child.is_alive() for child in children):
        if time.monotonic() > deadline or any(child.exitcode is not None and child.exitcode < 0 for child in children):
            for child in children:
                child.kill()
        children[0].join(0.01)
    return [child.exitcode for child in children]


def run(folder, *overrides, **options):
    return ended(started(folder, *overrides, **options))[0]


def records(folder):
    """What the log says of each step: loss, gradient norm and scale in full precision, and the samples."""
    steps = [record for record in read_log(folder / "log.jsonl") if record["event"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    return steps


def saved_steps(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def assert_same_run(folder, unbroken):
    assert records(folder) == records(unbroken)
    assert len(records(folder)) == STEPS
    one, other = last_checkpoint(folder / "checkpoints"), last_checkpoint(unbroken / "checkpoints")
    assert one.state["step"] == other.state["step"] == STEPS
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()
    assert not list((folder / "checkpoints").glob(".writing-*"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Folder of an unbroken run with the given settings; each is trained once."""
    folders = {}

    def of(*overrides):
        if overrides not in folders:
            folders[overrides] = tmp_path_factory.mktemp("unbroken")
            assert run(folders[overrides], *overrides) == 0
        return folders[overrides]

    return of


def test_the_unbroken_run_is_one_that_a_lost_state_would_change(unbroken):
    losses = [record["loss"] for record in records(unbroken())]
    assert len(set(losses)) == STEPS
    assert [record["epoch"] for record in records(unbroken())] == [step // EPOCH for step in range(STEPS)]
    tensors = last_checkpoint(unbroken() / "checkpoints").model_tensors()
    for queue in ("image_queue", "text_queue"):
        assert tensors[f"{queue}.pointer"].item() == STEPS * 8 % 20 != 0  # it has wrapped, with a remainder
    for name in ("image_tower.projection", "logit_scale.log_logit_scale"):
        assert not torch.equal(tensors[f"momentum_towers.encoder.{name}"], tensors[f"towers.{name}"])
    without = [record["loss"] for record in records(unbroken("dropout=0.0"))]
    assert all(with_dropout != loss for with_dropout, loss in zip(losses, without))


def test_killed_at_one_point_after_the_other_of_steps_and_of_writing_checkpoints(tmp_path, unbroken):
    """Before, at and after the end of an epoch too, twice without a step of progress, with other loader workers."""
    in_a_step = [point for point in IN_A_STEP if point != "second pass"]  # that one belongs to accumulation
    kills = [("updated", 2), *zip(IN_A_SAVE, range(4, 4 + len(IN_A_SAVE))), *zip(in_a_step, (13, 13, 15, 16))]
    assert {EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH} <= {step for _, step in kills}
    for number, (point, step) in enumerate(kills):
        more = ("run.save_every=1", f"run.num_workers={2 * (number % 4 == 3)}")
        assert run(tmp_path, *more, trigger=Trigger(signal.SIGKILL, point, step)) == KILLED
        whole = last_checkpoint(tmp_path / "checkpoints").state["step"]
        before = point in IN_A_SAVE and point not in ("renamed", "removing")  # this checkpoint is not there yet
        assert whole == (step - 1 if before else step), point
        assert len(records(tmp_path)) == step
    assert run(tmp_path, "run.save_every=1") == 0
    assert_same_run(tmp_path, unbroken())


def test_killed_between_checkpoints_and_before_the_first_one(tmp_path, unbroken):
    assert run(tmp_path, trigger=Trigger(signal.SIGKILL, "optimizer half", 3)) == KILLED
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".writing-step-00000003"]
    for point, step in (("updated", 5), ("embedded", 13)):
        assert run(tmp_path, trigger=Trigger(signal.SIGKILL, point, step)) == KILLED
        assert saved_steps(tmp_path)[-1] == step // SAVE_EVERY * SAVE_EVERY
    assert run(tmp_path) == 0
    assert_same_run(tmp_path, unbroken())


def test_killed_with_accumulation_under_way(tmp_path, unbroken):
    micro = "optim.micro_batch_size=3"  # 3, 3 and 2 of a batch of 8
    assert run(tmp_path, micro, trigger=Trigger(signal.SIGKILL, "second pass", 10)) == KILLED
    assert len(records(tmp_path)) == 10
    assert run(tmp_path, micro) == 0
    assert_same_run(tmp_path, unbroken(micro))


@pytest.mark.slow  # quick: tests/test_common_schedule.py, and other groups above
def test_a_separate_rate_of_the_logit_scale_resumes_with_its_moments(tmp_path, unbroken):
    faster = "optim.logit_scale_rate=20.0"
    assert run(tmp_path, faster, trigger=Trigger(signal.SIGKILL, "updated", 11)) == KILLED
    assert run(tmp_path, faster) == 0
    assert_same_run(tmp_path, unbroken(faster))
    scales = [[record["scale"] for record in records(folder)] for folder in (tmp_path, unbroken())]
    assert scales[0][1:] != scales[1][1:]


@pytest.mark.slow
@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("save_every", [1, 3])
def test_killed_at_every_point_of_every_step(tmp_path, unbroken, micro, save_every):
    settings = () if micro is None else (f"optim.micro_batch_size={micro}",)
    kills = 0
    for step in range(STEPS):
        points = [(point, step) for point in IN_A_STEP if point != "second pass" or micro is not None]
        if (step + 1) % save_every == 0 or step + 1 == STEPS:
            # once renamed, a checkpoint is not written again; there is one to remove from the third on
            last = "removing" if step % 2 and step + 1 > 2 * save_every else "renamed"
            points += [(point, step + 1) for point in (*IN_A_SAVE[:-2], last)]
        for point, reached_at in points:
            trigger = Trigger(signal.SIGKILL, point, reached_at)
            command = (*settings, f"run.save_every={save_every}", f"run.num_workers={kills % 2}")
            assert run(tmp_path, *command, trigger=trigger) == KILLED, trigger
            kills += 1
    assert run(tmp_path, *settings) == 0
    assert_same_run(tmp_path, unbroken(*settings))
    print(f"killed {kills} times, micro-batches of {micro}, a checkpoint every {save_every} steps")


@pytest.mark.slow  # quick: tests/test_common_checkpoint.py
def test_without_a_whole_checkpoint_the_run_stops_and_touches_nothing(tmp_path):
    assert run(tmp_path, trigger=Trigger(signal.SIGKILL, "updated", 7)) == KILLED
    for step in saved_steps(tmp_path):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "state.json").write_text("{}")
    log = (tmp_path / "log.jsonl").read_bytes()
    assert run(tmp_path) == 1
    last = (tmp_path / "output-0.txt").read_text().splitlines()[-1]
    assert re.match("error: none of the 2 checkpoints in .* can be used; the oldest: .*step-00000003 is damaged", last)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    assert saved_steps(tmp_path) == [3, 6]


def test_asked_to_stop_a_run_saves_its_step_and_goes_on_from_there(tmp_path, unbroken):
    only_at_the_end = "run.save_every=0"
    steps = {"embedded": (4, signal.SIGTERM), "gradients": (8, signal.SIGUSR1)}
    steps |= {"updated": (11, signal.SIGINT), "enqueued": (14, signal.SIGHUP)}
    for point, (step, asked) in steps.items():
        assert run(tmp_path, only_at_the_end, trigger=Trigger(asked, point, step)) == STOPPED_EXIT_STATUS
        assert saved_steps(tmp_path)[-1] == step + 1
        last = (tmp_path / "output-0.txt").read_text().splitlines()[-1]
        assert last.startswith(
            f"received a stop signal: saved at step {step + 1} of {STEPS} in {tmp_path}; the same command"
        )
    assert run(tmp_path, only_at_the_end) == 0
    assert_same_run(tmp_path, unbroken())


def test_asked_to_stop_while_a_checkpoint_is_written_the_run_stops_a_step_later(tmp_path, unbroken):
    assert run(tmp_path, trigger=Trigger(signal.SIGTERM, "model half", 6)) == STOPPED_EXIT_STATUS
    assert saved_steps(tmp_path) == [6, 7]
    assert run(tmp_path) == 0
    assert_same_run(tmp_path, unbroken())


def test_a_signal_to_the_whole_process_group_does_not_reach_the_loader(tmp_path, unbroken):
    children = started(tmp_path, "run.num_workers=2", "run.save_every=0")
    while not (tmp_path / "log.jsonl").exists() or len(read_log(tmp_path / "log.jsonl")) < 2:
        time.sleep(0.001)
    # impatient, as Slurm and a launcher together are; Ctrl-C and a closed terminal reach the loader, too
    for asked in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.killpg(children[0].pid, asked)
    assert ended(children) == [STOPPED_EXIT_STATUS]
    assert "Traceback" not in (tmp_path / "output-0.txt").read_text()
    assert len(records(tmp_path)) == saved_steps(tmp_path)[-1] < STEPS
    assert run(tmp_path) == 0
    assert_same_run(tmp_path, unbroken())


# each process draws for its own share; a low rate, so that rounding in float32 is not amplified over the steps
SAME_DRAWS = ("dropout=0.0", "optim.learning_rate=3.0e-4")


def test_another_world_size_keeps_the_order_of_samples_and_the_losses(tmp_path, unbroken):
    assert run(tmp_path, *SAME_DRAWS, trigger=Trigger(signal.SIGKILL, "updated", 5)) == KILLED
    assert run(tmp_path, *SAME_DRAWS, trigger=Trigger(signal.SIGKILL, "gradients", 11), processes=2) == KILLED
    micro = "optim.micro_batch_size=3"
    assert run(tmp_path, *SAME_DRAWS, micro, trigger=Trigger(signal.SIGKILL, "updated", 14), processes=2) == KILLED
    assert run(tmp_path, *SAME_DRAWS) == 0
    resumed, expected = records(tmp_path), records(unbroken(*SAME_DRAWS))
    assert [record["image_ids"] for record in resumed] == [record["image_ids"] for record in expected]
    for name in ("loss", "gradient_norm", "scale"):
        values, others = ([record[name] for record in run] for run in (resumed, expected))
        assert values == pytest.approx(others, rel=1e-6 if name == "loss" else 1e-4)
    assert [record["loss"] for record in resumed][:3] == [record["loss"] for record in expected][:3]


def test_two_processes_killed_give_the_losses_of_two_unbroken_and_agree_when_one_is_asked_to_stop(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert ended(started(whole, processes=2)) == [0, 0]
    assert run(broken, trigger=Trigger(signal.SIGKILL, "optimizer half", 9), processes=2) == KILLED
    asked = ended(started(broken, trigger=Trigger(signal.SIGINT, "embedded", 12), processes=2))
    assert asked == [STOPPED_EXIT_STATUS] * 2
    assert saved_steps(broken)[-1] == 13
    assert run(broken, processes=2) == 0
    assert_same_run(broken, whole)


def test_a_loss_that_is_not_finite_stops_every_process(tmp_path):
    settings = ("optim.learning_rate=1.0e+18", "optim.warmup_steps=0", "run.save_every=0")
    assert ended(started(tmp_path, *settings, processes=2)) == [1, 1]
    for rank in range(2):  # the step after the one that spoilt the weights
        last = (tmp_path / f"output-{rank}.txt").read_text().splitlines()[-1]
        assert re.match(r"error: loss is (nan|inf) at step 1 \(scale .*Largest norms: towers", last)
    assert saved_steps(tmp_path) == []


def test_a_disk_that_is_full_on_the_main_process_stops_all_of_them(tmp_path):
    assert run(tmp_path, trigger=Trigger(signal.SIGKILL, "updated", 4), processes=2) == KILLED
    (tmp_path / "checkpoints" / ".writing-step-00000006").write_text("a file where a folder must go")
    assert ended(started(tmp_path, processes=2)) == [1, 1]
    for rank in range(2):
        last = (tmp_path / f"output-{rank}.txt").read_text().splitlines()[-1]
        assert re.match(r"error: cannot write .*step-00000006: .*What was saved before stays: step-00000003", last)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_ctrl_c_ends_at_once_and_tells_what_is_saved(tmp_path, processes):
    goes_on = f"the last checkpoint is step 3 in {tmp_path}; the same command resumes from there"
    for step, message in ((1, f"nothing is saved in {tmp_path}; the same command starts again"), (4, goes_on)):
        twice = Trigger(signal.SIGINT, "embedded", step, times=2)
        assert ended(started(tmp_path, trigger=twice, everywhere=True, processes=processes)) == [130] * processes
        first, *_, last = (tmp_path / "output-0.txt").read_text().splitlines()[-3:]
        assert first.startswith(
            "received a stop signal: finishing and saving this step; press Ctrl-C again to end at once"
        )
        assert last.startswith(f"stopped at once: {message}")
        assert saved_steps(tmp_path) == ([] if step == 1 else [3])
    others = [(tmp_path / f"output-{rank}.txt").read_text() for rank in range(1, processes)]
    assert not any("stop" in output or "Traceback" in output for output in others)


def test_the_paper_s_script_killed_and_asked_to_stop_goes_on_to_the_same_losses(tmp_path):
    few = (
        "run.log_every=1",
        "run.evaluate_every=0",
        "run.save_every=2",
        "optim.steps=40",
        "data.num_test=8",
        "data.num_labelled=8",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    script = "oblique_topology.train"
    assert run(whole, *few, script=script) == 0
    for asked, reached, status in ((signal.SIGKILL, 2, KILLED), (signal.SIGTERM, 12, STOPPED_EXIT_STATUS)):
        children = started(broken, *few, script=script)
        while children[0].is_alive() and max(saved_steps(broken), default=0) < reached:
            time.sleep(0.001)
        os.kill(children[0].pid, asked)
        assert ended(children) == [status]
    step = saved_steps(broken)[-1]
    assert 12 <= step < 40
    assert f"received a stop signal: saved at step {step} of 40 in {broken}" in (broken / "output-0.txt").read_text()
    assert not (broken / "evaluation.json").exists()
    assert run(broken, *few, script=script) == 0
    one, other = (read_log(folder / "log.jsonl") for folder in (broken, whole))
    losses = [[record["loss"] for record in log if record["event"] == "train"] for log in (one, other)]
    assert losses[0] == losses[1]  # to the last bit
    assert len(losses[0]) == 40
    one, other = (json.loads((folder / "evaluation.json").read_text())["evaluations"] for folder in (broken, whole))
    assert one == other


@pytest.mark.slow
def test_a_launcher_that_is_asked_to_stop_passes_it_on_and_one_process_goes_on(tmp_path, unbroken):
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "scripts/accelerate/cpu_two_processes.yaml", "tests/resume_run.py"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [*command, str(tmp_path), *SAME_DRAWS, "run.save_every=0"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "log.jsonl").exists() or len(read_log(tmp_path / "log.jsonl")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    launcher.terminate()
    output, _ = launcher.communicate(timeout=60)
    # not our 143: torch's launcher ends its processes and then raises SignalException, whose traceback leaves with 1
    assert launcher.returncode == 1
    assert "SignalException: Process" in output.splitlines()[-1]
    (step,) = saved_steps(tmp_path)
    assert step < STEPS, "the run was over before the signal came"
    assert f"received a stop signal: saved at step {step} of {STEPS}" in output
    assert run(tmp_path, *SAME_DRAWS) == 0
    resumed, expected = records(tmp_path), records(unbroken(*SAME_DRAWS))
    assert [record["image_ids"] for record in resumed] == [record["image_ids"] for record in expected]
    losses = [[record["loss"] for record in records_of] for records_of in (resumed, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
