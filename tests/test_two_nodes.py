"""Training on two nodes: two hosts of this machine, network namespaces with a cable between them.

`make test-slow` runs it as root; elsewhere it is skipped.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_launch import losses

IS_POSSIBLE = os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_POSSIBLE, reason="network namespaces need root and the command ip"),
]
HOSTS = ("vlg-node-0", "vlg-node-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
ROWS = {
    "euclip/configs/table4_euclip.yaml": [],
    "geomm/configs/clip_geo.yaml": ["start.row=", "method.queue_size=24"],
}
FEW = ["optim.warmup_steps=1", "run.log_every=1", "run.evaluate_every=0", "data.num_test=16", "data.num_labelled=8"]


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def hosts():
    """Two hosts, each with one address on a cable to the other."""
    for host in HOSTS:
        ip("netns", "add", host)
    try:
        ip("link", "add", "cable0", "netns", HOSTS[0], "type", "veth", "peer", "name", "cable1", "netns", HOSTS[1])
        for number, host in enumerate(HOSTS):
            ip("-n", host, "address", "add", f"{ADDRESSES[number]}/24", "dev", f"cable{number}")
            for device in (f"cable{number}", "lo"):
                ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "delete", host, check=False)


def command(row, folder, *settings):
    script = f"{row.split('/')[0]}/train.py"
    return [script, "--config", row, "--scale", "smoke", "--output-dir", str(folder), *FEW, *ROWS[row], *settings]


def started(number, folder, arguments):
    """The process of one host, as a launcher there would start it."""
    places = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    places |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": f"cable{number}"}
    environment = os.environ | {name: str(value) for name, value in places.items()} | {"ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        ["ip", "netns", "exec", HOSTS[number], sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=(folder / f"output-{number}.txt").open("w"),
        stderr=subprocess.STDOUT,
    )


def outputs(folder):
    return [(folder / f"output-{number}.txt").read_text() for number in (0, 1)]


def wait_for_steps(folder, processes, count):
    while not (folder / "log.jsonl").exists() or len(losses(folder)) < count:
        assert all(process.poll() is None for process in processes), outputs(folder.parent)
        time.sleep(0.2)


@pytest.mark.parametrize("row", ROWS)
def test_two_nodes_have_the_losses_of_one_process(row, hosts, tmp_path):
    arguments = command(row, tmp_path / "two", "optim.steps=4")
    processes = [started(number, tmp_path, arguments) for number in (0, 1)]
    assert [process.wait(timeout=200) for process in processes] == [0, 0], outputs(tmp_path)
    alone = command(row, tmp_path / "one", "optim.steps=4")
    subprocess.run([sys.executable, *alone], cwd=ROOT, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, check=True)
    assert len(losses(tmp_path / "one")) == 4
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    # behind the first graph, at step 3, the last bit of a feature may decide to which cluster it belongs
    before = 2 if "geo" in row else 4
    assert two[:before] == pytest.approx(one[:before], rel=1e-6)
    assert two == pytest.approx(one, rel=5e-3)  # measured: 1e-3


@pytest.mark.parametrize("fault", ["killed", "cable cut"])
def test_a_node_that_is_gone_ends_the_other_with_a_message(fault, hosts, tmp_path):
    row = "euclip/configs/table4_euclip.yaml"
    arguments = command(row, tmp_path / "run", "optim.steps=100000", "run.process_timeout=20")
    processes = [started(number, tmp_path, arguments) for number in (0, 1)]
    try:
        wait_for_steps(tmp_path / "run", processes, 3)
        if fault == "killed":
            processes[1].send_signal(signal.SIGKILL)
        else:
            ip("-n", HOSTS[1], "link", "set", "cable1", "down")
        assert processes[0].wait(timeout=60) != 0
        last = outputs(tmp_path)[0].splitlines()[-1]
        assert last.startswith("error: another process of this run has ended or cannot be reached"), last
        assert "Traceback" not in outputs(tmp_path)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
