"""Rows trained side by side: as one after the other to the last bit; signals, divergence, killed processes."""

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from processes import FORKS

from common.base.config import ConfigError
from common.base.signals import Stopped, stop_signals
from common.reproduce import side_by_side
from common.reproduce.rows import Job, PaperCode, is_missing, run_row
from common.reproduce.side_by_side import at_once, run_rows, train_side_by_side
from common.run.checkpoint import saved_step
from common.run.guards import NonFiniteLoss
from oblique_topology.config import Config
from oblique_topology.evaluate import PAPER, evaluated_sets, reevaluate
from oblique_topology.train import train

# as in reproduce.py, whose figures would be imported by every process
CODE = PaperCode(PAPER, Config, train, reevaluate, open_tests=evaluated_sets)
TINY = (
    "data.num_train=24", "data.num_val=8", "data.num_test=8", "data.gallery=8", "data.num_labelled=8",
    "data.image_size=24", "optim.steps=2", "optim.warmup_steps=0", "optim.global_batch_size=8",
    "run.evaluate_every=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def two_at_once(monkeypatch):
    """On a machine with one core too, by processes that start at once."""
    monkeypatch.setattr(side_by_side, "at_once", lambda: 2)
    monkeypatch.setattr(side_by_side, "PROCESSES", FORKS)
    forkserver.ensure_running()  # it would keep the signals blocked that are while a process starts
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not multiprocessing.active_children()


def jobs_in(folder, *more, train=train):
    """Both rows of Table 2."""
    code = replace(CODE, train=train)
    return [Job(code, f"table2_{row}.yaml", "demo", 0, (*TINY, *more), folder) for row in ("clip", "multi")]


def test_side_by_side_is_one_after_the_other_to_the_last_bit(tmp_path, capsys):
    both = run_rows({"both": jobs_in(tmp_path / "both")})["both"]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "table2_clip, seed 0", "table2_multi, seed 0"
    ]  # fmt: skip
    run, single = both[1], run_row(jobs_in(tmp_path / "alone")[1])
    assert (run.evaluations, run.hits, run.hardware) == (single.evaluations, single.hits, single.hardware)
    assert run.files.folder.relative_to(tmp_path / "both") == single.files.folder.relative_to(tmp_path / "alone")
    name = "checkpoints/step-00000002/model.safetensors"
    assert (run.files.folder / name).read_bytes() == (single.files.folder / name).read_bytes()
    assert not any(is_missing(job) for job in jobs_in(tmp_path / "both"))


def once(condition, *actions):
    """Starts a thread that waits for the condition, and takes an action every second."""

    def act():
        while not condition():
            time.sleep(0.02)
        for action in actions:
            action()
            time.sleep(1)

    threading.Thread(target=act, daemon=True).start()


def ctrl_c():
    """As a terminal sends it: to all processes."""
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        os.kill(process, signal.SIGINT)


def begun(folder):
    logs = list(folder.glob("*/*/*/log.jsonl"))
    return len(logs) == 2 and all('"train"' in log.read_text() for log in logs)


def test_ctrl_c_saves_all_and_tells_the_step_of_each(tmp_path, terminal_signals):
    once(lambda: begun(tmp_path), ctrl_c)
    with pytest.raises(Stopped) as stopped:
        run_rows({"both": jobs_in(tmp_path, "optim.steps=5000", "run.save_every=0")})
    lines = sorted(str(stopped.value).splitlines(), key=lambda line: line.partition(" in ")[2])
    for line, folder in zip(lines, sorted(tmp_path.glob("*/*/*")), strict=True):
        assert f"saved at step {saved_step(folder / 'checkpoints')} of 5000 in {folder}" in line


def waits(config, pairs, files, *others):
    files.log.write_text(json.dumps({"event": "train", "process": os.getpid()}))
    time.sleep(600)


def stuck(config, pairs, files, *others):
    """A training whose step does not end."""
    with stop_signals():
        waits(config, pairs, files)


def test_a_second_signal_ends_all_at_once(tmp_path, terminal_signals):
    once(lambda: begun(tmp_path), ctrl_c, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"^the same command resumes$"):
        train_side_by_side(jobs_in(tmp_path, train=stuck))


def dies(config, pairs, files, *others):
    """Is killed, as for the memory it takes; in the next process it tells which one that is."""
    mark = files.folder / "killed"
    if mark.exists():
        raise ConfigError(f"process {os.getpid()}")
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_its_run_to_the_first_one(tmp_path):
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        run_rows({"both": jobs_in(tmp_path, train=dies)})
    assert len(list(tmp_path.glob("*/*/*/killed"))) == 2


def diverges(*arguments):
    raise NonFiniteLoss("loss is nan at step 3")


def refuses(*arguments):
    raise ConfigError("data.root: there is nothing")


@pytest.mark.parametrize("train", [diverges, refuses])
def test_a_run_fails_with_the_message_of_a_single_run(tmp_path, capsys, train):
    errors = []
    for folder, run in (("alone", lambda jobs: run_row(jobs[0])), ("both", lambda jobs: run_rows({"both": jobs}))):
        with pytest.raises((NonFiniteLoss, ConfigError)) as error:
            run(jobs_in(tmp_path / folder, train=train))
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    assert errors[0][1] in capsys.readouterr().err  # at once, not when the others have ended


def first_process(folder):
    side_by_side.at_once, side_by_side.PROCESSES = lambda: 2, multiprocessing.get_context("fork")
    train_side_by_side(jobs_in(folder, train=waits))


def test_all_end_when_the_first_process_is_killed(tmp_path):
    first = FORKS.Process(target=first_process, args=(tmp_path,))
    first.start()
    while not begun(tmp_path):
        time.sleep(0.02)
    trainers = [json.loads(log.read_text())["process"] for log in tmp_path.glob("*/*/*/log.jsonl")]
    first.kill()
    first.join()
    until = time.monotonic() + 30
    while alive := [process for process in trainers if runs(process)]:
        assert time.monotonic() < until, alive
        time.sleep(0.02)


def runs(process):
    """Whether there is such a process and it has not ended; nobody may have asked yet how it did."""
    status = Path(f"/proc/{process}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_one_run_a_core_but_one_in_all_on_an_accelerator_and_in_a_launch(monkeypatch):
    monkeypatch.setattr(side_by_side, "cores", lambda: 8)
    monkeypatch.setattr(side_by_side, "MEMORY", 1)
    assert at_once() == 8
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # OMP_NUM_THREADS=3
    assert at_once() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert at_once() == 8
    for change in (
        lambda patch: patch.setenv("WORLD_SIZE", "1"),
        lambda patch: patch.setattr(torch.accelerator, "is_available", lambda: True),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert at_once() == 1
    monkeypatch.setattr(side_by_side, "MEMORY", 2**60)
    assert at_once() == 0
