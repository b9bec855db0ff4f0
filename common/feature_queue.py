"""Feature queue: the newest keys of past steps in a ring of fixed size, as further candidates of InfoNCE.

Every process holds the same queue: keys are gathered in rank order, and a random start comes from a seed. Under DDP
pass broadcast_buffers=False, or each forward pass sends the queue from rank 0.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common.distributed import gather_without_gradient
from common.host_numbers import host_number, write_number_

STARTS = ("random_rows", "fill_level")
NO_ID = -1  # of rows whose sample is not known: random rows, and keys that came without ids


class FeatureQueue(nn.Module):
    """Ring buffer of features and the ids of their samples; part of the model's checkpoint.

    The caller normalises the features. They stay float32 where a model is cast to half precision, and follow
    `double()`.

    Args:
        capacity: rows kept, at least 1; the batch size need not divide it.
        dim: entries of a feature; the caller flattens keys with more axes.
        start: "random_rows": random directions of norm 1 fill the queue until keys replace them (MoCo, ALBEF);
            "fill_level": it starts empty and only written rows take part.
        seed: of the random rows; the global random state is not used.
    Attributes:
        features: (capacity, dim) float32.
        ids: (capacity,) int64; NO_ID = -1 = none.
        pointer: () int64, the slot of the next row.
        fill_level: () int64, slots that hold keys (not random rows), at most capacity.
    Raises:
        ValueError: impossible sizes, or an unknown start.
    """

    def __init__(self, capacity: int, dim: int, start: str = "random_rows", seed: int = 0) -> None:
        super().__init__()
        if capacity < 1 or dim < 1:
            raise ValueError(f"a feature queue needs capacity >= 1 and dim >= 1, got {capacity} and {dim}")
        if start not in STARTS:
            raise ValueError(f"feature queue start {start!r} is unknown; expected: {', '.join(STARTS)}")
        self.capacity, self.dim, self.start = capacity, dim, start
        features = torch.zeros(capacity, dim, dtype=torch.float32)
        if start == "random_rows":
            generator = torch.Generator().manual_seed(seed)
            features = F.normalize(torch.randn(capacity, dim, generator=generator, dtype=torch.float32), dim=1)
        self.register_buffer("features", features)
        self.register_buffer("ids", torch.full((capacity,), NO_ID, dtype=torch.int64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fill_level", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def enqueue(self, features: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Writes rows that are the same on every process, oldest first; of more rows than the capacity the newest stay.

        Args:
            features: (num_rows, dim), floating and not finer than the queue.
            ids: (num_rows,) int64, or None = NO_ID.
        Returns:
            (num_rows,) int64: the slot of each row, its column in `rows()`; -1 for a row that this call overwrites
            again.
        Raises:
            ValueError: a shape or dtype that does not fit.
        """
        num_rows = len(features) if features.ndim else 0
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"the feature queue takes (num_rows, {self.dim}), got {tuple(features.shape)}")
        if not features.is_floating_point() or features.dtype.itemsize > self.features.dtype.itemsize:
            raise ValueError(
                f"the feature queue holds {self.features.dtype} and got {features.dtype}; expected: a floating dtype "
                "that is not finer (or cast the queue with .double())"
            )
        if ids is not None and (ids.shape != (num_rows,) or ids.dtype != torch.int64):
            raise ValueError(f"ids of {num_rows} rows must be ({num_rows},) int64, got {tuple(ids.shape)} {ids.dtype}")
        # all rows advance the pointer, the newest `capacity` are written: no slot is written twice in one call
        device, kept = self.features.device, min(num_rows, self.capacity)
        slots = self.next_slots(num_rows)
        written = slots[num_rows - kept :]
        self.features[written] = features[num_rows - kept :].to(self.features)
        if ids is None:
            self.ids.index_fill_(0, written, NO_ID)  # assigned, the number would be copied from the host
        else:
            self.ids[written] = ids[num_rows - kept :].to(device)
        self.pointer.copy_((self.pointer + num_rows) % self.capacity)
        write_number_(self.fill_level, min(host_number(self.fill_level) + num_rows, self.capacity))
        slots[: num_rows - kept] = -1
        return slots

    def next_slots(self, num_rows: int) -> torch.Tensor:
        """(num_rows,) int64: where the next rows would be written."""
        return (self.pointer + torch.arange(num_rows, device=self.pointer.device)) % self.capacity

    def enqueue_from_all_processes(self, features: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Gathers the rows of all processes in rank order, and writes them. Call on every process.

        Args:
            features: (local_batch, dim), as many rows on each process.
        Returns:
            (world_size * local_batch,) slots as in `enqueue`; this process's begin at rank * local_batch.
        """
        return self.enqueue(gather_without_gradient(features), None if ids is None else gather_without_gradient(ids))

    def present(self) -> torch.Tensor:
        """(capacity,) bool: slots that take part. All with random rows, else those below the fill level."""
        if self.start == "random_rows":
            return torch.ones_like(self.ids, dtype=torch.bool)
        return torch.arange(self.capacity, device=self.ids.device) < self.fill_level

    def rows(self) -> torch.Tensor:
        """The features that take part, as a view, since a copy would cost as much as a product: row j is slot j.

        `enqueue` writes into them and must wait for the backward pass of logits formed from them; otherwise autograd
        raises a RuntimeError ("modified by an inplace operation").

        Returns:
            (num_rows, dim); num_rows is the capacity with random rows, else the fill level.
        """
        return self.features[: self._num_rows()]

    def row_ids(self) -> torch.Tensor:
        """(num_rows,) int64 ids of `rows()`, a copy; NO_ID where unknown."""
        return self.ids[: self._num_rows()].clone()

    @property
    def is_full(self) -> bool:
        return host_number(self.fill_level) == self.capacity

    def _num_rows(self) -> int:
        return self.capacity if self.start == "random_rows" else host_number(self.fill_level)

    def _apply(self, fn, recurse: bool = True):
        # a cast of the whole model to half precision moves the keys but does not round them
        before = self.features
        super()._apply(fn, recurse)
        if self.features.dtype in (torch.float16, torch.bfloat16):
            self.features = before.to(self.features.device)
        return self

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, dim={self.dim}, start={self.start!r}"
