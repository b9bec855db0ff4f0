"""Benchmark rows about evaluation."""

from pathlib import Path

import torch

from common.evaluation.retrieval import retrieval_ranks
from common.geometry import unit
from scripts.benchmarks.comparison import Comparison


def retrieval(quick: bool, folder: Path) -> Comparison:
    """Exact ranks both ways, over the similarity product alone."""
    num_images, num_texts = (50, 250) if quick else (5000, 25_000)
    images, texts = unit(torch.randn(num_images, 512)), unit(torch.randn(num_texts, 512))
    owners = torch.arange(num_images).repeat_interleave(5)
    return Comparison(
        f"product and exact ranks both ways with the tie rule, {num_images:,} x {num_texts:,} x 512 / product alone",
        "time",
        1.6,
        num_images + num_texts,
        lambda: retrieval_ranks(images @ texts.T, owners),
        lambda: images @ texts.T,
    )
