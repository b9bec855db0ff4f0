"""Conversion of what metrics accept: torch tensors, numpy arrays and lists of numbers."""

from typing import Any

import numpy as np
import torch


def tensor_of(values: Any, name: str) -> torch.Tensor:
    """A tensor as it is; a numpy array or nested list as a tensor.

    Raises:
        ValueError: what holds no numbers, or rows of unlike lengths.
    """
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.ascontiguousarray(values)
        native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
        return torch.from_numpy(native).reshape(np.shape(values))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}: {type(values).__name__} {str(values)[:60]!r}; expected numbers in a torch tensor or numpy array"
        ) from None


def labels_of(values: Any, name: str) -> torch.Tensor:
    """Class labels, places or rows as int64, from integers of any width or bool.

    Raises:
        ValueError: as `tensor_of`; numbers that are no integers.
    """
    labels = tensor_of(values, name)
    if not labels.numel():
        return labels.long()
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"{name} of dtype {labels.dtype}; expected integers")
    return labels.long()


def array_of(values: Any) -> np.ndarray:
    """The values as a numpy array, from any device, with or without gradient; bfloat16 becomes float32."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)
