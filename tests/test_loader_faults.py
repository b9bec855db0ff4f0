"""A run whose loader dies, stands still or lacks shared memory ends with what it has trained saved, and says why."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
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
    assert re.fullmatch(rf"{message}; saved at step {step} of {STEPS} in {folder}; the same command resumes .*", last)
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


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_whose_loader_process_is_killed_saves_its_last_step_and_names_the_loader(processes, tmp_path, unbroken):
    assert ended(started(tmp_path, *TWO_WORKERS, "fault=killed", processes=processes)) == [1] * processes
    message = f"error: {LOADER} has lost a process: SIGKILL, as the system sends it where memory runs out"
    lasts = {text.splitlines()[-1] for text in outputs(tmp_path, processes)}
    assert len(lasts) == 1
    assert_saved_and_same(tmp_path, *lasts, message, processes, unbroken)


@pytest.mark.parametrize(
    ("asked", "processes"),
    [
        (None, 2),
        (signal.SIGTERM, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((None, 1), (signal.SIGTERM, 2), (signal.SIGINT, 1), (signal.SIGINT, 2))
        ),
    ],
)
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
        message = f"received a stop signal while {LOADER} had no batch ready"
    assert ended(children) == [STOPPED_EXIT_STATUS] * processes
    last = outputs(tmp_path, processes)[0].splitlines()[-1]
    assert assert_saved_and_same(tmp_path, last, message, processes, unbroken) == 12


def test_the_paper_s_script_saves_its_last_step_when_a_loader_process_is_killed(tmp_path):
    settings = ("run.log_every=1", "run.evaluate_every=0", "run.save_every=0", "run.num_workers=2", "optim.steps=5000")
    (trainer,) = started(tmp_path, *settings, script="oblique_topology.train")
    while not (tmp_path / "log.jsonl").exists() or '"step": 3' not in (tmp_path / "log.jsonl").read_text():
        assert trainer.is_alive()
        time.sleep(0.01)
    workers = [child for child in psutil.Process(trainer.pid).children() if child.name() == "pt_data_worker"]
    workers[0].kill()
    assert ended([trainer]) == [1]
    (step,) = saved_steps(tmp_path)
    log = read_log(tmp_path / "log.jsonl")
    assert [record["step"] for record in log if record["event"] == "train"] == list(range(1, step + 1))
    last = outputs(tmp_path, 1)[0].splitlines()[-1]
    assert re.match(r"error: the loader of scenes/train, 256 pictures \(\w+\) \(run.num_workers=2\) has lost a", last)
    assert (
        f"SIGKILL, as the system sends it where memory runs out; saved at step {step} of 5000 in {tmp_path}; to" in last
    )


SMALL_MEMORY = """
import torch
from common.data.loader import Loader, NoBatch

class Pictures(torch.utils.data.Dataset):
    def __getitems__(self, places):
        return torch.zeros(len(places), 3, 64, 64, dtype=torch.uint8)  # 98,304 bytes for 8

def end_of(num_workers, filled=0):
    order = [[place] * 8 for place in range(40)]
    loader = Loader(Pictures(), "pictures", num_workers, lambda batch: batch, 4, batch_sampler=order)
    with open("/dev/shm/other", "wb") as other:
        other.write(bytes(filled))
    try:
        return sum(len(batch) for batch in loader)
    except NoBatch as error:
        return error

print(end_of(4), end_of(2), end_of(0), end_of(2, filled=700_000), sep="\\n")
"""


def test_too_little_shared_memory_is_known_before_the_first_step_with_the_number_of_processes_that_fits():
    """1.2 MB: 18 batches of 98,304 bytes are too many, 10 fit; then another program fills it."""
    small = "mount -t tmpfs -o size=1200k tmpfs /dev/shm && "
    if subprocess.run(["unshare", "-m", "sh", "-c", small + "true"], capture_output=True).returncode:
        pytest.skip("no right to mount a small /dev/shm")
    script = [sys.executable, "-W", "ignore", "-c", SMALL_MEMORY]
    command = ["unshare", "-m", "sh", "-c", f'{small} exec "$@"', "sh", *script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[1])
    assert not ended.stderr
    refused, fits, without, filled = ended.stdout.splitlines()
    assert fits == without == "320"
    assert refused == (
        "the loader of pictures (run.num_workers=4) puts up to 18 batches of 0.0983 MB into /dev/shm, 1.77 MB, where "
        "1.23 MB are free for it; expected: run.num_workers=2, or more shared memory (docker run --shm-size=1g)"
    )
    assert filled == (
        "the loader of pictures (run.num_workers=2) has filled /dev/shm; expected: fewer loader processes "
        "(run.num_workers), or more shared memory (docker run --shm-size)"
    )
