"""What of a set of captioned pictures can be read, and the pixels that it must have."""

import io
from typing import Any

import numpy as np
from PIL import Image
from tars import as_plain

from common.data.broken import BrokenSample


def pixels_of(content: bytes) -> bytes:
    """Of a picture's file, in RGB."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).tobytes()


def read_all(pairs: Any) -> tuple[dict[int, tuple], list[BrokenSample]]:
    """(row -> pixels, captions and id, where it can be read; what is broken, also what opening has shown)."""
    good, broken = {}, list(pairs.broken_at_open)
    for row in range(len(pairs)):
        try:
            good[row] = as_plain(pairs[row])
        except BrokenSample as error:
            broken.append(error)
    return good, broken
