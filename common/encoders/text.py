"""Bidirectional text transformer with any number of class tokens."""

import torch
from torch import nn

from common.encoders.transformer import Transformer


class BidirectionalTextTransformer(nn.Module):
    """The oblique paper's text tower: BERT order (post-norm), a further final LayerNorm, padding masked as keys.

    Several class tokens repeat the class id in front of the caption; they share its word embedding and differ by their
    position row alone (official release; TMLR appendix H says otherwise and is wrong against it).

    Args:
        vocabulary_size: token ids are in [0, vocabulary_size).
        context_length: length of the ids that come in, class and end token included.
        width, layers, heads, mlp_ratio: of the transformer.
        projection_dim: output numbers per class token.
        num_class_tokens: number of class tokens; the sequence grows by num_class_tokens - 1.
        final_layer_norm: False replaces the last LayerNorm by the identity.
        pad_id: id that is masked.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        projection_dim: int,
        mlp_ratio: float = 4.0,
        num_class_tokens: int = 1,
        final_layer_norm: bool = True,
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        self.context_length, self.num_class_tokens, self.projection_dim = (
            context_length,
            num_class_tokens,
            projection_dim,
        )
        self.pad_id = pad_id
        self.token_embedding = nn.Embedding(vocabulary_size, width)
        self.position_embedding = nn.Parameter(0.01 * torch.randn(context_length + num_class_tokens - 1, width))
        self.input_norm = nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, heads, mlp_ratio, pre_norm=False)
        self.final_norm = nn.LayerNorm(width) if final_layer_norm else nn.Identity()
        self.projection = nn.Parameter(width**-0.5 * torch.randn(width, projection_dim))
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """
        Args:
            token_ids: (batch, context_length), class id first, padded with pad_id.
        Returns:
            text_features: (batch, num_class_tokens * projection_dim); token k fills the k-th block.
        Raises:
            ValueError: if the length is not context_length.
        """
        if token_ids.shape[1] != self.context_length:
            raise ValueError(f"token_ids have length {token_ids.shape[1]}, this tower takes {self.context_length}")
        copies = token_ids[:, :1].expand(-1, self.num_class_tokens - 1)
        token_ids = torch.cat([copies, token_ids], dim=1)
        tokens = self.token_embedding(token_ids)
        tokens = self.input_norm(tokens + self.position_embedding.to(tokens.dtype))
        tokens = self.transformer(tokens, key_mask=token_ids != self.pad_id)
        return (self.final_norm(tokens[:, : self.num_class_tokens]) @ self.projection).flatten(1)
