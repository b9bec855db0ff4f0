"""Benchmark rows about EuCLIP: what a training step costs over CLIP's on the same towers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.base.config import load_row
from common.base.provenance import ROOT
from common.data.scenes import scene_words
from common.data.tokenizer import WordTokenizer
from common.geometry import clamp_scalars_, norm, scalar_values
from common.run.schedule import build_optimizer
from common.tiled import geometry_loss
from euclip.config import Config
from euclip.model import build_model
from scripts.benchmarks.comparison import Comparison

GOALS = {"euclip": 1.02, "meru": 1.10}  # in seconds over CLIP's
STEPS = 3  # in one go


def step_of(row: str, scale: str) -> tuple[Callable[[], None], int]:
    """Some training steps of a row on random pixels and words, as euclip/train.py makes them, and their pairs."""
    folder = ROOT / "euclip"
    config = load_row(Config, folder, folder / "configs" / f"table4_{row}.yaml", scale)
    data, method, batch = config.data, config.method, config.optim.global_batch_size
    tokenizer = WordTokenizer.from_words(scene_words())
    torch.manual_seed(0)
    model = build_model(config, tokenizer)
    optimizer = build_optimizer(model, config.optim)
    images = torch.randn(batch, 3, data.image_size, data.image_size)
    token_ids = torch.randint(5, tokenizer.vocabulary_size, (batch, data.context_length))
    token_ids[:, -1] = tokenizer.end_id

    def steps() -> None:
        for _ in range(STEPS):
            image_embeddings, text_embeddings, logit_scale = model(images, token_ids)
            loss = geometry_loss(image_embeddings, text_embeddings, model.geometry, logit_scale)
            if method.entailment_weight:
                residuals = model.geometry.entailment_residual(
                    images=image_embeddings, texts=text_embeddings, min_radius=method.min_radius
                )
                loss = loss + method.entailment_weight * residuals.mean()
            _ = (
                norm(image_embeddings).mean().item(),
                norm(text_embeddings).mean().item(),
                scalar_values(model.scalars()),
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clamp_scalars_(model.scalars())

    return steps, STEPS * batch


def step_over_clip(row: str, quick: bool, folder: Path) -> Comparison:
    """A row's training step and CLIP's at demo scale."""
    scale = "smoke" if quick else "demo"
    ours, samples = step_of(row, scale)
    clip, _ = step_of("clip", scale)
    what = f"training step at {scale} scale on the CPU, loss and entailment included: {row} / CLIP, same towers"
    return Comparison(what, "time", GOALS[row], samples, ours, clip)


EUCLIP_BENCHMARKS = {f"step_{row}": partial(step_over_clip, row) for row in GOALS}
