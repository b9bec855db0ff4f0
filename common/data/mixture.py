"""Several training sets as one, drawn from by weight (`data.mixture`)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common.base.provenance import hash_of
from common.data.broken import BrokenSample
from common.data.order import shares_of


def lazy_items(pairs: Any) -> Callable[[int], dict[str, Any]]:
    """A set's `lazily`, else its items."""
    # of its class: a set around another one forwards names, and would give the other's items
    return pairs.lazily if hasattr(type(pairs), "lazily") else pairs.__getitem__


class Mixture:
    """Training pairs from several sets, in the order of `MixedOrder`.

    Sample i of set k has the index `i * len(parts) + k`, so that a stream, which counts without end, can be a part.
    Images of two sets count as two, whatever their ids.

    Args:
        weights: relative frequency of each set; above 0.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        self.parts, self.weights = list(parts), list(weights)
        shares = shares_of(self.weights)
        self.name = " + ".join(f"{100 * share:.3g} % {part.name}" for share, part in zip(shares, self.parts))
        # another buffer of a stream is another order, and the run's key has no settings of parts
        orders = [[part.buffer_size] if hasattr(part, "buffer_size") else [] for part in self.parts]
        content = zip(shares, self.parts, orders)
        self.fingerprint = hash_of([[share, part.fingerprint, *order] for share, part, order in content])
        lost = [getattr(part, "broken_at_open", []) for part in self.parts]
        self.broken_at_open: list[BrokenSample] = [sample for samples in lost for sample in samples]

    def __len__(self) -> int:
        """Images of all sets; as many samples are an epoch, whatever the weights."""
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.lazily(index)
        return {**item, "captions": [*item["captions"]]}

    def lazily(self, index: int) -> dict[str, Any]:
        """See `Pairs`."""
        inside, number = divmod(index, len(self.parts))
        sample = lazy_items(self.parts[number])(inside)
        return {**sample, "image_id": f"{number}:{sample['image_id']}"}

    def captions(self, index: int) -> list[str]:
        inside, number = divmod(index, len(self.parts))
        return self.parts[number].captions(inside)

    def all_captions(self) -> Iterator[str]:
        """Of every set once: weights do not decide the vocabulary."""
        for part in self.parts:
            if hasattr(part, "all_captions"):
                yield from part.all_captions()
            else:
                for index in range(len(part)):
                    yield from part.captions(index)
