"""The model that all four papers share: two towers, a geometry, a logit scale."""

import torch
from torch import nn

from common.caption_lengths import encode_by_length
from common.geometry import Geometry, Scalar
from common.logit_scale import LogitBias, LogitScale


class TwoTowers(nn.Module):
    """Image tower and text tower whose outputs a geometry compares.

    Args:
        image_tower: (batch, 3, size, size) -> (batch, dim).
        text_tower: (batch, context_length) ids -> (batch, dim).
        geometry: a module, so that its scalars are saved with the model.
        logit_bias: of a loss that has one.
    """

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        geometry: Geometry,
        logit_scale: LogitScale,
        logit_bias: LogitBias | None = None,
    ) -> None:
        super().__init__()
        self.image_tower = image_tower
        self.text_tower = text_tower
        self.geometry = geometry
        self.logit_scale = logit_scale
        self.logit_bias = logit_bias

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, size, size) normalised pixels -> image embeddings."""
        return self.geometry.embed_image(self.image_tower(images))

    def encode_text(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, context_length) ids -> text embeddings."""
        return self.geometry.embed_text(encode_by_length(self.text_tower, token_ids))

    def scalars(self) -> list[Scalar]:
        of_logits = [scalar for module in self._of_logits() for scalar in module.scalars()]
        return [*of_logits, *self.geometry.scalars()]

    def _of_logits(self) -> list[LogitScale | LogitBias]:
        return [self.logit_scale] if self.logit_bias is None else [self.logit_scale, self.logit_bias]

    def forward(self, images: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Image embeddings, text embeddings, logit scale and bias if any, in one call for DDP and FSDP."""
        return self.encode_image(images), self.encode_text(token_ids), *(module() for module in self._of_logits())


def bare_tower(tower: nn.Module) -> nn.Module:
    """The tower itself; late interaction wraps its towers."""
    return getattr(tower, "tower", tower)
