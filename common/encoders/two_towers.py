"""The machine that all four papers share: two towers, a geometry, a logit scale."""

import torch
from torch import nn

from common.caption_lengths import encode_by_length
from common.geometry import Geometry, Scalar
from common.logit_scale import LogitScale


class TwoTowers(nn.Module):
    """Image tower and text tower whose outputs a geometry compares.

    Args:
        image_tower: (batch, 3, size, size) -> image_features (batch, dim).
        text_tower: (batch, context_length) ids -> text_features (batch, dim).
        geometry: see common/geometry.py; a module, so that its scalars are saved with the model.
        logit_scale: the multiplier.
    """

    def __init__(
        self, image_tower: nn.Module, text_tower: nn.Module, geometry: Geometry, logit_scale: LogitScale
    ) -> None:
        super().__init__()
        self.image_tower = image_tower
        self.text_tower = text_tower
        self.geometry = geometry
        self.logit_scale = logit_scale

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, size, size) normalised pixels -> image embeddings."""
        return self.geometry.embed_image(self.image_tower(images))

    def encode_text(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, context_length) -> text embeddings."""
        return self.geometry.embed_text(encode_by_length(self.text_tower, token_ids))

    def scalars(self) -> list[Scalar]:
        """The logit scale and those of the geometry."""
        return [*self.logit_scale.scalars(), *self.geometry.scalars()]

    def forward(self, images: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Image embeddings, text embeddings and the logit scale, in one call that DDP and FSDP can wrap."""
        return self.encode_image(images), self.encode_text(token_ids), self.logit_scale()


def bare_tower(tower: nn.Module) -> nn.Module:
    """The tower itself; late interaction wraps its towers."""
    return getattr(tower, "tower", tower)
