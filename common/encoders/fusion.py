"""Fusion of a caption with its image by cross-attention, and the head that fills in masked words (ALBEF)."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common.encoders.transformer import Transformer


class FusionTransformer(nn.Module):
    """BERT's upper layers with cross-attention to image tokens after each self-attention (ALBEF, Sec. 3.1).

    Args:
        layers, heads, mlp_ratio, norm_eps, dropout, gradient_checkpointing: of the transformer, post-norm.
    """

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
            text_tokens: (batch, length, width), of the text tower.
            text_mask: (batch, length), True at words, False at padding.
            image_tokens: (batch, image_length, image_width), class token included; of several images, the layers look
                at one after the other, in turn.
            recorded: receives the weights (batch, heads, length, image_length) of each layer, for Grad-CAM.
            first: only that many tokens come out, and the last layer spares itself the others; None = all.
        Returns:
            (batch, first, width); position 0 holds what the pair is judged by.
        """
        return self.transformer(text_tokens, text_mask, memory=image_tokens, recorded=recorded, first=first)

    def doubled(self) -> "FusionTransformer":
        """A fusion with two images: each layer twice, one after the other, for either image (ALBEF, NLVR2).

        Both begin as the layer does, and have one projection of keys and values between them, as long as they train.
        """
        twice = copy.deepcopy(self)
        pairs = [(block, copy.deepcopy(block)) for block in twice.transformer.blocks]
        for first, second in pairs:
            second.cross_attention.memory_projection = first.cross_attention.memory_projection
        twice.transformer.blocks = nn.ModuleList(block for pair in pairs for block in pair)
        return twice


class MaskedLanguageHead(nn.Module):
    """BERT's head: dense, GELU, LayerNorm, then the word embeddings themselves as the output matrix.

    Args:
        embedding_width: of the word embeddings; None = that of the tokens.
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
        """
        Args:
            tokens: (..., width).
            word_embeddings: (vocabulary_size, embedding_width), of the text tower; passed in, hence one parameter.
        Returns:
            (..., vocabulary_size) logits.
        """
        return F.linear(self.norm(F.gelu(self.dense(tokens))), word_embeddings, self.bias)
