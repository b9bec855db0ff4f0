"""Rank, world size and gathering that also work without a process group (world size 1 is a normal case)."""

import torch
import torch.distributed as dist


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Index of this process in [0, world_size); 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_main_process() -> bool:
    """True on rank 0, the only process that writes files."""
    return rank() == 0


def wait_for_everyone() -> None:
    """Barrier; nothing without a process group."""
    if world_size() > 1:
        dist.barrier()


def local_rows(local_batch: int) -> slice:
    """Where this process's rows stand among those of all processes, in rank order."""
    return slice(rank() * local_batch, (rank() + 1) * local_batch)


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        ctx.num_rows = tensor.shape[0]
        gathered = [torch.empty_like(tensor) for _ in range(world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return _SumOfOurRows.apply(gradient, ctx.num_rows)


class _SumOfOurRows(torch.autograd.Function):
    # the adjoint of _GatherWithGradient, and the other way round: a second derivative needs both
    @staticmethod
    def forward(ctx, gathered: torch.Tensor, num_rows: int) -> torch.Tensor:
        if dist.get_backend() == "nccl":  # half the traffic of an all-reduce; gloo has no such collective
            dist.reduce_scatter_tensor(ours := torch.empty_like(gathered[:num_rows]), gathered.contiguous())
            return ours
        dist.all_reduce(total := gathered.clone(memory_format=torch.contiguous_format))
        return total[local_rows(num_rows)]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _GatherWithGradient.apply(gradient), None


def gather_with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates a tensor over processes, in rank order, and lets the gradient flow back to every process.

    Without it, as with `accelerator.gather`, the gradient of InfoNCE lacks the terms in which our rows are the others'
    negatives.

    Args:
        tensor: (local_batch, ...), the same shape on every process.
    Returns:
        (world_size * local_batch, ...); the input itself when there is one process.
    """
    if world_size() == 1:
        return tensor
    return _GatherWithGradient.apply(tensor)


def gather_without_gradient(rows: torch.Tensor) -> torch.Tensor:
    """Concatenates over processes what the loss treats as given: momentum keys, sample ids, masks.

    Args:
        rows: (local_batch, ...), any dtype, the same shape on every process.
    Returns:
        (world_size * local_batch, ...), detached; row i of rank r is row r * local_batch + i.
    """
    return gather_with_gradient(rows.detach())


def gather_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Puts together rows that were dealt out in turn: process r holds rows r, r + W, r + 2W, ... of num_rows.

    Args:
        rows: (share, ...), as many on each process, no gradient needed; those beyond num_rows are padding.
    Returns:
        (num_rows, ...) in their original order, on every process.
    """
    if world_size() == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows.contiguous())
    return torch.stack(gathered, dim=1).flatten(0, 1)[:num_rows]


def mean_over_processes(value: torch.Tensor) -> torch.Tensor:
    """Mean of a detached tensor over processes, for logging."""
    value = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(value)
        value /= world_size()
    return value


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag of one process is true, on every process; the host waits for the device if there are several."""
    return flag if world_size() == 1 else mean_over_processes(torch.tensor(float(flag), device=device)).item() > 0


def broadcast_(tensor: torch.Tensor) -> None:
    """Writes the main process's tensor into that of every process."""
    if world_size() > 1:
        dist.broadcast(tensor, 0)
        torch.autograd.graph.increment_version(tensor)  # which a collective leaves as it is; see host_numbers.py


def gather_objects(item: object) -> list:
    """The items of all processes in rank order, for small Python objects."""
    if world_size() == 1:
        return [item]
    items: list = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def leave_process_group() -> None:
    """Last call of an entry script: waits for all processes, then closes the group.

    Without it a process of a gloo group may abort at exit ("terminate called ...").
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def wait_for_device(device: torch.device) -> None:
    """Waits until an accelerator has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
