"""The vision-language models of the chapter: CLIP-like towers, the same token by token, and a queue of past pairs.

What differs from the chapter's text:
    1. the caption's vector is that of the end token, the image's that of the class token, and both pass a learned
       projection before the normalisation; method.embedding=class_token compares both class tokens themselves;
    2. a logit scale 1/T multiplies the cosines; Eq. 6 and 7 as printed have a fixed 1.
"""

import torch
from torch import nn

from common.caption_lengths import up_to_first
from common.data.tokenizer import Tokenizer
from common.encoders.from_config import (
    bidirectional_text_transformer,
    causal_text_transformer,
    vision_transformer,
)
from common.encoders.text import CausalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Sphere, unit
from common.info_nce import QueuedPairs
from common.late_interaction import LateInteraction
from common.logit_scale import LogitBias, LogitScale
from common.losses import LOSSES
from common.momentum import MomentumEncoder
from common.pool import image_and_text_pools
from contrastive_basics.config import Config

LOSS_OF = {  # of method.loss
    "in_batch": LOSSES["info_nce"],
    "late_interaction": LOSSES["info_nce"],
    "sigmoid": LOSSES["sigmoid"],
}


def build_model(config: Config, tokenizer: Tokenizer) -> TwoTowers:
    """Both towers with random weights; their attribute `memory` is the row's MomentumQueue, or None."""
    method = config.method
    projected = method.embedding == "projection"
    image_tower = vision_transformer(config.data, config.model, projected=projected)
    # a class token in front of a caption sees its words without a causal mask only
    of_text = causal_text_transformer if projected else bidirectional_text_transformer
    text_tower = of_text(config.data, config.model, tokenizer, projected=projected)
    logit_scale = LogitScale.from_config(method)
    if method.loss == "late_interaction":
        towers = TwoTowers(PatchTokens(image_tower), WordTokens(text_tower), LateInteraction(), logit_scale)
    else:
        bias = LogitBias(method.logit_bias_init) if method.loss == "sigmoid" else None
        towers = TwoTowers(image_tower, text_tower, Sphere(), logit_scale, bias)
    towers.memory = MomentumQueue(towers, method.queue_size, config.model.embedding_dim) if method.queue_size else None
    return towers


class MomentumQueue(nn.Module):
    """Pairs of past steps as further negatives: momentum copies of both towers, and a pool of keys for each side.

    Negatives in the batch are online embeddings with gradient; the keys of the pools have none. The queues start empty,
    and only written keys count. The queue is a part of the model and of its checkpoints.

    Args:
        towers: followed by the copies; one vector a side.
        capacity: maximum number of pairs, at least 1.
        dim: size of an embedding.
    """

    def __init__(self, towers: TwoTowers, capacity: int, dim: int) -> None:
        super().__init__()
        self.image_encoder = MomentumEncoder(towers.image_tower)
        self.text_encoder = MomentumEncoder(towers.text_tower)
        self.image_pool, self.text_pool = image_and_text_pools(towers.geometry, capacity, dim, start="fill_level")

    def pairs(self) -> QueuedPairs:
        """The newest keys for the loss, without copying; the loss adds the batch's online embeddings."""
        images, texts = self.image_pool.queue, self.text_pool.queue
        return QueuedPairs(images.rows(), texts.rows(), images.row_ids())

    def start_(self, towers: TwoTowers) -> None:
        """Copies the towers as they are now, running statistics of a backbone included."""
        self.image_encoder.encoder.load_state_dict(towers.image_tower.state_dict())
        self.text_encoder.encoder.load_state_dict(towers.text_tower.state_dict())

    def update_(self, towers: TwoTowers, ema_momentum: float) -> None:
        """theta_k <- m theta_k + (1 - m) theta over the parameters of both towers."""
        self.image_encoder.update_(towers.image_tower, ema_momentum)
        self.text_encoder.update_(towers.text_tower, ema_momentum)

    @torch.no_grad()
    def insert_batch(self, images: torch.Tensor, token_ids: torch.Tensor, ids: torch.Tensor) -> None:
        """Writes the keys of all processes' batches, after the backward pass; call on every process.

        Args:
            images: (local_batch, 3, size, size), normalised. token_ids: (local_batch, context_length).
            ids: (local_batch,) int64 of the images.
        """
        self.image_pool.insert(unit(self.image_encoder(images)), ids)
        self.text_pool.insert(unit(self.text_encoder(token_ids)), ids)


class PatchTokens(nn.Module):
    """All patches of an image after the tower's projection, without the class token: (batch, num_patches, dim)."""

    def __init__(self, tower: VisionTransformer) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.tower.forward_tokens(images)[:, self.tower.num_class_tokens :]
        return patches @ self.tower.projection


class WordTokens(nn.Module):
    """Words and end token of a caption after the tower's projection: (batch, context_length - 1, dim), 0 for padding.

    The start token is left out (inferred): under the causal mask it is the same vector for every caption.
    """

    def __init__(self, tower: CausalTextTransformer) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        tokens = self.tower.forward_tokens(token_ids) @ self.tower.projection
        return (tokens * up_to_first(token_ids, self.tower.end_id)[..., None])[:, 1:]
