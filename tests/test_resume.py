"""Killed at any point and resumed, a run gives the losses, weights and optimiser state of an unbroken one, bit for bit.

Every run is a process of its own (tests/resume_run.py), forked from one that has the imports behind it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from processes import FORKS, free_port
from resume_run import IN_A_SAVE, IN_A_STEP, Trigger, in_child
from runs import logged

from common.base.places import ROOT
from common.base.signals import STOPPED_EXIT_STATUS
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles
from common.run.log import read_log

STEPS, EPOCH, SAVE_EVERY = 18, 8, 3  # as in resume_run.py
KILLED = -signal.SIGKILL


def started(folder, *overrides, trigger=None, everywhere=False, processes=1, script="resume_run"):
    """Processes of one run, going on from the last checkpoint in the folder. trigger: for process 0, or everywhere."""
    variables = [{}]
    if processes > 1:
        group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
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
    """What the log says of each step but its speed: loss, gradient norm and scale in full precision, and samples."""
    steps = [record for record in read_log(folder / "log.jsonl") if record["event"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    speed = {"samples_per_second", "data_wait_share"}
    return [{name: value for name, value in step.items() if name not in speed} for step in steps]


def last_line(folder, rank=0):
    return (folder / f"output-{rank}.txt").read_text().splitlines()[-1]


def last_step(folder):
    """Of the last whole checkpoint; 0 where there is none."""
    checkpoint = last_checkpoint(folder / "checkpoints")
    return 0 if checkpoint is None else checkpoint.state["step"]


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
    """Folder of an unbroken run with the given settings; trained once."""
    folders = {}

    def of(*overrides, processes=1):
        key = (*overrides, processes)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("unbroken")
            assert run(folders[key], *overrides, processes=processes) == 0
        return folders[key]

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
    assert losses[0] != records(unbroken(*SAME_DRAWS))[0]["loss"]  # before the first update only dropout differs


KILLS = (  # point, step, run.save_every
    ("optimizer half", 3, SAVE_EVERY),  # before the first checkpoint
    ("updated", 5, SAVE_EVERY),  # between two
    *zip(("model half", "flushed", "renamed", "removing"), range(7, 11), [1] * 4),
    ("second pass", 13, SAVE_EVERY),
    ("enqueued", 13, SAVE_EVERY),  # without a step of progress
    ("gradients", 16, 1),
)


def test_killed_at_one_point_after_the_other_of_steps_and_of_writing_checkpoints(tmp_path, unbroken):
    """Before, at and after the end of an epoch too, with other loader workers; the others are in the slow test below.

    Batches of 8 in micro-batches of 3, 3 and 2, with a separate rate of the logit scale.
    """
    settings = ("optim.micro_batch_size=3", "optim.logit_scale_rate=20.0")
    assert {EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH} <= {step for _, step, _ in KILLS}
    for number, (point, step, save_every) in enumerate(KILLS):
        more = (f"run.save_every={save_every}", f"run.num_workers={2 * (number % 4 == 3)}")
        assert run(tmp_path, *settings, *more, trigger=Trigger(signal.SIGKILL, point, step)) == KILLED
        before = point in IN_A_SAVE and point not in ("renamed", "removing")  # this checkpoint is not there yet
        assert last_step(tmp_path) == (step - before) // save_every * save_every, point
        assert len(records(tmp_path)) == step
    assert run(tmp_path, *settings) == 0
    assert_same_run(tmp_path, unbroken(*settings))


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


LOADER = r"the loader of scenes/train, 70 pictures \(\w+\) \(run\.num_workers=2\)"
ONLY_AT_THE_END = ("run.num_workers=2", "run.save_every=0")

STOPS = (  # point, step, signal, run.save_every, steps of the checkpoints
    ("embedded", 2, signal.SIGUSR1, 0, [3]),
    ("model half", 6, signal.SIGTERM, 3, [3, 6]),  # while a checkpoint is written
    ("enqueued", 9, signal.SIGHUP, 0, [6, 10]),
)


def test_asked_to_stop_a_run_saves_its_step_and_goes_on_from_there(tmp_path, unbroken):
    assert run(tmp_path, trigger=Trigger(signal.SIGINT, "embedded", 1, times=2)) == 130
    again = f"stopped at once: nothing is saved in {tmp_path}; the same command starts again"
    assert last_line(tmp_path).startswith(again)
    assert saved_steps(tmp_path) == []
    for point, step, asked, save_every, steps in STOPS:
        every = f"run.save_every={save_every}"
        assert run(tmp_path, every, trigger=Trigger(asked, point, step)) == STOPPED_EXIT_STATUS
        assert saved_steps(tmp_path) == steps
        saved = f"received a stop signal; saved at step {steps[-1]} of {STEPS} in {tmp_path}; the same command"
        assert last_line(tmp_path).startswith(saved)
    stuck = ("fault=stuck", "fault_step=12", "run.data_timeout=2")
    assert run(tmp_path, *ONLY_AT_THE_END, *stuck) == STOPPED_EXIT_STATUS
    message = rf"{LOADER} has given no batch for 2 seconds, run\.data_timeout .*; saved at step 12 of {STEPS} in "
    assert re.match(message, last_line(tmp_path))
    assert saved_steps(tmp_path) == [10, 12]
    assert "Traceback" not in (tmp_path / "output-0.txt").read_text()
    assert run(tmp_path) == 0
    assert_same_run(tmp_path, unbroken())


# each process draws for its own share; a low rate, so that rounding in float32 is not amplified over the steps
SAME_DRAWS = ("dropout=0.0", "optim.learning_rate=3.0e-4")


def test_another_world_size_keeps_the_order_of_samples_and_the_losses(tmp_path, unbroken):
    assert run(tmp_path, *SAME_DRAWS, trigger=Trigger(signal.SIGKILL, "updated", 5)) == KILLED
    micro = "optim.micro_batch_size=3"
    assert run(tmp_path, *SAME_DRAWS, micro, trigger=Trigger(signal.SIGKILL, "gradients", 13), processes=2) == KILLED
    assert last_step(tmp_path) == 12
    assert run(tmp_path, *SAME_DRAWS) == 0
    resumed, expected = records(tmp_path), records(unbroken(*SAME_DRAWS))
    assert [record["image_ids"] for record in resumed] == [record["image_ids"] for record in expected]
    for name in ("loss", "gradient_norm", "logit_scale"):
        values, others = ([record[name] for record in run] for run in (resumed, expected))
        assert values == pytest.approx(others, rel=1e-6 if name == "loss" else 1e-4)
    assert [record["loss"] for record in resumed][:3] == [record["loss"] for record in expected][:3]


def test_two_processes_agree_whatever_ends_them_and_go_on_to_the_losses_of_two_unbroken(tmp_path, unbroken):
    # a second Ctrl-C, which reaches both, ends them at once
    twice = Trigger(signal.SIGINT, "embedded", 4, times=2)
    assert ended(started(tmp_path, trigger=twice, everywhere=True, processes=2)) == [130] * 2
    lines = (tmp_path / "output-0.txt").read_text().splitlines()
    assert "received a stop signal: finishing and saving this step; press Ctrl-C again to end at once" in lines
    saved = f"stopped at once: the last checkpoint is step 3 in {tmp_path}; the same command resumes from there"
    assert lines[-1].startswith(saved)
    assert "stop" not in (tmp_path / "output-1.txt").read_text()
    assert saved_steps(tmp_path) == [3]

    # the main process cannot write, as on a full disk
    in_the_way = tmp_path / "checkpoints" / ".writing-step-00000006"
    in_the_way.write_text("a file where a folder must go")
    assert ended(started(tmp_path, processes=2)) == [1, 1]
    for rank in range(2):
        full = r"error: cannot write .*step-00000006: .*What was saved before stays: step-00000003"
        assert re.match(full, last_line(tmp_path, rank))
    in_the_way.unlink(missing_ok=True)

    # one of them loses a loader process
    assert ended(started(tmp_path, *ONLY_AT_THE_END, "fault=killed", "fault_step=12", processes=2)) == [1, 1]
    assert len(records(tmp_path)) == saved_steps(tmp_path)[-1] > 3
    for rank in range(2):
        lost = f"error: {LOADER} has lost a process: SIGKILL, as the system sends it where memory runs out; saved at "
        assert re.match(f"{lost}step {last_step(tmp_path)} of {STEPS} in {tmp_path}; ", last_line(tmp_path, rank))

    # one waits for data; impatient signals, as of Slurm and a launcher together, reach the loader processes too
    children = started(tmp_path, *ONLY_AT_THE_END, "fault=stuck", "fault_step=15", processes=2)
    while len(records(tmp_path)) < 15:
        assert children[0].is_alive()
        time.sleep(0.001)
    time.sleep(1)  # now it waits
    for asked in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        for child in children:
            os.killpg(child.pid, asked)
    assert ended(children) == [STOPPED_EXIT_STATUS] * 2
    waited = f"received a stop signal while {LOADER} had no batch ready; saved at step 15 of {STEPS} in {tmp_path}; "
    assert re.match(waited, last_line(tmp_path))

    # one is asked to stop
    asked = ended(started(tmp_path, trigger=Trigger(signal.SIGINT, "embedded", 15), processes=2))
    assert asked == [STOPPED_EXIT_STATUS] * 2
    assert saved_steps(tmp_path) == [15, 16]
    assert not any("Traceback" in (tmp_path / f"output-{rank}.txt").read_text() for rank in range(2))

    assert run(tmp_path, trigger=Trigger(signal.SIGKILL, "optimizer half", STEPS), processes=2) == KILLED
    assert last_step(tmp_path) == 16
    assert run(tmp_path, processes=2) == 0
    assert_same_run(tmp_path, unbroken(processes=2))


def test_a_loss_that_is_not_finite_stops_every_process(tmp_path):
    settings = ("optim.learning_rate=1.0e+18", "optim.warmup_steps=0", "run.save_every=0")
    assert ended(started(tmp_path, *settings, processes=2)) == [1, 1]
    for rank in range(2):  # the step after the one that spoilt the weights
        assert re.match(
            r"error: loss is (nan|inf) at step 2 \(learning_rate .*Largest norms: towers", last_line(tmp_path, rank)
        )
    assert saved_steps(tmp_path) == []


def test_the_paper_s_script_killed_and_asked_to_stop_goes_on_to_the_same_losses(tmp_path):
    few = ("run.log_every=1", "run.evaluate_every=5", "run.save_every=2", "data.num_test=8", "data.num_labelled=8")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    of_the_paper = {"script": "oblique_topology.train"}
    assert run(whole, *few, **of_the_paper) == 0
    for asked, step, status, saved in ((signal.SIGKILL, 3, KILLED, 2), (signal.SIGTERM, 5, STOPPED_EXIT_STATUS, 5)):
        assert run(broken, *few, trigger=Trigger(asked, "logged", step), **of_the_paper) == status
        assert last_step(broken) == saved
    assert f"received a stop signal; saved at step 5 of 6 in {broken}" in (broken / "output-0.txt").read_text()
    assert not (broken / "evaluation.json").exists()
    validated = [[record["step"] for record in read_log(broken / "log.jsonl") if record["event"] == "evaluate"]]
    assert run(broken, *few, **of_the_paper) == 0
    logs = [read_log(folder / "log.jsonl") for folder in (broken, whole)]
    validated += [[record["step"] for record in log if record["event"] == "evaluate"] for log in logs]
    assert validated == [[], [5, 5, 6, 6], [5, 5, 6, 6]]  # pairs and labels; the stop saves before the validation
    losses = logged(RunFiles(whole))
    assert (logged(RunFiles(broken)), len(losses)) == (losses, 6)  # to the last bit
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
    assert f"received a stop signal; saved at step {step} of {STEPS}" in output
    assert run(tmp_path, *SAME_DRAWS) == 0
    assert "# processes: 2, then 1\n" in (tmp_path / "config.yaml").read_text()
    resumed, expected = records(tmp_path), records(unbroken(*SAME_DRAWS))
    assert [record["image_ids"] for record in resumed] == [record["image_ids"] for record in expected]
    assert logged(RunFiles(tmp_path)) == pytest.approx([record["loss"] for record in expected], rel=1e-6)
