"""Parameters that FSDP2 has sharded, whole outside of the model's forward pass; plain parameters stay as they are."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that FSDP2 has sharded, put together, for use outside of the model's forward pass, as in the loss.

    Its gradient is averaged over processes, as FSDP2 does, and goes to the shards. Call it on every process.
    """
    if "torch.distributed.tensor" not in sys.modules:  # nothing is sharded; to import it takes half a second
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    put_together = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # each process brings a term
    if put_together.requires_grad:
        put_together.register_hook(lambda gradient: gradient / mesh.size())
    return put_together


@torch.no_grad()
def copy_whole_(target: nn.Module, sharded: nn.Module) -> None:
    """Copies parameters and buffers of a sharded model into a plain one. Call on every process."""
    values = target.state_dict(keep_vars=True)
    for name, value in sharded.state_dict().items():
        values[name].copy_(whole(value))


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Within it the weights of a model are whole, for calls outside of its forward pass. Call on every process.

    They have the precision of the forward pass, and so have products within.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        yield
        return
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    weight = next(model.parameters())
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    try:
        with torch.autocast(weight.device.type, weight.dtype) if is_half else nullcontext():
            yield
    finally:
        for module in sharded:
            module.reshard()
