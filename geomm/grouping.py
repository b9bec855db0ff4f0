"""Batches of similar samples: the order of an epoch by features of the epoch before (GRIT-VLP; MAFA).

    order = GroupedOrder(num_samples, global_batch_size, seed)
    grouping = Grouping(order, dim, queue_size, span)                  # a part of the model, hence of its checkpoints
    order.follow(grouping)                                             # the epoch in which a run begins or resumes
    ...
    indices = order.indices_of(step)
    if grouping.collect(indices, image_embeddings, text_embeddings):   # after each step, on every process
        order.follow(grouping)                                         # an epoch is over

The order of later epochs is not a function of the seed, so checkpoints have it, with the features collected so far. The
first epoch has the order of `SampleOrder`.
"""

import numpy as np
import torch
from torch import nn

from common.base.compiled import compiled
from common.data.order import SampleOrder, permuted, seed_of
from common.distributed import broadcast_, gather_without_gradient
from common.host_numbers import host_number, write_number_


class GroupedOrder(SampleOrder):
    """An order that knows one epoch at a time; arguments as in `SampleOrder`, for a set that is no stream."""

    by_epoch = True

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        super().__init__(num_samples, global_batch_size, seed)
        self.epoch, self.table = 0, None

    def follow(self, grouping: "Grouping") -> None:
        """Takes over the epoch of a grouping and, from the second one on, its order."""
        self.epoch = host_number(grouping.epoch)
        self.table = grouping.order.cpu().numpy().copy() if self.epoch else None

    def indices_of(self, step: int) -> np.ndarray:
        """(global_batch_size,) indices into the data set of one step, those of the first process first."""
        first = step * self.global_batch_size
        return self.epochs_and_indices(np.arange(first, first + self.global_batch_size))[1]

    def epochs_and_indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in `SampleOrder`, for positions in the first or the current epoch; ValueError for others."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.samples_per_epoch)
        if (epochs == 0).all():
            return super().epochs_and_indices(positions)
        if (epochs != self.epoch).any():
            raise ValueError(f"positions of epochs {np.unique(epochs).tolist()}; known is the order of {self.epoch}")
        return epochs, self.table[offsets]


class Grouping(nn.Module):
    """Collects features of an epoch and orders the next one by them, so that batches consist of similar samples.

    A full queue is shuffled and cut into spans, and every span becomes a chain. The batches of the chained order are
    shuffled. Samples that an epoch leaves out replace others in the last batch of the next epoch.

    Args:
        order: of the samples.
        dim: of an embedding.
        queue_size: samples that are collected before they are ordered; MAFA: 48,000 in each process.
        span: samples of a chain; MAFA: 1,920. Both are multiples of the batch, in MAFA of that of a process, 128;
            otherwise a batch holds two chains.
    Attributes:
        epoch: () int64. order: (samples_per_epoch,) int64 indices of this epoch, from the second one on.
        following: (samples_per_epoch,) int64 indices of the next epoch; the first `placed`, () int64, are known.
        indices, image_features, text_features: (queue_size, ...); the first `held`, () int64, are in use.
    """

    def __init__(self, order: SampleOrder, dim: int, queue_size: int = 48_000, span: int = 1_920) -> None:
        super().__init__()
        self.num_samples, self.batch, self.seed = order.num_samples, order.global_batch_size, order.seed
        self.span, length = span, order.samples_per_epoch
        queue_size = min(queue_size, length)
        for name, size in {"order": length, "following": length, "indices": queue_size}.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64))
        for name in ("image_features", "text_features"):
            self.register_buffer(name, torch.zeros(queue_size, dim, dtype=torch.float32))
        for name in ("epoch", "placed", "held"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def collect(self, indices: np.ndarray, images: torch.Tensor, texts: torch.Tensor) -> bool:
        """Adds the samples of a step; call on every process.

        Args:
            indices: (global_batch_size,) of its samples.
            images, texts: (local_batch, dim) unit vectors of this process's share, or points of a product of spheres.
        Returns:
            Whether the epoch has ended and `order` is that of the next one.
        """
        features = (gather_without_gradient(side.flatten(1)) for side in (images, texts))
        step = torch.from_numpy(indices).to(self.indices.device, non_blocking=True), *features
        while len(step[0]):
            held = host_number(self.held)
            room = len(self.indices) - held
            some = slice(held, held + min(room, len(step[0])))
            for buffer, values in zip((self.indices, self.image_features, self.text_features), step):
                buffer[some] = values[:room].to(buffer.dtype)
            write_number_(self.held, some.stop)
            if some.stop == len(self.indices) or host_number(self.placed) + some.stop == len(self.order):
                self._place()
            step = tuple(values[room:] for values in step)
        if host_number(self.placed) < len(self.order):
            return False
        self._begin()
        return True

    def _place(self) -> None:
        """Orders the collected samples and appends them to the next epoch; the main process decides the order."""
        held, placed, epoch = (host_number(buffer) for buffer in (self.held, self.placed, self.epoch))
        shuffled = permuted(np.arange(held), held, seed_of(self.seed, epoch, placed, 0))
        chains = []
        for start in range(0, held, self.span):
            some = torch.from_numpy(shuffled[start : start + self.span]).to(self.indices.device)
            chains.append(some[chain(self.image_features[some], self.text_features[some])])
        part = self.following[placed : placed + held]
        part.copy_(self.indices[torch.cat(chains)])
        broadcast_(part)
        write_number_(self.placed, placed + held)
        write_number_(self.held, 0)

    def _begin(self) -> None:
        """Begins the next epoch."""
        table = self.following.cpu().numpy().copy()
        left_out = np.setdiff1d(np.arange(self.num_samples), table)
        table[len(table) - len(left_out) :] = left_out
        batches = table.reshape(-1, self.batch)
        epoch = host_number(self.epoch)
        shuffled = permuted(np.arange(len(batches)), len(batches), seed_of(self.seed, epoch, 0, 1))
        self.order.copy_(torch.from_numpy(batches[shuffled].ravel()))
        write_number_(self.epoch, epoch + 1)
        write_number_(self.placed, 0)


def chain(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """(num,) int64: from the first sample's image to the unused sample with the closest caption, from that caption to
    the unused one with the closest image, and so on; ties go to the lower index. (num, dim) embeddings.
    """
    order = _chained((images.float() @ texts.float().T).cpu().numpy())
    return torch.from_numpy(order).to(images.device)


@compiled
def _chained(similarity):
    count = len(similarity)
    order, used = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    current, used[0] = 0, True
    for place in range(1, count):
        best, closest = -1, -np.inf
        for other in range(count):
            if not used[other]:
                score = similarity[current, other] if place % 2 else similarity[other, current]
                if best < 0 or score > closest:
                    best, closest = other, score
        order[place], used[best], current = best, True, best
    return order
