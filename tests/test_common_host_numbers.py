"""Numbers of buffers on the host: what the buffer holds, whoever wrote it."""

import copy

import pytest
import torch
from torch import nn

from common import host_numbers
from common.host_numbers import host_number, write_number_


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_number_is_that_of_its_buffer_however_it_was_written(on_cpu, monkeypatch):
    counter = Counter()
    if on_cpu:
        host_number(counter.number)
        counter.number.data.fill_(7)  # as a collective: no new version
        assert host_number(counter.number) == 7
        counter.number.zero_()
    else:
        monkeypatch.setattr(host_numbers, "_is_read", lambda buffer: False)
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


def test_a_number_that_the_host_wrote_is_not_read_again():
    buffer = torch.zeros((), dtype=torch.bool, device="meta")  # where nothing can be read
    write_number_(buffer, True)
    assert host_number(buffer) is True


def test_numbers_work_under_inference_mode():
    with torch.inference_mode():
        buffer = torch.zeros(())
        write_number_(buffer, 2)
        assert host_number(buffer) == 2
