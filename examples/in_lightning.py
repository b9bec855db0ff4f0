"""A geometry and its loss inside a Lightning module: python -m examples.in_lightning (pip install pytorch-lightning)"""

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from common.encoders.two_towers import TwoTowers
from common.geometry import clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from euclip.geometry import Hyperbolic
from examples.loop import noisy_pairs
from examples.plots import plot_losses


class Contrastive(LightningModule):
    """Towers, geometry and logit scale are one submodule: its parameters train, and checkpoints include them."""

    def __init__(self, model: TwoTowers):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        image_embeddings, text_embeddings, logit_scale = self.model(*batch)
        # with DDP the loss compares the embeddings of all processes
        loss = contrastive_loss(image_embeddings, text_embeddings, self.model.geometry, logit_scale)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *of_batch) -> None:  # after the optimiser's step
        clamp_scalars_(self.model.scalars())

    def configure_optimizers(self) -> torch.optim.Optimizer:  # the logit scale does not decay
        matrices, others = ([p for p in self.parameters() if (p.ndim >= 2) == decays] for decays in (True, False))
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]  # not the logit scale
        return torch.optim.AdamW(groups, lr=1e-3)


def fit(model: TwoTowers, samples: Dataset, steps: int) -> list[float]:
    """Returns the loss of every step. Lightning clips gradients only with gradient_clip_val."""
    module = Contrastive(model)
    trainer = Trainer(max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, DataLoader(samples, batch_size=64, shuffle=True, drop_last=True))
    return module.losses


def main() -> list[float]:
    torch.manual_seed(0)
    towers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    model = TwoTowers(*towers, Hyperbolic(dim=32, squared=False), LogitScale())
    return fit(model, TensorDataset(*next(noisy_pairs(1, batch_size=6400))), steps=200)


if __name__ == "__main__":
    plot_losses("in_lightning", main())
