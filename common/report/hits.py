"""Results of every query of a test set, packed to some kilobytes a run, so that an interval can be recomputed.

`<table>_hits.npz` lies beside `<table>.json`. Three arrays belong to a cell:

    "<row>/<column>/queries"   (pictures,) how many queries each picture has
    "<row>/<column>/levels"    the distinct results, in the column's unit: 0 and 100 for hits and misses in percent
    "<row>/<column>"           (seeds, planes, bytes) uint8: bit plane k holds bit k of every result's index into levels

Queries are in the order of the pictures, seeds in that of the cell.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np


@dataclass(frozen=True, eq=False)
class Hits:
    """Results of a cell: `levels[codes]` is (seeds, queries) in the column's unit; queries: (pictures,) counts."""

    levels: np.ndarray
    codes: np.ndarray
    queries: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Sequence[Sequence[float]]], whole: float = 100.0) -> "Hits | None":
        """From the `hits` of evaluations: per seed, the results of each picture's queries.

        Args:
            runs: in the order of the cell's seeds.
            whole: what a result of 1 is in the column's unit.
        Returns:
            None without queries, or where seeds differ in the pictures that could be read.
        """
        counts = [[len(results) for results in run] for run in runs]
        if not counts or not sum(counts[0]) or any(other != counts[0] for other in counts):
            return None
        results = np.array([list(chain.from_iterable(run)) for run in runs], dtype=np.float64)
        levels, codes = np.unique(results, return_inverse=True)
        return cls(whole * levels, codes.reshape(results.shape), np.array(counts[0]))

    def of_seeds(self, places: Sequence[int]) -> "Hits":
        """Only the seeds at these places."""
        return replace(self, codes=self.codes[list(places)])

    def over_seeds(self) -> list[np.ndarray]:
        """Each picture's results, as fractions, averaged over seeds."""
        return np.split(self.levels[self.codes].mean(axis=0) / 100, np.cumsum(self.queries)[:-1])

    def have_means(self, values: Sequence[float]) -> bool:
        """Whether these are the means of the seeds."""
        means = self.levels[self.codes].mean(axis=1)
        return len(means) == len(values) and np.allclose(means, values, rtol=0, atol=1e-6)

    def by_picture(self) -> np.ndarray:
        """z, (seeds, pictures): what a picture with all its queries adds to the number, in the column's unit.

        The number is the mean over queries, so a picture counts by w = its queries / the mean number of queries:

            z = w * (mean of its results) - number * (w - 1), whose mean over pictures is the number
        """
        ends = np.cumsum(self.queries)
        sums = np.cumsum(np.pad(self.levels[self.codes], ((0, 0), (1, 0))), axis=1)
        weights = self.queries / self.queries.mean()
        of_pictures = (sums[:, ends] - sums[:, ends - self.queries]) / self.queries.mean()
        return of_pictures - sums[:, -1:] / ends[-1] * (weights - 1)


def packed(cells: Mapping[tuple[str, str], Hits]) -> bytes:
    """Content of a table's file of hits; `cells` by row and column."""
    arrays = {}
    for (row, column), hits in cells.items():
        planes = max(1, int(len(hits.levels) - 1).bit_length())
        bits = (hits.codes[:, None, :] >> np.arange(planes)[:, None]) & 1
        arrays[f"{row}/{column}"] = np.packbits(bits.astype(np.uint8), axis=-1)
        arrays[f"{row}/{column}/levels"] = hits.levels
        arrays[f"{row}/{column}/queries"] = hits.queries.astype(np.min_scalar_type(hits.queries.max()))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def read_hits(path: Path) -> dict[str, Hits]:
    """What `packed` made, by "<row>/<column>": either name may have a slash.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile: a file that is missing, damaged or no such archive.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    cells = {}
    for key in (name.removesuffix("/queries") for name in arrays if name.endswith("/queries")):
        levels, queries = arrays[f"{key}/levels"], arrays[f"{key}/queries"].astype(np.int64)
        bits = np.unpackbits(arrays[key], axis=-1, count=int(queries.sum()))
        codes = (bits.astype(np.int64) << np.arange(bits.shape[1])[:, None]).sum(axis=1)
        cells[key] = Hits(levels, codes.astype(np.min_scalar_type(len(levels))), queries)
    return cells
