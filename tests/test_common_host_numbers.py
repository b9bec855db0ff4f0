"""Numbers of buffers on the host: what the buffer holds, whoever wrote it."""

import copy

import torch
from torch import nn

from common.host_numbers import host_number, write_number_


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))


def test_a_number_is_that_of_its_buffer_however_it_was_written(tmp_path):
    counter = Counter()
    assert host_number(counter.number) == 0
    write_number_(counter.number, 3)
    assert host_number(counter.number) == counter.number.item() == 3
    counter.number.add_(1)
    assert host_number(counter.number) == 4
    other = copy.deepcopy(counter)
    write_number_(other.number, 9)
    assert (host_number(counter.number), host_number(other.number)) == (4, 9)
    counter.load_state_dict(other.state_dict())
    assert host_number(counter.number) == 9
    counter.number = torch.tensor(5)
    assert host_number(counter.to(torch.float64).number) == 5


def test_a_number_that_the_host_wrote_is_not_read_again(monkeypatch):
    buffer = torch.zeros((), dtype=torch.bool)
    write_number_(buffer, True)
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 1 / 0)
    assert host_number(buffer) is True
