"""What surrounds a training loop: throughput, log, cache keys, guards."""

import argparse
import errno
import json
import multiprocessing
import os
import pickle
import platform
import re
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from accelerate import Accelerator
from processes import take_terminal_signals
from refusals import refused
from runs import row_config, trained

from common.base.config import ConfigError, override, to_dict
from common.base.files import locked, write_json
from common.base.settings import DataConfig, OptimConfig, RunConfig
from common.base.signals import Stopped, stop_signals
from common.data.batches import TrainingView
from common.data.broken import BrokenSample, TooManyBroken
from common.data.loader import NoBatch
from common.data.order import SampleOrder
from common.data.pairs import image_transform, open_training_pairs
from common.data.text import build_tokenizer
from common.evaluation.protocol import Evaluation
from common.reproduce.rows import is_current
from common.run.checkpoint import save_checkpoint, saved_step
from common.run.evaluation_files import save_evaluations
from common.run.folder import (
    RunFiles,
    RunName,
    check_same_run,
    checkpoint_to_resume,
    chosen_files,
    only_run_in,
    run_files,
    run_key,
    save_config,
)
from common.run.guards import NonFiniteLoss, check_finite, check_finite_gradient, clip_gradient
from common.run.inputs import batches_from
from common.run.journal import BrokenLog, StepClock
from common.run.launch import keep_freed_memory, seed_step
from common.run.log import RunLog, read_log
from oblique_topology.config import Config
from oblique_topology.train import SETUP

ROOT = Path(__file__).resolve().parents[1]
PAPER = "oblique_topology"
TRAIN = ROOT / "oblique_topology" / "train.py"


@pytest.fixture
def now(monkeypatch):
    """What the clock shows, in a list; it moves when it is told to."""
    seconds = [0.0]
    monkeypatch.setattr("common.run.journal.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def slow_batches(count, seconds, now):
    for number in range(count):
        now[0] += seconds
        yield number


def test_clock_counts_steps_and_waiting_and_no_evaluation_between_steps(now):
    clock, readings = StepClock(global_batch_size=10), []
    for number in clock.timed(slow_batches(9, 0.01, now)):
        now[0] += 0.03
        if number % 3 == 2:
            readings.append(clock.read())
        if number == 5:
            clock.pause()
            now[0] += 500.0
    # three steps of 40 ms, 10 of them waiting; after a pause the first wait is not counted either
    expected = [(250, 0.25), (250, 0.25), (30 / 0.11, 0.02 / 0.11)]
    assert [(*reading.values(),) for reading in readings] == [pytest.approx(pair) for pair in expected]


@pytest.mark.parametrize(("wait", "share"), [(0.009, 0.0), (0.03, 0.5)])
def test_a_long_wait_is_known_after_fifty_steps(now, wait, share):
    clock, waits = StepClock(global_batch_size=10), []
    for number in clock.timed(slow_batches(60, wait, now)):
        now[0] += 0.03
        if number % 10 == 9:
            clock.read()
            waits.append(clock.long_wait())
    assert waits == [0, 0, 0, 0, pytest.approx(share), 0]


@pytest.mark.slow  # quick: the waits of a `StepClock`
@pytest.mark.usefixtures("not_evaluated")
def test_a_run_that_waits_for_data_warns_once_and_names_the_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.run.journal.StepClock.long_wait", lambda clock: 0.5)
    few = ("optim.steps=3", "optim.warmup_steps=0", "optim.global_batch_size=8", "run.log_every=1")
    files = trained(PAPER, row_config(PAPER, "table2_clip", *few, "run.evaluate_every=0"), tmp_path)
    (wait,) = (line["text"] for line in read_log(files.log) if "waits for data" in line.get("text", ""))
    assert re.search(r"for 50% of the time, more than 25% .*; to wait less: more .* \(run\.num_workers, now ", wait)
    assert wait in capsys.readouterr().err


def save(files, step, config=None):
    model = torch.nn.Linear(2, 2)
    state = {"config": to_dict(Config()) if config is None else config, "data_fingerprint": "data"}
    save_checkpoint(files.checkpoints, step, model, torch.optim.AdamW(model.parameters()), state)


def test_the_name_of_a_runs_folder_is_read_back(tmp_path):
    files = run_files("euclip", "my-demo-row", "photos_scratch", Config(run=RunConfig(seed=3)), "data", tmp_path)
    name = RunName("my-demo-row", "photos_scratch", 3)
    assert [RunName.of(files.folder / part) for part in (".", "checkpoints/step-00000007")] == [name] * 2
    assert RunName.of(tmp_path / "elsewhere") == RunName("elsewhere", None, None)
    assert RunName.of(tmp_path / "elsewhere" / "seed0") == RunName("elsewhere", None, 0)


def test_settings_that_the_code_has_learnt_since_have_had_their_defaults_and_forgotten_ones_count_as_their_sections_do(
    tmp_path,
):
    files, older = RunFiles(tmp_path), to_dict(Config())
    del older["optim"]["beta2"], older["model"]["text"]["mlp_ratio"]
    older["run"]["colour"] = 1
    save(files, 7, older)
    assert checkpoint_to_resume(files, True, Config(), "data").state["step"] == 7
    with pytest.raises(ConfigError, match=r"config: optim\.beta2 0\.98 -> 0\.9; expected"):
        checkpoint_to_resume(files, True, override(Config(), ["optim.beta2=0.9"]), "data")
    older["optim"]["colour"] = 1
    save(files, 8, older)
    with pytest.raises(ConfigError, match=r"optim\.colour 1 -> None"):
        checkpoint_to_resume(files, True, Config(), "data")


def test_a_resume_sets_damaged_later_checkpoints_aside_and_a_look_does_not(tmp_path):
    files = RunFiles(tmp_path)
    assert checkpoint_to_resume(files, False, Config(), "data") is None
    for step in (7, 9):
        save(files, step)
    (files.checkpoints / "step-00000009" / "model.safetensors").write_bytes(b"")
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="step-00000009 is damaged"),
            pytest.raises(ConfigError, match="run up to step 7: choose another --output-dir, or add --resume"),
        ):
            checkpoint_to_resume(files, False, Config(), "data")
    with pytest.warns(UserWarning, match="step-00000009 is damaged"):
        assert checkpoint_to_resume(files, True, Config(), "data").state["step"] == 7
    assert sorted(path.name for path in files.checkpoints.iterdir()) == ["damaged-step-00000009", "step-00000007"]


def test_what_a_step_draws_depends_on_seed_step_and_process_only(monkeypatch):
    def draws(seed, step):
        seed_step(seed, step)
        return tuple(torch.rand(4).tolist())

    first = draws(0, 5)
    torch.rand(17)
    assert draws(0, 5) == first
    monkeypatch.setattr("common.run.launch.rank", lambda: 1)
    assert draws(0, 5) != first
    monkeypatch.undo()
    assert len({draws(seed, step) for seed in range(3) for step in range(100)}) == 300


def test_broken_samples_are_counted_over_a_resume_and_judged_over_the_whole_run(tmp_path):
    def broken(count):
        return [BrokenSample("shard.tar", f"k{number}", "image cannot be decoded") for number in range(count)]

    log = RunLog(tmp_path / "log.jsonl")
    whole = BrokenLog(log, max_share=0.01, at_open=[])
    whole.collect(broken(4), seen=996)
    whole.collect(broken(6), seen=994)
    assert whole.counts() == {"seen": 0, "broken": 0}
    whole.write_new(step=2)
    whole.write_new(step=3)  # nothing new, no line
    assert whole.counts() == {"seen": 2000, "broken": 10}
    assert [(record["step"], record["count"]) for record in read_log(log.path)] == [(2, 10)]

    resumed = BrokenLog(log, max_share=0.01, at_open=[], counted=json.loads(json.dumps(whole.counts())))
    resumed.collect(broken(20), seen=80)
    resumed.write_new(step=4)  # 30 of 2,100: as much above 21 as chance may bring, unlike 20 of 100
    resumed.collect(broken(8), seen=0)
    resumed.write_new(step=5)
    with pytest.raises(TooManyBroken, match="38 of 2108 samples are broken"):
        resumed.samples.check()
    assert [record["step"] for record in read_log(log.path)] == [2, 4, 5]  # named before the run stops


def test_signals_are_noted_within_and_as_before_outside(terminal_signals):
    asked = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in asked]
    for number in asked:
        with stop_signals() as stop:
            assert not stop.received
            os.kill(os.getpid(), number)
            assert stop.received
    with pytest.raises(KeyError), stop_signals():
        raise KeyError
    assert [signal.getsignal(number) for number in asked] == before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])  # as a launcher passes it on
def test_a_second_ctrl_c_ends_at_once_and_is_none_where_the_launcher_sends_the_first_one_again(
    second, monkeypatch, terminal_signals
):
    now = [100.0]
    monkeypatch.setattr("common.base.signals.time.monotonic", lambda: now[0])
    with stop_signals() as stop:
        for now[0] in (100.0, 100.1):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received
        now[0] = 101.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory by its own rules")
def test_tensors_of_a_step_take_the_pages_of_the_step_before():
    def step():
        return [torch.ones(6 * 2**20) for _ in range(8)]  # of 24 MB, 49,152 pages in all

    keep_freed_memory()
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 49_152


def test_what_nohup_or_a_script_s_background_ignores_stays_ignored():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        with stop_signals() as stop:
            for number in before:
                os.kill(os.getpid(), number)
            assert not stop.received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def trained_on_a_terminal(terminal, at_step):
    os.setsid()
    take_terminal_signals()
    for number in (1, 2):
        os.dup2(os.open(terminal, os.O_RDWR), number)  # the first terminal of a session is its own
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    with stop_signals() as stop:
        at_step.set()
        while not stop.received:
            time.sleep(0.01)
        print("saved")
        print("saved", file=sys.stderr)


def test_a_run_whose_terminal_closes_saves_and_says_so_to_nobody():
    screen, terminal = os.openpty()
    context = multiprocessing.get_context("forkserver")
    at_step = context.Event()
    run = context.Process(target=trained_on_a_terminal, args=(os.ttyname(terminal), at_step))
    run.start()
    assert at_step.wait(60)
    os.close(terminal)
    os.close(screen)
    run.join(20)
    assert run.exitcode == 0


def test_a_validation_that_fails_loses_no_step(tmp_path, monkeypatch):
    def fails(run):
        raise TooManyBroken("half of the validation pictures")

    monkeypatch.setattr("oblique_topology.train.SETUP", replace(SETUP, validate=fails))
    config = row_config(PAPER, "table2_clip", "optim.steps=2", "optim.warmup_steps=0", "run.save_every=0")
    with pytest.raises(NoBatch, match="half of the validation pictures; saved at step 2 of 2"):
        trained(PAPER, config, tmp_path)
    assert saved_step(RunFiles(tmp_path).checkpoints) == 2


@pytest.mark.parametrize(("log_every", "stops_at"), [(4, None), (100, 5)])  # by the log's count; by a signal before it
def test_a_run_with_too_many_broken_samples_loses_no_step(tmp_path, monkeypatch, log_every, stops_at):
    def broken_batches(*arguments):
        for number, batch in enumerate(batches_from(*arguments)):
            if number == stops_at:
                raise NoBatch("received a stop signal", is_stop=True)
            yield batch._replace(broken=[BrokenSample("shard.tar", "k", "no picture")] * 30)

    monkeypatch.setattr("common.run.training.batches_from", broken_batches)
    more = ["optim.steps=8", "optim.warmup_steps=0", "run.save_every=0", f"run.log_every={log_every}"]
    with pytest.raises(Stopped if stops_at else NoBatch, match=f"saved at step {stops_at or 4} of 8"):
        trained(PAPER, row_config(PAPER, "table2_clip", *more), tmp_path)
    assert saved_step(RunFiles(tmp_path).checkpoints) == (stops_at or 4)


def test_outside_the_main_thread_a_run_trains_without_looking_at_signals():
    def elsewhere():
        with stop_signals() as stop:
            return stop.received, signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == (False, signal.getsignal(signal.SIGTERM))


def test_a_folder_is_held_by_one_run(tmp_path):
    files = RunFiles(tmp_path / "run")
    with only_run_in(files), pytest.raises(ConfigError, match="another process trains in"), only_run_in(files):
        pass
    with only_run_in(files):
        (tmp_path / "run" / "log.jsonl").touch()
    assert (tmp_path / "run").exists()


def test_a_run_that_does_not_start_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError), only_run_in(RunFiles(tmp_path / "table4_clip-demo-0a1b" / "seed0")):
        raise ConfigError
    assert not [*tmp_path.iterdir()]


def test_who_waits_for_a_lock_says_which_file_it_waits_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.base.files._QUIET", 0.05)
    path = tmp_path / "features.lock"

    def wait():
        with locked(path, ""):
            pass

    with ThreadPoolExecutor(1) as pool, locked(path, ""):
        waiting = pool.submit(wait)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        assert f"waits for the process that holds {path}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])  # NFS, Lustre, others
def test_a_disk_without_locks_is_named_with_a_way_on_and_nothing_is_left_that_holds_the_folder(
    number, tmp_path, monkeypatch
):
    files, reason = RunFiles(tmp_path / "run"), os.strerror(number)
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, reason)))
    message = (
        f"{files.folder / '.lock'}: this disk has no locks ({reason}); expected: run.lock=false, where no "
        "second process trains in this folder, or another --output-dir"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"), only_run_in(files):
        pass
    with only_run_in(files, lock=False):
        monkeypatch.undo()
    with only_run_in(files):
        pass


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_step_and_names_its_parameters(bad):
    """Clipping by such a norm would make NaN of all gradients, so names are found before."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model[1].bias.grad[0] = bad
    norms, norm = clip_gradient(Accelerator(cpu=True), model, OptimConfig(max_gradient_norm=1.0))
    named = r"gradient norm is .* at step 3, .* the gradient of 1\.bias is not finite\. The w"
    refused((named, lambda: check_finite_gradient(float(norm), 3, norms)), error=NonFiniteLoss)
    check_finite_gradient(5.0, 3, norms)


def test_log_drops_later_steps_and_a_torn_last_line_on_resume(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    for step in (1, 2, 3):
        log.write("train", step=step, loss=float("nan") if step == 3 else 1.0 / step)
    with path.open("ab") as file:
        file.write('{"event": "train", "step": 4, "x": "gr\u00fcn"}'.encode()[:39])  # cut inside a character
    assert [record["step"] for record in read_log(path)] == [1, 2, 3]
    assert read_log(path)[2]["loss"] == "nan"
    RunLog(path, resume_step=2).write("train", step=3, loss=0.5)
    assert [(record["step"], record["loss"]) for record in read_log(path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_log_survives_any_text_and_refuses_damage_in_the_middle(tmp_path):
    path, text = tmp_path / "log.jsonl", "line\u2028separator and \x85 next line\nnew line"
    RunLog(path).write("broken", step=1, samples=[text])
    assert [record["samples"] for record in read_log(path)] == [[text]]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is no record"):
        read_log(path)
    path.write_text('{"step": 1}\n{"step": "2"}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 is no record.* a whole number; without this line the file can"):
        read_log(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the full disk that Linux has")
def test_a_full_disk_is_reported_with_the_file(tmp_path):
    for name, write in (
        ("log.jsonl", lambda files: RunLog.write(SimpleNamespace(path=files.log, enabled=True), "train")),
        ("config.yaml", lambda files: save_config(files, Config())),
        ("whole.tmp", lambda files: RunLog(files.folder / "whole.jsonl", resume_step=1)),
    ):
        (tmp_path / "whole.jsonl").write_text('{"step": 1}\n')
        (tmp_path / name).symlink_to("/dev/full")
        with pytest.raises(OSError, match=f"No space left on device: '.*{name}'"):
            write(RunFiles(tmp_path))


def test_a_line_break_in_a_name_leaves_config_yaml_a_config(tmp_path):
    save_config(RunFiles(tmp_path), Config(), training_data="a\nb, 3 images")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == to_dict(Config())
    assert "# training_data: a b, 3 images\n" in (tmp_path / "config.yaml").read_text()


def test_cache_key_depends_on_what_a_vocabulary_says_and_not_on_how_it_is_named(tmp_path, monkeypatch):
    def key(vocabulary):
        config = override(Config(), ["data.tokenizer=bert_wordpiece", f"data.vocabulary={vocabulary}"])
        return run_key(PAPER, config, "data")

    monkeypatch.setenv("HOME", str(tmp_path))
    keys = set()
    for content in ("one", "two"):
        (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", content]))
        keys.add(key(tmp_path / "vocab.txt"))
        assert keys >= {key(tmp_path), key("~/vocab.txt"), key("~")}
    assert len(keys) == 2
    with pytest.raises(ValueError, match=r"data\.vocabulary = '/nowhere/vocab\.txt': no such file"):
        key("/nowhere/vocab.txt")


def test_a_resume_takes_the_same_words_from_another_place_and_no_others(tmp_path):
    def config_of(name, *words):
        (tmp_path / name).write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        return override(Config(), ["data.tokenizer=bert_wordpiece", f"data.vocabulary={tmp_path / name}"])

    first = config_of("a.txt", "one", "two")
    words = build_tokenizer(first.data, None).to_json()
    checkpoint = SimpleNamespace(state={"config": to_dict(first), "tokenizer": words, "data_fingerprint": "data"})
    check_same_run(checkpoint, RunFiles(tmp_path), config_of("b.txt", "one", "two"), "data")
    with pytest.raises(ConfigError, match=r"with the words of data\.vocabulary = .*a\.txt, .*b\.txt holds others"):
        check_same_run(checkpoint, RunFiles(tmp_path), config_of("b.txt", "two", "one"), "data")


@pytest.mark.filterwarnings("ignore:.* merges, CLIP's vocabulary has:UserWarning")
def test_cache_key_with_the_default_vocabulary_depends_on_what_it_says(tmp_path, monkeypatch):
    file, keys = tmp_path / "default.txt", set()
    monkeypatch.setattr("common.data.clip_tokenizer._bundled_file", lambda: file)
    for content in ("a b", "a c"):
        file.write_text(f"#version: 0.2\n{content}\n")
        keys.add(run_key(PAPER, override(Config(), ["data.tokenizer=clip_bpe"]), "data"))
    assert len(keys) == 2


def test_cache_key_depends_on_config_data_and_code(monkeypatch):
    config = Config()
    key = run_key(PAPER, config, "data")
    assert run_key(PAPER, override(config, ["run.num_workers=2", "run.log_every=3"]), "data") == key
    changes = ("optim.learning_rate=2.0e-3", "optim.ema=0.9", "run.seed=1", "run.mixed_precision=bf16")
    changes += ("data.resize_with=torchvision",)
    others = [(PAPER, override(config, [change]), "data") for change in changes]
    for other in (*others, (PAPER, config, "other data"), ("contrastive_basics", config, "data")):
        assert run_key(*other) != key
    automatic = override(config, ["run.mixed_precision=auto"])
    for instructions, same_as in (({}, "no"), ({"avx512_bf16": True}, "bf16"), ({"bf16": True}, "bf16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", instructions.copy, raising=False)
        stated = override(config, [f"run.mixed_precision='{same_as}'"])
        assert run_key(PAPER, automatic, "data") == run_key(PAPER, stated, "data")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert run_key(PAPER, config, "data") != key


PHOTOGRAPHS = ["data.source=tsv", "data.root=/a", "data.train=a.tsv", "data.test=b.tsv", "optim.warmup_steps=0"]
ON = (  # what a run may go on with
    "data.root=/b", "data.train=/a/a.tsv", "data.val=c.tsv", "data.test=c.tsv", "data.second_test=c.tsv",
    "data.images=/b", "data.labelled=labels", "data.max_broken_share=0.5", "optim.micro_batch_size=64",
    "model.image.stem.cache_gb=3", "data.mixture=[{root: /c}]",
    "run.keep_checkpoints=5",
    "optim.loss_tile=32", "optim.loss_kernel=auto", "optim.compile=true", "run.log_every=3", "run.diagnose_every=5",
    "run.num_workers=7", "method.prompt_average=embeddings", "data.val_share=0.2",
)  # fmt: skip
ELSEWHERE = (
    "optim.steps=7", "optim.weight_decay=0.3", "data.caption_column=x", "data.image_size=64",
    "model.embedding_dim=96", "run.seed=2", "method.logit_scale_max=50",
)  # fmt: skip


@pytest.mark.parametrize("change", [*ON, *ELSEWHERE])
def test_a_change_with_which_a_run_goes_on_leads_to_its_folder_and_another_one_to_another_folder(tmp_path, change):
    config = override(Config(), PHOTOGRAPHS)
    there = run_files(PAPER, "table2_clip", "smoke", config, "data", tmp_path)
    save(there, 7, to_dict(config))
    changed = override(config, [change])
    assert (run_files(PAPER, "table2_clip", "smoke", changed, "data", tmp_path) == there) is (change in ON)
    if change in ON:
        assert checkpoint_to_resume(there, True, changed, "data").state["step"] == 7
    else:
        with pytest.raises(ConfigError, match=f"holds a run of another config: {change.partition('=')[0]} "):
            checkpoint_to_resume(there, True, changed, "data")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("data.val_share=0.2", r"data\.val_share 0\.0 -> 0\.2"),
        ("data.mixture=[{root: /c}]", r"data\.mixture \[\] -> \[\{"),
    ],
)
def test_a_refusal_of_other_training_data_names_the_settings_that_changed(tmp_path, change, named):
    config = override(Config(), PHOTOGRAPHS)
    there = run_files(PAPER, "table2_clip", "smoke", config, "data", tmp_path)
    save(there, 7, to_dict(config))
    with pytest.raises(ConfigError, match=f"other training data .* name now: {named}.*; expected the settings of that"):
        checkpoint_to_resume(there, True, override(config, [change]), "other data")


def test_how_many_pictures_are_looked_at_leads_to_the_same_run_evaluated_otherwise(tmp_path):
    changes = ["data.num_test=3000", "data.num_labelled=7", "data.gallery=500", "method.prompt_average=embeddings"]
    plain, otherwise, same = (
        run_files(PAPER, "a", "smoke", override(Config(), changed), "data", tmp_path)
        for changed in ([], changes, ["data.num_val=7"])
    )
    assert plain == otherwise == same
    assert plain.identity == same.identity != otherwise.identity


@pytest.mark.parametrize("named", [False, True])
def test_a_resume_of_nothing_is_an_error_that_names_the_folder(tmp_path, named):
    folder = tmp_path / "empty" if named else run_files(PAPER, "row", "smoke", Config(), "no such data").folder
    options = {"row": "row", "scale": "smoke", "output_dir": str(folder) if named else None}
    for resume in (None, "auto"):
        arguments = argparse.Namespace(**options, resume=resume)
        assert chosen_files(TRAIN, arguments, Config(), "no such data").folder == folder
    with pytest.raises(ConfigError, match=re.escape(f"--resume: {folder} holds no checkpoint.")):
        chosen_files(TRAIN, argparse.Namespace(**options, resume="last"), Config(), "no such data")


def evaluated(files, **provenance):
    result = Evaluation({"recall": 0.5}, {"fingerprint": "one"}, {}, {"recall": [[1.0], [0.0]]})
    training = {"training_data": "scenes", "training_revision": "today"}
    save_evaluations("oblique_topology", {"test": result}, files, 7, training, provenance)


def current(files, **fingerprints):
    fingerprints = fingerprints or {"test": "one"}
    return is_current(files, {role: SimpleNamespace(fingerprint=of) for role, of in fingerprints.items()})


def test_an_evaluation_that_is_torn_changed_by_hand_or_of_another_run_code_or_set_is_not_current(tmp_path):
    config, others = Config(), (["run.seed=1"], ["optim.steps=7", "optim.warmup_steps=0"], ["data.gallery=500"])
    run = run_files(PAPER, "table2_clip", "smoke", config, "data", tmp_path)
    evaluated(run, evaluation_code={"common/geometry.py": "other code"})
    assert not current(run)
    evaluated(run)
    assert current(run)
    assert not current(run, test="other")
    assert not current(run, test="one", second_test="one")
    for change in others:  # as if their folders had been swapped
        other = run_files(PAPER, "table2_clip", "smoke", override(config, change), "data", tmp_path)
        assert not current(RunFiles(run.folder, other.identity))
    assert not current(RunFiles(run.folder, {**run.identity, "row": "table2_multi"}))
    for file in (run.evaluation, run.hits):
        whole = file.read_bytes()
        for torn in (b"", whole[: len(whole) // 2], b"[]", b"null", b"\xff\xfe", whole.replace(b"0", b"7", 1)):
            file.write_bytes(torn)
            assert not current(run)
        file.write_bytes(whole)
    evaluation = json.loads(run.evaluation.read_text())
    evaluation["evaluations"]["test"]["metrics"]["recall"] = 7.5
    write_json(run.evaluation, evaluation)
    assert not current(run)
    evaluated(run)
    save(run, 7, to_dict(config))  # of weights that came later
    assert not current(run)
    evaluated(run)
    assert current(run)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_names_the_parameters(loss):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[0] = float("nan")
    with pytest.raises(NonFiniteLoss, match=r"at step 12 \(scale 3.0\). Parameters that are not finite: bias"):
        check_finite(loss, 12, model, scale=3.0)
    check_finite(1.0, 12, model)


def test_a_picture_meets_all_its_captions_and_other_crops_over_the_epochs():
    data = DataConfig(num_train=8, image_size=32, crop_scale=(0.3, 1.0))
    pairs = open_training_pairs(data, seed=0)
    order, tokenizer = SampleOrder(8, 8, 0), build_tokenizer(data, pairs)
    view = TrainingView(pairs, order, image_transform(data), tokenizer, data.context_length)
    view = pickle.loads(pickle.dumps(view))  # as it travels to spawned workers
    captions, crops = set(), set()
    for epoch in range(40):
        batch = view.__getitems__(list(range(8 * epoch, 8 * epoch + 8)))
        row = batch.image_ids.index(pairs[3]["image_id"])
        captions.add(tuple(batch.token_ids[row].tolist()))
        crops.add(batch.images[row].numpy().tobytes())
    assert captions == {tuple(ids) for ids in tokenizer.encode(pairs.captions(3), data.context_length).tolist()}
    assert len(crops) > 35
