"""common/base/compiled.py: compiled loops beside the caller's own use of numba."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import numba, numpy
def total(values):
    found = 0.0
    for place in numba.prange(len(values)):
        found += values[place]
    return found
assert numba.njit(parallel=True)(total)(numpy.ones(9)) == 9  # the caller's threads run from here on
import torch
torch.set_num_threads(5)
from common.evaluation import retrieval
found = retrieval.retrieval_ranks(torch.eye(3), torch.arange(3))
assert retrieval.recall_at_k(found.image_to_text, 1) == 1.0
assert torch.get_num_threads() == 5
assert numba.njit(total)(numpy.ones(9)) == 9  # numba reads the environment again where it compiles
"""


THREADS = """
from common.evaluation import rank_loops  # the first that imports numba
import numba, torch
from common.base.compiled import compiled
def threads_of_a_loop(count):
    return numba.get_num_threads()
loop = compiled(threads_of_a_loop, parallel=True)
before = numba.get_num_threads()
for count in (1, 3, 2):
    torch.set_num_threads(count)
    assert loop(count) == count, (loop(count), count)
    assert (torch.get_num_threads(), numba.get_num_threads()) == (count, before)
torch.set_num_threads(7)
assert loop(7) == 3  # no more than numba has started
"""


def test_loops_have_as_many_threads_as_torch_has_when_they_are_called():
    subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, env=os.environ | {"NUMBA_NUM_THREADS": "3"}, check=True)


@pytest.mark.slow
def test_retrieval_works_after_the_caller_has_used_numba_with_another_number_of_threads():
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, check=True)
