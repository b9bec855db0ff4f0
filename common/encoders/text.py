"""Text towers: bidirectional in BERT's order with any number of class tokens, and causal in CLIP's."""

import torch
import torch.nn.functional as F
from torch import nn

from common.caption_lengths import up_to_first
from common.encoders.transformer import Activation, Transformer


class BidirectionalTextTransformer(nn.Module):
    """BERT order: post-norm, LayerNorm on the embeddings, padding masked as keys.

    With a final LayerNorm and a projection it is the oblique paper's text tower; with
    `final_layer_norm=False, projection_dim=None, norm_eps=1e-12` it is BERT, ALBEF's text tower.
    Several class tokens repeat the class id in front of the caption; they differ by their position row only (official
    release; TMLR appendix H differs from it, and is wrong).

    Args:
        context_length: maximal number of ids, class and end token included.
        projection_dim: output numbers per class token; None = no projection.
        num_class_tokens: the sequence grows by num_class_tokens - 1.
        final_layer_norm: False = identity.
        end_id: what follows the first such id is masked; None = every pad_id is. Some vocabularies pad with an ordinary
            word (CLIP's id 0 is "!").
        dropout: of the embeddings behind their LayerNorm, and as in `Block`: in training, as BERT has it.
        stem: ids -> (batch, length, stem.width), in place of the word embeddings.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        projection_dim: int | None,
        mlp_ratio: float = 4.0,
        num_class_tokens: int = 1,
        final_layer_norm: bool = True,
        pad_id: int = 0,
        end_id: int | None = None,
        activation: Activation = "gelu",
        norm_eps: float = 1.0e-5,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.context_length, self.width, self.pad_id, self.end_id = context_length, width, pad_id, end_id
        self.num_class_tokens, self.projection_dim = num_class_tokens, projection_dim
        self.vocabulary_size = vocabulary_size
        self.stem, self.token_embedding = stem, _token_embedding(vocabulary_size, width, stem)
        self.position_embedding = nn.Parameter(0.01 * torch.randn(context_length + num_class_tokens - 1, width))
        self.input_norm = nn.LayerNorm(width, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)
        self.transformer = Transformer(
            width,
            layers,
            heads,
            mlp_ratio,
            pre_norm=False,
            activation=activation,
            norm_eps=norm_eps,
            dropout=dropout,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.final_norm = nn.LayerNorm(width, eps=norm_eps) if final_layer_norm else nn.Identity()
        self.projection = (
            None if projection_dim is None else nn.Parameter(width**-0.5 * torch.randn(width, projection_dim))
        )
        if stem is None:
            nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids, class id first -> (batch, num_class_tokens * projection_dim), one block per token."""
        tokens = self.class_tokens(token_ids)
        return (tokens if self.projection is None else tokens @ self.projection).flatten(1)

    def class_tokens(self, token_ids: torch.Tensor, word_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, num_class_tokens, width): the first tokens of `forward_tokens`, at less cost."""
        return self.final_norm(self._blocks(token_ids, word_mask, first=self.num_class_tokens))

    def forward_tokens(self, token_ids: torch.Tensor, word_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, num_class_tokens - 1 + length, width): all tokens before the projection.

        Args:
            word_mask: (batch, length), False at padding; None = from the ids. Needed where words are masked: the end
                token may be one of them.
        """
        return self.final_norm(self._blocks(token_ids, word_mask))

    def word_mask(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length), True at class, words and end token, False at padding."""
        if self.end_id is None:
            return token_ids != self.pad_id
        return up_to_first(token_ids, self.end_id)

    def _blocks(
        self, token_ids: torch.Tensor, word_mask: torch.Tensor | None = None, first: int | None = None
    ) -> torch.Tensor:
        word_mask = self.word_mask(token_ids) if word_mask is None else word_mask
        more = self.num_class_tokens - 1  # class tokens in front of the first
        tokens = self.token_embedding(token_ids if self.stem is None else self.stem(token_ids))
        tokens = torch.cat([tokens[:, :1].expand(-1, more, -1), tokens], dim=1)
        tokens = self.input_norm(tokens + self.position_embedding[: tokens.shape[1]].to(tokens.dtype))
        return self.transformer(self.dropout(tokens), F.pad(word_mask, (more, 0), value=True), first=first)


class CausalTextTransformer(nn.Module):
    """CLIP's text tower: causal, pre-norm, read out at the first end token (CLIP, Sec. 2.4).

    It needs no padding mask: the end token does not see what follows it.

    Args:
        projection_dim, stem: as in `BidirectionalTextTransformer`.
        end_id: 49,407 in CLIP's vocabulary; None = the largest id of a row, as in OpenAI's code.
        final_layer_norm: False = identity (EuCLIP, Sec. 3.3).
        dropout: of the embeddings, and as in `Block`; CLIP has none.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        projection_dim: int | None,
        end_id: int | None,
        mlp_ratio: float = 4.0,
        final_layer_norm: bool = True,
        activation: Activation = "gelu",
        norm_eps: float = 1.0e-5,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.context_length, self.width, self.projection_dim = context_length, width, projection_dim
        self.end_id, self.vocabulary_size = end_id, vocabulary_size
        self.stem, self.token_embedding = stem, _token_embedding(vocabulary_size, width, stem)
        self.position_embedding = nn.Parameter(0.01 * torch.randn(context_length, width))
        self.dropout = nn.Dropout(dropout)
        self.transformer = Transformer(
            width,
            layers,
            heads,
            mlp_ratio,
            pre_norm=True,
            activation=activation,
            norm_eps=norm_eps,
            dropout=dropout,
            causal=True,
            gradient_checkpointing=gradient_checkpointing,
            initialisation="clip_text",
        )
        self.final_norm = nn.LayerNorm(width, eps=norm_eps) if final_layer_norm else nn.Identity()
        self.projection = (
            None if projection_dim is None else nn.Parameter(width**-0.5 * torch.randn(width, projection_dim))
        )
        if stem is None:
            nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids -> (batch, projection_dim).

        Raises:
            ValueError: (ids on the CPU) if a row has no end token.
        """
        tokens = self.class_tokens(token_ids)[:, 0]
        return tokens if self.projection is None else tokens @ self.projection

    def class_tokens(self, token_ids: torch.Tensor, word_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 1, width): the end token before the projection; errors as in `forward`. word_mask is not used."""
        ends = self.end_positions(token_ids)
        if self.end_id is not None and token_ids.device.type == "cpu":  # on a GPU the check would stall the queue
            is_end = (token_ids == self.end_id).any(dim=1)
            if not is_end.all():
                row = int((~is_end).nonzero()[0])
                raise ValueError(
                    f"row {row} of token_ids has no end token (id {self.end_id}): another tokenizer's ids?"
                )
        tokens = self._blocks(token_ids)
        # CLIP normalises all positions and picks one; one LayerNorm row does not depend on the others
        return self.final_norm(tokens[torch.arange(len(tokens), device=tokens.device), ends])[:, None]

    def word_mask(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length), True at start, words and first end token, False behind it."""
        return torch.arange(token_ids.shape[1], device=token_ids.device) <= self.end_positions(token_ids)[:, None]

    def end_positions(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch,) position of each row's first end token; 0 in a row without one."""
        ends = token_ids if self.end_id is None else (token_ids == self.end_id).int()
        return ends.argmax(dim=1)

    def forward_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) before the projection; what follows the end token is of no use."""
        return self.final_norm(self._blocks(token_ids))

    def _blocks(self, token_ids: torch.Tensor) -> torch.Tensor:
        tokens = self.token_embedding(token_ids if self.stem is None else self.stem(token_ids))
        tokens = tokens + self.position_embedding[: tokens.shape[1]].to(tokens.dtype)
        return self.transformer(self.dropout(tokens))


def _token_embedding(vocabulary_size: int, width: int, stem: nn.Module | None) -> nn.Module:
    return nn.Embedding(vocabulary_size, width) if stem is None else nn.Linear(stem.width, width)
