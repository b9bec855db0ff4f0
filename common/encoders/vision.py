"""Vision transformer with any number of class tokens."""

import torch
from torch import nn

from common.encoders.transformer import Transformer


class VisionTransformer(nn.Module):
    """ViT as CLIP builds it: patch convolution without bias, LayerNorm before the blocks, class tokens in front.

    Args:
        image_size: side of the square input in pixels, a multiple of patch_size.
        patch_size: side of a patch in pixels.
        width, layers, heads, mlp_ratio: of the transformer.
        projection_dim: output numbers per class token.
        num_class_tokens: each has its own embedding and its own position row (oblique submission, Sec. 3.2); one
            projection is shared by all.
        final_layer_norm: False replaces the last LayerNorm by the identity (EuCLIP, Sec. 3.3).
    Raises:
        ValueError: if image_size is no multiple of patch_size.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        width: int,
        layers: int,
        heads: int,
        projection_dim: int,
        mlp_ratio: float = 4.0,
        num_class_tokens: int = 1,
        final_layer_norm: bool = True,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size {image_size} is not a multiple of patch_size {patch_size}")
        self.image_size, self.num_class_tokens, self.projection_dim = image_size, num_class_tokens, projection_dim
        num_patches = (image_size // patch_size) ** 2
        scale = width**-0.5
        self.patch_embedding = nn.Conv2d(3, width, patch_size, stride=patch_size, bias=False)
        self.class_embedding = nn.Parameter(scale * torch.randn(num_class_tokens, width))
        self.position_embedding = nn.Parameter(scale * torch.randn(num_class_tokens + num_patches, width))
        self.input_norm = nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, heads, mlp_ratio, pre_norm=True)
        self.final_norm = nn.LayerNorm(width) if final_layer_norm else nn.Identity()
        self.projection = nn.Parameter(scale * torch.randn(width, projection_dim))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """
        Args:
            images: (batch, 3, image_size, image_size), normalised.
        Returns:
            image_features: (batch, num_class_tokens * projection_dim); token k fills the k-th block of projection_dim.
        """
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)  # (batch, num_patches, width)
        class_tokens = self.class_embedding.to(patches.dtype).expand(len(images), -1, -1)
        tokens = torch.cat([class_tokens, patches], dim=1) + self.position_embedding.to(patches.dtype)
        tokens = self.transformer(self.input_norm(tokens))
        return (self.final_norm(tokens[:, : self.num_class_tokens]) @ self.projection).flatten(1)
