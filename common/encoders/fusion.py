"""Fusion of a caption with its image by cross-attention, and the head that fills in masked words (ALBEF)."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common.encoders.transformer import Transformer


class FusionTransformer(nn.Module):
    """BERT's upper layers (post-norm), with cross-attention to image tokens after self-attention (ALBEF, Sec. 3.1)."""

    def __init__(
        self,
        width: int,
        image_width: int,
        layers: int,
        heads: int,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1.0e-12,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.width = width
        self.transformer = Transformer(
            width,
            layers,
            heads,
            mlp_ratio,
            pre_norm=False,
            norm_eps=norm_eps,
            dropout=dropout,
            memory_width=image_width,
            gradient_checkpointing=gradient_checkpointing,
        )

    def forward(
        self,
        text_tokens: torch.Tensor,
        text_mask: torch.Tensor,
        image_tokens: torch.Tensor | tuple[torch.Tensor, ...],
        recorded: list[torch.Tensor] | None = None,
        first: int | None = None,
    ) -> torch.Tensor:
        """
        Args:
            text_tokens: (batch, length, width).
            text_mask: (batch, length), True at words, False at padding.
            image_tokens: (batch, image_length, image_width), class token included; of a tuple, the layers take one each
                in turn.
            recorded, first: as in `Transformer`.
        Returns:
            (batch, first, width); position 0 decides about the pair.
        """
        return self.transformer(text_tokens, text_mask, memory=image_tokens, recorded=recorded, first=first)

    def doubled(self) -> "FusionTransformer":
        """A fusion with two images: each layer twice in a row, once per image (ALBEF, NLVR2).

        Both copies start with the layer's weights; they always share the projection of keys and values.
        """
        twice = copy.deepcopy(self)
        pairs = [(block, copy.deepcopy(block)) for block in twice.transformer.blocks]
        for first, second in pairs:
            second.cross_attention.memory_projection = first.cross_attention.memory_projection
        twice.transformer.blocks = nn.ModuleList(block for pair in pairs for block in pair)
        return twice


class MaskedLanguageHead(nn.Module):
    """BERT's head: dense, GELU, LayerNorm, then the word embeddings as the output matrix.

    Args:
        embedding_width: of the word embeddings; None = `width`.
    """

    def __init__(
        self, width: int, vocabulary_size: int, embedding_width: int | None = None, norm_eps: float = 1.0e-12
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(width, embedding_width or width)
        self.norm = nn.LayerNorm(embedding_width or width, eps=norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, tokens: torch.Tensor, word_embeddings: torch.Tensor) -> torch.Tensor:
        """(..., width) tokens, (vocabulary_size, embedding_width) word embeddings -> (..., vocabulary_size) logits."""
        return F.linear(self.norm(F.gelu(self.dense(tokens))), word_embeddings, self.bias)
