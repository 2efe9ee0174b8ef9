"""Memory of large weights: huge pages, of which a pass over all weights needs fewer addresses translated."""

import sys

import torch
from torch import Tensor

from specinfer.core.systems import call_c

_HUGE_PAGE = 2**21  # bytes, of x86-64 and of ARM with pages of 4 KiB
_MADV_HUGEPAGE = 14  # as in Linux's mman.h


def zeros_on_huge_pages(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [count] zeros; on Linux on huge pages, as far as they fill whole ones, where the system has any."""
    num_bytes = count * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or num_bytes < _HUGE_PAGE:
        return torch.zeros(count, dtype=dtype, device=device)
    room = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE_PAGE
    part = room[start : start + num_bytes]
    call_c("madvise", part.data_ptr(), num_bytes // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    return part.view(dtype).zero_()
