"""Symmetric InfoNCE from a similarity function: one loss for every geometry, one or many processes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.distributed import gather_with_gradient, rank, world_size

PairSimilarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def info_nce(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each row against its positive (oblique submission Eq. 2, one direction).

    Args:
        logits: (num_queries, num_candidates), float32 or better.
        targets: (num_queries,) index of each row's positive, or (num_queries, num_candidates) row-stochastic.
    Returns:
        Scalar in nats, >= 0 for index targets. Equal logits give ln(num_candidates).
    """
    return F.cross_entropy(logits, targets)


def symmetric_info_nce(logits: torch.Tensor) -> torch.Tensor:
    """Mean of both directions for a square matrix whose diagonal holds the positives.

    Args:
        logits: (batch, batch), rows are images, columns are texts.
    Returns:
        Scalar in nats.
    Raises:
        ValueError: if the matrix is not square; the message gives its shape.
    """
    if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
        raise ValueError(f"in-batch InfoNCE needs a square matrix of logits, got {tuple(logits.shape)}")
    targets = torch.arange(len(logits), device=logits.device)
    return (info_nce(logits, targets) + info_nce(logits.T, targets)) / 2


def contrastive_loss(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    similarity: PairSimilarity,
    logit_scale: torch.Tensor,
) -> torch.Tensor:
    """InfoNCE over the global batch; row k of either side is the partner of row k of the other.

    With W processes each computes its local rows and columns against all candidates: B/W x B similarities instead of
    B x B. The mean of the returned values over processes is the global loss, and since gradients are averaged over
    processes (DDP, FSDP) every parameter gets the gradient of the global loss, trainable scalars included.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process.
        similarity: (a, ...), (b, ...) -> (a, b), larger is closer; images first.
        logit_scale: scalar tensor, the multiplier.
    Returns:
        Scalar in nats: this process's share of the global loss.
    """
    if world_size() == 1:
        return symmetric_info_nce(logit_scale * similarity(image_embeddings, text_embeddings))
    all_images, all_texts = gather_with_gradient(image_embeddings), gather_with_gradient(text_embeddings)
    targets = torch.arange(len(image_embeddings), device=image_embeddings.device) + rank() * len(image_embeddings)
    image_to_text = info_nce(logit_scale * similarity(image_embeddings, all_texts), targets)
    text_to_image = info_nce(logit_scale * similarity(all_images, text_embeddings).T, targets)
    return (image_to_text + text_to_image) / 2
