"""Captioned images in tar shards (WebDataset layout, see `tar_index.py`), read by position instead of as a stream.

Headers and captions are read once; then any sample is one seek away, so the order of samples can be a pure function of
(seed, epoch, position).
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.data.broken import check_opened
from common.data.pictures import Pictures, Shard
from common.data.shard_paths import expand_shards
from common.data.tar_index import cached_index


def open_shards(
    pattern: str | Path | list[str] | list[Path],
    root: str | Path | None = None,
    max_broken_share: float = 0.01,
    index_dir: str | Path | None = None,
    *,
    role: str = "train",
    is_ranked: bool = False,
    allow_missing_captions: bool = False,
    decode_size: int | None = None,
    key: str | None = None,
) -> Pictures:
    """Captioned images in tar shards; indices run through the shards one after the other.

    A cut shard or an image without caption is in `broken_at_open`. In ranked roles each line of a `KEY.txt` without
    `KEY.json` is a caption, as CLIP_benchmark's converter writes them; in training it is one, as in open_clip.

    Args:
        pattern, root: see `expand_shards`.
        index_dir: keeps the index between runs; None reads the shards at every opening.
        role: "train" may repeat an image; the others need unique `image_id`s.
        is_ranked: a part of the training set is, with a caption per line.
        allow_missing_captions: for labelled sets, which are not ranked: images without caption are samples with an
            empty list, and ids may repeat.
    """
    paths = expand_shards(pattern, root, f"data.{role}" if key is None else key)
    folder = Path(index_dir).expanduser() if index_dir is not None else None
    # one table over all shards; their indices are cached between runs
    indices = [cached_index(path, folder, allow_missing_captions) for path in paths]
    needs_unique_ids = role != "train" and not allow_missing_captions
    whole = pa.concat_tables(index.rows for index in indices)
    rows = _one_caption_per_line(whole) if is_ranked or needs_unique_ids else whole
    reading = "" if rows is whole else ", a caption per line"
    pictures = Pictures(
        _name_of(paths[0]),
        rows,
        Path(os.path.commonpath([path.parent for path in paths])),
        [broken for index in indices for broken in index.broken],
        role=role,
        decode_size=decode_size,
        shards=[
            Shard(path, len(index.rows), index.file_size, index.digest + reading, index.modified)
            for path, index in zip(paths, indices)
        ],
    )
    # refused before training starts: too much damage, or a ranked set that lists an image twice
    empty = f"no captioned image in {len(paths)} shards, {paths[0]} ..."
    check_opened(empty, len(pictures), pictures.broken_at_open, max_broken_share)
    if needs_unique_ids:
        check_unique_ids(pictures, lambda row: str(pictures.broken(row, "")))
    return pictures


def check_unique_ids(pairs: Any, place: Callable[[int], str] | None = None) -> None:
    """Checks that a ranked set has every image once: of two samples each would count the other's captions as wrong.

    Args:
        place: row -> where it lies, for the message; None = its number.
    Raises:
        ValueError: an `image_id` occurs twice.
    """
    place, rows = place or (lambda row: f"sample {row} of {pairs.name}"), {}
    for row in range(len(pairs)):
        image_id = pairs.image_id(row)
        first = rows.setdefault(image_id, row)
        if first != row:
            raise ValueError(
                f"image {image_id!r} occurs twice, in {place(first)} and in {place(row)}; expected in a "
                "set that is ranked: each image_id once, with all its captions"
            )


def _one_caption_per_line(rows: pa.Table) -> pa.Table:
    # Splits texts of several lines; captions of a `KEY.json` stay as they are
    if not pc.any(pc.match_substring(pc.list_flatten(rows["captions"]), "\n")).as_py():
        return rows
    captions = [
        [line.strip() for line in texts[0].split("\n") if line.strip()]
        if metadata is None and texts and "\n" in texts[0]
        else texts
        for texts, metadata in zip(rows["captions"].to_pylist(), rows["json"].to_pylist())
    ]
    place = rows.schema.get_field_index("captions")
    field = rows.schema.field(place)
    return rows.set_column(place, field, pa.chunked_array([captions], field.type))


def _name_of(shard: Path) -> str:
    # flickr8k-train-000003.tar gives flickr8k-train; 00000.tar, which has no name, its folder's
    return re.sub(r"[-_.]?\d*$", "", shard.stem) or shard.parent.name or "shards"
