"""The picture-caption splits: what each stands for, how its scenes are drawn, its usual size.

The split's name and the seed enter every picture's key, so no picture of one split is one of another.
"""

from dataclasses import dataclass

from .sampling import Statistics


@dataclass(frozen=True)
class Split:
    """One split; `stands_in_for` names the real data set whose part it takes."""

    statistics: Statistics
    default_size: int
    stands_in_for: str


_CROWDED = Statistics(count_weights=(0, 16, 42, 42), large_percent=45, detail=1)
SPLITS: dict[str, Split] = {
    "train": Split(Statistics(), 50_000, "the training pairs"),
    "val": Split(Statistics(), 1_000, "the validation pairs"),
    "test": Split(Statistics(), 1_000, "Flickr30k (1K test)"),
    "test_crowded": Split(_CROWDED, 1_000, "COCO (1K or 5K test)"),
    "test_other_domain": Split(Statistics(domain=1), 1_000, "an out-of-domain set of pairs"),
}


def find_split(name: str) -> Split:
    """The split of that name.

    Raises:
        ValueError: if there is none; the message lists the known ones.
    """
    if name not in SPLITS:
        raise ValueError(f"unknown split {name!r}; known splits: {', '.join(SPLITS)}")
    return SPLITS[name]
