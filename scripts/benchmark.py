"""Performance as ratios measured in one run, against unavoidable work or the alternative that a user would pick.

    make benchmark
    python scripts/benchmark.py --only retrieval --repeats 5 --json outputs/benchmark.json

Seconds depend on the machine and its load; the ratios are what to quote. Each row times both sides in turn, several
times, and takes the medians.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.data.pairs import TrainingView, build_tokenizer, image_transform, open_training_pairs
from common.evaluation.retrieval import retrieval_ranks
from common.geometry import unit
from common.info_nce import contrastive_loss
from common.run.config import ConfigError, load_row
from common.run.order import SampleOrder
from common.run.provenance import ROOT, git_revision, hardware
from common.run.schedule import build_optimizer
from common.run.session import run_or_explain
from oblique_topology.config import Config
from oblique_topology.model import build_model


def ratio(ours: Callable[[], object], reference: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median seconds of both, run in turn after one warm-up each, and the median of the pairwise ratios."""
    times: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):
        pair = []
        for function in (ours, reference):
            start = time.perf_counter()
            function()
            pair.append(time.perf_counter() - start)
        if repeat:
            times.append((pair[0], pair[1]))
    return {
        "ours_seconds": statistics.median(first for first, _ in times),
        "reference_seconds": statistics.median(second for _, second in times),
        "ratio": statistics.median(first / second for first, second in times),
    }


def retrieval(repeats: int) -> dict[str, float]:
    """Product and exact ranks both ways of 5,000 pictures x 25,000 captions, over the product alone; goal 1.6."""
    images, texts = unit(torch.randn(5000, 512)), unit(torch.randn(25_000, 512))
    text_to_image = torch.arange(5000).repeat_interleave(5)
    return ratio(lambda: retrieval_ranks(images @ texts.T, text_to_image), lambda: images @ texts.T, repeats)


def scenes(repeats: int) -> dict[str, float]:
    """Drawing and tokenising one demo batch, over one training step on it; below 1 the loader never starves the run."""
    row = ROOT / "oblique_topology" / "configs" / "table2_clip.yaml"
    config = load_row(Config, ROOT / "oblique_topology", row, "demo")
    pairs = open_training_pairs(config.data, 0)
    tokenizer = build_tokenizer(config.data, pairs)
    order = SampleOrder(len(pairs), config.optim.global_batch_size, 0)
    view = TrainingView(pairs, order, image_transform(config.data), tokenizer, config.data.context_length)
    positions = list(range(config.optim.global_batch_size))
    batch = view.__getitems__(positions)
    model = build_model(config, tokenizer.vocabulary_size)
    optimizer = build_optimizer(model, config.optim)

    def step() -> None:
        loss = contrastive_loss(*_embedded(model, batch), model.geometry.similarity, model.logit_scale())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return ratio(lambda: view.__getitems__(positions), step, repeats)


def _embedded(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    return model.encode_image(batch.images / 255.0), model.encode_text(batch.token_ids)


BENCHMARKS = {"retrieval": retrieval, "scenes": scenes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only if name not in BENCHMARKS]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)} is unknown; accepted: {', '.join(BENCHMARKS)}")
    results = {}
    print(f"{hardware()}, revision {git_revision()}, medians of {arguments.repeats}")
    print(f"{'':12} {'ours':>10} {'reference':>10} {'ratio':>7}  what")
    for name in arguments.only:
        results[name] = found = BENCHMARKS[name](arguments.repeats)
        what = BENCHMARKS[name].__doc__
        print(
            f"{name:12} {found['ours_seconds']:9.3f}s {found['reference_seconds']:9.3f}s {found['ratio']:7.2f}  {what}"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"hardware": hardware(), "results": results}, indent=1))


if __name__ == "__main__":
    run_or_explain(main)
