"""Transformer blocks with PyTorch's fused attention, in pre-norm (CLIP, ViT) and post-norm (BERT) order."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Activation = Literal["gelu", "quick_gelu"]
Initialisation = Literal["scaled", "clip_text", "clip_image"]


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), of OpenAI's CLIP weights; up to 0.02 away from the exact GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool = False,
) -> torch.Tensor:
    """F.scaled_dot_product_attention; bfloat16 on a CPU is computed in float32, as its kernel takes six times as long.

    Args:
        query, key, value: (batch, heads, length, width per head).
        mask: broadcasts to (batch, heads, length, length), True where attention may go; None = everywhere.
        causal: a token sees itself and those before it; only without a mask.
    """
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal)
    with torch.autocast("cpu", enabled=False):
        query, key, value = query.float(), key.float(), value.float()
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal).to(torch.bfloat16)


class Attention(nn.Module):
    """Multi-head self-attention; width is a multiple of heads."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_projection = nn.Linear(width, 3 * width)
        self.out_projection = nn.Linear(width, width)

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, causal: bool = False, first: int | None = None
    ) -> torch.Tensor:
        """(batch, length, width) -> (batch, first, width); `mask` and `causal` as in `fused_attention`."""
        batch, length, width = tokens.shape
        query, key, value = (
            self.in_projection(tokens).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        attended = fused_attention(query[:, :, :first], key, value, mask, dropout, causal)
        return self.out_projection(attended.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention of queries (`width`, a multiple of heads) to keys and values (`memory_width`)."""

    def __init__(self, width: int, memory_width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_projection = nn.Linear(width, width)
        self.memory_projection = nn.Linear(memory_width, 2 * width)
        self.out_projection = nn.Linear(width, width)

    def forward(
        self,
        tokens: torch.Tensor,
        memory: torch.Tensor,
        memory_mask: torch.Tensor | None = None,
        recorded: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """(batch, length, width) tokens, (batch, memory_length, memory_width) memory -> (batch, length, width).

        Args:
            memory_mask: (batch, 1, 1, memory_length), True where attention may go; None = everywhere.
            recorded: receives the weights (batch, heads, length, memory_length) as part of the graph, for Grad-CAM;
                same result, more memory.
        """
        batch, length, width = tokens.shape
        query = self.query_projection(tokens).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = (
            self.memory_projection(memory).view(batch, -1, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        if recorded is None:
            attended = fused_attention(query, key, value, memory_mask, dropout)
        else:
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            if memory_mask is not None:
                scores = scores.masked_fill(~memory_mask, -torch.inf)
            weights = scores.softmax(dim=-1)
            recorded.append(weights)
            attended = F.dropout(weights, dropout) @ value
        return self.out_projection(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Self-attention, cross-attention if there is a memory, and MLP, each with a residual.

    Args:
        pre_norm: True: x + f(norm(x)), as in ViT; False: norm(x + f(x)), as in BERT.
        norm_eps: CLIP and PyTorch 1e-5, timm's ViT 1e-6, BERT 1e-12.
        dropout: of attention weights and of each residual branch.
        memory_width: of the memory; None = no cross-attention.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float = 4.0,
        pre_norm: bool = True,
        activation: Activation = "gelu",
        norm_eps: float = 1.0e-5,
        dropout: float = 0.0,
        memory_width: int | None = None,
    ) -> None:
        super().__init__()
        activations = {"gelu": nn.GELU, "quick_gelu": QuickGELU}
        hidden = round(width * mlp_ratio)
        self.pre_norm = pre_norm
        self.attention = Attention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.cross_attention = None
        if memory_width is not None:
            self.cross_attention = CrossAttention(width, memory_width, heads, dropout)
            self.cross_attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), activations[activation](), nn.Linear(hidden, width))
        self.mlp_norm = nn.LayerNorm(width, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool = False,
        memory: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        recorded: list[torch.Tensor] | None = None,
        first: int | None = None,
    ) -> torch.Tensor:
        """As `Transformer.forward`, with masks that broadcast to (batch, heads, length, keys) and one memory."""

        def attend(x):
            return self.attention(x, mask, causal, first)

        def look(x):
            return self.cross_attention(x, memory, memory_mask, recorded)

        branches = [(attend, self.attention_norm)]
        if self.cross_attention is not None:
            branches.append((look, self.cross_attention_norm))
        branches.append((self.mlp, self.mlp_norm))
        for branch, norm in branches:
            if self.pre_norm:
                tokens = tokens[:, :first] + self.dropout(branch(norm(tokens)))
            else:
                tokens = norm(tokens[:, :first] + self.dropout(branch(tokens)))
        return tokens


class Transformer(nn.Module):
    """A stack of blocks.

    Args:
        width, heads, mlp_ratio, pre_norm, activation, norm_eps, dropout, memory_width: as in `Block`.
        causal: as in `fused_attention`.
        gradient_checkpointing: in training, runs each block again in the backward pass: activation memory of one block
            instead of all, for about a third more time.
        initialisation: of the blocks. "scaled": normal, with deviations from width; residual branches shrink with
            depth, so that the variance of their sum does not grow; biases 0. "clip_text": the same, with PyTorch's MLP
            biases. "clip_image": all as PyTorch draws it, as in OpenAI's and open_clip's image towers.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        mlp_ratio: float = 4.0,
        pre_norm: bool = True,
        activation: Activation = "gelu",
        norm_eps: float = 1.0e-5,
        dropout: float = 0.0,
        memory_width: int | None = None,
        causal: bool = False,
        gradient_checkpointing: bool = False,
        initialisation: Initialisation = "scaled",
    ) -> None:
        super().__init__()
        self.causal, self.gradient_checkpointing = causal, gradient_checkpointing
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp_ratio, pre_norm, activation, norm_eps, dropout, memory_width) for _ in range(layers)
        )
        for block in self.blocks:
            _initialise(block, width, layers, initialisation)

    def forward(
        self,
        tokens: torch.Tensor,
        key_mask: torch.Tensor | None = None,
        memory: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        memory_mask: torch.Tensor | None = None,
        recorded: list[torch.Tensor] | None = None,
        first: int | None = None,
    ) -> torch.Tensor:
        """
        Args:
            tokens: (batch, length, width).
            key_mask: (batch, length), True where a token may be attended to; None = everywhere.
            memory: (batch, memory_length, memory_width) for cross-attention; of a tuple, block i takes number i mod its
                length.
            memory_mask: (batch, memory_length), as key_mask; the same for all memories.
            recorded: receives the cross-attention weights of every block, in order (see `CrossAttention`); not in
                training with gradient checkpointing.
            first: number of tokens to return; the last block computes no others. None = all. Not for a causal
                transformer.
        Returns:
            (batch, first, width).
        """
        mask = None if key_mask is None else key_mask[:, None, None, :]  # (batch, 1 head, 1 query, length)
        causal = self.causal
        if causal and mask is not None:  # the fused kernel takes one or the other
            length = tokens.shape[1]
            mask, causal = mask & torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril(), False
        memory_mask = None if memory_mask is None else memory_mask[:, None, None, :]
        memories = memory if isinstance(memory, tuple) else (memory,)
        for number, block in enumerate(self.blocks):
            kept = first if block is self.blocks[-1] else None
            memory = memories[number % len(memories)]
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                tokens = checkpoint(
                    block, tokens, mask, causal, memory, memory_mask, recorded, kept, use_reentrant=False
                )
            else:
                tokens = block(tokens, mask, causal, memory, memory_mask, recorded, kept)
        return tokens[:, :first]


def _initialise(block: Block, width: int, layers: int, initialisation: Initialisation) -> None:
    attention, cross = block.attention, block.cross_attention
    if initialisation == "clip_image":  # nn.Linear has drawn the other weights as nn.MultiheadAttention and the MLP do
        nn.init.xavier_uniform_(attention.in_projection.weight)
    else:
        residual_std = width**-0.5 * (2 * layers) ** -0.5
        weights = [
            (attention.in_projection, width**-0.5),
            (attention.out_projection, residual_std),
            (block.mlp[0], (2 * width) ** -0.5),
            (block.mlp[2], residual_std),
        ]
        if cross is not None:
            weights += [
                (cross.query_projection, width**-0.5),
                (cross.memory_projection, cross.memory_projection.in_features**-0.5),
                (cross.out_projection, residual_std),
            ]
        for linear, std in weights:
            nn.init.normal_(linear.weight, std=std)
    zero = [attention.in_projection, attention.out_projection]
    if cross is not None:
        zero += [cross.query_projection, cross.memory_projection, cross.out_projection]
    if initialisation == "scaled":
        zero += [block.mlp[0], block.mlp[2]]
    for linear in zero:
        nn.init.zeros_(linear.bias)
