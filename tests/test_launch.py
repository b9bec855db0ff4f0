"""Entry scripts as a user starts them: by path, as a module, by Accelerate, with one process and two; and bad input."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "oblique_topology/train.py"
TWO = ["--config_file", "scripts/accelerate/cpu_two_processes.yaml"]
FEW = [
    "--scale",
    "smoke",
    "run.log_every=1",
    "run.evaluate_every=0",
    "run.save_every=0",
    "optim.steps=3",
    "optim.warmup_steps=2",
]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def start(*command, **variables):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


def losses(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["event"] == "train"]


@pytest.fixture(scope="module")
def by_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_path")
    done = start(sys.executable, TRAIN, *FEW, "--output-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_module_and_accelerate_launch_train_as_by_path(by_path, tmp_path):
    ways = {
        "module": [sys.executable, "-m", "oblique_topology.train"],
        "accelerate": [*ACCELERATE, "--config_file", "scripts/accelerate/cpu.yaml", TRAIN],
    }
    for name, command in ways.items():
        done = start(*command, *FEW, "--output-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert losses(tmp_path / name) == pytest.approx(losses(by_path), rel=1e-5)


def test_deterministic_algorithms_suffice_and_train_as_the_others(by_path, tmp_path):
    script = tmp_path / "asked.py"  # what the entry script leaves behind in its process
    script.write_text(
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch, os\n"
        f"runpy.run_path({str(ROOT / TRAIN)!r}, run_name='__main__')\n"
        "print('asked', torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
    )
    done = start(sys.executable, str(script), *FEW, "run.deterministic=true", "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "asked True :4096:8" in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(losses(by_path), rel=1e-5)


def test_two_processes_train_as_one(by_path, tmp_path):
    done = start(*ACCELERATE, *TWO, TRAIN, *FEW, "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "processes: 2" in (tmp_path / "config.yaml").read_text()
    assert losses(tmp_path) == pytest.approx(losses(by_path), rel=1e-5)
    one, two = (json.loads((folder / "evaluation.json").read_text())["evaluations"] for folder in (by_path, tmp_path))
    for name in one:
        assert two[name]["protocol"] == one[name]["protocol"]
        assert two[name]["metrics"] == pytest.approx(one[name]["metrics"], abs=0.03)  # a near tie may fall either way


def test_loss_and_every_gradient_of_two_processes_equal_one(tmp_path):
    done = start(*ACCELERATE, *TWO, "scripts/check_distributed.py", "--json", str(tmp_path / "errors.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "errors.json").read_text())
    assert report["processes"] == 2
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        assert len(report[dtype]) == 6  # two geometries; at once, in tiles, in tiles and micro-batches
        for errors in report[dtype].values():
            assert len(errors) > 60
            assert "logit_scale.log_logit_scale" in errors
            assert max(errors.values()) <= tolerance
    assert "geometry.log_curvature" in report["float64"]["hyperbolic, in tiles and micro-batches"]


@pytest.mark.parametrize(
    "script",
    [
        TRAIN,
        pytest.param("euclip/train.py", marks=pytest.mark.slow),
        pytest.param("contrastive_basics/train.py", marks=pytest.mark.slow),
        pytest.param("contrastive_basics/pretrain.py", marks=pytest.mark.slow),
    ],
)
def test_torch_compile_through_accelerate_gives_the_same_losses_and_goes_on_from_a_run_without_it(script, tmp_path):
    few = ["--scale", "smoke", "run.log_every=1", "run.evaluate_every=0", "run.save_every=3"]
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    done = start(sys.executable, script, *few, "--output-dir", str(plain), ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    shutil.copytree(plain, compiled)
    shutil.rmtree(compiled / "checkpoints" / "step-00000006")
    eager = [*ACCELERATE, "--config_file", "scripts/accelerate/cpu.yaml", "--dynamo_backend", "eager"]
    done = start(*eager, script, *few, "--output-dir", str(compiled), "--resume", TORCH_LOGS="+dynamo")
    assert done.returncode == 0, done.stderr
    assert "COMPILING" in done.stderr.upper(), "nothing was compiled"
    assert len(losses(compiled)) == 6
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    one, other = (json.loads((folder / "evaluation.json").read_text())["evaluations"] for folder in (plain, compiled))
    assert one == other


def test_a_run_killed_at_any_moment_goes_on_to_the_same_losses(tmp_path):
    few = ["--scale", "smoke", "run.log_every=1", "run.evaluate_every=0", "run.save_every=2", "optim.steps=60"]
    done = start(sys.executable, TRAIN, *few, "--output-dir", str(tmp_path / "unbroken"))
    assert done.returncode == 0, done.stderr
    killed = tmp_path / "killed"
    for kill_after in (2, 20):  # twice
        resume = ["--resume"] if (killed / "checkpoints").is_dir() else []
        command = [sys.executable, TRAIN, *few, "--output-dir", str(killed), *resume]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            steps = [int(path.name[5:]) for path in (killed / "checkpoints").glob("step-*")]
            if steps and max(steps) >= kill_after:
                break
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert not (killed / "evaluation.json").exists()
    done = start(sys.executable, TRAIN, *few, "--output-dir", str(killed), "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(tmp_path / "unbroken")  # to the last bit
    one, other = (json.loads((folder / "evaluation.json").read_text()) for folder in (tmp_path / "unbroken", killed))
    assert one["evaluations"] == other["evaluations"]


def test_fsdp2_on_two_processes_equals_one_and_writes_whole_checkpoints(tmp_path):
    script = "tests/fsdp2_two_processes.py"
    for folder in (tmp_path / "first", tmp_path / "again"):
        done = start(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", script, str(folder))
        # seen once in 65 runs with torch 2.15: the C library aborts in gloo's all-gather; nothing else is tried again
        if not ("malloc()" in done.stderr and "SIGABRT" in done.stderr):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((folder / "report.json").read_text())
    assert len(reports) == 4  # sphere, hyperbolic; at once, in micro-batches, in tiles and micro-batches
    for report in reports.values():
        assert report["sharded"] == pytest.approx(report["alone"], rel=1e-12)
        assert report["alone"][-1] < report["alone"][0] - 0.3
        assert max(report["gradient_errors"].values()) < 1e-11
        assert report["embedding_error"] < 1e-9
        assert max(report["checkpoint_errors"].values()) < 1e-9
    assert "geometry.log_curvature" in report["gradient_errors"]


def test_the_distributed_check_can_fail(tmp_path):
    # without the gradient of the gather each process sees the others' embeddings as constants
    script = tmp_path / "broken.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import common.info_nce as info_nce, common.distributed as distributed\n"
        "gather = distributed.gather_with_gradient\n"
        "def constant(tensor):\n"
        "    first = distributed.rank() * len(tensor)\n"
        "    full = gather(tensor).detach().clone()\n"
        "    full[first:first + len(tensor)] = tensor\n"
        "    return full\n"
        "info_nce.gather_with_gradient = constant\n"
        "import scripts.check_distributed as check\n"
        "check.main()\n"
    )
    done = start(*ACCELERATE, *TWO, str(script))
    assert done.returncode != 0
    assert "WRONG" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.stepz=3"], "command line: unknown key 'optim.stepz'; did you mean optim.steps?"),
        (["optim.learning_rate=.nan"], "command line: optim.learning_rate = nan; accepted: a finite number"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such config file"),
        (["optim.global_batch_size=100000"], "global_batch_size = 100000 is larger than the training set of 256"),
        (["--scale", "photos"], "data.source = shards needs a folder"),
        (["--scale", "photos", "data.root=/nowhere"], "'/nowhere'"),
    ],
)
def test_bad_input_ends_in_one_message_without_a_traceback(arguments, message):
    done = start(sys.executable, TRAIN, *FEW, *arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oblique_topology", "table99"], "oblique_topology has no table99 here yet; what exists: "),
        (["geomm", "table1"], "geomm has no table1 here yet"),
        (["clip", "table1"], "PAPER=clip is unknown; accepted: contrastive_basics, oblique_topology, euclip, geomm"),
        (
            ["oblique_topology", "table2", "--scale", "big"],
            "SCALE=big is unknown; accepted: smoke, demo, photos, paper",
        ),
        (["oblique_topology", "table2", "--seeds", "0"], "SEEDS=0 must be a whole number of seeds"),
        (["oblique_topology", "table2", "--data", "x"], "DATA=x has no effect at scale demo"),
    ],
)
def test_unknown_tables_papers_and_scales_are_one_line(arguments, message):
    done = start(sys.executable, "scripts/reproduce.py", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}"), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
