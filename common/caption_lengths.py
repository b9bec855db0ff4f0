"""Where captions end, and towers that are spared their padding."""

import torch
from torch import nn


def encode_by_length(tower: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """tower(token_ids) without most of the padding: captions of like length go through the tower together.

    The batch is sorted by length and cut into up to four parts, each as long as its longest caption. On a CPU time goes
    with the tokens, and captions fill half of their context or less. A GPU would wait for the lengths; there, and for a
    tower that does not end captions at an end token, it is the plain call.

    Args:
        tower: ids up to and with the first end token decide what it gives for a row.
        token_ids: (batch, length <= context_length).
    Returns:
        What tower(token_ids) gives, up to rounding.
    """
    end_id = getattr(tower, "end_id", None)
    if end_id is None or token_ids.device.type != "cpu" or not (token_ids == end_id).any(dim=1).all():
        return tower(token_ids)
    lengths = up_to_first(token_ids, end_id).sum(dim=1)
    parts, back = parts_of_like_length(lengths, min(4, max(1, len(lengths) // 16)))
    return torch.cat([tower(token_ids[rows, :longest]) for rows, longest in parts])[back]


def parts_of_like_length(lengths: torch.Tensor, num_parts: int) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor]:
    """Rows of like length together.

    Args:
        lengths: (num_rows,) int, on the CPU.
        num_parts: at most so many parts of about equal size, one or more.
    Returns:
        Of each part, shortest first, its rows and its greatest length; and the permutation that puts the parts' rows,
        one part after the other, back in their order.
    """
    order = lengths.argsort(stable=True)
    return [(rows, int(lengths[rows].max())) for rows in order.chunk(num_parts)], order.argsort()


def up_to_first(token_ids: torch.Tensor, end_id: int) -> torch.Tensor:
    """(batch, length) bool: True up to and with each row's first end token, everywhere in a row without one."""
    is_end = token_ids == end_id
    return is_end.cumsum(dim=1) - is_end.int() == 0
