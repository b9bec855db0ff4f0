"""Benchmark rows about data: tar shards against the webdataset library."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from common.data.batches import TrainingView, training_batches
from common.data.loader import Loader
from common.data.order import BatchPositions, SampleOrder
from common.data.shards import open_shards
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from scripts.benchmarks.comparison import Comparison


def write_shards(folder: Path, num_shards: int, per_shard: int, side: int) -> list[Path]:
    """Tar shards of JPEGs that compress like photographs (0.14 bytes per pixel and colour), each with a caption."""
    rng = np.random.default_rng(0)
    paths = [folder / f"shard-{number:03d}.tar" for number in range(num_shards)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(str(path)) as writer:
            for sample in range(number * per_shard, (number + 1) * per_shard):
                coarse = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
                smooth = np.asarray(coarse.resize((side * 4 // 3, side), Image.Resampling.BICUBIC))
                pixels = (smooth + rng.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
                captions = {"captions": [f"picture {sample} of a set"], "image_id": str(sample)}
                writer.write({"__key__": f"{sample:06d}", "jpg": buffer.getvalue(), "json": json.dumps(captions)})
    return paths


@dataclass(frozen=True)
class Prepare:
    """What both loops do with a webdataset sample; a class so that workers of every start method can have it."""

    transform: ImageTransform
    tokenizer: WordTokenizer
    context_length: int = 32

    def __call__(self, sample: dict[str, bytes]) -> tuple[torch.Tensor, str]:
        image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
        return self.transform.eval(image), json.loads(sample["json"])["captions"][0]

    def batch(self, samples: list[tuple[torch.Tensor, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        images, captions = zip(*samples)
        return torch.stack(images), self.tokenizer.encode(list(captions), self.context_length)


def loaders(paths: list[Path], size: int, batch: int, num_workers: int) -> tuple[Loader, DataLoader]:
    """Our training loader over one epoch in its random order, and webdataset's loop in the order of the files.

    Their shuffles are off: no buffer has to be filled. Both make the same batches of pixels and token ids.
    """
    pairs = open_shards([str(path) for path in paths])
    transform = ImageTransform(size, resize_with="torchvision")  # as at scale paper
    prepare = Prepare(transform, WordTokenizer.from_captions(pairs.all_captions(), 1, 10_000))
    order = SampleOrder(len(pairs), batch, 0)
    view = TrainingView(pairs, order, prepare.transform, prepare.tokenizer, prepare.context_length)
    ours = training_batches(view, BatchPositions(order, 0, len(pairs) // batch), num_workers, pin_memory=False)
    stream = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False).map(prepare)
    prefetch = 4 if num_workers else None  # as ours
    theirs = DataLoader(stream, batch, num_workers=num_workers, collate_fn=prepare.batch, prefetch_factor=prefetch)
    return ours, theirs


def shards(quick: bool, folder: Path, num_workers: int = 0) -> Comparison:
    """Our training loader over webdataset's loop, in this process."""
    num_shards, per_shard, side, batch = (2, 8, 64, 4) if quick else (4, 256, 256, 64)
    paths, samples, size = write_shards(folder, num_shards, per_shard, side), num_shards * per_shard, side * 7 // 8
    ours, theirs = loaders(paths, size, batch, num_workers)
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    return Comparison(
        f"read, decode, transform and tokenise {samples:,} JPEGs of {side * 4 // 3} x {side} to {size} pixels, "
        f"{num_workers} workers, {num_shards} shards, {megabytes:.1f} MB: our loader in random order, the headers read "
        "before / webdataset's in file order",
        "throughput",
        0.9,
        samples,
        lambda: _count(ours, samples),
        lambda: _count(theirs, samples),
    )


def shards_2_workers(quick: bool, folder: Path) -> Comparison:
    """The same with two worker processes on either side."""
    return shards(quick, folder, num_workers=2)


def shard_bytes(quick: bool, folder: Path) -> Comparison:
    """The same without decoding: the bytes of pictures and captions, by position in random order, over their stream."""
    num_shards, per_shard, side = (2, 8, 64) if quick else (4, 256, 256)
    paths = write_shards(folder, num_shards, per_shard, side)
    pairs = open_shards([str(path) for path in paths])
    places = [(row, member) for row in range(len(pairs)) for member in ("image", "json")]
    order = np.random.default_rng(0).permutation(len(places))

    def ours() -> int:
        return sum(len(pairs.read(*places[place])) for place in order)

    def theirs() -> int:
        stream = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False)
        return sum(len(sample["jpg"]) + len(sample["json"]) for sample in stream)

    if ours() != theirs():
        raise ValueError("the two readers do not give the same bytes")
    return Comparison(
        f"bytes of {len(places) // 2:,} pictures and their captions, not decoded: by position in random order / "
        "webdataset's stream in file order",
        "throughput",
        0.9,
        len(places) // 2,
        ours,
        theirs,
    )


def _count(batches: DataLoader, expected: int) -> None:
    seen = sum(len(batch.images) if hasattr(batch, "images") else len(batch[0]) for batch in batches)
    if seen != expected:
        raise ValueError(f"the loader gave {seen} samples of {expected}")
