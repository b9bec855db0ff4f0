"""scripts/benchmark.py: both sides of a row do the same work, the ratios are right, and the table says what it is."""

import hashlib
import json
from dataclasses import replace
from functools import partial

import open_clip
import pytest
import torch
from runs import called
from torch.utils.flop_counter import FlopCounterMode

from common.base.config import ConfigError
from common.base.provenance import cpu_computes_bfloat16
from scripts import benchmark
from scripts.benchmarks import comparison, loss
from scripts.benchmarks.comparison import Comparison, Skipped, Usage, measure
from scripts.benchmarks.data import loaders, write_shards
from scripts.benchmarks.loss import check_that_the_matrix_fits, usage_in_new_process
from scripts.benchmarks.training import SMALL, TOY, open_clips_clip, our_clip, our_loss


class Clock:
    """Time that passes only when a side of a comparison says so."""

    def __init__(self, monkeypatch, ours, reference):
        self.now, self.calls = 0.0, []
        self.seconds = {"ours": iter(ours), "reference": iter(reference)}
        monkeypatch.setattr(comparison.time, "perf_counter", lambda: self.now)

    def side(self, name):
        def work():
            self.calls.append(name)
            self.now += next(self.seconds[name])

        return work

    def compare(self, kind, goal=1.0):
        return Comparison("a / b", kind, goal, 30, self.side("ours"), self.side("reference"))


def test_sides_alternate_who_is_first_and_the_warm_up_does_not_count(monkeypatch):
    clock = Clock(monkeypatch, [100.0, 1.0, 2.0, 6.0], [100.0, 2.0, 2.0, 2.0])
    row = measure("x", clock.compare("time"), 3)
    assert clock.calls == ["reference", "ours", "ours", "reference", "reference", "ours", "ours", "reference"]
    assert (row.ours, row.reference, row.ours_samples_per_second) == (2.0, 2.0, 15.0)
    assert (row.ratio, row.low, row.high, row.repeats) == (1.0, 0.5, 3.0, 3)


def test_throughput_is_the_inverse_ratio(monkeypatch):
    row = measure("x", Clock(monkeypatch, [9.0, 1.0, 2.0], [9.0, 2.0, 2.0]).compare("throughput"), 2)
    assert (row.ratio, row.low, row.high) == (1.5, 1.0, 2.0)


def test_memory_is_measured_once_and_a_long_row_as_often_as_it_says(monkeypatch):
    calls = []

    def side(name, extra_bytes):
        return lambda: calls.append(name) or Usage(2.0, extra_bytes)

    row = measure("x", Comparison("a / b", "memory", 0.125, 30, side("ours", 5_000_000), side("b", 40_000_000)), 7)
    assert calls == ["ours", "b"]
    assert (row.ours, row.reference, row.ours_samples_per_second, row.ratio, row.met) == (5e6, 40e6, 15.0, 0.125, True)
    text = benchmark.markdown(benchmark.machine(), [row], {}, quick=False)
    assert "| x | a / b | memory | ≤ 0.125 | 0.125 | met | 5 MB | 40 MB | 15 |" in text
    long = replace(Clock(monkeypatch, [1.0] * 3, [1.0] * 3).compare("time"), most_repeats=2)
    assert measure("x", long, 7).repeats == 2


def training_flops(model, *inputs):
    """FLOPs of one forward and one backward pass."""
    with FlopCounterMode(display=False) as counter:
        sum(output.sum() for output in model(*inputs) if output.requires_grad).backward()
    return counter.get_total_flops()


def test_our_clip_and_open_clips_have_the_same_weights_and_ours_spares_what_nobody_reads():
    with torch.device("meta"):
        ours, theirs = our_clip(SMALL), open_clips_clip(SMALL)
        images = torch.zeros(1, 3, SMALL.image_size, SMALL.image_size)
        token_ids = torch.zeros(1, SMALL.context_length, dtype=torch.long)
    # one class token is a row there and a table of one row here
    shapes = [sorted(tuple(weight.squeeze().shape) for weight in model.parameters()) for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    # of pictures the last block works on the class token alone: out-projection and MLP of the patches are spared
    width, patches = SMALL.image_width, (SMALL.image_size // SMALL.patch_size) ** 2
    spared = training_flops(theirs, images, token_ids) - training_flops(ours, images, token_ids)
    attention = 2 * 2 * (patches + 1) * width
    assert spared == 3 * patches * (2 * 9 * width**2 + attention)


def test_both_losses_see_the_whole_batch():
    """A batch of equal pairs has the loss ln(batch) in both libraries."""
    images = torch.zeros(4, 3, TOY.image_size, TOY.image_size)
    token_ids = torch.full((4, TOY.context_length), TOY.vocabulary_size - 1)
    expected = pytest.approx(torch.tensor(4.0).log().item(), abs=1e-5)
    assert our_loss(our_clip(TOY), images, token_ids).item() == expected
    assert open_clip.ClipLoss()(*open_clips_clip(TOY)(images, token_ids)).item() == expected


def test_both_loaders_give_the_same_samples(tmp_path):
    ours, theirs = loaders(write_shards(tmp_path, 2, 6, 32), 24, 4, num_workers=2)

    def contents(batches):
        digests = [
            hashlib.sha256(image.numpy().tobytes() + ids.numpy().tobytes()).hexdigest()
            for images, token_ids in batches
            for image, ids in zip(images, token_ids)
        ]
        assert batches[0][0].shape == (4, 3, 24, 24)
        return sorted(digests)

    first = contents([(batch.images, batch.token_ids) for batch in ours])
    assert first == contents(list(theirs))
    assert len(set(first)) == 12


@pytest.mark.slow
def test_the_memory_of_a_loss_is_measured_in_a_new_process():
    usage = usage_in_new_process("sphere", 3_000, 0)
    assert 4 * 4 < usage.extra_bytes / 3_000**2 < 10 * 4  # some matrices of float32
    assert usage.seconds > 0


def test_a_matrix_that_does_not_fit_is_skipped_before_it_takes_the_machine_down():
    with pytest.raises(Skipped, match=r"the whole matrix needs \d+ GB, \d+ GB are free"):
        check_that_the_matrix_fits("hyperbolic", 2_000_000)
    check_that_the_matrix_fits("hyperbolic", 512)


run_main = partial(called, benchmark.main)


# every function, and every geometry in the rows of memory
ALIKE = {f"loss_{kind}_{geometry}" for kind in ("time", "limit") for geometry in [*loss.GEOMETRIES][1:]}


@pytest.mark.parametrize("left_out", [ALIKE, pytest.param(set(), marks=pytest.mark.slow)], ids=["alike", "none"])
def test_every_row_runs_at_toy_size_and_is_written_twice(left_out, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.default_rows() == [*benchmark.BENCHMARKS]
    assert left_out <= benchmark.BENCHMARKS.keys()
    monkeypatch.setattr(
        benchmark, "BENCHMARKS", {name: row for name, row in benchmark.BENCHMARKS.items() if name not in left_out}
    )
    run_main("--quick", "--repeats", "1", "--output", str(tmp_path / "new"))
    place = tmp_path / "new" / f"cpu-{torch.get_num_threads()}-threads"
    content = json.loads(place.with_suffix(".json").read_text())
    names = [row["name"] for row in content["rows"]]
    assert names == [name for name in benchmark.BENCHMARKS if name not in content["skipped"]]
    gpu = [name for name in benchmark.BENCHMARKS if "gpu" in name]
    assert len(gpu) == 20
    of_this_cpu = [] if cpu_computes_bfloat16() else ["step_bf16"]
    assert [*content["skipped"]] == [name for name in benchmark.BENCHMARKS if name in (*gpu, *of_this_cpu)]
    assert {content["skipped"][name] for name in gpu} == {"no CUDA device"}
    for row in content["rows"]:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert min(row["ours"], row["reference"], row["ours_samples_per_second"]) > 0
        less_is_better = row["kind"] in ("time", "memory")
        assert row["met"] == (row["ratio"] <= row["goal"] if less_is_better else row["ratio"] >= row["goal"])
    assert set(content["machine"]["versions"]) == set(benchmark.PACKAGES)
    table = place.with_suffix(".md").read_text()
    assert all(f"| {name} |" in table for name in benchmark.BENCHMARKS)


def test_an_interrupted_run_continues_after_its_last_row(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "git_revision", lambda: "0123456789ab")  # changed code begins anew
    clock, calls = Clock(monkeypatch, [1.0] * 9, [1.0] * 9), []

    def compared(name, quick, folder):
        calls.append(name)
        if calls == ["row0", "row1"]:
            raise KeyboardInterrupt
        return clock.compare("time")

    monkeypatch.setattr(benchmark, "BENCHMARKS", {name: partial(compared, name) for name in ("row0", "row1")})
    with pytest.raises(KeyboardInterrupt):
        run_main("--repeats", "1")
    (kept,) = (tmp_path / "outputs" / "benchmark").iterdir()
    kept.write_text(kept.read_text() + '{"row": {"na')  # killed while it wrote
    assert not (tmp_path / "results").exists()
    run_main("--repeats", "1")
    assert calls == ["row0", "row1", "row1"]
    (written,) = (tmp_path / "results" / "benchmark").glob("*.json")
    assert [row["name"] for row in json.loads(written.read_text())["rows"]] == ["row0", "row1"]
    assert not kept.exists()


@pytest.mark.parametrize("change", [["--fresh"], ["--repeats", "2"], ["revision"]])
def test_rows_of_a_fresh_run_other_repeats_and_another_revision_are_measured_again(tmp_path, monkeypatch, change):
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    clock, calls = Clock(monkeypatch, [1.0] * 9, [1.0] * 9), []
    rows = {"row0": lambda *_: calls.append("row0") or clock.compare("time"), "row1": lambda *_: 1 / (len(calls) - 1)}
    monkeypatch.setattr(benchmark, "BENCHMARKS", rows)
    with pytest.raises(ZeroDivisionError):
        run_main("--repeats", "1")
    if change == ["revision"]:
        monkeypatch.setattr(benchmark, "git_revision", lambda: "another")
        change = []
    run_main("--repeats", "1", "--only", "row0", *change)
    assert calls == ["row0", "row0"]
    assert len(list((tmp_path / "outputs" / "benchmark").glob("*.md"))) == 1
    assert not (tmp_path / "results").exists()  # these are not all rows


def test_with_a_gpu_a_whole_run_has_its_rows_the_most_telling_first_and_the_machine_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert benchmark.default_rows()[: len(benchmark.GPU_ROWS)] == list(benchmark.GPU_ROWS)
    assert sorted(benchmark.default_rows()) == sorted(name for name in benchmark.BENCHMARKS if "gpu" in name)
    assert benchmark.machine_class(2) == "nvidia-h100-80gb-hbm3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "retrieval", "speed"], "--only speed is unknown; expected one of: retrieval, scenes"),
        (["--repeats", "0"], "--repeats 0; expected at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        run_main(*arguments)
