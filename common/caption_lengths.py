"""Where captions end, and towers that compute no padding.

On a CPU time goes with the tokens, and captions fill half of their context or less. A GPU would wait for the lengths,
so there all captions go through together.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def encode_by_length(tower: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """tower(token_ids), up to rounding, where captions of like length go through together, without most of the padding.

    Args:
        tower: ids up to and with the first end token decide what it gives for a row; without end tokens it is called
            once.
        token_ids: (batch, length <= context_length).
    """
    end_id, positions = getattr(tower, "end_id", None), getattr(tower, "end_positions", None)
    if token_ids.device.type != "cpu" or (end_id is None and positions is None):
        return tower(token_ids)
    if end_id is not None and not (token_ids == end_id).any(dim=1).all():
        return tower(token_ids)
    lengths = up_to_first(token_ids, end_id).sum(dim=1) if end_id is not None else positions(token_ids) + 1
    parts, back = parts_of_like_length(lengths)
    return torch.cat([tower(token_ids[rows, :longest]) for rows, longest in parts])[back]


def tokens_by_length(
    compute: Callable[..., torch.Tensor], texts: torch.Tensor, text_mask: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """compute(texts, text_mask, *others) without most of the padding, whose tokens come out as zeros.

    Args:
        compute: gives (rows, length, width) or (rows, 1, width); a row depends on its words and others only.
        texts: (num_rows, length, ...) ids or tokens.
        text_mask: (num_rows, length), False at padding.
        others: tensors with a row for each text.
    """
    if text_mask.device.type != "cpu" or not len(text_mask):
        return compute(texts, text_mask, *others)
    length = text_mask.shape[1]
    parts, back = parts_of_like_length((text_mask * torch.arange(1, length + 1)).amax(dim=1).clamp(min=1))
    computed = []
    for rows, longest in parts:
        part = compute(texts[rows, :longest], text_mask[rows, :longest], *(other[rows] for other in others))
        computed.append(F.pad(part, (0, 0, 0, length - longest)) if part.shape[1] == longest > 1 else part)
    return torch.cat(computed)[back]


def parts_of_like_length(
    lengths: torch.Tensor, num_parts: int | None = None
) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor]:
    """Rows of like length together.

    Args:
        lengths: (num_rows,) int, on the CPU.
        num_parts: at most so many, of about equal size; None = up to four, of at least 16 rows.
    Returns:
        Rows and greatest length of each part, shortest first; the permutation that restores the order of all rows.
    """
    if num_parts is None:
        num_parts = min(4, max(1, len(lengths) // 16))
    order = lengths.argsort(stable=True)
    parts = [(rows, int(lengths[rows].max()) if len(rows) else 1) for rows in order.chunk(num_parts)]
    return parts, order.argsort()


def up_to_first(token_ids: torch.Tensor, end_id: int) -> torch.Tensor:
    """(batch, length) bool: True up to and with each row's first end token, everywhere in a row without one."""
    is_end = token_ids == end_id
    return is_end.cumsum(dim=1) - is_end.int() == 0
