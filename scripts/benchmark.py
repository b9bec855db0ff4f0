"""Performance as ratios measured in one run, against unavoidable work or the alternative that a user would pick.

    make benchmark
    python scripts/benchmark.py --only retrieval training --repeats 9 --output outputs/benchmark
    python scripts/benchmark.py --quick                     every row at toy size, in seconds: is it wired up?
    python scripts/benchmark.py --fresh                     measures again what an interrupted run has measured

Seconds depend on the machine and its load; the ratios are what to quote. Both sides of a row run in turn, the order
changing every time, so that a slow minute of the machine hits both; the row shows the median of the pairwise ratios and
their range. A whole run is written to results/benchmark/<machine class>.json and .md, a part to outputs/benchmark.
With a CUDA device a whole run has the rows that need one, in minutes. Each row is written to
outputs/benchmark/<machine class>.jsonl when it is done, from where the same command continues after an interruption.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.base.arguments import Parser, accepted
from common.base.config import ConfigError
from common.base.provenance import CHANGED, ROOT, git_revision, hardware
from common.run.launch import run_or_explain
from scripts.benchmarks.comparison import Row, Skipped, measure
from scripts.benchmarks.data import shard_bytes, shards, shards_2_workers
from scripts.benchmarks.demo import scenes, step_bf16
from scripts.benchmarks.euclip import EUCLIP_BENCHMARKS
from scripts.benchmarks.evaluation import retrieval
from scripts.benchmarks.geomm import GEOMM_BENCHMARKS
from scripts.benchmarks.loss import LOSS_BENCHMARKS
from scripts.benchmarks.training import training, training_gpu

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "open_clip_torch", "webdataset")
BENCHMARKS = (
    {
        function.__name__: function
        for function in (retrieval, scenes, shards, shards_2_workers, shard_bytes, step_bf16, training, training_gpu)
    }
    | LOSS_BENCHMARKS
    | EUCLIP_BENCHMARKS
    | GEOMM_BENCHMARKS
)

# the most telling first; further rows of a GPU follow
GPU_ROWS = ("training_gpu", "loss_gpu_32768", "loss_gpu_32768_torch")


def default_rows() -> list[str]:
    """With a CUDA device the rows that need one, the most telling first; else all, where those are skipped."""
    of_gpu = [name for name in (*GPU_ROWS, *BENCHMARKS) if name in BENCHMARKS and "_gpu" in name]
    return list(dict.fromkeys(of_gpu)) if torch.cuda.is_available() else list(BENCHMARKS)


def machine() -> dict[str, object]:
    """What the seconds depend on."""
    versions = {package: version(package) for package in PACKAGES}
    return {
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "git_revision": git_revision(),
    }


def machine_class(threads: int) -> str:
    """File name of this kind of machine: its GPU, or how many threads the CPU has."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"cpu-{threads}-threads"


def amount(value: float, kind: str) -> str:
    """Seconds, or of memory megabytes."""
    return f"{value / 1e6:,.0f} MB" if kind == "memory" else f"{value:.3f} s"


def markdown(about: dict[str, object], rows: list[Row], skipped: dict[str, str], quick: bool) -> str:
    """The table for a reader."""
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    lines = [
        "# Performance",
        "",
        f"{about['hardware']}, {about['threads']} threads of {about['processors']} processors, load at the start "
        f"{about['load_at_start']}. Python {about['python']}, {versions}. Revision {about['git_revision']}.",
        "",
        "Toy sizes (--quick): these figures mean nothing."
        if quick
        else "Medians of interleaved repeats; in brackets the smallest and largest ratio of ours to the reference. Of "
        "time and memory less is better, of throughput more.",
        "",
        "| row | what is compared | ratio of | goal | measured | verdict | ours | reference | ours, samples/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f}, {row.repeats} repeats)"
        if row.kind == "memory":
            spread = f"{row.ratio:.3f}"
        sign = "≥" if row.kind == "throughput" else "≤"
        lines.append(
            f"| {row.name} | {row.what} | {row.kind} | {sign} {row.goal} | {spread} | "
            f"{'met' if row.met else 'not met'} | {amount(row.ours, row.kind)} | {amount(row.reference, row.kind)} | "
            f"{row.ours_samples_per_second:,.0f} |"
        )
    lines += [f"| {name} | | | | | skipped: {reason} | | | |" for name, reason in skipped.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="*", default=default_rows(), help=", ".join(BENCHMARKS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=None, help="folder; default: see above")
    parser.add_argument("--quick", action="store_true", help="toy sizes; the figures mean nothing")
    parser.add_argument("--fresh", action="store_true", help="do not continue an interrupted run")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only if name not in BENCHMARKS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]} is unknown; {accepted(unknown[0], [*BENCHMARKS])}")
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats {arguments.repeats}; expected at least 1")
    output = arguments.output
    if output is None:
        whole = not arguments.quick and set(arguments.only) == set(default_rows())
        output = ROOT / ("results" if whole else "outputs") / "benchmark"
    about, rows, skipped = machine(), [], {}
    progress = Progress(ROOT / "outputs" / "benchmark" / f"{machine_class(about['threads'])}.jsonl", about, arguments)
    print(f"{about['hardware']}, revision {about['git_revision']}")
    for name in arguments.only:
        torch.manual_seed(0)
        torch.set_num_threads(about["threads"])  # numba's threads change it
        try:
            row, before = progress.rows.get(name), "before: " if name in progress.rows else ""
            if row is None:
                with tempfile.TemporaryDirectory() as folder:
                    row = measure(name, BENCHMARKS[name](arguments.quick, Path(folder)), arguments.repeats)
                progress.write(row)
        except Skipped as reason:
            skipped[name] = str(reason)
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        rows.append(row)
        verdict = "met" if row.met else "not met"
        ratio = f"{row.kind} ratio {row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"
        print(f"{before}{name}: {ratio}, goal {row.goal} {verdict}", flush=True)
    place = write(output, about, rows, skipped, arguments.quick)
    if not arguments.quick and progress.rows.keys() <= set(arguments.only):  # nothing is left to continue
        progress.path.unlink(missing_ok=True)
    print(f"-> {place}.json, {place}.md")


class Progress:
    """Rows of a run that is not complete: a line of JSON each, written as soon as the row is measured.

    rows: by name, those of an earlier run on the same machine, revision and settings; none with --quick or --fresh.
    """

    def __init__(self, path: Path, about: dict[str, object], arguments: argparse.Namespace) -> None:
        self.path, self.quick = path, arguments.quick
        self.setting = {key: value for key, value in about.items() if key != "load_at_start"}
        self.setting["repeats"] = arguments.repeats
        self.rows: dict[str, Row] = {}
        if self.quick or not path.is_file():
            return
        if arguments.fresh:
            path.unlink()
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line may be cut
                content = json.loads(line)
                if content["setting"] == self.setting and not self.setting["git_revision"].endswith(CHANGED):
                    self.rows[content["row"]["name"]] = Row(**content["row"])

    def write(self, row: Row) -> None:
        if self.quick:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": asdict(row), "setting": self.setting}) + "\n")


def write(folder: Path, about: dict[str, object], rows: list[Row], skipped: dict[str, str], quick: bool) -> Path:
    """The rows as JSON and Markdown; returns their path without suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / machine_class(about["threads"])
    content = {
        "quick": quick,
        "machine": about,
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "skipped": skipped,
    }
    place.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    place.with_suffix(".md").write_text(markdown(about, rows, skipped, quick), encoding="utf-8")
    return place


if __name__ == "__main__":
    run_or_explain(main)
