"""Features of captions by a frozen network, computed once: float16 on disk, known by the ids without padding.

Captions of all data sets share one growing file for each network. A chunk counts once the index names it, which is
written after its numbers; the rest of an interrupted run is cut off.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common.base.files import check_room, locked, naming
from common.caption_lengths import up_to_first

_RECORD = np.dtype([("hash", "<u8"), ("start", "<i8"), ("length", "<i8")])  # start and length in tokens
_CHUNK = 256  # captions
_WAY_ON = "model.text.stem.cache_gb=0, which keeps none, or a link from outputs/features to a disk that has locks"


class CaptionCache:
    """Token features of one network.

    Args:
        file: of the numbers; the index lies beside it.
        compute: (batch, length) ids -> (batch, length, width).
        max_bytes: of the file; beyond it nothing is computed.
    """

    def __init__(
        self, file: Path, width: int, end_id: int, compute: Callable[[torch.Tensor], torch.Tensor], max_bytes: float
    ) -> None:
        self.file, self.width, self.end_id, self.compute, self.max_bytes = file, width, end_id, compute, max_bytes
        self._index = file.with_suffix(".index")
        self._open()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Features, computed where they are not cached.

        Returns:
            (batch, length, width) float32; cached ones are zero behind the end token.
        """
        ids = token_ids.cpu()
        lengths = self._lengths(ids)
        records = self._find(_hashes(ids, lengths))
        features = torch.zeros(*ids.shape, self.width)
        for row, record in enumerate(records):
            if record >= 0:
                start, length = self._records["start"][record], self._records["length"][record]
                features[row, :length] = torch.from_numpy(self._numbers[start : start + length].astype(np.float32))
        features = features.to(token_ids.device)
        missing = torch.from_numpy(np.flatnonzero(records < 0)).to(token_ids.device)
        if len(missing):
            features[missing] = self.compute(token_ids[missing]).half().float()
        return features

    def __deepcopy__(self, memo: dict) -> "CaptionCache":
        # a copy of a model reads the same file
        return self

    def keep(self, name: str, ids: torch.Tensor, device: torch.device) -> None:
        """Computes missing captions. Call on every process: the first computes, the others wait."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{self.file}.lock"), _WAY_ON):
            self._open()  # another process may have written since
            # distinct captions that no record has
            lengths = self._lengths(ids)
            hashes = _hashes(ids, lengths)
            _, first = np.unique(hashes, return_index=True)
            missing = np.sort(first[self._find(hashes[first]) < 0])
            if not len(missing):
                return
            missing = missing[np.argsort(lengths[missing], kind="stable")]  # of like length together: little padding
            there, new = (self.file.stat().st_size if self.file.is_file() else 0), int(lengths[missing].sum())
            what = f"features of the captions of {name}: {new} tokens"
            folder, setting = self.file.parent, "model.text.stem.cache_gb"
            check_room(folder, what, 2 * self.width * new, self.max_bytes, setting, there)
            # an interrupted run may have left more numbers and half a record behind
            tokens = int(self._records["start"][-1] + self._records["length"][-1]) if len(self._records) else 0
            with naming(self.file), self.file.open("ab") as numbers, self._index.open("ab") as index:
                numbers.truncate(tokens * 2 * self.width)
                index.truncate(len(self._records) * _RECORD.itemsize)
                bar = tqdm(total=len(missing), desc=f"features of the captions of {name}", unit="caption", delay=2)
                with bar:
                    for rows in np.split(missing, range(_CHUNK, len(missing), _CHUNK)):
                        longest = int(lengths[rows].max())
                        batch = self.compute(ids[rows, :longest].to(device)).cpu().numpy().astype(np.float16)
                        records = np.empty(len(rows), _RECORD)
                        records["hash"], records["length"] = hashes[rows], lengths[rows]
                        records["start"] = tokens + np.cumsum(lengths[rows]) - lengths[rows]
                        # numbers first, then the record that makes them count
                        for row, features in zip(rows, batch, strict=True):
                            numbers.write(features[: lengths[row]].tobytes())
                        numbers.flush()
                        index.write(records.tobytes())
                        index.flush()
                        tokens += int(lengths[rows].sum())
                        bar.update(len(rows))
        self._open()

    def _open(self) -> None:
        records = np.zeros(0, _RECORD)
        self._numbers = np.zeros((0, self.width), np.float16)
        if self.file.is_file() and self._index.is_file() and self.file.stat().st_size >= 2 * self.width:
            content = self._index.read_bytes()
            records = np.frombuffer(content[: len(content) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
            tokens = self.file.stat().st_size // (2 * self.width)
            records = records[: np.searchsorted(records["start"] + records["length"], tokens, side="right")]
            self._numbers = np.memmap(self.file, np.float16, "r", shape=(tokens, self.width))
        self._records = records
        self._order = np.argsort(records["hash"])
        self._sorted = records["hash"][self._order]

    def _find(self, hashes: np.ndarray) -> np.ndarray:
        # numbers of the captions' records, -1 where there is none
        if not len(self._records):
            return np.full(len(hashes), -1)
        place = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return np.where(self._sorted[place] == hashes, self._order[place], -1)

    def _lengths(self, ids: torch.Tensor) -> np.ndarray:
        return up_to_first(ids, self.end_id).sum(dim=1).numpy()


def _hashes(ids: torch.Tensor, lengths: np.ndarray) -> np.ndarray:
    # (batch,) uint64, without regard to padding
    rows = ids.numpy().astype("<i4")
    digests = b"".join(
        hashlib.blake2b(row[:length].tobytes(), digest_size=8).digest() for row, length in zip(rows, lengths)
    )
    return np.frombuffer(digests, "<u8")
