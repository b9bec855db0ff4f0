"""`Stem` for captions: tokens of a pre-trained BERT stand in for the word embeddings of a text tower.

The stem is the embeddings of a BERT and its lowest layers, from none to all. The tower maps them to its width and adds
positions, class tokens and blocks, causal or not.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from common.caption_lengths import up_to_first
from common.encoders.stem import StemError
from common.encoders.text import BidirectionalTextTransformer
from common.geometry import full_precision

BERT_EPS = 1.0e-12


class TextStem(nn.Module):
    """Tokens of a BERT, with random weights until `load_`; frozen unless trainable.

    Args:
        sizes: vocabulary_size, context_length, end_id, width, layers, heads, mlp_ratio of
            `BidirectionalTextTransformer`.
    Attributes:
        kept: ids (batch, length) -> their cached tokens; None = tokens are computed.
    """

    def __init__(self, trainable: bool = False, **sizes: Any) -> None:
        super().__init__()
        self.network = BidirectionalTextTransformer(
            **sizes, projection_dim=None, final_layer_norm=False, norm_eps=BERT_EPS
        )
        self.width, self.heads, self.mlp_ratio = self.network.width, sizes["heads"], sizes["mlp_ratio"]
        self.trainable = trainable
        self.network.requires_grad_(trainable)
        self.kept: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids of the BERT's vocabulary -> (batch, length, width); undefined after the end token."""
        if self.trainable:
            return self.network.forward_tokens(token_ids)
        return self.compute(token_ids) if self.kept is None else self.kept(token_ids)

    @torch.no_grad()
    def compute(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The tokens of a frozen stem, in float32 under autocast too."""
        with full_precision(self.network.token_embedding.weight):
            return self.network.forward_tokens(token_ids)

    def fingerprint(self) -> str:
        """12 hex digits that change with the weights and the number of heads."""
        digest = hashlib.sha256(str(self.heads).encode())
        for name, tensor in self.network.state_dict().items():
            rows = tensor[:3] if name == "position_embedding" else tensor  # their number changes no feature
            digest.update(name.encode() + rows.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

    @torch.no_grad()
    def load_(self, source: str, tower: nn.Module | None) -> None:
        """Fills the embeddings and layers with the lowest of `tower`, a BERT in our names."""
        if not isinstance(tower, BidirectionalTextTransformer) or tower.num_class_tokens != 1:
            raise StemError(f"model.text.stem.weights = {source} is no BERT; expected: a folder or hub name of one")
        if tower.vocabulary_size != self.network.vocabulary_size:
            raise StemError(
                f"model.text.stem.weights = {source} has {tower.vocabulary_size} ids, the tokenizer of this run "
                f"{self.network.vocabulary_size}; expected: data.tokenizer=bert_wordpiece data.vocabulary={source}"
            )
        state, target = tower.state_dict(), self.network.state_dict()
        state["position_embedding"] = state["position_embedding"][: len(target["position_embedding"])]
        unlike = [
            f"{name} {tuple(tensor.shape)} instead of {tuple(state[name].shape) if name in state else 'none'}"
            for name, tensor in target.items()
            if name not in state or state[name].shape != tensor.shape
        ]
        # no shape shows these, and other values would change the features without an error
        blocks = tower.transformer.blocks[:1]
        unlike += [f"heads {self.heads} instead of {block.attention.heads}" for block in blocks
                   if block.attention.heads != self.heads]  # fmt: skip
        unlike += [
            f"activation gelu instead of {block.mlp[1]}" for block in blocks if type(block.mlp[1]) is not nn.GELU
        ]
        if tower.input_norm.eps != BERT_EPS:
            unlike.append(f"eps {BERT_EPS} instead of {tower.input_norm.eps}")
        if unlike:
            raise StemError(f"model.text.stem.weights = {source} does not fit this run: {', '.join(unlike[:3])}")
        self.network.load_state_dict({name: state[name] for name in target})


class PooledTextStem(nn.Module):
    """A text tower without a transformer: the mean over a stem's tokens, padding apart, then a projection.

    Sentence encoders are trained with this mean (Reimers and Gurevych 2019, Sec. 3).

    Args:
        projection_dim: output numbers; None = no projection.
    """

    num_class_tokens = 1

    def __init__(self, stem: TextStem, projection_dim: int | None) -> None:
        super().__init__()
        self.stem, self.width, self.projection_dim = stem, stem.width, projection_dim
        self.vocabulary_size, self.end_id = stem.network.vocabulary_size, stem.network.end_id
        self.context_length = stem.network.context_length
        scale = self.width**-0.5
        self.projection = (
            None if projection_dim is None else nn.Parameter(scale * torch.randn(self.width, projection_dim))
        )

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids -> (batch, projection_dim)."""
        mean = self.class_tokens(token_ids)[:, 0]
        return mean if self.projection is None else mean @ self.projection

    def class_tokens(self, token_ids: torch.Tensor, word_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 1, width): the mean in place of a class token; word_mask None = from the ids."""
        words = (self.word_mask(token_ids) if word_mask is None else word_mask)[..., None]
        return (self.forward_tokens(token_ids) * words).sum(dim=1, keepdim=True) / words.sum(dim=1, keepdim=True)

    def word_mask(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length), False at padding."""
        return up_to_first(token_ids, self.end_id)

    def forward_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.stem(token_ids)
