"""Numbers in buffers that the host needs, such as the fill level of a queue.

Reading one from a device makes the host wait. So it remembers what it wrote, and reads only after another write, such
as a checkpoint's; on a CPU always.
"""

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_REMEMBERED = WeakTensorKeyDictionary()  # buffer -> (its version when the number was known, number)


def host_number(buffer: Tensor) -> int | float | bool:
    """The value of a () buffer; waits for the device only after a write that was not `write_number_`'s.

    On a device, a write without a new version (`.data`, a collective) needs `torch.autograd.graph.increment_version`.
    """
    if _is_read(buffer):
        return buffer.item()
    version, number = _REMEMBERED.get(buffer, (None, None))
    if version != buffer._version:
        number = buffer.item()
        _REMEMBERED[buffer] = buffer._version, number
    return number


def write_number_(buffer: Tensor, number: int | float | bool) -> None:
    """Writes into a () buffer what `host_number` then gives without a wait."""
    buffer.fill_(number)
    if not _is_read(buffer):
        _REMEMBERED[buffer] = buffer._version, number


def _is_read(buffer: Tensor) -> bool:
    return buffer.device.type == "cpu" or buffer.is_inference()  # the latter has no version
