"""The compiled library: how it is found, checked, loaded and called."""

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
import torch

from specinfer.core.errors import NativeCodeError
from specinfer.core.systems import call_c, usable_cpus

_LAYOUT = 34  # version of structures and functions, as in types.h
_CPUS_HOLD = 5.0  # seconds
_REMEDY = "install the package again: from a wheel, or with a C++17 compiler (apt install g++, xcode-select --install)"
_bytes_of: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer
Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        NativeCodeError: It was not built, cannot be loaded, or is of another version; with the remedy.
    """
    places = (Path(__file__).parent / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)
    built = next((place for place in places if place.is_file()), None)
    if built is None:
        raise NativeCodeError(f"SpecInfer's native code was not built; {_REMEDY}")
    try:
        loaded = ctypes.CDLL(str(built))
        if (version := loaded.specinfer_layout()) != _LAYOUT:
            raise NativeCodeError(f"the native code {built} is of version {version}, not {_LAYOUT}; {_REMEDY}")
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        loaded.specinfer_name.restype = ctypes.c_char_p
        loaded.specinfer_use.argtypes = [ctypes.c_char_p]
        loaded.specinfer_move.argtypes = [number, pointer, pointer, size, size, size, number, number]
        loaded.specinfer_rows.argtypes = [pointer] * 3 + [size, number]
        loaded.specinfer_multiply.argtypes = [size, pointer]
        loaded.specinfer_multiply.restype = size
        loaded.specinfer_linear.argtypes = [pointer] * 4 + [size, number, pointer, number]
        loaded.specinfer_add_low_rank.argtypes = [size] * 3 + [pointer] * 3 + [size, number]
        loaded.specinfer_norm.argtypes = [pointer] * 3 + [size, size, ctypes.c_float, number]
        loaded.specinfer_rotate.argtypes = [pointer] * 5 + [size, number]
        loaded.specinfer_attend.argtypes = [pointer] * 3 + [size, pointer, number]
        loaded.specinfer_mix.argtypes = [pointer] * 8 + [number]
        loaded.specinfer_layer_inputs.argtypes = [pointer] * 5 + [size, number]
        loaded.specinfer_decode_all.argtypes = [pointer, size, *[pointer] * 5, number]
        least, key = ctypes.c_float, ctypes.c_uint64
        loaded.specinfer_choose.argtypes = [pointer, size, least, key, number, pointer, pointer, size]
        loaded.specinfer_choose.restype = size
        loaded.specinfer_noise.argtypes = [pointer] * 3 + [size, size]
        loaded.specinfer_most_probable.argtypes = [pointer, size, size, size, pointer, pointer, pointer]
        loaded.specinfer_most_probable.restype = size
        loaded.specinfer_walk.argtypes = [pointer, number]
        loaded.specinfer_walk_stochastic.argtypes = [pointer, number]
        loaded.specinfer_convolve.argtypes = [pointer] * 3 + [size, number]
        loaded.specinfer_recur.argtypes = [pointer] * 5 + [number]
        loaded.specinfer_grow.argtypes = [pointer]
        loaded.specinfer_merge.argtypes = [pointer]
        loaded.specinfer_count_tried.argtypes = [pointer]
        loaded.specinfer_draft.argtypes = [pointer, number]
        loaded.specinfer_tree_mask.argtypes = [pointer, size, size, size, pointer, pointer]
    except (OSError, AttributeError) as error:
        raise NativeCodeError(f"the native code {built} cannot be loaded ({error}); {_REMEDY}") from error
    return loaded


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array; `ctypes.data` takes several times as long."""
    try:
        return ctypes.addressof(_bytes_of(array))
    except TypeError:  # it is read-only
        return array.ctypes.data


def addresses(arrays: Iterable[npt.NDArray[Any] | None]) -> list[int]:
    """Return the address of each array, or 0 for None; that of an array named several times is looked up once."""
    known = dict[int, int]()
    return [
        0 if array is None else known.get(id(array)) or known.setdefault(id(array), address(array)) for array in arrays
    ]


def compute_alone() -> None:
    """Make PyTorch and native code called from this thread use only this thread; other threads are not affected."""
    torch.get_num_threads()  # makes PyTorch set its number now, not at the thread's first work
    call_c("omp_set_num_threads", 1)


@contextmanager
def computing_alone() -> Iterator[None]:
    """Return a context, or a decorator, in which PyTorch uses the calling thread only, as rows of logits need no more.

    Its other threads save nothing there, and on a busy machine it waits milliseconds for them after each operation.
    """
    before = torch.get_num_threads()
    compute_alone()
    try:
        yield
    finally:
        call_c("omp_set_num_threads", before)


def each_alone(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return a function's results, on as many threads of our own as PyTorch has, each of which computes alone.

    PyTorch's own threads wait for one another after each operation, for long on a busy machine.
    """
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=compute_alone) as pool:
        return list(pool.map(function, items))


def describe() -> str:
    """Return a description of the native kernels in use."""
    return str(library().specinfer_name().decode())


def call(name: str, *arguments: int | float | None) -> None:
    """Call a function with addresses and sizes, on PyTorch's number of threads, but at most one per CPU."""
    getattr(library(), name)(*arguments, min(torch.get_num_threads(), _cpus(int(time.monotonic() / _CPUS_HOLD))))


@lru_cache(maxsize=1)
def _cpus(interval: int) -> int:
    """Return the CPUs of this process, read again in each time interval, because container limits may change."""
    return usable_cpus()
