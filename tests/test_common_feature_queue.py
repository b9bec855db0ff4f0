"""The feature queue against a Python deque, across processes, casts and checkpoints."""

from collections import deque

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from processes import in_processes
from refusals import refused
from torch import nn

from common.base.settings import OptimConfig
from common.distributed import rank
from common.feature_queue import FeatureQueue
from common.run.checkpoint import last_checkpoint, save_checkpoint
from common.run.schedule import build_optimizer


def numbered(first, count, dim=2):
    """Rows that carry their own number."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(count, dim).contiguous()


class RingAgainstDeque(RuleBasedStateMachine):
    """Any order of writes and reloads leaves the newest rows, oldest first behind the pointer."""

    @initialize(capacity=st.integers(1, 9))
    def open_queue(self, capacity):
        self.capacity, self.written = capacity, 0
        self.queue = FeatureQueue(capacity, 2, start="fill_level")
        self.expected = deque(maxlen=capacity)

    @precondition(lambda self: self.written < 500)
    @rule(count=st.integers(0, 25), with_ids=st.booleans())
    def write(self, count, with_ids):
        rows = numbered(self.written, count)
        ids = torch.arange(self.written, self.written + count) * 10 if with_ids else None
        slots = self.queue.enqueue(rows, ids)
        self.expected.extend(
            (number, 10 * number if with_ids else -1) for number in range(self.written, self.written + count)
        )
        assert slots.tolist() == [
            (self.written + row) % self.capacity if row >= count - self.capacity else -1 for row in range(count)
        ]
        self.written += count

    @rule()
    def save_and_load(self):
        loaded = FeatureQueue(self.capacity, 2, start="fill_level")
        loaded.load_state_dict(self.queue.state_dict())
        self.queue = loaded

    @invariant()
    def holds_the_newest(self):
        filled = min(self.written, self.capacity)
        assert (int(self.queue.pointer), int(self.queue.fill_level)) == (self.written % self.capacity, filled)
        assert self.queue.present().sum() == filled
        rows, ids = self.queue.rows(), self.queue.row_ids()
        assert (rows.shape, ids.shape) == ((filled, 2), (filled,))
        oldest = int(self.queue.pointer) if filled == self.capacity else 0
        actual = [(int(rows[(oldest + k) % filled, 0]), int(ids[(oldest + k) % filled])) for k in range(filled)]
        assert actual == list(self.expected)


RingAgainstDeque.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestRingAgainstDeque = RingAgainstDeque.TestCase


def test_queue_wraps_and_keeps_newest():
    queue = FeatureQueue(12, 2)
    for batch in range(4):
        slots = queue.enqueue(numbered(100 * batch, 4))
    assert slots.tolist() == [0, 1, 2, 3]
    assert queue.features[:, 0].tolist() == [300, 301, 302, 303, 100, 101, 102, 103, 200, 201, 202, 203]
    assert int(queue.pointer) == 4


def test_a_batch_that_does_not_divide_the_capacity_wraps_with_the_remainder():
    queue = FeatureQueue(5, 2)
    queue.enqueue(numbered(0, 3))
    assert queue.enqueue(numbered(3, 4)).tolist() == [3, 4, 0, 1]
    assert queue.features[:, 0].tolist() == [5, 6, 2, 3, 4]


def test_random_rows_are_unit_and_depend_only_on_the_seed():
    state = torch.get_rng_state()
    queue = FeatureQueue(200, 16, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(queue.features.norm(dim=1), torch.ones(200))
    assert (queue.ids == -1).all()
    torch.manual_seed(99)
    assert torch.equal(FeatureQueue(200, 16, seed=3).features, queue.features)
    assert not torch.equal(FeatureQueue(200, 16, seed=4).features, queue.features)
    assert queue.features.mean(dim=0).norm() < 0.2  # in all directions


def test_rows_are_a_view_of_the_queue_and_a_write_before_the_backward_pass_is_an_error():
    queue = FeatureQueue(4, 2)
    assert queue.rows().data_ptr() == queue.features.data_ptr()
    query = torch.randn(3, 2, requires_grad=True)
    (query @ queue.rows().T).logsumexp(dim=1).sum().backward()
    loss = (query @ queue.rows().T).logsumexp(dim=1).sum()
    queue.enqueue(numbered(0, 1))
    refused(("modified by an inplace operation", loss.backward), error=RuntimeError)
    ids = queue.row_ids()
    queue.enqueue(numbered(0, 4), torch.arange(4))
    assert (ids == -1).all()  # a copy


def test_keys_are_stored_without_their_graph():
    queue = FeatureQueue(4, 2)
    queue.enqueue(torch.randn(2, 2, requires_grad=True) * 2)
    assert not queue.features.requires_grad


def test_keys_in_half_precision_are_cast_up_and_finer_ones_are_refused():
    queue = FeatureQueue(4, 2)
    key = torch.tensor([[0.3, 0.7]], dtype=torch.bfloat16)
    queue.enqueue(key)
    assert torch.equal(queue.features[:1], key.float())
    refused((r"holds torch\.float32 and got torch\.float64; .*\.double\(\)", lambda: queue.enqueue(key.double())))
    queue.double().enqueue(key.double())
    assert queue.features.dtype == torch.float64


def test_a_model_cast_to_half_precision_keeps_its_keys_unrounded():
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "queue": FeatureQueue(64, 2)})
    before = model["queue"].features.clone()
    model.to("cpu", torch.bfloat16)
    assert model["layer"].weight.dtype == torch.bfloat16
    assert torch.equal(model["queue"].features, before)


@pytest.mark.parametrize(
    ("features", "ids", "message"),
    [
        (torch.zeros(3, 4), None, r"takes \(num_rows, 2\), got \(3, 4\)"),
        (torch.zeros(2), None, r"takes \(num_rows, 2\), got \(2,\)"),
        (torch.zeros(3, 2, dtype=torch.int64), None, r"holds torch\.float32 and got torch\.int64"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), r"ids of 3 rows must be \(3,\) int64, got \(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3), r"must be \(3,\) int64, got \(3,\) torch\.float32"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(features, ids, message):
    queue = FeatureQueue(4, 2)
    before = {name: tensor.clone() for name, tensor in queue.state_dict().items()}
    refused((message, lambda: queue.enqueue(features, ids)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in queue.state_dict().items())


def test_impossible_queues_are_refused():
    refused(
        ("capacity >= 1", lambda: FeatureQueue(0, 2)),
        ("dim >= 1", lambda: FeatureQueue(2, 0)),
        ("'zeros' is unknown; expected: random_rows, fill_level", lambda: FeatureQueue(2, 2, start="zeros")),
    )


@pytest.mark.parametrize("start", ["random_rows", "fill_level"])
def test_the_queue_survives_a_checkpoint_bit_by_bit_and_goes_on_where_it_was(tmp_path, start):
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "queue": FeatureQueue(7, 2, start)})
    model["queue"].enqueue(torch.randn(5, 2), torch.arange(5))
    save_checkpoint(tmp_path, 1, model, build_optimizer(model, OptimConfig()), {})
    loaded = nn.ModuleDict({"layer": nn.Linear(2, 2), "queue": FeatureQueue(7, 2, start, seed=8)})
    last_checkpoint(tmp_path).load_model(loaded)
    more = torch.randn(4, 2)
    assert torch.equal(model["queue"].enqueue(more), loaded["queue"].enqueue(more))
    ours, theirs = model["queue"].state_dict(), loaded["queue"].state_dict()
    assert set(ours) == {"features", "ids", "pointer", "fill_level"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def keys_of_step(step):
    """Keys and ids of the global batch of six."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step)), 6 * step + torch.arange(6)


def queue_of_a_process():
    torch.manual_seed(rank())  # processes differ in their global random state
    queue, slots = FeatureQueue(11, 3), []
    for step in range(5):
        keys, ids = (of_batch.chunk(2)[rank()] for of_batch in keys_of_step(step))
        slots.append(queue.enqueue_from_all_processes(keys.requires_grad_(), ids))
    return queue.state_dict(), torch.stack(slots)


def test_two_processes_hold_the_same_queue_as_one():
    single = FeatureQueue(11, 3)
    slots = torch.stack([single.enqueue(*keys_of_step(step)) for step in range(5)])
    for state, actual in in_processes(2, queue_of_a_process):
        assert torch.equal(actual, slots)
        for name, tensor in single.state_dict().items():
            assert torch.equal(state[name], tensor), name
