"""Any two towers and any geometry: three imports and a loop.

python -m examples.loop
"""

import torch
from torch import nn

from common.geometry import Sphere, clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale


def train(image_tower: nn.Module, text_tower: nn.Module, geometry: nn.Module, logit_scale: LogitScale, batches) -> list:
    """Returns the loss of every step. Towers give features, (batch, dim); the geometry maps them to embeddings."""
    towers, compared_by = nn.ModuleList([image_tower, text_tower]), nn.ModuleList([geometry, logit_scale])
    scalars = [*logit_scale.scalars(), *geometry.scalars()]
    groups = [{"params": towers.parameters()}, {"params": compared_by.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    losses = []
    for images, texts in batches:
        image_embeddings = geometry.embed_image(image_tower(images))
        text_embeddings = geometry.embed_text(text_tower(texts))
        loss = contrastive_loss(image_embeddings, text_embeddings, geometry, logit_scale())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clamp_scalars_(scalars)  # after the step: CLIP's bound of 100 and those of the geometry
        losses.append(loss.item())
    return losses


def noisy_pairs(steps: int, batch_size: int = 64):
    """Two views of the same hidden numbers, like an image and its caption."""
    for _ in range(steps):
        hidden = torch.randn(batch_size, 8)
        yield [torch.cat([hidden, torch.randn(batch_size, 8)], dim=1) for _ in range(2)]


def main(geometry: nn.Module | None = None, logit_scale: LogitScale | None = None) -> list:
    torch.manual_seed(0)
    towers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    losses = train(*towers, geometry or Sphere(), logit_scale or LogitScale(), noisy_pairs(steps=200))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; chance level {torch.tensor(64.0).log():.2f}")
    return losses


if __name__ == "__main__":
    from examples.plots import plot_losses

    plot_losses("loop", main())
