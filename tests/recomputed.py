"""Margins of a table with 95 % intervals over seeds and pictures, from its packed hits; imports nothing of ours.

python tests/recomputed.py '[[[1, "row", "column"], [-1, "other row", "column"]], ...]' <table>.json ...
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

for path, claim in itertools.product(map(Path, sys.argv[2:]), json.loads(sys.argv[1])):
    table = json.loads(path.read_text(encoding="utf-8"))
    file = np.load(path.with_name(table["hits_file"]))
    cells = {(row["method"], key): cell for row in table["rows"] for key, cell in row["ours"].items() if cell}
    sets = {}
    for weight, row, column in claim:
        queries = file[f"{row}/{column}/queries"].astype(int)
        bits = np.unpackbits(file[f"{row}/{column}"], axis=-1, count=queries.sum()).astype(int)
        hits = file[f"{row}/{column}/levels"][(bits << np.arange(bits.shape[1])[:, None]).sum(1)]
        sums = np.array([np.bincount(np.repeat(np.arange(len(queries)), queries), run, len(queries)) for run in hits])
        z = (sums - hits.mean(1, keepdims=True) * (queries - queries.mean())) / queries.mean()
        test_set = cells[row, column]["full_protocol"]["fingerprint"]
        sets[test_set] = sets.get(test_set, 0) + weight * z
    by_seed, seeds = sum(z.mean(1) for z in sets.values()), len(hits)
    squared = stats.t.isf(0.025, seeds - 1) ** 2 * by_seed.var(ddof=1) / seeds
    for z in sets.values():
        rest, pictures = z - z.mean(1, keepdims=True) - z.mean(0) + z.mean(), z.shape[1]
        shared = (rest**2).sum() / ((seeds - 1) * (pictures - 1)) / z.size
        squared += stats.norm.isf(0.025) ** 2 * max(0, z.mean(0).var(ddof=1) / pictures - shared)
    print(by_seed.mean(), squared**0.5)
