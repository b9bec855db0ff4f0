"""SigLIP's loss: every pair of image and text is a separate decision, matched or not (Zhai et al. 2023, Eq. 1)."""

import math

import torch
import torch.nn.functional as F

from common.distributed import gather_with_gradient, rank, world_size
from common.geometry import Geometry
from common.info_nce import as_scale, check_geometry, check_pairs
from common.vectors import at_least_float32, full_precision, one_matrix


def sigmoid_loss(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    geometry: Geometry,
    logit_scale: torch.Tensor,
    logit_bias: torch.Tensor,
) -> torch.Tensor:
    """-1/B sum_ij log sigmoid(z_ij (logit_scale * similarity_ij + logit_bias)), z_ij = 1 for i = j and -1 otherwise.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...), the same shape on every process; row k of both is a pair.
        logit_scale, logit_bias: scalar tensors; the paper starts from 10 and -10.
    Returns:
        Scalar in nats: this process's share; its mean over processes is the loss of the global batch.
    Raises:
        ValueError: a function in place of a geometry; another number of texts than of images.
    """
    check_geometry(geometry)
    check_pairs(image_embeddings, text_embeddings, ids=None, queue=None, distillation=None)
    logit_scale = as_scale(logit_scale, image_embeddings)
    batch = len(image_embeddings)
    # this process's images against the texts of all: together the processes see every pair once
    scores = geometry.directions(image_embeddings, gather_with_gradient(text_embeddings))
    columns = torch.arange(batch, device=image_embeddings.device)[:, None] + rank() * batch
    similarity = scores[0]
    if one_matrix(scores):  # matched pairs are close pairs: their digits go over the diagonal
        similarity = similarity.scatter(
            1, columns, geometry.paired_similarity(image_embeddings, text_embeddings)[:, None]
        )
    with full_precision(similarity):
        logits = at_least_float32(logit_scale * similarity) + logit_bias
        matched = torch.zeros_like(logits).scatter(1, columns, 1.0)
        return F.binary_cross_entropy_with_logits(logits, matched, reduction="sum") / batch


def sigmoid_chance(local_batch: int) -> float:
    """Loss of the best logit that all pairs can share, sigmoid(logit) = 1/B: ln B + (B - 1) ln(B / (B - 1)).

    Args:
        local_batch: pairs of each process; at least 2 over all.
    """
    batch = world_size() * local_batch
    return math.log(batch) + (batch - 1) * math.log(batch / (batch - 1))
