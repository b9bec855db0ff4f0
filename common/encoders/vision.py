"""Vision transformer with any number of class tokens."""

import torch
import torch.nn.functional as F
from torch import nn

from common.base.arguments import multiples_beside
from common.encoders.stem import Stem
from common.encoders.transformer import Activation, Initialisation, Transformer


class VisionTransformer(nn.Module):
    """ViT as CLIP builds it: patch convolution without bias, LayerNorm before the blocks, class tokens in front.

    `patch_bias=True, input_norm=False, projection_dim=None` gives the ViT of timm and DeiT, ALBEF's image tower.

    Args:
        image_size: side of the square input in pixels, a multiple of patch_size.
        projection_dim: output numbers per class token; None = no projection.
        num_class_tokens: each has its own embedding and position row (oblique submission, Sec. 3.2); they share the
            projection.
        final_layer_norm: False = identity (EuCLIP, Sec. 3.3).
        patch_dropout: share of its patches that a training image loses, in [0, 1).
        stem: its features stand in for the patches (hybrid architecture).
    Raises:
        ValueError: if image_size is no multiple of patch_size, or the stem has another grid.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        width: int,
        layers: int,
        heads: int,
        projection_dim: int | None,
        mlp_ratio: float = 4.0,
        num_class_tokens: int = 1,
        final_layer_norm: bool = True,
        activation: Activation = "gelu",
        norm_eps: float = 1.0e-5,
        patch_bias: bool = False,
        input_norm: bool = True,
        patch_dropout: float = 0.0,
        gradient_checkpointing: bool = False,
        stem: Stem | None = None,
        initialisation: Initialisation = "clip_image",
    ) -> None:
        super().__init__()
        if image_size % patch_size:  # the patches would leave out a rim
            sizes = multiples_beside(image_size, patch_size)
            raise ValueError(
                f"image_size = {image_size} is not a multiple of patch_size = {patch_size}; expected: {sizes}"
            )
        if stem is not None and stem.grid != image_size // patch_size:
            raise ValueError(
                f"the stem {stem.name} makes {stem.grid} x {stem.grid} places of {image_size} pixels, patches of "
                f"{patch_size} would be {image_size // patch_size} x {image_size // patch_size}; expected: patches of "
                f"{image_size / stem.grid:g}"
            )
        self.image_size, self.patch_size, self.width = image_size, patch_size, width
        self.num_class_tokens, self.projection_dim, self.patch_dropout = num_class_tokens, projection_dim, patch_dropout
        num_patches = (image_size // patch_size) ** 2
        self.kept_patches = round(num_patches * (1 - patch_dropout))
        scale = width**-0.5
        self.stem = stem
        channels, side = (3, patch_size) if stem is None else (stem.channels, 1)
        self.patch_embedding = nn.Conv2d(channels, width, side, stride=side, bias=patch_bias)
        self.class_embedding = nn.Parameter(scale * torch.randn(num_class_tokens, width))
        self.position_embedding = nn.Parameter(scale * torch.randn(num_class_tokens + num_patches, width))
        self.input_norm = nn.LayerNorm(width, eps=norm_eps) if input_norm else nn.Identity()
        self.transformer = Transformer(
            width,
            layers,
            heads,
            mlp_ratio,
            pre_norm=True,
            activation=activation,
            norm_eps=norm_eps,
            gradient_checkpointing=gradient_checkpointing,
            initialisation=initialisation,
        )
        self.final_norm = nn.LayerNorm(width, eps=norm_eps) if final_layer_norm else nn.Identity()
        self.projection = None if projection_dim is None else nn.Parameter(scale * torch.randn(width, projection_dim))

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Shape of one training image: pixels, or the cached features of a frozen stem."""
        stem, size = self.stem, self.image_size
        return (3, size, size) if stem is None or stem.trainable else (stem.channels, stem.grid, stem.grid)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalised images (batch, 3, size, size) or a stem's features -> (batch, num_class_tokens * projection_dim).

        Token k fills the k-th block of projection_dim.
        """
        tokens = self.class_tokens(images)
        return (tokens if self.projection is None else tokens @ self.projection).flatten(1)

    def class_tokens(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, num_class_tokens, width): the first tokens of `forward_tokens`, at less cost."""
        return self.final_norm(self._blocks(images, self.num_class_tokens))

    def forward_tokens(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, num_class_tokens + num_patches, width) before the projection: class tokens, patches row by row."""
        return self.final_norm(self._blocks(images))

    def _blocks(self, images: torch.Tensor, first: int | None = None) -> torch.Tensor:
        if self.stem is not None:
            images = self.stem.places(images)
        elif images.shape[1:] != self.picture_shape:  # other sizes would get the wrong positions
            raise ValueError(f"images of shape {tuple(images.shape)}; expected: (batch, {str(self.picture_shape)[1:]}")
        classes, positions = self.position_embedding.tensor_split([self.num_class_tokens])
        if self.training and self.patch_dropout:  # before the embedding, so that lost patches cost nothing
            images, kept = self._drop_patches(images)
            positions = positions[kept]
        if self.stem is not None:
            images = self.stem.drop_channels(
                images.float(), self.training
            )  # cached ones are float16; few are left after patch dropout
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)  # (batch, num_patches, width)
        class_tokens = (self.class_embedding + classes).to(patches.dtype).expand(len(images), -1, -1)
        tokens = torch.cat([class_tokens, patches + positions.to(patches.dtype)], dim=1)
        return self.transformer(self.input_norm(tokens), first=first)

    def _drop_patches(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Draws the patches that each image keeps.
        #
        # Returns:
        #     (batch, channels, kept * side, side), the patches in order one above the other, and (batch, kept) numbers.
        side = self.patch_embedding.stride[0]
        patches = images.unflatten(2, (-1, side)).unflatten(4, (-1, side)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        kept = torch.rand(patches.shape[:2], device=patches.device).topk(self.kept_patches, dim=1).indices
        kept = kept.sort(dim=1).values
        patches = patches[torch.arange(len(patches), device=kept.device)[:, None], kept]
        return patches.transpose(1, 2).flatten(2, 3), kept


def interpolate_positions(
    position_embedding: torch.Tensor, num_class_tokens: int, grid: int, antialias: bool = True
) -> torch.Tensor:
    """Position rows of a square grid of patches, resampled bicubically for another grid; class rows are unchanged.

    Args:
        position_embedding: (num_class_tokens + old_grid**2, width), class rows first.
        grid: new side in patches.
        antialias: True as open_clip does; False as ALBEF and DeiT do (another bicubic kernel, also when enlarging).
    Returns:
        (num_class_tokens + grid**2, width); the input itself if the grid stays.
    Raises:
        ValueError: if the old rows are no square grid.
    """
    classes, patches = position_embedding.tensor_split([num_class_tokens])
    old_grid = round(len(patches) ** 0.5)
    if old_grid**2 != len(patches) or not old_grid:
        raise ValueError(f"{len(position_embedding)} position rows less {num_class_tokens} class rows are no square")
    if old_grid == grid:
        return position_embedding
    square = patches.float().T.reshape(1, -1, old_grid, old_grid)
    square = F.interpolate(square, size=(grid, grid), mode="bicubic", antialias=antialias, align_corners=False)
    return torch.cat([classes, square.flatten(2)[0].T.to(patches.dtype)])
