"""Memory that a forward pass keeps for the backward pass, counted in tensors: the same on every machine."""

import weakref
from collections.abc import Callable, Sequence

import torch


def bytes_kept_for_backward(loss_of: Callable[[], torch.Tensor], weights: Sequence[torch.Tensor]) -> int:
    """Bytes of all tensors but the weights that a loss's graph keeps for its backward pass.

    On the meta device it costs neither time nor memory.
    """
    weight_storages = {weight.untyped_storage()._cdata for weight in weights}  # on the meta device all addresses are 0
    saved: list[weakref.ref] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()  # the same memory; a result that held its own graph would never be freed
        saved.append(weakref.ref(detached))
        return detached

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of()
    # what was saved by a part of the graph that is gone is not kept, and its address may have been given out again
    storages = [tensor.untyped_storage() for tensor in (reference() for reference in saved) if tensor is not None]
    kept = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in weight_storages}
    del loss  # the graph lives until here
    return sum(kept.values())
