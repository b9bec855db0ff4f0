"""Small tar shards that the tests write."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def jpeg(seed: int, size: tuple[int, int] = (24, 20), kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def pair(seed: int, **changes: object) -> dict[str, bytes]:
    """Members of one sample; a change of None leaves a member out."""
    content = {"image_id": f"id{seed}", "captions": [f"picture {seed}", f"a view of {seed}"]}
    members = {"jpg": jpeg(seed), "json": json.dumps(content).encode()}
    members |= changes
    return {extension: body for extension, body in members.items() if body is not None}


def write_tar(path: Path, samples: dict[str, dict[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for key, members in samples.items():
            for extension, body in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    return path


def good_tar(path: Path, num_samples: int, first: int = 0) -> Path:
    return write_tar(path, {f"k{seed:04d}": pair(seed) for seed in range(first, first + num_samples)})


def as_plain(sample: dict) -> tuple:
    return np.asarray(sample["image"]).tobytes(), sample["captions"], sample["image_id"]
