"""The switch for sums in one order: within `fixed_order`, a row's result has the same bits among any other rows.

Kernels then choose tiles, warps and parts of sums by the shapes of weights, heads and the device, never by the number
of rows. Rows are padded to one tile, so that all are multiplied by the same instruction, which adds up the products of
a row in an order that depends on nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_FIXED: ContextVar[bool] = ContextVar("is_fixed", default=False)


def is_fixed() -> bool:
    """Return whether sums must have one order."""
    return _IS_FIXED.get()


@contextmanager
def fixed_order() -> Iterator[None]:
    """Let operations of this thread add up in one order within the context."""
    token = _IS_FIXED.set(True)
    try:
        yield
    finally:
        _IS_FIXED.reset(token)
