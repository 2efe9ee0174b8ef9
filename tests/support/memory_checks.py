"""Checks of every access to memory by kernels that Triton's interpreter runs; importing this is enough.

The interpreter runs programs one after the other, and all threads of one together, so on a CPU a kernel gives right
numbers whose programs or threads would race on a GPU. A launch fails here if

- an access is outside the tensors that it was given, or not aligned to the size of its elements;
- a program writes what another one reads or writes, as all may run at once;
- a thread may read or overwrite what another thread of its program has written since the last barrier, or overwrite
  what another has yet to read. Threads of one warp read before they write, so the last is allowed with a single warp.
  Each warp loads a block of fewer elements than threads, and scalars; only one of them stores these.

Reductions are no barriers: within a warp they need none.
"""

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

Numbers = npt.NDArray[np.int64]

_TRITON = str(Path(triton.__file__).parent)
_WARP = 32
_DEFAULT_WARPS = 4  # Triton's


class _Access(NamedTuple):
    is_store: bool
    addresses: Numbers
    size: int  # of an element, bytes
    lanes: Numbers  # numbers of these elements in the block
    num_elements: int  # of the block
    program: int
    num_barriers: int  # before it, in its program
    line: str


class _Launch:
    """The accesses of a launch, in their order."""

    def __init__(self, tensors: list[torch.Tensor], num_warps: int) -> None:
        self.threads, self.program, self.num_barriers = num_warps * _WARP, -1, 0
        self.has_addresses = False  # in tables, which lead to other tensors
        self.accesses: list[_Access] = []
        self.wrong: set[str] = set()
        ranges = sorted((each.data_ptr(), each.data_ptr() + _num_bytes(each)) for each in tensors if each.numel())
        self._starts = np.array([0, *(start for start, _ in ranges)])
        self._ends = np.maximum.accumulate(np.array([0, *(end for _, end in ranges)]))

    def add(self, is_store: bool, pointers: Any, mask: Any) -> None:
        data, size = pointers.data, max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        lanes = np.flatnonzero(np.broadcast_to(mask.data, data.shape))
        addresses, line = data.reshape(-1)[lanes].astype(np.int64), _line_of_kernel()
        ends = self._ends[np.searchsorted(self._starts, addresses, side="right") - 1]
        if not self.has_addresses and (addresses + size > ends).any():
            self.wrong.add(f"outside of all tensors: {line}")
        if (addresses % size).any():
            self.wrong.add(f"not aligned: {line}")
        self.accesses.append(
            _Access(is_store, addresses, size, lanes, data.size, self.program, self.num_barriers, line)
        )

    def check(self) -> None:
        """Raise an AssertionError that names what may go wrong, with the lines."""
        self.wrong.update(self._races())
        assert not self.wrong, "\n".join(sorted(self.wrong))

    def _races(self) -> Iterator[str]:
        granule = min((each.size for each in self.accesses), default=1)
        parts = [_in_granules(each, granule) for each in self.accesses]
        stored = [places for (places, _), each in zip(parts, self.accesses, strict=True) if each.is_store]
        if not stored:
            return
        written = np.unique(np.concatenate(stored))
        number = np.repeat(np.arange(len(parts)), [len(places) for places, _ in parts])
        place, lane = (np.concatenate(each) for each in zip(*parts, strict=True))
        found = np.minimum(np.searchsorted(written, place), len(written) - 1)
        matters = written[found] == place
        number, place, lane = number[matters], place[matters], lane[matters]
        program = np.array([each.program for each in self.accesses])[number]
        order = np.lexsort((number, program, place))
        number, place, lane, program = number[order], place[order], lane[order], program[order]
        # Everything here is written by somebody, so a place with two programs has a race.
        shared = np.flatnonzero((place[1:] == place[:-1]) & (program[1:] != program[:-1]))
        for first, second in {(number[i], number[i + 1]) for i in shared.tolist()}:
            yield f"programs race: {self.accesses[first].line} | {self.accesses[second].line}"
        same = (place[1:] == place[:-1]) & (program[1:] == program[:-1])
        yield from self._races_of_threads(number, lane, np.concatenate([[False], same]))

    def _races_of_threads(self, number: Numbers, lane: Numbers, continues: npt.NDArray[np.bool_]) -> Iterator[str]:
        """Compare each access of a place with the store before it, and each load with the store after it."""
        count, positions = len(number), np.arange(len(number))
        is_store = np.array([each.is_store for each in self.accesses])[number]
        group = np.cumsum(~continues)
        before = np.concatenate([[-1], np.maximum.accumulate(np.where(is_store, positions, -1))[:-1]])
        after = np.minimum.accumulate(np.where(is_store, positions, count)[::-1])[::-1]
        early = np.concatenate([before, positions[~is_store]])
        late = np.concatenate([positions, after[~is_store]])
        valid = (early >= 0) & (late < count)
        early, late = early[valid], late[valid]
        together = group[early] == group[late]
        pairs = np.stack([number[early], number[late], lane[early] == lane[late]])[:, together]
        for first, second, is_same_lane in np.unique(pairs, axis=1).T.tolist():
            one, other = self.accesses[first], self.accesses[second]
            if first == second:
                yield f"threads of one store race: {one.line}"
            elif one.num_barriers == other.num_barriers and self._may_race(one, other, bool(is_same_lane)):
                yield f"threads race: {one.line} | {other.line}"

    def _may_race(self, one: _Access, other: _Access, is_same_lane: bool) -> bool:
        if not one.is_store and self.threads == _WARP:
            return False
        if not is_same_lane or one.num_elements != other.num_elements:
            return True
        return not (one.is_store and other.is_store) and one.num_elements < self.threads


def _num_bytes(tensor: torch.Tensor) -> int:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.element_size()


def _in_granules(access: _Access, granule: int) -> tuple[Numbers, Numbers]:
    """Return the places of `granule` bytes that an access covers, and the lane of each."""
    count = access.size // granule
    places = (access.addresses // granule)[:, None] + np.arange(count)
    return places.reshape(-1), np.repeat(access.lanes, count)


def _line_of_kernel() -> str:
    """Return the innermost line that is neither of Triton nor of this file, with its number."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TRITON, __file__)):
        frame = frame.f_back
    assert frame is not None
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{number} {linecache.getline(name, number).strip()}"


_launch: _Launch | None = None
_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
_barrier, _set_program = InterpreterBuilder.create_barrier, InterpreterBuilder.set_grid_idx
_to_pointer, _run = InterpreterBuilder.create_int_to_ptr, GridExecutor.__call__


def _checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
    assert _launch is not None
    _launch.add(False, pointers, mask)
    return _load(self, pointers, mask, *others)


def _checked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
    assert _launch is not None
    _launch.add(True, pointers, mask)
    return _store(self, pointers, value, mask, *others)


def _counted_barrier(self: Any) -> Any:
    assert _launch is not None
    _launch.num_barriers += 1
    return _barrier(self)


def _next_program(self: Any, *place: int) -> Any:
    assert _launch is not None
    _launch.program, _launch.num_barriers = _launch.program + 1, 0
    return _set_program(self, *place)


def _pointer_of_address(self: Any, *args: Any) -> Any:
    assert _launch is not None
    _launch.has_addresses = True
    return _to_pointer(self, *args)


def _checked_run(self: Any, *args: Any, **kwargs: Any) -> None:
    global _launch
    given = [each for one in (*args, *kwargs.values()) for each in (one if isinstance(one, tuple) else (one,))]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    launch = _launch = _Launch(tensors, kwargs.get("num_warps", _DEFAULT_WARPS))
    try:
        _run(self, *args, **kwargs)
    finally:
        _launch = None
    launch.check()


InterpreterBuilder.create_masked_load = _checked_load
InterpreterBuilder.create_masked_store = _checked_store
InterpreterBuilder.create_barrier = _counted_barrier
InterpreterBuilder.set_grid_idx = _next_program
InterpreterBuilder.create_int_to_ptr = _pointer_of_address
GridExecutor.__call__ = _checked_run
