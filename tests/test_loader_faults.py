"""A run whose loader dies, stands still or lacks shared memory ends with what it has trained saved, and says why."""

import os
import re
import signal
import time

import pytest
from test_resume import SAME_DRAWS, STEPS, assert_same_run, ended, records, run, saved_steps, started

from common.base.signals import STOPPED_EXIT_STATUS
from common.run.log import read_log

LOADER = r"the loader of scenes/train \(run\.num_workers=2\)"
TWO_WORKERS = (*SAME_DRAWS, "run.num_workers=2", "run.save_every=0")


def assert_saved_and_same(folder, last, message, processes, unbroken):
    """The message, the checkpoint that it names, and that the run goes on from there to what an unbroken one gives."""
    (step,) = saved_steps(folder)
    assert len(records(folder)) == step < STEPS
    assert re.fullmatch(rf"{message}; saved at step {step} of {STEPS} in {folder}; the same command goes on .*", last)
    assert run(folder, *SAME_DRAWS, processes=processes) == 0
    assert_same_run(folder, unbroken(processes))
    return step


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Folder of an unbroken run of so many processes; each is trained once."""
    folders = {}

    def of(processes):
        if processes not in folders:
            folders[processes] = tmp_path_factory.mktemp("unbroken")
            assert run(folders[processes], *SAME_DRAWS, processes=processes) == 0
        return folders[processes]

    return of


def outputs(folder, processes):
    texts = [(folder / f"output-{rank}.txt").read_text() for rank in range(processes)]
    assert not any("Traceback" in text for text in texts)
    return texts


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_loader_process_is_killed_saves_its_last_step_and_names_the_loader(processes, tmp_path, unbroken):
    assert ended(started(tmp_path, *TWO_WORKERS, "fault=killed", processes=processes)) == [1] * processes
    message = f"error: {LOADER} has lost a process: SIGKILL, as the system sends it where memory runs out"
    lasts = {text.splitlines()[-1] for text in outputs(tmp_path, processes)}
    assert len(lasts) == 1
    assert_saved_and_same(tmp_path, *lasts, message, processes, unbroken)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("asked", [None, signal.SIGTERM, signal.SIGINT])
def test_a_run_whose_data_do_not_come_ends_in_time_and_at_a_signal_with_its_last_step_saved(
    asked, processes, tmp_path, unbroken
):
    timeout = 2 if asked is None else 600
    children = started(tmp_path, *TWO_WORKERS, "fault=stuck", f"run.data_timeout={timeout}", processes=processes)
    message = f"{LOADER} has given no batch for 2 seconds, run\\.data_timeout .*"
    if asked is not None:
        while not (tmp_path / "log.jsonl").exists() or len(read_log(tmp_path / "log.jsonl")) < 12:
            time.sleep(0.001)
        time.sleep(1)  # now it waits
        for child in children:  # as a launcher passes it on
            os.kill(child.pid, asked)
        message = f"asked to stop, while {LOADER} had no batch ready"
    assert ended(children) == [STOPPED_EXIT_STATUS] * processes
    last = outputs(tmp_path, processes)[0].splitlines()[-1]
    assert assert_saved_and_same(tmp_path, last, message, processes, unbroken) == 12
