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
def test_large_weights_ask_for_huge_pages() -> None:
    zeros = zeros_on_huge_pages(2**25, torch.uint8, CPU)
    assert zeros.data_ptr() % 2**21 == 0
    # Whether the system has enough of them free is its own affair, so this reads what was asked for.
    assert "hg" in _flags_of_mapping(zeros.data_ptr())


def _flags_of_mapping(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has the address {address:#x}")
