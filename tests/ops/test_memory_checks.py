"""The checks of memory in Triton's interpreter: kernels that would race or go astray on a GPU do not run."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from interpreter import interpreted

pytestmark = interpreted


@triton.jit
def shift_program(numbers, out, count, WAITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write numbers, and read them one place further on."""
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(numbers + places))
    if WAITS:
        tl.debug_barrier()
    tl.store(numbers + places, tl.load(out + (places + 1) % count))


@triton.jit
def double_program(numbers, BLOCK: tl.constexpr):
    """Double numbers in place."""
    places = tl.arange(0, BLOCK)
    tl.store(numbers + places, 2 * tl.load(numbers + places))


@triton.jit
def copy_program(numbers, out, first, step, BLOCK: tl.constexpr):
    """Copy a block of numbers; programs begin `step` places apart."""
    places = tl.program_id(0) * step + tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(numbers + first + places))


@triton.jit
def scatter_program(places, out, BLOCK: tl.constexpr):
    """Write each number to its place."""
    numbers = tl.arange(0, BLOCK)
    tl.store(out + tl.load(places + numbers), numbers)


def _numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        (lambda: shift_program[(1,)](_numbers(256), _numbers(256), 256, WAITS=False, BLOCK=256), "threads race"),
        (lambda: double_program[(1,)](_numbers(64), BLOCK=64), "threads race"),
        (lambda: scatter_program[(1,)](_numbers(8) // 2, _numbers(8), BLOCK=8), "threads of one store race"),
        (lambda: copy_program[(2,)](_numbers(48), _numbers(48), 0, 16, BLOCK=32), "programs race"),
        (lambda: copy_program[(1,)](_numbers(32), _numbers(32), 1, 0, BLOCK=32), "outside of all tensors"),
        (lambda: copy_program[(1,)](_numbers(32), _numbers(33)[1:], -1, 0, BLOCK=32), "outside of all tensors"),
        (lambda: copy_program[(1,)](_numbers(32), _numbers(31), 0, 0, BLOCK=32), "outside of all tensors"),
    ],
)  # fmt: skip
def test_a_launch_that_may_go_wrong_on_a_gpu_fails_and_names_the_line(launch: Callable[[], Any], what: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(f"{what}: test_memory_checks.py:")):
        launch()


@pytest.mark.parametrize(
    "launch",
    [
        lambda: shift_program[(1,)](_numbers(256), _numbers(256), 256, WAITS=True, BLOCK=256),
        lambda: double_program[(1,)](_numbers(64), BLOCK=64, num_warps=2),
        lambda: double_program[(1,)](_numbers(16), BLOCK=16, num_warps=1),
        lambda: scatter_program[(1,)](_numbers(8).flip(0), _numbers(8), BLOCK=8),
        lambda: copy_program[(2,)](_numbers(32), _numbers(32), 0, 16, BLOCK=16),
    ],
)
def test_barriers_and_places_of_their_own_are_enough(launch: Callable[[], Any]) -> None:
    launch()


def test_what_another_program_reads_is_not_written() -> None:
    """In this order of programs the numbers are right: the second one reads what the first has not written."""
    numbers = _numbers(64)
    with pytest.raises(AssertionError, match="programs race"):
        copy_program[(2,)](numbers, numbers, 16, 16, BLOCK=16)
    assert numbers[:32].tolist() == list(range(16, 48))
