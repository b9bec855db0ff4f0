"""Tables of refusals: what a message must match, and the call that must raise it."""

from collections.abc import Callable

import pytest


def refused(*cases: tuple[str, Callable], error: type[Exception] = ValueError) -> None:
    """Every call raises `error` with a message that matches its pattern, as in `pytest.raises(match=...)`."""
    for pattern, call in cases:
        with pytest.raises(error, match=pattern):
            call()
