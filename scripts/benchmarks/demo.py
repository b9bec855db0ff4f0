"""Benchmark rows about the newcomer's run: drawing its scenes, and its step in bfloat16."""

from collections.abc import Callable
from pathlib import Path

import torch

from common.base.config import load_row
from common.base.provenance import ROOT, cpu_computes_bfloat16
from common.data.batches import TrainingView
from common.data.order import SampleOrder
from common.data.pairs import image_transform, open_training_pairs
from common.data.text import build_tokenizer
from common.data.transforms import normalize
from oblique_topology.config import Config
from oblique_topology.model import build_model
from scripts.benchmarks.comparison import Comparison, Skipped
from scripts.benchmarks.training import our_loss, training_step


def batch_and_step(quick: bool) -> tuple[int, Callable[[], object], Callable[[], None]]:
    """Size of a batch of the baseline at demo scale, drawing one, and one training step on it."""
    row = ROOT / "oblique_topology" / "configs" / "table2_clip.yaml"
    config = load_row(Config, ROOT / "oblique_topology", row, "smoke" if quick else "demo")
    pairs = open_training_pairs(config.data, 0)
    tokenizer = build_tokenizer(config.data, pairs)
    size = config.optim.global_batch_size
    view = TrainingView(
        pairs, SampleOrder(len(pairs), size, 0), image_transform(config.data), tokenizer, config.data.context_length
    )
    positions = list(range(size))
    batch = view.__getitems__(positions)
    images, token_ids = normalize(batch.images), batch.token_ids
    model = build_model(config, tokenizer)
    step = training_step(model, lambda: our_loss(model, images, token_ids), model.logit_scale.clamp_, config.optim)
    return size, lambda: view.__getitems__(positions), step


def scenes(quick: bool, folder: Path) -> Comparison:
    """Drawing and tokenising one demo batch, over one training step on it; below 1 one worker never starves the run."""
    size, draw, step = batch_and_step(quick)
    what = f"drawing and tokenising a batch of {size} scenes / one demo training step on it"
    return Comparison(what, "time", 1.0, size, draw, step)


def step_bf16(quick: bool, folder: Path) -> Comparison:
    """One demo training step under bfloat16 autocast, as run.mixed_precision=bf16 has it, over one in float32."""
    if not cpu_computes_bfloat16():
        raise Skipped("a CPU without instructions for bfloat16, or one that torch does not know")
    size, _, step = batch_and_step(quick)

    def in_bf16() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step()

    what = f"demo training step of {size} scenes on the CPU, towers in bfloat16 / in float32"
    return Comparison(what, "time", 0.6, size, in_bf16, step)
