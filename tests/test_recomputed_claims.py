"""Ten claims recomputed from a table's packed hits by a script that imports nothing of ours; and what a table of runs
says about its runs."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_common_claims import PROTOCOL, table
from test_common_claims_ties import with_hits

from common.report.claims.expressions import parse
from common.report.claims.intervals import estimate
from common.report.claims.ours import our_cells
from common.report.claims.read import FAILS, HOLDS
from common.report.claims.verdict import UNDECIDED
from common.report.formats import write_table
from common.report.table import read_table

SCRIPT = Path(__file__).with_name("recomputed.py")
OTHER_SET = {**PROTOCOL, "data": "second", "fingerprint": "11"}
OTHER_IMAGES = np.random.default_rng(8).normal(size=400)


def recomputed(paths, claims):
    command = [sys.executable, SCRIPT, json.dumps(claims), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=paths[0].parent)
    return [tuple(map(float, line.split())) for line in done.stdout.splitlines()]


def verdict(low, high):
    return HOLDS if low > 0 else FAILS if high < 0 else UNDECIDED


def pair_of_rows(levels, number):
    """Rows a and b on two test sets; five seeds, 400 images each. Of two rows no spread is pooled."""
    rows = {}
    for name, level in zip("ab", levels):
        number += 2
        second = with_hits(level, 5, number + 1, None, OTHER_SET, OTHER_IMAGES, data="second (11)")
        rows[name] = {"x": with_hits(level, generator=number), "y": second}
    return table(rows)


def test_ten_claims_recomputed_from_the_packed_hits_have_the_same_verdicts(tmp_path):
    """Row a above row b, on one test set and in the mean of two."""
    on_one = [[1, "a", "x"], [-1, "b", "x"]]
    on_both = [[0.5 * sign, row, column] for column in "xy" for sign, row in ((1, "a"), (-1, "b"))]
    for number, levels in enumerate(((0.3, 0.0), (0.0, 0.3), (0.27, 0.3), (0.2, 0.1), (-0.5, -0.5))):
        write_table(pair_of_rows(levels, 10 * number), tmp_path / str(number))
    paths, verdicts = sorted(tmp_path.glob("*/*.json")), []
    expected = iter(recomputed(paths, [on_one, on_both]))
    for path in paths:
        written = read_table(path)
        ours = our_cells([written])[written.scale]
        for claim, (value, half_width) in zip((on_one, on_both), itertools.islice(expected, 2), strict=True):
            terms = (f'{weight} * {written.table_id}["{row}"]["{column}"]' for weight, row, column in claim)
            margin = parse(" + ".join(terms) + " > 0")
            used = {cell: ours[cell] for cell in margin.cells}
            of_margin = estimate(margin, margin.slopes({cell: used[cell].number.mean for cell in used}), used)
            low, high = of_margin.interval_at(0.05)
            assert of_margin.value == pytest.approx(value, abs=1e-9)
            assert (high - low) / 2 == pytest.approx(half_width, rel=0.02)  # ours is of the angles of shares
            assert verdict(low, high) == verdict(value - half_width, value + half_width)
            verdicts.append(verdict(low, high))
    assert len(verdicts) == 10
    assert set(verdicts) == {HOLDS, FAILS, UNDECIDED}


def test_the_script_imports_nothing_of_ours():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith(("import", "from")) and "common" in line]


@pytest.mark.slow  # the table of two seeds is trained for it
def test_a_table_of_runs_names_what_trained_and_evaluated_each_row(oblique):
    oblique("table2", seeds=2)
    path = oblique.folder / "results" / "oblique_topology" / "table2" / "smoke" / "table2.json"
    written = read_table(path)
    for row in (row for row in written.rows if row.ours):
        assert row.training.revision
        assert row.training.evaluated_at
        assert len(row.training.loss_over_chance) == 2
        assert "common/info_nce.py" in written.code[row.training.code]
        assert row.training.validation == ()  # these runs have none
    assert path.with_name(written.hits_file).stat().st_size < 20_000
