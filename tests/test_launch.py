"""Entry scripts as a user starts them: by path, as a module, by Accelerate, with one process and two; and bad input."""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fsdp2_two_processes import compare_all
from processes import FORKS, free_port, in_processes, once_more_after_a_crash
from runs import called
from two_processes import trained_and_checked

from common.base.config import ConfigError, _check_script
from common.base.places import ROOT
from common.reproduce.rows import Job, run_row
from common.run import training
from common.run.checkpoint import CheckpointError
from common.run.folder import RunFiles, only_run_in
from common.run.launch import command_to_resume, interrupted_with_saved_step, run_or_explain
from contrastive_basics import pretrain
from euclip import evaluate as euclip_evaluate
from euclip import train as euclip_train
from geomm import finetune
from geomm import train as geomm_train
from oblique_topology import train
from oblique_topology.reproduce import CODE as OBLIQUE
from scripts import evaluate, reproduce

TRAIN = "oblique_topology/train.py"
FEW = [
    "--scale",
    "smoke",
    "run.log_every=1",
    "run.evaluate_every=0",
    "run.save_every=0",
    "optim.steps=3",
    "optim.warmup_steps=2",
]
LABELLED = "data.num_labelled=200"  # a near tie that falls the other way is half a percent
TABLE = ("oblique_topology", "table2")


def start(*command, **variables):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


def losses(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["event"] == "train"]


def evaluations(folder):
    return json.loads((folder / "evaluation.json").read_text())["evaluations"]


@pytest.fixture(scope="module")
def by_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_path")
    done = start(sys.executable, TRAIN, *FEW, LABELLED, "--output-dir", str(folder))
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    return folder


def test_a_finished_run_says_what_it_measured_and_where_that_lies(by_path):
    output = (by_path / "stdout.txt").read_text()
    assert "\n  test: i2t R@1 " in output
    assert "\n  imagenet: acc " in output
    assert output.splitlines()[-1].endswith(str(by_path))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What tests/two_processes.py writes, started once for all that is asked of two processes."""
    folder = tmp_path_factory.mktemp("two")
    in_processes(2, trained_and_checked, folder, *FEW, LABELLED)
    return folder


def as_a_module(name, *arguments):
    """As `python -m` starts it, in a process that has the imports of others behind it."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = [name, *map(str, arguments)]
    sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_as_a_module_with_deterministic_algorithms_it_trains_as_by_path(by_path, tmp_path):
    arguments = [*FEW, "run.deterministic=true", "run.test=false", "--output-dir", tmp_path]
    assert in_processes(1, as_a_module, "oblique_topology.train", *arguments) == [(True, ":4096:8")]
    assert losses(tmp_path) == pytest.approx(losses(by_path), rel=1e-5)


def test_two_processes_train_as_one(by_path, two):
    assert "processes: 2" in (two / "config.yaml").read_text()
    assert losses(two) == pytest.approx(losses(by_path), rel=1e-5)
    one, other = evaluations(by_path), evaluations(two)
    for name in one:
        assert other[name]["protocol"] == one[name]["protocol"]
        assert other[name]["metrics"] == pytest.approx(one[name]["metrics"], abs=0.03)  # a near tie may fall either way


def test_loss_and_every_gradient_of_two_processes_equal_one_and_the_check_can_fail(two):
    report = json.loads((two / "report.json").read_text())
    assert report["right"]["status"] == 0, report["right"]["output"]
    assert report["wrong"]["status"] == 1
    assert "WRONG" in report["wrong"]["output"]
    report = json.loads((two / "errors.json").read_text())
    assert report["processes"] == 2
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        assert len(report[dtype]) == 6  # two geometries; at once, in tiles, in tiles and micro-batches
        for errors in report[dtype].values():
            assert len(errors) > 60
            assert "logit_scale.log_logit_scale" in errors
            assert max(errors.values()) <= tolerance
    assert "geometry.log_curvature" in report["float64"]["hyperbolic, in tiles and micro-batches"]


def trained(script, folder, overrides, backend=None):
    """Frames that were compiled in a run of an entry script."""
    if backend is not None:
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = backend  # as `accelerate launch --dynamo_backend`
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = [script, *overrides, "--output-dir", folder]
    importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()
    return torch._dynamo.utils.counters["frames"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, "contrastive_basics/pretrain.py"])
def test_torch_compile_through_accelerate_gives_the_same_losses_and_goes_on_from_a_run_without_it(script, tmp_path):
    few = ["--scale", "smoke", "run.log_every=1", "run.evaluate_every=0", "run.save_every=3"]
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    assert in_processes(1, trained, script, str(plain), few) == [0]
    shutil.copytree(plain, compiled)
    shutil.rmtree(compiled / "checkpoints" / "step-00000006")
    (frames,) = in_processes(1, trained, script, str(compiled), [*few, "--resume"], "EAGER")
    assert frames > 0, "nothing was compiled"
    assert len(losses(compiled)) == 6
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    assert evaluations(compiled) == evaluations(plain)


@pytest.mark.slow  # quick: tests/test_sharding.py
@once_more_after_a_crash
def test_fsdp2_on_two_processes_equals_one_and_writes_whole_checkpoints(tmp_path):
    reports = in_processes(2, compare_all, tmp_path)[0]
    assert len(reports) == 4  # sphere, hyperbolic; at once, in micro-batches, in tiles and micro-batches
    for report in reports.values():
        assert report["sharded"] == pytest.approx(report["single"], rel=1e-12)
        assert report["single"][-1] < report["single"][0] - 0.3
        assert max(report["gradient_errors"].values()) < 1e-11
        assert report["embedding_error"] < 1e-9
        assert max(report["checkpoint_errors"].values()) < 1e-9
    assert "geometry.log_curvature" in report["gradient_errors"]


@pytest.mark.parametrize(
    ("main", "words", "first_use"),
    [
        (geomm_train.main, ["--scale", "smoke"], "common.reproduce.rows.run_row"),
        (reproduce.main, [*TABLE, "--scale", "smoke"], "common.reproduce.side_by_side.run_row"),
        (euclip_evaluate.main, ["--checkpoint", "run"], "common.run.evaluation.named_checkpoint"),
    ],
)
def test_processes_wait_as_long_as_the_setting_says_also_for_the_run_that_a_row_starts_from(
    main, words, first_use, monkeypatch
):
    class FirstUse(Exception):
        pass

    def used(*arguments):
        raise FirstUse

    timeouts = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("common.run.launch.PartialState", lambda cpu, timeout: timeouts.append(timeout.total_seconds()))
    monkeypatch.setattr(first_use, used)
    with pytest.raises(FirstUse):
        called(main, *words, "run.process_timeout=77")
    assert timeouts == [77]


def launched(number, nodes, port, function, folder, words):
    """As process `number` of two that have no group yet; what the function returns is written."""
    local = {"LOCAL_RANK": str(number % (2 // nodes)), "LOCAL_WORLD_SIZE": str(2 // nodes)}
    os.environ |= {**local, "RANK": str(number), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    (folder / f"{number}.txt").write_text(function(number, folder, *words))


def of_two_launched(function, folder, *words, nodes=1):
    """What `function(number, folder, *words)` returns in each of two processes that a launcher has started."""
    port = free_port()
    processes = [FORKS.Process(target=launched, args=(n, nodes, port, function, folder, words)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()  # where it waits for the other
    return [(folder / f"{number}.txt").read_text() for number in range(2)]


def resumed(number, folder):
    return message_of(train.main, *FEW, "--output-dir", str(folder / str(number)), "--resume")


def test_a_resume_on_disks_of_which_one_has_no_checkpoint_ends_everywhere_with_one_message(by_path, tmp_path):
    shutil.copytree(by_path / "checkpoints", tmp_path / "0" / "checkpoints")
    one, other = of_two_launched(resumed, tmp_path, nodes=2)
    assert one == other
    assert one.startswith(f"error: process 1 of 2: --resume: {tmp_path / '1'} holds no checkpoint")


def answered(number, folder, *words):
    sys.argv = ["evaluate.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_or_explain(evaluate.main)
    return printed.getvalue()


@pytest.mark.parametrize("options", [["--json"], ["--json", "--tasks", "retrieval,zero_shot"]])
def test_launched_processes_share_an_evaluation_and_one_of_them_answers(options, by_path, tmp_path, capsys):
    words = [str(by_path), *options, "data.num_test=6", "data.num_labelled=6"]
    called(evaluate.main, *words)
    single = json.loads(capsys.readouterr().out)
    first, second = of_two_launched(answered, tmp_path, *words)
    shared = json.loads(first)
    if "--tasks" not in options:  # code and hardware are those of a process
        single, shared = single["evaluations"], shared["evaluations"]
    assert (shared, second) == (single, "")


def answer_refused(number, folder, *words):
    return message_of(evaluate.main, *words)


def row_refused(number, folder):
    return message_of(lambda: run_row(Job(OBLIQUE, "table2_clip.yaml", "smoke", 0, (), folder)))


def test_what_the_main_process_cannot_write_or_lock_ends_the_others_with_its_message(by_path, tmp_path):
    (tmp_path / "notes").touch()
    output = str(tmp_path / "notes/answer.json")
    messages = of_two_launched(answer_refused, tmp_path, str(by_path), "--output", output, LABELLED, "data.num_test=6")
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"error: process 0 of 2: --output {output}: [Errno ")
    files = Job(OBLIQUE, "table2_clip.yaml", "smoke", 0, (), tmp_path).opened()[2]
    with only_run_in(files):
        messages = of_two_launched(row_refused, tmp_path)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"error: process 0 of 2: another process trains in {files.folder}; ")


def message_of(main, *arguments):
    """What a script called with these arguments prints before it ends with status 1."""
    with pytest.raises(SystemExit) as ended:
        called(lambda: run_or_explain(main), *arguments)
    return ended.value.code


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (
            train.main,
            (*FEW, "optim.learning_rate=nan"),
            "command line: optim.learning_rate = nan; expected: a finite n",
        ),
        (train.main, (*FEW, "--config", "no/where.yaml"), "no/where.yaml: no such config file"),
        (train.main, (*FEW, "--config", "table2_mutli"), "no row of oblique_topology; did you mean table2_multi?"),
        (train.main, (*FEW, "optim.global_batch_size=100000"), "100000 is larger than the training set of 256"),
        (train.main, (*FEW, "--scale", "photos"), "data.source = shards needs a folder"),
        (train.main, (*FEW, "--scale", "photos", "data.root=/nowhere"), "'/nowhere'"),
        (
            reproduce.main,
            ("oblique_topology", "table99"),
            "error: oblique_topology has no table99; did you mean table9?",
        ),
        (
            reproduce.main,
            ("clip", "table1"),
            "error: PAPER=clip is unknown; expected one of: contrastive_basics, obliq",
        ),
        (
            reproduce.main,
            (*TABLE, "--scale", "big"),
            "error: SCALE=big is unknown; expected one of: smoke, demo, photos",
        ),
        (reproduce.main, (*TABLE, "--seeds", "0"), "error: SEEDS=0 must be a whole number of seeds"),
        (
            reproduce.main,
            (*TABLE, "--set", "data.train='a"),
            "error: SET=data.train='a: No closing quotation; expected",
        ),
        (reproduce.main, (*TABLE, "--data", "x"), "error: DATA=x has no effect at scale demo"),
    ],
)
def test_bad_input_ends_in_one_message_without_a_traceback(main, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = message_of(main, *arguments)
    assert output.startswith("error: ")
    assert message in output
    assert "\n" not in output


REFUSED = "error: ACCELERATE_MIXED_PRECISION = '{}' (from the environment, the option --mixed_precision of accelerate "
REFUSED += "launch, or its config file); expected one of: no, bf16"


@pytest.mark.parametrize(("precision", "setting"), [("fp8", []), ("FP16", ["run.mixed_precision=auto"])])
def test_a_precision_that_no_run_trains_in_is_refused_wherever_it_comes_from(precision, setting, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    assert message_of(train.main, *FEW, "--output-dir", str(tmp_path), *setting) == REFUSED.format(precision.lower())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("main", "row", "script"),
    [
        (geomm_train.main, "vqa_albef", "finetune.py"),
        (finetune.main, "albef", "train.py"),
        (pretrain.main, "table1_ours", "train.py"),
        (euclip_train.main, str(ROOT / "oblique_topology/configs/table2_clip.yaml"), "train.py"),
        (euclip_train.main, str(ROOT / "geomm/configs/vqa_albef.yaml"), "finetune.py"),
    ],
)
def test_a_row_of_another_script_is_refused_with_its_command(main, row, script):
    output = message_of(main, "--config", row, "--scale", "smoke")
    assert re.fullmatch(rf"error: --config {row}: \w+/\w+\.py does not train it; run: .*/{script} --config .*", output)


@pytest.mark.parametrize(
    ("typed", "parent", "line"),
    [
        ("python euclip/train.py --scale smoke", "bash", "python euclip/train.py --scale smoke --resume"),
        ("python -m euclip.train --resume auto", "bash", "python -m euclip.train --resume auto"),
        ("python t.py --output-dir 'a b;c' run.seed=1", "sh", "python t.py --output-dir 'a b;c' run.seed=1 --resume"),
        (
            "/bin/python -u euclip/train.py --scale smoke",
            "/bin/python /bin/accelerate launch --quiet euclip/train.py --scale smoke",
            "ACCELERATE_USE_CPU=true accelerate launch --quiet euclip/train.py --scale smoke --resume",
        ),
        ("/bin/python /bin/vlgeometry train euclip", "zsh", "vlgeometry train euclip --resume"),
        ("/bin/python /elsewhere/vlgeometry train euclip", "zsh", "/elsewhere/vlgeometry train euclip --resume"),
    ],
)
def test_the_line_that_resumes_is_the_one_typed(typed, parent, line, monkeypatch):
    typed = shlex.split(typed)
    script = next(number for number, word in enumerate(typed) if re.search(r"\.py$|\.train$|vlgeometry$", word))
    launcher = SimpleNamespace(cmdline=lambda: shlex.split(parent), environ=lambda: {"ACCELERATE_USE_CPU": "true"})
    process = SimpleNamespace(parent=lambda: launcher, environ=lambda: {"HOME": "/", "PATH": "a b"})
    commands = {name: f"/bin/{name}" for name in ("accelerate", "vlgeometry")}
    commands |= {path: path for path in (*commands.values(), "/elsewhere/vlgeometry")}
    monkeypatch.setattr("psutil.Process", lambda: process)
    monkeypatch.setattr("shutil.which", commands.get)
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", typed[script:])
    assert command_to_resume() == line


def test_a_finished_run_is_named_with_the_line_that_resumes_it(by_path, tmp_path, capsys):
    folder = tmp_path / "it's a run"
    shutil.copytree(by_path, folder)
    refusal = message_of(train.main, *FEW, "--output-dir", str(folder))
    line = refusal.partition(f"{folder} holds a run up to step 3: choose another --output-dir, or add --resume")[2]
    words = shlex.split(line.partition(": ")[2])
    assert words == ["python", "script", *FEW, "--output-dir", str(folder), "--resume"]
    called(train.main, *words[2:])
    assert losses(folder) == losses(by_path)
    assert "oblique_topology, step 3" in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(28, "No space", "log.jsonl"), CheckpointError("cannot write step 2")])
def test_an_error_of_the_disk_names_the_last_checkpoint_and_the_command_that_resumes_it(error, by_path):
    with pytest.raises(ConfigError) as told, interrupted_with_saved_step(RunFiles(by_path, {}, "python x --resume")):
        raise error
    assert str(told.value) == (
        f"{error}; the last checkpoint is step 3 in {by_path}; to resume, run: python x --resume"
    )
    with pytest.raises(CheckpointError, match="damaged"), interrupted_with_saved_step(RunFiles(by_path)):
        raise CheckpointError("damaged")


def test_a_file_where_the_output_folder_must_be_is_named_with_the_setting(tmp_path):
    (tmp_path / "notes").touch()
    folder = tmp_path / "notes" / "my run"
    assert message_of(train.main, *FEW, f"--output-dir={folder}") == (
        f"error: --output-dir {folder}: [Errno 20] Not a directory: '{folder}'; "
        "a file lies where a folder must be; expected another folder"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ["data.root=/disk"],
            PermissionError(13, "No", "/disk/a.tar"),
            "data.root /disk: [Errno 13] No: '/disk/a.tar'; ",
        ),
        (["--output", "x/y"], FileExistsError(17, "No", "x"), "--output x/y: [Errno 17] No: 'x'; a file lies where"),
        (
            ["--checkpoint", "x", "--output", "x/y", "data.root=/"],
            PermissionError(13, "No", "x/y/a"),
            "--output x/y: [Errno 13] No",
        ),
        (["--scale", "smoke"], OSError(28, "No space", "/elsewhere"), "[Errno 28] No space: '/elsewhere'"),
        (["--output", "x"], OSError(28, "No", "x/a"), "--output x: [Errno 28] No: 'x/a'; expected free space there"),
        ([], OSError(30, "Read-only", "outputs"), "[Errno 30] Read-only: 'outputs': outputs go to {outputs}; "),
        (["--name", ""], OSError("a message for the user"), "a message for the user"),
    ],
)
def test_an_error_of_the_disk_names_the_setting_of_its_file(arguments, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def main():
        raise error

    assert message_of(main, *arguments).startswith(f"error: {message.format(outputs=tmp_path / 'outputs')}")


def test_a_row_of_another_paper_is_refused_with_or_without_its_header(tmp_path):
    for paper in ("euclip", "oblique_topology"):
        shutil.copytree(ROOT / paper / "configs", tmp_path / paper / "configs")
    script, configs = tmp_path / "euclip" / "train.py", tmp_path / "oblique_topology" / "configs"
    (configs / "mine.yaml").write_text("method: {structure: Multi(2, 16)}\n")
    command = "accelerate launch oblique_topology/train.py --config"
    for name, config in (("table2_clip", "oblique_topology/configs/table2_clip.yaml"), ("mine", configs / "mine.yaml")):
        with pytest.raises(ConfigError, match=re.escape(f"euclip/train.py does not train it; run: {command} {config}")):
            _check_script("--config x", configs / f"{name}.yaml", script)
    # rows of this paper, rows of a user, and a script that no row names
    (tmp_path / "euclip/configs/mine.yaml").touch()
    (tmp_path / "mine.yaml").touch()
    for row in ("euclip/configs/table4_clip.yaml", "euclip/configs/mine.yaml", "mine.yaml"):
        _check_script("--config x", tmp_path / row, script)
    _check_script("--config x", configs / "table2_clip.yaml", script.with_name("my_train.py"))


@pytest.mark.parametrize(
    ("argument", "meant"), [("--outptu-dir=x", "--output-dir"), ("--scale=dmeo", "demo"), ("--frobnicate", "")]
)
def test_a_mistyped_flag_or_choice_has_a_nearest(argument, meant, capsys):
    assert message_of(train.main, argument) == 2
    output = capsys.readouterr().err
    assert output.endswith(f"; did you mean {meant}?\n") if meant else "did you mean" not in output


@pytest.mark.parametrize(("tracker", "needs"), [("wandb", "wandb"), ("tensorboard", "tensorboard or tensorboardX")])
def test_a_tracker_whose_package_is_missing_ends_a_run_before_it_trains(tracker, needs, tmp_path, monkeypatch):
    folder = SimpleNamespace(origin=None)  # of wandb's own runs, which looks like a package
    monkeypatch.setattr("common.run.launch.find_spec", lambda package: folder if package == "wandb" else None)
    output = message_of(train.main, *FEW, "--output-dir", str(tmp_path), f"run.tracker={tracker}")
    assert f"run.tracker = {tracker} needs the package {needs}, which is not installed; run: pip install" in output
    assert not (tmp_path / "log.jsonl").exists()


def test_ctrl_c_before_the_first_checkpoint_says_that_nothing_is_saved(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "checkpoint_to_resume", interrupted)
    arguments = ("oblique_topology", "table2", "--scale", "smoke", "--output", str(tmp_path))
    assert message_of(reproduce.main, *arguments) == 130
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith(f"stopped at once: nothing is saved in {tmp_path}")
    assert output.endswith("; the same command starts again")
