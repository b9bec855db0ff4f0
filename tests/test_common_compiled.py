"""common/base/compiled.py: compiled loops beside the caller's own use of numba."""

import os
import subprocess
import sys

import numba
import pytest
import torch
from processes import in_processes

from common.base.compiled import compiled
from common.base.places import ROOT

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


def threads_of_a_loop(count):
    return numba.get_num_threads()


def threads_of_loops():
    loop = compiled(threads_of_a_loop, parallel=True)
    before, most = numba.get_num_threads(), numba.config.NUMBA_NUM_THREADS
    for count in (2, 1, most, most + 4):  # no more than numba has started
        torch.set_num_threads(count)
        assert loop(count) == min(count, most)
        assert (torch.get_num_threads(), numba.get_num_threads()) == (count, before)


def test_loops_have_as_many_threads_as_torch_has_when_they_are_called():
    in_processes(1, threads_of_loops)


@pytest.mark.slow
def test_retrieval_works_after_the_caller_has_used_numba_with_another_number_of_threads():
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, check=True)
