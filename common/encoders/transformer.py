"""Transformer blocks with PyTorch's fused attention, in pre-norm (CLIP, ViT) and post-norm (BERT) order."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Multi-head self-attention through F.scaled_dot_product_attention.

    Args:
        width: token dim; a multiple of heads.
        heads: number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads = heads
        self.in_projection = nn.Linear(width, 3 * width)
        self.out_projection = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = tokens.shape
        query, key, value = (
            self.in_projection(tokens).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask)
        return self.out_projection(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP with residuals.

    Args:
        width: token dim.
        heads: attention heads.
        mlp_ratio: hidden width of the MLP over `width`.
        pre_norm: True: x + f(norm(x)), as in ViT; False: norm(x + f(x)), as in BERT.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0, pre_norm: bool = True) -> None:
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.pre_norm = pre_norm
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        if self.pre_norm:
            tokens = tokens + self.attention(self.attention_norm(tokens), key_mask)
            return tokens + self.mlp(self.mlp_norm(tokens))
        tokens = self.attention_norm(tokens + self.attention(tokens, key_mask))
        return self.mlp_norm(tokens + self.mlp(tokens))


class Transformer(nn.Module):
    """A stack of blocks.

    Args:
        width, heads, mlp_ratio, pre_norm: as in Block.
        layers: number of blocks.
    """

    def __init__(self, width: int, layers: int, heads: int, mlp_ratio: float = 4.0, pre_norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio, pre_norm) for _ in range(layers))
        self._initialise(width, layers)

    def _initialise(self, width: int, layers: int) -> None:
        """CLIP's scheme: residual branches shrink with depth, so that the sum's variance does not grow with it."""
        attention_std, hidden_std = width**-0.5, (2 * width) ** -0.5
        residual_std = attention_std * (2 * layers) ** -0.5
        for block in self.blocks:
            nn.init.normal_(block.attention.in_projection.weight, std=attention_std)
            nn.init.normal_(block.attention.out_projection.weight, std=residual_std)
            nn.init.normal_(block.mlp[0].weight, std=hidden_std)
            nn.init.normal_(block.mlp[2].weight, std=residual_std)
            for linear in (block.attention.in_projection, block.attention.out_projection, block.mlp[0], block.mlp[2]):
                nn.init.zeros_(linear.bias)

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            tokens: (batch, length, width).
            key_mask: (batch, length), True where a token may be attended to; None = everywhere.
        Returns:
            (batch, length, width).
        """
        if key_mask is not None:
            key_mask = key_mask[:, None, None, :]  # (batch, 1 head, 1 query, length)
        for block in self.blocks:
            tokens = block(tokens, key_mask)
        return tokens
