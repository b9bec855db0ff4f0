"""Batches of like samples: the order of an epoch, by features gathered in the epoch before (GRIT-VLP; MAFA).

    order = GroupedOrder(num_samples, global_batch_size, seed)
    grouping = Grouping(order, dim, queue_size, span)                  # a part of the model, hence of its checkpoints
    order.follow(grouping)                                             # the epoch that a run begins or goes on in
    ...
    indices = order.indices_of(step)
    if grouping.collect(indices, image_embeddings, text_embeddings):   # after each step, on every process
        order.follow(grouping)                                         # an epoch is over

The order of later epochs is a value and no function of the seed: it is saved, with the features gathered so far. The
first epoch's is that of `SampleOrder`.
"""

import numpy as np
import torch
from torch import nn

from common.base.compiled import compiled
from common.data.order import SampleOrder, permuted, seed_of
from common.distributed import broadcast_, gather_without_gradient


class GroupedOrder(SampleOrder):
    """An order of which one epoch is known at a time; arguments as in `SampleOrder`, of a set that is no stream."""

    by_epoch = True

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        super().__init__(num_samples, global_batch_size, seed)
        self.epoch, self.table = 0, None

    def follow(self, grouping: "Grouping") -> None:
        """Takes the epoch, and from the second one on the order, that a grouping has come to."""
        self.epoch = int(grouping.epoch)
        self.table = grouping.order.cpu().numpy().copy() if self.epoch else None

    def indices_of(self, step: int) -> np.ndarray:
        """(global_batch_size,) indices into the data set of one step, those of the first process first."""
        first = step * self.global_batch_size
        return self.epochs_and_indices(np.arange(first, first + self.global_batch_size))[1]

    def epochs_and_indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in `SampleOrder`, of positions in the first epoch or in the one that is known.

        Raises:
            ValueError: positions of another epoch.
        """
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.samples_per_epoch)
        if (epochs == 0).all():
            return super().epochs_and_indices(positions)
        if (epochs != self.epoch).any():
            raise ValueError(f"positions of epochs {np.unique(epochs).tolist()}; known is the order of {self.epoch}")
        return epochs, self.table[offsets]


class Grouping(nn.Module):
    """Gathers features of an epoch and orders the next one by them, so that batches consist of like samples.

    Whenever `queue_size` samples are gathered they are shuffled and cut into spans, each of which becomes a chain. The
    batches of the chained order are shuffled. Samples that an epoch has left out stand in the place of others of the
    next one's last batch.

    Args:
        order: of the samples.
        dim: of an embedding.
        queue_size: samples that are gathered before they are ordered; MAFA: 48,000.
        span: samples of a chain; MAFA: 1,920, a multiple of the batch.
    Attributes:
        epoch: () int64. order: (samples_per_epoch,) int64 indices of this epoch, from the second one on.
        following: (samples_per_epoch,) int64, those of the next one, of which `placed`, () int64, are known.
        indices, image_features, text_features: (queue_size, ...), of which `held`, () int64, are in use.
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
        """Takes in a step; call on every process.

        Args:
            indices: (global_batch_size,) of its samples.
            images, texts: (local_batch, dim) unit vectors of this process's share, or points of a product of spheres.
        Returns:
            Whether the epoch is over and `order` is that of the next one.
        """
        features = (gather_without_gradient(side.flatten(1)) for side in (images, texts))
        step = torch.from_numpy(indices).to(self.indices.device), *features
        while len(step[0]):
            held, room = int(self.held), len(self.indices) - int(self.held)
            some = slice(held, held + min(room, len(step[0])))
            for buffer, values in zip((self.indices, self.image_features, self.text_features), step):
                buffer[some] = values[:room].to(buffer.dtype)
            self.held.fill_(some.stop)
            if some.stop == len(self.indices) or int(self.placed) + some.stop == len(self.order):
                self._place()
            step = tuple(values[room:] for values in step)
        if int(self.placed) < len(self.order):
            return False
        self._begin()
        return True

    def _place(self) -> None:
        """Orders what is held and puts it behind what is known of the next epoch; the main process's order counts."""
        held, placed = int(self.held), int(self.placed)
        shuffled = permuted(np.arange(held), held, seed_of(self.seed, int(self.epoch), placed, 0))
        chains = []
        for start in range(0, held, self.span):
            some = torch.from_numpy(shuffled[start : start + self.span]).to(self.indices.device)
            chains.append(some[chain(self.image_features[some], self.text_features[some])])
        part = self.following[placed : placed + held]
        part.copy_(self.indices[torch.cat(chains)])
        broadcast_(part)
        self.placed.fill_(placed + held)
        self.held.zero_()

    def _begin(self) -> None:
        """Makes the next epoch this one."""
        table = self.following.cpu().numpy().copy()
        left_out = np.setdiff1d(np.arange(self.num_samples), table)
        table[len(table) - len(left_out) :] = left_out
        batches = table.reshape(-1, self.batch)
        shuffled = permuted(np.arange(len(batches)), len(batches), seed_of(self.seed, int(self.epoch), 0, 1))
        self.order.copy_(torch.from_numpy(batches[shuffled].ravel()))
        self.epoch.add_(1)
        self.placed.zero_()


def chain(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """(num,) int64: from the first sample's picture to the unused sample with the closest caption, from that caption to
    the unused one with the closest picture, and so on; ties go to the lower index.

    Args:
        images, texts: (num, dim), row by row one sample.
    """
    found = _chained((images.float() @ texts.float().T).cpu().numpy())
    return torch.from_numpy(found).to(images.device)


@compiled
def _chained(similarity):
    count = len(similarity)
    order, used = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    current, used[0] = 0, True
    for place in range(1, count):
        best, closest = -1, -np.inf
        for other in range(count):
            if not used[other]:
                found = similarity[current, other] if place % 2 else similarity[other, current]
                if best < 0 or found > closest:
                    best, closest = other, found
        order[place], used[best], current = best, True, best
    return order
