"""Benchmark rows about training: our CLIP against open_clip's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import torch

from common.base.settings import OptimConfig
from common.encoders.text import CausalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Sphere
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.run.schedule import build_optimizer
from scripts.benchmarks.comparison import Comparison, Skipped


@dataclass(frozen=True)
class Towers:
    """Sizes of a CLIP model and its batch."""

    image_size: int
    patch_size: int
    image_width: int
    image_layers: int
    text_width: int
    text_layers: int
    head_width: int
    context_length: int
    vocabulary_size: int
    embedding_dim: int
    batch: int
    steps: int  # in one go


TOY = Towers(32, 16, 32, 1, 32, 1, 16, 8, 64, 16, 4, 1)
SMALL = Towers(96, 16, 256, 6, 256, 4, 64, 32, 4096, 256, 32, 2)
VIT_B_32 = Towers(224, 32, 768, 12, 512, 12, 64, 77, 49_408, 512, 256, 5)


def our_clip(towers: Towers) -> TwoTowers:
    """CLIP from this repository's parts."""
    image_tower = VisionTransformer(
        image_size=towers.image_size,
        patch_size=towers.patch_size,
        width=towers.image_width,
        layers=towers.image_layers,
        heads=towers.image_width // towers.head_width,
        projection_dim=towers.embedding_dim,
    )
    text_tower = CausalTextTransformer(
        vocabulary_size=towers.vocabulary_size,
        context_length=towers.context_length,
        width=towers.text_width,
        layers=towers.text_layers,
        heads=towers.text_width // towers.head_width,
        projection_dim=towers.embedding_dim,
        end_id=towers.vocabulary_size - 1,
    )
    return TwoTowers(image_tower, text_tower, Sphere(), LogitScale(1 / 0.07, maximum=100.0))


def open_clips_clip(towers: Towers) -> open_clip.CLIP:
    """The same model from open_clip."""
    image = open_clip.CLIPVisionCfg(
        image_size=towers.image_size,
        patch_size=towers.patch_size,
        width=towers.image_width,
        layers=towers.image_layers,
        head_width=towers.head_width,
    )
    text = open_clip.CLIPTextCfg(
        context_length=towers.context_length,
        vocab_size=towers.vocabulary_size,
        width=towers.text_width,
        layers=towers.text_layers,
        heads=towers.text_width // towers.head_width,
    )
    return open_clip.CLIP(towers.embedding_dim, image, text)


def our_loss(model: TwoTowers, images: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """As in train.py."""
    image_embeddings, text_embeddings, logit_scale = model(images, token_ids)
    return contrastive_loss(image_embeddings, text_embeddings, model.geometry, logit_scale)


def training_step(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], clamp: Callable[[], object], optim: OptimConfig
) -> Callable[[], None]:
    """Forward, backward, AdamW with weight decay on matrices alone, bound of the logit scale."""
    optimizer = build_optimizer(model, optim)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        clamp()

    return step


def training_pair(towers: Towers, device: str = "cpu") -> tuple[Callable[[], None], Callable[[], None]]:
    """Some training steps of our CLIP and of open_clip's, on the same batch; on a GPU under bfloat16 autocast."""
    images = torch.randn(towers.batch, 3, towers.image_size, towers.image_size, device=device)
    token_ids = torch.randint(1, towers.vocabulary_size - 1, (towers.batch, towers.context_length), device=device)
    token_ids[:, -1] = towers.vocabulary_size - 1  # the largest id ends a caption, for both
    ours, theirs = our_clip(towers).to(device), open_clips_clip(towers).to(device)
    their_loss = open_clip.ClipLoss()
    optim = OptimConfig()
    our_step = training_step(ours, lambda: our_loss(ours, images, token_ids), ours.logit_scale.clamp_, optim)

    def clamp() -> None:
        with torch.no_grad():
            theirs.logit_scale.clamp_(0, np.log(100))

    their_step = training_step(theirs, lambda: their_loss(*theirs(images, token_ids)), clamp, optim)

    def several(step: Callable[[], None]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            for _ in range(towers.steps):
                step()
        if device != "cpu":
            torch.cuda.synchronize()

    return lambda: several(our_step), lambda: several(their_step)


def training(quick: bool, folder: Path, towers: Towers = SMALL, device: str = "cpu") -> Comparison:
    """Training steps of the same CLIP from our parts and from open_clip's."""
    towers = TOY if quick else towers
    ours, theirs = training_pair(towers, device)
    return Comparison(
        f"training, {device}: ViT {towers.image_width} x {towers.image_layers} on "
        f"{(towers.image_size // towers.patch_size) ** 2} patches, causal text {towers.text_width} x "
        f"{towers.text_layers} on {towers.context_length} tokens, batch {towers.batch}, InfoNCE, AdamW: "
        "our parts / open_clip's",
        "throughput",
        1.0,
        towers.batch * towers.steps,
        ours,
        theirs,
    )


def training_gpu(quick: bool, folder: Path) -> Comparison:
    """The same at the size of ViT-B/32 on a CUDA device, under bfloat16 autocast."""
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device")
    return training(quick, folder, VIT_B_32, "cuda")
