"""The seam: how an image embedding and a text embedding are compared.

Conventions, for every geometry in this repository:
    features     tower output after the projection, before any geometry, (batch, dim)
    embeddings   features after the geometry's map; what is gathered over processes, cached and compared
    similarity   (num_images, num_texts), rows are images, larger means closer; distances are negated in here, once
Training and every evaluation call the same `similarity`. Nothing asks which geometry it has.
All comparisons run in float32 or better, whatever autocast says: the close pairs are the positives, and half
precision ties them (2,000 cosines around 0.25 leave 2.4 candidates at the top score in bfloat16).
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(tensor: torch.Tensor):
    """Context that switches autocast off on the tensor's device, for maths that must not run in half precision."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def check_same_dim(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> None:
    """Raises ValueError with both shapes unless everything but the first axis agrees."""
    if image_embeddings.shape[1:] != text_embeddings.shape[1:]:
        raise ValueError(
            f"image embeddings {tuple(image_embeddings.shape)} and text embeddings {tuple(text_embeddings.shape)} "
            "must agree in every axis but the first"
        )


def unit(features: torch.Tensor) -> torch.Tensor:
    """Scales the last axis to norm 1; a zero vector stays zero. Same shape, float32 or better."""
    return F.normalize(at_least_float32(features), dim=-1, eps=1e-12)


def inner_product_similarity(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Inner products of all pairs; on unit vectors the cosine, in [-1, 1] up to rounding.

    Args:
        image_embeddings: (num_images, dim).
        text_embeddings: (num_texts, dim).
    Returns:
        (num_images, num_texts), float32 or better, higher is closer.
    Raises:
        ValueError: if the two dims differ; the message gives both shapes.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        return at_least_float32(image_embeddings) @ at_least_float32(text_embeddings).T


@runtime_checkable
class Geometry(Protocol):
    """What a geometry offers. It is an nn.Module, so that its own trainable scalars train and travel with the model.

    Implementations do not inherit from each other; they compose the pure functions of their file.
    """

    name: str

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept."""

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> embeddings, first axis kept. Differs from the image side only where a paper says so."""

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        """(num_images, num_texts), larger is closer."""

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Mean over the first axis as this geometry defines it: of the prompts of a class, or for a root."""


class Sphere(nn.Module):
    """The unit sphere with the cosine: CLIP's geometry and the baseline of all four papers."""

    name = "sphere"

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return unit(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return unit(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return inner_product_similarity(image_embeddings, text_embeddings)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Normalised mean (CLIP's prompt ensemble)."""
        return unit(embeddings.mean(dim=0))
