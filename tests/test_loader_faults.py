"""A run whose loader dies or lacks shared memory says why, the former with what it has trained saved.

Loaders that die or stand still on two processes are in tests/test_resume.py.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_resume import ended, last_line, saved_steps, started

from common.base.signals import stop_signals
from common.data.loader import Loader, NoBatch
from common.run.log import read_log


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
    assert "Traceback" not in (tmp_path / "output-0.txt").read_text()
    last = last_line(tmp_path)
    assert re.match(r"error: the loader of scenes/train, 256 pictures \(\w+\) \(run.num_workers=2\) has lost a", last)
    assert f"saved at step {step} of 5000 in {tmp_path}; to" in last


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


class SlowRows:
    def __len__(self):
        return 2

    def __getitem__(self, row):
        time.sleep(0.3)
        return row


@pytest.mark.parametrize("stops_at_signal", [True, False])
def test_a_signal_ends_the_wait_of_training_but_not_of_an_evaluation(monkeypatch, stops_at_signal):
    monkeypatch.setattr("common.data.loader.TURN", 0.05)
    loader = Loader(SlowRows(), "rows", 1, stops_at_signal=stops_at_signal)
    with stop_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        if stops_at_signal:
            with pytest.raises(NoBatch, match="received a stop signal while the loader of rows"):
                list(loader)
        else:
            assert [int(row) for row in loader] == [0, 1]
