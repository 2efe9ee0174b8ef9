"""Weights on huge pages."""

import re
from pathlib import Path

import pytest
import torch

from specinfer.ops.cpu.huge_pages import zeros_on_huge_pages

CPU = torch.device("cpu")
MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("count", [0, 5, 2**20, 2**21 + 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_there_are_as_many_zeros_as_asked_for(count: int, dtype: torch.dtype) -> None:
    zeros = zeros_on_huge_pages(count, dtype, CPU)
    assert zeros.shape == (count,)
    assert zeros.dtype == dtype
    assert not zeros.any()


def test_meta_tensors_stay_on_their_device() -> None:
    assert zeros_on_huge_pages(2**24, torch.uint8, torch.device("meta")).is_meta


@pytest.mark.skipif(not MODES.is_file() or "[never]" in MODES.read_text(), reason="the system has no huge pages")
def test_large_weights_lie_on_huge_pages() -> None:
    before = _huge_bytes()
    zeros = zeros_on_huge_pages(2**25, torch.uint8, CPU)
    assert zeros.data_ptr() % 2**21 == 0
    assert _huge_bytes() - before >= 2**24  # the system may lack some


def _huge_bytes() -> int:
    sizes = re.findall(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps").read_text())
    return 1024 * sum(map(int, sizes))
