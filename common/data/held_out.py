"""A share of a training set that is held out for validation, where the source has no validation split.

A hash of the image id decides the side: the same for every run, row and seed, whatever images are added or removed.
"""

import hashlib
from typing import Any, NamedTuple

from common.data.broken import BrokenSample
from common.data.part import Part


class Split(NamedTuple):
    """Two sides of a set that share no image."""

    training: Part
    validation: Part


def is_held_out(identity: str, share: float) -> bool:
    """Whether an image is on the validation side; a larger share contains the images of a smaller one."""
    digest = hashlib.blake2b(f"validation 0 {identity}".encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_off(data_set: Any, share: float) -> Split:
    """Both sides of a training set (no stream, no mixture); `share` lies in (0, 1)."""
    if getattr(data_set, "forward_only", False) or not hasattr(data_set, "image_id"):
        raise ValueError(
            f"data.val_share = {share}: {data_set.name} has no random access to ids of pictures; expected data.val, a "
            "validation set of its own"
        )
    identity = getattr(data_set, "lasting_id", data_set.image_id)
    sides: tuple[list[int], list[int]] = ([], [])
    for index in range(len(data_set)):
        try:
            is_validation = is_held_out(str(identity(index)), share)
        except BrokenSample:  # training counts and replaces it
            is_validation = False
        sides[is_validation].append(index)
    if not all(sides):
        raise ValueError(
            f"data.val_share = {share}: of {len(data_set)} samples of {data_set.name} {len(sides[1])} are held out; "
            "expected at least one on each side"
        )
    if hasattr(data_set, "pictures"):  # items of two images: an image may recur beside another one
        of_training, held_out = ({picture for row in side for picture in data_set.pictures(row)} for side in sides)
        if shared := sorted(of_training & held_out):
            raise ValueError(
                f"data.val_share = {share}: {data_set.name} has {shared[0]!r} in several pairs, on both sides; "
                "expected data.val, a validation set without its images"
            )
    setting = f"data.val_share={share!r}"
    training, validation = Part(data_set, sides[0], f"without {setting}"), Part(data_set, sides[1], f"only {setting}")
    training.broken_at_open = getattr(data_set, "broken_at_open", ())  # named once
    return Split(training, validation)
