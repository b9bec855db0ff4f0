"""Token-wise late interaction (FILIP, Sec. 3.1): every token looks for its best partner, and the matches are averaged.

    s_i2t(I, T) = mean over image tokens k of max over words r of <u_k, w_r>
    s_t2i(I, T) = mean over words r of max over image tokens k of <u_k, w_r>
Two different matrices: in loss and retrieval, images rank captions by the first and captions rank images by the second.
With one token on each side both are the inner product. A block of pairs costs num_image_tokens * num_words times a
cosine.

Padding words are zero vectors, so embeddings can be gathered, cached and stored like others; they take part in no
maximum and no mean. With padded = False a zero vector is a token like others.
"""

from collections.abc import Callable

import torch
from torch import nn

from common.caption_lengths import parts_of_like_length
from common.scalars import Scalar
from common.vectors import at_least_float32, full_precision, unit

MAX_PRODUCTS = 2**24  # token pairs that are held at once


def late_interaction(
    image_tokens: torch.Tensor, text_tokens: torch.Tensor, padded: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both similarities of all pairs.

    Args:
        image_tokens: (num_images, num_image_tokens, dim), unit norm.
        text_tokens: (num_texts, num_words, dim), unit norm.
        padded: whether zero vectors are padding.
    Returns:
        s_i2t and s_t2i, each (num_images, num_texts), float32 or better, in [-1, 1]; higher is closer. For a text of
        padding only they are -inf and 0.
    Raises:
        ValueError: if the dims differ.
    """
    if image_tokens.ndim != 3 or text_tokens.ndim != 3 or image_tokens.shape[2] != text_tokens.shape[2]:
        raise ValueError(
            f"late interaction takes (num_images, tokens, dim) and (num_texts, words, dim) of one dim, got "
            f"{tuple(image_tokens.shape)} and {tuple(text_tokens.shape)}"
        )
    per_text = image_tokens.shape[0] * image_tokens.shape[1] * text_tokens.shape[1]
    num_parts = -(-len(text_tokens) * per_text // MAX_PRODUCTS)
    if padded and text_tokens.device.type == "cpu":  # elsewhere to ask for lengths would stall the device
        places = torch.arange(1, text_tokens.shape[1] + 1)
        lengths = ((text_tokens != 0).any(dim=2) * places).amax(dim=1).clamp(min=1)
        parts, back = parts_of_like_length(lengths, max(8, num_parts))
        blocks = [_block(image_tokens, text_tokens[rows, :longest], padded) for rows, longest in parts]
    else:
        blocks = [_block(image_tokens, texts, padded) for texts in text_tokens.chunk(max(1, num_parts))]
        back = slice(None)
    return torch.cat([i2t for i2t, _ in blocks], dim=1)[:, back], torch.cat([t2i for _, t2i in blocks], dim=1)[:, back]


def _block(image_tokens: torch.Tensor, text_tokens: torch.Tensor, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    real = _real(text_tokens, padded)
    with full_precision(image_tokens):
        images, texts = at_least_float32(image_tokens), at_least_float32(text_tokens)
        products = torch.einsum("ind,tmd->itnm", images, texts)
        best_word = products.masked_fill(~real[None, :, None, :], -torch.inf).amax(dim=3)  # (images, texts, tokens)
        best_token = products.amax(dim=2).masked_fill(~real, 0.0)  # (images, texts, words)
        return best_word.mean(dim=2), best_token.sum(dim=2) / real.sum(dim=1).clamp(min=1)


def _real(text_tokens: torch.Tensor, padded: bool) -> torch.Tensor:
    # (texts, words) bool: False for padding
    return (text_tokens != 0).any(dim=2) | (not padded)


class LateInteraction(nn.Module):
    """Late interaction as a geometry.

    Args:
        embed: features of either side -> (batch, tokens, dim) of unit norm, zero where padded.
        padded: as in `late_interaction`.
    """

    def __init__(
        self,
        name: str = "late_interaction",
        embed: Callable[[torch.Tensor], torch.Tensor] = unit,
        padded: bool = True,
    ) -> None:
        super().__init__()
        self.name, self.embed, self.padded = name, embed, padded
        self.is_inner_product = False

    def embed_image(self, image_features: torch.Tensor) -> torch.Tensor:
        return self.embed(image_features)

    def embed_text(self, text_features: torch.Tensor) -> torch.Tensor:
        return self.embed(text_features)

    def similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        return late_interaction(image_embeddings, text_embeddings, self.padded)[0]

    def directions(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image_to_text, text_to_image = late_interaction(image_embeddings, text_embeddings, self.padded)
        return image_to_text, text_to_image.T

    def paired_similarity(self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
        real = _real(text_embeddings, self.padded)
        with full_precision(image_embeddings):
            products = at_least_float32(image_embeddings) @ at_least_float32(text_embeddings).mT
            return products.masked_fill(~real[:, None], -torch.inf).amax(dim=2).mean(dim=1)

    def mean(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Raises ValueError: tokens of unlike prompts do not correspond; scores can be averaged."""
        raise ValueError(f"{self.name} has no mean of embeddings; expected: method.prompt_average = scores")

    def scalars(self) -> list[Scalar]:
        return []
