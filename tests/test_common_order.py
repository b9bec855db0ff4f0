"""The order of samples: a permutation per epoch, the same for any number of processes and any start."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from common.base.random_keys import mix64, mix64_array
from common.data.order import BatchPositions, MixedOrder, SampleOrder, permuted, seed_of


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**62))
def test_permuted_hits_every_index_once(size, seed):
    assert np.array_equal(np.sort(permuted(np.arange(size), size, seed)), np.arange(size))


def test_permuted_needs_no_table_and_works_far_out():
    size = 3_000_000_000
    values = permuted(np.arange(size - 1000, size), size, 7)
    assert len(np.unique(values)) == 1000
    assert 0 <= values.min() <= values.max() < size


def test_permutation_looks_random():
    # neighbours are unrelated and every decile of the output is hit evenly by every decile of the input
    values = permuted(np.arange(10_000), 10_000, 3)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    counts = np.histogram2d(np.arange(10_000), values, bins=10)[0]
    assert (np.abs(counts - 100) < 45).all()  # 4.5 standard deviations of a count of 100


def test_epochs_and_seeds_give_different_orders():
    one, other = (SampleOrder(1000, 10, seed).epochs_and_indices(np.arange(2000))[1] for seed in (0, 1))
    for different in (one[1000:], other[:1000]):
        assert (one[:1000] != different).mean() > 0.99


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(2, 400), batch=st.integers(2, 60), seed=st.integers(0, 1000))
def test_every_sample_at_most_once_per_epoch_and_epochs_hold_whole_batches(num_samples, batch, seed):
    batch = min(batch, num_samples)
    order = SampleOrder(num_samples, batch, seed)
    assert order.samples_per_epoch % batch == 0
    assert num_samples - order.samples_per_epoch < batch
    epochs, indices = order.epochs_and_indices(np.arange(3 * order.samples_per_epoch))
    for epoch in range(3):
        seen = indices[epochs == epoch]
        assert len(seen) == len(set(seen)) == order.samples_per_epoch


@pytest.mark.parametrize("num_processes", [1, 2, 3, 6])
def test_global_batches_depend_on_the_step_only_and_not_on_the_number_of_processes(num_processes):
    order = SampleOrder(50, 12, 0)
    shares = [list(BatchPositions(order, 2, 7, process, num_processes)) for process in range(num_processes)]
    assert {len(BatchPositions(order, 2, 7)), *map(len, shares)} == {5}
    for step in range(5):
        together = [position for share in shares for position in share[step]]
        assert together == list(range((step + 2) * 12, (step + 3) * 12))


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 50), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_mixture_draws_its_shares_and_goes_through_each_set_epoch_by_epoch(sizes, weights, seed):
    weights, count = weights[: len(sizes)], len(sizes)
    order = MixedOrder([SampleOrder(size, 1, seed + k) for k, size in enumerate(sizes)], weights, 1, seed)
    indices = order.epochs_and_indices(np.arange(3_000))[1]
    for number, size in enumerate(sizes):
        shares = [(indices[cycle : cycle + 1_000] % count == number).sum() for cycle in (0, 1_000, 2_000)]
        assert shares[0] == shares[1] == shares[2] >= 1
        assert abs(shares[0] - 1_000 * weights[number] / sum(weights)) <= count / 2 + 1
        inside = indices[indices % count == number] // count
        for start in range(0, len(inside) - size + 1, size):  # every sample once in each epoch of the set
            assert np.array_equal(np.sort(inside[start : start + size]), np.arange(size))
        assert {order.substitute(int(indices[7]), k) % count for k in range(20)} == {indices[7] % count}
    some = np.array([2_500, 1, 999, 1_000])
    assert np.array_equal(order.epochs_and_indices(some)[1], indices[some])


def test_batches_that_cannot_be_dealt_out_or_filled_are_refused():
    refused(
        (r"global_batch_size = 12 .* 5 processes", lambda: BatchPositions(SampleOrder(50, 12, 0), 0, 1, 0, 5)),
        ("global_batch_size = 64 is larger than the training set of 50", lambda: SampleOrder(50, 64, 0)),
    )


def test_seeds_from_different_parts_differ():
    seeds = {seed_of(a, b) for a in range(100) for b in range(100)}
    assert len(seeds) == 10_000
    assert seed_of(1, 2) != seed_of(2, 1)
    assert 0 <= min(seeds) <= max(seeds) < 2**63


def test_keys_of_an_array_equal_keys_one_by_one():
    values = np.random.default_rng(0).integers(0, 2**64, 500, dtype=np.uint64)
    assert mix64_array(values).tolist() == [mix64(int(value)) for value in values]
