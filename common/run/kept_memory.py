"""How much memory a forward pass keeps for the backward pass: counted, so the same on every machine."""

from collections.abc import Callable, Sequence

import torch


def bytes_kept_for_backward(loss_of: Callable[[], torch.Tensor], weights: Sequence[torch.Tensor]) -> int:
    """Bytes of all tensors that the graph of a loss keeps for its backward pass, weights left out, each memory once.

    Args:
        loss_of: the forward pass; on the meta device it costs neither time nor memory.
        weights: tensors that are there anyhow.
    """
    own = {weight.untyped_storage()._cdata for weight in weights}  # on the meta device all addresses are 0
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of()
    del loss  # held until here, so that no memory was given out twice
    return sum(kept.values())
