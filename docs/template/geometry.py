"""Embeddings in a ball, compared by the negative squared Euclidean distance."""

import torch
from torch import nn

from common.geometry import (
    Scalar,
    at_least_float32,
    both_ways,
    check_same_dim,
    full_precision,
    paired_squared_distances,
)


def into_ball(features: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Maps (batch, dim) features into the open ball of that radius: radius * f / sqrt(1 + |f|^2)."""
    features = at_least_float32(features)
    return radius * features / (1 + features.square().sum(dim=-1, keepdim=True)).sqrt()


def negative_squared_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """(num_images, num_texts) of -|x - y|^2, in (-4 radius^2, 0]; higher is closer."""
    check_same_dim(image_embeddings, text_embeddings)
    images, texts = at_least_float32(image_embeddings), at_least_float32(text_embeddings)
    with full_precision(images):
        return -(images[:, None] - texts[None]).square().sum(dim=-1)


class Ball(nn.Module):
    """The open ball with a trainable radius; its scalar trains and is saved with the model."""

    name = "ball"
    is_inner_product = False

    def __init__(self) -> None:
        super().__init__()
        self.log_radius = nn.Parameter(torch.tensor([0.0]))

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return into_ball(image_features, self.log_radius.exp())

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return into_ball(text_features, self.log_radius.exp())

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return negative_squared_distance(image_embeddings, text_embeddings)

    def directions(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return both_ways(self.similarity(image_embeddings, text_embeddings))

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return -paired_squared_distances(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        return at_least_float32(embeddings).mean(dim=0)

    def scalars(self) -> list[Scalar]:
        return [Scalar("radius", self.log_radius)]
