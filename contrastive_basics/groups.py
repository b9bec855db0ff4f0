"""InfoNCE within groups of a batch, so that only the number of negatives changes (claim C20)."""

import torch

from common.geometry import inner_product_similarity
from common.info_nce import symmetric_info_nce


def loss_within_groups(
    image_embeddings: torch.Tensor, text_embeddings: torch.Tensor, logit_scale: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Mean of Eq. 8 over groups of consecutive pairs of a process's batch, without gathering from other processes.

    Args:
        image_embeddings, text_embeddings: (local_batch, dim), unit.
        group_size: pairs of a group; a query has group_size - 1 negatives. The whole batch as one group is InfoNCE.
    Returns:
        Scalar in nats, ln(group_size) for equal cosines.
    Raises:
        ValueError: if the groups do not fill the batch.
    """
    if len(image_embeddings) % group_size:
        raise ValueError(
            f"method.group_size = {group_size} does not divide the {len(image_embeddings)} pairs of a process; "
            "expected: a divisor of optim.global_batch_size / number of processes"
        )
    groups = zip(image_embeddings.split(group_size), text_embeddings.split(group_size))
    losses = [symmetric_info_nce(logit_scale * inner_product_similarity(images, texts)) for images, texts in groups]
    return torch.stack(losses).mean()
